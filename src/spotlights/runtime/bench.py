"""Interleaved timing: functions are compared inside one run, so that a throttled machine slows all of them alike."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from spotlights.runtime import native

_SLOW = 1.25  # a round counts as disturbed when its control kernel took this many times the best


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one function, one sample a round.

    Attributes:
        seconds: one sample for each round kept, in order.
        calls: calls averaged in one sample.
        discarded: rounds thrown away because the control kernel ran slow in them.

    Example:
        >>> timing = Timing(seconds=(0.25, 0.5, 0.375))
        >>> timing.minimum, timing.median, timing.quantile(0.25)
        (0.25, 0.375, 0.3125)
    """

    seconds: tuple[float, ...]
    calls: int = 1
    discarded: int = 0

    @property
    def minimum(self) -> float:
        """Seconds per call in the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds per call in the middle round."""
        return self.quantile(0.5)

    def quantile(self, q: float) -> float:
        """Seconds per call at quantile ``q`` in [0, 1], linear between samples; low ones suit shared machines."""
        return float(np.quantile(self.seconds, q))


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 20,
    warmup: int = 2,
    min_seconds: float = 0.005,
    max_seconds: float = math.inf,
    control: Callable[[], object] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    on_round: Callable[[int, int], None] | None = None,
) -> dict[str, Timing]:
    """Time every function once a round, in an order shuffled each round.

    Args:
        functions: name -> function without arguments.
        rounds: samples wanted of each function.
        warmup: untimed calls of each function before the first round.
        min_seconds: shortest sample; a faster function is called several times within one sample.
        max_seconds: a function whose ``rounds`` samples would take longer than this all together gets fewer, at least 3
            (or ``rounds``).
        control: fixed work such as `control_kernel()`, timed before and after each round. Rounds in which it took
            more than 1.25 times its best are discarded and repeated, up to ``3 * rounds`` rounds in all; on a machine
            that never calms down fewer samples than ``rounds`` remain.
        device: "cpu" for the wall clock, a CUDA device for CUDA events on its current stream.
        seed: of the order.
        on_round: called after each round with the rounds kept so far and those wanted.

    Returns:
        name -> `Timing`, in the order of ``functions``; all share ``discarded``.

    Raises:
        ValueError: no function, or ``rounds`` below 1.

    Example:
        >>> timings = interleave({"sum": lambda: sum(range(100)), "max": lambda: max(range(100))}, rounds=3)
        >>> len(timings["sum"].seconds), timings["max"].minimum > 0
        (3, True)
    """
    if not functions:
        raise ValueError("functions: got none, expected at least one to time")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, expected at least 1")
    sample = _cuda_sample if torch.device(device).type == "cuda" else _cpu_sample
    where = torch.device(device)
    timed = dict(functions)
    for function in timed.values():
        for _ in range(warmup):
            function()
    calls, wanted = {}, {}
    for name, function in timed.items():
        calls[name], seconds = _calibrate(sample, function, min_seconds, where)
        affordable = math.floor(min(rounds, max_seconds / max(seconds, 1e-9)))
        wanted[name] = max(min(3, rounds), affordable)
    control_calls = _calibrate(sample, control, min_seconds, where)[0] if control else 0

    order = random.Random(seed)
    names = list(timed)
    samples: list[dict[str, float]] = []
    pace: list[float] = []  # the slower of the two control samples around each round
    kept: list[int] = []
    most = max(wanted.values())
    while len(kept) < most and len(samples) < (3 * most if control else most):
        taken = {name: sum(name in samples[index] for index in kept) for name in names}
        order.shuffle(names)
        before = sample(control, control_calls, where) if control else 0.0
        due = [name for name in names if taken[name] < wanted[name]]
        samples.append({name: sample(timed[name], calls[name], where) / calls[name] for name in due})
        after = sample(control, control_calls, where) if control else 0.0
        pace.append(max(before, after))
        # The best may come late, so earlier rounds are judged anew.
        kept = [index for index, seconds in enumerate(pace) if seconds <= _SLOW * min(pace)]
        if on_round is not None:
            on_round(min(len(kept), most), most)
    discarded = len(samples) - len(kept)
    return {name: Timing(_samples(name, samples, kept), calls[name], discarded) for name in functions}


