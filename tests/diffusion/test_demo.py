"""The demo: what it writes, that it goes on where it stopped, its verdicts, and how its page looks."""

import csv
import json
import math
import re
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import ANY

import pytest
import torch

pytest.importorskip("transformers", reason="needs the text extra")

from spotlights.cli import main
from spotlights.diffusion.demo import METHODS, Outcome, bound_verdict, compare, verdict
from spotlights.diffusion.demo_parts import PARTS, QUICK, Row
from spotlights.diffusion.digits import (
    Digits,
    accuracy,
    frechet_distance,
    frechet_error,
    load_digits,
    pictures,
    quantise,
    train_classifier,
)

COMMAND = ["xdlm", "demo", "--quick", "--seeds", "2", "--workers", "1"]


def rows(folder):
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main([*COMMAND, "--quiet", "--out", str(folder)]) == 0
    return folder


def test_results_hold_every_figure_once(demo):
    found = [(row["part"], row["k"], row["steps"], row["seed"], row["metric"]) for row in rows(demo)]
    assert len(found) == len(set(found))
    for name in PARTS:
        for k in ("0", "0.1", "0.5", "1"):
            assert (name, k, "", "", "nelbo") in found
            for steps in QUICK.steps[name]:
                if name == "digits":
                    assert {(name, k, str(steps), "", metric) for metric in ("fid", "accuracy")} <= set(found)
                else:
                    wanted = {(name, k, str(steps), seed, metric) for seed in "01" for metric in ("nll", "entropy")}
                    assert wanted <= set(found)
    assert ("text", "1", "", "", "bits_per_byte") in found


def test_results_are_numbers_with_a_machine_line(demo):
    for row in rows(demo):
        assert math.isfinite(float(row["value"]))
        assert "torch" in row["machine"]
        assert row["method"] == ("held-back data" if not row["k"] else METHODS[float(row["k"])])


def test_held_back_data_have_the_entropy_of_the_source(demo):
    source = PARTS["hmm"](QUICK)
    held = source.data.test.tokens
    row = next(row for row in rows(demo) if (row["part"], row["k"], row["metric"]) == ("hmm", "", "nll"))
    assert float(row["value"]) == pytest.approx(float(source.likelihood.nll(held).mean()), rel=1e-5)


def test_page_names_every_part_and_holds_nothing_from_elsewhere(demo):
    page = (demo / "report.html").read_text(encoding="utf-8")
    for part in (PARTS[name](QUICK) for name in ("hmm", "brackets")):
        assert part.title in page
        assert (
            part.text(part.data.test.tokens[0]).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in page
        )
    for name in METHODS.values():
        assert name in page
    # A quick run draws no conclusion.
    assert "its figures mean nothing" in page
    assert "shape" not in page
    assert not re.findall(r"""(?:src|href|srcset)\s*=\s*["'](?!data:|#)""", page)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)


