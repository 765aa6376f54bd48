"""Noise and schedules: distributions, forward draws against their probabilities, rates, and bad input."""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from spotlights.diffusion import CosineSchedule, LinearSchedule, NoiseKernel, PolynomialSchedule, Schedule
from spotlights.diffusion.kernel import categorical

CUSTOM = torch.tensor([0.3, 0.0, 0.2, 0.5, 0.0], dtype=torch.float64)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def turning(t):
    """Noise over 4 tokens that turns from masks (token 3) to uniform."""
    uniform = (0.8 * t / 4)[..., None].expand(*t.shape, 4)
    return uniform + (1 - 0.8 * t)[..., None] * torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)


class TestDistribution:
    @pytest.mark.parametrize("mask_id", [0, 2, 4])
    @pytest.mark.parametrize("k", [0.0, 1e-3, 0.5, 1.0])
    def test_mixed(self, k, mask_id):
        pi = NoiseKernel.mixed(5, mask_id, k).pi()
        expected = [k / 5 + (1 - k) * (token == mask_id) for token in range(5)]
        torch.testing.assert_close(pi, torch.tensor(expected, dtype=torch.float64), rtol=1e-15, atol=1e-17)

    def test_ends(self):
        assert NoiseKernel.masked(4, 0).pi().tolist() == [1, 0, 0, 0]
        assert NoiseKernel.uniform(4).pi().tolist() == [0.25] * 4
        assert NoiseKernel.uniform(4, mask_id=2).pi().tolist() == [0.25] * 4
        assert NoiseKernel.mixed(4, None, 1).mask_id is None

    def test_custom(self):
        pi = NoiseKernel(torch.tensor([0.1, 0.2, 0.7])).pi()
        assert pi.dtype == torch.float64
        assert float(pi.sum()) == pytest.approx(1, abs=1e-15)
        times = torch.tensor([0.1, 0.9], dtype=torch.float64)
        moving = NoiseKernel(turning, vocab_size=4, mask_id=3)
        torch.testing.assert_close(moving.pi(times), turning(times))
        with pytest.raises(ValueError, match=r"^t: got None"):
            moving.pi()

    @pytest.mark.parametrize("kernel", [NoiseKernel.mixed(5, 1, 0.3), NoiseKernel.uniform(5), NoiseKernel(CUSTOM)])
    def test_noise_is_beta_pi(self, kernel):
        t = torch.tensor([[0.2, 0.9, 1.0, 0.5, 0.1]], dtype=torch.float64)
        tokens = torch.arange(5)[None]
        dense = t[..., None] * kernel.pi()
        torch.testing.assert_close(kernel.noise_at(t, tokens), dense.gather(-1, tokens[..., None])[..., 0])
        elsewhere = torch.arange(5) != kernel.mask_id
        everywhere = kernel.noise(t).expand(1, 5, 5)
        torch.testing.assert_close(everywhere[..., elsewhere], dense[..., elsewhere])


class TestSchedules:
    T = torch.linspace(0, 1, 21, dtype=torch.float64)
    ALL = (LinearSchedule(), CosineSchedule(), PolynomialSchedule(3), PolynomialSchedule(1.5))

    @pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: type(schedule).__name__)
    def test_falls_from_one_to_zero_with_the_slope_it_says(self, schedule):
        alpha = schedule.alpha(self.T)
        assert alpha[0] == 1
        assert abs(float(alpha[-1])) < 1e-15
        assert (alpha.diff() < 0).all()
        inner, h = self.T[1:-1], 1e-6
        slope = (schedule.alpha(inner + h) - schedule.alpha(inner - h)) / (2 * h)
        torch.testing.assert_close(schedule.derivative(inner), slope, rtol=1e-8, atol=1e-8)

    def test_formulas(self):
        torch.testing.assert_close(LinearSchedule().alpha(self.T), 1 - self.T)
        torch.testing.assert_close(CosineSchedule().alpha(self.T), 1 - (self.T * math.pi / 2).sin())
        torch.testing.assert_close(PolynomialSchedule(3).alpha(self.T), 1 - self.T**3)

    def test_ones_own(self):
        class Square(Schedule):
            def alpha(self, t):
                return (1 - t) ** 2

        kernel = NoiseKernel.mixed(4, 3, 0.5, schedule=Square())
        t = torch.tensor([0.25, 1.0], dtype=torch.float64)
        torch.testing.assert_close(kernel.alpha(t), (1 - t) ** 2)
        with torch.no_grad():
            torch.testing.assert_close(kernel.schedule.derivative(t), -2 * (1 - t))

    def test_power_must_be_positive(self):
        with pytest.raises(ValueError, match=r"^power: got 0"):
            PolynomialSchedule(0)


