"""The CPU library's kernels: channels-last, the table packed by blocks of channels, M never built."""

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


def why_not(call: Call) -> str | None:
    """Return why the library cannot run a call, or None."""
    if call.device.type != "cpu":
        return f"the input is on {call.device.type}, not on the CPU"
    if call.dtype != torch.float32:
        return f"it computes in float32, not {call.dtype}"
    if call.local_window is not None:
        return "it has no second table"
    return LIBRARY if isinstance(LIBRARY, str) else None


class _Shape(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "channels", "height", "width", "wh", "ww")]


class Packed(NamedTuple):
    """A table in the library's own order, and its window."""

    values: Tensor
    window: tuple[int, int]


def _library() -> NativeLibrary:
    if isinstance(LIBRARY, str):
        raise RuntimeError(LIBRARY)
    return LIBRARY


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p | None:
    return None if tensor is None else ctypes.c_void_p(tensor.data_ptr())


def _strides(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 3)(tensor.stride(0), tensor.stride(2), tensor.stride(3))


def _channels_last(tensor: Tensor) -> Tensor:
    """Return a map whose channels lie side by side: itself where they do."""
    if tensor.shape[1] == 1 or tensor.stride(1) == 1:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def prepare(weight: Tensor, local_weight: Tensor | None, shortcut: bool, dtype: torch.dtype) -> Packed:
    """Return the table (C, 2*wh-1, 2*ww-1) in the library's order, the shortcut added at its centre."""
    library, (wh, ww), channels = _library(), window_of(weight), weight.shape[0]
    weight = weight.contiguous()
    sizes = (ctypes.c_int64(channels), ctypes.c_int64(wh), ctypes.c_int64(ww))
    size = library.functions.spotlights_wbmm_packed_size(library.level, *sizes)
    values = weight.new_empty(size)
    library.call("spotlights_wbmm_pack_f32", _pointer(weight), *sizes, 0, int(shortcut), _pointer(values))
    return Packed(values, (wh, ww))


def forward_prepared(input: Tensor, prepared: Packed, bias: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of an input (B, C, H, W) and a prepared table."""
    layout = layout_of(input)
    maps = _channels_last(input)
    output = torch.empty_like(input, memory_format=torch.channels_last)
    bias = None if bias is None else bias.contiguous()
    shape = _Shape(*input.shape, *prepared.window)
    _library().call(
        "spotlights_wbmm_forward_f32",
        ctypes.byref(shape),
        _pointer(maps),
        _strides(maps),
        _pointer(prepared.values),
        _pointer(bias),
        _pointer(output),
        _strides(output),
    )
    return output if layout is torch.channels_last else output.contiguous()


def forward(input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None) -> Tensor:
    """Return the output (B, C, H, W) of :func:`spotlights.wbmm.wbmm2d` for checked arguments."""
    return forward_prepared(input, prepare(weight, local_weight, shortcut, input.dtype), bias)


def weight_gradient(grad_output: Tensor, input: Tensor, window: tuple[int, int]) -> Tensor:
    """Return the gradient (C, 2*wh-1, 2*ww-1) of the table of that window."""
    wh, ww = window
    gradient = input.new_empty(input.shape[1], 2 * wh - 1, 2 * ww - 1)
    grads, maps = _channels_last(grad_output), _channels_last(input)
    shape = _Shape(*input.shape, wh, ww)
    _library().call(
        "spotlights_wbmm_weight_gradient_f32",
        ctypes.byref(shape),
        _pointer(grads),
        _strides(grads),
        _pointer(maps),
        _strides(maps),
        _pointer(gradient),
    )
    return gradient
