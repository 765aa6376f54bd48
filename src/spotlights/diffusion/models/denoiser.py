"""A denoiser of token sequences as a transformers model: bidirectional, rotary, without an input for time.

The blocks are those of DiT (arXiv 2212.09748). The noise tells its level by itself, so XDLM (arXiv 2602.01362) and MDLM
give the network no time; classes, where there are some, modulate every block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput

from spotlights.diffusion.checks import check_count, check_parameterization
from spotlights.diffusion.generation import Denoiser
from spotlights.diffusion.kernel import NoiseKernel
from spotlights.diffusion.schedules import SCHEDULES

_ROTARY_BASE = 10_000.0


class XDLMConfig(PreTrainedConfig):
    """Size of an `XDLMForMaskedLM`, and the noise it denoises.

    Attributes:
        vocab_size: N, the mask token included.
        mask_token_id: id of the mask token; None where ``k`` is 1 and there is none.
        hidden_size: D, width of the residual stream.
        num_hidden_layers: blocks.
        num_attention_heads: heads, of an even width.
        intermediate_size: width inside a block's MLP; 4 D where None.
        max_position_embeddings: longest sequence.
        learned_positions: add a learned embedding of the absolute position, for data of a fixed layout such as images;
            rotary positions alone tell distances only.
        num_classes: classes to condition on, 0 for none; class id ``num_classes`` means "no class".
        dropout: of embeddings and of what each half block adds.
        initializer_range: standard deviation of initial weights.
        k: part of uniform noise.
        schedule: name of the noise schedule, "linear" or "cosine".
        parameterization: "loo" or "denoiser", as in `spotlights.diffusion.nelbo`.
        tie_word_embeddings: whether the head's weight is that of the embedding.

    Example:
        >>> XDLMConfig(vocab_size=258, mask_token_id=256, k=0.5).k
        0.5
    """

    model_type = "xdlm"

    vocab_size: int = 258
    mask_token_id: int | None = 256
    pad_token_id: int | None = None
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    intermediate_size: int | None = None
    max_position_embeddings: int = 256
    learned_positions: bool = False
    num_classes: int = 0
    dropout: float = 0.0
    initializer_range: float = 0.02
    k: float = 0.1
    schedule: str = "linear"
    parameterization: str = "loo"
    tie_word_embeddings: bool = False


class XDLMForMaskedLM(PreTrainedModel):
    """Gives every token of a noised sequence logits of what it was.

    Args:
        config: its size and noise.

    Raises:
        ValueError: a size does not fit, or the config's noise is not usable.

    Example:
        >>> config = XDLMConfig(vocab_size=9, mask_token_id=8, hidden_size=32, num_hidden_layers=1)
        >>> model = XDLMForMaskedLM(config).eval()
        >>> model(torch.tensor([[3, 8, 8, 1]])).logits.shape
        torch.Size([1, 4, 9])
    """

    config_class = XDLMConfig
    base_model_prefix = "xdlm"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _tied_weights_keys = {"head.weight": "embedding.weight"}  # noqa: RUF012

    def __init__(self, config: XDLMConfig) -> None:
        super().__init__(config)
        width, heads = config.hidden_size, config.num_attention_heads
        counts = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
        for name in counts:
            check_count(name, getattr(config, name))
        if config.intermediate_size is not None:
            check_count("intermediate_size", config.intermediate_size)
        if config.num_classes < 0:
            raise ValueError(f"num_classes: got {config.num_classes}, expected 0 or more")
        if width % (2 * heads):
            raise ValueError(f"hidden_size: got {width}, expected a multiple of {2 * heads} for {heads} heads")
        if config.schedule not in SCHEDULES:
            raise ValueError(f"schedule: got {config.schedule!r}, expected one of {', '.join(SCHEDULES)}")
        check_parameterization(config.parameterization)
        self.noise_kernel()
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width) if config.learned_positions else None
        # One row more for "no class".
        self.classes = nn.Embedding(config.num_classes + 1, width) if config.num_classes else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config, parts=2)
        self.head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        if isinstance(module, _Modulation):
            # Blocks start as the identity, whatever the class is.
            init.zeros_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm) and module.weight is not None:
            init.ones_(module.weight)
            init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embedding."""
        self.embedding = value  # type: ignore[assignment]

    def get_output_embeddings(self) -> nn.Module:
        """Return the language-model head."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language-model head."""
        self.head = new_embeddings  # type: ignore[assignment]

    def noise_kernel(self) -> NoiseKernel:
        """Return the noise that this model denoises."""
        config = self.config
        schedule = SCHEDULES[config.schedule]()
        return NoiseKernel.mixed(config.vocab_size, config.mask_token_id, config.k, schedule=schedule)

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        class_labels: Tensor | None = None,
    ) -> Tensor:
        """Return what the head takes, (B, L, D): for `linear_nelbo` with ``head.weight`` and ``head.bias``.

        Args:
            input_ids: noised tokens, (B, L) int64.
            attention_mask: (B, L), 0 or False at padding.
            document_ids: (B, L) int64; tokens see those of their own document only.
            class_labels: (B,) int64; by default "no class".

        Raises:
            ValueError: the sequence is too long, a shape does not match, or there are labels without classes.
        """
        if input_ids.ndim != 2:
            raise ValueError(f"input_ids: got shape {tuple(input_ids.shape)}, expected (batch, length)")
        length, longest = input_ids.shape[1], self.config.max_position_embeddings
        if length > longest:
            raise ValueError(f"input_ids: got {length} tokens, expected at most {longest} (max_position_embeddings)")
        for name, value, expected in (
            ("attention_mask", attention_mask, input_ids.shape),
            ("document_ids", document_ids, input_ids.shape),
            ("class_labels", class_labels, input_ids.shape[:1]),
        ):
            if value is not None and value.shape != expected:
                raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {tuple(expected)}")
        if class_labels is not None and self.classes is None:
            raise ValueError("class_labels: given to a model without classes (num_classes=0)")
        condition = None
        if self.classes is not None:
            if class_labels is None:
                class_labels = input_ids.new_full((len(input_ids),), self.config.num_classes)
            condition = F.silu(self.classes(class_labels))[:, None]
        mask = attention_mask[:, None, None, :].bool() if attention_mask is not None else None
        if document_ids is not None:
            same = (document_ids[:, :, None] == document_ids[:, None, :])[:, None]
            mask = same if mask is None else mask & same
        if mask is not None and attention_mask is not None:
            # A padding token sees itself, so that no row of attention is empty.
            mask = mask | torch.eye(length, dtype=torch.bool, device=mask.device)
        x = self.embedding(input_ids)
        if self.positions is not None:
            x = x + self.positions.weight[:length]
        x = self.dropout(x)
        rotation = _rotation(length, self.config.hidden_size // self.config.num_attention_heads, x)
        for block in self.blocks:
            x = block(x, rotation, mask, condition)
        return self.norm(x, condition)[0]

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        class_labels: Tensor | None = None,
    ) -> MaskedLMOutput:
        """Return logits (B, L, N) of the tokens before noise; arguments as in `hidden`."""
        return MaskedLMOutput(logits=self.head(self.hidden(input_ids, attention_mask, document_ids, class_labels)))

    def denoiser(self, **context: Tensor | None) -> Denoiser:
        """Return the function (z, t) -> logits that `sample` takes, with a context as in `hidden` held fixed.

        Where a block-wise sampler asks for the first tokens only, masks and documents are cut to them.
        """

        def denoise(z: Tensor, t: Tensor) -> Tensor:
            return self.head(self.hidden(z, **cut(context, z.shape[1])))

        return denoise


