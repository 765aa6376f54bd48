"""Other people's models as denoisers: masked language models of transformers, and LLaDA-like ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spotlights.diffusion.checks import check_parameterization
from spotlights.diffusion.generation import Denoiser
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.models.denoiser import cut
from spotlights.diffusion.schedules import Schedule


class MaskedLMDenoiser:
    """Wraps a model whose forward takes tokens and gives logits of what masked ones were.

    That is every ``AutoModelForMaskedLM`` (BERT, RoBERTa, ModernBERT, ...) and every LLaDA-type checkpoint. Such models
    are trained by cross-entropy on masks: ``k=0`` is their noise, and with ``k > 0`` their parameterization is
    "denoiser".

    Args:
        model: of transformers, or any module that takes ``input_ids`` and ``attention_mask`` and gives ``.logits`` or
            the logits themselves.
        tokenizer: of the model; its size and special tokens are taken from it.
        mask_id: id of the mask token; by default the tokenizer's, then the config's ``mask_token_id``. LLaDA's is
            126336.
        vocab_size: N; by default the tokenizer's size, then the config's. Logits beyond it, there only to pad the
            matrix, are cut off.
        k: part of uniform noise.
        schedule: alpha(t), by default 1 - t.
        parameterization: "loo" or "denoiser", as in `spotlights.diffusion.nelbo`.

    Attributes:
        kernel: the noise, for `sample`, `nelbo` and the others.
        parameterization: as given.

    Raises:
        ValueError: there is no mask token, or one outside the vocabulary; later, the model has fewer logits than N, or
            positions than tokens.
        TypeError: later, the model gives no logits.

    Example:
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> from spotlights.diffusion import sample
        >>> sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=40, **sizes)).eval()
        >>> denoiser = MaskedLMDenoiser(model, mask_id=3)
        >>> prompt = torch.tensor([[7, 3, 3, 9]])
        >>> bool((sample(denoiser, denoiser.kernel, prompt=prompt, steps=2) == 3).any())
        False
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        mask_id: int | None = None,
        vocab_size: int | None = None,
        k: float = 0.0,
        schedule: Schedule | None = None,
        parameterization: str = "denoiser",
    ) -> None:
        check_parameterization(parameterization)
        config = getattr(model, "config", None)
        if mask_id is None:
            mask_id = getattr(tokenizer, "mask_token_id", None)
        if mask_id is None:
            mask_id = getattr(config, "mask_token_id", None)
        if mask_id is None:
            raise ValueError("mask_id: neither the tokenizer nor the model's config has a mask token; give its id")
        if vocab_size is None:
            vocab_size = len(tokenizer) if tokenizer is not None else getattr(config, "vocab_size", None)
        if vocab_size is None:
            raise ValueError("vocab_size: neither a tokenizer nor the model's config tells it; give it")
        self.model = model
        self.tokenizer = tokenizer
        self.parameterization = parameterization
        self.kernel = NoiseKernel.mixed(vocab_size, mask_id, k, schedule=schedule)

    def noise_kernel(self) -> NoiseKernel:
        """Return the noise, as `XDLMForMaskedLM.noise_kernel` does."""
        return self.kernel

    def special(self, tokens: Tensor) -> Tensor:
        """Return which tokens are special ones of the tokenizer besides the mask, (B, L) bool: never to be noised.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("tokenizer: got none, expected one that tells its special tokens")
        ids = [token for token in self.tokenizer.all_special_ids if token != self.kernel.mask_id]
        return torch.isin(tokens, torch.tensor(ids, dtype=tokens.dtype, device=tokens.device))

    def __call__(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """Return logits (B, L, N) of tokens (B, L); the model sees no time."""
        return self._logits(z, {})

    def denoiser(self, **context: Tensor | None) -> Denoiser:
        """Return the function (z, t) -> logits with a context held fixed, such as ``attention_mask`` (B, L)."""

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            return self._logits(z, cut(context, z.shape[1]))

        return denoise

    def _logits(self, z: Tensor, context: dict[str, Tensor | None]) -> Tensor:
        try:
            output = self.model(input_ids=z, **context)
        except (RuntimeError, IndexError) as error:
            longest = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
            if isinstance(longest, int) and z.shape[1] > longest:
                message = f"z: got {z.shape[1]} tokens, expected at most {longest} (max_position_embeddings)"
                raise ValueError(message) from error
            raise
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if logits is None:
            raise TypeError(
                f"model: {type(self.model).__name__} gave {type(output).__name__}, expected one with logits"
            )
        size = self.kernel.vocab_size
        if logits.shape[-1] < size:
            raise ValueError(f"vocab_size: got {size}, but the model gives {logits.shape[-1]} logits")
        return logits[..., :size]
