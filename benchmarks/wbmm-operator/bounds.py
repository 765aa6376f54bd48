"""What bounds the operator on a CPU: its rate against the size of the maps, beside a copy of the same maps.

Writes bounds.csv and bounds.png. Maps are (B, 64, 28, 28) float32 in channels-last memory; only B grows.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from spotlights.runtime.bench import control_kernel, interleave, keep_memory_warm, peak_flops
from spotlights.runtime.bench_table import LOW, Results, Row, environment, measures
from spotlights.runtime.report import new_figure
from spotlights.runtime.runs import replacing
from spotlights.wbmm import WBMM2d

HERE = Path(__file__).parent
CHANNELS, SIDE = 64, 28
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WINDOWS = (7, 14)


def measure(results: Results, machine: Row) -> None:
    """Time both windows and a copy at every batch size."""
    control = control_kernel()
    for batch in BATCHES:
        case = {"batch": batch, "channels": CHANNELS, "size": SIDE}
        if results.has(tuple(case.items())):
            continue
        x = torch.randn(batch, CHANNELS, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
        target = torch.empty_like(x)
        layers = {f"{side}x{side}": WBMM2d(CHANNELS, side).eval() for side in WINDOWS}
        functions = {name: partial(layer, x) for name, layer in layers.items()}
        functions["copy"] = partial(target.copy_, x)
        functions["control"] = control
        with torch.no_grad():
            timings = interleave(functions, rounds=15, control=control)
        pace = timings.pop("control").minimum
        peak = peak_flops()
        rows = []
        for name, timing in timings.items():
            work = 2 * x.numel() * int(name.split("x")[0]) ** 2 if name in layers else None
            counts = {"bytes": 2 * 4 * x.numel(), "flops": work, "peak_flops": peak, "control_seconds": pace}
            rows.append({**case, "provider": name, **measures(timing), **counts, **machine})
        results.add(rows)
        print(batch, *(f"{name} {timing.quantile(0.25) * 1e6:.0f} us" for name, timing in timings.items()), flush=True)


def draw(rows: list[Row]) -> None:
    """Draw the part of the multiply-add peak and of the copy's bandwidth over the bytes of input and output."""
    with new_figure(9.0, 3.6, 1, 2, sharex=True) as (figure, axes):
        copies = {row["batch"]: row[LOW] for row in rows if row["provider"] == "copy"}
        for side in WINDOWS:
            own = [row for row in rows if row["provider"] == f"{side}x{side}"]
            x = [row["bytes"] / 1e6 for row in own]
            label = f"{side} × {side}"
            peak = [100 * row["flops"] / row[LOW] / row["peak_flops"] for row in own]
            axes[0].plot(x, peak, marker="o", markersize=4, label=label)
            axes[1].plot(x, [100 * copies[row["batch"]] / row[LOW] for row in own], marker="o", markersize=4)
        axes[0].set_title("% of the multiply-add peak")
        axes[1].set_title("% of the speed of a copy")
        axes[0].legend()
        for place in axes:
            place.set_xscale("log")
            place.set_ylim(bottom=0)
            place.set_xlabel("input and output, MB")
        with replacing(HERE / "bounds.png") as temporary:
            figure.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Measure what is missing, and draw."""
    keep_memory_warm()
    machine = environment()
    results = Results(HERE / "bounds.csv", machine)
    measure(results, machine)
    draw(results.rows)


if __name__ == "__main__":
    main()
