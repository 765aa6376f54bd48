"""The release's weights on the Hugging Face Hub: which file, and what to do where the hub cannot be reached."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timm.models import resolve_pretrained_cfg

from spotlights.runtime.errors import first_line

REPOSITORY = "wansong-s/WBMM"

# The dense files have been published under both spellings.
_SPELLINGS = {
    "wbmm_t_dense_in1k_224_w7.pth": "wbmm_t_in1k_224_dense_w7.pth",
    "wbmm_s_dense_in1k_224_w7.pth": "wbmm_s_in1k_224_dense_w7.pth",
}


def hub_overlay(variant: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The `pretrained_cfg_overlay` under which timm finds the weights that `kwargs` of `create_model` ask for.

    Raises:
        FileNotFoundError: neither cache nor hub gives the file; the message says how to get it here.

    Example:
        >>> hub_overlay("wbmm_tiny", {"pretrained_cfg_overlay": {"file": "tiny.safetensors"}})
        {'file': 'tiny.safetensors'}
    """
    overlay = dict(kwargs.get("pretrained_cfg_overlay") or {})
    cfg = resolve_pretrained_cfg(variant, kwargs.get("pretrained_cfg"), overlay)
    if cfg.file or cfg.state_dict or not (cfg.hf_hub_id and cfg.hf_hub_filename):
        return overlay
    names = [cfg.hf_hub_filename]
    if names[0] in _SPELLINGS:
        names.append(_SPELLINGS[names[0]])
    return {**overlay, "hf_hub_filename": _available(variant, cfg.hf_hub_id, names, kwargs.get("cache_dir"))}


def weights_file(cfg: Mapping[str, Any], cache_dir: str | Path | None) -> str | None:
    """The local file that timm reads for a resolved `pretrained_cfg`, None where there is none."""
    if cfg.get("file"):
        return str(cfg["file"])
    if cfg.get("hf_hub_id") and cfg.get("hf_hub_filename"):
        return _cached(cfg["hf_hub_id"], cfg["hf_hub_filename"], cache_dir)
    return None


def _cached(repository: str, name: str, cache_dir: str | Path | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    repository, _, revision = repository.partition("@")
    path = try_to_load_from_cache(repository, name, cache_dir=cache_dir, revision=revision or None)
    return path if isinstance(path, str) else None


def _available(variant: str, repository: str, names: Sequence[str], cache_dir: str | Path | None) -> str:
    """The first of `names` that the cache or the hub has.

    Asked here before timm does, since timm's download tries half a minute before it says that there is no network.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    held = [name for name in names if _cached(repository, name, cache_dir)]
    if held and len(names) == 1:
        return held[0]
    hub, _, revision = repository.partition("@")
    reason = "the repository has no such file"
    # A cached file that the hub has renamed since would make timm fail, so the hub is asked about it too.
    for name in [*held, *(name for name in names if name not in held)]:
        try:
            get_hf_file_metadata(hf_hub_url(hub, name, revision=revision or None))
            return name
        except EntryNotFoundError:
            continue
        except Exception as error:  # httpx's, requests' or the hub's own, by its version
            if held:
                return held[0]
            reason = first_line(error)
            break
    wanted, cache = " or ".join(names), os.fspath(cache_dir or constants.HF_HUB_CACHE)
    raise FileNotFoundError(
        f"{variant}: cannot fetch {wanted} of {hub} ({reason}), nor is it in the cache {cache}; remedy: on a connected "
        f"machine, `hf download {hub} {names[0]}`; then copy that machine's hub cache here and set HF_HUB_CACHE to it, "
        f"or copy the file, run `spotlights wbmm import {names[0]} --model {variant} --out FILE.safetensors` and pass "
        f'pretrained_cfg_overlay=dict(file="FILE.safetensors")'
    )
