"""The tables, pictures and page of ``spotlights xdlm bench``, drawn from its rows alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.runtime.bench_table import LOW, Row, by_case, read_table
from spotlights.runtime.report import Page, new_figure
from spotlights.runtime.runs import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

REPORT = "report.html"
_TASKS = {"loss": "loss from logits", "head": "loss from hidden states", "step": "one sampler step from logits"}
_COLOURS = {"fused": "#2b7fc9", "plain": "#d8701f"}
_NOTE = (
    "Losses are forward and backward. ms: lower quartile of one call; MiB: the most that torch's tensors hold in one "
    "call beyond its inputs, gradients included; fused is ours, plain what one writes from the papers' formulas."
)


def memory_of(row: Row) -> int:
    """Return the peak bytes of a row, whoever counted."""
    return row["peak_bytes_cuda"] if row["peak_bytes_profiler"] is None else row["peak_bytes_profiler"]


def title_of(row: Row) -> str:
    """Return what a row's case is, in a line."""
    width = f", width {row['width']}" if row["width"] else ""
    sizes = f"vocabulary {row['vocab']:,}, batch {row['batch']}, length {row['length']}"
    return f"{_TASKS[row['task']]}; {sizes}{width}"


def ratios(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return for each method of one case how many times as fast fused is as plain, and its part of the memory.

    Example:
        >>> row = {"method": "xdlm", "peak_bytes_cuda": None}
        >>> fused = {**row, "form": "fused", "seconds_q25": 1.0, "peak_bytes_profiler": 10}
        >>> plain = {**row, "form": "plain", "seconds_q25": 3.0, "peak_bytes_profiler": 40}
        >>> ratios([fused, plain])
        {'xdlm': (3.0, 0.25)}
    """
    found = {(row["method"], row["form"]): row for row in rows}
    return {
        method: (
            found[method, "plain"][LOW] / row[LOW],
            memory_of(row) / max(1, memory_of(found[method, "plain"])),
        )
        for (method, form), row in found.items()
        if form == "fused"
    }


def _cells(rows: Sequence[Row]) -> Iterator[list[str]]:
    pairs = ratios(rows)
    for row in rows:
        speed, memory = pairs[row["method"]]
        ours = row["form"] == "fused"
        yield [
            row["provider"],
            f"{1e3 * row[LOW]:,.1f}",
            f"{speed:.2f}" if ours else "1.00",
            f"{memory_of(row) / 2**20:,.1f}",
            f"{memory:.3f}" if ours else "1",
        ]


_COLUMNS = ("method", "ms", "x plain", "MiB", "of plain")


def case_table(rows: Sequence[Row]) -> Table:
    """Return one case's times and memory for the terminal."""
    from rich.table import Table

    table = Table(title=title_of(rows[0]), title_justify="left", title_style="")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row, cells in zip(rows, _cells(rows), strict=True):
        table.add_row(*cells, style="bold" if row["form"] == "fused" else "")
    return table


def summary(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each case on XDLM, fused against plain."""
    lines = []
    for case in by_case(rows).values():
        speed, memory = ratios(case)["xdlm"]
        lines.append(f"{title_of(case[0])}: XDLM {speed:.2f} times as fast as plain, with {memory:.3f} of its memory")
    return lines


def print_summary(rows: Sequence[Row]) -> None:
    """Print what the columns mean, and the summary."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_NOTE)
    for line in summary(rows):
        console.print(line, soft_wrap=True)


def draw(rows: Sequence[Row], value: str) -> Figure:
    """Draw "time" or "memory" of every provider, one panel a case."""
    cases = list(by_case(rows).values())
    with new_figure(6.8, 0.6 + 1.75 * len(cases), rows=len(cases), squeeze=False) as (figure, axes):
        for panel, case in zip(axes[:, 0], cases, strict=True):
            _bars(panel, case, value)
        axes[-1, 0].set_xlabel("ms a call (less is better)" if value == "time" else "MiB held (less is better)")
    return figure


def _bars(panel: Any, rows: Sequence[Row], value: str) -> None:
    amounts = [1e3 * row[LOW] if value == "time" else memory_of(row) / 2**20 for row in rows]
    bars = panel.barh([row["provider"] for row in rows], amounts, color=[_COLOURS[row["form"]] for row in rows])
    panel.bar_label(bars, [f"{amount:,.1f}" if amount < 100 else f"{amount:,.0f}" for amount in amounts], padding=4)
    panel.set_title(f"{_TASKS[rows[0]['task']]}, vocabulary {rows[0]['vocab']:,}", fontsize=10)
    panel.set_xlim(0, 1.15 * max(amounts))
    panel.grid(axis="y", visible=False)
    panel.invert_yaxis()


def write_report(path: Path) -> Path:
    """Write the pictures and the page beside a ``results.csv``, and return the page's path.

    Raises:
        UserError: the CSV is unreadable, or a file cannot be written.
    """
    rows = read_table(path)
    first = rows[0]
    facts = {name: first[name] for name in ("machine", "commit")}
    page = Page("XDLM: fused losses and sampler steps", " ".join(f"{line}." for line in summary(rows)), facts)
    for value, alt in {"time": "Time of a call", "memory": "Peak memory of a call"}.items():
        figure = draw(rows, value)
        with replacing(path.with_name(f"{value}.png")) as temporary:
            figure.savefig(temporary, format="png", dpi=160)
        page.section(alt)
        page.figure(figure, alt=f"{alt}, each method fused and plain, one panel a case.")
    page.section("All numbers", _NOTE)
    for case in by_case(rows).values():
        marked = [index for index, row in enumerate(case) if row["form"] == "fused"]
        page.table(_COLUMNS, list(_cells(case)), caption=title_of(case[0]), highlight=marked)
    return page.save(path.with_name(REPORT))
