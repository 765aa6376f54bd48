"""Judges of generated token sequences: a negative log-likelihood, and the entropy that guards it against repetition."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spotlights.diffusion.checks import check_count, check_tensor, check_tokens

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]


class Judge(Protocol):
    """Anything that gives token sequences a likelihood: an n-gram model, an exact source, a language model."""

    def nll(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood of sequences (B, L) int64: (B,) float64, in nats a token."""
        ...


class NGramJudge:
    """An n-gram model with Witten-Bell smoothing: each context shares what it has not seen with the next shorter one.

    P(w | h) = (c(h w) + T(h) P(w | h')) / (c(h) + T(h)), where c counts in the training text, T(h) is the number of
    different tokens seen after h, h' is h without its first token, and the shortest context backs off to 1 / N. The
    first tokens of a sequence are judged by what little stands before them.

    Args:
        order: tokens in an n-gram; 1 looks at no context.
        vocab_size: N.

    Raises:
        ValueError: an argument is below 1.

    Example:
        >>> judge = NGramJudge(order=2, vocab_size=2).fit(torch.tensor([[0, 1, 0, 1, 0, 1, 0, 1]]))
        >>> judge.nll(torch.tensor([[0, 1, 0, 1], [0, 0, 1, 1]])).exp()
        tensor([1.2961, 3.6515], dtype=torch.float64)
    """

    def __init__(self, order: int, vocab_size: int) -> None:
        check_count("order", order)
        check_count("vocab_size", vocab_size)
        self.order = order
        self.vocab_size = vocab_size
        # One entry a level: the known n-grams as sorted keys, how often each came, and for each context how often it
        # came and how many different tokens followed. The number of an n-gram is its place among the keys; the key of
        # a longer one is its context's number times N plus its last token.
        self._keys: list[_Ints] = []
        self._counts: list[_Floats] = []
        self._totals: list[_Floats] = []
        self._types: list[_Floats] = []

    def fit(self, tokens: Tensor, *, padding: Tensor | None = None) -> NGramJudge:
        """Count the n-grams of a training text, forgetting any earlier one, and return the judge.

        Args:
            tokens: (B, L) int64; n-grams do not cross from one sequence to the next.
            padding: (B, L) bool, tokens that are no text, or None.

        Raises:
            ValueError: a token is out of range, a shape does not match, or there is no token.
        """
        array = self._array(tokens)
        if padding is not None:
            check_tensor("padding", padding)
            if padding.dtype != torch.bool:
                raise TypeError(f"padding: got dtype {padding.dtype}, expected bool")
        text = np.ones(array.shape, dtype=bool) if padding is None else ~padding.cpu().numpy()
        if text.shape != array.shape:
            raise ValueError(f"padding: got shape {text.shape}, expected {array.shape} as in tokens")
        if not text.any():
            raise ValueError("tokens: got no token, expected a text to count")
        self._keys, self._counts, self._totals, self._types = [], [], [], []
        contexts, contexts_known = np.zeros_like(array), 1
        for _ in range(self.order):
            keys = np.where((contexts >= 0) & text, contexts * self.vocab_size + array, -1)
            known, numbers, counts = np.unique(keys[keys >= 0], return_inverse=True, return_counts=True)
            if not len(known):
                break  # the text has no n-gram so long
            owners = known // self.vocab_size
            self._keys.append(known)
            self._counts.append(counts.astype(np.float64))
            self._totals.append(np.bincount(owners, weights=counts, minlength=contexts_known).astype(np.float64))
            self._types.append(np.bincount(owners, minlength=contexts_known).astype(np.float64))
            grams = np.full_like(array, -1)
            grams[keys >= 0] = numbers
            contexts, contexts_known = _shifted(grams), len(known)
        return self

    def token_nll(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood of each token given those before it: (B, L) float64, in nats.

        Args:
            tokens: (B, L) int64.

        Raises:
            ValueError: a token is out of range, or nothing was fitted.
        """
        array = self._array(tokens)
        if not self._keys:
            raise ValueError("fit: expected to be called before judging")
        chance = np.full(array.shape, 1 / self.vocab_size)
        contexts = np.zeros_like(array)
        for keys, counts, totals, types in zip(self._keys, self._counts, self._totals, self._types, strict=True):
            numbers = _find(np.where(contexts >= 0, contexts * self.vocab_size + array, -1), keys)
            seen = np.where(numbers >= 0, counts[numbers], 0)
            total, different = (np.where(contexts >= 0, of_context[contexts], 0) for of_context in (totals, types))
            # A context that never came says nothing: the shorter one's chance stands.
            weight = np.maximum(total + different, 1)
            chance = np.where(total > 0, (seen + different * chance) / weight, chance)
            contexts = _shifted(numbers)
        return torch.from_numpy(-np.log(chance))

    def nll(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood of sequences (B, L) int64: (B,) float64, in nats a token.

        Raises:
            ValueError: a token is out of range, or nothing was fitted.
        """
        return self.token_nll(tokens).mean(1)

    def _array(self, tokens: Tensor) -> _Ints:
        check_tokens("tokens", tokens, self.vocab_size)
        return tokens.cpu().numpy().astype(np.int64)


def _shifted(grams: _Ints) -> _Ints:
    """Return at each place the n-gram that ends just before it, -1 where none does."""
    before = np.full_like(grams, -1)
    before[:, 1:] = grams[:, :-1]
    return before


def _find(keys: _Ints, known: _Ints) -> _Ints:
    """Return the place of each key among the sorted known ones, or -1."""
    places = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.where(known[places] == keys, places, -1)


def token_entropy(tokens: Tensor) -> float:
    """Return the entropy of the tokens inside a sequence, in nats, averaged over sequences (B, L) int64.

    A model that repeats itself pleases a judge of likelihood; this figure then falls below that of the data.

    Raises:
        ValueError: there is no token.

    Example:
        >>> round(token_entropy(torch.tensor([[5, 5, 5, 5], [0, 0, 1, 1]])), 4)
        0.3466
    """
    if tokens.ndim != 2 or not tokens.numel():
        raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected (B, L) with at least one token")
    ordered = tokens.cpu().sort(1).values
    # Runs of equal tokens in a sorted sequence are the counts; each token of a run of n stands for -log(n / L) / L.
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    runs = starts.flatten().cumsum(0) - 1
    frequency = runs.bincount()[runs].double() / tokens.shape[1]
    return float(frequency.log().mean().abs())
