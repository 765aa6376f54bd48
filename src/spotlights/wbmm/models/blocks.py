"""The parts of a WBMM network: token mixer, block, stem and stage."""

import torch
from timm.layers import DropPath, LayerNorm2d, SqueezeExcite
from timm.models import checkpoint_seq
from torch import Tensor, nn

from spotlights.wbmm.layers import WBMM2d


def depthwise(channels: int, kernel_size: int) -> nn.Conv2d:
    """A depthwise convolution without bias that keeps the map's size (odd kernels)."""
    return nn.Conv2d(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels, bias=False)


class LocalBranches(nn.Module):
    """P/N's last stage: BN1(op(x)) + BN2(DW5x5(x)) + BN3(DW3x3(x)), on maps of any size.

    Input and output are (B, C, H, W). `op` is the operator, its shortcut included.

    Example:
        >>> LocalBranches(WBMM2d(8), 8)(torch.zeros(2, 8, 7, 9)).shape
        torch.Size([2, 8, 7, 9])
    """

    def __init__(self, op: nn.Module, channels: int) -> None:
        super().__init__()
        self.op = op
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv5 = depthwise(channels, 5)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = depthwise(channels, 3)
        self.bn3 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn1(self.op(x)) + self.bn2(self.conv5(x)) + self.bn3(self.conv3(x))


class GlobalResponseNorm2d(nn.Module):
    """ConvNeXt V2's global response normalisation of (B, C, H, W): x + weight * x * n + bias, n = |x| / mean_c |x|.

    |x| is the norm over H and W. Written as x * (1 + weight * n) + bias, so that the map is read and written once.

    Example:
        >>> x = torch.ones(1, 4, 3, 3)
        >>> torch.equal(GlobalResponseNorm2d(4)(x), x)  # weight and bias start at 0
        True
    """

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        # Squares are summed in FP32 at least. The tiny number keeps the root's gradient finite for an all-zero channel;
        # vector_norm would do so by itself, but is 2.5 times slower on a CPU in channels-last memory.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        norm = (wide.square().sum(dim=(2, 3), keepdim=True) + 1e-20).sqrt()
        ratio = norm / (norm.mean(dim=1, keepdim=True) + self.eps)
        scale = 1 + self.weight.view(1, -1, 1, 1) * ratio.to(x.dtype)
        return torch.addcmul(self.bias.view(1, -1, 1, 1), x, scale)


class Mlp(nn.Module):
    """C -> 4C -> GELU -> GRN -> C -> BatchNorm on (B, C, H, W), as 1x1 convolutions: fastest in channels-last memory.

    Example:
        >>> Mlp(8)(torch.zeros(2, 8, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, 4 * channels, 1)
        self.act = nn.GELU()
        self.grn = GlobalResponseNorm2d(4 * channels)
        self.fc2 = nn.Conv2d(4 * channels, channels, 1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc2(self.grn(self.act(self.fc1(x)))))


class WBMMBlock(nn.Module):
    """x + drop_path(gamma * Mlp(SE(BatchNorm(op(x))))) on (B, C, H, W).

    `kind` is "W" (the windowed operator with its shortcut) or "D" (3x3 depthwise convolution); `twin_kernel_size`
    puts a depthwise convolution of that size where "W" would have its operator.

    Example:
        >>> WBMMBlock(8, "W", window_size=7)(torch.zeros(2, 8, 10, 9)).shape
        torch.Size([2, 8, 10, 9])
    """

    def __init__(
        self,
        channels: int,
        kind: str,
        window_size: int | tuple[int, int] = 7,
        local_branches: bool = False,
        twin_kernel_size: int | None = None,
        drop_path: float = 0.0,
        ls_init_value: float = 1e-6,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        op: nn.Module
        if kind == "D":
            op = depthwise(channels, 3)
        elif twin_kernel_size is not None:
            op = depthwise(channels, twin_kernel_size)
        else:
            op = WBMM2d(channels, window_size, backend=backend)
        self.op = LocalBranches(op, channels) if kind == "W" and local_branches else op
        self.norm = nn.BatchNorm2d(channels)
        self.se = SqueezeExcite(channels, rd_channels=channels // 4)
        self.mlp = Mlp(channels)
        self.gamma = nn.Parameter(torch.full((channels,), ls_init_value))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.se(self.norm(self.op(x))))
        return x + self.drop_path(y * self.gamma.view(1, -1, 1, 1))


def downsample(in_channels: int, channels: int) -> nn.Sequential:
    """3x3 stride-2 convolution and channel LayerNorm: (B, C, H, W) -> (B, C', ceil(H/2), ceil(W/2))."""
    return nn.Sequential(nn.Conv2d(in_channels, channels, 3, stride=2, padding=1), LayerNorm2d(channels))


def stem(in_channels: int, channels: int, stride: int) -> nn.Sequential:
    """One stride-2 step (stride 2), or two of them by way of half the width with GELU between (stride 4)."""
    if stride == 2:
        return downsample(in_channels, channels)
    return nn.Sequential(*downsample(in_channels, channels // 2), nn.GELU(), *downsample(channels // 2, channels))


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
