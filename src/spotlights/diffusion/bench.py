"""``spotlights xdlm bench``: the fused loss and sampler step against what one writes from the papers' formulas.

The network is left out: logits, or hidden states, are given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from spotlights.diffusion import plain
from spotlights.diffusion.bench_report import case_table, print_summary, write_report
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.loss import linear_nelbo, nelbo
from spotlights.diffusion.sampling import posterior_step
from spotlights.runtime.bench import control_kernel, interleave
from spotlights.runtime.bench_run import RESULTS, WrongResultError, prepare_run
from spotlights.runtime.bench_table import Results, Row, measures, peak_bytes
from spotlights.runtime.errors import UserError
from spotlights.runtime.progress import EpochProgress

TASKS = ("loss", "head", "step")
VOCABULARIES = (50_257, 126_464)
METHODS = {"mdlm": 0.0, "xdlm": 0.1, "udlm": 1.0}
_TIME, _EARLIER = 0.5, 0.5 - 1 / 64  # one of 64 steps, half way
_TOLERANCE = 1e-3  # of the largest value; plain formulas in float32 lose digits by cancellation
_SECONDS = 30.0  # for all samples of one provider in one case


@dataclass(frozen=True)
class BenchCase:
    """What all providers do.

    Attributes:
        task: "loss" (from logits, forward and backward), "head" (the same from hidden states, language-model head
            included) or "step" (one sampler step from logits).
        vocab: N, the mask included.
        batch: sequences.
        length: tokens of each.
        width: D of hidden states; 0 where logits are given.
    """

    task: str
    vocab: int
    batch: int
    length: int
    width: int


def run_bench(
    *,
    tasks: Sequence[str] = TASKS,
    vocabularies: Sequence[int] = VOCABULARIES,
    batch: int = 4,
    length: int = 256,
    width: int = 768,
    device: str = "cpu",
    out: str | Path | None = None,
    rounds: int = 7,
) -> list[Row]:
    """Measure times and peak memory, print tables and ratios, and return all rows.

    Args:
        tasks: some of `TASKS`.
        vocabularies: sizes N.
        batch: sequences.
        length: tokens of each.
        width: D of the hidden states.
        device: "cpu" or "cuda".
        out: folder for ``results.csv``, pictures and page; a run that was stopped goes on in it.
        rounds: samples of each provider; slow ones get fewer, at least 3.

    Raises:
        UserError: a size is out of range, no such device, or an unusable folder.
        WrongResultError: a fused function computes something else than the plain one.
    """
    from rich.console import Console

    for name, value in {"vocab": min(vocabularies), "batch": batch, "length": length, "width": width}.items():
        if value < (3 if name == "vocab" else 1):
            raise UserError(f"--{name}: got {value}, expected at least {3 if name == 'vocab' else 1}")
    folder, machine = prepare_run(device, out)
    results = Results(folder and folder / RESULTS, {**machine, "device": device})
    console = Console(highlight=False, markup=False)
    console.print(machine["machine"], soft_wrap=True)
    cases = [
        BenchCase(task, vocab, batch, length, width if task == "head" else 0)
        for task in tasks
        for vocab in vocabularies
    ]
    with EpochProgress(len(cases), unit="case") as progress:
        for number, case in enumerate(cases, start=1):
            columns = {"device": device, "dtype": "float32", **asdict(case)}
            if not results.has(tuple(columns.items())):

                def on_round(done: int, count: int, number: int = number) -> None:
                    progress.step(number, done, count)

                timed = _measure(case, torch.device(device), rounds, on_round)
                results.add([{**columns, **row, **machine} for row in timed])
            progress.show(case_table([row for row in results.rows if columns.items() <= row.items()]))
    print_summary(results.rows)
    if folder is not None:
        console.print(f"report: {write_report(folder / RESULTS)}", soft_wrap=True)
    return results.rows


def _measure(case: BenchCase, device: torch.device, rounds: int, on_round: Callable[[int, int], None]) -> list[Row]:
    calls = _calls(case, device)
    check = _check_step if case.task == "step" else _check_loss
    check(calls, case.vocab, device)
    memory = {name: peak_bytes(call, device) for name, call in calls.items()}
    control = control_kernel(device)
    everything: dict[str, Callable[[], object]] = {**calls, "control": control}
    timings = interleave(
        everything,
        rounds=rounds,
        warmup=1,
        max_seconds=_SECONDS,
        control=control,
        device=device,
        on_round=on_round,
    )
    seconds = timings["control"].quantile(0.25)
    return [
        {
            "provider": name,
            "method": name.partition(" ")[0],
            "form": name.partition(" ")[2],
            **memory[name],
            **measures(timings[name]),
            "control_seconds": seconds,
        }
        for name in calls
    ]


_Call = Callable[[], tuple[Tensor, ...]]


def _calls(case: BenchCase, device: torch.device) -> dict[str, _Call]:
    """Return the providers of a case; those of losses return the loss and a gradient, those of steps the tokens."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.batch, case.length)
    x = torch.randint(case.vocab - 1, shape, generator=generator, device=device)
    calls: dict[str, _Call] = {}
    if case.task == "head":
        hidden = torch.randn(*shape, case.width, generator=generator, device=device, requires_grad=True)
        weight = torch.randn(case.vocab, case.width, generator=generator, device=device)
        leaves = [hidden, weight.mul_(2 * case.width**-0.5).requires_grad_()]
    else:
        leaves = [torch.randn(*shape, case.vocab, generator=generator, device=device).mul_(2)]
        leaves[0].requires_grad_(case.task == "loss")
    for method, k in METHODS.items():
        kernel = NoiseKernel.mixed(case.vocab, case.vocab - 1, k)
        z = kernel.q_sample(x, _TIME, generator=generator)
        if case.task == "step":
            calls[f"{method} fused"] = _fused_step(leaves[0], z, kernel, device)
            calls[f"{method} plain"] = _plain_step(leaves[0], z, method, k, device)
        else:
            calls[f"{method} fused"] = _training(leaves, _fused_loss(leaves, x, z, kernel))
            calls[f"{method} plain"] = _training(leaves, _plain_loss(leaves, x, z, method, k))
    return calls


