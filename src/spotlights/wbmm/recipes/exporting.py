"""Export of image classifiers: the file, checked against PyTorch, with its size, latency and accuracy beside it."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spotlights.runtime.bench import interleave
from spotlights.runtime.errors import UserError, first_line
from spotlights.runtime.runs import replacing
from spotlights.wbmm.export import INPUT, export_onnx, export_pt2
from spotlights.wbmm.recipes.data import ImageSet, make_loader
from spotlights.wbmm.recipes.inference import TrainedModel, normalise
from spotlights.wbmm.recipes.networks import create_network, default_image_size
from spotlights.wbmm.reparam import reparameterize

Runner = Callable[[Tensor], Tensor]
TOLERANCE = 1e-4  # of the largest output, float32
MOST_LOSS = 0.01  # of accuracy, that INT8 may cost before the next way of quantising is tried
CALIBRATION = 128  # images


@dataclass
class Form:
    """One form of the network in the report.

    Attributes:
        name: what it is.
        bytes: size of its file, None for the network in memory.
        milliseconds: of one image, the lower quartile of interleaved rounds.
        difference: the largest from PyTorch's outputs, over the largest of these.
        accuracy: on the images given, or None.
    """

    name: str
    bytes: int | None
    milliseconds: float
    difference: float
    accuracy: float | None


@dataclass
class Exported:
    """What :func:`export_network` did: the file, its forms beside PyTorch's, and remarks."""

    path: Path
    forms: list[Form]
    notes: list[str]


