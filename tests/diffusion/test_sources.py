"""Exact sources against enumeration of everything they can say."""

import itertools
import math

import pytest
import torch

from spotlights.diffusion.sources import BracketGrammar, HiddenMarkovModel


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def everything(vocab_size, length):
    return torch.tensor(list(itertools.product(range(vocab_size), repeat=length)))


def hidden_markov_model():
    return HiddenMarkovModel.random(3, 4, generator=generator(1))


def paths_likelihood(model, row):
    """Sum over every path of hidden states."""
    total = 0.0
    for path in itertools.product(range(len(model.initial)), repeat=len(row)):
        chance = model.initial[path[0]] * model.emission[path[0], row[0]]
        for before, state, token in zip(path, path[1:], row[1:], strict=False):
            chance = chance * model.transition[before, state] * model.emission[state, token]
        total += float(chance)
    return total


def dyck_words(pairs):
    """Every nesting of so many brackets, as lists of the partner of each place."""
    for word in itertools.product((True, False), repeat=2 * pairs):
        partners, stack = [0] * len(word), []
        for place, opens in enumerate(word):
            if opens:
                stack.append(place)
            elif not stack:
                break
            else:
                partners[stack.pop()] = place
        else:
            if not stack:
                yield [(start, partner) for start, partner in enumerate(partners) if partner]


def trees_likelihood(grammar, row):
    """Sum over every nesting and every choice of kinds."""
    other = grammar.noise / grammar.vocab_size

    def emission(wanted, token):
        return 1 - grammar.noise + other if wanted == token else other

    words = list(dyck_words(len(row) // 2))
    total = 0.0
    for word in words:
        for kinds in itertools.product(range(grammar.kinds), repeat=len(word)):
            chance = 1 / len(words) / grammar.kinds ** len(word)
            for (start, end), kind in zip(word, kinds, strict=True):
                chance *= emission(2 * kind, row[start]) * emission(2 * kind + 1, row[end])
            total += chance
    return total


def test_forward_algorithm_equals_the_sum_over_paths():
    model = hidden_markov_model()
    tokens = everything(4, 4)
    likelihood = model.log_likelihood(tokens).exp()
    assert float(likelihood.sum()) == pytest.approx(1, abs=1e-12)
    for index in (0, 17, 100, 255):
        assert float(likelihood[index]) == pytest.approx(paths_likelihood(model, tokens[index].tolist()), rel=1e-10)


def test_inside_algorithm_equals_the_sum_over_trees():
    grammar = BracketGrammar(kinds=2, noise=0.3)
    tokens = everything(4, 6)
    likelihood = grammar.log_likelihood(tokens).exp()
    assert float(likelihood.sum()) == pytest.approx(1, abs=1e-12)
    for index in (0, 5, 1234, 4095):
        assert float(likelihood[index]) == pytest.approx(trees_likelihood(grammar, tokens[index].tolist()), rel=1e-10)


@pytest.mark.parametrize("source", [hidden_markov_model(), BracketGrammar(kinds=2, noise=0.2)], ids=["hmm", "brackets"])
def test_samples_come_as_often_as_the_likelihood_says(source):
    tokens = everything(4, 4)
    drawn = source.sample(20_000, 4, generator(2))
    codes = (drawn * torch.tensor([64, 16, 4, 1])).sum(1)
    seen = codes.bincount(minlength=256).double()
    expected = 20_000 * source.log_likelihood(tokens).exp()
    common = expected > 5
    rare = torch.stack([seen[~common].sum(), expected[~common].sum()])
    statistic = float(
        ((seen - expected)[common].square() / expected[common]).sum() + (rare[0] - rare[1]) ** 2 / rare[1]
    )
    # A chi-square variable passes its mean by five standard deviations once in a million.
    freedom = int(common.sum())
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_entropy_rate_of_known_sources():
    stuck = HiddenMarkovModel(torch.full((4,), 0.25), torch.eye(4), torch.eye(4))
    rate = stuck.entropy_rate(5, samples=64, generator=generator())
    assert rate.nats_per_token == pytest.approx(math.log(4) / 5)
    assert rate.error < 1e-12
    tokens = everything(4, 5)
    model = hidden_markov_model()
    exact = float(-(model.log_likelihood(tokens).exp() * model.log_likelihood(tokens)).sum() / 5)
    estimate = model.entropy_rate(5, samples=8192, generator=generator(3))
    assert abs(estimate.nats_per_token - exact) < 4 * estimate.error


def test_long_sequences_stay_finite():
    grammar = BracketGrammar(kinds=4, noise=1e-3)
    clean = grammar.sample(3, 120, generator())
    assert bool(grammar.nll(clean).isfinite().all())
    assert bool((grammar.nll(torch.zeros(1, 120, dtype=torch.int64)) > 2 * grammar.nll(clean).max()).all())
    model = hidden_markov_model()
    assert bool(model.nll(model.sample(2, 5000, generator())).isfinite().all())


def test_chances_near_the_smallest_number():
    rare = HiddenMarkovModel(torch.ones(1), torch.ones(1, 1), torch.tensor([[1.0, 1e-320]], dtype=torch.float64))
    found = rare.log_likelihood(torch.tensor([[1, 0, 0]]))
    assert float(found) == pytest.approx(math.log(1e-320))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tokens_are_integers(dtype):
    for source in (hidden_markov_model(), BracketGrammar()):
        with pytest.raises(TypeError, match=f"^tokens: got dtype {dtype}"):
            source.nll(torch.zeros(1, 4, dtype=dtype))


def test_impossible_sequences_have_no_likelihood():
    alternating = HiddenMarkovModel(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.eye(2))
    assert alternating.log_likelihood(torch.tensor([[0, 1, 0], [0, 0, 1]])).tolist() == [0, -math.inf]


def test_the_first_state_is_stationary():
    model = hidden_markov_model()
    torch.testing.assert_close(model.initial @ model.transition, model.initial)


def test_samples_follow_the_generator():
    for source in (hidden_markov_model(), BracketGrammar()):
        assert torch.equal(source.sample(4, 8, generator(7)), source.sample(4, 8, generator(7)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: HiddenMarkovModel(torch.ones(2), torch.eye(2), torch.eye(2)), "initial: expected rows"),
        (lambda: HiddenMarkovModel(torch.ones(1), torch.eye(2), torch.eye(2)), "got shapes"),
        (lambda: HiddenMarkovModel(torch.tensor(1.0), torch.eye(1), torch.eye(1)), "got shapes"),
        (lambda: HiddenMarkovModel(torch.ones(1), torch.eye(1), torch.ones(1)), "got shapes"),
        (lambda: HiddenMarkovModel(torch.ones(1), torch.eye(1), torch.tensor([[math.nan, 1]])), "emission: expected"),
        (lambda: hidden_markov_model().entropy_rate(4, samples=1), "samples: got 1, expected at least 2"),
        (lambda: hidden_markov_model().nll(torch.tensor([[0, 4]])), "tokens: got token 4, expected ids from 0 to 3"),
        (lambda: hidden_markov_model().nll(torch.tensor([0, 1])), r"tokens: got shape \(2,\)"),
        (lambda: BracketGrammar().nll(torch.tensor([[0, 1, 0]])), "length: got 3, expected an even number"),
        (lambda: BracketGrammar(kinds=0), "kinds: got 0"),
        (lambda: BracketGrammar(noise=0.0), "noise: got 0.0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