def _training(leaves: Sequence[Tensor], loss: Callable[[], Tensor]) -> _Call:
    def call() -> tuple[Tensor, ...]:
        value = loss()
        return value.detach(), *torch.autograd.grad(value, leaves)

    return call


def _fused_loss(leaves: Sequence[Tensor], x: Tensor, z: Tensor, kernel: NoiseKernel) -> Callable[[], Tensor]:
    if len(leaves) == 2:
        return lambda: linear_nelbo(leaves[0], leaves[1], x, z, _TIME, kernel)
    return lambda: nelbo(leaves[0], x, z, _TIME, kernel).mean()


def _plain_loss(leaves: Sequence[Tensor], x: Tensor, z: Tensor, method: str, k: float) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        logits = leaves[0] @ leaves[1].T if len(leaves) == 2 else leaves[0]
        if method == "mdlm":
            return plain.mdlm_loss(logits, x, z, _TIME).mean()
        if method == "udlm":
            return plain.udlm_loss(logits, x, z, _TIME).mean()
        return plain.xdlm_loss(logits, x, z, _TIME, k).mean()

    return loss


def _fused_step(logits: Tensor, z: Tensor, kernel: NoiseKernel, device: torch.device) -> _Call:
    generator = torch.Generator(device).manual_seed(1)
    return lambda: (posterior_step(logits, z, _TIME, _EARLIER, kernel, generator=generator),)


def _plain_step(logits: Tensor, z: Tensor, method: str, k: float, device: torch.device) -> _Call:
    generator = torch.Generator(device).manual_seed(1)
    if method == "mdlm":
        return lambda: (plain.mdlm_step(logits, z, _TIME, _EARLIER, generator),)
    return lambda: (plain.xdlm_step(logits, z, _TIME, _EARLIER, k, generator),)


def _check_loss(calls: dict[str, _Call], vocab: int, device: torch.device) -> None:
    for method in METHODS:
        for mine, theirs in zip(calls[f"{method} fused"](), calls[f"{method} plain"](), strict=True):
            difference, largest = float((mine - theirs).abs().max()), float(theirs.abs().max())
            if not difference <= _TOLERANCE * largest:
                raise WrongResultError(f"{method}: loss or gradient differs by {difference:.3g} of {largest:.3g}")


def _check_step(calls: dict[str, _Call], vocab: int, device: torch.device) -> None:
    """Compare how often tokens are drawn, at a vocabulary small enough to count."""
    count, small = 40_000, 16
    generator = torch.Generator(device).manual_seed(2)
    logits = torch.randn(1, 1, small, generator=generator, device=device).expand(1, count, small)
    for method, k in METHODS.items():
        kernel = NoiseKernel.mixed(small, small - 1, k)
        for token in (0, small - 1):
            z = torch.full((1, count), token, device=device)
            expected = plain.xdlm_posterior(logits[:, :1].double(), z[:, :1], _TIME, 0.1, k)[0, 0]
            drawn = posterior_step(logits, z, _TIME, 0.1, kernel, generator=generator)
            difference = float((torch.bincount(drawn[0], minlength=small) / count - expected).abs().max())
            if difference > 0.02:  # eight standard deviations
                raise WrongResultError(f"{method}: a token is drawn {difference:.3f} more or less often than it should")
