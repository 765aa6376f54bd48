"""A WBMM network written the plain way: the reference that ours is compared with, in its results and in its speed."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spotlights.wbmm.layers import WBMM2d
from spotlights.wbmm.models import WBMMNet
from spotlights.wbmm.models.blocks import WBMMBlock, WBMMStage


def _convolution(layer: nn.Conv2d) -> nn.Conv2d:
    """A 1x1 convolution of (B, C, H, W) with a copy of a pointwise layer's weights."""
    convolution = nn.Conv2d(layer.in_channels, layer.out_channels, 1)
    convolution.weight, convolution.bias = deepcopy(layer.weight), deepcopy(layer.bias)
    return convolution


class SqueezeExcitation(nn.Module):
    """x * sigmoid(up(relu(down(mean of x over H and W)))) on (B, C, H, W), as 1x1 convolutions of one position."""

    def __init__(self, down: nn.Conv2d, up: nn.Conv2d) -> None:
        super().__init__()
        self.down = _convolution(down)
        self.up = _convolution(up)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class GlobalResponseNorm(nn.Module):
    """(1 + weight * n) * x + bias with n = |x| / mean_c |x| on (B, H, W, C); |x| is the norm over H and W."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = nn.Parameter(bias.detach().clone())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        return (1 + self.weight * (norm / (norm.mean(dim=-1, keepdim=True) + self.eps))) * x + self.bias


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    outputs, inputs = weight.shape[:2]
    layer = nn.Linear(inputs, outputs, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight.flatten(1))
        if bias is not None:
            layer.bias.copy_(bias)
    return layer


class InNCHW(nn.Module):
    """A copy of a module, its output (B, C, H, W) in NCHW memory: a channel LayerNorm leaves it in channels-last."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = deepcopy(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x).contiguous()


class PlainBlock(nn.Module):
    """A block as its authors write it, step by step, on (B, C, H, W) in NCHW memory.

    Operator, BatchNorm, squeeze-and-excite; a permutation to (B, H, W, C); Linear to 4C, GELU, GRN, Linear; the
    permutation back; BatchNorm, layer scale, residual, which takes the layout of x.
    """

    def __init__(self, block: WBMMBlock) -> None:
        super().__init__()
        mlp, gamma = block.mlp, block.gamma
        assert gamma is not None
        assert mlp.grn.bias is not None
        self.op = deepcopy(block.op)
        self.op_norm = deepcopy(block.norm)
        self.se = SqueezeExcitation(block.se.fc1, block.se.fc2)
        self.fc1 = _linear(mlp.fc1.weight, mlp.fc1.bias)
        self.act = nn.GELU()
        self.grn = GlobalResponseNorm(mlp.grn.weight, mlp.grn.bias, mlp.grn.eps)
        self.fc2 = _linear(mlp.fc2.weight, mlp.fc2.bias)
        self.out_norm = deepcopy(mlp.norm)
        self.gamma = nn.Parameter(gamma.detach().clone())
        self.drop_path = deepcopy(block.drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(self.op_norm(self.op(x)))
        y = self.fc2(self.grn(self.act(self.fc1(y.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
        return x + self.drop_path(self.gamma.view(1, -1, 1, 1) * self.out_norm(y))


def plain_network(network: WBMMNet) -> nn.Sequential:
    """Return a network of `PlainBlock` with copies of a network's weights: equal outputs, in training and in eval mode.

    The operator is the paper's batched product of whole windows, its matrix kept in eval mode (backend ``matmul``).
    Stem, downsampling and head are copies of the network's own modules, in NCHW memory.

    Args:
        network: as trained, not reparameterised.

    Raises:
        ValueError: the network is reparameterised.

    Example:
        >>> network = WBMMNet(dims=(8, 16), block_pattern=("DD", "WD"), num_classes=10).eval()
        >>> images = torch.randn(2, 3, 64, 48)
        >>> torch.allclose(plain_network(network)(images), network(images), atol=1e-5)
        True
    """
    if any(isinstance(block, WBMMBlock) and block.gamma is None for block in network.modules()):
        raise ValueError("plain_network: network: got a reparameterised one, expected one that has its BatchNorms")
    stages = nn.Sequential()
    for stage in network.stages:
        assert isinstance(stage, WBMMStage)
        blocks = nn.Sequential(*(PlainBlock(block) for block in stage.blocks if isinstance(block, WBMMBlock)))
        stages.append(nn.Sequential(OrderedDict(downsample=InNCHW(stage.downsample), blocks=blocks)))
    plain = nn.Sequential(OrderedDict(stem=InNCHW(network.stem), stages=stages, head=deepcopy(network.head)))
    for module in plain.modules():
        if isinstance(module, WBMM2d):
            module.backend = "matmul"
    return plain.train(network.training).to(memory_format=torch.contiguous_format)
