"""``spotlights xdlm demo``: MDLM, XDLM and UDLM side by side, on sources of known likelihood, on text and on digits.

Only the noise differs between the four models of a part: data, network, updates and seeds are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from spotlights.diffusion.demo_jobs import JUDGED, Job, default_workers, load_part, read_judged, run_jobs
from spotlights.diffusion.demo_parts import PARTS, Part, Row
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import at_least
from spotlights.runtime.runs import claim_folder

SETTINGS = "demo.json"
METHODS = {0.0: "MDLM, k = 0", 0.1: "XDLM, k = 0.1", 0.5: "XDLM, k = 0.5", 1.0: "UDLM, k = 1"}
_Z = 2.394  # two-sided 95 % for the best of three comparisons (Bonferroni)


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo: sets of samples for each model, whether to hurry, and which parts."""

    seeds: int = 3
    quick: bool = False
    parts: tuple[str, ...] = tuple(PARTS)


@dataclass
class Outcome:
    """A part's figures, and some samples: k -> steps -> sequences."""

    part: Part
    rows: list[Row]
    samples: dict[float, dict[int, list[list[int]]]]

    def value(self, metric: str, k: float | None, steps: int | None = None) -> tuple[float, float]:
        """Return a figure over all seeds and its standard error (0 where none is known).

        Raises:
            KeyError: there is no such figure.
        """
        found = [row for row in self.rows if (row.metric, row.k, row.steps) == (metric, k, steps)]
        if not found:
            raise KeyError((metric, k, steps))
        mean = sum(row.value for row in found) / len(found)
        return mean, math.sqrt(sum((row.error or 0) ** 2 for row in found)) / len(found)


