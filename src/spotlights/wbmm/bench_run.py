"""One run of ``spotlights wbmm bench``: what is printed, and what is left in its folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from spotlights.runtime.bench import copy_bandwidth, keep_memory_warm, peak_flops
from spotlights.runtime.bench_table import Results, Row, environment, read_table
from spotlights.runtime.errors import UserError
from spotlights.runtime.progress import EpochProgress
from spotlights.wbmm.bench import DTYPES, SUITES, Case, run_cases
from spotlights.wbmm.bench_report import RESULTS, baseline_table, case_table, print_summary, write_report


class _Screen:
    def __init__(self, progress: EpochProgress) -> None:
        self.progress = progress

    def step(self, epoch: int, step: int, steps: int) -> None:
        self.progress.step(epoch, step, steps)

    def case_done(self, case: Case, rows: Sequence[Row], skipped: Sequence[str]) -> None:
        self.progress.show(case_table(rows) if rows else str(case))
        for line in skipped:
            self.progress.show(f"left out: {line}")


def run_bench(
    suite: str | Sequence[Case] = "quick",
    *,
    device: str = "cpu",
    dtype: str = "float32",
    train: bool = False,
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    rounds: int = 15,
) -> list[Row]:
    """Measure a suite, print tables and verdict, and return all rows, those of an earlier part of the run included.

    Args:
        suite: a name from ``spotlights.wbmm.bench.SUITES``, or cases.
        device: "cpu" or "cuda".
        dtype: a name from ``spotlights.wbmm.bench.DTYPES``.
        train: time forward and all gradients instead of inference.
        out: folder for ``results.csv``, pictures and page; None keeps nothing.
        baseline: an earlier ``results.csv`` to compare with.
        rounds: samples of each provider.

    Raises:
        UserError: no such device, an unusable folder or file, or one that was measured otherwise.
        WrongResultError: a provider computed something else than the definition.
    """
    from rich.console import Console

    earlier = None if baseline is None else read_table(baseline)
    folder, machine = prepare_run(device, out)
    results = Results(folder and folder / RESULTS, {**machine, "device": device, "dtype": dtype})
    cases = SUITES[suite] if isinstance(suite, str) else tuple(suite)

    console = Console(highlight=False, markup=False)
    console.print(machine["machine"], soft_wrap=True)
    peaks = {"peak_flops": peak_flops(device), "copy_bandwidth": copy_bandwidth(device)}
    with EpochProgress(len(cases), unit="case") as progress:
        run_cases(
            cases,
            results,
            {**peaks, **machine},
            device=device,
            dtype=DTYPES[dtype],
            train=train,
            rounds=rounds,
            watcher=_Screen(progress),
        )
    if not results.rows:
        raise UserError("nothing was measured: every case was left out")
    print_summary(results.rows)
    if earlier is not None:
        line, table = baseline_table(results.rows, earlier)
        console.print(line)
        if table is not None:
            console.print(table)
    if folder is not None:
        console.print(f"report: {write_report(folder / RESULTS)}", soft_wrap=True)
    return results.rows


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
