"""The release's weights: fetched by timm's own loader from a hub and its cache, and read from local files."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from argparse import Namespace
from copy import deepcopy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import load_file
from timm.models import load_checkpoint
from torch import nn

from spotlights.cli import main
from spotlights.wbmm import reparameterize
from spotlights.wbmm.models import WBMMNet
from spotlights.wbmm.recipes.inference import load_run

FIXTURES = Path(__file__).parent.parent / "fixtures" / "wbmm"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NARROW = {"dims": (8, 16, 24, 32)}
PATTERN = {"p_like": ("DD", "WD", "WD" * 3, "WW"), "t_like": ("DDD", "WDW", "WD" * 9, "WWW")}

# ours -> the release's, in what follows stages.S.blocks.B.
RELEASE_KEYS = [
    (r"^op\.conv([35])\.", r"dwconv.dwconv\1."),
    (r"^op\.", "dwconv."),
    (r"^se\.fc1\.", "se.down."),
    (r"^se\.fc2\.", "se.up."),
    (r"^mlp\.fc1\.", "pwconv1.1."),
    (r"^mlp\.grn\.weight$", "act.1.gamma"),
    (r"^mlp\.grn\.bias$", "act.1.beta"),
    (r"^mlp\.fc2\.", "pwconv2.0."),
    (r"^mlp\.norm\.", "pwconv2.2."),
]


def release_state(network):
    """The state of a network, folded or not, in the release's names and shapes, index buffers included."""
    own, state = network.state_dict(), {}
    folded = "stages.0.blocks.0.gamma" not in own
    for key, value in own.items():
        if match := re.match(r"^stages\.(\d)\.blocks\.(\d+)\.(.*)", key):
            stage, block, rest = match.groups()
            block = f"stages.{stage}.{block}."
            if ".folded" in key:
                state[f"{block}dwconv.bias_fused"] = state.pop(f"{block}dwconv.bias")
                continue
            if value.ndim == 3:
                rest = "dwconv.R_fused" if folded else "dwconv.relative_position_bias_table"
                value = value.flatten(1)
                state[f"{block}dwconv.relative_position_index"] = torch.zeros(49, 49, dtype=torch.int64)
            for pattern, name in RELEASE_KEYS:
                rest = re.sub(pattern, name, rest)
            if rest.startswith("act.1."):
                value = value.view(1, 1, 1, -1)
                if folded:
                    state[f"{block}act.1.beta"] = torch.zeros_like(value)
            elif re.match(r"pwconv\d\.\d\.weight", rest):
                value = value.flatten(1) if value.ndim == 4 else value
                if folded and rest.startswith("pwconv2"):
                    state[f"{block}gamma"] = torch.ones(len(value))
            key = block + rest
        key = re.sub(r"^stem\.", "downsample_layers.0.", key)
        key = re.sub(r"^stages\.(\d)\.downsample\.", r"downsample_layers.\1.", key)
        key = re.sub(r"^norms\.(\d)", r"norm\1", key).replace("head.norm.", "norm.").replace("head.fc.", "head.")
        state[key] = value.detach().clone()
    return state


def seeded(name, **kwargs):
    """A network whose every tensor is random, so that a value in a wrong place shows."""
    torch.manual_seed(0)
    network = timm.create_model(name, **kwargs).eval()
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            nn.init.trunc_normal_(tensor, mean=1.0, std=0.3, a=0.1, b=2) if tensor.ndim == 1 else tensor.mul_(2)
    return network


def save_release(network, path):
    torch.save({"model": release_state(network), "args": Namespace(lr=4e-3, model="release")}, path)
    return path.read_bytes()


def put_in_cache(cache, name, content):
    """Store a file as huggingface_hub does: blob by hash, snapshot link, reference of the branch."""
    folder = cache / "models--wansong-s--WBMM"
    digest = hashlib.sha256(content).hexdigest()
    for part in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "blobs" / digest).write_bytes(content)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT / name).symlink_to(f"../../blobs/{digest}")


