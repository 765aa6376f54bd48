"""``wbmm2d``: argument checks, choice of backend, registration with ``torch.library``, autograd, FLOP count."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from spotlights.wbmm.backends import BACKENDS, Call, functions_of, matmul
from spotlights.wbmm.windows import layout_of, window_of

_library = torch.library.Library("spotlights", "DEF")
_library.define(
    "wbmm2d(Tensor input, Tensor weight, Tensor? bias, bool shortcut, Tensor? local_weight, str backend) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.define(
    "wbmm2d_weight_gradient(Tensor grad_output, Tensor input, int[2] window, str backend) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)


def wbmm2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    shortcut: bool = False,
    local_weight: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mix positions inside non-overlapping windows, one number per channel and relative offset.

    With i and o the input and output positions of a window (arXiv 2607.02097, section 3)::

        output[c, o] = sum_i input[c, i] * weight[c, h_i - h_o + wh - 1, w_i - w_o + ww - 1]

    Windows are cut from the top-left corner; a size that the window does not divide is zero-padded at the bottom and
    right, and the output cropped.

    Args:
        input: (B, C, H, W), floating point. A channels-last input gives a channels-last output.
        weight: (C, 2*wh-1, 2*ww-1); the window (wh, ww) follows from the shape.
        bias: (C,), added to the output.
        shortcut: add the input to the output.
        local_weight: (C, 2*lh-1, 2*lw-1), added for pairs of positions in the same (lh, lw) sub-window; lh must divide
            wh and lw must divide ww (section 4 of the paper: hierarchical windows as one operator).
        backend: a name from ``spotlights.wbmm.backends``, or None for the first that can run the call.

    Returns:
        (B, C, H, W), of the input's dtype (under autocast, of autocast's dtype).

    Raises:
        TypeError: an argument is not a tensor, or tensors differ in dtype.
        ValueError: a shape, device or backend does not fit; the message names the argument.

    Example:
        >>> x = torch.randn(2, 8, 13, 21)
        >>> wbmm2d(x, torch.zeros(8, 13, 13), shortcut=True).equal(x)
        True
    """
    return apply(input, weight, bias, shortcut, local_weight, backend, cache=None)


class _Arguments(NamedTuple):
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    shortcut: bool
    local_weight: Tensor | None
    backend: str | None


class _Entry(NamedTuple):
    """What was prepared, and everything it holds for."""

    weight: Tensor
    local_weight: Tensor | None
    bias: Tensor | None
    state: tuple[Any, ...]  # of the weights' memory
    held: tuple[Tensor | None, ...]  # that memory: freed, another tensor could lie at the same address
    shortcut: bool
    backend: str | None  # as asked for
    dtype: torch.dtype
    device: torch.device
    run: Callable[[Tensor, Any, Tensor | None], Tensor]
    prepared: Any


class PreparedCache:
    """Keeps what a backend prepared from a weight until that weight changes.

    A change is a new tensor, new storage or an in-place write that torch counts. It counts no writes through ``.data``,
    of fused optimisers or of collectives: to make training safe, a call that wants the weight's gradient clears all.
    """

    def __init__(self) -> None:
        self._entry: _Entry | None = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # A copied or unpickled module starts empty.
        return PreparedCache, ()

    def clear(self) -> None:
        self._entry = None

    def run(self, arguments: _Arguments) -> Tensor | None:
        """Return the output where an earlier call prepared for all of this, else None. Needs no checked arguments."""
        input, weight, bias, shortcut, local_weight, backend = arguments
        entry = self._entry
        if (
            entry is None
            or entry.weight is not weight
            or entry.local_weight is not local_weight
            or entry.bias is not bias
            or type(input) is not Tensor
            or entry.dtype is not (dtype := autocast_dtype(input.device) or input.dtype)
            or entry.device != input.device
            or entry.shortcut is not shortcut
            or entry.backend != backend
            or input.ndim != 4
            or input.shape[1] != weight.shape[0]
            or input.numel() == 0
            or not _nothing_watches(input, weight, bias, local_weight)
            or _state(weight, local_weight) != entry.state
        ):
            return None
        return entry.run(input.to(dtype), entry.prepared, None if bias is None else bias.to(dtype))

    def prepare(self, arguments: _Arguments, chosen: ModuleType, dtype: torch.dtype) -> None:
        """Prepare checked arguments for ``run``, where that is safe."""
        input, weight, bias, shortcut, local_weight, backend = arguments
        if (
            hasattr(chosen, "prepare")
            and _nothing_watches(input, weight, bias, local_weight)
            and _cacheable(weight)
            and _cacheable(local_weight)
        ):
            # Built as ordinary tensors even in inference mode: a later call may need a gradient of the input.
            with torch.inference_mode(False), torch.no_grad():
                prepared = chosen.prepare(weight, local_weight, shortcut, dtype)
            state = _state(weight, local_weight)
            self._entry = _Entry(
                weight,
                local_weight,
                bias,
                state,
                (weight.detach(), None if local_weight is None else local_weight.detach()),
                shortcut,
                backend,
                dtype,
                input.device,
                chosen.forward_prepared,
                prepared,
            )


