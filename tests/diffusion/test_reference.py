"""The dense reference against Bayes' rule over the joint of x, z_s and z_t."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import one_hot

from spotlights.diffusion import CosineSchedule, NoiseKernel, posterior, reference

NOISES = [(2, 1, 0.5), (4, 0, 0.0), (5, 0, 0.1), (6, 2, 0.5), (9, 8, 1e-3), (9, 8, 1.0), (4, None, 1.0)]
CUSTOM = torch.tensor([0.3, 0.0, 0.2, 0.5, 0.0], dtype=torch.float64)
STEPS = [(1.0, 0.0), (1.0, 0.7), (0.6, 0.0), (0.6, 0.59), (0.3, 0.1)]


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def kernels(definition, noise):
    if noise == "custom":
        return NoiseKernel(CUSTOM, mask_id=3), CUSTOM, 3
    return NoiseKernel.mixed(*noise), definition.pi(*noise), noise[1]


@pytest.mark.parametrize("noise", [*NOISES, "custom"], ids=str)
class TestBayes:
    @pytest.mark.parametrize("step", STEPS, ids=str)
    def test_posterior(self, definition, noise, step):
        kernel, pi, mask_id = kernels(definition, noise)
        t, s = step
        z = torch.arange(len(pi))[None]
        logits = random(1, len(pi), len(pi))
        p = definition.probabilities(logits, mask_id)
        actual = posterior(logits, z, t, s, kernel)
        for token in range(len(pi)):
            if t == 1 and pi[token] == 0:
                continue  # no token is there
            expected = definition.bayes(p[0, token], token, number(1 - t), number(1 - s), pi)
            torch.testing.assert_close(actual[0, token], expected, rtol=0, atol=6e-16)

    def test_stay_or_redraw(self, definition, noise):
        # keep z with probability w, else draw from f_s: the rule that the sampler follows
        kernel, pi, mask_id = kernels(definition, noise)
        t, s = 0.6, 0.35
        z = torch.arange(len(pi))[None]
        logits = random(1, len(pi), len(pi))
        p = definition.probabilities(logits, mask_id)
        f_t, f_s = (definition.marginal(p, number(1 - v), pi) for v in (t, s))
        stay = (1 - t) / (1 - s) * f_s.diagonal(0, 1, 2) / f_t.diagonal(0, 1, 2)
        stay = torch.where((pi == 0) & (stay.isnan()), 1, stay)[..., None]
        rule = stay * one_hot(z, len(pi)) + (1 - stay) * f_s
        torch.testing.assert_close(posterior(logits, z, t, s, kernel), rule, rtol=0, atol=6e-16)

    def test_marginals_follow_from_each_other(self, definition, noise):
        kernel, pi, _ = kernels(definition, noise)
        size, t, s = len(pi), number(0.8), number(0.3)
        every = torch.arange(size)
        to = torch.stack([reference.transition(z, t, s, kernel) for z in every], dim=-1)  # (from, to)
        torch.testing.assert_close(to, definition.matrix(0.2 / 0.7, pi), rtol=1e-14, atol=1e-15)
        data = torch.eye(size, dtype=torch.float64)
        early, late = (reference.marginal(data, v.expand(size), kernel) for v in (s, t))
        torch.testing.assert_close(early @ to, late, rtol=1e-14, atol=1e-15)
        torch.testing.assert_close(late, 0.2 * data + 0.8 * pi, rtol=1e-14, atol=1e-15)

    @pytest.mark.parametrize("step", [(1.0, 0.5), (0.6, 0.0), (0.6, 0.4)], ids=str)
    def test_step_kl(self, definition, noise, step):
        kernel, pi, mask_id = kernels(definition, noise)
        t, s = step
        x, z = definition.pairs(pi, mask_id)
        logits = random(1, x.shape[1], len(pi))
        p = definition.probabilities(logits, mask_id)
        actual = reference.step_kl(logits, x, z, t, s, kernel)
        for place, (a, b) in enumerate(zip(x[0], z[0], strict=True)):
            if t == 1 and pi[b] == 0:
                continue
            guess, true = (
                definition.bayes(v, b, number(1 - t), number(1 - s), pi)
                for v in (p[0, place], one_hot(a, len(pi)).double())
            )
            expected = sum(float(q * (q / r).log()) for q, r in zip(true, guess, strict=True) if q > 0)
            assert float(actual[0, place]) == pytest.approx(expected, rel=1e-11, abs=1e-13)

    def test_nelbo(self, definition, noise):
        kernel, pi, mask_id = kernels(definition, noise)
        x, z = definition.pairs(pi, mask_id)
        logits = random(1, x.shape[1], len(pi))
        p = definition.probabilities(logits, mask_id)
        for t in (0.01, 0.5, 0.99):
            expected = definition.nelbo(p, x, z, torch.full(x.shape, 1 - t, dtype=torch.float64), -1.0, pi)
            torch.testing.assert_close(reference.nelbo(logits, x, z, t, kernel), expected, rtol=1e-11, atol=1e-12)

    def test_a_denoisers_answer_leaves_the_prior(self, definition, noise):
        # One token: E[x | z] is the prior times what z says, and the correction takes z's part out of it.
        kernel, pi, mask_id = kernels(definition, noise)
        prior = definition.probabilities(random(len(pi)), mask_id)
        for t in (0.1, 0.7):
            rows = []
            for z in range(len(pi)):
                like = (1 - t) * one_hot(torch.tensor(z), len(pi)).double() + t * pi[z]
                rows.append((prior * like).log())
            z = torch.tensor([[token for token in range(len(pi)) if pi[token] > 0]])
            logits = torch.stack(rows)[z]
            when = number(t).expand(z.shape)
            p = reference.probabilities(logits, z, when, kernel, "denoiser")
            torch.testing.assert_close(p, prior.expand_as(p), rtol=1e-12, atol=1e-14)


class TestPosterior:
    def test_what_cannot_be_noise_stays(self):
        kernel = NoiseKernel.masked(4, mask_id=3)
        z = torch.tensor([[0, 1, 2]])
        for logits in (torch.zeros(1, 3, 4), torch.full((1, 3, 4), -torch.inf).index_fill(-1, torch.tensor([2]), 0.0)):
            for t, s in STEPS:
                assert torch.equal(posterior(logits, z, t, s, kernel), one_hot(z, 4).float())

    def test_no_mask_is_left_at_the_end(self):
        for size, mask_id, k in [(5, 0, 0.0), (5, 0, 0.1), (5, 4, 1.0)]:
            kernel = NoiseKernel.mixed(size, mask_id, k)
            z = torch.arange(size)[None]
            assert posterior(random(1, size, size), z, 0.4, 0.0, kernel)[0, :, mask_id].abs().max() == 0

    def test_moving_noise_and_schedule(self, definition):
        def pi(t):
            uniform = (0.8 * t / 4)[..., None].expand(*t.shape, 4)
            return uniform + (1 - 0.8 * t)[..., None] * torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)

        kernel = NoiseKernel(pi, mask_id=3, vocab_size=4, schedule=CosineSchedule())
        logits, z, t, s = random(1, 4, 4), torch.arange(4)[None], 0.7, 0.2
        p = definition.probabilities(logits, 3)
        alpha = [1 - math.sin(v * math.pi / 2) for v in (t, s)]
        noise_t, noise_s = ((1 - a) * pi(number(v)) for a, v in zip(alpha, (t, s), strict=True))
        kept = alpha[0] / alpha[1]
        step = kept * torch.eye(4, dtype=torch.float64) + noise_t - kept * noise_s  # (from, to)
        torch.testing.assert_close(step.sum(1), torch.ones(4, dtype=torch.float64))
        for token in range(4):
            joint = (alpha[1] * p[0, token] + noise_s) * step[:, token]
            actual = posterior(logits, z, t, s, kernel)[0, token]
            torch.testing.assert_close(actual, joint / joint.sum(), rtol=1e-12, atol=1e-14)

    def test_times_and_dtypes(self):
        kernel = NoiseKernel.mixed(4, 3, 0.2)
        z, logits = torch.tensor([[0, 3], [3, 1]]), random(2, 2, 4).to(torch.bfloat16)
        t, s = torch.tensor([0.9, 0.4]), torch.tensor([0.5, 0.0])
        both = posterior(logits, z, t, s, kernel)
        assert both.dtype == torch.bfloat16
        for row in range(2):
            here = slice(row, row + 1)
            assert torch.equal(both[here], posterior(logits[here], z[here], float(t[row]), float(s[row]), kernel))

    def test_steps_in_a_row_are_one_step(self, definition):
        # One token with its prior as p: going back in two steps is going back in one.
        for noise in NOISES:
            kernel, pi, mask_id = kernels(definition, noise)
            size = len(pi)
            prior = definition.probabilities(random(size), mask_id)
            logits, z = prior.log().expand(1, size, size), torch.arange(size)[None]
            once, first, second = (
                posterior(logits, z, t, s, kernel)[0] for t, s in ((0.9, 0.2), (0.9, 0.5), (0.5, 0.2))
            )
            torch.testing.assert_close(first @ second, once, rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"z": torch.tensor([[4]])}, "z: got token 4"),
            ({"logits": torch.zeros(1, 1, 5)}, r"logits: got shape \(1, 1, 5\).*padded"),
            ({"t": 0.0}, r"t: got 0.0, expected times in \(0, 1\]"),
            ({"s": 1.0}, r"s: got 1.0, expected times in \[0, 1\)"),
            ({"s": 0.5}, "s: got 0.5 with t = 0.5, expected s before t"),
            ({"parameterization": "x0"}, "parameterization: got 'x0'"),
        ],
    )
    def test_bad_input(self, changes, message):
        arguments = {"logits": torch.zeros(1, 1, 4), "z": torch.tensor([[1]]), "t": 0.5, "s": 0.2, **changes}
        with pytest.raises(ValueError, match=f"^{message}"):
            posterior(**arguments, kernel=NoiseKernel.mixed(4, 3, 0.5))


def test_kl_of_distributions_with_zeros():
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.25, 0.25, 0.5])
    assert float(reference.kl_divergence(p, q)) == pytest.approx(math.log(2))
    assert float(reference.kl_divergence(q, p)) == math.inf
    for a, b in itertools.product((p, q), repeat=2):
        assert float(reference.kl_divergence(a, b)) >= 0
