"""The demo's tables, pictures and page, drawn from its figures alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spotlights import __version__
from spotlights.diffusion.demo import METHODS, DemoConfig, Outcome, all_rows, bound_verdict, shape, verdict
from spotlights.diffusion.demo_parts import DigitsPart, Row
from spotlights.diffusion.digits import CLASSES, SIDE, pictures
from spotlights.runtime.bench import machine_line
from spotlights.runtime.report import Page, new_figure
from spotlights.runtime.runs import replacing, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPORT, RESULTS = "report.html", "results.csv"
# Metric -> how a table and an axis call it, and digits behind the point.
_METRICS = {
    "nelbo": ("NELBO, nats a token", 3),
    "bits_per_byte": ("NELBO, bits a byte", 3),
    "nll": ("NLL of samples, nats a token", 3),
    "entropy": ("Entropy of tokens, nats", 2),
    "accuracy": ("Read as the wanted class, %", 1),
    "fid": ("FID on the judge's features", 2),
}
_SHORT = {
    "nelbo": "NELBO\nnats",
    "bits_per_byte": "NELBO\nbits/byte",
    "nll": "NLL",
    "fid": "FID",
    "accuracy": "right, %",
}
_DATA = "held-back data"
_GAP = 1  # pixels between digits


@dataclass(frozen=True)
class Report:
    """Where the page lies, and its result in short."""

    path: Path
    summary: str


def write_report(folder: Path, config: DemoConfig, outcomes: Sequence[Outcome]) -> Report:
    """Write ``results.csv``, the pictures and ``report.html`` into the folder.

    Raises:
        UserError: a file cannot be written.
    """
    machine = machine_line()
    write(folder / RESULTS, _csv(all_rows(outcomes), machine))
    summary = _QUICK if config.quick else _summary(outcomes)
    page = Page(
        "MDLM, XDLM and UDLM side by side",
        summary,
        {"machine": machine, "spotlights": __version__, "sets of samples": config.seeds, "quick": config.quick or None},
    )
    page.section("Likelihood", _LIKELIHOOD)
    with _saved(folder / "nelbo.png", height=1.1 + 1.0 * (len(outcomes) + 1) // 2 * 2, **_grid(outcomes)) as drawn:
        _draw_bounds(drawn[1], outcomes)
    page.figure(drawn[0], "NELBO of each model on each kind of data.", _BOUND_CAPTION)
    for outcome in outcomes:
        _write_part(page, folder, outcome, verdicts=not config.quick)
    page.section("How it was measured", _method(config, outcomes))
    return Report(page.save(folder / REPORT), summary)


_QUICK = "A quick run, after a few updates of each network: its figures mean nothing."
_LIKELIHOOD = (
    "The bound on the negative log-likelihood of held-back data: what a model understands. MDLM is meant to lead here, "
    "UDLM to lead in few-step samples, XDLM to stand between."
)
_BOUND_CAPTION = (
    "Lines: 95 % interval. Dashed: for the two sources their exact entropy, which no bound can beat; for text what the "
    "n-gram judge gives to the same bytes."
)


def _write_part(page: Page, folder: Path, outcome: Outcome, verdicts: bool) -> None:
    part = outcome.part
    page.section(part.title, f"{bound_verdict(outcome)}\n\n{verdict(outcome)}" if verdicts else "")
    for metric in _qualities(outcome):
        caption = f"{_METRICS[metric][0]} ({_of_data(outcome, metric)})"
        page.table(["", *(f"{steps} steps" for steps in part.steps)], _table(outcome, metric), caption)
    with _saved(folder / f"frontier-{part.name}.png", height=3.5, columns=2) as (figure, axes):
        for place, metric in zip(axes, _qualities(outcome), strict=True):
            _draw_lines(place, outcome, metric)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=9)
    shown = " and ".join(_METRICS[metric][0] for metric in _qualities(outcome))
    page.figure(figure, f"{shown} over the number of steps, one line a model.", "Bands: 95 % interval over samples.")
    if isinstance(part, DigitsPart):
        with _saved(folder / "digits.png", height=2.9, rows=2, columns=2) as (figure, axes):
            _draw_digits(axes.flatten(), outcome)
        page.figure(figure, "Generated digits of each class at each number of steps.", "Classes 0 to 9 from the left.")
        return
    rows = [
        [f"{METHODS[k]}, {steps} steps", part.text(torch.tensor(made))]
        for steps in (min(part.steps), max(part.steps))
        for k in METHODS
        for made in outcome.samples[k][steps][:1]
    ]
    assert part.data.test is not None
    rows.append([_DATA, part.text(part.data.test.tokens[0])])
    page.table(["", "one sample"], rows, "Samples, the first of each")


def _qualities(outcome: Outcome) -> tuple[str, str]:
    return ("fid", "accuracy") if isinstance(outcome.part, DigitsPart) else ("nll", "entropy")


def _format(value: float, metric: str) -> str:
    factor, digits = 100 if metric == "accuracy" else 1, _METRICS[metric][1]
    return f"{factor * value:.{digits}f}"


def _table(outcome: Outcome, metric: str) -> Iterator[list[object]]:
    for k, name in METHODS.items():
        yield [name, *(_format(outcome.value(metric, k, count)[0], metric) for count in outcome.part.steps)]


def _of_data(outcome: Outcome, metric: str) -> str:
    return f"{_DATA}: {_format(outcome.value(metric, None)[0], metric)}"


def _summary(outcomes: Sequence[Outcome]) -> str:
    parts = "; ".join(f"in {outcome.part.name} {shape(outcome)}" for outcome in outcomes)
    return (
        "The paper reports samples of k > 0 ahead of those of k = 0 at few steps and behind them at many. "
        f"That appears {parts}."
    )


def _method(config: DemoConfig, outcomes: Sequence[Outcome]) -> str:
    sizes = "; ".join(
        f"{outcome.part.name}: {outcome.part.training.steps:,} updates of {outcome.part.training.batch_size} sequences "
        f"of {outcome.part.length} tokens, {config.seeds} × {outcome.part.samples} samples"
        for outcome in outcomes
    )
    return (
        f"Four models a part, alike but for their noise. {sizes}. AdamW, cosine schedule, moving average of the "
        "weights. Seeds vary the samples, not the trainings: intervals say how far another draw of samples would move "
        "a figure, not another training.\n\n"
        "A source gives the exact likelihood of what a model generates; text is judged by an n-gram model of the "
        "training part. Low NLL alone is no praise: repetitions have it too, hence the entropy of tokens inside a "
        "sample beside it. Digits are generated for a wanted class with classifier-free guidance, from a model trained "
        "with class dropout, and judged by a small classifier: by how often it reads the wanted class, and by the "
        "Fréchet distance of its features to those of the training digits, which compares within this page only.\n\n"
        "Three k > 0 are compared with k = 0, and the margins allow for it (95 % for all three together, Bonferroni); "
        "what lies within is called level. The hidden Markov model was picked among five by short trials, as one that "
        "small models learn in half a minute. Models as small and as briefly trained as these need not rank as the "
        "paper's do."
    )


def _csv(rows: Sequence[Row], machine: str) -> str:
    text = io.StringIO()
    names = [entry.name for entry in fields(Row)]
    writer = csv.DictWriter(text, [*names, "method", "machine"], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        values = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(row).items()}
        writer.writerow({**values, "method": _DATA if row.k is None else METHODS[row.k], "machine": machine})
    return text.getvalue()


def show_tables(outcomes: Sequence[Outcome], *, verdicts: bool) -> None:
    """Print one table for each part, and what it says."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    for outcome in outcomes:
        part = outcome.part
        table = Table(title=part.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
        bound = "bits_per_byte" if any(row.metric == "bits_per_byte" for row in outcome.rows) else "nelbo"
        qualities = _qualities(outcome)
        table.caption = "; ".join(
            f"{_SHORT.get(metric, metric)} of {_of_data(outcome, metric)}" for metric in qualities
        )
        table.caption_justify = "left"
        table.add_column("", no_wrap=True)
        for title in (_SHORT[bound], "", *(f"{steps}\nsteps" for steps in part.steps)):
            table.add_column(title, justify="right", no_wrap=True)
        names = "\n".join(_SHORT.get(metric, metric) for metric in qualities)
        for k, name in METHODS.items():
            cells = (
                "\n".join(_format(outcome.value(metric, k, steps)[0], metric) for metric in qualities)
                for steps in part.steps
            )
            table.add_row(name, _format(outcome.value(bound, k)[0], bound), names, *cells)
        console.print(table)
        console.print(f"{bound_verdict(outcome)} {verdict(outcome)}\n" if verdicts else "")


@contextmanager
def _saved(path: Path, **options: Any) -> Iterator[tuple[Figure, Any]]:
    with new_figure(**options) as (figure, axes):
        yield figure, axes
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=160)


