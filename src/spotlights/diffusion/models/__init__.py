"""Denoisers for transformers: the project's own, wrapped masked language models, and a scheduler."""

from spotlights.diffusion.models.adapters import MaskedLMDenoiser
from spotlights.diffusion.models.denoiser import XDLMConfig, XDLMForMaskedLM
from spotlights.diffusion.models.scheduler import XDLMScheduler

__all__ = ["MaskedLMDenoiser", "XDLMConfig", "XDLMForMaskedLM", "XDLMScheduler"]
