"""Judging a denoiser: its bound on the likelihood, and its samples by a judge together with their entropy."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spotlights.diffusion import sample
from spotlights.diffusion.recipes.data import TokenSet
from spotlights.diffusion.recipes.objective import batch_nelbo, fixed_times, generators_for
from spotlights.runtime.runs import replacing, write

if TYPE_CHECKING:
    from spotlights.diffusion.judges import Judge
    from spotlights.diffusion.models.denoiser import XDLMForMaskedLM

FRONTIER_STEPS = (4, 8, 16, 32, 64, 128, 256)
DATA = "data"  # the row of held-back text
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class NelboEstimate:
    """A bound on the negative log-likelihood with its 95 % interval over sequences.

    Attributes:
        nats_per_token: the NELBO.
        low: lower end of the interval, in nats a token.
        high: upper end.
        tokens: how many were judged.
        bytes: of text they stand for, None for what is no text.

    Example:
        >>> estimate = NelboEstimate(math.log(2), 0.6, 0.8, tokens=10, bytes=20)
        >>> round(estimate.perplexity, 12), estimate.bits_per_byte
        (2.0, 0.5)
    """

    nats_per_token: float
    low: float
    high: float
    tokens: int
    bytes: int | None = None

    @property
    def perplexity(self) -> float:
        """exp of the NELBO: the bound on the perplexity of a token."""
        return float(torch.tensor(self.nats_per_token, dtype=torch.float64).exp())  # math.exp raises before infinity

    @property
    def bits_per_byte(self) -> float | None:
        """The bound in bits a byte of text, None for what is no text."""
        if not self.bytes:
            return None
        return self.nats_per_token * self.tokens / self.bytes / math.log(2)


@torch.no_grad()
def estimate_nelbo(
    model: XDLMForMaskedLM,
    tokens: TokenSet,
    *,
    draws: int = 4,
    generator: torch.Generator | None = None,
    batch_size: int = 32,
    on_draw: Callable[[int, int], None] | None = None,
) -> NelboEstimate:
    """Estimate the NELBO of token sequences by several draws of times and noise for each.

    A sequence's times divide (0, 1] evenly, and its noise follows from its place alone: the batch size does not matter.

    Args:
        model: the denoiser, in evaluation mode.
        tokens: the sequences, at least two for an interval.
        draws: of a time and noise for each sequence.
        generator: of the seed of all draws; seeded by 0 where None.
        batch_size: sequences at a time.
        on_draw: called after each batch with those done and their total.

    Raises:
        ValueError: ``draws`` is below 1, or there is no sequence.
    """
    if draws < 1:
        raise ValueError(f"draws: got {draws}, expected at least 1")
    if not len(tokens):
        raise ValueError("tokens: got no sequence, expected at least one")
    generator = generator or torch.Generator().manual_seed(0)
    seed = int(torch.randint(2**40, (), generator=generator))
    shift = float(torch.rand((), dtype=torch.float64, generator=generator))
    kernel = model.noise_kernel()
    sums = torch.zeros(len(tokens), dtype=torch.float64)
    batches = -(-len(tokens) // batch_size)
    for draw in range(draws):
        for number, on_cpu in enumerate(tokens.batches(batch_size)):
            batch = {name: value.to(model.device) for name, value in on_cpu.items()}
            t = fixed_times(batch["index"], draw, draws, shift)
            noise = generators_for(batch["index"], seed + draw, model.device)
            z = kernel.q_sample(batch["tokens"], t, observed=batch.get("padding"), generator=noise)
            losses = batch_nelbo(model, kernel, batch, z, t, reduction="none")
            sums[on_cpu["index"]] += losses.double().sum(1).cpu()
            if on_draw is not None:
                on_draw(draw * batches + number + 1, draws * batches)
    sums /= draws
    length = tokens.length
    counts = torch.full_like(sums, length) if tokens.padding is None else (~tokens.padding).sum(1).double()
    mean, error = _ratio(sums, counts)
    total = None if tokens.byte_counts is None else int(tokens.byte_counts.sum())
    return NelboEstimate(mean, mean - _Z95 * error, mean + _Z95 * error, int(counts.sum()), total)


def _ratio(values: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return sum(values) / sum(counts) and its standard error over the n entries, infinite for one."""
    mean = float(values.sum() / counts.sum())
    n = len(values)
    spread = (values - mean * counts).square().sum() / (n * (n - 1)) if n > 1 else torch.tensor(torch.inf)
    return mean, float(spread.sqrt() / counts.mean())


@dataclass(frozen=True)
class Frontier:
    """What samples of one model are like at one number of steps; the row of held-back text has no k and steps.

    Attributes:
        run: which model.
        k: its part of uniform noise.
        steps: of denoising.
        nll: of the samples by the judge, in nats a token: low is good, but so are repetitions.
        nll_low: lower end of its 95 % interval over samples.
        nll_high: upper end.
        entropy: of the tokens of the samples, in nats: what repetition lowers.
        samples: how many.
        seconds: for all of them.
    """

    run: str
    k: float | None
    steps: int | None
    nll: float
    nll_low: float
    nll_high: float
    entropy: float
    samples: int
    seconds: float | None = None


