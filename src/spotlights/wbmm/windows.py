"""Cutting a map into windows and putting it together again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def window_of(weight: Tensor) -> tuple[int, int]:
    """Return the window (wh, ww) of a relative table of shape (C, 2*wh-1, 2*ww-1).

    Example:
        >>> window_of(torch.zeros(8, 13, 27))
        (7, 14)
    """
    return (weight.shape[1] + 1) // 2, (weight.shape[2] + 1) // 2


def split_windows(input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return input (B, C, H, W), zero-padded at the bottom and right, as a view (B, C, rows, wh, columns, ww).

    Example:
        >>> split_windows(torch.zeros(2, 3, 13, 21), (7, 7)).shape
        torch.Size([2, 3, 2, 7, 3, 7])
    """
    height, width = input.shape[-2:]
    wh, ww = window
    bottom, right = -height % wh, -width % ww
    if bottom or right:
        input = F.pad(input, (0, right, 0, bottom))
    return input.unflatten(3, (-1, ww)).unflatten(2, (-1, wh))


def layout_of(input: Tensor) -> torch.memory_format:
    """Return the memory format that an output of this input takes: channels-last in, channels-last out."""
    if not input.is_contiguous() and input.stride(1) == 1:
        return torch.channels_last
    return torch.contiguous_format


def join_windows(windows: Tensor, size: tuple[int, int], layout: torch.memory_format) -> Tensor:
    """Return windows (B, C, rows, wh, columns, ww) as one map (B, C, H, W) of that size, dense in that layout.

    Example:
        >>> x = torch.rand(2, 3, 13, 21)
        >>> torch.equal(join_windows(split_windows(x, (7, 7)), (13, 21), torch.contiguous_format), x)
        True
    """
    height, width = size
    if layout is torch.channels_last:
        # Merging in this order makes it the only copy of a map that the window divides.
        joined = windows.permute(0, 2, 3, 4, 5, 1).flatten(3, 4).flatten(1, 2)
        return joined[:, :height, :width].contiguous().permute(0, 3, 1, 2)
    return windows.flatten(4, 5).flatten(2, 3)[..., :height, :width].contiguous()
