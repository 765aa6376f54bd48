"""Folding networks and changing windows: equal outputs everywhere, and states that know their kind."""

import copy

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from timm.utils.model import reparameterize_model
from torch import nn
from torch.nn.utils import prune

from spotlights.wbmm import FoldedWBMM2d, HierarchicalWBMM2d, WBMM2d, reparameterize, resize_window
from spotlights.wbmm.models import WBMMNet
from spotlights.wbmm.models.blocks import ConvolutionBeside, GlobalResponseNorm, LocalBranches, depthwise

NAMES = sorted(timm.list_models("wbmm_*"))


def small(**kwargs):
    """Every kind of block, small enough to run anywhere."""
    arguments = {
        "dims": (8, 16, 24),
        "block_pattern": ("WD", "DH", "WDW"),
        "window_size": 5,
        "hierarchical_windows": (6, 3),
        "stem_stride": 2,
        "num_classes": 5,
        "local_branches": True,
        "drop_path_rate": 0.3,
    }
    torch.manual_seed(0)
    return WBMMNet(**{**arguments, **kwargs})


def prune_half(module):
    prune.l1_unstructured(module, "weight", amount=0.5)


def named(name, **kwargs):
    """A published network with its depth, its pattern and a tenth of its width."""
    widths = {"dims": (8, 12, 16, 20)} if name != "wbmm_atto" else {}
    torch.manual_seed(0)
    return timm.create_model(name, num_classes=7, **widths, **kwargs)


def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def outputs(network, *sizes):
    torch.manual_seed(2)
    return [network(torch.randn(2, 3, *size)) for size in sizes]


