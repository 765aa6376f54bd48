"""Runs that were damaged or edited by hand, and figures at the edge: one line, and JSON that any reader takes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from spotlights.cli import main
from spotlights.diffusion.judges import NGramJudge
from spotlights.diffusion.recipes.config import DiffusionConfig
from spotlights.diffusion.recipes.evaluation import NelboEstimate
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import settings_from


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("the cat sat on the mat.\n" * 40)
    options = ["--length", "16", "--hidden-size", "16", "--layers", "1", "--heads", "2", "--steps", "2"]
    options += ["--vocab", "char", "--accelerator", "cpu", "--quiet"]
    assert main(["xdlm", "train", "--data", str(folder / "text.txt"), "--out", str(folder / "run"), *options]) == 0
    return folder / "run"


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def spoil_weights(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: torch.full_like(value, math.nan) for name, value in tensors.items()}, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda model: edit_json(model / "config.json", num_hidden_layers=2), "the weights are of another network"),
        (lambda model: edit_json(model / "config.json", mask_token_id=0), "mask_token_id is "),
        (lambda model: spoil_weights(model / "model.safetensors"), "NaN"),
    ],
)
@pytest.mark.parametrize("command", ["eval", "sample"])
def test_damaged_models_are_one_line(
    command: str,
    damage: Callable[[Path], None],
    message: str,
    run: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(run, tmp_path / "run")
    damage(tmp_path / "run" / "model")
    capfd.readouterr()
    assert main(["xdlm", command, str(tmp_path / "run")]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message in errors[0]


def test_json_of_a_single_sequence_has_no_infinity(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["xdlm", "eval", str(run), "--limit", "1", "--samples", "0", "--json"]) == 0

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    figures = json.loads(capfd.readouterr().out, parse_constant=refuse)
    (row,) = figures["runs"].values()
    assert row["nelbo_low"] is None
    assert row["nelbo_high"] is None
    assert row["nelbo"] > 0


def test_perplexity_beyond_floating_point_is_infinite() -> None:
    assert NelboEstimate(1000.0, 999.0, 1001.0, tokens=1).perplexity == math.inf


def test_judge_of_texts_shorter_than_its_order() -> None:
    judge = NGramJudge(6, 5).fit(torch.tensor([[1, 2]]))
    assert judge.nll(torch.tensor([[1, 2, 3, 4, 1, 2, 3]])).isfinite().all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": True}, "config.yaml: lr: got True, expected float"),
        ({"steps": "5"}, "config.yaml: steps: got '5', expected int or null"),
        ({"length": 8.0}, "config.yaml: length: got 8.0, expected int"),
        ({"speed": 1, 2: 3}, "config.yaml: unknown setting 2, speed"),
    ],
)
def test_settings_edited_by_hand_are_checked(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as caught:
        settings_from(DiffusionConfig, values)
    assert str(caught.value) == message


def test_whole_numbers_and_null_are_good_settings() -> None:
    settings = settings_from(DiffusionConfig, {"lr": 1, "steps": None, "devices": 2})
    assert (settings.lr, settings.steps, settings.devices) == (1, None, 2)
