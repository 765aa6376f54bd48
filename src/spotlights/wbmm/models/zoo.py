"""The published networks, and `wbmm_atto` for small images, under their timm names.

How the paper trained them (ImageNet-1k, 300 epochs, AdamW 4e-3 at batch 4096, weight decay 0.05, 20 warm-up epochs,
cosine, label smoothing 0.1, RandAugment m9, erasing 0.25). The networks themselves start with a drop path of 0.

| network | drop path | mixup | cutmix | top-1 |
|---|---|---|---|---|
| wbmm_pico  | 0.1 | 0.3 | 0.3 | 80.3 |
| wbmm_nano  | 0.1 | 0.5 | 0.5 | 81.7 |
| wbmm_tiny  | 0.2 | 0.8 | 1.0 | 83.2 |
| wbmm_small | 0.4 | 0.8 | 1.0 | 83.9 |

The dense backbones share their namesake's recipe; their top-1 is not reported.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import FeatureGetterNet
from torch import nn
from torch.serialization import safe_globals

from spotlights.wbmm.layers import sides_of

from .checkpoints import checkpoint_filter_fn, load_original_checkpoint
from .network import WBMMNet
from .pretrained import REPOSITORY, hub_overlay, weights_file

_TINY = {"dims": (80, 160, 320, 640), "block_pattern": ("DDD", "WDW", "WD" * 9, "WWW")}
_SMALL = {"dims": (96, 192, 384, 768), "block_pattern": ("DDD", "WDW", "WDD" * 9, "WWW")}


def _cfg(filename: str | None = None, **kwargs: Any) -> dict[str, Any]:
    weights = {"hf_hub_id": REPOSITORY, "hf_hub_filename": filename} if filename else {}
    return {
        **weights,
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "stem.0",
        "classifier": "head.fc",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2607.02097",
        "paper_name": "WBMM: Windowed Batch Matrix Multiplication for Efficient Large Receptive Field Convolution",
        "origin_url": "https://github.com/wansong-s/WBMM",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "wbmm_atto.untrained": _cfg(input_size=(3, 28, 28), pool_size=(4, 4), crop_pct=1.0),
        "wbmm_pico.in1k": _cfg("wbmm_p_in1k_224_w7.pth"),
        "wbmm_nano.in1k": _cfg("wbmm_n_in1k_224_w7.pth"),
        "wbmm_tiny.in1k": _cfg("wbmm_t_in1k_224_w7.pth"),
        "wbmm_small.in1k": _cfg("wbmm_s_in1k_224_w7.pth"),
        "wbmm_tiny_dense.in1k": _cfg("wbmm_t_dense_in1k_224_w7.pth"),
        "wbmm_small_dense.in1k": _cfg("wbmm_s_dense_in1k_224_w7.pth"),
        "wbmm_tiny_hier.untrained": _cfg(),
        "wbmm_small_hier.untrained": _cfg(),
    }
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    if pretrained:
        kwargs["pretrained_cfg_overlay"] = hub_overlay(variant, kwargs)
        if kwargs.get("inference_mode") and (network := _loaded_then_folded(variant, kwargs)) is not None:
            return network
    try:
        with safe_globals([Namespace]):
            return _build(variant, pretrained, **kwargs)
    except Exception as error:
        if pretrained and not isinstance(error, TypeError):
            _explain(variant, kwargs)
        raise


def _build(variant: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    feature_cfg = {
        "out_indices": tuple(range(len(kwargs["block_pattern"]))),
        "feature_cls": "getter",
        "norm": kwargs.get("dense", False),
    }
    return build_model_with_cfg(
        WBMMNet, variant, pretrained, pretrained_filter_fn=checkpoint_filter_fn, feature_cfg=feature_cfg, **kwargs
    )


def _loaded_then_folded(variant: str, kwargs: Mapping[str, Any]) -> nn.Module | None:
    """The network with the weights of a file that is not folded, folded; None where the file does not load so."""
    plain = {name: value for name, value in kwargs.items() if name not in ("inference_mode", "input_size")}
    try:
        with safe_globals([Namespace]):
            network = _build(variant, True, **plain)
    except (ValueError, RuntimeError):
        return None
    size = kwargs.get("input_size")
    inner: Any = network.model if isinstance(network, FeatureGetterNet) else network
    inner.fuse(None if size is None else sides_of(size, "input_size"))
    return network


def _explain(variant: str, kwargs: dict[str, Any]) -> None:
    """Raise in one line what is wrong with the weights' file, if it is the file."""
    try:
        plain = {name: value for name, value in kwargs.items() if name not in ("features_only", "out_indices")}
        network = _build(variant, False, **plain)
    except ValueError:
        return
    cfg: Any = network.pretrained_cfg
    path = weights_file(cfg, kwargs.get("cache_dir"))
    if path is None:
        return
    try:
        load_original_checkpoint(network, path)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{variant}: {error}") from None


