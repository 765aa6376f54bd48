"""WBMM2d: its parameters, and the weight kept in eval mode."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from spotlights.wbmm import WBMM2d, wbmm2d
from spotlights.wbmm.backends import BACKENDS, Call, matmul


@pytest.fixture
def layer():
    return WBMM2d(6, (4, 3), bias=True, backend="matmul")


@pytest.fixture
def input():
    return torch.randn(2, 6, 9, 10)


def expected(layer, input):
    return wbmm2d(input, layer.weight, layer.bias, shortcut=layer.shortcut, backend="reference")


def test_parameters():
    torch.manual_seed(0)
    layer = WBMM2d(512, 7)
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {"weight": (512, 13, 13)}
    assert layer.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert layer.weight.abs().max() <= 2
    assert list(WBMM2d(4, bias=True).state_dict()) == ["weight", "bias"]
    assert WBMM2d(4, device="meta", dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert repr(WBMM2d(4, (5, 9))) == "WBMM2d(4, window_size=(5, 9), shortcut=True, bias=False)"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_train_and_eval_agree(layer, input, mode):
    with mode():
        torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-5)
        layer.eval()
        for _ in range(2):
            torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-5)


def test_matrix_is_built_once_in_eval(layer, input, monkeypatch):
    built = []
    original = matmul.build_matrix
    monkeypatch.setattr(matmul, "build_matrix", lambda *a, **k: built.append(1) or original(*a, **k))
    layer.eval()
    with torch.no_grad():
        for _ in range(3):
            layer(input)
    assert len(built) == 1


CHANGES = {
    "in place": lambda layer: layer.weight.mul_(2),
    "load_state_dict": lambda layer: layer.load_state_dict({k: v + 1 for k, v in layer.state_dict().items()}),
    "assigned state": lambda layer: layer.load_state_dict(
        {k: v + 1 for k, v in layer.state_dict().items()}, assign=True
    ),
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones_like(layer.weight))),
    "new storage": lambda layer: setattr(layer.weight, "data", torch.ones_like(layer.weight)),
    "dtype": lambda layer: layer.double().weight.mul_(2),
    "reset": lambda layer: layer.reset_parameters(),
    "optimiser step": lambda layer: torch.optim.SGD(layer.parameters(), 1.0).step(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_is_seen(layer, input, change):
    layer.eval()
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    with torch.no_grad():
        before = layer(input)
        CHANGES[change](layer)
        input = input.to(layer.weight.dtype)
        after = layer(input)
        torch.testing.assert_close(after, expected(layer, input), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 1e-2


def test_fused_optimiser_in_eval(layer, input):
    layer.eval()
    optimiser = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    with torch.no_grad():
        layer(input)
    layer(input).square().sum().backward()
    optimiser.step()
    with torch.no_grad():
        torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-4)


def test_conversion_there_and_back(layer, input):
    layer.eval()
    with torch.no_grad():
        layer(input)
        layer.half().float()
        assert layer._prepared._entry is None
        torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-5)


def test_copies_share_nothing(layer, input):
    layer.eval()
    with torch.no_grad():
        layer(input)
        twin = copy.deepcopy(layer)
        unpickled = pickle.loads(pickle.dumps(layer))
        twin.weight.zero_()
        twin.bias.zero_()
        torch.testing.assert_close(twin(input), input)
        torch.testing.assert_close(unpickled(input), layer(input))
        torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-5)


def test_saved_file_holds_no_matrix(layer, input):
    layer.eval()
    with torch.no_grad():
        layer(input)
    assert sum(t.numel() for t in layer.state_dict().values()) == 6 * 7 * 5 + 6
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    assert set(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)) == {"weight", "bias"}


def test_inference_mode_then_gradient(layer, input):
    layer.eval()
    with torch.inference_mode():
        layer(input)
    layer.requires_grad_(False)
    input.requires_grad_()
    layer(input).sum().backward()
    ones = torch.ones_like(input)
    flipped = wbmm2d(ones, layer.weight.flip(1, 2), shortcut=True, backend="reference")
    torch.testing.assert_close(input.grad, flipped, rtol=1e-4, atol=1e-5)


def test_inference_tensors_are_not_cached(input):
    with torch.inference_mode():
        layer = WBMM2d(6, (4, 3), backend="matmul").eval()
        layer(input)
        layer.weight.mul_(3)
        torch.testing.assert_close(layer(input), expected(layer, input), rtol=1e-4, atol=1e-5)


def test_gradients_reach_weight_in_eval(layer, input):
    layer.eval()
    with torch.no_grad():
        layer(input)
    layer(input).sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_frozen_layer_passes_the_gradient_on(backend):
    layer = WBMM2d(4, 3, backend=backend).eval().requires_grad_(False)
    if reason := BACKENDS[backend].why_not(Call(torch.device("cpu"), torch.float32, (3, 3), None)):
        pytest.skip(reason)
    input = torch.randn(2, 4, 7, 8)
    with torch.no_grad():
        layer(input)  # fills the cache
    watched = input.clone().requires_grad_()
    layer(watched).sum().backward()
    ones = torch.ones(2, 4, 7, 8)
    expected = wbmm2d(ones, layer.weight.flip(1, 2), shortcut=True, backend="reference")
    torch.testing.assert_close(watched.grad, expected)


def test_autocast_in_eval(layer, input):
    layer.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        low = layer(input)
        low_again = layer(input)
    with torch.no_grad():
        full = layer(input)
    assert low.dtype == torch.bfloat16
    assert full.dtype == torch.float32
    assert torch.equal(low, low_again)
    assert (low - full).abs().max() < 0.02 * full.abs().max()


def test_functional_call_and_vmap_over_models(layer, input):
    layer.eval()
    with torch.no_grad():
        layer(input)
        stacked = {k: torch.stack([v, 2 * v]) for k, v in layer.named_parameters()}
        both = torch.func.vmap(lambda p: torch.func.functional_call(layer, p, (input,)))(stacked)
        doubled = torch.func.functional_call(layer, {k: 2 * v for k, v in layer.named_parameters()}, (input,))
    torch.testing.assert_close(both[0], layer(input), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(both[1], doubled, rtol=1e-4, atol=1e-5)


def test_compiled_in_eval_sees_new_weights(layer, input):
    torch._dynamo.reset()
    layer.eval()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(input), layer(input))
        layer.weight.mul_(2)
        torch.testing.assert_close(compiled(input), expected(layer, input), rtol=1e-4, atol=1e-5)


def test_meta_then_to_empty():
    layer = WBMM2d(4, 7, device="meta").eval()
    assert layer(torch.empty(1, 4, 9, 9, device="meta")).shape == (1, 4, 9, 9)
    layer = layer.to_empty(device="cpu")
    layer.reset_parameters()
    with torch.no_grad():
        x = torch.randn(1, 4, 9, 9)
        torch.testing.assert_close(layer(x), expected(layer, x))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0,), {}, "channels: got 0"),
        ((4, 0), {}, "window_size: got 0"),
        ((4, (7, -1)), {}, r"window_size: got \(7, -1\)"),
        ((4, (7, 7, 7)), {}, "window_size"),
        ((4, 7.0), {}, "window_size: got 7.0"),
        ((4,), {"backend": "fast"}, "backend: got 'fast'"),
    ],
)
def test_bad_arguments(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        WBMM2d(*arguments, **options)


def test_swapped_weights_are_prepared_anew():
    """A freed weight's address may be the next one's."""
    layer = WBMM2d(64).eval().requires_grad_(False)
    x = torch.randn(1, 64, 14, 14)
    kept = layer.weight.data
    for _ in range(5):
        layer.weight.data = torch.randn(64, 13, 13)
        torch.testing.assert_close(layer(x), wbmm2d(x, layer.weight.clone(), shortcut=True), rtol=1e-5, atol=1e-5)
        layer.weight.data = kept
