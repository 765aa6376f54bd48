"""The bound against its definition: values, limits, known methods, steps, moving noise, and bad input."""

import itertools
import math

import pytest
import torch
from torch.nn.functional import one_hot

from spotlights.diffusion import CosineSchedule, NoiseKernel, PolynomialSchedule, linear_nelbo, nelbo

# vocabulary, mask, k
NOISES = [(5, 4, 0.0), (4, 0, 0.0), (5, 0, 0.1), (6, 2, 0.5), (9, 8, 1e-3), (9, 8, 1.0), (4, None, 1.0), (2, 1, 0.5)]
CUSTOM = torch.tensor([0.3, 0.0, 0.2, 0.5, 0.0], dtype=torch.float64)  # the mask is token 3
TIMES = [1e-3, 0.1, 0.5, 0.9, 0.999]


def random(*shape, seed=0, scale=2.0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


class TestValues:
    @pytest.mark.parametrize("t", TIMES)
    @pytest.mark.parametrize("noise", NOISES, ids=str)
    def test_the_definition(self, definition, noise, t):
        size, mask_id, k = noise
        pi = definition.pi(size, mask_id, k)
        x, z = definition.pairs(pi, mask_id)
        logits, alpha = random(1, x.shape[1], size), torch.full(x.shape, 1 - t, dtype=torch.float64)
        p = definition.probabilities(logits, mask_id)
        actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k))
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, definition.nelbo(p, x, z, alpha, -1.0, pi), rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("t", TIMES)
    @pytest.mark.parametrize("noise", [noise for noise in NOISES if noise[2] > 0], ids=str)
    def test_the_papers_own_form_of_signed_logs(self, definition, noise, t):
        size, mask_id, k = noise
        pi, alpha = definition.pi(size, mask_id, k), 1 - t
        x, z = definition.pairs(pi, mask_id)
        logits = random(1, x.shape[1], size, seed=1)
        p = definition.probabilities(logits, mask_id)
        f, g = (alpha * v + t * pi for v in (one_hot(x, size).double(), p))

        def at(values, tokens):
            return values.gather(-1, tokens[..., None])[..., 0]

        logs = (f.log() - g.log()) * (torch.arange(size) != (-1 if mask_id is None else mask_id))
        paper = (at(one_hot(x, size).double(), z) - at(p, z)) / at(g, z)
        paper = paper - at(f / g, z).log() / alpha + at(f / g, x).log() + k * t / alpha * logs.sum(-1) / size
        actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k))
        torch.testing.assert_close(actual, pi[z] / at(f, z) * paper, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("noise", NOISES, ids=str)
    def test_the_generator_of_the_reversed_chain(self, definition, noise):
        size, mask_id, k = noise
        pi, t = definition.pi(size, mask_id, k), 0.3
        x, z = definition.pairs(pi, mask_id)
        logits = random(1, x.shape[1], size, seed=2)
        p = definition.probabilities(logits, mask_id)
        expected = torch.zeros(x.shape, dtype=torch.float64)
        for place, (a, b) in enumerate(zip(x[0].tolist(), z[0].tolist(), strict=True)):
            data = (1 - t) * one_hot(torch.tensor(a), size).double() + t * pi
            model = (1 - t) * p[0, place] + t * pi
            for e in set(range(size)) - {b}:
                # rates at which the data's and the model's chains go back from b to e
                rate = pi[b] / (1 - t)
                true, guess = rate * data[e] / data[b], rate * model[e] / model[b]
                expected[0, place] += guess - true + (true * (true / guess).log() if true > 0 else 0)
        actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("mask_id", [None, 3, 1])
    @pytest.mark.parametrize("t", TIMES)
    def test_custom_noise_with_zeros(self, definition, mask_id, t):
        x, z = definition.pairs(CUSTOM, mask_id)
        logits, alpha = random(1, x.shape[1], 5, seed=3), torch.full(x.shape, 1 - t, dtype=torch.float64)
        expected = definition.nelbo(definition.probabilities(logits, mask_id), x, z, alpha, -1.0, CUSTOM)
        kernel = NoiseKernel(CUSTOM, mask_id=mask_id)
        torch.testing.assert_close(nelbo(logits, x, z, t, kernel), expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("noise", NOISES, ids=str)
    def test_custom_noise_equals_mixed(self, definition, noise):
        size, mask_id, k = noise
        pi = definition.pi(size, mask_id, k)
        x, z, t = definition.batch(pi, mask_id)
        logits = random(*x.shape, size)
        pair = [NoiseKernel.mixed(size, mask_id, k), NoiseKernel(pi, mask_id=mask_id)]
        for steps in (None, 7):
            values = [nelbo(logits, x, z, t, kernel, steps=steps) for kernel in pair]
            torch.testing.assert_close(*values, rtol=1e-10, atol=1e-11)

    @pytest.mark.parametrize("schedule", ["cosine", "square", "root"])
    @pytest.mark.parametrize("noise", [NOISES[0], NOISES[2], NOISES[5]], ids=str)
    def test_schedules(self, definition, schedule, noise):
        size, mask_id, k = noise
        pi = definition.pi(size, mask_id, k)
        x, z, t = definition.batch(pi, mask_id)
        made, alpha, slope = {
            "cosine": (CosineSchedule(), 1 - (t * math.pi / 2).sin(), -math.pi / 2 * (t * math.pi / 2).cos()),
            "square": (PolynomialSchedule(2), 1 - t**2, -2 * t),
            "root": (PolynomialSchedule(0.5), 1 - t.sqrt(), -0.5 / t.sqrt()),
        }[schedule]
        logits = random(*x.shape, size)
        expected = definition.nelbo(definition.probabilities(logits, mask_id), x, z, alpha, slope, pi)
        actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k, schedule=made))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("noise", NOISES, ids=str)
    def test_denoiser_parameterization(self, definition, noise):
        size, mask_id, k = noise
        pi = definition.pi(size, mask_id, k)
        x, z, t = definition.batch(pi, mask_id)
        logits = random(*x.shape, size)
        p = definition.probabilities(definition.loo_logits(logits, z, 1 - t, pi, mask_id), mask_id)
        actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k), parameterization="denoiser")
        torch.testing.assert_close(actual, definition.nelbo(p, x, z, 1 - t, -1.0, pi), rtol=1e-9, atol=1e-10)

    def test_the_masks_logit_and_the_shape_of_times_do_not_matter(self, definition):
        kernel = NoiseKernel.mixed(5, 0, 0.3)
        x, z, _ = definition.batch(definition.pi(5, 0, 0.3), 0)
        logits, t = random(*x.shape, 5), torch.tensor([0.2, 0.4, 0.6, 0.8], dtype=torch.float64)
        changed = logits.clone()
        changed[..., 0] = 40
        first = nelbo(logits, x, z, t, kernel)
        assert torch.equal(first, nelbo(changed, x, z, t[:, None].expand(x.shape), kernel))
        assert torch.equal(first[1], nelbo(logits, x, z, 0.4, kernel)[1])
        assert torch.equal(first, nelbo(logits, x.int(), z, t, kernel))
        assert torch.equal(first, nelbo(logits.transpose(0, 2).contiguous().transpose(0, 2), x, z, t, kernel))


