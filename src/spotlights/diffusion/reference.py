"""The definition of the diffusion, dense over the vocabulary and short enough to believe (XDLM, section 3).

Everything here builds tensors of (batch, length, vocabulary) and is meant for tests and small vocabularies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spotlights.diffusion.checks import check_logits, check_parameterization, check_tokens, step_times, times
from spotlights.diffusion.kernel import NoiseKernel


def probabilities(logits: Tensor, z: Tensor, t: Tensor, kernel: NoiseKernel, parameterization: str = "loo") -> Tensor:
    """Return the model's p over data tokens, (B, L, N): softmax with the mask left out.

    A denoiser predicts x from all of z; dividing p_z by 1 + alpha / (beta pi(z)) takes what z itself said out of it.
    """
    if parameterization == "denoiser":
        own = own_evidence(z, t, kernel)
        logits = logits.scatter_add(-1, z[..., None], -own[..., None].to(logits.dtype))
    if kernel.mask_id is not None:
        mask = torch.arange(kernel.vocab_size, device=logits.device) == kernel.mask_id
        logits = logits.masked_fill(mask, -torch.inf)
    return logits.softmax(-1)


def own_evidence(z: Tensor, t: Tensor, kernel: NoiseKernel) -> Tensor:
    """Return log(1 + alpha / (beta pi(z))), what z says of its own x: 0 for masks and where z cannot be noise."""
    noise = kernel.noise_at(t, z)
    own = torch.log1p(kernel.alpha(t) / noise).masked_fill(noise == 0, 0)
    return own if kernel.mask_id is None else own.masked_fill(z == kernel.mask_id, 0)


def marginal(p: Tensor, t: Tensor, kernel: NoiseKernel) -> Tensor:
    """Return f_t(p, .) = alpha p + (1 - alpha) pi for p of (..., N) and t of (...)."""
    alpha = kernel.alpha(t)[..., None]
    return alpha * p + (1 - alpha) * kernel.pi(t)


def transition(z: Tensor, t: Tensor, s: Tensor, kernel: NoiseKernel) -> Tensor:
    """Return f_{t|s}(e, z), the probability that e at time s is z at time t: (..., N) for z, t and s of (...)."""
    kept = kernel.alpha(t) / kernel.alpha(s)
    drawn = kernel.noise_at(t, z) - kept * kernel.noise_at(s, z)
    return kept[..., None] * _one_hot(z, kernel) + drawn[..., None]


def posterior_of(p: Tensor, z: Tensor, t: Tensor, s: Tensor, kernel: NoiseKernel) -> Tensor:
    """Return q(z_s | z_t = z, p) = f_s(p, .) f_{t|s}(., z) / f_t(p, z), (..., N); z stays where it is impossible."""
    joint = marginal(p, s, kernel) * transition(z, t, s, kernel)
    total = joint.sum(-1, keepdim=True)
    return torch.where(total > 0, joint / total, _one_hot(z, kernel))


def posterior(
    logits: Tensor,
    z: Tensor,
    t: Tensor | float,
    s: Tensor | float,
    kernel: NoiseKernel,
    *,
    parameterization: str = "loo",
) -> Tensor:
    """Return the distribution of z_s that `posterior_step` draws from, dense: for small vocabularies.

    Args:
        logits: (B, L, N), floating.
        z: tokens at time ``t``, (B, L) int64.
        t: times in (0, 1]; a number, (B,) or (B, L).
        s: earlier times in [0, 1), likewise.
        kernel: the noise.
        parameterization: "loo" or "denoiser", as in `nelbo`.

    Returns:
        (B, L, N) of the logits' dtype.

    Raises:
        ValueError: a shape, token or time is not as above, or ``parameterization`` is unknown.

    Example:
        >>> kernel = NoiseKernel.masked(3, mask_id=2)
        >>> posterior(torch.zeros(1, 1, 3), torch.tensor([[2]]), 1.0, 0.5, kernel)
        tensor([[[0.2500, 0.2500, 0.5000]]])
    """
    check_tokens("z", z, kernel.vocab_size)
    check_logits(logits, z, kernel.vocab_size)
    check_parameterization(parameterization)
    later, earlier = step_times(t, s, z.shape, z.device)
    p = probabilities(logits.double(), z, later, kernel, parameterization)
    return posterior_of(p, z, later, earlier, kernel).to(logits.dtype)


def step_kl(
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    t: Tensor | float,
    s: Tensor | float,
    kernel: NoiseKernel,
    parameterization: str = "loo",
) -> Tensor:
    """Return KL(q(z_s | z_t, x) || q(z_s | z_t, p)) for each token, (B, L): one step of the finite NELBO."""
    later, earlier = step_times(t, s, z.shape, z.device)
    p = probabilities(logits, z, later, kernel, parameterization)
    return kl_divergence(
        posterior_of(_one_hot(x, kernel), z, later, earlier, kernel), posterior_of(p, z, later, earlier, kernel)
    )


def nelbo(
    logits: Tensor, x: Tensor, z: Tensor, t: Tensor | float, kernel: NoiseKernel, parameterization: str = "loo"
) -> Tensor:
    """Return the continuous-time NELBO of each token, (B, L), for noise that does not depend on time and t < 1.

    With f = f_t(x, .), g = f_t(p, .) and rho = f(z) / g(z) it is
    (-alpha' / alpha) pi(z) / f(z) * [KL(f || g) + rho - log rho - 1]; 0 where z cannot be noise.
    """
    when = times("t", t, z.shape, z.device)
    p = probabilities(logits, z, when, kernel, parameterization)
    data, model = marginal(_one_hot(x, kernel), when, kernel), marginal(p, when, kernel)
    at_z, model_at_z = (values.gather(-1, z[..., None])[..., 0] for values in (data, model))
    pi_z = kernel.pi().to(z.device)[z]
    rho = at_z / model_at_z
    rate = -kernel.schedule.derivative(when) / kernel.alpha(when)
    loss = rate * pi_z / at_z * (kl_divergence(data, model) + rho - rho.log() - 1)
    return torch.where(pi_z > 0, loss, 0)


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) over the last dimension; where p is 0 the term is 0."""
    ratio = torch.where(p > 0, p, 1) / torch.where(p > 0, q, 1)
    return (p * ratio.log()).sum(-1)


def _one_hot(tokens: Tensor, kernel: NoiseKernel) -> Tensor:
    return torch.nn.functional.one_hot(tokens.long(), kernel.vocab_size).double()
