"""What several verbs share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from spotlights.runtime.errors import UserError

_EXTRAS = (
    "timm",
    "torchvision",
    "lightning",
    "torchmetrics",
    "matplotlib",
    "rich",
    "yaml",
    "safetensors",
    "PIL",
    "mlxtend",
)
_EXPORT_EXTRAS = ("onnx", "onnxscript", "onnxruntime")


@contextmanager
def needs_vision() -> Iterator[None]:
    """Turn the absence of an optional package into one line with its remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS + _EXPORT_EXTRAS:
            raise
        extra = "vision,export" if package in _EXPORT_EXTRAS else "vision"
        raise UserError(f"this command needs {package}; remedy: pip install 'spotlights[{extra}]'") from error


def flag(name: str) -> str:
    """Return the option of a field: ``batch_size`` is ``--batch-size``."""
    return f"--{name.replace('_', '-')}"


def at_least(least: int, **values: int | None) -> None:
    """Raise UserError for an option below its least value; None passes."""
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{flag(name)}: got {value}, expected at least {least}")


def skipped_line(skipped: list[str]) -> Mapping[str, str]:
    """Return the summary's line on unreadable images, nothing where there are none."""
    if not skipped:
        return {}
    shown = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
    return {"skipped images": f"{len(skipped)} ({shown})"}
