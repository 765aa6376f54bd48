"""Tables, pictures and page of ``spotlights wbmm bench --suite network``, drawn from its rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.runtime.bench_table import LOW, Row, by_case, read_table
from spotlights.runtime.errors import UserError
from spotlights.runtime.report import Page, new_figure
from spotlights.runtime.runs import replacing
from spotlights.wbmm.bench_profile import PARTS
from spotlights.wbmm.bench_report import REPORT, rich_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

PROFILE = "profile.csv"
_TASKS = {"forward": "inference", "train": "training step"}
_COLOURS = ("#2b7fc9", "#d8701f", "#2c9c67", "#ab5fc0", "#94832f", "#cf4d76", "#4fb0bf", "#8a6a52", "#8b939b")


@dataclass(frozen=True)
class Form:
    """Rows of a network's form; ``network`` is added to the name of ours, or None for any other network's name."""

    form: str
    network: str = ""
    compiled: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class Pair:
    """Two forms to compare: how many times as fast the first is (or how much of the memory it takes)."""

    label: str
    task: str
    first: Form
    second: Form
    memory: bool = False


_PLAIN, _OURS, _FOLDED = Form("plain"), Form("unfolded"), Form("folded")
_TWIN = " DW 13x13"
PAIRS = (
    Pair("folded, against plain", "forward", _FOLDED, _PLAIN),
    Pair("unfolded, against plain", "forward", _OURS, _PLAIN),
    Pair("folded and compiled, against plain", "forward", Form("folded", compiled=1), _PLAIN),
    Pair("folded and compiled, against plain compiled", "forward", Form("folded", compiled=1), Form("plain", "", 1)),
    Pair("folded in bfloat16, against folded in float32", "forward", Form("folded", dtype="bfloat16"), _FOLDED),
    Pair("folded, against the DW 13x13 twin folded", "forward", _FOLDED, Form("folded", _TWIN)),
    Pair("unfolded, against the DW 13x13 twin", "forward", _OURS, Form("unfolded", _TWIN)),
    Pair("ours, against plain", "train", _OURS, _PLAIN),
    Pair("ours, against the DW 13x13 twin", "train", _OURS, Form("unfolded", _TWIN)),
    Pair("memory, ours as a part of plain's", "train", _OURS, _PLAIN, memory=True),
    Pair("memory, ours as a part of the twin's", "train", _OURS, Form("unfolded", _TWIN), memory=True),
)


@dataclass(frozen=True)
class Ratio:
    """One comparison over the batches that have both sides.

    Attributes:
        label: what is compared.
        task: "forward" or "train".
        memory: whether of memory rather than of speed.
        values: batch -> how many times as fast the first is, or its memory as a part of the second's.
    """

    label: str
    task: str
    memory: bool
    values: dict[int, float]


def network_of(rows: Sequence[Row]) -> str:
    """Return the name of the network that the rows are about: the one that has a plain form."""
    return next((row["network"] for row in rows if row["form"] == "plain"), rows[0]["network"])


def peak_of(row: Row) -> int | None:
    """Return the most memory of a row, by whichever counter its device has."""
    peak: int | None = row["peak_bytes_profiler"] if row["peak_bytes_cuda"] is None else row["peak_bytes_cuda"]
    return peak


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """Return the comparisons of `PAIRS`, and those with other networks, as far as they were measured.

    Example:
        >>> common = {"task": "forward", "batch": 4, "network": "wbmm_tiny", "compiled": 0, "dtype": "float32"}
        >>> table = [{**common, "form": form, "seconds_q25": t} for form, t in (("plain", 3.0), ("folded", 1.5))]
        >>> [(ratio.label, ratio.values) for ratio in ratios(table)]
        [('folded, against plain', {4: 2.0})]
    """
    ours = network_of(rows)
    others = [name for name in dict.fromkeys(row["network"] for row in rows) if not name.startswith(ours)]
    pairs = list(PAIRS)
    for name in others:
        pairs.append(Pair(f"folded, against {name}", "forward", _FOLDED, Form("unfolded", name)))
        pairs.append(Pair(f"ours, against {name}", "train", _OURS, Form("unfolded", name)))
    index = {
        (row["task"], row["batch"], row["network"], row["form"], row["compiled"], row["dtype"]): row for row in rows
    }
    batches = sorted({row["batch"] for row in rows})
    found = []
    for pair in pairs:
        values = {}
        for batch in batches:
            first, second = (
                index.get((pair.task, batch, _full_name(ours, form, others), form.form, form.compiled, form.dtype))
                for form in (pair.first, pair.second)
            )
            if first is None or second is None:
                continue
            if not pair.memory:
                values[batch] = second[LOW] / first[LOW]
            elif (mine := peak_of(first)) and (theirs := peak_of(second)):
                values[batch] = mine / theirs
        if values:
            found.append(Ratio(pair.label, pair.task, pair.memory, values))
    return sorted(found, key=lambda ratio: list(_TASKS).index(ratio.task))


def _full_name(ours: str, form: Form, others: Sequence[str]) -> str:
    return form.network if form.network in others else ours + form.network


def verdict(rows: Sequence[Row]) -> str:
    """Return the ratios that matter most in one sentence."""
    wanted = (
        ("forward", "folded, against plain", "folded it runs {} times as fast as the plain implementation"),
        ("forward", "folded, against the DW 13x13 twin folded", "{} times as fast as its depthwise 13x13 twin"),
        ("train", "ours, against plain", "a training step is {} times as fast as the plain one"),
        ("train", "memory, ours as a part of plain's", "it takes {} of the plain one's memory"),
    )
    found = {(ratio.label, ratio.task): ratio for ratio in ratios(rows)}
    parts = [text.format(_listed(found[label, task].values)) for task, label, text in wanted if (label, task) in found]
    return f"{network_of(rows)}: {', '.join(parts)}." if parts else "Too little was measured to compare."


def _listed(values: dict[int, float]) -> str:
    return ", ".join(f"{value:.2f} (batch {batch})" for batch, value in values.items())


def case_text(row: Row) -> str:
    """Return the words for a row's case."""
    return f"{_TASKS[row['task']]}, batch {row['batch']}"


