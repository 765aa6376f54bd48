"""The denoising of one sequence as a page that plays itself, or as a GIF."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spotlights.diffusion.recipes._animation_page import PAGE
from spotlights.diffusion.recipes.vocabulary import MASK, Vocabulary
from spotlights.runtime.errors import UserError
from spotlights.runtime.runs import replacing, write

if TYPE_CHECKING:
    from PIL import Image, ImageFont

SUFFIXES = (".html", ".gif")
BLOCK = "░"  # what a mask looks like
PLAIN, MASKED, NEW, REWRITTEN, GIVEN = range(5)
_MOST_GIF_FRAMES = 80
_COLUMNS = 72
_PAPER = (255, 255, 255)
# Text and background of a token by its state.
_COLOURS = {
    PLAIN: ((34, 38, 42), None),
    MASKED: ((176, 182, 188), None),
    NEW: ((18, 70, 40), (206, 238, 216)),
    REWRITTEN: ((110, 52, 4), (255, 226, 190)),
    GIVEN: ((28, 88, 163), None),
}


@dataclass(frozen=True)
class Frame:
    """One moment: the text of each token, and its state (`PLAIN`, `MASKED`, `NEW`, `REWRITTEN` or `GIVEN`)."""

    pieces: list[str]
    states: list[int]


def make_frames(history: Sequence[Tensor], observed: Tensor, vocabulary: Vocabulary) -> list[Frame]:
    """Return the frames of a denoising.

    Args:
        history: the sequence at each moment, (L,) int64, noise first.
        observed: (L,) bool, which tokens were given.
        vocabulary: of the tokens.

    Example:
        >>> from spotlights.diffusion.recipes.vocabulary import CharacterVocabulary
        >>> history = [torch.tensor([0, 3, 1]), torch.tensor([0, 1, 0])]
        >>> make_frames(history, torch.tensor([True, False, False]), CharacterVocabulary("ab"))[1]
        Frame(pieces=['a', 'b', 'a'], states=[4, 2, 3])
    """
    frames = []
    before = history[0]
    for tokens in history:
        pieces = vocabulary.pieces(tokens.tolist())
        states = torch.full_like(tokens, PLAIN)
        changed = tokens != before
        states[changed] = REWRITTEN
        states[changed & (before == vocabulary.mask_id)] = NEW
        states[tokens == vocabulary.mask_id] = MASKED
        states[observed] = GIVEN
        frames.append(Frame([BLOCK if piece == MASK else piece for piece in pieces], states.tolist()))
        before = tokens
    return frames


def write_animation(frames: Sequence[Frame], path: str | Path, *, title: str) -> None:
    """Write the frames as HTML or GIF, as the name of the file ends.

    Raises:
        UserError: another ending, or the file cannot be written.
    """
    suffix = check_suffix(path)
    if suffix == ".html":
        write(path, animation_page(frames, title))
    else:
        _write_gif(frames, Path(path))


def check_suffix(path: str | Path) -> str:
    """Return the ending of the name of an animation file; raise UserError for an unknown one."""
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(f"--animate: got {path}, expected a name that ends in {' or '.join(SUFFIXES)}")
    return suffix


def animation_page(frames: Sequence[Frame], title: str) -> str:
    """Return one HTML file without outer resources: a text that denoises itself, with a slider and a play button."""
    first = frames[0]
    changes: list[list[list[Any]]] = []
    for earlier, later in pairwise(frames):
        pairs = zip(earlier.pieces, later.pieces, earlier.states, later.states, strict=True)
        changes.append(
            [[i, new, state] for i, (old, new, was, state) in enumerate(pairs) if old != new or was != state]
        )
    data = json.dumps({"first": [first.pieces, first.states], "changes": changes}, ensure_ascii=False)
    # Text from a model may hold anything: no "<" may end the script element, and no filled-in text is filled in again.
    values = {
        "title": escape(title),
        "steps": str(len(frames) - 1),
        "text": escape("".join(frames[-1].pieces)),
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], PAGE)


def _write_gif(frames: Sequence[Frame], path: Path) -> None:
    from matplotlib import get_data_path
    from PIL import ImageFont

    if len(frames) > _MOST_GIF_FRAMES:
        chosen = torch.linspace(0, len(frames) - 1, _MOST_GIF_FRAMES).round().long().tolist()
        frames = [frames[index] for index in chosen]
    font = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/DejaVuSansMono.ttf", 15)
    placed = [_place(frame) for frame in frames]
    rows = 1 + max(row for cells in placed for row, *_ in cells)
    pictures = [_draw(cells, rows, font, number, len(frames)) for number, cells in enumerate(placed)]
    durations = [600, *[max(60, 4000 // len(frames))] * (len(frames) - 2), 3000][-len(frames) :]
    with replacing(path) as temporary:
        pictures[0].save(
            temporary, format="GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0, disposal=1
        )


_Cell = tuple[int, int, str, int]  # row, column, character, state


def _place(frame: Frame) -> list[_Cell]:
    cells: list[_Cell] = []
    row = column = 0
    for piece, state in zip(frame.pieces, frame.states, strict=True):
        for character in piece.expandtabs(4):
            if character == "\n":
                row, column = row + 1, 0
                continue
            if column == _COLUMNS:
                row, column = row + 1, 0
            cells.append((row, column, character if character.isprintable() else "\u00b7", state))
            column += 1
    return cells or [(0, 0, " ", PLAIN)]


def _draw(cells: list[_Cell], rows: int, font: ImageFont.FreeTypeFont, number: int, frames: int) -> Image.Image:
    from PIL import Image, ImageDraw

    width, height, margin = 9, 20, 14
    picture = Image.new("RGB", (_COLUMNS * width + 2 * margin, rows * height + 2 * margin + 6), _PAPER)
    pen = ImageDraw.Draw(picture)
    for row, column, character, state in cells:
        ink, ground = _COLOURS[state]
        x, y = margin + column * width, margin + row * height
        if ground is not None:
            pen.rectangle((x, y, x + width - 1, y + height - 2), fill=ground)
        if state == MASKED:
            pen.rectangle((x + 1, y + 4, x + width - 2, y + height - 6), fill=(226, 229, 232))
        else:
            pen.text((x, y), character, font=font, fill=ink)
    done = number / max(frames - 1, 1)
    pen.rectangle((0, picture.height - 4, round(picture.width * done), picture.height), fill=_COLOURS[GIVEN][0])
    return picture.quantize(64, dither=Image.Dither.NONE)
