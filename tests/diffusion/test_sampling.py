"""The sampler's frequencies against Bayes' rule, what it must never do, and that batch mates do not matter."""

import math

import pytest
import torch

from spotlights.diffusion import CosineSchedule, NoiseKernel, chunks, guide, posterior, posterior_step

CUSTOM = torch.tensor([0.3, 0.0, 0.2, 0.5, 0.0], dtype=torch.float64)
DRAWS = 8000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed)) * 1.5


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def draw(kernel, logits, t, s, seed=0, **options):
    """Counts (N, N): how often each z (row) became each token, with logits (N,) for all."""
    size = len(logits)
    z = torch.arange(size)[:, None].expand(size, DRAWS)
    drawn = posterior_step(logits.expand(size, DRAWS, size), z, t, s, kernel, generator=seeded(seed), **options)
    return torch.stack([row.bincount(minlength=size) for row in drawn])


class TestFrequencies:
    @pytest.mark.parametrize("step", [(1.0, 0.6), (0.8, 0.0), (0.6, 0.55), (0.3, 0.1)], ids=str)
    @pytest.mark.parametrize(
        "noise", [(5, 4, 0.0), (5, 0, 0.1), (5, 2, 0.5), (5, 0, 1.0), (4, None, 1.0), "custom"], ids=str
    )
    def test_the_posterior(self, definition, p_value, noise, step):
        if noise == "custom":
            kernel, pi, mask_id = NoiseKernel(CUSTOM, mask_id=3), CUSTOM, 3
        else:
            kernel, pi, mask_id = NoiseKernel.mixed(*noise), definition.pi(*noise), noise[1]
        t, s = step
        logits = random(len(pi), seed=3)
        if mask_id is not None:
            logits[mask_id] = 30  # never to be drawn from the model
        p = definition.probabilities(logits, mask_id)
        counts = draw(kernel, logits.float(), t, s)
        for z in range(len(pi)):
            if t == 1 and pi[z] == 0:
                continue  # no token is there
            expected = definition.bayes(p, z, number(1 - t), number(1 - s), pi)
            assert p_value(counts[z], expected) > 1e-4

    @pytest.mark.parametrize("k", [0.0, 0.3])
    def test_moving_noise_and_schedule(self, p_value, k):
        def pi(t):
            uniform = (0.8 * t / 4)[..., None].expand(*t.shape, 4)
            return uniform + (1 - 0.8 * t)[..., None] * torch.tensor([0.0, 0, 0, 1], dtype=torch.float64)

        schedule = CosineSchedule()
        moving = NoiseKernel(pi, mask_id=3, vocab_size=4, schedule=schedule)
        for kernel in (moving, NoiseKernel.mixed(4, 3, k, schedule=schedule)):
            logits = random(4)
            counts = draw(kernel, logits, 0.7, 0.3)
            expected = posterior(logits.expand(1, 4, 4), torch.arange(4)[None], 0.7, 0.3, kernel)[0]
            for z in range(4):
                assert p_value(counts[z], expected[z]) > 1e-4

    @pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
    @pytest.mark.parametrize(
        "options", [{"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 2}, {"top_p": 0.7}], ids=str
    )
    def test_temperature_and_truncation_act_on_p(self, definition, p_value, k, options):
        logits = torch.tensor([1.0, -0.5, 9.0, 0.3, 1.7])  # the mask, 2, has the highest; p = .25 .06 0 .13 .51, about
        scores = logits.double() / options.get("temperature", 1.0)
        if "temperature" not in options:
            scores[[1, 3]] = -torch.inf
        p = definition.probabilities(scores, 2)
        if "top_p" in options:
            whole = definition.probabilities(logits.double(), 2)
            assert whole[4] < 0.7 < whole[4] + whole[0]
        for dtype in (torch.float32, torch.float64):
            counts = draw(NoiseKernel.mixed(5, 2, k), logits, 0.8, 0.3, dtype=dtype, **options)
            for z in range(5):
                if k == 0 and z in (1, 3) and p[z] == 0:
                    assert counts[z, z] == DRAWS
                else:
                    expected = definition.bayes(p, z, number(0.2), number(0.7), definition.pi(5, 2, k))
                    assert p_value(counts[z], expected) > 1e-4

    @pytest.mark.parametrize("k", [0.0, 0.3, 1.0])
    def test_denoiser_parameterization(self, definition, p_value, k):
        pi, prior, t, s = definition.pi(5, 0, k), definition.probabilities(random(5), 0), 0.6, 0.2
        kernel = NoiseKernel.mixed(5, 0, k)
        for z in range(5):
            if pi[z] == 0:
                continue
            like = (1 - t) * torch.eye(5, dtype=torch.float64)[z] + t * pi[z]
            logits = (prior * like).log().expand(1, DRAWS, 5)
            tokens = torch.full((1, DRAWS), z)
            drawn = posterior_step(logits, tokens, t, s, kernel, generator=seeded(z), parameterization="denoiser")
            expected = definition.bayes(prior, z, number(1 - t), number(1 - s), pi)
            assert p_value(drawn[0].bincount(minlength=5), expected) > 1e-4

    def test_float64_finds_tokens_that_float32_cannot_tell_apart(self, monkeypatch):
        # one large probability before 2 ** 16 small ones, a half of whose sum is passed at the middle token
        size = 2**16
        logits = torch.zeros(size, dtype=torch.float64)
        logits[0], likely = math.log(2.0**29), 2.0**29
        kernel = NoiseKernel.masked(size, size - 1)
        place = (likely + (size - 2) / 2) / (likely + size - 2)
        draws = torch.tensor([0.0, 0.0, place, 0.0], dtype=torch.float64)
        monkeypatch.setattr("spotlights.diffusion.sampling.uniforms", lambda shape, *_: draws.expand(*shape, 4))
        z = torch.full((1, 1), size - 1)
        drawn = posterior_step(logits.expand(1, 1, size), z, 1.0, 0.0, kernel, dtype=torch.float64)
        assert int(drawn) == pytest.approx(size / 2, abs=1)

    def test_times_of_any_shape(self):
        kernel = NoiseKernel.mixed(6, 5, 0.4)
        z, logits = torch.randint(6, (2, 30), generator=seeded()), random(2, 30, 6)
        t, s = torch.tensor([0.9, 0.5]), torch.tensor([0.4, 0.0])
        drawn = posterior_step(logits, z, t, s, kernel, generator=[seeded(1), seeded(2)])
        wide = [v[:, None].expand(2, 30) for v in (t, s)]
        assert torch.equal(drawn, posterior_step(logits, z, *wide, kernel, generator=[seeded(1), seeded(2)]))
        for row in range(2):
            here = slice(row, row + 1)
            alone = posterior_step(
                logits[here], z[here], float(t[row]), float(s[row]), kernel, generator=[seeded(row + 1)]
            )
            assert torch.equal(alone, drawn[here])
        assert posterior_step(logits, z.int(), t, s, kernel).dtype == torch.int32


class TestNever:
    @pytest.mark.parametrize("mask_id", [0, 3, 5])
    @pytest.mark.parametrize("k", [0.0, 0.1, 0.5, 1.0])
    def test_a_mask_is_left_at_the_end(self, k, mask_id):
        kernel = NoiseKernel.mixed(6, mask_id, k)
        z = torch.arange(6)[:, None].expand(6, 3000)
        logits = random(6, 3000, 6)
        logits[..., mask_id] = 100
        for t in (0.01, 0.5, 1.0):
            drawn = posterior_step(logits, z, t, 0.0, kernel, generator=seeded())
            assert (drawn != mask_id).all()

    def test_a_token_that_cannot_be_noise_changes(self):
        kernel = NoiseKernel.masked(5, mask_id=2)
        z = torch.tensor([[0, 1, 3, 4]]).expand(500, 4)
        for fill in (0.0, -torch.inf):
            logits = torch.full((500, 4, 5), fill)
            logits[..., 0] = 5.0
            for t, s in ((1.0, 0.0), (1.0, 0.5), (0.5, 0.1), (1e-6, 0.0)):
                assert torch.equal(posterior_step(logits, z, t, s, kernel, generator=seeded()), z)

    def test_observed_tokens_change(self):
        kernel = NoiseKernel.mixed(9, 0, 0.5)
        z = torch.randint(9, (8, 100), generator=seeded())
        observed = torch.rand(8, 100, generator=seeded(1)) < 0.4
        logits = random(8, 100, 9)
        logits[observed] = torch.nan
        drawn = posterior_step(logits, z, 0.9, 0.0, kernel, observed=observed, generator=seeded(2))
        assert torch.equal(drawn[observed], z[observed])
        assert (drawn != z)[~observed].float().mean() > 0.5

    def test_the_logits_change(self):
        kernel = NoiseKernel.mixed(9, 0, 0.5)
        z, logits = torch.randint(9, (2, 20), generator=seeded()), random(2, 20, 9)
        before = logits.clone()
        posterior_step(
            logits, z, 0.9, 0.1, kernel, dtype=torch.float64, temperature=0.5, top_k=3, parameterization="denoiser"
        )
        assert torch.equal(logits, before)


class TestExtremes:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("option", [{"temperature": 1e-320}, {"temperature": 1e-40}, {"top_p": 1e-300}], ids=str)
    def test_only_the_likeliest_is_left(self, option, dtype):
        kernel = NoiseKernel.masked(5, 4)
        logits = random(2, 50, 5)
        drawn = posterior_step(logits, torch.full((2, 50), 4), 1.0, 0.0, kernel, dtype=dtype, **option)
        assert torch.equal(drawn, logits[..., :4].argmax(-1))

    def test_a_huge_temperature_makes_all_alike_but_what_is_impossible(self, p_value):
        logits = torch.tensor([9.0, 0.0, -torch.inf, -9.0, 0.0]).expand(1, 20000, 5)
        z = torch.full((1, 20000), 4)
        drawn = posterior_step(logits, z, 1.0, 0.0, NoiseKernel.masked(5, 4), temperature=1e300, generator=seeded())
        assert p_value(drawn.flatten().bincount(minlength=5), torch.tensor([1, 1, 0, 1, 0]).double() / 3) > 1e-3


class TestBatchMates:
    @pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "temperature": 0.8}, {"dtype": torch.float64}], ids=str)
    @pytest.mark.parametrize("length", [1, 3])
    @pytest.mark.parametrize("k", [0.0, 0.1])
    def test_a_large_vocabulary(self, two_threads, k, length, options):
        size = 126464
        kernel = NoiseKernel.mixed(size, size - 1, k)
        logits = torch.randn(4, length, size, generator=seeded()) * 3
        z = torch.full((4, length), size - 1)
        z[1] = 5
        logits[1, :, 5] = 9.0  # stays or goes by a probability that needs every logit
        drawn = posterior_step(logits, z, 0.9, 0.05, kernel, generator=[seeded(row) for row in range(4)], **options)
        for row in range(4):
            here = slice(row, row + 1)
            alone = posterior_step(logits[here], z[here], 0.9, 0.05, kernel, generator=[seeded(row)], **options)
            assert torch.equal(alone, drawn[here])

    def test_sums_of_one_row_and_of_many_are_the_same(self, two_threads):
        rows = torch.randn(5, 126464, generator=seeded())
        for reduce in (torch.sum, torch.logsumexp):
            many = chunks.reduce_rows(reduce, rows)
            for row in range(5):
                assert torch.equal(chunks.reduce_rows(reduce, rows[row : row + 1]), many[row : row + 1])
                assert chunks.reduce_rows(reduce, rows[row : row + 1], keepdim=True).shape == (1, 1)

    def test_chunks_do_not_change_the_draws(self, monkeypatch):
        kernel = NoiseKernel.mixed(33, 32, 0.3)
        z, logits = torch.randint(33, (3, 40), generator=seeded()), random(3, 40, 33).float()
        drawn = []
        for rows in (1, 2, 7, 1000):
            monkeypatch.setattr(chunks, "CPU_LOGITS", rows * 33)
            drawn.append(posterior_step(logits, z, 0.8, 0.2, kernel, generator=seeded(5)))
        for other in drawn[1:]:
            assert torch.equal(other, drawn[0])


