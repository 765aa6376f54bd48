"""Training an image classifier from a folder, a named data set or the embedded digits into a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

from spotlights.runtime import runs
from spotlights.runtime.errors import UserError
from spotlights.runtime.training import EpochLoader, TrainingConfig, fit, seed_everything
from spotlights.wbmm.recipes.augment import PROFILES, Augmentation, random_affine, training_transform
from spotlights.wbmm.recipes.config import KIND, ClassificationConfig
from spotlights.wbmm.recipes.data import (
    FileImages,
    ImageData,
    ImageSet,
    TensorImages,
    load_run_data,
    make_loader,
)
from spotlights.wbmm.recipes.inference import evaluate, load_run, normalise
from spotlights.wbmm.recipes.networks import create_network
from spotlights.wbmm.recipes.plots import plot_confusion

SUMMARY = "summary.json"
CONFUSION = "confusion.png"
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass
class RunSummary:
    """How a training went; accuracies are those of the best epoch's weights, None where there were no such images.

    ``seconds`` is the time spent in epochs, over all parts of a resumed run.
    """

    path: str
    model: str
    classes: int
    parameters: int
    best_epoch: int
    epochs: int
    stopped_early: bool
    val_accuracy: float | None
    test_accuracy: float | None
    train_images: int
    val_images: int
    test_images: int
    seconds: float
    skipped: list[str] = field(default_factory=list)


def train(config: ClassificationConfig, *, resume: bool = False, progress: bool = True) -> RunSummary:
    """Train a classifier and leave its run folder.

    Args:
        config: the settings; ``out`` names the run folder, a fresh one under ``runs/`` where None.
        resume: go on with the run in ``config.out``, whose own settings must be these.
        progress: show progress on standard output.

    Raises:
        UserError: a setting, the data or the folder is not usable, or the loss is not finite.
    """
    config.validate()
    if not resume:
        with runs.new_folder(config.out, "wbmm") as folder:
            return _train_in(folder, config, resume=False, progress=progress)
    if config.out is None:
        raise UserError("--resume: name the run folder to go on with")
    folder = Path(config.out)
    _check_same(runs.read_config(folder, KIND), config.to_dict())
    return _train_in(folder, config, resume=True, progress=progress)


def _check_same(saved: dict[str, Any], given: dict[str, Any]) -> None:
    # Where a run computes, and from where it reads, may change between its parts.
    free = {"workers", "accelerator", "devices", "strategy", "data"}
    for name, value in given.items():
        if name not in free and saved.get(name) != value:
            option = name.replace("_", "-")
            raise UserError(f"--resume: the run was started with --{option} {saved.get(name)}, not {value}")


def _train_in(folder: Path, config: ClassificationConfig, *, resume: bool, progress: bool) -> RunSummary:
    show: Callable[[str], None] = print if progress and runs.is_rank_zero() else (lambda text: None)
    data = load_run_data(config, note=show)
    parts = data.splits
    mean, std = _statistics(parts["train"], data.channels)
    augment = data.augment if config.augment == "auto" else config.augment
    resolved: dict[str, Any] = {
        "class_names": data.class_names,
        "channels": data.channels,
        "image_size": data.image_size,
        "mean": list(mean),
        "std": list(std),
        "augment": augment,
        "images": {part: len(images) for part, images in sorted(parts.items())},
    }
    if resume:
        _check_data(runs.read_config(folder, KIND).get("resolved") or {}, resolved)
    augmentation = PROFILES[augment]
    seed_everything(config.seed)
    model = create_network(
        config.model,
        config.model_args,
        channels=data.channels,
        classes=len(data.class_names),
        image_size=data.image_size,
        drop_path=config.drop_path,
    )
    module = Classifier(model, config, mean, std, augmentation, warp=isinstance(parts["train"], TensorImages))
    train_loader, val_loader = _loaders(parts, config, data, augmentation)
    if runs.is_rank_zero() and not resume:
        runs.write_config(folder, KIND, {**config.to_dict(), "resolved": resolved})
    counts = ", ".join(f"{len(images):,} {part}" for part, images in parts.items())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    show(f"{folder}: {config.model}, {parameters:,} parameters; {counts} images of {len(data.class_names)} classes")
    result = fit(
        module,
        train_loader,
        val_loader,
        folder=folder,
        config=TrainingConfig(
            epochs=config.epochs,
            monitor="val_accuracy",
            minimise=False,
            patience=config.patience if val_loader is not None else 0,
            ema_decay=config.ema_decay,
            clip_gradient=config.clip_gradient or None,
            precision=config.precision,
            accelerator=config.accelerator,
            devices=config.devices,
            strategy=config.strategy,
        ),
        metadata={"kind": KIND, "model": config.model, "model_args": config.model_args, **resolved},
        resume=resume,
        progress=progress,
    )
    summary = RunSummary(
        path=str(folder),
        model=config.model,
        classes=len(data.class_names),
        parameters=parameters,
        best_epoch=result.best_epoch,
        epochs=result.last_epoch,
        stopped_early=result.stopped_early,
        val_accuracy=result.history[result.best_epoch - 1].get("val_accuracy"),
        test_accuracy=None,
        train_images=len(parts["train"]),
        val_images=len(parts["val"]) if "val" in parts else 0,
        test_images=len(parts["test"]) if "test" in parts else 0,
        seconds=round(result.seconds, 2),
        skipped=data.skipped,
    )
    if runs.is_rank_zero():
        _judge(folder, summary, data, module.device)
        runs.write_json(folder / SUMMARY, asdict(summary))
    return summary


def _judge(folder: Path, summary: RunSummary, data: ImageData, device: torch.device) -> None:
    """Evaluate the file of the best weights, as any user of the run would, and draw its confusion matrix."""
    part = next((part for part in ("test", "val") if part in data.splits), None)
    if part is None:
        return
    evaluation = evaluate(load_run(folder, device=device), data.splits[part])
    if part == "test":
        summary.test_accuracy = evaluation.accuracy
    title = f"{'test' if part == 'test' else 'validation'} images, accuracy {100 * evaluation.accuracy:.2f} %"
    plot_confusion(evaluation.confusion.numpy(), data.class_names, folder / CONFUSION, title=title)


def _check_data(saved: dict[str, Any], resolved: dict[str, Any]) -> None:
    for name, what in {"class_names": "classes", "images": "numbers of images", "image_size": "image size"}.items():
        if saved.get(name) != resolved[name]:
            raise UserError(f"--resume: the data has other {what} than when the run was started")


def _statistics(images: ImageSet, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if isinstance(images, FileImages):
        mean, std = _IMAGENET
        return (mean, std) if channels == 3 else ((0.449,), (0.226,))
    values = images.images.to(torch.float32).div_(255).transpose(0, 1).flatten(1)
    deviation, mean_values = torch.std_mean(values, dim=1)
    rounded = [(round(float(m), 4), round(max(float(s), 0.01), 4)) for m, s in zip(mean_values, deviation, strict=True)]
    return tuple(m for m, _ in rounded), tuple(s for _, s in rounded)


def _loaders(
    parts: dict[str, ImageSet], config: ClassificationConfig, data: ImageData, augmentation: Augmentation
) -> tuple[EpochLoader, Any]:
    images = parts["train"]
    if isinstance(images, FileImages):
        images.transform = training_transform(data.image_size, data.channels, augmentation)
    workers = config.workers if config.workers is not None else 0
    # A last batch of one image has no batch statistics.
    drop = len(images) > config.batch_size and len(images) % config.batch_size == 1
    if len(images) < 2:
        raise UserError("one training image is too few; add images or lower --val-split")
    options: dict[str, Any] = {"workers": workers, "pin_memory": torch.cuda.is_available()}
    train_loader = make_loader(images, config.batch_size, kind=EpochLoader, shuffle=True, drop_last=drop, **options)
    val_loader = make_loader(parts["val"], 2 * config.batch_size, **options) if "val" in parts else None
    assert isinstance(train_loader, EpochLoader)
    return train_loader, val_loader


class Classifier(pl.LightningModule):
    """Cross-entropy training of a network on uint8 batches, with augmentation and mixing on the batch's device."""

    def __init__(
        self,
        model: nn.Module,
        config: ClassificationConfig,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augmentation: Augmentation,
        *,
        warp: bool,
    ) -> None:
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)
        self.config = config
        self.mean, self.std = mean, std
        self.augmentation = augmentation
        self.warp = warp
        self.erase = RandomErasing(augmentation.erase, mode="const", device="cpu") if augmentation.erase else None
        classes = int(model.num_classes)  # type: ignore[arg-type]
        mixing = config.mixup > 0 or config.cutmix > 0
        self.mix = (
            Mixup(config.mixup, config.cutmix, label_smoothing=config.label_smoothing, num_classes=classes)
            if mixing
            else None
        )

    def on_after_batch_transfer(
        self, batch: tuple[torch.Tensor, torch.Tensor], dataloader_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalise, and augment in training; targets become (B, K) probabilities where images are mixed."""
        images, targets = batch
        values = images.float() / 255
        if self.trainer.training and self.warp:
            values = random_affine(values, self.augmentation)
        values = normalise(values, self.mean, self.std)
        if self.trainer.training:
            if self.erase is not None:
                values = self.erase(values)
            if self.mix is not None and len(values) % 2 == 0:
                values, targets = self.mix(values, targets)
        return values.contiguous(memory_format=torch.channels_last), targets

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one batch."""
        images, targets = batch
        # Mixed targets carry their smoothing already.
        smoothing = 0.0 if targets.is_floating_point() else self.config.label_smoothing
        loss = F.cross_entropy(self.model(images), targets, label_smoothing=smoothing)
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(images), sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of one batch."""
        images, targets = batch
        logits = self.model(images)
        right = (logits.argmax(dim=1) == targets).float().mean()
        for name, value in {"val_loss": F.cross_entropy(logits, targets), "val_accuracy": right}.items():
            self.log(name, value, on_step=False, on_epoch=True, batch_size=len(images), sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Return timm's AdamW, without weight decay on biases and norms, and its cosine schedule by updates."""
        config = self.config
        optimizer = create_optimizer_v2(self.model, opt="adamw", lr=config.lr, weight_decay=config.weight_decay)
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched="cosine",
            num_epochs=config.epochs,
            warmup_epochs=min(config.warmup_epochs, config.epochs - 1),
            warmup_lr=config.lr / 100,
            min_lr=config.lr / 100,
            warmup_prefix=False,
            step_on_epochs=False,
            updates_per_epoch=-(-self.trainer.estimated_stepping_batches // config.epochs),
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advance timm's schedule by the number of updates done."""
        scheduler.step_update(num_updates=self.global_step)
