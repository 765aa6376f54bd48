"""What any method's training needs around Lightning's Trainer: resume, averaging, records, early stop, a calm display.

A run folder fills up as training goes: ``metrics.csv`` and ``curves.png`` each epoch, ``best.safetensors`` and
``last.safetensors``, and ``last.ckpt``, from which a killed run replays its unfinished epoch exactly.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import random
import signal
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from spotlights.runtime import weights
from spotlights.runtime.errors import UserError
from spotlights.runtime.plots import plot_curves
from spotlights.runtime.progress import EpochProgress
from spotlights.runtime.runs import remove_temporaries, replacing, write

CHECKPOINT = "last.ckpt"
METRICS = "metrics.csv"
CURVES = "curves.png"


@dataclass
class TrainingConfig:
    """How long and on what to train; nothing in it belongs to one method.

    ``monitor`` is the logged metric that picks the best epoch, larger being better unless ``minimise``; where it was
    not logged the last epoch is the best. ``patience`` epochs without a better one end the run, 0 never.
    """

    epochs: int
    monitor: str = "val_loss"
    minimise: bool = True
    patience: int = 0
    ema_decay: float = 0.0
    clip_gradient: float | None = None
    precision: str = "32-true"
    accelerator: str = "auto"
    devices: str | int = "auto"
    strategy: str = "auto"


@dataclass
class FitResult:
    """How a training ended: the best and the last epoch (from 1), seconds spent in all its parts, and the metrics."""

    best_epoch: int
    last_epoch: int
    stopped_early: bool
    seconds: float
    history: list[dict[str, float]] = field(default_factory=list)


class EpochLoader(DataLoader):
    """A DataLoader whose epoch draws nothing before its first batch is asked for.

    Lightning makes iterators at moments that differ between a fresh and a resumed run; starting late leaves all
    random draws of an epoch after the point where a resumed run has its random state back.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of one epoch."""
        yield from super().__iter__()


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (timm draws from the global generator)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the state of every global generator in types that weights-only loading accepts."""
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what :func:`random_state` returned.

    Example:
        >>> state = random_state()
        >>> first = torch.rand(())
        >>> set_random_state(state)
        >>> bool(torch.rand(()) == first)
        True
    """
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


def fit(
    module: pl.LightningModule,
    train_loader: EpochLoader,
    val_loader: DataLoader | None,
    *,
    folder: str | Path,
    config: TrainingConfig,
    metadata: Mapping[str, Any],
    resume: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train ``module`` and leave its run in ``folder``.

    Args:
        module: logs scalars under ``train_*`` and ``val_*``; ``module.model`` is the network whose (averaged) state
            is exported.
        train_loader: the training batches.
        val_loader: the validation batches, or None.
        folder: an existing run folder.
        config: how to train.
        metadata: plain values stored as JSON in the header of both safetensors files.
        resume: go on from the folder's ``last.ckpt``; without one, start.
        progress: show progress on standard output.

    Raises:
        UserError: the loss is not finite, the folder cannot be written, the checkpoint belongs to another network, or
            Lightning refuses the precision, devices or strategy.
        TypeError: ``train_loader`` is not an :class:`EpochLoader`.
    """
    if not isinstance(train_loader, EpochLoader):
        raise TypeError(f"train_loader: got {type(train_loader).__name__}, expected EpochLoader")
    folder = Path(folder)
    checkpoint = folder / CHECKPOINT
    averaging = _Averaging(config.ema_decay) if config.ema_decay else None
    recorder = _Recorder(folder, config, metadata, averaging, EpochProgress(config.epochs, enabled=progress))
    if resume:
        remove_temporaries(folder)
        if checkpoint.exists():
            recorder.load_state_dict(_recorder_state(checkpoint))
    if not recorder.finished:
        with _quiet(), recorder.progress, _interruptible():
            try:
                trainer = pl.Trainer(
                    max_epochs=config.epochs,
                    accelerator=config.accelerator,
                    devices=config.devices,
                    strategy=config.strategy,
                    precision=config.precision,
                    gradient_clip_val=config.clip_gradient,
                    callbacks=[callback for callback in (averaging, recorder) if callback is not None],
                    default_root_dir=folder,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                    num_sanity_val_steps=0,
                )
            # Lightning's own errors have no common base.
            except Exception as error:
                raise UserError(f"--accelerator/--devices/--strategy/--precision: {_first_line(error)}") from error
            again = str(checkpoint) if resume and checkpoint.exists() else None
            trainer.fit(module, train_loader, val_loader, ckpt_path=again, weights_only=True)
    return FitResult(
        best_epoch=recorder.best_epoch,
        last_epoch=recorder.epoch,
        stopped_early=recorder.epoch < config.epochs,
        seconds=sum(row["seconds"] for row in recorder.rows),
        history=recorder.rows,
    )


class _Averaging(WeightAveraging):
    """Exponential average of weights and buffers whose decay warms up, so that short runs forget their start."""

    def __init__(self, decay: float) -> None:
        def average(averaged: Any, current: Any, updates: torch.Tensor) -> None:
            warm = (1 + float(updates)) / (10 + float(updates))
            get_ema_multi_avg_fn(min(decay, warm))(averaged, current, updates)

        super().__init__(use_buffers=True, multi_avg_fn=average)

    @property
    def module(self) -> pl.LightningModule:
        assert self._average_model is not None
        return self._average_model.module