class TestKnownMethods:
    @pytest.mark.parametrize("t", [*TIMES, 1.0])
    def test_no_uniform_noise_is_mdlm(self, t):
        kernel = NoiseKernel.masked(6, mask_id=2)
        x, z = torch.tensor([[0, 1, 3, 4, 5]]), torch.tensor([[2, 1, 2, 2, 5]])
        logits = random(1, 5, 6)
        scores = logits.clone()
        scores[..., 2] = -torch.inf
        cross_entropy = -scores.log_softmax(-1).gather(-1, x[..., None])[..., 0]
        torch.testing.assert_close(nelbo(logits, x, z, t, kernel), cross_entropy / t * (z == 2), rtol=1e-12, atol=0)

    @pytest.mark.parametrize("t", TIMES)
    @pytest.mark.parametrize("mask_id", [None, 0, 5])
    def test_uniform_noise_only_is_udlm(self, t, mask_id):
        size, alpha = 6, 1 - t
        tokens = [token for token in range(size) if token != mask_id]
        x, z = torch.tensor(list(itertools.product(tokens, range(size)))).T[:, None]
        logits = random(1, x.shape[1], size)
        scores = logits.clone()
        if mask_id is not None:
            scores[..., mask_id] = -torch.inf
        # The UDLM paper's loss, with bars for N alpha (.) + 1 - alpha, at the place i of z
        bar = size * alpha * one_hot(x, size).double() + (1 - alpha)
        bar_model = size * alpha * scores.softmax(-1) + (1 - alpha)
        at_i, model_at_i = (v.gather(-1, z[..., None]) for v in (bar, bar_model))
        inner = size / at_i - size / model_at_i
        inner = inner[..., 0] - (bar / at_i * (model_at_i * bar / (bar_model * at_i)).log()).sum(-1)
        expected = -1 / (size * alpha) * inner
        actual = nelbo(logits, x, z, t, NoiseKernel.uniform(size, mask_id))
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


