"""Reading text, turning it into tokens, packing it into sequences, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from spotlights.diffusion.recipes.config import DiffusionConfig
from spotlights.diffusion.recipes.data import TokenSet, load_parts, load_run_data, pack, split_off
from spotlights.diffusion.recipes.documents import read_documents
from spotlights.diffusion.recipes.vocabulary import (
    ByteVocabulary,
    CharacterVocabulary,
    TokenizerVocabulary,
    find_vocabulary,
    load_vocabulary,
    text_of,
)
from spotlights.runtime.errors import UserError

TEXT = "Zażółć gęślą jaźń, 绿色 🙂\tand\nplain."


@pytest.mark.parametrize("name", ["byte", "char", "tokenizer"])
def test_vocabulary_round_trip(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    vocabulary = find_vocabulary(str(tokenizer_folder) if name == "tokenizer" else name, [TEXT])
    ids, sizes = vocabulary.encode(TEXT)
    assert sizes.sum() == len(TEXT.encode())
    assert sizes.min() >= 0
    assert text_of(vocabulary, ids.tolist()) == TEXT
    assert vocabulary.name == name
    special = {vocabulary.mask_id, vocabulary.end_id}
    assert len(special) == 2
    assert not special & set(ids.tolist())
    assert max(*ids, *special) < vocabulary.size
    assert vocabulary.pieces([vocabulary.mask_id, int(ids[0]), vocabulary.end_id])[::2] == ["<mask>", "<end>"]
    vocabulary.save(tmp_path)
    again = load_vocabulary(tmp_path)
    assert again.size == vocabulary.size
    assert np.array_equal(again.encode(TEXT)[0], ids)


def test_bytes_that_are_no_text_are_shown_as_such() -> None:
    vocabulary = ByteVocabulary()
    assert vocabulary.pieces([0xE7, 0xBB, 0xBF, 65]) == ["绿", "", "", "A"]
    assert vocabulary.pieces([0xE7, 0xBB, 257, 65]) == ["\ufffd", "\ufffd", "<mask>", "A"]
    assert vocabulary.pieces([0xBF, 0xFF, 0xE7]) == ["\ufffd"] * 3


def test_character_sizes_are_those_of_utf8() -> None:
    _, sizes = CharacterVocabulary.of([TEXT]).encode(TEXT)
    assert sizes.tolist() == [len(character.encode()) for character in TEXT]


def test_tokens_of_several_bytes_are_counted_whole(tokenizer_folder: Path) -> None:
    vocabulary = find_vocabulary(str(tokenizer_folder), [])
    ids, sizes = vocabulary.encode("the cat 绿")
    pieces = vocabulary.pieces(ids.tolist())
    assert len(ids) < 11
    assert max(sizes) > 1
    assert "the" in pieces[0] + pieces[1]
    assert sizes.sum() == 11


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"eos_token": "[EOS]"}, "the tokenizer has no mask token; add one by tokenizer.add_special_tokens"),
        ({"mask_token": "[MASK]"}, "the tokenizer has no token that ends a document"),
        ({"mask_token": "[MASK]", "eos_token": "[MASK]"}, r"\[MASK\] is the mask and ends documents; expected two"),
    ],
)
def test_tokenizer_without_a_needed_token_is_refused(
    special: dict[str, str], message: str, tmp_path: Path, word_tokenizer: Callable[..., Any]
) -> None:
    word_tokenizer(**special).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        find_vocabulary(str(tmp_path), [])


def test_mask_token_in_the_text_is_refused(tokenizer_folder: Path) -> None:
    vocabulary = find_vocabulary(str(tokenizer_folder), [])
    assert isinstance(vocabulary, TokenizerVocabulary)
    with pytest.raises(UserError, match=r"the text holds the mask token \[MASK\] itself"):
        vocabulary.encode("the [MASK] cat")


def test_unusable_vocabularies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--vocab: got bytes, expected byte, char, or a folder"):
        find_vocabulary("bytes", [])
    with pytest.raises(UserError, match=r"--vocab: .*: cannot load a tokenizer: "):
        find_vocabulary(str(tmp_path), [])
    with pytest.raises(UserError, match="the character 'x' is not among the 3 of the vocabulary"):
        CharacterVocabulary.of(["abc"]).encode("abxc")
    with pytest.raises(UserError, match="the character 'x' is not among the 0"):
        CharacterVocabulary("").encode("x")
    (tmp_path / "vocabulary.json").write_text('{"kind": "runes"}')
    with pytest.raises(UserError, match="a vocabulary of unknown kind 'runes'"):
        load_vocabulary(tmp_path)
    for characters in ("[98, 97]", "[97, 97]", "[9999999]", "[55296]"):
        (tmp_path / "vocabulary.json").write_text(f'{{"kind": "char", "characters": {characters}}}')
        with pytest.raises(UserError, match="cannot read the vocabulary"):
            load_vocabulary(tmp_path)
    (tmp_path / "vocabulary.json").write_text("{")
    with pytest.raises(UserError, match="cannot read the vocabulary"):
        load_vocabulary(tmp_path)


def test_packing_loses_no_token_and_knows_its_documents() -> None:
    texts = ["abc", "", "d", "efghijk"]
    vocabulary = ByteVocabulary()
    packed = pack(texts, vocabulary, length=5)
    assert packed.padding is not None
    assert packed.documents is not None
    assert packed.byte_counts is not None
    kept = packed.tokens[~packed.padding].tolist()
    assert text_of(vocabulary, kept) == "abc<end>d<end>efghijk<end>"
    assert packed.documents.tolist() == [[0, 0, 0, 0, 1], [0, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert packed.padding.sum(1).tolist() == [0, 0, 1]
    assert packed.byte_counts.tolist() == [4, 4, 3]
    assert pack(["abcd"], vocabulary, length=5).padding is None
    with pytest.raises(UserError, match="the text is empty"):
        pack(["", ""], vocabulary, length=5)


def test_sets_are_divided_in_batches_and_thinned_out() -> None:
    tokens = TokenSet(torch.arange(20).view(10, 2), labels=torch.arange(10))
    assert [batch["labels"].tolist() for batch in tokens.batches(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    few = tokens.subset(3)
    assert few.labels is not None
    assert few.labels.tolist() == [0, 4, 9]
    assert tokens.subset(None) is tokens


def test_documents_are_held_back_whole_where_there_are_many() -> None:
    texts = [f"document {number} " * (1 + number % 3) for number in range(40)]
    train, held = split_off(texts, 0.1, seed=3)
    assert sorted(train + held) == sorted(texts)
    assert 0 < sum(map(len, held)) <= 0.1 * sum(map(len, texts))
    assert split_off(texts, 0.1, seed=3) == (train, held)
    assert split_off(texts, 0.1, seed=4) != (train, held)
    kept, cut = split_off(["x" * 100, "y" * 50], 0.2, seed=0)
    assert sorted(map(len, kept)) == [40, 80]
    assert sorted(map(len, cut)) == [10, 20]


def test_folder_with_parts_and_files_of_all_kinds(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "a.txt").write_text(f"text of {name}", encoding="utf-8")
    (tmp_path / "train" / "b.txt").write_bytes("\ufeffwith a mark\r\n".encode())
    (tmp_path / "train" / "c.txt").write_text("Grüße", encoding="utf-16")
    (tmp_path / "train" / "d.bin").write_bytes(b"\0\1\2")
    (tmp_path / "train" / "e.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "train" / ".hidden").write_text("no")
    (tmp_path / "train" / "empty.txt").write_text(" \n")
    documents = read_documents(str(tmp_path))
    assert documents.parts == {
        "train": ["with a mark\n", "Grüße", "text of train"],
        "val": ["text of valid"],
        "test": ["text of test"],
    }
    assert [Path(line.partition(":")[0]).name for line in documents.skipped] == ["d.bin", "e.txt"]
    data = load_run_data(DiffusionConfig(data=str(tmp_path), length=8))
    assert data.val is not None
    assert data.test is not None
    assert text_of(ByteVocabulary(), data.test.tokens.flatten().tolist()).startswith("text of test<end>")
    parts = load_parts(str(tmp_path), ByteVocabulary(), 8, limit=2)
    assert {name: len(part) for name, part in parts.items()} == {"train": 2, "val": 2, "test": 2}


def test_python_itself_is_the_text_where_none_is_given() -> None:
    documents = read_documents(None)
    assert sum(map(len, documents.parts["all"])) > 2e6
    assert any(text.startswith('"""Heap queue algorithm') for text in documents.parts["all"])


