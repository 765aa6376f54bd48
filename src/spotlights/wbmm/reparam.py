"""Fold trained modules for inference, and change the window of trained ones (arXiv 2607.02097, section 4)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from spotlights.wbmm.folding import Foldable, parameter_like, wide
from spotlights.wbmm.layers import FoldedWBMM2d, HierarchicalWBMM2d, WBMM2d, sides_of


def reparameterize(model: nn.Module, *, input_size: int | tuple[int, int] | None = None) -> nn.Module:
    """Fold what is constant at inference into neighbouring weights: same outputs in eval mode, fewer steps.

    Every :class:`~spotlights.wbmm.HierarchicalWBMM2d`, every block of a WBMM network and every such network inside the
    model folds: BatchNorm and shortcut into the operator's table and bias; BatchNorm, layer scale and GRN's bias into
    the block's last layer; the side branches of pico's and nano's last stage into one 5 x 5 depthwise convolution; drop
    path goes. What folds are the norms' running statistics, so a model in training mode changes its outputs (to those
    of eval mode). The arithmetic is float64, the weights keep dtype, device and ``requires_grad``. Parameters are new:
    make optimisers afterwards. Hooks on operators, norms and branches go with the modules that are replaced; hooks on
    the other ones stay. No random numbers are drawn. Folding again changes nothing.

    Args:
        model: any module, changed in place.
        input_size: the largest images, one side or (height, width), that the WBMM network will see. Where its last map
            is one window (224 pixels with windows of 7), the side branches fold into the table, and the operator raises
            ValueError on larger maps. None is right on every size.

    Returns:
        The model; where it is a HierarchicalWBMM2d itself, its folded form.

    Raises:
        ValueError: input_size is not positive, a norm has no running statistics, or a weight is parametrised.

    Example:
        >>> import torch
        >>> model = nn.Sequential(HierarchicalWBMM2d(8, (4, 2)), nn.ReLU()).eval()
        >>> x = torch.randn(1, 8, 9, 11)
        >>> expected = model(x)
        >>> reparameterize(model)
        Sequential(
          (0): FoldedWBMM2d(8, window_size=(4, 4), local_window_size=(2, 2))
          (1): ReLU()
        )
        >>> torch.allclose(model(x), expected, atol=1e-5)
        True
    """
    size = None if input_size is None else sides_of(input_size, "reparameterize: input_size")
    folded: dict[nn.Module, nn.Module] = {}

    def fold(module: nn.Module) -> nn.Module:
        if module not in folded:
            folded[module] = module.fuse(size) if isinstance(module, Foldable) else module
            if folded[module] is module:
                # Not named_children: a module under two names has to be replaced under both.
                for name, child in list(module._modules.items()):
                    if child is not None and (result := fold(child)) is not child:
                        setattr(module, name, result)
        return folded[module]

    return fold(model)


def resize_window(model: nn.Module, window_size: int | tuple[int, int]) -> nn.Module:
    """Give every windowed operator of a trained model another window, by bicubic resizing of its table.

    A larger window sees further: the table is stretched over the new offsets, its centre stays the centre. In a
    :class:`~spotlights.wbmm.HierarchicalWBMM2d` the local window becomes ``window_size``, and the global one stays the
    same multiple of it. Fine-tune afterwards; parameters are new, so make the optimiser after this too.

    Args:
        model: a :class:`~spotlights.wbmm.WBMM2d` or a model with some, changed in place.
        window_size: one side or (height, width).

    Returns:
        The model.

    Raises:
        ValueError: window_size is not positive, the model has no windowed operator, or it is folded.

    Example:
        >>> resize_window(WBMM2d(8, window_size=7), 8)
        WBMM2d(8, window_size=(8, 8), shortcut=True, bias=False)
    """
    sides = sides_of(window_size, "resize_window: window_size")
    operators = {module: sides for module in model.modules() if isinstance(module, WBMM2d)}
    if not operators:
        raise ValueError(f"resize_window: model: this {type(model).__name__} has no WBMM2d")
    if any(isinstance(op, FoldedWBMM2d) for op in operators):
        raise ValueError(
            "resize_window: model: it is folded, and shortcut and norms cannot be told from the table any more; "
            "resize the model before folding it"
        )
    for module in model.modules():
        if isinstance(module, HierarchicalWBMM2d):
            (gh, gw), (lh, lw) = module.global_op.window_size, module.local_op.window_size
            operators[module.global_op] = (gh // lh * sides[0], gw // lw * sides[1])
    for op, window in operators.items():
        if op.window_size != window:
            table = (2 * window[0] - 1, 2 * window[1] - 1)
            resized = F.interpolate(wide(op.weight)[None], size=table, mode="bicubic", align_corners=False)[0]
            op.weight = parameter_like(resized, op.weight)
            op.window_size = window
    return model
