"""Choosing among several ways of computing one operator.

A backend answers one question, "why can you not run this call?"; the choice, the listing and the error message all come
from that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Call = TypeVar("Call")


@dataclass(frozen=True)
class Backend(Generic[Call]):
    """One way of computing an operator.

    Attributes:
        name: what users write as ``backend=name``.
        summary: one line for tables.
        why_not: maps a call to the reason why this backend cannot run it, or to None when it can.
        functions: the module or object that holds the implementations.
    """

    name: str
    summary: str
    why_not: Callable[[Call], str | None]
    functions: object


class Backends(Generic[Call]):
    """The backends of one operator, in order of preference.

    Example:
        >>> even = Backend("halves", "splits in two", lambda n: "n is odd" if n % 2 else None, None)
        >>> any_ = Backend("plain", "runs always", lambda n: None, None)
        >>> backends = Backends("op", [even, any_])
        >>> backends.select(4).name, backends.select(3).name
        ('halves', 'plain')
        >>> backends.select(3, "halves")
        Traceback (most recent call last):
        ...
        ValueError: op: backend='halves' cannot run this call: n is odd
    """

    def __init__(self, operator: str, backends: Iterable[Backend[Call]]) -> None:
        self.operator = operator
        self._backends = {backend.name: backend for backend in backends}

    def __iter__(self) -> Iterator[Backend[Call]]:
        return iter(self._backends.values())

    def __getitem__(self, name: str) -> Backend[Call]:
        """Return the backend called ``name``; raises ValueError with the known names otherwise."""
        try:
            return self._backends[name]
        except KeyError:
            known = ", ".join(map(repr, self._backends))
            raise ValueError(f"{self.operator}: backend: got {name!r}, expected None or one of {known}") from None

    def select(self, call: Call, name: str | None = None) -> Backend[Call]:
        """Return the backend called ``name``, or the first that can run ``call``; raises ValueError with the reason."""
        if name is not None:
            backend = self[name]
            if reason := backend.why_not(call):
                raise ValueError(f"{self.operator}: backend={name!r} cannot run this call: {reason}")
            return backend
        reasons = []
        for backend in self:
            reason = backend.why_not(call)
            if reason is None:
                return backend
            reasons.append(f"{backend.name}: {reason}")
        raise ValueError(f"{self.operator}: no backend can run this call ({'; '.join(reasons)})")
