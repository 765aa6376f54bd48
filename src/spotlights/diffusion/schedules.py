"""Noise schedules: how much of the data is left at time t."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Schedule(ABC):
    """The part alpha(t) of tokens not yet touched by noise: 1 at t = 0, falling to 0 at t = 1.

    A schedule of your own defines `alpha` by differentiable torch operations; `derivative` follows from it.

    Example:
        >>> class Quartic(Schedule):
        ...     def alpha(self, t):
        ...         return (1 - t**2) ** 2
        >>> Quartic().derivative(torch.tensor(0.5, dtype=torch.float64))
        tensor(-1.5000, dtype=torch.float64)
    """

    @abstractmethod
    def alpha(self, t: Tensor) -> Tensor:
        """Return alpha at times ``t``, any shape, in [0, 1]."""

    def derivative(self, t: Tensor) -> Tensor:
        """Return d alpha / dt at times ``t``, any shape, in [0, 1]."""
        with torch.inference_mode(False), torch.enable_grad():
            times = t.detach().clone().requires_grad_()
            return torch.autograd.grad(self.alpha(times).sum(), times)[0]


class LinearSchedule(Schedule):
    """alpha = 1 - t, which MDLM calls log-linear.

    Example:
        >>> LinearSchedule().alpha(torch.tensor([0.0, 0.25, 1.0]))
        tensor([1.0000, 0.7500, 0.0000])
    """

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1 - t."""
        return 1 - t

    def derivative(self, t: Tensor) -> Tensor:
        """Return -1."""
        return -torch.ones_like(t)


class CosineSchedule(Schedule):
    """alpha = 1 - sin(pi t / 2): noise comes fast at first, slowly at the end.

    Example:
        >>> CosineSchedule().alpha(torch.tensor([0.0, 1 / 3, 1.0]))
        tensor([1.0000, 0.5000, 0.0000])
    """

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1 - sin(pi t / 2)."""
        return 1 - torch.sin(t * (torch.pi / 2))

    def derivative(self, t: Tensor) -> Tensor:
        """Return -(pi / 2) cos(pi t / 2)."""
        return -(torch.pi / 2) * torch.cos(t * (torch.pi / 2))


class PolynomialSchedule(Schedule):
    """alpha = 1 - t ** power.

    Example:
        >>> PolynomialSchedule(2).alpha(torch.tensor([0.0, 0.5, 1.0]))
        tensor([1.0000, 0.7500, 0.0000])
    """

    def __init__(self, power: float) -> None:
        if not power > 0:
            raise ValueError(f"power: got {power}, expected more than 0")
        self.power = power

    def alpha(self, t: Tensor) -> Tensor:
        """Return 1 - t ** power."""
        return 1 - t**self.power

    def derivative(self, t: Tensor) -> Tensor:
        """Return -power t ** (power - 1)."""
        return -self.power * t ** (self.power - 1)


SCHEDULES: dict[str, type[Schedule]] = {"linear": LinearSchedule, "cosine": CosineSchedule}