class _Recorder(pl.Callback):
    """Records each epoch and makes it durable, in an order in which a kill between two steps loses nothing."""

    def __init__(
        self,
        folder: Path,
        config: TrainingConfig,
        metadata: Mapping[str, Any],
        averaging: _Averaging | None,
        progress: EpochProgress,
    ) -> None:
        self.folder = folder
        self.config = config
        self.metadata = dict(metadata)
        self.averaging = averaging
        self.progress = progress
        self.rows: list[dict[str, float]] = []
        self.best_epoch = 0
        self._random_states: list[Any] | None = None
        self._epoch_started = 0.0

    @property
    def epoch(self) -> int:
        return int(self.rows[-1]["epoch"]) if self.rows else 0

    @property
    def finished(self) -> bool:
        return self.epoch >= self.config.epochs or 0 < self.config.patience <= self._epochs_without_gain()

    def _epochs_without_gain(self) -> int:
        sign = -1 if self.config.minimise else 1
        values = [sign * row[self.config.monitor] for row in self.rows if self.config.monitor in row]
        # The first of equals counts here: a plateau ends a run although its last epoch is kept as the best.
        return len(values) - 1 - values.index(max(values)) if values else 0

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "best_epoch": self.best_epoch, "random_states": self._random_states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = state_dict["rows"]
        self.best_epoch = state_dict["best_epoch"]
        self._random_states = state_dict["random_states"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._random_states is not None and trainer.global_rank < len(self._random_states):
            set_random_state(self._random_states[trainer.global_rank])
        self._epoch_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        # Elsewhere the check would wait for the device or for other processes: there the epoch's mean tells.
        if loss is not None and loss.device.type == "cpu" and trainer.world_size == 1:
            _check_finite("the training loss", float(loss), trainer.current_epoch + 1, batch_idx + 1)
        if trainer.is_global_zero:
            self.progress.step(trainer.current_epoch + 1, batch_idx + 1, int(trainer.num_training_batches))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        metrics = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        for name, value in metrics.items():
            _check_finite(name, value, epoch)
        now = time.perf_counter()
        seconds, self._epoch_started = now - self._epoch_started, now
        rate = float(trainer.optimizers[0].param_groups[0]["lr"]) if trainer.optimizers else 0.0
        is_best = self._is_best(metrics)
        self.best_epoch = epoch if is_best else self.best_epoch
        self.rows.append({"epoch": epoch, **metrics, "lr": rate, "seconds": round(seconds, 3)})
        self._random_states = _gather(random_state())
        if trainer.is_global_zero:
            network = (self.averaging.module if self.averaging else pl_module).model
            exported = weights.dump(network, {**self.metadata, "epoch": epoch})
            if is_best:
                write(self.folder / weights.BEST, exported)
            write(self.folder / weights.LAST, exported)
        self._save_checkpoint(trainer)
        if trainer.is_global_zero:
            write(self.folder / METRICS, _csv(self.rows))
            self.progress.epoch(epoch, metrics, seconds=seconds, best=is_best and self.config.monitor in metrics)
        if self.finished:
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self.rows:
            monitored = self.config.monitor in self.rows[-1]
            plot_curves(self.rows, self.folder / CURVES, best_epoch=self.best_epoch if monitored else None)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        if self.best_epoch == 0 or self.config.monitor not in metrics:
            return True
        before, now = self.rows[self.best_epoch - 1][self.config.monitor], metrics[self.config.monitor]
        # Of equals the later one: a small validation set ties often, and training goes on for a reason.
        return now <= before if self.config.minimise else now >= before

    def _save_checkpoint(self, trainer: pl.Trainer) -> None:
        # Every process takes part in gathering a sharded state; the first one alone writes.
        if trainer.is_global_zero:
            with replacing(self.folder / CHECKPOINT) as temporary:
                trainer.save_checkpoint(temporary)
        else:
            trainer.save_checkpoint(self.folder / CHECKPOINT)


def _check_finite(name: str, value: float, epoch: int, step: int | None = None) -> None:
    if not math.isfinite(value):
        where = f"epoch {epoch}" + (f", step {step}" if step else "")
        raise UserError(f"{name} became {value} in {where}; try a smaller --lr, or --precision 32-true")


def _gather(state: Any) -> list[Any]:
    """Return the state of every process, in the order of their ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def read_metrics(folder: str | Path) -> list[dict[str, float]]:
    """Return the metrics of each epoch that a run folder's ``metrics.csv`` holds.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = Path(folder) / METRICS
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{path}: cannot read the metrics: {_first_line(error)}") from error


def _csv(rows: list[dict[str, float]]) -> str:
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "seconds"]
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, "seconds"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _recorder_state(checkpoint: Path) -> dict[str, Any]:
    try:
        callbacks = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["callbacks"]
        return callbacks[_Recorder.__qualname__]
    except Exception as error:
        raise UserError(f"{checkpoint}: not a checkpoint of this program: {_first_line(error)}") from error


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn what Lightning makes of Ctrl-C and of a state that does not fit back into plain errors."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    except RuntimeError as error:
        if "state_dict" in str(error):
            raise UserError(f"--resume: the run holds another network: {_first_line(error)}") from error
        raise
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's notices and advice off the user's screen."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning")]
    loggers.append(logging.getLogger("lightning.pytorch.utilities.rank_zero"))
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
