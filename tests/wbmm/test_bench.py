"""The benchmark: what it compares, that it checks before it times, what it leaves, and how it fails."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from spotlights.cli import main
from spotlights.runtime.bench_run import RESULTS, WrongResultError
from spotlights.runtime.bench_table import LOW, Results, by_case, environment, format_table, read_table
from spotlights.runtime.errors import UserError
from spotlights.wbmm import bench, bench_run
from spotlights.wbmm.backends import BACKENDS, Call
from spotlights.wbmm.bench import SUITES, Case, run_cases
from spotlights.wbmm.bench_report import baseline_table, draw, ours, ratios, verdict, write_report
from spotlights.wbmm.bench_run import run_bench
from spotlights.wbmm.functional import count_multiply_adds
from spotlights.wbmm.providers import providers_for

CPU = torch.device("cpu")
TINY = [Case(1, 32, 14, 14), Case(2, 32, 14, 14)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Inference and training over two tiny maps."""
    out = tmp_path_factory.mktemp("bench")
    run_bench(TINY, out=out, rounds=1)
    run_bench(TINY, out=out, rounds=1, train=True)
    return out


def few(*names, change=None):
    """A source of the named providers only, the first changed."""

    def source(*arguments):
        found = [provider for provider in providers_for(*arguments)[0] if provider.name in names]
        if change is not None:
            found[0] = change(found[0])
        return found, []

    return source


def test_suites_are_the_grids():
    assert [(case.batch, case.height) for case in SUITES["quick"]] == [(1, 14), (16, 14), (1, 56)]
    assert {case.channels for case in SUITES["quick"]} == {256}
    assert len(SUITES["cpu"]) == 21
    assert Case(1, 64, 224, 224) in SUITES["cpu"]
    assert {(case.channels, case.height) for case in SUITES["paper"]} == {(256, side) for side in (14, 28, 56, 224)}


def test_every_provider_runs_and_agrees_with_its_definition(folder):
    tasks = {}
    for row in read_table(folder / RESULTS):
        tasks.setdefault(row["task"], set()).add(row["provider"])
    call = Call(CPU, torch.float32, (7, 7), None)
    able = [backend.name for backend in BACKENDS if not backend.why_not(call)]
    for name in able:
        assert any(provider.startswith(f"{name} 7x7") for provider in tasks["forward"])
    for layout in ("NHWC", "NCHW"):
        assert ("cpu" not in able) or f"cpu 14x14 {layout}" in tasks["forward"] & tasks["train"]
        assert {f"depthwise {k}x{k} {layout}" for k in (5, 7, 13, 27)} <= tasks["forward"]
        assert {f"depthwise {k}x{k} {layout}" for k in (5, 7, 13)} <= tasks["train"]
        assert f"depthwise 27x27 {layout}" not in tasks["train"]
    both = tasks["forward"] & tasks["train"]
    assert {"matmul 7x7 NCHW", "matmul 14x14+7x7 NCHW", "fft 7x7 NCHW", "attention 14x14 NHWC"} <= both
    assert "matmul 14x14 NCHW uncached" in tasks["forward"] - tasks["train"]


