"""What bfloat16 wins the operator on a CPU: the maps of ``--suite cpu`` in both dtypes, in turn.

Writes bfloat16.csv and bfloat16.png. Weights and maps are of one dtype, maps in channels-last memory.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import geometric_mean

import torch

from spotlights.runtime.bench import control_kernel, interleave, keep_memory_warm
from spotlights.runtime.bench_table import LOW, Results, Row, environment, measures
from spotlights.runtime.report import new_figure
from spotlights.runtime.runs import replacing
from spotlights.wbmm import WBMM2d
from spotlights.wbmm.bench import SUITES

HERE = Path(__file__).parent
WINDOWS = (7, 14)
DTYPES = (torch.float32, torch.bfloat16)


def measure(results: Results, machine: Row) -> None:
    """Time both windows in both dtypes on every map."""
    control = control_kernel()
    for grid in SUITES["cpu"]:
        case = {"channels": grid.channels, "batch": grid.batch, "size": grid.height}
        if results.has(tuple(case.items())):
            continue
        plain = torch.randn(grid.batch, grid.channels, grid.height, grid.width)
        maps = {dtype: plain.to(dtype, memory_format=torch.channels_last) for dtype in DTYPES}
        functions = {}
        for side in WINDOWS:
            layer = WBMM2d(grid.channels, side).eval()
            for dtype in DTYPES:
                own = WBMM2d(grid.channels, side).eval().to(dtype)
                own.load_state_dict(layer.state_dict())
                functions[f"{side}x{side} {str(dtype).removeprefix('torch.')}"] = partial(own, maps[dtype])
        with torch.no_grad():
            timings = interleave({**functions, "control": control}, rounds=15, control=control)
        pace = timings.pop("control").minimum
        results.add(
            [
                {**case, "provider": name, **measures(timing), "control_seconds": pace, **machine}
                for name, timing in timings.items()
            ]
        )
        print(*case.values(), *(f"{name} {timing.quantile(0.25) * 1e6:.0f} us" for name, timing in timings.items()))


def draw(rows: list[Row]) -> None:
    """Draw how many times as fast bfloat16 is over the bytes of a float32 map, and print the means."""
    seconds: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in rows:
        seconds.setdefault((row["channels"], row["batch"], row["size"]), {})[row["provider"]] = row[LOW]
    with new_figure(9.0, 3.6) as (figure, axes):
        for side in WINDOWS:
            megabytes = [4e-6 * c * b * s * s for c, b, s in seconds]
            ratios = [own[f"{side}x{side} float32"] / own[f"{side}x{side} bfloat16"] for own in seconds.values()]
            axes.plot(megabytes, ratios, "o", markersize=4, label=f"{side} × {side}")
            print(f"{side}x{side}: {geometric_mean(ratios):.2f} times as fast in bfloat16, {min(ratios):.2f} at least")
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_ylim(0)
        axes.set_xlabel("MB of a float32 map")
        axes.set_ylabel("times as fast in bfloat16")
        axes.legend()
        with replacing(HERE / "bfloat16.png") as temporary:
            figure.savefig(temporary, format="png", dpi=150)


def main() -> None:
    """Measure what is missing, and draw."""
    keep_memory_warm()
    machine = environment()
    results = Results(HERE / "bfloat16.csv", machine)
    measure(results, machine)
    draw(results.rows)


if __name__ == "__main__":
    main()
