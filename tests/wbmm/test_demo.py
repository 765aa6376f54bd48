"""The demo: what it writes, that it goes on where it stopped, and how its page looks."""

import csv
import json
import re

import pytest

pytest.importorskip("timm", reason="needs the vision extra")

from spotlights.cli import main
from spotlights.wbmm.demo import NETWORKS, TASKS

SMALL = ["wbmm", "demo", "--epochs", "1", "--limit", "60", "--batch-size", "30"]


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main([*SMALL, "--seeds", "2", "--out", str(folder)]) == 0
    return folder


def test_accuracy_table_counts_the_runs(demo):
    table = rows(demo / "accuracy.csv")
    assert [(row["network"], row["seed"]) for row in table] == [(n, s) for n in NETWORKS for s in "01"]
    for row in table:
        run = demo / "runs" / f"{row['network'].lower().replace(' ', '-')}-seed{row['seed']}"
        summary = json.loads((run / "summary.json").read_text())
        assert int(row["test_images"]) == summary["test_images"] == 60
        assert int(row["correct"]) / 60 == pytest.approx(summary["test_accuracy"])
        assert float(row["interval_low"]) <= float(row["mean_accuracy"]) <= float(row["interval_high"])


def test_speed_table_covers_every_task(demo):
    table = rows(demo / "speed.csv")
    assert [(row["task"], row["network"]) for row in table] == [(t, n) for t in TASKS for n in NETWORKS]
    for row in table:
        assert 0 < float(row["min_seconds"]) <= float(row["quartile_seconds"]) <= float(row["median_seconds"])
        rate = int(row["batch"]) / float(row["quartile_seconds"])
        assert float(row["images_per_second"]) == pytest.approx(rate, rel=0.01)


def test_page_names_every_network_and_number(demo):
    page = (demo / "report.html").read_text()
    for row in rows(demo / "accuracy.csv"):
        assert f"{100 * float(row['mean_accuracy']):.2f} %" in page
        assert row["network"] in page
    # Nothing on the page comes from elsewhere.
    assert not re.findall(r"""(?:src|href|srcset)\s*=\s*["'](?!data:|#)""", page)


def test_finished_runs_are_kept(demo, capsys):
    weights = demo / "runs" / "wbmm-7x7-seed0" / "best.safetensors"
    before = weights.stat().st_mtime_ns
    (demo / "runs" / "dw-5x5-seed1" / "summary.json").unlink()
    assert main([*SMALL, "--seeds", "2", "--out", str(demo)]) == 0
    assert weights.stat().st_mtime_ns == before
    assert capsys.readouterr().out.count("finished before") == 2 * len(NETWORKS) - 1


def test_other_settings_are_refused(demo, capsys):
    assert main([*SMALL, "--seeds", "3", "--out", str(demo)]) == 2
    assert "holds a demo with other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--epochs", "0"], "--epochs: got 0, expected at least 1"),
        (["--seeds", "0"], "--seeds: got 0"),
        (["--limit", "3"], "--limit: got 3, expected at least 20"),
    ],
)
def test_bad_settings(options, message, tmp_path, capsys):
    assert main(["wbmm", "demo", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_foreign_folder_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    assert main([*SMALL, "--out", str(tmp_path)]) == 2
    assert "not empty (it holds thesis.txt)" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_page_in_a_browser(demo, browser_evaluate, browser_screenshot, tmp_path, width):
    from PIL import Image

    page = demo / "report.html"
    widths = browser_evaluate(page, "[...page.images].map(image => image.naturalWidth)", width=width)
    assert len(widths) > 12
    assert min(widths) > 0
    overflow = "page.documentElement.scrollWidth - page.documentElement.clientWidth"
    assert browser_evaluate(page, overflow, width=width) <= 0
    with Image.open(browser_screenshot(page, tmp_path / "page.png", width=width, height=3000)) as image:
        # Pictures and text have many colours; a blank page has few.
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 200
