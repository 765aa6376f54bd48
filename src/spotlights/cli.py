"""The ``spotlights METHOD VERB`` command: collects the command line of each method and holds no logic of its own."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from spotlights import __version__
from spotlights.runtime.errors import UserError

# Name of the command -> its wing, and what it is.
METHODS = {
    "wbmm": ("wbmm", "Windowed Batch Matrix Multiplication: large receptive fields for vision networks"),
    "xdlm": ("diffusion", "XDLM: discrete diffusion between masks and uniform noise, for text and other tokens"),
}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command; each method's ``cli.add_commands`` adds its verbs."""
    parser = argparse.ArgumentParser(
        prog="spotlights", description="Methods of ICML 2026 as drop-in PyTorch.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"spotlights {__version__}")
    methods = parser.add_subparsers(title="methods", dest="method", metavar="METHOD", required=True)
    for name, (_, summary) in METHODS.items():
        method = methods.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        verbs = method.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
        _wing(name).add_commands(verbs)
    summary = "versions, threads and instruction set, and which backends can run here"
    info = methods.add_parser("info", help=summary, description=f"Print {summary}.", allow_abbrev=False)
    info.set_defaults(run=_info)
    return parser


def _wing(name: str) -> ModuleType:
    return importlib.import_module(f"spotlights.{METHODS[name][0]}.cli")


def _info(arguments: argparse.Namespace) -> None:
    from spotlights.runtime.info import environment

    lines = dict(environment())
    for name in METHODS:
        lines |= {f"{name} {backend}": state for backend, state in _wing(name).backend_states()}
    for name, value in lines.items():
        print(f"{name:<16} {value}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, 130 interrupted, 141 output closed."""
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"spotlights: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever reads the output has seen enough; the interpreter must not write to the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print("spotlights: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
