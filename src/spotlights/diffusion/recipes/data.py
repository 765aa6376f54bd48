"""Token sequences for training and judging: documents packed end to end and cut to one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from spotlights.diffusion.recipes.config import DiffusionConfig
from spotlights.diffusion.recipes.documents import read_documents
from spotlights.diffusion.recipes.vocabulary import Ids, Vocabulary, find_vocabulary
from spotlights.runtime.errors import UserError

Batch = dict[str, Tensor]


@dataclass
class TokenSet(Dataset):
    """Sequences of one length L; as a data set it gives whole batches with each sequence's ``index``.

    Attributes:
        tokens: (n, L) int64.
        padding: (n, L) bool, tokens that are no data, or None where there are none.
        documents: (n, L) int64, the number within its sequence of the document a token belongs to, or None for one.
        labels: (n,) int64 classes, or None.
        byte_counts: (n,) int64, the bytes of text in each sequence, or None for what is no text.

    Example:
        >>> batch = TokenSet(torch.tensor([[1, 2], [3, 4], [5, 6]])).__getitems__([0, 2])
        >>> batch["tokens"], batch["index"]
        (tensor([[1, 2],
            [5, 6]]), tensor([0, 2]))
    """

    tokens: Tensor
    padding: Tensor | None = None
    documents: Tensor | None = None
    labels: Tensor | None = None
    byte_counts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.tokens.shape[1]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        fields = {"tokens": self.tokens, "padding": self.padding, "documents": self.documents, "labels": self.labels}
        return {"index": chosen, **{name: value[chosen] for name, value in fields.items() if value is not None}}

    def subset(self, limit: int | None) -> TokenSet:
        """Return at most ``limit`` sequences, evenly spread."""
        if limit is None or len(self) <= limit:
            return self
        chosen = torch.linspace(0, len(self) - 1, limit).round().long()
        values = (self.tokens, self.padding, self.documents, self.labels, self.byte_counts)
        return TokenSet(*(None if value is None else value[chosen] for value in values))  # type: ignore[arg-type]

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all sequences in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            yield self.__getitems__(range(start, min(start + size, len(self))))


@dataclass
class TokenData:
    """The parts of a data set; ``val`` may hold no sequence, and ``vocabulary`` is None for what is no text."""

    train: TokenSet
    val: TokenSet | None
    test: TokenSet | None
    vocabulary: Vocabulary | None
    skipped: list[str] = field(default_factory=list)


def pack(texts: Sequence[str], vocabulary: Vocabulary, length: int) -> TokenSet:
    """Return documents end to end, each closed by the end token, cut into sequences; only the last one is padded.

    Args:
        texts: the documents.
        vocabulary: makes tokens of them.
        length: tokens in a sequence.

    Raises:
        UserError: the vocabulary has no token for something, or there is no text.

    Example:
        >>> from spotlights.diffusion.recipes.vocabulary import CharacterVocabulary
        >>> packed = pack(["ab", "c"], CharacterVocabulary("abc"), length=4)
        >>> packed.tokens, packed.documents, packed.padding
        (tensor([[0, 1, 3, 2],
            [3, 3, 3, 3]]), tensor([[0, 0, 0, 1],
            [0, 1, 1, 1]]), tensor([[False, False, False, False],
            [False,  True,  True,  True]]))
    """
    encoded: list[Ids] = []
    sizes: list[Ids] = []
    end = np.array([vocabulary.end_id], dtype=np.int64)
    nothing = np.zeros(1, dtype=np.int64)
    for text in texts:
        ids, widths = vocabulary.encode(text)
        if len(ids):
            encoded += [ids, end]
            sizes += [widths, nothing]
    if not encoded:
        raise UserError("the text is empty, expected at least one token")
    lengths = [len(ids) + 1 for ids in encoded[::2]]
    count = -(-sum(lengths) // length)
    missing = count * length - sum(lengths)
    tokens = np.concatenate([*encoded, np.full(missing, vocabulary.end_id)]).reshape(count, length)
    owner = np.repeat(np.arange(len(lengths) + 1), [*lengths, missing]).reshape(count, length)
    widths = np.concatenate([*sizes, np.zeros(missing, dtype=np.int64)]).reshape(count, length)
    padding = torch.zeros(count, length, dtype=torch.bool)
    if missing:
        padding[-1, -missing:] = True
    return TokenSet(
        torch.from_numpy(tokens),
        padding if missing else None,
        torch.from_numpy(owner - owner[:, :1]),
        byte_counts=torch.from_numpy(widths.sum(1)),
    )


def split_off(texts: Sequence[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Divide documents into training and validation by a seed: whole ones, or the ends of each where they are few.

    Example:
        >>> split_off(["a" * 90 + "b" * 10], 0.1, seed=0)[1]
        ['bbbbbbbbbb']
    """
    order = np.random.default_rng(seed).permutation(len(texts))
    shuffled = [texts[index] for index in order]
    if fraction == 0:
        return shuffled, []
    if len(texts) < 20:
        cuts = [round(len(text) * (1 - fraction)) for text in shuffled]
        starts = [text[:cut] for text, cut in zip(shuffled, cuts, strict=True)]
        return starts, [text[cut:] for text, cut in zip(shuffled, cuts, strict=True)]
    wanted = fraction * sum(map(len, texts))
    kept: list[str] = []
    held: list[str] = []
    size = 0
    for text in shuffled:
        take = size + len(text) <= wanted
        size += len(text) if take else 0
        (held if take else kept).append(text)
    return kept, held or [kept.pop()]


def load_run_data(config: DiffusionConfig, vocabulary: Vocabulary | None = None) -> TokenData:
    """Return the text of a run, divided and packed as its training does.

    Args:
        config: the run's settings.
        vocabulary: the run's, where it is known already.

    Raises:
        UserError: the text is missing, empty or not usable.
    """
    documents = read_documents(config.data, config.text_column)
    parts = documents.parts
    vocabulary = vocabulary or find_vocabulary(config.vocab, (text for texts in parts.values() for text in texts))
    if "val" in parts:
        train, held = split_off(parts["train"], 0, config.seed)[0], parts["val"]
    else:
        train, held = split_off(parts.get("train") or parts["all"], config.val_split, config.seed)
    texts = {"train": train, "val": held, "test": parts.get("test", [])}
    packed = {
        name: pack(some, vocabulary, config.length).subset(config.limit) if any(some) else None
        for name, some in texts.items()
    }
    if packed["train"] is None:
        raise UserError(f"--data: {config.data} is too short to learn from")
    return TokenData(packed["train"], packed["val"], packed["test"], vocabulary, documents.skipped)


def load_parts(
    data: str, vocabulary: Vocabulary, length: int, *, text_column: str = "text", limit: int | None = None
) -> dict[str, TokenSet]:
    """Return other text, packed for a run that was trained before: each part, or ``all``.

    Raises:
        UserError: the text is missing, empty, or holds what the vocabulary has no token for.
    """
    documents = read_documents(data, text_column)
    return {name: pack(texts, vocabulary, length).subset(limit) for name, texts in documents.parts.items()}
