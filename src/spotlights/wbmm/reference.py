"""The definition of WBMM, short enough to believe (arXiv 2607.02097, section 3).

Every window is convolved on its own with the table as a depthwise kernel, as ``conv2d`` defines it, and zero padding
(wh-1, ww-1): output position o sees input position i through ``weight[c, h_i - h_o + wh - 1, w_i - w_o + ww - 1]``.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from spotlights.wbmm.windows import join_windows, layout_of, split_windows, window_of


def _as_batch(input: Tensor, window: tuple[int, int]) -> Tensor:
    return split_windows(input, window).permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def _convolve_windows(input: Tensor, weight: Tensor) -> Tensor:
    batch, channels, height, width = input.shape
    wh, ww = window_of(weight)
    output = F.conv2d(_as_batch(input, (wh, ww)), weight[:, None], padding=(wh - 1, ww - 1), groups=channels)
    windows = output.unflatten(0, (batch, -(-height // wh), -(-width // ww))).permute(0, 3, 1, 4, 2, 5)
    return join_windows(windows, (height, width), layout_of(input))


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of :func:`spotlights.wbmm.wbmm2d` for checked arguments."""
    output = _convolve_windows(input, weight)
    if local_weight is not None:
        output = output + _convolve_windows(input, local_weight)
    if shortcut:
        output = output + input
    if bias is not None:
        output = output + bias[:, None, None]
    return output


def weight_gradient(grad_output: Tensor, input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the gradient (C, 2*wh-1, 2*ww-1) of the table of that window.

    ``sum over windows and output positions o of input[o + d] * grad_output[o]`` for every relative offset d.
    """
    wh, ww = window
    channels = input.shape[1]
    gradient = conv2d_weight(
        _as_batch(input, window),
        (channels, 1, 2 * wh - 1, 2 * ww - 1),
        _as_batch(grad_output, window),
        padding=(wh - 1, ww - 1),
        groups=channels,
    )
    return gradient[:, 0]
