"""A block's inference on a CPU: two steps of the CPU library, and when they may stand in for the modules.

Under torch.compile the steps are registered operators of the same names; torch.export sees the modules.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from spotlights.wbmm.backends import cpu

_PLAIN = (Tensor, nn.Parameter)
_HIDDEN_BYTES = 16 << 20  # of a hidden map at once: it stays in the caches


def unwatched() -> bool:
    """Whether nothing records or transforms operations, autograd apart."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def computes_natively(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the CPU library computes on a map (B, H, W, C): it takes it, and nothing watches, autograd neither."""
    given = [tensor for tensor in parameters if tensor is not None]
    return unwatched() and cpu.takes_map(x) and all(map(cpu.fits_vector, given)) and not _needs_gradient((x, *given))


def stands_in(
    maps: Sequence[Tensor], modules: Sequence[nn.Module], others: Sequence[Tensor | None] = (), gradients: bool = False
) -> bool:
    """Whether the CPU library may take the place of modules on maps (B, H, W, C), using other tensors too.

    Where no gradient is wanted of any of these; with `gradients`, only where one is. Not where modules have hooks or
    another `forward`, or where tensors are of other dtypes, devices or classes.
    """
    x = maps[0]
    # Not parameters alone: a weight may have been made a plain attribute or a buffer.
    used = [getattr(module, name, None) for module in modules for name in ("weight", "bias")]
    tensors: list[Tensor] = [*maps, *(tensor for tensor in (*used, *others) if tensor is not None)]
    device, dtype = x.device, x.dtype
    return (
        _takes_maps(maps)
        and not (gradients and torch.compiler.is_compiling())
        and all(type(t) in _PLAIN and t.device == device and t.dtype == dtype for t in tensors)
        and _needs_gradient(tensors) == gradients
        and not torch.is_autocast_enabled("cpu")
        and not (torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)
        and not (torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
        and not any(map(is_watched, modules))
    )


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks or another `forward`."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks) or "forward" in module.__dict__


def _takes_maps(maps: Sequence[Tensor]) -> bool:
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting() and all(map(cpu.fits_map, maps))
    return unwatched() and all(map(cpu.takes_map, maps))


def _needs_gradient(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_affine(norm: nn.Module, channels: int) -> bool:
    """Whether a norm multiplies and adds constants: a BatchNorm of so many channels in eval mode, or none at all."""
    if type(norm) is nn.Identity:
        return True
    return (
        type(norm) is nn.BatchNorm2d
        and not norm.training
        and norm.running_var is not None
        and norm.running_var.numel() == channels
    )


def scale_and_shift(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the constants, float32 (C,), of a norm that `is_affine`; None for no norm."""
    if not isinstance(norm, nn.BatchNorm2d):
        return None, None
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = (norm.running_var.float() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias


def squeeze_excite(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
) -> Tensor:
    """Return y * sigmoid(W2 relu(W1 mean(y) + b1) + b2) of y = x * scale + shift, a map (B, H, W, C).

    Weights are (C', C) or (C', C, 1, 1).
    """
    if torch.compiler.is_compiling():
        return _squeeze_excite_operator(x, scale, shift, weight1, bias1, weight2, bias2)
    return cpu.squeeze_excite(x, scale, shift, (weight1, bias1), (weight2, bias2))


def add_mlp(
    residual: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    respond: Callable[[Tensor, Tensor | None], Tensor],
    weight2: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """Return residual + scale * W2 respond(W1 x, b1) + shift, maps (B, H, W, C), weights (C', C).

    A few images at a time, so that the hidden map, which `respond` overwrites, stays in the caches. In the dtype
    of `product_dtype`.
    """
    output = torch.empty_like(residual)
    dtype = product_dtype(x.dtype)
    weight1, weight2 = weight1.to(dtype), weight2.to(dtype)
    for part, (hidden,) in groups(x, weight1.shape[0], 1, dtype):
        start = residual[part].to(dtype)
        out = output[part] if dtype == output.dtype else torch.empty_like(start)
        # Biases are added in passes that are made anyhow: torch.addmm would copy them over the whole map first.
        torch.mm(x[part].to(dtype).flatten(0, 2), weight1.t(), out=hidden.flatten(0, 2))
        hidden = respond(hidden, bias1)
        torch.mm(hidden.flatten(0, 2), weight2.t(), out=out.flatten(0, 2))
        cpu.scale_add(out, scale, shift, start, out)
        if dtype != output.dtype:
            output[part] = out
    return output


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to multiply in on a CPU, for results of a dtype: float32 where torch has no fast products of bfloat16.

    Without oneDNN's, which need AVX-512 or its like, they are several times as slow.
    """
    if dtype != torch.bfloat16:
        return dtype
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if fast else torch.float32


def groups(x: Tensor, channels: int, count: int, dtype: torch.dtype) -> Iterator[tuple[slice, tuple[Tensor, ...]]]:
    """Groups of images of a map (B, H, W, C), and for each the same memory for `count` maps of that many channels."""
    batch, height, width, _ = x.shape
    images = min(batch, max(1, _HIDDEN_BYTES // (height * width * channels * dtype.itemsize)))
    hidden = x.new_empty((count, images, height, width, channels), dtype=dtype)
    for first in range(0, batch, images):
        yield slice(first, first + images), tuple(hidden[:, : min(images, batch - first)])


# The strides that the fake implementations promise, and the library takes.
_EXACT = (torch.Tag.needs_exact_strides,)


@torch.library.custom_op("spotlights::squeeze_excite", mutates_args=(), tags=_EXACT)
def _squeeze_excite_operator(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
) -> Tensor:
    return cpu.squeeze_excite(x, scale, shift, (weight1, bias1), (weight2, bias2))


@torch.library.custom_op("spotlights::add_mlp", mutates_args=(), tags=_EXACT)
def add_mlp_operator(
    residual: Tensor,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight2: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
) -> Tensor:
    """`add_mlp` with GELU and GRN of this weight, bias and eps."""

    def respond(hidden: Tensor, shift: Tensor | None) -> Tensor:
        cpu.gelu_response_norm(hidden, weight, bias, eps, hidden, shift)
        return hidden

    return add_mlp(residual, x, weight1, bias1, respond, weight2, scale, shift)


@_squeeze_excite_operator.register_fake
def _(x: Tensor, *arguments: object) -> Tensor:
    return torch.empty_like(x)


@add_mlp_operator.register_fake
def _(residual: Tensor, *arguments: object) -> Tensor:
    return torch.empty_like(residual)
