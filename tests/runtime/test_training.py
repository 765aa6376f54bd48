"""Training around Lightning: what a run leaves behind, and that a killed run ends as an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from spotlights.runtime import weights
from spotlights.runtime.errors import UserError
from spotlights.runtime.plots import plot_curves
from spotlights.runtime.training import (
    EpochLoader,
    FitResult,
    TrainingConfig,
    fit,
    random_state,
    read_metrics,
    seed_everything,
    set_random_state,
)


class Toy(pl.LightningModule):
    """Draws from every generator in each step, and dies where the environment tells it to."""

    def __init__(self, width: int = 16, *, loss_scale: float = 1.0, rate: float = 1e-2) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3))
        self.loss_scale = loss_scale
        self.rate = rate

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        if os.environ.get("KILL_AT") == f"step {self.current_epoch + 1}.{index}":
            os.kill(os.getpid(), signal.SIGKILL)
        images, targets = batch
        noise = torch.randn_like(images) * np.random.rand() * random.random()  # noqa: NPY002
        loss = F.cross_entropy(self.model(images + 0.1 * noise), targets) * self.loss_scale
        self.log("train_loss", loss, on_step=False, on_epoch=True, batch_size=len(images))
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        images, targets = batch
        self.log("val_loss", F.cross_entropy(self.model(images), targets), batch_size=len(images))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.97**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if os.environ.get("KILL_AT") == f"save {self.current_epoch + 1}":
            os.kill(os.getpid(), signal.SIGKILL)


class Noisy(TensorDataset):
    """Draws where images are loaded: in a worker process, if there is one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        images, targets = super().__getitem__(index)
        return images + 0.1 * torch.randn(8), targets


def train(
    folder: Path, *, resume: bool = False, workers: int = 0, module: Toy | None = None, **settings: Any
) -> FitResult:
    torch.set_num_threads(1)
    seed_everything(3)
    data = TensorDataset(torch.randn(90, 8), torch.randint(3, (90,)))
    loader = EpochLoader(Noisy(*data.tensors), 16, shuffle=True, num_workers=workers)
    config = TrainingConfig(**{"epochs": 4, "ema_decay": 0.9, "accelerator": "cpu", **settings})
    options: dict[str, Any] = {"folder": folder, "config": config, "metadata": {"kind": "toy"}, "resume": resume}
    return fit(module or Toy(), loader, DataLoader(data, 45), **options)


def metrics_without_time(folder: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FitResult]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder)


