"""Sources of token sequences whose likelihood is known exactly: they train models and judge what these generate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spotlights.diffusion.checks import check_count, check_tokens


@dataclass(frozen=True)
class EntropyRate:
    """An entropy in nats a token, estimated from samples, and the standard error of the estimate."""

    nats_per_token: float
    error: float


class Source(ABC):
    """A distribution over sequences of the tokens 0 to ``vocab_size`` - 1; it is a judge of samples, too."""

    vocab_size: int

    @abstractmethod
    def sample(self, n: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Return ``n`` sequences, (n, length) int64."""

    @abstractmethod
    def log_likelihood(self, tokens: Tensor) -> Tensor:
        """Return the exact log-probability of sequences (B, L) int64 among all of that length: (B,) float64, nats.

        Raises:
            ValueError: a token is out of range, or no sequence has that length.
        """

    def nll(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood in nats a token, (B,) float64, of sequences (B, L) int64."""
        return -self.log_likelihood(tokens) / tokens.shape[1]

    def entropy_rate(
        self, length: int, *, samples: int = 4096, generator: torch.Generator | None = None
    ) -> EntropyRate:
        """Estimate the entropy of sequences of one length, by the mean exact NLL of samples.

        Raises:
            ValueError: less than 2 samples.
        """
        check_count("samples", samples, least=2)
        nll = self.nll(self.sample(samples, length, generator))
        return EntropyRate(float(nll.mean()), float(nll.std()) / math.sqrt(samples))

    def _check(self, tokens: Tensor) -> None:
        if tokens.ndim != 2 or not tokens.shape[1]:
            raise ValueError(f"tokens: got shape {tuple(tokens.shape)}, expected (B, L) with L of at least 1")
        check_tokens("tokens", tokens, self.vocab_size)


class HiddenMarkovModel(Source):
    """A Markov chain over hidden states, each of which emits one token; likelihoods by the forward algorithm.

    Args:
        initial: (S,) floating, chances of the first state.
        transition: (S, S) floating; row i holds the chances of the state after i.
        emission: (S, V) floating; row i holds the chances of the tokens of state i.

    Raises:
        ValueError: the shapes do not fit, or a row is no distribution.

    Example:
        >>> coin = HiddenMarkovModel(torch.ones(1), torch.ones(1, 1), torch.tensor([[0.25, 0.75]]))
        >>> coin.log_likelihood(torch.tensor([[0, 1]])).exp()
        tensor([0.1875], dtype=torch.float64)
    """

    def __init__(self, initial: Tensor, transition: Tensor, emission: Tensor) -> None:
        states = initial.numel()
        emitting = emission.ndim == 2 and len(emission) == states
        if initial.ndim != 1 or transition.shape != (states, states) or not emitting:
            shapes = ", ".join(str(tuple(table.shape)) for table in (initial, transition, emission))
            raise ValueError(f"initial, transition, emission: got shapes {shapes}, expected (S,), (S, S), (S, V)")
        tables = {"initial": initial, "transition": transition, "emission": emission}
        for name, table in tables.items():
            if not bool((table >= 0).all()) or not bool(((table.sum(-1) - 1).abs() <= 1e-5).all()):
                raise ValueError(f"{name}: expected rows of numbers of 0 or more that sum to 1")
        self.initial, self.transition, self.emission = (
            table.double() / table.double().sum(-1, keepdim=True) for table in tables.values()
        )
        self.vocab_size = emission.shape[1]

    @classmethod
    def random(
        cls, states: int, vocab_size: int, *, sharpness: float = 2.5, generator: torch.Generator | None = None
    ) -> HiddenMarkovModel:
        """Return a model of softmaxes of normal draws times ``sharpness``: 0 is noise, 10 nearly certain."""

        def rows(*shape: int) -> Tensor:
            return torch.softmax(sharpness * torch.randn(*shape, dtype=torch.float64, generator=generator), -1)

        transition = rows(states, states)
        # Far along the chain every start is forgotten: the rows of a high power are the stationary distribution.
        stationary = torch.linalg.matrix_power(transition, 1 << 12).mean(0)
        return cls(stationary / stationary.sum(), transition, rows(states, vocab_size))

    def sample(self, n: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Return ``n`` sequences, (n, length) int64."""
        state = torch.multinomial(self.initial, n, replacement=True, generator=generator)
        tokens = torch.empty(n, length, dtype=torch.int64)
        for place in range(length):
            tokens[:, place] = torch.multinomial(self.emission[state], 1, generator=generator)[:, 0]
            state = torch.multinomial(self.transition[state], 1, generator=generator)[:, 0]
        return tokens

    def log_likelihood(self, tokens: Tensor) -> Tensor:
        """Return the exact log-probability of sequences (B, L) int64: (B,) float64, in nats.

        Raises:
            ValueError: a token is out of range.
        """
        self._check(tokens)
        emitted = self.emission.T[tokens.cpu()]
        state = self.initial.expand(len(tokens), -1)
        total = torch.zeros(len(tokens), dtype=torch.float64)
        for place in range(tokens.shape[1]):
            joint = state * emitted[:, place]
            chance = joint.sum(1)
            total += chance.log()
            state = (joint / torch.where(chance > 0, chance, 1)[:, None]) @ self.transition
        return total


class BracketGrammar(Source):
    """Balanced brackets of several kinds, some tokens replaced at random; likelihoods by the inside algorithm.

    The grammar is S -> (_a S )_a S or nothing. All nestings of one length are equally likely, all kinds too, and each
    token is then replaced with chance ``noise`` by one drawn uniformly. Kind a opens with token 2 a and closes with
    2 a + 1. Sequences have an even length.

    Args:
        kinds: of brackets.
        noise: chance of a random token, above 0 so that every sequence is possible.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> grammar = BracketGrammar(kinds=1, noise=1e-9)
        >>> grammar.log_likelihood(torch.tensor([[0, 0, 1, 1], [0, 1, 0, 1]])).exp()
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    def __init__(self, kinds: int = 4, noise: float = 0.02) -> None:
        check_count("kinds", kinds)
        if not 0 < noise < 1:
            raise ValueError(f"noise: got {noise}, expected a number between 0 and 1, both excluded")
        self.kinds = kinds
        self.noise = noise
        self.vocab_size = 2 * kinds

    def sample(self, n: int, length: int, generator: torch.Generator | None = None) -> Tensor:
        """Return ``n`` sequences, (n, length) int64.

        Raises:
            ValueError: ``length`` is odd.
        """
        self._check_length(length)
        # ways[r, d]: how many balanced endings r tokens have while d brackets are open.
        ways = torch.zeros(length + 1, length + 3, dtype=torch.float64)
        ways[0, 0] = 1
        for left in range(1, length + 1):
            ways[left, 0] = ways[left - 1, 1]
            ways[left, 1:-1] = ways[left - 1, :-2] + ways[left - 1, 2:]
        depth = torch.zeros(n, dtype=torch.int64)
        kinds = torch.randint(self.kinds, (n, length), generator=generator)
        coins = torch.rand(n, length, dtype=torch.float64, generator=generator)
        open_kinds = torch.zeros(n, length + 1, dtype=torch.int64)
        tokens = torch.empty(n, length, dtype=torch.int64)
        rows = torch.arange(n)
        for place in range(length):
            left = length - place
            opens = coins[:, place] * ways[left, depth] < ways[left - 1, depth + 1]
            level = torch.where(opens, depth, depth - 1)
            kind = torch.where(opens, kinds[:, place], open_kinds[rows, level])
            open_kinds[rows, level] = kind
            tokens[:, place] = 2 * kind + (~opens).long()
            depth = torch.where(opens, depth + 1, depth - 1)
        replaced = torch.rand(n, length, generator=generator) < self.noise
        return torch.where(replaced, torch.randint(self.vocab_size, (n, length), generator=generator), tokens)

    def log_likelihood(self, tokens: Tensor) -> Tensor:
        """Return the exact log-probability of sequences (B, L) int64 among all of length L: (B,) float64, in nats.

        Raises:
            ValueError: a token is out of range, or L is odd.
        """
        self._check(tokens)
        length = tokens.shape[1]
        self._check_length(length)
        other = self.noise / self.vocab_size
        emission = torch.full((self.vocab_size, self.vocab_size), other, dtype=torch.float64)
        emission.fill_diagonal_(1 - self.noise + other)
        emitted = emission.log()[:, tokens.cpu()].movedim(0, -1)
        opened, closed = emitted[..., 0::2], emitted[..., 1::2]
        # inside[w][:, i]: log-weight of a balanced span of w tokens from i; paired[w]: of one whose ends match.
        inside = {0: torch.zeros(len(tokens), length + 1, dtype=torch.float64)}
        paired: dict[int, Tensor] = {}
        for width in range(2, length + 1, 2):
            starts = length - width + 1
            ends = opened[:, :starts] + closed[:, width - 1 :]
            paired[width] = ends.logsumexp(-1) - math.log(self.kinds) + inside[width - 2][:, 1 : starts + 1]
            parts = [
                paired[first][:, :starts] + inside[width - first][:, first : first + starts]
                for first in range(2, width + 1, 2)
            ]
            inside[width] = torch.stack(parts).logsumexp(0)
        return inside[length][:, 0] - math.log(_catalan(length // 2))

    def _check_length(self, length: int) -> None:
        if length < 2 or length % 2:
            raise ValueError(f"length: got {length}, expected an even number of at least 2")


def _catalan(pairs: int) -> int:
    return math.comb(2 * pairs, pairs) // (pairs + 1)
