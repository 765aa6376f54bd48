"""The n-gram judge against counting by hand, and the entropy of tokens."""

import itertools
import math
from collections import Counter

import pytest
import torch

from spotlights.diffusion.judges import NGramJudge, token_entropy

TEXT = torch.randint(0, 4, (6, 30), generator=torch.Generator().manual_seed(3))


def chance(word, context, sequences, vocab_size):
    """Witten-Bell by the formula, with dictionaries."""
    shorter = chance(word, context[1:], sequences, vocab_size) if context else 1 / vocab_size
    n = len(context)
    after = Counter(
        sequence[i + n] for sequence in sequences for i in range(len(sequence) - n) if sequence[i : i + n] == context
    )
    total, different = after.total(), len(after)
    return (after[word] + different * shorter) / (total + different) if total else shorter


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_equals_the_formula(order):
    sequences = TEXT.tolist()
    tokens = torch.randint(0, 5, (3, 12), generator=torch.Generator().manual_seed(4))
    expected = [
        [-math.log(chance(row[i], row[max(0, i - order + 1) : i], sequences, 5)) for i in range(len(row))]
        for row in tokens.tolist()
    ]
    judge = NGramJudge(order, 5).fit(TEXT)
    torch.testing.assert_close(judge.token_nll(tokens), torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(judge.nll(tokens), torch.tensor(expected, dtype=torch.float64).mean(1))


@pytest.mark.parametrize("order", [1, 3, 6])
def test_is_a_distribution_over_whole_sequences(order):
    judge = NGramJudge(order, 3).fit(TEXT % 2)
    everything = torch.tensor(list(itertools.product(range(3), repeat=7)))
    assert float((-7 * judge.nll(everything)).exp().sum()) == pytest.approx(1, abs=1e-12)


def test_longer_contexts_help_and_nonsense_is_punished():
    pattern = torch.arange(400).remainder(7).square().remainder(7).view(8, 50)
    losses = [float(NGramJudge(order, 7).fit(pattern).nll(pattern).mean()) for order in (1, 2, 3)]
    assert losses[0] > losses[1] > losses[2]
    shuffled = pattern[:, torch.randperm(50, generator=torch.Generator().manual_seed(0))]
    assert float(NGramJudge(3, 7).fit(pattern).nll(shuffled).mean()) > 3 * losses[2]


def test_padding_is_not_counted():
    padding = torch.zeros_like(TEXT, dtype=torch.bool)
    padding[-1, 20:] = True
    padding[0, :] = True
    judge = NGramJudge(3, 5).fit(TEXT, padding=padding)
    sequences = [*TEXT[1:-1].tolist(), TEXT[-1, :20].tolist()]
    row = [0, 3, 3, 1, 2, 0]
    expected = [-math.log(chance(row[i], row[max(0, i - 2) : i], sequences, 5)) for i in range(6)]
    torch.testing.assert_close(judge.token_nll(torch.tensor([row]))[0], torch.tensor(expected, dtype=torch.float64))


def test_a_large_vocabulary_does_not_overflow():
    tokens = torch.randint(0, 126_464, (4, 100), generator=torch.Generator().manual_seed(5))
    judge = NGramJudge(6, 126_464).fit(tokens)
    # A token seen once in 400, all different; the sixth has been seen in one context only.
    assert float(judge.token_nll(tokens)[0, 0]) == pytest.approx(math.log(800), rel=0.01)
    assert bool((judge.token_nll(tokens)[:, 5] < 0.05).all())


def test_fit_forgets_the_text_before():
    again = NGramJudge(3, 5).fit(TEXT % 2).fit(TEXT)
    torch.testing.assert_close(again.nll(TEXT), NGramJudge(3, 5).fit(TEXT).nll(TEXT))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NGramJudge(0, 5), "order: got 0"),
        (lambda: NGramJudge(2, 5).nll(TEXT), "fit: expected to be called"),
        (lambda: NGramJudge(2, 3).fit(TEXT), "tokens: got token 3, expected ids from 0 to 2"),
        (lambda: NGramJudge(2, 5).fit(TEXT[0]), r"tokens: got shape \(30,\)"),
        (lambda: NGramJudge(2, 5).fit(TEXT, padding=torch.ones(2, 2, dtype=torch.bool)), "padding: got shape"),
        (lambda: NGramJudge(2, 5).fit(TEXT, padding=torch.ones_like(TEXT).bool()), "got no token"),
        (lambda: token_entropy(TEXT[:0]), "at least one token"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_dtypes():
    with pytest.raises(TypeError, match=r"^tokens: got dtype torch.float32"):
        NGramJudge(2, 5).fit(TEXT.float())
    with pytest.raises(TypeError, match=r"^padding: got dtype torch.int64, expected bool"):
        NGramJudge(2, 5).fit(TEXT, padding=torch.zeros_like(TEXT))
    with pytest.raises(TypeError, match=r"^order: got 2.5, expected an integer"):
        NGramJudge(2.5, 5)


def test_token_entropy():
    assert token_entropy(torch.arange(16).view(2, 8)) == pytest.approx(math.log(8))
    assert token_entropy(torch.full((3, 8), 7)) == 0
    mixed = torch.tensor([[0, 1, 1, 1], [2, 2, 2, 2]])
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / 2
    assert token_entropy(mixed) == pytest.approx(expected)