def run_demo(folder: str | Path, config: DemoConfig, *, workers: int | None = None, progress: bool = True) -> Path:
    """Train, sample and judge every model of every part, and return the path of the report.

    A folder that holds part of the same demo is gone on with: judged models are kept, a broken training resumes.

    Args:
        folder: new, or of the same demo.
        config: the settings.
        workers: models at a time, each in a process of its own; by default one a core, at most four. With several, a
            script calls this below ``if __name__ == "__main__":``.
        progress: say what is done.

    Raises:
        UserError: a setting is out of range, or the folder is unusable or holds something else.
    """
    from spotlights.diffusion.demo_report import show_tables, write_report

    at_least(1, seeds=config.seeds, workers=workers)
    if unknown := set(config.parts) - set(PARTS):
        raise UserError(f"--parts: got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    folder = Path(folder)
    claim_folder(folder, SETTINGS, {**asdict(config), "parts": list(config.parts)})
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if progress else (lambda text: None)
    jobs = [
        Job(folder / "runs" / f"{name}-k{k:g}", name, k, config.seeds, config.quick)
        for name in config.parts
        for k in METHODS
    ]
    open_jobs = [job for job in jobs if not (job.run / JUDGED).exists()]
    workers = workers or default_workers()
    if done := len(jobs) - len(open_jobs):
        say(f"{done} of {len(jobs)} models were finished before")
    if open_jobs:
        say(f"{len(open_jobs)} models to train, sample and judge, {min(workers, len(open_jobs))} at a time")
    for job, seconds in run_jobs(open_jobs, workers, progress):
        done += 1
        say(f"[{done}/{len(jobs)}] {job.part}, {METHODS[job.k]}: {_words(read_judged(job.run)[0])} ({seconds:.0f} s)")
    outcomes = [_outcome(name, [job for job in jobs if job.part == name]) for name in config.parts]
    report = write_report(folder, config, outcomes)
    show_tables(outcomes, verdicts=not config.quick)
    print(f"\n{report.summary}\nreport: {report.path}")
    return report.path


def _outcome(name: str, jobs: Sequence[Job]) -> Outcome:
    part = load_part(name, jobs[0].quick)
    outcome = Outcome(part, list(part.reference()), {})
    for job in jobs:
        rows, outcome.samples[job.k] = read_judged(job.run)
        outcome.rows += rows
    return outcome


def _words(rows: Sequence[Row]) -> str:
    """Return the NELBO, and the first set's quality at the fewest and at the most steps."""
    quality = "fid" if any(row.metric == "fid" for row in rows) else "nll"
    found = [row for row in rows if row.metric == quality and not row.seed]
    nelbo = next(row.value for row in rows if row.metric == "nelbo")
    ends = ", ".join(f"{row.value:.3f} at {row.steps}" for row in (found[0], found[-1]))
    return f"NELBO {nelbo:.3f} nats, {quality.upper()} {ends} steps"


@dataclass(frozen=True)
class Comparison:
    """A k > 0 against k = 0 at one number of steps: the difference of their figures, its margin, and who is ahead.

    ``place`` is ``ahead``, ``behind``, or ``even`` where the difference is within the margin.
    """

    difference: float
    margin: float
    place: str


def compare(outcome: Outcome, steps: int) -> dict[float, Comparison]:
    """Compare the samples of each k > 0 with those of k = 0 at one number of steps."""
    part = outcome.part
    masked, masked_error = outcome.value(part.quality, 0.0, steps)
    found = {}
    for k in METHODS:
        if k > 0:
            value, error = outcome.value(part.quality, k, steps)
            difference, margin = value - masked, _Z * math.hypot(error, masked_error)
            better = (difference > 0) == part.higher_is_better
            place = "even" if abs(difference) <= margin else "ahead" if better else "behind"
            found[k] = Comparison(difference, margin, place)
    return found


def shape(outcome: Outcome) -> str:
    """Return for which k > 0 the paper's shape appears in a part: ahead of k = 0 at few steps, behind it at many."""
    few, many = (compare(outcome, steps) for steps in (min(outcome.part.steps), max(outcome.part.steps)))
    halves: dict[tuple[bool, bool], list[float]] = {}
    for k in few:
        halves.setdefault((few[k].place == "ahead", many[k].place == "behind"), []).append(k)
    names = {
        (True, True): "in full",
        (True, False): "at few steps alone",
        (False, True): "at many steps alone",
        (False, False): "not shown",
    }
    return ", ".join(f"{name} for {_listed(halves[half])}" for half, name in names.items() if half in halves)


def verdict(outcome: Outcome) -> str:
    """Return in a few sentences how samples compare at few and at many steps, and where the paper's shape appears."""
    steps = outcome.part.steps
    return (
        f"{_sentence(outcome, min(steps))} {_sentence(outcome, max(steps))} The paper's shape, ahead of k = 0 at few "
        f"steps and behind it at many, appears {shape(outcome)}.{_caution(outcome)}"
    )


def _sentence(outcome: Outcome, steps: int) -> str:
    quality = outcome.part.quality
    metric = {"nll": "NLL", "fid": "FID"}.get(quality, quality)
    others = (
        f"k = {k:g} {'level' if found.place == 'even' else found.place} ({found.difference:+.3f} ± {found.margin:.3f})"
        for k, found in compare(outcome, steps).items()
    )
    return (
        f"At {steps} steps the {metric} of k = 0 is {outcome.value(quality, 0.0, steps)[0]:.3f}; {', '.join(others)}."
    )


def _caution(outcome: Outcome) -> str:
    if outcome.part.quality != "nll":
        return ""
    few, data = min(outcome.part.steps), outcome.value("entropy", None)[0]
    ahead = [k for k, found in compare(outcome, few).items() if found.place == "ahead"]
    repeating = [k for k in ahead if outcome.value("entropy", k, few)[0] < 0.9 * data]
    if not repeating:
        return ""
    least = min(outcome.value("entropy", k, few)[0] for k in repeating)
    return (
        f" A caution: samples of {_listed(repeating)} repeat themselves, with a token entropy of {least:.2f} "
        f"against {data:.2f}."
    )


def _listed(ks: Sequence[float]) -> str:
    """Return numbers as words.

    Example:
        >>> _listed([0.1, 0.5, 1.0])
        'k = 0.1, 0.5 and 1'
    """
    *first, last = (f"{k:g}" for k in ks)
    return f"k = {', '.join(first)} and {last}" if first else f"k = {last}"


def bound_verdict(outcome: Outcome) -> str:
    """Return in a sentence how the NELBO ranks the models, and by how much."""
    bounds = {k: outcome.value("nelbo", k) for k in METHODS}
    order = sorted(bounds, key=lambda k: bounds[k][0])
    first, last = order[0], order[-1]
    margin = 1.96 * math.hypot(bounds[first][1], bounds[last][1])
    gap = bounds[last][0] - bounds[first][0]
    told = f"a gap of {gap:.3f} ± {margin:.3f}" + ("" if gap > margin else ", which these sequences do not rank")
    return (
        f"The NELBO in nats a token, from best to worst: "
        f"{', '.join(f'{bounds[k][0]:.3f} (k = {k:g})' for k in order)}: {told}."
    )


def all_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return the figures of all parts."""
    return [row for outcome in outcomes for row in outcome.rows]
