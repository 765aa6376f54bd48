"""The commands as a user meets them: what they print, what they leave, and how they fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spotlights.cli import main
from spotlights.runtime.errors import UserError
from spotlights.wbmm.cli.common import needs_vision

SMALL = ["--epochs", "1", "--batch-size", "8", "--accelerator", "cpu", "--image-size", "28"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of eight images, one more that is broken and one of each odd kind."""
    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for name, colour in (("rote Äpfel", 0), ("绿色", 1)):
        (root / name).mkdir()
        for index in range(8):
            pixels = generator.integers(0, 100, (32, 40 + index, 3), dtype=np.uint8)
            pixels[..., colour] += 150
            Image.fromarray(pixels).save(root / name / f"{index}.png")
    first = root / "rote Äpfel"
    Image.open(first / "0.png").convert("CMYK").save(first / "cmyk.jpg")
    Image.open(first / "0.png").convert("L").save(first / "grey.png")
    Image.open(first / "0.png").convert("P").save(first / "palette.gif")
    Image.fromarray(np.full((30, 30), 40000, np.uint16)).save(first / "16.png")
    (first / "broken.png").write_bytes((first / "0.png").read_bytes()[:300])
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "photos"
    arguments = [
        "--data",
        str(photos),
        "--out",
        str(folder),
        "--epochs",
        "4",
        "--batch-size",
        "4",
        "--val-split",
        "0.2",
    ]
    assert main(["wbmm", "train", *arguments, "--accelerator", "cpu", "--image-size", "28", "--lr", "0.005"]) == 0
    return folder


