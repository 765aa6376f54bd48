"""Whole samples: from noise to data in steps, with prompts, guidance, blocks, or the refine heuristic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from spotlights.diffusion.checks import Generators, check_count, check_logits, check_observed, check_tokens
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.sampling import guide, posterior_step

Denoiser = Callable[[Tensor, Tensor], Tensor]
SAMPLERS = ("posterior", "refine")


@torch.no_grad()
def sample(
    denoiser: Denoiser,
    kernel: NoiseKernel,
    *,
    prompt: Tensor | None = None,
    observed: Tensor | None = None,
    shape: tuple[int, int] | None = None,
    steps: int = 64,
    sampler: str = "posterior",
    block_size: int | None = None,
    unconditional: Denoiser | None = None,
    guidance: float = 0.0,
    generator: Generators = None,
    device: torch.device | str = "cpu",
    on_step: Callable[[int, int, Tensor], None] | None = None,
    **options: Any,
) -> Tensor:
    """Generate token sequences from noise, keeping what is observed.

    Args:
        denoiser: (z of (B, L) int64, t of (B,) float64) -> logits (B, L, N); ``lambda z, t: model(z).logits``.
        kernel: the noise that the denoiser was trained with.
        prompt: (B, L) int64; its observed tokens are given, the others are filled.
        observed: (B, L) bool, which tokens of the prompt are given; by default all but masks.
        shape: (B, L) where there is no prompt.
        steps: of denoising, for each block.
        sampler: "posterior" draws by `posterior_step`; "refine" commits the most confident tokens by `refine_step`.
        block_size: fill blocks of so many tokens from left to right; the denoiser then sees the sequence up to the
            block's end. None fills all at once.
        unconditional: a denoiser without the condition, for classifier-free guidance.
        guidance: its scale g.
        generator: one, or one for each sequence.
        device: where to sample without a prompt.
        on_step: called after each step with the steps done, their total, and z.
        **options: of `posterior_step`: temperature, top_k, top_p, dtype, parameterization; "refine" takes none.

    Returns:
        (B, L) int64 without masks at the tokens that were not observed.

    Raises:
        ValueError: an argument is out of range or missing; an error of `posterior_step`.

    Example:
        >>> kernel = NoiseKernel.masked(3, mask_id=2)
        >>> prefer_one = lambda z, t: torch.tensor([-99.0, 99.0, 0.0]).expand(*z.shape, 3)
        >>> sample(prefer_one, kernel, prompt=torch.tensor([[0, 2, 2]]), steps=4)
        tensor([[0, 1, 1]])
    """
    check_count("steps", steps)
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler: got {sampler!r}, expected {' or '.join(map(repr, SAMPLERS))}")
    if sampler == "refine" and (kernel.k is None or kernel.mask_id is None):
        raise ValueError(f"sampler: 'refine' needs mixed noise with a mask token, got {kernel}")
    if sampler == "refine" and options:
        raise ValueError(f"{next(iter(options))}: has no meaning for the sampler 'refine', which draws nothing")
    if block_size is not None:
        check_count("block_size", block_size)
    if guidance and unconditional is None:
        raise ValueError("unconditional: got None, expected a denoiser, as guidance is not 0")
    if prompt is None:
        if shape is None:
            raise ValueError("shape: expected (batch, length), as there is no prompt")
        if observed is not None:
            raise ValueError("observed: given without a prompt")
        given, z = None, kernel.prior(shape, generator=generator, device=device)
    else:
        check_tokens("prompt", prompt, kernel.vocab_size)
        if shape is not None and tuple(shape) != prompt.shape:
            raise ValueError(f"shape: got {tuple(shape)}, expected {tuple(prompt.shape)} as the prompt has, or none")
        if observed is None and kernel.mask_id is None:
            raise ValueError("observed: expected which tokens of the prompt are given, as there is no mask token")
        given = check_observed(
            prompt.ne(kernel.mask_id) if observed is None and kernel.mask_id is not None else observed,
            prompt.shape,
            prompt.device,
        )
        noise = kernel.prior((prompt.shape[0], prompt.shape[1]), generator=generator, device=prompt.device)
        z = torch.where(given, prompt.long(), noise)
    fixed = torch.zeros_like(z, dtype=torch.bool) if given is None else given
    step = _posterior_sampler if sampler == "posterior" else _refine_sampler

    def logits(tokens: Tensor, t: float) -> Tensor:
        when = torch.full((len(tokens),), t, dtype=torch.float64, device=tokens.device)
        scores = denoiser(tokens, when)
        check_logits(scores, tokens, kernel.vocab_size)
        return guide(scores, unconditional(tokens, when), guidance) if unconditional and guidance else scores

    length = z.shape[1]
    size = block_size or max(length, 1)
    blocks = [(start, min(start + size, length)) for start in range(0, length, size)]
    blocks = [(start, end) for start, end in blocks if not bool(fixed[:, start:end].all())]
    done = 0
    for start, end in blocks:
        before = torch.arange(end, device=z.device) < start
        for z_part in step(logits, z[:, :end], fixed[:, :end] | before, kernel, steps, generator, options):
            z = torch.cat([z_part, z[:, end:]], dim=1)
            done += 1
            if on_step is not None:
                on_step(done, steps * len(blocks), z)
    return z


_Logits = Callable[[Tensor, float], Tensor]


def _posterior_sampler(
    logits: _Logits,
    z: Tensor,
    fixed: Tensor,
    kernel: NoiseKernel,
    steps: int,
    generator: Generators,
    options: dict[str, Any],
) -> Iterator[Tensor]:
    for number in range(steps, 0, -1):
        t, s = number / steps, (number - 1) / steps
        z = posterior_step(logits(z, t), z, t, s, kernel, observed=fixed, generator=generator, **options)
        yield z


def _refine_sampler(
    logits: _Logits,
    z: Tensor,
    fixed: Tensor,
    kernel: NoiseKernel,
    steps: int,
    generator: Generators,
    options: dict[str, Any],
) -> Iterator[Tensor]:
    assert kernel.mask_id is not None
    assert kernel.k is not None
    z = z.masked_fill(~fixed, kernel.mask_id)
    unmasked = torch.zeros(len(z), dtype=torch.int64, device=z.device)
    for number in range(steps, 0, -1):
        left = (z.eq(kernel.mask_id) & ~fixed).sum(1)
        count = -(-left // number)
        # The budget of a step is a difference of whole sums: few tokens a step add up to rewritten ones, too.
        budget = _refine_budget(unmasked + count, kernel)
        if kernel.k < 1:
            budget = budget - _refine_budget(unmasked, kernel)
        unmasked += count
        z = refine_step(logits(z, number / steps), z, count, kernel, budget=budget, observed=fixed)
        yield z


def _refine_budget(unmasked: Tensor, kernel: NoiseKernel) -> Tensor:
    """Return how many committed tokens may be rewritten for so many unmasked ones, (B,) int64; all where k is 1."""
    assert kernel.k is not None
    if kernel.k == 1:
        return torch.full_like(unmasked, 2**31)
    # Decimals such as 0.4 are stored a little too small, which would round whole budgets down.
    return (unmasked.double() * (kernel.k / (1 - kernel.k)) + 1e-9).long()


@torch.no_grad()
def refine_step(
    logits: Tensor,
    z: Tensor,
    count: Tensor | int,
    kernel: NoiseKernel,
    *,
    budget: Tensor | int | None = None,
    observed: Tensor | None = None,
) -> Tensor:
    """Commit the ``count`` most confident masked tokens, and rewrite committed ones that the model would not choose.

    The heuristic of the paper's LLaDA experiments, not the posterior: for each token unmasked, k / (1 - k) committed
    tokens whose argmax is another token now are rewritten, the most confident first; with k = 1 all of them.

    Args:
        logits: (B, L, N), floating; the mask's logit is ignored.
        z: (B, L) int64, masks where nothing is committed yet.
        count: tokens to unmask in each sequence; a number or (B,).
        kernel: mixed noise with a mask.
        budget: committed tokens to rewrite at most; a number or (B,), by default ``count`` k / (1 - k) rounded down.
        observed: (B, L) bool; tokens that are never rewritten.

    Returns:
        (B, L) of the dtype of ``z``.

    Example:
        >>> kernel = NoiseKernel.mixed(3, mask_id=2, k=0.5)
        >>> logits = torch.tensor([[[0.0, 3.0, 0.0], [5.0, 0.0, 0.0], [1.0, 0.0, 0.0]]])
        >>> refine_step(logits, torch.tensor([[0, 2, 2]]), 1, kernel)
        tensor([[1, 0, 2]])
    """
    check_tokens("z", z, kernel.vocab_size)
    check_logits(logits, z, kernel.vocab_size)
    if kernel.k is None or kernel.mask_id is None:
        raise ValueError(f"kernel: got {kernel}, expected mixed noise with a mask token")
    fixed = check_observed(observed, z.shape, z.device)
    keep = torch.arange(kernel.vocab_size, device=z.device) != kernel.mask_id
    scores = logits.masked_fill(~keep, -torch.inf)
    best, choice = scores.max(-1)
    confidence = best - scores.logsumexp(-1)
    if bool(confidence.isnan().any()):
        raise ValueError("logits: expected numbers without NaN or infinity")
    masked = (z == kernel.mask_id) & ~fixed
    wanted = torch.as_tensor(count, device=z.device).expand(len(z)).minimum(masked.sum(1))
    allowed = _refine_budget(wanted, kernel) if budget is None else torch.as_tensor(budget, device=z.device)
    changed = ~masked & ~fixed & (choice != z)
    rewritten = _most_confident(confidence, masked, wanted)
    rewritten |= _most_confident(confidence, changed, allowed.expand(len(z)))
    return torch.where(rewritten, choice.to(z.dtype), z)


def _most_confident(confidence: Tensor, among: Tensor, count: Tensor) -> Tensor:
    """Return (B, L) bool: the ``count`` (B,) most confident tokens among those allowed."""
    order = confidence.masked_fill(~among, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return among & (rank < count[:, None])
