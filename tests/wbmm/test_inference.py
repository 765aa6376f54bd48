"""A block's inference by the CPU library: against the definition, and left to the modules where those are watched."""

import copy

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from spotlights.wbmm.backends import cpu
from spotlights.wbmm.models import WBMMNet, inference, wbmm_atto
from spotlights.wbmm.models.blocks import MapConv2d, Mlp, SqueezeExcite, WBMMBlock

# Odd numbers of channels, single positions, more rows than a chunk, several images.
SHAPES = [(2, 5, 7, 1), (3, 4, 4, 3), (2, 9, 10, 17), (1, 1, 1, 20), (1, 20, 21, 64), (9, 3, 2, 40), (1, 150, 4, 33)]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-8}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def excited(x, scale, shift, weight1, bias1, weight2, bias2):
    y = x if scale is None else x * scale + shift
    hidden = torch.relu(y.mean(dim=(1, 2)) @ weight1.T + bias1)
    return y * torch.sigmoid(hidden @ weight2.T + bias2)[:, None, None]


def close(found, expected, dtype):
    most = ROUNDING[dtype] * expected.abs() + 1e-6 * expected.abs().max()
    return found.dtype == dtype and bool(((found - expected).abs() <= most).all())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_squeeze_excite_is_the_definition(shape, dtype, level, poison):
    channels, reduced = shape[-1], shape[-1] // 4 + 1
    x = draw(*shape, dtype=dtype)
    weights = draw(reduced, channels, dtype=dtype, seed=1), draw(channels, reduced, dtype=dtype, seed=3)
    biases = draw(reduced, seed=2), draw(channels, seed=4)
    for affine in ((None, None), (draw(channels, seed=5), draw(channels, seed=6))):
        arguments = (x, *affine, weights[0], biases[0], weights[1], biases[1])
        expected = excited(*(None if a is None else a.double() for a in arguments))
        assert close(inference.squeeze_excite(*arguments), expected, dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scale_add_is_the_definition(shape, dtype, level, poison):
    x, residual = draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)
    scale, shift = draw(shape[-1], seed=2), draw(shape[-1], seed=3)
    for by, on in ((None, None), (scale, None), (None, shift), (scale, shift)):
        expected = x.double() * (1 if by is None else by) + (0 if on is None else on) + residual.double()
        for output in (torch.empty_like(x), x.clone(), residual.clone()):
            cpu.scale_add(x, by, on, residual, output)
            assert close(output, expected, dtype)


def test_a_shift_before_gelu(level, poison):
    for shape in SHAPES:
        x, shift, weight = draw(*shape), draw(shape[-1], seed=1), draw(shape[-1], seed=2)
        found, expected = torch.empty_like(x), torch.empty_like(x)
        cpu.gelu_response_norm(x, weight, None, 1e-6, found, shift)
        cpu.gelu_response_norm(x + shift, weight, None, 1e-6, expected)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_in_its_image_alone(value, level):
    x = torch.ones(3, 3, 3, 17)
    x[1, 1, 1, 5] = value
    ones = torch.ones(17)
    arguments = (x, None, None, torch.eye(17), ones, torch.eye(17), -ones)
    found = inference.squeeze_excite(*arguments)
    assert found[[0, 2]].isfinite().all()
    torch.testing.assert_close(found, excited(*arguments), equal_nan=True)


def test_the_same_bits_for_any_number_of_threads(level):
    threads = torch.get_num_threads()
    arguments = draw(3, 40, 41, 33), None, None, draw(9, 33), draw(9), draw(33, 9), draw(33)
    try:
        found = []
        for number in (1, 2, 3, 8):
            torch.set_num_threads(number)
            found.append(inference.squeeze_excite(*arguments))
        assert all(torch.equal(found[0], other) for other in found)
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def count(monkeypatch):
    """The calls of the CPU library's two steps."""
    calls = []
    for name in ("squeeze_excite", "scale_add"):
        step = getattr(cpu, name)
        monkeypatch.setattr(cpu, name, lambda *a, name=name, step=step: [calls.append(name), step(*a)][1])
    return calls


