"""Settings of the image classification recipe."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from spotlights.runtime import runs
from spotlights.runtime.options import require, settings_from
from spotlights.wbmm.recipes.augment import PROFILES
from spotlights.wbmm.recipes.datasets import DATASETS

KIND = "wbmm classification"
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


@dataclass
class ClassificationConfig:
    """What to train, on what and how; each field is the command's option of the same name.

    Example:
        >>> ClassificationConfig(epochs=0).validate()
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: --epochs: got 0, expected at least 1
    """

    out: str | None = None
    model: str = "wbmm_atto"
    model_args: dict[str, Any] = field(default_factory=dict)
    data: str | None = None
    dataset: str | None = None
    image_size: int | None = None
    epochs: int = 20
    batch_size: int = 64
    lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_epochs: int = 2
    label_smoothing: float = 0.1
    mixup: float = 0.0
    cutmix: float = 0.0
    drop_path: float = 0.0
    augment: str = "auto"
    ema_decay: float = 0.99
    val_split: float = 0.1
    patience: int = 0
    clip_gradient: float = 5.0
    precision: str = "32-true"
    seed: int = 0
    limit: int | None = None
    workers: int | None = None
    accelerator: str = "auto"
    devices: str | int = "auto"
    strategy: str = "auto"

    def validate(self) -> None:
        """Check every value.

        Raises:
            UserError: a value is outside its range; the message names the option, the value and the range.
        """
        for name, least in {"epochs": 1, "batch_size": 2, "image_size": 8, "limit": 1}.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"at least {least}")
        for name in ("weight_decay", "warmup_epochs", "mixup", "cutmix", "patience", "clip_gradient", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        require(self.workers is None or self.workers >= 0, "workers", self.workers, "0 or more")
        require(self.lr > 0, "lr", self.lr, "more than 0")
        for name in ("label_smoothing", "drop_path", "ema_decay", "val_split"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        require(self.precision in PRECISIONS, "precision", self.precision, f"one of {', '.join(PRECISIONS)}")
        names = ("auto", *PROFILES)
        require(self.augment in names, "augment", self.augment, f"one of {', '.join(names)}")
        if self.dataset is not None:
            require(self.dataset in DATASETS, "dataset", self.dataset, f"one of {', '.join(DATASETS)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, paths made absolute, the run folder left out."""
        values = asdict(self)
        del values["out"]
        if self.data is not None:
            values["data"] = str(Path(self.data).absolute())
        return values


def load_config(folder: str | Path) -> ClassificationConfig:
    """Return the settings of a run, with ``out`` set to its folder.

    Raises:
        UserError: the folder is missing, or is no run of this recipe.
    """
    values = runs.read_config(folder, KIND)
    values.pop("resolved", None)
    config = settings_from(ClassificationConfig, values)
    config.out = str(folder)
    return config


@dataclass(frozen=True)
class DemoConfig:
    """What the demo trains; ``limit`` keeps so many training and so many test images, for a quick look."""

    epochs: int = 15
    seeds: int = 1
    batch_size: int = 64
    lr: float = 4e-3
    limit: int | None = None

    def validate(self) -> None:
        """Raise UserError for a value outside its range."""
        for name, least in {"epochs": 1, "seeds": 1, "batch_size": 2, "limit": 20}.items():
            value = getattr(self, name)
            require(value is None or value >= least, name, value, f"at least {least}")
        require(self.lr > 0, "lr", self.lr, "more than 0")
