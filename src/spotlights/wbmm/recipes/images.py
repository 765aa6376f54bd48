"""Image files of any kind, read into the two kinds a network takes: 8-bit grey and 8-bit RGB."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from spotlights.runtime.errors import UserError, first_line

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".apng", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
    | {".pnm", ".avif", ".jp2"}
)
_GREY = {"1", "L", "LA", "La", "I", "F"}


def is_grey(image: Image.Image) -> bool:
    """Tell whether an image holds grey values only, by its mode."""
    return image.mode in _GREY or image.mode.startswith("I;16")


def read_image(path: str | Path, channels: int | None = None) -> Image.Image:
    """Return an image as 8-bit grey (``channels=1``), RGB (3), or as it is stored (None: one of the two).

    EXIF rotation is applied, 16-bit and floating-point values are scaled to 8 bits, transparency is laid on white,
    palettes, CMYK and the like become RGB, and of an animation the first frame counts.

    Raises:
        UserError: the file is missing, damaged, truncated, or no image.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as opened:
                opened.load()
                image = ImageOps.exif_transpose(opened)
            return _as_8_bit(image, channels)
    # Decoders fail in many ways on damaged files (zlib, struct, Syntax, Type, Memory errors); all mean the same.
    except Exception as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else _reason(error)
        raise UserError(f"{path}: cannot read the image: {reason}") from error


def _as_8_bit(image: Image.Image, channels: int | None) -> Image.Image:
    grey = is_grey(image)
    if image.mode == "F" or image.mode.startswith("I"):
        image = _scaled_to_8_bit(image)
    if image.mode == "P" and "transparency" not in image.info:
        image = image.convert("RGB")
    elif image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    target = "L" if channels == 1 or (channels is None and grey) else "RGB"
    return image if image.mode == target else image.convert(target)


def _scaled_to_8_bit(image: Image.Image) -> Image.Image:
    values = np.nan_to_num(np.asarray(image, dtype=np.float64))
    if image.mode == "F":
        factor = 255.0 if values.max(initial=0) <= 1 else 1.0
    else:
        factor = 1 / 257 if image.mode != "I" or values.max(initial=0) > 255 else 1.0
    return Image.fromarray(np.clip(np.rint(values * factor), 0, 255).astype(np.uint8))


def _reason(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "not an image, or damaged"
    return first_line(error)


def images_in(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted, hidden files and folders left out."""
    found = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    return sorted(path for path in found if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def expand(patterns: Iterable[str | Path]) -> list[Path]:
    """Return the image files that files, folders and globs name, in order, each once.

    Raises:
        UserError: an argument names nothing, or a folder without images.
    """
    paths: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            found = images_in(path)
        elif path.exists():
            found = [path]
        else:
            matches = sorted(Path(match) for match in glob.glob(str(pattern), recursive=True))
            found = [image for match in matches for image in (images_in(match) if match.is_dir() else [match])]
        if not found:
            raise UserError(
                f"{pattern}: " + ("no images in this folder" if path.is_dir() else "no such file or folder")
            )
        paths.update(dict.fromkeys(found))
    return list(paths)