class TestRate:
    @pytest.mark.parametrize("schedule", TestSchedules.ALL, ids=lambda schedule: type(schedule).__name__)
    @pytest.mark.parametrize("noise", ["mixed", "custom", "moving"])
    def test_is_how_fast_noise_gathers(self, noise, schedule):
        kernel = {
            "mixed": NoiseKernel.mixed(4, 3, 0.3, schedule=schedule),
            "custom": NoiseKernel(torch.tensor([0.5, 0.0, 0.2, 0.3]).double(), schedule=schedule),
            "moving": NoiseKernel(turning, vocab_size=4, mask_id=3, schedule=schedule),
        }[noise]
        t = torch.linspace(0.1, 0.9, 9, dtype=torch.float64)[:, None].expand(9, 4)
        tokens, h = torch.arange(4).expand(9, 4), 1e-6

        def odds(t):  # noise against data: its slope is the rate over alpha
            pi = kernel.pi(t)[..., 0, :] if noise == "moving" else kernel.pi()
            alpha = schedule.alpha(t)
            return (1 - alpha) * pi / alpha

        expected = schedule.alpha(t) ** 2 * (odds(t + h) - odds(t - h)) / (2 * h)
        torch.testing.assert_close(kernel.rate_at(t, tokens), expected, rtol=1e-7, atol=1e-8)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_needs_no_gradient_mode(self, mode):
        class Square(Schedule):
            def alpha(self, t):
                return (1 - t) ** 2

        for schedule in (LinearSchedule(), Square()):
            kernel = NoiseKernel(turning, vocab_size=4, mask_id=3, schedule=schedule)
            expected = kernel.rate_at(torch.full((1, 4), 0.5, dtype=torch.float64), torch.arange(4)[None])
            with mode():
                t, tokens = torch.full((1, 4), 0.5, dtype=torch.float64), torch.arange(4)[None]
                rate = kernel.rate_at(t, tokens)
            assert not rate.requires_grad
            assert torch.equal(rate, expected)


