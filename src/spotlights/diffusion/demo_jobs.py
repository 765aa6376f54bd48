"""The demo's trainings: each model is one job, several at a time in processes of one thread each.

Networks this small gain nothing from a second thread, but two of them side by side take half the time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from spotlights.diffusion.demo_parts import FULL, PARTS, QUICK, Part, Row
from spotlights.diffusion.models.denoiser import XDLMForMaskedLM
from spotlights.diffusion.recipes.quiet import no_bars
from spotlights.diffusion.recipes.training import MODEL, fit_tokens
from spotlights.runtime.errors import UserError
from spotlights.runtime.runs import write_json
from spotlights.runtime.training import CHECKPOINT

JUDGED = "judged.json"
MOST_WORKERS = 4  # each takes about a gigabyte
Samples = dict[int, list[list[int]]]


@dataclass(frozen=True)
class Job:
    """One model to train, sample and judge: its run folder, part, noise, sets of samples, and the scale."""

    run: Path
    part: str
    k: float
    seeds: int
    quick: bool


@cache
def load_part(name: str, quick: bool) -> Part:
    """Return a part, made once in each process."""
    return PARTS[name](QUICK if quick else FULL)


def read_judged(run: Path) -> tuple[list[Row], Samples]:
    """Return the figures of a finished job, and its samples: steps -> sequences.

    Raises:
        UserError: they are unreadable.
    """
    path = run / JUDGED
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return [Row(**row) for row in stored["rows"]], {int(n): made for n, made in stored["samples"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: unreadable ({error}); delete it to judge this model again") from error


def run_jobs(jobs: Sequence[Job], workers: int, progress: bool) -> Iterator[tuple[Job, float]]:
    """Yield each job and its seconds once it is done; jobs may end in any order.

    Args:
        jobs: what to do.
        workers: processes; with one, the jobs run in this process.
        progress: show the epochs of each training, where it runs in this process.

    Raises:
        UserError: as `fit_tokens`.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from ((job, _do(job, progress)) for job in jobs)
        return
    # Not forked: torch's threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(workers, _begin) as pool:
        yield from pool.imap_unordered(_work, jobs)


def default_workers() -> int:
    """Return how many jobs suit this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def _begin() -> None:
    # The parent ends its workers; Ctrl-C reaches them too, but it is not theirs to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _work(job: Job) -> tuple[Job, float]:
    try:
        return job, _do(job, progress=False)
    except KeyboardInterrupt:  # what becomes of SIGTERM in a training
        os._exit(130)


def _do(job: Job, progress: bool) -> float:
    started = time.perf_counter()
    part = load_part(job.part, job.quick)
    model = _trained(job, part, progress)
    rows = list(part.bound(model, job.k))
    samples: Samples = {}

    def keep(steps: int, made: Tensor) -> None:
        samples[steps] = made.tolist()

    rows += part.judge(model, job.k, job.seeds, keep)
    write_json(job.run / JUDGED, {"rows": [asdict(row) for row in rows], "samples": samples})
    return time.perf_counter() - started


def _trained(job: Job, part: Part, progress: bool) -> XDLMForMaskedLM:
    folder = job.run / MODEL
    if folder.is_dir():
        with no_bars():
            return XDLMForMaskedLM.from_pretrained(str(folder), local_files_only=True).eval()
    job.run.mkdir(parents=True, exist_ok=True)
    model = part.model(job.k)
    again = (job.run / CHECKPOINT).exists()
    show: Callable[[str], None] = print if progress else (lambda text: None)
    show(f"{job.run}: {sum(parameter.numel() for parameter in model.parameters()):,} parameters")
    fit_tokens(model, part.data, part.training, job.run, resume=again, progress=progress)
    return model