def assert_same(network, expected):
    own, other = network.state_dict(), expected.state_dict()
    assert list(own) == list(other)
    assert all(torch.equal(own[name], other[name]) for name in own)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty hub cache of a process that is offline."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub on this machine that serves `files`; with `closed` set nobody listens there any more."""
    files = {}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            content = files.get(self.path.removeprefix("/wansong-s/WBMM/resolve/main/"))
            self.send_response(404 if content is None else 200)
            if content is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            else:
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            return content

        def do_GET(self):
            self.wfile.write(self.do_HEAD() or b"")

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield Namespace(files=files, stop=lambda: (server.shutdown(), server.server_close()))
        server.shutdown()


@pytest.mark.parametrize("kind", ["state", "fused_compact"])
@pytest.mark.parametrize("name", ["p_like", "t_like"])
def test_these_tests_name_tensors_as_the_release_does(name, kind):
    expected = {k: tuple(v.shape) for k, v in load_file(FIXTURES / f"{name}.{kind}.safetensors").items()}
    dims = [expected[f"downsample_layers.{i}.{3 if i == 0 else 0}.bias"][0] for i in range(4)]
    folded = {"inference_mode": True, "input_size": 224} if kind == "fused_compact" else {}
    network = WBMMNet(dims=dims, block_pattern=PATTERN[name], local_branches=name == "p_like", num_classes=10, **folded)
    assert {k: tuple(v.shape) for k, v in release_state(network).items()} == expected


