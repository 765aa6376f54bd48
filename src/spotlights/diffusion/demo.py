"""``spotlights xdlm demo``: MDLM, XDLM and UDLM side by side, on sources of known likelihood, on text and on digits.

Only the noise differs between the four models of a part: data, network, updates and seeds are the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from spotlights.diffusion.demo_parts import FULL, PARTS, QUICK, Part, Row
from spotlights.diffusion.models.denoiser import XDLMForMaskedLM
from spotlights.diffusion.recipes.quiet import no_bars
from spotlights.diffusion.recipes.training import MODEL, fit_tokens
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import at_least
from spotlights.runtime.runs import claim_folder, write_json
from spotlights.runtime.training import CHECKPOINT

SETTINGS = "demo.json"
JUDGED = "judged.json"
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


def run_demo(folder: str | Path, config: DemoConfig, *, progress: bool = True) -> Path:
    """Train, sample and judge every model of every part, and return the path of the report.

    A folder that holds part of the same demo is gone on with: judged models are kept, a broken training resumes.

    Raises:
        UserError: a setting is out of range, or the folder is unusable or holds something else.
    """
    from spotlights.diffusion.demo_report import show_tables, write_report

    at_least(1, seeds=config.seeds)
    if unknown := set(config.parts) - set(PARTS):
        raise UserError(f"--parts: got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    folder = Path(folder)
    claim_folder(folder, SETTINGS, {**asdict(config), "parts": list(config.parts)})
    say: Callable[[str], None] = (lambda text: print(text, flush=True)) if progress else (lambda text: None)
    outcomes = []
    for number, name in enumerate(config.parts):
        part = PARTS[name](QUICK if config.quick else FULL)
        say(f"\n{part.title}")
        outcome = Outcome(part, list(part.reference()), {})
        for index, k in enumerate(METHODS):
            say(f"[{number * len(METHODS) + index + 1}/{len(config.parts) * len(METHODS)}] {part.name}, {METHODS[k]}")
            rows, samples = _judged(folder / "runs" / f"{name}-k{k:g}", part, k, config.seeds, say, progress)
            outcome.rows += rows
            outcome.samples[k] = samples
        outcomes.append(outcome)
    report = write_report(folder, config, outcomes)
    show_tables(outcomes)
    print(f"\n{report.summary}\nreport: {report.path}")
    return report.path


def _judged(
    run: Path, part: Part, k: float, seeds: int, say: Callable[[str], None], progress: bool
) -> tuple[list[Row], dict[int, list[list[int]]]]:
    judged = run / JUDGED
    if judged.exists():
        say("finished before")
        try:
            stored = json.loads(judged.read_text(encoding="utf-8"))
            return [Row(**row) for row in stored["rows"]], {int(n): made for n, made in stored["samples"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{judged}: unreadable ({error}); delete it to judge this model again") from error
    model = _trained(run, part, k, progress)
    rows = list(part.bound(model, k))
    say(", ".join(map(_words, rows)))
    samples: dict[int, list[list[int]]] = {}

    def keep(steps: int, made: Tensor) -> None:
        samples[steps] = made.tolist()

    shown: list[Row] = []
    for row in part.judge(model, k, seeds, keep):
        rows.append(row)
        shown.append(row)
        if row.metric == "seconds":
            of = "" if row.seed is None else f", set {row.seed + 1}/{seeds}"
            say(f"{row.steps} steps{of}: {', '.join(map(_words, shown[:-1]))} ({row.value:.1f} s)")
            shown.clear()
    write_json(judged, {"rows": [asdict(row) for row in rows], "samples": samples})
    return rows, samples


def _trained(run: Path, part: Part, k: float, progress: bool) -> XDLMForMaskedLM:
    if (run / MODEL).is_dir():
        with no_bars():
            return XDLMForMaskedLM.from_pretrained(str(run / MODEL), local_files_only=True).eval()
    run.mkdir(parents=True, exist_ok=True)
    model = part.model(k)
    fit_tokens(model, part.data, part.training, run, resume=(run / CHECKPOINT).exists(), progress=progress)
    return model


def _words(row: Row) -> str:
    spread = "" if row.error is None else f" ± {1.96 * row.error:.3f}"
    return f"{row.metric.replace('_', ' ')} {row.value:.3f}{spread}"


@dataclass(frozen=True)
class Comparison:
    """The best k > 0 against k = 0 at one number of steps, and whether it is ``better``, ``worse`` or ``even``."""

    steps: int
    k: float
    value: float
    masked: float
    margin: float
    verdict: str


def compare(outcome: Outcome, steps: int) -> Comparison:
    """Compare sample quality at one number of steps; differences inside the 95 % interval are ``even``."""
    part = outcome.part
    sign = -1 if part.higher_is_better else 1
    masked, masked_error = outcome.value(part.quality, 0.0, steps)
    others = {k: outcome.value(part.quality, k, steps) for k in METHODS if k > 0}
    best = min(others, key=lambda k: sign * others[k][0])
    value, error = others[best]
    margin = _Z * math.hypot(error, masked_error)
    gain = sign * (masked - value)
    verdict = "even" if abs(gain) <= margin else "better" if gain > 0 else "worse"
    return Comparison(steps, best, value, masked, margin, verdict)


def verdict(outcome: Outcome) -> str:
    """Return in a sentence or two whether the paper's shape appears in a part: few steps k > 0, many steps k = 0."""
    part = outcome.part
    few, many = compare(outcome, min(part.steps)), compare(outcome, max(part.steps))
    halves = few.verdict == "better", many.verdict == "worse"
    shape = {
        (True, True): "The paper's shape appears: k > 0 ahead at few steps, k = 0 at many.",
        (True, False): "Half of the paper's shape appears: k > 0 is ahead at few steps, but k = 0 is not at many.",
        (False, True): "Half of the paper's shape appears: k = 0 is ahead at many steps, but k > 0 is not at few.",
        (False, False): "The paper's shape does not appear: neither k > 0 at few steps nor k = 0 at many is ahead.",
    }[halves]
    return f"{_sentence(part, few)} {_sentence(part, many)} {shape}{_caution(outcome, few)}"


def _sentence(part: Part, found: Comparison) -> str:
    metric = {"nll": "NLL", "fid": "FID"}.get(part.quality, part.quality)
    judgement = {"better": "better", "worse": "worse", "even": "no difference that these samples show"}[found.verdict]
    return (
        f"At {found.steps} steps the best k > 0 (k = {found.k:g}) has {metric} {found.value:.3f}, k = 0 has "
        f"{found.masked:.3f} (difference {found.value - found.masked:+.3f} ± {found.margin:.3f}): {judgement}."
    )


def _caution(outcome: Outcome, few: Comparison) -> str:
    if few.verdict != "better" or outcome.part.quality != "nll":
        return ""
    entropy, data = outcome.value("entropy", few.k, few.steps)[0], outcome.value("entropy", None)[0]
    if entropy >= 0.9 * data:
        return ""
    return f" A caution: those samples repeat themselves, with a token entropy of {entropy:.2f} against {data:.2f}."


def bound_verdict(outcome: Outcome) -> str:
    """Return in a sentence how the NELBO ranks the models, and whether each keeps above the data's entropy."""
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
