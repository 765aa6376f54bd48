"""What ``spotlights wbmm bench`` compares: WBMM's backends and other operators that mix positions of a map.

Every provider comes with its definition, so that it can be checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.wbmm import reference
from spotlights.wbmm.backends import BACKENDS, Call
from spotlights.wbmm.functional import PreparedCache, apply, count_multiply_adds
from spotlights.wbmm.layers import WBMM2d
from spotlights.wbmm.windows import join_windows, layout_of, split_windows

WINDOWS = (7, 14)
KERNELS = (5, 7, 13, 27)
HEAD = 32
LAYOUTS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}

Operator = Callable[..., Tensor]


@dataclass(frozen=True)
class Provider:
    """One way of mixing the positions of a map.

    Attributes:
        name: unique within a case.
        family: "wbmm", "wbmm uncached", "two-table", "depthwise", "fft" or "attention".
        method: the backend's name, or the family's.
        size: side of the window or kernel.
        layout: of the input, "NHWC" or "NCHW".
        summary: one line for readers.
        parameters: shapes of the weights for one channel each, channels first.
        prepare: makes the operator ``input -> output`` from the weights; what it keeps between calls is not timed.
        expected: the definition, ``(input, *weights) -> output``, used in float64.
        multiply_adds: for each position and channel, those with zero padding left out; None where a count says nothing.
        taps: the same with the padding, which slow implementations do work on.
        maps_in: maps of C channels that the input holds.
        group: channels that depend on each other.
        default: whether ``wbmm2d`` takes this backend when none is named.
    """

    name: str
    family: str
    method: str
    size: int
    layout: str
    summary: str
    parameters: tuple[tuple[int, ...], ...]
    prepare: Callable[..., Operator]
    expected: Operator
    multiply_adds: float | None
    taps: float
    maps_in: int = 1
    group: int = 1
    default: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is computed by this package."""
        return self.family in ("wbmm", "wbmm uncached", "two-table")


def providers_for(
    channels: int, height: int, width: int, device: torch.device, dtype: torch.dtype, train: bool
) -> tuple[list[Provider], list[str]]:
    """Return the providers for maps of that size, and a line for each kind left out.

    Example:
        >>> found, _ = providers_for(32, 14, 14, torch.device("cpu"), torch.float64, False)
        >>> [provider.name for provider in found if provider.size == 7 and provider.ours]
        ['matmul 7x7 NCHW', 'matmul 7x7 NCHW uncached', 'reference 7x7 NCHW']
    """
    found: list[Provider] = []
    skipped: list[str] = []
    for window in WINDOWS:
        found += _operator(height, width, window, device, dtype, train)
    local, whole = WINDOWS
    found += _two_tables(height, width, whole, local, device, dtype)
    for kernel in KERNELS:
        if train and kernel > 13:
            skipped.append(f"depthwise {kernel}x{kernel}: not timed in training, its gradients take too long")
            continue
        found += (_depthwise(height, width, kernel, layout) for layout in LAYOUTS)
    for window in WINDOWS:
        found.append(_fft(height, width, window))
        if channels % HEAD or height % window or width % window:
            skipped.append(f"attention {window}x{window}: needs {HEAD} channels a head and whole windows")
        else:
            found.append(_attention(window))
    return found, skipped


def _per_element(height: int, width: int, window: int) -> float:
    return count_multiply_adds((1, 1, height, width), (window, window)) / max(1, height * width)


def _definition(input: Tensor, weight: Tensor, local_weight: Tensor | None = None) -> Tensor:
    return reference.forward(input, weight, None, False, local_weight)


def _operator(
    height: int, width: int, window: int, device: torch.device, dtype: torch.dtype, train: bool
) -> Iterator[Provider]:
    call = Call(device, dtype, (window, window), None)
    default = BACKENDS.select(call).name
    for backend in BACKENDS:
        # The definition convolves with a kernel of the table's size: as slow as that depthwise convolution.
        if backend.why_not(call) or (backend.name == "reference" and train and 2 * window - 1 > 13):
            continue
        for layout in LAYOUTS if backend.name not in ("matmul", "reference") else ("NCHW",):

            def prepare(weight: nn.Parameter, *, train: bool, name: str = backend.name) -> Operator:
                module = WBMM2d(weight.shape[0], window, shortcut=False, backend=name, device="meta")
                module.weight = weight
                return module.train(train)

            def rebuild(weight: nn.Parameter, *, train: bool, name: str = backend.name) -> Operator:
                return lambda input: apply(input, weight, None, False, None, name, cache=None)

            kinds = [("wbmm", "", backend.summary, prepare)]
            if backend.name == "matmul":
                kept = "the paper's form, M rebuilt in every step" if train else "the paper's form, M kept"
                kinds = [("wbmm", "", kept, prepare)]
                if not train:
                    kinds.append(("wbmm uncached", " uncached", "the paper's form, M rebuilt in every call", rebuild))
            for family, suffix, summary, make in kinds:
                yield Provider(
                    name=f"{backend.name} {window}x{window} {layout}{suffix}",
                    family=family,
                    method=backend.name,
                    size=window,
                    layout=layout,
                    summary=summary,
                    parameters=((2 * window - 1, 2 * window - 1),),
                    prepare=make,
                    expected=_definition,
                    multiply_adds=_per_element(height, width, window),
                    taps=(2 * window - 1) ** 2 if backend.name == "reference" else window**2,
                    default=backend.name == default and not suffix,
                )


