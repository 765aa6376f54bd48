"""``spotlights xdlm train``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spotlights.diffusion.cli.common import needs_text
from spotlights.diffusion.recipes.config import PRECISIONS, STEPS, DiffusionConfig
from spotlights.diffusion.schedules import SCHEDULES
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import flag

if TYPE_CHECKING:
    from spotlights.diffusion.recipes.training import RunSummary

_FREE_ON_RESUME = {"workers", "accelerator", "devices", "strategy"}

# Field of DiffusionConfig -> type and help; "%s" becomes the default.
_OPTIONS: dict[str, tuple[type, str]] = {
    "text_column": (str, "column of a dataset that holds the text (default %s)"),
    "vocab": (str, "byte, char, or a folder that holds a Hugging Face tokenizer (default %s)"),
    "length": (int, "tokens in a sequence, the model's context (default %s)"),
    "k": (float, "part of uniform noise: 0 is masked diffusion (MDLM), 1 uniform diffusion (UDLM) (default %s)"),
    "schedule": (str, f"of the noise: {', '.join(SCHEDULES)} (default %s)"),
    "hidden_size": (int, "width of the network (default %s)"),
    "layers": (int, "blocks of the network (default %s)"),
    "heads": (int, "attention heads (default %s)"),
    "dropout": (float, "dropout in the network (default %s)"),
    "epochs": (int, "passes over the training text, instead of --steps"),
    "steps": (int, f"updates in all, cut into ten epochs or more (default {STEPS})"),
    "batch_size": (int, "sequences per step and device (default %s)"),
    "lr": (float, "peak learning rate of AdamW, cosine schedule (default %s)"),
    "weight_decay": (float, "weight decay (default %s)"),
    "warmup_steps": (int, "steps of linear warm-up, at most a tenth of all (default %s)"),
    "ema_decay": (float, "decay of the averaged weights, which are judged and saved; 0 off (default %s)"),
    "clip_gradient": (float, "largest gradient norm, 0 off (default %s)"),
    "val_split": (float, "part of the text held back for validation where no val part is (default %s)"),
    "patience": (int, "stop after so many epochs without a better validation NELBO, 0 never (default %s)"),
    "seed": (int, "seed of everything random (default %s)"),
    "limit": (int, "use at most so many sequences of each part (default: all)"),
    "workers": (int, "processes that load sequences (default %s: none besides this one)"),
    "accelerator": (str, "cpu, gpu, ... as Lightning names them (default %s)"),
    "devices": (str, "how many devices, or which (default %s)"),
    "strategy": (str, "Lightning's strategy for several devices (default %s)"),
}


def add_train(verbs: Any) -> None:
    """Add ``train``."""
    parser = verbs.add_parser(
        "train",
        help="train a denoiser of text",
        description="Train a discrete diffusion model of text into a run folder: weights, settings, metrics, curves, "
        "and a model folder for from_pretrained. Without --data it learns the sources of Python's standard library.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="text file, folder of them (with train, val and test folders in it or not), or a Hugging Face dataset "
        "written by save_to_disk",
    )
    parser.add_argument("--out", metavar="DIR", help="new run folder (default: runs/xdlm-TIME)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped, by its own settings")
    parser.add_argument("--quiet", action="store_true", help="no progress, the summary only")
    defaults = DiffusionConfig()
    for name, (kind, text) in _OPTIONS.items():
        shown = text % getattr(defaults, name) if "%s" in text else text
        metavar = "X" if kind is float else "N" if kind is int else "NAME"
        parser.add_argument(flag(name), type=kind, metavar=metavar, help=shown)
    parser.add_argument(
        "--precision", metavar="NAME", help=f"one of {', '.join(PRECISIONS)} (default {defaults.precision})"
    )
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    names = {entry.name for entry in fields(DiffusionConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    run = getattr(arguments, "resume", None)
    if run is None:
        DiffusionConfig(**given).validate()
    elif extra := set(given) - _FREE_ON_RESUME:
        raise UserError(f"--resume goes on with the run's own settings; drop {', '.join(map(flag, sorted(extra)))}")
    with needs_text():
        from spotlights.diffusion.recipes.config import load_config
        from spotlights.diffusion.recipes.training import train
        from spotlights.runtime.runs import is_rank_zero

        config = DiffusionConfig() if run is None else load_config(run)
        for name, value in given.items():
            setattr(config, name, value)
        try:
            summary = train(config, resume=run is not None, progress=not getattr(arguments, "quiet", False))
        except KeyboardInterrupt:
            print(f"stopped; go on by: spotlights xdlm train --resume {config.out or 'RUN'}", file=sys.stderr)
            raise
        if is_rank_zero():
            _print_summary(summary)
    return 0


def _print_summary(summary: RunSummary) -> None:
    early = ", stopped early" if summary.stopped_early else ""
    lines = {"epochs": f"{summary.epochs}{early}, best {summary.best_epoch}"}
    lines["training time"] = f"{summary.seconds:.1f} s"
    if summary.val_nelbo is not None:
        bits = "" if summary.val_bits_per_byte is None else f", {summary.val_bits_per_byte:.4f} bits a byte"
        lines["validation NELBO"] = f"{summary.val_nelbo:.4f} nats a token{bits}"
    if summary.skipped:
        shown = "; ".join(summary.skipped[:3]) + ("; ..." if len(summary.skipped) > 3 else "")
        lines["skipped files"] = f"{len(summary.skipped)} ({shown})"
    lines["run folder"] = summary.path
    for name, value in lines.items():
        print(f"{name:<20} {value}")
