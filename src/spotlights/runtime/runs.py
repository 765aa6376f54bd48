"""Run folders: a training's config, metrics, weights and pictures in one place, every file whole or absent."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spotlights.runtime.errors import UserError

CONFIG = "config.yaml"
_SHARED_NAME = "SPOTLIGHTS_RUN_FOLDER"


def is_rank_zero() -> bool:
    """Tell whether this process writes: the only one, or the first of a distributed run."""
    return all(os.environ.get(name, "0") == "0" for name in ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK"))


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` and rename it to ``path`` once the block has ended well.

    Raises:
        UserError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "notes.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write(path: str | Path, data: bytes | str) -> None:
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def write_json(path: str | Path, value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_config(folder: Path, kind: str, config: Mapping[str, Any]) -> None:
    """Write the resolved settings of a run; ``kind`` says which recipe reads them back.

    Raises:
        UserError: the file cannot be written.
    """
    import yaml

    write(folder / CONFIG, yaml.safe_dump({"kind": kind, **config}, sort_keys=False, allow_unicode=True))


def read_config(folder: str | Path, kind: str) -> dict[str, Any]:
    """Return the settings that :func:`write_config` stored.

    Raises:
        UserError: the folder is missing, holds no run, or a run of another kind.
    """
    import yaml

    path = Path(folder) / CONFIG
    if not path.is_file():
        what = "not a run folder (no config.yaml in it)" if path.parent.is_dir() else "no such folder"
        raise UserError(f"{folder}: {what}")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: unreadable: {str(error).splitlines()[0]}") from error
    found = config.pop("kind", None) if isinstance(config, dict) else None
    if found != kind:
        raise UserError(f"{folder}: a run of kind {found!r}, expected {kind!r}")
    return config


@contextmanager
def new_folder(path: str | Path | None, prefix: str) -> Iterator[Path]:
    """Yield an empty run folder, ``runs/PREFIX-TIME`` unless ``path`` names one, and remove it if nothing came of it.

    Processes of a distributed run other than the first take the folder that the first one made.

    Raises:
        UserError: the folder holds something already, or cannot be made.
    """
    if not is_rank_zero():
        yield Path(os.environ.get(_SHARED_NAME) or path or ".")
        return
    try:
        folder = _fresh_folder(prefix) if path is None else Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        content = next(folder.iterdir(), None)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {error.filename}: {error.strerror}") from error
    if (folder / CONFIG).exists():
        raise UserError(f"--out: {folder} already holds a run; go on with it by --resume {folder}, or name another")
    if content is not None:
        raise UserError(f"--out: {folder} is not empty (it holds {content.name}); name a new folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--out: cannot write in {folder}: permission denied")
    os.environ[_SHARED_NAME] = str(folder)
    try:
        yield folder
    except UserError:
        # Settings alone are no run; the name is free again.
        if [path.name for path in folder.iterdir()] == [CONFIG]:
            (folder / CONFIG).unlink()
        raise
    finally:
        os.environ.pop(_SHARED_NAME, None)
        with suppress(OSError):
            folder.rmdir()


def claim_folder(folder: Path, settings_file: str, settings: Mapping[str, Any]) -> None:
    """Make a folder for several runs that a repeated command goes on with, or check that it belongs to that command.

    Args:
        folder: new, empty, or claimed before by the same settings.
        settings_file: name of the JSON file in it that says whose it is.
        settings: plain values.

    Raises:
        UserError: the folder holds something else, or cannot be used.
    """
    path = folder / settings_file
    if path.is_file():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: unreadable ({error}); name another folder by --out") from error
        if found != settings:
            raise UserError(f"--out: {folder} holds a demo with other settings ({found}); name another folder")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = next(folder.iterdir(), None)
    except OSError as error:
        raise UserError(f"--out: cannot use the folder {folder}: {error.strerror}") from error
    if content is not None:
        raise UserError(f"--out: {folder} is not empty (it holds {content.name}); name a new folder")
    write_json(path, settings)


def _fresh_folder(prefix: str) -> Path:
    base = Path("runs") / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1000):
        folder = base if number == 0 else base.with_name(f"{base.name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise UserError(f"--out: {base} and a thousand like it exist already")


def remove_temporaries(folder: Path) -> None:
    """Delete what a killed run left half-written under its temporary names."""
    for path in folder.glob(".*.tmp*"):
        with suppress(OSError):
            path.unlink()