def named_network(name: str, *, pretrained: bool, image_size: int | None) -> TrainedModel:
    """Return a network by its timm name, with published or random weights.

    Raises:
        UserError: an unknown name, weights that cannot be had, or images too small for it.
    """
    import timm

    size = image_size or default_image_size(name)
    cfg: Any = timm.get_pretrained_cfg(name)
    channels = cfg.input_size[0] if cfg is not None else 3
    classes = (cfg.num_classes if cfg is not None else 0) or 1000
    model = create_network(name, {}, channels=channels, classes=classes, image_size=size)
    if pretrained:
        try:
            model = timm.create_model(name, pretrained=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--pretrained: {name}: {first_line(error)}") from error
    mean, std = (cfg.mean, cfg.std) if cfg is not None else ((0.5,) * channels,) * 2
    names = [str(label) for label in range(classes)]
    return TrainedModel(model.eval(), names, channels, size, tuple(mean), tuple(std), {"model": name})


def export_network(
    trained: TrainedModel,
    out: str | Path,
    *,
    format: str = "onnx",
    dynamic: bool = False,
    half: bool = False,
    int8: bool = False,
    compiled: bool = False,
    images: ImageSet | None = None,
    calibration: ImageSet | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a network as a file, run that file, and compare it with PyTorch.

    Args:
        trained: the network, on the CPU. It is not changed.
        out: the file, written whole or not at all.
        format: ``onnx`` or ``pt2``.
        dynamic: leave height and width free; the batch always is.
        half: float16 inside.
        int8: INT8 by static calibration; where that costs more than 1 % of accuracy, by one scale a tensor, then by
            weights alone.
        compiled: ``pt2`` compiled ahead of time.
        images: labelled by the network's classes, for accuracy.
        calibration: for ``int8``.
        note: called with a line about each step.

    Raises:
        UserError: the network cannot be exported so, or the file's outputs differ from PyTorch's.
    """
    out = Path(out)
    size, channels = trained.image_size, trained.channels
    eager = reparameterize(_copy(trained))
    runners: dict[str, Runner] = {"PyTorch, folded": torch.inference_mode()(eager)}
    metadata = {
        "classes": trained.class_names,
        "image_size": size,
        "mean": list(trained.mean),
        "std": list(trained.std),
    }
    notes: list[str] = []
    files: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = Path(folder) / f"network.{format}"
        name = {"onnx": "ONNX", "pt2": "AOTInductor" if compiled else "torch.export"}[format] + (
            ", FP16" if half else ""
        )
        note(f"exporting as {name}")
        options: dict[str, Any] = {"image_size": size, "channels": channels, "dynamic": dynamic, "half": half}
        try:
            if format == "onnx":
                export_onnx(trained.model, first, metadata=metadata, **options)
            else:
                export_pt2(trained.model, first, compiled=compiled, **options)
        except ValueError as error:
            raise UserError(str(error)) from error
        except RuntimeError as error:  # of a converter or a compiler
            raise UserError(f"{name}: cannot be written: {first_line(error)}") from error
        files[name] = first
        runners[name] = onnx_runner(first) if format == "onnx" else _pt2_runner(first, compiled)
        note("comparing with PyTorch")
        try:
            difference = _difference(runners[name], eager, channels, _sizes(size, dynamic))
        except Exception as error:  # ONNX Runtime's own errors share no other base class
            raise UserError(f"{name}: the file does not run: {first_line(error)}") from error
        if math.isinf(difference):
            raise UserError(f"{name}: outputs are not finite" + ("; float16 is too small for this network" * half))
        if not half and difference > TOLERANCE:
            raise UserError(f"{name}: the outputs differ from PyTorch's by {difference:.1e} of the largest")
        differences = {"PyTorch, folded": 0.0, name: difference}
        accuracies: dict[str, float] = {}
        if images is not None:
            note(f"classifying {len(images.targets):,} images")
            accuracies = {which: accuracy(runner, trained, images) for which, runner in runners.items()}
        chosen = name
        if int8:
            if images is None or calibration is None:
                raise UserError("--int8: needs images to calibrate and judge it by; give a run, --data or --dataset")
            for how, path in _quantised(first, Path(folder), trained, calibration, notes, note):
                chosen = f"ONNX, INT8 {how}"
                runners[chosen], files[chosen] = onnx_runner(path), path
                accuracies[chosen] = accuracy(runners[chosen], trained, images)
                lost = accuracies[name] - accuracies[chosen]
                if lost <= MOST_LOSS:
                    break
                notes.append(f"INT8 {how} loses {100 * lost:.2f} % of accuracy")
            else:
                raise UserError("--int8: every way of quantising this network failed: " + "; ".join(notes))
            differences |= {
                which: _difference(runners[which], eager, channels, [(size, size)]) for which in files if which != name
            }
        note("timing")
        one = torch.zeros(1, channels, size, size).contiguous(memory_format=torch.channels_last)
        timings = interleave(
            {which: partial(runner, one) for which, runner in runners.items()}, rounds=20, max_seconds=10
        )
        forms = [
            Form(
                which,
                files[which].stat().st_size if which in files else None,
                1000 * timings[which].quantile(0.25),
                differences[which],
                accuracies.get(which),
            )
            for which in runners
        ]
        with replacing(out) as temporary:
            shutil.copyfile(files[chosen], temporary)
    return Exported(out, forms, notes)


def _copy(trained: TrainedModel) -> torch.nn.Module:
    return copy.deepcopy(trained.model).eval().to(memory_format=torch.channels_last)


def _sizes(size: int, dynamic: bool) -> list[tuple[int, int]]:
    return [(size, size), (size + 13, size + 5), (2 * size, size)] if dynamic else [(size, size)]


def _difference(runner: Runner, eager: torch.nn.Module, channels: int, sizes: list[tuple[int, int]]) -> float:
    """The largest difference between outputs on random images, batches of one and of three, over the largest output."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for batch in (1, 3):
        for sides in sizes:
            inputs = torch.randn(batch, channels, *sides, generator=generator)
            with torch.inference_mode():
                expected = eager(inputs.contiguous(memory_format=torch.channels_last))
            off, scale = float((runner(inputs) - expected).abs().max()), float(expected.abs().max())
            ratio = off / scale if scale else off
            worst = max(worst, ratio if math.isfinite(ratio) else math.inf)  # max() passes NaN over
    return worst


def onnx_runner(path: str | Path) -> Runner:
    """Return a function that runs an ONNX file in ONNX Runtime on torch's number of threads."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {INPUT: images.contiguous().numpy()})[0])

    return run


def _pt2_runner(path: Path, compiled: bool) -> Runner:
    module = torch._inductor.aoti_load_package(str(path)) if compiled else torch.export.load(path).module()

    def run(images: Tensor) -> Tensor:
        with torch.inference_mode(), torch.no_grad():
            return module(images)

    return run


def _batches(trained: TrainedModel, images: ImageSet, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for batch, targets in make_loader(images, batch_size):
        yield normalise(batch, trained.mean, trained.std), targets


def accuracy(runner: Runner, trained: TrainedModel, images: ImageSet) -> float:
    """Return the part of images whose largest output is that of their class."""
    right = sum(int((runner(inputs).argmax(1) == targets).sum()) for inputs, targets in _batches(trained, images, 64))
    return right / len(images.targets)


def _quantised(
    first: Path,
    folder: Path,
    trained: TrainedModel,
    images: ImageSet,
    notes: list[str],
    note: Callable[[str], None],
) -> Iterator[tuple[str, Path]]:
    """Yield an INT8 file for each way that works, best first; why one does not, goes to the notes."""
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quant_pre_process,
        quantize_dynamic,
        quantize_static,
    )

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.batches = _batches(trained, images, 16)

        def get_next(self) -> Mapping[str, np.ndarray] | None:
            batch = next(self.batches, None)
            return None if batch is None else {INPUT: batch[0].numpy()}

    prepared = folder / "prepared.onnx"
    quant_pre_process(first, prepared, skip_symbolic_shape=True)

    def static(path: Path, per_channel: bool) -> None:
        quantize_static(
            prepared,
            path,
            Images(),
            quant_format=QuantFormat.QDQ,
            per_channel=per_channel,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )

    ways: dict[str, Callable[[Path], None]] = {
        "static, a scale per channel": lambda path: static(path, True),
        "static, a scale per tensor": lambda path: static(path, False),
        "weights only": lambda path: quantize_dynamic(prepared, path, weight_type=QuantType.QInt8),
    }
    for number, (how, quantise) in enumerate(ways.items()):
        note(f"quantising: {how}")
        path = folder / f"int8-{number}.onnx"
        try:
            quantise(path)
            onnx_runner(path)(torch.zeros(1, trained.channels, trained.image_size, trained.image_size))
        # ONNX Runtime's own errors share no other base class.
        except Exception as error:
            notes.append(f"INT8 {how} does not work: {first_line(error)}")
            continue
        yield how, path
