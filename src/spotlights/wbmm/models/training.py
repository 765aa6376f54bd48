"""An Mlp under autograd on a CPU as one step, a few images at a time: of its two hidden maps only the first is kept."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spotlights.wbmm.backends import cpu

from .inference import groups
from .response import gelu_response_norm, response_gradients


class _Mlp(torch.autograd.Function):
    """Keeps x, W1 x and the norms of GRN; all else of a hidden map's size exists for a few images, in the caches."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        weight2: Tensor,
    ) -> Tensor:
        ctx.eps = eps
        output = x.new_empty((*x.shape[:3], weight2.shape[0]))
        norm = x.new_empty((x.shape[0], 1, 1, weight1.shape[0]))
        hidden = x.new_empty((*x.shape[:3], weight1.shape[0]))
        for part, (response,) in groups(x, weight1.shape[0], 1, x.dtype):
            torch.mm(x[part].flatten(0, 2), weight1.t(), out=hidden[part].flatten(0, 2))
            norm[part] = cpu.gelu_response_norm(hidden[part], weight, bias, eps, response, bias1)
            torch.mm(response.flatten(0, 2), weight2.t(), out=output[part].flatten(0, 2))
        ctx.save_for_backward(x, weight1, bias1, weight, bias, weight2, hidden, norm)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, bias1, weight, bias, weight2, hidden, norm = ctx.saved_tensors
        grad = grads[0].contiguous()
        inputs = (x, weight1, bias1, weight, bias, ctx.eps, weight2)
        # By plain operations for second derivatives, many gradients at once, and modes that record.
        if torch.is_grad_enabled() or not cpu.takes_map(grad):
            graph = torch.is_grad_enabled()
            wanted = [t for t, needs in zip(inputs, ctx.needs_input_grad, strict=True) if needs]
            with torch.enable_grad():
                composed = _composed(*inputs)
            found = iter(torch.autograd.grad(composed, wanted, grad, create_graph=graph))
            return tuple(next(found) if needs else None for needs in ctx.needs_input_grad)
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        needs_weight1, needs_weight2 = ctx.needs_input_grad[1], ctx.needs_input_grad[6]
        grad_weight1, grad_weight, grad_weight2 = map(torch.zeros_like, (weight1, weight, weight2))
        grad_bias1, grad_bias = (None if t is None else torch.zeros_like(t) for t in (bias1, bias))
        for part, (response, upstream) in groups(x, weight1.shape[0], 2, x.dtype):
            x_rows, grad_rows = x[part].flatten(0, 2), grad[part].flatten(0, 2)
            upstream_rows = upstream.flatten(0, 2)
            torch.mm(grad_rows, weight2, out=upstream_rows)
            along, total = cpu.gelu_response_sums(upstream, hidden[part], bias1)
            scale, pull, part_weight = response_gradients(norm[part], along, weight, ctx.eps)
            cpu.gelu_response_gradient(
                upstream, hidden[part], scale, pull, upstream, shift=bias1, bias=bias, response=response
            )
            if needs_weight2:
                grad_weight2.addmm_(grad_rows.t(), response.flatten(0, 2))
            if needs_weight1:
                grad_weight1.addmm_(upstream_rows.t(), x_rows)
            grad_weight += part_weight
            if grad_bias1 is not None:
                grad_bias1 += upstream_rows.sum(0)
            if grad_bias is not None:
                grad_bias += total.sum(dim=(0, 1, 2))
            if grad_x is not None:
                torch.mm(upstream_rows, weight1, out=grad_x[part].flatten(0, 2))
        return grad_x, grad_weight1, grad_bias1, grad_weight, grad_bias, None, grad_weight2


def _composed(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, weight2: Tensor
) -> Tensor:
    return F.linear(gelu_response_norm(F.linear(x, weight1, bias1), weight, bias, eps), weight2)


def mlp(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, weight2: Tensor
) -> Tensor:
    """Return W2 GRN(GELU(W1 x + b1)) for training on a CPU.

    Args:
        x: (B, H, W, C), contiguous, float32.
        weight1: (C', C).
        bias1: (C',), or None.
        weight: GRN's weight (C',).
        bias: GRN's bias (C',), or None.
        eps: GRN's.
        weight2: (C, C').

    Returns:
        (B, H, W, C).

    Example:
        >>> from spotlights.wbmm.backends import cpu
        >>> x, w1, w2 = torch.randn(2, 3, 3, 8), torch.randn(32, 8, requires_grad=True), torch.randn(8, 32)
        >>> ones = torch.ones(32)
        >>> isinstance(cpu.LIBRARY, str) or torch.allclose(
        ...     mlp(x, w1, None, ones, None, 1e-6, w2), _composed(x, w1, None, ones, None, 1e-6, w2), atol=1e-4
        ... )
        True
    """
    result: Tensor = _Mlp.apply(x, weight1, bias1, weight, bias, eps, weight2)
    return result
