"""Training a denoiser of token sequences into a run folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from spotlights.diffusion.recipes.config import KIND, DiffusionConfig
from spotlights.diffusion.recipes.data import Batch, TokenData, TokenSet, load_run_data
from spotlights.diffusion.recipes.inference import MODEL, save_model
from spotlights.diffusion.recipes.objective import batch_nelbo, fixed_times, generators_for, random_times
from spotlights.diffusion.recipes.vocabulary import Vocabulary
from spotlights.runtime import runs, weights
from spotlights.runtime.errors import UserError
from spotlights.runtime.training import EpochLoader, FitResult, TrainingConfig, fit, seed_everything

if TYPE_CHECKING:
    from spotlights.diffusion.models.denoiser import XDLMForMaskedLM

SUMMARY = "summary.json"
FREE_ON_RESUME = {"data", "workers", "accelerator", "devices", "strategy"}


@dataclass
class RunSummary:
    """How a training went; the validation NELBO, in nats a token, is that of the best epoch's weights.

    It and the bits per byte are None where nothing was held back; ``seconds`` is the time spent in epochs.
    """

    path: str
    k: float
    vocabulary: str
    tokens: int
    parameters: int
    best_epoch: int
    epochs: int
    stopped_early: bool
    val_nelbo: float | None
    val_bits_per_byte: float | None
    train_sequences: int
    val_sequences: int
    test_sequences: int
    seconds: float
    skipped: list[str] = field(default_factory=list)


def train(config: DiffusionConfig, *, resume: bool = False, progress: bool = True) -> RunSummary:
    """Train a denoiser of text and leave its run folder.

    Args:
        config: the settings; ``out`` names the run folder, a fresh one under ``runs/`` where None.
        resume: go on with the run in ``config.out``, whose own settings must be these.
        progress: show progress on standard output.

    Raises:
        UserError: a setting, the text or the folder is not usable, or the loss is not finite.
    """
    config.validate()
    if not resume:
        with runs.new_folder(config.out, "xdlm") as folder:
            return _train_in(folder, config, resume=False, progress=progress)
    if config.out is None:
        raise UserError("--resume: name the run folder to go on with")
    saved = runs.read_config(config.out, KIND)
    for name, value in config.to_dict().items():
        if name not in FREE_ON_RESUME and saved.get(name) != value:
            option = name.replace("_", "-")
            raise UserError(f"--resume: the run was started with --{option} {saved.get(name)}, not {value}")
    return _train_in(Path(config.out), config, resume=True, progress=progress)


def _train_in(folder: Path, config: DiffusionConfig, *, resume: bool, progress: bool) -> RunSummary:
    show: Callable[[str], None] = print if progress and runs.is_rank_zero() else (lambda text: None)
    data = load_run_data(config)
    vocabulary = data.vocabulary
    assert vocabulary is not None
    parts = {"train": data.train, "val": data.val, "test": data.test}
    counts = {name: len(part) for name, part in parts.items() if part is not None}
    resolved = {"tokens": vocabulary.size, "sequences": counts}
    if resume:
        saved = runs.read_config(folder, KIND).get("resolved")
        for name, what in {"tokens": "size of the vocabulary", "sequences": "number of sequences"}.items():
            if not isinstance(saved, dict) or saved.get(name) != resolved[name]:
                raise UserError(f"--resume: the data has another {what} than when the run was started")
    seed_everything(config.seed)
    model = create_model(config, vocabulary)
    if runs.is_rank_zero() and not resume:
        runs.write_config(folder, KIND, {**config.to_dict(), "resolved": resolved})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    listed = ", ".join(f"{count:,} {name}" for name, count in counts.items())
    show(f"{folder}: {parameters:,} parameters, {vocabulary.size:,} tokens; {listed} sequences of {config.length}")
    result = fit_tokens(model, data, config, folder, resume=resume, progress=progress)
    val, val_nelbo = validation_part(data, config), result.history[result.best_epoch - 1].get("val_nelbo")
    summary = RunSummary(
        path=str(folder),
        k=config.k,
        vocabulary=vocabulary.name,
        tokens=vocabulary.size,
        parameters=parameters,
        best_epoch=result.best_epoch,
        epochs=result.last_epoch,
        stopped_early=result.stopped_early,
        val_nelbo=val_nelbo,
        val_bits_per_byte=None if val_nelbo is None or val is None else bits_per_byte(val_nelbo, val),
        train_sequences=counts["train"],
        val_sequences=counts.get("val", 0),
        test_sequences=counts.get("test", 0),
        seconds=round(result.seconds, 2),
        skipped=data.skipped,
    )
    if runs.is_rank_zero():
        runs.write_json(folder / SUMMARY, asdict(summary))
    return summary


def validation_part(data: TokenData, config: DiffusionConfig) -> TokenSet | None:
    """Return the held-back sequences that each epoch judges by: at most as many as it trains on, evenly spread."""
    _, batches = config.rounds(-(-len(data.train) // config.batch_size))
    return None if data.val is None else data.val.subset(batches * config.batch_size)


def bits_per_byte(nats_per_token: float, tokens: TokenSet) -> float | None:
    """Return the bits a byte of text that so many nats a token are, or None for what is no text."""
    if tokens.byte_counts is None or not int(tokens.byte_counts.sum()):
        return None
    return nats_per_token * count_tokens(tokens) / int(tokens.byte_counts.sum()) / math.log(2)


def count_tokens(tokens: TokenSet) -> int:
    """Return how many tokens are data."""
    return tokens.tokens.numel() if tokens.padding is None else int((~tokens.padding).sum())


def create_model(config: DiffusionConfig, vocabulary: Vocabulary) -> XDLMForMaskedLM:
    """Return an untrained denoiser of the size that the settings say; weights come from torch's global generator."""
    from spotlights.diffusion.models.denoiser import XDLMConfig, XDLMForMaskedLM

    return XDLMForMaskedLM(
        XDLMConfig(
            vocab_size=vocabulary.size,
            mask_token_id=vocabulary.mask_id,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=4 * config.hidden_size,
            max_position_embeddings=config.length,
            dropout=config.dropout,
            k=config.k,
            schedule=config.schedule,
        )
    )


