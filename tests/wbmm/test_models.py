"""The networks: the paper's own numbers, the release's outputs, and timm's interface."""

import copy

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from spotlights.wbmm import WBMM2d
from spotlights.wbmm.models import WBMMNet

NAMES = ["atto", "pico", "nano", "tiny", "small", "tiny_dense", "small_dense", "tiny_hier", "small_hier"]


def tiny(**kwargs):
    """Three stages with every kind of block, small enough to run anywhere."""
    arguments = {
        "dims": (8, 16, 24),
        "block_pattern": ("WD", "DW", "WD"),
        "stem_stride": 2,
        "num_classes": 5,
        "ls_init_value": 0.5,
        "local_branches": True,
    }
    torch.manual_seed(0)
    return WBMMNet(**{**arguments, **kwargs})


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"),
    [("pico", 10.66, 1.50), ("nano", 18.17, 2.65), ("tiny", 31.07, 4.77), ("small", 55.71, 8.94)],
)
def test_published_sizes(name, millions, gmacs):
    with torch.device("meta"):
        network = timm.create_model(f"wbmm_{name}").eval()
        image = torch.empty(1, 3, 224, 224)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == millions
    with FlopCounterMode(display=False) as counter:
        network(image)
    # The published count leaves out the squeeze-and-excite layers, which work on one pixel a map.
    pooled = sum(p.numel() for n, p in network.named_parameters() if ".se." in n and p.ndim > 1)
    assert round((counter.get_total_flops() / 2 - pooled) / 1e9, 2) == gmacs


@pytest.mark.parametrize(("name", "millions"), [("tiny_dense", 31.10), ("small_dense", 55.74)])
def test_dense_sizes(name, millions):
    with torch.device("meta"):
        classifier = timm.create_model(f"wbmm_{name}")
        backbone = timm.create_model(f"wbmm_{name}", features_only=True)
    assert round(sum(p.numel() for p in classifier.parameters()) / 1e6, 2) == millions
    dims = backbone.feature_info.channels()
    head = 2 * dims[-1] + 1001 * dims[-1] - dims[-1] + 1000
    difference = sum(p.numel() for p in classifier.parameters()) - sum(p.numel() for p in backbone.parameters())
    assert difference == head - 2 * sum(dims)


def test_atto_is_small_and_keeps_a_map():
    network = timm.create_model("wbmm_atto", in_chans=1, num_classes=10).eval()
    assert sum(p.numel() for p in network.parameters()) < 1e6
    with FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 1, 28, 28))
    assert 3e6 < counter.get_total_flops() / 2 < 6e6
    assert any(isinstance(m, WBMM2d) for m in network.modules())
    assert network.forward_features(torch.zeros(1, 1, 28, 28)).shape[-2:] == (4, 4)
    assert network.forward_features(torch.zeros(1, 1, 64, 64)).shape[-2:] == (8, 8)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_registered(name):
    assert timm.is_model(f"wbmm_{name}")
    with torch.device("meta"):
        network = timm.create_model(f"wbmm_{name}", num_classes=7, drop_path_rate=0.1, in_chans=1)
        assert network(torch.empty(2, 1, 64, 64)).shape == (2, 7)
    for key in (network.pretrained_cfg["first_conv"], network.pretrained_cfg["classifier"]):
        assert f"{key}.weight" in network.state_dict()


def test_pretrained_files():
    files = {name: timm.get_pretrained_cfg(f"wbmm_{name}").hf_hub_filename for name in NAMES}
    assert files == {
        "atto": None,
        "pico": "wbmm_p_in1k_224_w7.pth",
        "nano": "wbmm_n_in1k_224_w7.pth",
        "tiny": "wbmm_t_in1k_224_w7.pth",
        "small": "wbmm_s_in1k_224_w7.pth",
        "tiny_dense": "wbmm_t_dense_in1k_224_w7.pth",
        "small_dense": "wbmm_s_dense_in1k_224_w7.pth",
        "tiny_hier": None,
        "small_hier": None,
    }
    assert timm.get_pretrained_cfg("wbmm_tiny_dense.in1k").hf_hub_id == "wansong-s/WBMM"
    with pytest.raises(RuntimeError, match="No pretrained weights"):
        timm.create_model("wbmm_atto", pretrained=True)


