"""Converting known networks to WBMM: speed before and after, drift, and accuracy after a short fine-tune.

``run.py speed`` writes layers.csv and networks.csv, ``run.py drift`` drift.csv and ``run.py finetune`` accuracy.csv;
rows that are there already are not made again. The last two need what tests/data/fetch.sh fetches. ``run.py report``
prints the tables of README.md and draws speed.png and drift.png.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from timm.utils.model import reparameterize_model
from torch import Tensor, nn

from spotlights.runtime.bench import control_kernel, interleave, keep_memory_warm
from spotlights.runtime.bench_table import LOW, Results, Row, environment, format_table, measures
from spotlights.runtime.runs import replacing, write
from spotlights.wbmm import ConversionReport, ConvertedDepthwise2d, convert_depthwise

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("SPOTLIGHTS_TEST_DATA")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spotlights" / "tests"
)
LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
# The variants compared: the 3x3 path beside the operator, no such path, and its centre left in the table as well.
LOCAL, WITHOUT, TWICE = "converted", "converted, no 3x3 path", "converted, centre counted twice"


class LargeKernelNet(nn.Module):
    """A small network of 13x13 depthwise convolutions and pointwise layers, in the manner of UniRepLKNet."""

    def __init__(self, depths: tuple[int, ...] = (2, 2, 6, 2), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, width // 2, 3, 2, 1), nn.GELU()]
        before = width // 2
        for stage, depth in enumerate(depths):
            channels = width << stage
            stages += [nn.Conv2d(before, channels, 3, 2, 1), nn.BatchNorm2d(channels)]
            stages += [LargeKernelBlock(channels) for _ in range(depth)]
            before = channels
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(x).mean((2, 3)))


class LargeKernelBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 13, padding=6, groups=channels, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.wide = nn.Conv2d(channels, 4 * channels, 1)
        self.narrow = nn.Conv2d(4 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(self.depthwise(x)))))


NETWORKS = ("convnext_tiny", "mobilenetv3_large_100", "efficientnet_b0", "fastvit_t8", "large_kernel_13x13")
PRETRAINED = {
    "tf_efficientnet_lite0": ("efficientnet-lite0-57934424.pth", 5),
    "mobilenet_v2": ("mobilenet_v2-b0353104.pth", 3),
}


def untrained(name: str) -> nn.Module:
    """Build a network with random weights, its residual branches not scaled down and its branches merged."""
    torch.manual_seed(0)
    if name == "large_kernel_13x13":
        return LargeKernelNet().eval()
    network = timm.create_model(name)
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if parameter_name.rpartition(".")[2] == "gamma":
                parameter.fill_(1)
    return reparameterize_model(network).eval()


def pretrained(name: str, classes: int | None = None, folder: Path = CACHE / "weights") -> nn.Module:
    """Build a network with ImageNet weights and, where asked, a fresh head."""
    file, _ = PRETRAINED[name]
    state = torch.load(folder / file, weights_only=True)
    if name == "mobilenet_v2":
        network: nn.Module = torchvision.models.mobilenet_v2()
        network.load_state_dict(state)
    else:
        network = timm.create_model(name)
        names = list(network.state_dict())
        # The file holds the same tensors in the same order under other names.
        network.load_state_dict(dict(zip(names, state.values(), strict=True)))
    if classes is not None:
        head = nn.Linear(1280, classes)
        if name == "mobilenet_v2":
            network.classifier[1] = head
        else:
            network.classifier = head
    return network.eval()


def converted(network: nn.Module, variant: str, min_kernel_size: int = 5, **options: Any) -> ConversionReport:
    """Convert ``network`` in place in one of the variants."""
    report = convert_depthwise(network, keep_local=variant != WITHOUT, min_kernel_size=min_kernel_size, **options)
    if variant == TWICE:
        with torch.no_grad():
            for module in network.modules():
                if isinstance(module, ConvertedDepthwise2d):
                    module.op.weight[:, 5:8, 5:8] += module.local.weight[:, 0]
    return report


def solar_cells(size: int, folder: Path = CACHE / "elpv") -> tuple[Tensor, Tensor]:
    """Return (N, 1, size, size) uint8 images of solar cells and (N,) int64: whether one is defective."""
    lines = (folder / "labels.csv").read_text(encoding="utf-8").split("\n")
    entries = [line.split() for line in lines if line]
    images = []
    for name, _, _ in entries:
        with Image.open(folder / name) as image:
            images.append(np.asarray(image.convert("L").resize((size, size), Image.Resampling.BILINEAR)))
    targets = torch.tensor([float(probability) > 0.5 for _, probability, _ in entries]).long()
    return torch.from_numpy(np.stack(images))[:, None], targets


def normalised(images: Tensor) -> Tensor:
    return ((images.float() / 255 - 0.45) / 0.225).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)


def speed(arguments: argparse.Namespace) -> None:
    """Time the layers and the whole network, in inference and in training steps."""
    keep_memory_warm()
    fixed = environment()
    for name in arguments.network or NETWORKS:
        for batch in arguments.batch:
            size = (batch, 3, 224, 224)
            time_layers(name, size, fixed)
            time_network(name, size, fixed)


def time_layers(name: str, size: tuple[int, ...], fixed: Row) -> None:
    path = HERE / "layers.csv"
    rows = read_rows(path)
    for variant in (LOCAL, WITHOUT):
        for layout, memory_format in LAYOUTS.items():
            key = {"network": name, "variant": variant, "layout": layout, "batch": str(size[0])}
            if any(all(row[column] == value for column, value in key.items()) for row in rows):
                continue
            network = untrained(name).to(memory_format=memory_format)
            report = converted(network, variant, dry_run=True, input_size=size, measure=True)
            print(name, variant, layout, report, sep="\n", flush=True)
            rows += [key | row | fixed for row in report.rows() if row.get("macs_before")]
            write(path, format_table(rows))


def time_network(name: str, size: tuple[int, ...], fixed: Row) -> None:
    results = Results(HERE / "networks.csv", {"machine": fixed["machine"]})
    for task in ("inference", "training"):
        case = {"network": name, "task": task, "batch": size[0]}
        if results.has(tuple(case.items())):
            continue
        calls: dict[str, Callable[[], object]] = {}
        for provider in ("original NCHW", "original NHWC", LOCAL, WITHOUT):
            network = untrained(name)
            if provider in (LOCAL, WITHOUT):
                converted(network, provider)
            memory_format = torch.contiguous_format if provider == "original NCHW" else torch.channels_last
            network.to(memory_format=memory_format).train(task == "training")
            calls[provider] = step(network, torch.randn(size).to(memory_format=memory_format), task == "training")
        with torch.set_grad_enabled(task == "training"):
            timings = interleave(
                calls | {"control": control_kernel()}, rounds=12, warmup=1, max_seconds=8, control=control_kernel()
            )
        control = timings.pop("control").quantile(0.25)
        results.add(
            [
                case | {"provider": provider} | measures(timing) | {"control_seconds": control} | fixed
                for provider, timing in timings.items()
            ]
        )
        print(case, {provider: round(timing.quantile(0.25), 4) for provider, timing in timings.items()}, flush=True)


def step(network: nn.Module, images: Tensor, training: bool) -> Callable[[], object]:
    if not training:
        return lambda: network(images)
    targets = torch.arange(len(images))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return lambda: torch.autograd.grad(F.cross_entropy(network(images), targets), parameters, allow_unused=True)


def drift(arguments: argparse.Namespace) -> None:
    """Write how far the logits move: the norm of the difference over that of the original's logits."""
    rows = []
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(16, 3, 224, 224, generator=generator)
    for name in NETWORKS:
        rows += drift_rows(name, "random", "noise", untrained(name), noise, 5)
    images = normalised(solar_cells(224)[0][:64])
    for name, (_, min_kernel_size) in PRETRAINED.items():
        rows += drift_rows(name, "ImageNet", "solar cells", pretrained(name), images, min_kernel_size)
    write(HERE / "drift.csv", format_table(rows))


