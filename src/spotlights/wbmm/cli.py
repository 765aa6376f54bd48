"""``spotlights wbmm``: train, evaluate and use WBMM networks from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from spotlights.runtime.errors import UserError
from spotlights.wbmm.recipes.augment import PROFILES
from spotlights.wbmm.recipes.config import PRECISIONS, ClassificationConfig, DemoConfig
from spotlights.wbmm.recipes.datasets import DATASETS

if TYPE_CHECKING:
    from spotlights.wbmm.recipes.classification import RunSummary
    from spotlights.wbmm.recipes.data import ImageData
    from spotlights.wbmm.recipes.inference import TrainedModel

_EXTRAS = (
    "timm",
    "torchvision",
    "lightning",
    "torchmetrics",
    "matplotlib",
    "rich",
    "yaml",
    "safetensors",
    "PIL",
    "mlxtend",
)
_FREE_ON_RESUME = {"workers", "accelerator", "devices", "strategy"}

# Field of ClassificationConfig -> type and help; "%s" becomes the default.
_TRAIN_OPTIONS: dict[str, tuple[type, str]] = {
    "model": (str, "network: wbmm_atto (for 28 to 64 pixels), wbmm_pico, ..., or any name of timm (default %s)"),
    "image_size": (
        int,
        "side of the images in pixels (default: that of small images of one size, else the network's, at least 64)",
    ),
    "epochs": (int, "passes over the training images (default %s)"),
    "batch_size": (int, "images per step and device (default %s)"),
    "lr": (float, "peak learning rate of AdamW, cosine schedule (default %s)"),
    "weight_decay": (float, "weight decay (default %s)"),
    "warmup_epochs": (int, "epochs of linear warm-up (default %s)"),
    "label_smoothing": (float, "label smoothing (default %s)"),
    "mixup": (float, "mixup alpha, 0 off (default %s)"),
    "cutmix": (float, "cutmix alpha, 0 off (default %s)"),
    "drop_path": (float, "stochastic depth rate (default %s)"),
    "ema_decay": (float, "decay of the averaged weights, which are judged and saved; 0 off (default %s)"),
    "val_split": (float, "part of the training images held back for validation where no val folder is (default %s)"),
    "patience": (int, "stop after so many epochs without a better validation accuracy, 0 never (default %s)"),
    "clip_gradient": (float, "largest gradient norm, 0 off (default %s)"),
    "seed": (int, "seed of everything random (default %s)"),
    "limit": (int, "use at most so many images of each part (default: all)"),
    "workers": (int, "processes that load images (default 0: none besides this one)"),
    "accelerator": (str, "cpu, gpu, ... as Lightning names them (default %s)"),
    "devices": (str, "how many devices, or which (default %s)"),
    "strategy": (str, "Lightning's strategy for several devices (default %s)"),
}

# Field of DemoConfig -> type and help.
_DEMO_OPTIONS: dict[str, tuple[type, str]] = {
    "seeds": (int, "repeat everything with so many seeds (default %s)"),
    "epochs": (int, "passes over the training images (default %s)"),
    "batch_size": (int, "images a step (default %s)"),
    "lr": (float, "peak learning rate (default %s)"),
    "limit": (int, "use at most so many training and test images, for a quick look (default: all)"),
}


def add_commands(verbs: Any) -> None:
    """Add this method's verbs to the command line."""
    _add_train(verbs)
    _add_eval(verbs)
    _add_predict(verbs)
    _add_demo(verbs)
    _add_bench(verbs)


def backend_states() -> Iterator[tuple[str, str]]:
    """Yield each backend with "can run", or the reason why it cannot, for float32 on the CPU."""
    import torch

    from spotlights.wbmm.backends import BACKENDS, Call

    call = Call(torch.device("cpu"), torch.float32, (7, 7), None)
    for backend in BACKENDS:
        yield backend.name, backend.why_not(call) or f"can run: {backend.summary}"


