"""What turns text into tokens and back: bytes, characters, or a Hugging Face tokenizer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spotlights.runtime.errors import UserError, first_line
from spotlights.runtime.runs import write_json

FILE = "vocabulary.json"
END, MASK = "<end>", "<mask>"
Ids = NDArray[np.int64]


class Vocabulary(Protocol):
    """N tokens, among them one that ends a document and the mask.

    Attributes:
        size: N.
        mask_id: the mask's id.
        end_id: id of the token that ends a document; its text is empty.
        name: what it is, in a word.
    """

    name: str

    @property
    def size(self) -> int: ...

    @property
    def mask_id(self) -> int: ...

    @property
    def end_id(self) -> int: ...

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Return the ids of a text's tokens, (n,), and how many of its UTF-8 bytes each stands for, (n,).

        Raises:
            UserError: the text holds what this vocabulary has no token for.
        """
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token, `END` and `MASK` for these two; joined they are the whole text."""
        ...

    def save(self, folder: Path) -> None:
        """Write what `load_vocabulary` needs into a folder."""
        ...


class ByteVocabulary:
    """The 256 bytes of UTF-8, the end of a document (256) and the mask (257).

    Example:
        >>> vocabulary = ByteVocabulary()
        >>> ids, sizes = vocabulary.encode("é!")
        >>> ids.tolist(), sizes.tolist(), vocabulary.pieces([195, 169, 33, 257])
        ([195, 169, 33], [1, 1, 1], ['é', '', '!', '<mask>'])
    """

    name = "byte"
    size = 258
    mask_id = 257
    end_id = 256

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Return the bytes of a text, each counted as one."""
        ids = np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int64)
        return ids, np.ones_like(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token; a character of several bytes stands at its first."""
        pieces: list[str] = []
        index = 0
        while index < len(ids):
            first = ids[index]
            if first >= 256:
                pieces.append(MASK if first == self.mask_id else END)
                index += 1
                continue
            length = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            chunk = ids[index : index + length]
            try:
                text = bytes(chunk).decode()  # a ValueError, too, where the end or the mask is in it
            except ValueError:
                text, length = "\ufffd", 1
            pieces += [text, *[""] * (length - 1)]
            index += length
        return pieces

    def save(self, folder: Path) -> None:
        """Write `FILE`."""
        write_json(folder / FILE, {"kind": "byte"})


class CharacterVocabulary:
    """The characters of a text in order, the end of a document and the mask behind them.

    Example:
        >>> vocabulary = CharacterVocabulary.of(["abba", "cab"])
        >>> vocabulary.encode("cab")[0].tolist(), vocabulary.mask_id
        ([2, 0, 1], 4)
    """

    name = "char"

    def __init__(self, characters: str) -> None:
        self.characters = characters
        self._ids = {character: index for index, character in enumerate(characters)}
        self._codes = np.array([ord(character) for character in characters], dtype=np.int64)

    @classmethod
    def of(cls, texts: Iterable[str]) -> CharacterVocabulary:
        """Return the vocabulary of all characters in some texts."""
        found: set[str] = set()
        for text in texts:
            found.update(text)
        return cls("".join(sorted(found)))

    @property
    def size(self) -> int:
        """The number of tokens."""
        return len(self.characters) + 2

    @property
    def end_id(self) -> int:
        """Id of the token that ends a document."""
        return len(self.characters)

    @property
    def mask_id(self) -> int:
        """Id of the mask."""
        return len(self.characters) + 1

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Return one id a character; raise UserError for a character that is not in the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32).astype(np.int64)
        ids = np.searchsorted(self._codes, codes).clip(max=max(len(self._codes) - 1, 0))
        if len(codes) and (not len(self._codes) or bool((self._codes[ids] != codes).any())):
            unknown = next(character for character in text if character not in self._ids)
            raise UserError(f"the character {unknown!r} is not among the {len(self.characters)} of the vocabulary")
        return ids, 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the character of each token."""
        names = [*self.characters, END, MASK]
        return [names[index] for index in ids]

    def save(self, folder: Path) -> None:
        """Write `FILE`."""
        write_json(folder / FILE, {"kind": "char", "characters": [ord(character) for character in self.characters]})


class TokenizerVocabulary:
    """A Hugging Face tokenizer that has a mask token and one that ends a document (eos, sep or cls).

    Raises:
        UserError: a token is missing.
    """

    name = "tokenizer"

    def __init__(self, tokenizer: Any, source: str = "tokenizer") -> None:
        self.tokenizer = tokenizer
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"{source}: the tokenizer has no mask token; "
                "add one by tokenizer.add_special_tokens({'mask_token': '[MASK]'}) and save it"
            )
        self.mask_id = int(tokenizer.mask_token_id)
        ends = (tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id)
        end = next((index for index in ends if index is not None), None)
        if end is None:
            raise UserError(f"{source}: the tokenizer has no token that ends a document; add an eos_token and save it")
        self.end_id = int(end)
        if self.mask_id == self.end_id:
            raise UserError(f"{source}: {tokenizer.mask_token} is the mask and ends documents; expected two tokens")
        # Ids may have gaps.
        self.size = max(len(tokenizer), *(index + 1 for index in tokenizer.get_vocab().values()))

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Return the tokenizer's ids, and the bytes up to the end of each token that no token before it reached.

        Raises:
            UserError: the tokenizer refuses the text, or finds the mask in it.
        """
        # Long documents are meant here: they are cut afterwards.
        options: dict[str, Any] = {"add_special_tokens": False, "verbose": False}
        if self.tokenizer.is_fast:
            options["return_offsets_mapping"] = True
        try:
            encoded = self.tokenizer(text, **options)
        # The library raises whatever its models do.
        except Exception as error:
            raise UserError(f"the tokenizer cannot read the text: {first_line(error)}") from error
        if self.tokenizer.is_fast:
            ends = np.array([end for _, end in encoded["offset_mapping"]], dtype=np.int64)
            widths = np.array([len(character.encode("utf-8", "surrogatepass")) for character in text], dtype=np.int64)
            reached = np.concatenate([[0], widths.cumsum()])[np.maximum.accumulate(ends)] if len(ends) else ends
        else:
            count = len(encoded["input_ids"])
            total = len(text.encode("utf-8", "surrogatepass"))
            reached = np.linspace(0, total, count + 1).round().astype(np.int64)[1:]
        ids = np.array(encoded["input_ids"], dtype=np.int64)
        if bool((ids == self.mask_id).any()):
            raise UserError(f"the text holds the mask token {self.tokenizer.mask_token} itself; take it out")
        return ids, np.diff(reached, prepend=0)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return what each token adds to the text decoded so far."""
        pieces: list[str] = []
        start, before = 0, ""
        for index, token in enumerate(ids):
            if token in (self.mask_id, self.end_id):
                pieces.append(MASK if token == self.mask_id else END)
                start, before = index + 1, ""
                continue
            text = self.tokenizer.decode(list(ids[start : index + 1]), clean_up_tokenization_spaces=False)
            # Bytes of an unfinished character show only once the character is whole.
            whole = text.rstrip("\ufffd") if text.startswith(before) else text
            pieces.append(whole[len(before) :])
            before = whole
        return pieces

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files and `FILE`."""
        self.tokenizer.save_pretrained(folder)
        write_json(folder / FILE, {"kind": "tokenizer"})


def text_of(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Return the text of tokens, the end of a document as `END`.

    Example:
        >>> text_of(ByteVocabulary(), [72, 105, 256])
        'Hi<end>'
    """
    return "".join(vocabulary.pieces(ids))


