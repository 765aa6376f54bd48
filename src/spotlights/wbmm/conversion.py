"""Replacing large depthwise convolutions of any network by WBMM, with their kernels carried over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, skip_init

from spotlights.wbmm.conversion_report import (
    ConversionReport,
    ConvertedLayer,
    LeftLayer,
    Replacement,
    full_size,
    measured,
    seen_maps,
)
from spotlights.wbmm.folding import Foldable
from spotlights.wbmm.layers import WBMM2d, sides_of


class ConvertedDepthwise2d(nn.Module):
    """A depthwise convolution turned into WBMM inside windows and, where kept, a 3x3 convolution across them.

    The convolution's kernel lies in the middle of the operator's table: inside a window the operator *is* that
    convolution. Pairs of positions in different windows are cut, except those at distance 1 at most where
    ``keep_local`` moves the kernel's centre from the table to ``local``.

    Args:
        convolution: stride 1, odd kernel and zero padding that keeps the size; its dtype, device, ``requires_grad`` and
            mode are taken over.
        window_size: one side or (height, width); must hold the kernel: dilation * (k - 1) + 1 <= 2 * window - 1.
        keep_local: whether to have the 3x3 path.

    Attributes:
        op: WBMM2d without shortcut, with a bias where the convolution had one.
        local: Conv2d 3x3, depthwise, without bias; or None.

    Shape:
        input and output (B, C, H, W), any height and width; channels-last in, channels-last out.

    Raises:
        ValueError: the convolution is of another kind, or does not fit the window.

    Example:
        >>> convolution = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        >>> x = torch.randn(2, 8, 7, 7)
        >>> torch.allclose(ConvertedDepthwise2d(convolution)(x), convolution(x), atol=1e-5)
        True
    """

    def __init__(
        self, convolution: nn.Conv2d, window_size: int | tuple[int, int] = 7, *, keep_local: bool = True
    ) -> None:
        super().__init__()
        window = sides_of(window_size, "ConvertedDepthwise2d: window_size")
        if reason := _unsuitable(convolution, window, 1):
            raise ValueError(f"ConvertedDepthwise2d: convolution: {reason}")
        channels, bias = convolution.out_channels, convolution.bias
        kind = {"device": convolution.weight.device, "dtype": convolution.weight.dtype}
        self.op = skip_init(WBMM2d, channels, window, shortcut=False, bias=bias is not None, **kind)
        self.local = (
            skip_init(nn.Conv2d, channels, channels, 3, padding=1, groups=channels, bias=False, **kind)
            if keep_local
            else None
        )
        with torch.no_grad():
            table = self.op.weight.zero_()
            rows, columns = (
                slice(side - 1 - dilation * (k // 2), side + dilation * (k // 2), dilation)
                for side, k, dilation in zip(window, convolution.kernel_size, convolution.dilation, strict=True)
            )
            table[:, rows, columns] = convolution.weight[:, 0]
            if self.local is not None:
                # A window of side 1 has no neighbours in its table.
                near = [min(1, side - 1) for side in window]
                rows, columns = (slice(side - 1 - n, side + n) for side, n in zip(window, near, strict=True))
                local = self.local.weight.zero_()
                local[:, 0, 1 - near[0] : 2 + near[0], 1 - near[1] : 2 + near[1]] = table[:, rows, columns]
                table[:, rows, columns] = 0
            if bias is not None:
                self.op.bias.copy_(bias)
                self.op.bias.requires_grad_(bias.requires_grad)
        for parameter in (self.op.weight, *([] if self.local is None else self.local.parameters())):
            parameter.requires_grad_(convolution.weight.requires_grad)
        self.train(convolution.training)

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.op(input)
        if self.local is None:
            return output
        # In place, where autograd does not mind: that saves a tenth of the layer's time.
        return output + self.local(input) if torch.is_grad_enabled() else output.add_(self.local(input))


FilterFn = Callable[[nn.Module, str], bool]


def convert_depthwise(
    model: nn.Module,
    *,
    window_size: int | tuple[int, int] = 7,
    module_filter_fn: FilterFn | None = None,
    keep_local: bool = True,
    min_kernel_size: int = 5,
    dry_run: bool = False,
    input_size: int | tuple[int, ...] | None = None,
    measure: bool = False,
) -> ConversionReport:
    """Replace the stride-1 depthwise convolutions of ``model`` in place by WBMM, with their kernels carried over.

    Each becomes a :class:`ConvertedDepthwise2d`. The outputs are equal on maps of one window, and on any map for pairs
    of positions inside one window or, with ``keep_local``, at distance 1 at most; what is lost, fine-tuning has to
    mend. Make the optimiser afterwards: the parameters are new ones. A state dict of a converted model loads into a
    fresh model converted the same way. Merge training branches (timm's ``reparameterize_model``) before: that reads
    the convolutions' weights.

    Args:
        model: any module, changed in place; not a scripted one.
        window_size: one side or (height, width). It holds kernels up to 2 * window - 1, dilation counted.
        module_filter_fn: ``module_filter_fn(module, name)`` says whether to convert a layer that could be.
        keep_local: keep the kernel's centre as a 3x3 depthwise convolution: the traffic between windows. It is moved
            out of the operator's table, not counted twice.
        min_kernel_size: layers whose longer kernel side is smaller are left: of a 3x3 kernel ``keep_local`` leaves
            nothing to the operator, which then begins at zero.
        dry_run: change nothing.
        input_size: what to run once for the sizes of maps in the report: one side or (height, width) of an image with
            three channels, (C, H, W), or (B, C, H, W).
        measure: time every layer before and after, in inference and in a training step (forward and all gradients), on
            maps of these sizes in the layout that they have in that run.

    Returns:
        What was (or, in a dry run, would be) converted and what was left and why; its ``undo()`` puts the
        convolutions back.

    Raises:
        TypeError: ``model`` is no module, or a scripted one.
        ValueError: nothing to convert (not in a dry run), with the reasons; an argument does not fit.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.ReLU())
        >>> report = convert_depthwise(model, input_size=56)
        >>> type(model[1]).__name__, report.layers[0].name, report.layers[0].map_size
        ('ConvertedDepthwise2d', '1', (56, 56))
        >>> report.undo()
        >>> type(model[1]).__name__
        'Conv2d'
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"convert_depthwise: model: got {type(model).__name__}, expected an nn.Module that is not scripted"
        )
    window = sides_of(window_size, "convert_depthwise: window_size")
    if not isinstance(min_kernel_size, int) or min_kernel_size < 1:
        raise ValueError(f"convert_depthwise: min_kernel_size: got {min_kernel_size!r}, expected a positive int")
    if measure and input_size is None:
        raise ValueError("convert_depthwise: measure: needs an input_size, got None")
    wanted: list[tuple[str, nn.Conv2d]] = []
    left: list[LeftLayer] = []
    for name, module, reason in _candidates(model, window, min_kernel_size):
        if reason is None and module_filter_fn is not None and not module_filter_fn(module, name):
            reason = "module_filter_fn said no"
        if reason is None:
            wanted.append((name, module))
        else:
            left.append(LeftLayer(name, reason))
    if not wanted and not dry_run:
        raise ValueError(f"convert_depthwise: nothing to convert: {_summary(left)}")

    size = None if input_size is None else full_size(input_size)
    maps = {} if size is None else seen_maps(model, [module for _, module in wanted], size)
    with torch.inference_mode(False):  # parameters made in inference mode could never be trained
        pairs = [(module, ConvertedDepthwise2d(module, window, keep_local=keep_local)) for _, module in wanted]
    seconds = measured(pairs, maps) if measure else {}
    layers = []
    for name, module in wanted:
        seen = maps.get(module)
        layers.append(
            ConvertedLayer(
                name,
                module.out_channels,
                _two(module.kernel_size),
                _two(module.dilation),
                window,
                keep_local,
                None if seen is None else seen.shape[0],
                None if seen is None else (seen.shape[2], seen.shape[3]),
                seconds.get(module),
            )
        )
    replacements: list[Replacement] = []
    if not dry_run:
        converted = dict(pairs)
        for parent in list(model.modules()):
            for attribute, child in list(parent.named_children()):
                if isinstance(child, nn.Conv2d) and child in converted:
                    replacements.append(Replacement(parent, attribute, child, converted[child]))
        for replacement in replacements:
            setattr(replacement.parent, replacement.attribute, replacement.converted)
    return ConversionReport(tuple(layers), tuple(left), size, replacements)


