"""The paper's way: expand the table to a matrix per channel, then one batched matrix product over all windows.

M[c, o, i] = weight[c, h_i - h_o + wh - 1, w_i - w_o + ww - 1] for positions o, i of a window of d = wh*ww, taken from
the table by ``unfold``: no index buffer, and a backward that neither scatters nor depends on the order of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spotlights.wbmm.windows import join_windows, layout_of, split_windows, window_of


def build_matrix(weight: Tensor, local_weight: Tensor | None = None, shortcut: bool = False) -> Tensor:
    """Return M (C, d, d), output position first, of tables (C, 2*wh-1, 2*ww-1) and (C, 2*lh-1, 2*lw-1).

    The local table acts between positions of the same (lh, lw) sub-window only.

    Example:
        >>> build_matrix(torch.tensor([[[1., 2., 3.]]]))
        tensor([[[2., 3.],
                 [1., 2.]]])
    """
    wh, ww = window_of(weight)
    # unfold counts the output position backwards: entry a of axis 1 starts at row a = wh - 1 - h_o.
    matrix = weight.unfold(1, wh, 1).unfold(2, ww, 1).flip(1, 2).reshape(-1, wh * ww, wh * ww)
    if local_weight is not None:
        lh, lw = window_of(local_weight)
        local = build_matrix(local_weight).view(-1, 1, lh, 1, lw, 1, lh, 1, lw)
        rows, columns = (torch.eye(n, dtype=matrix.dtype, device=matrix.device) for n in (wh // lh, ww // lw))
        same_block = rows.view(wh // lh, 1, 1, 1, -1, 1, 1, 1) * columns.view(ww // lw, 1, 1, 1, -1, 1)
        matrix = matrix + (local * same_block).reshape(matrix.shape)
    if shortcut:
        matrix = matrix + torch.eye(wh * ww, dtype=matrix.dtype, device=matrix.device)
    return matrix


def _partition(input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return input (B, C, H, W) as (C, windows, d)."""
    return split_windows(input, window).permute(1, 0, 2, 4, 3, 5).flatten(4, 5).flatten(1, 3)


def prepare(
    weight: Tensor, local_weight: Tensor | None, shortcut: bool, dtype: torch.dtype
) -> tuple[Tensor, tuple[int, int]]:
    """Return what ``forward_prepared`` needs: M in that dtype, and the window."""
    return build_matrix(weight, local_weight, shortcut).to(dtype), window_of(weight)


def forward_prepared(input: Tensor, prepared: tuple[Tensor, tuple[int, int]], bias: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of an input (B, C, H, W) and a prepared weight."""
    matrix, window = prepared
    windows = _partition(input, window)
    columns = matrix.mT
    output = torch.bmm(windows, columns) if bias is None else torch.baddbmm(bias[:, None, None], windows, columns)
    batch, channels, height, width = input.shape
    wh, ww = window
    output = output.view(channels, batch, -(-height // wh), -(-width // ww), wh, ww).permute(1, 0, 2, 4, 3, 5)
    return join_windows(output, (height, width), layout_of(input))


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of :func:`spotlights.wbmm.wbmm2d` for checked arguments."""
    return forward_prepared(input, prepare(weight, local_weight, shortcut, input.dtype), bias)


def weight_gradient(grad_output: Tensor, input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the gradient (C, 2*wh-1, 2*ww-1) of the table of that window: the gradient of M, summed per offset."""
    wh, ww = window
    channels = input.shape[1]
    grad_matrix = torch.bmm(_partition(grad_output, window).mT, _partition(input, window))
    grad = grad_matrix.view(channels, wh, ww, wh, ww).flip(1, 2)
    grad = torch.ops.aten.unfold_backward(grad, [channels, wh, 2 * ww - 1, wh], 2, ww, 1)
    return torch.ops.aten.unfold_backward(grad, [channels, 2 * wh - 1, 2 * ww - 1], 1, wh, 1)
