"""The benchmark: its plain rivals are right, its checks bite, its files and pictures hold what was measured."""

import csv
import math

import pytest
import torch

from spotlights.cli import main
from spotlights.diffusion import NoiseKernel, plain, reference

K = {"mdlm": 0.0, "xdlm": 0.1, "udlm": 1.0}
SMALL = ["--vocab", "40", "--batch", "2", "--length", "6", "--width", "8"]


def draw(k):
    generator = torch.Generator().manual_seed(0)
    kernel = NoiseKernel.mixed(9, 8, k)
    x = torch.randint(8, (2, 40), generator=generator)
    logits = torch.randn(2, 40, 9, generator=generator, dtype=torch.float64)
    return kernel, logits, x, kernel.q_sample(x, 0.4, generator=generator)


@pytest.mark.parametrize("method", K)
def test_plain_losses_follow_the_definition(method):
    kernel, logits, x, z = draw(K[method])
    loss = {
        "mdlm": lambda: plain.mdlm_loss(logits, x, z, 0.4),
        "xdlm": lambda: plain.xdlm_loss(logits, x, z, 0.4, 0.1),
        "udlm": lambda: plain.udlm_loss(logits, x, z, 0.4),
    }[method]()
    torch.testing.assert_close(loss, reference.nelbo(logits, x, z, 0.4, kernel))


@pytest.mark.parametrize("method", K)
def test_plain_posteriors_follow_the_definition(method):
    kernel, logits, _, z = draw(K[method])
    expected = reference.posterior(logits, z, 0.4, 0.3, kernel)
    torch.testing.assert_close(plain.xdlm_posterior(logits, z, 0.4, 0.3, K[method]), expected)


def test_plain_steps_draw_from_their_posterior():
    count, generator = 40_000, torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1, 9, generator=generator)
    for method, token in (("mdlm", 8), ("mdlm", 3), ("xdlm", 8), ("xdlm", 3)):
        z = torch.full((1, count), token)
        many = logits.expand(1, count, 9)
        step = plain.mdlm_step if method == "mdlm" else lambda *rest: plain.xdlm_step(*rest[:4], 0.1, rest[4])
        drawn = torch.bincount(step(many, z, 0.4, 0.1, generator)[0], minlength=9) / count
        expected = reference.posterior(logits, z[:, :1], 0.4, 0.1, NoiseKernel.mixed(9, 8, K[method]))[0, 0]
        assert (drawn - expected).abs().max() < 5 * math.sqrt(0.25 / count)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("rich", reason="needs the text extra")
    out = tmp_path_factory.mktemp("bench") / "out"
    assert main(["xdlm", "bench", *SMALL, "--out", str(out)]) == 0
    return out


def test_every_task_is_measured_for_every_method(folder):
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {(row["task"], row["provider"]) for row in rows}
    forms = [f"{method} {form}" for method in K for form in ("fused", "plain")]
    assert found == {(task, provider) for task in ("loss", "head", "step") for provider in forms}
    assert all(float(row["seconds_q25"]) > 0 and int(row["peak_bytes_profiler"]) > 0 for row in rows)
    assert {row["width"] for row in rows if row["task"] == "head"} == {"8"}


def test_a_second_run_measures_nothing_again(folder, capsys):
    before = (folder / "results.csv").read_bytes()
    assert main(["xdlm", "bench", *SMALL, "--out", str(folder)]) == 0
    assert (folder / "results.csv").read_bytes() == before
    assert "XDLM" in capsys.readouterr().out


def test_pictures_and_page(folder):
    assert {path.name for path in folder.iterdir()} == {"results.csv", "time.png", "memory.png", "report.html"}
    page = (folder / "report.html").read_text()
    assert page.count("<table>") == 3
    assert "one sampler step from logits; vocabulary 40, batch 2, length 6" in page


@pytest.mark.parametrize("name", ["nelbo", "posterior_step"])
def test_a_wrong_result_is_not_timed(monkeypatch, capsys, name):
    bench = pytest.importorskip("spotlights.diffusion.bench", reason="needs the text extra")
    right = getattr(bench, name)
    wrong = {
        "nelbo": lambda *arguments, **options: 1.01 * right(*arguments, **options),
        "posterior_step": lambda logits, *rest, **options: right(1.5 * logits, *rest, **options),
    }[name]
    monkeypatch.setattr(bench, name, wrong)
    task = "loss" if name == "nelbo" else "step"
    assert main(["xdlm", "bench", *SMALL, "--task", task]) == 1
    assert "wrong result: mdlm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--vocab", "2"], "--vocab: got 2, expected at least 3"),
        (["--batch", "0"], "--batch: got 0, expected at least 1"),
        (["--length", "-1"], "--length: got -1, expected at least 1"),
    ],
)
def test_bad_sizes(capsys, options, message):
    pytest.importorskip("rich", reason="needs the text extra")
    assert main(["xdlm", "bench", *options]) == 2
    assert message in capsys.readouterr().err
