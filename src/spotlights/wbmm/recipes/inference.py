"""Using a trained network: load its run, predict images, evaluate data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from spotlights.runtime import weights
from spotlights.runtime.errors import UserError
from spotlights.wbmm.recipes.augment import evaluation_transform
from spotlights.wbmm.recipes.data import ImageData, ImageSet, make_loader
from spotlights.wbmm.recipes.images import read_image
from spotlights.wbmm.recipes.networks import create_network


@dataclass
class TrainedModel:
    """A network in evaluation mode with all that its use needs."""

    model: nn.Module
    class_names: list[str]
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    info: dict[str, Any] = field(default_factory=dict)

    def preprocess(self, image: Image.Image) -> torch.Tensor:
        """Return an image as this network's input, (C, H, W) uint8; :meth:`probabilities` normalises."""
        mode = "L" if self.channels == 1 else "RGB"
        return evaluation_transform(self.image_size)(image if image.mode == mode else image.convert(mode))

    @torch.inference_mode()
    def probabilities(self, images: torch.Tensor) -> torch.Tensor:
        """Return class probabilities.

        Args:
            images: (B, C, H, W), uint8.

        Returns:
            (B, K), float32.
        """
        device = next(self.model.parameters()).device
        inputs = normalise(images.to(device), self.mean, self.std)
        return self.model(inputs.contiguous(memory_format=torch.channels_last)).float().softmax(dim=1).cpu()


def normalise(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return uint8 images (B, C, H, W), or floats in [0, 1], as float32 of the given mean and deviation per channel."""
    values = images.float() / 255 if images.dtype == torch.uint8 else images
    shape = (1, -1, 1, 1)
    return (values - values.new_tensor(mean).view(shape)) / values.new_tensor(std).view(shape)


def load_run(path: str | Path, *, device: str | torch.device = "cpu") -> TrainedModel:
    """Load the best weights of a run folder, or one of its ``.safetensors`` files.

    Raises:
        UserError: the path holds no weights, or weights that do not fit the network they name.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in (weights.BEST, weights.LAST) if (path / name).is_file()), None)
        if found is None:
            raise UserError(f"{path}: no {weights.BEST} in this folder; a training writes it after an epoch")
        path = found
    elif not path.is_file():
        raise UserError(f"{path}: no such run folder or weights file")
    tensors, info = weights.load(path)
    try:
        class_names, channels = [str(name) for name in info["class_names"]], int(info["channels"])
        size, mean, std = int(info["image_size"]), tuple(info["mean"]), tuple(info["std"])
        name, options = info["model"], dict(info["model_args"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: weights of another recipe (its metadata lacks {error})") from error
    if not class_names:
        raise UserError(f"{path}: a backbone without a classifier; it has nothing to predict")
    model = create_network(name, options, channels=channels, classes=len(class_names), image_size=size)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise UserError(f"{path}: the weights are of another network than {name}: {lines[0]}") from error
    model = model.to(device).to(memory_format=torch.channels_last).eval()
    return TrainedModel(model, class_names, channels, size, mean, std, info)


@dataclass
class Evaluation:
    """Probabilities (N, K) float32 and targets (N,) int64 of a data set, and the figures drawn from them."""

    probabilities: torch.Tensor
    targets: torch.Tensor
    class_names: list[str]

    @property
    def predictions(self) -> torch.Tensor:
        """The most probable class of each image, (N,) int64."""
        return self.probabilities.argmax(dim=1)

    @property
    def accuracy(self) -> float:
        """The part of images whose most probable class is right."""
        return float((self.predictions == self.targets).double().mean())

    @property
    def top5(self) -> float:
        """The part of images whose right class is among the five most probable."""
        best = self.probabilities.topk(min(5, len(self.class_names)), dim=1).indices
        return float((best == self.targets[:, None]).any(dim=1).double().mean())

    @property
    def confusion(self) -> torch.Tensor:
        """Counts by true class (rows) and predicted class (columns), (K, K) int64."""
        count = len(self.class_names)
        return torch.bincount(self.targets * count + self.predictions, minlength=count * count).view(count, count)

    def per_class(self) -> list[dict[str, Any]]:
        """Return name, image count, precision, recall and F1 of each class; None where undefined."""
        matrix = self.confusion
        rows = []
        for label, name in enumerate(self.class_names):
            hits, actual, guessed = int(matrix[label, label]), int(matrix[label].sum()), int(matrix[:, label].sum())
            rows.append(
                {
                    "class": name,
                    "images": actual,
                    "precision": hits / guessed if guessed else None,
                    "recall": hits / actual if actual else None,
                    "f1": 2 * hits / (actual + guessed) if actual + guessed else None,
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return {
            "images": len(self.targets),
            "accuracy": self.accuracy,
            "top5_accuracy": self.top5,
            "classes": self.per_class(),
        }


def evaluate(trained: TrainedModel, images: ImageSet, *, batch_size: int = 256, workers: int = 0) -> Evaluation:
    """Run a network over a data set whose targets index the network's own classes."""
    loader = make_loader(images, batch_size, workers=workers)
    probabilities = [trained.probabilities(batch) for batch, _ in loader]
    return Evaluation(torch.cat(probabilities), images.targets, trained.class_names)


def predict(
    trained: TrainedModel, paths: Sequence[str | Path], *, top_k: int = 3, batch_size: int = 64
) -> list[dict[str, Any]]:
    """Classify image files.

    Returns:
        For each path a mapping with ``image`` and either ``predictions``, the ``top_k`` most probable classes as
        ``class`` and ``probability``, or ``error``, why the file could not be read.
    """
    results: list[dict[str, Any]] = []
    for start in range(0, len(paths), batch_size):
        batch = []
        for path in paths[start : start + batch_size]:
            results.append({"image": str(path)})
            try:
                batch.append((results[-1], trained.preprocess(read_image(path, trained.channels))))
            except UserError as error:
                results[-1]["error"] = str(error)
        if batch:
            probabilities = trained.probabilities(torch.stack([image for _, image in batch]))
            best = probabilities.topk(min(top_k, len(trained.class_names)), dim=1)
            for (result, _), values, labels in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
                result["predictions"] = [
                    {"class": trained.class_names[label], "probability": value}
                    for value, label in zip(values, labels, strict=True)
                ]
    return results


def match_classes(data: ImageData, trained: TrainedModel) -> None:
    """Renumber the targets of ``data`` to the network's classes, by name or, for ImageNet's folders, by id.

    Raises:
        UserError: a class that the network does not know.
    """
    known_as = trained.class_names
    if set(data.class_names) <= set(trained.info.get("class_ids", [])):
        known_as = trained.info["class_ids"]
    unknown = [name for name in data.class_names if name not in known_as]
    if unknown:
        known = ", ".join(trained.class_names[:8]) + (", ..." if len(trained.class_names) > 8 else "")
        raise UserError(f"the data has a class {unknown[0]!r} that the run has not; it knows {known}")
    order = torch.tensor([known_as.index(name) for name in data.class_names])
    for images in data.splits.values():
        images.targets = order[images.targets]
    data.class_names = trained.class_names