def fit_tokens(
    model: XDLMForMaskedLM,
    data: TokenData,
    config: DiffusionConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train a denoiser on token sequences; afterwards it holds the averaged weights of the best epoch.

    Args:
        model: the denoiser, whose ``noise_kernel()`` is the noise.
        data: the sequences; labels train it with classifier-free guidance. Each epoch is validated on at most as many
            sequences as it trains on.
        config: how; the fields on data, vocabulary, model and noise are not looked at.
        folder: an existing folder for what `spotlights.runtime.training.fit` writes, and at the end ``model/``, for
            ``from_pretrained``.
        resume: go on from the folder's ``last.ckpt``.
        progress: show progress on standard output.

    Raises:
        UserError: as `spotlights.runtime.training.fit`.
    """
    folder = Path(folder)
    seed_everything(config.seed)
    options: dict[str, Any] = {
        "collate_fn": _as_is,
        "num_workers": config.workers,
        "pin_memory": torch.cuda.is_available(),
    }
    epochs, limit = config.rounds(-(-len(data.train) // config.batch_size))
    val = validation_part(data, config)
    train_loader = _ShortEpochs(data.train, config.batch_size, shuffle=True, limit=limit, **options)
    val_loader = None if val is None else DataLoader(val, config.batch_size, **options)
    result = fit(
        _Denoising(model, config, epochs * limit),
        train_loader,
        val_loader,
        folder=folder,
        config=TrainingConfig(
            epochs=epochs,
            monitor="val_nelbo",
            patience=config.patience if val_loader is not None else 0,
            ema_decay=config.ema_decay,
            clip_gradient=config.clip_gradient or None,
            precision=config.precision,
            accelerator=config.accelerator,
            devices=config.devices,
            strategy=config.strategy,
        ),
        metadata={"kind": KIND},
        resume=resume,
        progress=progress,
    )
    tensors, _ = weights.load(folder / weights.BEST)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{folder / weights.BEST}: the weights of another network than config.yaml says") from error
    model.eval()
    if runs.is_rank_zero():
        save_model(model, data.vocabulary, folder / MODEL)
    return result


def _as_is(batch: Any) -> Any:
    return batch


class _ShortEpochs(EpochLoader):
    """A loader whose epochs end after ``limit`` batches."""

    def __init__(self, *arguments: Any, limit: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.limit = limit

    def __len__(self) -> int:
        return min(self.limit, super().__len__())

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from islice(super().__iter__(), len(self))


class _Denoising(pl.LightningModule):
    """Minimises the NELBO; validation takes the same times and noise in every epoch, so that epochs compare."""

    def __init__(self, model: XDLMForMaskedLM, config: DiffusionConfig, steps: int) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.steps = steps
        self.kernel = model.noise_kernel()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of one batch."""
        tokens = batch["tokens"]
        rank, ranks = self.global_rank, self.trainer.world_size
        seed = self.config.seed * 1_000_003 + self.global_step
        # All processes share the shift of the times, none the noise; a resumed run needs no state for either.
        t = random_times(len(tokens), torch.Generator(self.device).manual_seed(seed), rank, ranks)
        generator = torch.Generator(self.device).manual_seed(seed * ranks + rank + 2**40)
        z = self.kernel.q_sample(tokens, t, observed=batch.get("padding"), generator=generator)
        if "labels" in batch and self.config.class_dropout:
            coins = torch.rand(len(tokens), device=self.device, generator=generator)
            dropped = coins < self.config.class_dropout
            batch = {**batch, "labels": batch["labels"].masked_fill(dropped, self.model.config.num_classes)}
        loss = self._nelbo(batch, z, t, f"step {batch_idx + 1}")
        self._log("train_nelbo", loss, batch)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the NELBO of one batch."""
        t = fixed_times(batch["index"])
        generators = generators_for(batch["index"], self.config.seed, self.device)
        z = self.kernel.q_sample(batch["tokens"], t, observed=batch.get("padding"), generator=generators)
        self._log("val_nelbo", self._nelbo(batch, z, t, "validation"), batch)

    def _nelbo(self, batch: Batch, z: Tensor, t: Tensor, place: str) -> Tensor:
        try:
            return batch_nelbo(self.model, self.kernel, batch, z, t)
        except ValueError as error:
            if "NaN" not in str(error):
                raise
            place = f"epoch {self.current_epoch + 1}, {place}"
            raise UserError(f"{place}: {error}; try a smaller --lr, or --precision 32-true") from error

    def _log(self, name: str, value: Tensor, batch: Batch) -> None:
        count = batch["tokens"].numel() - (int(batch["padding"].sum()) if "padding" in batch else 0)
        self.log(name, value, on_step=False, on_epoch=True, batch_size=count, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return AdamW, without weight decay on biases and norms, and a cosine schedule after a linear warm-up."""
        config = self.config
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in self.model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98))
        warmup = min(config.warmup_steps, self.steps // 10)

        def rate(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            done = min((step - warmup) / max(self.steps - warmup, 1), 1)
            return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
