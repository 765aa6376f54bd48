"""Networks as files for deployment: ONNX, torch.export archives and AOTInductor packages, of plain operators only.

A model is folded first. ``spotlights::wbmm2d`` is then rewritten as the paper's form, a gather of the table into one
matrix per channel and a batched matrix product over windows, which every runtime has.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from spotlights.runtime.errors import first_line
from spotlights.runtime.runs import replacing
from spotlights.wbmm.layers import WBMM2d
from spotlights.wbmm.reparam import reparameterize
from spotlights.wbmm.windows import window_of

INPUT, OUTPUT = "images", "logits"


def _matrix(weight: Tensor) -> Tensor:
    """The matrix (C, d, d), input position first, of tables (C, 2*wh-1, 2*ww-1)."""
    wh, ww = window_of(weight)
    rows, columns = torch.arange(wh).repeat_interleave(ww), torch.arange(ww).repeat(wh)
    down, across = rows[:, None] - rows + wh - 1, columns[:, None] - columns + ww - 1
    return weight.flatten(1)[:, down * (2 * ww - 1) + across]


def _copied(x: Tensor) -> Tensor:
    # A reshape copies or not by the example's number of windows, and the program keeps that.
    return x.clone(memory_format=torch.contiguous_format)


def plain_wbmm2d(
    input: Tensor, weight: Tensor, bias: Tensor | None, shortcut: bool, local_weight: Tensor | None, backend: str
) -> Tensor:
    """Compute ``spotlights::wbmm2d`` by operators that every runtime has, sizes free: nothing depends on their values.

    Args:
        input: (B, C, H, W), floating point.
        weight: (C, 2*wh-1, 2*ww-1), as are the others of the input's dtype.
        bias: (C,).
        shortcut: add the input to the output.
        local_weight: (C, 2*lh-1, 2*lw-1).
        backend: not used; the operator's own argument.

    Returns:
        (B, C, H, W).

    Example:
        >>> x = torch.randn(1, 2, 5, 9)
        >>> torch.allclose(plain_wbmm2d(x, torch.zeros(2, 5, 5), None, True, None, ""), x)
        True
    """
    batch, channels, height, width = input.shape
    wh, ww = window_of(weight)
    matrix = _matrix(weight)
    if local_weight is not None:
        lh, lw = window_of(local_weight)
        row, column = torch.arange(wh).repeat_interleave(ww), torch.arange(ww).repeat(wh)
        inside = (row % lh) * lw + column % lw
        block = (row // lh) * (ww // lw) + column // lw
        local = _matrix(local_weight)[:, inside[:, None], inside]
        matrix = matrix + local * (block[:, None] == block).to(matrix.dtype)
    if shortcut:
        matrix = matrix + torch.eye(wh * ww, dtype=matrix.dtype)
    # Of positive numbers: ONNX rounds a quotient of integers towards zero.
    rows, columns = (height + wh - 1) // wh, (width + ww - 1) // ww
    fixed = isinstance(height, int) and isinstance(width, int)
    if fixed:
        padded = F.pad(input, (0, columns * ww - width, 0, rows * wh - height))
    else:
        # Inductor drops a padding or crop that is nothing on the example; these two never are.
        padded = F.pad(input, (0, ww, 0, wh))[:, :, : rows * wh, : columns * ww]
    windows = _copied(padded).view(batch, channels, rows, wh, columns, ww).permute(1, 0, 2, 4, 3, 5)
    output = torch.bmm(_copied(windows).view(channels, batch * rows * columns, wh * ww), matrix)
    output = output.view(channels, batch, rows, columns, wh, ww).permute(1, 0, 2, 4, 3, 5)
    output = _copied(output).view(batch, channels, rows * wh, columns * ww)
    if not fixed:
        output = F.pad(output, (0, 1, 0, 1))
    output = output[:, :, :height, :width]
    return output if bias is None else output + bias[:, None, None]


class HalfInside(nn.Module):
    """A float16 copy of a model, folded in float32 first, that takes and returns float32.

    Args:
        model: takes and returns one tensor.

    Example:
        >>> HalfInside(nn.Linear(3, 2))(torch.zeros(1, 3)).dtype
        torch.float32
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = reparameterize(copy.deepcopy(model).eval()).half()

    def forward(self, input: Tensor) -> Tensor:
        return self.model(input.half()).float()


