"""The benchmark's tables, pictures and page, drawn from its rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.runtime.bench_table import LOW, Row, by_case, compare, read_table
from spotlights.runtime.errors import UserError
from spotlights.runtime.report import Page, new_figure
from spotlights.runtime.runs import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

REPORT = "report.html"
_CHANGED = 0.1


@dataclass(frozen=True)
class Rival:
    """What WBMM of a window is compared with: rows of a family and, where given, method, size and layout."""

    label: str
    family: str
    method: str | None = None
    size: int | None = None
    layout: str | None = None

    def best(self, rows: Iterable[Row], window: int) -> Row | None:
        """Return its fastest row of one case, in either layout; rivals without a size take the window's."""
        wanted = {"family": self.family, "method": self.method, "layout": self.layout, "size": self.size or window}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        fitting = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
        return min(fitting, key=lambda row: row[LOW], default=None)


PAPER = Rival("paper's form", "wbmm", "matmul")
RIVALS = (
    PAPER,
    Rival("paper's form, M rebuilt", "wbmm uncached", "matmul"),
    *(Rival(f"DW {size}x{size}", "depthwise", size=size) for size in (5, 13, 27)),
    Rival("DW 27x27 NCHW", "depthwise", size=27, layout="NCHW"),
    Rival("FFT", "fft"),
    Rival("window attention", "attention"),
    Rival("two tables", "two-table"),
)


def ours(rows: Iterable[Row], window: int) -> Row | None:
    """Return the fastest row, in either layout, of the backend that is taken when none is named."""
    return min(
        (row for row in rows if row["family"] == "wbmm" and row["default"] and row["size"] == window),
        key=lambda row: row[LOW],
        default=None,
    )


def windows_of(rows: Iterable[Row]) -> list[int]:
    """Return the windows that were measured."""
    return sorted({row["size"] for row in rows if row["family"] == "wbmm"})