def _state(weight: Tensor, local_weight: Tensor | None) -> tuple[int, ...]:
    if local_weight is None:
        return weight.data_ptr(), weight._version
    return weight.data_ptr(), weight._version, local_weight.data_ptr(), local_weight._version


def _nothing_watches(*tensors: Tensor | None) -> bool:
    """Whether the call is a plain computation: no gradient, no transform, no tracing, no recording mode."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return False
    modes = torch._C._len_torch_dispatch_stack() + torch._ops._len_torch_dispatch_stack_pre_dispatch()
    return not (torch.jit.is_tracing() or _inside_a_transform() or modes)


def _inside_a_transform() -> bool:
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _cacheable(tensor: Tensor | None) -> bool:
    # Only a module's own parameter: functional_call and torch.func put other tensors, even wrapped ones, in its place.
    return tensor is None or (
        isinstance(tensor, nn.Parameter)
        and type(tensor.data) is Tensor
        and tensor.device.type != "meta"
        and not tensor.is_inference()
    )


def apply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shortcut: bool,
    local_weight: Tensor | None,
    backend: str | None,
    cache: PreparedCache | None,
) -> Tensor:
    """Compute :func:`wbmm2d`, keeping the prepared weight in ``cache`` where that is safe."""
    arguments = _Arguments(input, weight, bias, shortcut, local_weight, backend)
    if torch.compiler.is_compiling():
        cache = None
    if cache is not None and (output := cache.run(arguments)) is not None:
        return output
    check_arguments(input, weight, bias, local_weight)
    dtype = autocast_dtype(input.device) or input.dtype
    window, local_window = window_of(weight), None if local_weight is None else window_of(local_weight)
    name = BACKENDS.select(Call(input.device, dtype, window, local_window), backend).name
    if cache is not None:
        # A training step may follow, and fused optimisers change weights without counting it.
        cache.clear()
        cache.prepare(arguments, functions_of(name), dtype)
        if (output := cache.run(arguments)) is not None:
            return output
    input, weight = input.to(dtype), weight.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    local_weight = None if local_weight is None else local_weight.to(dtype)
    if _inside_a_transform():
        # Registered operators do not nest in torch.func's transforms and lose forward-mode tangents; plain ones do not.
        return matmul.forward(input, weight, bias, shortcut, local_weight)
    return torch.ops.spotlights.wbmm2d(input, weight, bias, shortcut, local_weight, name)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast asks for on that device, or None where it is off."""
    # Tensors on "meta" have no autocast, and asking for it raises.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return None


def check_arguments(input: Tensor, weight: Tensor, bias: Tensor | None, local_weight: Tensor | None) -> None:
    """Raise TypeError or ValueError, naming the argument, unless the arguments fit each other."""
    tensors = {"input": input, "weight": weight, "bias": bias, "local_weight": local_weight}
    for name, tensor in tensors.items():
        if tensor is None and name in ("bias", "local_weight"):
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"wbmm2d: {name}: got {type(tensor).__name__}, expected a tensor")
    if input.ndim != 4:
        raise ValueError(f"wbmm2d: input: got shape {tuple(input.shape)}, expected (B, C, H, W)")
    if not input.is_floating_point():
        raise TypeError(f"wbmm2d: input: got {input.dtype}, expected a floating-point dtype")
    channels = input.shape[1]
    for name, table in (("weight", weight), ("local_weight", local_weight)):
        if table is None:
            continue
        if table.ndim != 3 or table.shape[0] != channels or table.shape[1] % 2 == 0 or table.shape[2] % 2 == 0:
            half = "2*wh-1, 2*ww-1" if name == "weight" else "2*lh-1, 2*lw-1"
            raise ValueError(
                f"wbmm2d: {name}: got shape {tuple(table.shape)}, expected (C, {half}) with C = {channels} "
                f"for input {tuple(input.shape)}"
            )
    if local_weight is not None:
        window, local = window_of(weight), window_of(local_weight)
        if window[0] % local[0] or window[1] % local[1]:
            raise ValueError(
                f"wbmm2d: local_weight: got shape {tuple(local_weight.shape)}, a window of {local}, expected one that "
                f"divides the window {window} of weight"
            )
    if bias is not None and bias.shape != (channels,):
        raise ValueError(
            f"wbmm2d: bias: got shape {tuple(bias.shape)}, expected ({channels},) for input {tuple(input.shape)}"
        )
    autocast = autocast_dtype(input.device) is not None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.dtype != input.dtype and not (autocast and tensor.is_floating_point()):
            raise TypeError(f"wbmm2d: {name}: got {tensor.dtype}, expected {input.dtype}, the dtype of input")
        if tensor.device != input.device:
            raise ValueError(f"wbmm2d: {name}: is on {tensor.device}, expected {input.device}, the device of input")


