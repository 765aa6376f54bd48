"""One step back in time: keep a token or draw it anew, equal to the posterior and never dense over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from spotlights.diffusion.checks import (
    Generators,
    check_count,
    check_logits,
    check_observed,
    check_parameterization,
    check_tensor,
    check_tokens,
    step_times,
    uniforms,
)
from spotlights.diffusion.chunks import reduce_rows, rows_at_once
from spotlights.diffusion.kernel import NoiseKernel, categorical
from spotlights.diffusion.reference import own_evidence


@torch.no_grad()
def posterior_step(
    logits: Tensor,
    z: Tensor,
    t: Tensor | float,
    s: Tensor | float,
    kernel: NoiseKernel,
    *,
    generator: Generators = None,
    observed: Tensor | None = None,
    parameterization: str = "loo",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Draw tokens at an earlier time ``s`` from q(z_s | z_t, p).

    A token stays with probability alpha_{t|s} f_s(p, z) / f_t(p, z); otherwise it is drawn from f_s(p, .): from the
    model with probability alpha_s, else from the noise. Masked tokens that stay cost nothing, others one or two passes
    over their logits. Unmasking, remasking and correction are all this one rule; at s = 0 no mask is left.

    Args:
        logits: (B, L, N), floating; the mask's logit is ignored.
        z: tokens at time ``t``, (B, L) int64.
        t: times in (0, 1]; a number, (B,) or (B, L).
        s: earlier times in [0, 1), likewise.
        kernel: the noise.
        generator: of the draws; with one for each sequence, a sequence's draws do not depend on its batch mates.
        observed: (B, L) bool; tokens that are never rewritten.
        parameterization: "loo" or "denoiser", as in `nelbo`.
        temperature: divides the logits, more than 0 and finite.
        top_k: keep only so many of the likeliest tokens.
        top_p: keep only the likeliest tokens whose probabilities reach this sum, in (0, 1].
        dtype: of probabilities and running sums; float64 follows the distribution in its last digits, too.

    Returns:
        (B, L) of the dtype of ``z``.

    Raises:
        ValueError: an argument is out of range, a shape does not match, every token is observed, or the logits of a
            token that is looked at hold NaN. TypeError: a dtype is not as above.

    Example:
        >>> kernel = NoiseKernel.masked(3, mask_id=2)
        >>> logits = torch.tensor([[[9.0, -99.0, 0.0], [-99.0, 9.0, 0.0]]])
        >>> posterior_step(logits, torch.tensor([[2, 2]]), 1.0, 0.0, kernel)
        tensor([[0, 1]])
    """
    check_tokens("z", z, kernel.vocab_size)
    check_logits(logits, z, kernel.vocab_size)
    fixed = check_observed(observed, z.shape, z.device).flatten()
    later, earlier = (times.flatten() for times in step_times(t, s, z.shape, z.device))
    prepare = _Preparation(kernel, parameterization, temperature, top_k, top_p, dtype)
    draws = uniforms(z.shape, 4, generator, z.device).flatten(0, 1)
    flat = z.flatten().long()

    alpha_t, alpha_s = kernel.alpha(later), kernel.alpha(earlier)
    kept = alpha_t / alpha_s
    noise_t, noise_s = kernel.noise_at(later, flat), kernel.noise_at(earlier, flat)
    drawn = noise_t - kept * noise_s
    movable = (drawn > 1e-15 * noise_t) & ~fixed
    masked = flat == kernel.mask_id if kernel.mask_id is not None else torch.zeros_like(fixed)
    # The model gives a mask no probability, so whether a masked token stays is known without its logits.
    redrawn = movable & masked & (draws[:, 0] >= kept * noise_s / noise_t)
    from_model = draws[:, 1] < alpha_s
    result = flat.clone()
    noise = redrawn & ~from_model
    needed = (movable & ~masked) | (redrawn & from_model)
    index = needed.nonzero()[:, 0]
    rows_of = logits.flatten(0, 1)
    for part in index.split(rows_at_once(kernel.vocab_size, logits.device)):
        rows = prepare(rows_of.index_select(0, part), flat[part], later[part])
        highest = rows.amax(1, keepdim=True)
        weights = rows.sub_(highest).exp_()
        total = reduce_rows(torch.sum, weights)
        if not bool(total.isfinite().all()):
            raise ValueError("logits: expected numbers without NaN or +infinity, and a token other than the mask")
        p_z = (weights.gather(1, flat[part, None])[:, 0] / total).double()
        stay = kept[part] * (alpha_s[part] * p_z + noise_s[part]) / (alpha_t[part] * p_z + noise_t[part])
        again = masked[part] | (draws[part, 0] >= stay)
        noise[part] = again & ~from_model[part]
        chosen = (again & from_model[part]).nonzero()[:, 0]
        if len(chosen):
            cumulative = weights[chosen].cumsum(1) if len(chosen) < len(part) else weights.cumsum_(1)
            result[part[chosen]] = categorical(cumulative, draws[part[chosen], 2])
    lost = noise.nonzero()[:, 0]
    if len(lost):
        result[lost] = kernel.draw(earlier[lost], draws[lost, 3], draws[lost, 2])
    return result.view(z.shape).to(z.dtype)


