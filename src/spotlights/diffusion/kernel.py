"""The noise: which distribution tokens fall into, and when (XDLM, arXiv 2602.01362, section 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spotlights.diffusion.checks import Generators, check_count, check_observed, check_tokens, times, uniforms
from spotlights.diffusion.schedules import LinearSchedule, Schedule

NoisePath = Callable[[Tensor], Tensor]


class NoiseKernel:
    """Noise that turns tokens into draws from a distribution pi as time goes from 0 to 1.

    At time t a token is still itself with probability alpha(t); else it was drawn from pi, so that
    f_t(p, e) = alpha p_e + (1 - alpha) pi(e). `mixed` gives the paper's pi, `masked` and `uniform` its two ends.

    Args:
        pi: the noise distribution over N tokens, (N,) floating; or a function of times, (...) float64, that returns
            (..., N) float64 by differentiable torch operations.
        mask_id: id of the mask token, to which models give no probability; None where there is none.
        vocab_size: N; needed where ``pi`` is a function.
        schedule: alpha(t).

    Attributes:
        k: part of uniform noise in `mixed`, None for other distributions.

    Raises:
        ValueError: ``pi`` is no distribution, or ``mask_id`` is out of range.
        TypeError: ``pi`` is neither a tensor nor a function.

    Example:
        >>> kernel = NoiseKernel(torch.tensor([0.5, 0.25, 0.25]))
        >>> kernel.q_sample(torch.tensor([[0, 1, 2]]), t=1e-9)
        tensor([[0, 1, 2]])
    """

    def __init__(
        self,
        pi: Tensor | NoisePath,
        *,
        mask_id: int | None = None,
        vocab_size: int | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.k: float | None = None
        self.schedule = schedule or LinearSchedule()
        if isinstance(pi, Tensor):
            if pi.ndim != 1 or not pi.numel():
                raise ValueError(f"pi: got shape {tuple(pi.shape)}, expected (N,)")
            if vocab_size not in (None, len(pi)):
                raise ValueError(f"vocab_size: got {vocab_size}, expected {len(pi)} as in pi")
            vocab_size = len(pi)
            pi = pi.double()
            if not (bool((pi >= 0).all()) and abs(float(pi.sum()) - 1) < 1e-5):
                raise ValueError("pi: expected numbers of 0 or more that sum to 1")
            pi = pi / pi.sum()
        elif not callable(pi):
            raise TypeError(f"pi: got {type(pi).__name__}, expected a tensor or a function of times")
        elif vocab_size is None:
            raise ValueError("vocab_size: needed where pi is a function of time")
        self._set_vocabulary(vocab_size, mask_id)
        self._pi: Tensor | NoisePath | None = pi

    def _set_vocabulary(self, vocab_size: int, mask_id: int | None) -> None:
        check_count("vocab_size", vocab_size, least=2)
        if mask_id is not None and not 0 <= mask_id < vocab_size:
            raise ValueError(f"mask_id: got {mask_id}, expected an id from 0 to {vocab_size - 1}")
        self.vocab_size = vocab_size
        self.mask_id = mask_id

    @classmethod
    def mixed(cls, vocab_size: int, mask_id: int | None, k: float, *, schedule: Schedule | None = None) -> NoiseKernel:
        """Return XDLM's noise pi(e) = k/N + (1 - k) [e = mask]: k = 0 is MDLM's, k = 1 is UDLM's.

        Args:
            vocab_size: N, the mask token included.
            mask_id: id of the mask token; may be None where k = 1.
            k: part of uniform noise, in [0, 1].
            schedule: alpha(t), by default 1 - t.

        Raises:
            ValueError: ``k`` or ``mask_id`` is out of range, or there is no mask although k < 1.

        Example:
            >>> NoiseKernel.mixed(4, mask_id=3, k=0.4).pi()
            tensor([0.1000, 0.1000, 0.1000, 0.7000], dtype=torch.float64)
        """
        if not 0 <= k <= 1:
            raise ValueError(f"k: got {k}, expected a number in [0, 1]")
        if mask_id is None and k < 1:
            raise ValueError(f"mask_id: got None with k = {k}, expected the id of the mask token")
        kernel = cls.__new__(cls)
        kernel.k = float(k)
        kernel.schedule = schedule or LinearSchedule()
        kernel._set_vocabulary(vocab_size, mask_id)
        kernel._pi = None
        return kernel

    @classmethod
    def masked(cls, vocab_size: int, mask_id: int, *, schedule: Schedule | None = None) -> NoiseKernel:
        """Return MDLM's noise: every token falls into the mask; the ``mixed`` noise of k = 0."""
        return cls.mixed(vocab_size, mask_id, 0.0, schedule=schedule)

    @classmethod
    def uniform(cls, vocab_size: int, mask_id: int | None = None, *, schedule: Schedule | None = None) -> NoiseKernel:
        """Return UDLM's noise: tokens fall uniformly; the ``mixed`` noise of k = 1."""
        return cls.mixed(vocab_size, mask_id, 1.0, schedule=schedule)

    def __repr__(self) -> str:
        """Show what the noise is."""
        noise = "custom pi" if self.k is None else f"k={self.k:g}"
        return f"NoiseKernel({noise}, vocab_size={self.vocab_size}, mask_id={self.mask_id})"

    def alpha(self, t: Tensor) -> Tensor:
        """Return the part of tokens untouched at times ``t``, any shape."""
        return self.schedule.alpha(t)

    def pi(self, t: Tensor | None = None) -> Tensor:
        """Return the noise distribution, (N,) float64, or (..., N) at times ``t``, (...) float64.

        Raises:
            ValueError: the distribution depends on time and ``t`` is None, or its function gives another shape.
        """
        if isinstance(self._pi, Tensor):
            row = self._pi if t is None else self._pi.to(t.device)
        elif self._pi is None:
            assert self.k is not None
            device = None if t is None else t.device
            row = torch.full((self.vocab_size,), self.k / self.vocab_size, dtype=torch.float64, device=device)
            if self.mask_id is not None:
                row[self.mask_id] += 1 - self.k
        elif t is None:
            raise ValueError("t: got None, expected times, as this noise depends on time")
        else:
            moving = self._pi(t)
            if moving.shape != (*t.shape, self.vocab_size):
                expected = (*t.shape, self.vocab_size)
                raise ValueError(f"pi: the function gave shape {tuple(moving.shape)}, expected {expected}")
            return moving
        return row if t is None else row.expand(*t.shape, -1)

    def noise(self, t: Tensor) -> Tensor:
        """Return (1 - alpha) pi(e) for all tokens but the mask: (..., 1) where it is the same for all, or (..., N)."""
        beta = (1 - self.alpha(t))[..., None]
        return beta * (self.k / self.vocab_size) if self.k is not None else beta * self.pi(t)

    def noise_at(self, t: Tensor, tokens: Tensor) -> Tensor:
        """Return (1 - alpha) pi(e) at one token e for each time: float64 in the shape of ``t`` and ``tokens``."""
        if isinstance(self._pi, Tensor):
            return (1 - self.alpha(t)) * self._pi.to(t.device)[tokens.long()]
        if self.k is None:
            return self.noise(t).gather(-1, tokens[..., None].long()).squeeze(-1)
        point = (tokens == self.mask_id).double() if self.mask_id is not None else torch.zeros_like(t)
        return (1 - self.alpha(t)) * (self.k / self.vocab_size + (1 - self.k) * point)

    def rate_at(self, t: Tensor, tokens: Tensor) -> Tensor:
        """Return alpha times the rate at which tokens are drawn as noise at time ``t``, float64.

        It is alpha (beta pi)' - alpha' beta pi, that is -alpha' pi where pi does not depend on time.

        Raises:
            ValueError: it is negative somewhere, so that pi is no path of a diffusion.
        """
        if self._pi is None or isinstance(self._pi, Tensor):
            beta = 1 - self.alpha(t)
            return -self.schedule.derivative(t) * (self.noise_at(t, tokens) / beta)
        with torch.inference_mode(False), torch.enable_grad():
            moving = t.detach().clone().requires_grad_()
            tokens = tokens.clone()
            noise = self.noise_at(moving, tokens)
            slope = torch.autograd.grad(noise.sum(), moving)[0]
        rate = self.alpha(t) * slope - self.schedule.derivative(t) * noise.detach()
        if bool((rate < -1e-9).any()):
            raise ValueError("pi: the noise of some token shrinks faster than the data, expected a rate of 0 or more")
        return rate.clamp_min(0)

    def q_sample(
        self, x: Tensor, t: Tensor | float, *, observed: Tensor | None = None, generator: Generators = None
    ) -> Tensor:
        """Return tokens noised to time ``t``: kept with probability alpha(t), else drawn from pi.

        Args:
            x: data tokens, (B, L) int64.
            t: times in (0, 1]; a number, (B,) or (B, L).
            observed: (B, L) bool; tokens that are never noised, such as prompts and padding.
            generator: of the draws; one, or one for each sequence.

        Returns:
            (B, L) of the dtype of ``x``.

        Raises:
            ValueError: a token or time is out of range, a shape does not match, or every token is observed.
            TypeError: a dtype is not as above.

        Example:
            >>> kernel = NoiseKernel.masked(5, mask_id=4)
            >>> kernel.q_sample(torch.tensor([[0, 1, 2]]), t=1.0, observed=torch.tensor([[True, False, False]]))
            tensor([[0, 4, 4]])
        """
        check_tokens("x", x, self.vocab_size)
        fixed = check_observed(observed, x.shape, x.device)
        when = times("t", t, x.shape, x.device)
        draws = uniforms(x.shape, 3, generator, x.device)
        keep = fixed | (draws[..., 0] < self.alpha(when))
        return torch.where(keep, x, self.draw(when, draws[..., 1], draws[..., 2]).to(x.dtype))

    def draw(self, t: Tensor, coin: Tensor, place: Tensor) -> Tensor:
        """Return one draw from pi for each time: int64 from two float64 uniforms in [0, 1), all of one shape."""
        if self.k is None:
            cumulative = (self._pi.to(t.device) if isinstance(self._pi, Tensor) else self.pi(t)).cumsum(-1)
            if bool(((cumulative[..., -1] - 1).abs() > 1e-5).any()):
                raise ValueError("pi: the function gave numbers that do not sum to 1")
            return categorical(cumulative, place)
        everywhere = (place * self.vocab_size).long().clamp_max(self.vocab_size - 1)
        return everywhere if self.mask_id is None else torch.where(coin < self.k, everywhere, self.mask_id)

    def prior(
        self, shape: tuple[int, int], *, generator: Generators = None, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return tokens of pure noise, (B, L) int64: where sampling starts.

        Raises:
            ValueError: ``shape`` is not (B, L), or the generators do not fit.

        Example:
            >>> NoiseKernel.masked(5, mask_id=4).prior((1, 3))
            tensor([[4, 4, 4]])
        """
        if len(shape) != 2 or min(shape) < 0:
            raise ValueError(f"shape: got {tuple(shape)}, expected (batch, length)")
        draws = uniforms(torch.Size(shape), 2, generator, torch.device(device))
        return self.draw(torch.ones_like(draws[..., 0]), draws[..., 0], draws[..., 1])


def categorical(cumulative: Tensor, place: Tensor) -> Tensor:
    """Return the token at which running sums of weights, (..., N), pass the part ``place`` in [0, 1) of their total.

    A token of weight 0 is never returned.

    Example:
        >>> categorical(torch.tensor([0.0, 1.0, 1.0, 4.0]), torch.tensor([0.2, 0.3]))
        tensor([1, 3])
    """
    total = cumulative[..., -1]
    # A product rounded up to the total would point beyond the last token.
    target = torch.minimum(place.to(cumulative.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    if cumulative.ndim == 1:
        return torch.searchsorted(cumulative, target, right=True)
    return torch.searchsorted(cumulative.contiguous(), target[..., None].contiguous(), right=True).squeeze(-1)
