"""What a conversion does to each layer: multiply-adds, padding, measured speed, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spotlights.runtime.bench import control_kernel, interleave
from spotlights.runtime.bench_table import Row, format_table
from spotlights.wbmm.windows import layout_of


class Speeds(NamedTuple):
    """Seconds of one layer, lower quartiles of interleaved rounds: the convolution, and what replaces it.

    Attributes:
        before: the convolution in inference.
        after: what replaces it.
        train_before: a training step of the convolution: forward, gradients of the input and of the weights.
        train_after: the same of what replaces it.
    """

    before: float
    after: float
    train_before: float
    train_after: float


@dataclass(frozen=True)
class ConvertedLayer:
    """One depthwise convolution that becomes WBMM.

    Attributes:
        name: as ``named_modules`` has it.
        channels: C.
        kernel_size: of the convolution, as all pairs here (height, width).
        dilation: of the convolution.
        window_size: of the operator.
        keep_local: whether a 3x3 path stays beside it.
        batch: B of the run for sizes, or None without ``input_size`` or where that run did not reach the layer.
        map_size: H and W there (the first map, where there are several), or None.
        seconds: measured on that map, or None.

    Example:
        >>> layer = ConvertedLayer("0", 8, (7, 7), (1, 1), (7, 7), True, 1, (10, 14))
        >>> layer.macs_before, layer.macs_after, layer.padding
        (54880, 86912, 1.4)
    """

    name: str
    channels: int
    kernel_size: tuple[int, int]
    dilation: tuple[int, int]
    window_size: tuple[int, int]
    keep_local: bool
    batch: int | None = None
    map_size: tuple[int, int] | None = None
    seconds: Speeds | None = None

    @property
    def macs_before(self) -> int | None:
        """Multiply-adds of the convolution for one image."""
        return None if self.map_size is None else self.channels * _area(self.map_size) * _area(self.kernel_size)

    @property
    def macs_after(self) -> int | None:
        """Multiply-adds of the operator, padded windows counted whole, and the 3x3 path for one image."""
        if self.map_size is None:
            return None
        local = 9 * _area(self.map_size) if self.keep_local else 0
        return self.channels * (self._padded_area() * _area(self.window_size) + local)

    @property
    def padding(self) -> float | None:
        """Area of the windows over area of the map."""
        return None if self.map_size is None else self._padded_area() / _area(self.map_size)

    def _padded_area(self) -> int:
        assert self.map_size is not None
        return _area((s + -s % w for s, w in zip(self.map_size, self.window_size, strict=True)))


class LeftLayer(NamedTuple):
    """A depthwise convolution that stays as it is."""

    name: str
    reason: str


class Replacement(NamedTuple):
    """Where a module was replaced: the parent's attribute, what was there, and what is now."""

    parent: nn.Module
    attribute: str
    original: nn.Module
    converted: nn.Module


@dataclass(frozen=True)
class ConversionReport:
    """What :func:`spotlights.wbmm.convert_depthwise` converted (in a dry run: would convert) and what it left.

    ``print(report)`` shows a table.

    Attributes:
        layers: those converted, in the model's order.
        left: the other depthwise convolutions, with the reason.
        input_size: (B, C, H, W) of the run for sizes, or None.

    Example:
        >>> from spotlights.wbmm import convert_depthwise
        >>> model = nn.Sequential(nn.Conv2d(3, 3, 7, padding=3, groups=3), nn.Conv2d(3, 3, 3, padding=1, groups=3))
        >>> print(convert_depthwise(model, dry_run=True, input_size=20))
        input 1x3x20x20
        layer  channels  kernel  dilation  window  map    padding  MACs           inference ms  training ms
        0      3         7x7     1x1       7x7     20x20  1.10x    58.8k > 75.6k  -             -
        left: 1 (kernel 3x3 below min_kernel_size=5)
    """

    layers: tuple[ConvertedLayer, ...]
    left: tuple[LeftLayer, ...]
    input_size: tuple[int, ...] | None = None
    _replacements: list[Replacement] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Put the convolutions back, with the weights that they had before, in the model that was converted.

        They go to the device and dtype, and into the mode, that their replacements have by now. Does nothing after a
        dry run or when called again.

        Raises:
            ValueError: something else has replaced a converted layer meanwhile; nothing is changed.
        """
        for parent, attribute, _, converted in self._replacements:
            if getattr(parent, attribute, None) is not converted:
                raise ValueError(f"undo: {attribute} of {type(parent).__name__} is no longer the converted layer")
        for parent, attribute, original, converted in self._replacements:
            now = next(converted.parameters())
            setattr(parent, attribute, original.to(now.device, now.dtype).train(converted.training))
        self._replacements.clear()

    def rows(self) -> list[Row]:
        """Return one row a layer, converted ones first; plain numbers in multiply-adds and seconds."""
        rows: list[Row] = []
        for layer in self.layers:
            s = layer.seconds
            rows.append(
                {
                    "layer": layer.name,
                    "channels": layer.channels,
                    "kernel": _written(layer.kernel_size),
                    "dilation": _written(layer.dilation),
                    "window": _written(layer.window_size),
                    "batch": layer.batch,
                    "map": None if layer.map_size is None else _written(layer.map_size),
                    "macs_before": layer.macs_before,
                    "macs_after": layer.macs_after,
                    "padding": layer.padding,
                    **{f"seconds_{name}": None if s is None else getattr(s, name) for name in Speeds._fields},
                    "left_because": None,
                }
            )
        rows.extend({"layer": layer.name, "left_because": layer.reason} for layer in self.left)
        return rows

    def to_csv(self) -> str:
        """Return :meth:`rows` as CSV."""
        return format_table(self.rows())

    def __str__(self) -> str:
        lines = [] if self.input_size is None else [f"input {_written(self.input_size)}"]
        table = [["layer", "channels", "kernel", "dilation", "window", "map", "padding", "MACs"]]
        table[0] += ["inference ms", "training ms"]
        for layer in self.layers:
            table.append(
                [
                    layer.name,
                    str(layer.channels),
                    _written(layer.kernel_size),
                    _written(layer.dilation),
                    _written(layer.window_size),
                    "-" if layer.map_size is None else _written(layer.map_size),
                    "-" if layer.padding is None else f"{layer.padding:.2f}x",
                    _macs(layer.macs_before, layer.macs_after),
                    "-" if layer.seconds is None else _change(layer.seconds.before, layer.seconds.after),
                    "-" if layer.seconds is None else _change(layer.seconds.train_before, layer.seconds.train_after),
                ]
            )
        if self.layers:
            widths = [max(map(len, column)) for column in zip(*table, strict=True)]
            lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += [f"left: {layer.name} ({layer.reason})" for layer in self.left]
        return "\n".join(lines or ["no depthwise convolution"])


def full_size(input_size: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return an input size as (B, C, H, W).

    Raises:
        ValueError: it is none of a side, (H, W), (C, H, W) and (B, C, H, W).

    Example:
        >>> full_size(224), full_size((1, 96, 128))
        ((1, 3, 224, 224), (1, 1, 96, 128))
    """
    sides = tuple(input_size) if isinstance(input_size, (tuple, list)) else (input_size, input_size)
    if not 2 <= len(sides) <= 4 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(
            f"input_size: got {input_size!r}, expected positive ints: a side, (H, W), (C, H, W) or (B, C, H, W)"
        )
    return (1, 3)[: 4 - len(sides)] + sides


