"""The paper's released checkpoints: their key names, and reading their files without running code from them."""

import os
import pickle
import re
import warnings
from argparse import Namespace
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn
from torch.serialization import safe_globals

from spotlights.runtime.errors import first_line
from spotlights.wbmm.folding import ANY_MAP, ONE_WINDOW, other_kind, wide

# (release, ours), applied in order to what follows `stages.S.B.`
_BLOCK_KEYS = [
    (r"^dwconv\.(relative_position_bias_table|R_fused)$", "op.weight"),
    (r"^dwconv\.bias_fused$", "op.bias"),
    (r"^dwconv\.dwconv([35])\.", r"op.conv\1."),
    (r"^dwconv\.(bn[123])\.", r"op.\1."),
    (r"^dwconv\.", "op."),
    (r"^se\.down\.", "se.fc1."),
    (r"^se\.up\.", "se.fc2."),
    (r"^pwconv1\.1\.", "mlp.fc1."),
    (r"^act\.1\.gamma$", "mlp.grn.weight"),
    (r"^act\.1\.beta$", "mlp.grn.bias"),
    (r"^pwconv2\.0\.", "mlp.fc2."),
    (r"^pwconv2\.2\.", "mlp.norm."),
]


def _rename(key: str, branched: set[str]) -> str:
    """Our name of a release key; `branched` holds the `stages.S.B` that carry local branches."""
    if match := re.match(r"^downsample_layers\.(\d+)\.(.*)", key):
        stage, rest = match.groups()
        return f"stem.{rest}" if stage == "0" else f"stages.{stage}.downsample.{rest}"
    if match := re.match(r"^stages\.(\d+)\.(\d+)\.(.*)", key):
        stage, block, rest = match.groups()
        if rest == "dwconv.relative_position_bias_table" and f"stages.{stage}.{block}" in branched:
            rest = "op.op.weight"
        for pattern, name in _BLOCK_KEYS:
            rest = re.sub(pattern, name, rest)
        return f"stages.{stage}.blocks.{block}.{rest}"
    key = re.sub(r"^norm(\d)\.", r"norms.\1.", key)
    key = re.sub(r"^norm\.", "head.norm.", key)
    return re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", key)


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """The release's state in our names and shapes; a state in our own names passes unchanged.

    The state may lie under `model`. Index buffers are left out. What one kind of file has and another network has
    not, norms of a dense backbone or the head of a classifier, is left out, or stays as the network has it.

    A folded file (`R_fused`) is for a folded network (`inference_mode=True`); the layer scale and GRN's bias, which the
    release leaves, are folded here. One of pico or nano has its side branches in the table, which is right on maps of
    one window only: its network needs an `input_size` too, 224 for the published ones.

    Args:
        state_dict: a release file's content.
        model: the `WBMMNet` it is meant for; its shapes guide the reshaping.

    Raises:
        ValueError: file and network are not folded alike; the sentence says what to do.

    Example:
        >>> from spotlights.wbmm.models import WBMMNet
        >>> network = WBMMNet(dims=(8, 16), block_pattern=("D", "W"), num_classes=0)
        >>> table = torch.ones(16, 169)
        >>> state = checkpoint_filter_fn({"stages.1.0.dwconv.relative_position_bias_table": table}, network)
        >>> state["stages.1.blocks.0.op.weight"].shape
        torch.Size([16, 13, 13])
    """
    state: Mapping[str, Any] = state_dict
    if isinstance(state.get("model"), Mapping):
        state = state["model"]
    if not any(key.startswith("downsample_layers.") or ".dwconv." in key for key in state):
        return dict(state)
    branched = {key.partition(".dwconv.")[0] for key in state if ".dwconv.dwconv5." in key}
    own = model.state_dict()
    _check_folding(state, own)
    result: dict[str, Tensor] = {}
    for key, value in state.items():
        if key.endswith("relative_position_index"):
            continue
        name = _rename(key, branched)
        if name not in own and name.startswith(("norms.", "head.")):
            continue
        # Tables come flattened, Linear weights without the two axes of a 1x1 convolution, GRN with three axes of 1.
        target = own.get(name)
        if target is not None and value.shape != target.shape and value.numel() == target.numel():
            value = value.reshape(target.shape)
        result[name] = value
    for name in [name for name in result if name.endswith(".gamma") and name not in own]:
        _fold_last_layer(result, name.removesuffix("gamma"))
    for name, value in own.items():
        if name.endswith((f".{ANY_MAP}", f".{ONE_WINDOW}")):
            result[name] = value
        if name.startswith(("norms.", "head.")) and name not in result:
            result[name] = value
            if name == "head.fc.weight":
                warnings.warn("checkpoint: it has no classifier; the network keeps its own", stacklevel=2)
    return result