def drift_rows(
    name: str, weights: str, images: str, network: nn.Module, input: Tensor, min_kernel_size: int
) -> list[Row]:
    rows = []
    with torch.no_grad():
        expected = network(input)
        for variant in (LOCAL, WITHOUT, TWICE):
            changed = copy.deepcopy(network)
            layers = len(converted(changed, variant, min_kernel_size).layers)
            moved = relative(changed(input), expected)
            rows.append({"network": name, "weights": weights, "images": images, "size": input.shape[-1]})
            rows[-1] |= {"variant": variant, "layers": layers, "drift": round(moved, 5), "torch": torch.__version__}
            print(*rows[-1].values(), flush=True)
    return rows


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def finetune(arguments: argparse.Namespace) -> None:
    """Fine-tune the original, convert it, and fine-tune original and converted network equally."""
    images, targets = solar_cells(arguments.size)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train = (images[order[:2000]], targets[order[:2000]])
    test = (normalised(images[order[2000:]]), targets[order[2000:]])
    path = HERE / "accuracy.csv"
    trainings = 0
    for seed in arguments.seed:
        for name in arguments.network or PRETRAINED:
            rows = read_rows(path)
            settings = {"network": name, "size": str(arguments.size), "seed": str(seed)}
            done = [row["variant"] for row in rows if all(row[key] == value for key, value in settings.items())]
            base = arguments.work / f"{name}-{arguments.size}-{seed}.pt"
            torch.manual_seed(seed)
            network = pretrained(name, 2)
            if base.exists():
                network.load_state_dict(torch.load(base, weights_only=True))
            else:
                fit(network, train, arguments.epochs, 1e-3, seed)
                base.parent.mkdir(parents=True, exist_ok=True)
                torch.save(network.state_dict(), base)
                trainings += 1
            logits = predict(network, test[0])
            start = accuracy(logits, test[1])
            for variant in ("original", LOCAL, WITHOUT):
                if variant in done:
                    continue
                if trainings == arguments.trainings:
                    return
                trainings += 1
                changed = copy.deepcopy(network)
                layers = 0
                if variant != "original":
                    layers = len(converted(changed, variant, PRETRAINED[name][1]).layers)
                before = predict(changed, test[0])
                seconds = fit(changed, train, arguments.epochs, 3e-4, seed + 1000)
                row = {
                    **settings,
                    "variant": variant,
                    "layers": layers,
                    "epochs": f"{arguments.epochs}+{arguments.epochs}",
                    "accuracy_fine_tuned_original": start,
                    "drift": round(relative(before, logits), 5),
                    "accuracy_after_conversion": accuracy(before, test[1]),
                    "accuracy_after_more_fine_tuning": accuracy(predict(changed, test[0]), test[1]),
                    "seconds": round(seconds, 1),
                    **environment(),
                }
                rows.append(row)
                write(path, format_table(rows))
                print(*row.values(), flush=True)