@torch.library.impl(_library, "wbmm2d", "CompositeExplicitAutograd")
def _forward(
    input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None, backend: str
) -> Tensor:
    if input.numel() == 0:
        return torch.empty_like(input, memory_format=layout_of(input))
    return functions_of(backend).forward(input, weight, bias, shortcut, local_weight)


@torch.library.impl(_library, "wbmm2d_weight_gradient", "CompositeExplicitAutograd")
def _weight_gradient(grad_output: Tensor, input: Tensor, window: tuple[int, int], backend: str) -> Tensor:
    wh, ww = window
    if input.numel() == 0:
        return input.new_zeros((input.shape[1], 2 * wh - 1, 2 * ww - 1))
    return functions_of(backend).weight_gradient(grad_output, input, (wh, ww)).contiguous()


@torch.library.register_fake("spotlights::wbmm2d", lib=_library)
def _forward_fake(
    input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None, backend: str
) -> Tensor:
    return torch.empty_like(input, memory_format=layout_of(input))


@torch.library.register_fake("spotlights::wbmm2d_weight_gradient", lib=_library)
def _weight_gradient_fake(grad_output: Tensor, input: Tensor, window: tuple[int, int], backend: str) -> Tensor:
    wh, ww = window
    return input.new_empty((input.shape[1], 2 * wh - 1, 2 * ww - 1))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, weight, _, ctx.shortcut, local_weight, ctx.backend = inputs
    needs_input = ctx.needs_input_grad[1] or ctx.needs_input_grad[4]
    ctx.save_for_backward(input if needs_input else None, weight, local_weight)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, weight, local_weight = ctx.saved_tensors
    grad_input = grad_weight = grad_bias = grad_local = None
    if ctx.needs_input_grad[0]:
        # The transpose of the window's matrix is the same operator with the table turned about its centre.
        turned = None if local_weight is None else local_weight.flip(1, 2)
        grad_input = torch.ops.spotlights.wbmm2d(
            grad_output, weight.flip(1, 2), None, ctx.shortcut, turned, ctx.backend
        )
    if ctx.needs_input_grad[1]:
        grad_weight = torch.ops.spotlights.wbmm2d_weight_gradient(grad_output, input, window_of(weight), ctx.backend)
    if ctx.needs_input_grad[2]:
        grad_bias = grad_output.sum((0, 2, 3))
    if ctx.needs_input_grad[4]:
        grad_local = torch.ops.spotlights.wbmm2d_weight_gradient(
            grad_output, input, window_of(local_weight), ctx.backend
        )
    return grad_input, grad_weight, grad_bias, None, grad_local, None


torch.library.register_autograd("spotlights::wbmm2d", _backward, setup_context=_save, lib=_library)


def _save_weight_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad_output, input, _, ctx.backend = inputs
    ctx.save_for_backward(grad_output, input)


def _backward_weight_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    # <grad, weight_gradient(g, x)> = <g, wbmm2d(x, grad)>: linear in g and in x, so both derivatives are the operator.
    grad_output, input = ctx.saved_tensors
    operator = torch.ops.spotlights.wbmm2d
    first = operator(input, grad, None, False, None, ctx.backend) if ctx.needs_input_grad[0] else None
    second = operator(grad_output, grad.flip(1, 2), None, False, None, ctx.backend) if ctx.needs_input_grad[1] else None
    return first, second, None, None


torch.library.register_autograd(
    "spotlights::wbmm2d_weight_gradient",
    _backward_weight_gradient,
    setup_context=_save_weight_gradient,
    lib=_library,
)


def count_multiply_adds(size: tuple[int, ...], window: tuple[int, int]) -> int:
    """Return the multiply-adds of one table over a map of size (B, C, H, W): all pairs of positions in a window.

    Example:
        >>> count_multiply_adds((1, 1, 14, 14), (7, 7)) == 14 * 14 * 49
        True
        >>> count_multiply_adds((1, 1, 8, 7), (7, 7)) == (49 + 1) * 49
        True
    """
    batch, channels, *sides = size
    pairs = 1
    for side, extent in zip(sides, window, strict=True):
        pairs *= side // extent * extent**2 + (side % extent) ** 2
    return batch * channels * pairs


@register_flop_formula(torch.ops.spotlights.wbmm2d)
def _flops(
    input_shape: torch.Size,
    weight_shape: torch.Size,
    bias_shape: torch.Size | None,
    shortcut: bool,
    local_shape: torch.Size | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    # The local table is added to the other one before any position is multiplied, so it costs nothing here.
    return 2 * count_multiply_adds(tuple(input_shape), ((weight_shape[1] + 1) // 2, (weight_shape[2] + 1) // 2))


@register_flop_formula(torch.ops.spotlights.wbmm2d_weight_gradient)
def _flops_weight_gradient(
    grad_shape: torch.Size, input_shape: torch.Size, window: tuple[int, int], *args: Any, **kwargs: Any
) -> int:
    return 2 * count_multiply_adds(tuple(input_shape), (window[0], window[1]))
