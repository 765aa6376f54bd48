"""Training, loading, evaluating and predicting, on a few of the embedded digits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

from spotlights.runtime import weights
from spotlights.runtime.errors import UserError
from spotlights.runtime.training import read_metrics
from spotlights.wbmm.recipes.classification import RunSummary, train
from spotlights.wbmm.recipes.config import ClassificationConfig, load_config
from spotlights.wbmm.recipes.data import ImageData, TensorImages, load_run_data
from spotlights.wbmm.recipes.inference import Evaluation, TrainedModel, evaluate, load_run, match_classes, predict
from spotlights.wbmm.recipes.networks import create_network
from spotlights.wbmm.recipes.plots import plot_confusion

SETTINGS = {"limit": 100, "epochs": 2, "batch_size": 32, "lr": 5e-3, "accelerator": "cpu"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSummary]:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return folder, train(ClassificationConfig(out=str(folder), **SETTINGS), progress=False)  # type: ignore[arg-type]


def test_run_folder_says_everything(run: tuple[Path, RunSummary]) -> None:
    folder, summary = run
    assert {path.name for path in folder.iterdir()} == {
        "best.safetensors",
        "config.yaml",
        "confusion.png",
        "curves.png",
        "last.ckpt",
        "last.safetensors",
        "metrics.csv",
        "summary.json",
    }
    assert json.loads((folder / "summary.json").read_text())["test_accuracy"] == summary.test_accuracy
    assert (summary.train_images, summary.val_images, summary.test_images) == (90, 10, 100)
    assert (summary.classes, summary.epochs, summary.skipped) == (10, 2, [])
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["lr"], config["model"], config["resolved"]["augment"]) == (5e-3, "wbmm_atto", "digits")
    _, metadata = weights.load(folder / "best.safetensors")
    assert metadata["class_names"] == list("0123456789")
    assert (metadata["channels"], metadata["image_size"], metadata["model_args"]) == (1, 28, {})
    assert summary.val_accuracy == read_metrics(folder)[summary.best_epoch - 1]["val_accuracy"]


def test_loaded_run_reproduces_its_summary(run: tuple[Path, RunSummary]) -> None:
    folder, summary = run
    trained = load_run(folder)
    assert not trained.model.training
    data = load_run_data(load_config(folder))
    assert evaluate(trained, data.splits["test"]).accuracy == summary.test_accuracy
    assert evaluate(trained, data.splits["val"]).accuracy == pytest.approx(summary.val_accuracy)
    assert sum(parameter.numel() for parameter in trained.model.parameters()) == summary.parameters
    by_file = load_run(folder / "best.safetensors")
    images = torch.randint(256, (2, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(trained.probabilities(images), by_file.probabilities(images))
    assert trained.probabilities(images).sum(1).tolist() == pytest.approx([1, 1])


def test_prediction_of_files_equals_that_of_tensors(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    trained = load_run(run[0])
    images = load_run_data(load_config(run[0])).splits["test"]
    assert isinstance(images, TensorImages)
    paths = [tmp_path / f"{index}.png" for index in range(3)]
    for path, pixels in zip(paths, images.images, strict=False):
        Image.fromarray(pixels[0].numpy()).save(path)
    paths.insert(1, tmp_path / "missing.png")
    results = predict(trained, paths, top_k=2, batch_size=2)
    assert [result["image"] for result in results] == [str(path) for path in paths]
    assert results[1] == {"image": str(paths[1]), "error": f"{paths[1]}: cannot read the image: no such file"}
    best = trained.probabilities(images.images[:3]).topk(2, dim=1)
    for row, result in enumerate([results[0], *results[2:]]):
        assert [guess["class"] for guess in result["predictions"]] == [str(int(k)) for k in best.indices[row]]
        found = [guess["probability"] for guess in result["predictions"]]
        assert found == pytest.approx(best.values[row].tolist(), abs=1e-5)


def test_training_is_repeatable(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    train(load_into(run[0], tmp_path / "again"), progress=False)
    assert (tmp_path / "again" / "best.safetensors").read_bytes() == (run[0] / "best.safetensors").read_bytes()


def load_into(folder: Path, out: Path) -> ClassificationConfig:
    config = load_config(folder)
    config.out = str(out)
    return config


def test_resume_of_other_settings_or_data_is_refused(run: tuple[Path, RunSummary]) -> None:
    config = load_config(run[0])
    config.model = "wbmm_nano"
    with pytest.raises(UserError, match="--resume: the run was started with --model wbmm_atto, not wbmm_nano"):
        train(config, resume=True, progress=False)
    saved = yaml.safe_load((run[0] / "config.yaml").read_text())
    other = {**saved, "resolved": {**saved["resolved"], "class_names": ["cat", "dog"]}}
    try:
        (run[0] / "config.yaml").write_text(yaml.safe_dump(other))
        with pytest.raises(UserError, match="--resume: the data has other classes than when the run was started"):
            train(load_config(run[0]), resume=True, progress=False)
    finally:
        (run[0] / "config.yaml").write_text(yaml.safe_dump(saved, sort_keys=False))


@pytest.mark.parametrize(("name", "value"), [("mixup", 0.4), ("cutmix", 1.0), ("augment", "photo"), ("val_split", 0.0)])
def test_options_train(name: str, value: object, tmp_path: Path) -> None:
    settings = {**SETTINGS, "epochs": 1, "limit": 40, "batch_size": 15, "out": str(tmp_path / "run"), name: value}
    summary = train(ClassificationConfig(**settings), progress=False)  # type: ignore[arg-type]
    assert summary.best_epoch == 1
    assert (summary.val_accuracy is None) == (name == "val_split")
    assert summary.test_accuracy is not None


def test_photographs_train_from_files(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for name, colour in (("red", 0), ("blue", 2)):
        (tmp_path / "data" / name).mkdir(parents=True)
        for index in range(8):
            pixels = generator.integers(0, 100, (70 + index, 90, 3), dtype=np.uint8)
            pixels[..., colour] += 150
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{index}.png")
    settings = {**SETTINGS, "epochs": 3, "batch_size": 4, "val_split": 0.25, "image_size": 28}
    config = ClassificationConfig(data=str(tmp_path / "data"), out=str(tmp_path / "run"), **settings)  # type: ignore[arg-type]
    summary = train(config, progress=False)
    assert summary.val_accuracy == 1.0
    assert (summary.train_images, summary.val_images, summary.test_images) == (12, 4, 0)
    assert [guess["class"] for result in predict(load_run(tmp_path / "run"), sorted((tmp_path / "data").rglob("*.png")))
            for guess in result["predictions"][:1]] == ["blue"] * 8 + ["red"] * 8  # fmt: skip


def test_weights_that_do_not_fit_are_refused(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    tensors, metadata = weights.load(run[0] / "best.safetensors")
    other = create_network("wbmm_atto", {"twin_kernel_size": 5}, channels=1, classes=10, image_size=28)
    (tmp_path / "best.safetensors").write_bytes(weights.dump(other, metadata))
    with pytest.raises(UserError, match="the weights are of another network than wbmm_atto"):
        load_run(tmp_path)
    save_file(tensors, tmp_path / "best.safetensors")
    with pytest.raises(UserError, match="not weights that a training of this program wrote"):
        load_run(tmp_path)
    (tmp_path / "best.safetensors").write_bytes(weights.dump(other, {"kind": "poems"}))
    with pytest.raises(UserError, match="weights of another recipe"):
        load_run(tmp_path)


def test_networks_that_cannot_be_made_are_user_errors() -> None:
    for name, options, size, message in [
        ("wbmm_atoo", {}, 28, "no network is called 'wbmm_atoo'; near: wbmm_atto"),
        ("wbmm_atto", {"colour": 3}, 28, "wbmm_atto cannot be made with"),
        ("test_convnext", {}, 28, "--image-size: test_convnext cannot take 28 x 28 images"),
    ]:
        with pytest.raises(UserError, match=message):
            create_network(name, options, channels=1, classes=3, image_size=size)  # type: ignore[arg-type]


def test_evaluation_figures() -> None:
    probabilities = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1], [0.1, 0.9, 0.0]])
    result = Evaluation(probabilities, torch.tensor([0, 1, 1, 1]), ["a", "b", "c"])
    assert result.accuracy == 0.75
    assert result.top5 == 1.0
    assert result.confusion.tolist() == [[1, 0, 0], [1, 2, 0], [0, 0, 0]]
    a, b, c = result.per_class()
    assert a == {"class": "a", "images": 1, "precision": 0.5, "recall": 1.0, "f1": pytest.approx(2 / 3)}
    assert (b["precision"], b["recall"], b["f1"]) == (1.0, pytest.approx(2 / 3), pytest.approx(0.8))
    assert (c["images"], c["precision"], c["recall"], c["f1"]) == (0, None, None, None)


def test_top5_counts_the_five_best() -> None:
    probabilities = torch.arange(8.0).expand(8, 8)
    assert Evaluation(probabilities, torch.arange(8), list("abcdefgh")).top5 == 5 / 8


def test_classes_are_matched_by_name() -> None:
    trained = TrainedModel(torch.nn.Identity(), ["a", "b", "c"], 1, 8, (0.0,), (1.0,))
    images = TensorImages(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1]))
    data = ImageData({"all": images}, ["c", "a"], 1, 8, "none")
    match_classes(data, trained)
    assert images.targets.tolist() == [2, 0, 0]
    with pytest.raises(UserError, match="the data has a class 'dog' that the run has not; it knows a, b, c"):
        match_classes(ImageData({}, ["dog"], 1, 8, "none"), trained)


@pytest.mark.parametrize("count", [2, 12, 60, 150])
def test_confusion_is_drawn_for_any_names(count: int, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    names = [f"$x_{index}$ Äpfel 绿色 {'long' * 9}" for index in range(count)]
    plot_confusion(np.eye(count, dtype=np.int64) * 1234, names, tmp_path / "confusion.png", title="50 %")
    with Image.open(tmp_path / "confusion.png") as image:
        assert max(image.size) < 3000
    assert [str(warning.message) for warning in recwarn] == []


def test_loading_a_run_needs_no_training_library(run: tuple[Path, RunSummary]) -> None:
    code = "import sys; from spotlights.wbmm.recipes.inference import load_run; load_run(sys.argv[1]); "
    code += "print([name for name in ('lightning', 'torchmetrics', 'matplotlib') if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code, str(run[0])], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
