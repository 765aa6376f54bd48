"""What windows, memory formats and bfloat16 cost the operator on a CPU, per multiply-add of its definition.

Writes windows.csv and windows.png. Maps are (16, 64, H, W), of whole windows and about 28 by 28.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from spotlights.runtime.bench import control_kernel, interleave, keep_memory_warm, peak_flops
from spotlights.runtime.bench_table import LOW, Results, Row, environment, measures
from spotlights.runtime.report import new_figure
from spotlights.runtime.runs import replacing
from spotlights.wbmm import WBMM2d

HERE = Path(__file__).parent
BATCH, CHANNELS, SIDE = 16, 64, 28
WINDOWS = (3, 4, 5, 6, 7, 8, 9, (5, 9), 10, 11, 12, 13, 14, 16)
FORMS = ("float32", "bfloat16", "float32 NCHW", "float32 NCHW, layout changed")


def with_layout_changed(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Take and give NCHW memory, and compute in channels-last."""
    return layer(x.contiguous(memory_format=torch.channels_last)).contiguous()


def measure(results: Results, machine: Row) -> None:
    """Time every window in every form, those of one window in turn."""
    control = control_kernel()
    for window in WINDOWS:
        height, width = window if isinstance(window, tuple) else (window, window)
        case = {"window": f"{height}x{width}"}
        if results.has(tuple(case.items())):
            continue
        sides = round(SIDE / height) * height, round(SIDE / width) * width
        plain = torch.randn(BATCH, CHANNELS, *sides)
        last = plain.contiguous(memory_format=torch.channels_last)
        layer = WBMM2d(CHANNELS, window).eval()
        low = WBMM2d(CHANNELS, window).eval().bfloat16()
        calls = (partial(layer, last), partial(low, last.bfloat16()), partial(layer, plain))
        functions = dict(zip(FORMS, (*calls, partial(with_layout_changed, layer, plain)), strict=True))
        with torch.no_grad():
            timings = interleave({**functions, "control": control}, rounds=15, control=control)
        pace = timings.pop("control").minimum
        peak, work = peak_flops(), 2 * plain.numel() * height * width
        rows = []
        for form, timing in timings.items():
            counts = {"flops": work, "peak_flops": peak, "control_seconds": pace}
            rows.append({**case, "provider": form, **measures(timing), **counts, **machine})
        results.add(rows)
        rates = (f"{form} {work / timing.quantile(0.25) / 1e9:.0f}" for form, timing in timings.items())
        print(case["window"], "GFLOP/s:", ", ".join(rates), flush=True)


def draw(rows: list[Row]) -> None:
    """Draw picoseconds per multiply-add over the window, in each form."""
    windows = list(dict.fromkeys(row["window"] for row in rows))
    with new_figure(9.0, 3.6) as (figure, axes):
        for form in FORMS:
            own = {row["window"]: 2e12 * row[LOW] / row["flops"] for row in rows if row["provider"] == form}
            axes.plot([own[window] for window in windows], marker="o", markersize=4, label=form)
        axes.set_xticks(range(len(windows)), windows)
        axes.set_yscale("log")
        axes.set_yticks((10, 20, 50, 100, 200), ("10", "20", "50", "100", "200"))
        axes.set_xlabel("window")
        axes.set_ylabel("ps per multiply-add")
        axes.legend()
        with replacing(HERE / "windows.png") as temporary:
            figure.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Measure what is missing, and draw."""
    keep_memory_warm()
    machine = environment()
    results = Results(HERE / "windows.csv", machine)
    measure(results, machine)
    draw(results.rows)


if __name__ == "__main__":
    main()
