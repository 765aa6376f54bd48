"""The confusion matrix as a picture."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from spotlights.runtime.runs import replacing

_WIDE_FONTS = (
    "DejaVu Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans",
    "Apple SD Gothic Neo",
    "Microsoft YaHei",
    "SimHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Nirmala UI",
    "Noto Sans Devanagari",
    "Arial Unicode MS",
)


def plot_confusion(confusion: np.ndarray, class_names: Sequence[str], path: str | Path, *, title: str = "") -> None:
    """Draw a confusion matrix, (K, K) counts by true (rows) and predicted class, and save a PNG.

    Colours are parts of each row; counts are written in up to 20 classes, names along both axes in up to 100. A name
    with letters that no installed font has is shown by its number.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    count = len(class_names)
    families, labels = _printable(class_names)
    longest = max(map(len, labels))
    cell = 0.55 if count <= 12 else 0.42 if count <= 20 else 0.19 if count <= 100 else 8 / count
    font = 9 if count <= 12 else 8 if count <= 20 else 6.5
    side = max(cell * count, 1.6)
    margin = 0.9 + (0.6 * longest * font / 72 if count <= 100 else 0.3)
    with rc_context({"font.family": families}):
        figure = Figure(figsize=(side + margin + 1.1, side + margin + 0.6), layout="constrained", dpi=120)
        axes = figure.add_subplot()
        totals = confusion.sum(axis=1, keepdims=True)
        image = axes.imshow(confusion / np.maximum(totals, 1), cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, ax=axes, label="part of the true class", fraction=0.046)
        if count <= 100:
            upright = longest <= 2 and count <= 20
            axes.set_xticks(range(count), labels, rotation=0 if upright else 90, fontsize=font, parse_math=False)
            axes.set_yticks(range(count), labels, fontsize=font, parse_math=False)
        if count <= 20:
            for (row, column), value in np.ndenumerate(confusion):
                if value:
                    dark = value > 0.5 * totals[row, 0]
                    text = f"{value}"
                    size = min(font, 72 * cell * 0.9 / (0.62 * len(text)))
                    axes.text(column, row, text, ha="center", va="center", fontsize=size, color="w" if dark else "k")
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        if title:
            axes.set_title(title, fontsize=10)
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", bbox_inches="tight", pad_inches=0.1)


def _printable(class_names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the installed font families that the names need, and the names as they can be drawn."""
    from matplotlib import font_manager

    installed = {entry.name: entry.fname for entry in font_manager.fontManager.ttflist}
    wanted = {character for name in class_names for character in name if not character.isspace()}
    families: list[str] = []
    covered: set[str] = set()
    for family in _WIDE_FONTS:
        if family in installed and not (families and wanted <= covered):
            known = font_manager.get_font(installed[family]).get_charmap()
            added = {character for character in wanted if ord(character) in known}
            if not families or added - covered:
                families.append(family)
                covered |= added
    labels = []
    for number, name in enumerate(class_names):
        drawable = all(c in covered or c.isspace() or unicodedata.combining(c) for c in name)
        short = name if len(name) <= 24 else name[:23] + "…"
        labels.append(short if drawable and name.strip() else f"#{number}")
    return families, labels
