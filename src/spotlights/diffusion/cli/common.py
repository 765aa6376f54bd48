"""What several verbs share."""

from __future__ import annotations

from contextlib import AbstractContextManager

from spotlights.runtime.options import needs_extra

_TEXT = (
    "transformers",
    "tokenizers",
    "datasets",
    "lightning",
    "matplotlib",
    "rich",
    "yaml",
    "safetensors",
    "PIL",
    "mlxtend",
)


def needs_text() -> AbstractContextManager[None]:
    """Turn the absence of a package of the ``text`` extra into one line with its remedy."""
    return needs_extra({"text": _TEXT})
