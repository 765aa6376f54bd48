"""Checks of arguments that the functions of this wing share; each error names the argument and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

PARAMETERIZATIONS = ("loo", "denoiser")
Generators = torch.Generator | Sequence[torch.Generator] | None


def check_count(name: str, value: int, least: int = 1) -> None:
    """Raise for a count that is no integer, or below ``least``."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name}: got {value!r}, expected an integer")
    if value < least:
        raise ValueError(f"{name}: got {value}, expected at least {least}")


def check_tensor(name: str, value: Tensor, device: torch.device | None = None) -> None:
    """Raise for what is no tensor, or not on ``device``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a tensor")
    if device is not None and value.device != device:
        raise ValueError(f"{name}: got device {value.device}, expected {device} as the tokens have")


def check_tokens(name: str, tokens: Tensor, vocab_size: int, like: Tensor | None = None) -> None:
    """Raise for tokens that are no (B, L) integers in [0, vocab_size), or not of the shape and device of ``like``."""
    check_tensor(name, tokens, None if like is None else like.device)
    shape = None if like is None else like.shape
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: got dtype {tokens.dtype}, expected int64")
    if tokens.ndim != 2 or (shape is not None and tokens.shape != shape):
        expected = "(batch, length)" if shape is None else f"{tuple(shape)}"
        raise ValueError(f"{name}: got shape {tuple(tokens.shape)}, expected {expected}")
    if tokens.numel():
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{name}: got token {low if low < 0 else high}, expected ids from 0 to {vocab_size - 1}")


def check_logits(logits: Tensor, tokens: Tensor, vocab_size: int) -> None:
    """Raise for logits whose shape is not that of ``tokens`` with the vocabulary behind it."""
    check_tensor("logits", logits, tokens.device)
    expected = (*tokens.shape, vocab_size)
    if logits.shape != expected:
        hint = ""
        if logits.ndim == 3 and logits.shape[:2] == tokens.shape and logits.shape[2] > vocab_size:
            hint = f"; drop padded entries by logits[..., :{vocab_size}]"
        raise ValueError(f"logits: got shape {tuple(logits.shape)}, expected {expected}{hint}")
    if not logits.is_floating_point():
        raise TypeError(f"logits: got dtype {logits.dtype}, expected a floating one")


def check_observed(observed: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    """Return the (B, L) bool mask of observed tokens, none where None; raise where nothing is left to noise."""
    if observed is None:
        return torch.zeros(shape, dtype=torch.bool, device=device)
    check_tensor("observed", observed, device)
    if observed.dtype != torch.bool:
        raise TypeError(f"observed: got dtype {observed.dtype}, expected bool")
    if observed.shape != shape:
        raise ValueError(f"observed: got shape {tuple(observed.shape)}, expected {tuple(shape)}")
    if observed.numel() and bool(observed.all()):
        raise ValueError("observed: every token is observed, expected at least one that is not")
    return observed


def check_parameterization(name: str) -> None:
    """Raise for an unknown parameterization."""
    if name not in PARAMETERIZATIONS:
        raise ValueError(f"parameterization: got {name!r}, expected {' or '.join(map(repr, PARAMETERIZATIONS))}")


def times(name: str, t: Tensor | float, shape: torch.Size, device: torch.device, *, zero: bool = False) -> Tensor:
    """Return times as (B, L) float64 from a number, (), (B,) or (B, L).

    Raises:
        ValueError: another shape, or a time outside (0, 1], [0, 1) where ``zero``.
        TypeError: no number and no tensor.
    """
    try:
        values = torch.as_tensor(t, dtype=torch.float64, device=device)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}: got {t!r}, expected a number or a tensor") from error
    if values.shape == shape[:1] and values.ndim == 1:
        values = values[:, None]
    elif values.ndim and values.shape != shape:
        raise ValueError(f"{name}: got shape {tuple(values.shape)}, expected (), {tuple(shape[:1])} or {tuple(shape)}")
    good = (values >= 0) & (values < 1) if zero else (values > 0) & (values <= 1)
    if not bool(good.all()):
        wrong = values[~good].flatten()[0]
        raise ValueError(f"{name}: got {float(wrong)}, expected times in {'[0, 1)' if zero else '(0, 1]'}")
    return values.expand(shape)


def step_times(t: Tensor | float, s: Tensor | float, shape: torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the times of a step from ``t`` back to ``s`` as `times` does; raise unless s < t."""
    later, earlier = times("t", t, shape, device), times("s", s, shape, device, zero=True)
    if not bool((earlier < later).all()):
        wrong = (earlier >= later).nonzero()[0]
        raise ValueError(
            f"s: got {float(earlier[tuple(wrong)])} with t = {float(later[tuple(wrong)])}, expected s before t"
        )
    return later, earlier


def uniforms(shape: torch.Size, count: int, generator: Generators, device: torch.device) -> Tensor:
    """Return ``count`` float64 uniforms in [0, 1) a token, (B, L, count).

    With one generator a sequence, what a sequence draws does not depend on its batch mates.

    Raises:
        ValueError: a list of generators of another length than the batch.
        TypeError: something else than generators.
    """
    options = {"dtype": torch.float64, "device": device}
    if generator is None or isinstance(generator, torch.Generator):
        return torch.rand(*shape, count, generator=generator, **options)  # type: ignore[call-overload]
    if not isinstance(generator, Sequence) or not all(isinstance(each, torch.Generator) for each in generator):
        raise TypeError(f"generator: got {generator!r}, expected a torch.Generator, or a list of one for each sequence")
    if len(generator) != shape[0]:
        raise ValueError(f"generator: got {len(generator)} generators, expected one for each of {shape[0]} sequences")
    rows = [torch.rand(shape[1], count, generator=each, **options) for each in generator]  # type: ignore[call-overload]
    return torch.stack(rows) if rows else torch.empty(*shape, count, **options)  # type: ignore[call-overload]
