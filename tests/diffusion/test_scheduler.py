"""The scheduler: equal to the sampler, kept as JSON."""

import pytest
import torch

from spotlights.diffusion import sample
from spotlights.runtime.errors import UserError

pytest.importorskip("transformers", reason="needs the text extra")

from spotlights.diffusion.models import XDLMConfig, XDLMForMaskedLM, XDLMScheduler


def test_a_loop_draws_what_the_sampler_draws():
    logits = torch.randn(2, 7, 9, generator=torch.Generator().manual_seed(0))
    scheduler = XDLMScheduler(9, 8, k=0.3)
    scheduler.set_timesteps(5)
    generator = torch.Generator().manual_seed(1)
    z = scheduler.init_sample((2, 7), generator=generator)
    for t in scheduler.timesteps:
        z = scheduler.step(logits, t, scheduler.scale_model_input(z, t), generator=generator).prev_sample
    expected = sample(
        lambda z, t: logits, scheduler.kernel, shape=(2, 7), steps=5, generator=torch.Generator().manual_seed(1)
    )
    assert torch.equal(z, expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("parameterization", ["loo", "denoiser"])
@pytest.mark.parametrize("steps", [1, 7, 49])
@torch.no_grad()
def test_a_loop_with_a_model_a_prompt_and_generators(schedule, parameterization, steps):
    def generators():
        return [torch.Generator().manual_seed(seed) for seed in range(3)]

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1}
    model = XDLMForMaskedLM(XDLMConfig(vocab_size=9, mask_token_id=8, **sizes)).eval()
    prompt = torch.randint(8, (3, 7))
    prompt[:, 2:5] = 8
    observed = prompt != 8
    scheduler = XDLMScheduler(9, 8, k=0.3, schedule=schedule, parameterization=parameterization)
    scheduler.set_timesteps(steps)
    given = generators()
    z = torch.where(observed, prompt, scheduler.init_sample((3, 7), generator=given))
    for t in scheduler.timesteps.float():  # as a pipeline may round them
        z = scheduler.step(model(z).logits, t, z, generator=given, observed=observed)[0]
    options = {"prompt": prompt, "steps": steps, "parameterization": parameterization}
    assert torch.equal(z, sample(model.denoiser(), scheduler.kernel, generator=generators(), **options))


def test_a_tuple_where_no_dict_is_wanted():
    scheduler = XDLMScheduler(5, 4)
    scheduler.set_timesteps(1)
    (z,) = scheduler.step(torch.zeros(1, 3, 5), 1.0, torch.full((1, 3), 4), return_dict=False)
    assert (z < 4).all()


def test_noise_is_the_kernels():
    scheduler = XDLMScheduler(5, 4, k=0.0)
    x = torch.zeros(1, 1000, dtype=torch.int64)
    z = scheduler.add_noise(x, torch.tensor([0.3]), generator=torch.Generator().manual_seed(0))
    assert set(z.unique().tolist()) == {0, 4}
    assert 0.25 < float((z == 4).float().mean()) < 0.35
    given = torch.arange(1000)[None] < 500
    z = scheduler.add_noise(x, 1.0, observed=given)
    assert torch.equal(z == 4, ~given)


def test_save_and_load(tmp_path):
    scheduler = XDLMScheduler(5, 4, k=0.7, schedule="cosine", parameterization="denoiser")
    scheduler.save_pretrained(tmp_path / "pipeline" / "scheduler")
    again = XDLMScheduler.from_pretrained(tmp_path / "pipeline", subfolder="scheduler")
    assert again.config == scheduler.config
    assert XDLMScheduler.from_config(scheduler.config, k=0.1).config.k == 0.1


@pytest.mark.parametrize("text", [None, "{", "[]", '{"steps": 3}'])
def test_bad_files(tmp_path, text):
    if text is not None:
        (tmp_path / "scheduler_config.json").write_text(text)
    with pytest.raises(UserError, match=r"scheduler_config.json: no settings of a scheduler"):
        XDLMScheduler.from_pretrained(tmp_path)


def test_bad_arguments():
    scheduler = XDLMScheduler(5, 4)
    with pytest.raises(ValueError, match=r"timestep: got 0.5, expected one of timesteps, after set_timesteps"):
        scheduler.step(torch.zeros(1, 3, 5), 0.5, torch.full((1, 3), 4))
    scheduler.set_timesteps(4)
    for t in (0.0, 0.26, 1.25, float("nan")):
        with pytest.raises(ValueError, match=f"timestep: got {t}, expected one of timesteps"):
            scheduler.step(torch.zeros(1, 3, 5), t, torch.full((1, 3), 4))
    with pytest.raises(ValueError, match="parameterization: got 'other'"):
        XDLMScheduler(5, 4, parameterization="other")
    with pytest.raises(ValueError, match="num_inference_steps: got 0"):
        scheduler.set_timesteps(0)
    with pytest.raises(ValueError, match="schedule: got 'square'"):
        XDLMScheduler(5, 4, schedule="square")
