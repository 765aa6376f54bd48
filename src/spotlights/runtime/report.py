"""The self-contained HTML page that demos and benchmarks write: one file, no external resource, light and dark."""

from __future__ import annotations

import base64
import contextlib
import io
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spotlights import __version__
from spotlights.runtime._report_style import CSS
from spotlights.runtime.runs import write

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL import Image

_INK, _INK_DARK = "#22262a", "#e4e6e8"
_FAINT, _FAINT_DARK = "#d3d7db", "#43484d"
_SERIES = ("#2b7fc9", "#d8701f", "#2c9c67", "#ab5fc0", "#94832f", "#cf4d76")  # legible on white and on near-black
_FIGURE_STYLE: Any = {
    "figure.facecolor": "white",
    "axes.facecolor": "none",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "text.color": _INK,
    "font.size": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "image.cmap": "Blues",
    "svg.hashsalt": "spotlights",
}
_OURS = "spotlights"  # gid of figures that can be redrawn in the page's dark colours

_NUMBER = re.compile(r"[<>≤≥≈~±+\-−]*\s*\d")
_FIGURE_SCALE = 2  # pixels per CSS pixel for pictures shown below their own size
_CELL_SMALL, _CELL_LARGE = 112, 176  # CSS pixels across one gallery picture


class Page:
    """A report: title and summary on top, then what is added, in order; `save` writes one HTML file.

    All text is escaped. Sections are optional; what is added before the first one stands below the summary.

    Args:
        title: heading of the page.
        summary: the result, in a sentence or two.
        facts: name -> value, shown small below the summary: machine, versions, seed, command.
        lang: language of the page's text, a BCP 47 tag.

    Example:
        >>> page = Page("WBMM on 5,000 digits", "It reads 98.7 % of them.", {"torch": "2.14"})
        >>> page.section("Accuracy", "On 1,000 test images.")
        >>> page.table(["network", "accuracy"], [["WBMM", "98.7 %"], ["DW 5x5", "98.1 %"]], highlight=0)
        >>> page.html().count("<table>")
        1
    """

    def __init__(
        self, title: str, summary: str = "", facts: Mapping[str, object] | None = None, *, lang: str = "en"
    ) -> None:
        self.title = title
        self.summary = summary
        self.facts = dict(facts or {})
        self.lang = lang
        self._parts: list[str] = []
        self._sections = 0

    def section(self, title: str, text: str = "") -> None:
        """Start a section; ``text`` as in `text`."""
        if self._sections:
            self._parts.append("</section>")
        self._sections += 1
        name = f"section-{self._sections}"
        self._parts.append(f'<section aria-labelledby="{name}">\n<h2 id="{name}">{escape(title)}</h2>')
        self.text(text)

    def text(self, text: str) -> None:
        """Add text; blank lines part paragraphs."""
        self._parts += [f"<p>{escape(paragraph.strip())}</p>" for paragraph in text.split("\n\n") if paragraph.strip()]

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        caption: str | None = None,
        highlight: int | Collection[int] | None = None,
    ) -> None:
        """Add a table; the first column names the rows, columns of numbers are set flush right.

        Args:
            columns: headings.
            rows: one value per heading; floats are shown to four digits, None as a dash, strings as they are.
            caption: shown above the table.
            highlight: index or indices of rows to stress (bold, with a mark at the edge).

        Raises:
            ValueError: a row's length differs from ``columns``, or ``highlight`` names a row that is not there.
        """
        table = [list(row) for row in rows]
        for index, row in enumerate(table):
            if len(row) != len(columns):
                raise ValueError(f"rows: row {index} has {len(row)} values, expected {len(columns)} as in columns")
        marked = {highlight} if isinstance(highlight, int) else set(highlight or ())
        if not marked <= set(range(len(table))):
            raise ValueError(f"highlight: got {sorted(marked)}, expected indices of the {len(table)} rows")
        numeric = [bool(column) and all(map(_is_number, column)) for column in zip(*table, strict=True)]
        numeric = numeric or [False] * len(columns)
        classes = ["", *(' class="number"' if is_number else "" for is_number in numeric[1:])]
        head = "".join(
            f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(columns, classes, strict=True)
        )
        body = []
        for index, row in enumerate(table):
            cells = [f'<th scope="row">{escape(_format(row[0]))}</th>']
            cells += [
                f"<td{kind}>{escape(_format(cell))}</td>" for cell, kind in zip(row[1:], classes[1:], strict=True)
            ]
            body.append(("<tr class=highlight>" if index in marked else "<tr>") + "".join(cells) + "</tr>")
        label = escape(caption or "Table: " + ", ".join(columns))
        # A wide table scrolls inside its frame; the frame takes focus so that the keyboard can scroll it.
        self._parts.append(
            '<figure class="table">'
            + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
            + f'<div class="scroll" role="region" aria-label="{label}" tabindex="0"><table>'
            + f"\n<thead><tr>{head}</tr></thead>\n<tbody>\n"
            + "\n".join(body)
            + "\n</tbody></table></div></figure>"
        )

    def figure(self, figure: Figure, alt: str, caption: str = "") -> None:
        """Add a matplotlib figure as SVG; those made by `new_figure` follow the page into dark mode.

        Args:
            figure: drawn at its own size, narrower where the window is.
            alt: what the figure shows, for readers who do not see it.
            caption: shown below.

        Raises:
            ValueError: ``alt`` is empty.
        """
        if not alt.strip():
            raise ValueError("alt: got an empty text, expected what the figure shows")
        light, dark = _figure_svg(figure)
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
        source = f'<source media="screen and (prefers-color-scheme: dark)" srcset="{dark}">' if dark else ""
        image = f'<img src="{light}" alt="{escape(alt)}" width="{width}" height="{height}">'
        self._parts.append(
            f"<figure{'' if dark else ' class=plain'}><picture>{source}{image}</picture>"
            + (f"<figcaption>{escape(caption)}</figcaption>" if caption else "")
            + "</figure>"
        )

    def gallery(self, items: Iterable[tuple[object, str, bool | None]]) -> None:
        """Add small pictures with their captions side by side, such as predictions.

        Args:
            items: (picture, caption, good). The picture is a PIL image or an array, (H, W) or (H, W, 1, 3 or 4), uint8
                or float in [0, 1]; tiny ones are enlarged with hard pixel edges. ``good`` marks it as right or wrong
                in words; None leaves it unmarked.

        Raises:
            ValueError: an array of another shape. TypeError: of another dtype.
        """
        pictures = [(_image(picture), caption, good) for picture, caption, good in items]
        if not pictures:
            return
        tiny = all(2 * max(image.size) <= _CELL_SMALL for image, _, _ in pictures)
        cell = _CELL_SMALL if tiny else _CELL_LARGE
        self._parts.append(f'<ul class="gallery" style="--cell:{cell}px">')
        for image, caption, good in pictures:
            mark, verdict = {True: ("✓", "right"), False: ("✗", "wrong"), None: ("", "")}[good]
            spoken = ": ".join(filter(None, [verdict, caption])) or "picture"
            self._parts.append(
                f"<li{f' class={verdict}' if verdict else ''}>{_gallery_image(image, cell, spoken)}"
                f'<span class="caption">{escape(caption)}</span>'
                + (f'<span class="verdict"><span aria-hidden="true">{mark}</span> {verdict}</span>' if verdict else "")
                + "</li>"
            )
        self._parts.append("</ul>")

    def html(self) -> str:
        """Return the page."""
        facts = "".join(
            f"<div><dt>{escape(name)}</dt> <dd>{escape(_format(value))}</dd></div>"
            for name, value in self.facts.items()
        )
        body = "\n".join(self._parts) + ("\n</section>" if self._sections else "")
        return f"""<!doctype html>
<html lang="{escape(self.lang)}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="spotlights {__version__}">
<title>{escape(self.title)}</title>
<style>
{CSS}</style>
</head>
<body>
<header>
<h1>{escape(self.title)}</h1>
{f'<p class="summary">{escape(self.summary)}</p>' if self.summary else ""}
{f'<dl class="facts">{facts}</dl>' if facts else ""}
</header>
<main>
{body}
</main>
<footer><p>Written by spotlights {__version__}.</p></footer>
</body>
</html>
"""

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the page, whole or not at all, and return its path.

        Raises:
            UserError: the file cannot be written.
        """
        target = Path(path)
        write(target, self.html())
        return target


@contextlib.contextmanager
def new_figure(
    width: float = 6.8, height: float = 3.6, rows: int = 1, columns: int = 1, **subplots: Any
) -> Iterator[tuple[Figure, Any]]:
    """Open a matplotlib figure in the pages' style, without pyplot; draw inside the ``with`` block.

    Args:
        width: in inches; 6.8 fills a page's column.
        height: in inches.
        rows: of axes.
        columns: of axes.
        **subplots: further arguments of ``Figure.subplots``.

    Yields:
        The figure and its axes (an array where there are several). ``figure.savefig`` gives white paper; `Page.figure`
        also a dark version, in which only text, frames and grid change their colours.

    Example:
        >>> with new_figure() as (figure, axes):
        ...     _ = axes.plot([1, 2, 3], label="loss")
        >>> page = Page("Curves")
        >>> page.figure(figure, alt="The loss rises from 1 to 3.")
    """
    import matplotlib
    from cycler import cycler
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_FIGURE_STYLE, "axes.prop_cycle": cycler(color=_SERIES)}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.set_gid(_OURS)
        yield figure, figure.subplots(rows, columns, **subplots)
        figure.draw_without_rendering()  # ticks are made at the first draw, from the style of that moment


def _figure_svg(figure: Figure) -> tuple[str, str | None]:
    import matplotlib

    ours = figure.get_gid() == _OURS
    options: dict[str, Any] = {"facecolor": "none"} if ours else {}
    buffer = io.StringIO()
    with matplotlib.rc_context(_FIGURE_STYLE if ours else {"svg.hashsalt": "spotlights"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, dpi=96 * _FIGURE_SCALE, **options)
    svg = buffer.getvalue()
    dark = svg.replace(_INK, _INK_DARK).replace(_FAINT, _FAINT_DARK)
    return _svg_uri(svg), _svg_uri(dark) if ours else None


def _svg_uri(svg: str) -> str:
    return _data_uri("image/svg+xml", svg.encode())


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(_NUMBER.match(value))) or _plain_number(value) is not None


def _plain_number(value: object) -> int | float | None:
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _format(value: object) -> str:
    if value is None:
        return "–"
    number = _plain_number(value)
    if number is None:
        return str(value)
    if isinstance(number, float) and (not math.isfinite(number) or abs(number) < 1000):
        return f"{number:.4g}"
    return f"{number:,.0f}"


def _image(picture: object) -> Image.Image:
    from PIL import Image

    if isinstance(picture, Image.Image):
        return picture
    array = np.asarray(picture)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.size == 0 or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise ValueError(f"items: got a picture of shape {array.shape}, expected (H, W) or (H, W, 1, 3 or 4)")
    if np.issubdtype(array.dtype, np.floating):
        array = (array.clip(0, 1) * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise TypeError(f"items: got a picture of dtype {array.dtype}, expected uint8 or float in [0, 1]")
    return Image.fromarray(array)


def _gallery_image(image: Image.Image, cell: int, alt: str) -> str:
    longest = max(image.size)
    enlarge = cell // longest
    scale = enlarge if enlarge >= 2 else cell / longest
    width, height = (max(1, round(side * scale)) for side in image.size)
    if longest > _FIGURE_SCALE * cell:
        image = image.copy()
        image.thumbnail((_FIGURE_SCALE * cell,) * 2)
    if image.mode not in ("L", "LA", "RGB", "RGBA"):
        image = image.convert("RGBA" if image.mode == "P" and "transparency" in image.info else "RGB")
    buffer = io.BytesIO()
    if enlarge >= 2 or image.mode.endswith("A"):
        image.save(buffer, "PNG", optimize=True)
        kind = "image/png"
    else:
        image.save(buffer, "JPEG", quality=88)
        kind = "image/jpeg"
    crisp = ' class="crisp"' if enlarge >= 2 else ""
    uri = _data_uri(kind, buffer.getvalue())
    return f'<img src="{uri}" alt="{escape(alt)}" width="{width}" height="{height}"{crisp}>'