def _case_cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]], list[int]]:
    plain = next((row for row in rows if row["form"] == "plain" and not row["compiled"]), None)
    ours = network_of(rows)
    body = []
    for row in rows:
        peak = peak_of(row)
        body.append(
            [
                row["provider"],
                f"{1000 * row[LOW]:.1f}",
                f"{row['batch'] / row[LOW]:.1f}",
                "-" if plain is None else f"{plain[LOW] / row[LOW]:.2f}",
                "-" if peak is None else f"{peak / 2**20:.0f}",
                row["layout"],
            ]
        )
    stressed = [i for i, row in enumerate(rows) if row["network"] == ours and row["form"] != "plain"]
    return ["network", "ms", "img/s", "x plain", "MiB", "layout"], body, stressed


_LEGEND = (
    "ms: lower quartile of one call; x plain: times as fast as the plain implementation in eager mode; MiB: the most "
    "that torch's tensors hold in one call beyond parameters and images, in training with all gradients. A training "
    "step is forward, cross-entropy and backward, without an optimiser's step."
)


_PROFILE_LEGEND = (
    "Inference in eager mode, by hooks around the modules of each part. Residual is what a block does outside of them: "
    "layer scale and addition. Ours computes the first norm of a block with squeeze-and-excite, and biases, the second "
    "norm, layer scale and addition with the pointwise layers."
)


def case_table(rows: Sequence[Row]) -> Table:
    """Return the table of one case, the forms of ours bold."""
    columns, body, stressed = _case_cells(rows)
    return rich_table(columns, body, _title(rows[0]), stressed)


def _title(row: Row) -> str:
    return f"{case_text(row)}, {row['size']}x{row['size']} pixels, {row['device']}"


def ratio_table(rows: Sequence[Row], task: str) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells of a task's ratios."""
    batches = sorted({row["batch"] for row in rows if row["task"] == task})
    body = [
        [ratio.label, *(f"{ratio.values[batch]:.2f}" if batch in ratio.values else "-" for batch in batches)]
        for ratio in ratios(rows)
        if ratio.task == task
    ]
    return [network_of(rows), *(f"batch {batch}" for batch in batches)], body


