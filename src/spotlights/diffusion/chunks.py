"""How many tokens are worked on at once, which bounds the memory of losses and samplers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CPU_LOGITS = 2**19  # a chunk and its temporaries stay in the cache
GPU_LOGITS = 2**26


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose logits make one chunk.

    Example:
        >>> rows_at_once(50257, torch.device("cpu"))
        10
    """
    return max(1, (GPU_LOGITS if device.type == "cuda" else CPU_LOGITS) // vocab_size)


def reduce_rows(reduce: Callable[..., Tensor], rows: Tensor, *, keepdim: bool = False) -> Tensor:
    """Return ``reduce(rows, dim=1)`` for (n, N), where a row's result does not depend on how many rows there are.

    Torch splits the reduction of a single row over threads, which adds in another order.

    Example:
        >>> reduce_rows(torch.sum, torch.ones(1, 3))
        tensor([3.])
    """
    if len(rows) == 1:
        return reduce(rows.repeat(2, 1), dim=1, keepdim=keepdim)[:1]
    return reduce(rows, dim=1, keepdim=keepdim)