def cut(context: dict[str, Tensor | None], length: int) -> dict[str, Tensor | None]:
    """Return a context whose values of each token, (B, L), are cut to ``length``; those of each sequence stay."""
    return {
        name: value[:, :length] if isinstance(value, Tensor) and value.ndim > 1 else value
        for name, value in context.items()
    }


def _rotation(length: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the rotary angles, (L, width) each in the dtype of ``like``."""
    frequencies = _ROTARY_BASE ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.arange(length, device=like.device, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class _Modulation(nn.Linear):
    """Shift, scale and gate of a class, zero at first."""


class _Norm(nn.Module):
    """LayerNorm; with classes its shift, scale and (of three parts) gate come from the class."""

    def __init__(self, config: XDLMConfig, parts: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.parts = parts
        self.norm = nn.LayerNorm(width, elementwise_affine=not config.num_classes)
        self.modulation = _Modulation(width, parts * width) if config.num_classes else None

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.modulation is None:
            return self.norm(x), None
        shift, scale, *gate = self.modulation(condition).chunk(self.parts, dim=-1)
        return self.norm(x) * (1 + scale) + shift, gate[0] if gate else None


class _Block(nn.Module):
    def __init__(self, config: XDLMConfig) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size or 4 * width
        self.heads = config.num_attention_heads
        self.attention_norm = _Norm(config, parts=3)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = _Norm(config, parts=3)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, condition: Tensor | None
    ) -> Tensor:
        normed, gate = self.attention_norm(x, condition)
        x = x + self._gated(self._attend(normed, rotation, mask), gate)
        normed, gate = self.mlp_norm(x, condition)
        return x + self._gated(self.down(F.gelu(self.up(normed), approximate="tanh")), gate)

    def _gated(self, change: Tensor, gate: Tensor | None) -> Tensor:
        return self.dropout(change if gate is None else change * gate)

    def _attend(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(_rotate(q, rotation), _rotate(k, rotation), v, attn_mask=mask)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


AutoConfig.register("xdlm", XDLMConfig)
AutoModel.register(XDLMConfig, XDLMForMaskedLM)
AutoModelForMaskedLM.register(XDLMConfig, XDLMForMaskedLM)
