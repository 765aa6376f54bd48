"""``spotlights wbmm bench``: WBMM against what else mixes positions of a map, timed in turn and checked beforehand.

All providers compute the operator alone: no bias, shortcut, normalisation or projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from spotlights.runtime.bench import control_kernel, interleave
from spotlights.runtime.bench_run import WrongResultError
from spotlights.runtime.bench_table import LOW, Results, Row, measures, peak_bytes
from spotlights.wbmm.providers import LAYOUTS, Provider, providers_for

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest difference from float64, as a part of the largest value.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_MOST_TAPS = {"cpu": 1.3e10, "cuda": 3e12}  # a call of some seconds, at the pace of slow convolutions
_TENSORS_HELD = {"forward": 20, "train": 32}  # of one map's size, at most, by inputs, outputs and temporaries


@dataclass(frozen=True)
class Case:
    """The map that all providers work on: batch, channels, height, width."""

    batch: int
    channels: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.channels} channels, batch {self.batch}, {self.height}x{self.width}"


def _square(channels: int, pairs: Sequence[tuple[int, int]]) -> tuple[Case, ...]:
    return tuple(Case(batch, channels, side, side) for batch, side in pairs)


_GRID = ((1, 14), (1, 56), (16, 14), (16, 28), (64, 28), (128, 14), (1, 224))
SUITES: dict[str, tuple[Case, ...]] = {
    "quick": _square(256, ((1, 14), (16, 14), (1, 56))),
    "cpu": tuple(case for channels in (64, 256, 320) for case in _square(channels, _GRID)),
    "paper": _square(256, [(batch, side) for side in (14, 28, 56, 224) for batch in (1, 4, 16, 64, 128)]),
}


# (channels, height, width, device, dtype, train) -> providers, and reasons for those left out.
Source = Callable[[int, int, int, torch.device, torch.dtype, bool], tuple[Sequence[Provider], Sequence[str]]]


class Watcher(Protocol):
    """Who hears of the progress."""

    def step(self, epoch: int, step: int, steps: int) -> None: ...

    def case_done(self, case: Case, rows: Sequence[Row], skipped: Sequence[str]) -> None: ...


def run_cases(
    cases: Sequence[Case],
    results: Results,
    fixed: Row,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    train: bool = False,
    rounds: int = 15,
    providers: Source = providers_for,
    watcher: Watcher | None = None,
) -> None:
    """Verify and time all providers of each case that ``results`` lacks.

    Args:
        cases: what to measure.
        results: takes the rows, case by case.
        fixed: further columns of every row: the environment, measured peaks.
        device: where to compute.
        dtype: of maps and weights.
        train: time forward and all gradients instead of inference.
        rounds: samples of each provider; slow ones get fewer.
        providers: what to compare.
        watcher: told of the progress.

    Raises:
        WrongResultError: a provider computed something else than the definition.

    Example:
        >>> results = Results(None, {})
        >>> run_cases([Case(1, 32, 7, 7)], results, {}, rounds=1)
        >>> {"depthwise", "attention"} <= {row["family"] for row in results.rows}
        True
    """
    where = torch.device(device)
    for number, case in enumerate(cases, start=1):
        if results.has(tuple(case_columns(case, where, dtype, train).items())):
            continue
        report = _Steps(watcher, number)
        rows, skipped = _measure(case, fixed, where, dtype, train, rounds, providers, report)
        if rows:
            results.add(rows)
        if watcher is not None:
            watcher.case_done(case, rows, skipped)


def case_columns(case: Case, device: torch.device, dtype: torch.dtype, train: bool) -> Row:
    """Return the columns that name a case in the table."""
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "task": "train" if train else "forward",
        "channels": case.channels,
        "batch": case.batch,
        "height": case.height,
        "width": case.width,
    }


class _Steps:
    """The steps of one case: a third for checking the providers, two for timing them."""

    def __init__(self, watcher: Watcher | None, number: int) -> None:
        self.watcher = watcher
        self.number = number

    def checked(self, done: int, count: int) -> None:
        if self.watcher is not None:
            self.watcher.step(self.number, round(1000 * done / count / 3), 1000)

    def timed(self, done: int, count: int) -> None:
        if self.watcher is not None:
            self.watcher.step(self.number, round(1000 * (1 + 2 * done / count) / 3), 1000)


@dataclass
class Prepared:
    """A provider ready to be called on a case.

    Attributes:
        input: (B, maps_in * C, H, W).
        weights: its parameters.
        grad_output: (B, C, H, W) in training, else None.
        run: one timed call; returns the output, in training also the gradients of input and weights.
    """

    input: Tensor
    weights: list[nn.Parameter]
    grad_output: Tensor | None
    run: Callable[[], tuple[Tensor, ...]]


def prepare(
    provider: Provider,
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    train: bool,
    shared: dict[tuple[int, str], Tensor],
) -> Prepared:
    """Draw inputs (kept in ``shared`` for all providers of a case) and weights, and return the call to time."""
    layout = LAYOUTS[provider.layout]

    def draw(maps: int, seed: int) -> Tensor:
        key = (seed, provider.layout)
        if key not in shared:
            generator = torch.Generator(device).manual_seed(seed)
            shape = (case.batch, maps * case.channels, case.height, case.width)
            values = torch.randn(shape, generator=generator, device=device).to(dtype)
            shared[key] = values.contiguous(memory_format=layout)
        return shared[key]

    input = draw(provider.maps_in, provider.maps_in)
    generator = torch.Generator(device).manual_seed(10)
    weights = [
        nn.Parameter(torch.randn(case.channels, *shape, generator=generator, device=device).mul(0.02).to(dtype))
        for shape in provider.parameters
    ]
    operator = provider.prepare(*weights, train=train)
    if not train:

        @torch.inference_mode()
        def infer() -> tuple[Tensor, ...]:
            return (operator(input),)

        return Prepared(input, weights, None, infer)
    grad_output = draw(1, 4)
    leaf = input.detach().requires_grad_()

    def step() -> tuple[Tensor, ...]:
        output = operator(leaf)
        return output.detach(), *torch.autograd.grad(output, [leaf, *weights], grad_output)

    return Prepared(input, weights, grad_output, step)


def verify(provider: Provider, case: Case, prepared: Prepared, dtype: torch.dtype) -> None:
    """Compare a call's results with the definition in float64, on the first and last channels (and images).

    Raises:
        WrongResultError: they differ.
    """
    train = prepared.grad_output is not None
    group, channels = provider.group, case.channels
    picked = sorted({*range(group), *range(channels - group, channels)})
    read = [part * channels + channel for part in range(provider.maps_in) for channel in picked]
    # The weights' gradients sum over all images.
    images = list(range(case.batch)) if train else sorted({0, case.batch - 1})
    results = prepared.run()
    input = prepared.input[images][:, read].double()
    weights = [weight.detach()[picked].double() for weight in prepared.weights]
    if prepared.grad_output is None:
        expected = [provider.expected(input, *weights)]
    else:
        leaves = [tensor.requires_grad_() for tensor in (input, *weights)]
        output = provider.expected(*leaves)
        expected = [output, *torch.autograd.grad(output, leaves, prepared.grad_output[:, picked].double())]
    names = ["output", "gradient of the input", *(f"gradient of weight {i}" for i in range(len(weights)))]
    for name, result, wanted in zip(names, results, expected, strict=False):
        if name == "output":
            result = result[images][:, picked]
        else:
            result = result[:, read] if name == "gradient of the input" else result[picked]
        if result.shape != wanted.shape:
            raise WrongResultError(f"{provider.name}: {name} has shape {tuple(result.shape)} in {case}")
        error = float((result.detach().double() - wanted.detach()).abs().max() / wanted.detach().abs().max())
        if not error <= _TOLERANCE[dtype]:
            raise WrongResultError(
                f"{provider.name}: {name} differs from the definition by {error:.1e} of its largest value, allowed "
                f"{_TOLERANCE[dtype]:.0e}, in {case}"
            )


def _measure(
    case: Case,
    fixed: Row,
    device: torch.device,
    dtype: torch.dtype,
    train: bool,
    rounds: int,
    providers: Source,
    report: _Steps,
) -> tuple[list[Row], list[str]]:
    columns = case_columns(case, device, dtype, train)
    elements = case.batch * case.channels * case.height * case.width
    need, free = _TENSORS_HELD[columns["task"]] * elements * dtype.itemsize, available_bytes(device)
    if free is not None and need > free:
        return [], [f"the whole case: it may take {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"]
    found, reasons = providers(case.channels, case.height, case.width, device, dtype, train)
    skipped = list(reasons)
    calls: dict[str, Callable[[], object]] = {}
    rows: list[Row] = []
    shared: dict[tuple[int, str], Tensor] = {}
    with exact_float32():
        for index, provider in enumerate(found):
            report.checked(index, len(found))
            if provider.taps * elements > _MOST_TAPS[device.type]:
                skipped.append(f"{provider.name}: would take too long")
                continue
            try:
                prepared = prepare(provider, case, device, dtype, train, shared)
                verify(provider, case, prepared, dtype)
                memory = peak_bytes(prepared.run, device)
            except torch.OutOfMemoryError:
                skipped.append(f"{provider.name}: out of memory")
                continue
            except RuntimeError as error:
                # What others lack for a dtype is their affair; ours must run where it says that it can.
                if provider.ours:
                    raise
                skipped.append(f"{provider.name}: {str(error).splitlines()[0]}")
                continue
            calls[provider.name] = prepared.run
            rows.append({**columns, **_describe(provider, elements, dtype, prepared, train), **memory})
        if not rows:
            return [], skipped
        control = control_kernel(device)
        timings = interleave(
            {**calls, "control": control},
            rounds=rounds,
            warmup=1,
            max_seconds=2.0,
            control=control,
            device=device,
            on_round=report.timed,
        )
    pace = measures(timings["control"])[LOW]
    return [{**row, **measures(timings[row["provider"]]), "control_seconds": pace, **fixed} for row in rows], skipped


def _describe(provider: Provider, elements: int, dtype: torch.dtype, prepared: Prepared, train: bool) -> Row:
    # Training: output, gradient of the input and gradient of the weights, each as much work as the output.
    flops = None if provider.multiply_adds is None else 2 * provider.multiply_adds * elements * (3 if train else 1)
    # The least traffic: every tensor read or written once a pass.
    maps = (2 * provider.maps_in + 1) + (provider.maps_in + 1) if train else provider.maps_in + 1
    weights = sum(weight.numel() for weight in prepared.weights) * (3 if train else 1)
    return {
        "provider": provider.name,
        "family": provider.family,
        "method": provider.method,
        "size": provider.size,
        "layout": provider.layout,
        "default": int(provider.default),
        "flops": None if flops is None else round(flops),
        "bytes": (maps * elements + weights) * dtype.itemsize,
    }


def available_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, or None where that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


@contextmanager
def exact_float32() -> Iterator[None]:
    """Keep cuDNN from convolving float32 in TF32, which nothing else here does."""
    flags = {"enabled": True, "benchmark": True, "deterministic": False, "allow_tf32": False}
    with torch.backends.cudnn.flags(**flags):
        yield