def test_published_width_from_the_cache_of_an_offline_process(tmp_path):
    expected = seeded("wbmm_pico")
    put_in_cache(tmp_path / "hub", "wbmm_p_in1k_224_w7.pth", save_release(expected, tmp_path / "release.pth"))
    code = (
        "import timm, torch\nimport spotlights.wbmm.models\n"
        "network = timm.create_model('wbmm_pico.in1k', pretrained=True).eval()\n"
        "maps = timm.create_model('wbmm_pico', pretrained=True, features_only=True, out_indices=(1, 3)).eval()\n"
        "image = torch.linspace(-2, 2, 3 * 64 * 64).view(1, 3, 64, 64)\n"
        "with torch.inference_mode():\n    torch.save([network(image), *maps(image)], 'outputs.pt')\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True)
    logits, second, last = torch.load(tmp_path / "outputs.pt")
    with torch.inference_mode():
        image = torch.linspace(-2, 2, 3 * 64 * 64).view(1, 3, 64, 64)
        wanted = [expected(image), *expected.forward_intermediates(image, indices=[1, 3], intermediates_only=True)]
    for a, b in zip([logits, second, last], wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-5


@pytest.mark.parametrize("kwargs", [{}, {"input_size": 224}, {"features_only": True}])
def test_inference_mode_folds_the_published_weights(kwargs, cache, tmp_path):
    expected = seeded("wbmm_pico")
    put_in_cache(cache, "wbmm_p_in1k_224_w7.pth", save_release(expected, tmp_path / "release.pth"))
    network = timm.create_model("wbmm_pico", pretrained=True, inference_mode=True, **kwargs).eval()
    assert not any(name.endswith("gamma") for name, _ in network.named_parameters())
    image = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        found, wanted = [network(image)], [expected(image)]
        if "features_only" in kwargs:
            found, wanted = found[0], expected.forward_intermediates(image, intermediates_only=True)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-5


@pytest.mark.parametrize("size", ["t", "s"])
@pytest.mark.parametrize("spelling", ["wbmm_{}_dense_in1k_224_w7.pth", "wbmm_{}_in1k_224_dense_w7.pth"])
def test_either_spelling_of_the_dense_files(spelling, size, cache, tmp_path):
    name = {"t": "wbmm_tiny_dense", "s": "wbmm_small_dense"}[size]
    expected = seeded(name, **NARROW)
    put_in_cache(cache, spelling.format(size), save_release(expected, tmp_path / "release.pth"))
    network = timm.create_model(name, pretrained=True, **NARROW)
    assert_same(network, expected)
    assert network.pretrained_cfg["hf_hub_filename"] == spelling.format(size)
    backbone = timm.create_model(f"{name}.in1k", pretrained=True, features_only=True, **NARROW)
    assert torch.equal(backbone.model.stages[3].blocks[2].mlp.fc2.weight, expected.stages[3].blocks[2].mlp.fc2.weight)
    assert torch.equal(backbone.model.norms[0].weight, torch.ones(8))


@pytest.mark.parametrize("spelling", ["wbmm_t_dense_in1k_224_w7.pth", "wbmm_t_in1k_224_dense_w7.pth"])
def test_download_then_the_cache_without_network(spelling, hub, tmp_path):
    expected = seeded("wbmm_tiny_dense", **NARROW)
    hub.files[spelling] = save_release(expected, tmp_path / "release.pth")
    assert_same(timm.create_model("wbmm_tiny_dense", pretrained=True, **NARROW), expected)
    assert (tmp_path / "hub" / "models--wansong-s--WBMM" / "snapshots" / COMMIT / spelling).is_file()
    hub.stop()
    assert_same(timm.create_model("wbmm_tiny_dense", pretrained=True, **NARROW), expected)


def test_file_renamed_on_the_hub_after_it_was_cached(hub, tmp_path):
    old, new = "wbmm_t_in1k_224_dense_w7.pth", "wbmm_t_dense_in1k_224_w7.pth"
    expected = seeded("wbmm_tiny_dense", **NARROW)
    hub.files[new] = save_release(expected, tmp_path / "release.pth")
    put_in_cache(tmp_path / "hub", old, hub.files[new])
    network = timm.create_model("wbmm_tiny_dense", pretrained=True, **NARROW)
    assert_same(network, expected)
    assert network.pretrained_cfg["hf_hub_filename"] == new


def test_other_classes_channels_and_cache_dir(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    expected = seeded("wbmm_tiny", **NARROW)
    put_in_cache(tmp_path / "own", "wbmm_t_in1k_224_w7.pth", save_release(expected, tmp_path / "release.pth"))
    kwargs = {"num_classes": 5, "in_chans": 1, "cache_dir": str(tmp_path / "own")}
    network = timm.create_model("wbmm_tiny", pretrained=True, **kwargs, **NARROW)
    assert network.head.fc.weight.shape == (5, 32)
    torch.testing.assert_close(network.stem[0].weight, expected.stem[0].weight.sum(1, keepdim=True))
    assert torch.equal(network.head.norm.weight, expected.head.norm.weight)


REMEDY = (
    r"nor is it in the cache \S*hub; remedy: on a connected machine, `hf download wansong-s/WBMM {0}`; then copy that "
    r"machine's hub cache here and set HF_HUB_CACHE to it, or copy the file, run `spotlights wbmm import {0} --model "
    r'{1} --out FILE.safetensors` and pass pretrained_cfg_overlay=dict\(file="FILE.safetensors"\)$'
)


def test_offline_without_the_file(cache):
    first, second = "wbmm_s_dense_in1k_224_w7.pth", "wbmm_s_in1k_224_dense_w7.pth"
    start = (
        rf"^wbmm_small_dense: cannot fetch {first} or {second} of wansong-s/WBMM \(Cannot reach .*offline mode.*\), "
    )
    with pytest.raises(FileNotFoundError, match=start + REMEDY.format(first, "wbmm_small_dense")) as caught:
        timm.create_model("wbmm_small_dense", pretrained=True)
    assert caught.value.__context__ is None


def test_no_network(hub, capfd):
    hub.stop()
    name = "wbmm_t_in1k_224_w7.pth"
    start = rf"^wbmm_tiny: cannot fetch {name} of wansong-s/WBMM \(.*[Cc]onnection refused.*\), "
    with pytest.raises(FileNotFoundError, match=start + REMEDY.format(name, "wbmm_tiny")) as caught:
        timm.create_model("wbmm_tiny.in1k", pretrained=True, **NARROW)
    assert caught.value.__context__ is None
    assert "Retry" not in capfd.readouterr().err


def test_hub_without_the_file(hub):
    with pytest.raises(FileNotFoundError, match=r"wbmm_p_in1k_224_w7\.pth .*\(the repository has no such file\)"):
        timm.create_model("wbmm_pico", pretrained=True, **NARROW)


class Payload:
    def __reduce__(self):
        return print, ("this must not run",)


def damaged(kind, network, path):
    if kind == "code":
        torch.save({"model": release_state(network), "extra": Payload()}, path)
    elif kind == "truncated":
        path.write_bytes(save_release(network, path)[:20_000])
    elif kind == "page":
        path.write_text("<html>sign in</html>")
    else:
        save_release(timm.create_model("wbmm_nano", **NARROW), path)


BAD_FILES = [
    ("code", r"refused, since loading it could run code \(it holds print\)"),
    ("truncated", r"not a whole checkpoint file \("),
    ("page", r"refused, since loading it could run code \(damaged, or more than tensors\)"),
    ("other network", r"checkpoint does not fit this network: \d+ missing \(first: "),
]


@pytest.mark.parametrize(("kind", "message"), BAD_FILES)
def test_bad_file_in_the_cache(kind, message, cache, tmp_path, capsys):
    network = timm.create_model("wbmm_tiny", **NARROW)
    damaged(kind, network, tmp_path / "bad.pth")
    put_in_cache(cache, "wbmm_t_in1k_224_w7.pth", (tmp_path / "bad.pth").read_bytes())
    with pytest.raises(ValueError, match=rf"^wbmm_tiny: .*{message}") as caught:
        timm.create_model("wbmm_tiny", pretrained=True, **NARROW)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert "must not run" not in capsys.readouterr().out


def test_wrong_arguments_are_not_blamed_on_the_file(cache, tmp_path):
    put_in_cache(cache, "wbmm_t_in1k_224_w7.pth", b"")
    with pytest.raises(TypeError, match="windows"):
        timm.create_model("wbmm_tiny", pretrained=True, windows=7)
    with pytest.raises(ValueError, match=r"nowhere\.safetensors"):
        timm.create_model(
            "wbmm_pico", pretrained=True, pretrained_cfg_overlay={"file": str(tmp_path / "nowhere.safetensors")}
        )


def import_file(file, model, out):
    return main(["wbmm", "import", str(file), "--model", model, "--out", str(out)])


@pytest.fixture(scope="module")
def pico(tmp_path_factory):
    """A network of published width, its release file, the imported file and what the command printed."""
    folder = tmp_path_factory.mktemp("import")
    network = seeded("wbmm_pico")
    save_release(network, folder / "release.pth")
    command = [sys.executable, "-m", "spotlights.cli", "wbmm", "import", "release.pth", "--model", "wbmm_pico"]
    printed = subprocess.run(
        [*command, "--out", "new/pico.safetensors"], cwd=folder, capture_output=True, text=True, check=True
    )
    assert printed.stderr == ""
    return Namespace(network=network, folder=folder, out=folder / "new" / "pico.safetensors", printed=printed.stdout)


def test_import_says_what_it_did(pico):
    assert pico.printed.splitlines() == [
        "network              wbmm_pico, 10,659,912 parameters, 1,000 classes, plain",
        "weights              new/pico.safetensors",
        'use                  timm.create_model("wbmm_pico", pretrained=True, '
        'pretrained_cfg_overlay=dict(file="new/pico.safetensors"))',
        "or                   spotlights wbmm predict new/pico.safetensors IMAGE",
    ]
    assert [path.name for path in pico.out.parent.iterdir()] == ["pico.safetensors"]


def test_imported_file_loads_by_each_of_timms_ways(pico):
    file = str(pico.out)
    overlay = {"file": file}
    assert_same(timm.create_model("wbmm_pico", pretrained=True, pretrained_cfg_overlay=overlay), pico.network)
    assert_same(timm.create_model("wbmm_pico", checkpoint_path=file), pico.network)
    network = timm.create_model("wbmm_pico")
    load_checkpoint(network, file)
    assert_same(network, pico.network)
    backbone = timm.create_model("wbmm_pico", pretrained=True, features_only=True, pretrained_cfg_overlay=overlay)
    assert torch.equal(
        backbone.model.stages[3].blocks[1].op.conv5.weight, pico.network.stages[3].blocks[1].op.conv5.weight
    )


def test_predict_and_eval_know_imagenets_classes(pico, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    for name in ("n01440764", "n02124075"):
        (tmp_path / name).mkdir()
        for index in range(2):
            pixels = torch.randint(0, 255, (236, 250, 3), dtype=torch.uint8, generator=generator)
            Image.fromarray(pixels.numpy()).save(tmp_path / name / f"{index}.png")
    assert main(["wbmm", "predict", str(pico.out), str(tmp_path), "--top-k", "1000", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert len(results) == 4
    guesses = {guess["class"]: guess["probability"] for guess in results[0]["predictions"]}
    assert len(guesses) == 1000
    assert {"tench", "Egyptian cat", "crane (n02012849)", "crane (n03126707)"} <= set(guesses)

    mean, std = (torch.tensor(pico.network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    image = torch.from_numpy(np.array(Image.open(results[0]["image"]))).permute(2, 0, 1)
    with torch.inference_mode():
        probabilities = pico.network(((image[:, 6:230, 13:237] / 255 - mean) / std)[None]).softmax(1)[0]
    assert guesses["tench"] == pytest.approx(float(probabilities[0]), rel=1e-3)
    assert guesses["Egyptian cat"] == pytest.approx(float(probabilities[285]), rel=1e-3)

    assert main(["wbmm", "eval", str(pico.out), "--data", str(tmp_path), "--json"]) == 0
    rows = {row["class"]: row["images"] for row in json.loads(capsys.readouterr().out)["classes"]}
    assert (rows["tench"], rows["Egyptian cat"], sum(rows.values())) == (2, 2, 4)
    assert main(["wbmm", "eval", str(pico.out)]) == 2
    assert "no run beside it says which images to use; give --data or --dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"inference_mode": True, "input_size": 224}, "the release's"),
        ({"inference_mode": True, "input_size": 224}, "ours"),
        ({"inference_mode": True}, "ours"),
    ],
)
def test_import_of_a_folded_file(kwargs, names, pico, tmp_path, capsys):
    network = reparameterize(deepcopy(pico.network), input_size=kwargs.get("input_size"))
    state = network.state_dict() if names == "ours" else {"model": release_state(network)}
    torch.save(state, tmp_path / "folded.pth")
    out = tmp_path / "folded.safetensors"
    assert import_file(tmp_path / "folded.pth", "wbmm_pico", out) == 0
    printed = capsys.readouterr().out
    assert "1,000 classes, folded for inference\n" in printed
    arguments = "".join(f", {name}={value}" for name, value in kwargs.items())
    assert f'timm.create_model("wbmm_pico", pretrained=True{arguments}, pretrained_cfg_overlay=dict(' in printed
    overlay = {"file": str(out)}
    again = timm.create_model("wbmm_pico", pretrained=True, pretrained_cfg_overlay=overlay, **kwargs)
    assert_same(again, network)
    assert_same(timm.create_model("wbmm_pico", checkpoint_path=str(out), **kwargs), network)
    assert load_run(out).class_names[285] == "Egyptian cat"
    with pytest.raises(ValueError, match=r"^wbmm_pico: .*create the network with inference_mode=True"):
        timm.create_model("wbmm_pico", pretrained=True, pretrained_cfg_overlay=overlay)


def test_import_of_a_dense_backbone_and_of_other_classes(tmp_path, capsys):
    network = seeded("wbmm_tiny_dense", dense=True, num_classes=0)
    state = {key: value for key, value in release_state(network).items() if not key.startswith("norm.")}
    torch.save(state, tmp_path / "dense.pth")
    out = tmp_path / "dense.safetensors"
    assert import_file(tmp_path / "dense.pth", "wbmm_tiny_dense", out) == 0
    assert "no classifier, norms of a dense backbone, plain" in capsys.readouterr().out
    backbone = timm.create_model(
        "wbmm_tiny_dense", pretrained=True, features_only=True, pretrained_cfg_overlay={"file": str(out)}
    )
    assert torch.equal(backbone.model.norms[2].weight, network.norms[2].weight)
    assert main(["wbmm", "predict", str(out), "x.png"]) == 2
    assert "a backbone without a classifier" in capsys.readouterr().err

    network = seeded("wbmm_pico", num_classes=3)
    save_release(network, tmp_path / "three.pth")
    out = tmp_path / "three.safetensors"
    assert import_file(tmp_path / "three.pth", "wbmm_pico", out) == 0
    assert "num_classes=3, pretrained_cfg_overlay=dict(" in capsys.readouterr().out
    overlay = {"file": str(out), "num_classes": 3}
    again = timm.create_model("wbmm_pico", pretrained=True, num_classes=3, pretrained_cfg_overlay=overlay)
    assert_same(again, network)


@pytest.mark.parametrize(("kind", "message"), [*BAD_FILES, ("missing", "cannot read it: No such file or directory")])
def test_import_of_a_bad_file_is_one_line_and_exit_code_2(kind, message, tmp_path, capsys):
    if kind != "missing":
        damaged(kind, timm.create_model("wbmm_tiny", **NARROW), tmp_path / "bad.pth")
    assert import_file(tmp_path / "bad.pth", "wbmm_tiny", tmp_path / "new" / "out.safetensors") == 2
    printed = capsys.readouterr()
    assert re.fullmatch(rf"spotlights: error: {tmp_path}/bad\.pth: {message}.*\n", printed.err)
    assert printed.out == ""
    assert not (tmp_path / "new").exists()


def test_import_of_an_imported_file(pico, tmp_path, capsys):
    """It would lose its classes' names and its image size."""
    assert import_file(pico.out, "wbmm_pico", tmp_path / "again.safetensors") == 2
    error = capsys.readouterr().err
    assert error.startswith(f"spotlights: error: {pico.out}: it names its network, classes and image size itself; ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "out", "message"),
    [
        ("wbmm_tini", "a.safetensors", "--model: no network is called 'wbmm_tini'; near: "),
        ("resnet18", "a.safetensors", "--model: resnet18 is no WBMM network; expected "),
        ("wbmm_tiny", "a.pth", r"--out: got \S*a.pth, expected a name that ends in .safetensors"),
        ("wbmm_tiny", "old.safetensors", r"--out: \S*old.safetensors exists already; name a new file"),
        ("wbmm_pico", "release.pth/a.safetensors", r"--out: cannot make the folder \S*release.pth: "),
    ],
)
def test_import_with_bad_arguments(model, out, message, pico, tmp_path, capsys):
    (tmp_path / "release.pth").symlink_to(pico.folder / "release.pth")
    (tmp_path / "old.safetensors").write_bytes(b"old")
    assert import_file(tmp_path / "release.pth", model, tmp_path / out) == 2
    assert re.fullmatch(rf"spotlights: error: {message}.*\n", capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.safetensors", "release.pth"]
    assert (tmp_path / "old.safetensors").read_bytes() == b"old"