def assert_folded(network):
    parts = list(network.modules())
    assert not any(isinstance(m, nn.BatchNorm2d | LocalBranches | HierarchicalWBMM2d) for m in parts)
    assert all(isinstance(m, FoldedWBMM2d) for m in parts if isinstance(m, WBMM2d))
    assert all(m.bias is None for m in parts if isinstance(m, GlobalResponseNorm))
    assert not any("gamma" in name for name, _ in network.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_every_network(name, randomise):
    network = randomise(named(name, drop_path_rate=0.1))
    sizes = [(45, 61), (64, 64), (230, 100)]
    expected = outputs(network, *sizes)
    exact = copy.deepcopy(network).double()
    assert reparameterize(network) is network
    assert_folded(network)
    for got, before in zip(outputs(network, *sizes), expected, strict=True):
        assert relative_error(got, before) < 1e-5
    image = torch.randn(1, 3, 45, 61, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error(reparameterize(copy.deepcopy(exact))(image), exact(image)) < 1e-12


def test_full_width(randomise):
    network = randomise(timm.create_model("wbmm_nano", num_classes=9))
    (expected,) = outputs(network, (45, 61))
    assert relative_error(outputs(reparameterize(network), (45, 61))[0], expected) < 1e-5


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("backend", ["reference", "matmul", None])
def test_backends_and_layouts(backend, memory_format, randomise):
    network = randomise(small(backend=backend)).to(memory_format=memory_format)
    image = torch.randn(2, 3, 45, 61).contiguous(memory_format=memory_format)
    with torch.no_grad():
        expected = network.forward_features(image)
        got = reparameterize(network).forward_features(image)
    assert relative_error(got, expected) < 1e-5
    assert got.stride() == expected.stride()
    assert all(op.backend == backend for op in network.modules() if isinstance(op, WBMM2d))


@pytest.mark.parametrize("kernel_size", [3, 5, 13])
def test_twin(kernel_size, randomise):
    network = randomise(small(twin_kernel_size=kernel_size))
    expected = outputs(network, (45, 61), (7, 5))
    for got, before in zip(outputs(reparameterize(network), (45, 61), (7, 5)), expected, strict=True):
        assert relative_error(got, before) < 1e-5
    # Both branches lie in the operator itself, whatever the map.
    assert network.stages[2].blocks[0].op.weight.shape[-1] == max(kernel_size, 5)


def test_branches_without_a_size_keep_one_convolution(randomise):
    network = reparameterize(randomise(small()))
    beside = network.stages[2].blocks[0].op
    assert isinstance(beside, ConvolutionBeside)
    assert {n: tuple(p.shape) for n, p in beside.named_parameters()} == {
        "op.weight": (24, 9, 9),
        "op.bias": (24,),
        "conv5.weight": (24, 1, 5, 5),
    }


@pytest.mark.parametrize("input_size", [40, (40, 33), (6, 40)])
def test_branches_in_the_table(input_size, randomise):
    network = randomise(small())
    height, width = (input_size, input_size) if isinstance(input_size, int) else input_size
    sizes = [(height, width), (height - 1, width - 3), (4, 5), (40, 40)]
    expected = outputs(network, *sizes)
    reparameterize(network, input_size=input_size)
    operators = [network.stages[2].blocks[i].op for i in (0, 2)]
    assert all(isinstance(op, FoldedWBMM2d) and op.single_window for op in operators)
    for got, before in zip(outputs(network, *sizes), expected, strict=True):
        assert relative_error(got, before) < 1e-5
    assert not network.stages[0].blocks[0].op.single_window
    with pytest.raises(ValueError, match=r"got a map of \(6, 5\), expected at most \(5, 5\).*without input_size"):
        network(torch.zeros(1, 3, 41, 40))
    with pytest.raises(ValueError, match=r"\(5, 6\)"):
        network(torch.zeros(1, 3, 40, 41))


def test_a_size_of_several_windows_is_exact_everywhere(randomise):
    network = randomise(small())
    expected = outputs(network, (41, 40), (60, 60))
    for got, before in zip(outputs(reparameterize(network, input_size=41), (41, 40), (60, 60)), expected, strict=True):
        assert relative_error(got, before) < 1e-5


def test_folding_again(randomise):
    network = reparameterize(randomise(small()))
    before = {name: value.clone() for name, value in network.state_dict().items()}
    reparameterize(network)
    network.fuse()
    assert list(before) == list(network.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    expected = outputs(network, (40, 40))[0]
    reparameterize(network, input_size=40)  # goes further
    assert network.stages[2].blocks[0].op.single_window
    assert relative_error(outputs(network, (40, 40))[0], expected) < 1e-5


def test_timm_folds_equally(randomise):
    network = randomise(small())
    ours = reparameterize(copy.deepcopy(network))
    expected = outputs(network, (45, 61))[0]
    theirs = reparameterize_model(network)
    again = reparameterize_model(theirs, inplace=True)
    assert again is theirs
    assert_folded(theirs)
    assert relative_error(outputs(theirs, (45, 61))[0], expected) < 1e-5
    assert torch.equal(outputs(network, (45, 61))[0], expected)
    assert list(theirs.state_dict()) == list(ours.state_dict())
    assert all(torch.equal(value, ours.state_dict()[name]) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("fold", [reparameterize, reparameterize_model])
@pytest.mark.parametrize("name", ["wbmm_pico", "wbmm_tiny_dense", "wbmm_tiny_hier"])
def test_backbones(name, fold, randomise):
    backbone = randomise(named(name, features_only=True, out_indices=(1, 3)))
    image = torch.randn(1, 3, 45, 61)
    with torch.no_grad():
        expected = backbone(image)
        folded = fold(backbone)
        for got, before in zip(folded(image), expected, strict=True):
            assert relative_error(got, before) < 1e-5
    assert_folded(folded)


class Own(nn.Module):
    """Somebody's network, with the same layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = HierarchicalWBMM2d(6, (4, 2))
        self.second = nn.ModuleList([self.first, nn.Conv2d(6, 3, 1)])
        self.again = self.first
        self.plain = WBMM2d(3, 4)
        self.nothing = None
        self.network = small()

    def forward(self, x):
        return self.network(self.plain(self.second[1](self.again(self.second[0](self.first(x))))))


@pytest.mark.parametrize("fold", [reparameterize, lambda m: reparameterize(nn.DataParallel(m)).module])
def test_anything_that_contains_them(fold, randomise):
    model = randomise(Own())
    image = torch.randn(1, 6, 45, 61)
    with torch.no_grad():
        expected = model(image)
        assert fold(model) is model
        assert relative_error(model(image), expected) < 1e-5
    assert model.first is model.again is model.second[0]
    assert type(model.plain) is WBMM2d
    assert_folded(model.network)
    assert isinstance(reparameterize(HierarchicalWBMM2d(6)), FoldedWBMM2d)


def test_nothing_to_fold():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    assert reparameterize(model) is model
    assert isinstance(model[1], nn.BatchNorm2d)


def test_training_mode_folds_running_statistics(randomise):
    network = randomise(small())
    expected = outputs(network, (45, 61))[0]
    reparameterize(network.train())
    assert all(m.training for m in network.modules())
    assert relative_error(outputs(network, (45, 61))[0], expected) < 1e-5


def test_copies_and_averages(randomise):
    network = randomise(small()).train()
    ema = ModelEmaV3(network, decay=0.5)
    optimiser = torch.optim.SGD(network.parameters(), 0.1)
    network(torch.randn(4, 3, 45, 61)).square().mean().backward()
    optimiser.step()
    ema.update(network)
    average = ema.module.eval()
    expected = outputs(average, (45, 61))[0]
    assert relative_error(outputs(network.eval(), (45, 61))[0], expected) > 1e-3
    clone = copy.deepcopy(average)
    for model in (average, clone):
        assert relative_error(outputs(reparameterize(model), (45, 61))[0], expected) < 1e-5
    assert torch.equal(outputs(copy.deepcopy(clone), (45, 61))[0], outputs(clone, (45, 61))[0])
    # Averaging a folded network keeps its kind.
    ema = ModelEmaV3(clone, decay=0.5)
    ema.update(average)
    small(inference_mode=True).load_state_dict(ema.module.state_dict())


def test_folded_network_can_be_fine_tuned(randomise):
    network = reparameterize(randomise(small())).train()
    before = {name: p.clone() for name, p in network.named_parameters()}
    image = torch.randn(2, 3, 33, 47)
    optimiser = torch.optim.SGD(network.parameters(), 0.01)
    network(image).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    optimiser.step()
    moved = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
    assert {name for name in before if ".op." in name or ".mlp." in name} <= moved
    torch.testing.assert_close(network.eval()(image), network.train()(image), atol=1e-4, rtol=1e-4)


def test_dtype_and_frozen_parameters(randomise):
    network = randomise(small()).to(torch.bfloat16)
    for p in network.stages[0].parameters():
        p.requires_grad_(False)
    reparameterize(network)
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in network.stages[0].parameters())
    assert all(p.requires_grad for p in network.stages[1].parameters())


@pytest.mark.parametrize("frozen", [timm.utils.model.freeze_batch_norm_2d, nn.SyncBatchNorm.convert_sync_batchnorm])
def test_other_batch_norms(frozen, randomise):
    network = randomise(small())
    expected = outputs(network, (45, 61))[0]
    assert relative_error(outputs(reparameterize(frozen(network)), (45, 61))[0], expected) < 1e-5


def test_batch_norm_without_affine(randomise):
    network = randomise(small())
    network.stages[0].blocks[0].norm = nn.BatchNorm2d(8, affine=False)
    expected = outputs(network.eval(), (45, 61))[0]
    assert relative_error(outputs(reparameterize(network), (45, 61))[0], expected) < 1e-5


@pytest.mark.parametrize("part", ["mlp.fc2", "op"])
@pytest.mark.parametrize("change", [prune_half, nn.utils.parametrizations.weight_norm], ids=["pruned", "weight norm"])
def test_computed_weights_are_refused(part, change):
    network = small().eval()
    block = network.stages[1].blocks[0]  # a D block
    change(block.get_submodule(part))
    state = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    with pytest.raises(ValueError, match=f"reparameterize: {part}: got a .* whose weight is no parameter"):
        reparameterize(network)
    assert block.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())


@pytest.mark.parametrize("part", ["norm", "mlp.norm", "op.bn3"])
def test_norm_without_statistics(part, randomise):
    network = randomise(small())
    network.stages[2].blocks[0].set_submodule(part, nn.GroupNorm(1, 24))
    expected = outputs(network, (45, 61))[0]
    with pytest.raises(ValueError, match="got a GroupNorm, expected a BatchNorm with running statistics"):
        reparameterize(network)
    # Blocks fold one by one, each as a whole.
    assert relative_error(outputs(network, (45, 61))[0], expected) < 1e-5


def test_folded_operators_that_cannot_take_more():
    for op in (FoldedWBMM2d(4, 4, 2), FoldedWBMM2d(4, 4, single_window=True)):
        with pytest.raises(ValueError, match="expected an operator of one table for maps of any size"):
            LocalBranches(op, 4).fuse()


@pytest.mark.parametrize("input_size", [0, (3, 4, 5), "224"])
def test_bad_input_size(input_size):
    with pytest.raises(ValueError, match="reparameterize: input_size"):
        reparameterize(small(), input_size=input_size)


def test_input_size_needs_inference_mode():
    with pytest.raises(ValueError, match="input_size"):
        small(input_size=40)


@pytest.mark.parametrize("name", NAMES)
def test_folded_by_name(name, randomise, tmp_path):
    network = reparameterize(randomise(named(name)))
    save_file(network.state_dict(), tmp_path / "folded.safetensors")
    other = named(name, inference_mode=True).eval()
    assert_folded(other)
    assert list(other.state_dict()) == list(network.state_dict())
    other.load_state_dict(load_file(tmp_path / "folded.safetensors"), strict=True)
    assert torch.equal(outputs(other, (45, 61))[0], outputs(network, (45, 61))[0])


def test_folded_by_name_on_meta():
    with torch.device("meta"):
        folded = timm.create_model("wbmm_small_hier", inference_mode=True)
        whole = timm.create_model("wbmm_small_hier")
    state = folded.state_dict()
    assert state["stages.0.blocks.0.op.local_weight"].shape == (96, 13, 13)
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in whole.parameters())
    assert list(state) == list(timm.create_model("wbmm_small_hier", inference_mode=True).state_dict())


STATES = {
    "whole": {},
    "folded": {"inference_mode": True},
    "for one window": {"inference_mode": True, "input_size": 40},
}
REFUSALS = {
    ("folded", "whole"): "create the network with inference_mode=True, or call spotlights.wbmm.reparameterize",
    ("for one window", "whole"): "create the network with inference_mode=True, or call spotlights.wbmm.reparameterize",
    ("whole", "folded"): "load it first, fold with spotlights.wbmm.reparameterize afterwards",
    ("whole", "for one window"): "load it first, fold with spotlights.wbmm.reparameterize afterwards",
    ("for one window", "folded"): "inference_mode=True and the input_size that it was folded for",
    ("folded", "for one window"): "inference_mode=True and without input_size",
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("of", "into"), REFUSALS, ids=" into ".join)
def test_states_of_another_kind(of, into, strict):
    state, network = small(**STATES[of]).state_dict(), small(**STATES[into])
    with torch.no_grad():
        network.stem[0].weight.fill_(3)
    for prefix, model in (("", network), ("model.", nn.ModuleDict({"model": network}))):
        renamed = {prefix + name: value for name, value in state.items()}
        with pytest.raises(RuntimeError, match=REFUSALS[of, into]) as caught:
            model.load_state_dict(renamed, strict=strict)
        assert "\n" not in str(caught.value)
        assert (network.stem[0].weight == 3).all()


@pytest.mark.parametrize("kind", STATES)
def test_states_of_the_same_kind(kind):
    network = small(**STATES[kind])
    with torch.no_grad():
        network.stages[2].blocks[0].mlp.fc2.weight.fill_(3)
    other = small(**STATES[kind])
    other.load_state_dict(network.state_dict())
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in network.state_dict().items())


def test_operator_state_of_another_kind():
    folded = FoldedWBMM2d(8, 7)
    with pytest.raises(RuntimeError, match=r"of a folded operator, this is an operator that is not folded: .*Folded"):
        WBMM2d(8, 7, bias=True).load_state_dict(folded.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="of an operator that is not folded, this is a folded operator"):
        folded.load_state_dict(WBMM2d(8, 7, bias=True).state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="of a folded operator for maps of one window"):
        folded.load_state_dict(FoldedWBMM2d(8, 7, single_window=True).state_dict())


def test_branches_of_a_small_window(randomise):
    # A window of 2 knows no offset of 2: what a 5x5 kernel has there never meets an input.
    branches = randomise(LocalBranches(WBMM2d(4, 2), 4))
    x = torch.randn(3, 4, 2, 2)
    folded = branches.fuse((2, 2))
    assert folded.weight.shape == (4, 3, 3)
    with torch.no_grad():
        assert relative_error(folded(x), branches(x)) < 1e-5


def test_branches_around_a_convolution_with_bias(randomise):
    branches = randomise(LocalBranches(depthwise(4, 7, bias=True), 4))
    folded = branches.fuse()
    assert isinstance(folded, nn.Conv2d)
    assert folded.kernel_size == (7, 7)
    x = torch.randn(2, 4, 9, 13)
    with torch.no_grad():
        assert relative_error(folded(x), branches(x)) < 1e-5


def smooth(window):
    """A smooth function of the offset in units of the table's extent, sampled at a table's positions."""

    def axis(side):
        n = 2 * side - 1
        return (torch.arange(n) - (n - 1) / 2) / n

    h, w = axis(window[0])[:, None], axis(window[1])[None]
    waves = [torch.cos(3 * h) * torch.exp(-4 * w * w), torch.sin(2 * h + w)]
    return torch.stack(waves)


@pytest.mark.parametrize("window", [(8, 8), (16, 16), (14, 9), (7, 5)])
def test_resized_table(window):
    op = WBMM2d(2, 7)
    with torch.no_grad():
        op.weight.copy_(smooth((7, 7)))
    before = op.weight
    x = torch.randn(1, 2, 20, 30)
    op.eval()(x)
    assert resize_window(op, window) is op
    assert op.window_size == window
    # At the border, two cells of the old table wide, bicubic interpolation repeats the last value.
    margins = [-(-2 * (2 * side - 1) // 13) + 1 for side in window]
    inner = (slice(None), *(slice(margin, -margin) for margin in margins))
    torch.testing.assert_close(op.weight[inner], smooth(window)[inner], atol=0.015, rtol=0)
    torch.testing.assert_close(op.weight, smooth(window), atol=6e-2, rtol=0)
    torch.testing.assert_close(op.weight[:, window[0] - 1, window[1] - 1], before[:, 6, 6])
    with torch.no_grad():
        torch.testing.assert_close(op(x), op.train()(x), atol=1e-4, rtol=1e-4)


def test_same_window_changes_nothing():
    network = small(block_pattern=("WD", "DW", "WDW"))
    parameters = list(network.parameters())
    assert resize_window(network, 5) is network
    assert all(a is b for a, b in zip(parameters, network.parameters(), strict=True))


def test_window_of_a_network(randomise):
    network = resize_window(randomise(small()), 4)
    hierarchical = network.stages[1].blocks[1].op
    assert (hierarchical.global_op.window_size, hierarchical.local_op.window_size) == ((8, 8), (4, 4))
    assert network.stages[0].blocks[0].op.weight.shape == (8, 7, 7)
    expected = small(window_size=4, hierarchical_windows=(8, 4)).state_dict()
    assert {n: v.shape for n, v in network.state_dict().items()} == {n: v.shape for n, v in expected.items()}
    before = outputs(network, (45, 61))[0]
    assert before.shape == (2, 5)
    assert relative_error(outputs(reparameterize(network), (45, 61))[0], before) < 1e-5


def test_windows_that_cannot_be_changed():
    with pytest.raises(ValueError, match="resize_window: window_size: got 0"):
        resize_window(WBMM2d(4), 0)
    with pytest.raises(ValueError, match="this ReLU has no WBMM2d"):
        resize_window(nn.ReLU(), 8)
    network = small()
    network.stages[2].blocks[0].fuse()
    with pytest.raises(ValueError, match=r"it is folded.*resize the model before folding it"):
        resize_window(network, 8)
    assert network.stages[0].blocks[0].op.window_size == (5, 5)


def test_folding_draws_no_random_numbers():
    network = WBMMNet(dims=(8, 16), block_pattern=("DH", "WD"), num_classes=3, local_branches=True)
    before = torch.get_rng_state()
    reparameterize(network)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(tensor.is_meta for tensor in (*network.parameters(), *network.buffers()))


def test_an_operator_s_state_in_a_network():
    with pytest.raises(RuntimeError, match="it is of a folded operator, this is a whole network: create"):
        small().load_state_dict(FoldedWBMM2d(8, 5).state_dict())
