"""``spotlights xdlm eval``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.diffusion.cli.common import needs_text
from spotlights.diffusion.cli.sampling import add_draw_options, draw_options
from spotlights.runtime.errors import UserError, first_line
from spotlights.runtime.options import at_least, find_device
from spotlights.runtime.progress import passing_bar

if TYPE_CHECKING:
    from spotlights.diffusion.judges import Judge
    from spotlights.diffusion.recipes.data import TokenSet
    from spotlights.diffusion.recipes.inference import TrainedDenoiser

_CSV, _PNG = "frontier.csv", "frontier.png"


def add_eval(verbs: Any) -> None:
    """Add ``eval``."""
    parser = verbs.add_parser(
        "eval",
        help="judge trained denoisers by likelihood and by their samples",
        description="Print the NELBO with its 95 % interval, bits per byte and perplexity of runs on held-back text, "
        "and the NLL of their samples by a judge together with the entropy of their tokens. With --frontier, sample "
        "every run at 4 to 256 steps.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folders", nargs="+", metavar="RUN", help="run folders of one vocabulary")
    parser.add_argument(
        "--data", metavar="PATH", help="text to judge by, as for training (default: that of the first run)"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of a dataset (default %(default)s)")
    parser.add_argument(
        "--split", metavar="NAME", help="part to judge by: train, val or test (default: test, else val, else all)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="judge by at most so many sequences (default: all)")
    parser.add_argument(
        "--draws", type=int, default=4, metavar="N", help="times and noises for each sequence (default %(default)s)"
    )
    parser.add_argument("--samples", type=int, default=64, metavar="N", help="to judge; 0: none (default %(default)s)")
    parser.add_argument(
        "--judge", metavar="DIR", help="folder of a Hugging Face causal language model (default: an n-gram judge)"
    )
    parser.add_argument(
        "--judge-order", type=int, default=6, metavar="N", help="of the n-gram judge, in tokens (default %(default)s)"
    )
    parser.add_argument(
        "--frontier", action="store_true", help="judge samples at 4, 8, ..., 256 steps instead of --steps"
    )
    parser.add_argument("--out", metavar="DIR", default=".", help=f"folder for {_CSV} and {_PNG} (default: here)")
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="sequences at a time (default %(default)s)"
    )
    add_draw_options(parser, steps=64)
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    at_least(1, draws=arguments.draws, limit=arguments.limit, batch_size=arguments.batch_size)
    at_least(0, samples=arguments.samples)
    at_least(1, judge_order=arguments.judge_order)
    options = draw_options(arguments)
    if arguments.frontier and not arguments.samples:
        raise UserError("--samples: got 0 beside --frontier, expected at least 1")
    with needs_text():
        from spotlights.diffusion.recipes.inference import load_run

        device = find_device(arguments.device)
        runs = {folder: load_run(folder, device=device) for folder in arguments.run_folders}
        first = next(iter(runs.values()))
        for trained in runs.values():
            _check_comparable(first, trained)
        part, held, training = _text(arguments, first)
        rows = {folder: _bound(arguments, trained, held) for folder, trained in runs.items()}
        figures: dict[str, Any] = {"split": part, "sequences": len(held), "runs": rows}
        if arguments.samples:
            judge = _judge(arguments, first, training)
            reference = _whole(held, arguments.samples)
            if arguments.frontier:
                figures["frontier"] = _frontier(arguments, runs, judge, reference, options)
            else:
                _judge_runs(arguments, runs, judge, reference, options, figures)
    if arguments.json:
        # JSON knows no infinity, which is how wide the interval of a single sequence is.
        figures = json.loads(json.dumps(figures), parse_constant=lambda name: None)
        print(json.dumps(figures, indent=2, ensure_ascii=False))
    else:
        _print_figures(figures)
    return 0


def _check_comparable(first: TrainedDenoiser, other: TrainedDenoiser) -> None:
    import torch

    probe = torch.arange(first.vocabulary.size).tolist()
    if other.context != first.context:
        raise UserError(f"{other.source}: has a context of {other.context}, {first.source} of {first.context} tokens")
    same = other.vocabulary.size == first.vocabulary.size and other.vocabulary.mask_id == first.vocabulary.mask_id
    if not same or other.vocabulary.pieces(probe) != first.vocabulary.pieces(probe):
        raise UserError(f"{other.source}: has another vocabulary than {first.source}; judge them one by one")


def _text(arguments: argparse.Namespace, first: TrainedDenoiser) -> tuple[str, TokenSet, TokenSet | None]:
    """Return the name of the part to judge by, the part, and the run's own training part where it is there."""
    from spotlights.diffusion.recipes.config import load_config
    from spotlights.diffusion.recipes.data import load_parts, load_run_data

    folder = Path(arguments.run_folders[0])
    parts: dict[str, TokenSet] = {}
    training = None
    needs_training = arguments.samples and arguments.judge is None
    if arguments.data is None or needs_training:
        try:
            data = load_run_data(load_config(folder), first.vocabulary)
        except UserError as error:
            if arguments.data is None:
                raise
            remedy = "the n-gram judge counts the run's own text; give --judge, or --samples 0"
            raise UserError(f"{folder}: {error} ({remedy})") from error
        training = data.train
        found = {"train": data.train, "val": data.val, "test": data.test}
        parts = {name: part for name, part in found.items() if part is not None}
    if arguments.data is not None:
        parts = load_parts(arguments.data, first.vocabulary, first.context, text_column=arguments.text_column)
    part = arguments.split or next(name for name in ("test", "val", "all", "train") if name in parts)
    if part not in parts:
        raise UserError(f"--split: got {part}, expected one of {', '.join(parts)}")
    return part, parts[part].subset(arguments.limit), training