@torch.no_grad()
def generate(
    model: XDLMForMaskedLM,
    count: int,
    *,
    length: int | None = None,
    steps: int = 64,
    seed: int = 0,
    batch_size: int = 32,
    on_step: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Tensor:
    """Return unconditional samples, (count, length) int64 on the CPU; each follows from ``seed`` and its number.

    Args:
        model: the denoiser.
        count: how many.
        length: of each, by default the model's context.
        steps: of denoising.
        seed: of the draws.
        batch_size: samples at a time.
        on_step: called after each step of each batch with those done and their total.
        **options: of `spotlights.diffusion.sample`.
    """
    length = length or model.config.max_position_embeddings
    kernel, denoiser = model.noise_kernel(), model.denoiser()
    batches = -(-count // batch_size)
    done: list[Tensor] = []

    def show(step: int, total: int, _: Tensor) -> None:
        if on_step is not None:
            on_step(len(done) * total + step, batches * total)

    for start in range(0, count, batch_size):
        size = min(batch_size, count - start)
        noise = generators_for(torch.arange(start, start + size), seed, model.device)
        drawn = sample(
            denoiser,
            kernel,
            shape=(size, length),
            steps=steps,
            generator=noise,
            device=model.device,
            on_step=show,
            **options,
        )
        done.append(drawn.cpu())
    return torch.cat(done)


def judge_samples(tokens: Tensor, judge: Judge) -> dict[str, float]:
    """Return ``nll`` with ``nll_low`` and ``nll_high``, and ``entropy``, of samples (B, L), in nats a token."""
    from spotlights.diffusion.judges import token_entropy

    each = judge.nll(tokens).double()
    mean, error = _ratio(each, torch.ones_like(each))
    margin = _Z95 * error
    return {"nll": mean, "nll_low": mean - margin, "nll_high": mean + margin, "entropy": float(token_entropy(tokens))}


def frontier(
    models: Mapping[str, XDLMForMaskedLM],
    judge: Judge,
    reference: Tensor,
    *,
    steps: Sequence[int] = FRONTIER_STEPS,
    samples: int = 64,
    seed: int = 0,
    batch_size: int = 32,
    on_row: Callable[[Frontier], None] | None = None,
    **options: Any,
) -> list[Frontier]:
    """Sample every model at every number of steps and judge the samples; the first row judges held-back data.

    Args:
        models: name -> denoiser.
        judge: gives each sample's negative log-likelihood in nats a token.
        reference: held-back sequences, (B, L) int64.
        steps: numbers of steps.
        samples: how many of each.
        seed: of the samples.
        batch_size: samples at a time.
        on_row: called with each row.
        **options: of `generate`.
    """
    import time

    rows = [Frontier(DATA, None, None, **judge_samples(reference, judge), samples=len(reference))]
    for name, model in models.items():
        for count in steps:
            started = time.perf_counter()
            made = generate(
                model,
                samples,
                length=reference.shape[1],
                steps=count,
                seed=seed,
                batch_size=batch_size,
                **options,
            )
            seconds = round(time.perf_counter() - started, 3)
            figures = judge_samples(made, judge)
            rows.append(Frontier(name, model.config.k, count, **figures, samples=samples, seconds=seconds))
            if on_row is not None:
                on_row(rows[-1])
    return rows


def write_frontier(rows: Sequence[Frontier], path: str | Path) -> None:
    """Write the rows as CSV.

    Raises:
        UserError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [*asdict(rows[0])], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write(path, text.getvalue())


def plot_frontier(rows: Sequence[Frontier], path: str | Path) -> None:
    """Draw the judge's NLL and the entropy of samples over the steps, one line a model, and save a PNG.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    from spotlights.runtime.report import new_figure

    panels = {"nll": "NLL by the judge (nats a token)", "entropy": "entropy of tokens (nats)"}
    names = list(dict.fromkeys(row.run for row in rows if row.run != DATA))
    ticks = sorted({row.steps for row in rows if row.steps is not None})
    with new_figure(9.0, 3.8, 1, len(panels)) as (figure, axes):
        for place, (key, title) in zip(axes, panels.items(), strict=True):
            for name in names:
                own = [row for row in rows if row.run == name]
                label = f"k = {own[0].k:g}" if len({row.k for row in rows}) > len(names) else name
                x, y = [row.steps for row in own], [getattr(row, key) for row in own]
                (line,) = place.plot(x, y, marker="o", markersize=3.5, label=label)
                if key == "nll":
                    low, high = [row.nll_low for row in own], [row.nll_high for row in own]
                    place.fill_between(x, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            for row in rows:
                if row.run == DATA:
                    place.axhline(getattr(row, key), color="0.5", linestyle="--", linewidth=1, label="held-back data")
            place.set_xscale("log", base=2)
            place.xaxis.set_major_locator(FixedLocator(ticks))
            place.xaxis.set_major_formatter(FixedFormatter([str(tick) for tick in ticks]))
            place.xaxis.set_minor_locator(NullLocator())
            place.set_xlabel("denoising steps")
            place.set_title(title)
        axes[0].legend(fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
