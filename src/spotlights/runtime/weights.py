"""Trained weights as safetensors files whose header says what they are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from spotlights.runtime.errors import UserError

BEST = "best.safetensors"
LAST = "last.safetensors"
_METADATA = "spotlights"


def dump(network: torch.nn.Module, metadata: Mapping[str, Any]) -> bytes:
    """Return the content of a safetensors file: the state of ``network``, and ``metadata`` (plain values) as JSON.

    One metadata key only: the format keeps several in no fixed order, and equal weights should be equal files.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    return save(tensors, {_METADATA: json.dumps(metadata, ensure_ascii=False)})


def is_described(path: str | Path) -> bool:
    """Whether a file is one that :func:`dump` made."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return _METADATA in (file.metadata() or {})
    except (OSError, SafetensorError):
        return False


def load(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file that :func:`dump` made.

    Raises:
        UserError: the file is missing, damaged, or has no such metadata.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})[_METADATA])
            return {name: file.get_tensor(name) for name in file.keys()}, metadata  # noqa: SIM118 (not a mapping)
    except KeyError as error:
        raise UserError(f"{path}: not weights that a training of this program wrote (no metadata)") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path}: cannot read the weights: {str(error).partition(chr(10))[0]}") from error