def _grid(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    columns = min(2, len(outcomes))
    return {"rows": -(-len(outcomes) // columns), "columns": columns, "squeeze": False}


def _colours() -> dict[float, str]:
    import matplotlib

    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return dict(zip(METHODS, cycle, strict=False))


def _draw_bounds(panels: Any, outcomes: Sequence[Outcome]) -> None:
    colours = _colours()
    for axes in panels.flatten()[len(outcomes) :]:
        axes.remove()
    for axes, outcome in zip(panels.flatten(), outcomes, strict=False):
        values = {k: outcome.value("nelbo", k) for k in METHODS}
        means = [value for value, _ in values.values()]
        errors = [1.96 * error for _, error in values.values()]
        places = range(len(METHODS))
        axes.barh(places, means, xerr=errors, height=0.62, color=[colours[k] for k in METHODS], ecolor="0.5")
        for place, (mean, error) in enumerate(zip(means, errors, strict=True)):
            axes.annotate(
                f"{mean:.3f}", (mean + error, place), (4, 0), textcoords="offset points", va="center", fontsize=9
            )
        if not isinstance(outcome.part, DigitsPart):
            axes.axvline(outcome.value("nll", None)[0], color="0.5", linestyle="--", linewidth=1.2)
        axes.set_yticks(places, [f"k = {k:g}" for k in METHODS])
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.grid(visible=False, axis="y")
        axes.set_title(outcome.part.name)
        axes.set_xlabel("NELBO, nats a token")


def _draw_lines(axes: Axes, outcome: Outcome, metric: str) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    steps = outcome.part.steps
    factor = 100 if metric == "accuracy" else 1
    for k, colour in _colours().items():
        found = np.array([outcome.value(metric, k, count) for count in steps]) * factor
        axes.plot(steps, found[:, 0], marker="o", markersize=4, color=colour, label=f"k = {k:g}")
        margin = 1.96 * found[:, 1]
        axes.fill_between(steps, found[:, 0] - margin, found[:, 0] + margin, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(factor * outcome.value(metric, None)[0], color="0.5", linestyle="--", linewidth=1.2, label=_DATA)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(steps))
    axes.xaxis.set_major_formatter(FixedFormatter([str(count) for count in steps]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("denoising steps")
    axes.set_title(_METRICS[metric][0], fontsize=10)


def _draw_digits(panels: Any, outcome: Outcome) -> None:
    steps = outcome.part.steps
    for axes, (k, name) in zip(panels, METHODS.items(), strict=True):
        rows = [pictures(torch.tensor(outcome.samples[k][count])).numpy() for count in steps]
        strips = [np.concatenate([np.pad(image, _GAP, constant_values=128) for image in row], axis=1) for row in rows]
        axes.imshow(np.concatenate(strips), cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        cell = SIDE + 2 * _GAP
        axes.set_yticks([(index + 0.5) * cell for index in range(len(steps))], [f"{count} steps" for count in steps])
        axes.set_xticks([(index + 0.5) * cell for index in range(CLASSES)], range(CLASSES))
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_title(name)