def _check_folding(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    unfolded = any(name.endswith(".gamma") for name in own)
    if not any(key.endswith(".R_fused") for key in state):
        if unfolded:
            return
        raise ValueError(
            "checkpoint: not folded, but the network is: load it into one made without inference_mode, then call "
            "spotlights.wbmm.reparameterize"
        )
    if unfolded:
        raise ValueError(
            "checkpoint: folded for inference (it holds R_fused): create the network with inference_mode=True"
        )
    if any(name.endswith(".op.conv5.weight") for name in own):
        raise ValueError(
            "checkpoint: folded with its side branches in the table (R_fused), for a last map of one window: create "
            "the network with inference_mode=True and input_size, 224 for the published files"
        )


def _fold_last_layer(state: dict[str, Tensor], block: str) -> None:
    """Take layer scale and GRN's bias out of a block's state and fold them into its last layer."""
    gamma, beta = wide(state.pop(f"{block}gamma")), wide(state.pop(f"{block}mlp.grn.bias")).flatten()
    weight, bias = state[f"{block}mlp.fc2.weight"], state[f"{block}mlp.fc2.bias"]
    matrix = wide(weight).flatten(1)
    state[f"{block}mlp.fc2.weight"] = (matrix * gamma[:, None]).reshape(weight.shape).to(weight.dtype)
    state[f"{block}mlp.fc2.bias"] = ((matrix @ beta + wide(bias)) * gamma).to(bias.dtype)


def read_checkpoint(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of a `.pth` or `.safetensors` file, read without running code from it.

    Raises:
        ValueError: the file is damaged, would run code, or holds no mapping; one line says which.
        OSError: it cannot be opened.
    """
    name = os.fspath(path)
    if name.endswith(".safetensors"):
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(name)
        except SafetensorError as error:
            raise ValueError(f"{name}: not a whole safetensors file ({first_line(error)})") from None
    with open(name, "rb") as file:
        content = _unpickle(file, name)
    if not isinstance(content, Mapping):
        raise ValueError(f"{name}: holds a {type(content).__name__}, expected a state dict")
    return content


def _unpickle(file: BinaryIO, name: str) -> object:
    try:
        with safe_globals([Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        why = f"it holds {found[1]}" if found else "damaged, or more than tensors"
        raise ValueError(f"{name}: refused, since loading it could run code ({why})") from None
    except (RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(f"{name}: not a whole checkpoint file ({first_line(error)})") from None


def _differences(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = [name for name in own if name in state and state[name].shape != own[name].shape]
    parts = []
    if missing:
        parts.append(f"{len(missing)} missing (first: {missing[0]})")
    if unexpected:
        parts.append(f"{len(unexpected)} not in the network (first: {unexpected[0]})")
    if shapes:
        got, expected = tuple(state[shapes[0]].shape), tuple(own[shapes[0]].shape)
        parts.append(f"{len(shapes)} of another shape (first: {shapes[0]}, got {got}, expected {expected})")
    return "; ".join(parts)


def load_original_checkpoint(model: nn.Module, path_or_state: str | os.PathLike[str] | Mapping[str, Any]) -> None:
    """Load a file of the paper's release, or its content, into a network of the same architecture.

    A `.pth` file is read with weights-only loading that allows `argparse.Namespace` and nothing else.

    Args:
        model: a `WBMMNet`, or one made with `features_only=True`.
        path_or_state: `.pth` or `.safetensors` file, or a state dict; tensors under `model` or at top level.

    Raises:
        ValueError: the state is another architecture's, is not folded as the network is, has another number of
            classes, or the file is damaged or would run code; one line says which.
        FileNotFoundError: no such file.

    Example:
        >>> from spotlights.wbmm.models import WBMMNet
        >>> network = WBMMNet(dims=(8, 16), block_pattern=("D", "W"), num_classes=10)
        >>> load_original_checkpoint(network, {"model": {"stages.1.0.dwconv.R_fused": torch.ones(16, 169)}})
        Traceback (most recent call last):
        ...
        ValueError: checkpoint: folded for inference (it holds R_fused): create the network with inference_mode=True
    """
    if isinstance(model, FeatureGetterNet):
        model = model.model
    state = path_or_state if isinstance(path_or_state, Mapping) else read_checkpoint(path_or_state)
    state = checkpoint_filter_fn(state, model)
    if message := other_kind(model, state):
        raise ValueError(message)
    if differences := _differences(state, model.state_dict()):
        raise ValueError(f"checkpoint does not fit this network: {differences}")
    model.load_state_dict(state)