@register_model
def wbmm_atto(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """0.19 M parameters at 10 classes, 5.5 MMAC at 28 pixels, no weights: for images of 28 to 64 pixels.

    Strides 2, 4, 8: 28 pixels give maps of 14, 7 and 4, which its windows of 7 divide where they are used.
    """
    args = {
        "dims": (24, 48, 96),
        "block_pattern": ("W", "WD", "D"),
        "stem_stride": 2,
        "ls_init_value": 1.0,
        "init_std": None,
    }
    return _create("wbmm_atto", pretrained, **{**args, **kwargs})


@register_model
def wbmm_pico(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """10.66 M parameters, 1.50 GMAC at 224 pixels, top-1 80.3 (as published)."""
    args = {"dims": (64, 128, 256, 512), "block_pattern": ("DD", "WD", "WD" * 3, "WW"), "local_branches": True}
    return _create("wbmm_pico", pretrained, **{**args, **kwargs})


@register_model
def wbmm_nano(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """18.17 M parameters, 2.65 GMAC at 224 pixels, top-1 81.7 (as published)."""
    args = {"dims": (80, 160, 320, 640), "block_pattern": ("DD", "WD", "WD" * 4, "WW"), "local_branches": True}
    return _create("wbmm_nano", pretrained, **{**args, **kwargs})


@register_model
def wbmm_tiny(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """31.07 M parameters, 4.77 GMAC at 224 pixels, top-1 83.2 (as published)."""
    return _create("wbmm_tiny", pretrained, **{**_TINY, **kwargs})


@register_model
def wbmm_small(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """55.71 M parameters, 8.94 GMAC at 224 pixels, top-1 83.9 (as published)."""
    return _create("wbmm_small", pretrained, **{**_SMALL, **kwargs})


def _backbone(args: dict[str, Any], first: tuple[str, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    # A classifier would never use the stages' norms, and unused parameters stop distributed training.
    pattern = (*first, *args["block_pattern"][len(first) :])
    return {**args, "block_pattern": pattern, "dense": kwargs.get("features_only", False), **kwargs}


@register_model
def wbmm_tiny_dense(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`wbmm_tiny` with WBMM in the first stage: with `features_only=True` a backbone of normalised maps."""
    return _create("wbmm_tiny_dense", pretrained, **_backbone(_TINY, ("WDW",), kwargs))


@register_model
def wbmm_small_dense(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`wbmm_small` with WBMM in the first stage: with `features_only=True` a backbone of normalised maps."""
    return _create("wbmm_small_dense", pretrained, **_backbone(_SMALL, ("WDW",), kwargs))


@register_model
def wbmm_tiny_hier(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`wbmm_tiny_dense` with hierarchical windows, 14 and 7, in the first two stages; no published weights."""
    return _create("wbmm_tiny_hier", pretrained, **_backbone(_TINY, ("HDH", "HDH"), kwargs))


@register_model
def wbmm_small_hier(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`wbmm_small_dense` with hierarchical windows, 14 and 7, in the first two stages; no published weights."""
    return _create("wbmm_small_hier", pretrained, **_backbone(_SMALL, ("HDH", "HDH"), kwargs))
