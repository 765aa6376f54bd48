"""The parts of a WBMM network: token mixer, block, stem and stage."""

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerNorm2d
from timm.models import checkpoint_seq
from torch import Tensor, nn

from spotlights.wbmm.folding import Foldable, Kinded, add_centred, affine_of, check_foldable, parameter_like, wide
from spotlights.wbmm.layers import FoldedWBMM2d, HierarchicalWBMM2d, WBMM2d

from .inference import (
    add_mlp,
    add_mlp_operator,
    is_affine,
    is_watched,
    product_dtype,
    scale_and_shift,
    squeeze_excite,
    stands_in,
    unwatched,
)
from .response import GlobalResponseNorm
from .training import mlp


class MapConv2d(nn.Conv2d):
    """A convolution of maps (B, C, H, W), computed in float32 where a CPU is slow in the maps' dtype (`product_dtype`).

    Example:
        >>> MapConv2d(3, 8, 3)(torch.zeros(1, 3, 9, 9)).shape
        torch.Size([1, 8, 7, 7])
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = super()._conv_forward
        if not unwatched() or input.device.type != "cpu" or (dtype := product_dtype(input.dtype)) == input.dtype:
            return convolve(input, weight, bias)
        return convolve(input.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(input.dtype)


def depthwise(channels: int, kernel_size: int, bias: bool = False) -> nn.Conv2d:
    """A depthwise convolution that keeps the map's size (odd kernels)."""
    return MapConv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=bias)


def depthwise_of(kernel: Tensor, bias: Tensor | None, like: Tensor) -> nn.Conv2d:
    """A depthwise convolution of this kernel (C, k, k) and bias (C,), as parameters like another one."""
    with torch.device("meta"):  # draws no random numbers
        conv = depthwise(kernel.shape[0], kernel.shape[-1])
    conv.weight = parameter_like(kernel[:, None], like)
    conv.bias = None if bias is None else parameter_like(bias, like)
    return conv


def scale_convolution(conv: nn.Conv2d, scale: Tensor, shift: Tensor) -> None:
    """Make a convolution's output, in place, scale * output + shift, both (C,)."""
    if conv.bias is not None:
        shift = wide(conv.bias) * scale + shift
    conv.bias = parameter_like(shift, conv.weight)
    conv.weight = parameter_like(wide(conv.weight) * scale.view(-1, 1, 1, 1), conv.weight)


class ConvolutionBeside(Kinded, Foldable):
    """LocalBranches folded for maps of any size: op(x) + DW5x5(x) on (B, C, H, W).

    Example:
        >>> ConvolutionBeside(FoldedWBMM2d(8), depthwise(8, 5))(torch.zeros(2, 8, 7, 9)).shape
        torch.Size([2, 8, 7, 9])
    """

    def __init__(self, op: FoldedWBMM2d, conv5: nn.Conv2d) -> None:
        super().__init__()
        self.op = op
        self.conv5 = conv5

    @property
    def state_kind(self) -> str:
        return "beside"

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x) + self.conv5(x)

    @torch.no_grad()
    def fuse(self, input_size: tuple[int, int] | None = None) -> nn.Module:
        """This module, or with an `input_size` within one window the operator with the convolution in its table."""
        if input_size is None or any(i > w for i, w in zip(input_size, self.op.window_size, strict=True)):
            return self
        merged = FoldedWBMM2d.of(self.op, single_window=True)
        table = add_centred(wide(merged.weight), wide(self.conv5.weight)[:, 0])
        merged.weight = parameter_like(table, merged.weight)
        return merged

    @torch.no_grad()
    def absorb(self, scale: Tensor, shift: Tensor) -> None:
        """Make the output, in place, scale * output + shift, both (C,)."""
        self.op.absorb(scale, shift)
        self.conv5.weight = parameter_like(wide(self.conv5.weight) * scale.view(-1, 1, 1, 1), self.conv5.weight)