def block_of(randomise, kind="W", folded=False, channels=20):
    block = randomise(WBMMBlock(channels, kind, ls_init_value=0.5))
    return block.fuse() if folded else block


def of_modules(module, x, monkeypatch):
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(cpu, "fits_map", lambda x: False)
        return module(x)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("kind", ["W", "D"])
def test_blocks_give_what_their_modules_give(kind, folded, level, randomise, monkeypatch, count, poison):
    block = block_of(randomise, kind, folded)
    x = draw(5, 20, 9, 10).to(memory_format=torch.channels_last)
    expected = of_modules(block, x, monkeypatch)
    assert count == []
    hidden_bytes = 9 * 10 * 80 * 4
    for images, steps in ((5, 1), (2, 3), (1, 5)):
        count.clear()
        # One byte less would leave a group with one image less.
        monkeypatch.setattr(inference, "_HIDDEN_BYTES", images * hidden_bytes)
        with torch.no_grad():
            found = block(x)
        assert count == ["squeeze_excite"] + steps * ["scale_add"]
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[False, True], ids=["slow bfloat16", "fast bfloat16"])
def fast(request, monkeypatch):
    """Whether torch is said to have fast products of bfloat16 here."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: request.param)
    return request.param


@pytest.mark.parametrize("kind", "WD")
@pytest.mark.parametrize("folded", [False, True])
def test_blocks_of_bfloat16(folded, kind, fast, level, randomise, count, monkeypatch):
    block = block_of(randomise, kind=kind, folded=folded)
    x = draw(3, 20, 9, 10).to(memory_format=torch.channels_last)
    monkeypatch.setattr(inference, "_HIDDEN_BYTES", 2 * 9 * 10 * 80 * (2 if fast else 4))  # two images, and one
    products = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: products.append((a.dtype, b.dtype)) or mm(a, b, out=out))
    with torch.no_grad():
        expected = block.double()(x.double())
        found = block.bfloat16()(x.bfloat16())
    assert products == 4 * [2 * (torch.bfloat16 if fast else torch.float32,)]
    assert count == ["squeeze_excite", "scale_add", "scale_add"]
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() / expected.norm() < 1e-2


def test_convolutions_of_bfloat16(fast):
    convolution = MapConv2d(4, 6, 3, padding=1, groups=2).bfloat16()
    x = draw(2, 4, 7, 5).bfloat16().requires_grad_()
    found = convolution(x)
    weight, bias = convolution.weight, convolution.bias
    expected = F.conv2d(x.double(), weight.double(), bias.double(), padding=1, groups=2)
    assert found.dtype == torch.bfloat16
    if not fast:
        assert torch.equal(found, F.conv2d(x.float(), weight.float(), bias.float(), padding=1, groups=2).bfloat16())
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)
    grads = torch.autograd.grad(found.double().sum(), (x, weight, bias))
    for grad, wanted in zip(grads, torch.autograd.grad(expected.sum(), (x, weight, bias)), strict=True):
        assert grad.dtype == torch.bfloat16
        torch.testing.assert_close(grad, wanted, rtol=0.02, atol=0.1)


def test_exported_convolutions_are_of_their_dtype(fast):
    convolution = MapConv2d(4, 6, 3).bfloat16()
    graph = torch.export.export(convolution, (draw(2, 4, 7, 5).bfloat16(),)).graph
    assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["aten.conv2d.default"]


@pytest.mark.parametrize("path", ["se.fc1", "se.fc2", "norm", "mlp.fc1", "mlp.fc2", "mlp.norm"])
@pytest.mark.parametrize("before", [False, True])
def test_hooks_are_called(path, before, randomise, monkeypatch, count):
    block = block_of(randomise)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    expected = of_modules(block, x, monkeypatch)
    seen = []
    module = block.get_submodule(path)
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    handle = register(lambda *arguments: seen.append(arguments))
    with torch.no_grad():
        torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-5)
        assert len(seen) == 1
        assert count == (["squeeze_excite"] if path.startswith("mlp") else ["scale_add"])
        handle.remove()
        block(x)
    assert len(seen) == 1


def test_global_hooks_are_called(count):
    block = WBMMBlock(20, "W").eval()
    x = draw(1, 20, 7, 7).to(memory_format=torch.channels_last)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *rest: seen.append(module))
    try:
        with torch.no_grad():
            block(x)
    finally:
        handle.remove()
    assert {block.mlp.fc1, block.mlp.norm, block.se.fc2, block.norm} < set(seen)
    assert count == []


def changed_forward(block):
    block.mlp.fc2.forward = lambda x: torch.zeros(*x.shape[:3], 20)
    return lambda x: x


def parametrised(block):
    nn.utils.parametrizations.weight_norm(block.mlp.fc1)
    weight = block.mlp.fc1.parametrizations.weight
    nn.init.constant_(weight.original0, 2.0)
    return copy.deepcopy(block)


def another_activation(block):
    block.mlp.act = nn.ReLU()
    return copy.deepcopy(block)


def batch_statistics(block):
    block.norm.train()
    return copy.deepcopy(block)


@pytest.mark.parametrize("change", [changed_forward, parametrised, another_activation, batch_statistics])
def test_changed_modules_are_called(change, randomise, monkeypatch, count):
    block = block_of(randomise)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    reference = change(block)
    expected = of_modules(reference, x, monkeypatch) if isinstance(reference, nn.Module) else x
    with torch.no_grad():
        found = block(x)
    if isinstance(reference, nn.Module):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        # fc2 gives nothing, so what is left is the residual and the norm behind fc2.
        zero = block.mlp.norm(torch.zeros_like(x))
        torch.testing.assert_close(found, x + zero * block.gamma.view(1, -1, 1, 1), rtol=1e-5, atol=1e-5)
    assert count == (["scale_add"] if change is batch_statistics else ["squeeze_excite"])


def test_gradients_keep_the_modules(randomise, count):
    block = block_of(randomise)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    block(x).sum().backward()
    assert all(parameter.grad is not None for parameter in block.parameters())
    assert count == []
    block.requires_grad_(False)
    block(x)
    assert count == ["squeeze_excite", "scale_add"]
    count.clear()
    block.gamma.requires_grad_(True)
    block(x).sum().backward()
    assert block.gamma.grad.abs().max() > 0
    assert count == ["squeeze_excite"]
    count.clear()
    x.requires_grad_()
    block.gamma.requires_grad_(False)
    block(x).sum().backward()
    assert x.grad.abs().max() > 0
    assert count == []


def test_training_keeps_the_modules(randomise, count):
    block = block_of(randomise).train()
    before = block.norm.running_mean.clone()
    with torch.no_grad():
        block(draw(2, 20, 9, 10).to(memory_format=torch.channels_last))
    assert count == []
    assert not torch.equal(block.norm.running_mean, before)


def test_autocast_keeps_the_modules(randomise, count):
    block = block_of(randomise, folded=True)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        block(x)
    assert count == []


def test_other_layouts_dtypes_and_empty_batches(randomise, monkeypatch, count):
    block = block_of(randomise, folded=True)
    with torch.no_grad():
        x = draw(2, 20, 9, 10)
        torch.testing.assert_close(block(x), of_modules(block, x, monkeypatch), rtol=1e-5, atol=1e-5)
        assert block(x[:0]).shape == (0, 20, 9, 10)
        count.clear()
        wide = copy.deepcopy(block).double()(x.double().to(memory_format=torch.channels_last))
    assert count == []
    torch.testing.assert_close(wide.float(), of_modules(block, x, monkeypatch), rtol=1e-5, atol=1e-5)


def test_another_default_device(randomise, count):
    block = block_of(randomise)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = block(x)
        with torch.device("meta"):
            assert torch.equal(block(x), expected)
            assert torch.equal(copy.deepcopy(block)(x), expected)
    assert len(count) == 6
    with torch.device("meta"):
        copy.deepcopy(block).train()(x).sum().backward()


def test_floating_point_operations_are_counted():
    network = wbmm_atto(num_classes=10).eval()
    images = torch.zeros(1, 3, 32, 32)
    counts = []
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients), FlopCounterMode(display=False) as counter:
            network(images)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def operators_of(graph):
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("folded", [False, True])
def test_compiled_blocks_take_the_steps(folded, randomise, monkeypatch):
    if isinstance(cpu.LIBRARY, str):
        pytest.skip(cpu.LIBRARY)
    block = block_of(randomise, folded=folded)
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with torch.no_grad():
        for size in ((2, 20, 9, 10), (3, 20, 12, 11)):
            x = draw(*size).to(memory_format=torch.channels_last)
            torch.testing.assert_close(compiled(x), of_modules(block, x, monkeypatch), rtol=1e-5, atol=1e-5)
    for graph in graphs:
        assert {"spotlights.add_mlp.default", "spotlights.squeeze_excite.default"} < operators_of(graph)


def test_exported_blocks_do_not(randomise):
    block = block_of(randomise, folded=True)
    x = draw(2, 20, 9, 10).to(memory_format=torch.channels_last)
    for strict in (False, True):
        with torch.no_grad():
            program = torch.export.export(block, (x,), strict=strict)
        found = {name for name in operators_of(program.graph) if name.startswith("spotlights")}
        assert found == {"spotlights.wbmm2d.default"}


def test_registered_steps_pass_torchs_own_checks():
    if isinstance(cpu.LIBRARY, str):
        pytest.skip(cpu.LIBRARY)
    x, weight, bias = draw(2, 5, 6, 8), draw(2, 8), draw(2)
    back, last = draw(8, 2), draw(8)
    torch.library.opcheck(inference._squeeze_excite_operator, (x, None, None, weight, bias, back, last))
    wide, narrow = draw(32, 8), draw(8, 32)
    torch.library.opcheck(
        inference.add_mlp_operator, (x, x, wide, draw(32), draw(32), None, 1e-6, narrow, None, draw(8))
    )


def test_modules_alone_work_as_before():
    squeeze, mlp = SqueezeExcite(8, 2).eval(), Mlp(8).eval()
    x = draw(2, 5, 6, 8)
    norm = nn.BatchNorm2d(8).eval()
    norm.running_mean.normal_()
    with torch.no_grad():
        turned = norm(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        torch.testing.assert_close(squeeze(x, norm), squeeze(turned.contiguous()))
        hidden = F.gelu(mlp.fc1(x))
        torch.testing.assert_close(mlp(x), mlp.norm(mlp.fc2(hidden).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def parts_that_do_not_fit(block):
    """One way after another to make a block whose parts do not fit together."""
    mlp = block.mlp
    few = nn.Parameter(torch.ones(16))
    for module, name, value in (
        (mlp.grn, "weight", few),
        (mlp.grn, "bias", few),
        (mlp.fc1, "bias", few),
        (mlp.fc1, "weight", nn.Parameter(mlp.fc1.weight[:24].detach())),
        (mlp.fc2, "weight", nn.Parameter(mlp.fc2.weight[:10].detach())),
        (mlp.fc2, "weight", nn.Parameter(mlp.fc2.weight[:, :24].detach())),
        (mlp, "norm", nn.BatchNorm2d(5).eval()),
        (block, "norm", nn.BatchNorm2d(5).eval()),
        (block.se.fc1, "bias", nn.Parameter(torch.ones(2))),
        (block.se.fc2, "bias", few),
        (block.se.fc2, "weight", nn.Parameter(block.se.fc2.weight[:10].detach())),
        (block, "op", nn.MaxPool2d(2)),
        (block, "gamma", few),
    ):
        kept = getattr(module, name)
        setattr(module, name, value)
        yield
        setattr(module, name, kept)


@pytest.mark.parametrize("training", [False, True])
def test_parts_that_do_not_fit_are_refused(training, randomise):
    block = block_of(randomise).train(training)
    x = draw(2, 20, 10, 10).to(memory_format=torch.channels_last)
    block(x)
    for _ in parts_that_do_not_fit(block):
        with torch.set_grad_enabled(training), pytest.raises((RuntimeError, ValueError)):
            block(x)
    block(x)


def test_before_dispatch_a_tracer_sees_the_operations(randomise):
    block = block_of(randomise)
    x, other = (draw(2, 20, 9, 10, seed=seed).to(memory_format=torch.channels_last) for seed in (0, 1))
    with torch.no_grad():
        traced = make_fx(lambda x: block(x), pre_dispatch=True)(x)
        torch.testing.assert_close(traced(other), block(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", ["mlp", "drop_path", "se", "mlp.grn"])
def test_hooks_on_a_block_s_own_modules(path, randomise, monkeypatch):
    block = block_of(randomise)
    x = draw(3, 20, 9, 10).to(memory_format=torch.channels_last)
    monkeypatch.setattr(inference, "_HIDDEN_BYTES", 1)  # image by image
    seen = []

    def double(module, arguments, output):
        seen.append(arguments[0])
        return 2 * output

    block.get_submodule(path).register_forward_hook(double)
    with torch.no_grad():
        results = [block(x), of_modules(block, x, monkeypatch)]
    assert len(seen) == 2
    torch.testing.assert_close(*seen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_other_modules_in_a_block(randomise):
    block = block_of(randomise, channels=4)
    x = draw(2, 4, 9, 10).to(memory_format=torch.channels_last)
    with torch.no_grad():
        block.mlp = nn.Identity()
        y = block.se(block.norm(block.op(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        torch.testing.assert_close(block(x), x + y * block.gamma.view(1, -1, 1, 1), rtol=1e-5, atol=1e-5)
        block.se = nn.Identity()
        y = block.norm(block.op(x))
        torch.testing.assert_close(block(x), x + y * block.gamma.view(1, -1, 1, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rate", [0.5, 1.0])
def test_dropped_paths_in_inference(rate, randomise):
    block = block_of(randomise)
    block.drop_path = DropPath(rate).train()  # Monte Carlo: the rest stays in eval mode
    x = draw(1, 20, 9, 10).to(memory_format=torch.channels_last)
    torch.manual_seed(0)
    with torch.no_grad():
        dropped = sum(torch.equal(block(x), x) for _ in range(20))
    assert dropped == 20 if rate == 1 else 0 < dropped < 20


@pytest.mark.parametrize("path", ["se.fc1", "mlp.fc1", "mlp.fc2"])
def test_weights_that_are_plain_attributes_get_gradients(path, randomise):
    block = block_of(randomise).requires_grad_(False)
    x = draw(1, 20, 9, 10).to(memory_format=torch.channels_last)
    layer = block.get_submodule(path)
    weight = layer.weight.detach().clone().requires_grad_()
    expected = block(x)
    del layer.weight
    layer.weight = weight
    found = block(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(found.sum(), weight)
    assert grad.abs().max() > 0


def test_negative_views(randomise):
    block = block_of(randomise)
    with torch.no_grad():
        for x in (draw(2, 20, 9, 10), draw(2, 20, 9, 10).to(memory_format=torch.channels_last)):
            negative = torch._neg_view(x)
            for module in (block, block.op):
                torch.testing.assert_close(module(negative), module(negative.clone()), rtol=1e-5, atol=1e-5)
            y = x.permute(0, 2, 3, 1).contiguous()
            torch.testing.assert_close(block.se(torch._neg_view(y)), block.se(-y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_networks_compile_and_trace_whole(dtype, fast):
    torch.manual_seed(0)
    network = WBMMNet(dims=(8, 12), block_pattern=("D", "W"), num_classes=3).eval().to(dtype)
    images = draw(2, 3, 64, 64).to(dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = network(images)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
        compiled = torch.compile(network, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), expected, **tolerance)
        torch.testing.assert_close(torch.jit.trace(network, images)(images), expected, **tolerance)
