"""``spotlights wbmm export``."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.runtime.errors import UserError
from spotlights.runtime.options import at_least
from spotlights.wbmm.cli.common import needs_vision
from spotlights.wbmm.recipes.datasets import DATASETS

if TYPE_CHECKING:
    from spotlights.wbmm.recipes.data import ImageSet
    from spotlights.wbmm.recipes.exporting import Exported
    from spotlights.wbmm.recipes.inference import TrainedModel


def add_export(verbs: Any) -> None:
    """Add ``export``."""
    parser = verbs.add_parser(
        "export",
        help="write a network for ONNX Runtime, torch.export or AOTInductor",
        description="Fold a network, write it as a file of plain operators, and run that file beside PyTorch: largest "
        "difference, size, latency, and accuracy on the run's own or other images.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="RUN|MODEL", help="run folder, .safetensors file, or a network's name")
    parser.add_argument("--format", default="onnx", choices=("onnx", "pt2"), help="(default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="new file (default: NAME.onnx or NAME.pt2 here)")
    parser.add_argument("--dynamic", action="store_true", help="any height and width; the batch always is free")
    parser.add_argument("--fp16", action="store_true", help="float16 inside; input and output stay float32")
    parser.add_argument("--int8", action="store_true", help="INT8, calibrated on images (onnx)")
    parser.add_argument("--compile", action="store_true", help="compile ahead of time by AOTInductor (pt2)")
    parser.add_argument("--pretrained", action="store_true", help="published weights for a network's name")
    parser.add_argument("--image-size", type=int, metavar="N", help="side of the images (default: the network's own)")
    parser.add_argument("--data", metavar="DIR", help="labelled images for accuracy and INT8 (default: the run's own)")
    parser.add_argument("--dataset", metavar="NAME", help=f"a known data set instead: {', '.join(DATASETS)}")
    parser.add_argument(
        "--limit", type=int, default=1000, metavar="N", help="judge accuracy by at most so many (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    at_least(1, limit=arguments.limit, image_size=arguments.image_size)
    if arguments.int8 and (arguments.format != "onnx" or arguments.fp16):
        raise UserError("--int8: got it with --format pt2 or --fp16, expected --format onnx alone")
    if arguments.compile and arguments.format != "pt2":
        raise UserError("--compile: got it with --format onnx, expected --format pt2")
    path = Path(arguments.model)
    name = path.stem if path.is_file() else path.resolve().name
    out = Path(arguments.out or f"{name}.{arguments.format}")
    if out.exists():
        raise UserError(f"--out: {out} exists already; name a new file")
    if not out.parent.is_dir():
        raise UserError(f"--out: no such folder: {out.parent}")
    with needs_vision():
        from spotlights.wbmm.recipes.exporting import export_network

        trained = _load(arguments)
        images, calibration = _images(arguments, trained)
        # The exporters talk about their own insides.
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        logging.getLogger().setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = export_network(
                trained,
                out,
                format=arguments.format,
                dynamic=arguments.dynamic,
                half=arguments.fp16,
                int8=arguments.int8,
                compiled=arguments.compile,
                images=images,
                calibration=calibration,
                note=lambda text: print(f"{text} ...", file=sys.stderr, flush=True),
            )
        _print(exported, arguments.json)
    return 0


def _load(arguments: argparse.Namespace) -> TrainedModel:
    from spotlights.wbmm.recipes.exporting import named_network
    from spotlights.wbmm.recipes.inference import load_run

    if (
        not Path(arguments.model).exists()
        and not arguments.model.endswith(".safetensors")
        and "/" not in arguments.model
    ):
        return named_network(arguments.model, pretrained=arguments.pretrained, image_size=arguments.image_size)
    if arguments.pretrained:
        raise UserError("--pretrained: got it with a run, expected a network's name")
    trained = load_run(arguments.model)
    if arguments.image_size:
        trained.image_size = arguments.image_size
    return trained


def _images(arguments: argparse.Namespace, trained: TrainedModel) -> tuple[ImageSet | None, ImageSet | None]:
    """Images to judge by, and others to calibrate on where the data is divided."""
    from spotlights.wbmm.cli.inference import evaluation_data
    from spotlights.wbmm.recipes.data import limited
    from spotlights.wbmm.recipes.exporting import CALIBRATION
    from spotlights.wbmm.recipes.inference import match_classes

    folder = Path(arguments.model)
    if not arguments.data and not arguments.dataset and not folder.is_dir():
        return None, None
    data = evaluation_data(arguments.data, arguments.dataset, None, folder, trained)
    match_classes(data, trained)
    part = next(part for part in ("test", "val", "all", "train") if part in data.splits)
    rest = next(part for part in ("train", "all", "val", "test") if part in data.splits)
    return limited(data.splits[part], arguments.limit), limited(data.splits[rest], CALIBRATION)


def _print(exported: Exported, as_json: bool) -> None:
    if as_json:
        print(json.dumps({**asdict(exported), "path": str(exported.path)}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(caption_justify="left")
    table.add_column("form", overflow="fold")
    for name in ("file", "one image", "difference", "accuracy"):
        table.add_column(name, justify="right")
    for form in exported.forms:
        table.add_row(
            form.name,
            "" if form.bytes is None else f"{form.bytes / 1e6:.1f} MB",
            f"{form.milliseconds:.1f} ms",
            f"{form.difference:.1e}",
            "" if form.accuracy is None else f"{100 * form.accuracy:.2f} %",
        )
    Console(highlight=False, markup=False).print(table)
    for note in exported.notes:
        print(note)
    print(f"{'file':<20} {exported.path}")