def tasks_of(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return (device, dtype, task) of the rows, in order."""
    return list(dict.fromkeys((row["device"], row["dtype"], row["task"]) for row in rows))


def of_task(rows: Iterable[Row], task: tuple[str, str, str]) -> list[Row]:
    """Return the rows of one (device, dtype, task)."""
    return [row for row in rows if (row["device"], row["dtype"], row["task"]) == task]


@dataclass(frozen=True)
class Ratios:
    """How many times longer a rival takes than WBMM of one window, over the cases that have both.

    Attributes:
        window: its side.
        rival: the rival's label.
        values: one ratio a case.
        worst: the case of the smallest.
    """

    window: int
    rival: str
    values: tuple[float, ...]
    worst: str

    @property
    def mean(self) -> float:
        """Geometric mean."""
        return math.exp(sum(map(math.log, self.values)) / len(self.values))


def ratios(rows: Sequence[Row]) -> list[Ratios]:
    """Return the ratios of each window to each rival; the rows are of one task.

    Example:
        >>> case = {"channels": 8, "batch": 1, "height": 14, "width": 14}
        >>> wbmm = {"family": "wbmm", "method": "cpu", "size": 7, "layout": "NHWC", "default": 1}
        >>> dw = {"family": "depthwise", "method": "depthwise", "size": 5, "layout": "NCHW", "default": 0}
        >>> table = [{**case, "provider": row["family"], **row, "seconds_q25": t} for row, t in ((wbmm, 1), (dw, 3))]
        >>> [(entry.window, entry.rival, round(entry.mean, 3)) for entry in ratios(table)]
        [(7, 'DW 5x5', 3.0)]
    """
    found = []
    for window in windows_of(rows):
        for rival in RIVALS:
            values = []
            for case, members in by_case(rows).items():
                mine, theirs = ours(members, window), rival.best(members, window)
                if mine is not None and theirs is not None and mine is not theirs:
                    values.append((theirs[LOW] / mine[LOW], _case_text(dict(case))))
            if values:
                found.append(Ratios(window, rival.label, tuple(value for value, _ in values), min(values)[1]))
    return found


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence on whether WBMM pays, for rows of one task."""
    found = {(entry.window, entry.rival): entry for entry in ratios(rows)}
    instead: dict[str, list[Ratios]] = {"the convolution of its table's size": [], "DW 5x5": [], "the paper's form": []}
    for window in windows_of(rows):
        # The convolution of the table's own size, or the largest that was measured below it.
        twins = [f"DW {size}x{size}" for size in (27, 13) if size < 2 * window]
        for name, rivals in zip(instead, (twins, ["DW 5x5"], [PAPER.label]), strict=True):
            entry = next((found[window, rival] for rival in rivals if (window, rival) in found), None)
            if entry is not None:
                instead[name].append(entry)
    task = "a training step" if rows and rows[0]["task"] == "train" else "inference"
    parts = [f"instead of {name}: {_answer(entries)}" for name, entries in instead.items() if entries]
    if not parts:
        return f"Does it pay on this hardware, in {task}? Too little was measured to say."
    count = len(by_case(rows))
    maps = f"{count} size{'s' if count > 1 else ''} of maps"
    return f"Does it pay on this hardware, in {task}, over {maps}, each in its better layout? " + _sentence(parts)


def _sentence(parts: Sequence[str]) -> str:
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _answer(entries: Sequence[Ratios]) -> str:
    if all(min(entry.values) > 1 for entry in entries):
        word = "yes"
    else:
        word = "no" if all(max(entry.values) <= 1 for entry in entries) else "at some sizes"
    return f"{word}, " + ", ".join(map(_against, entries))


def _against(entry: Ratios) -> str:
    low, high = min(entry.values), max(entry.values)
    spread = f" ({low:.2f} to {high:.2f})" if len(entry.values) > 1 else ""
    against = f" as {entry.rival}" if entry.rival.startswith("DW") and entry.rival != "DW 5x5" else ""
    return f"{entry.window}x{entry.window} is {entry.mean:.2f}{spread} times as fast{against}"


def _case_text(row: Row) -> str:
    return f"C={row['channels']} B={row['batch']} {row['height']}x{row['width']}"


def _operator_case_text(row: Row) -> str:
    return f"{_case_text(row)} {row['task']}"


def fraction(row: Row, of: str) -> float | None:
    """Return the part of the measured peak ("flops") or copy bandwidth ("bytes") that a row reaches."""
    top = row.get({"flops": "peak_flops", "bytes": "copy_bandwidth"}[of])
    return None if not top or row[of] is None else row[of] / row[LOW] / top


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def rich_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str, stressed: Iterable[int] = ()
) -> Table:
    """Return a table for the terminal: the first column names the rows, ``stressed`` ones are bold."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    marked = set(stressed)
    for index, row in enumerate(rows):
        table.add_row(*row, style="bold" if index in marked else None)
    return table


def case_table(rows: Sequence[Row]) -> Table:
    """Return the table of one case: ours bold, every other with its time as a multiple of ours."""
    columns, body, stressed = _case_cells(rows)
    first = rows[0]
    return rich_table(columns, body, f"{_case_text(first)}, {first['dtype']}, {first['task']}", stressed)


def _case_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[int]]:
    best = {window: ours(rows, window) for window in windows_of(rows)}
    mine = {window: row for window, row in best.items() if row is not None}
    body = []
    for row in rows:
        memory = row.get("peak_bytes_cuda") or row.get("peak_bytes_profiler")
        body.append(
            [
                row["provider"],
                f"{1000 * row[LOW]:.3f}",
                *(_times(row[LOW] / other[LOW]) for other in mine.values()),
                _percent(fraction(row, "flops")),
                _percent(fraction(row, "bytes")),
                "-" if memory is None else f"{memory / 2**20:.1f}",
            ]
        )
    stressed = [index for index, row in enumerate(rows) if any(row is other for other in mine.values())]
    return ["operator", "ms", *(f"x{w}" for w in mine), "FMA", "copy", "MiB"], body, stressed


_LEGEND = (
    "ms: lower quartile; x7, x14: times that of the fastest default WBMM (bold) of this window; FMA: part of the "
    "measured peak of float32 multiply-adds; copy: part of the measured copy bandwidth, for the least traffic; MiB: "
    "most memory held beyond inputs by torch's tensors in one call. matmul in NCHW is the paper's form."
)


def summary_tables(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, columns and cells of the tables that sum up one task."""
    yield (
        "times as fast as",
        ["WBMM", "against", "mean", "least", "at", "cases"],
        [
            [
                f"{entry.window}x{entry.window}",
                entry.rival,
                _times(entry.mean),
                _times(min(entry.values)),
                entry.worst,
                str(len(entry.values)),
            ]
            for entry in ratios(rows)
        ],
    )
    body = []
    for case, members in by_case(rows).items():
        cells = [_case_text(dict(case))]
        for window in windows_of(rows):
            row = ours(members, window)
            cells += ["-", "-"] if row is None else [_percent(fraction(row, of)) for of in ("flops", "bytes")]
        body.append(cells)
    names = [f"{window}x{window} {of}" for window in windows_of(rows) for of in ("FMA", "copy")]
    yield "part of the measured peaks", ["case", *names], body


