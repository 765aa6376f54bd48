"""Texts to learn from: a file, a folder, a Hugging Face dataset on disk, or Python's own sources."""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotlights.runtime.errors import UserError, first_line

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}
_DATASET_FILES = ("dataset_dict.json", "state.json")
# Tests, tables and tools that read unlike the rest of the library, and what is not part of it.
_LEFT_OUT = {"encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}


@dataclass
class Documents:
    """The documents of each part: ``train``, ``val``, ``test``, or ``all`` where nothing divides them.

    ``skipped`` names the files that hold no text.
    """

    parts: dict[str, list[str]]
    skipped: list[str] = field(default_factory=list)


def read_documents(data: str | None, text_column: str = "text") -> Documents:
    """Read text.

    Args:
        data: a text file; a folder of them, with ``train``, ``val`` and ``test`` folders in it or not; a dataset that
            ``save_to_disk`` wrote; None for the sources of Python's standard library.
        text_column: of a dataset.

    Raises:
        UserError: it is missing, holds no text, or cannot be read.
    """
    if data is None:
        return Documents({"all": _standard_library()})
    path = Path(data)
    if os.path.isfile(data):  # unlike Path's, it takes any string
        documents = Documents({"all": [_read(path)]})
    elif not os.path.isdir(data):
        raise UserError(f"--data: {data or 'an empty name'} is missing")
    elif any((path / name).is_file() for name in _DATASET_FILES):
        documents = Documents(_dataset(path, text_column))
    else:
        documents = _folder(path)
    documents.parts = {name: [text for text in texts if text.strip()] for name, texts in documents.parts.items()}
    documents.parts = {name: texts for name, texts in documents.parts.items() if texts}
    if not documents.parts:
        why = f": {documents.skipped[0]}" if documents.skipped else ""
        raise UserError(f"--data: {data} holds no text{why}")
    if "train" not in documents.parts:
        documents.parts = {"all": [text for texts in documents.parts.values() for text in texts]}
    return documents


def _read(path: Path) -> str:
    try:
        # Opening a pipe would wait for its writer.
        if path.exists() and not path.is_file():
            raise UserError(f"{path}: neither a file nor a folder")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror or error}") from error
    marked = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if marked and not content.startswith(codecs.BOM_UTF32_LE):
        encoding = "utf-16"
    elif b"\0" in content[:8192]:
        raise UserError(f"{path}: a binary file, expected text")
    else:
        encoding = "utf-8-sig"
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not {encoding.removesuffix('-sig').upper()} text (byte {error.start})") from error
    return text.replace("\r\n", "\n")


def _folder(root: Path) -> Documents:
    names = {part: [root / name for name in names if (root / name).is_dir()] for part, names in PARTS.items()}
    places = {part: found for part, found in names.items() if found} if names["train"] else {"all": [root]}
    documents = Documents({})
    for part, folders in places.items():
        texts = []
        for path in (path for folder in folders for path in _files(folder)):
            try:
                texts.append(_read(path))
            except UserError as error:
                documents.skipped.append(str(error))
        documents.parts[part] = texts
    return documents


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(root, name) for name in sorted(files) if not name.startswith("."))


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_path("stdlib"))
    texts = []
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts[:-1]
        # The names of these files and folders, and what is in them, belong to the machine.
        local = path.name.startswith("_sysconfigdata") or any(part.startswith("config-") for part in inside)
        if not local and not _LEFT_OUT.intersection(inside):
            try:
                texts.append(_read(path))
            except UserError:
                continue  # a few sources are in other encodings
    if not texts:
        raise UserError("--data: this Python came without the sources of its library; name a text file or folder")
    return texts


def _dataset(path: Path, column: str) -> dict[str, list[str]]:
    import datasets

    try:
        loaded: Any = datasets.load_from_disk(str(path))
    # The library raises whatever its readers do.
    except Exception as error:
        raise UserError(f"--data: {path}: cannot load the dataset: {first_line(error)}") from error
    splits = loaded if isinstance(loaded, dict) else {"all": loaded}
    parts: dict[str, list[str]] = {}
    for name, split in splits.items():
        if column not in split.column_names:
            raise UserError(f"--text-column: got {column}, expected one of {', '.join(split.column_names)}")
        part = next((part for part, known in PARTS.items() if name in known), name)
        texts = split[column][:]
        if not all(text is None or isinstance(text, str) for text in texts):
            raise UserError(f"--text-column: {column} holds no text")
        parts.setdefault(part, []).extend(text for text in texts if text)
    return parts
