"""``spotlights wbmm``: the verbs, one module for each group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spotlights.wbmm.cli.bench import add_bench
from spotlights.wbmm.cli.demo import add_demo
from spotlights.wbmm.cli.export import add_export
from spotlights.wbmm.cli.import_weights import add_import
from spotlights.wbmm.cli.inference import add_eval, add_predict
from spotlights.wbmm.cli.training import add_train


def add_commands(verbs: Any) -> None:
    """Add this method's verbs to the command line."""
    add_train(verbs)
    add_eval(verbs)
    add_predict(verbs)
    add_import(verbs)
    add_export(verbs)
    add_demo(verbs)
    add_bench(verbs)


def backend_states() -> Iterator[tuple[str, str]]:
    """Yield each backend with "can run", or the reason why it cannot, for float32 on the CPU."""
    import torch

    from spotlights.wbmm.backends import BACKENDS, Call

    call = Call(torch.device("cpu"), torch.float32, (7, 7), None)
    for backend in BACKENDS:
        yield backend.name, backend.why_not(call) or f"can run: {backend.summary}"
