"""Augmentation that suits the data: whole batches of small images by one affine warp, photographs by timm."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Augmentation:
    """How strongly to vary images: rotation and shear in degrees, translation in parts of the side."""

    degrees: float = 0.0
    shear: float = 0.0
    translate: float = 0.0
    zoom: float = 0.0
    flip: bool = False
    border: str = "zeros"
    erase: float = 0.0
    rand_augment: str | None = None
    rand_ops: tuple[str, ...] = ()
    crop: tuple[float, float] = (1.0, 1.0)


# Names that geometry alone may change: a mirrored or half-hidden digit is another digit.
_GEOMETRY = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")

PROFILES = {
    "none": Augmentation(),
    "digits": Augmentation(
        degrees=12, shear=10, translate=0.08, zoom=0.1, rand_augment="rand-m3-n2-mstd0.5", rand_ops=_GEOMETRY
    ),
    "fashion": Augmentation(
        degrees=4, translate=0.06, zoom=0.06, flip=True, erase=0.2, rand_augment="rand-m3-n2", rand_ops=_GEOMETRY
    ),
    "photo": Augmentation(
        degrees=8,
        translate=0.12,
        zoom=0.1,
        flip=True,
        border="reflection",
        erase=0.25,
        rand_augment="rand-m7-n2-mstd0.5-inc1",
        crop=(0.35, 1.0),
    ),
}


def random_affine(images: torch.Tensor, augmentation: Augmentation) -> torch.Tensor:
    """Warp each image of a batch by its own random rotation, shear, zoom, shift and mirror image.

    Args:
        images: (B, C, H, W), floating point.
        augmentation: the ranges.

    Returns:
        (B, C, H, W), the dtype of ``images``; draws come from the device's global generator.

    Example:
        >>> batch = torch.rand(2, 1, 8, 8)
        >>> random_affine(batch, PROFILES["digits"]).shape
        torch.Size([2, 1, 8, 8])
        >>> random_affine(batch, PROFILES["none"]) is batch
        True
    """
    a = augmentation
    if not (a.degrees or a.shear or a.translate or a.zoom or a.flip):
        return images
    draws = torch.rand(6, len(images), device=images.device) * 2 - 1
    angle, shear = draws[0] * math.radians(a.degrees), draws[1] * math.radians(a.shear)
    scale = torch.exp(draws[2] * math.log1p(a.zoom))
    mirror = torch.where(draws[5] < 0, -1.0, 1.0) if a.flip else torch.ones_like(scale)
    cosine, sine, slant = angle.cos() * scale, angle.sin() * scale, shear.tan()
    # Rows map output positions, in [-1, 1], to where they are read; a shift of t sides is 2 t there.
    theta = torch.stack(
        [
            torch.stack([cosine * mirror, cosine * slant - sine, 2 * a.translate * draws[3]], dim=1),
            torch.stack([sine * mirror, sine * slant + cosine, 2 * a.translate * draws[4]], dim=1),
        ],
        dim=1,
    )
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    warped = F.grid_sample(images.float(), grid, padding_mode=a.border, align_corners=False)
    return warped.to(images.dtype)


def training_transform(size: int, channels: int, augmentation: Augmentation) -> Callable[[Any], torch.Tensor]:
    """Return a function from a PIL image to a random training view, (C, size, size), uint8."""
    from timm.data.auto_augment import rand_augment_transform
    from timm.data.transforms import RandomResizedCropAndInterpolation
    from torchvision import transforms

    steps: list[Any] = []
    if augmentation.crop[0] < 1:
        steps.append(RandomResizedCropAndInterpolation(size, scale=augmentation.crop, interpolation="bicubic"))
    else:
        steps += _centre(size)
    if augmentation.flip:
        steps.append(transforms.RandomHorizontalFlip())
    if augmentation.rand_augment:
        options = {"translate_pct": 0.2, "img_mean": (0,) * 3 if channels == 3 else 0}
        chosen = list(augmentation.rand_ops) or None
        if channels == 1:
            chosen = chosen or [*_GEOMETRY, "AutoContrast", "Equalize", "ContrastIncreasing", "BrightnessIncreasing"]
        steps.append(rand_augment_transform(augmentation.rand_augment, options, transforms=chosen))
    return transforms.Compose([*steps, transforms.PILToTensor()])


def evaluation_transform(size: int) -> Callable[[Any], torch.Tensor]:
    """Return a function from a PIL image to its centre, (C, size, size), uint8."""
    from torchvision import transforms

    return transforms.Compose([*_centre(size), transforms.PILToTensor()])


def _centre(size: int) -> list[Any]:
    from torchvision import transforms

    # Small networks see whole images; larger ones the usual 95 %, which leaves the distortion at the rim out.
    side = size if size <= 96 else round(size / 0.95)
    return [
        transforms.Resize(side, transforms.InterpolationMode.BICUBIC, antialias=True),
        transforms.CenterCrop(size),
    ]
