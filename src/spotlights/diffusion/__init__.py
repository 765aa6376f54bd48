"""The core of discrete diffusion: noise, bounds and samplers for sequences of tokens (XDLM, arXiv 2602.01362).

Plain functions of logits, tokens and times; any network that gives logits can use them. The networks are in
:mod:`spotlights.diffusion.models`, which needs the ``text`` extra.
"""

from spotlights.diffusion.generation import refine_step, sample
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.loss import linear_nelbo, nelbo
from spotlights.diffusion.reference import posterior
from spotlights.diffusion.sampling import guide, posterior_step
from spotlights.diffusion.schedules import CosineSchedule, LinearSchedule, PolynomialSchedule, Schedule

__all__ = [
    "CosineSchedule",
    "LinearSchedule",
    "NoiseKernel",
    "PolynomialSchedule",
    "Schedule",
    "guide",
    "linear_nelbo",
    "nelbo",
    "posterior",
    "posterior_step",
    "refine_step",
    "sample",
]
