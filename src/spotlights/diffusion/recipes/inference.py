"""Using a trained denoiser: loading a run, prompts and templates, samples as text."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spotlights.diffusion import sample
from spotlights.diffusion.recipes.objective import generators_for
from spotlights.diffusion.recipes.quiet import no_bars
from spotlights.diffusion.recipes.vocabulary import FILE, Vocabulary, load_vocabulary, text_of
from spotlights.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from spotlights.diffusion.models.denoiser import XDLMForMaskedLM

MODEL = "model"
_HOLE = re.compile(r"\[MASK(?::([^\]]*))?\]")
_DIGITS = 9  # of a number of tokens at most


@dataclass
class TrainedDenoiser:
    """A denoiser in evaluation mode with its vocabulary; ``source`` is where it came from."""

    model: XDLMForMaskedLM
    vocabulary: Vocabulary
    source: str

    @property
    def context(self) -> int:
        """The most tokens that a sequence may have."""
        return int(self.model.config.max_position_embeddings)


def load_run(path: str | Path, *, device: str | torch.device = "cpu") -> TrainedDenoiser:
    """Load the weights of a run's best epoch; ``path`` is a finished run folder or the ``model`` folder in it.

    Raises:
        UserError: there is no such folder, the run is not finished, or what it holds does not fit.
    """
    path = Path(path)
    folder = next((place for place in (path / MODEL, path) if os.path.isfile(place / FILE)), None)
    if folder is None:
        from spotlights.runtime.training import CHECKPOINT

        what = "no such run folder"
        if os.path.isdir(path):
            what = f"no {MODEL}/{FILE} in it; a training writes it at its end"
        if os.path.isfile(path / CHECKPOINT):
            what += f"; spotlights xdlm train --resume {path} goes on"
        raise UserError(f"{path}: {what}")
    from spotlights.diffusion.models.denoiser import XDLMForMaskedLM

    vocabulary = load_vocabulary(folder)
    try:
        with no_bars():
            model, info = XDLMForMaskedLM.from_pretrained(str(folder), local_files_only=True, output_loading_info=True)
    # The library raises whatever its readers do.
    except Exception as error:
        raise UserError(f"{folder}: cannot load the model: {first_line(error)}") from error
    if misfit := sorted(info["missing_keys"]) or sorted(info["unexpected_keys"]):
        raise UserError(f"{folder}: the weights are of another network than config.json says ({misfit[0]})")
    for name, here in {"vocab_size": vocabulary.size, "mask_token_id": vocabulary.mask_id}.items():
        if (there := getattr(model.config, name)) != here:
            raise UserError(f"{folder}: {name} is {here} in the vocabulary, {there} in config.json")
    context = model.config.max_position_embeddings
    if not isinstance(context, int) or context < 1:
        raise UserError(f"{folder}: max_position_embeddings is {context!r} in config.json, expected at least 1")
    return TrainedDenoiser(model.to(device).eval(), vocabulary, str(path))


def save_model(model: XDLMForMaskedLM, vocabulary: Vocabulary | None, folder: Path) -> None:
    """Write a folder that ``from_pretrained`` and `load_vocabulary` read, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        with no_bars():
            model.save_pretrained(temporary)
        if vocabulary is not None:
            vocabulary.save(temporary)
        if folder.exists():
            shutil.rmtree(folder)
        temporary.rename(folder)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def prompted(trained: TrainedDenoiser, prompt: str, length: int | None) -> tuple[Tensor, Tensor]:
    """Return a sequence that begins with a prompt, of ``length`` tokens in all, by default the model's context.

    Raises:
        UserError: the prompt fills the length or has unknown characters, or the length exceeds the context.
    """
    length = length or trained.context
    _check_length(trained, length, "--length")
    ids = trained.vocabulary.encode(prompt)[0]
    if len(ids) > trained.context:
        raise UserError(f"--prompt: got {len(ids)} tokens, but the model's context has {trained.context}")
    if len(ids) >= length:
        raise UserError(f"--prompt: got {len(ids)} tokens for a --length of {length}, expected fewer: nothing is left")
    tokens = torch.full((1, length), trained.vocabulary.mask_id)
    tokens[0, : len(ids)] = torch.from_numpy(ids)
    return tokens, (torch.arange(length) < len(ids))[None]


