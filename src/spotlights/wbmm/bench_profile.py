"""Where the time of a network goes, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from spotlights.runtime.bench import Timing

PROFILE_BATCHES = (1, 16)
PARTS = (
    "operator",
    "depthwise 3x3",
    "norm",
    "squeeze-excite",
    "pointwise",
    "GELU and GRN",
    "residual",
    "stem, downsampling, head",
)
_BY_NAME = {
    "op_norm": "norm",
    "out_norm": "norm",
    "se": "squeeze-excite",
    "mlp": "pointwise",
    "fc1": "pointwise",
    "fc2": "pointwise",
    "act": "GELU and GRN",
    "grn": "GELU and GRN",
}


def part_of(path: str, module: nn.Module) -> str | None:
    """Return the part that a module of a WBMM network is timed as, or None where it belongs to the one around it.

    Example:
        >>> part_of("stages.0.blocks.1.mlp.grn", nn.Identity()), part_of("stages.0.blocks.1", nn.Identity())
        ('GELU and GRN', 'residual')
    """
    names = path.split(".")
    if names[-1] in ("stem", "downsample", "head"):
        return "stem, downsampling, head"
    if "blocks" not in names[:-1]:
        return None
    inside = names[names.index("blocks") + 2 :]
    if not inside:
        return "residual"
    if inside == ["op"]:
        return "depthwise 3x3" if isinstance(module, nn.Conv2d) else "operator"
    # An Mlp's own time is that of its pointwise layers. It takes over what is in it, and so does squeeze-and-excite
    # with the norm before it.
    if len(inside) > 1 and inside not in (["mlp", "act"], ["mlp", "grn"]):
        return None
    return _BY_NAME.get(inside[-1])


class _Clock:
    """Time spent in each part, that of the parts within it left out."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since = 0.0

    def _turn(self) -> None:
        now = perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def enter(self, part: str) -> None:
        self._turn()
        self._open.append(part)

    def leave(self) -> None:
        self._turn()
        self._open.pop()


def profile_parts(
    networks: Mapping[str, nn.Module],
    images: Mapping[str, Tensor],
    *,
    rounds: int = 15,
    max_seconds: float = float("inf"),
) -> dict[str, dict[str, Timing]]:
    """Return the seconds of each part of WBMM networks in inference on the CPU, none for parts computed within others.

    The networks run in turn. A part's time is that of its modules, taken around their calls (a few microseconds each).
    Hooks would not do: modules with hooks are not left to the steps of the CPU library. What a block does outside of
    its modules, layer scale and addition, permutations if it has any, is its "residual"; what an `Mlp` does itself,
    often with the norm and the residual, is "pointwise". A `SqueezeExcite` computes the norm before it.

    Args:
        networks: name -> network in eval mode, not compiled.
        images: name -> (B, C, H, W) for each of them.
        rounds: samples wanted.
        max_seconds: for all samples of a network, of which it gets at least 3 (or ``rounds``).

    Example:
        >>> from spotlights.wbmm.models import WBMMNet
        >>> network = WBMMNet(dims=(8, 16), block_pattern=("DD", "WD"), num_classes=10).eval()
        >>> parts = profile_parts({"ours": network}, {"ours": torch.zeros(1, 3, 32, 32)}, rounds=2)["ours"]
        >>> all(timing.minimum > 0 for timing in parts.values())
        True
    """
    samples: dict[str, dict[str, list[float]]] = {name: {part: [] for part in PARTS} for name in networks}
    clock = _Clock()
    timed: dict[nn.Module, str] = {}
    for network in networks.values():
        for path, module in network.named_modules():
            if (part := part_of(path, module)) is not None:
                timed[module] = part
    call = nn.Module.__call__

    def timed_call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if (part := timed.get(module)) is None:
            return call(module, *arguments, **options)
        clock.enter(part)
        try:
            return call(module, *arguments, **options)
        finally:
            clock.leave()

    taken = dict.fromkeys(networks, 0.0)
    with patch.object(nn.Module, "__call__", timed_call), torch.inference_mode():
        for number in range(rounds + 1):
            for name, network in networks.items():
                if taken[name] > max_seconds and number > 3:
                    continue
                clock.seconds = dict.fromkeys(PARTS, 0.0)
                network(images[name])
                # The first call fills caches.
                if number:
                    taken[name] += sum(clock.seconds.values())
                    for part, seconds in clock.seconds.items():
                        samples[name][part].append(seconds)
    return {name: {part: Timing(tuple(s)) for part, s in parts.items() if any(s)} for name, parts in samples.items()}