class _Candidate(NamedTuple):
    name: str
    module: nn.Conv2d
    reason: str | None  # why it cannot be converted


def _candidates(model: nn.Module, window: tuple[int, int], min_kernel_size: int) -> Iterator[_Candidate]:
    """Yield every depthwise convolution outside converted layers, each once."""
    inside = {
        part for module in model.modules() if isinstance(module, ConvertedDepthwise2d) for part in module.modules()
    }
    folding = {
        child: type(parent).__name__
        for parent in model.modules()
        if isinstance(parent, Foldable)
        for child in parent.children()
    }
    users: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    for name, module in model.named_modules():
        if not isinstance(module, nn.Conv2d) or module in inside:
            continue
        if module.groups != module.in_channels or (module.groups == 1 and module.out_channels != 1):
            continue
        reason = _unsuitable(module, window, min_kernel_size)
        if reason is None and module is model:
            reason = "it is the model itself, which cannot be replaced in place"
        if reason is None and module in folding:
            reason = f"its {folding[module]} folds it"
        if reason is None and any(users[parameter] > 1 for parameter in module.parameters(recurse=False)):
            reason = "its weight belongs to another layer too"
        yield _Candidate(name, module, reason)


def _unsuitable(convolution: nn.Conv2d, window: tuple[int, int], min_kernel_size: int) -> str | None:
    """Return why a convolution cannot become WBMM, or None."""
    kernel, dilation = _two(convolution.kernel_size), _two(convolution.dilation)
    written = "x".join(map(str, kernel))
    reach = [step * (k // 2) for step, k in zip(dilation, kernel, strict=True)]
    if not convolution.groups == convolution.in_channels == convolution.out_channels:
        return f"{convolution.in_channels} to {convolution.out_channels} channels in {convolution.groups} groups"
    if convolution.stride != (1, 1):
        return f"stride {'x'.join(map(str, convolution.stride))}"
    if not all(k % 2 for k in kernel):
        return f"even kernel {written}"
    if max(kernel) < min_kernel_size:
        return f"kernel {written} below min_kernel_size={min_kernel_size}"
    if any(r > side - 1 for r, side in zip(reach, window, strict=True)):
        needed = ", ".join(str(max(side, r + 1)) for r, side in zip(reach, window, strict=True))
        dilated = "" if dilation == (1, 1) else f" with dilation {'x'.join(map(str, dilation))}"
        return f"kernel {written}{dilated} needs window_size=({needed})"
    if convolution.padding_mode != "zeros":
        return f"padding_mode {convolution.padding_mode!r}"
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    if (
        parametrize.is_parametrized(convolution)
        or any(getattr(convolution, name) for name in hooks)
        or "forward" in vars(convolution)
    ):
        return "parametrised, hooked or patched"
    if type(convolution).forward is nn.Conv2d.forward:
        if convolution.padding != "same" and tuple(convolution.padding) != tuple(reach):
            return f"padding {convolution.padding}, 'same' would be {tuple(reach)}"
    elif not _computes_same(convolution, tuple(reach)):
        return f"{type(convolution).__name__} computes something else than a convolution of the same size"
    return None


def _computes_same(convolution: nn.Conv2d, padding: tuple[int, ...]) -> bool:
    """Try out whether a subclass with a forward of its own pads as 'same' does and changes nothing else."""
    if convolution.weight.device.type == "meta":
        return False
    # A copy, as its forward may keep state; float64, as its rounding is not known.
    trial = copy.deepcopy(convolution).double().eval()
    generator = torch.Generator().manual_seed(0)
    for height, width in ((9, 12), (14, 7)):
        input = torch.randn(1, trial.in_channels, height, width, generator=generator, dtype=torch.float64)
        input = input.to(trial.weight.device)
        with torch.no_grad():
            plain = F.conv2d(input, trial.weight, trial.bias, 1, padding, trial.dilation, trial.groups)
            output = trial(input)
        if output.shape != plain.shape or not torch.allclose(output, plain, rtol=1e-9, atol=1e-12):
            return False
    return True


def _summary(left: list[LeftLayer]) -> str:
    if not left:
        return "the model has no depthwise nn.Conv2d"
    names: dict[str, list[str]] = {}
    for layer in left:
        names.setdefault(layer.reason, []).append(layer.name)
    listed = [
        f"{reason}: {found[0] or 'the model'}{f' and {len(found) - 1} more' if len(found) > 1 else ''}"
        for reason, found in names.items()
    ]
    return "; ".join(listed)


def _two(sides: tuple[int, ...]) -> tuple[int, int]:
    height, width = sides
    return height, width