def _bound(arguments: argparse.Namespace, trained: TrainedDenoiser, held: TokenSet) -> dict[str, Any]:
    import torch

    from spotlights.diffusion.recipes.evaluation import estimate_nelbo

    with passing_bar(f"{trained.source}: NELBO") as show, _usable(trained.source):
        estimate = estimate_nelbo(
            trained.model,
            held,
            draws=arguments.draws,
            generator=torch.Generator().manual_seed(arguments.seed),
            batch_size=arguments.batch_size,
            on_draw=show,
        )
    return {
        "k": trained.model.config.k,
        "nelbo": estimate.nats_per_token,
        "nelbo_low": estimate.low,
        "nelbo_high": estimate.high,
        "bits_per_byte": estimate.bits_per_byte,
        "perplexity": estimate.perplexity,
        "tokens": estimate.tokens,
        "bytes": estimate.bytes,
    }


@contextmanager
def _usable(source: str) -> Iterator[None]:
    """Turn what a damaged model or an extreme option makes of the logits into one line."""
    try:
        yield
    except ValueError as error:
        if "NaN" not in str(error):
            raise
        raise UserError(f"{source}: {first_line(error)}") from error


def _whole(held: TokenSet, count: int) -> Any:
    """Return at most ``count`` sequences without padding, (B, L) int64."""
    whole = held.tokens if held.padding is None else held.tokens[~held.padding.any(1)]
    if not len(whole):
        raise UserError(f"the text has no whole sequence of {held.length} tokens to compare samples with; --samples 0")
    return whole[:: max(1, len(whole) // count)][:count]


def _judge(arguments: argparse.Namespace, first: TrainedDenoiser, training: TokenSet | None) -> Judge:
    if arguments.judge is not None:
        from spotlights.diffusion.recipes.causal_judge import CausalJudge

        return CausalJudge.load(arguments.judge, first.vocabulary, device=find_device(arguments.device))
    from spotlights.diffusion.judges import NGramJudge

    assert training is not None
    return NGramJudge(arguments.judge_order, first.vocabulary.size).fit(training.tokens, padding=training.padding)


def _judge_runs(
    arguments: argparse.Namespace,
    runs: Mapping[str, TrainedDenoiser],
    judge: Judge,
    reference: Any,
    options: dict[str, Any],
    figures: dict[str, Any],
) -> None:
    from spotlights.diffusion.recipes.evaluation import generate, judge_samples

    figures |= {"steps": options["steps"], "samples": arguments.samples, "held_back": judge_samples(reference, judge)}
    for folder, trained in runs.items():
        with passing_bar(f"{folder}: samples") as show, _usable(folder):
            made = generate(
                trained.model,
                arguments.samples,
                seed=arguments.seed,
                batch_size=arguments.batch_size,
                on_step=show,
                **options,
            )
        figures["runs"][folder] |= judge_samples(made, judge)


def _frontier(
    arguments: argparse.Namespace,
    runs: Mapping[str, TrainedDenoiser],
    judge: Judge,
    reference: Any,
    options: dict[str, Any],
) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from spotlights.diffusion.recipes.evaluation import Frontier, frontier, plot_frontier, write_frontier

    folder = Path(arguments.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {folder}: {error.strerror}") from error

    width = max(map(len, runs))

    def show(row: Frontier) -> None:
        if not arguments.json:
            margin = (row.nll_high - row.nll_low) / 2
            print(
                f"{row.run:<{width}}  k {row.k:<5g} {row.steps:>4} steps  NLL {row.nll:.4f} ± {margin:.4f}  "
                f"entropy {row.entropy:.4f}  ({row.seconds:.1f} s)",
                flush=True,
            )

    with passing_bar("samples") as on_step, _usable(", ".join(runs)):
        rows = frontier(
            {name: trained.model for name, trained in runs.items()},
            judge,
            reference,
            samples=arguments.samples,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            on_row=show,
            on_step=on_step,
            **{name: value for name, value in options.items() if name != "steps"},
        )
    write_frontier(rows, folder / _CSV)
    plot_frontier(rows, folder / _PNG)
    if not arguments.json:
        held = rows[0]
        print(f"held-back data: NLL {held.nll:.4f}, entropy {held.entropy:.4f}")
        print(f"written: {folder / _CSV}, {folder / _PNG}\n")
    return [asdict(row) for row in rows]


def _print_figures(figures: Mapping[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.width = max(console.width, 80)  # lines that a narrower terminal breaks are better than cut figures
    judged = "held_back" in figures
    table = Table("run", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("k", "NELBO (95 %)", "bits/byte", "perplexity", *(("NLL", "entropy") if judged else ())):
        table.add_column(name, no_wrap=True)
    for run, row in figures["runs"].items():
        bound = f"{row['nelbo']:.4f} ± {(row['nelbo_high'] - row['nelbo_low']) / 2:.4f}"
        bits = "-" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        table.add_row(run, f"{row['k']:g}", bound, bits, f"{row['perplexity']:.3f}", *(_judged(row) if judged else ()))
    if judged:
        table.add_row(figures["split"], *[""] * 4, *_judged(figures["held_back"]))
    console.print(table)
    first = next(iter(figures["runs"].values()))
    print(f"NELBO in nats a token, of {first['tokens']:,} in {figures['sequences']:,} sequences ({figures['split']})")
    if judged:
        print(
            f"NLL by the judge and entropy in nats a token, of {figures['samples']} samples in {figures['steps']} steps"
        )


def _judged(row: Mapping[str, Any]) -> tuple[str, str]:
    return f"{row['nll']:.4f}", f"{row['entropy']:.4f}"
