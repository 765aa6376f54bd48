"""The ``spotlights METHOD VERB`` command: collects the command line of each method and holds no logic of its own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from spotlights import __version__
from spotlights.runtime.errors import UserError

METHODS = {
    "wbmm": "Windowed Batch Matrix Multiplication: large receptive fields for vision networks",
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each method's ``cli.add_commands`` adds its verbs."""
    parser = argparse.ArgumentParser(
        prog="spotlights", description="Methods of ICML 2026 as drop-in PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"spotlights {__version__}")
    methods = parser.add_subparsers(title="methods", dest="method", metavar="METHOD", required=True)
    for name, summary in METHODS.items():
        method = methods.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verbs = method.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
        importlib.import_module(f"spotlights.{name}.cli").add_commands(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, 130 interrupted."""
    arguments = build_parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except UserError as error:
        print(f"spotlights: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spotlights: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
