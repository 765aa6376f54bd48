"""``spotlights wbmm bench``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from spotlights.runtime.errors import UserError
from spotlights.wbmm.cli.common import needs_vision

_NETWORK = "network"


def add_bench(verbs: Any) -> None:
    """Add ``bench``."""
    from spotlights.wbmm.bench import DTYPES, SUITES

    parser = verbs.add_parser(
        "bench",
        help="time the operator and the networks against their rivals",
        description="Check, then time in turn: every backend, the paper's form with M kept and rebuilt, depthwise 5x5, "
        "7x7, 13x13 and 27x27 convolutions, FFT and window attention. Prints times, ratios and fractions of the "
        "machine's measured peaks. The suite named network times whole networks instead: wbmm_tiny in its forms, a "
        "plain implementation, a depthwise 13x13 twin, and others of its size.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--suite",
        choices=(*SUITES, _NETWORK),
        default="quick",
        help="which sizes: quick takes about a minute, network about ten (default %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of maps and weights (default %(default)s)")
    parser.add_argument(
        "--train",
        action="store_true",
        help="time forward and all gradients instead of inference (network does both by itself; training only, then)",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for results.csv, pictures and report.html; a bench that was stopped goes on in it",
    )
    parser.add_argument("--baseline", metavar="FILE", help="compare with an earlier results.csv")
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="N", help="network: these of its batches only (1, 4 and 16)"
    )
    parser.add_argument("--profile", action="store_true", help="network: also time its parts, on the CPU")
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    with needs_vision():
        from spotlights.runtime.bench_run import run_to_exit_code

        bench = _network_bench(arguments) if arguments.suite == _NETWORK else _operator_bench(arguments)
        return run_to_exit_code(bench, resumes=arguments.out is not None)


def _operator_bench(arguments: argparse.Namespace) -> Callable[[], object]:
    from spotlights.wbmm.bench_run import run_bench

    for name in ("batch", "profile"):
        if getattr(arguments, name):
            raise UserError(f"--{name}: is for --suite {_NETWORK}, got --suite {arguments.suite}")
    return lambda: run_bench(
        arguments.suite,
        device=arguments.device,
        dtype=arguments.dtype,
        train=arguments.train,
        out=arguments.out,
        baseline=arguments.baseline,
    )


def _network_bench(arguments: argparse.Namespace) -> Callable[[], object]:
    from spotlights.wbmm.bench_network import BATCHES, CASES, run_network_bench

    if arguments.dtype != "float32":
        raise UserError(
            f"--dtype: got {arguments.dtype}, but --suite {_NETWORK} times float32 and bfloat16 side by side; drop it"
        )
    batches = arguments.batch or BATCHES
    if unknown := sorted(set(batches) - set(BATCHES)):
        raise UserError(f"--batch: got {unknown[0]}, expected some of {', '.join(map(str, BATCHES))}")
    cases = [case for case in CASES if case.batch in batches and (case.task == "train" or not arguments.train)]
    if not cases:
        trained = {str(case.batch) for case in CASES if case.task == "train"}
        raise UserError(f"--batch: got none that is trained with, expected {', '.join(trained)} beside --train")
    return lambda: run_network_bench(
        cases=cases,
        profile=arguments.profile,
        device=arguments.device,
        out=arguments.out,
        baseline=arguments.baseline,
    )
