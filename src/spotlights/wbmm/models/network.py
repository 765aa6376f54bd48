"""The WBMM network (arXiv 2607.02097), any depth, width and arrangement of its blocks."""

from collections.abc import Sequence
from functools import partial

import torch
from timm.layers import LayerNorm2d, NormMlpClassifierHead, calculate_drop_path_rates, trunc_normal_
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from spotlights.wbmm.folding import Foldable, Kinded
from spotlights.wbmm.layers import sides_of

from .blocks import WBMMBlock, WBMMStage, downsample, stem


def _check_architecture(
    depths: Sequence[int] | None,
    dims: Sequence[int],
    block_pattern: Sequence[str],
    local_branches: bool,
    stem_stride: int,
    twin_kernel_size: int | None,
) -> None:
    if isinstance(block_pattern, str) or not block_pattern:
        raise TypeError(f'block_pattern: got {block_pattern!r}, expected one string a stage, such as ("DD", "WD")')
    for stage, pattern in enumerate(block_pattern):
        if not pattern or set(pattern) - {"W", "H", "D"}:
            raise ValueError(f'block_pattern[{stage}]: got "{pattern}", expected letters W, H and D, one a block')
    if len(dims) != len(block_pattern):
        raise ValueError(f"dims: got {len(dims)} widths for {len(block_pattern)} stages of block_pattern")
    if any(d % 4 or d < 4 for d in dims):
        raise ValueError(f"dims: got {tuple(dims)}, expected positive multiples of 4")
    lengths = tuple(len(pattern) for pattern in block_pattern)
    if depths is not None and tuple(depths) != lengths:
        raise ValueError(f"depths: got {tuple(depths)}, expected the lengths of block_pattern, {lengths}")
    if local_branches and "W" not in block_pattern[-1]:
        raise ValueError(f'local_branches: the last stage, "{block_pattern[-1]}", has no W block to put them beside')
    if stem_stride not in (2, 4):
        raise ValueError(f"stem_stride: got {stem_stride}, expected 2 or 4")
    if twin_kernel_size is not None and (twin_kernel_size < 1 or twin_kernel_size % 2 == 0):
        raise ValueError(f"twin_kernel_size: got {twin_kernel_size}, expected an odd number or None")