def fit(network: nn.Module, data: tuple[Tensor, Tensor], epochs: int, rate: float, seed: int) -> float:
    """Train on flipped and turned images, a cosine over all steps; return the seconds it took."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images, targets = data
    batch, steps = 32, epochs * (len(images) // 32)
    optimizer = torch.optim.AdamW(network.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    network.to(memory_format=torch.channels_last).train()
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for indices in order[: len(images) // batch * batch].split(batch):
            turns = int(torch.randint(4, (), generator=generator))
            picked = torch.rot90(images[indices], turns, (2, 3))
            flips = torch.rand(len(indices), 1, 1, 1, generator=generator) < 0.5
            input = normalised(torch.where(flips, picked.flip(3), picked))
            loss = F.cross_entropy(network(input), targets[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return time.perf_counter() - start


def predict(network: nn.Module, images: Tensor) -> Tensor:
    network.eval()
    with torch.no_grad():
        return torch.cat([network(part) for part in images.split(32)])


def accuracy(logits: Tensor, targets: Tensor) -> float:
    return round((logits.argmax(1) == targets).float().mean().item(), 4)


def report(arguments: argparse.Namespace) -> None:
    """Print Markdown tables and draw pictures of what the CSV files hold."""
    cases = speed_cases()
    print("| network | task | batch | original, ms | converted, ms | no 3 × 3 path, ms |\n|---|---|---|---|---|---|")
    for (name, task, batch), (before, *after) in cases.items():
        cells = [f"{1000 * seconds:.1f} ({before / seconds:.2f}×)" for seconds in after]
        print("|", " | ".join([f"`{name}`", task, batch, f"{1000 * before:.1f}", *cells]), "|")
    print("\n| network | weights, images | layers | converted | no 3 × 3 path | counted twice |\n" + "|---" * 6 + "|")
    drifts: dict[tuple[str, ...], list[float]] = {}
    for row in read_rows(HERE / "drift.csv"):
        key = (f"`{row['network']}`", f"{row['weights']}, {row['images']}", row["layers"])
        drifts.setdefault(key, []).append(float(row["drift"]))
    for key, values in drifts.items():
        print("|", " | ".join([*key, *(f"{value:.3f}" for value in values)]), "|")
    print("\n| network | variant | layers | drift | before | converted | tuned on |\n|---|---|---|---|---|---|---|")
    accuracies = read_rows(HERE / "accuracy.csv")
    stages = ("accuracy_fine_tuned_original", "accuracy_after_conversion", "accuracy_after_more_fine_tuning")
    for row in accuracies:
        cells = [f"`{row['network']}`", row["variant"], row["layers"], f"{float(row['drift']):.3f}"]
        print("|", " | ".join(cells + [f"{100 * float(row[stage]):.2f} %" for stage in stages]), "|")
    draw_speed(cases, HERE / "speed.png")
    draw_drift({key[0].strip("`"): values for key, values in drifts.items()}, accuracies, HERE / "drift.png")


def speed_cases() -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """Return (network, task, batch) -> seconds of the original in its better layout and of both conversions."""
    found: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in read_rows(HERE / "networks.csv"):
        found.setdefault((row["network"], row["task"], row["batch"]), {})[row["provider"]] = float(row[LOW])
    order = {name: index for index, name in enumerate(NETWORKS)}
    return {
        case: (min(times["original NCHW"], times["original NHWC"]), times[LOCAL], times[WITHOUT])
        for case, times in sorted(found.items(), key=lambda item: (item[0][1], int(item[0][2]), order[item[0][0]]))
    }


def draw_speed(cases: dict[tuple[str, str, str], tuple[float, float, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=120)
    for axes, task in zip(figure.subplots(1, 2), ("inference", "training"), strict=True):
        rows = [(name, batch, times) for (name, of, batch), times in cases.items() if of == task]
        for offset, label, color, index in ((-0.19, LOCAL, "tab:blue", 1), (0.19, WITHOUT, "tab:orange", 2)):
            places = [place + offset for place in range(len(rows))]
            ratios = [times[0] / times[index] for _, _, times in rows]
            axes.barh(places, ratios, 0.36, label=label, color=color)
            for place, ratio, (_, _, times) in zip(places, ratios, rows, strict=True):
                text = f"{1000 * times[index]:.1f} ms"
                axes.text(max(ratio, 1) + 0.01, place, text, va="center", fontsize=7)
        names = [f"{name}, batch {batch}\n{1000 * times[0]:.1f} ms before" for name, batch, times in rows]
        axes.set_yticks(range(len(rows)), names, fontsize=7.5)
        axes.invert_yaxis()
        axes.axvline(1, color="0.3", linewidth=1)
        axes.set_xlim(0, 1.15 * max(axes.get_xlim()[1], 1))
        axes.set_title(task, fontsize=10)
        axes.set_xlabel("times as fast as the original in its better layout", fontsize=8)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def draw_drift(drifts: dict[str, list[float]], accuracies: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained", dpi=120)
    left, right = figure.subplots(1, 2)
    colors = dict(zip(("original", LOCAL, WITHOUT, TWICE), ("0.5", "tab:blue", "tab:orange", "tab:red"), strict=True))
    for index, variant in enumerate((LOCAL, WITHOUT, TWICE)):
        places = [place + 0.27 * (index - 1) for place in range(len(drifts))]
        left.barh(places, [values[index] for values in drifts.values()], 0.25, label=variant, color=colors[variant])
        for place, values in zip(places, drifts.values(), strict=True):
            left.text(max(values[index], 1e-3) * 1.1, place, f"{values[index]:.3f}", va="center", fontsize=7)
    left.set_xscale("log")
    left.set_xlim(1e-3, 20)
    left.set_yticks(range(len(drifts)), drifts, fontsize=8)
    left.invert_yaxis()
    left.set_title("how far the logits move, before any fine-tuning", fontsize=10)
    left.set_xlabel("norm of the difference over norm of the logits", fontsize=8)
    for place, row in enumerate(accuracies):
        ends = [100 * float(row[f"accuracy_after_{stage}"]) for stage in ("conversion", "more_fine_tuning")]
        color = colors[row["variant"]]
        right.plot(ends, [place] * 2, color=color, linewidth=1.5)
        right.plot(ends[0], place, "o", color=color, markerfacecolor="white")
        right.plot(ends[1], place, "o", color=color)
        right.text(max(ends) + 0.5, place, f"{ends[0]:.2f} → {ends[1]:.2f}", va="center", fontsize=8)
    right.set_yticks(range(len(accuracies)), [f"{row['network']}\n{row['variant']}" for row in accuracies], fontsize=8)
    right.invert_yaxis()
    right.set_xlim(right.get_xlim()[0], right.get_xlim()[1] + 5)
    right.set_title("accuracy at the conversion (open) and two epochs later", fontsize=10)
    right.set_xlabel("test accuracy, %", fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("speed", help="time layers and networks")
    verb.add_argument("--network", action="append", choices=NETWORKS, help="default: all")
    verb.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    verb.set_defaults(run=speed)
    verb = verbs.add_parser("drift", help="measure how far the logits move")
    verb.set_defaults(run=drift)
    verb = verbs.add_parser("finetune", help="measure accuracy before and after")
    verb.add_argument("--network", action="append", choices=PRETRAINED, help="default: all")
    verb.add_argument("--size", type=int, default=128)
    verb.add_argument("--epochs", type=int, default=2, help="before the conversion, and again after it")
    verb.add_argument("--seed", type=int, nargs="+", default=[0])
    verb.add_argument("--trainings", type=int, help="stop after so many; the next run goes on")
    verb.add_argument("--work", type=Path, default=CACHE / "conversion", help="where to keep the fine-tuned originals")
    verb.set_defaults(run=finetune)
    verb = verbs.add_parser("report", help="print the tables, draw the pictures")
    verb.set_defaults(run=report)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
