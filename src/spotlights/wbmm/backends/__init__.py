"""The ways of computing WBMM; each module has ``forward`` and ``weight_gradient``.

A module may also have ``prepare(weight, local_weight, shortcut, dtype)`` and ``forward_prepared(input, prepared,
bias)``, where work on the weight alone can be kept between calls.
"""

from __future__ import annotations

from types import ModuleType

from spotlights.runtime.backends import Backend, Backends
from spotlights.wbmm import reference
from spotlights.wbmm.backends import cpu, matmul
from spotlights.wbmm.backends.call import Call


def _always(call: Call) -> str | None:
    return None


BACKENDS: Backends[Call] = Backends(
    "wbmm2d",
    [
        Backend("cpu", "compiled kernels, fastest channels-last; float32 and bfloat16 on the CPU", cpu.why_not, cpu),
        Backend("matmul", "one batched matrix product, as in the paper; any device", _always, matmul),
        Backend("reference", "the definition: a depthwise conv2d per window; any device", _always, reference),
    ],
)


def functions_of(name: str) -> ModuleType:
    """Return the module that implements the backend called ``name``."""
    functions = BACKENDS[name].functions
    assert isinstance(functions, ModuleType)
    return functions