class LocalBranches(Kinded, Foldable):
    """P/N's last stage: BN1(op(x)) + BN2(DW5x5(x)) + BN3(DW3x3(x)), on maps of any size.

    Input and output are (B, C, H, W). `op` is the operator, its shortcut included.

    Example:
        >>> LocalBranches(WBMM2d(8), 8)(torch.zeros(2, 8, 7, 9)).shape
        torch.Size([2, 8, 7, 9])
    """

    def __init__(self, op: WBMM2d | nn.Conv2d, channels: int) -> None:
        super().__init__()
        self.op = op
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv5 = depthwise(channels, 5)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = depthwise(channels, 3)
        self.bn3 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.op(x)) + self.bn2(self.conv5(x)) + self.bn3(self.conv3(x))

    @property
    def state_kind(self) -> str:
        return "branches"

    @torch.no_grad()
    def fuse(self, input_size: tuple[int, int] | None = None) -> nn.Module:
        """Both convolutions as one DW 5x5 beside the operator, or in it: see `ConvolutionBeside`."""
        (scale, shift), (scale5, shift5), (scale3, shift3) = map(affine_of, (self.bn1, self.bn2, self.bn3))
        shift = shift + shift5 + shift3
        like = self.conv5.weight
        kernel = wide(like)[:, 0] * scale5.view(-1, 1, 1)
        add_centred(kernel, wide(self.conv3.weight)[:, 0] * scale3.view(-1, 1, 1))
        if isinstance(self.op, nn.Conv2d):
            if self.op.bias is not None:
                shift = shift + scale * wide(self.op.bias)
            small, large = sorted((kernel, wide(self.op.weight)[:, 0] * scale.view(-1, 1, 1)), key=torch.numel)
            return depthwise_of(add_centred(large, small), shift, like).train(self.training)
        beside = ConvolutionBeside(FoldedWBMM2d.of(self.op).absorb(scale, shift), depthwise_of(kernel, None, like))
        return beside.train(self.training).fuse(input_size)


class Pointwise(nn.Conv2d):
    """A 1x1 convolution of maps (B, H, W, C) or of vectors (B, C), computed as the matrix product that it is.

    Its weight has a convolution's shape (C', C, 1, 1).

    Example:
        >>> x = torch.randn(2, 5, 7, 8)
        >>> layer = Pointwise(8, 16)
        >>> expected = torch.conv2d(x.permute(0, 3, 1, 2), layer.weight, layer.bias).permute(0, 2, 3, 1)
        >>> torch.allclose(layer(x), expected, atol=1e-5)
        True
    """

    def __init__(self, in_channels: int, out_channels: int, bias: bool = True) -> None:
        super().__init__(in_channels, out_channels, 1, bias=bias)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight.flatten(1), self.bias)


