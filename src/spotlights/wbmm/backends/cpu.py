"""The CPU library's kernels: the tables packed by blocks of channels, M never built, any layout read in place."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from spotlights.runtime.native import NativeLibrary, load
from spotlights.wbmm.backends.call import Call
from spotlights.wbmm.windows import layout_of, window_of

# At import, not at the first call: torch.compile traces the choice of a backend and cannot follow a library's loading.
LIBRARY = load()
_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def why_not(call: Call) -> str | None:
    """Return why the library cannot run a call, or None."""
    if call.device.type != "cpu":
        return f"the input is on {call.device.type}, not on the CPU"
    if call.dtype not in _DTYPES:
        return f"it computes in float32 and bfloat16, not {call.dtype}"
    return LIBRARY if isinstance(LIBRARY, str) else None


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "channels", "height", "width", "wh", "ww", "lh", "lw")]


class Packed(NamedTuple):
    """Tables in the library's own order, their window and sub-window."""

    values: Tensor
    windows: tuple[int, int, int, int]


def _library() -> NativeLibrary:
    if isinstance(LIBRARY, str):
        raise RuntimeError(LIBRARY)
    return LIBRARY


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _strides(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 4)(*tensor.stride())


def _float(tensor: Tensor | None, count: int | None = None) -> Tensor | None:
    if count is not None and tensor is not None and tensor.numel() != count:
        raise ValueError(f"got {tensor.numel()} numbers for a map of {count} channels")  # they would be read beyond
    # Asking is ten times as fast as converting in vain, and a small network's block asks ten times.
    if tensor is None or (tensor.dtype is torch.float32 and tensor.is_contiguous() and not tensor.is_neg()):
        return tensor
    return tensor.to(torch.float32).contiguous().resolve_neg()


def prepare(weight: Tensor, local_weight: Tensor | None, shortcut: bool, dtype: torch.dtype) -> Packed:
    """Return the tables (C, 2*wh-1, 2*ww-1) and (C, 2*lh-1, 2*lw-1) in the library's order, the shortcut added."""
    library = _library()
    windows = window_of(weight) + window_of(weight if local_weight is None else local_weight)
    table, local = _float(weight), _float(local_weight)
    shape = _Shape(0, weight.shape[0], 0, 0, *windows)
    size = library.functions.spotlights_wbmm_packed_size(library.level, ctypes.byref(shape))
    values = torch.empty(size, dtype=torch.float32, device="cpu")
    library.call(
        "spotlights_wbmm_pack",
        ctypes.byref(shape),
        _DTYPES[dtype],
        _pointer(table),
        _pointer(local),
        0,
        int(shortcut),
        _pointer(values),
    )
    return Packed(values, windows)


