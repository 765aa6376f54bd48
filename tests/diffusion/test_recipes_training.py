"""Training, resuming, loading, judging and sampling, on tiny models."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from spotlights.diffusion import NoiseKernel, nelbo
from spotlights.diffusion.judges import NGramJudge
from spotlights.diffusion.models.denoiser import XDLMConfig, XDLMForMaskedLM
from spotlights.diffusion.recipes import training
from spotlights.diffusion.recipes.config import DiffusionConfig, load_config
from spotlights.diffusion.recipes.data import TokenData, TokenSet, load_run_data
from spotlights.diffusion.recipes.evaluation import (
    estimate_nelbo,
    frontier,
    generate,
    plot_frontier,
    write_frontier,
)
from spotlights.diffusion.recipes.inference import draw, filled_in, load_run, prompted
from spotlights.diffusion.recipes.objective import batch_nelbo, fixed_times, random_times
from spotlights.diffusion.recipes.training import RunSummary, fit_tokens, train, validation_part
from spotlights.diffusion.recipes.vocabulary import load_vocabulary
from spotlights.runtime import weights
from spotlights.runtime.errors import UserError
from spotlights.runtime.training import read_metrics

SETTINGS = {
    "length": 32, "hidden_size": 32, "layers": 2, "heads": 2, "batch_size": 8, "lr": 1e-2, "accelerator": "cpu",
    "ema_decay": 0.9, "steps": 20, "patience": 0, "val_split": 0.2,
}  # fmt: skip
WORDS = "the cat sat on the mat. the dog ran to the cat. "


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(WORDS * 60, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunSummary]:
    folder = tmp_path_factory.mktemp("runs") / "words"
    config = DiffusionConfig(data=str(text), out=str(folder), vocab="char", **SETTINGS)  # type: ignore[arg-type]
    return folder, train(config, progress=False)


def test_run_folder_says_everything(run: tuple[Path, RunSummary], text: Path) -> None:
    folder, summary = run
    assert {path.name for path in folder.iterdir()} == {
        "best.safetensors", "config.yaml", "curves.png", "last.ckpt", "last.safetensors", "metrics.csv", "model",
        "summary.json",
    }  # fmt: skip
    assert {path.name for path in (folder / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocabulary.json",
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["data"], config["k"], config["resolved"]["tokens"]) == (str(text), 0.1, summary.tokens)
    assert json.loads((folder / "summary.json").read_text())["val_nelbo"] == summary.val_nelbo
    rows = read_metrics(folder)
    assert len(rows) == 10
    assert list(rows[0]) == ["epoch", "train_nelbo", "val_nelbo", "lr", "seconds"]
    assert summary.val_nelbo == rows[summary.best_epoch - 1]["val_nelbo"] < rows[0]["val_nelbo"]
    assert summary.tokens == len(set(WORDS)) + 2


def test_model_folder_loads_as_transformers_does(run: tuple[Path, RunSummary]) -> None:
    model = XDLMForMaskedLM.from_pretrained(run[0] / "model")
    best, _ = weights.load(run[0] / "best.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    assert model.config.k == 0.1
    assert load_vocabulary(run[0] / "model").size == model.config.vocab_size == run[1].tokens


def test_validation_nelbo_is_that_of_the_saved_weights(run: tuple[Path, RunSummary]) -> None:
    trained = load_run(run[0])
    data = load_run_data(load_config(run[0]), trained.vocabulary)
    val = validation_part(data, load_config(run[0]))
    assert val is not None
    assert data.val is not None
    assert len(val) == 16 < len(data.val)
    kernel = trained.model.noise_kernel()
    total = count = 0.0
    for batch in val.batches(5):
        generators = [torch.Generator().manual_seed(int(index)) for index in batch["index"]]
        t = fixed_times(batch["index"])
        z = kernel.q_sample(batch["tokens"], t, observed=batch.get("padding"), generator=generators)
        with torch.no_grad():
            losses = batch_nelbo(trained.model, kernel, batch, z, t, reduction="none")
        total += float(losses.sum())
        count += float(losses.numel() - (int(batch["padding"].sum()) if "padding" in batch else 0))
    assert total / count == pytest.approx(run[1].val_nelbo, rel=1e-5)
    bytes_of_text = int(val.byte_counts.sum())  # type: ignore[union-attr]
    assert run[1].val_bits_per_byte == pytest.approx(total / bytes_of_text / math.log(2), rel=1e-5)


def test_training_is_repeatable(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    config = load_config(run[0])
    config.out = str(tmp_path / "again")
    train(config, progress=False)
    assert (tmp_path / "again" / "best.safetensors").read_bytes() == (run[0] / "best.safetensors").read_bytes()


def test_killed_run_ends_as_an_uninterrupted_one(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    command = [sys.executable, __file__, str(run[0]), str(broken), "7"]
    killed = subprocess.run(command, env=os.environ, capture_output=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (broken / "model").exists()
    with pytest.raises(UserError, match=r"no model/vocabulary.json in it; a training writes it at its end"):
        load_run(broken)
    summary = train(load_config(broken), resume=True, progress=False)
    assert summary.val_nelbo == run[1].val_nelbo
    for name in (weights.BEST, weights.LAST, "model/model.safetensors"):
        assert (broken / name).read_bytes() == (run[0] / name).read_bytes()
    timeless = [{name: value for name, value in row.items() if name != "seconds"} for row in read_metrics(run[0])]
    assert [{n: v for n, v in row.items() if n != "seconds"} for row in read_metrics(broken)] == timeless


def test_resume_of_other_settings_or_data_is_refused(
    run: tuple[Path, RunSummary], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(run[0])
    config.k = 0.5
    with pytest.raises(UserError, match=r"--resume: the run was started with --k 0\.1, not 0.5"):
        train(config, resume=True, progress=False)
    config = load_config(run[0])
    config.data = str(text.with_name("other.txt"))
    Path(config.data).write_text(WORDS.replace("dog", "bird") * 60)
    with pytest.raises(UserError, match="--resume: the data has another size of the vocabulary"):
        train(config, resume=True, progress=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 1),
        ("val_split", 0.0),
        ("schedule", "cosine"),
        ("k", 0.0),
        ("k", 1.0),
        ("limit", 3),
        ("precision", "bf16-mixed"),
        ("precision", "16-mixed"),
    ],
)
def test_options_train(name: str, value: object, text: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "steps": None if name == "epochs" else 2, name: value}
    config = DiffusionConfig(data=str(text), out=str(tmp_path / "run"), **settings)  # type: ignore[arg-type]
    summary = train(config, progress=False)
    assert (summary.val_nelbo is None) == (name == "val_split")
    trained = load_run(tmp_path / "run")
    assert trained.model.config.k == config.k
    samples = draw(trained, *prompted(trained, "the ", None), count=2, steps=3)
    assert all(text.startswith("the ") for text in samples.texts)
    assert not (samples.tokens == trained.vocabulary.mask_id).any()


def test_tokenizer_goes_with_the_model(text: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    config = DiffusionConfig(data=str(text), out=str(tmp_path / "run"), vocab=str(tokenizer_folder), **SETTINGS)  # type: ignore[arg-type]
    summary = train(config, progress=False)
    assert summary.vocabulary == "tokenizer"
    assert summary.val_bits_per_byte < summary.val_nelbo / math.log(2)  # type: ignore[operator]
    trained = load_run(tmp_path / "run" / "model")
    tokens, observed = filled_in(trained, "the cat [MASK:2] the dog")
    assert draw(trained, tokens, observed, steps=2).texts[0].startswith("the cat")
    assert (tmp_path / "run" / "model" / "tokenizer.json").is_file()


def test_classes_steer_samples_and_are_dropped_for_guidance(tmp_path: Path) -> None:
    torch.manual_seed(0)
    labels = torch.arange(64) % 2
    tokens = TokenSet(labels[:, None].expand(-1, 8) * 2 + torch.randint(2, (64, 8)), labels=labels)
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8}
    model = XDLMForMaskedLM(XDLMConfig(vocab_size=5, mask_token_id=4, num_classes=2, k=0.1, **options))
    (tmp_path / "run").mkdir()
    settings = {**SETTINGS, "steps": 80, "batch_size": 16, "class_dropout": 0.3}
    result = fit_tokens(
        model,
        TokenData(tokens, tokens, None, None),
        DiffusionConfig(**settings),  # type: ignore[arg-type]
        tmp_path / "run",
        progress=False,
    )
    assert result.last_epoch == 20  # passes of four batches
    assert not model.training
    z = torch.full((2, 8), 4)
    with torch.no_grad():
        p = model(z, class_labels=torch.tensor([0, 1])).logits.softmax(-1)
        free = model(z[:1]).logits.softmax(-1)[0, :, :2].sum(-1).mean()
    assert p[0, :, :2].sum(-1).min() > 0.8
    assert p[1, :, 2:4].sum(-1).min() > 0.8
    assert 0.2 < float(free) < 0.8


def test_loss_that_is_not_finite_ends_in_one_line(text: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "lr": 1e20, "clip_gradient": 0.0, "warmup_steps": 0}
    with pytest.raises(UserError, match="try a smaller --lr"):
        train(DiffusionConfig(data=str(text), out=str(tmp_path / "run"), **settings), progress=False)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


def test_times_fill_the_interval_in_one_process_and_in_several() -> None:
    parts = [random_times(5, torch.Generator().manual_seed(7), rank, 3) for rank in range(3)]
    together = torch.cat(parts).sort().values
    assert torch.allclose(together.diff(), torch.full((14,), 1 / 15, dtype=torch.float64))
    assert 0 < together.min() <= together.max() <= 1
    index = torch.arange(1000)
    draws = torch.stack([fixed_times(index, number, 4, shift=0.3) for number in range(4)])
    assert torch.allclose(draws[:-1] - draws[1:], torch.full((3, 1000), 0.25, dtype=torch.float64))
    assert draws.min() > 0
    assert draws.max() <= 1
    fine = draws[0].sub(0.75).mul(4).sort().values
    assert (fine - (torch.arange(1000) + 0.5) / 1000).abs().max() < 0.003


class Oracle(torch.nn.Module):
    """Stands where a denoiser does, and knows that tokens are independent draws from ``p``."""

    def __init__(self, p: torch.Tensor, k: float) -> None:
        super().__init__()
        self.config = XDLMConfig(vocab_size=len(p) + 1, mask_token_id=len(p), k=k, max_position_embeddings=16)
        self.head = torch.nn.Linear(len(p) + 1, len(p) + 1, bias=False)
        torch.nn.init.eye_(self.head.weight)
        self.device = torch.device("cpu")
        self.logits = torch.cat([p.log(), torch.zeros(1)])

    def noise_kernel(self) -> NoiseKernel:
        return NoiseKernel.mixed(self.config.vocab_size, self.config.mask_token_id, self.config.k)

    def hidden(self, z: torch.Tensor, **context: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(*z.shape, -1)


@pytest.mark.parametrize("k", [0.0, 0.1, 1.0])
def test_nelbo_of_the_exact_model_is_the_entropy(k: float) -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    tokens = torch.multinomial(p.expand(600, -1), 16, replacement=True, generator=torch.Generator().manual_seed(1))
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[::3, 10:] = True
    data = TokenSet(tokens, padding, byte_counts=(~padding).sum(1) * 2)
    model = Oracle(p, k)
    estimate = estimate_nelbo(model, data, draws=8)  # type: ignore[arg-type]
    exact = float(-p.log()[tokens][~padding].mean())
    assert estimate.low < exact < estimate.high
    assert estimate.high - estimate.low < 0.15
    assert estimate.nats_per_token == pytest.approx(exact, abs=0.05)
    assert (estimate.tokens, estimate.bytes) == (int((~padding).sum()), 2 * int((~padding).sum()))
    assert estimate.bits_per_byte == pytest.approx(estimate.nats_per_token / 2 / math.log(2))
    assert estimate.perplexity == pytest.approx(math.exp(estimate.nats_per_token))
    other = estimate_nelbo(model, data, draws=8, batch_size=7)  # type: ignore[arg-type]
    assert other.nats_per_token == pytest.approx(estimate.nats_per_token, rel=1e-6)
    again = estimate_nelbo(model, data, draws=8, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]
    assert again.nats_per_token != estimate.nats_per_token
    with pytest.raises(ValueError, match="draws: got 0"):
        estimate_nelbo(model, data, draws=0)  # type: ignore[arg-type]


def test_interval_covers_what_it_says() -> None:
    p = torch.tensor([0.6, 0.3, 0.1])
    model = Oracle(p, 0.1)
    entropy = float(-(p * p.log()).sum())
    hits = 0
    for seed in range(40):
        draws = torch.Generator().manual_seed(seed)
        tokens = TokenSet(torch.multinomial(p.expand(60, -1), 16, replacement=True, generator=draws))
        estimate = estimate_nelbo(model, tokens, draws=2, generator=draws)  # type: ignore[arg-type]
        hits += estimate.low < entropy < estimate.high
    assert 33 <= hits <= 40


def test_batch_nelbo_is_the_loss_of_the_models_logits(run: tuple[Path, RunSummary]) -> None:
    trained = load_run(run[0])
    kernel = trained.model.noise_kernel()
    data = load_run_data(load_config(run[0]), trained.vocabulary)
    batch = next(data.train.batches(4))
    t = torch.tensor([0.2, 0.4, 0.7, 1.0], dtype=torch.float64)
    z = kernel.q_sample(batch["tokens"], t, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = trained.model(z, document_ids=batch["documents"]).logits
        expected = nelbo(logits, batch["tokens"], z, t, kernel)
        found = batch_nelbo(trained.model, kernel, batch, z, t, reduction="none")
    assert torch.allclose(found, expected, atol=1e-5)


def test_samples_do_not_depend_on_how_many_are_drawn(run: tuple[Path, RunSummary]) -> None:
    trained = load_run(run[0])
    few = generate(trained.model, 3, steps=4, seed=5)
    many = generate(trained.model, 7, steps=4, seed=5, batch_size=2)
    assert few.shape == (3, 32)
    assert torch.equal(few, many[:3])
    texts = draw(trained, *prompted(trained, "", None), count=3, seed=5, steps=4).texts
    assert texts == draw(trained, *prompted(trained, "", None), count=5, seed=5, steps=4).texts[:3]


def test_frontier_as_csv_and_picture(run: tuple[Path, RunSummary], tmp_path: Path) -> None:
    trained = load_run(run[0])
    data = load_run_data(load_config(run[0]), trained.vocabulary)
    judge = NGramJudge(3, trained.vocabulary.size).fit(data.train.tokens)
    seen = []
    rows = frontier({"a": trained.model}, judge, data.train.tokens[:8], steps=(2, 4), samples=5, on_row=seen.append)
    assert seen == rows[1:]
    assert [(row.run, row.k, row.steps, row.samples) for row in rows] == [
        ("data", None, None, 8),
        ("a", 0.1, 2, 5),
        ("a", 0.1, 4, 5),
    ]
    samples = generate(trained.model, 5, steps=4)
    assert rows[2].nll == pytest.approx(float(judge.nll(samples).mean()))
    assert rows[0].nll < rows[2].nll
    assert rows[2].nll_low < rows[2].nll < rows[2].nll_high
    write_frontier(rows, tmp_path / "frontier.csv")
    with (tmp_path / "frontier.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [row["steps"] for row in read] == ["", "2", "4"]
    assert float(read[2]["nll"]) == rows[2].nll
    plot_frontier(rows, tmp_path / "frontier.png")
    with Image.open(tmp_path / "frontier.png") as image:
        assert image.size[0] > 1000


def test_two_processes_train_one_model(text: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from spotlights.diffusion.recipes.config import DiffusionConfig;"
        "from spotlights.diffusion.recipes.training import train;"
        f"config = DiffusionConfig(data={str(text)!r}, out=sys.argv[1], **{SETTINGS!r});"
        "config.devices, config.strategy, config.steps = '2', 'ddp', 4;"
        "train(config, progress=False)"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    subprocess.run([sys.executable, str(script), str(tmp_path / "run")], check=True, capture_output=True, timeout=180)
    rows = read_metrics(tmp_path / "run")
    assert rows[-1]["val_nelbo"] < rows[0]["val_nelbo"]
    assert load_run(tmp_path / "run").model.config.k == 0.1


if __name__ == "__main__":
    settings = load_config(sys.argv[1])
    settings.out = sys.argv[2]
    step = training._Denoising.training_step

    def fatal(self, batch, index):
        if self.global_step == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, batch, index)

    training._Denoising.training_step = fatal  # type: ignore[method-assign]
    train(settings, progress=False)
