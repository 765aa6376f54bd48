"""What the verbs of every wing share in reading their options."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

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
    hints = get_type_hints(kind)
    if unknown := sorted(str(name) for name in values if name not in hints):
        raise UserError(f"config.yaml: unknown setting {', '.join(unknown)}")
    for name, value in values.items():
        hint = hints[name]
        kinds = [get_origin(each) or each for each in (get_args(hint) if isinstance(hint, UnionType) else (hint,))]
        # A whole number will do for any number, but a truth value is none.
        if type(value) not in kinds and not (type(value) is int and float in kinds):
            expected = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise UserError(f"config.yaml: {name}: got {value!r}, expected {expected}")
    settings = kind(**values)
    settings.validate()
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
        found = torch.zeros(1, device=name)
        found.tolist()  # the meta device holds no values
        return found.device
    # Builds without a device raise AssertionError, others RuntimeError or NotImplementedError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device: {name}: {first_line(error)}") from error
