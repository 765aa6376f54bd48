"""``spotlights xdlm``: the verbs, one module for each group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spotlights.diffusion.cli.bench import add_bench
from spotlights.diffusion.cli.demo import add_demo
from spotlights.diffusion.cli.evaluation import add_eval
from spotlights.diffusion.cli.sampling import add_sample
from spotlights.diffusion.cli.training import add_train


def add_commands(verbs: Any) -> None:
    """Add this method's verbs to the command line."""
    add_train(verbs)
    add_eval(verbs)
    add_sample(verbs)
    add_demo(verbs)
    add_bench(verbs)


def backend_states() -> Iterator[tuple[str, str]]:
    """Yield nothing: the core is plain torch and runs wherever torch does."""
    yield from ()
