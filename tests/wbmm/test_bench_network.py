"""The benchmark of whole networks: the plain one equals ours, what is timed is checked, and the ratios follow."""

import re
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from spotlights.cli import main
from spotlights.runtime.bench_run import RESULTS, WrongResultError
from spotlights.runtime.bench_table import LOW, environment, read_table
from spotlights.runtime.errors import UserError
from spotlights.wbmm import bench_network, bench_network_report, reparameterize
from spotlights.wbmm.backends import cpu
from spotlights.wbmm.bench_network import NetworkCase, entrants, randomise, run_network_bench
from spotlights.wbmm.bench_network_report import PROFILE, case_text, ratios, verdict, write_network_report
from spotlights.wbmm.bench_profile import PARTS, part_of, profile_parts
from spotlights.wbmm.bench_report import baseline_table
from spotlights.wbmm.layers import WBMM2d
from spotlights.wbmm.models import WBMMNet
from spotlights.wbmm.plain_network import PlainBlock, plain_network

SMALL = {"network": "wbmm_atto", "rivals": ("convnext_atto",), "compiled": False, "rounds": 2}
CASES = [NetworkCase("forward", 1, 32), NetworkCase("forward", 3, 32), NetworkCase("train", 3, 32)]
TWIN = "wbmm_atto DW 13x13"


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A whole run over a small network, its parts included."""
    out = tmp_path_factory.mktemp("bench")
    run_network_bench(**SMALL, cases=CASES, profile=True, out=out)
    return out


def network(**options) -> WBMMNet:
    torch.manual_seed(0)
    arguments = {"dims": (8, 16), "block_pattern": ("DWH", "WD"), "num_classes": 10, "hierarchical_windows": (6, 3)}
    made = WBMMNet(**{**arguments, **options})
    randomise(made)
    return made.double()


def difference(result, wanted) -> float:
    return float((result - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    "options",
    [{}, {"local_branches": True, "block_pattern": ("DD", "WW")}, {"twin_kernel_size": 13}, {"window_size": (5, 9)}],
)
def test_plain_equals_ours(options):
    ours = network(**options).eval()
    images = torch.randn(2, 3, 52, 84, dtype=torch.float64)
    with torch.no_grad():
        expected = ours(images)
        assert difference(plain_network(ours)(images), expected) < 1e-10
        # The weights must matter in every part for this to mean something.
        changed = plain_network(ours)
        for part in ("op.weight", "grn.weight", "grn.bias", "gamma", "se.up.weight", "fc2.weight", "out_norm.bias"):
            name, weight = next((n, p) for n, p in changed.named_parameters() if n.endswith(part))
            before = weight.clone()
            weight.mul_(1.1)
            assert difference(changed(images), expected) > 1e-7, name
            weight.copy_(before)


def test_plain_trains_as_ours():
    ours = network(local_branches=True, block_pattern=("DW", "WD"), drop_path_rate=0.2).train()
    plain = plain_network(ours)
    images, targets = torch.randn(4, 3, 64, 48, dtype=torch.float64), torch.arange(4)
    for module in (ours, plain):
        torch.manual_seed(1)
        F.cross_entropy(module(images), targets).backward()
    gradients = [parameter.grad for parameter in ours.parameters()]
    found = [parameter.grad for parameter in plain.parameters()]
    assert len(gradients) == len(found)
    norms = [sorted(float(g.norm()) for g in group) for group in (gradients, found)]
    np.testing.assert_allclose(*norms, rtol=1e-8, atol=1e-12)
    assert difference(next(plain.parameters()).grad, next(ours.parameters()).grad) < 1e-10
    assert difference(plain.stages[0].blocks[1].op.weight.grad, ours.stages[0].blocks[1].op.weight.grad) < 1e-10
    assert difference(plain.stages[1].blocks[0].op_norm.running_var, ours.stages[1].blocks[0].norm.running_var) < 1e-12


def test_plain_is_in_nchw_and_in_the_papers_form():
    plain = plain_network(network().eval().to(memory_format=torch.channels_last))
    layouts = []
    for module in plain.modules():
        if isinstance(module, PlainBlock):
            module.register_forward_hook(lambda module, inputs, output: layouts.append(output.is_contiguous()))
    plain(torch.randn(2, 3, 56, 56, dtype=torch.float64))
    assert layouts == [True] * 5
    assert {module.backend for module in plain.modules() if isinstance(module, WBMM2d)} == {"matmul"}


def test_a_folded_network_has_no_plain_form():
    with pytest.raises(ValueError, match="got a reparameterised one"):
        plain_network(reparameterize(network().eval()))


def test_the_table_holds_every_entrant(folder):
    rows = read_table(folder / RESULTS)
    names = {}
    for entry in rows:
        names.setdefault((entry["task"], entry["batch"]), []).append(entry["provider"])
    forward = [entrant.name for entrant in entrants("wbmm_atto", ["convnext_atto"], train=False, compiled=False)]
    assert forward == [
        "wbmm_atto plain",
        "wbmm_atto unfolded",
        "wbmm_atto folded",
        "wbmm_atto folded, bfloat16",
        f"{TWIN} unfolded",
        f"{TWIN} folded",
        "convnext_atto",
    ]
    train = ["wbmm_atto plain", "wbmm_atto unfolded", f"{TWIN} unfolded", "convnext_atto"]
    assert names == {("forward", 1): forward, ("forward", 3): forward, ("train", 3): train}
    columns = (
        "device, task, size, batch, provider, network, form, compiled, dtype, layout, parameters, peak_bytes_profiler"
    )
    assert ", ".join(rows[0]).startswith(columns)
    by_name = {entry["provider"]: entry for entry in rows if entry["task"] == "train"}
    assert by_name["wbmm_atto plain"]["layout"] == "NCHW"
    assert by_name["wbmm_atto unfolded"]["layout"] == "NHWC"
    ours = timm.create_model("wbmm_atto")
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    assert by_name["wbmm_atto plain"]["parameters"] == by_name["wbmm_atto unfolded"]["parameters"] == parameters
    # All gradients are held at the end of a step.
    assert all(entry["peak_bytes_profiler"] > 4 * entry["parameters"] for entry in by_name.values())


def test_the_profile_holds_every_part(folder):
    rows = read_table(folder / PROFILE)
    assert {(entry["batch"], entry["provider"]) for entry in rows} == {(1, f) for f in ("plain", "unfolded", "folded")}
    for form in ("plain", "unfolded", "folded"):
        # Ours has no norm by itself.
        expected = [part for part in PARTS if form == "plain" or part != "norm"]
        assert [entry["part"] for entry in rows if entry["provider"] == form] == expected


def test_parts_are_told_apart_by_where_they_stand():
    ours, plain = network(local_branches=True), plain_network(network(local_branches=True))
    for module in (ours, plain):
        found = {path: part_of(path, child) for path, child in module.named_modules()}
        assert found["stages.0.blocks.0.op"] == "depthwise 3x3"
        assert found["stages.0.blocks.1.op"] == found["stages.1.blocks.0.op"] == "operator"
        assert found["stages.1.blocks.0.op.bn1"] is None
        assert found["stages.1.downsample"] == found["head"] == "stem, downsampling, head"
        assert found["stages.0"] is None
        assert {part for path, part in found.items() if path.startswith(("stem.", "stages.1.downsample."))} == {None}
        pointwise = [path for path, part in found.items() if part == "pointwise"]
        assert {path.rpartition(".")[2] for path in pointwise} == ({"mlp"} if module is ours else {"fc1", "fc2"})
        norms = [path for path, part in found.items() if part == "norm"]
        assert {path.rpartition(".")[2] for path in norms} == (set() if module is ours else {"op_norm", "out_norm"})
        assert {part for path, part in found.items() if path.endswith(("act", "grn"))} == {"GELU and GRN"}
        assert {part for path, part in found.items() if path.startswith("stages.0.blocks.0.se.")} == {None}


def test_the_profile_is_of_the_steps_that_are_taken(monkeypatch):
    if isinstance(cpu.LIBRARY, str):
        pytest.skip(cpu.LIBRARY)
    calls = []
    monkeypatch.setattr(cpu, "_call_on_maps", lambda name, *rest: calls.append(name))
    module = network().float().eval()
    profile_parts({"ours": module}, {"ours": torch.zeros(1, 3, 32, 32)}, rounds=1)
    blocks = sum(len(stage.blocks) for stage in module.stages)
    for name in ("spotlights_squeeze_excite", "spotlights_scale_add", "spotlights_gelu_response"):
        assert calls.count(name) == 2 * blocks


def test_parts_add_up_to_the_whole():
    module = network().float().eval()
    slow = torch.nn.GELU()

    class Slow(torch.nn.Module):
        def forward(self, x):
            for _ in range(200):
                slow(x)
            return x

    for block in (*module.stages[0].blocks, *module.stages[1].blocks):
        block.mlp.act = Slow()
    images = torch.zeros(2, 3, 96, 96)
    call = torch.nn.Module.__call__
    parts = profile_parts({"slow": module}, {"slow": images}, rounds=3)["slow"]
    total = sum(timing.median for timing in parts.values())
    assert parts["GELU and GRN"].median > 0.7 * total
    assert torch.nn.Module.__call__ is call


def test_a_wrong_form_is_caught(monkeypatch):
    def wrong(entrant, size, train):
        module = build(entrant, size, train)
        if entrant.form == "folded" and not entrant.twin:
            with torch.no_grad():
                module.stages[0].blocks[0].op.weight.mul_(1.01)
        return module

    build = bench_network.build
    monkeypatch.setattr(bench_network, "build", wrong)
    with pytest.raises(WrongResultError, match=r"wbmm_atto folded: logits differ by .* those of wbmm_atto plain"):
        run_network_bench(**SMALL, cases=CASES[:1])


def test_a_wrong_gradient_is_caught(monkeypatch):
    def wrong(entrant, size, train):
        module = build(entrant, size, train)
        if entrant.form == "unfolded" and entrant.base == "wbmm_atto" and not entrant.twin:
            next(module.parameters()).register_hook(lambda gradient: gradient * 1.01)
        return module

    build = bench_network.build
    monkeypatch.setattr(bench_network, "build", wrong)
    with pytest.raises(WrongResultError, match=r"wbmm_atto unfolded: gradient of the first layer differ"):
        run_network_bench(**SMALL, cases=CASES[2:])


def test_a_compiled_network_takes_part(monkeypatch):
    wanted = [entrant for entrant in entrants("wbmm_atto", (), train=False) if entrant.form == "folded"][:2]
    monkeypatch.setattr(bench_network, "entrants", lambda *arguments: wanted)
    rows = run_network_bench(network="wbmm_atto", rivals=(), cases=CASES[:1], rounds=1)
    assert [entry["provider"] for entry in rows][:1] == ["wbmm_atto folded"]
    assert [entry["compiled"] for entry in rows] in ([0, 1], [0])  # without a compiler it is left out


def test_a_stopped_run_goes_on(folder, tmp_path, monkeypatch):
    rows = read_table(folder / RESULTS)
    source = (folder / RESULTS).read_text().splitlines(keepends=True)
    (tmp_path / RESULTS).write_text("".join(source[: 1 + sum(entry["batch"] == 1 for entry in rows)]))
    first = read_table(tmp_path / RESULTS)
    assert {entry["batch"] for entry in first} == {1}
    run_network_bench(**SMALL, cases=[CASES[0], CASES[2]], out=tmp_path)
    now = read_table(tmp_path / RESULTS)
    assert now[: len(first)] == first
    assert [(entry["task"], entry["batch"]) for entry in now[len(first) :]] == [("train", 3)] * 4
    monkeypatch.setattr(torch, "__version__", "0")
    with pytest.raises(UserError, match=r"was measured with machine = .* this run has .*torch 0"):
        run_network_bench(**SMALL, cases=CASES[:1], out=tmp_path)


def row(provider, seconds, *, form="unfolded", network="wbmm_tiny", task="forward", batch=1, peak=100, **more):
    case = {"device": "cpu", "task": task, "size": 224, "batch": batch}
    kind = {"network": network, "form": form, "compiled": 0, "dtype": "float32", "layout": "NHWC", "parameters": 1}
    memory = {"peak_bytes_profiler": peak, "peak_bytes_cuda": None}
    times = {LOW: seconds, "control_seconds": 1.0, "samples": 3}
    return {**case, "provider": provider, **kind, **memory, **more, **times, **environment()}


ROWS = [
    row("plain", 6.0, form="plain"),
    row("unfolded", 3.0),
    row("folded", 2.0, form="folded"),
    row("plain, compiled", 4.0, form="plain", compiled=1),
    row("folded, compiled", 1.0, form="folded", compiled=1),
    row("folded, bfloat16", 1.25, form="folded", dtype="bfloat16"),
    row("twin", 4.5, network="wbmm_tiny DW 13x13"),
    row("twin folded", 3.0, network="wbmm_tiny DW 13x13", form="folded"),
    row("convnext_tiny", 2.5, network="convnext_tiny"),
    row("plain", 9.0, form="plain", batch=16),
    row("folded", 3.0, form="folded", batch=16),
    row("plain", 8.0, form="plain", task="train", batch=16, peak=200),
    row("unfolded", 4.0, task="train", batch=16, peak=150),
    row("twin", 6.0, network="wbmm_tiny DW 13x13", task="train", batch=16, peak=300),
    row("convnext_tiny", 5.0, network="convnext_tiny", task="train", batch=16),
]


def test_ratios_follow_from_the_table():
    found = {(ratio.task, ratio.label): ratio.values for ratio in ratios(ROWS)}
    assert found == {
        ("forward", "folded, against plain"): {1: 3.0, 16: 3.0},
        ("forward", "unfolded, against plain"): {1: 2.0},
        ("forward", "folded and compiled, against plain"): {1: 6.0},
        ("forward", "folded and compiled, against plain compiled"): {1: 4.0},
        ("forward", "folded in bfloat16, against folded in float32"): {1: 1.6},
        ("forward", "folded, against the DW 13x13 twin folded"): {1: 1.5},
        ("forward", "unfolded, against the DW 13x13 twin"): {1: 1.5},
        ("forward", "folded, against convnext_tiny"): {1: 1.25},
        ("train", "ours, against plain"): {16: 2.0},
        ("train", "ours, against the DW 13x13 twin"): {16: 1.5},
        ("train", "memory, ours as a part of plain's"): {16: 0.75},
        ("train", "memory, ours as a part of the twin's"): {16: 0.5},
        ("train", "ours, against convnext_tiny"): {16: 1.25},
    }
    assert verdict(ROWS) == (
        "wbmm_tiny: folded it runs 3.00 (batch 1), 3.00 (batch 16) times as fast as the plain implementation, 1.50 "
        "(batch 1) times as fast as its depthwise 13x13 twin, a training step is 2.00 (batch 16) times as fast as the "
        "plain one, it takes 0.75 (batch 16) of the plain one's memory."
    )
    assert verdict(ROWS[8:9]) == "Too little was measured to compare."


def test_cuda_memory_is_compared_where_it_was_counted():
    cuda = [{**entry, "peak_bytes_cuda": peak} for entry, peak in zip(ROWS[11:13], (1000, 300), strict=True)]
    found = {ratio.label: ratio.values for ratio in ratios(cuda)}
    assert found["memory, ours as a part of plain's"] == {16: 0.3}


def test_baseline_names_what_changed():
    now = [{**entry, LOW: 2 * entry[LOW]} if entry["provider"] == "folded" else entry for entry in ROWS]
    line, table = baseline_table(now, ROWS, case_text)
    assert line == "15 times compared with the baseline, 2 changed by more than 10 %"
    assert table is not None
    assert list(table.columns[1].cells) == ["inference, batch 1", "inference, batch 16"]


def test_folder_holds_tables_pictures_and_page(folder):
    pictures = {"network-forward.png", "network-train.png", "network-profile.png"}
    assert {path.name for path in folder.iterdir()} == {RESULTS, PROFILE, "report.html"} | pictures
    for name in pictures:
        pixels = np.asarray(Image.open(folder / name).convert("L"))
        assert pixels.shape[1] > 900
        assert (pixels < 200).mean() > 0.03
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<picture>") == 3
    assert "times as fast as the plain implementation" in page


def test_pictures_have_a_bar_for_each_row(folder, tmp_path):
    (tmp_path / RESULTS).write_bytes((folder / RESULTS).read_bytes())
    write_network_report(tmp_path / RESULTS)
    assert not (tmp_path / "network-profile.png").exists()
    figures = {name: figure for name, figure, _ in bench_network_report.draw(read_table(folder / RESULTS), [])}
    assert [len(axes.patches) for axes in figures["network-forward"].axes] == [7, 7]
    assert [len(axes.patches) for axes in figures["network-train"].axes] == [4]


def test_command_goes_on_and_prints_ratios(folder, monkeypatch, capsys):
    def small(**options):
        options["cases"] = CASES
        return run_network_bench(**SMALL, **options)

    monkeypatch.setattr(bench_network, "run_network_bench", small)
    assert main(["wbmm", "bench", "--suite", "network", "--profile", "--out", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"folded, against plain +│ +\d+\.\d\d │ +\d+\.\d\d", printed)
    assert re.search(r"memory, ours as a part of plain's +│ +\d+\.\d\d", printed)
    assert "ms an image, batch 1" in printed
    assert f"report: {folder / 'report.html'}" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "bfloat16"], "--dtype: got bfloat16, but --suite network times float32 and bfloat16 side by side"),
        (["--batch", "3"], "--batch: got 3, expected some of 1, 4, 16"),
        (["--batch", "4", "--train"], "--batch: got none that is trained with, expected 16 beside --train"),
        (["--profile", "--device", "cuda"], "--profile: got --device cuda, but parts are timed on the cpu only"),
        (["--suite", "quick", "--profile"], "--profile: is for --suite network, got --suite quick"),
        (["--suite", "quick", "--batch", "1"], "--batch: is for --suite network, got --suite quick"),
        (["--baseline", "{}/nothing.csv"], "nothing.csv: cannot read it"),
        (["--out", "{}"], "is not empty (it holds notes.txt)"),
    ],
)
def test_bad_options_are_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "notes.txt").write_text("hello")
    given = [argument.format(tmp_path) for argument in arguments]
    assert main(["wbmm", "bench", "--suite", "network", *given]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_on_cuda(tmp_path):
    rows = run_network_bench(**SMALL, cases=CASES, device="cuda", out=tmp_path)
    assert all(entry["peak_bytes_cuda"] > 0 for entry in rows)
