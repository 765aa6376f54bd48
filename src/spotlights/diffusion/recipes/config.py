"""Settings of a training of a denoiser."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spotlights.diffusion.schedules import SCHEDULES
from spotlights.runtime import runs
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import require, settings_from

KIND = "diffusion text"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
STEPS = 2000  # where neither epochs nor steps are given
_ROUNDS = 10  # validations in a training that is counted in steps


@dataclass
class DiffusionConfig:
    """What to train, on what and how; each field is the command's option of the same name.

    Example:
        >>> DiffusionConfig(k=1.5).validate()
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: --k: got 1.5, expected a number from 0 to 1
    """

    out: str | None = None
    data: str | None = None
    text_column: str = "text"
    vocab: str = "byte"
    length: int = 128
    k: float = 0.1
    schedule: str = "linear"
    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    dropout: float = 0.0
    class_dropout: float = 0.1
    epochs: int | None = None
    steps: int | None = None
    batch_size: int = 32
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: int = 100
    ema_decay: float = 0.999
    clip_gradient: float = 1.0
    val_split: float = 0.05
    patience: int = 0
    precision: str = "32-true"
    seed: int = 0
    limit: int | None = None
    workers: int = 0
    accelerator: str = "auto"
    devices: str | int = "auto"
    strategy: str = "auto"

    def validate(self) -> None:
        """Check every value.

        Raises:
            UserError: a value is outside its range; the message names the option, the value and the range.
        """
        least = {"length": 2, "hidden_size": 2, "layers": 1, "heads": 1}
        for name, value in {**least, "epochs": 1, "steps": 1, "batch_size": 1, "limit": 1}.items():
            given = getattr(self, name)
            require(given is None or given >= value, name, given, f"at least {value}")
        require(0 <= self.seed < 2**32, "seed", self.seed, "0 to 2^32 - 1")
        for name in ("weight_decay", "warmup_steps", "clip_gradient", "patience", "workers"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("dropout", "class_dropout", "ema_decay", "val_split"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        require(0 <= self.k <= 1, "k", self.k, "a number from 0 to 1")
        require(self.lr > 0, "lr", self.lr, "more than 0")
        require(self.schedule in SCHEDULES, "schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        even = self.hidden_size % self.heads == 0 and self.hidden_size // self.heads % 2 == 0
        require(even, "hidden_size", self.hidden_size, f"an even multiple of --heads {self.heads}")
        if self.epochs is not None and self.steps is not None:
            raise UserError(f"--epochs: got {self.epochs} beside --steps {self.steps}, expected one of them")

    def rounds(self, batches: int) -> tuple[int, int]:
        """Return how many epochs to train and how many batches each has, where one pass over the data has ``batches``.

        Steps are cut into ten epochs, or more where ten passes hold too few batches; the last one is filled up.

        Example:
            >>> DiffusionConfig(epochs=3).rounds(70), DiffusionConfig(steps=500).rounds(70)
            ((3, 70), (10, 50))
        """
        if self.epochs is not None:
            return self.epochs, batches
        steps = self.steps or STEPS
        each = min(batches, -(-steps // _ROUNDS))
        return -(-steps // each), each

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, paths made absolute, the run folder left out."""
        values = asdict(self)
        del values["out"]
        if self.data is not None:
            values["data"] = str(Path(self.data).absolute())
        if os.path.isdir(self.vocab):
            values["vocab"] = str(Path(self.vocab).absolute())
        return values


def load_config(folder: str | Path) -> DiffusionConfig:
    """Return the settings of a run, with ``out`` set to its folder.

    Raises:
        UserError: the folder is missing, or is no run of this recipe.
    """
    values = runs.read_config(folder, KIND)
    values.pop("resolved", None)
    config = settings_from(DiffusionConfig, values)
    config.out = str(folder)
    return config
