"""Networks by timm's names, with errors that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from spotlights.runtime.errors import UserError


def default_image_size(name: str) -> int:
    """Return the side of the square images that a network was made for, 224 where it does not say."""
    import timm

    check_name(name)
    size = timm.get_pretrained_cfg_value(name, "input_size")
    return int(size[-1]) if size else 224


def create_network(
    name: str, options: Mapping[str, Any], *, channels: int, classes: int, image_size: int, drop_path: float = 0.0
) -> nn.Module:
    """Create a network by its timm name and see it take an image.

    Raises:
        UserError: an unknown name, arguments it does not take, or images too small for it.
    """
    import timm

    check_name(name)
    arguments = {**options, **({"drop_path_rate": drop_path} if drop_path else {})}
    try:
        model = timm.create_model(name, pretrained=False, in_chans=channels, num_classes=classes, **arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        raise UserError(f"--model: {name} cannot be made with {arguments or 'its defaults'}: {error}") from error
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, image_size, image_size))
    except (ValueError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--image-size: {name} cannot take {image_size} x {image_size} images: {reason}") from error
    return model.train()


def check_name(name: str) -> None:
    """Raise UserError, with near names, for a name that neither timm nor this package knows."""
    import timm

    import spotlights.wbmm.models  # noqa: F401 (registers its names)

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3)
        hint = f"; near: {', '.join(near)}" if near else "; the wbmm_* names and all of timm's are known"
        raise UserError(f"--model: no network is called {name!r}{hint}")
