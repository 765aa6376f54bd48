"""``spotlights xdlm demo``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from spotlights.diffusion.cli.common import needs_text


def add_demo(verbs: Any) -> None:
    """Add ``demo``."""
    parser = verbs.add_parser(
        "demo",
        help="train MDLM, XDLM and UDLM on sources of known likelihood, text and digits, and write a report",
        description="Train four small denoisers that differ in their noise alone (k = 0, 0.1, 0.5, 1) on a hidden "
        "Markov model, on a grammar of brackets, on the sources of Python's library and on 5,000 digits; compare their "
        "NELBO and their samples at 4 to 256 steps, and write report.html. Needs no network access and no data; a demo "
        "that was stopped goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", metavar="DIR", default="runs/xdlm-demo", help="folder (default %(default)s)")
    parser.add_argument(
        "--seeds", type=int, metavar="N", default=3, help="sets of samples for each model (default %(default)s)"
    )
    parser.add_argument(
        "--parts", nargs="+", metavar="NAME", help="some of hmm, brackets, text and digits (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute's look at the report, with figures that mean nothing"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="models trained at a time, each on one thread (default: one a core, at most 4)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, the tables only")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    with needs_text():
        from spotlights.diffusion.demo import DemoConfig, run_demo

        parts = {} if arguments.parts is None else {"parts": tuple(arguments.parts)}
        config = DemoConfig(seeds=arguments.seeds, quick=arguments.quick, **parts)
        try:
            run_demo(arguments.out, config, workers=arguments.workers, progress=not arguments.quiet)
        except KeyboardInterrupt:
            print("stopped; the same command goes on", file=sys.stderr)
            raise
    return 0
