"""WBMM as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spotlights.wbmm.backends import BACKENDS
from spotlights.wbmm.functional import PreparedCache, apply


class WBMM2d(nn.Module):
    """Windowed batch matrix multiplication over maps (B, C, H, W), drop-in for a large depthwise convolution.

    See :func:`spotlights.wbmm.wbmm2d` for the mathematics (arXiv 2607.02097, section 3). In eval mode, what a backend
    derives from the weight is kept until the weight changes; a write through ``weight.data`` goes unseen, so use
    ``with torch.no_grad(): weight.copy_(...)`` instead.

    Args:
        channels: C, the channels of input and output.
        window_size: one side or (height, width); every output sees its whole window.
        shortcut: add the input to the output, as the paper's networks do.
        bias: learn a bias per channel.
        backend: a name from ``spotlights.wbmm.backends``, or None for the first that can run.
        device: where to create the parameters.
        dtype: dtype of the parameters.

    Shape:
        input and output (B, C, H, W), any height and width.

    Raises:
        ValueError: channels or window_size is not positive, or backend is unknown.

    Example:
        >>> layer = WBMM2d(64, window_size=7)
        >>> layer(torch.randn(1, 64, 50, 37)).shape
        torch.Size([1, 64, 50, 37])
    """

    def __init__(
        self,
        channels: int,
        window_size: int | tuple[int, int] = 7,
        *,
        shortcut: bool = True,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sides = window_size if isinstance(window_size, (tuple, list)) else (window_size, window_size)
        if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
            raise ValueError(f"WBMM2d: window_size: got {window_size!r}, expected a positive int or two of them")
        if channels < 1:
            raise ValueError(f"WBMM2d: channels: got {channels}, expected at least 1")
        if backend is not None:
            BACKENDS[backend]
        self.channels = channels
        self.window_size = (sides[0], sides[1])
        self.shortcut = shortcut
        self.backend = backend
        table = (channels, 2 * sides[0] - 1, 2 * sides[1] - 1)
        self.weight = nn.Parameter(torch.empty(table, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self._prepared = PreparedCache()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution of deviation 0.02, truncated at 2, and zero the bias."""
        nn.init.trunc_normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def train(self, mode: bool = True) -> WBMM2d:
        self._prepared.clear()
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> WBMM2d:
        # Converting there and back can reuse an address: the weight differs while nothing in the cache's key does.
        self._prepared.clear()
        return super()._apply(fn, recurse)

    def forward(self, input: Tensor) -> Tensor:
        cache = None if self.training else self._prepared
        return apply(input, self.weight, self.bias, self.shortcut, None, self.backend, cache)

    def extra_repr(self) -> str:
        backend = "" if self.backend is None else f", backend={self.backend!r}"
        return (
            f"{self.channels}, window_size={self.window_size}, shortcut={self.shortcut}, "
            f"bias={self.bias is not None}{backend}"
        )