def print_summary(rows: Sequence[Row]) -> None:
    """Print, for each task, the summary tables and the verdict."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_LEGEND)
    for task in tasks_of(rows):
        members = of_task(rows, task)
        for title, columns, body in summary_tables(members):
            console.print(rich_table(columns, body, f"{', '.join(task)}: {title}"))
        console.print(verdict(members), soft_wrap=True)


def baseline_table(
    rows: Sequence[Row], baseline: Sequence[Row], case_text: Callable[[Row], str] = _operator_case_text
) -> tuple[str, Table | None]:
    """Return one line on the comparison with earlier rows, and the table of changes above 10 %."""
    found = compare(rows, baseline)
    changed = [change for change in found if abs(math.log(change.ratio)) > math.log1p(_CHANGED)]
    line = f"{len(found)} times compared with the baseline, {len(changed)} changed by more than 10 %"
    if not changed:
        return line, None
    body = [
        [
            change.provider,
            case_text(dict(change.case)),
            f"{1000 * change.before:.3f}",
            f"{1000 * change.now:.3f}",
            f"{100 * (change.ratio - 1):+.0f} %",
        ]
        for change in sorted(changed, key=lambda change: -change.ratio)
    ]
    columns = ["what", "case", "ms then", "ms now", "time"]
    return line, rich_table(columns, body, "against the baseline, by the control kernel's pace")


# One colour and marker for each in every picture.
_KINDS = ("ours", "paper's form", "depthwise", "fft", "attention", "two-table")


def _kind(row: Row) -> str | None:
    if row["family"] == "wbmm" and row["default"]:
        return "ours"
    if row["family"] == "wbmm":
        return "paper's form" if row["method"] == "matmul" else None
    return row["family"] if row["family"] in _KINDS else None


_NAMES = {"ours": "WBMM", "fft": "FFT", "attention": "window attention", "two-table": "WBMM, two tables"}
_MARKERS = {"ours": "o", "paper's form": "s", "depthwise": "^", "fft": "v", "attention": "D", "two-table": "P"}


def _colours() -> dict[str, str]:
    import matplotlib

    return dict(zip(_KINDS, matplotlib.rcParams["axes.prop_cycle"].by_key()["color"], strict=False))


def _main_channels(rows: Sequence[Row]) -> int:
    widths = sorted({row["channels"] for row in rows})
    return 256 if 256 in widths else widths[len(widths) // 2]


def draw(rows: Sequence[Row]) -> Iterator[tuple[str, Figure, str]]:
    """Yield file name, figure and description of each picture."""
    tasks = tasks_of(rows)
    for task in tasks:
        members = of_task(rows, task)
        prefix = task[2] if len({name for *_, name in tasks}) == len(tasks) else "-".join(task)
        main = [row for row in members if row["channels"] == _main_channels(members)]
        yield f"{prefix}-size", _draw_sizes(main), "Time against the side of kernel or window, one panel a map."
        if figure := _draw_speedups(main):
            yield f"{prefix}-speedup", figure, "How many times as fast as depthwise convolutions, against the batch."
        yield f"{prefix}-roofline", _draw_roofline(members), "GFLOP/s against FLOP per byte, with measured limits."


def _draw_sizes(rows: Sequence[Row]) -> Figure:
    cases = list(by_case(rows).items())
    shown = cases if len(cases) <= 6 else [cases[round(i * (len(cases) - 1) / 5)] for i in range(6)]
    columns = {1: 1, 2: 2, 4: 2}.get(len(shown), 3)
    lines = -(-len(shown) // columns)
    places = {size: place for place, size in enumerate(sorted({row["size"] for row in rows}))}
    with new_figure(10.2 if columns > 1 else 6.8, 1 + 2.7 * lines, lines, columns, squeeze=False) as (figure, grid):
        colours = _colours()
        handles: dict[str, Any] = {}
        for axes, (case, members) in zip(grid.flat, shown, strict=False):
            for kind in _KINDS:
                for layout, style in (("NHWC", "-"), ("NCHW", ":")):
                    points = sorted(
                        (places[row["size"]], 1000 * row[LOW])
                        for row in members
                        if _kind(row) == kind and row["layout"] == layout
                    )
                    if points:
                        label = f"{_NAMES.get(kind, kind)}, {layout}"
                        (handles[label],) = axes.plot(
                            *zip(*points, strict=True),
                            style,
                            marker=_MARKERS[kind],
                            markersize=5,
                            color=colours[kind],
                        )
            axes.set_title(_case_text(dict(case)), fontsize=10)
            axes.set_xticks(list(places.values()), list(map(str, places)))
            axes.set_xlim(-0.4, len(places) - 0.6)
            axes.set_xlabel("side of the kernel or window")
            axes.set_yscale("log")
        for axes in list(grid.flat)[len(shown) :]:
            axes.set_visible(False)
        figure.supylabel("ms, lower quartile", fontsize=10)
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=9)
    return figure


def _log_axis(axis: Any, ticks: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

    axis.axes.set_xscale("log", base=2)
    axis.set_major_locator(FixedLocator(list(ticks)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _draw_speedups(rows: Sequence[Row]) -> Figure | None:
    windows, kernels = windows_of(rows), (5, 13)
    if not windows or not any(row["family"] == "depthwise" for row in rows):
        return None
    batches = sorted({row["batch"] for row in rows})
    sizes = sorted({(row["height"], row["width"]) for row in rows})
    with new_figure(6.8, 2.6 * len(windows), len(windows), 2, sharex=True, squeeze=False) as (figure, grid):
        for line, window in zip(grid, windows, strict=True):
            for axes, kernel in zip(line, kernels, strict=True):
                rival = Rival("", "depthwise", size=kernel)
                highest = 1.0
                for size in sizes:
                    points = []
                    for case, members in by_case(rows).items():
                        mine, theirs = ours(members, window), rival.best(members, window)
                        at = dict(case)
                        if mine and theirs and (at["height"], at["width"]) == size:
                            points.append((at["batch"], theirs[LOW] / mine[LOW]))
                            highest = max(highest, theirs[LOW] / mine[LOW])
                    if points:
                        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"{size[0]}x{size[1]}")
                axes.axhline(1, color="0.5", linewidth=1, linestyle="--")
                axes.set_ylim(0, 1.12 * highest)
                axes.set_title(f"WBMM {window}x{window} against DW {kernel}x{kernel}", fontsize=10)
                _log_axis(axes.xaxis, batches)
        for axes in grid[-1]:
            axes.set_xlabel("batch")
        figure.supylabel("times as fast, better layouts", fontsize=10)
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels) or 1, title="map")
    return figure


def _draw_roofline(rows: Sequence[Row]) -> Figure:
    with new_figure(6.8, 4.4) as (figure, axes):
        colours = _colours()
        shown = [row for row in rows if row["flops"] and _kind(row) not in (None, "two-table")]
        intensities = [row["flops"] / row["bytes"] for row in shown]
        for kind in _KINDS:
            for filled, name in ((True, "channels-last"), (False, "NCHW")):
                points = [
                    (row["flops"] / row["bytes"], row["flops"] / row[LOW] / 1e9)
                    for row in shown
                    if _kind(row) == kind and (row["layout"] == "NHWC") == filled
                ]
                if points:
                    axes.plot(
                        *zip(*points, strict=True),
                        _MARKERS[kind],
                        linestyle="none",
                        markersize=5.5,
                        color=colours[kind],
                        markerfacecolor=colours[kind] if filled else "none",
                        alpha=0.85,
                        label=f"{_NAMES.get(kind, kind)}, {name}",
                    )
        low, high = min(intensities) / 1.5, max(intensities) * 1.5
        bandwidth = max((row["copy_bandwidth"] or 0 for row in rows), default=0)
        peak = max((row["peak_flops"] or 0 for row in rows), default=0)
        if bandwidth:
            ends = [low, min(high, peak / bandwidth) if peak else high]
            label = f"copy bandwidth, {bandwidth / 1e9:.0f} GB/s"
            axes.plot(ends, [bandwidth * end / 1e9 for end in ends], color="0.5", linewidth=1.4, label=label)
        if peak:
            label = f"float32 multiply-adds, {peak / 1e9:.0f} GFLOP/s"
            axes.plot([low, high], [peak / 1e9] * 2, color="0.5", linewidth=1.4, linestyle="--", label=label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        axes.set_xlabel("FLOP per byte of the least traffic")
        axes.set_ylabel("GFLOP/s")
        figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def write_report(table: str | Path) -> Path:
    """Draw the pictures and the page from a table of results, beside it, and return the page's path.

    Raises:
        UserError: the table is unreadable or empty, or a file cannot be written.
    """
    table = Path(table)
    rows = read_table(table)
    if not rows:
        raise UserError(f"{table}: holds no times")
    verdicts = " ".join(verdict(of_task(rows, task)) for task in tasks_of(rows))
    names = ("machine", "torch", "threads", "commit", "cpu_level")
    page = Page("WBMM and its rivals, timed", verdicts, {name: rows[0][name] for name in names})
    for task in tasks_of(rows):
        page.section(", ".join(task))
        for title, columns, body in summary_tables(of_task(rows, task)):
            page.table(columns, [[None if cell == "-" else cell for cell in row] for row in body], title.capitalize())
    page.section("Pictures")
    for name, figure, alt in draw(rows):
        with replacing(table.with_name(f"{name}.png")) as temporary:
            figure.savefig(temporary, format="png", dpi=160)
        page.figure(figure, alt, f"{name.replace('-', ', ')}: {alt}")
    page.section("All times", _LEGEND)
    for members in by_case(rows).values():
        columns, body, stressed = _case_cells(members)
        first = members[0]
        page.table(columns, body, f"{_case_text(first)}, {first['dtype']}, {first['task']}", stressed)
    return page.save(table.with_name(REPORT))
