"""``spotlights xdlm sample``."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from spotlights.diffusion.cli.common import needs_text
from spotlights.diffusion.generation import SAMPLERS
from spotlights.runtime.errors import UserError
from spotlights.runtime.options import at_least, find_device, require
from spotlights.runtime.progress import passing_bar

if TYPE_CHECKING:
    from torch import Tensor

    from spotlights.diffusion.recipes.inference import TrainedDenoiser


def add_draw_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """Add the options of how samples are drawn, which ``eval`` shares."""
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="denoising steps (default %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, metavar="X", help="divides the logits (default %(default)s)"
    )
    parser.add_argument("--top-k", type=int, metavar="N", help="draw from so many likeliest tokens (default: all)")
    parser.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest tokens that reach this sum")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (default %(default)s)")
    parser.add_argument("--device", default="cpu", metavar="NAME", help="torch device (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def draw_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options for `spotlights.diffusion.sample`.

    Raises:
        UserError: one is out of range.
    """
    at_least(1, steps=arguments.steps, top_k=arguments.top_k)
    require(0 <= arguments.seed < 2**32, "seed", arguments.seed, "0 to 2^32 - 1")
    require(0 < arguments.temperature < math.inf, "temperature", arguments.temperature, "more than 0")
    require(arguments.top_p is None or 0 < arguments.top_p <= 1, "top_p", arguments.top_p, "a number in (0, 1]")
    options = {"steps": arguments.steps, "top_k": arguments.top_k, "top_p": arguments.top_p}
    if arguments.temperature != 1:
        options["temperature"] = arguments.temperature
    return {name: value for name, value in options.items() if value is not None}


def add_sample(verbs: Any) -> None:
    """Add ``sample``."""
    parser = verbs.add_parser(
        "sample",
        help="write text with a trained denoiser",
        description="Draw text from a run: freely, after a prompt, or into the gaps of a template.",
        allow_abbrev=False,
    )
    parser.add_argument("run_folder", metavar="RUN", help="run folder, or the model folder in it")
    parser.add_argument("--prompt", metavar="TEXT", help="what the text begins with")
    parser.add_argument(
        "--template", metavar="TEXT", help="text with gaps: each [MASK] is one token to find, [MASK:20] are twenty"
    )
    parser.add_argument("--length", type=int, metavar="N", help="tokens in all (default: the model's context)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="samples (default %(default)s)")
    parser.add_argument(
        "--sampler",
        default="posterior",
        choices=SAMPLERS,
        help="posterior draws; refine commits the most confident tokens (default %(default)s)",
    )
    parser.add_argument("--block-size", type=int, metavar="N", help="fill blocks of so many tokens from left to right")
    parser.add_argument(
        "--animate", metavar="FILE", help="write the denoising of the first sample, to a .html or .gif file"
    )
    add_draw_options(parser, steps=64)
    parser.set_defaults(run=_sample)


def _sample(arguments: argparse.Namespace) -> int:
    at_least(1, count=arguments.count, length=arguments.length, block_size=arguments.block_size)
    options = draw_options(arguments)
    options |= {"sampler": arguments.sampler, "block_size": arguments.block_size}
    if arguments.template is not None and (arguments.prompt is not None or arguments.length is not None):
        raise UserError("--template: got it beside --prompt or --length, expected it alone: it holds both")
    if arguments.sampler == "refine" and (useless := {"temperature", "top_k", "top_p"} & set(options)):
        name = min(useless).replace("_", "-")
        raise UserError(f"--{name}: has no meaning for --sampler refine, which draws nothing")
    with needs_text():
        from spotlights.diffusion.recipes.animation import check_suffix
        from spotlights.diffusion.recipes.inference import draw, filled_in, load_run, prompted

        if arguments.animate is not None:
            check_suffix(arguments.animate)
        trained = load_run(arguments.run_folder, device=find_device(arguments.device))
        if arguments.template is not None:
            tokens, observed = filled_in(trained, arguments.template)
        else:
            tokens, observed = prompted(trained, arguments.prompt or "", arguments.length)
        history: list[Tensor] = []
        with passing_bar("denoising") as show:

            def keep(done: int, total: int, z: Tensor) -> None:
                show(done, total)
                history.append(z[0].cpu())

            samples = draw(
                trained, tokens, observed, count=arguments.count, seed=arguments.seed, on_step=keep, **options
            )
        if arguments.animate is not None:
            _animate(arguments, trained, tokens[0], observed[0], history)
    if arguments.json:
        rows = [{"text": text, "tokens": row.tolist()} for text, row in zip(samples.texts, samples.tokens, strict=True)]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        for number, text in enumerate(samples.texts, start=1):
            if arguments.count > 1:
                print(f"--- {number}")
            print(text)
    return 0


def _animate(
    arguments: argparse.Namespace, trained: TrainedDenoiser, tokens: Tensor, observed: Tensor, history: list[Tensor]
) -> None:
    from spotlights.diffusion.recipes.animation import make_frames, write_animation
    from spotlights.diffusion.recipes.inference import first_noise

    start = first_noise(trained, arguments.seed, len(tokens), arguments.sampler)
    frames = make_frames([start.where(~observed, tokens), *history], observed, trained.vocabulary)
    title = f"k = {trained.model.config.k:g}, {len(history)} steps"
    write_animation(frames, arguments.animate, title=title)
