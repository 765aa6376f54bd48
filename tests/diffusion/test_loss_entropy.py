"""The bound's exact mean over data and noise: the entropy, where the model is the leave-one-out posterior."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from spotlights.diffusion import CosineSchedule, NoiseKernel, PolynomialSchedule, nelbo


def quadrature(count, power=3):
    """Times in (0, 1), dense near 0, and their weights, whose sum is 1."""
    nodes, weights = np.polynomial.legendre.leggauss(count)
    u = (nodes + 1) / 2
    return torch.tensor(u**power), torch.tensor(weights / 2 * power * u ** (power - 1))


def expected_bound(kernel, pi, joint, logits_of, times, weights, steps=None):
    """The bound's exact mean over sequences x of the table ``joint``, all z, and weighted times.

    ``logits_of(z, t)`` takes (n, L) tokens and (n,) times.
    """
    size, length = len(pi), joint.ndim
    xs = [x for x in itertools.product(range(joint.shape[0]), repeat=length) if joint[x] > 0]
    rows = list(itertools.product(xs, itertools.product(range(size), repeat=length)))
    x, z = torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
    prior = joint[tuple(x.T)]
    total = 0.0
    for t, weight in zip(times.tolist(), weights.tolist(), strict=True):
        alpha = float(kernel.alpha(torch.tensor(t, dtype=torch.float64)))
        weight_of = prior * (alpha * (x == z).double() + (1 - alpha) * pi[z]).prod(1) * weight
        here = weight_of > 0
        when = torch.full((int(here.sum()),), t, dtype=torch.float64)
        logits = logits_of(z[here], when)
        values = nelbo(logits[0], x[here], z[here], when, kernel, steps=steps, parameterization=logits[1]).sum(1)
        total += float((weight_of[here] * values).sum())
    return total


def entropy(p):
    return float(-(p[p > 0] * p[p > 0].log()).sum())


def evidence(z, alpha, pi, symbols):
    """q(z_i | x_i = e) for every data token e, (n, L, symbols)."""
    return (
        alpha[:, None, None] * one_hot(z, len(pi))[..., :symbols].double() + ((1 - alpha[:, None]) * pi[z])[..., None]
    )


def posterior_given_others(z, alpha, pi, joint, own):
    """P(x_i = e | z_j for j != i), with z_i too where ``own``, from the table, (n, L, N); 0 for the mask at the end."""
    symbols, length = joint.shape[0], joint.ndim
    like = evidence(z, alpha, pi, symbols)
    result = torch.zeros(*z.shape, len(pi), dtype=torch.float64)
    for i in range(length):
        table = joint.expand(len(z), *joint.shape)
        for j in range(length):
            if j != i or own:
                view = [len(z)] + [symbols if axis == j else 1 for axis in range(length)]
                table = table * like[:, j].view(view)
        others = [axis + 1 for axis in range(length) if axis != i]
        marginal = table.sum(others) if others else table
        result[:, i, :symbols] = marginal / marginal.sum(-1, keepdim=True)
    return result


class TestEntropy:
    """The bound is exact where the model is the leave-one-out posterior, whatever the noise."""

    # six tokens and the mask; entropy 1.631
    PRIOR = torch.tensor(np.random.default_rng(1).random(6))
    PRIOR = PRIOR / PRIOR.sum()

    def bound(self, definition, k, power, own, parameterization="loo", steps=None, schedule=None):
        pi = definition.pi(7, 6, k)
        kernel = NoiseKernel.mixed(7, 6, k, schedule=schedule)
        if steps is None:
            times, weights = quadrature(80, power)
        else:
            times = torch.arange(1, steps + 1, dtype=torch.float64) / steps
            weights = torch.full((steps,), 1 / steps, dtype=torch.float64)

        def logits_of(z, t):
            p = posterior_given_others(z, kernel.alpha(t), pi, self.PRIOR, own)
            return p.log(), parameterization

        return expected_bound(kernel, pi, self.PRIOR, logits_of, times, weights, steps)

    @pytest.mark.parametrize("k", [0.0, 0.1, 0.5, 1.0])
    @pytest.mark.parametrize(
        "schedule", [None, CosineSchedule(), PolynomialSchedule(2)], ids=["linear", "cosine", "square"]
    )
    def test_one_token(self, definition, k, schedule):
        assert self.bound(definition, k, 5, own=False, schedule=schedule) == pytest.approx(
            entropy(self.PRIOR), abs=2e-7
        )

    @pytest.mark.parametrize("steps", [1, 2, 9])
    @pytest.mark.parametrize("k", [0.0, 0.1, 0.5, 1.0])
    def test_one_token_in_any_number_of_steps(self, definition, k, steps):
        # One token's chain is reversed exactly by every step.
        bound = self.bound(definition, k, 3, own=False, steps=steps)
        assert bound == pytest.approx(entropy(self.PRIOR), abs=1e-12)

    @pytest.mark.parametrize(("k", "expected"), [(0.0, 1.631), (0.1, 1.93), (0.5, 2.30), (1.0, 2.49)])
    def test_what_all_of_z_says_is_no_optimum(self, definition, k, expected):
        assert entropy(self.PRIOR) == pytest.approx(1.631, abs=5e-4)
        assert self.bound(definition, k, 5, own=True) == pytest.approx(expected, abs=6e-3)

    @pytest.mark.parametrize("k", [0.0, 0.1, 0.5, 1.0])
    def test_a_denoiser_reaches_the_optimum_when_told_so(self, definition, k):
        bound = self.bound(definition, k, 5, own=True, parameterization="denoiser")
        assert bound == pytest.approx(entropy(self.PRIOR), abs=2e-7)

    @pytest.mark.parametrize("parameterization", ["loo", "denoiser"])
    @pytest.mark.parametrize("k", [0.0, 0.1, 0.5, 1.0])
    @pytest.mark.parametrize(("symbols", "length"), [(3, 2), (2, 3)])
    def test_sequences(self, definition, symbols, length, k, parameterization):
        joint = torch.randn((symbols,) * length, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        joint = (joint * 1.5).exp() / (joint * 1.5).exp().sum()
        pi, kernel = definition.pi(symbols + 1, symbols, k), NoiseKernel.mixed(symbols + 1, symbols, k)

        def logits_of(z, t):
            own = parameterization == "denoiser"
            return posterior_given_others(z, 1 - t, pi, joint, own).log(), parameterization

        bound = expected_bound(kernel, pi, joint, logits_of, *quadrature(40, 5))
        assert bound == pytest.approx(entropy(joint), abs=1e-6)
        coarse = expected_bound(
            kernel, pi, joint, logits_of, torch.tensor([0.5, 1.0]).double(), torch.tensor([0.5, 0.5]).double(), steps=2
        )
        assert coarse > entropy(joint) + 1e-3
