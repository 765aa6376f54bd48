"""``spotlights xdlm bench``."""

from __future__ import annotations

import argparse
from typing import Any

from spotlights.diffusion.cli.common import needs_text


def add_bench(verbs: Any) -> None:
    """Add ``bench``."""
    parser = verbs.add_parser(
        "bench",
        help="time the fused loss and sampler step against plain ones",
        description="Check, then time in turn: the loss from logits and from hidden states, forward and backward, and "
        "one sampler step, of MDLM (k=0), XDLM (k=0.1) and UDLM (k=1), fused and as one writes them from the papers' "
        "formulas. Prints times, peak memory and ratios. The network is left out.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--task", nargs="+", choices=("loss", "head", "step"), metavar="NAME", help="some of loss, head, step"
    )
    parser.add_argument(
        "--vocab", type=int, nargs="+", metavar="N", help="sizes of the vocabulary (default 50257 and 126464)"
    )
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="sequences (default %(default)s)")
    parser.add_argument("--length", type=int, default=256, metavar="N", help="tokens of each (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=768, metavar="N", help="width of the hidden states (default %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default %(default)s)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for results.csv, pictures and report.html; a bench that was stopped goes on in it",
    )
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    with needs_text():
        from spotlights.diffusion.bench import TASKS, VOCABULARIES, run_bench
        from spotlights.runtime.bench_run import run_to_exit_code

        def bench() -> None:
            run_bench(
                tasks=arguments.task or TASKS,
                vocabularies=arguments.vocab or VOCABULARIES,
                batch=arguments.batch,
                length=arguments.length,
                width=arguments.width,
                device=arguments.device,
                out=arguments.out,
            )

        return run_to_exit_code(bench, resumes=arguments.out is not None)