class SeenMap(NamedTuple):
    """The first map that reached a layer."""

    shape: tuple[int, ...]
    layout: torch.memory_format


def seen_maps(model: nn.Module, layers: Sequence[nn.Module], size: tuple[int, ...]) -> dict[nn.Module, SeenMap]:
    """Run zeros of that size through ``model`` in eval mode and return what reached each of the layers.

    Raises:
        ValueError: the model fails on such an input.
    """
    maps: dict[nn.Module, SeenMap] = {}

    def note(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        maps.setdefault(module, SeenMap(tuple(arguments[0].shape), layout_of(arguments[0])))

    modes = {module: module.training for module in model.modules()}
    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    first = next(model.parameters(), torch.empty(0))
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(size, device=first.device, dtype=first.dtype))
    except Exception as error:
        what = str(error).partition("\n")[0]
        raise ValueError(f"input_size: the model fails on an input {_written(size)}: {what}") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    return maps


def measured(
    pairs: Iterable[tuple[nn.Conv2d, nn.Module]], maps: Mapping[nn.Module, SeenMap]
) -> dict[nn.Module, Speeds]:
    """Return the speeds of every convolution with a map, layers of one kind timed once."""
    known: dict[tuple[object, ...], Speeds] = {}
    speeds: dict[nn.Module, Speeds] = {}
    for convolution, converted in pairs:
        if (seen := maps.get(convolution)) is None:
            continue
        kind = (type(convolution), convolution.kernel_size, convolution.dilation, convolution.bias is None, seen)
        if kind not in known:
            known[kind] = _time(convolution, converted, seen)
        speeds[convolution] = known[kind]
    return speeds


def _time(convolution: nn.Conv2d, converted: nn.Module, seen: SeenMap) -> Speeds:
    weight = convolution.weight
    input = torch.randn(seen.shape, device=weight.device, dtype=weight.dtype).to(memory_format=seen.layout)
    both = {"before": convolution, "after": converted}
    mode = converted.training
    times = []
    for training in (False, True):
        converted.train(training)
        calls = {name: _call(module, input.clone().requires_grad_(training)) for name, module in both.items()}
        with torch.set_grad_enabled(training):
            timings = interleave(
                calls, max_seconds=0.6, control=control_kernel(weight.device), device=weight.device
            ).values()
        times += [timing.quantile(0.25) for timing in timings]
    converted.train(mode)
    return Speeds(*times)


def _call(module: nn.Module, input: Tensor) -> Callable[[], object]:
    """Return the forward pass, or where the input wants a gradient a training step that leaves no trace."""
    if not input.requires_grad:
        return lambda: module(input)
    wanted = [input, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    with torch.no_grad():
        gradient = torch.ones_like(module(input))
    return lambda: torch.autograd.grad(module(input), wanted, gradient)


def _area(sides: Iterable[int]) -> int:
    height, width = sides
    return height * width


def _written(sides: Iterable[int]) -> str:
    return "x".join(map(str, sides))


def _macs(before: int | None, after: int | None) -> str:
    return "-" if before is None or after is None else f"{_short(before)} > {_short(after)}"


def _short(count: int) -> str:
    for unit, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{letter}"
    return str(count)


def _change(before: float, after: float) -> str:
    return f"{1000 * before:.3f} > {1000 * after:.3f} ({before / after:.2f}x)"
