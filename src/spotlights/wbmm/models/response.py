"""GELU and global response normalisation of maps (B, H, W, C), and both as one step of less memory and time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.wbmm.backends import cpu

from .inference import computes_natively, unwatched


def _map_norm(x: Tensor) -> Tensor:
    """The norm over H and W, (B, 1, 1, C), its squares summed in FP32 at least."""
    # FP16 would overflow. The tiny number keeps the root's gradient finite for an all-zero channel; vector_norm would
    # do so by itself, but is 3 times slower on a CPU.
    square = x.float().square() if x.dtype == torch.float16 else x.square()
    dtype = torch.float32 if x.dtype == torch.bfloat16 else square.dtype
    return (square.sum(dim=(1, 2), keepdim=True, dtype=dtype) + 1e-20).sqrt()


class GlobalResponseNorm(nn.Module):
    """ConvNeXt V2's global response normalisation of (B, H, W, C): x + weight * x * n + bias, n = |x| / mean_c |x|.

    |x| is the norm over H and W. Written as x * (1 + weight * n) + bias, so that the map is read and written once.
    A folded network has the bias in the layer behind, and None here.

    Called with `gelu` it is that of GELU of x, or of x + `shift`: one step of little memory under autograd
    (`gelu_response_norm`), of the CPU library without. `overwrite`: nobody needs x afterwards, and its memory may take
    the result.

    Example:
        >>> x = torch.ones(1, 3, 3, 4)
        >>> torch.equal(GlobalResponseNorm(4)(x), x)  # weight and bias start at 0
        True
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor, gelu: bool = False, shift: Tensor | None = None, overwrite: bool = False) -> Tensor:
        if gelu:
            if computes_natively(x, self.weight, self.bias, shift):
                output = x if overwrite else torch.empty_like(x)
                cpu.gelu_response_norm(x, self.weight, self.bias, self.eps, output, shift)
                return output
            if shift is not None:
                x = x + shift
            if keeps_graph(x):
                return gelu_response_norm(x, self.weight, self.bias, self.eps)
            x = F.gelu(x)
        norm = _map_norm(x)
        ratio = norm / (norm.mean(dim=-1, keepdim=True) + self.eps)
        scale = 1 + self.weight * ratio.to(x.dtype)
        return x * scale if self.bias is None else torch.addcmul(self.bias, x, scale)


class _GeluResponseNorm(torch.autograd.Function):
    """Of all maps it keeps x alone for the backward pass, and computes GELU there anew."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        ctx.eps, ctx.has_bias = eps, bias is not None
        if cpu.takes_map(x):
            y = torch.empty_like(x)
            norm = cpu.gelu_response_norm(x, weight, bias, eps, y)
            ctx.save_for_backward(x, weight, norm)
            return y
        y = F.gelu(x)
        norm = _map_norm(y)
        scale = 1 + weight * (norm / (norm.mean(dim=-1, keepdim=True) + eps)).to(x.dtype)
        ctx.save_for_backward(x, weight, norm)
        return y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, norm = ctx.saved_tensors
        native = not torch.is_grad_enabled() and unwatched() and all(map(cpu.takes_map, (x, grad)))
        if native:
            along, total = cpu.gelu_response_sums(grad, x)
        else:
            y = F.gelu(x)
            if torch.is_grad_enabled():
                norm = _map_norm(y)  # second derivatives pass through it
            along = (grad * y).sum(dim=(1, 2), keepdim=True, dtype=norm.dtype)
        scale, pull, grad_weight = response_gradients(norm, along, weight, ctx.eps)
        if native:
            grad_x = torch.empty_like(x)
            cpu.gelu_response_gradient(grad, x, scale, pull, grad_x)
        else:
            grad_y = torch.addcmul(grad * scale.to(x.dtype), y, pull.to(x.dtype))
            grad_x = torch.ops.aten.gelu_backward(grad_y, x)
        grad_weight = grad_weight.to(weight.dtype)
        if not ctx.has_bias:
            return grad_x, grad_weight, None, None
        grad_bias = total.sum(dim=(0, 1, 2)).to(x.dtype) if native else grad.sum(dim=(0, 1, 2))
        return grad_x, grad_weight, grad_bias, None


def response_gradients(norm: Tensor, along: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return what GRN's gradients are made of.

    With y GRN's input and `along` the sums of grad * y over H and W, (B, 1, 1, C) like the norms, these are scale and
    pull, of the gradient grad * scale + y * pull of y, and the gradient (C,) of GRN's weight.
    """
    mean = norm.mean(dim=-1, keepdim=True) + eps
    ratio = norm / mean
    grad_ratio = along * weight  # `along` is the gradient of the scale
    grad_norm = (grad_ratio - (grad_ratio * ratio).mean(dim=-1, keepdim=True)) / mean
    return 1 + weight * ratio, grad_norm / norm, (along * ratio).sum(dim=(0, 1, 2))


def keeps_graph(x: Tensor) -> bool:
    """Whether autograd alone watches x: no tracing, which fuses by itself, and no transform of torch.func."""
    return torch.is_grad_enabled() and x.requires_grad and unwatched()


def gelu_response_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """GRN of GELU of a map (B, H, W, C), for training: autograd keeps no map but the input.

    Args:
        x: (B, H, W, C).
        weight: GRN's weight (C,).
        bias: GRN's bias (C,), or None.
        eps: GRN's.

    Returns:
        (B, H, W, C).

    Example:
        >>> x = torch.randn(2, 3, 3, 8, requires_grad=True)
        >>> norm = GlobalResponseNorm(8)
        >>> torch.allclose(gelu_response_norm(x, norm.weight, norm.bias, norm.eps), norm(F.gelu(x)))
        True
    """
    bias = None if bias is None else bias.to(x.dtype)
    return _GeluResponseNorm.apply(x, weight.to(x.dtype), bias, eps)
