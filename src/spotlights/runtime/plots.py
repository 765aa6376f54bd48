"""Pictures that every training draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from spotlights.runtime.runs import replacing


def plot_curves(rows: Sequence[Mapping[str, float]], path: str | Path, *, best_epoch: int | None = None) -> None:
    """Draw each metric of ``rows`` (one mapping an epoch, with ``epoch``) over the epochs and save a PNG.

    ``train_NAME`` and ``val_NAME`` share a panel; the learning rate has its own.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    panels: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        if key not in ("epoch", "seconds"):
            panels.setdefault(key.removeprefix("train_").removeprefix("val_"), []).append(key)
    figure = Figure(figsize=(4.2 * max(1, len(panels)), 3.4), layout="constrained", dpi=120)
    for index, (title, keys) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for key in keys:
            points = [(row["epoch"], row[key]) for row in rows if key in row]
            label = "validation" if key.startswith("val_") else "training"
            axes.plot(*zip(*points, strict=True), marker="o" if len(points) < 40 else "", markersize=3, label=label)
        if best_epoch is not None and any(key.startswith("val_") for key in keys):
            axes.axvline(best_epoch, color="0.6", linewidth=1, linestyle="--", label=f"best, epoch {best_epoch}")
        if len(axes.get_lines()) > 1:
            axes.legend(fontsize=8)
        axes.set_title({"lr": "learning rate"}.get(title, title), fontsize=10)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")
