"""The demo's tables, pictures and page, drawn from its result alone."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spotlights import __version__
from spotlights.runtime.bench import Timing
from spotlights.runtime.report import Page, new_figure
from spotlights.runtime.runs import replacing, write
from spotlights.runtime.statistics import bootstrap_difference, bootstrap_interval
from spotlights.wbmm.demo import NETWORKS, REPORT, TASKS, DemoResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = next(iter(NETWORKS))
_QUANTILE = 0.25
# The tasks named in the verdict and in the small picture.
_SHOWN = ("inference, batch 64", "training step, batch 64")


@dataclass(frozen=True)
class Report:
    """Where the page lies, and its one-sentence result."""

    path: Path
    summary: str


def write_report(folder: Path, result: DemoResult) -> Report:
    """Write ``accuracy.csv``, ``speed.csv``, the pictures and ``report.html`` into the folder.

    Raises:
        UserError: a file cannot be written.
    """
    write(folder / "accuracy.csv", _accuracy_csv(result))
    write(folder / "speed.csv", _speed_csv(result))
    images = result.correct[_OURS].shape[1]
    summary = _summary(result)
    page = Page(
        f"WBMM and depthwise convolutions on {images:,} test digits",
        summary,
        {"machine": result.machine, "spotlights": __version__, "seeds": result.config.seeds},
    )
    page.section("Accuracy", _ACCURACY)
    columns = ["network", "parameters", "accuracy", "95 % interval", "difference to WBMM, points", "ranked?"]
    page.table(columns, [*_accuracy_rows(result)], highlight=0)
    with _saved(folder / "accuracy.png", height=2.4) as (figure, axes):
        _draw_accuracy(axes, result)
    page.figure(figure, "Accuracy of each network with its 95 % interval.", "Bars: 95 % bootstrap interval.")
    page.section(
        "Learning curves",
        "First seed. The loss is that of the weights in training, the accuracy that of their moving average on the "
        "validation images, few enough for steps of half a percent.",
    )
    with _saved(folder / "curves.png", height=3.0, columns=2) as (figure, axes):
        _draw_curves(axes, result)
    page.figure(figure, "Training loss and validation accuracy of each network over the epochs.")
    page.section("Sample predictions", f"What {_OURS} reads (first seed): its errors first, then some it gets right.")
    page.gallery(_gallery(result))
    page.section("Speed", _SPEED)
    page.table(["images per second", *TASKS], [*_speed_rows(result)], highlight=0)
    with _saved(folder / "speed.png", height=3.0, columns=len(TASKS)) as (figure, axes):
        _draw_speed(axes, result)
    page.figure(figure, "Images per second of each network in inference and training.")
    page.section("How it was measured", _method(result))
    with _saved(folder / "summary.png", width=10.2, height=2.7, columns=3) as (_, axes):
        _draw_accuracy(axes[0], result)
        for panel, task in zip(axes[1:], _SHOWN, strict=True):
            _draw_bars(panel, result, task)
            panel.set_yticklabels([])
    return Report(page.save(folder / REPORT), summary)


_ACCURACY = (
    "The same network, data, recipe and seeds; only the operator of its W blocks differs. The interval says how far "
    "the accuracy would move with other test images, resampled 10,000 times. Where the interval of the paired "
    "difference holds 0, this test set does not rank the two, and neither does this page.\n\n"
    "A caution: the network's initialisation and layer scale were chosen by trying them with WBMM on these digits, "
    "which favours it, and the interval does not cover what another seed would change."
)
_SPEED = (
    "Images per second of the whole network, all networks timed in turn within one run, from the lower quartile of the "
    "times. Rounds in which a fixed control kernel ran slow were thrown away."
)


def _method(result: DemoResult) -> str:
    config = result.config
    limited = "" if config.limit is None else f" (here at most {config.limit} of each)"
    return (
        "Embedded digits: 4,000 for training, of which 5 % choose the epoch, and 1,000 for test, never used in "
        f"training{limited}. {config.epochs} epochs of AdamW, learning rate {config.lr}, batches of "
        f"{config.batch_size}, random rotation, shear, shift and zoom, label smoothing, moving average of the weights. "
        "The runs, with their settings, metrics and weights, lie beside this page under runs/.\n\n"
        "The depthwise networks keep everything else of the WBMM network. Small images say little about large ones: "
        "train on your own folder with `spotlights wbmm train --data FOLDER`."
    )


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _summary(result: DemoResult) -> str:
    ours = result.correct[_OURS]
    low, high = bootstrap_interval(ours)
    verdicts = {name: _verdict(ours, other) for name, other in result.correct.items() if name != _OURS}
    ranked = {
        side: " and ".join(name for name, verdict in verdicts.items() if verdict == found)
        for side, found in (("above", "worse"), ("below", "better"))
    }
    seeds = f", mean of {result.config.seeds} seeds" if result.config.seeds > 1 else ""
    rank = ", ".join(f"{side} {names}" for side, names in ranked.items() if names)
    rank = f"These test images rank it {rank}." if rank else "These test images do not rank it against the others."
    speeds = " and ".join(
        f"{_per_second(result, task, _OURS) / _per_second(result, task, 'DW 13x13'):.2f} ({task})" for task in _SHOWN
    )
    return (
        f"{_OURS} reads {_percent(ours.mean())} of the test digits (95 % interval {100 * low:.1f} to {100 * high:.1f}"
        f"{seeds}). {rank} Its speed relative to DW 13x13, whose kernel is as large as its table: {speeds}."
    )


def _verdict(ours: np.ndarray, other: np.ndarray) -> str:
    low, high = bootstrap_difference(other, ours)
    if low <= 0 <= high:
        return "no"
    return "better" if low > 0 else "worse"


def _accuracy_rows(result: DemoResult) -> Iterator[list[object]]:
    ours = result.correct[_OURS]
    for name, correct in result.correct.items():
        low, high = bootstrap_interval(correct)
        row: list[object] = [name, result.parameters[name], _percent(correct.mean())]
        row.append(f"{100 * low:.1f} to {100 * high:.1f}")
        if name == _OURS:
            row += [None, None]
        else:
            below, above = bootstrap_difference(correct, ours)
            row += [f"{100 * below:+.1f} to {100 * above:+.1f}", _verdict(ours, correct)]
        yield row


def _per_second(result: DemoResult, task: str, name: str) -> float:
    return TASKS[task] / _seconds(result.speeds[task][name])


def _seconds(timing: Timing) -> float:
    return timing.quantile(_QUANTILE)


def _speed_rows(result: DemoResult) -> Iterator[list[object]]:
    for name in NETWORKS:
        yield [name, *(f"{_per_second(result, task, name):,.0f}" for task in TASKS)]


def _csv(columns: list[str], rows: list[list[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([columns, *rows])
    return text.getvalue()


def _accuracy_csv(result: DemoResult) -> str:
    rows: list[list[object]] = []
    for name, correct in result.correct.items():
        low, high = bootstrap_interval(correct)
        for seed, right in enumerate(correct):
            seconds = result.seconds[name][seed]
            shared = [f"{correct.mean():.4f}", f"{low:.4f}", f"{high:.4f}", result.parameters[name]]
            rows.append([name, seed, len(right), int(right.sum()), f"{right.mean():.4f}", *shared, seconds])
    columns = (
        "network seed test_images correct accuracy mean_accuracy interval_low interval_high parameters train_seconds"
    )
    return _csv([*columns.split(), "epochs", "machine"], [[*row, result.config.epochs, result.machine] for row in rows])


def _speed_csv(result: DemoResult) -> str:
    rows: list[list[object]] = []
    for task, timings in result.speeds.items():
        for name, timing in timings.items():
            values = (timing.minimum, _seconds(timing), timing.median)
            rate = f"{TASKS[task] / _seconds(timing):.1f}"
            rows.append(
                [task, name, TASKS[task], *(f"{v:.6f}" for v in values), rate, timing.discarded, result.machine]
            )
    columns = (
        "task network batch min_seconds quartile_seconds median_seconds images_per_second discarded_rounds machine"
    )
    return _csv(columns.split(), rows)


@contextmanager
def _saved(path: Path, **options: Any) -> Iterator[tuple[Figure, Any]]:
    with new_figure(**options) as (figure, axes):
        yield figure, axes
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=160)


def _colours(axes: Axes) -> dict[str, str]:
    # One colour a network in every picture, ours the first.
    import matplotlib

    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]
    return dict(zip(NETWORKS, cycle, strict=False))


def _draw_accuracy(axes: Axes, result: DemoResult) -> None:
    colours = _colours(axes)
    names = list(result.correct)
    for position, name in enumerate(names):
        correct = result.correct[name]
        low, high = (100 * bound for bound in bootstrap_interval(correct))
        axes.plot([low, high], [position, position], color=colours[name], linewidth=3, alpha=0.45)
        axes.plot(100 * correct.mean(), position, "o", color=colours[name], markersize=7)
        if len(correct) > 1:
            seeds = 100 * correct.mean(axis=1)
            axes.plot(seeds, [position] * len(seeds), "|", color=colours[name], markersize=11)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("test accuracy, %")
    axes.set_title("Accuracy with 95 % interval")


def _draw_curves(panels: Any, result: DemoResult) -> None:
    colours = _colours(panels[0])
    for axes, key, title, factor in (
        (panels[0], "train_loss", "Training loss", 1),
        (panels[1], "val_accuracy", "Validation accuracy, %", 100),
    ):
        for name, history in result.histories.items():
            points = [(row["epoch"], factor * row[key]) for row in history if key in row]
            marker = "o" if len(points) < 3 else ""
            axes.plot(*zip(*points, strict=True), marker=marker, label=name, color=colours[name])
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
    # Most epochs lie near the end of the scale: the first ones would press them together.
    best = max(factor * row["val_accuracy"] for history in result.histories.values() for row in history)
    panels[1].set_ylim(bottom=max(0, min(90, best - 10)))
    panels[0].legend()


def _draw_bars(axes: Axes, result: DemoResult, task: str) -> None:
    colours = _colours(axes)
    rates = [_per_second(result, task, name) for name in NETWORKS]
    bars = axes.barh(list(NETWORKS), rates, color=[colours[name] for name in NETWORKS], height=0.62)
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates], padding=3, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.22)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("images per second")
    axes.set_title(task.capitalize().replace(", ", ",\n"))


def _draw_speed(panels: Any, result: DemoResult) -> None:
    for index, (axes, task) in enumerate(zip(panels, TASKS, strict=True)):
        _draw_bars(axes, result, task)
        axes.locator_params(axis="x", nbins=3)
        if index:
            axes.set_yticklabels([])


def _gallery(result: DemoResult, count: int = 12) -> Iterator[tuple[object, str, bool | None]]:
    evaluation = result.evaluation
    right = evaluation.predictions == evaluation.targets
    for index in [*_spread(~right, count), *_spread(right, count)]:
        truth, guess = int(evaluation.targets[index]), int(evaluation.predictions[index])
        chance = f"{100 * float(evaluation.probabilities[index, guess]):.0f} %"
        names = evaluation.class_names
        caption = f"{names[truth]}, {chance}" if truth == guess else f"{names[truth]} read as {names[guess]}, {chance}"
        yield result.images[index, 0].numpy(), caption, truth == guess


def _spread(chosen: torch.Tensor, count: int) -> list[int]:
    """Return at most so many of the true indices, evenly over all of them: the test images lie sorted by class."""
    indices = torch.nonzero(chosen).flatten()
    places = torch.linspace(0, max(0, len(indices) - 1), min(count, len(indices))).long()
    return indices[places].tolist()
