"""The commands as a user meets them: what they print, what they leave, and how they fail."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from spotlights.cli import main
from spotlights.diffusion.recipes.animation import GIVEN, MASKED, NEW, REWRITTEN, make_frames, write_animation
from spotlights.diffusion.recipes.inference import load_run
from spotlights.diffusion.recipes.vocabulary import ByteVocabulary, CharacterVocabulary, text_of

SMALL = ["--length", "32", "--hidden-size", "32", "--layers", "2", "--heads", "2", "--batch-size", "8"]
SMALL += ["--steps", "10", "--lr", "0.01", "--accelerator", "cpu", "--val-split", "0.2", "--vocab", "char"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("the cat sat on the mat.\nthe dög ran to the cat.\n" * 60, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def runs(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two runs, of k = 0.1 and 1."""
    folder = tmp_path_factory.mktemp("runs")
    for k in ("0.1", "1"):
        arguments = ["--data", str(text), "--k", k, "--out", str(folder / k), "--quiet", *SMALL]
        assert main(["xdlm", "train", *arguments]) == 0
    return str(folder / "0.1"), str(folder / "1")


def test_train_prints_progress_and_one_summary(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["xdlm", "train", "--data", str(text), "--out", str(out), *SMALL]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    assert re.fullmatch(rf"{out}: [\d,]+ parameters, 18 tokens; 73 train, 19 val sequences of 32", lines[0])
    assert re.match(r"epoch  1/10  train nelbo \d\.\d{4}, val nelbo \d\.\d{4}  \(", lines[1])
    assert [line[:20].strip() for line in lines[11:]] == [
        "epochs",
        "training time",
        "validation NELBO",
        "run folder",
    ]
    assert re.search(r"\d\.\d{4} nats a token, \d\.\d{4} bits a byte", lines[13])
    assert main(["xdlm", "train", "--resume", str(out), "--quiet"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"run folder           {out}"


def test_train_names_files_without_text(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(text.read_bytes())
    (folder / "b.png").write_bytes(b"\x89PNG\0\0")
    assert main(["xdlm", "train", "--data", str(folder), "--out", str(tmp_path / "run"), "--quiet", *SMALL]) == 0
    assert f"skipped files        1 ({folder / 'b.png'}: a binary file, expected text)" in capfd.readouterr().out


def test_eval_of_one_run(runs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["xdlm", "eval", runs[0], "--samples", "4", "--steps", "4", "--json"]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    figures = json.loads(printed.out)
    row = figures["runs"][runs[0]]
    assert (figures["split"], figures["sequences"], figures["samples"], figures["steps"]) == ("val", 19, 4, 4)
    assert row["nelbo_low"] < row["nelbo"] < row["nelbo_high"]
    assert row["perplexity"] == pytest.approx(2.718281828459045 ** row["nelbo"])
    assert row["bits_per_byte"] == pytest.approx(row["nelbo"] / 0.6931471805599453 * row["tokens"] / row["bytes"])
    assert figures["held_back"]["nll"] < row["nll"]
    assert 0 < row["entropy"] < 3
    summary = json.loads((Path(runs[0]) / "summary.json").read_text())
    assert row["nelbo"] == pytest.approx(summary["val_nelbo"], abs=0.3)


def test_eval_tables_and_frontier_of_two_runs(
    runs: tuple[str, str], text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--data", str(text), "--draws", "1", "--samples", "2", "--frontier", "--out", str(tmp_path / "new")]
    assert main(["xdlm", "eval", *runs, *arguments]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert re.search(r" 0\.1 +\d\.\d{4} ± \d\.\d{4} +\d", printed.out)
    assert len(re.findall(r"k 1 +\d+ steps  NLL \d\.\d{4} ± \d\.\d{4}  entropy \d\.\d{4}", printed.out)) == 7
    assert f"written: {tmp_path / 'new' / 'frontier.csv'}" in printed.out
    assert "sequences (all)" in printed.out
    with (tmp_path / "new" / "frontier.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["k"] for row in rows] == ["", *["0.1"] * 7, *["1.0"] * 7]
    assert [row["steps"] for row in rows] == ["", *["4", "8", "16", "32", "64", "128", "256"] * 2]
    with Image.open(tmp_path / "new" / "frontier.png") as image:
        assert image.size == (1350, 570)


def test_eval_by_a_causal_language_model(
    runs: tuple[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({"a": 0, "t": 1, "[UNK]": 2, "[BOS]": 3}, [], unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", bos_token="[BOS]")
    fast.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=4, n_positions=64, n_embd=8, n_layer=1, n_head=1))
    torch.nn.init.zeros_(model.transformer.ln_f.weight)  # every token equally likely
    model.save_pretrained(tmp_path)
    arguments = ["--judge", str(tmp_path), "--samples", "2", "--steps", "4", "--json"]
    assert main(["xdlm", "eval", runs[0], *arguments]) == 0
    figures = json.loads(capfd.readouterr().out)
    # A judge of even chances charges log 4 for each character but the end of a document, which it reads as two.
    assert figures["held_back"]["nll"] == pytest.approx(1.3863, abs=0.1)


def test_sample_continues_a_prompt(runs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["xdlm", "sample", runs[0], "--prompt", "the dög", "--count", "3", "--steps", "4", "--json"]) == 0
    first = json.loads(capfd.readouterr().out)
    assert [row["text"][:7] for row in first] == ["the dög"] * 3
    assert [len(row["tokens"]) for row in first] == [32] * 3
    assert len({row["text"] for row in first}) == 3
    assert main(["xdlm", "sample", runs[0], "--prompt", "the dög", "--count", "1", "--steps", "4"]) == 0
    assert capfd.readouterr().out == first[0]["text"] + "\n"
    assert main(["xdlm", "sample", runs[0], "--length", "9", "--count", "2", "--seed", "1", "--steps", "4"]) == 0
    assert re.match(r"--- 1\n(.|\n)*\n--- 2\n", capfd.readouterr().out)


@pytest.mark.parametrize("options", [[], ["--sampler", "refine"], ["--block-size", "4"], ["--top-p", "0.9"]])
def test_sample_fills_a_template(options: list[str], runs: tuple[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    template = "the [MASK:3] sat\n[MASK]n the"
    for run in runs:
        assert main(["xdlm", "sample", run, "--template", template, "--steps", "3", "--json", *options]) == 0
        (row,) = json.loads(capfd.readouterr().out)
        assert re.sub("<end>", "$", row["text"])[:4] == "the "
        assert row["text"].endswith("n the")
        assert len(row["tokens"]) == 4 + 3 + 5 + 1 + 5


@pytest.mark.browser
def test_animation_as_a_page_plays(
    runs: tuple[str, str], tmp_path: Path, browser_evaluate: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "a.html"
    assert main(["xdlm", "sample", runs[0], "--prompt", "the ", "--steps", "5", "--animate", str(page), "--json"]) == 0
    text = json.loads(capfd.readouterr().out)[0]["text"]
    source = page.read_text(encoding="utf-8")
    assert "http:" not in source.replace("http-equiv", "")
    assert "https:" not in source
    slide = "(page.getElementById('slider').value = {0}, page.getElementById('slider').oninput(), {1})"
    shown = "page.getElementById('text').textContent"
    trained = load_run(runs[0])
    noise = trained.model.noise_kernel().prior((1, 32), generator=torch.Generator().manual_seed(0))[0, 4:]
    start = text_of(trained.vocabulary, noise.tolist()).replace("<mask>", "░")
    assert start.count("░") > 20
    assert browser_evaluate(page, slide.format(5, shown)) == text
    assert browser_evaluate(page, slide.format(0, shown)) == "the " + start
    assert browser_evaluate(page, slide.format(2, "page.getElementById('place').textContent")) == "step 2 of 5"
    assert browser_evaluate(page, slide.format(3, "page.querySelectorAll('#text .s4').length")) == 4
    assert browser_evaluate(page, "page.documentElement.scrollWidth", width=320) <= 320


@pytest.mark.browser
def test_page_shows_hostile_text_as_text(tmp_path: Path, browser_evaluate: Callable[..., Any]) -> None:
    text = "</script><script>document.title='x'</script><b>{{data}}\"'"
    ids = torch.tensor(ByteVocabulary().encode(text)[0])
    frames = make_frames([torch.full_like(ids, 257), ids], torch.zeros_like(ids, dtype=torch.bool), ByteVocabulary())
    write_animation(frames, tmp_path / "a.html", title="{{text}} <i>")
    shown = "(page.getElementById('slider').value = 1, page.getElementById('slider').oninput(), "
    assert browser_evaluate(tmp_path / "a.html", shown + "page.getElementById('text').textContent)") == text
    assert browser_evaluate(tmp_path / "a.html", "page.title") == "{{text}} <i>"
    assert browser_evaluate(tmp_path / "a.html", "page.querySelectorAll('b, i').length") == 0


def test_frames_know_what_happened() -> None:
    vocabulary = CharacterVocabulary("ab")
    history = [torch.tensor([0, 3, 3, 1]), torch.tensor([0, 1, 3, 1]), torch.tensor([0, 0, 2, 3])]
    frames = make_frames(history, torch.tensor([True, False, False, False]), vocabulary)
    assert [frame.states for frame in frames] == [
        [GIVEN, MASKED, MASKED, 0],
        [GIVEN, NEW, MASKED, 0],
        [GIVEN, REWRITTEN, NEW, MASKED],
    ]
    assert frames[2].pieces == ["a", "a", "<end>", "░"]


def test_animation_as_a_gif(runs: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    assert main(["xdlm", "sample", runs[1], "--steps", "100", "--animate", str(path)]) == 0
    with Image.open(path) as image:
        assert image.n_frames > 20  # type: ignore[attr-defined]
        assert image.size[0] == 676
        assert image.info["loop"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--k", "1.5"], "--k: got 1.5, expected a number from 0 to 1"),
        (["train", "--k", "nan"], "--k: got nan, expected a number from 0 to 1"),
        (["train", "--steps", "0"], "--steps: got 0, expected at least 1"),
        (["train", "--steps", "5", "--epochs", "5"], "--epochs: got 5 beside --steps 5, expected one of them"),
        (["train", "--length", "1"], "--length: got 1, expected at least 2"),
        (["train", "--hidden-size", "30"], "--hidden-size: got 30, expected an even multiple of --heads 4"),
        (["train", "--lr", "0"], "--lr: got 0.0, expected more than 0"),
        (["train", "--seed", "4294967296"], "--seed: got 4294967296, expected 0 to 2^32 - 1"),
        (["train", "--schedule", "x"], "--schedule: got x, expected one of linear, cosine"),
        (["train", "--precision", "8"], "--precision: got 8, expected one of 32-true, bf16-mixed, 16-mixed"),
        (["train", "--vocab", "words"], "--vocab: got words, expected byte, char, or a folder that holds a tokenizer"),
        (["train", "--vocab", "NOMASK"], "--vocab: NOMASK: the tokenizer has no mask token"),
        (["train", "--vocab", "v" * 300], f"--vocab: got {'v' * 300}, expected byte, char, or a folder"),
        (["train", "--data", "nowhere"], "--data: nowhere is missing"),
        (["train", "--data", ""], "--data: an empty name is missing"),
        (["train", "--data", "empty.txt"], "--data: empty.txt holds no text"),
        (["train", "--data", "binary.txt"], "binary.txt: a binary file, expected text"),
        (["train", "--data", "latin.txt"], "latin.txt: not UTF-8 text (byte 3)"),
        (["train", "--accelerator", "abacus"], "--accelerator/--devices/--strategy/--precision: "),
        (["train", "--resume", "nowhere"], "nowhere: no such folder"),
        (["train", "--resume", "nowhere", "--lr", "1"], "--resume goes on with the run's own settings; drop --lr"),
        (["eval", "nowhere"], "nowhere: no such run folder"),
        (["sample", "nowhere"], "nowhere: no such run folder"),
        (["sample", "."], ".: no model/vocabulary.json in it; a training writes it at its end"),
        (["sample", "RUN", "--count", "0"], "--count: got 0, expected at least 1"),
        (["sample", "RUN", "--steps", "0"], "--steps: got 0, expected at least 1"),
        (["sample", "RUN", "--temperature", "0"], "--temperature: got 0.0, expected more than 0"),
        (["sample", "RUN", "--temperature", "inf"], "--temperature: got inf, expected more than 0"),
        (["sample", "RUN", "--seed", "-1"], "--seed: got -1, expected 0 to 2^32 - 1"),
        (["sample", "RUN", "--top-p", "2"], "--top-p: got 2.0, expected a number in (0, 1]"),
        (["sample", "RUN", "--device", "abacus"], "--device: abacus: "),
        (["sample", "RUN", "--device", "meta"], "--device: meta: "),
        (["sample", "RUN", "--length", "33"], "--length: got 33 tokens, but the model's context has 32"),
        (["sample", "RUN", "--prompt", "the " * 9], "--prompt: got 36 tokens, but the model's context has 32"),
        (["sample", "RUN", "--prompt", "the " * 8], "--prompt: got 32 tokens for a --length of 32, expected fewer"),
        (["sample", "RUN", "--prompt", "quiz"], "the character 'q' is not among the 16 of the vocabulary"),
        (["sample", "RUN", "--template", "the cat"], "--template: got no [MASK], expected at least one place to fill"),
        (["sample", "RUN", "--template", "[MASK:0]"], "--template: got [MASK:0], expected 1 to 32 tokens"),
        (["sample", "RUN", "--template", "[MASK:x]"], "--template: got [MASK:x], expected 1 to 32 tokens"),
        (["sample", "RUN", "--template", "[MASK:9999999999]"], "--template: got [MASK:9999999999], expected 1 to 32"),
        (["sample", "RUN", "--template", "the [MASK:29]"], "--template: got 33 tokens, but the model's context has 32"),
        (["sample", "RUN", "--template", "[MASK]", "--prompt", "a"], "--template: got it beside --prompt or --length"),
        (["sample", "RUN", "--sampler", "refine", "--top-k", "2"], "--top-k: has no meaning for --sampler refine"),
        (["sample", "RUN", "--animate", "a.mp4"], "--animate: got a.mp4, expected a name that ends in .html or .gif"),
        (["sample", "RUN", "--animate", "no/a.html"], "cannot write no/a.html: No such file or directory"),
        (["eval", "RUN", "--split", "test"], "--split: got test, expected one of train, val"),
        (["eval", "RUN", "--data", "empty.txt"], "--data: empty.txt holds no text"),
        (["eval", "RUN", "--data", "other.txt"], "the character 'x' is not among the 16 of the vocabulary"),
        (["eval", "RUN", "--frontier", "--samples", "0"], "--samples: got 0 beside --frontier, expected at least 1"),
        (["eval", "RUN", "--judge", "nowhere"], "--judge: nowhere: no such folder"),
        (["eval", "RUN", "--judge", "."], "--judge: .: no causal language model: "),
        (["eval", "RUN", "BYTES"], "BYTES: has another vocabulary than RUN; judge them one by one"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    runs: tuple[str, str],
    byte_run: str,
    maskless: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for name, content in {"empty": b"\n", "binary": b"a\0b", "latin": b"caf\xe9", "other": b"xyz " * 20}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    places = {"RUN": runs[0], "BYTES": byte_run, "NOMASK": maskless}
    assert main(["xdlm", *(places.get(argument, argument) for argument in arguments)]) == 2
    error = capfd.readouterr().err
    for name, place in places.items():
        message = message.replace(name, place)
    assert error.startswith(f"spotlights: error: {message}")
    assert error.count("\n") == 1
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {
        "empty.txt",
        "binary.txt",
        "latin.txt",
        "other.txt",
    }


@pytest.fixture(scope="module")
def byte_run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("runs") / "bytes"
    arguments = ["--data", str(text), "--out", str(folder), "--quiet", *SMALL, "--vocab", "byte", "--steps", "1"]
    assert main(["xdlm", "train", *arguments]) == 0
    return str(folder)


@pytest.fixture(scope="module")
def maskless(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.BPE({"a": 0, "[EOS]": 1}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[EOS]").save_pretrained(folder)
    return str(folder)


def test_commands_import_none_of_the_extras() -> None:
    code = (
        "import sys\nfrom spotlights.cli import main\n"
        "try:\n    main(['xdlm', 'train', '--help'])\nexcept SystemExit:\n    pass\n"
        "names = ('transformers', 'datasets', 'lightning', 'matplotlib', 'rich', 'yaml', 'safetensors', 'PIL')\n"
        "print([name for name in names if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "(default 2000)" in " ".join(printed.split())
    assert printed.splitlines()[-1] == "[]"
