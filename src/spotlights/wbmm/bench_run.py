"""One run of ``spotlights wbmm bench``: what is printed, and what is left in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spotlights.runtime.bench import copy_bandwidth, peak_flops
from spotlights.runtime.bench_run import RESULTS, prepare_run
from spotlights.runtime.bench_table import Results, Row, read_table
from spotlights.runtime.errors import UserError
from spotlights.runtime.progress import EpochProgress
from spotlights.wbmm.bench import DTYPES, SUITES, Case, run_cases
from spotlights.wbmm.bench_report import baseline_table, case_table, print_summary, write_report


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
