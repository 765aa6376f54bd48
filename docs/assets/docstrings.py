"""Makes the site's Markdown of what docstrings write for a terminal: roles, literal blocks, the Example section."""

import re
from typing import Any

import griffe

_RULES = [
    (re.compile(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`"), r"`\1`"),
    (re.compile(r"(?<=\S)::(?=\n\n)"), ":"),
    (re.compile(r"^Example:$", re.MULTILINE), "Examples:"),
]


class Markdown(griffe.Extension):
    """Rewrites docstrings as they are collected."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one object's docstring."""
        if obj.docstring is not None:
            for pattern, replacement in _RULES:
                obj.docstring.value = pattern.sub(replacement, obj.docstring.value)
