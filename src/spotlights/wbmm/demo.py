"""``spotlights wbmm demo``: one small network trained with WBMM and with depthwise convolutions in its place.

Same data, same recipe, same seeds; only the operator changes. The outcome is a folder of runs, two CSV files, their
pictures and ``report.html``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from spotlights.runtime.bench import Timing, control_kernel, interleave, machine_line
from spotlights.runtime.runs import CONFIG, claim_folder
from spotlights.runtime.training import read_metrics
from spotlights.wbmm.recipes.classification import SUMMARY, train
from spotlights.wbmm.recipes.config import ClassificationConfig, DemoConfig, load_config
from spotlights.wbmm.recipes.data import TensorImages, load_run_data
from spotlights.wbmm.recipes.inference import Evaluation, TrainedModel, evaluate, load_run, normalise

REPORT = "report.html"
SETTINGS = "demo.json"
# Name and depthwise kernel size; None keeps the windowed operator.
NETWORKS: dict[str, int | None] = {"WBMM 7x7": None, "DW 3x3": 3, "DW 5x5": 5, "DW 13x13": 13}
TASKS = {"inference, batch 1": 1, "inference, batch 64": 64, "training step, batch 64": 64}


@dataclass(frozen=True)
class DemoResult:
    """All that the report shows.

    Attributes:
        config: the settings.
        correct: network -> (seeds, N) bool, whether each test image was read correctly.
        histories: network -> the metrics of each epoch, of the first seed.
        seconds: network -> training time of each seed.
        parameters: network -> number of parameters.
        evaluation: of the first network and seed.
        images: the test images (N, 1, H, W), uint8.
        speeds: task -> network -> timing of one call.
        machine: what the speeds were measured on.
    """

    config: DemoConfig
    correct: dict[str, np.ndarray]
    histories: dict[str, list[dict[str, float]]]
    seconds: dict[str, list[float]]
    parameters: dict[str, int]
    evaluation: Evaluation
    images: torch.Tensor
    speeds: dict[str, dict[str, Timing]]
    machine: str


def run_demo(folder: str | Path, config: DemoConfig, *, progress: bool = True) -> Path:
    """Train, evaluate and time every network, and return the path of the report.

    A folder that holds part of the same demo is gone on with: finished runs are kept, a broken one resumes.

    Raises:
        UserError: a setting is out of range, or the folder is unusable or holds something else.
    """
    from spotlights.wbmm.demo_report import write_report

    config.validate()
    folder = Path(folder)
    show: Callable[[str], None] = print if progress else (lambda text: None)
    claim_folder(folder, SETTINGS, asdict(config))
    runs = [(name, seed) for seed in range(config.seeds) for name in NETWORKS]
    for number, (name, seed) in enumerate(runs, start=1):
        show(f"\n[{number}/{len(runs)}] {name}, seed {seed}")
        _train(_run_folder(folder, name, seed), name, seed, config, show, progress)
    show("\nmeasuring accuracy and speed ...")
    result = _measure(folder, config)
    report = write_report(folder, result)
    show(f"\n{report.summary}\nreport: {report.path}")
    return report.path


def _run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / "runs" / f"{name.lower().replace(' ', '-')}-seed{seed}"


def _train(run: Path, name: str, seed: int, config: DemoConfig, show: Callable[[str], None], progress: bool) -> None:
    if (run / SUMMARY).exists():
        show("finished before")
        return
    kernel = NETWORKS[name]
    settings = ClassificationConfig(
        out=str(run),
        model="wbmm_atto",
        model_args={} if kernel is None else {"twin_kernel_size": kernel},
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=config.lr,
        limit=config.limit,
        seed=seed,
        val_split=0.05,
    )
    train(settings, resume=(run / CONFIG).exists(), progress=progress)


def _measure(folder: Path, config: DemoConfig) -> DemoResult:
    test = load_run_data(load_config(_run_folder(folder, next(iter(NETWORKS)), 0))).splits["test"]
    assert isinstance(test, TensorImages)
    correct, histories, seconds, parameters, trained, evaluations = {}, {}, {}, {}, {}, {}
    for name in NETWORKS:
        runs = [_run_folder(folder, name, seed) for seed in range(config.seeds)]
        judged = [evaluate(load_run(run), test) for run in runs]
        summaries = [json.loads((run / SUMMARY).read_text(encoding="utf-8")) for run in runs]
        correct[name] = np.stack([(e.predictions == e.targets).numpy() for e in judged])
        histories[name] = read_metrics(runs[0])
        seconds[name] = [summary["seconds"] for summary in summaries]
        parameters[name] = summaries[0]["parameters"]
        trained[name] = load_run(runs[0])
        evaluations[name] = judged[0]
    return DemoResult(
        config=config,
        correct=correct,
        histories=histories,
        seconds=seconds,
        parameters=parameters,
        evaluation=evaluations[next(iter(NETWORKS))],
        images=test.images,
        speeds=time_networks(trained, test.images),
        machine=machine_line(),
    )


def time_networks(trained: dict[str, TrainedModel], images: torch.Tensor) -> dict[str, dict[str, Timing]]:
    """Time each task of :data:`TASKS` for every network, interleaved.

    Args:
        trained: the networks.
        images: (N, C, H, W), uint8.

    Returns:
        task -> network -> seconds per call.
    """
    speeds = {}
    for task, batch in TASKS.items():
        calls = {}
        for name, network in trained.items():
            inputs = normalise(images[torch.arange(batch) % len(images)], network.mean, network.std)
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            step = _training_step if task.startswith("training") else _inference
            calls[name] = step(network.model, inputs)
        speeds[task] = interleave(calls, rounds=9, control=control_kernel())
    return speeds


def _inference(model: torch.nn.Module, inputs: torch.Tensor) -> Callable[[], object]:
    @torch.inference_mode()
    def call() -> object:
        return model.eval()(inputs)

    return call


def _training_step(model: torch.nn.Module, inputs: torch.Tensor) -> Callable[[], object]:
    targets = torch.arange(len(inputs)) % 10

    def call() -> None:
        model.train().zero_grad()
        F.cross_entropy(model(inputs), targets).backward()

    return call
