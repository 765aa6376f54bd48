"""A file of the paper's release as weights of ours: checked, renamed, with all that prediction needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotlights.runtime import runs, weights
from spotlights.runtime.errors import UserError
from spotlights.wbmm.folding import ANY_MAP, ONE_WINDOW
from spotlights.wbmm.recipes.networks import check_name, create_network, default_image_size


@dataclass(frozen=True)
class Imported:
    """What an import wrote; ``classes`` is 0 for a backbone, ``arguments`` are the network's."""

    out: Path
    model: str
    arguments: dict[str, Any]
    parameters: int
    classes: int
    folded: bool


def import_weights(file: str | Path, model: str, out: str | Path) -> Imported:
    """Read a local file of the release, or a state of ours, and write it as safetensors in our names.

    The new file loads by timm (``checkpoint_path``, or ``pretrained_cfg_overlay=dict(file=...)``), and by
    :func:`spotlights.wbmm.recipes.inference.load_run`.

    Args:
        file: ``.pth``, read without running code from it, or ``.safetensors``.
        model: the WBMM network that it belongs to.
        out: new ``.safetensors`` file; its folder is made.

    Raises:
        UserError: a file that is missing, damaged, could run code, is another network's or one of a run or import; an
            ``out`` that exists.
    """
    from spotlights.wbmm.models import load_original_checkpoint
    from spotlights.wbmm.models.checkpoints import read_checkpoint

    out = Path(out)
    if out.suffix != ".safetensors":
        raise UserError(f"--out: got {out}, expected a name that ends in .safetensors")
    if out.exists():
        raise UserError(f"--out: {out} exists already; name a new file")
    check_name(model)
    if not model.startswith("wbmm_"):
        raise UserError(f"--model: {model} is no WBMM network; expected wbmm_tiny, wbmm_small, ...")
    if weights.is_described(file):
        raise UserError(
            f"{file}: it names its network, classes and image size itself; predict, eval and timm take it as it is"
        )
    try:
        content = read_checkpoint(file)
        state = content["model"] if isinstance(content.get("model"), Mapping) else content
        size = default_image_size(model)
        classes, arguments = _classes(state), _arguments(state, model, size)
        network = create_network(model, arguments, channels=3, classes=classes, image_size=size)
        load_original_checkpoint(network, content)
    except OSError as error:
        raise UserError(f"{file}: cannot read it: {error.strerror or error}") from error
    except ValueError as error:
        reason = str(error) if str(error).startswith(str(file)) else f"{file}: {error}"
        raise UserError(f"{reason} (--model {model})" if "does not fit" in reason else reason) from error
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: cannot make the folder {error.filename}: {error.strerror}") from error
    metadata = {
        "kind": "imported",
        "model": model,
        "model_args": arguments,
        "channels": 3,
        "image_size": size,
        **_preprocessing(model),
        **_class_names(classes),
    }
    runs.write(out, weights.dump(network, metadata))
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Imported(out, model, arguments, parameters, classes, "inference_mode" in arguments)


def _classes(state: Mapping[str, Any]) -> int:
    heads = [len(state[name]) for name in ("head.weight", "head.fc.weight") if name in state]
    return heads[0] if heads else 0


def _arguments(state: Mapping[str, Any], model: str, size: int) -> dict[str, Any]:
    """The arguments that a network of this state needs beside its name."""
    arguments: dict[str, Any] = {}
    if any(name.startswith(("norm0.", "norms.0.")) for name in state):
        arguments["dense"] = True
    if any(name.endswith((".R_fused", f".{ANY_MAP}", f".{ONE_WINDOW}")) for name in state):
        arguments["inference_mode"] = True
        # The release folds pico's and nano's branches into the table, right for its own image size alone.
        if model.startswith(("wbmm_pico", "wbmm_nano")) and not any(".conv5." in name for name in state):
            arguments["input_size"] = size
    return arguments


def _preprocessing(model: str) -> dict[str, list[float]]:
    import timm

    cfg = timm.get_pretrained_cfg(model)
    return {"mean": list(cfg.mean), "std": list(cfg.std)}


def _class_names(classes: int) -> dict[str, list[str]]:
    """Names of the classes: for 1,000 those of ImageNet-1k, whose folders bear the names in ``class_ids``."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    if classes != info.num_classes():
        return {"class_names": [str(label) for label in range(classes)]}
    ids = info.label_names()
    names = [info.index_to_description(label).partition(",")[0] for label in range(classes)]
    unique = [name if names.count(name) == 1 else f"{name} ({key})" for name, key in zip(names, ids, strict=True)]
    return {"class_names": unique, "class_ids": ids}
