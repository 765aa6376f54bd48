"""What the demo learns and judges: two sources of known likelihood, the sources of Python's library, and digits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spotlights.diffusion import sample
from spotlights.diffusion.digits import (
    CLASSES,
    LEVELS,
    SIDE,
    DigitClassifier,
    Digits,
    accuracy,
    frechet_distance,
    frechet_error,
    load_digits,
    train_classifier,
)
from spotlights.diffusion.judges import Judge, NGramJudge
from spotlights.diffusion.models.denoiser import XDLMConfig, XDLMForMaskedLM
from spotlights.diffusion.recipes.config import DiffusionConfig
from spotlights.diffusion.recipes.data import TokenData, TokenSet, load_run_data
from spotlights.diffusion.recipes.evaluation import estimate_nelbo, generate, judge_samples
from spotlights.diffusion.recipes.objective import generators_for
from spotlights.diffusion.recipes.vocabulary import Vocabulary, text_of
from spotlights.diffusion.sources import BracketGrammar, HiddenMarkovModel, Source

_BATCH = 32
_JUDGED_BATCH = 64
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Row:
    """One figure: of a model (``k``) or of held-back data (None), at so many steps, by one seed or all of them.

    ``metric`` is nelbo, bits_per_byte, nll, entropy, accuracy, fid or seconds; ``error`` a standard error, ``count``
    the sequences that it comes from.
    """

    part: str
    k: float | None
    steps: int | None
    seed: int | None
    metric: str
    value: float
    error: float | None = None
    count: int | None = None


@dataclass(frozen=True)
class Scale:
    """How much of everything: sequences to train on and to judge by, updates, samples of one seed, steps."""

    sequences: int
    held: int
    updates: dict[str, int]
    samples: dict[str, int]
    steps: dict[str, tuple[int, ...]]


FULL = Scale(
    sequences=20_000,
    held=1024,
    updates={"hmm": 1200, "brackets": 1200, "text": 700, "digits": 700},
    samples={"hmm": 128, "brackets": 48, "text": 24, "digits": 60},
    steps={**dict.fromkeys(("hmm", "brackets", "text"), (4, 8, 16, 64, 256)), "digits": (4, 16, 64)},
)
QUICK = Scale(
    sequences=512,
    held=32,
    updates=dict.fromkeys(("hmm", "brackets", "text", "digits"), 3),
    samples={"hmm": 8, "brackets": 8, "text": 8, "digits": 20},
    steps=dict.fromkeys(("hmm", "brackets", "text", "digits"), (2, 8)),
)


class Part(ABC):
    """One comparison of the four models on one kind of data.

    Attributes:
        name: for folders and tables.
        title: for people.
        data: what to train on; ``test`` is held back for judging.
        training: how to train.
        quality: metric that ranks samples.
        higher_is_better: of ``quality``.
    """

    name: str
    title: str
    data: TokenData
    training: DiffusionConfig
    quality = "nll"
    higher_is_better = False

    def __init__(self, scale: Scale, length: int, tokens: int) -> None:
        self.steps = scale.steps[self.name]
        self.samples = scale.samples[self.name]
        self.length = length
        self.tokens = tokens
        self.training = DiffusionConfig(
            length=length,
            steps=scale.updates[self.name],
            batch_size=_BATCH,
            lr=3e-3,
            ema_decay=0.99,
            class_dropout=0.1,
            accelerator="cpu",
            devices="1",
        )

    def model(self, k: float) -> XDLMForMaskedLM:
        """Return an untrained denoiser; the mask is the last token."""
        torch.manual_seed(self.training.seed)
        config = XDLMConfig(
            vocab_size=self.tokens + 1,
            mask_token_id=self.tokens,
            max_position_embeddings=self.length,
            num_attention_heads=4,
            k=k,
            **self.size(),
        )
        return XDLMForMaskedLM(config)

    def size(self) -> dict[str, Any]:
        """Return width and depth of the network."""
        return {"hidden_size": 64, "num_hidden_layers": 2}

    def text(self, tokens: Tensor) -> str:
        """Return a sequence (L,) as text for people."""
        return " ".join(map(str, tokens.tolist()))

    @abstractmethod
    def reference(self) -> Iterator[Row]:
        """Yield the figures of held-back data."""

    @abstractmethod
    def judge(self, model: XDLMForMaskedLM, k: float, seeds: int, keep: Callable[[int, Tensor], None]) -> Iterator[Row]:
        """Yield the figures of samples; ``keep`` is given the steps and some samples of each."""

    def bound(self, model: XDLMForMaskedLM, k: float) -> Iterator[Row]:
        """Yield the NELBO of held-back data."""
        assert self.data.test is not None
        bound = estimate_nelbo(model, self.data.test, draws=8, batch_size=_JUDGED_BATCH)
        error, count = (bound.high - bound.low) / (2 * _Z95), len(self.data.test)
        yield Row(self.name, k, None, None, "nelbo", bound.nats_per_token, error, count)
        if bound.bits_per_byte is not None:
            ratio = bound.bits_per_byte / bound.nats_per_token
            yield Row(self.name, k, None, None, "bits_per_byte", bound.bits_per_byte, error * ratio, count)


class SequencePart(Part):
    """Sequences whose samples a judge of likelihood ranks."""

    likelihood: Judge

    def reference(self) -> Iterator[Row]:
        """Yield NLL and entropy of held-back data."""
        assert self.data.test is not None
        yield from self._figures(self.data.test.tokens, None, None, None)

    def judge(self, model: XDLMForMaskedLM, k: float, seeds: int, keep: Callable[[int, Tensor], None]) -> Iterator[Row]:
        """Yield NLL, entropy and seconds of the samples of each seed."""
        for steps in self.steps:
            for seed in range(seeds):
                started = time.perf_counter()
                made = generate(
                    model, self.samples, length=self.length, steps=steps, seed=seed, batch_size=_JUDGED_BATCH
                )
                seconds = time.perf_counter() - started
                if seed == 0:
                    keep(steps, made[:3])
                yield from self._figures(made, k, steps, seed)
                yield Row(self.name, k, steps, seed, "seconds", seconds, None, len(made))

    def _figures(self, tokens: Tensor, k: float | None, steps: int | None, seed: int | None) -> Iterator[Row]:
        judged = judge_samples(tokens, self.likelihood)
        error = (judged["nll_high"] - judged["nll_low"]) / (2 * _Z95)
        yield Row(self.name, k, steps, seed, "nll", judged["nll"], error, len(tokens))
        yield Row(self.name, k, steps, seed, "entropy", judged["entropy"], None, len(tokens))


class SourcePart(SequencePart):
    """A source that knows the exact likelihood of every sequence."""

    def __init__(self, name: str, title: str, source: Source, letters: str, length: int, scale: Scale) -> None:
        self.name = name
        self.title = title
        self.letters = letters
        super().__init__(scale, length, source.vocab_size)
        generator = torch.Generator().manual_seed(0)
        train, test = (TokenSet(source.sample(n, length, generator)) for n in (scale.sequences, scale.held))
        self.data = TokenData(train, None, test, None)
        self.likelihood = source

    def size(self) -> dict[str, Any]:
        """Return width and depth of the network, and that it knows places: every sequence begins at the beginning."""
        return {**super().size(), "learned_positions": True}

    def text(self, tokens: Tensor) -> str:
        """Return a sequence (L,) as text, one letter a token."""
        return "".join(self.letters[token] for token in tokens.tolist())


class TextPart(SequencePart):
    """The sources of Python's standard library, byte by byte, judged by an n-gram model of the training text."""

    name = "text"
    title = "Python's standard library, bytes"
    order = 6

    def __init__(self, scale: Scale) -> None:
        length = 64
        loaded = load_run_data(DiffusionConfig(length=length, limit=2 * scale.sequences))
        assert loaded.val is not None
        assert loaded.vocabulary is not None
        self.vocabulary: Vocabulary = loaded.vocabulary
        super().__init__(scale, length, self.vocabulary.size - 1)
        self.data = TokenData(loaded.train, None, loaded.val.subset(scale.held // 2), self.vocabulary)
        judge = NGramJudge(self.order, self.vocabulary.size)
        self.likelihood = judge.fit(loaded.train.tokens, padding=loaded.train.padding)

    def text(self, tokens: Tensor) -> str:
        """Return a sequence (L,) as text; control characters and line ends become visible."""
        shown = text_of(self.vocabulary, tokens.tolist()).replace("\n", "↵").replace("\x7f", "␡")
        return "".join(chr(0x2400 + ord(letter)) if letter < " " else letter for letter in shown)


class DigitsPart(Part):
    """Digits of a wanted class, judged by a classifier: whether it reads that class, and the distance of features."""

    name = "digits"
    title = f"Digits, {SIDE} × {SIDE} pixels, {LEVELS} grey levels"
    quality = "fid"
    guidance = 1.0

    def __init__(self, scale: Scale) -> None:
        super().__init__(scale, SIDE * SIDE, LEVELS)
        train, test = load_digits(min(scale.sequences, 4000))
        self.data = TokenData(
            TokenSet(train.tokens, labels=train.labels), None, TokenSet(test.tokens, labels=test.labels), None
        )
        self.test = test
        self.classifier: DigitClassifier = train_classifier(train)
        self.real = self._features(train.tokens)

    def size(self) -> dict[str, Any]:
        """Return width, depth and classes of the network."""
        return {**super().size(), "num_classes": CLASSES, "learned_positions": True}

    @torch.no_grad()
    def _features(self, tokens: Tensor) -> Tensor:
        return self.classifier.features(tokens)

    def reference(self) -> Iterator[Row]:
        """Yield accuracy and FID of held-back digits."""
        yield from self._figures(self.test, None, None)

    def judge(self, model: XDLMForMaskedLM, k: float, seeds: int, keep: Callable[[int, Tensor], None]) -> Iterator[Row]:
        """Yield accuracy, FID and seconds of the samples of all seeds together: the FID needs many."""
        labels = torch.arange(self.samples * seeds) % CLASSES
        for steps in self.steps:
            started = time.perf_counter()
            made = torch.cat(
                [self._sample(model, part, steps) for part in torch.arange(len(labels)).split(_JUDGED_BATCH)]
            )
            seconds = time.perf_counter() - started
            keep(steps, made[:CLASSES])
            yield from self._figures(Digits(made, labels), k, steps)
            yield Row(self.name, k, steps, None, "seconds", seconds, None, len(made))

    def _sample(self, model: XDLMForMaskedLM, numbers: Tensor, steps: int) -> Tensor:
        return sample(
            model.denoiser(class_labels=numbers % CLASSES),
            model.noise_kernel(),
            shape=(len(numbers), self.length),
            steps=steps,
            unconditional=model.denoiser(),
            guidance=self.guidance,
            generator=generators_for(numbers, 0, torch.device("cpu")),
        )

    def _figures(self, digits: Digits, k: float | None, steps: int | None) -> Iterator[Row]:
        right = accuracy(self.classifier, digits).double()
        count = len(right)
        yield Row(self.name, k, steps, None, "accuracy", float(right.mean()), float(right.std()) / count**0.5, count)
        made = self._features(digits.tokens)
        error = frechet_error(made, self.real)
        yield Row(self.name, k, steps, None, "fid", frechet_distance(made, self.real), error, count)


def hidden_markov_part(scale: Scale) -> SourcePart:
    """Return the part of a fixed hidden Markov model."""
    source = HiddenMarkovModel.random(8, 12, sharpness=3, generator=torch.Generator().manual_seed(0))
    return SourcePart("hmm", "Hidden Markov model, 8 states, 12 tokens", source, "abcdefghijkl", 32, scale)


def brackets_part(scale: Scale) -> SourcePart:
    """Return the part of balanced brackets."""
    return SourcePart("brackets", "Grammar of balanced brackets, 3 kinds", BracketGrammar(3, 0.01), "()[]{}", 16, scale)


PARTS: dict[str, Callable[[Scale], Part]] = {
    "hmm": hidden_markov_part,
    "brackets": brackets_part,
    "text": TextPart,
    "digits": DigitsPart,
}
