"""The denoiser: what it sees and does not see, saving, classes, compilation."""

import pytest
import torch

from spotlights.diffusion import linear_nelbo, nelbo, sample

transformers = pytest.importorskip("transformers", reason="needs the text extra")

from spotlights.diffusion.models import XDLMConfig, XDLMForMaskedLM  # noqa: E402


def make(classes=0, **changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 16}
    config = XDLMConfig(vocab_size=9, mask_token_id=8, num_classes=classes, **{**sizes, **changes})
    model = XDLMForMaskedLM(config).eval()
    # As initialised, classes change nothing.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modulation" in name:
                parameter.normal_(std=0.1)
    return model


@pytest.fixture
def tokens():
    return torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(1))


def test_every_token_sees_every_other(tokens):
    model = make()
    hidden = model.get_input_embeddings()(tokens).detach().requires_grad_()
    model.embedding.register_forward_hook(lambda *_: hidden)
    model.hidden(tokens)[0, 5, 3].backward()
    assert (hidden.grad[0].abs().amax(-1) > 0).all()
    assert not hidden.grad[1].any()


def test_position_counts(tokens):
    logits = make()(tokens).logits
    turned = make()(tokens.flip(1)).logits.flip(1)
    assert (logits - turned).abs().max() > 1e-3


def test_absolute_positions_count_where_they_are_learned():
    """In a sequence of equal tokens every place sees the same, but for where it is."""
    tokens = torch.full((1, 12), 3)
    rotary, learned = make()(tokens).logits[0], make(learned_positions=True)(tokens).logits[0]
    torch.testing.assert_close(rotary, rotary[:1].expand_as(rotary))
    assert (learned - learned[:1]).abs().max() > 1e-3


def test_padding_is_not_seen(tokens):
    model, mask = make(), torch.arange(12) < torch.tensor([[7], [12]])
    padded = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(padded[0, :7], model(tokens[:1, :7]).logits[0])
    torch.testing.assert_close(padded[1], model(tokens[1:]).logits[0])
    assert padded.isfinite().all()
    torch.testing.assert_close(padded, model(tokens, attention_mask=mask.long()).logits)


def test_other_documents_are_not_seen(tokens):
    model = make()
    documents = (torch.arange(12) >= 5).long().expand(2, 12)
    together = model(tokens, document_ids=documents).logits
    torch.testing.assert_close(together[:, :5], model(tokens[:, :5]).logits)
    torch.testing.assert_close(together[:, 5:], model(tokens[:, 5:]).logits)  # rotary positions are relative


def test_classes_count_and_none_is_the_default(tokens):
    model = make(classes=3)
    by_class = [model(tokens, class_labels=torch.tensor([label, label])).logits for label in range(4)]
    assert (by_class[0] - by_class[1]).abs().max() > 1e-3
    assert torch.equal(model(tokens).logits, by_class[3])


def test_classes_change_nothing_at_first(tokens):
    config = XDLMConfig(vocab_size=9, mask_token_id=8, hidden_size=32, num_hidden_layers=1, num_classes=3)
    model = XDLMForMaskedLM(config).eval()
    first, second = (model(tokens, class_labels=torch.tensor([label, label])).logits for label in (0, 2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("classes", [0, 3])
def test_save_and_load(tokens, tmp_path, classes):
    model = make(classes, k=0.25, schedule="cosine", parameterization="denoiser")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    for loaded in (XDLMForMaskedLM, transformers.AutoModelForMaskedLM, transformers.AutoModel):
        again = loaded.from_pretrained(tmp_path)
        assert type(again) is XDLMForMaskedLM
        assert torch.equal(again(tokens).logits, model(tokens).logits)
        assert (again.config.k, again.config.schedule, again.config.parameterization) == (0.25, "cosine", "denoiser")
        assert again.noise_kernel().k == 0.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_kept_to_the_bit(tmp_path, dtype):
    model = make(classes=3).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    again = XDLMForMaskedLM.from_pretrained(tmp_path)
    assert not again.training
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], weight), name