class WBMMNet(Kinded, Foldable):
    """A WBMM network in timm's manner: images (B, in_chans, H, W) of any size -> logits (B, num_classes).

    Args:
        in_chans: channels of the images.
        num_classes: outputs of the classifier; 0 leaves it out.
        global_pool: "avg", or "" for a map of logits (B, num_classes, H', W').
        depths: blocks a stage; follows from `block_pattern` when left out, must agree with it otherwise.
        dims: channels a stage, multiples of 4.
        block_pattern: one string a stage, one letter a block: W = windowed operator, H = hierarchical windows,
            D = 3x3 depthwise convolution.
        window_size: window of every W block, an int or (height, width).
        hierarchical_windows: windows of every H block, the global one and a local one that divides it.
        local_branches: DW 5x5 and DW 3x3 beside the operator in the last stage's W blocks (pico and nano).
        stem_stride: 4 (two 3x3 stride-2 convolutions), or 2 (one of them) for small images.
        twin_kernel_size: a depthwise convolution of this size in place of every windowed operator.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth, rising linearly from 0 to this at the last block.
        ls_init_value: first value of the layer scale.
        init_std: spread of a new weight, the paper's 0.02, or None for 1/sqrt(fan-in), which narrow networks need to
            leave the linear part of their activations.
        backend: how the operator is computed, see `spotlights.wbmm.wbmm2d`.
        dense: a channel LayerNorm for each stage's output, applied by `forward_intermediates(norm=True)`.
        inference_mode: build the folded network, see :func:`spotlights.wbmm.reparameterize`; the state of a folded
            network loads into it.
        input_size: the largest images, one side or (height, width), that a folded network with local branches will see;
            where its last map is one window, the branches lie in the table, and larger maps are refused.

    Raises:
        TypeError, ValueError: an argument that does not describe a network; the message names it.

    Example:
        >>> network = WBMMNet(dims=(8, 16), block_pattern=("DD", "WD"), stem_stride=2, num_classes=10)
        >>> network(torch.zeros(2, 3, 33, 47)).shape
        torch.Size([2, 10])
        >>> [tuple(f.shape) for f in network.forward_intermediates(torch.zeros(2, 3, 28, 28), intermediates_only=True)]
        [(2, 8, 14, 14), (2, 16, 7, 7)]
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        depths: Sequence[int] | None = None,
        dims: Sequence[int] = (80, 160, 320, 640),
        block_pattern: Sequence[str] = ("DDD", "WDW", "WD" * 9, "WWW"),
        window_size: int | tuple[int, int] = 7,
        hierarchical_windows: tuple[int | tuple[int, int], int | tuple[int, int]] = (14, 7),
        local_branches: bool = False,
        stem_stride: int = 4,
        twin_kernel_size: int | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        ls_init_value: float = 1e-6,
        init_std: float | None = 0.02,
        backend: str | None = None,
        dense: bool = False,
        inference_mode: bool = False,
        input_size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        _check_architecture(depths, dims, block_pattern, local_branches, stem_stride, twin_kernel_size)
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.drop_rate = drop_rate
        self.stem = stem(in_chans, dims[0], stem_stride)

        rates = calculate_drop_path_rates(drop_path_rate, [len(p) for p in block_pattern], stagewise=True)
        stages = []
        self.feature_info = []
        for i, (dim, pattern) in enumerate(zip(dims, block_pattern, strict=True)):
            blocks = [
                WBMMBlock(
                    dim,
                    kind,
                    window_size=window_size,
                    hierarchical_windows=hierarchical_windows,
                    local_branches=local_branches and i == len(dims) - 1,
                    twin_kernel_size=twin_kernel_size,
                    drop_path=rate,
                    ls_init_value=ls_init_value,
                    backend=backend,
                )
                for kind, rate in zip(pattern, rates[i], strict=True)
            ]
            stages.append(WBMMStage(downsample(dims[i - 1], dim) if i else nn.Identity(), blocks))
            self.feature_info.append({"num_chs": dim, "reduction": stem_stride * 2**i, "module": f"stages.{i}"})
        self.stages = nn.Sequential(*stages)
        self.norms = nn.ModuleList([LayerNorm2d(dim) for dim in dims]) if dense else None

        self.num_features = dims[-1]
        self.head = NormMlpClassifierHead(self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate)
        self.head_hidden_size = self.head.num_features
        self.apply(partial(_init_weights, std=init_std))
        if inference_mode:
            self.fuse(None if input_size is None else sides_of(input_size, "input_size"))
        elif input_size is not None:
            raise ValueError("input_size: it says how to fold, and inference_mode is False")

    @property
    def state_kind(self) -> str:
        return "network"

    def fuse(self, input_size: tuple[int, int] | None = None) -> "WBMMNet":
        """Fold every block in place and return this network; images of at most `input_size` will come (None: any)."""
        size = input_size
        for i, stage in enumerate(self.stages):
            assert isinstance(stage, WBMMStage)
            if input_size is not None:
                reduction = self.feature_info[i]["reduction"]
                size = -(-input_size[0] // reduction), -(-input_size[1] // reduction)
            for block in stage.blocks:
                assert isinstance(block, WBMMBlock)
                block.fuse(size)
        return self

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, object]:
        """Patterns that sort parameters into layers, for layer-wise learning rates."""
        norms = (r"^norms", (99999,))
        if coarse:
            return {"stem": r"^stem", "blocks": [(r"^stages\.(\d+)", None), norms]}
        blocks = [(r"^stages\.(\d+)\.downsample", (0,)), (r"^stages\.(\d+)\.blocks\.(\d+)", None)]
        return {"stem": r"^stem", "blocks": [*blocks, norms]}

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every block's activations in the backward pass instead of keeping them."""
        for stage in self.stages:
            assert isinstance(stage, WBMMStage)
            stage.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer: Linear (1x1 convolution without pooling), or Identity for num_classes=0."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes` (0: none); `global_pool` "avg" or "" changes the pooling."""
        self.num_classes = num_classes
        self.head.reset(num_classes, global_pool)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The stages' outputs (B, C_i, H_i, W_i), and unless `intermediates_only` the last map before them.

        Args:
            x: images (B, in_chans, H, W).
            indices: which stages: the last n, these, or all.
            norm: normalise each one (dense networks; the others have no norm for maps).
            stop_early: leave out the stages after the last one asked for.
            output_fmt: "NCHW".
            intermediates_only: return the list alone.
        """
        if output_fmt != "NCHW":
            raise ValueError(f'output_fmt: got "{output_fmt}", expected "NCHW"')
        take, last = feature_take_indices(len(self.stages), indices)
        features = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in take:
                features.append(self.norms[i](x) if norm and self.norms is not None else x)
        return features if intermediates_only else (x, features)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the stages `indices` do not need; returns them counted from the first stage."""
        take, last = feature_take_indices(len(self.stages), indices)
        if prune_norm:
            self.norms = None
        elif self.norms is not None:
            kept = [norm if i in take else nn.Identity() for i, norm in enumerate(self.norms)]
            self.norms = nn.ModuleList(kept[: last + 1])
        pruned = last < len(self.stages) - 1
        if pruned:
            self.stages = self.stages[: last + 1]
            self.num_features = self.head_hidden_size = self.feature_info[last]["num_chs"]
        if prune_head or pruned:
            self.num_classes = 0
            self.head.reset(0, "")
            self.head.norm = nn.Identity()
            self.head.in_features = self.head.num_features = self.num_features
        return take

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> the last stage's output (B, num_features, H', W')."""
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Last map (B, num_features, H', W') -> logits, or with `pre_logits` the pooled, normalised features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def _init_weights(module: nn.Module, std: float | None) -> None:
    if isinstance(module, nn.Conv2d | nn.Linear):
        trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5 if std is None else std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
