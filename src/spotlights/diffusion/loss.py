"""The NELBO without tensors of (batch, length, vocabulary): chunks of tokens, one closed gradient.

Both bounds, in continuous time and in T steps, have the form gain * KL(f_tau(x) || f_tau(p)) + a function of p_z
alone, where p_z is the model's probability of the noised token. Over the vocabulary one needs two sums for the loss
and one pass for its gradient; all else are gathers at x and z, done in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spotlights.diffusion.checks import (
    check_count,
    check_logits,
    check_observed,
    check_parameterization,
    check_tensor,
    check_tokens,
    step_times,
    times,
)
from spotlights.diffusion.chunks import reduce_rows, rows_at_once
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.reference import own_evidence

_HEAD_ROWS = 256  # tokens that share one reading of the head's weight
_LEAST_ALPHA = 1e-20  # at t = 1 the bound is a limit, which this alpha reaches to the last bit
_LEAST_NOISE = 1e-30  # likewise for the last of T steps, whose s = 0 has no noise; its inverse is a float32


def nelbo(
    logits: Tensor,
    x: Tensor,
    z: Tensor,
    t: Tensor | float,
    kernel: NoiseKernel,
    *,
    observed: Tensor | None = None,
    parameterization: str = "loo",
    steps: int | None = None,
) -> Tensor:
    """Return the negative evidence lower bound of each token in nats, for one draw z of noise.

    Its mean over t uniform in (0, 1] and z = q_sample(x, t) bounds -log p(x). Peak memory is that of the logits and,
    in training, of their gradient; the gradient is closed, so second derivatives are not offered.

    Args:
        logits: (B, L, N), floating; the mask's logit is ignored. float16 and bfloat16 are computed in float32.
        x: data tokens, (B, L) int64.
        z: noised tokens, (B, L) int64.
        t: their times in (0, 1]; a number, (B,) or (B, L).
        kernel: the noise.
        observed: (B, L) bool; tokens whose loss is 0, such as prompts and padding.
        parameterization: "loo" where softmax(logits) is the distribution of x given all tokens of z but its own, which
            is what minimising this bound leads to; "denoiser" where it is given all of z, as after cross-entropy.
        steps: T for the bound of T steps from t to t - 1/T, whose mean is over t in {1/T, ..., 1}; None for
            continuous time.

    Returns:
        (B, L), float64 for float64 logits, else float32.

    Raises:
        ValueError: a shape, token or time is not as above, x holds the mask where it is not observed, every token is
            observed, or the logits hold NaN. TypeError: a dtype is not as above.

    Example:
        >>> kernel = NoiseKernel.mixed(3, mask_id=2, k=0)
        >>> nelbo(torch.zeros(1, 2, 3), torch.tensor([[0, 1]]), torch.tensor([[2, 1]]), 0.5, kernel)  # log(2) / t
        tensor([[1.3863, 0.0000]])
    """
    check_tokens("z", z, kernel.vocab_size)
    check_logits(logits, z, kernel.vocab_size)
    tokens = _Tokens.select(x, z, t, kernel, observed, parameterization, steps)
    return _checked(_Nelbo.apply(logits.flatten(0, 1), tokens), "logits").view(z.shape)


def linear_nelbo(
    hidden: Tensor,
    weight: Tensor,
    x: Tensor,
    z: Tensor,
    t: Tensor | float,
    kernel: NoiseKernel,
    *,
    bias: Tensor | None = None,
    observed: Tensor | None = None,
    parameterization: str = "loo",
    steps: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Return `nelbo` of ``hidden @ weight.T + bias``, the language-model head included: logits are never stored.

    Args:
        hidden: last hidden states, (B, L, D), floating.
        weight: of the head, (N, D) in the dtype of ``hidden``.
        x: as in `nelbo`.
        z: as in `nelbo`.
        t: as in `nelbo`.
        kernel: as in `nelbo`.
        bias: of the head, (N,).
        observed: as in `nelbo`.
        parameterization: as in `nelbo`.
        steps: as in `nelbo`.
        reduction: "mean" over the tokens not observed, "sum", or "none" for (B, L). The first two compute gradients
            together with the loss; "none", and float16 for the sake of loss scaling, compute each logit a second time
            in the backward pass.

    Returns:
        A scalar, or (B, L) for "none"; float64 for float64 input, else float32.

    Raises:
        ValueError, TypeError: as `nelbo`; a shape does not match, or ``reduction`` is unknown.

    Example:
        >>> kernel = NoiseKernel.mixed(3, mask_id=2, k=0)
        >>> x, z = torch.tensor([[0, 1]]), torch.tensor([[2, 1]])
        >>> linear_nelbo(torch.ones(1, 2, 8), torch.zeros(3, 8), x, z, 0.5, kernel)
        tensor(0.6931)
    """
    check_tokens("z", z, kernel.vocab_size)
    for name, value in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if value is not None:
            check_tensor(name, value, z.device)
    if not hidden.is_floating_point():
        raise TypeError(f"hidden: got dtype {hidden.dtype}, expected a floating one")
    if hidden.ndim != 3 or hidden.shape[:2] != z.shape:
        raise ValueError(f"hidden: got shape {tuple(hidden.shape)}, expected {(*z.shape, 'D')} with D features")
    if weight.shape != (kernel.vocab_size, hidden.shape[2]):
        expected = (kernel.vocab_size, hidden.shape[2])
        raise ValueError(f"weight: got shape {tuple(weight.shape)}, expected {expected}")
    if weight.dtype != hidden.dtype:
        raise TypeError(f"weight: got dtype {weight.dtype}, expected {hidden.dtype} as hidden has")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: got shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: got {reduction!r}, expected 'mean', 'sum' or 'none'")
    tokens = _Tokens.select(x, z, t, kernel, observed, parameterization, steps)
    arguments = (hidden.flatten(0, 1), weight, bias, tokens)
    # Products run in the dtype of what is given, whatever autocast says.
    with torch.autocast(hidden.device.type, enabled=False):
        if reduction == "none":
            loss = _LinearNelbo.apply(*arguments).view(z.shape)
        else:
            counted = z.numel() if observed is None else int((~observed).sum())
            scale = 1 / max(counted, 1) if reduction == "mean" else 1.0
            if hidden.dtype == torch.float16:
                # Gradients of a mean underflow unless they know how the loss is scaled.
                loss = _LinearNelbo.apply(*arguments).sum(dtype=torch.float64).mul(scale).float()
            else:
                loss = _ReducedLinearNelbo.apply(*arguments, scale, torch.is_grad_enabled())
    return _checked(loss, "hidden, weight or bias")


