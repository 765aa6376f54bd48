"""Ablations of the operator on Fashion-MNIST: windows, what the matrix is made of, and which blocks use it.

``run.py`` trains every variant with every seed, one row of results.csv and answers.csv each; rows that are there
already are not made again, and ``run.py train --only VARIANT --seed S`` makes some of them. ``run.py report`` prints
the tables of README.md and draws accuracy.png. The images are those that tests/data/fetch.sh fetches.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from spotlights.runtime.bench_table import Row, environment, format_table
from spotlights.runtime.runs import CONFIG, replacing, write
from spotlights.runtime.statistics import bootstrap_difference
from spotlights.runtime.training import read_metrics
from spotlights.wbmm import WBMM2d
from spotlights.wbmm.backends.matmul import build_matrix, forward_prepared
from spotlights.wbmm.models.zoo import wbmm_atto
from spotlights.wbmm.recipes.classification import SUMMARY, train
from spotlights.wbmm.recipes.config import ClassificationConfig
from spotlights.wbmm.recipes.data import load_run_data
from spotlights.wbmm.recipes.inference import evaluate, load_run

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("SPOTLIGHTS_TEST_DATA")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotlights" / "tests"
)
RESULTS, ANSWERS, PICTURE = HERE / "results.csv", HERE / "answers.csv", HERE / "accuracy.png"
SEEDS = (0, 1)
EPOCHS = 4
IMAGES = 6000
# 28 pixels give maps of 14, 7 and 4: the first alone holds several windows of 7.
BASE = ("WDW", "WD", "W")
DIMS = (16, 32, 64)

REFERENCE = "windows of 7, alternating"
VARIANTS: dict[str, dict[str, Any]] = {
    REFERENCE: {},
    "windows of 14": {"first_window": 14},
    "windows of 14 + 7": {"block_pattern": ("HDH", *BASE[1:])},
    "free matrix": {"matrix": "free"},
    "table, no shortcut": {"matrix": "table"},
    "D everywhere": {"block_pattern": ("DDD", "DD", "D")},
    "W everywhere": {"block_pattern": ("WWW", "WW", "W")},
    "W in the first stage": {"block_pattern": ("WDW", "DD", "D")},
    "W in the later stages": {"block_pattern": ("DDD", "WD", "W")},
}
# Each question names its variants and how the reference is called there.
QUESTIONS = {
    "windows where maps are larger than 7": ("windows of 7", ("windows of 14", "windows of 14 + 7")),
    "what the matrix is made of": ("table and shortcut", ("table, no shortcut", "free matrix")),
    "which blocks are windowed": (
        "alternating: WDW, WD, W",
        ("D everywhere", "W in the first stage", "W in the later stages", "W everywhere"),
    ),
}


class FreeMatrix(nn.Module):
    """A full matrix (C, d, d) a channel in place of a table: maps (B, C, H, W) in, the same out, no shortcut.

    It starts as the matrix of the operator it replaces.
    """

    def __init__(self, op: WBMM2d) -> None:
        super().__init__()
        self.window_size = op.window_size
        self.matrix = nn.Parameter(build_matrix(op.weight.detach(), None, op.shortcut).clone())

    def forward(self, input: Tensor) -> Tensor:
        return forward_prepared(input, (self.matrix, self.window_size), None)


# timm looks here for what it knows of a network.
default_cfgs = generate_default_cfgs({"wbmm_ablation.untrained": {"input_size": (3, 28, 28)}})


@register_model
def wbmm_ablation(
    pretrained: bool = False, matrix: str = "table and shortcut", first_window: int = 7, **kwargs: Any
) -> nn.Module:
    """``wbmm_atto``, narrower and of two more blocks, its operators changed after construction."""
    network: Any = wbmm_atto(pretrained, **{"dims": DIMS, "block_pattern": BASE, **kwargs})
    for number, stage in enumerate(network.stages):
        for block in stage.blocks:
            if not isinstance(block.op, WBMM2d):
                continue
            if number == 0 and first_window != 7:
                block.op = WBMM2d(block.op.channels, first_window)
            block.op.shortcut = matrix == "table and shortcut"
            if matrix == "free":
                block.op = FreeMatrix(block.op)
    return network


def multiply_adds(network: nn.Module, images: Tensor) -> int:
    """Count the multiply-adds of convolutions, linear layers and operators for ``images`` (1, C, H, W)."""
    counts: list[int] = []

    def count(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, WBMM2d | FreeMatrix):
            (height, width), (wh, ww) = output.shape[-2:], module.window_size
            counts.append(output.shape[1] * math.ceil(height / wh) * math.ceil(width / ww) * (wh * ww) ** 2)
        else:
            counts.append(output.numel() * module.weight[0].numel())

    counted = (nn.Conv2d, nn.Linear, WBMM2d, FreeMatrix)
    hooks = [module.register_forward_hook(count) for module in network.modules() if isinstance(module, counted)]
    with torch.inference_mode():
        network.eval()(images)
    for hook in hooks:
        hook.remove()
    return sum(counts)


def train_variants(arguments: argparse.Namespace) -> None:
    """Train what is missing, one after the other."""
    wanted = [(name, seed) for seed in arguments.seed for name in arguments.only or VARIANTS]
    for number, (name, seed) in enumerate(wanted, start=1):
        print(f"\n[{number}/{len(wanted)}] {name}, seed {seed}", flush=True)
        if (name, str(seed)) in [(row["variant"], row["seed"]) for row in read_rows(RESULTS)]:
            print("finished before")
            continue
        train_one(name, seed, arguments.work)


def train_one(name: str, seed: int, work: Path) -> None:
    folder = work / f"{''.join(letter if letter.isalnum() else '-' for letter in name.lower())}-seed{seed}"
    config = ClassificationConfig(
        out=str(folder),
        model=wbmm_ablation.__name__,
        model_args=VARIANTS[name],
        data=str(CACHE),
        dataset="fashion-mnist",
        epochs=EPOCHS,
        lr=4e-3,
        warmup_epochs=1,
        limit=IMAGES,
        seed=seed,
        val_split=0,
    )
    if not (folder / SUMMARY).exists():
        train(config, resume=(folder / CONFIG).exists())
    summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    trained = load_run(folder)
    evaluation = evaluate(trained, load_run_data(config).splits["test"])
    correct = (evaluation.predictions == evaluation.targets).numpy()
    key = {"variant": name, "seed": str(seed)}
    row = {
        **key,
        "parameters": summary["parameters"],
        "mega_multiply_adds": round(multiply_adds(trained.model, torch.zeros(1, 1, 28, 28)) / 1e6, 3),
        "train_images": summary["train_images"],
        "test_images": len(correct),
        "epochs": EPOCHS,
        "test_accuracy": round(float(correct.mean()), 5),
        "train_loss": round(read_metrics(folder)[-1]["train_loss"], 5),
        "seconds": round(summary["seconds"], 1),
        **environment(),
    }
    # Other trainings may have added rows meanwhile; the row in results.csv says that a training is done: it comes last.
    write(ANSWERS, format_table([*read_rows(ANSWERS), {**key, "correct_bits": np.packbits(correct).tobytes().hex()}]))
    write(RESULTS, format_table([*read_rows(RESULTS), row]))
    print(f"test accuracy {100 * row['test_accuracy']:.2f} %", flush=True)


def report(arguments: argparse.Namespace) -> None:
    """Print Markdown tables and draw the picture of what the CSV files hold."""
    rows = {name: [row for row in read_rows(RESULTS) if row["variant"] == name] for name in VARIANTS}
    accuracies = {name: [100 * float(row["test_accuracy"]) for row in found] for name, found in rows.items() if found}
    correct = read_answers(rows)
    noise, degrees = seed_noise(accuracies)
    for question, (reference_name, others) in QUESTIONS.items():
        print(f"\n| {question} | parameters | M multiply-adds | accuracy, % | seeds | difference | train loss |")
        print("|---" * 7 + "|")
        for name in (REFERENCE, *others):
            found, values = rows[name], accuracies[name]
            low, high = (100 * end for end in bootstrap_difference(correct[name], correct[REFERENCE]))
            difference = np.mean(values) - np.mean(accuracies[REFERENCE])
            cells = [
                reference_name if name == REFERENCE else name,
                f"{int(found[0]['parameters']):,}",
                f"{float(found[0]['mega_multiply_adds']):.1f}",
                f"{np.mean(values):.2f}",
                ", ".join(f"{value:.2f}" for value in values),
                "" if name == REFERENCE else f"{difference:+.2f} ({low:+.2f} to {high:+.2f})",
                f"{np.mean([float(row['train_loss']) for row in found]):.3f}",
            ]
            print("|", " | ".join(cells), "|")
    seconds = [float(row["seconds"]) for row in chain.from_iterable(rows.values())]
    seeds = min(map(len, accuracies.values()))
    margin = half_width(noise, degrees, seeds)
    print(f"\nseeds: deviation {noise:.2f} points over {degrees} degrees of freedom")
    print(
        f"the mean of {seeds} seeds is known to {margin:.2f}, a difference of two to {math.sqrt(2) * margin:.2f} (95 %)"
    )
    print(f"{len(seconds)} trainings, {min(seconds):.0f} to {max(seconds):.0f} s each")
    draw(accuracies, noise, degrees)


def seed_noise(accuracies: dict[str, list[float]]) -> tuple[float, int]:
    """Return the standard deviation between the seeds of a variant, pooled over all, and its degrees of freedom."""
    squares = sum(float(np.var(values)) * len(values) for values in accuracies.values())
    degrees = sum(len(values) - 1 for values in accuracies.values())
    return math.sqrt(squares / degrees), degrees


def half_width(noise: float, degrees: int, seeds: int) -> float:
    """Return half of the 95 % interval of a mean over so many seeds."""
    from scipy.stats import t

    return float(t.ppf(0.975, degrees)) * noise / math.sqrt(seeds)


def draw(accuracies: dict[str, list[float]], noise: float, degrees: int) -> None:
    from matplotlib.figure import Figure

    sizes = [1 + len(others) for _, others in QUESTIONS.values()]
    figure = Figure(figsize=(7.6, 5.6), layout="constrained", dpi=120)
    panels = figure.subplots(len(sizes), 1, sharex=True, height_ratios=sizes)
    for axes, (question, (reference_name, others)) in zip(panels, QUESTIONS.items(), strict=True):
        axes.axvline(np.mean(accuracies[REFERENCE]), color="0.7", linewidth=1)
        for place, name in enumerate((REFERENCE, *others)):
            values = accuracies[name]
            color = "tab:blue" if name == REFERENCE else "0.25"
            width = half_width(noise, degrees, len(values))
            mean = float(np.mean(values))
            axes.errorbar(mean, place, xerr=width, fmt="o", color=color, capsize=4, markersize=6)
            axes.plot(values, [place] * len(values), "|", color="tab:orange", markersize=11, markeredgewidth=1.5)
            axes.text(1.01, place, f"{mean:.2f}", va="center", fontsize=8, transform=axes.get_yaxis_transform())
        axes.set_yticks(range(1 + len(others)), [reference_name, *others], fontsize=8)
        axes.set_ylim(len(others) + 0.6, -0.6)
        axes.set_title(question, fontsize=9, loc="left")
        axes.grid(axis="x", alpha=0.3)
    panels[-1].set_xlabel(
        f"accuracy on {IMAGES:,} test images, %: dots and bars the means over seeds with 95 % intervals "
        "from the spread\nof the seeds, orange each seed; the reference, in blue, is the same in each panel",
        fontsize=8,
    )
    with replacing(PICTURE) as temporary:
        figure.savefig(temporary, format="png")


def read_answers(rows: dict[str, list[Row]]) -> dict[str, NDArray[np.bool_]]:
    """Return variant -> (seeds, N) bool, whether each test image was read correctly."""
    bits = {(row["variant"], row["seed"]): bytes.fromhex(row["correct_bits"]) for row in read_rows(ANSWERS)}
    return {
        name: np.stack(
            [
                np.unpackbits(np.frombuffer(bits[name, row["seed"]], np.uint8), count=int(row["test_images"]))
                for row in found
            ]
        ).astype(bool)
        for name, found in rows.items()
        if found
    }


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers()
    verb = verbs.add_parser("train", help="train what is missing; the default")
    for options in (parser, verb):
        options.set_defaults(run=train_variants)
        options.add_argument("--only", action="append", choices=VARIANTS, help="default: all variants")
        options.add_argument("--seed", type=int, nargs="+", default=SEEDS)
        options.add_argument("--work", type=Path, default=CACHE / "ablation", help="where to keep the run folders")
    verb = verbs.add_parser("report", help="print the tables, draw the picture")
    verb.set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