@pytest.mark.parametrize("train", [False, True])
def test_odd_sizes_and_double_precision(train):
    results = Results(None, {})
    run_cases([Case(2, 3, 10, 17)], results, {}, dtype=torch.float64, train=train, rounds=1)
    assert {row["family"] for row in results.rows} >= {"wbmm", "two-table", "depthwise", "fft"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_leaves_out_what_cannot_run(dtype):
    reasons = []

    class Watcher:
        def step(self, *arguments):
            pass

        def case_done(self, case, rows, skipped):
            reasons.extend(skipped)

    results = Results(None, {})
    run_cases([Case(1, 32, 14, 14)], results, {}, dtype=dtype, rounds=1, watcher=Watcher())
    names = {row["provider"] for row in results.rows}
    assert {"matmul 7x7 NCHW", "depthwise 5x5 NCHW"} <= names
    for name in ("fft 7x7 NCHW", "fft 14x14 NCHW"):
        assert name in names or any(reason.startswith(name) for reason in reasons)


@pytest.mark.parametrize("name", ["matmul 7x7 NCHW", "depthwise 5x5 NHWC", "fft 14x14 NCHW", "attention 7x7 NHWC"])
@pytest.mark.parametrize("train", [False, True])
def test_a_wrong_provider_is_caught(name, train):
    def break_it(provider):
        def prepare(*weights, train):
            operator = provider.prepare(*weights, train=train)
            return lambda input: operator(input) * 1.001

        return dataclasses.replace(provider, prepare=prepare)

    results = Results(None, {})
    with pytest.raises(WrongResultError, match=rf"{name}: output differs .* in 64 channels, batch 2, 14x14"):
        run_cases([Case(2, 64, 14, 14)], results, {}, train=train, rounds=1, providers=few(name, change=break_it))
    assert results.rows == []


def test_a_wrong_gradient_and_a_nan_are_caught():
    def wrong_gradient(provider):
        def prepare(weight, *, train):
            operator = provider.prepare(weight, train=train)
            return lambda input: operator(input) + (weight.sum() - weight.sum().detach()) * 0.1

        return dataclasses.replace(provider, prepare=prepare)

    def nan(provider):
        return dataclasses.replace(
            provider, prepare=lambda weight, *, train: lambda input: input + weight.sum() * torch.nan
        )

    for change, message in ((wrong_gradient, "gradient of weight 0 differs"), (nan, "output differs .* nan")):
        source = few("matmul 7x7 NCHW", change=change)
        with pytest.raises(WrongResultError, match=message):
            run_cases([Case(2, 4, 14, 14)], Results(None, {}), {}, train=True, rounds=1, providers=source)


def test_work_and_traffic_are_counted():
    results = Results(None, {})
    names = ("matmul 7x7 NCHW", "depthwise 5x5 NCHW", "attention 7x7 NHWC")
    run_cases([Case(2, 32, 14, 14)], results, {}, rounds=1, providers=few(*names))
    rows = {row["provider"]: row for row in results.rows}
    values = 2 * 32 * 14 * 14
    assert rows[names[0]]["flops"] == 2 * count_multiply_adds((2, 32, 14, 14), (7, 7))
    # Of 25 taps, those beyond the map's border are no work: 5 at most places, 4 and 3 at two on either side.
    assert rows[names[1]]["flops"] == 2 * 2 * 32 * (10 * 5 + 2 * 4 + 2 * 3) ** 2
    assert rows[names[2]]["flops"] == 2 * values * 2 * 49
    assert rows[names[0]]["bytes"] == 4 * (2 * values + 32 * 13 * 13)
    assert rows[names[2]]["bytes"] == 4 * 4 * values
    assert rows[names[0]]["peak_bytes_profiler"] >= 4 * values


def test_a_case_beyond_the_memory_is_left_out(monkeypatch):
    monkeypatch.setattr(bench, "available_bytes", lambda device: 2**20)
    with pytest.raises(UserError, match="nothing was measured"):
        run_bench([Case(1, 32, 28, 28)], rounds=1)


def test_a_stopped_run_goes_on(tmp_path, monkeypatch):
    source = few("matmul 7x7 NCHW", "depthwise 5x5 NCHW")
    fixed = {"peak_flops": None, "copy_bandwidth": 1e9, **environment()}
    path = tmp_path / RESULTS

    class Stop:
        def step(self, *arguments):
            pass

        def case_done(self, *arguments):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_cases(TINY, Results(path, {}), fixed, rounds=1, providers=source, watcher=Stop())
    first = read_table(path)
    assert len(by_case(first)) == 1
    run_cases(TINY, Results(path, environment()), fixed, rounds=1, providers=source)
    assert read_table(path)[:2] == first
    assert len(by_case(read_table(path))) == 2


def test_another_dtype_is_refused(folder):
    with pytest.raises(UserError, match="measured with dtype = 'float32', this run has 'bfloat16'"):
        run_bench(TINY, out=folder, dtype="bfloat16", rounds=1)


def row(provider, family, size, seconds, layout="NHWC", method="cpu", default=0, batch=1):
    case = {"device": "cpu", "dtype": "float32", "task": "forward", "channels": 8, "batch": batch}
    kind = {"family": family, "method": method, "size": size, "layout": layout, "default": default}
    work = {"flops": 4e9, "bytes": 2e9, "peak_flops": 8e9, "copy_bandwidth": 1e10}
    times = {LOW: seconds, "control_seconds": 1.0}
    return {**case, "height": 14, "width": 14, "provider": provider, **kind, **work, **times, **environment()}


ROWS = [
    row("cpu 7x7 NHWC", "wbmm", 7, 1.0, default=1),
    row("cpu 7x7 NCHW", "wbmm", 7, 2.0, "NCHW", default=1),
    row("matmul 7x7 NCHW", "wbmm", 7, 4.0, "NCHW", "matmul"),
    row("depthwise 5x5 NHWC", "depthwise", 5, 0.5, method="depthwise"),
    row("depthwise 13x13 NHWC", "depthwise", 13, 9.0, method="depthwise"),
    row("depthwise 13x13 NCHW", "depthwise", 13, 3.0, "NCHW", "depthwise"),
    row("cpu 7x7 NHWC", "wbmm", 7, 1.0, default=1, batch=4),
    row("depthwise 5x5 NHWC", "depthwise", 5, 2.0, method="depthwise", batch=4),
    row("depthwise 13x13 NHWC", "depthwise", 13, 12.0, method="depthwise", batch=4),
]


def test_ratios_take_the_better_layout_and_the_geometric_mean():
    assert ours(ROWS[:6], 7) is ROWS[0]
    found = {entry.rival: entry for entry in ratios(ROWS)}
    assert found["DW 13x13"].values == (3.0, 12.0)
    assert found["DW 13x13"].mean == pytest.approx(6)
    assert found["DW 5x5"].mean == pytest.approx(1)
    assert found["paper's form"].values == (4.0,)
    assert found["DW 5x5"].worst == "C=8 B=1 14x14"


def test_verdict_is_one_honest_sentence():
    text = verdict(ROWS)
    assert "of its table's size: yes, 7x7 is 6.00 (3.00 to 12.00) times as fast as DW 13x13" in text
    assert "of DW 5x5: at some sizes, 7x7 is 1.00 (0.50 to 2.00) times as fast" in text
    slow = [{**entry, LOW: 1e3} if entry["default"] else entry for entry in ROWS]
    assert "table's size: no, 7x7 is" in verdict(slow)
    assert "Too little was measured" in verdict(ROWS[:2])


def test_baseline_names_changes_above_ten_percent():
    now = [{**entry, LOW: entry[LOW] * (1.5 if entry["size"] == 5 else 1.05)} for entry in ROWS]
    line, table = baseline_table(now, ROWS)
    assert line == "9 times compared with the baseline, 2 changed by more than 10 %"
    assert table is not None
    assert table.row_count == 2
    assert baseline_table(ROWS, ROWS)[1] is None


def test_folder_holds_table_pictures_and_page(folder):
    names = {path.name for path in folder.iterdir()}
    pictures = {f"{task}-{kind}.png" for task in ("forward", "train") for kind in ("size", "speedup", "roofline")}
    assert names == {RESULTS, "report.html"} | pictures
    for name in pictures:
        pixels = np.asarray(Image.open(folder / name).convert("L"))
        assert pixels.shape[1] > 900
        assert (pixels < 200).mean() > 0.003
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count("<picture>") == len(pictures)
    assert "Does it pay on this hardware" in page


def test_pictures_come_from_the_table_and_no_panel_is_empty(folder, tmp_path):
    copy = tmp_path / RESULTS
    copy.write_bytes((folder / RESULTS).read_bytes())
    write_report(copy)
    assert (tmp_path / "forward-size.png").exists()
    for _, figure, alt in draw(read_table(copy)):
        panels = [axes for axes in figure.axes if axes.get_visible()]
        assert panels
        assert all(len(axes.get_lines()) >= 2 for axes in panels)
        assert alt


def test_command_prints_tables_and_verdict(folder, monkeypatch, capsys):
    monkeypatch.setitem(bench_run.SUITES, "quick", tuple(TINY))
    assert main(["wbmm", "bench", "--out", str(folder), "--baseline", str(folder / RESULTS)]) == 0
    printed = capsys.readouterr().out
    assert "Does it pay on this hardware, in inference, over 2 sizes" in printed
    assert re.search(r"compared with the baseline, 0\s+changed", printed)
    assert f"report: {folder / 'report.html'}" in printed


def test_command_names_a_wrong_provider(monkeypatch, capsys):
    def wrong(*arguments, **options):
        raise WrongResultError("fft 7x7 NCHW: output differs")

    monkeypatch.setattr(bench_run, "run_cases", wrong)
    assert main(["wbmm", "bench"]) == 1
    assert capsys.readouterr().err == "spotlights: wrong result: fft 7x7 NCHW: output differs\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "slow"], "invalid choice"),
        (["--dtype", "int8"], "invalid choice"),
        (["--baseline", "{}/nothing.csv"], "nothing.csv: cannot read it"),
        (["--baseline", "{}/full/notes.txt"], "no table of measured times"),
        (["--out", "{}/full"], "is not empty (it holds notes.txt)"),
        (["--out", "{}/full/notes.txt"], "cannot use the folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capsys, arguments, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("hello")
    try:
        code = main(["wbmm", "bench", *(argument.format(tmp_path) for argument in arguments)])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_a_missing_cuda_device_is_one_line(capsys):
    assert main(["wbmm", "bench", "--device", "cuda"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runs_on_cuda(tmp_path):
    rows = run_bench(TINY, device="cuda", out=tmp_path, rounds=2)
    assert all(entry["peak_bytes_cuda"] > 0 for entry in rows)
    assert "matmul 14x14 NCHW" in {entry["provider"] for entry in rows}


def test_an_empty_table_draws_nothing(tmp_path):
    path = tmp_path / RESULTS
    path.write_text(format_table(ROWS).splitlines()[0] + "\n")
    with pytest.raises(UserError, match="holds no times"):
        write_report(path)