class TestGuide:
    @pytest.mark.parametrize("scale", [0.0, 0.5, 2.0, -1.0])
    def test_formula(self, scale):
        conditional, unconditional = random(2, 3, 7), random(2, 3, 7, seed=1)
        log_p = (1 + scale) * conditional.log_softmax(-1) - scale * unconditional.log_softmax(-1)
        guided = guide(conditional, unconditional, scale)
        torch.testing.assert_close(guided.softmax(-1), log_p.softmax(-1), rtol=1e-12, atol=1e-14)

    def test_infinities_and_inputs_stay(self):
        conditional, unconditional = torch.tensor([0.0, -torch.inf, 1.0]), torch.tensor([1.0, -torch.inf, 0.0])
        kept = conditional.clone(), unconditional.clone()
        assert guide(conditional, unconditional, 1.0).tolist() == [-1.0, -math.inf, 2.0]
        assert torch.equal(conditional, kept[0])
        assert torch.equal(unconditional, kept[1])

    def test_no_guidance_minds_no_infinity(self):
        conditional = torch.tensor([0.0, -torch.inf, 1.0])
        assert torch.equal(guide(conditional, torch.tensor([-torch.inf, 0.0, 0.0]), 0.0), conditional)

    def test_dtypes_must_match(self):
        with pytest.raises(TypeError, match=r"^unconditional: got dtype torch.float32, expected torch.float16"):
            guide(torch.zeros(3).half(), torch.zeros(3), 1.0)

    def test_shapes_must_match(self):
        with pytest.raises(ValueError, match=r"^unconditional: got shape \(4,\), expected \(3,\)"):
            guide(torch.zeros(3), torch.zeros(4), 1.0)


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (
                {"logits": torch.zeros(1, 2, 6)},
                ValueError,
                r"logits: got shape \(1, 2, 6\), .*padded .*logits\[..., :4\]",
            ),
            ({"logits": torch.zeros(1, 2, 4).long()}, TypeError, "logits: got dtype torch.int64"),
            ({"logits": torch.full((1, 2, 4), torch.nan)}, ValueError, "logits: .*NaN"),
            ({"logits": torch.full((1, 2, 4), torch.inf)}, ValueError, "logits: .*infinity"),
            ({"logits": torch.tensor([[[-torch.inf] * 3 + [0.0]] * 2])}, ValueError, "logits: .*other than the mask"),
            ({"z": torch.tensor([[1, 4]])}, ValueError, "z: got token 4, expected ids from 0 to 3"),
            ({"z": torch.tensor([[1.0, 2.0]])}, TypeError, "z: got dtype torch.float32"),
            ({"t": 1.5}, ValueError, "t: got 1.5"),
            ({"s": -0.1}, ValueError, r"s: got -0.1, expected times in \[0, 1\)"),
            ({"s": 0.9}, ValueError, "s: got 0.9 with t = 0.8, expected s before t"),
            ({"observed": torch.ones(1, 2, dtype=torch.bool)}, ValueError, "observed: every token is observed"),
            ({"observed": torch.zeros(2, 1, dtype=torch.bool)}, ValueError, r"observed: got shape \(2, 1\)"),
            ({"generator": [seeded()] * 2}, ValueError, "generator: got 2 generators"),
            ({"parameterization": "x0"}, ValueError, "parameterization: got 'x0'"),
            ({"temperature": 0.0}, ValueError, "temperature: got 0.0"),
            ({"temperature": math.inf}, ValueError, "temperature: got inf, expected a finite number above 0"),
            ({"top_k": 0}, ValueError, "top_k: got 0"),
            ({"top_k": 2.0}, TypeError, "top_k: got 2.0, expected an integer"),
            ({"top_p": 0.0}, ValueError, "top_p: got 0.0"),
            ({"top_p": 1.1}, ValueError, "top_p: got 1.1"),
            ({"dtype": torch.float16}, TypeError, "dtype: got torch.float16"),
        ],
    )
    def test_posterior_step(self, changes, error, message):
        arguments = {"logits": torch.zeros(1, 2, 4), "z": torch.tensor([[3, 3]]), "t": 0.8, "s": 0.0, **changes}
        with pytest.raises(error, match=f"^{message}"):
            posterior_step(**arguments, kernel=NoiseKernel.mixed(4, 3, 0.1))
