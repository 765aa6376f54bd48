"""GELU and GRN in one step: the gradients of the definition, with the input alone kept."""

import copy

import pytest
import torch
import torch.nn.functional as F

from spotlights.wbmm.models.blocks import MapGELU, Mlp, Pointwise, SqueezeExcite
from spotlights.wbmm.models.response import GlobalResponseNorm, gelu_response_norm, keeps_graph


def defined(x, weight, bias, eps=1e-6):
    y = F.gelu(x)
    norm = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
    y = y + weight * y * (norm / (norm.mean(dim=-1, keepdim=True) + eps))
    return y if bias is None else y + bias


def arguments(dtype=torch.float64, shape=(2, 3, 4, 5)):
    generator = torch.Generator().manual_seed(0)
    shapes = (shape, shape[-1:], shape[-1:])
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients(with_bias):
    x, weight, bias = arguments()
    inputs = (x, weight, bias) if with_bias else (x, weight)

    def step(x, weight, bias=None):
        return gelu_response_norm(x, weight, bias, 1e-6)

    torch.testing.assert_close(step(*inputs), defined(x, weight, bias if with_bias else None), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(step, inputs)
    assert torch.autograd.gradgradcheck(step, inputs)


def test_the_module_is_the_same():
    x, weight, bias = arguments()
    module = GlobalResponseNorm(5).double()
    module.weight, module.bias = torch.nn.Parameter(weight.detach()), torch.nn.Parameter(bias.detach())
    torch.testing.assert_close(module(F.gelu(x)), defined(x, weight, bias), rtol=1e-12, atol=1e-12)
    module.bias = None
    torch.testing.assert_close(module(F.gelu(x)), defined(x, weight, None), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_good_as_its_rounding(dtype):
    x, weight, bias = arguments(torch.float32, (2, 14, 14, 32))
    x = (30 * x.detach()).requires_grad_()  # squares beyond FP16's range
    expected = defined(x, weight, bias)
    wanted = torch.autograd.grad(expected.sum(), (x, weight, bias))
    low = [tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight, bias)]
    result = gelu_response_norm(*low, 1e-6)
    found = torch.autograd.grad(result.float().sum(), low)
    assert result.dtype == dtype
    for a, b in zip((result, *found), (expected, *wanted), strict=True):
        assert a.dtype == dtype
        assert float((a.detach().float() - b.detach()).norm() / b.detach().norm()) < (
            2e-2 if dtype == torch.bfloat16 else 3e-3
        )


def test_an_empty_channel_has_finite_gradients():
    x = torch.zeros(1, 3, 3, 4, requires_grad=True)
    weight, bias = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    gelu_response_norm(x, weight, bias, 1e-6).sum().backward()
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (x, weight, bias))


def test_autograd_keeps_the_input_alone():
    x, weight, bias = arguments(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda t: t):
        gelu_response_norm(x, weight, bias, 1e-6)
    assert kept == [x.shape, weight.shape, (2, 1, 1, 5)]


def test_training_and_eval_paths_agree():
    torch.manual_seed(0)
    mlp = Mlp(8).double().eval()
    torch.nn.init.normal_(mlp.grn.weight)
    torch.nn.init.normal_(mlp.grn.bias)
    x = torch.randn(2, 5, 7, 8, dtype=torch.float64)
    assert keeps_graph(mlp.fc1(x))
    with torch.no_grad():
        expected = mlp(x)
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)
    replaced = copy.deepcopy(mlp)
    replaced.act = torch.nn.ReLU()  # another activation is used where it was put in
    assert not torch.allclose(replaced(x), expected)


def test_transforms_of_torch_func_pass():
    torch.manual_seed(0)
    mlp = Mlp(4).double().eval()
    torch.nn.init.normal_(mlp.grn.weight)
    x = torch.randn(2, 3, 3, 4, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in mlp.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(mlp, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters, x)
    loss_by_autograd = mlp(x).square().sum()
    for name, parameter in mlp.named_parameters():
        (wanted,) = torch.autograd.grad(loss_by_autograd, parameter, retain_graph=True)
        torch.testing.assert_close(found[name], wanted, rtol=1e-9, atol=1e-9)
    _, tangent = torch.func.jvp(lambda x: loss(parameters, x), (x,), (torch.ones_like(x),))
    (gradient,) = torch.autograd.grad(mlp(x.requires_grad_()).square().sum(), x)
    torch.testing.assert_close(tangent, gradient.sum(), rtol=1e-9, atol=1e-9)


def test_layers_equal_their_convolutional_form():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 7, 8)
    turned = x.permute(0, 3, 1, 2)
    layer = Pointwise(8, 12)
    wanted = torch.conv2d(turned, layer.weight, layer.bias).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(x), wanted)
    assert layer.weight.shape == (12, 8, 1, 1)
    squeeze = SqueezeExcite(8, 2)
    mean = turned.mean((2, 3), keepdim=True)
    hidden = torch.conv2d(mean, squeeze.fc1.weight, squeeze.fc1.bias).relu()
    scale = torch.conv2d(hidden, squeeze.fc2.weight, squeeze.fc2.bias).sigmoid()
    torch.testing.assert_close(squeeze(x), (turned * scale).permute(0, 2, 3, 1))
    torch.testing.assert_close(MapGELU()(turned), F.gelu(turned))