def guide(conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """Return logits under classifier-free guidance: (1 + g) log p_c - g log p_u, up to a constant for each token.

    Args:
        conditional: (..., N) logits given the condition; those of -infinity stay so.
        unconditional: (..., N) logits without it, of the same dtype; what only they exclude becomes +infinity.
        scale: g, 0 for no guidance.

    Raises:
        ValueError: the shapes differ. TypeError: the dtypes do.

    Example:
        >>> guide(torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.0]), scale=2.0)
        tensor([2., 0.])
    """
    for name, value in (("conditional", conditional), ("unconditional", unconditional)):
        check_tensor(name, value)
    if conditional.shape != unconditional.shape:
        raise ValueError(f"unconditional: got shape {tuple(unconditional.shape)}, expected {tuple(conditional.shape)}")
    if conditional.dtype != unconditional.dtype:
        raise TypeError(f"unconditional: got dtype {unconditional.dtype}, expected {conditional.dtype}")
    if scale == 0:  # infinity times 0 is no number
        return conditional.clone()
    guided = torch.lerp(unconditional, conditional, 1 + scale)
    return guided.masked_fill_(conditional == -torch.inf, -torch.inf)


class _Preparation:
    """Turns copied rows of logits into those whose softmax is p: leave-one-out, temperature, top-k, top-p."""

    def __init__(
        self,
        kernel: NoiseKernel,
        parameterization: str,
        temperature: float,
        top_k: int | None,
        top_p: float | None,
        dtype: torch.dtype,
    ) -> None:
        check_parameterization(parameterization)
        if not 0 < temperature < torch.inf:
            raise ValueError(f"temperature: got {temperature}, expected a finite number above 0")
        if top_k is not None:
            check_count("top_k", top_k)
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p: got {top_p}, expected a number in (0, 1]")
        if dtype not in (torch.float32, torch.float64):
            raise TypeError(f"dtype: got {dtype}, expected torch.float32 or torch.float64")
        self.kernel = kernel
        self.denoiser = parameterization == "denoiser"
        limits = torch.finfo(dtype)
        self.temperature = min(max(temperature, limits.tiny), limits.max)
        self.top_k = top_k
        self.top_p = top_p
        self.dtype = dtype

    def __call__(self, rows: Tensor, z: Tensor, t: Tensor) -> Tensor:
        """Return (n, N) logits for rows (n, N) that may be changed in place, tokens (n,) and times (n,)."""
        kernel = self.kernel
        rows = rows.to(self.dtype)
        if self.denoiser:
            rows.scatter_add_(1, z[:, None], -own_evidence(z, t, kernel)[:, None].to(rows.dtype))
        if kernel.mask_id is not None:
            rows[:, kernel.mask_id] = -torch.inf
        if self.temperature != 1:
            # The highest becomes 0, which no temperature takes out of range.
            rows = rows.sub_(rows.amax(1, keepdim=True)).div_(self.temperature)
        if self.top_k is not None and self.top_k < kernel.vocab_size:
            least = rows.topk(self.top_k, dim=1).values[:, -1:]
            rows.masked_fill_(rows < least, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = rows.sort(1, descending=True)
            before = ordered.softmax(1).cumsum(1).roll(1, 1)
            beyond = before >= self.top_p
            beyond[:, 0] = False
            drop = torch.zeros_like(beyond).scatter_(1, order, beyond)
            rows.masked_fill_(drop, -torch.inf)
        return rows
