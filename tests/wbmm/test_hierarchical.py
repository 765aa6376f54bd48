"""HierarchicalWBMM2d: two branches in training, one operator of two tables afterwards, on every size."""

import copy

import pytest
import torch
from torch import nn

from spotlights.wbmm import FoldedWBMM2d, HierarchicalWBMM2d, WBMM2d, wbmm2d
from spotlights.wbmm.backends import BACKENDS, Call

WINDOWS = [(14, 7), (8, 4), (4, 2), (6, 2), (6, 1), (4, 4), ((4, 6), (2, 3)), ((5, 9), (5, 3))]
SIZES = [(14, 14), (28, 21), (45, 61), (3, 5), (1, 1)]


def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


def test_definition():
    layer = HierarchicalWBMM2d(6, (4, 2))
    x = torch.randn(3, 6, 10, 11)
    branches = (
        wbmm2d(x, layer.global_op.weight, shortcut=True, backend="reference"),
        wbmm2d(x, layer.local_op.weight, backend="reference"),
    )
    norms = nn.BatchNorm2d(6), nn.BatchNorm2d(6)
    expected = sum(norm(branch) for norm, branch in zip(norms, branches, strict=True))
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)
    for own, norm in zip((layer.global_norm, layer.local_norm), norms, strict=True):
        torch.testing.assert_close(own.running_var, norm.running_var)


def test_training_reaches_both_tables():
    layer = HierarchicalWBMM2d(4, (4, 2))
    layer(torch.randn(2, 4, 9, 9)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.local_op.weight.grad.abs().max() > 0


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_one_operator_on_every_size(windows, randomise):
    layer = randomise(HierarchicalWBMM2d(8, windows))
    exact, folded = copy.deepcopy(layer).double(), layer.fuse()
    for size in SIZES:
        x = torch.randn(2, 8, *size)
        with torch.no_grad():
            assert relative_error(folded(x), layer(x)) < 1e-5
            x = x.double()
            assert relative_error(exact.fuse()(x), exact(x)) < 1e-13


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", ["reference", "matmul", "cpu"])
def test_backends(backend, memory_format, randomise):
    if reason := BACKENDS[backend].why_not(Call(torch.device("cpu"), torch.float32, (14, 14), (7, 7))):
        pytest.skip(f"backend {backend} cannot run here: {reason}")
    layer = randomise(HierarchicalWBMM2d(20, backend=backend))
    folded = layer.fuse()
    assert folded.backend == backend
    x = torch.randn(2, 20, 45, 61).contiguous(memory_format=memory_format)
    with torch.no_grad():
        y = folded(x)
        assert relative_error(y, layer(x)) < 1e-5
    assert y.is_contiguous(memory_format=memory_format)


def test_no_table_of_one_window_could_hold_it(randomise):
    # Pairs at the same offset get another number when a border of the small windows lies between them.
    folded = randomise(HierarchicalWBMM2d(1, (4, 2), shortcut=False)).fuse()
    with torch.no_grad():
        responses = folded(torch.eye(16).view(16, 1, 4, 4)) - folded.bias
    matrix = responses.flatten(1)  # [input position, output position]
    inside, across = matrix[0, 1], matrix[1, 2]
    assert inside - across == pytest.approx(folded.local_weight[0, 1, 0].item(), abs=1e-6)
    assert abs(inside - across) > 1e-3


def test_compact():
    folded = HierarchicalWBMM2d(16).fuse()
    assert folded.weight[0].numel() + folded.local_weight[0].numel() == 27**2 + 13**2 == 898
    assert type(folded) is FoldedWBMM2d
    assert list(folded.children()) == []


def test_what_folding_keeps(randomise):
    layer = randomise(HierarchicalWBMM2d(4, (4, 2))).to(torch.bfloat16)
    layer.local_op.weight.requires_grad_(False)
    before = copy.deepcopy(layer.state_dict())
    folded = layer.fuse()
    assert folded.weight.dtype == folded.bias.dtype == folded.local_weight.dtype == torch.bfloat16
    assert (folded.weight.requires_grad, folded.local_weight.requires_grad) == (True, False)
    assert not folded.training
    assert layer.train().fuse().training
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_folded_one_can_be_trained(randomise):
    folded = randomise(HierarchicalWBMM2d(4, (4, 2))).fuse().train()
    x = torch.randn(2, 4, 9, 9)
    optimiser = torch.optim.SGD(folded.parameters(), 0.01)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = folded(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sorted(losses, reverse=True) == losses
    with torch.no_grad():
        torch.testing.assert_close(folded.eval()(x), folded.train()(x), atol=1e-5, rtol=1e-5)


def folded_pair(randomise):
    return randomise(HierarchicalWBMM2d(4, (4, 2))).fuse()


def test_state_dict_round_trip(randomise):
    folded, other = folded_pair(randomise), FoldedWBMM2d(4, 4, local_window_size=2)
    assert sorted(folded.state_dict()) == ["bias", "folded", "local_weight", "weight"]
    other.load_state_dict(folded.state_dict())
    x = torch.randn(1, 4, 7, 9)
    assert torch.equal(other.eval()(x), folded(x))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: WBMM2d(4, 4, bias=True), "of two windows, this is an operator that is not folded: .*FoldedWBMM2d"),
        (lambda: FoldedWBMM2d(4, 4), "of two windows, this is a folded operator: .*FoldedWBMM2d with local_window"),
        (lambda: HierarchicalWBMM2d(4, (4, 2)), "of two windows, this is a hierarchical operator that is not folded"),
    ],
)
def test_two_tables_are_refused_elsewhere(other, message, strict, randomise):
    other = other()
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(RuntimeError, match=message) as caught:
        other.load_state_dict(folded_pair(randomise).state_dict(), strict=strict)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: WBMM2d(4, 4, bias=True), "it is of an operator that is not folded, this is a folded operator of two"),
        (lambda: HierarchicalWBMM2d(4, (4, 2)), "it is of a hierarchical operator that is not folded.*reparameterize"),
        (lambda: FoldedWBMM2d(4, 4), "it is of a folded operator, this is a folded operator of two windows"),
    ],
)
def test_two_tables_refuse_other_states(state, message):
    with pytest.raises(RuntimeError, match=message):
        FoldedWBMM2d(4, 4, local_window_size=2).load_state_dict(state().state_dict(), strict=False)


def test_repr():
    folded = FoldedWBMM2d(4, (4, 6), (2, 3))
    assert repr(folded) == "FoldedWBMM2d(4, window_size=(4, 6), local_window_size=(2, 3))"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HierarchicalWBMM2d(4, (14, 4)), r"HierarchicalWBMM2d: local window: got \(4, 4\), .*\(14, 14\)"),
        (lambda: HierarchicalWBMM2d(4, (7, 14)), "divides the window"),
        (lambda: HierarchicalWBMM2d(4, 14), "window_sizes: got 14"),
        (lambda: HierarchicalWBMM2d(4, (14, 0)), "positive"),
        (lambda: HierarchicalWBMM2d(4, (14, 7, 1)), "window_sizes"),
        (lambda: HierarchicalWBMM2d(0), "channels: got 0"),
        (lambda: HierarchicalWBMM2d(4, backend="none"), "none"),
        (lambda: FoldedWBMM2d(4, 7, 2), r"FoldedWBMM2d: local window: got \(2, 2\)"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