class TestForward:
    @pytest.mark.parametrize("t", [0.3, 1.0])
    @pytest.mark.parametrize(
        "noise", [(5, 4, 0.0), (5, 0, 0.1), (5, 2, 0.5), (5, 4, 1.0), (5, None, 1.0), "custom", "moving"]
    )
    def test_frequencies(self, definition, p_value, noise, t):
        if noise == "custom":
            kernel, pi = NoiseKernel(CUSTOM, mask_id=3), CUSTOM
        elif noise == "moving":
            kernel, pi = NoiseKernel(turning, vocab_size=4, mask_id=3), turning(torch.tensor(t).double())
        else:
            kernel, pi = NoiseKernel.mixed(*noise), definition.pi(*noise)
        size = len(pi)
        x = torch.arange(size)[:, None].expand(size, 20000)
        z = kernel.q_sample(x, t, generator=seeded(1))
        for token in range(size):
            data = one_hot(torch.tensor(token), size).double()
            expected = definition.marginal(data, torch.tensor(1 - t, dtype=torch.float64), pi)
            assert p_value(z[token].bincount(minlength=size), expected) > 1e-4
        prior = kernel.prior((10, 2000), generator=seeded(2))
        at_end = turning(torch.tensor(1.0).double()) if noise == "moving" else pi
        assert p_value(prior.flatten().bincount(minlength=size), at_end) > 1e-4

    def test_times_of_any_shape(self):
        kernel = NoiseKernel.masked(4, 3, schedule=PolynomialSchedule(2))
        x = torch.zeros(3, 20000, dtype=torch.int64)
        t = torch.tensor([0.1, 0.5, 1.0])
        expected = torch.tensor([0.01, 0.25, 1.0])
        by_sequence = kernel.q_sample(x, t, generator=seeded())
        by_token = kernel.q_sample(x, t[:, None].expand(3, 20000), generator=seeded())
        assert torch.equal(by_sequence, by_token)
        torch.testing.assert_close((by_sequence == 3).float().mean(1), expected, rtol=0, atol=0.012)

    def test_observed_tokens_stay(self):
        kernel = NoiseKernel.mixed(9, 0, 0.5)
        x = torch.randint(1, 9, (4, 50), generator=seeded())
        observed = torch.rand(4, 50, generator=seeded(1)) < 0.5
        z = kernel.q_sample(x, 1.0, observed=observed, generator=seeded(2))
        assert torch.equal(z[observed], x[observed])
        assert (z[~observed] == 0).float().mean() > 0.4

    def test_dtypes_are_kept(self):
        kernel = NoiseKernel.mixed(9, 8, 0.5)
        for dtype in (torch.int32, torch.int64):
            x = torch.zeros(2, 3, dtype=dtype)
            assert kernel.q_sample(x, 0.5).dtype == dtype

    def test_a_generator_for_each_sequence(self):
        for kernel in (NoiseKernel.mixed(50, 0, 0.5), NoiseKernel(torch.full((50,), 1 / 50))):
            x = torch.randint(1, 50, (4, 30), generator=seeded())
            z = kernel.q_sample(x, 0.7, generator=[seeded(seed) for seed in range(4)])
            prior = kernel.prior((4, 30), generator=[seeded(seed) for seed in range(4)])
            for row in range(4):
                assert torch.equal(kernel.q_sample(x[row : row + 1], 0.7, generator=[seeded(row)])[0], z[row])
                assert torch.equal(kernel.prior((1, 30), generator=[seeded(row)])[0], prior[row])
            assert torch.equal(z, kernel.q_sample(x, 0.7, generator=[seeded(seed) for seed in range(4)]))

    def test_a_large_custom_noise_needs_no_table_for_each_token(self):
        kernel = NoiseKernel(torch.full((2**20,), 2.0**-20))
        x = torch.zeros(8, 4096, dtype=torch.int64)  # 256 GiB in a table
        z = kernel.q_sample(x, 0.5, generator=seeded())
        assert 0.49 < float((z == 0).double().mean()) < 0.51
        noise = kernel.noise_at(torch.full(x.shape, 0.5, dtype=torch.float64), z)
        torch.testing.assert_close(noise, torch.full_like(noise, 2.0**-21))


class TestCategorical:
    def test_tokens_of_no_weight_are_never_drawn(self):
        weights = torch.tensor([0.0, 0.1, 0.0, 0.7, 0.0, 0.2, 0.0])
        extremes = torch.tensor([0.0, 1e-300, 0.125, 0.5, 0.8, 1 - 2**-24, 1 - 2**-53], dtype=torch.float64)
        for dtype in (torch.float32, torch.float64):
            running = weights.to(dtype).cumsum(0)
            for sums in (running, running.expand(len(extremes), 7)):
                assert categorical(sums, extremes).tolist() == [1, 1, 3, 3, 5, 5, 5]

    def test_frequencies(self, p_value):
        weights = torch.tensor([1.0, 0.0, 3.0, 2.0])
        drawn = categorical(weights.cumsum(0), torch.rand(20000, dtype=torch.float64, generator=seeded()))
        assert p_value(drawn.bincount(minlength=4), weights.double() / 6) > 1e-3


