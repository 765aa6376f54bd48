"""The NELBO of a denoiser on batches of token sequences, for training and for judging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spotlights.diffusion import NoiseKernel, linear_nelbo
from spotlights.diffusion.recipes.data import Batch

if TYPE_CHECKING:
    from spotlights.diffusion.models.denoiser import XDLMForMaskedLM

_GOLDEN = 0.6180339887498949  # multiples of it, modulo 1, fill the interval evenly however many there are


def context_of(batch: Batch) -> dict[str, Tensor]:
    """Return what a model needs of a batch besides its tokens: attention mask, documents, classes."""
    context: dict[str, Tensor] = {}
    if "padding" in batch:
        context["attention_mask"] = ~batch["padding"]
    if "documents" in batch:
        context["document_ids"] = batch["documents"]
    if "labels" in batch:
        context["class_labels"] = batch["labels"]
    return context


def batch_nelbo(
    model: XDLMForMaskedLM, kernel: NoiseKernel, batch: Batch, z: Tensor, t: Tensor, *, reduction: str = "mean"
) -> Tensor:
    """Return the NELBO of a batch in nats: a scalar, or (B, L) for ``reduction="none"``; padding counts nothing.

    Args:
        model: the denoiser.
        kernel: its noise.
        batch: ``tokens`` (B, L) int64, and what `TokenSet` gives besides.
        z: noised tokens, (B, L) int64.
        t: their times, (B,) float64.
        reduction: as in `linear_nelbo`.
    """
    head: Any = model.head
    hidden = model.hidden(z, **context_of(batch))
    device = hidden.device.type
    # float16 would lose gradients as small as a token's part of the mean; the head then runs in float32.
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16:
        hidden = hidden.bfloat16()
    else:
        hidden = hidden.to(head.weight.dtype)
    return linear_nelbo(
        hidden,
        head.weight.to(hidden.dtype),
        batch["tokens"],
        z,
        t,
        kernel,
        bias=head.bias,
        observed=batch.get("padding"),
        parameterization=model.config.parameterization,
        reduction=reduction,
    )


def random_times(count: int, generator: torch.Generator, rank: int = 0, ranks: int = 1) -> Tensor:
    """Return times in (0, 1] that fill it evenly from one random shift, (count,) float64.

    Args:
        count: sequences of this process.
        generator: of the shift, on the device of the result.
        rank: of this process; the times of all ``ranks`` processes interleave where they share the shift.
        ranks: processes.

    Example:
        >>> times = random_times(4, torch.Generator().manual_seed(0))
        >>> bool(((times.sort().values.diff() - 0.25).abs() < 1e-12).all())
        True
    """
    device = generator.device
    shift = torch.rand((), dtype=torch.float64, device=device, generator=generator)
    places = torch.arange(count, dtype=torch.float64, device=device) * ranks + rank
    return 1 - (shift + places / (count * ranks)) % 1


def fixed_times(index: Tensor, draw: int = 0, draws: int = 1, shift: float = 0.5) -> Tensor:
    """Return the time of each sequence in one of several draws, (B,) float64 in (0, 1].

    A sequence's times lie 1 / draws apart; over the sequences they fill the interval, in whatever batches they come.

    Args:
        index: of the sequences in their set, (B,) int64.
        draw: which draw, from 0.
        draws: how many.
        shift: of all times.

    Example:
        >>> fixed_times(torch.tensor([0, 1, 2]), draw=0, draws=2)
        tensor([0.7500, 0.9410, 0.6320], dtype=torch.float64)
    """
    place = (shift + index.double() * _GOLDEN) % 1
    return 1 - (place + draw) / draws


def generators_for(index: Tensor, seed: int, device: torch.device) -> Sequence[torch.Generator]:
    """Return one generator for each sequence, seeded by ``seed`` and its index, whatever batch it comes in."""
    return [torch.Generator(device).manual_seed((seed * 1_000_003 + number) % 2**63) for number in index.tolist()]