def test_a_tied_head(tokens, tmp_path):
    model = make(tie_word_embeddings=True)
    assert model.head.weight is model.embedding.weight
    assert make().head.weight is not make().embedding.weight
    model.save_pretrained(tmp_path)
    again = XDLMForMaskedLM.from_pretrained(tmp_path)
    assert again.head.weight is again.embedding.weight
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_no_mask_where_none_is_needed(tokens, monkeypatch):
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def watched(*arguments, attn_mask=None, **options):
        seen.append(attn_mask)
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model = make()
    model(tokens)
    assert seen == [None, None]
    model(tokens, document_ids=torch.zeros_like(tokens))
    assert seen[-1].dtype == torch.bool


def test_bfloat16_is_close(tokens):
    model = make()
    expected = model(tokens).logits.detach()
    found = model.to(torch.bfloat16)(tokens).logits
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("classes", [0, 3])
def test_compiles(tokens, classes):
    model = make(classes)
    compiled = torch.compile(model, fullgraph=True)
    context = {"attention_mask": torch.arange(12) < torch.tensor([[7], [12]]), "document_ids": tokens // 5}
    if classes:
        context["class_labels"] = torch.tensor([0, 2])
    for arguments in ({}, context):
        torch.testing.assert_close(compiled(tokens, **arguments).logits, model(tokens, **arguments).logits)


def test_hidden_and_head_give_the_logits(tokens):
    model, kernel = make(), make().noise_kernel()
    x = tokens.clamp_max(7)
    z = kernel.q_sample(x, 0.5, generator=torch.Generator().manual_seed(0))
    hidden = model.hidden(z)
    fused = linear_nelbo(hidden, model.head.weight, x, z, 0.5, kernel, bias=model.head.bias)
    torch.testing.assert_close(fused, nelbo(model(z).logits, x, z, 0.5, kernel).mean())


def test_denoiser_holds_its_context():
    model = make(classes=3)
    labels = torch.tensor([1, 2])
    denoise = model.denoiser(class_labels=labels, document_ids=torch.zeros(2, 12, dtype=torch.int64))
    z = torch.full((2, 6), 8)
    torch.testing.assert_close(denoise(z, torch.ones(2)), model(z, class_labels=labels).logits)
    drawn = sample(denoise, model.noise_kernel(), shape=(2, 12), steps=3, block_size=5)
    assert drawn.shape == (2, 12)
    assert (drawn < 8).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 30}, "hidden_size: got 30, expected a multiple of 8 for 4 heads"),
        ({"hidden_size": 0}, "hidden_size: got 0, expected at least 1"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings: got 0"),
        ({"intermediate_size": 0}, "intermediate_size: got 0"),
        ({"num_classes": -1}, "num_classes: got -1, expected 0 or more"),
        ({"schedule": "square"}, "schedule: got 'square', expected one of linear, cosine"),
        ({"k": 1.5}, r"k: got 1.5, expected a number in \[0, 1\]"),
        ({"mask_token_id": 9}, "mask_id: got 9, expected an id from 0 to 8"),
        ({"parameterization": "other"}, "parameterization: got 'other', expected 'loo' or 'denoiser'"),
    ],
)
def test_bad_config(changes, message):
    with pytest.raises(ValueError, match=message):
        XDLMForMaskedLM(XDLMConfig(**{"vocab_size": 9, "mask_token_id": 8, "hidden_size": 32, **changes}))


def test_bad_input(tokens):
    with pytest.raises(ValueError, match=r"input_ids: got 17 tokens, expected at most 16"):
        make()(torch.zeros(1, 17, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"input_ids: got shape \(12,\), expected \(batch, length\)"):
        make()(tokens[0])
    for name in ("attention_mask", "document_ids"):
        with pytest.raises(ValueError, match=rf"{name}: got shape \(2, 11\), expected \(2, 12\)"):
            make()(tokens, **{name: torch.ones(2, 11, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"class_labels: got shape \(3,\), expected \(2,\)"):
        make(classes=3)(tokens, class_labels=torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="class_labels: given to a model without classes"):
        make()(tokens, class_labels=torch.zeros(2, dtype=torch.int64))