def forward_prepared(input: Tensor, prepared: Packed, bias: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of an input (B, C, H, W) and prepared tables."""
    library = _library()
    input = input.resolve_neg()
    output = torch.empty_like(input, memory_format=layout_of(input))
    bias = _float(bias)
    library.call(
        "spotlights_wbmm_forward",
        ctypes.byref(_Shape(*input.shape, *prepared.windows)),
        _DTYPES[input.dtype],
        _pointer(input),
        _strides(input),
        _pointer(prepared.values),
        _pointer(bias),
        _pointer(output),
        _strides(output),
        library.threads,
    )
    return output


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of :func:`spotlights.wbmm.wbmm2d` for checked arguments."""
    return forward_prepared(input, prepare(weight, local_weight, shortcut, input.dtype), bias)


def weight_gradient(grad_output: Tensor, input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the gradient (C, 2*wh-1, 2*ww-1) of the table of that window."""
    wh, ww = window
    grad_output, input = grad_output.resolve_neg(), input.resolve_neg()
    gradient = torch.empty((input.shape[1], 2 * wh - 1, 2 * ww - 1), dtype=torch.float32, device="cpu")
    _library().call(
        "spotlights_wbmm_weight_gradient",
        ctypes.byref(_Shape(*input.shape, wh, ww, wh, ww)),
        _DTYPES[input.dtype],
        _pointer(grad_output),
        _strides(grad_output),
        _pointer(input),
        _strides(input),
        _pointer(gradient),
    )
    return gradient.to(input.dtype)


def fits_map(x: Tensor) -> bool:
    """Whether the functions below compute on such a map (B, H, W, C)."""
    return (
        x.device.type == "cpu"
        and x.dtype in _DTYPES
        and x.numel() > 0
        and x.is_contiguous()
        and not isinstance(LIBRARY, str)
    )


def fits_vector(tensor: Tensor) -> bool:
    """Whether they take such weights, biases and factors."""
    return tensor.device.type == "cpu" and tensor.dtype in _DTYPES


def takes_map(x: Tensor) -> bool:
    """Whether they compute on this very one: no subclass, no batch (vmap), and no mode that records operations."""
    return (
        type(x) is Tensor
        and fits_map(x)
        and not x.is_neg()
        and not torch._C._functorch.is_legacy_batchedtensor(x)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._ops._len_torch_dispatch_stack_pre_dispatch() == 0
    )


def _call_on_maps(name: str, x: Tensor, *arguments: object) -> None:
    batch, height, width, channels = x.shape
    _library().call(name, _DTYPES[x.dtype], *map(ctypes.c_int64, (batch, height * width, channels)), *arguments)


def gelu_response_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, output: Tensor, shift: Tensor | None = None
) -> Tensor:
    """Write GRN of GELU of x + shift to the output, which may be x (B, H, W, C); return the norms (B, 1, 1, C)."""
    norm = torch.empty((x.shape[0], 1, 1, x.shape[3]), dtype=torch.float32, device="cpu")
    floats = [_float(tensor, x.shape[3]) for tensor in (shift, weight, bias)]
    inputs, outputs = map(_pointer, (x, *floats)), map(_pointer, (output, norm))
    _call_on_maps("spotlights_gelu_response", x, *inputs, ctypes.c_float(eps), *outputs, _library().threads)
    return norm


def gelu_response_sums(grad: Tensor, x: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the sums over H and W, (B, 1, 1, C), of grad * GELU(x + shift) and of grad, both maps (B, H, W, C)."""
    along, total = torch.empty((2, x.shape[0], 1, 1, x.shape[3]), dtype=torch.float32, device="cpu")
    shift = _float(shift, x.shape[3])
    _call_on_maps("spotlights_gelu_response_sums", x, *map(_pointer, (grad, x, shift, along, total)))
    return along, total


def gelu_response_gradient(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    pull: Tensor,
    output: Tensor,
    *,
    shift: Tensor | None = None,
    bias: Tensor | None = None,
    response: Tensor | None = None,
) -> None:
    """Write (grad * scale + y * pull) * GELU'(x + shift), y = GELU(x + shift), to the output, which may be grad.

    Maps are (B, H, W, C), factors (B, 1, 1, C). `response`, which may be x, receives y * scale + bias.
    """
    per_image = x.shape[0] * x.shape[3]
    floats = [_float(shift, x.shape[3]), _float(bias, x.shape[3]), _float(scale, per_image), _float(pull, per_image)]
    _call_on_maps("spotlights_gelu_response_gradient", x, *map(_pointer, (grad, x, *floats, output, response)))


def squeeze_excite(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, down: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor]
) -> Tensor:
    """Return y * sigmoid(up(relu(down(mean of y)))) of y = x * scale + shift, a map (B, H, W, C).

    `down` and `up` are a weight (C', C) or (C', C, 1, 1), of the map's dtype, and a bias (C',).
    """
    output = torch.empty_like(x)
    scale, shift, bias2 = (_float(tensor, x.shape[3]) for tensor in (scale, shift, up[1]))
    bias1 = _float(down[1], down[0].shape[0])
    weights = down[0].contiguous(), up[0].contiguous()
    pointers = map(_pointer, (x, scale, shift, weights[0], bias1, weights[1], bias2, output))
    _call_on_maps("spotlights_squeeze_excite", x, ctypes.c_int64(weights[0].shape[0]), *pointers)
    return output


def scale_add(x: Tensor, scale: Tensor | None, shift: Tensor | None, residual: Tensor, output: Tensor) -> None:
    """Write x * scale + shift + residual, maps (B, H, W, C), to the output, which may be one of them."""
    scale, shift = (_float(tensor, x.shape[3]) for tensor in (scale, shift))
    _call_on_maps("spotlights_scale_add", x, *map(_pointer, (x, scale, shift, residual, output)))