class TestLimits:
    def test_all_noise_says_nothing_with_uniform_noise(self, definition):
        for size, mask_id, k in [(5, 4, 0.1), (5, 0, 0.5), (4, None, 1.0)]:
            kernel = NoiseKernel.mixed(size, mask_id, k)
            x, z = definition.pairs(definition.pi(size, mask_id, k), mask_id)
            logits = random(1, x.shape[1], size).requires_grad_()
            values = nelbo(logits, x, z, 1.0, kernel)
            values.sum().backward()
            assert values.abs().max() < 1e-15
            assert logits.grad.abs().max() < 1e-15

    @pytest.mark.parametrize("schedule", [None, PolynomialSchedule(2)], ids=["linear", "square"])
    def test_all_noise_leaves_cross_entropy_with_masks_only(self, schedule):
        kernel = NoiseKernel.masked(5, mask_id=0, schedule=schedule)
        x, z = torch.tensor([[1, 2, 4]]), torch.tensor([[0, 0, 0]])
        logits = random(1, 3, 5).requires_grad_()
        values = nelbo(logits, x, z, 1.0, kernel)
        values.sum().backward()
        p = logits.detach()[..., 1:].softmax(-1)
        slope = 1 if schedule is None else 2
        torch.testing.assert_close(values[0].detach(), -slope * p.gather(-1, x[..., None] - 1)[0, :, 0].log())
        torch.testing.assert_close(logits.grad[..., 1:], slope * (p - one_hot(x - 1, 4)))
        assert logits.grad[..., 0].abs().max() == 0

    def test_tokens_that_cannot_be_noise_cost_nothing(self):
        kernel = NoiseKernel.masked(5, mask_id=4)
        x = torch.tensor([[0, 1, 2, 3]])
        for t, steps in itertools.product((1e-6, 0.5, 1.0), (None, 8)):
            logits = random(1, 4, 5).requires_grad_()
            values = nelbo(logits, x, x, t, kernel, steps=steps)
            values.sum().backward()
            assert torch.equal(values, torch.zeros_like(values))
            assert torch.equal(logits.grad, torch.zeros_like(logits))

    @pytest.mark.parametrize("schedule", [None, CosineSchedule()], ids=["linear", "cosine"])
    def test_a_trace_of_uniform_noise_is_like_none(self, schedule):
        x, z, t = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[4, 4, 4, 3]]), 0.4
        logits = random(1, 4, 5)
        alpha, slope = (
            (1 - math.sin(t * math.pi / 2), -math.pi / 2 * math.cos(t * math.pi / 2)) if schedule else (0.6, -1)
        )
        cross_entropy = -logits[..., :4].log_softmax(-1).gather(-1, x[..., None])[..., 0]
        expected = -slope / (1 - alpha) * cross_entropy * (z == 4)
        for k, tolerance in ((1e-4, 3e-2), (1e-8, 1e-5), (1e-12, 1e-9), (1e-30, 1e-12)):
            kernel = NoiseKernel.mixed(5, 4, k, schedule=schedule)
            torch.testing.assert_close(nelbo(logits, x, z, t, kernel), expected, rtol=tolerance, atol=tolerance)

    def test_model_equal_to_the_data_costs_nothing(self, definition):
        for size, mask_id, k in NOISES:
            pi = definition.pi(size, mask_id, k)
            x, z, t = definition.batch(pi, mask_id)
            logits = one_hot(x, size).double().log()
            kernel = NoiseKernel.mixed(size, mask_id, k)
            for steps in (None, 5):
                assert nelbo(logits, x, z, t, kernel, steps=steps).abs().max() < 1e-12

    def test_a_data_token_of_no_probability_is_finite_with_uniform_noise_only(self):
        logits, x, z = torch.tensor([[[-torch.inf, 0.0, 0.0]]]), torch.tensor([[0]]), torch.tensor([[2]])
        assert nelbo(logits, x, z, 0.5, NoiseKernel.masked(3, 2)).item() == math.inf
        assert 0 < nelbo(logits, x, z, 0.5, NoiseKernel.mixed(3, 2, 0.1)).item() < 10


