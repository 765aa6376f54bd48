"""How many tokens are worked on at once, which bounds the memory of losses and samplers."""

from __future__ import annotations

import torch

CPU_LOGITS = 2**19  # a chunk and its temporaries stay in the cache
GPU_LOGITS = 2**26


def rows_at_once(vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens whose logits make one chunk.

    Example:
        >>> rows_at_once(50257, torch.device("cpu"))
        10
    """
    return max(1, (GPU_LOGITS if device.type == "cuda" else CPU_LOGITS) // vocab_size)