def profile_tables(parts: Sequence[Row]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield columns and cells of each batch's parts: ms an image, and percentages of the whole."""
    groups = _profiles(parts)
    for batch in sorted({batch for batch, _ in groups}):
        forms = {form: seconds for (of_batch, form), seconds in groups.items() if of_batch == batch}
        totals = {form: sum(seconds.values()) for form, seconds in forms.items()}
        body = [
            [
                part,
                *(
                    f"{1000 * seconds[part]:.2f} ({seconds[part] / totals[form]:.0%})" if part in seconds else "-"
                    for form, seconds in forms.items()
                ),
            ]
            for part in PARTS
        ]
        total = ["all", *(f"{1000 * total:.2f}" for total in totals.values())]
        yield [f"ms an image, batch {batch}", *forms], [*body, total]


def _profiles(parts: Iterable[Row]) -> dict[tuple[int, str], dict[str, float]]:
    groups: dict[tuple[int, str], dict[str, float]] = {}
    for row in parts:
        groups.setdefault((row["batch"], row["provider"]), {})[row["part"]] = row[LOW] / row["batch"]
    return groups


def _tasks_of(rows: Iterable[Row]) -> list[str]:
    return [task for task in _TASKS if any(row["task"] == task for row in rows)]


def print_network_summary(rows: Sequence[Row], parts: Sequence[Row]) -> None:
    """Print the ratios of each task, the profile if there is one, and the verdict."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    console.print(_LEGEND)
    for task in _tasks_of(rows):
        columns, body = ratio_table(rows, task)
        console.print(rich_table(columns, body, f"{_TASKS[task]}: times as fast, memory"))
    for columns, body in profile_tables(parts):
        console.print(rich_table(columns, body, "where the time of inference goes", [len(PARTS)]))
    console.print(verdict(rows), soft_wrap=True)


def draw(rows: Sequence[Row], parts: Sequence[Row]) -> Iterator[tuple[str, Figure, str]]:
    """Yield file name, figure and description of each picture."""
    for task in _tasks_of(rows):
        members = [row for row in rows if row["task"] == task]
        what = f"Images a second in {'a ' if task == 'train' else ''}{_TASKS[task]}, and times as fast as plain."
        yield f"network-{task}", _draw_speeds(members), what
    if parts:
        yield "network-profile", _draw_profile(parts), "Where the time of inference goes, in ms an image."


def _draw_speeds(rows: Sequence[Row]) -> Figure:
    cases = list(by_case(rows).values())
    ours = network_of(rows)
    most = max(map(len, cases))
    with new_figure(6.8, len(cases) * (0.7 + 0.24 * most), len(cases), 1, squeeze=False) as (figure, grid):
        for axes, members in zip(grid[:, 0], cases, strict=True):
            plain = next((row for row in members if row["form"] == "plain" and not row["compiled"]), None)
            speeds = [row["batch"] / row[LOW] for row in members]
            colours = [_COLOURS[_kind(row, ours)] for row in members]
            axes.barh(range(len(members)), speeds, color=colours, height=0.72)
            for place, (row, speed) in enumerate(zip(members, speeds, strict=True)):
                times = "" if plain is None else f"  {plain[LOW] / row[LOW]:.2f}x"
                axes.annotate(
                    f"{speed:.{0 if speed >= 100 else 1}f}{times}",
                    (speed, place),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=8,
                )
            axes.set_yticks(range(len(members)), [row["provider"] for row in members], fontsize=8)
            axes.invert_yaxis()
            axes.grid(False, axis="y")
            axes.set_xlim(0, 1.25 * max(speeds))
            axes.set_title(case_text(members[0]), fontsize=10)
        figure.supxlabel("images a second (more is better); x: times as fast as plain", fontsize=9)
    return figure


def _kind(row: Row, ours: str) -> int:
    """Return the colour's number: ours, plain, twin, others."""
    if row["network"] == ours:
        return 1 if row["form"] == "plain" else 0
    return 2 if row["network"].startswith(ours) else 8


def _draw_profile(parts: Sequence[Row]) -> Figure:
    groups = _profiles(parts)
    batches = sorted({batch for batch, _ in groups})
    with new_figure(6.8, 0.9 + 1.45 * len(batches), len(batches), 1, squeeze=False, sharex=True) as (figure, grid):
        handles: dict[str, Any] = {}
        for axes, batch in zip(grid[:, 0], batches, strict=True):
            forms = [form for of_batch, form in groups if of_batch == batch]
            left = [0.0] * len(forms)
            for part, colour in zip(PARTS, _COLOURS, strict=False):
                widths = [1000 * groups[batch, form].get(part, 0.0) for form in forms]
                handles[part] = axes.barh(range(len(forms)), widths, left=left, color=colour, height=0.68)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            for place, total in enumerate(left):
                axes.annotate(
                    f"{total:.1f}", (total, place), (4, 0), textcoords="offset points", va="center", fontsize=9
                )
            axes.set_yticks(range(len(forms)), forms)
            axes.invert_yaxis()
            axes.grid(False, axis="y")
            axes.set_title(f"batch {batch}", fontsize=10)
        grid[-1][0].set_xlabel("ms an image")
        axes = grid[0][0]
        axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=9)
    return figure


def write_network_report(table: str | Path) -> Path:
    """Draw the pictures and the page from a table of results and the profile beside it, and return the page's path.

    Raises:
        UserError: a table is unreadable or empty, or a file cannot be written.
    """
    table = Path(table)
    rows = read_table(table)
    if not rows:
        raise UserError(f"{table}: holds no times")
    beside = table.with_name(PROFILE)
    parts = read_table(beside) if beside.exists() else []
    names = ("machine", "torch", "threads", "commit", "cpu_level")
    page = Page("WBMM networks and their rivals, timed", verdict(rows), {name: rows[0][name] for name in names})
    page.section("Times as fast, memory", _LEGEND)
    for task in _tasks_of(rows):
        columns, body = ratio_table(rows, task)
        page.table(columns, [[None if cell == "-" else cell for cell in row] for row in body], _TASKS[task])
    page.section("Pictures")
    for name, figure, alt in draw(rows, parts):
        with replacing(table.with_name(f"{name}.png")) as temporary:
            figure.savefig(temporary, format="png", dpi=160)
        page.figure(figure, alt, alt)
    if parts:
        page.section("Where the time goes", _PROFILE_LEGEND)
        for columns, body in profile_tables(parts):
            page.table(columns, body, highlight=len(PARTS))
    page.section("All times")
    for members in by_case(rows).values():
        columns, body, stressed = _case_cells(members)
        page.table(columns, body, _title(members[0]), stressed)
    return page.save(table.with_name(REPORT))
