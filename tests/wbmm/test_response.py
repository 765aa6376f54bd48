"""GELU and GRN in one step: the definition's values and gradients, the input alone kept; the CPU library's step."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from spotlights.wbmm.backends import cpu
from spotlights.wbmm.models import wbmm_atto
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


# Odd numbers of channels, single positions, more rows than a chunk, fewer images than threads and many.
SHAPES = [(2, 5, 7, 1), (3, 4, 4, 3), (2, 9, 10, 17), (1, 1, 1, 20), (1, 20, 21, 64), (9, 3, 2, 40), (1, 2, 3, 9000)]


def native(x, weight, bias, in_place=False):
    assert cpu.takes_map(x)
    output = x.clone() if in_place else torch.empty_like(x)
    cpu.gelu_response_norm(output if in_place else x, weight, bias, 1e-6, output)
    return output


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_library_computes_the_definition(shape, level, poison):
    x, weight, bias = (tensor.detach() for tensor in arguments(torch.float32, shape))
    x *= 3
    expected = defined(x.double(), weight.double(), bias.double())
    found = native(x, weight, bias)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-6
    assert torch.equal(native(x, weight, bias, in_place=True), found)
    without = native(x, weight, None)
    assert (without + bias - expected).abs().max() / expected.abs().max() < 1e-6
    low = native(x.bfloat16(), weight, bias)
    expected = defined(x.bfloat16().double(), weight.double(), bias.double())
    assert low.dtype == torch.bfloat16
    # Rounded twice, before and after the scale.
    assert ((low - expected).abs() <= 2**-7 * ((expected - bias).abs() + expected.abs())).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_library_computes_the_gradients(shape, level, poison):
    inputs = arguments(torch.float32, shape)
    upstream = torch.randn(shape)
    expected = torch.autograd.grad(defined(*(t.double() for t in inputs)), inputs, upstream.double())
    found = torch.autograd.grad(gelu_response_norm(*inputs, 1e-6), inputs, upstream)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() / b.abs().max() < 3e-6
    low = [t.detach().bfloat16().requires_grad_() for t in inputs]
    found = torch.autograd.grad(gelu_response_norm(*low, 1e-6), low, upstream.bfloat16())
    expected = torch.autograd.grad(defined(*(t.double() for t in low)), low, upstream.bfloat16().double())
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() / b.norm() < 1e-2


def test_the_library_is_gelu_where_the_weight_is_zero(level):
    x = torch.linspace(-12, 12, 200_001).view(1, -1, 1, 1)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = x.to(dtype)
        expected = F.gelu(inputs.double())
        found = native(inputs, torch.zeros(1), None)
        rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
        assert ((found - expected).abs() <= rounding * expected.abs() + 3e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_shows_in_its_image_alone(dtype, level):
    values = torch.tensor([float("nan"), float("inf"), float("-inf"), -3e38])
    x = torch.ones(4, 3, 3, 17, dtype=dtype)
    x[:, 1, 1, 5] = values
    found = native(x, torch.ones(17), None)
    assert found[0].isnan().all()
    assert found[1, ..., 5].isnan().all()  # an infinite norm by an infinite mean
    assert found[2:].isfinite().all()
    assert (found[2:, 1, 1, 5].abs() < 1e-10).all()


def test_the_library_gives_the_same_bits_for_any_number_of_threads(level):
    threads = torch.get_num_threads()
    try:
        for shape in SHAPES:
            x, weight, bias = (tensor.detach() for tensor in arguments(torch.float32, shape))
            found = []
            for number in (1, 2, 3, 8):
                torch.set_num_threads(number)
                x.requires_grad_()
                (gradient,) = torch.autograd.grad(gelu_response_norm(x, weight, bias, 1e-6).square().sum(), x)
                found.append(torch.stack([native(x.detach(), weight, bias), gradient]))
            assert all(torch.equal(found[0], other) for other in found)
    finally:
        torch.set_num_threads(threads)


def test_folded_networks_agree_with_and_without_the_library(randomise, level, monkeypatch):
    network = randomise(wbmm_atto(num_classes=10))
    network.fuse()
    images = torch.randn(3, 3, 28, 28)
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            found = network(images)
            with monkeypatch.context() as patch:
                patch.setattr(cpu, "takes_map", lambda x: False)
                expected = network(images)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.detach().abs().max()))


def test_it_falls_back_without_the_library(monkeypatch):
    mlp = Mlp(8).eval()
    x = torch.randn(2, 5, 7, 8)
    with torch.no_grad():
        expected = mlp(x)
        monkeypatch.setattr(cpu, "LIBRARY", "not built")
        torch.testing.assert_close(mlp(x), expected, rtol=1e-5, atol=1e-5)


def test_empty_batches_and_other_layouts_pass():
    mlp = Mlp(8).eval()
    with torch.no_grad():
        assert mlp(torch.zeros(0, 5, 7, 8)).shape == (0, 5, 7, 8)
        x = torch.randn(2, 8, 5, 7).permute(0, 2, 3, 1)
        torch.testing.assert_close(mlp(x), mlp(x.contiguous()))


def test_a_hook_keeps_what_the_first_layer_gave():
    mlp = Mlp(8).eval()
    x, kept = torch.randn(2, 5, 7, 8), []
    with torch.no_grad():
        expected = mlp(x)
        mlp.fc1.register_forward_hook(lambda module, inputs, output: kept.append(output))
        assert torch.equal(mlp(x), expected)
        assert torch.equal(kept[0], F.linear(x, mlp.fc1.weight.flatten(1), mlp.fc1.bias))


def test_tracers_see_plain_operations():
    mlp = Mlp(8).eval()
    torch.nn.init.normal_(mlp.grn.weight)
    x, other = torch.randn(2, 2, 5, 7, 8)
    with torch.no_grad():
        expected = mlp(other)
        makers = (
            lambda: torch.export.export(mlp, (x,)).module(),
            lambda: torch.jit.trace(mlp, x),
            lambda: make_fx(mlp)(x),
        )
        for make in makers:
            torch.testing.assert_close(make()(other), expected, rtol=1e-4, atol=1e-5)
        several = torch.vmap(mlp)(torch.stack([x, other]))
        torch.testing.assert_close(several[1], expected, rtol=1e-4, atol=1e-5)