def _add_train(verbs: Any) -> None:
    parser = verbs.add_parser(
        "train",
        help="train an image classifier",
        description="Train an image classifier into a run folder: weights, settings, metrics, curves and confusion "
        "matrix. Without --data and --dataset it learns 5,000 embedded handwritten digits.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="images in train/CLASS/* (with val/CLASS/* and test/CLASS/* or not) or in CLASS/*; with --dataset, where "
        "its files are",
    )
    parser.add_argument("--dataset", metavar="NAME", help=f"a known data set: {', '.join(DATASETS)}")
    parser.add_argument("--out", metavar="DIR", help="new run folder (default: runs/wbmm-TIME)")
    parser.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped, by its own settings")
    parser.add_argument("--quiet", action="store_true", help="no progress, the summary only")
    defaults = ClassificationConfig()
    for name, (kind, text) in _TRAIN_OPTIONS.items():
        shown = text % getattr(defaults, name) if "%s" in text else text
        parser.add_argument(
            _flag(name), type=kind, metavar="X" if kind is float else "N" if kind is int else "NAME", help=shown
        )
    parser.add_argument(
        "--augment",
        metavar="NAME",
        help=f"augmentation: {', '.join(PROFILES)} (default auto: what suits the data set, photo for folders)",
    )
    parser.add_argument(
        "--precision", metavar="NAME", help=f"one of {', '.join(PRECISIONS)} (default {defaults.precision})"
    )
    parser.add_argument(
        "--model-arg",
        dest="model_args",
        action="append",
        metavar="NAME=VALUE",
        help="argument for the network, for example window_size=14; may be repeated",
    )
    parser.set_defaults(run=_train)


def _add_eval(verbs: Any) -> None:
    parser = verbs.add_parser(
        "eval",
        help="evaluate a trained network",
        description="Print accuracy, top-5 accuracy and figures per class of a run on its own or other images.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", metavar="RUN", help="run folder, or one of its .safetensors files")
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


def _add_predict(verbs: Any) -> None:
    parser = verbs.add_parser(
        "predict",
        help="classify images with a trained network",
        description="Print the most probable classes of images, in files, folders or globs. An unreadable image is "
        "reported and the exit code is 2, after all others are done.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", metavar="RUN", help="run folder, or one of its .safetensors files")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image file, folder of images, or glob")
    parser.add_argument(
        "--top-k", type=int, default=3, metavar="N", help="classes to show for each image (default %(default)s)"
    )
    parser.add_argument("--device", default="cpu", metavar="NAME", help="torch device (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_predict)


def _add_demo(verbs: Any) -> None:
    parser = verbs.add_parser(
        "demo",
        help="train WBMM and depthwise convolutions on embedded digits and write a report",
        description="Train one small network with WBMM and with depthwise 3x3, 5x5 and 13x13 convolutions in its "
        "place on 5,000 embedded digits, compare accuracy and speed, and write report.html. Needs no network access; "
        "a demo that was stopped goes on where it was.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--out", metavar="DIR", default="runs/wbmm-demo", help="folder (default %(default)s)")
    parser.add_argument("--quiet", action="store_true", default=False, help="no progress")
    defaults = DemoConfig()
    for name, (kind, text) in _DEMO_OPTIONS.items():
        shown = text % getattr(defaults, name) if "%s" in text else text
        parser.add_argument(_flag(name), type=kind, metavar="X" if kind is float else "N", help=shown)
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    names = {entry.name for entry in fields(DemoConfig)}
    config = DemoConfig(**{name: value for name, value in vars(arguments).items() if name in names})
    config.validate()
    with needs_vision():
        from spotlights.wbmm.demo import run_demo

        run_demo(arguments.out, config, progress=not arguments.quiet)
    return 0


def _add_bench(verbs: Any) -> None:
    from spotlights.wbmm.bench import DTYPES, SUITES

    parser = verbs.add_parser(
        "bench",
        help="time the operator against depthwise convolutions, FFT and window attention",
        description="Check, then time in turn: every backend, the paper's form with M kept and rebuilt, depthwise 5x5, "
        "7x7, 13x13 and 27x27 convolutions, FFT and window attention. Prints times, ratios and fractions of the "
        "machine's measured peaks.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--suite", choices=SUITES, default="quick", help="which sizes: quick takes about a minute (default %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where (default %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of maps and weights (default %(default)s)")
    parser.add_argument("--train", action="store_true", help="time forward and all gradients instead of inference")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for results.csv, pictures and report.html; a bench that was stopped goes on in it",
    )
    parser.add_argument("--baseline", metavar="FILE", help="compare with an earlier results.csv")
    parser.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    with needs_vision():
        from spotlights.wbmm.bench import WrongResultError
        from spotlights.wbmm.bench_run import run_bench

        try:
            run_bench(
                arguments.suite,
                device=arguments.device,
                dtype=arguments.dtype,
                train=arguments.train,
                out=arguments.out,
                baseline=arguments.baseline,
            )
        except WrongResultError as error:
            print(f"spotlights: wrong result: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            if arguments.out is not None:
                print("stopped; the same command goes on", file=sys.stderr)
            raise
    return 0


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@contextmanager
def needs_vision() -> Iterator[None]:
    """Turn the absence of an optional package into one line with its remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise UserError(f"this command needs {package}; remedy: pip install 'spotlights[vision]'") from error


def _train(arguments: argparse.Namespace) -> int:
    names = {entry.name for entry in fields(ClassificationConfig)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if "model_args" in given:
        given["model_args"] = _parse_model_args(given["model_args"])
    run = getattr(arguments, "resume", None)
    if run is None:
        ClassificationConfig(**given).validate()
    elif set(given) - _FREE_ON_RESUME:
        extra = ", ".join(_flag(name) for name in given if name not in _FREE_ON_RESUME)
        raise UserError(
            f"--resume goes on with the run's own settings; drop {extra.replace('model-args', 'model-arg')}"
        )
    with needs_vision():
        from spotlights.runtime.runs import is_rank_zero
        from spotlights.wbmm.recipes.classification import train
        from spotlights.wbmm.recipes.config import load_config

        if run is None:
            config = ClassificationConfig(**given)
        else:
            config = load_config(run)
            for name, value in given.items():
                setattr(config, name, value)
        try:
            summary = train(config, resume=run is not None, progress=not getattr(arguments, "quiet", False))
        except KeyboardInterrupt:
            print(f"stopped; go on by: spotlights wbmm train --resume {config.out or 'RUN'}", file=sys.stderr)
            raise
        if is_rank_zero():
            _print_summary(summary)
    return 0


def _parse_model_args(texts: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier():
            raise UserError(f"--model-arg: got {text!r}, expected NAME=VALUE")
        try:
            values[name] = json.loads(value)
        except json.JSONDecodeError:
            values[name] = value
    return values


def _print_summary(summary: RunSummary) -> None:
    early = ", stopped early" if summary.stopped_early else ""
    lines = {"epochs": f"{summary.epochs}{early}, best {summary.best_epoch}"}
    lines["training time"] = f"{summary.seconds:.1f} s"
    if summary.val_accuracy is not None:
        lines["validation accuracy"] = f"{100 * summary.val_accuracy:.2f} % of {summary.val_images:,} images"
    if summary.test_accuracy is not None:
        lines["test accuracy"] = f"{100 * summary.test_accuracy:.2f} % of {summary.test_images:,} images"
    lines |= _skipped_line(summary.skipped)
    lines["run folder"] = summary.path
    for name, value in lines.items():
        print(f"{name:<20} {value}")


def _skipped_line(skipped: list[str]) -> Mapping[str, str]:
    if not skipped:
        return {}
    shown = "; ".join(skipped[:3]) + ("; ..." if len(skipped) > 3 else "")
    return {"skipped images": f"{len(skipped)} ({shown})"}


def _eval(arguments: argparse.Namespace) -> int:
    _at_least(1, batch_size=arguments.batch_size, limit=arguments.limit)
    with needs_vision():
        from spotlights.wbmm.recipes.inference import evaluate, match_classes

        trained = _load(arguments)
        data = _evaluation_data(arguments, trained)
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


def _evaluation_data(arguments: argparse.Namespace, trained: TrainedModel) -> ImageData:
    from spotlights.wbmm.recipes.config import load_config
    from spotlights.wbmm.recipes.data import limited, load_data, load_run_data

    size = trained.image_size
    if arguments.data is not None or arguments.dataset is not None:
        return load_data(
            arguments.data,
            arguments.dataset,
            image_size=size,
            default_size=size,
            channels=trained.channels,
            limit=arguments.limit,
        )
    config = load_config(arguments.run_folder)
    config.image_size = size
    data = load_run_data(config, channels=trained.channels)
    if arguments.limit:
        # After the division: a part must hold no image of another, as it was trained.
        data.splits = {part: limited(images, arguments.limit) for part, images in data.splits.items()}
    return data


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
        "top-5 accuracy": f"{100 * figures['top5_accuracy']:.2f} %",
        **_skipped_line(figures["skipped"]),
    }
    for name, value in lines.items():
        print(f"{name:<20} {value}")


def _predict(arguments: argparse.Namespace) -> int:
    _at_least(1, top_k=arguments.top_k)
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
    import torch

    from spotlights.wbmm.recipes.inference import load_run

    try:
        device = torch.empty(0, device=arguments.device).device
    # Builds without a device raise AssertionError, others RuntimeError or NotImplementedError.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"--device: {arguments.device}: {str(error).splitlines()[0]}") from error
    return load_run(arguments.run_folder, device=device)


def _at_least(least: int, **values: int | None) -> None:
    for name, value in values.items():
        if value is not None and value < least:
            raise UserError(f"{_flag(name)}: got {value}, expected at least {least}")