def _samples(name: str, samples: list[dict[str, float]], kept: list[int]) -> tuple[float, ...]:
    # A slow function may have run in discarded rounds only: better those than nothing.
    calm = tuple(samples[index][name] for index in kept if name in samples[index])
    return calm or tuple(sample[name] for sample in samples if name in sample)


def control_kernel(device: torch.device | str = "cpu") -> Callable[[], object]:
    """Return the fixed work that tells whether the machine runs at its usual pace: a 256 x 256 float32 product.

    Example:
        >>> control_kernel()().shape
        torch.Size([256, 256])
    """
    matrix = torch.full((256, 256), 0.5, device=device)
    return lambda: matrix @ matrix


def copy_bandwidth(device: torch.device | str = "cpu", size: int = 2**28) -> float:
    """Return the bytes per second, read and written, of copying ``size`` bytes: the best of several copies.

    Example:
        >>> copy_bandwidth(size=2**20) > 1e8
        True
    """
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    timing = interleave({"copy": lambda: target.copy_(source)}, rounds=5, max_seconds=0.5, device=device)["copy"]
    return 2 * 4 * source.numel() / timing.minimum


def peak_flops(device: torch.device | str = "cpu") -> float | None:
    """Return the FLOP/s that torch's threads reach in plain float32 multiply-adds, or None where nothing measures it.

    Example:
        >>> peak = peak_flops()
        >>> peak is None or peak > 1e8
        True
    """
    return native.peak_flops() if torch.device(device).type == "cpu" else None


def keep_memory_warm() -> bool:
    """Make this process keep freed memory, so that no timed call pays for fresh pages; tell whether that works here.

    Without it the C library hands large tensors back to the system at every call, and each operator is charged for the
    pages of its output and temporaries.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    mmap_max, trim_threshold = -4, -1
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def machine_line(device: torch.device | str = "cpu") -> str:
    """Describe in one line what a number was measured on: CPU or GPU, cores and threads, torch, operating system.

    Example:
        >>> f"torch {torch.__version__}" in machine_line()
        True
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    parts = [
        _cpu_model(),
        f"{cores} core{'s' if cores > 1 else ''}",
        f"{threads} thread{'s' if threads > 1 else ''}",
        f"torch {torch.__version__}",
        f"{platform.system()} {platform.release()} {platform.machine()}",
    ]
    if torch.device(device).type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join(parts)


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    if sys.platform == "darwin":
        answer = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True)
        if answer.returncode == 0:
            return answer.stdout.strip()
    return platform.processor() or platform.machine()


_Sample = Callable[[Callable[[], object], int, torch.device], float]


def _cpu_sample(function: Callable[[], object], calls: int, device: torch.device) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - start


def _cuda_sample(function: Callable[[], object], calls: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def _calibrate(
    sample: _Sample, function: Callable[[], object], min_seconds: float, device: torch.device
) -> tuple[int, float]:
    """Return the calls that make a sample long enough, and how long it is."""
    calls = 1
    seconds = sample(function, calls, device)  # the first call may pay for caches
    if seconds > 20 * min_seconds:
        return calls, seconds
    # The faster of two: one sample that the machine disturbed would make all later ones too short.
    while (seconds := min(sample(function, calls, device) for _ in range(2))) < min_seconds:
        # At most tenfold, as a first short sample is a poor guide; 1.2 leaves room so that samples stay long enough.
        calls = min(10 * calls, math.ceil(1.2 * calls * min_seconds / max(seconds, 1e-9)))
    return calls, seconds
