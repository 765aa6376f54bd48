"""The CPU library: where it is, which instruction set it uses, and torch's threads for it.

The library is plain C (``csrc/``). It runs its loops on torch's own thread pool, so ``torch.set_num_threads`` rules and
no second pool appears. ``SPOTLIGHTS_CPU_LEVEL`` forces an instruction set: ``baseline``, ``avx2``, ``avx512``,
``avx512bf16`` or ``amx``. ``avx512bf16``, which adds dot products for bfloat16, is taken by itself only where a short
measurement finds them faster than float32's multiply-adds: on some processors they are half as fast. ``amx`` is
``avx512`` with matrix units for bfloat16.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")
LEVEL_VARIABLE = "SPOTLIGHTS_CPU_LEVEL"
_CODES = {1: "bad argument", 2: "out of memory", 3: "torch's thread pool refused the work"}

_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class NativeLibrary:
    """The loaded library.

    Attributes:
        functions: its C functions.
        level: index into :data:`LEVELS` of the instruction set in use.
        pool: address of torch's ``parallel_for``.
    """

    functions: ctypes.CDLL
    level: int
    pool: ctypes.c_void_p

    @property
    def runner(self) -> ctypes.c_void_p:
        """What runs the loops: torch's threads, or this thread alone in a forked process, where they are missing."""
        return ctypes.cast(self.functions.spotlights_serial_for, ctypes.c_void_p) if _forked else self.pool

    @property
    def threads(self) -> int:
        """How many threads the runner has."""
        return 1 if _forked else torch.get_num_threads()

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that takes the runner and the level first; raises RuntimeError with its reason."""
        code = getattr(self.functions, name)(self.runner, self.level, *arguments)
        if code:
            raise RuntimeError(f"{name}: {_CODES.get(code, f'error {code}')}")


@functools.cache
def load() -> NativeLibrary | str:
    """Return the library, or the reason why it is not here.

    Example:
        >>> native = load()
        >>> isinstance(native, str) or native.level < len(LEVELS)
        True
    """
    path = Path(__file__).parents[1] / "lib" / ("libspotlights" + (".dll" if os.name == "nt" else ".so"))
    if not path.exists():
        return "the CPU library was not built: no C++ compiler when the package was installed"
    try:
        functions = ctypes.CDLL(str(path))
        pool = ctypes.cast(_torch_library().torch_parallel_for, ctypes.c_void_p)
    except OSError as error:
        return f"the CPU library does not load: {error}"
    except AttributeError:
        return f"torch {torch.__version__} does not share its thread pool (torch_parallel_for)"
    for counted in (functions.spotlights_wbmm_packed_size, functions.spotlights_multiply_adds):
        counted.restype = ctypes.c_int64
    best = int(functions.spotlights_best_level())
    level = best
    if LEVELS[best] == "avx512bf16" and not functions.spotlights_dots_pay():
        level = LEVELS.index("avx512")
    if wanted := os.environ.get(LEVEL_VARIABLE):
        if wanted not in LEVELS:
            return f"{LEVEL_VARIABLE}: got {wanted!r}, expected one of {', '.join(LEVELS)}"
        level = LEVELS.index(wanted)
        if level > best:
            return f"{LEVEL_VARIABLE}: {wanted} does not run on this processor, which has {LEVELS[best]}"
    return NativeLibrary(functions, level, pool)


def peak_flops(seconds: float = 0.2) -> float | None:
    """Return the FLOP/s of float32 multiply-adds in registers on torch's threads: the roof of every kernel.

    The best of many runs, of milliseconds, in ten bursts of that time altogether; None without the library.

    Example:
        >>> peak = peak_flops(0.01)
        >>> peak is None or peak > 1e8
        True
    """
    native = load()
    if isinstance(native, str):
        return None
    best = 0.0
    for _ in range(10):
        end = time.perf_counter() + seconds / 10
        while (start := time.perf_counter()) < end:
            tasks, iterations = ctypes.c_int64(native.threads), ctypes.c_int64(500_000)
            count = native.functions.spotlights_multiply_adds(native.runner, native.level, tasks, iterations)
            best = max(best, 2 * count / (time.perf_counter() - start))
        # Threads that happen to share a core would do so for a while; a pause lets the system move them apart.
        time.sleep(seconds / 5)
    return best


def _torch_library() -> ctypes.CDLL:
    names = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / names.get(sys.platform, "libtorch_cpu.so")))