def test_pictures_are_written(demo):
    from PIL import Image

    for name in ("nelbo", "digits", *(f"frontier-{part}" for part in PARTS)):
        with Image.open(demo / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 20


def test_finished_models_are_kept_and_a_lost_judgement_is_made_again(demo, capsys):
    run = demo / "runs" / "hmm-k0.5"
    before, judged = (run / "last.ckpt").stat().st_mtime_ns, json.loads((run / "judged.json").read_text())
    (run / "judged.json").unlink()
    assert main([*COMMAND, "--out", str(demo)]) == 0
    said = capsys.readouterr().out
    models = len(METHODS) * len(PARTS)
    assert f"{models - 1} of {models} models were finished before" in said
    assert f"[{models}/{models}] hmm, XDLM, k = 0.5: NELBO " in said
    assert (run / "last.ckpt").stat().st_mtime_ns == before
    again = json.loads((run / "judged.json").read_text())
    assert again["samples"] == judged["samples"]
    figures = [[row for row in stored["rows"] if row["metric"] != "seconds"] for stored in (again, judged)]
    assert [{**row, "value": pytest.approx(row["value"]), "error": ANY} for row in figures[0]] == figures[1]


def test_workers_do_what_one_process_does(demo, tmp_path):
    assert main([*COMMAND[:-2], "--parts", "brackets", "--workers", "2", "--quiet", "--out", str(tmp_path)]) == 0
    for k in ("0", "0.1", "0.5", "1"):
        name = f"runs/brackets-k{k}/judged.json"
        one, two = (json.loads((folder / name).read_text())["rows"] for folder in (demo, tmp_path))
        values = [[row["value"] for row in rows if row["metric"] == "nelbo"] for rows in (one, two)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_an_interrupted_demo_goes_on(tmp_path):
    command = [sys.executable, "-m", "spotlights.cli", *COMMAND[:-2], "--parts", "brackets", "--workers", "2"]
    # Under a parent that ignores SIGINT, as a background job does, the demo would ignore it as well.
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.startswith("[1/4]"):
                break
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert errors.splitlines() == ["stopped; the same command goes on", "spotlights: interrupted"]
    assert not list(tmp_path.glob("report.html"))
    assert main([*command[3:], "--quiet", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").exists()


def test_an_unreadable_judgement_is_named(demo, capsys):
    judged = demo / "runs" / "hmm-k0" / "judged.json"
    content = judged.read_text()
    judged.write_text("{")
    assert main([*COMMAND, "--quiet", "--out", str(demo)]) == 2
    assert "judged.json: unreadable" in capsys.readouterr().err
    judged.write_text(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "0"], "--seeds: got 0, expected at least 1"),
        (["--workers", "0"], "--workers: got 0, expected at least 1"),
        (["--parts", "hmm", "music"], "--parts: got music, expected some of hmm, brackets, text, digits"),
    ],
)
def test_bad_settings(options, message, tmp_path, capsys):
    assert main(["xdlm", "demo", "--out", str(tmp_path / "out"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_settings_are_refused(demo, capsys):
    assert main(["xdlm", "demo", "--out", str(demo)]) == 2
    assert "holds a demo with other settings" in capsys.readouterr().err


def outcome(few, many, *, error=0.01, entropy=1.0, higher_is_better=False, quality="nll"):
    """A part whose k = 0 has 1 everywhere, and whose k > 0 have these figures at 4 and 256 steps, k = 0.5 the best."""
    worse = -0.1 if higher_is_better else 0.1
    found = [Row("x", None, None, None, "entropy", 1.0)]
    for k in METHODS:
        found.append(Row("x", k, None, None, "nelbo", 2 + k, 0.05, 10))
        for steps, value in ((4, few), (256, many)):
            of_k = 1.0 if k == 0 else value if k == 0.5 else value + worse
            for seed in (0, 1):
                found.append(Row("x", k, steps, seed, quality, of_k, error, 10))
                found.append(Row("x", k, steps, seed, "entropy", entropy, None, 10))
    part = SimpleNamespace(name="x", steps=(4, 256), quality=quality, higher_is_better=higher_is_better)
    return Outcome(part, found, {})


@pytest.mark.parametrize(
    ("few", "many", "words"),
    [
        (0.5, 1.5, "in full for k = 0.1, 0.5 and 1"),
        (0.5, 1.001, "in full for k = 0.1 and 1, at few steps alone for k = 0.5"),
        (0.5, 0.6, "at few steps alone for k = 0.1, 0.5 and 1"),
        (1.5, 1.5, "at many steps alone for k = 0.1, 0.5 and 1"),
        (0.999, 1.001, "at many steps alone for k = 0.1 and 1, not shown for k = 0.5"),
    ],
)
def test_verdicts_follow_the_figures(few, many, words):
    found = verdict(outcome(few, many))
    assert f"The paper's shape, ahead of k = 0 at few steps and behind it at many, appears {words}." in found
    place = {0.5: "ahead", 1.5: "behind", 0.999: "level"}[few]
    assert f"At 4 steps the NLL of k = 0 is 1.000; k = 0.1 {'ahead' if few == 0.5 else 'behind'}" in found
    assert f"k = 0.5 {place} ({few - 1:+.3f} ± 0.024)" in found


def test_comparisons_know_their_margin():
    # Two seeds halve the variance; two models double it.
    found = compare(outcome(0.5, 1.0, error=0.03), 4)
    assert {k: comparison.place for k, comparison in found.items()} == dict.fromkeys((0.1, 0.5, 1.0), "ahead")
    assert found[0.5].difference == pytest.approx(-0.5)
    assert found[0.5].margin == pytest.approx(2.394 * 0.03, rel=1e-6)
    assert compare(outcome(0.95, 1.0, error=0.03), 4)[0.5].place == "even"
    assert compare(outcome(1.2, 1.0, higher_is_better=True), 4)[0.5].place == "ahead"
    assert compare(outcome(0.8, 1.0, higher_is_better=True), 4)[0.5].place == "behind"


def test_repetition_is_told():
    found = verdict(outcome(0.5, 1.5, entropy=0.5))
    assert "samples of k = 0.1, 0.5 and 1 repeat themselves, with a token entropy of 0.50 against 1.00" in found
    assert "repeat themselves" not in verdict(outcome(0.5, 1.5))


def test_bounds_are_ranked():
    assert "2.000 (k = 0), 2.100 (k = 0.1), 2.500 (k = 0.5), 3.000 (k = 1): a gap of 1.000 ± 0.139." in bound_verdict(
        outcome(1, 1)
    )


def test_digits_keep_their_classes_and_levels():
    train, test = load_digits()
    assert train.tokens.shape == (4000, 64)
    assert test.tokens.shape == (1000, 64)
    assert train.labels.bincount().tolist() == [400] * 10
    assert test.labels.bincount().tolist() == [100] * 10
    assert train.tokens.unique().tolist() == [0, 1, 2, 3, 4]
    few, fewer = load_digits(100)
    assert (len(few.labels), len(fewer.labels)) == (100, 20)
    image = torch.zeros(1, 28, 28)
    image[0, 2:5, 5:8] = 255
    assert quantise(image)[0].nonzero().flatten().tolist() == [1]
    assert pictures(quantise(image))[0, 0].tolist() == [0, 252, 0, 0, 0, 0, 0, 0]


def test_the_classifier_reads_digits():
    train, test = load_digits()
    state = torch.get_rng_state()
    judge = train_classifier(train, epochs=3)
    assert torch.equal(torch.get_rng_state(), state)
    right = accuracy(judge, test)
    assert float(right.double().mean()) > 0.88
    shuffled = Digits(test.tokens, test.labels.roll(100))
    assert float(accuracy(judge, shuffled).double().mean()) < 0.1


def test_frechet_distance_of_normal_features():
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(20_000, 3, dtype=torch.float64, generator=generator)
    mixing = torch.tensor([[1.0, 0.5, 0.0], [0.0, 2.0, 0.3], [0.0, 0.0, 0.7]], dtype=torch.float64)
    other = draws @ mixing + torch.tensor([1.0, 0.0, -2.0])
    covariance, product = mixing.T @ mixing, torch.linalg.eigvals(mixing.T @ mixing).real
    expected = 5 + 3 + float(covariance.trace()) - 2 * float(product.sqrt().sum())
    assert frechet_distance(draws, other) == pytest.approx(expected, rel=0.03)
    assert frechet_distance(draws, draws) == pytest.approx(0, abs=1e-9)
    # Means of n draws move by 1 / sqrt(n): the distance of a shifted set does, by about twice the shift.
    shifted = draws[:400] + torch.tensor([3.0, 0.0, 0.0])
    assert frechet_error(shifted, draws) == pytest.approx(2 * 3 / 20, rel=0.4)
    with pytest.raises(ValueError, match="first, second: got shapes"):
        frechet_distance(draws[:1], draws)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 400])
def test_page_in_a_browser(demo, browser_evaluate, browser_screenshot, tmp_path, width):
    from PIL import Image

    page = demo / "report.html"
    widths = browser_evaluate(page, "[...page.images].map(image => image.naturalWidth)", width=width)
    assert len(widths) == 6
    assert min(widths) > 0
    overflow = "page.documentElement.scrollWidth - page.documentElement.clientWidth"
    assert browser_evaluate(page, overflow, width=width) <= 0
    with Image.open(browser_screenshot(page, tmp_path / "page.png", width=width, height=3000)) as image:
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 24)) > 200
