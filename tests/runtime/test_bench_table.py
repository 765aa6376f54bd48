"""Measured times as CSV: round trip, resume, comparison with an earlier file, and what is refused."""

import subprocess
from pathlib import Path

import pytest
import torch

from spotlights.runtime import bench_table
from spotlights.runtime.bench import Timing, copy_bandwidth, keep_memory_warm, peak_flops
from spotlights.runtime.bench_table import (
    ENVIRONMENT,
    LOW,
    Results,
    by_case,
    case_of,
    compare,
    environment,
    format_table,
    measures,
    peak_bytes,
    read_table,
)
from spotlights.runtime.errors import UserError

MACHINE = dict(zip(ENVIRONMENT, ("CPU, 2 cores", "2.10", "2", "12345e6", "avx512"), strict=True))


def row(batch=1, provider="ours", seconds=0.5, control=0.25, **more):
    timing = measures(Timing((seconds,)))
    return {"dtype": "float32", "batch": batch, "provider": provider, **timing, "control_seconds": control, **more}


def test_measures_are_quantiles():
    columns = measures(Timing((4.0, 1.0, 2.0, 3.0), calls=7, discarded=2))
    assert columns == {
        "seconds_min": 1.0,
        "seconds_q10": pytest.approx(1.3),
        "seconds_q25": 1.75,
        "seconds_q75": 3.25,
        "seconds_median": 2.5,
        "samples": 4,
        "calls": 7,
        "discarded": 2,
    }


def test_round_trip_keeps_values_and_kinds(tmp_path):
    rows = [row(1, seconds=0.1 + 0.2, flops=None, **MACHINE), row(2, "other, 5x5", flops=10**12, **MACHINE)]
    path = tmp_path / "results.csv"
    path.write_text(format_table(rows))
    assert read_table(path) == rows  # "2.10" and "12345e6" stay text


def test_cases_are_the_columns_before_the_provider():
    rows = [row(1), row(1, "other"), row(2)]
    assert case_of(rows[0]) == (("dtype", "float32"), ("batch", 1))
    assert [len(members) for members in by_case(rows).values()] == [2, 1]


def test_results_are_on_disk_after_each_case_and_gone_on_with(tmp_path):
    path = tmp_path / "results.csv"
    results = Results(path, MACHINE)
    results.add([row(1, **MACHINE)])
    assert len(read_table(path)) == 1
    again = Results(path, MACHINE)
    assert again.has(case_of(row(1)))
    assert not again.has(case_of(row(2)))
    again.add([row(2, **MACHINE)])
    assert [entry["batch"] for entry in read_table(path)] == [1, 2]
    assert [entry.name for entry in tmp_path.iterdir()] == ["results.csv"]


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_results_of_another_environment_are_refused(tmp_path, name):
    path = tmp_path / "results.csv"
    Results(path, MACHINE).add([row(1, **MACHINE)])
    with pytest.raises(UserError, match=rf"measured with {name} = .*'other'"):
        Results(path, {**MACHINE, name: "other"})


def test_comparison_goes_by_the_control_kernels_pace():
    then = [row(1, seconds=0.5, control=0.25), row(2, seconds=1.0), row(3)]
    now = [row(1, seconds=1.0, control=0.5), row(2, seconds=1.5), row(4)]
    changes = compare(now, then)
    assert [dict(change.case)["batch"] for change in changes] == [1, 2]
    assert [change.ratio for change in changes] == [1.0, 1.5]
    assert (changes[1].before, changes[1].now) == (1.0, 1.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column provider"),
        ("a,b\n1,2\n", "no column provider"),
        (b"\xff\xfe\x00", "cannot read"),
        (format_table([row(**MACHINE)]).rstrip().rpartition(",")[0] + "\n", "line 2: got another number of fields"),
        (format_table([row(seconds=-1.0, **MACHINE)]), "line 2: got '-1.0' seconds"),
        (format_table([row(**MACHINE)]).replace(",0.25,", ",,"), "line 2"),
    ],
)
def test_bad_tables_are_refused(tmp_path, text, message):
    path = tmp_path / "results.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_table(path)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nothing\.csv: cannot read it: No such file"):
        read_table(tmp_path / "nothing.csv")


def test_peak_bytes_counts_what_is_held_at_once():
    x = torch.ones(1 << 18)  # 1 MiB

    def chain():
        y = x + 1
        for _ in range(5):
            y = y * 2  # two at a time
        return y

    assert peak_bytes(chain) == {"peak_bytes_profiler": pytest.approx(2 << 20, rel=0.01), "peak_bytes_cuda": None}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_bytes_on_cuda():
    x = torch.ones(1 << 20, device="cuda")
    assert peak_bytes(lambda: x + 1, "cuda") == {"peak_bytes_profiler": None, "peak_bytes_cuda": 4 << 20}


def test_environment_names_this_machine():
    found = environment()
    assert tuple(found) == ENVIRONMENT
    assert found["torch"] == torch.__version__
    assert found["threads"] == str(torch.get_num_threads())


def test_commit_is_that_of_the_package_only(tmp_path, monkeypatch):
    from spotlights import __version__

    # An installed copy inside somebody else's repository, untracked there.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(bench_table, "__file__", str(tmp_path / Path(bench_table.__file__).name))
    assert bench_table.commit() == f"v{__version__}"
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "src").mkdir()
    for name in ("bench_table.py", "src/other.py"):
        (tmp_path / name).write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], check=True, capture_output=True, text=True)
    assert bench_table.commit() == head.stdout.strip()
    (tmp_path / "src" / "other.py").write_text("2")
    assert bench_table.commit() == head.stdout.strip() + "+changes"


def test_measured_peaks():
    assert 1e8 < copy_bandwidth(size=1 << 20) < 1e13
    peak = peak_flops()
    assert peak is None or 1e8 < peak < 1e14
    assert isinstance(keep_memory_warm(), bool)


def test_low_quantile_is_a_column():
    assert LOW in measures(Timing((1.0,)))