class TestSteps:
    @pytest.mark.parametrize("steps", [1, 2, 10, 100])
    @pytest.mark.parametrize("noise", NOISES, ids=str)
    def test_the_definition(self, definition, noise, steps):
        size, mask_id, k = noise
        pi = definition.pi(size, mask_id, k)
        x, z = definition.pairs(pi, mask_id)
        logits = random(1, x.shape[1], size)
        p = definition.probabilities(logits, mask_id)
        for step in {1, (steps + 1) // 2, steps}:
            t = step / steps
            impossible = (pi[z] == 0) & (t == 1)
            alpha_t, alpha_s = (torch.full(x.shape, 1 - v, dtype=torch.float64) for v in (t, (step - 1) / steps))
            expected = steps * definition.step_kl(p, x, z, alpha_t, alpha_s, pi)
            actual = nelbo(logits, x, z, t, NoiseKernel.mixed(size, mask_id, k), steps=steps)
            torch.testing.assert_close(actual[~impossible], expected[~impossible], rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("noise", NOISES[:-1], ids=str)
    def test_many_steps_are_continuous_time(self, definition, noise):
        size, mask_id, k = noise
        kernel = NoiseKernel.mixed(size, mask_id, k, schedule=CosineSchedule())
        x, z, t = definition.batch(definition.pi(size, mask_id, k), mask_id)
        t = t.clamp(0.2, 0.9)
        logits = random(*x.shape, size)
        limit = nelbo(logits, x, z, t, kernel)
        errors = [float((nelbo(logits, x, z, t, kernel, steps=T) - limit).abs().max()) for T in (100, 1000, 10000)]
        assert errors[0] > 0
        for coarse, fine in itertools.pairwise(errors):
            assert coarse / fine == pytest.approx(10, rel=0.3)


def drifting_pi(c):
    """Noise that turns from masks (token 3 of 4) to uniform: pi_t = (1 - c t) mask + c t / 4."""

    def pi(t):
        uniform = (c * t / 4)[..., None].expand(*t.shape, 4)
        return uniform + (1 - c * t)[..., None] * torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)

    return pi


class TestMovingNoise:
    X, Z = torch.tensor(list(itertools.product(range(3), range(4)))).T[:, None]

    @pytest.mark.parametrize("schedule", [None, CosineSchedule()], ids=["linear", "cosine"])
    def test_the_generator_by_finite_differences(self, definition, schedule):
        pi = drifting_pi(0.8)
        kernel = NoiseKernel(pi, mask_id=3, vocab_size=4, schedule=schedule)
        logits, eye = random(1, 12, 4), torch.eye(4, dtype=torch.float64)
        p = definition.probabilities(logits, 3)

        def alpha(t):
            return 1 - t if schedule is None else 1 - math.sin(t * math.pi / 2)

        def noise(t):
            return (1 - alpha(t)) * pi(torch.tensor(t, dtype=torch.float64))

        for t in (0.2, 0.7):
            h = 1e-5
            slope = (alpha(t + h) - alpha(t - h)) / (2 * h)
            # the rate at which tokens become each token as noise
            rate = (noise(t + h) - noise(t - h)) / (2 * h) - slope / alpha(t) * noise(t)
            f, g = alpha(t) * eye[self.X] + noise(t), alpha(t) * p + noise(t)
            f, g = (v / v.gather(-1, self.Z[..., None]) for v in (f, g))
            terms = rate[self.Z][..., None] * (g - f - f * (g / f).log()) * (1 - eye[self.Z])
            torch.testing.assert_close(nelbo(logits, self.X, self.Z, t, kernel), terms.sum(-1), rtol=1e-7, atol=1e-7)

    def test_many_steps_are_continuous_time(self):
        kernel = NoiseKernel(drifting_pi(1.0), mask_id=3, vocab_size=4)
        logits = random(1, 12, 4)
        for t in (0.3, 0.8):
            limit = nelbo(logits, self.X, self.Z, t, kernel)
            errors = [
                float((nelbo(logits, self.X, self.Z, t, kernel, steps=T) - limit).abs().max()) for T in (1000, 10000)
            ]
            assert errors[0] / errors[1] == pytest.approx(10, rel=0.3)

    @pytest.mark.parametrize("steps", [1, 3, 16])
    def test_steps_by_bayes(self, definition, steps):
        pi, t = drifting_pi(0.8), 2 / 3 if steps == 3 else 1.0
        kernel = NoiseKernel(pi, mask_id=3, vocab_size=4)
        logits, eye = random(1, 12, 4), torch.eye(4, dtype=torch.float64)
        p, s = definition.probabilities(logits, 3), t - 1 / steps
        noise_t, noise_s = (v * pi(torch.tensor(v, dtype=torch.float64)) for v in (t, max(s, 0.0)))
        kept = (1 - t) / (1 - s)
        to_z = (kept * eye + noise_t - kept * noise_s)[:, self.Z[0]].T
        both = [((1 - s) * v + noise_s) * to_z for v in (eye[self.X], p)]
        expected = steps * definition.kl(*(v / v.sum(-1, keepdim=True) for v in both))
        actual = nelbo(logits, self.X, self.Z, t, kernel, steps=steps)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)

    def test_gradient(self, definition):
        kernel = NoiseKernel(drifting_pi(0.8), mask_id=3, vocab_size=4)
        logits = random(1, 12, 4, scale=1.0).requires_grad_()
        for steps in (None, 5):
            assert torch.autograd.gradcheck(lambda v, T=steps: nelbo(v, self.X, self.Z, 0.6, kernel, steps=T), logits)

    def test_noise_that_shrinks_is_refused(self):
        kernel = NoiseKernel(drifting_pi(3.0), mask_id=3, vocab_size=4)
        for steps in (None, 10):
            with pytest.raises(ValueError, match="pi: the noise of some token shrinks"):
                nelbo(random(1, 12, 4), self.X, self.Z, 0.4, kernel, steps=steps)


