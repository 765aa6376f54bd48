"""An Mlp trained on a CPU as one step: the definition's gradients, modules called where they are watched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spotlights.wbmm.backends import cpu
from spotlights.wbmm.models import inference, training
from spotlights.wbmm.models.blocks import Mlp, WBMMBlock
from spotlights.wbmm.models.response import gelu_response_norm

NAMES = ("x", "weight1", "bias1", "weight", "bias", "weight2")
SHAPES = [(5, 4, 7, 6), (1, 1, 1, 5), (3, 9, 10, 17)]


def draw(shape, bias1=True, bias=True):
    generator = torch.Generator().manual_seed(0)
    channels = shape[-1]
    shapes = (
        shape,
        (4 * channels, channels),
        (4 * channels,),
        (4 * channels,),
        (4 * channels,),
        (channels, 4 * channels),
    )
    tensors = [torch.randn(s, generator=generator) / max(1, s[-1]) ** 0.5 for s in shapes]
    return [
        None if name in ("bias1", "bias") and not {"bias1": bias1, "bias": bias}[name] else tensor.requires_grad_()
        for name, tensor in zip(NAMES, tensors, strict=True)
    ]


def step(x, weight1, bias1, weight, bias, weight2):
    return training.mlp(x, weight1, bias1, weight, bias, 1e-6, weight2)


def defined(x, weight1, bias1, weight, bias, weight2):
    y = F.gelu(F.linear(x, weight1, bias1))
    norm = torch.linalg.vector_norm(y, dim=(1, 2), keepdim=True)
    y = y + weight * y * (norm / (norm.mean(dim=-1, keepdim=True) + 1e-6))
    return F.linear(y if bias is None else y + bias, weight2)


@pytest.fixture
def small_groups(monkeypatch):
    """Hidden maps of two images of (9, 10, 17) at once, so that groups and a rest are many."""
    monkeypatch.setattr(inference, "_HIDDEN_BYTES", 2 * 9 * 10 * 68 * 4)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bias1", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_value_and_gradients(shape, bias1, bias, level, poison, small_groups):
    tensors = draw(shape, bias1, bias)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in tensors]
    expected, found = defined(*wide), step(*tensors)
    assert (found - expected).abs().max() < 2e-6 * expected.abs().max()
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = [t for t in wide if t is not None]
    expected = torch.autograd.grad(expected, wanted, upstream.double())
    found = torch.autograd.grad(found, [t for t in tensors if t is not None], upstream)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < 5e-6 * b.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_each_gradient_by_itself(name, level):
    tensors = [t.detach() for t in draw((3, 4, 5, 6))]
    one = tensors[NAMES.index(name)].requires_grad_()
    (found,) = torch.autograd.grad(step(*tensors).square().sum(), one)
    (expected,) = torch.autograd.grad(defined(*tensors).square().sum(), one)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_second_derivatives(level):
    tensors = draw((2, 3, 4, 5))
    results = []
    for function in (step, defined):
        first = torch.autograd.grad(function(*tensors).square().sum(), tensors, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), tensors))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_any_number_of_threads_agrees(level, small_groups):
    threads = torch.get_num_threads()
    tensors = draw((3, 9, 10, 17))
    try:
        found = []
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(torch.autograd.grad(step(*tensors).square().sum(), tensors))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def test_one_hidden_map_is_kept():
    if isinstance(cpu.LIBRARY, str):
        pytest.skip(cpu.LIBRARY)
    mlp = Mlp(16).train()
    x = torch.randn(3, 10, 11, 16, requires_grad=True)
    mlp.norm = nn.Identity()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: [kept.append(t.numel()), t][1], lambda t: t):
        mlp(x)
    assert sorted(kept)[-3:] == [1024, x.numel(), 4 * x.numel()]


@pytest.fixture
def steps(monkeypatch):
    """The calls of the one step."""
    calls = []
    apply = training._Mlp.apply
    monkeypatch.setattr(training._Mlp, "apply", lambda *arguments: [calls.append(1), apply(*arguments)][1])
    return calls


def gradients(module, x):
    for parameter in module.parameters():
        parameter.grad = None
    output = module(x)
    output.square().sum().backward()
    return [output, *(parameter.grad for parameter in module.parameters())]


def of_modules(module, x):
    """In float64, which the library does not compute."""
    return gradients(copy.deepcopy(module).double(), x.double())


def assert_close(found, expected):
    # BatchNorm makes some gradients, such as that of GRN's bias, zero up to rounding.
    largest = max(float(b.detach().abs().max()) for b in expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=5e-6 * largest)


@pytest.mark.parametrize("folded", [False, True])
def test_blocks_train_as_their_modules(folded, level, randomise, steps):
    block = randomise(WBMMBlock(12, "D", ls_init_value=0.5))
    if folded:
        block.fuse()
    block.train()
    x = torch.randn(3, 12, 9, 10).to(memory_format=torch.channels_last)
    expected = of_modules(block, x)
    assert steps == []
    assert_close(gradients(block, x), expected)
    assert steps == [1]


def leave_hook(mlp, seen):
    mlp.fc1.register_forward_hook(lambda *arguments: seen.append("fc1"))


def leave_backward_hook(mlp, seen):
    mlp.fc2.register_full_backward_hook(lambda *arguments: seen.append("fc2"))


def leave_hook_on_grn(mlp, seen):
    mlp.grn.register_forward_hook(lambda *arguments: seen.append("grn"))


@pytest.mark.parametrize("watch", [leave_hook, leave_backward_hook, leave_hook_on_grn])
def test_watched_modules_are_called(watch, steps):
    mlp, seen = Mlp(8).train(), []
    x = torch.randn(2, 5, 6, 8)
    expected = of_modules(mlp, x)
    watch(mlp, seen)
    assert_close(gradients(mlp, x), expected)
    assert len(seen) == 1
    assert steps == []


def test_other_modules_dtypes_and_modes_are_left_alone(steps):
    x = torch.randn(2, 5, 6, 8)
    changed = Mlp(8)
    changed.act = nn.ReLU()
    gradients(changed, x)
    gradients(Mlp(8).double(), x.double())
    gradients(Mlp(8).bfloat16(), x.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        gradients(Mlp(8), x)
    torch.func.grad(lambda x: Mlp(8)(x).sum())(x)
    Mlp(8).requires_grad_(False)(x)
    with torch.no_grad():
        Mlp(8)(x)
    assert steps == []
    gradients(Mlp(8), x)
    assert steps == [1]


def test_it_agrees_with_the_step_that_keeps_its_input(level):
    tensors = draw((3, 4, 5, 6))
    x, weight1, bias1, weight, bias, weight2 = tensors
    composed = F.linear(gelu_response_norm(F.linear(x, weight1, bias1), weight, bias, 1e-6), weight2)
    found = torch.autograd.grad(step(*tensors).square().sum(), tensors)
    assert_close(found, torch.autograd.grad(composed.square().sum(), tensors))


def test_vectorised_jacobian():
    """Its backward pass is given many gradients at once."""
    tensors = draw((1, 2, 2, 3))

    def of_input(x):
        return step(x, *tensors[1:])

    expected = torch.autograd.functional.jacobian(of_input, tensors[0])
    found = torch.autograd.functional.jacobian(of_input, tensors[0], vectorize=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
