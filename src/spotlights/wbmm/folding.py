"""What modules that fold share: exact arithmetic on weights, and state dicts that know their kind.

A folded module has the same output in eval mode and fewer parts (arXiv 2607.02097, section 4). Its state dict names
other tensors, so the kind of a state shows in its keys; where it would not, a marker buffer carries it. A state of
another kind than the module's is refused at loading, strict or not: half of it would fit and give wrong outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ANY_MAP = "folded"
ONE_WINDOW = "folded_single_window"

# kind of a state -> (what it is, what its reader must have done to the module)
_KINDS = {
    "network": ("a whole network", "load it into a network of the same name"),
    "block": ("a block that is not folded", "load it first, fold with spotlights.wbmm.reparameterize afterwards"),
    "folded block": (
        "a folded block",
        "create the network with inference_mode=True, or call spotlights.wbmm.reparameterize on it before loading",
    ),
    "operator": (
        "an operator that is not folded",
        "load it into one that is not folded, fold with spotlights.wbmm.reparameterize afterwards",
    ),
    "folded operator": (
        "a folded operator",
        "create the network with inference_mode=True, or the operator as FoldedWBMM2d",
    ),
    "single window": (
        "a folded operator for maps of one window",
        "create the network with inference_mode=True and the input_size that it was folded for",
    ),
    "two tables": (
        "a folded operator of two windows",
        "create a hierarchical network with inference_mode=True, or the operator as FoldedWBMM2d with "
        "local_window_size",
    ),
    "beside": (
        "a folded operator with a convolution beside it",
        "create the network with inference_mode=True and without input_size",
    ),
    "hierarchical": (
        "a hierarchical operator that is not folded",
        "load it into a HierarchicalWBMM2d, fold with spotlights.wbmm.reparameterize afterwards",
    ),
    "branches": (
        "an operator with branches beside it that are not folded",
        "load it first, fold with spotlights.wbmm.reparameterize afterwards",
    ),
}

_FOLDED = {"folded block", "folded operator", "single window", "two tables", "beside"}


def kind_of_state(state: Mapping[str, Any], prefix: str = "") -> str | None:
    """Return the kind of module whose tensors lie under that prefix, or None for none of ours.

    Example:
        >>> kind_of_state({"op.weight": torch.zeros(8, 13, 13), "op.folded": torch.ones(())}, "op.")
        'folded operator'
    """

    def has(name: str) -> bool:
        return prefix + name in state

    if has("mlp.fc2.weight"):
        return "block" if has("gamma") else "folded block"
    if has(f"op.{ANY_MAP}"):
        return "beside"
    if has("conv5.weight"):
        return "branches"
    if has("global_op.weight"):
        return "hierarchical"
    if has(ONE_WINDOW):
        return "single window"
    if has("local_weight"):
        return "two tables"
    if has("weight"):
        return "folded operator" if has(ANY_MAP) else "operator"
    return None


def other_kind(module: nn.Module, state: Mapping[str, Any], prefix: str = "") -> str | None:
    """Return one sentence on the first part of a module whose state under that prefix is of another kind, or None."""
    for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
        if not isinstance(part, Kinded):
            continue
        inner = f"{name}." if name else ""
        found = kind_of_state(state, inner)
        if found is not None and found != part.state_kind and {found, part.state_kind} & _FOLDED:
            what, remedy = _KINDS[found]
            where = f"{name}: " if name else ""
            return f"state dict: {where}it is of {what}, this is {_KINDS[part.state_kind][0]}: {remedy}"
    return None


class Kinded(nn.Module):
    """A module that refuses, with RuntimeError, to load a state dict in which it or a part is of another kind."""

    @property
    def state_kind(self) -> str:
        """The kind of this module's state dict, as :func:`kind_of_state` names it."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if message := other_kind(self, state_dict, prefix):
            raise RuntimeError(message)
        super()._load_from_state_dict(state_dict, prefix, *args)


class Foldable(nn.Module):
    """A module that :func:`spotlights.wbmm.reparameterize` and timm's ``reparameterize_model`` fold."""

    def fuse(self, input_size: tuple[int, int] | None = None) -> nn.Module:
        """Return the folded module: this one, changed in place, or another. Folding again changes nothing.

        Args:
            input_size: the largest (H, W) that the module will see, or None for any.
        """
        raise NotImplementedError


def wide(tensor: Tensor) -> Tensor:
    """Return a copy in float64, on the CPU (not every device has float64), without gradient."""
    return tensor.detach().to("meta" if tensor.is_meta else "cpu", torch.float64, copy=True)


def parameter_like(value: Tensor, like: Tensor) -> nn.Parameter:
    """Return a value as a parameter on the device, of the dtype and with the ``requires_grad`` of another tensor."""
    return nn.Parameter(value.to(like.device, like.dtype), requires_grad=like.requires_grad)


def check_foldable(name: str, module: nn.Module) -> None:
    """Refuse, with ValueError, a module whose weight is no parameter of its own and so cannot take a scale."""
    if "weight" not in module._parameters:
        raise ValueError(
            f"reparameterize: {name}: got a {type(module).__name__} whose weight is no parameter (pruning or "
            "a parametrization), expected one of its own: make it permanent first, for example by "
            "torch.nn.utils.parametrize.remove_parametrizations or torch.nn.utils.prune.remove"
        )


def affine_of(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return scale and shift (C,), float64, with ``norm(x) = scale * x + shift`` in eval mode.

    Raises:
        ValueError: norm keeps no running statistics.

    Example:
        >>> scale, shift = affine_of(nn.BatchNorm2d(4, eps=0))
        >>> (scale.tolist(), shift.tolist())
        ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    mean, variance = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    if not isinstance(mean, Tensor) or not isinstance(variance, Tensor):
        raise ValueError(
            f"reparameterize: got a {type(norm).__name__}, expected a BatchNorm with running statistics: "
            "only these are constants that fold into weights"
        )
    eps = norm.eps
    assert isinstance(eps, float | int)
    scale = (wide(variance) + eps).rsqrt()
    if isinstance(norm.weight, Tensor):
        scale = scale * wide(norm.weight)
    shift = -wide(mean) * scale
    if isinstance(norm.bias, Tensor):
        shift = shift + wide(norm.bias)
    return scale, shift


def add_centred(table: Tensor, kernel: Tensor) -> Tensor:
    """Add a kernel (C, k, k) to a table (C, h, w), centre on centre, in place; what sticks out is left out.

    Example:
        >>> add_centred(torch.zeros(1, 3, 5), torch.ones(1, 3, 3))[0].tolist()
        [[0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0, 0.0]]
    """

    def middle(extent: int, other: int) -> slice:
        margin = max(extent - other, 0) // 2
        return slice(margin, extent - margin)

    (height, width), (rows, columns) = table.shape[1:], kernel.shape[1:]
    part = kernel[:, middle(rows, height), middle(columns, width)]
    table[:, middle(height, rows), middle(width, columns)] += part
    return table
