"""What the verbs of every wing share in reading their options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from spotlights.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    import torch


def flag(name: str) -> str:
    """Return the option of a field.

    Example:
        >>> flag("batch_size")
        '--batch-size'
    """
    return f"--{name.replace('_', '-')}"


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise UserError unless an option's value is as expected.

    Example:
        >>> require(0 > 0, "lr", 0, "more than 0")
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: --lr: got 0, expected more than 0
    """
    if not condition:
        raise UserError(f"{flag(name)}: got {value}, expected {expected}")


def at_least(least: int, **values: int | None) -> None:
    """Raise UserError for an option below its least value; None passes."""
    for name, value in values.items():
        require(value is None or value >= least, name, value, f"at least {least}")


class Settings(Protocol):
    """A dataclass of a recipe's settings that can check itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def validate(self) -> None:
        """Raise UserError for a value out of range."""


S = TypeVar("S", bound=Settings)


def settings_from(kind: type[S], values: Mapping[str, Any]) -> S:
    """Return the settings that a run's ``config.yaml`` holds, checked.

    Raises:
        UserError: an unknown or ill-typed setting, or one out of range.
    """
    if unknown := set(values) - {entry.name for entry in fields(kind)}:
        raise UserError(f"config.yaml: unknown setting {', '.join(sorted(unknown))}")
    settings = kind(**values)
    try:
        settings.validate()
    except TypeError as error:
        raise UserError(f"config.yaml: a setting of the wrong type: {error}") from error
    return settings


@contextmanager
def needs_extra(extras: Mapping[str, Collection[str]]) -> Iterator[None]:
    """Turn the absence of an optional package into one line with its remedy.

    Args:
        extras: name of an extra of this package -> the modules that it brings.

    Example:
        >>> with needs_extra({"text": ("transformers",)}):
        ...     raise ModuleNotFoundError(name="transformers.models")
        Traceback (most recent call last):
        ...
        spotlights.runtime.errors.UserError: this command needs transformers; remedy: pip install 'spotlights[text]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        extra = next((name for name, modules in extras.items() if module in modules), None)
        if extra is None:
            raise
        raise UserError(f"this command needs {module}; remedy: pip install 'spotlights[{extra}]'") from error


def find_device(name: str) -> torch.device:
    """Return the torch device that ``--device`` names.

    Raises:
        UserError: there is no such device here.
    """
    import torch

    try:
        return torch.empty(0, device=name).device
    # Builds without a device raise AssertionError, others RuntimeError or NotImplementedError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device: {name}: {first_line(error)}") from error