class TestBadInput:
    @pytest.mark.parametrize("k", [-0.1, 1.1, math.nan])
    def test_k(self, k):
        with pytest.raises(ValueError, match=r"^k: got .*, expected a number in \[0, 1\]"):
            NoiseKernel.mixed(5, 4, k)

    @pytest.mark.parametrize("mask_id", [-1, 5])
    def test_mask_id(self, mask_id):
        for make in (
            lambda: NoiseKernel.mixed(5, mask_id, 0.5),
            lambda: NoiseKernel.masked(5, mask_id),
            lambda: NoiseKernel.uniform(5, mask_id),
            lambda: NoiseKernel(CUSTOM, mask_id=mask_id),
        ):
            with pytest.raises(ValueError, match=f"^mask_id: got {mask_id}, expected an id from 0 to 4"):
                make()

    def test_no_mask_although_there_must_be_one(self):
        with pytest.raises(ValueError, match=r"^mask_id: got None with k = 0\.5"):
            NoiseKernel.mixed(5, None, 0.5)

    @pytest.mark.parametrize(
        ("pi", "options", "message"),
        [
            (torch.tensor([0.5, 0.6]), {}, "pi: expected numbers of 0 or more that sum to 1"),
            (torch.tensor([1.5, -0.5]), {}, "pi: expected numbers of 0 or more"),
            (torch.tensor([0.5, math.nan]), {}, "pi: expected numbers of 0 or more"),
            (torch.ones(2, 2) / 4, {}, r"pi: got shape \(2, 2\)"),
            (torch.ones(0), {}, r"pi: got shape \(0,\)"),
            (torch.ones(1), {}, "vocab_size: got 1, expected at least 2"),
            (CUSTOM, {"vocab_size": 4}, "vocab_size: got 4, expected 5 as in pi"),
            (turning, {}, "vocab_size: needed where pi is a function"),
        ],
    )
    def test_pi(self, pi, options, message):
        with pytest.raises(ValueError, match=f"^{message}"):
            NoiseKernel(pi, **options)

    def test_what_is_no_distribution_at_all(self):
        with pytest.raises(TypeError, match=r"^pi: got list, expected a tensor or a function"):
            NoiseKernel([0.5, 0.5], vocab_size=2)
        with pytest.raises(TypeError, match=r"^vocab_size: got 5.0, expected an integer"):
            NoiseKernel.uniform(5.0)

    @pytest.mark.parametrize(
        ("function", "message"),
        [
            (lambda t: torch.full((4,), 0.25).double(), r"pi: the function gave shape \(4,\), expected \(1, 2, 4\)"),
            (lambda t: torch.full((*t.shape, 3), 1 / 3), r"pi: the function gave shape \(1, 2, 3\)"),
            (lambda t: torch.full((*t.shape, 4), 1.0), "pi: the function gave numbers that do not sum to 1"),
        ],
    )
    def test_a_function_of_time(self, function, message):
        kernel = NoiseKernel(function, vocab_size=4)
        with pytest.raises(ValueError, match=f"^{message}"):
            kernel.q_sample(torch.tensor([[0, 1]]), 0.5)
        with pytest.raises(ValueError, match=f"^{message}"):
            kernel.prior((1, 2))

    @pytest.mark.parametrize("shape", [(4,), (1, 2, 3), (-1, 2)])
    def test_shape(self, shape):
        with pytest.raises(ValueError, match=r"^shape: got \(.*\), expected \(batch, length\)"):
            NoiseKernel.uniform(5).prior(shape)

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"x": torch.tensor([[5]])}, ValueError, "x: got token 5, expected ids from 0 to 4"),
            ({"x": torch.tensor([[-1]])}, ValueError, "x: got token -1"),
            ({"x": torch.tensor([1])}, ValueError, r"x: got shape \(1,\), expected \(batch, length\)"),
            ({"x": torch.tensor([[1.0]])}, TypeError, "x: got dtype torch.float32"),
            ({"t": 0}, ValueError, "t: got 0.0"),
            ({"t": 1.1}, ValueError, "t: got 1.1"),
            ({"t": None}, TypeError, "t: got None, expected a number or a tensor"),
            ({"t": "half"}, TypeError, "t: got 'half'"),
            ({"x": [[1]]}, TypeError, "x: got list, expected a tensor"),
            ({"observed": [[False]]}, TypeError, "observed: got list, expected a tensor"),
            ({"observed": torch.zeros(1, 1, device="meta").bool()}, ValueError, "observed: got device meta"),
            ({"generator": 3}, TypeError, "generator: got 3, expected a torch.Generator"),
            ({"generator": [3]}, TypeError, r"generator: got \[3\]"),
            ({"t": torch.ones(2)}, ValueError, r"t: got shape \(2,\)"),
            ({"observed": torch.tensor([[True]])}, ValueError, "observed: every token is observed"),
            ({"observed": torch.tensor([[1]])}, TypeError, "observed: got dtype torch.int64"),
            ({"observed": torch.tensor([True])}, ValueError, r"observed: got shape \(1,\)"),
            (
                {"generator": [torch.Generator()] * 2},
                ValueError,
                "generator: got 2 generators, expected one for each of 1",
            ),
        ],
    )
    def test_q_sample(self, changes, error, message):
        with pytest.raises(error, match=f"^{message}"):
            NoiseKernel.mixed(5, 4, 0.5).q_sample(**{"x": torch.tensor([[1]]), "t": 0.5, **changes})
