"""The ``spotlights METHOD VERB`` command: collects the command line of each method and holds no logic of its own."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from spotlights import __version__
from spotlights.runtime.errors import UserError, first_line, is_out_of_memory

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
    _prepare_output()
    arguments = build_parser().parse_args(argv)
    try:
        code = arguments.run(arguments) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"spotlights: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _drop_output()  # whoever reads it has seen enough
        return 141
    except OSError as error:
        print(f"spotlights: error: {error}", file=sys.stderr)
        _drop_output()
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"spotlights: error: out of memory: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("spotlights: interrupted", file=sys.stderr)
        return 130


def _prepare_output() -> None:
    """Let commands print whatever they have to say, wherever it goes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (stays open)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Keep the interpreter from writing once more, at its end, what could not be written."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
