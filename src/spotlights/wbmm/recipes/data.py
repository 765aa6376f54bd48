"""Labelled images for training and evaluation, from folders or by name, always as uint8 batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from spotlights.runtime.errors import UserError
from spotlights.wbmm.recipes import images as image_files
from spotlights.wbmm.recipes.augment import evaluation_transform
from spotlights.wbmm.recipes.config import ClassificationConfig
from spotlights.wbmm.recipes.datasets import DATASETS, load_named
from spotlights.wbmm.recipes.networks import default_image_size

SMALL = 64
CACHE_BYTES = 2 << 30
_SPLIT_NAMES = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


class TensorImages(Dataset):
    """Images of one size, held in memory: (N, C, H, W) uint8 with (N,) int64 targets; whole batches at a time."""

    def __init__(self, images: torch.Tensor, targets: torch.Tensor) -> None:
        self.images = images
        self.targets = targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.as_tensor(indices)
        return self.images[chosen], self.targets[chosen]

    def subset(self, indices: np.ndarray) -> TensorImages:
        """Return some of the images."""
        return TensorImages(*self.__getitems__(indices.tolist()))


class FileImages(Dataset):
    """Image files, each view made by ``transform``; ``cache`` holds those that were decoded already."""

    def __init__(
        self,
        paths: list[Path],
        targets: torch.Tensor,
        channels: int,
        transform: Callable[[Image.Image], torch.Tensor],
        cache: dict[Path, Image.Image],
    ) -> None:
        self.paths = paths
        self.targets = targets
        self.channels = channels
        self.transform = transform
        self.cache = cache

    def __len__(self) -> int:
        return len(self.paths)

    def __getitems__(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([self.view(index) for index in indices]), self.targets[torch.as_tensor(indices)]

    def view(self, index: int) -> torch.Tensor:
        """Return one view, (C, H, W) uint8."""
        path = self.paths[index]
        mode = "L" if self.channels == 1 else "RGB"
        image = self.cache.get(path)
        image = image_files.read_image(path, self.channels) if image is None else image
        return self.transform(image if image.mode == mode else image.convert(mode))

    def subset(self, indices: np.ndarray) -> FileImages:
        """Return some of the images."""
        paths = [self.paths[index] for index in indices]
        return FileImages(paths, self.targets[torch.from_numpy(indices)], self.channels, self.transform, self.cache)


ImageSet = TensorImages | FileImages


@dataclass
class ImageData:
    """The parts of a data set: ``splits`` has ``train``, ``val`` or ``test``, or ``all`` where nothing divides it."""

    splits: dict[str, ImageSet]
    class_names: list[str]
    channels: int
    image_size: int
    augment: str
    skipped: list[str] = field(default_factory=list)


def make_loader(
    images: ImageSet, batch_size: int, *, workers: int = 0, kind: type[DataLoader] = DataLoader, **options: Any
) -> DataLoader:
    """Return a loader of (B, C, H, W) uint8 images and (B,) targets."""
    return kind(images, batch_size, num_workers=workers, collate_fn=_as_is, **options)


def _as_is(batch: Any) -> Any:
    return batch


def load_data(
    data: str | None,
    dataset: str | None,
    *,
    image_size: int | None,
    default_size: int,
    channels: int | None = None,
    limit: int | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> ImageData:
    """Read a data set.

    Args:
        data: a folder ``train/CLASS/*`` with ``val`` and ``test`` beside ``train`` or not, or ``CLASS/*``; with
            ``dataset``, where its files are.
        dataset: a name of :data:`~spotlights.wbmm.recipes.datasets.DATASETS`; the embedded digits where both are None.
        image_size: side of the images, or None for the data's own (up to 64 pixels) or ``default_size``.
        default_size: side for photographs.
        channels: 1 or 3, or None for what the data has.
        limit: keep at most so many images of a part, as many of each class as possible.
        note: called with a line about long work.

    Raises:
        UserError: the folder is missing, empty or laid out differently, has one class only or an empty one.
    """
    if dataset is None and data is not None:
        result = _load_folder(Path(data), image_size, default_size, channels, note)
    else:
        name = dataset or "digits"
        parts, class_names = load_named(name, data)
        found, size = parts["train"][0].shape[1], int(parts["train"][0].shape[-1])
        target = (channels or int(found), image_size or size)
        splits: dict[str, ImageSet] = {
            part: TensorImages(adapt(images, *target), targets) for part, (images, targets) in parts.items()
        }
        result = ImageData(splits, class_names, *target, DATASETS[name].augment)
    if limit is not None:
        result.splits = {part: limited(images, limit) for part, images in result.splits.items()}
    return result


def load_run_data(
    config: ClassificationConfig, *, channels: int | None = None, note: Callable[[str], None] = lambda text: None
) -> ImageData:
    """Return the data of a run, divided into ``train``, ``val`` and ``test`` as its training divides it.

    Raises:
        UserError: the data is missing or not usable.
    """
    data = load_data(
        config.data,
        config.dataset,
        image_size=config.image_size,
        default_size=max(SMALL, default_image_size(config.model)),
        channels=channels,
        limit=config.limit,
        note=note,
    )
    images = data.splits.pop("all", None) or data.splits.pop("train")
    if "val" not in data.splits:
        kept, held = split_off(images, config.val_split, config.seed)
        data.splits |= {"train": kept} | ({"val": held} if held is not None else {})
    else:
        data.splits["train"] = images
    return data


def adapt(images: torch.Tensor, channels: int, size: int) -> torch.Tensor:
    """Return (N, C, H, W) uint8 images with another number of channels (1 or 3) and side."""
    if images.shape[1] == 3 and channels == 1:
        grey = images.float().mul(torch.tensor([0.299, 0.587, 0.114]).view(3, 1, 1)).sum(1, keepdim=True)
        images = grey.round().to(torch.uint8)
    elif images.shape[1] == 1 and channels == 3:
        images = images.expand(-1, 3, -1, -1)
    if images.shape[-2:] != (size, size):
        images = torch.cat([_resized(chunk, size) for chunk in images.split(4096)])
    return images


def _resized(images: torch.Tensor, size: int) -> torch.Tensor:
    resized = F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)


def split_off(images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet | None]:
    """Divide a training set into training and validation, class by class, by a seed.

    Raises:
        UserError: no class has two images.
    """
    if fraction == 0:
        return images, None
    generator = np.random.default_rng(seed)
    targets = images.targets.numpy()
    held = np.zeros(len(targets), dtype=bool)
    for label in np.unique(targets):
        members = generator.permutation(np.flatnonzero(targets == label))
        count = min(max(1, round(fraction * len(members))), len(members) - 1)
        held[members[:count]] = True
    if not held.any():
        raise UserError("too few images to hold some back for validation; add images, a val folder, or --val-split 0")
    return images.subset(np.flatnonzero(~held)), images.subset(np.flatnonzero(held))


def limited(images: ImageSet, limit: int) -> ImageSet:
    """Return at most ``limit`` of the images, as many of each class as possible."""
    if len(images) <= limit:
        return images
    targets = images.targets.numpy()
    rank = np.empty(len(targets), dtype=np.int64)
    for label in np.unique(targets):
        members = np.flatnonzero(targets == label)
        rank[members] = np.arange(len(members))
    return images.subset(np.sort(np.argsort(rank, kind="stable")[:limit]))


def _load_folder(
    root: Path, image_size: int | None, default_size: int, channels: int | None, note: Callable[[str], None]
) -> ImageData:
    layout = _layout(root)
    class_names = sorted(child.name for child in _subfolders(layout["train"] if "train" in layout else layout["all"]))
    if len(class_names) < 2:
        found = f"only {class_names[0]!r}" if class_names else "none"
        raise UserError(f"--data: {root} must hold a folder of images for each of two or more classes; found {found}")
    files: dict[str, list[tuple[Path, int]]] = {}
    for part, folder in layout.items():
        strange = [child.name for child in _subfolders(folder) if child.name not in class_names]
        if strange:
            raise UserError(f"--data: {folder} has a class {strange[0]!r} that {layout['train']} has not")
        files[part] = [
            (path, label) for label, name in enumerate(class_names) for path in image_files.images_in(folder / name)
        ]
    paths = [path for entries in files.values() for path, _ in entries]
    if len(paths) > 2000:
        note(f"reading {len(paths):,} images in {root}")
    checked = _read_all(paths, image_size or default_size)
    skipped = [checked.errors[path] for path in paths if path in checked.errors]
    channels = channels or (1 if checked.all_grey else 3)
    small = checked.uniform_size is not None and checked.uniform_size <= SMALL
    size = image_size or (checked.uniform_size if small and checked.uniform_size else default_size)
    transform = evaluation_transform(size)
    splits: dict[str, ImageSet] = {}
    for part, entries in files.items():
        kept = [(path, label) for path, label in entries if path not in checked.errors]
        if part in ("train", "all"):
            _check_classes(root, class_names, entries, kept)
        targets = torch.tensor([label for _, label in kept], dtype=torch.int64)
        images = FileImages([path for path, _ in kept], targets, channels, transform, checked.cache)
        packed = small and size == checked.uniform_size and len(kept) > 0
        splits[part] = TensorImages(*images.__getitems__(range(len(images)))) if packed else images
    return ImageData(
        {part: images for part, images in splits.items() if len(images)}, class_names, channels, size, "photo", skipped
    )


def _layout(root: Path) -> dict[str, Path]:
    if not root.is_dir():
        raise UserError(f"--data: {root} is {'not a folder' if root.exists() else 'missing'}")
    layout = {}
    for part, names in _SPLIT_NAMES.items():
        folder = next((root / name for name in names if (root / name).is_dir()), None)
        if folder is not None:
            layout[part] = folder
    # A folder `train` of plain images is a class of trains.
    return layout if "train" in layout and _subfolders(layout["train"]) else {"all": root}


def _subfolders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _check_classes(
    root: Path, class_names: list[str], entries: Iterable[tuple[Path, int]], kept: Iterable[tuple[Path, int]]
) -> None:
    readable, found = {label for _, label in kept}, {label for _, label in entries}
    for label, name in enumerate(class_names):
        if label not in readable:
            what = "no readable image" if label in found else "no image"
            raise UserError(f"--data: {root}: class {name!r} has {what}; add some or remove its folder")


@dataclass
class _Checked:
    errors: dict[Path, str]
    cache: dict[Path, Image.Image]
    all_grey: bool
    uniform_size: int | None


def _read_all(paths: list[Path], size: int) -> _Checked:
    """Decode every image once: what cannot be read is known before training, and the rest is kept while room lasts."""
    errors: dict[Path, str] = {}
    cache: dict[Path, Image.Image] = {}
    sizes: set[tuple[int, int]] = set()
    all_grey, room = True, CACHE_BYTES

    def read(path: Path) -> tuple[Image.Image, tuple[int, int]] | str:
        try:
            image = image_files.read_image(path)
        except UserError as error:
            return str(error)
        original, shorter = image.size, min(image.size)
        # Twice the side leaves random crops their detail.
        if shorter > 2 * size:
            scale = 2 * size / shorter
            image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS)
        return image, original

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        for start in range(0, len(paths), 512):
            chunk = paths[start : start + 512]
            for path, result in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(result, str):
                    errors[path] = result
                    continue
                image, original = result
                sizes.add(original)
                all_grey &= image.mode == "L"
                room -= image.width * image.height * len(image.getbands())
                if room > 0:
                    cache[path] = image
    one = next(iter(sizes)) if len(sizes) == 1 else None
    return _Checked(errors, cache, all_grey and bool(sizes), one[0] if one and one[0] == one[1] else None)