def _two_tables(
    height: int, width: int, window: int, local: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Provider]:
    call = Call(device, dtype, (window, window), (local, local))
    default = BACKENDS.select(call).name
    for backend in BACKENDS:
        if backend.why_not(call) or backend.name == "reference":
            continue

        def prepare(
            weight: nn.Parameter, local_weight: nn.Parameter, *, train: bool, name: str = backend.name
        ) -> Operator:
            cache = None if train else PreparedCache()

            def operator(input: Tensor) -> Tensor:
                return apply(input, weight, None, False, local_weight, name, cache)

            return operator

        layout = "NCHW" if backend.name == "matmul" else "NHWC"
        yield Provider(
            name=f"{backend.name} {window}x{window}+{local}x{local} {layout}",
            family="two-table",
            method=backend.name,
            size=window,
            layout=layout,
            summary=f"a second table within {local}x{local} sub-windows",
            parameters=((2 * window - 1, 2 * window - 1), (2 * local - 1, 2 * local - 1)),
            prepare=prepare,
            expected=_definition,
            multiply_adds=_per_element(height, width, window),
            taps=window**2,
            default=backend.name == default,
        )


def _taps_inside(side: int, kernel: int) -> int:
    """Return how often a kernel of that side meets a row of that many values, over all its places."""
    reach = kernel // 2
    return sum(min(place + reach, side - 1) - max(place - reach, 0) + 1 for place in range(side))


def _depthwise(height: int, width: int, kernel: int, layout: str) -> Provider:
    def convolve(input: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(input, weight[:, None], padding=kernel // 2, groups=input.shape[1])

    return Provider(
        name=f"depthwise {kernel}x{kernel} {layout}",
        family="depthwise",
        method="depthwise",
        size=kernel,
        layout=layout,
        summary="torch's conv2d with one group a channel",
        parameters=((kernel, kernel),),
        prepare=lambda weight, *, train: lambda input: convolve(input, weight),
        expected=convolve,
        multiply_adds=_taps_inside(height, kernel) * _taps_inside(width, kernel) / max(1, height * width),
        taps=kernel**2,
    )


def _fft(height: int, width: int, window: int) -> Provider:
    # Only offsets of a window wrap around, and they land outside the part that is read.
    period = 2 * window

    def spectrum(weight: Tensor) -> Tensor:
        return torch.fft.rfft2(weight.flip(1, 2), (period, period))[:, None, None]

    def convolve(input: Tensor, kernel: Tensor) -> Tensor:
        windows = split_windows(input, (window, window)).transpose(3, 4)
        product = torch.fft.rfft2(windows, (period, period)) * kernel
        output = torch.fft.irfft2(product, (period, period))[..., window - 1 : -1, window - 1 : -1]
        size = (input.shape[2], input.shape[3])
        return join_windows(output.transpose(3, 4), size, layout_of(input))

    def prepare(weight: nn.Parameter, *, train: bool) -> Operator:
        if train:
            return lambda input: convolve(input, spectrum(weight))
        kept = spectrum(weight.detach())
        return lambda input: convolve(input, kept)

    return Provider(
        name=f"fft {window}x{window} NCHW",
        family="fft",
        method="fft",
        size=window,
        layout="NCHW",
        summary="each window by torch.fft, the table's spectrum kept in inference",
        parameters=((2 * window - 1, 2 * window - 1),),
        prepare=prepare,
        expected=_definition,
        multiply_adds=None,
        taps=window**2,
    )


def _attention(window: int) -> Provider:
    def heads(input: Tensor) -> Tensor:
        """Return query, key and value, (3, B * windows, heads, positions, 32)."""
        windows = split_windows(input, (window, window)).unflatten(1, (3, -1, HEAD))
        windows = windows.permute(1, 0, 4, 6, 2, 5, 7, 3)
        return windows.flatten(5, 6).flatten(1, 3).contiguous()

    def join(output: Tensor, input: Tensor) -> Tensor:
        batch, _, height, width = input.shape
        output = output.unflatten(0, (batch, height // window, width // window)).unflatten(4, (window, window))
        output = output.permute(0, 3, 6, 1, 4, 2, 5).flatten(1, 2)
        return join_windows(output, (height, width), layout_of(input))

    def attend(input: Tensor) -> Tensor:
        query, key, value = heads(input)
        return join(F.scaled_dot_product_attention(query, key, value), input)

    def expected(input: Tensor) -> Tensor:
        query, key, value = heads(input)
        return join(torch.softmax(query @ key.mT / HEAD**0.5, dim=-1) @ value, input)

    return Provider(
        name=f"attention {window}x{window} NHWC",
        family="attention",
        method="attention",
        size=window,
        layout="NHWC",
        summary="scaled_dot_product_attention in windows, heads of 32 channels; reads q, k and v, no projections",
        parameters=(),
        prepare=lambda *, train: attend,
        expected=expected,
        multiply_adds=2 * window**2,
        taps=2 * window**2,
        maps_in=3,
        group=HEAD,
    )