def _checked(loss: Tensor, source: str) -> Tensor:
    if bool(loss.isnan().any()):
        raise ValueError(f"{source}: the loss is NaN, expected numbers without NaN or infinity")
    return loss


@dataclass
class _Tokens:
    """The tokens whose loss is not 0, and what their losses need besides p_x, p_z and the two sums.

    All are (n,) float64 but the int64 tokens; ``index`` is the place of each in the flattened batch.
    """

    kernel: NoiseKernel
    index: Tensor
    count: int
    x: Tensor
    z: Tensor
    t: Tensor
    tau: Tensor  # time of the KL: t in continuous time, s in steps
    alpha: Tensor  # at tau
    noise_x: Tensor  # (1 - alpha) pi(x) at tau
    own: Tensor | None  # what a denoiser's logit at z is lowered by
    gain: Tensor
    at_z: Callable[[Tensor, slice], tuple[Tensor, Tensor]]  # log p_z -> (z-term, its derivative)

    @classmethod
    def select(
        cls,
        x: Tensor,
        z: Tensor,
        t: Tensor | float,
        kernel: NoiseKernel,
        observed: Tensor | None,
        parameterization: str,
        steps: int | None,
    ) -> _Tokens:
        check_tokens("x", x, kernel.vocab_size, like=z)
        check_parameterization(parameterization)
        if steps is not None:
            check_count("steps", steps)
        fixed = check_observed(observed, z.shape, z.device)
        if kernel.mask_id is not None and bool(((x == kernel.mask_id) & ~fixed).any()):
            raise ValueError(f"x: holds the mask id {kernel.mask_id} at a token that is not observed")
        later = times("t", t, z.shape, z.device)
        earlier = later
        if steps is not None:
            later, earlier = step_times(later, (later - 1 / steps).clamp_min(0), z.shape, z.device)
        drawn = kernel.rate_at(later, z) if steps is None else _drawn(kernel, later, earlier, z)
        # Where z cannot be noise the bound is 0.
        index = ((drawn > 0) & ~fixed).flatten().nonzero()[:, 0]
        chosen = [values.flatten()[index] for values in (x, z, later, earlier, drawn)]
        x, z, later, tau, drawn = chosen
        own = own_evidence(z, later, kernel) if parameterization == "denoiser" else None
        alpha = kernel.alpha(tau).clamp_min(_LEAST_ALPHA)
        make = _continuous if steps is None else _finite
        gain, at_z = make(kernel, x, z, later, tau, alpha, drawn, steps or 0)
        noise_x = kernel.noise_at(tau, x)
        return cls(kernel, index, fixed.numel(), x, z, later, tau, alpha, noise_x, own, gain, at_z)

    def chunks(self, size: int, within: slice | None = None) -> Iterator[slice]:
        """Yield slices of ``size`` tokens, or fewer at the end, of all or of those ``within``."""
        start, stop = (within.start, within.stop) if within is not None else (0, len(self.index))
        for first in range(start, stop, size):
            yield slice(first, min(first + size, stop))

    def rows(self, source: Tensor, part: slice) -> Tensor:
        """Return the rows of ``source`` that belong to a slice of the tokens, without a copy where all are used."""
        return source[part] if len(self.index) == self.count else source.index_select(0, self.index[part])

    def prepare(self, rows: Tensor, part: slice) -> Tensor:
        """Change logits (n, N), in place, to those of a leave-one-out distribution over data tokens."""
        if self.own is not None:
            rows.scatter_add_(1, self.z[part, None], -self.own[part, None].to(rows.dtype))
        if self.kernel.mask_id is not None:
            rows[:, self.kernel.mask_id] = -torch.inf
        return rows