def test_train_prints_progress_and_one_summary(photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["wbmm", "train", "--data", str(photos), "--out", str(out), *SMALL]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert re.fullmatch(rf"{out}: wbmm_atto, [\d,]+ parameters; 18 train, 2 val images of 2 classes", lines[0])
    assert lines[1].startswith("epoch 1/1  train loss ")
    assert [line[:20].strip() for line in lines[2:]] == [
        "epochs",
        "training time",
        "validation accuracy",
        "skipped images",
        "run folder",
    ]
    assert "1 (" in lines[5]
    assert "broken.png: cannot read the image" in lines[5]
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["skipped"][0].startswith(str(photos))


def test_train_without_out_makes_a_folder_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["wbmm", "train", "--limit", "30", "--quiet", *SMALL[:-2]]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("epochs")
    folder = lines[-1].split()[-1]
    assert re.fullmatch(r"runs/wbmm-\d{8}-\d{6}", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert main(["wbmm", "train", "--resume", folder, "--quiet"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"run folder           {folder}"


def test_eval_of_the_runs_own_images(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["wbmm", "eval", str(run), "--json"]) == 0
    figures = json.loads(capfd.readouterr().out)
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert (figures["split"], figures["images"]) == ("val", summary["val_images"])
    assert figures["accuracy"] == pytest.approx(summary["val_accuracy"])
    assert [row["class"] for row in figures["classes"]] == ["rote Äpfel", "绿色"]
    assert len(figures["skipped"]) == 1


def test_eval_of_a_folder_as_a_table(run: Path, photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["wbmm", "eval", str(run), "--data", str(photos)]) == 0
    printed = capfd.readouterr().out
    assert "rote Äpfel" in printed
    assert "绿色" in printed
    assert re.search(r"^images +20 \(all\)$", printed, re.MULTILINE)
    assert re.search(r"^accuracy +\d+\.\d\d %$", printed, re.MULTILINE)
    assert "top-5" not in printed  # of two classes


def test_predict_reports_the_broken_image_after_the_others(
    run: Path, photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["wbmm", "predict", str(run), str(photos), "--top-k", "9", "--json"]) == 2
    printed = capfd.readouterr()
    results = json.loads(printed.out)
    assert len(results) == 21
    assert [Path(result["image"]).name for result in results if "error" in result] == ["broken.png"]
    assert all(len(result["predictions"]) == 2 for result in results if "error" not in result)
    assert re.fullmatch(r"spotlights: error: .*broken\.png: cannot read the image: .*\n", printed.err)
    green = [result["predictions"][0]["class"] for result in results if "绿色" in result["image"]]
    assert green == ["绿色"] * 8


def test_predict_table_of_a_glob(run: Path, photos: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["wbmm", "predict", str(run), str(photos / "绿色" / "[01].png")]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert len(re.findall(r"\d+\.\d\d %", printed.out)) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--epochs", "0"], "--epochs: got 0, expected at least 1"),
        (["train", "--batch-size", "-4"], "--batch-size: got -4, expected at least 2"),
        (["train", "--lr", "0"], "--lr: got 0.0, expected more than 0"),
        (["train", "--lr", "nan"], "--lr: got nan, expected more than 0"),
        (["train", "--val-split", "1"], "--val-split: got 1.0, expected at least 0 and below 1"),
        (["train", "--augment", "x"], "--augment: got x, expected one of auto, none, digits, fashion, photo"),
        (["train", "--precision", "8"], "--precision: got 8, expected one of 32-true, bf16-mixed, 16-mixed"),
        (["train", "--dataset", "imagenet"], "--dataset: got imagenet, expected one of digits, mnist"),
        (["train", "--model", "wbmm_atoo"], "--model: no network is called 'wbmm_atoo'; near: wbmm_atto"),
        (["train", "--model-arg", "size"], "--model-arg: got 'size', expected NAME=VALUE"),
        (["train", "--model-arg", "window_size=0"], "--model: wbmm_atto cannot be made with {'window_size': 0}"),
        (["train", "--data", "nowhere"], "--data: nowhere is missing"),
        (["train", "--accelerator", "abacus", "--limit", "20"], "--accelerator/--devices/--strategy/--precision: "),
        (["train", "--lr", "1e30", "--limit", "200", "--accelerator", "cpu"], "the training loss became "),
        (["train", "--resume", "nowhere"], "nowhere: no such folder"),
        (["train", "--resume", "nowhere", "--lr", "1"], "--resume goes on with the run's own settings; drop --lr"),
        (["eval", "nowhere"], "nowhere: no such run folder or weights file"),
        (["predict", "nowhere", "a.png"], "nowhere: no such run folder or weights file"),
        (["predict", "nowhere", "a.png", "--top-k", "0"], "--top-k: got 0, expected at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["wbmm", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"spotlights: error: {message}")
    assert error.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "RUN", "--split", "test"], "--split: got test, expected one of"),
        (
            ["eval", "RUN", "--dataset", "digits"],
            "the data has a class '0' that the run has not; it knows rote Äpfel, 绿色",
        ),
        (["eval", "RUN", "--batch-size", "0"], "--batch-size: got 0, expected at least 1"),
        (["eval", "RUN", "--device", "abacus"], "--device: abacus: "),
        (["predict", "RUN", "nowhere.png"], "nowhere.png: no such file or folder"),
        (["train", "--out", "RUN"], "already holds a run; go on with it by --resume"),
        (["train", "--out", "RUN/config.yaml/run"], "--out: cannot make the folder"),
    ],
)
def test_bad_use_of_a_run_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in run.iterdir())
    assert main(["wbmm", *(argument.replace("RUN", str(run)) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("spotlights: error: ")
    assert message in error
    assert error.count("\n") == 1
    assert sorted(path.name for path in run.iterdir()) == before


def test_missing_extra_is_one_line_with_its_remedy() -> None:
    with (
        pytest.raises(UserError, match=r"this command needs timm; remedy: pip install 'spotlights\[vision\]'"),
        needs_vision(),
    ):
        raise ModuleNotFoundError("No module named 'timm.data'", name="timm.data")
    with pytest.raises(ModuleNotFoundError), needs_vision():
        raise ModuleNotFoundError("No module named 'spotlights.wrong'", name="spotlights.wrong")


def test_help_imports_none_of_the_extras() -> None:
    code = (
        "import sys\nfrom spotlights.cli import main\n"
        "try:\n    main(['wbmm', 'train', '--help'])\nexcept SystemExit:\n    pass\n"
        "names = ('timm', 'torchvision', 'lightning', 'matplotlib', 'rich', 'mlxtend', 'yaml', 'PIL')\n"
        "print([name for name in names if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "(default 20)" in printed
    assert printed.splitlines()[-1] == "[]"


def test_eval_limit_takes_held_back_images_only(tmp_path, capsys):
    from spotlights.wbmm.recipes.config import load_config
    from spotlights.wbmm.recipes.data import load_run_data

    run = tmp_path / "run"
    assert main(["wbmm", "train", "--epochs", "1", "--limit", "200", "--quiet", "--out", str(run)]) == 0
    held = load_run_data(load_config(run)).splits["val"]
    capsys.readouterr()
    for limit, expected in ((5, 5), (10_000, len(held))):
        assert main(["wbmm", "eval", str(run), "--split", "val", "--limit", str(limit), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["images"] == expected
