"""What one writes from the papers' formulas, dense over the vocabulary: the rivals of the benchmark.

Each function takes logits (B, L, N), tokens (B, L) and one time, with alpha = 1 - t and the mask as the last token, and
works in the logits' dtype with what autograd keeps.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _log_softmax(logits: Tensor) -> Tensor:
    mask = torch.arange(logits.shape[-1], device=logits.device) == logits.shape[-1] - 1
    return logits.masked_fill(mask, -torch.inf).log_softmax(-1)


def _noise(size: int, k: float, like: Tensor) -> Tensor:
    pi = like.new_full((size,), k / size)
    pi[-1] += 1 - k
    return pi


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(-1, tokens[..., None])[..., 0]


def xdlm_loss(logits: Tensor, x: Tensor, z: Tensor, t: float, k: float) -> Tensor:
    """Return XDLM's NELBO of each token, (B, L): the KL over the vocabulary, and rho - log rho - 1 (k > 0)."""
    alpha, pi = 1 - t, _noise(logits.shape[-1], k, logits)
    model = alpha * _log_softmax(logits).exp() + t * pi
    data = t * pi[x] + alpha
    # The data's marginal is t pi everywhere but at x.
    entropy = (t * pi * (t * pi).log()).sum() - t * pi[x] * (t * pi[x]).log() + data * data.log()
    log_model = model.log()
    cross = (t * pi * log_model).sum(-1) + alpha * _at(log_model, x)
    at_z = t * pi[z] + alpha * (x == z).to(pi.dtype)
    rho = at_z / _at(model, z)
    return pi[z] / (alpha * at_z) * (entropy - cross + rho - rho.log() - 1)


def mdlm_loss(logits: Tensor, x: Tensor, z: Tensor, t: float) -> Tensor:
    """Return MDLM's NELBO of each token, (B, L): cross-entropy over t at masks."""
    return -_at(_log_softmax(logits), x) / t * (z == logits.shape[-1] - 1)


def udlm_loss(logits: Tensor, x: Tensor, z: Tensor, t: float) -> Tensor:
    """Return UDLM's NELBO of each token, (B, L), from N alpha p + 1 - alpha (Schiff et al. 2025, arXiv 2412.10193)."""
    size, alpha = logits.shape[-1], 1 - t
    model = size * alpha * _log_softmax(logits).exp() + t
    same = (x == z).to(model.dtype)
    data_z = size * alpha * same + t
    model_z = _at(model, z)
    log_model = model.log()
    # sum over j of data_j log(model_z data_j / (model_j data_z)), the data being t everywhere but at x
    data_x = size * alpha + t
    total = size * alpha + size * t
    own = (size - 1) * t * torch.log(model.new_tensor(t)) + data_x * torch.log(model.new_tensor(data_x))
    cross = t * log_model.sum(-1) + (data_x - t) * _at(log_model, x)
    signed = (total * (model_z.log() - data_z.log()) + own - cross) / data_z
    return (size / model_z - size / data_z + signed) / (size * alpha)


def _draw(probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
    noise = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / noise).argmax(-1)


def xdlm_step(
    logits: Tensor, z: Tensor, t: float, s: float, k: float, generator: torch.Generator | None = None
) -> Tensor:
    """Draw z_s from the posterior over the vocabulary, (B, L); UDLM's for k = 1."""
    return _draw(xdlm_posterior(logits, z, t, s, k), generator)


def xdlm_posterior(logits: Tensor, z: Tensor, t: float, s: float, k: float) -> Tensor:
    """Return f_s(p, .) f_{t|s}(., z) / f_t(p, z), (B, L, N)."""
    pi = _noise(logits.shape[-1], k, logits)
    kept = (1 - t) / (1 - s)
    marginal = (1 - s) * _log_softmax(logits).exp() + s * pi
    transition = ((1 - kept) * pi[z])[..., None].expand_as(marginal).clone()
    transition.scatter_add_(-1, z[..., None], torch.full_like(transition[..., :1], kept))
    joint = marginal * transition
    return joint / joint.sum(-1, keepdim=True)


def mdlm_step(logits: Tensor, z: Tensor, t: float, s: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw z_s from MDLM's posterior, (B, L): masks are filled with probability (t - s) / t, the rest stays."""
    probabilities = _log_softmax(logits).exp() * (t - s)
    probabilities[..., -1] = s
    mask = logits.shape[-1] - 1
    return torch.where(z == mask, _draw(probabilities, generator), z)
