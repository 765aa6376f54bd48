"""The sampler as a scheduler in the manner of diffusers: timesteps, step, add_noise, a JSON config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spotlights.diffusion.checks import Generators, check_count, check_parameterization
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.sampling import posterior_step
from spotlights.diffusion.schedules import SCHEDULES
from spotlights.runtime.errors import UserError
from spotlights.runtime.runs import write_json

CONFIG = "scheduler_config.json"


@dataclass(frozen=True)
class XDLMSchedulerConfig:
    """The settings of an `XDLMScheduler`, as its config file holds them."""

    vocab_size: int
    mask_token_id: int | None
    k: float = 0.1
    schedule: str = "linear"
    parameterization: str = "loo"


class XDLMSchedulerOutput(NamedTuple):
    """What a step returns: ``prev_sample``, tokens at the earlier time, (B, L) int64."""

    prev_sample: Tensor


class XDLMScheduler:
    """Steps tokens from noise to data where a pipeline of diffusers takes a scheduler; diffusers is not needed.

    Args:
        vocab_size: N, the mask included.
        mask_token_id: id of the mask; None with ``k=1`` where there is none.
        k: part of uniform noise.
        schedule: "linear" or "cosine".
        parameterization: "loo" or "denoiser", as in `spotlights.diffusion.nelbo`.

    Attributes:
        config: the settings.
        timesteps: (steps,) float64, from 1 downwards, once `set_timesteps` was called.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> scheduler = XDLMScheduler(vocab_size=5, mask_token_id=4)
        >>> scheduler.set_timesteps(4)
        >>> scheduler.timesteps.tolist()
        [1.0, 0.75, 0.5, 0.25]
        >>> z = scheduler.init_sample((1, 3))
        >>> for t in scheduler.timesteps:
        ...     z = scheduler.step(torch.zeros(1, 3, 5), t, z).prev_sample
        >>> bool((z < 4).all())
        True
    """

    order = 1
    init_noise_sigma = 1.0

    def __init__(
        self,
        vocab_size: int,
        mask_token_id: int | None,
        k: float = 0.1,
        schedule: str = "linear",
        parameterization: str = "loo",
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {schedule!r}, expected one of {', '.join(SCHEDULES)}")
        check_parameterization(parameterization)
        self.config = XDLMSchedulerConfig(vocab_size, mask_token_id, k, schedule, parameterization)
        self.kernel = NoiseKernel.mixed(vocab_size, mask_token_id, k, schedule=SCHEDULES[schedule]())
        self.timesteps = torch.empty(0, dtype=torch.float64)
        self.num_inference_steps: int | None = None

    def set_timesteps(self, num_inference_steps: int, device: torch.device | str | None = None) -> None:
        """Choose how many steps lead from noise to data.

        Raises:
            ValueError: less than 1.
        """
        check_count("num_inference_steps", num_inference_steps)
        self.num_inference_steps = num_inference_steps
        counts = torch.arange(num_inference_steps, 0, -1, dtype=torch.float64, device=device)
        self.timesteps = counts / num_inference_steps

    def init_sample(
        self, shape: tuple[int, int], *, generator: Generators = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return pure noise, (B, L) int64: where a pipeline starts."""
        return self.kernel.prior(shape, generator=generator, device=device)

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """Return the tokens as they are: there is nothing to scale."""
        return sample

    def step(
        self,
        model_output: Tensor,
        timestep: Tensor | float,
        sample: Tensor,
        generator: Generators = None,
        return_dict: bool = True,
        **options: Any,
    ) -> XDLMSchedulerOutput | tuple[Tensor]:
        """Go from one of ``timesteps`` to the next, the last one to 0.

        Args:
            model_output: logits (B, L, N).
            timestep: one of ``timesteps``; it may have been rounded to float32.
            sample: tokens at that time, (B, L) int64.
            generator: of the draws; one, or one for each sequence.
            return_dict: False returns a tuple.
            **options: of `posterior_step`: observed, temperature, top_k, top_p, dtype.

        Raises:
            ValueError: `set_timesteps` was not called, or the time is none of its.
        """
        distances = (self.timesteps - float(timestep)).abs() * len(self.timesteps)
        if not len(distances) or not bool(distances.min() < 1e-3):
            raise ValueError(f"timestep: got {float(timestep)}, expected one of timesteps, after set_timesteps()")
        place = int(distances.argmin())
        earlier = self.timesteps[place + 1] if place + 1 < len(self.timesteps) else 0.0
        previous = posterior_step(
            model_output,
            sample,
            self.timesteps[place],
            earlier,
            self.kernel,
            generator=generator,
            parameterization=self.config.parameterization,
            **options,
        )
        return XDLMSchedulerOutput(previous) if return_dict else (previous,)

    def add_noise(
        self,
        sample: Tensor,
        timesteps: Tensor | float,
        generator: Generators = None,
        observed: Tensor | None = None,
    ) -> Tensor:
        """Return tokens noised to times in (0, 1], (B, L), but for those observed; see `NoiseKernel.q_sample`."""
        return self.kernel.q_sample(sample, timesteps, observed=observed, generator=generator)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | XDLMSchedulerConfig, **changes: Any) -> XDLMScheduler:
        """Return a scheduler with the settings of a config, some changed; keys that begin with "_" are left out."""
        values = asdict(config) if isinstance(config, XDLMSchedulerConfig) else dict(config)
        return cls(**{name: value for name, value in {**values, **changes}.items() if not name.startswith("_")})

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write ``scheduler_config.json`` into a folder, which is made where it is missing."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / CONFIG, {"_class_name": type(self).__name__, **asdict(self.config)})

    @classmethod
    def from_pretrained(cls, directory: str | Path, *, subfolder: str = "") -> XDLMScheduler:
        """Return the scheduler that `save_pretrained` wrote into a folder.

        Raises:
            UserError: the file is missing, or holds no such settings.
        """
        path = Path(directory) / subfolder / CONFIG
        try:
            return cls.from_config(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: no settings of a scheduler: {error}") from error
