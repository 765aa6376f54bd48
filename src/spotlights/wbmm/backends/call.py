"""What a backend is asked about."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Call(NamedTuple):
    """What a backend needs to know of a call to decide whether it can run it."""

    device: torch.device
    dtype: torch.dtype
    window: tuple[int, int]
    local_window: tuple[int, int] | None