@pytest.mark.parametrize("size", [(190, 250), (33, 47), (28, 28), (3, 2)])
def test_any_input_size_and_gradients(size):
    network = tiny(drop_path_rate=0.1, drop_rate=0.1)
    logits = network(torch.randn(2, 3, *size))
    assert logits.shape == (2, 5)
    logits.square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_initialisation():
    def spread(layer):
        return float(layer.weight.detach().std())

    paper, scaled = tiny(dims=(8, 16, 64)), tiny(dims=(8, 16, 64), init_std=None)
    fc2 = [net.stages[2].blocks[0].mlp.fc2 for net in (paper, scaled)]
    assert spread(fc2[0]) == pytest.approx(0.02, rel=0.05)
    assert spread(fc2[1]) == pytest.approx(256**-0.5, rel=0.05)
    operators = [m for net in (paper, scaled) for m in net.modules() if isinstance(m, WBMM2d)]
    assert all(spread(op) == pytest.approx(0.02, rel=0.1) for op in operators)
    assert all(torch.equal(b.gamma, torch.full_like(b.gamma, 0.5)) for s in paper.stages for b in s.blocks)


def test_local_branches_always_run():
    network = tiny().eval()
    branched = network.stages[2].blocks[0].op
    for size in ((28, 28), (61, 90)):
        image = torch.randn(1, 3, *size)
        before = network.forward_features(image)
        with torch.no_grad():
            branched.conv5.weight.neg_()
        assert (network.forward_features(image) - before).abs().max() > 1e-4


def test_twin_has_no_windowed_operator():
    network = tiny(twin_kernel_size=13)
    assert not any(isinstance(m, WBMM2d) for m in network.modules())
    assert network.stages[0].blocks[0].op.weight.shape == (8, 1, 13, 13)
    assert network.stages[0].blocks[1].op.weight.shape == (8, 1, 3, 3)
    assert network(torch.randn(2, 3, 33, 47)).shape == (2, 5)