def plain_program(model: nn.Module, example: Tensor, *, dynamic: bool = False) -> ExportedProgram:
    """Return a folded copy of a model as a graph of plain operators, in eval mode.

    Args:
        model: takes images (B, C, H, W) and returns one tensor, on the CPU.
        example: (B, C, H, W), an input, at least two images.
        dynamic: leave height and width free; the batch always is.

    Raises:
        ValueError: the model cannot take the example, or cannot be traced.

    Example:
        >>> from spotlights.wbmm import WBMM2d
        >>> program = plain_program(WBMM2d(4, 7), torch.randn(2, 4, 9, 9))
        >>> any("spotlights" in str(node.target) for node in program.graph.nodes)
        False
    """
    folded = reparameterize(copy.deepcopy(model).eval())
    if dynamic:
        example = _several_windows(folded, example)
    sizes: dict[int, Any] = {0: Dim("batch", min=1)}
    if dynamic:
        sizes |= {2: Dim.AUTO, 3: Dim.AUTO}
    try:
        with torch.no_grad():
            traced = torch.export.export(folded, (example,), dynamic_shapes=(sizes,), strict=False)
            program = traced.run_decompositions({torch.ops.spotlights.wbmm2d.default: plain_wbmm2d})
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        size = "x".join(str(side) for side in example.shape)
        raise ValueError(f"export: the model cannot be traced on {size}: {first_line(error)}") from error
    if hasattr(traced, "_guards_code"):
        # Views of the plain form ask whether there is one window and bind the program to the example's answer, though
        # they are right for every number; what the model itself asked stays.
        program._guards_code = traced._guards_code
    return program


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    image_size: int | tuple[int, int],
    channels: int = 3,
    dynamic: bool = False,
    half: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write a model as an ONNX file with input ``images`` (B, C, H, W) and output ``logits``, both float32.

    Args:
        model: takes images (B, C, H, W) and returns one tensor, on the CPU. It is not changed.
        path: the file, written whole or not at all.
        image_size: one side or (height, width) to trace with.
        channels: C.
        dynamic: leave height and width free; the batch always is.
        half: weights and arithmetic in float16.
        metadata: plain values for the file's properties, each as JSON.

    Raises:
        ValueError: the model cannot take such images, or cannot be traced.
        ModuleNotFoundError: the ``export`` extra is not installed.
        UserError: the file cannot be written.
    """
    import onnx

    program = plain_program(HalfInside(model) if half else model, _example(image_size, channels), dynamic=dynamic)
    exported = torch.onnx.export(
        program, dynamo=True, input_names=[INPUT], output_names=[OUTPUT], external_data=False, verbose=False
    )
    assert exported is not None  # without a path a program comes back
    proto = exported.model_proto
    for name, value in (metadata or {}).items():
        proto.metadata_props.add(key=name, value=json.dumps(value, ensure_ascii=False))
    onnx.checker.check_model(proto)
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


def export_pt2(
    model: nn.Module,
    path: str | Path,
    *,
    image_size: int | tuple[int, int],
    channels: int = 3,
    dynamic: bool = False,
    half: bool = False,
    compiled: bool = False,
) -> None:
    """Write a model as a ``.pt2`` file: a ``torch.export`` archive, or compiled ahead of time by AOTInductor.

    Archives open with ``torch.export.load(path).module()``, compiled packages with
    ``torch._inductor.aoti_load_package(path)`` on a machine of the same kind. Input and output are float32.

    Args:
        model: takes images (B, C, H, W) and returns one tensor, on the CPU. It is not changed.
        path: the file, written whole or not at all.
        image_size: one side or (height, width) to trace with.
        channels: C.
        dynamic: leave height and width free; the batch always is.
        half: weights and arithmetic in float16.
        compiled: compile ahead of time; needs a C++ compiler.

    Raises:
        ValueError: the model cannot take such images, or cannot be traced.
        UserError: the file cannot be written.
    """
    program = plain_program(HalfInside(model) if half else model, _example(image_size, channels), dynamic=dynamic)
    with replacing(path) as temporary:
        if compiled:
            packaged = temporary.with_name(temporary.name + ".pt2")
            torch._inductor.aoti_compile_and_package(program, package_path=str(packaged))
            packaged.replace(temporary)
        else:
            with open(temporary, "wb") as file:  # given a path, torch insists on the ending .pt2
                torch.export.save(program, file)


def _several_windows(model: nn.Module, example: Tensor) -> Tensor:
    """Return an example of several windows at every stride up to 32: compiled from one window, one would be assumed."""
    windows = [layer.window_size for layer in model.modules() if isinstance(layer, WBMM2d)]
    least = [32 * (max((window[axis] for window in windows), default=0) + 1) for axis in (0, 1)]
    height, width = (max(side, some) for side, some in zip(example.shape[2:], least, strict=True))
    return example.new_zeros(*example.shape[:2], height, width)


def _example(image_size: int | tuple[int, int], channels: int) -> Tensor:
    sides = image_size if isinstance(image_size, tuple) else (image_size, image_size)
    return torch.zeros(2, channels, *sides)
