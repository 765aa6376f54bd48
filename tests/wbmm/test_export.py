"""Exported files: plain operators only, and the same outputs as PyTorch on every batch and size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from spotlights.cli import main
from spotlights.wbmm import HierarchicalWBMM2d, WBMM2d
from spotlights.wbmm.export import export_onnx, export_pt2, plain_program, plain_wbmm2d
from spotlights.wbmm.reference import forward as reference

onnx = pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("onnxscript", reason="needs the export extra")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the export extra")
pytest.importorskip("timm", reason="needs the vision extra")

from spotlights.wbmm.models import WBMMNet  # noqa: E402 (needs timm)
from spotlights.wbmm.recipes.exporting import _difference, _quantised, accuracy, named_network, onnx_runner  # noqa: E402


def small_network() -> nn.Module:
    torch.manual_seed(0)
    network = WBMMNet(
        dims=(8, 16), block_pattern=("DH", "W"), window_size=7, hierarchical_windows=(14, 7), num_classes=5, in_chans=1
    )
    for parameter in network.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)  # or layer scale would hide the blocks
    return network.eval()


def run_onnx(path: Path, images: torch.Tensor) -> torch.Tensor:
    return onnx_runner(path)(images)


@pytest.mark.parametrize(("window", "local"), [((7, 7), None), ((3, 5), None), ((14, 14), (7, 7)), ((4, 6), (2, 3))])
@pytest.mark.parametrize("size", [(7, 7), (13, 20), (28, 5)])
@pytest.mark.parametrize("shortcut", [False, True])
def test_plain_form_is_the_operator(window, local, size, shortcut) -> None:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, bias = draw(2, 3, *size), draw(3)
    weight = draw(3, 2 * window[0] - 1, 2 * window[1] - 1)
    local_weight = draw(3, 2 * local[0] - 1, 2 * local[1] - 1) if local else None
    expected = reference(x, weight, bias, shortcut, local_weight)
    torch.testing.assert_close(plain_wbmm2d(x, weight, bias, shortcut, local_weight, ""), expected)


def test_program_has_plain_operators_only_and_leaves_the_model_alone() -> None:
    network = small_network()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    program = plain_program(network, torch.zeros(2, 1, 30, 30))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert targets
    assert all(target.startswith(("aten.", "<built-in")) for target in targets), targets
    assert network.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize("dynamic", [False, True])
def test_onnx_equals_pytorch(dynamic: bool, tmp_path: Path) -> None:
    network, path = small_network(), tmp_path / "network.onnx"
    export_onnx(network, path, image_size=56, channels=1, dynamic=dynamic, metadata={"classes": ["a", "ä"]})
    model = onnx.load(path)
    assert {node.domain for node in model.graph.node} <= {""}
    assert not model.functions
    assert json.loads({entry.key: entry.value for entry in model.metadata_props}["classes"]) == ["a", "ä"]
    for batch in (1, 2, 5):
        for size in [(56, 56), (57, 61), (88, 40), (112, 56)] if dynamic else [(56, 56)]:
            images = torch.randn(batch, 1, *size)
            with torch.inference_mode():
                expected = network(images)
            torch.testing.assert_close(run_onnx(path, images), expected, rtol=1e-4, atol=1e-5)


def test_onnx_in_float16_is_close(tmp_path: Path) -> None:
    network, path = small_network(), tmp_path / "half.onnx"
    export_onnx(network, path, image_size=56, channels=1, half=True)
    kinds = {tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) > 1}
    assert onnx.TensorProto.FLOAT16 in kinds
    assert onnx.TensorProto.FLOAT not in kinds
    images = torch.randn(3, 1, 56, 56)
    with torch.inference_mode():
        expected = network(images)
    found = run_onnx(path, images)
    assert found.dtype == torch.float32
    assert 0 < float((found - expected).abs().max()) < 0.01 * float(expected.abs().max())


def test_archive_equals_pytorch_on_other_sizes(tmp_path: Path) -> None:
    network, path = small_network(), tmp_path / "network.pt2"
    export_pt2(network, path, image_size=56, channels=1, dynamic=True)
    loaded = torch.export.load(path).module()
    for size in [(56, 56), (61, 75), (28, 40), (120, 30)]:  # one window and several, in either direction
        images = torch.randn(3, 1, *size)
        with torch.inference_mode():
            torch.testing.assert_close(loaded(images), network(images), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_compiled_package_of_free_sizes_equals_pytorch(tmp_path: Path) -> None:
    layer, path = WBMM2d(4, 7, bias=True).eval(), tmp_path / "layer.pt2"
    nn.init.normal_(layer.weight)
    # From one full window: no padding, no crop, one window, none of which may be taken for granted.
    export_pt2(layer, path, image_size=7, channels=4, dynamic=True, compiled=True)
    loaded = torch._inductor.aoti_load_package(str(path))
    for size in [(7, 7), (14, 14), (9, 23), (28, 5), (3, 40)]:
        images = torch.randn(2, 4, *size)
        with torch.inference_mode():
            torch.testing.assert_close(loaded(images), layer(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_no_match(wrong: float) -> None:
    def eager(images: torch.Tensor) -> torch.Tensor:
        return torch.ones(len(images), 3)

    assert _difference(lambda images: torch.full((len(images), 3), wrong), eager, 1, [(8, 8)]) == float("inf")


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_compiled_package_equals_pytorch(tmp_path: Path) -> None:
    layer, path = WBMM2d(4, 7, bias=True).eval(), tmp_path / "layer.pt2"
    nn.init.normal_(layer.weight)
    export_pt2(layer, path, image_size=16, channels=4, compiled=True)
    loaded = torch._inductor.aoti_load_package(str(path))
    images = torch.randn(3, 4, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(images), layer(images), rtol=1e-4, atol=1e-5)


def test_layers_export_too(tmp_path: Path) -> None:
    layer = HierarchicalWBMM2d(3, (6, 3)).eval()
    export_onnx(layer, tmp_path / "layer.onnx", image_size=(9, 20))
    images = torch.randn(2, 3, 9, 20)
    with torch.inference_mode():
        torch.testing.assert_close(run_onnx(tmp_path / "layer.onnx", images), layer(images), rtol=1e-4, atol=1e-5)


def test_a_size_the_model_cannot_take_is_a_sentence_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"export: the model cannot be traced on 2x2x8x8: .*expected"):
        export_onnx(WBMM2d(4, 7), tmp_path / "layer.onnx", image_size=8, channels=2)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    options = ["--limit", "600", "--epochs", "4", "--lr", "0.005", "--accelerator", "cpu", "--out", str(folder)]
    assert main(["wbmm", "train", *options]) == 0
    return folder


def test_command_writes_int8_beside_fp32(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "digits.onnx"
    assert main(["wbmm", "export", str(run), "--int8", "--limit", "100", "--out", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    eager, fp32, *int8 = report["forms"]
    assert fp32["difference"] < 1e-4
    assert fp32["accuracy"] == eager["accuracy"] > 0.3
    assert int8[-1]["accuracy"] >= fp32["accuracy"] - 0.01
    assert out.stat().st_size == int8[-1]["bytes"] < fp32["bytes"]
    model = onnx.load(out)
    assert any(tensor.data_type == onnx.TensorProto.INT8 for tensor in model.graph.initializer)
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]


def test_every_way_of_quantising_is_tried(run: Path, tmp_path: Path) -> None:
    from spotlights.wbmm.recipes.data import load_data
    from spotlights.wbmm.recipes.inference import load_run

    trained = load_run(run)
    images = load_data(None, None, image_size=28, default_size=28, channels=1, limit=64).splits["test"]
    first, notes = tmp_path / "first.onnx", []
    export_onnx(trained.model, first, image_size=28, channels=1)
    ways = dict(_quantised(first, tmp_path, trained, images, notes, lambda text: None))
    assert list(ways) == ["static, a scale per channel", "static, a scale per tensor", "weights only"]
    assert notes == []
    exact = accuracy(onnx_runner(first), trained, images)
    assert abs(accuracy(onnx_runner(ways["weights only"]), trained, images) - exact) < 0.1


def test_command_prints_a_table(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "digits.pt2"
    assert main(["wbmm", "export", str(run), "--format", "pt2", "--limit", "50", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "PyTorch, folded" in printed
    assert "torch.export" in printed
    assert str(out) in printed


def test_networks_by_name() -> None:
    trained = named_network("wbmm_atto", pretrained=False, image_size=None)
    assert (trained.channels, trained.image_size, len(trained.class_names)) == (3, 28, 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing/here"], "nothing/here: no such run folder"),
        (["wbmm_tinny"], "no network is called 'wbmm_tinny'; near: wbmm_tiny"),
        (["vit_tiny_patch16_224", "--image-size", "100"], "--image-size: vit_tiny_patch16_224 cannot take 100 x 100"),
        (["wbmm_atto", "--int8"], "--int8: needs images"),
        (["wbmm_atto", "--int8", "--format", "pt2"], "--int8: got it with --format pt2"),
        (["vit_tiny_patch16_224", "--dynamic"], "Input height (237) doesn't match model (224)"),
        (["wbmm_atto", "--compile"], "--compile: got it with --format onnx"),
        (["wbmm_atto", "--out", "missing/folder/x.onnx"], "--out: no such folder: missing/folder"),
        (["wbmm_atto", "--data", "no-images"], "no-images"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["wbmm", "export", *arguments]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.onnx"
    out.write_text("mine")
    assert main(["wbmm", "export", "wbmm_atto", "--out", str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_a_folder_gives_its_whole_name(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.v1").mkdir()
    (tmp_path / "net.v1.onnx").touch()
    for name in ("net.v1", "./net.v1/"):
        assert main(["wbmm", "export", name]) == 2
        assert "--out: net.v1.onnx exists already" in capsys.readouterr().err
