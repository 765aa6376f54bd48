"""A Hugging Face causal language model as the judge of samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spotlights.diffusion.recipes.quiet import no_bars
from spotlights.diffusion.recipes.vocabulary import END, Vocabulary
from spotlights.runtime.errors import UserError, first_line


class CausalJudge:
    """Reads samples as text and gives the model's negative log-likelihood, in nats per token of the samples.

    Args:
        model: a causal language model in evaluation mode.
        tokenizer: its tokenizer.
        vocabulary: of the samples.
    """

    def __init__(self, model: Any, tokenizer: Any, vocabulary: Vocabulary) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, folder: str | Path, vocabulary: Vocabulary, *, device: str | torch.device = "cpu") -> CausalJudge:
        """Load model and tokenizer from a folder.

        Raises:
            UserError: it holds no causal language model.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        if not Path(folder).is_dir():
            raise UserError(f"--judge: {folder}: no such folder")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            with no_bars():
                model = AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)
        # The library raises whatever its readers do.
        except Exception as error:
            raise UserError(f"--judge: {folder}: no causal language model: {first_line(error)}") from error
        return cls(model.to(device).eval(), tokenizer, vocabulary)

    @torch.no_grad()
    def nll(self, tokens: Tensor) -> Tensor:
        """Return the NLL of samples (B, L) int64, (B,) float64; where the model has no start token the first is free.

        Raises:
            UserError: a sample has more tokens of the judge than its context.
        """
        return torch.tensor([self._nll(row.tolist()) / len(row) for row in tokens], dtype=torch.float64)

    def _nll(self, ids: list[int]) -> float:
        # The end of a document is a blank line to a model that knows another token for it, or none.
        text = "".join("\n\n" if piece == END else piece for piece in self.vocabulary.pieces(ids))
        read = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        start = self.tokenizer.bos_token_id
        read = ([] if start is None else [start]) + read
        most = getattr(self.model.config, "max_position_embeddings", None)
        if most is not None and len(read) > most:
            raise UserError(f"--judge: a sample has {len(read)} of its tokens, but its context has {most}")
        if max(read, default=0) >= (size := self.model.get_input_embeddings().num_embeddings):
            raise UserError(f"--judge: its tokenizer gave the id {max(read)}, its model knows {size} tokens")
        if len(read) < 2:
            return 0.0
        inputs = torch.tensor([read], device=self.model.device)
        logits = self.model(inputs).logits[0, :-1].double()
        return float(torch.nn.functional.cross_entropy(logits, inputs[0, 1:], reduction="sum"))