class SqueezeExcite(nn.Module):
    """x * sigmoid(fc2(relu(fc1(mean of x over H and W)))) on maps (B, H, W, C).

    Where a norm is given x goes through it first; in inference on a CPU both are one step, which does not call it.

    Example:
        >>> SqueezeExcite(8, 2)(torch.zeros(2, 5, 5, 8)).shape
        torch.Size([2, 5, 5, 8])
    """

    def __init__(self, channels: int, reduced: int) -> None:
        super().__init__()
        self.fc1 = Pointwise(channels, reduced)
        self.fc2 = Pointwise(reduced, channels)

    def forward(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        norm = nn.Identity() if norm is None else norm
        down, up = self.fc1, self.fc2
        if (
            type(down) is type(up) is Pointwise
            and down.bias is not None
            and up.bias is not None
            and stands_in((x,), (down, up, norm))
            and up.weight.shape[:2] == down.weight.shape[1::-1] == (x.shape[3], up.weight.shape[1])
            and is_affine(norm, x.shape[3])
        ):
            return squeeze_excite(x, *scale_and_shift(norm), down.weight, down.bias, up.weight, up.bias)
        x = norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        scale = torch.sigmoid(self.fc2(F.relu(self.fc1(x.mean(dim=(1, 2))))))
        return x * scale[:, None, None]


class Mlp(nn.Module):
    """C -> 4C -> GELU -> GRN -> C -> BatchNorm on maps (B, H, W, C).

    GELU and GRN are one step, of the module `grn`: under autograd it keeps no map but its input, and on a CPU it passes
    over the map fewer times. The module `act` is not called then, nor are hooks on it, and hooks on `grn` see GELU's
    input. Another module in the place of either is called as usual. In float32 training on a CPU all but the norm is
    one step (`mlp`), where no hooks are on `fc1`, `grn` and `fc2`.

    With a residual (B, H, W, C) the result is residual + gamma * Mlp(x), for what `adds_to` accepts: a few images at a
    time, their hidden map in the caches, biases, norm and gamma in the passes over it.

    Example:
        >>> Mlp(8)(torch.zeros(2, 5, 5, 8)).shape
        torch.Size([2, 5, 5, 8])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = Pointwise(channels, 4 * channels)
        self.act = nn.GELU()
        self.grn = GlobalResponseNorm(4 * channels)
        self.fc2 = Pointwise(4 * channels, channels, bias=False)
        self.norm: nn.Module = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, residual: Tensor | None = None, gamma: Tensor | None = None) -> Tensor:
        if residual is not None:
            return self._add_to(residual, x, gamma)
        fc1, grn, fc2 = self.fc1, self.grn, self.fc2
        natively = self._is_plain() and x.dtype == torch.float32 and stands_in((x,), (fc1, grn, fc2), gradients=True)
        if natively and self._fits(x):
            x = mlp(x, fc1.weight.flatten(1), fc1.bias, grn.weight, grn.bias, grn.eps, fc2.weight.flatten(1))
            x = x if fc2.bias is None else x + fc2.bias
        else:
            x = fc1(x)
            x = fc2(grn(x, gelu=True) if self._responds() else grn(self.act(x)))
        return self.norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    def _responds(self) -> bool:
        act = self.act
        return type(act) is nn.GELU and act.approximate == "none" and type(self.grn) is GlobalResponseNorm

    def _is_plain(self) -> bool:
        return type(self.fc1) is type(self.fc2) is Pointwise and self._responds()

    def _fits(self, x: Tensor) -> bool:
        # The modules say best what does not fit together; the library would read what is not there.
        fc1, grn, fc2 = self.fc1, self.grn, self.fc2
        hidden, channels = fc1.weight.shape[0], fc2.weight.shape[0]
        return (
            fc1.weight.shape[1] == x.shape[3]
            and fc2.weight.shape[1] == hidden
            and all(t is None or t.numel() == hidden for t in (fc1.bias, grn.weight, grn.bias))
            and (fc2.bias is None or fc2.bias.numel() == channels)
        )

    def adds_to(self, residual: Tensor, x: Tensor, gamma: Tensor | None) -> bool:
        """Whether the call may take a residual: inference on a CPU, on the modules as made, without hooks on them."""
        norm = self.norm
        return (
            self._is_plain()
            and stands_in((x, residual), (self.fc1, self.grn, self.fc2, norm), (gamma,))
            and self._fits(x)
            and residual.shape == (*x.shape[:3], self.fc2.weight.shape[0])
            and is_affine(norm, residual.shape[3])
            and (gamma is None or gamma.numel() == residual.shape[3])
        )

    def _add_to(self, residual: Tensor, x: Tensor, gamma: Tensor | None) -> Tensor:
        scale, shift = scale_and_shift(self.norm)
        bias = self.fc2.bias
        if scale is None or shift is None:
            shift = bias
        elif bias is not None:
            shift = shift + scale * bias
        if gamma is not None:
            scale = gamma if scale is None else scale * gamma
            shift = None if shift is None else shift * gamma
        weight1, weight2 = self.fc1.weight.flatten(1), self.fc2.weight.flatten(1)
        grn = self.grn
        if torch.compiler.is_compiling():
            layer1 = (weight1, self.fc1.bias, grn.weight, grn.bias, grn.eps)
            return add_mlp_operator(residual, x, *layer1, weight2, scale, shift)

        def respond(hidden: Tensor, shift: Tensor | None) -> Tensor:
            return grn(hidden, gelu=True, shift=shift, overwrite=True)

        return add_mlp(residual, x, weight1, self.fc1.bias, respond, weight2, scale, shift)

    @torch.no_grad()
    def absorb(self, gamma: Tensor) -> None:
        """Fold GRN's bias, the norm and a layer scale (C,) behind it into fc2, in place."""
        scale, shift = affine_of(self.norm)
        assert self.grn.bias is not None
        constant = wide(self.fc2.weight).flatten(1) @ wide(self.grn.bias)
        scale_convolution(self.fc2, scale * gamma, (scale * constant + shift) * gamma)
        self.grn.bias = None
        self.norm = nn.Identity()


class WBMMBlock(Kinded, Foldable):
    """x + drop_path(gamma * Mlp(SE(BatchNorm(op(x))))) on (B, C, H, W).

    `kind` is "W" (the windowed operator with its shortcut), "H" (the hierarchical one, of two windows) or "D" (3x3
    depthwise convolution); `twin_kernel_size` puts a depthwise convolution of that size in place of the first two.

    Folded (`fuse`), norms, shortcut, branches, layer scale and GRN's bias lie in the operator and in fc2, and
    x + Mlp(SE(op(x))) is left; `gamma` is None then.

    Example:
        >>> block = WBMMBlock(8, "W", window_size=7).eval()
        >>> x = torch.randn(2, 8, 10, 9)
        >>> expected = block(x)
        >>> torch.allclose(block.fuse()(x), expected, atol=1e-5)
        True
    """

    def __init__(
        self,
        channels: int,
        kind: str,
        window_size: int | tuple[int, int] = 7,
        hierarchical_windows: tuple[int | tuple[int, int], int | tuple[int, int]] = (14, 7),
        local_branches: bool = False,
        twin_kernel_size: int | None = None,
        drop_path: float = 0.0,
        ls_init_value: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.op: nn.Module
        if kind == "D":
            self.op = depthwise(channels, 3)
        elif kind == "H" and twin_kernel_size is None:
            self.op = HierarchicalWBMM2d(channels, hierarchical_windows, backend=backend)
        else:
            op = (
                WBMM2d(channels, window_size, backend=backend)
                if twin_kernel_size is None
                else depthwise(channels, twin_kernel_size)
            )
            self.op = LocalBranches(op, channels) if kind == "W" and local_branches else op
        self.norm: nn.Module = nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, channels // 4)
        self.mlp = Mlp(channels)
        self.gamma: nn.Parameter | None = nn.Parameter(torch.full((channels,), ls_init_value))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    @property
    def state_kind(self) -> str:
        return "folded block" if self.gamma is None else "block"

    def forward(self, x: Tensor) -> Tensor:
        # (B, H, W, C) is the order in memory from the stem on: these permutations move nothing.
        y, residual = self.op(x), x.permute(0, 2, 3, 1)
        if type(self.se) is SqueezeExcite and not is_watched(self.se):
            y = self.se(y.permute(0, 2, 3, 1), self.norm)
        else:
            y = self.se(self.norm(y).permute(0, 2, 3, 1))
        if self._keeps_paths() and self.mlp.adds_to(residual, y, self.gamma):
            return self.mlp(y, residual, self.gamma).permute(0, 3, 1, 2)
        y = self.mlp(y).permute(0, 3, 1, 2)
        return x + y if self.gamma is None else torch.addcmul(x, self.drop_path(y), self.gamma.view(1, -1, 1, 1))

    def _keeps_paths(self) -> bool:
        """Whether all that happens to the Mlp's result is its addition, and nobody watches it."""
        if self.training or type(self.mlp) is not Mlp or is_watched(self.mlp) or is_watched(self.drop_path):
            return False
        return type(self.drop_path) is nn.Identity or (type(self.drop_path) is DropPath and not self.drop_path.training)

    @torch.no_grad()
    def fuse(self, input_size: tuple[int, int] | None = None) -> "WBMMBlock":
        """Fold in place, and return this block. Maps of at most `input_size` (H, W) will come, or any for None."""
        if self.gamma is not None:
            check_foldable("mlp.fc2", self.mlp.fc2)
            if isinstance(self.op, nn.Conv2d):
                check_foldable("op", self.op)
        if isinstance(self.op, Foldable):
            self.op = self.op.fuse(input_size)
        if self.gamma is None:
            return self
        norm = affine_of(self.norm)
        self.mlp.absorb(wide(self.gamma))  # either line may raise, and nothing has changed then
        if isinstance(self.op, nn.Conv2d):
            scale_convolution(self.op, *norm)
        else:
            if not isinstance(self.op, FoldedWBMM2d | ConvolutionBeside):
                assert isinstance(self.op, WBMM2d)
                self.op = FoldedWBMM2d.of(self.op)
            self.op.absorb(*norm)
        self.norm = self.drop_path = nn.Identity()
        self.gamma = None
        return self


def downsample(in_channels: int, channels: int) -> nn.Sequential:
    """3x3 stride-2 convolution and channel LayerNorm: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""
    return nn.Sequential(MapConv2d(in_channels, channels, 3, stride=2, padding=1), LayerNorm2d(channels))


class MapGELU(nn.GELU):
    """GELU of a map (B, C, H, W) in channels-last memory, twice as fast on a CPU when told that it lies in one piece.

    Example:
        >>> MapGELU()(torch.zeros(1, 8, 5, 5)).shape
        torch.Size([1, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def stem(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    """One stride-2 step (stride 2), or two of them by way of half the width with GELU between (stride 4)."""
    if stride == 2:
        return downsample(in_channels, channels)
    return nn.Sequential(*downsample(in_channels, channels // 2), MapGELU(), *downsample(channels // 2, channels))


class WBMMStage(nn.Module):
    """Downsampling (absent in the first stage) and the stage's blocks: (B, C, H, W) -> (B, C', H', W')."""

    def __init__(self, down: nn.Module, blocks: list[WBMMBlock]) -> None:
        super().__init__()
        self.downsample = down
        self.blocks = nn.Sequential(*blocks)
        self.grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint_seq(self.blocks, x)
        return self.blocks(x)
