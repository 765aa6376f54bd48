"""``spotlights wbmm bench --suite network``: whole networks, checked against a plain one and timed in turn.

A training step is forward, cross-entropy and backward to every parameter, without an optimiser's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.runtime.bench import control_kernel, interleave
from spotlights.runtime.bench_run import RESULTS, WrongResultError, prepare_run
from spotlights.runtime.bench_table import LOW, Results, Row, measures, peak_bytes, read_table
from spotlights.runtime.errors import UserError
from spotlights.runtime.progress import EpochProgress
from spotlights.wbmm.bench import DTYPES, exact_float32
from spotlights.wbmm.bench_network_report import (
    PROFILE,
    case_table,
    case_text,
    print_network_summary,
    write_network_report,
)
from spotlights.wbmm.bench_profile import PROFILE_BATCHES, profile_parts
from spotlights.wbmm.bench_report import baseline_table
from spotlights.wbmm.providers import LAYOUTS

TWIN_KERNEL = 13
RIVALS = ("convnext_tiny", "inception_next_tiny", "swin_tiny_patch4_window7_224")
# Largest difference from the plain network, as a part of the largest value.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
_SECONDS = 6.0  # for all samples of one network in one case
_LONG = 8.0  # for a round of all networks


@dataclass(frozen=True)
class NetworkCase:
    """What all networks do: "forward" or "train", on square images of a side, in batches."""

    task: str
    batch: int
    size: int = 224


CASES = (*(NetworkCase("forward", batch) for batch in (1, 4, 16)), NetworkCase("train", 16))
BATCHES = tuple(sorted({case.batch for case in CASES}))


@dataclass(frozen=True)
class Entrant:
    """One network in one form.

    Attributes:
        network: its name, by which its forms are compared.
        form: "plain" (see `plain_network`), "unfolded" or "folded" (reparameterised).
        base: the timm name.
        twin: whether depthwise convolutions stand in for the operator.
        compiled: whether by torch.compile, for the very batch.
        dtype: of weights and images.
        layout: "NHWC" or "NCHW"; None takes the faster one.
    """

    network: str
    form: str
    base: str
    twin: bool = False
    compiled: bool = False
    dtype: str = "float32"
    layout: str | None = "NHWC"

    @property
    def name(self) -> str:
        """Unique within a case."""
        form = "" if self.network == self.base and self.layout is None else f" {self.form}"
        dtype = "" if self.dtype == "float32" else f", {self.dtype}"
        return f"{self.network}{form}{', compiled' if self.compiled else ''}{dtype}"


def entrants(network: str, rivals: Sequence[str], train: bool, compiled: bool = True) -> list[Entrant]:
    """Return who takes part, of each network the form that the others are checked against first.

    Example:
        >>> [entrant.name for entrant in entrants("wbmm_tiny", ["convnext_tiny"], train=True)]
        ['wbmm_tiny plain', 'wbmm_tiny unfolded', 'wbmm_tiny DW 13x13 unfolded', 'convnext_tiny']
    """
    plain = Entrant(network, "plain", network, layout="NCHW")
    ours = Entrant(network, "unfolded", network)
    twin = Entrant(f"{network} DW {TWIN_KERNEL}x{TWIN_KERNEL}", "unfolded", network, twin=True)
    others = [Entrant(name, "unfolded", name, layout=None) for name in rivals]
    if train:
        return [plain, ours, twin, *others]
    folded = replace(ours, form="folded")
    compilations = [replace(entrant, compiled=True) for entrant in (plain, folded) if compiled]
    halved = replace(folded, dtype="bfloat16")
    return [plain, ours, folded, *compilations, halved, twin, replace(twin, form="folded"), *others]


def run_network_bench(
    *,
    network: str = "wbmm_tiny",
    rivals: Sequence[str] = RIVALS,
    cases: Sequence[NetworkCase] = CASES,
    compiled: bool = True,
    profile: bool = False,
    device: str = "cpu",
    out: str | Path | None = None,
    baseline: str | Path | None = None,
    rounds: int = 15,
) -> list[Row]:
    """Time a network in its forms, its depthwise twin and others; print tables and ratios, and return all rows.

    Args:
        network: a WBMM network's timm name; it gets random weights that let every part count.
        rivals: further timm names, as timm makes them, in their faster memory layout.
        cases: what to measure; all networks of a case run in turn, round by round.
        compiled: also time what torch.compile makes of the network and of the plain one; half a minute each to compile.
        profile: also time the parts of the network by themselves, see `profile_parts`.
        device: "cpu" or "cuda".
        out: folder for ``results.csv``, ``profile.csv``, pictures and page; a run that was stopped goes on in it.
        baseline: an earlier ``results.csv`` to compare with.
        rounds: samples of each network; slow ones get fewer, at least 3.

    Raises:
        UserError: no such device, an unusable folder or file, or one that was measured otherwise.
        WrongResultError: a form of the network computes something else than the plain one.
    """
    from rich.console import Console

    if profile and device != "cpu":
        raise UserError(f"--profile: got --device {device}, but parts are timed on the cpu only")
    earlier = None if baseline is None else read_table(baseline)
    folder, machine = prepare_run(device, out)
    same = {**machine, "device": device}
    results = Results(folder and folder / RESULTS, same)
    parts = Results(folder and folder / PROFILE, same)
    console = Console(highlight=False, markup=False)
    console.print(machine["machine"], soft_wrap=True)

    where = torch.device(device)
    batches = [case for case in cases if case.task == "forward" and case.batch in PROFILE_BATCHES] if profile else []
    with EpochProgress(len(cases) + len(batches), unit="case") as progress, exact_float32():
        for number, case in enumerate(cases, start=1):
            columns = {"device": device, "task": case.task, "size": case.size, "batch": case.batch}
            if results.has(tuple(columns.items())):
                continue
            race = _Race(case, where, entrants(network, rivals, case.task == "train", compiled))
            for done, count in race.prepare():
                progress.step(number, round(500 * done / count), 1000)

            def on_round(done: int, count: int, number: int = number) -> None:
                progress.step(number, 500 + round(500 * done / count), 1000)

            timed = race.time(rounds, on_round)
            results.add([{**columns, **row, **machine} for row in timed])
            progress.show(case_table(results.rows[-len(timed) :]))
            for line in race.skipped:
                progress.show(f"left out: {line}")
            torch._dynamo.reset()
        for number, case in enumerate(batches, start=len(cases) + 1):
            columns = {"device": device, "task": case.task, "size": case.size, "batch": case.batch}
            if not parts.has(tuple(columns.items())):
                parts.add([{**columns, **row, **machine} for row in _profile(network, case, rounds)])
            progress.step(number, 1000, 1000)
    print_network_summary(results.rows, parts.rows)
    if earlier is not None:
        line, table = baseline_table(results.rows, earlier, case_text)
        console.print(line)
        if table is not None:
            console.print(table)
    if folder is not None:
        console.print(f"report: {write_network_report(folder / RESULTS)}", soft_wrap=True)
    return results.rows


class _Race:
    """The entrants of one case: built, checked and then timed."""

    def __init__(self, case: NetworkCase, device: torch.device, found: Sequence[Entrant]) -> None:
        self.case = case
        self.device = device
        self.found = found
        self.skipped: list[str] = []
        self.rows: list[Row] = []
        self.calls: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
        self._expected: dict[str, tuple[Tensor, ...]] = {}
        self._round_seconds = 0.0

    def prepare(self) -> Iterator[tuple[int, int]]:
        """Build and check one entrant after the other; yields how many are done, and all."""
        for done, entrant in enumerate(self.found, start=1):
            try:
                self._prepare(entrant)
            except torch.OutOfMemoryError:
                self.skipped.append(f"{entrant.name}: out of memory")
            except RuntimeError as error:
                # A machine without a compiler cannot compile; whatever else does not run is a fault.
                if not entrant.compiled:
                    raise
                self.skipped.append(f"{entrant.name}: {str(error).strip().splitlines()[0]}")
            yield done, len(self.found)

    def _prepare(self, entrant: Entrant) -> None:
        train = self.case.task == "train"
        module = build(entrant, self.case.size, train).to(self.device)
        layout = entrant.layout or self._faster_layout(module, entrant)
        run = self._call(module, entrant, layout)
        self._check(entrant, run())
        start = perf_counter()
        memory = peak_bytes(run, self.device)
        self._round_seconds += perf_counter() - start
        self.calls[entrant.name] = run
        self.rows.append(
            {
                "provider": entrant.name,
                "network": entrant.network,
                "form": entrant.form,
                "compiled": int(entrant.compiled),
                "dtype": entrant.dtype,
                "layout": layout,
                "parameters": sum(parameter.numel() for parameter in module.parameters()),
                **memory,
            }
        )

    def _call(self, module: nn.Module, entrant: Entrant, layout: str) -> Callable[[], tuple[Tensor, ...]]:
        memory_format, dtype = LAYOUTS[layout], DTYPES[entrant.dtype]
        module = module.to(dtype).to(memory_format=memory_format)
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(self.case.batch, 3, self.case.size, self.case.size, generator=generator)
        images = images.to(self.device, dtype, memory_format=memory_format)
        call = torch.compile(module, dynamic=False) if entrant.compiled else module
        if self.case.task == "forward":

            @torch.inference_mode()
            def infer() -> tuple[Tensor, ...]:
                return (call(images),)

            return infer
        targets = torch.arange(self.case.batch, device=self.device)
        first = next(module.parameters())

        def step() -> tuple[Tensor, ...]:
            output = call(images)
            F.cross_entropy(output, targets).backward()
            assert first.grad is not None
            results = output.detach(), first.grad
            module.zero_grad(set_to_none=True)
            return results

        return step

    def _faster_layout(self, module: nn.Module, entrant: Entrant) -> str:
        seconds = {}
        for layout in LAYOUTS:
            run = self._call(module, entrant, layout)
            run()
            seconds[layout] = _seconds(run, self.device)
        return min(seconds, key=lambda layout: seconds[layout])

    def _check(self, entrant: Entrant, results: tuple[Tensor, ...]) -> None:
        expected = self._expected.setdefault(entrant.network, results)
        names = ("logits", "gradient of the first layer")
        most = _TOLERANCE[entrant.dtype]
        for name, result, wanted in zip(names, results, expected, strict=False):
            error = float((result.float() - wanted.float()).abs().max() / wanted.float().abs().max())
            if not error <= most:
                raise WrongResultError(
                    f"{entrant.name}: {name} differ by {error:.1e} of the largest value from those of "
                    f"{next(iter(self.calls), entrant.name)}, allowed {most:.0e}, at batch {self.case.batch}"
                )

    def time(self, rounds: int, on_round: Callable[[int, int], None]) -> list[Row]:
        """Return the rows of all that were prepared, with their times."""
        control = control_kernel(self.device)
        timings = interleave(
            {**self.calls, "control": control},
            rounds=rounds,
            warmup=0,  # checking has warmed all of them
            max_seconds=_SECONDS,
            # In rounds that take long, the pace at their ends says nothing about what lies between.
            control=control if self._round_seconds < _LONG else None,
            device=self.device,
            on_round=on_round,
        )
        pace = measures(timings["control"])[LOW]
        return [{**row, **measures(timings[row["provider"]]), "control_seconds": pace} for row in self.rows]


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter() - start


def build(entrant: Entrant, size: int, train: bool) -> nn.Module:
    """Return an entrant's network in float32; the forms of one network have the same weights.

    Example:
        >>> module = build(entrants("wbmm_atto", [], train=False)[0], 28, train=False)
        >>> module(torch.zeros(1, 3, 28, 28)).shape
        torch.Size([1, 1000])
    """
    import timm

    from spotlights.wbmm.models import WBMMNet

    torch.manual_seed(0)
    options = {"twin_kernel_size": TWIN_KERNEL} if entrant.twin else {}
    module = timm.create_model(entrant.base, **options).train(train)
    if not isinstance(module, WBMMNet):
        return module
    randomise(module)
    if entrant.form == "plain":
        from spotlights.wbmm.plain_network import plain_network

        return plain_network(module)
    if entrant.form == "folded":
        from spotlights.wbmm import reparameterize

        return reparameterize(module)
    return module


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0) -> None:
    """Draw all weights and statistics anew: as initialised, a network hides what its blocks compute.

    Example:
        >>> layer = nn.BatchNorm2d(4)
        >>> randomise(layer)
        >>> bool((layer.weight != 1).all() and (layer.running_var != 1).all())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        part = name.rpartition(".")[2]
        if part == "weight" and tensor.dim() > 1:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        elif part in ("weight", "running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif part == "gamma":
            tensor.uniform_(0.1, 0.3, generator=generator)
        elif part in ("running_mean", "bias"):
            tensor.normal_(0, 0.1, generator=generator)


def _profile(network: str, case: NetworkCase, rounds: int) -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(case.batch, 3, case.size, case.size, generator=generator)
    modules = {}
    inputs = {}
    # Plain, unfolded, folded come first.
    for entrant in entrants(network, (), train=False)[:3]:
        memory_format = LAYOUTS[entrant.layout or "NCHW"]
        modules[entrant.form] = build(entrant, case.size, train=False).to(memory_format=memory_format)
        inputs[entrant.form] = images.contiguous(memory_format=memory_format)
    timings = profile_parts(modules, inputs, rounds=rounds, max_seconds=_SECONDS)
    control = control_kernel()
    pace = measures(interleave({"control": control}, rounds=rounds)["control"])[LOW]
    return [
        {"provider": form, "network": network, "part": part, **measures(timing), "control_seconds": pace}
        for form, found in timings.items()
        for part, timing in found.items()
    ]