def test_dataset_on_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the text extra")
    rows = datasets.Dataset.from_dict({"text": ["one", "two", None, ""], "n": [1, 2, 3, 4]})
    rows.save_to_disk(str(tmp_path / "single"))
    assert read_documents(str(tmp_path / "single")).parts == {"all": ["one", "two"]}
    parts = {"train": rows, "validation": datasets.Dataset.from_dict({"text": ["three"], "n": [1]})}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "parts"))
    assert read_documents(str(tmp_path / "parts")).parts == {"train": ["one", "two"], "val": ["three"]}
    with pytest.raises(UserError, match="--text-column: got body, expected one of text, n"):
        read_documents(str(tmp_path / "parts"), "body")
    with pytest.raises(UserError, match="--text-column: n holds no text"):
        read_documents(str(tmp_path / "parts"), "n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no text"),
        (b" \n\t", "holds no text"),
        (b"PK\3\4\0\0", "a binary file, expected text"),
        (b"caf\xe9", r"not UTF-8 text \(byte 3\)"),
        ("text".encode("utf-32"), "a binary file, expected text"),
    ],
)
def test_files_without_text_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_documents(str(path))
    with pytest.raises(UserError, match=message):
        read_documents(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"pipe\.txt: neither a file nor a folder"):
        read_documents(str(tmp_path))


def test_missing_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data: .*nowhere is missing"):
        read_documents(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="holds no text"):
        read_documents(str(tmp_path))
