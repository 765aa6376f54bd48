"""What several verbs share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from spotlights.runtime.options import needs_extra

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


def needs_vision() -> AbstractContextManager[None]:
    """Turn the absence of an optional package into one line with its remedy."""
    return needs_extra({"vision": _EXTRAS, "vision,export": _EXPORT_EXTRAS})


def skipped_line(skipped: list[str]) -> Mapping[str, str]:
    """Return the summary's line on unreadable images, nothing where there are none."""
    if not skipped:
        return {}
    shown = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
    return {"skipped images": f"{len(skipped)} ({shown})"}
