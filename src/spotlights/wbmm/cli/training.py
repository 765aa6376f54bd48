"""``spotlights wbmm train``."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spotlights.runtime.errors import UserError
from spotlights.runtime.options import flag
from spotlights.wbmm.cli.common import needs_vision, skipped_line
from spotlights.wbmm.recipes.augment import PROFILES
from spotlights.wbmm.recipes.config import PRECISIONS, ClassificationConfig
from spotlights.wbmm.recipes.datasets import DATASETS

if TYPE_CHECKING:
    from spotlights.wbmm.recipes.classification import RunSummary

_FREE_ON_RESUME = {"workers", "accelerator", "devices", "strategy"}

# Field of ClassificationConfig -> type and help; "%s" becomes the default.
_TRAIN_OPTIONS: dict[str, tuple[type, str]] = {
    "model": (str, "network: wbmm_atto (for 28 to 64 pixels), wbmm_pico, ..., or any name of timm (default %s)"),
    "image_size": (
        int,
        "side of the images in pixels (default: that of small images of one size, else the network's, at least 64)",
    ),
    "epochs": (int, "passes over the training images (default %s)"),
    "batch_size": (int, "images per step and device (default %s)"),
    "lr": (float, "peak learning rate of AdamW, cosine schedule (default %s)"),
    "weight_decay": (float, "weight decay (default %s)"),
    "warmup_epochs": (int, "epochs of linear warm-up (default %s)"),
    "label_smoothing": (float, "label smoothing (default %s)"),
    "mixup": (float, "mixup alpha, 0 off (default %s)"),
    "cutmix": (float, "cutmix alpha, 0 off (default %s)"),
    "drop_path": (float, "stochastic depth rate (default %s)"),
    "ema_decay": (float, "decay of the averaged weights, which are judged and saved; 0 off (default %s)"),
    "val_split": (float, "part of the training images held back for validation where no val folder is (default %s)"),
    "patience": (int, "stop after so many epochs without a better validation accuracy, 0 never (default %s)"),
    "clip_gradient": (float, "largest gradient norm, 0 off (default %s)"),
    "seed": (int, "seed of everything random (default %s)"),
    "limit": (int, "use at most so many images of each part (default: all)"),
    "workers": (int, "processes that load images (default 0: none besides this one)"),
    "accelerator": (str, "cpu, gpu, ... as Lightning names them (default %s)"),
    "devices": (str, "how many devices, or which (default %s)"),
    "strategy": (str, "Lightning's strategy for several devices (default %s)"),
}


def add_train(verbs: Any) -> None:
    """Add ``train``."""
    parser = verbs.add_parser(
        "train",
        help="train an image classifier",
        description="Train an image classifier into a run folder: weights, settings, metrics, curves and confusion "
        "matrix. Without --data and --dataset it learns 5,000 embedded handwritten digits.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="images in train/CLASS/* (with val/CLASS/* and test/CLASS/* or not) or in CLASS/*; with --dataset, where "
        "its files are",
    )
    parser.add_argument("--dataset", metavar="NAME", help=f"a known data set: {', '.join(DATASETS)}")
    parser.add_argument("--out", metavar="DIR", help="new run folder (default: runs/wbmm-TIME)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped, by its own settings")
    parser.add_argument("--quiet", action="store_true", help="no progress, the summary only")
    defaults = ClassificationConfig()
    for name, (kind, text) in _TRAIN_OPTIONS.items():
        shown = text % getattr(defaults, name) if "%s" in text else text
        parser.add_argument(
            flag(name), type=kind, metavar="X" if kind is float else "N" if kind is int else "NAME", help=shown
        )
    parser.add_argument(
        "--augment",
        metavar="NAME",
        help=f"augmentation: {', '.join(PROFILES)} (default auto: what suits the data set, photo for folders)",
    )
    parser.add_argument(
        "--precision", metavar="NAME", help=f"one of {', '.join(PRECISIONS)} (default {defaults.precision})"
    )
    parser.add_argument(
        "--model-arg",
        dest="model_args",
        action="append",
        metavar="NAME=VALUE",
        help="argument for the network, for example window_size=14; may be repeated",
    )
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    names = {entry.name for entry in fields(ClassificationConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if "model_args" in given:
        given["model_args"] = _parse_model_args(given["model_args"])
    run = getattr(arguments, "resume", None)
    if run is None:
        ClassificationConfig(**given).validate()
    elif set(given) - _FREE_ON_RESUME:
        extra = ", ".join(flag(name) for name in given if name not in _FREE_ON_RESUME)
        raise UserError(
            f"--resume goes on with the run's own settings; drop {extra.replace('model-args', 'model-arg')}"
        )
    with needs_vision():
        from spotlights.runtime.runs import is_rank_zero
        from spotlights.wbmm.recipes.classification import train
        from spotlights.wbmm.recipes.config import load_config

        if run is None:
            config = ClassificationConfig(**given)
        else:
            config = load_config(run)
            for name, value in given.items():
                setattr(config, name, value)
        try:
            summary = train(config, resume=run is not None, progress=not getattr(arguments, "quiet", False))
        except KeyboardInterrupt:
            print(f"stopped; go on by: spotlights wbmm train --resume {config.out or 'RUN'}", file=sys.stderr)
            raise
        if is_rank_zero():
            _print_summary(summary)
    return 0


def _parse_model_args(texts: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise UserError(f"--model-arg: got {text!r}, expected NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def _print_summary(summary: RunSummary) -> None:
    early = ", stopped early" if summary.stopped_early else ""
    lines = {"epochs": f"{summary.epochs}{early}, best {summary.best_epoch}"}
    lines["training time"] = f"{summary.seconds:.1f} s"
    if summary.val_accuracy is not None:
        lines["validation accuracy"] = f"{100 * summary.val_accuracy:.2f} % of {summary.val_images:,} images"
    if summary.test_accuracy is not None:
        lines["test accuracy"] = f"{100 * summary.test_accuracy:.2f} % of {summary.test_images:,} images"
    lines |= skipped_line(summary.skipped)
    lines["run folder"] = summary.path
    for name, value in lines.items():
        print(f"{name:<20} {value}")