def test_drop_path_rises_to_the_last_block():
    network = tiny(drop_path_rate=0.5)
    rates = [getattr(b.drop_path, "drop_prob", 0.0) for stage in network.stages for b in stage.blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_intermediates_are_the_stages_outputs():
    network = tiny().eval()
    image = torch.randn(2, 3, 45, 38)
    last, features = network.forward_intermediates(image)
    assert torch.equal(last, network.forward_features(image))
    assert torch.equal(features[-1], last)
    assert torch.equal(network.forward_head(last), network(image))
    assert [(f.shape[1], *f.shape[2:]) for f in features] == [(8, 23, 19), (16, 12, 10), (24, 6, 5)]
    only = network.forward_intermediates(image, indices=[1], intermediates_only=True, stop_early=True)
    assert len(only) == 1
    assert torch.equal(only[0], features[1])
    with pytest.raises(ValueError, match="output_fmt"):
        network.forward_intermediates(image, output_fmt="NHWC")


def test_dense_norms_normalise_intermediates_alone():
    network = tiny(dense=True).eval()
    image = torch.randn(1, 3, 40, 40)
    plain = network.forward_intermediates(image, intermediates_only=True)
    normed = network.forward_intermediates(image, norm=True, intermediates_only=True)
    for before, after in zip(plain, normed, strict=True):
        expected = nn.functional.layer_norm(before.movedim(1, -1), after.shape[1:2], eps=1e-6).movedim(-1, 1)
        torch.testing.assert_close(after, expected)
    kept = copy.deepcopy(network)
    assert kept.prune_intermediate_layers([1]) == [1]
    assert [name for name, _ in kept.norms.named_parameters()] == ["1.weight", "1.bias"]
    torch.testing.assert_close(kept.forward_intermediates(image, [1], norm=True, intermediates_only=True)[0], normed[1])


@pytest.mark.parametrize("name", ["wbmm_pico", "wbmm_tiny_dense"])
def test_features_only(name):
    with torch.device("meta"):
        backbone = timm.create_model(name, features_only=True)
        features = backbone(torch.empty(2, 3, 190, 250))
    assert backbone.feature_info.reduction() == [4, 8, 16, 32]
    assert [tuple(f.shape[1:]) for f in features] == [
        (c, -(-190 // r), -(-250 // r)) for c, r in zip(backbone.feature_info.channels(), (4, 8, 16, 32), strict=True)
    ]
    assert not any(n.startswith("model.head") for n, _ in backbone.named_parameters())


def test_features_only_of_some_stages():
    dims = (8, 16, 24, 32)
    backbone = timm.create_model("wbmm_tiny_dense", features_only=True, out_indices=(1, -2), dims=dims).eval()
    assert backbone.feature_info.channels() == [16, 24]
    features = backbone(torch.randn(1, 3, 64, 96))
    assert [tuple(f.shape) for f in features] == [(1, 16, 8, 12), (1, 24, 4, 6)]
    for feature in features:  # normalised over channels
        torch.testing.assert_close(feature.mean(1), torch.zeros_like(feature[:, 0]), atol=1e-5, rtol=0)
    sum(f.square().sum() for f in features).backward()
    assert all(p.grad is not None for p in backbone.parameters())


def test_classifier():
    network = tiny().eval()
    image = torch.randn(2, 3, 28, 28)
    features = network.forward_head(network.forward_features(image), pre_logits=True)
    assert features.shape == (2, network.head_hidden_size) == (2, network.num_features)
    torch.testing.assert_close(network.get_classifier()(features), network(image))
    network.reset_classifier(3)
    assert network.num_classes == 3
    assert network(image).shape == (2, 3)
    network.reset_classifier(0)
    assert isinstance(network.get_classifier(), nn.Identity)
    torch.testing.assert_close(network(image), features)
    network.reset_classifier(4, "")
    assert network(image).shape == (2, 4, 4, 4)
    assert tiny(num_classes=0, global_pool="")(image).shape == (2, 24, 4, 4)


def test_grad_checkpointing_gives_the_same_gradients():
    network = tiny()
    saving = copy.deepcopy(network)
    saving.set_grad_checkpointing()
    image = torch.randn(2, 3, 30, 21)
    for net in (network, saving):
        net(image).square().sum().backward()
    for (name, plain), recomputed in zip(network.named_parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(recomputed.grad, plain.grad, msg=name)


@pytest.mark.parametrize("coarse", [False, True])
def test_group_matcher(coarse):
    network = tiny(dense=True)
    groups = group_parameters(network, network.group_matcher(coarse))
    names = [name for group in groups.values() for name in group]
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())
    layer = {name: i for i, group in groups.items() for name in group}
    assert layer["stem.0.weight"] == 0
    assert layer["head.fc.weight"] == max(groups) == (4 if coarse else 7)
    first, second = layer["stages.1.blocks.0.gamma"], layer["stages.1.blocks.1.gamma"]
    assert second - first == (0 if coarse else 1)
    assert layer["stages.1.downsample.0.weight"] == first


def test_layer_decay_optimizer():
    optimizer = create_optimizer_v2(tiny(), "adamw", lr=1.0, weight_decay=0.1, layer_decay=0.5)
    assert sorted({g["lr_scale"] for g in optimizer.param_groups}) == [0.5**i for i in range(7, -1, -1)]


def test_deepcopy_state_dict_and_channels_last():
    network = tiny().eval()
    image = torch.randn(2, 3, 28, 28)
    expected = network(image)
    assert torch.equal(copy.deepcopy(network)(image), expected)
    other = tiny(ls_init_value=0.1).eval()
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(image), expected)
    last = network.to(memory_format=torch.channels_last)
    torch.testing.assert_close(last(image.to(memory_format=torch.channels_last)), expected)


def test_all_zero_channel_has_finite_gradients():
    network = tiny()
    with torch.no_grad():
        for stage in network.stages:
            for block in stage.blocks:
                block.mlp.fc1.weight.zero_()
    network(torch.zeros(2, 3, 16, 16)).sum().backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"block_pattern": "WD"}, TypeError, "block_pattern"),
        ({"block_pattern": ("WD", "X", "W")}, ValueError, r'block_pattern\[1\]: got "X"'),
        ({"block_pattern": ("WD", "", "W")}, ValueError, r"block_pattern\[1\]"),
        ({"dims": (8, 16)}, ValueError, "dims: got 2 widths for 3 stages"),
        ({"dims": (8, 16, 30)}, ValueError, "multiples of 4"),
        ({"depths": (2, 2, 3)}, ValueError, r"depths: got \(2, 2, 3\), expected .* \(2, 2, 2\)"),
        ({"block_pattern": ("WD", "DW", "DD")}, ValueError, "local_branches"),
        ({"stem_stride": 3}, ValueError, "stem_stride: got 3"),
        ({"twin_kernel_size": 4}, ValueError, "twin_kernel_size: got 4"),
    ],
)
def test_bad_architecture(kwargs, error, message):
    with pytest.raises(error, match=message):
        tiny(**kwargs)