def _drawn(kernel: NoiseKernel, t: Tensor, s: Tensor, z: Tensor) -> Tensor:
    """Return the probability that z was drawn as noise between s and t; raise where it is negative."""
    drawn = kernel.noise_at(t, z) - kernel.alpha(t) / kernel.alpha(s) * kernel.noise_at(s, z)
    if bool((drawn < -1e-9).any()):
        raise ValueError(
            "pi: the noise of some token shrinks faster than the data, expected it to grow between s and t"
        )
    # Rounding leaves a trace where nothing is drawn.
    return torch.where(drawn > 1e-15 * kernel.noise_at(t, z), drawn, 0)


def _continuous(
    kernel: NoiseKernel, x: Tensor, z: Tensor, t: Tensor, tau: Tensor, alpha: Tensor, drawn: Tensor, steps: int
) -> tuple[Tensor, Callable[[Tensor, slice], tuple[Tensor, Tensor]]]:
    same, noise_z = (x == z).double(), kernel.noise_at(t, z)
    at_z = alpha * same + noise_z
    gain = drawn / at_z

    def z_term(log_p_z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """rho - log rho - 1, divided by alpha as the KL is, times the gain."""
        p_z = log_p_z.exp()
        model = alpha[part] * p_z + noise_z[part]
        excess = (same[part] - p_z) / model  # (rho - 1) / alpha
        log_rho = (at_z[part] / model).log()
        value = _excess(alpha[part] * excess, log_rho) / alpha[part]
        return gain[part] * value, -gain[part] * alpha[part] * excess / model * p_z

    return gain, z_term


def _finite(
    kernel: NoiseKernel, x: Tensor, z: Tensor, t: Tensor, tau: Tensor, alpha: Tensor, drawn: Tensor, steps: int
) -> tuple[Tensor, Callable[[Tensor, slice], tuple[Tensor, Tensor]]]:
    same, later = (x == z).double(), kernel.alpha(t)
    noise_t, noise_s = kernel.noise_at(t, z), kernel.noise_at(tau, z)
    at_t, at_s = later * same + noise_t, alpha * same + noise_s
    stay = later / alpha * at_s / at_t
    gain = steps * alpha * drawn / at_t

    def at_z(log_p_z: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """stay log(f_s(x, z) / f_s(p, z)) - log(f_t(x, z) / f_t(p, z)), times T."""
        p_z = log_p_z.exp()
        model_t, model_s = later[part] * p_z + noise_t[part], alpha[part] * p_z + noise_s[part]
        # Without noise at s p_z may be too small for a number, its logarithm is not.
        log_model_s = torch.where(noise_s[part] > 0, model_s.log(), alpha[part].log() + log_p_z)
        share = torch.where(noise_s[part] > 0, alpha[part] * p_z / model_s, 1)
        # Without noise at s a token that must have been drawn has a stay of 0, whatever p_z is.
        kept = torch.where(stay[part] > 0, stay[part] * (at_s[part].log() - log_model_s), 0)
        value = kept - at_t[part].log() + model_t.log()
        # Never negative, by the log-sum inequality.
        return steps * value.clamp_min(0), steps * (later[part] * p_z / model_t - stay[part] * share)

    return gain, at_z


def _excess(value: Tensor, log: Tensor | None = None) -> Tensor:
    """Return value - log(1 + value), exact for small values too; ``log`` is log(1 + value) where 1 + value is known."""
    series = value.square() * (0.5 - value * (1 / 3 - value * (0.25 - value * 0.2)))
    return torch.where(value.abs() < 1e-3, series, value - (torch.log1p(value) if log is None else log))


@dataclass
class _Found:
    """What a chunk's gradient needs from its loss: the rows' log of summed exponentials, and factors, all (n, 1)."""

    log_total: Tensor
    drift_x: Tensor
    drift_z: Tensor


def _loss(rows: Tensor, tokens: _Tokens, part: slice) -> tuple[Tensor, _Found]:
    """Turn prepared logits (n, N) into probabilities, in place, and return the losses, (n,) float64."""
    alpha, noise_x, gain = tokens.alpha[part], tokens.noise_x[part], tokens.gain[part]
    places = torch.stack([tokens.x[part], tokens.z[part]], dim=1)
    at_places = rows.gather(1, places).double()
    highest = rows.amax(1, keepdim=True)
    total = reduce_rows(torch.sum, rows.sub_(highest).exp_(), keepdim=True)
    p = rows.div_(total)
    log_total = highest.double() + total.double().log()
    log_p_x, log_p_z = (at_places - log_total).unbind(1)
    p_x = log_p_x.exp()

    # KL / alpha, each token's term written as f_x (r - 1 - log r) >= 0 with r = f_p / f_x.
    data_x, model_x = alpha + noise_x, alpha * p_x + noise_x
    change = alpha * (p_x - 1) / data_x
    log_ratio = torch.where(noise_x > 0, (model_x / data_x).log(), log_p_x)
    at_x = data_x / alpha * _excess(change, log_ratio)
    others = (_terms(p, tokens, part) - _terms_at(noise_x, alpha * p_x)) / alpha
    kl = at_x + others.clamp_min(0)

    value, drift_z = tokens.at_z(log_p_z, part)
    drift_x = gain * torch.where(noise_x > 0, alpha * p_x / model_x, 1)
    found = _Found(log_total, *(v[:, None].to(rows.dtype) for v in (drift_x, drift_z)))
    return gain * kl + value, found


def _terms_at(noise: Tensor, mass: Tensor) -> Tensor:
    """Return noise * (w - log(1 + w)) with w = mass / noise, or mass where there is no noise."""
    return torch.where(noise > 0, noise * _excess(mass / noise), mass)


def _terms(p: Tensor, tokens: _Tokens, part: slice) -> Tensor:
    """Return the sum over the vocabulary of `_terms_at` with mass = alpha p, (n,) float64."""
    alpha = tokens.alpha[part]
    if tokens.kernel.k == 0:
        return alpha
    noise = tokens.kernel.noise(tokens.tau[part])
    if noise.shape[1] == 1:
        # The sum of w needs no pass: p sums to 1.
        noise = noise.clamp_min(_LEAST_NOISE)
        logs = reduce_rows(torch.sum, (p * (alpha[:, None] / noise).to(p.dtype)).log1p_())
        return alpha - noise[:, 0] * logs
    noise = noise.to(p.dtype)
    mass = p * alpha[:, None].to(p.dtype)
    w = torch.where(noise > 0, mass / noise, 0)
    return reduce_rows(torch.sum, torch.where(noise > 0, noise * (w - w.log1p()), mass)).double()


def _gradient(p: Tensor, found: _Found, tokens: _Tokens, part: slice, upstream: Tensor) -> Tensor:
    """Turn probabilities (n, N) into the gradient of losses to logits, in place; ``upstream`` is (n, 1)."""
    gain, alpha = tokens.gain[part, None].to(p.dtype), tokens.alpha[part, None]
    if tokens.kernel.k == 0:
        grad = p.mul_((found.drift_x - found.drift_z) * upstream)
    else:
        noise = tokens.kernel.noise(tokens.tau[part])
        if noise.shape[1] == 1:
            rest = torch.div(p, (p * (alpha / noise.clamp_min(_LEAST_NOISE)).to(p.dtype)).add_(1))
        else:
            model = p * alpha.to(p.dtype) + noise.to(p.dtype)
            rest = torch.where(model > 0, p * noise.to(p.dtype) / model, 0)
        weight = gain * reduce_rows(torch.sum, rest, keepdim=True) + found.drift_x - found.drift_z
        grad = p.mul_(weight * upstream).addcmul_(rest, gain * upstream, value=-1)
    grad.scatter_add_(1, tokens.x[part, None], -found.drift_x * upstream)
    return grad.scatter_add_(1, tokens.z[part, None], found.drift_z * upstream)


def _working(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Nelbo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: _Tokens) -> Tensor:
        work = _working(logits.dtype)
        loss = logits.new_zeros(tokens.count, dtype=work)
        ctx.tokens, ctx.found = tokens, []
        for part in tokens.chunks(rows_at_once(logits.shape[1], logits.device)):
            rows = tokens.prepare(tokens.rows(logits, part).to(work, copy=True), part)
            values, found = _loss(rows, tokens, part)
            loss[tokens.index[part]] = values.to(work)
            ctx.found.append(found)
        ctx.save_for_backward(logits)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        tokens, work = ctx.tokens, _working(logits.dtype)
        grad = torch.empty_like(logits) if len(tokens.index) == tokens.count else torch.zeros_like(logits)
        for part, found in zip(tokens.chunks(rows_at_once(logits.shape[1], logits.device)), ctx.found, strict=True):
            rows = tokens.prepare(tokens.rows(logits, part).to(work, copy=True), part)
            p = rows.sub_(found.log_total.to(work)).exp_()
            here = upstream[tokens.index[part], None].to(work)
            grad[tokens.index[part]] = _gradient(p, found, tokens, part, here).to(grad.dtype)
        return grad, None


@dataclass
class _HeadGradients:
    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


def _linear_pass(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens, upstream: Tensor | None
) -> tuple[Tensor, _HeadGradients | None]:
    """Return losses (count,), and gradients to hidden, weight and bias where ``upstream`` (count,) is given."""
    work = _working(hidden.dtype)
    loss = hidden.new_zeros(tokens.count, dtype=work)
    # Sums over chunks keep more digits than their terms.
    wide = torch.zeros(weight.shape if upstream is not None else (0,), dtype=work, device=weight.device)
    wide_bias = wide.new_zeros(len(wide))
    grad_hidden = torch.zeros_like(hidden) if upstream is not None else hidden
    for block in tokens.chunks(max(_HEAD_ROWS, rows_at_once(len(weight), hidden.device))):
        states = tokens.rows(hidden, block)
        logits = (states @ weight.T).to(work)
        if bias is not None:
            logits += bias
        for part in tokens.chunks(rows_at_once(len(weight), hidden.device), block):
            rows = tokens.prepare(logits[part.start - block.start : part.stop - block.start], part)
            values, found = _loss(rows, tokens, part)
            loss[tokens.index[part]] = values.to(work)
            if upstream is not None:
                _gradient(rows, found, tokens, part, upstream[tokens.index[part], None].to(work))
        if upstream is not None:
            narrow = logits.to(hidden.dtype)
            grad_hidden[tokens.index[block]] = narrow @ weight
            wide = wide.addmm_(narrow.T, states) if work == hidden.dtype else wide.add_(narrow.T @ states)
            wide_bias += logits.sum(0)
            del narrow
        del logits, rows  # before the next block's are made
    if upstream is None:
        return loss, None
    return loss, _HeadGradients(grad_hidden, wide.to(weight.dtype), None if bias is None else wide_bias.to(bias.dtype))


class _LinearNelbo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens) -> Tensor:
        ctx.tokens = tokens
        ctx.save_for_backward(hidden, weight, bias)
        return _linear_pass(hidden, weight, bias, tokens, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias = ctx.saved_tensors
        _, grads = _linear_pass(hidden, weight, bias, ctx.tokens, upstream)
        assert grads is not None
        return grads.hidden, grads.weight, grads.bias, None


class _ReducedLinearNelbo(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: _Tokens, scale: float, training: bool
    ) -> Tensor:
        wanted = training and any(ctx.needs_input_grad)
        upstream = hidden.new_full((tokens.count,), scale, dtype=_working(hidden.dtype)) if wanted else None
        loss, grads = _linear_pass(hidden, weight, bias, tokens, upstream)
        ctx.grads = grads
        return loss.sum(dtype=torch.float64).mul(scale).to(loss.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Scaled in place: a copy would double the memory of the weight's gradient.
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("linear_nelbo: one backward pass only; reduction='none' allows several")
        scaled = [None if grad is None else grad.mul_(upstream) for grad in (grads.hidden, grads.weight, grads.bias)]
        return *scaled, None, None, None