def find_vocabulary(name: str, texts: Iterable[str]) -> Vocabulary:
    """Return the vocabulary that ``--vocab`` names; "char" holds the characters of ``texts``.

    Raises:
        UserError: neither "byte" nor "char" nor a folder with a usable tokenizer.
    """
    if name == "byte":
        return ByteVocabulary()
    if name == "char":
        return CharacterVocabulary.of(texts)
    if not os.path.isdir(name):
        raise UserError(f"--vocab: got {name}, expected byte, char, or a folder that holds a tokenizer")
    return _tokenizer(Path(name), f"--vocab: {name}")


def load_vocabulary(folder: str | Path) -> Vocabulary:
    """Return the vocabulary that was saved in a folder.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = Path(folder) / FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kind = stored["kind"]
        if kind == "char":
            codes = stored["characters"]
            if codes != sorted(set(codes)):
                raise ValueError("the characters are out of order")
            characters = "".join(map(chr, codes))
            characters.encode()  # halves of surrogate pairs cannot be written anywhere
            return CharacterVocabulary(characters)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(f"{path}: cannot read the vocabulary: {first_line(error)}") from error
    if kind == "byte":
        return ByteVocabulary()
    if kind == "tokenizer":
        return _tokenizer(Path(folder), str(folder))
    raise UserError(f"{path}: a vocabulary of unknown kind {kind!r}")


def _tokenizer(folder: Path, source: str) -> TokenizerVocabulary:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    # The library raises whatever its parsers do.
    except Exception as error:
        raise UserError(f"{source}: cannot load a tokenizer: {first_line(error)}") from error
    return TokenizerVocabulary(tokenizer, source)
