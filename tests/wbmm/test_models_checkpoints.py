"""The release's checkpoints: same outputs as its own networks, and a clear refusal of everything else."""

import ast
import pickle
from argparse import Namespace
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spotlights.wbmm.models import WBMMNet, checkpoint_filter_fn, load_original_checkpoint

FIXTURES = Path(__file__).parent.parent / "fixtures" / "wbmm"
PATTERNS = {
    "p_like": ("DD", "WD", "WD" * 3, "WW"),
    "t_like": ("DDD", "WDW", "WD" * 9, "WWW"),
    "dense_t_like": ("WDW", "WDW", "WD" * 9, "WWW"),
}


def state_of(name):
    return load_file(FIXTURES / f"{name}.state.safetensors")


def arguments_of(name):
    with safe_open(FIXTURES / f"{name}.state.safetensors", "pt") as file:
        metadata = {key: ast.literal_eval(value) for key, value in file.metadata().items()}
    return {
        "depths": metadata["depths"],
        "dims": metadata["dims"],
        "block_pattern": PATTERNS[name],
        "window_size": metadata.get("window", 7),
        "local_branches": metadata.get("small_kernel", False),
        "num_classes": 10,
    }


def network_of(name, **kwargs):
    torch.manual_seed(0)
    return WBMMNet(**{**arguments_of(name), **kwargs}).eval()


def relative_error(got, expected):
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["p_like", "t_like"])
def test_logits_of_the_release(name, memory_format):
    network = network_of(name)
    load_original_checkpoint(network, FIXTURES / f"{name}.state.safetensors")
    data = load_file(FIXTURES / f"{name}.io.safetensors")
    with torch.no_grad():
        logits = network.to(memory_format=memory_format)(data["x"].contiguous(memory_format=memory_format))
    assert relative_error(logits, data["logits"]) < 1e-5


def test_dense_features_of_the_release():
    kwargs = {k: v for k, v in arguments_of("dense_t_like").items() if k != "num_classes"}
    backbone = timm.create_model("wbmm_tiny_dense", features_only=True, **kwargs).eval()
    load_original_checkpoint(backbone, FIXTURES / "dense_t_like.state.safetensors")
    data = load_file(FIXTURES / "dense_t_like.io.safetensors")
    with torch.no_grad():
        features = backbone(data["x"])
    assert len(features) == 4
    for i, feature in enumerate(features):
        assert relative_error(feature, data[f"feature{i}"]) < 1e-5


def test_through_timm(tmp_path):
    path = tmp_path / "release.pth"
    torch.save({"model": state_of("p_like"), "args": Namespace(lr=4e-3)}, path)
    kwargs = arguments_of("p_like") | {"num_classes": 1000}
    overlay = {"file": str(path), "num_classes": 10}
    network = timm.create_model("wbmm_pico", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()
    expected = network_of("p_like")
    load_original_checkpoint(expected, path)
    image = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(network.forward_features(image), expected.forward_features(image))
    assert network(image).shape == (1, 1000)


def dense_as_classifier():
    """The released dense files: a classifier's norm and head in place of the norms of the stages."""
    state = {k: v for k, v in state_of("dense_t_like").items() if not k.startswith("norm")}
    head = {"norm.weight": torch.randn(64), "norm.bias": torch.randn(64), "head.weight": torch.randn(10, 64)}
    return {**state, **head, "head.bias": torch.randn(10)}


def test_dense_file_with_a_head():
    state = dense_as_classifier()
    classifier = network_of("dense_t_like")
    load_original_checkpoint(classifier, state)
    assert torch.equal(classifier.head.fc.weight, state["head.weight"])
    assert torch.equal(classifier.head.norm.weight, state["norm.weight"])
    backbone = network_of("dense_t_like", dense=True, num_classes=0)
    load_original_checkpoint(backbone, state)
    assert torch.equal(backbone.norms[2].weight, torch.ones(48))
    table = state["stages.0.0.dwconv.relative_position_bias_table"]
    assert torch.equal(backbone.stages[0].blocks[0].op.weight.flatten(1), table)


def test_dense_file_without_a_head_in_a_classifier():
    network = network_of("dense_t_like", dense=True)
    head = network.head.fc.weight.clone()
    with pytest.warns(UserWarning, match="no classifier"):
        load_original_checkpoint(network, state_of("dense_t_like"))
    assert torch.equal(network.head.fc.weight, head)
    assert torch.equal(network.norms[0].weight, state_of("dense_t_like")["norm0.weight"])


def test_own_state_passes_unchanged():
    network = network_of("p_like")
    own = network.state_dict()
    filtered = checkpoint_filter_fn(own, network)
    assert list(filtered) == list(own)
    assert all(filtered[key] is own[key] for key in own)


def test_every_release_value_arrives():
    state = state_of("p_like")
    network = network_of("p_like")
    load_original_checkpoint(network, state)
    used = [v for k, v in state.items() if not k.endswith("relative_position_index")]
    assert len(used) == len(network.state_dict())
    assert sum(v.double().sum() for v in used) == pytest.approx(
        float(sum(v.double().sum() for v in network.state_dict().values()))
    )


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"local_branches": False}, "not in the network"),
        ({"window_size": 5}, r"of another shape \(first: stages.1.blocks.0.op.weight"),
        ({"num_classes": 3}, r"head.fc.weight, got \(10, 128\), expected \(3, 128\)"),
        ({"dims": (16, 32, 64, 96)}, "of another shape"),
        ({"block_pattern": ("DD", "WD", "WD" * 4, "WW"), "depths": (2, 2, 8, 2)}, "missing"),
    ],
)
def test_another_architecture(kwargs, message):
    network = network_of("p_like", **kwargs)
    before = network.stem[0].weight.clone()
    with pytest.raises(ValueError, match=message) as caught:
        load_original_checkpoint(network, state_of("p_like"))
    assert "\n" not in str(caught.value)
    assert torch.equal(network.stem[0].weight, before)


