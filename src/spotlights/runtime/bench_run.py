"""What every benchmark command does before it measures: check the device, open the folder, calm the process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from spotlights.runtime.bench import keep_memory_warm
from spotlights.runtime.bench_table import Row, environment
from spotlights.runtime.errors import UserError

RESULTS = "results.csv"


class WrongResultError(Exception):
    """A provider's result differs from the definition: its time would mean nothing."""


def prepare_run(device: str, out: str | Path | None) -> tuple[Path | None, Row]:
    """Check the device, open the folder, make the process fit for timing; return folder and environment's columns.

    Raises:
        UserError: no such device, or an unusable folder.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: got cuda, but torch sees no CUDA device")
    folder = None if out is None else _folder(Path(out))
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler speaks up where there is no GPU
    if device == "cpu":
        keep_memory_warm()
    return folder, environment(device)


def _folder(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = next(folder.iterdir(), None)
    except OSError as error:
        raise UserError(f"--out: cannot use the folder {folder}: {error.strerror}") from error
    if content is not None and not (folder / RESULTS).exists():
        raise UserError(f"--out: {folder} is not empty (it holds {content.name}); name a new folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: cannot write in {folder}: permission denied")
    return folder


def run_to_exit_code(bench: Callable[[], object], *, resumes: bool) -> int:
    """Run a benchmark for its command: 0 where it ended well, 1 where a provider's result was wrong.

    Args:
        bench: raises WrongResultError for a wrong result.
        resumes: whether an interrupted run goes on by the same command, which then is said.
    """
    try:
        bench()
    except WrongResultError as error:
        print(f"spotlights: wrong result: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if resumes:
            print("stopped; the same command goes on", file=sys.stderr)
        raise
    return 0
