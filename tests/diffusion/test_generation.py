"""Whole samples: their distribution, what is given stays, blocks, guidance, the refine heuristic, and bad input."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from torch.nn.functional import one_hot

from spotlights.diffusion import CosineSchedule, NoiseKernel, guide, refine_step, sample


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=seeded(seed)) * 1.5


class Denoiser:
    """Logits that depend on the whole sequence and the time, each sequence by itself; notes what it was shown."""

    def __init__(self, size, length, seed=0):
        self.table = random(size, length, size, seed=seed)
        self.seen = []

    def __call__(self, z, t):
        self.seen.append((z.clone(), t.clone()))
        mixed = self.table[z, torch.arange(z.shape[1])].sum(1, keepdim=True)
        return mixed * t[:, None, None] + self.table[z, torch.arange(z.shape[1])] / 2


class TestDistribution:
    @pytest.mark.parametrize("steps", [1, 2, 7])
    @pytest.mark.parametrize(("mask_id", "k"), [(4, 0.0), (0, 0.1), (2, 0.5), (4, 1.0), (None, 1.0)])
    def test_tokens_of_their_own_are_exact_in_any_number_of_steps(self, p_value, mask_id, k, steps):
        kernel = NoiseKernel.mixed(5, mask_id, k, schedule=CosineSchedule())
        logits = random(5)
        if mask_id is not None:
            logits[mask_id] = -torch.inf
        drawn = sample(
            lambda z, t: logits.expand(*z.shape, 5), kernel, shape=(10, 1000), steps=steps, generator=seeded(1)
        )
        assert drawn.dtype == torch.int64
        assert p_value(drawn.flatten().bincount(minlength=5), logits.softmax(0)) > 1e-4

    @pytest.mark.parametrize("k", [0.0, 0.2, 1.0])
    def test_pairs_need_many_steps(self, k):
        # data: two tokens that are mostly equal; the model is the exact distribution of each given the other
        joint = torch.tensor([[0.4, 0.05, 0.0], [0.0, 0.3, 0.05], [0.05, 0.0, 0.15]], dtype=torch.float64)
        kernel = NoiseKernel.mixed(4, 3, k)
        pi = kernel.pi()

        def leave_one_out(z, t):
            like = (1 - t[:, None, None]) * one_hot(z, 4).double() + t[:, None, None] * pi[z][..., None]
            left, right = like[..., :3].unbind(1)
            p = torch.stack([right @ joint.T, left @ joint], dim=1).clamp_min(1e-300)
            return torch.nn.functional.pad(p.log(), (0, 1), value=-torch.inf)

        def distance(steps):
            drawn = sample(leave_one_out, kernel, shape=(20000, 2), steps=steps, generator=seeded(3))
            counts = (drawn[:, 0] * 3 + drawn[:, 1]).bincount(minlength=9).view(3, 3)
            return float((counts / 20000 - joint).abs().sum() / 2)

        one, many = distance(1), distance(64)
        assert one > 0.3
        assert many < 0.025

    def test_generators(self, two_threads):
        kernel, denoiser = NoiseKernel.mixed(9, 8, 0.3), Denoiser(9, 6)
        together = sample(denoiser, kernel, shape=(4, 6), steps=5, generator=[seeded(row) for row in range(4)])
        for row in range(4):
            alone = sample(denoiser, kernel, shape=(1, 6), steps=5, generator=[seeded(row)])
            assert torch.equal(alone, together[row : row + 1])
        first, again, other = (sample(denoiser, kernel, shape=(4, 6), steps=5, generator=seeded(s)) for s in (1, 1, 2))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)


class TestPrompts:
    PROMPT = torch.tensor([[1, 2, 0, 3, 0, 0, 4, 0], [0, 0, 5, 5, 5, 0, 0, 1]])  # the mask is 0

    @pytest.mark.parametrize("block_size", [None, 3])
    @pytest.mark.parametrize("sampler", ["posterior", "refine"])
    @pytest.mark.parametrize("k", [0.0, 0.5, 1.0])
    def test_what_is_given_is_never_rewritten(self, k, sampler, block_size):
        kernel, denoiser, shown = NoiseKernel.mixed(6, 0, k), Denoiser(6, 8), []
        given = self.PROMPT != 0
        options = {"steps": 6, "sampler": sampler, "block_size": block_size, "generator": seeded()}
        drawn = sample(denoiser, kernel, prompt=self.PROMPT, on_step=lambda *step: shown.append(step[2]), **options)
        for z in [*shown, drawn]:
            assert torch.equal(z[given], self.PROMPT[given])
        for z, _ in denoiser.seen:
            assert torch.equal(z[given[:, : z.shape[1]]], self.PROMPT[:, : z.shape[1]][given[:, : z.shape[1]]])
        assert (drawn != 0).all()
        assert torch.equal(drawn, shown[-1])

    def test_observed_says_what_is_given(self):
        observed = torch.zeros(2, 8, dtype=torch.bool)
        observed[:, :2] = True  # masks among them are kept; tokens beyond are not
        kernel = NoiseKernel.mixed(6, 0, 0.5)
        drawn = sample(Denoiser(6, 8), kernel, prompt=self.PROMPT, observed=observed, steps=4, generator=seeded())
        assert torch.equal(drawn[:, :2], self.PROMPT[:, :2])
        assert (drawn[:, 2:] != 0).all()
        assert not torch.equal(drawn[:, 2:], self.PROMPT[:, 2:])

    def test_a_prompt_fully_given_beside_one_that_is_not(self):
        prompt = torch.tensor([[1, 2, 3], [1, 0, 0]])
        drawn = sample(Denoiser(6, 3), NoiseKernel.mixed(6, 0, 0.5), prompt=prompt, steps=4, generator=seeded())
        assert torch.equal(drawn[0], prompt[0])
        assert (drawn[1] != 0).all()

    def test_without_a_mask_token(self):
        prompt, observed = torch.tensor([[1, 2, 3]]), torch.tensor([[True, False, True]])
        kernel = NoiseKernel.uniform(6)
        drawn = sample(Denoiser(6, 3), kernel, prompt=prompt, observed=observed, steps=4, generator=seeded())
        assert torch.equal(drawn[observed], prompt[observed])

    def test_the_prompts_are_not_changed(self):
        prompt = self.PROMPT.clone()
        sample(Denoiser(6, 8), NoiseKernel.mixed(6, 0, 0.5), prompt=prompt, steps=2)
        assert torch.equal(prompt, self.PROMPT)


class TestSteps:
    def test_times_fall_evenly_and_each_step_is_told(self):
        denoiser, calls = Denoiser(6, 4), []
        sample(
            denoiser,
            NoiseKernel.mixed(6, 0, 0.5),
            shape=(2, 4),
            steps=4,
            on_step=lambda done, total, z: calls.append((done, total, z.shape)),
        )
        assert calls == [(done, 4, (2, 4)) for done in (1, 2, 3, 4)]
        assert [t.tolist() for _, t in denoiser.seen] == [[value] * 2 for value in (1.0, 0.75, 0.5, 0.25)]
        assert denoiser.seen[0][1].dtype == torch.float64

    @pytest.mark.parametrize("sampler", ["posterior", "refine"])
    def test_blocks_are_filled_from_left_to_right(self, sampler):
        denoiser, shown = Denoiser(6, 7), []
        kernel = NoiseKernel.mixed(6, 0, 0.5)
        drawn = sample(
            denoiser,
            kernel,
            shape=(3, 7),
            steps=2,
            block_size=3,
            sampler=sampler,
            generator=seeded(),
            on_step=lambda done, total, z: shown.append((done, total, z)),
        )
        assert [(done, total) for done, total, _ in shown] == [(done, 6) for done in range(1, 7)]
        assert [z.shape[1] for z, _ in denoiser.seen] == [3, 3, 6, 6, 7, 7]
        for block, (start, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
            finished = shown[2 * block + 1][2]
            assert (finished[:, :end] != 0).all()
            assert torch.equal(finished[:, :end], drawn[:, :end])  # never rewritten later
            assert torch.equal(shown[2 * block][2][:, :start], drawn[:, :start])

    def test_blocks_that_are_given_take_no_steps(self):
        prompt = torch.tensor([[1, 2, 3, 0, 0, 4], [1, 2, 3, 0, 5, 4]])
        denoiser = Denoiser(6, 6)
        sample(denoiser, NoiseKernel.mixed(6, 0, 0.5), prompt=prompt, steps=3, block_size=3)
        assert [z.shape[1] for z, _ in denoiser.seen] == [6, 6, 6]

    def test_guidance(self):
        kernel, conditional, unconditional = NoiseKernel.mixed(6, 0, 0.5), Denoiser(6, 5), Denoiser(6, 5, seed=1)
        options = {"shape": (4, 5), "steps": 4}
        guided = sample(conditional, kernel, unconditional=unconditional, guidance=1.5, generator=seeded(), **options)
        by_hand = sample(
            lambda z, t: guide(conditional(z, t), unconditional(z, t), 1.5), kernel, generator=seeded(), **options
        )
        plain = sample(conditional, kernel, generator=seeded(), **options)
        off = sample(conditional, kernel, unconditional=unconditional, generator=seeded(), **options)
        assert torch.equal(guided, by_hand)
        assert torch.equal(plain, off)
        assert not torch.equal(guided, plain)

    def test_options_reach_the_step(self):
        kernel, logits = NoiseKernel.mixed(6, 0, 0.5), random(6)
        best = int(logits[1:].argmax()) + 1

        def denoiser(z, t):
            return logits.expand(*z.shape, 6)

        for options in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3, "dtype": torch.float64}):
            assert (sample(denoiser, kernel, shape=(5, 20), steps=3, **options) == best).all()

    def test_no_gradients_are_kept(self):
        scale = torch.ones((), requires_grad=True)
        modes = []

        def denoiser(z, t):
            modes.append((scale * 1).requires_grad)
            return torch.zeros(*z.shape, 6)

        sample(denoiser, NoiseKernel.mixed(6, 0, 0.5), shape=(1, 2), steps=2)
        assert modes == [False, False]

    def test_nothing_to_sample(self):
        for shape in ((0, 4), (2, 0)):
            assert sample(Denoiser(6, 4), NoiseKernel.mixed(6, 0, 0.5), shape=shape, steps=2).shape == shape


def refined(logits, z, count, budget, mask_id, observed):
    """The rule for one sequence, by lists: what is rewritten is what the model is surest of."""
    scores = [[-math.inf if token == mask_id else value for token, value in enumerate(row)] for row in logits.tolist()]
    best = [max(range(len(row)), key=row.__getitem__) for row in scores]
    sure = [row[top] - math.log(sum(map(math.exp, row))) for row, top in zip(scores, best, strict=True)]
    places = sorted(range(len(z)), key=lambda place: -sure[place])
    free = [place for place in places if not observed[place]]
    masked = [place for place in free if z[place] == mask_id][:count]
    changed = [place for place in free if z[place] != mask_id and z[place] != best[place]][:budget]
    return [best[place] if place in masked + changed else z[place] for place in range(len(z))]


class TestRefine:
    @pytest.mark.parametrize("k", ["0", "1/10", "1/2", "3/4", "1"])
    @pytest.mark.parametrize("mask_id", [0, 3])
    def test_the_rule(self, k, mask_id):
        part = Fraction(k)
        kernel = NoiseKernel.mixed(7, mask_id, float(part))
        logits = random(6, 40, 7).float()
        z = torch.randint(7, (6, 40), generator=seeded())
        z[:, ::2] = mask_id
        observed = torch.rand(6, 40, generator=seeded(1)) < 0.2
        counts = torch.tensor([0, 1, 3, 9, 10, 40])
        drawn = refine_step(logits, z, counts, kernel, observed=observed)
        for row in range(6):
            masks = int(((z[row] == mask_id) & ~observed[row]).sum())
            wanted = min(int(counts[row]), masks)
            budget = 40 if part == 1 else int(wanted * part / (1 - part))
            expected = refined(logits[row], z[row].tolist(), wanted, budget, mask_id, observed[row].tolist())
            assert drawn[row].tolist() == expected

    def test_a_sample_spends_what_its_steps_leave(self):
        """One token a step at k = 0.25: the budget of a third a step lets every third step rewrite one."""
        changing = iter(range(99))

        def denoiser(z, t):
            return torch.nn.functional.one_hot(torch.full_like(z, next(changing) % 2), 3) * 9.0

        seen = []
        kernel = NoiseKernel.mixed(3, 2, 0.25)
        sample(denoiser, kernel, shape=(1, 9), steps=9, sampler="refine", on_step=lambda *rest: seen.append(rest[2]))
        committed = [(before != after) & (before != 2) for before, after in itertools.pairwise(seen)]
        assert [int(each.sum()) for each in committed] == [0, 1, 0, 0, 1, 0, 0, 1]

    def test_the_budget_of_round_fractions(self):
        # k / (1 - k) per token, rounded down; never one too few because of how decimals are stored
        length = 200
        for tenths, count in itertools.product(range(1, 10), (9, 18, 27, 45, 63, 90, 99)):
            kernel = NoiseKernel.mixed(3, 2, tenths / 10)
            z = torch.zeros(1, 20 * length, dtype=torch.int64)
            z[:, :count] = 2
            logits = torch.tensor([0.0, 1.0, 0.0]).expand(1, 20 * length, 3)
            drawn = refine_step(logits, z, count, kernel)
            changed = int(((drawn == 1) & (z == 0)).sum())
            assert changed == math.floor(Fraction(tenths, 10 - tenths) * count), (tenths, count)

    @pytest.mark.parametrize("length", [1, 3])
    def test_batch_mates(self, two_threads, length):
        size = 126464
        kernel = NoiseKernel.mixed(size, size - 1, 0.5)
        logits = torch.randn(3, length, size, generator=seeded())
        z = torch.full((3, length), size - 1)
        drawn = refine_step(logits, z, 1, kernel)
        for row in range(3):
            assert torch.equal(refine_step(logits[row : row + 1], z[row : row + 1], 1, kernel), drawn[row : row + 1])

    def test_sampling_commits_evenly(self):
        shown = []
        kernel = NoiseKernel.mixed(6, 0, 0.0)
        sample(
            Denoiser(6, 10),
            kernel,
            shape=(2, 10),
            steps=4,
            sampler="refine",
            on_step=lambda *step: shown.append(step[2]),
        )
        assert [(z != 0).sum(1).tolist() for z in shown] == [[3, 3], [6, 6], [8, 8], [10, 10]]
        for early, late in itertools.pairwise(shown):
            assert torch.equal(late[early != 0], early[early != 0])  # k = 0 rewrites nothing

    def test_bad_input(self):
        kernel = NoiseKernel.mixed(4, 3, 0.5)
        good = {"logits": torch.zeros(1, 2, 4), "z": torch.tensor([[3, 3]]), "count": 1, "kernel": kernel}
        for changes, error, message in [
            ({"logits": torch.full((1, 2, 4), torch.nan)}, ValueError, "logits: expected numbers without NaN"),
            ({"logits": torch.zeros(1, 2, 5)}, ValueError, r"logits: got shape \(1, 2, 5\)"),
            ({"z": torch.tensor([[4, 0]])}, ValueError, "z: got token 4"),
            ({"kernel": NoiseKernel.uniform(4)}, ValueError, "kernel: got NoiseKernel.*, expected mixed noise"),
            ({"observed": torch.ones(1, 2, dtype=torch.bool)}, ValueError, "observed: every token is observed"),
        ]:
            with pytest.raises(error, match=f"^{message}"):
                refine_step(**{**good, **changes})


class TestBadInput:
    PROMPT = torch.tensor([[1, 0, 0]])

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"shape": None}, ValueError, "shape: expected"),
            ({"shape": (4,)}, ValueError, r"shape: got \(4,\), expected \(batch, length\)"),
            ({"prompt": PROMPT, "shape": (2, 3)}, ValueError, r"shape: got \(2, 3\), expected \(1, 3\) as the prompt"),
            ({"steps": 0}, ValueError, "steps: got 0"),
            ({"steps": 2.0}, TypeError, "steps: got 2.0, expected an integer"),
            ({"denoiser": lambda z, t: (z,)}, TypeError, "logits: got tuple, expected a tensor"),
            ({"sampler": "euler"}, ValueError, "sampler: got 'euler', expected 'posterior' or 'refine'"),
            (
                {"sampler": "refine", "kernel": NoiseKernel.uniform(6)},
                ValueError,
                "sampler: 'refine' needs mixed noise",
            ),
            ({"sampler": "refine", "top_k": 2}, ValueError, "top_k: has no meaning for the sampler 'refine'"),
            ({"block_size": 0}, ValueError, "block_size: got 0"),
            ({"guidance": 1.0}, ValueError, "unconditional: got None"),
            ({"observed": PROMPT > 0}, ValueError, "observed: given without a prompt"),
            ({"prompt": PROMPT + 5}, ValueError, "prompt: got token 6, expected ids from 0 to 5"),
            ({"prompt": PROMPT[0]}, ValueError, r"prompt: got shape \(3,\)"),
            ({"prompt": PROMPT.float()}, TypeError, "prompt: got dtype torch.float32"),
            ({"prompt": PROMPT + 1}, ValueError, "observed: every token is observed"),
            ({"prompt": PROMPT, "observed": PROMPT[:, :2] > 0}, ValueError, r"observed: got shape \(1, 2\)"),
            ({"prompt": PROMPT, "kernel": NoiseKernel.uniform(6)}, ValueError, "observed: expected which tokens"),
            ({"temperature": -1}, ValueError, "temperature: got -1"),
            ({"generator": [seeded()] * 3}, ValueError, "generator: got 3 generators"),
            ({"denoiser": lambda z, t: torch.zeros(*z.shape, 8)}, ValueError, r"logits: got shape .* padded"),
            ({"denoiser": lambda z, t: torch.full((*z.shape, 6), torch.nan)}, ValueError, "logits: .*NaN"),
            (
                {"denoiser": lambda z, t: torch.full((*z.shape, 6), torch.nan), "sampler": "refine"},
                ValueError,
                "logits: .*NaN",
            ),
        ],
    )
    def test_sample(self, changes, error, message):
        arguments = {"denoiser": Denoiser(6, 3), "kernel": NoiseKernel.mixed(6, 0, 0.5), "shape": (1, 3), "steps": 2}
        with pytest.raises(error, match=f"^{message}"):
            sample(**{**arguments, **changes})
