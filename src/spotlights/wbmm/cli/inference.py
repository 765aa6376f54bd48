"""``spotlights wbmm eval`` and ``predict``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spotlights.runtime.errors import UserError
from spotlights.runtime.options import at_least, find_device
from spotlights.runtime.runs import CONFIG
from spotlights.wbmm.cli.common import needs_vision, skipped_line
from spotlights.wbmm.recipes.datasets import DATASETS

if TYPE_CHECKING:
    from spotlights.wbmm.recipes.data import ImageData
    from spotlights.wbmm.recipes.inference import TrainedModel


def add_eval(verbs: Any) -> None:
    """Add ``eval``."""
    parser = verbs.add_parser(
        "eval",
        help="evaluate a trained network",
        description="Print accuracy, top-5 accuracy (of more than five classes) and figures per class of a run on its "
        "own or other images.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="run folder, one of its .safetensors files, or an imported one"
    )
    parser.add_argument(
        "--data", metavar="DIR", help="labelled images, laid out as for training (default: the run's own)"
    )
    parser.add_argument("--dataset", metavar="NAME", help=f"a known data set: {', '.join(DATASETS)}")
    parser.add_argument(
        "--split", metavar="NAME", help="part to evaluate: train, val or test (default: test, else val, else all)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="images at a time (default %(default)s)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="use at most so many images (default: all)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="torch device (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_eval)


def add_predict(verbs: Any) -> None:
    """Add ``predict``."""
    parser = verbs.add_parser(
        "predict",
        help="classify images with a trained network",
        description="Print the most probable classes of images, in files, folders or globs. An unreadable image is "
        "reported and the exit code is 2, after all others are done.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "run_folder", metavar="RUN", help="run folder, one of its .safetensors files, or an imported one"
    )
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, folder of images, or glob")
    parser.add_argument(
        "--top-k", type=int, default=3, metavar="N", help="classes to show for each image (default %(default)s)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="torch device (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_predict)


def _eval(arguments: argparse.Namespace) -> int:
    at_least(1, batch_size=arguments.batch_size, limit=arguments.limit)
    with needs_vision():
        from spotlights.wbmm.recipes.inference import evaluate, match_classes

        trained = _load(arguments)
        data = evaluation_data(arguments.data, arguments.dataset, arguments.limit, Path(arguments.run_folder), trained)
        match_classes(data, trained)
        part = arguments.split or next(part for part in ("test", "val", "all", "train") if part in data.splits)
        if part not in data.splits:
            raise UserError(f"--split: got {part}, expected one of {', '.join(data.splits)}")
        result = evaluate(trained, data.splits[part], batch_size=arguments.batch_size)
        figures = {"split": part, **result.to_dict(), "skipped": data.skipped}
        if arguments.json:
            print(json.dumps(figures, indent=2, ensure_ascii=False))
        else:
            _print_figures(figures)
    return 0


def evaluation_data(
    data: str | None, dataset: str | None, limit: int | None, folder: Path, trained: TrainedModel
) -> ImageData:
    """Return the images given by the options, or those of the run itself."""
    from spotlights.wbmm.recipes.config import load_config
    from spotlights.wbmm.recipes.data import limited, load_data, load_run_data

    size = trained.image_size
    if data is not None or dataset is not None:
        return load_data(data, dataset, image_size=size, default_size=size, channels=trained.channels, limit=limit)
    run = folder
    if folder.is_file():
        run = folder.parent
        if not (run / CONFIG).is_file():
            raise UserError(f"{folder}: no run beside it says which images to use; give --data or --dataset")
    config = load_config(run)
    config.image_size = size
    images = load_run_data(config, channels=trained.channels)
    if limit:
        # After the division: a part must hold no image of another, as it was trained.
        images.splits = {part: limited(some, limit) for part, some in images.splits.items()}
    return images


def _print_figures(figures: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(caption_justify="left")
    table.add_column("class", overflow="fold")
    for name in ("images", "precision", "recall", "F1"):
        table.add_column(name, justify="right")
    for row in figures["classes"]:
        shares = ["-" if row[name] is None else f"{100 * row[name]:.2f} %" for name in ("precision", "recall", "f1")]
        table.add_row(row["class"], f"{row['images']:,}", *shares)
    Console(highlight=False, markup=False).print(table)
    lines = {
        "images": f"{figures['images']:,} ({figures['split']})",
        "accuracy": f"{100 * figures['accuracy']:.2f} %",
        **({"top-5 accuracy": f"{100 * figures['top5_accuracy']:.2f} %"} if len(figures["classes"]) > 5 else {}),
        **skipped_line(figures["skipped"]),
    }
    for name, value in lines.items():
        print(f"{name:<20} {value}")


def _predict(arguments: argparse.Namespace) -> int:
    at_least(1, top_k=arguments.top_k)
    with needs_vision():
        from spotlights.wbmm.recipes.images import expand
        from spotlights.wbmm.recipes.inference import predict

        trained = _load(arguments)
        results = predict(trained, expand(arguments.images), top_k=arguments.top_k)
        if arguments.json:
            print(json.dumps(results, indent=2, ensure_ascii=False))
        else:
            _print_predictions(results)
    errors = [result["error"] for result in results if "error" in result]
    for error in errors:
        print(f"spotlights: error: {error}", file=sys.stderr)
    return 2 if errors else 0


def _print_predictions(results: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("image", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right")
    for result in results:
        for rank, guess in enumerate(result.get("predictions", [])):
            first = result["image"] if rank == 0 else ""
            end = rank > 0 and rank == len(result["predictions"]) - 1
            table.add_row(first, guess["class"], f"{100 * guess['probability']:.2f} %", end_section=end)
    if table.row_count:
        Console(highlight=False, markup=False).print(table)


def _load(arguments: argparse.Namespace) -> TrainedModel:
    from spotlights.wbmm.recipes.inference import load_run

    return load_run(arguments.run_folder, device=find_device(arguments.device))
