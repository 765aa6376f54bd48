"""``spotlights wbmm demo``."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from spotlights.runtime.options import flag
from spotlights.wbmm.cli.common import needs_vision
from spotlights.wbmm.recipes.config import DemoConfig

# Field of DemoConfig -> type and help.
_DEMO_OPTIONS: dict[str, tuple[type, str]] = {
    "seeds": (int, "repeat everything with so many seeds (default %s)"),
    "epochs": (int, "passes over the training images (default %s)"),
    "batch_size": (int, "images a step (default %s)"),
    "lr": (float, "peak learning rate (default %s)"),
    "limit": (int, "use at most so many training and test images, for a quick look (default: all)"),
}


def add_demo(verbs: Any) -> None:
    """Add ``demo``."""
    parser = verbs.add_parser(
        "demo",
        help="train WBMM and depthwise convolutions on embedded digits and write a report",
        description="Train one small network with WBMM and with depthwise 3x3, 5x5 and 13x13 convolutions in its "
        "place on 5,000 embedded digits, compare accuracy and speed, and write report.html. Needs no network access; "
        "a demo that was stopped goes on where it was.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--out", metavar="DIR", default="runs/wbmm-demo", help="folder (default %(default)s)")
    parser.add_argument("--quiet", action="store_true", default=False, help="no progress")
    defaults = DemoConfig()
    for name, (kind, text) in _DEMO_OPTIONS.items():
        shown = text % getattr(defaults, name) if "%s" in text else text
        parser.add_argument(flag(name), type=kind, metavar="X" if kind is float else "N", help=shown)
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    names = {entry.name for entry in fields(DemoConfig)}
    config = DemoConfig(**{name: value for name, value in vars(arguments).items() if name in names})
    config.validate()
    with needs_vision():
        from spotlights.wbmm.demo import run_demo

        run_demo(arguments.out, config, progress=not arguments.quiet)
    return 0