X, Z = torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([[0, 3, 3], [3, 3, 1]])
KERNEL = NoiseKernel.mixed(4, 3, 0.1)
LOGITS = torch.zeros(2, 3, 4)
HIDDEN, WEIGHT = torch.zeros(2, 3, 8), torch.zeros(4, 8)
ALL = torch.ones(2, 3, dtype=torch.bool)


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (
                {"logits": torch.zeros(2, 3, 5)},
                ValueError,
                r"logits: got shape \(2, 3, 5\), .* padded .*logits\[..., :4\]",
            ),
            ({"logits": torch.zeros(2, 3, 3)}, ValueError, r"logits: got shape \(2, 3, 3\), expected \(2, 3, 4\)$"),
            ({"logits": torch.zeros(3, 4)}, ValueError, r"logits: got shape \(3, 4\)"),
            ({"logits": LOGITS.long()}, TypeError, "logits: got dtype torch.int64"),
            ({"logits": LOGITS.to("meta")}, ValueError, "logits: got device meta, expected cpu"),
            ({"logits": (LOGITS,)}, TypeError, "logits: got tuple, expected a tensor"),
            ({"x": X.to("meta")}, ValueError, "x: got device meta, expected cpu"),
            ({"logits": LOGITS + torch.nan}, ValueError, "logits: .*NaN"),
            ({"logits": LOGITS.masked_fill(torch.arange(4) == 1, torch.inf)}, ValueError, "logits: .*infinity"),
            ({"x": X[:1]}, ValueError, r"x: got shape \(1, 3\), expected \(2, 3\)"),
            ({"x": X + 2}, ValueError, "x: got token 4, expected ids from 0 to 3"),
            ({"x": X - 1}, ValueError, "x: got token -1"),
            ({"x": X.float()}, TypeError, "x: got dtype torch.float32"),
            ({"x": X + 1}, ValueError, "x: holds the mask id 3"),
            ({"z": Z + 1}, ValueError, "z: got token 4"),
            ({"z": Z[0]}, ValueError, r"z: got shape \(3,\)"),
            ({"t": 0.0}, ValueError, r"t: got 0.0, expected times in \(0, 1\]"),
            ({"t": 1.5}, ValueError, "t: got 1.5"),
            ({"t": math.nan}, ValueError, "t: got nan"),
            ({"t": torch.full((3,), 0.5)}, ValueError, r"t: got shape \(3,\), expected \(\), \(2,\) or \(2, 3\)"),
            ({"observed": ALL}, ValueError, "observed: every token is observed"),
            ({"observed": ALL[:1]}, ValueError, r"observed: got shape \(1, 3\)"),
            ({"observed": ALL.int()}, TypeError, "observed: got dtype torch.int32"),
            ({"parameterization": "x0"}, ValueError, "parameterization: got 'x0', expected 'loo' or 'denoiser'"),
            ({"steps": 0}, ValueError, "steps: got 0"),
            ({"steps": 2.5}, TypeError, "steps: got 2.5, expected an integer"),
        ],
    )
    def test_nelbo(self, changes, error, message):
        arguments = {"logits": LOGITS, "x": X, "z": Z, "t": 0.5, "kernel": KERNEL, **changes}
        with pytest.raises(error, match=f"^{message}"):
            nelbo(**arguments)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"hidden": HIDDEN[0]}, ValueError, r"hidden: got shape \(3, 8\), expected \(2, 3, 'D'\)"),
            ({"hidden": HIDDEN + torch.nan}, ValueError, "hidden, weight or bias: .*NaN"),
            ({"hidden": HIDDEN + torch.nan, "reduction": "none"}, ValueError, "hidden, weight or bias: .*NaN"),
            ({"hidden": HIDDEN.long(), "weight": WEIGHT.long()}, TypeError, "hidden: got dtype torch.int64"),
            ({"weight": WEIGHT.to("meta")}, ValueError, "weight: got device meta, expected cpu"),
            ({"weight": torch.zeros(5, 8)}, ValueError, r"weight: got shape \(5, 8\), expected \(4, 8\)"),
            ({"weight": WEIGHT.double()}, TypeError, "weight: got dtype torch.float64, expected torch.float32"),
            ({"bias": torch.zeros(5)}, ValueError, r"bias: got shape \(5,\), expected \(4,\)"),
            ({"reduction": "max"}, ValueError, "reduction: got 'max'"),
            ({"x": X + 1}, ValueError, "x: holds the mask id 3"),
            ({"z": Z + 1}, ValueError, "z: got token 4"),
            ({"observed": ALL}, ValueError, "observed: every token is observed"),
            ({"steps": -1}, ValueError, "steps: got -1"),
        ],
    )
    def test_linear_nelbo(self, changes, error, message):
        arguments = {"hidden": HIDDEN, "weight": WEIGHT, "x": X, "z": Z, "t": 0.5, "kernel": KERNEL, **changes}
        with pytest.raises(error, match=f"^{message}"):
            linear_nelbo(**arguments)

    def test_second_derivatives_are_refused(self):
        logits = random(2, 3, 4).requires_grad_()
        (grad,) = torch.autograd.grad(nelbo(logits, X, Z, 0.5, KERNEL).sum(), logits, create_graph=True)
        with pytest.raises(RuntimeError, match="does not require grad"):
            grad.sum().backward()

    def test_empty_batches(self):
        for shape in ((0, 3), (2, 0)):
            nothing = torch.zeros(shape, dtype=torch.int64)
            logits = torch.zeros(*shape, 4, requires_grad=True)
            values = nelbo(logits, nothing, nothing, 0.5, KERNEL)
            values.sum().backward()
            assert values.shape == shape
            assert logits.grad.shape == (*shape, 4)
