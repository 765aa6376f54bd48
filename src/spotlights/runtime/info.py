"""What ``spotlights info`` says of the machine."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from spotlights import __version__
from spotlights.runtime.bench import machine_line
from spotlights.runtime.native import LEVELS, load


def environment() -> Iterator[tuple[str, str]]:
    """Yield name and value of what bears on speed: versions, machine, threads, the CPU library.

    Example:
        >>> dict(environment())["torch"] == torch.__version__
        True
    """
    yield "spotlights", __version__
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "machine", machine_line()
    yield "threads", str(torch.get_num_threads())
    library = load()
    yield "cpu library", library if isinstance(library, str) else f"loaded, {LEVELS[library.level]}"