@pytest.mark.parametrize(("moment", "workers"), [("step 3.2", 1), ("save 3", 0), ("step 1.1", 0)])
def test_killed_run_ends_as_an_uninterrupted_one(moment: str, workers: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    train(whole, workers=workers)
    command = [sys.executable, __file__, str(broken), str(workers)]
    killed = subprocess.run(command, env=os.environ | {"KILL_AT": moment}, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    done = read_metrics(broken) if (broken / "metrics.csv").exists() else []
    assert [row["epoch"] for row in done] == ([] if moment == "step 1.1" else [1, 2])

    result = train(broken, workers=workers, resume=True)

    assert result.last_epoch == 4
    assert metrics_without_time(broken) == metrics_without_time(whole)
    for name in (weights.BEST, weights.LAST):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(path.name for path in broken.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_run_folder_holds_these_files_and_no_others(whole: tuple[Path, FitResult]) -> None:
    folder, result = whole
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors",
        "curves.png",
        "last.ckpt",
        "last.safetensors",
        "metrics.csv",
    ]
    lines = (folder / "metrics.csv").read_text().splitlines()
    assert lines[0] == "epoch,train_loss,val_loss,lr,seconds"
    assert len(lines) == 5
    losses = [row["val_loss"] for row in read_metrics(folder)]
    assert result.best_epoch == 1 + losses.index(min(losses))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_exported_weights_are_the_averaged_ones_that_were_judged(whole: tuple[Path, FitResult]) -> None:
    folder, result = whole
    tensors, metadata = weights.load(folder / weights.BEST)
    assert metadata == {"kind": "toy", "epoch": result.best_epoch}
    network = Toy().model
    network.load_state_dict(tensors)
    seed_everything(3)
    data = TensorDataset(torch.randn(90, 8), torch.randint(3, (90,)))
    with torch.no_grad():
        loss = F.cross_entropy(network.eval()(data.tensors[0]), data.tensors[1])
    assert float(loss) == pytest.approx(result.history[result.best_epoch - 1]["val_loss"], abs=1e-6)
    raw = torch.load(folder / "last.ckpt", weights_only=True)["current_model_state"]["model.0.weight"]
    assert not torch.equal(raw, weights.load(folder / weights.LAST)[0]["0.weight"])


def test_output_is_one_line_an_epoch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, epochs=2)
    printed = capfd.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert "train loss" in lines[0]
    assert "val loss" in lines[0]


def test_finished_run_resumes_to_itself(whole: tuple[Path, FitResult]) -> None:
    folder, result = whole
    before = (folder / "last.ckpt").read_bytes()
    assert train(folder, resume=True) == result
    assert (folder / "last.ckpt").read_bytes() == before


def test_patience_stops_early_and_resuming_does_not_go_on(tmp_path: Path) -> None:
    # Without steps there is no gain after the first epoch; averaged weights equal the first ones.
    module = Toy(rate=0.0, loss_scale=0.0)
    for layer in module.model:
        if isinstance(layer, nn.BatchNorm1d):
            layer.momentum = 0.0
    result = train(tmp_path, epochs=9, patience=2, module=module)
    assert (result.last_epoch, result.stopped_early) == (3, True)
    assert train(tmp_path, epochs=9, patience=2, resume=True).last_epoch == 3


def test_without_validation_the_last_epoch_is_the_best(tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(20, 8), torch.randint(3, (20,)))
    config = TrainingConfig(epochs=2, accelerator="cpu")
    result = fit(Toy(), EpochLoader(data, 10), None, folder=tmp_path, config=config, metadata={}, progress=False)
    assert result.best_epoch == 2
    assert sorted(result.history[0]) == ["epoch", "lr", "seconds", "train_loss"]


def test_loss_that_is_not_finite_ends_the_run_before_anything_is_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the training loss became nan in epoch 1, step 1; try a smaller --lr"):
        train(tmp_path, module=Toy(loss_scale=float("nan")))
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_of_another_network_is_refused(whole: tuple[Path, FitResult], tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes((whole[0] / "last.ckpt").read_bytes())
    with pytest.raises(UserError, match="--resume: the run holds another network"):
        train(tmp_path, epochs=6, resume=True, module=Toy(width=5))


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"PK half a file")
    with pytest.raises(UserError, match=r"last\.ckpt: not a checkpoint of this program"):
        train(tmp_path, resume=True)


def test_refusals_of_lightning_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--accelerator/--devices/--strategy/--precision: ") as caught:
        train(tmp_path, precision="7-bit")
    assert "\n" not in str(caught.value)


def test_folder_that_vanished_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*best\.safetensors"):
        train(tmp_path / "missing")


def test_plain_loaders_are_refused(tmp_path: Path) -> None:
    loader: Any = DataLoader(TensorDataset(torch.zeros(4, 8)))
    with pytest.raises(TypeError, match="got DataLoader, expected EpochLoader"):
        fit(Toy(), loader, None, folder=tmp_path, config=TrainingConfig(1), metadata={})


def test_random_state_covers_every_generator() -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(()))  # noqa: NPY002

    state = random_state()
    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first


@pytest.mark.parametrize("content", [b"", b"not safetensors at all", b"\x02\0\0\0\0\0\0\0{}"])
def test_damaged_weights_are_a_user_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"weights\.safetensors: (cannot read the weights|not weights that)"):
        weights.load(path)


def test_metrics_that_cannot_be_read_are_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics\.csv: cannot read the metrics"):
        read_metrics(tmp_path)


def test_curves_need_no_validation(tmp_path: Path) -> None:
    plot_curves([{"epoch": 1, "train_loss": 2.0, "lr": 0.1}], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000


if __name__ == "__main__":
    train(Path(sys.argv[1]), workers=int(sys.argv[2]))