def filled_in(trained: TrainedDenoiser, template: str) -> tuple[Tensor, Tensor]:
    """Return the sequence of a template in which each ``[MASK]`` is one token to find, and ``[MASK:20]`` twenty.

    Raises:
        UserError: there is no ``[MASK]``, the text has unknown characters, or it is longer than the context.
    """
    ids: list[int] = []
    holes: list[bool] = []
    place = 0
    for match in _HOLE.finditer(template):
        given = "1" if match[1] is None else match[1]
        count = int(given) if given.isdecimal() and len(given) <= _DIGITS else 0
        if not 0 < count <= trained.context:
            raise UserError(f"--template: got {match[0]}, expected 1 to {trained.context} tokens")
        _extend(trained, template[place : match.start()], ids, holes)
        ids += [trained.vocabulary.mask_id] * count
        holes += [True] * count
        place = match.end()
    if not holes:
        raise UserError("--template: got no [MASK], expected at least one place to fill: all tokens are given")
    _extend(trained, template[place:], ids, holes)
    _check_length(trained, len(ids), "--template")
    return torch.tensor([ids]), ~torch.tensor([holes])


def _extend(trained: TrainedDenoiser, text: str, ids: list[int], holes: list[bool]) -> None:
    given = trained.vocabulary.encode(text)[0].tolist() if text else []
    ids += given
    holes += [False] * len(given)


def _check_length(trained: TrainedDenoiser, length: int, option: str) -> None:
    if length > trained.context:
        raise UserError(f"{option}: got {length} tokens, but the model's context has {trained.context}")


@dataclass(frozen=True)
class Samples:
    """Token sequences (B, L) int64 and their texts."""

    tokens: Tensor
    texts: list[str]


def draw(
    trained: TrainedDenoiser,
    tokens: Tensor,
    observed: Tensor,
    *,
    count: int = 1,
    seed: int = 0,
    on_step: Callable[[int, int, Tensor], None] | None = None,
    **options: Any,
) -> Samples:
    """Draw samples; each follows from ``seed`` and its number, however many are drawn.

    Args:
        trained: the denoiser.
        tokens: (1, L) int64, looked at where observed.
        observed: (1, L) bool, which tokens are given.
        count: how many samples.
        seed: of the draws.
        on_step: as in `spotlights.diffusion.sample`.
        **options: of `spotlights.diffusion.sample`: steps, sampler, block_size, temperature, ...

    Raises:
        UserError: an option is out of range.
    """
    model = trained.model
    device = model.device
    try:
        drawn = sample(
            model.denoiser(),
            model.noise_kernel(),
            prompt=tokens.expand(count, -1).to(device),
            observed=observed.expand(count, -1).to(device),
            generator=generators_for(torch.arange(count), seed, device),
            on_step=on_step,
            **options,
        ).cpu()
    except ValueError as error:
        raise UserError(first_line(error)) from error
    return Samples(drawn, [text_of(trained.vocabulary, row.tolist()) for row in drawn])


def first_noise(trained: TrainedDenoiser, seed: int, length: int, sampler: str) -> Tensor:
    """Return the noise that the first sample of `draw` starts from, (length,) int64."""
    if sampler == "refine":
        return torch.full((length,), trained.vocabulary.mask_id)
    noise = generators_for(torch.zeros(1, dtype=torch.int64), seed, trained.model.device)
    return trained.model.noise_kernel().prior((1, length), generator=noise, device=trained.model.device)[0].cpu()