def folded_state_of(name):
    return load_file(FIXTURES / f"{name}.fused_compact.safetensors")


@pytest.mark.parametrize(("name", "input_size"), [("t_like", None), ("p_like", 224), ("p_like", (200, 224))])
def test_folded_logits_of_the_release(name, input_size):
    network = network_of(name, inference_mode=True, input_size=input_size)
    load_original_checkpoint(network, {"model": folded_state_of(name)})
    data = load_file(FIXTURES / f"{name}.io.safetensors")
    with torch.no_grad():
        logits = network(data["x"])
        assert relative_error(logits, data["logits_fused_compact"]) < 1e-5
        # A folded file is the same network as the one it was made from.
        whole = network_of(name)
        load_original_checkpoint(whole, FIXTURES / f"{name}.state.safetensors")
        assert relative_error(logits, whole(data["x"])) < 1e-5


def test_folded_file_through_timm(tmp_path):
    path = tmp_path / "folded.safetensors"
    save_file(folded_state_of("p_like"), path)
    kwargs = arguments_of("p_like") | {"inference_mode": True, "input_size": 224}
    overlay = {"file": str(path), "num_classes": 10}
    network = timm.create_model("wbmm_pico", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs).eval()
    data = load_file(FIXTURES / "p_like.io.safetensors")
    with torch.no_grad():
        assert relative_error(network(data["x"]), data["logits_fused_compact"]) < 1e-5
        with pytest.raises(ValueError, match=r"got a map of \(8, 7\), expected at most \(7, 7\)"):
            network(torch.zeros(1, 3, 225, 224))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("p_like", {}, r"it holds R_fused.*inference_mode=True"),
        ("p_like", {"inference_mode": True}, "side branches.*inference_mode=True and input_size, 224"),
        ("t_like", {}, r"it holds R_fused.*inference_mode=True"),
    ],
)
def test_folded_file_in_another_network(name, kwargs, message):
    network = network_of(name, **kwargs)
    before = network.stem[0].weight.clone()
    with pytest.raises(ValueError, match=message) as caught:
        load_original_checkpoint(network, folded_state_of(name))
    assert "\n" not in str(caught.value)
    assert torch.equal(network.stem[0].weight, before)


def test_file_that_is_not_folded_in_a_folded_network():
    with pytest.raises(ValueError, match=r"made without inference_mode, then call spotlights\.wbmm\.reparameterize"):
        load_original_checkpoint(network_of("t_like", inference_mode=True), state_of("t_like"))


def test_own_folded_state():
    folded = network_of("p_like", inference_mode=True)
    other = network_of("p_like", inference_mode=True)
    with torch.no_grad():
        other.stages[3].blocks[0].op.conv5.weight.fill_(1)
    load_original_checkpoint(other, folded.state_dict())
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in folded.state_dict().items())
    with pytest.raises(ValueError, match=r"inference_mode=True, or call spotlights\.wbmm\.reparameterize"):
        load_original_checkpoint(network_of("p_like"), folded.state_dict())


class Payload:
    def __reduce__(self):
        return print, ("this must not run",)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_truncated_file(tmp_path, suffix):
    path = tmp_path / f"cut{suffix}"
    if suffix == ".pth":
        torch.save(state_of("p_like"), path)
    else:
        save_file(state_of("p_like"), path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=rf"cut\{suffix}: ") as caught:
        load_original_checkpoint(network_of("p_like"), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", pickle.dumps(Payload(), protocol=2)])
def test_not_a_checkpoint(tmp_path, content):
    path = tmp_path / "odd.pth"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"odd\.pth: ") as caught:
        load_original_checkpoint(network_of("p_like"), path)
    assert "\n" not in str(caught.value)


def test_code_is_refused(tmp_path, capsys):
    path = tmp_path / "code.pth"
    torch.save({"model": state_of("p_like"), "extra": Payload()}, path)
    with pytest.raises(ValueError, match=r"could run code .*print") as caught:
        load_original_checkpoint(network_of("p_like"), path)
    assert "\n" not in str(caught.value)
    assert "must not run" not in capsys.readouterr().out
    torch.save([1, 2], path)
    with pytest.raises(ValueError, match="holds a list"):
        load_original_checkpoint(network_of("p_like"), path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_original_checkpoint(network_of("p_like"), tmp_path / "none.pth")
