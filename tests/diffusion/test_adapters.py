"""Other people's models as denoisers."""

import pytest
import torch

from spotlights.diffusion import nelbo, sample

transformers = pytest.importorskip("transformers", reason="needs the text extra")

from spotlights.diffusion.models import MaskedLMDenoiser, XDLMConfig, XDLMForMaskedLM  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
WORDS = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "a", "b", "c", "d", "e"]


@pytest.fixture
def bert():
    torch.manual_seed(0)
    # Twelve logits for ten words: padded, as checkpoints are.
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=12, **SIZES)).eval()


def tokenizer(mask="[MASK]"):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    if mask:
        special["mask_token"] = mask
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def test_padded_logits_are_cut_and_the_mask_is_found(bert):
    denoiser = MaskedLMDenoiser(bert, tokenizer())
    assert (denoiser.kernel.vocab_size, denoiser.kernel.mask_id, denoiser.kernel.k) == (10, 3, 0.0)
    z = torch.tensor([[1, 5, 3, 3, 2]])
    assert torch.equal(denoiser(z), bert(z).logits[..., :10])


def test_infilling_keeps_what_is_given(bert):
    denoiser = MaskedLMDenoiser(bert, tokenizer(), k=0.2)
    prompt = torch.tensor([[1, 5, 3, 3, 2]]).repeat(50, 1)
    drawn = sample(denoiser, denoiser.kernel, prompt=prompt, steps=4, parameterization=denoiser.parameterization)
    assert torch.equal(drawn[:, [0, 1, 4]], prompt[:, [0, 1, 4]])
    assert (drawn != 3).all()
    assert (drawn < 10).all()


def test_special_tokens_are_told(bert):
    denoiser = MaskedLMDenoiser(bert, tokenizer())
    tokens = torch.tensor([[1, 5, 3, 6, 2, 0]])
    assert denoiser.special(tokens).tolist() == [[True, False, False, False, True, True]]
    x = torch.tensor([[1, 5, 7, 6, 2, 0]])
    z = denoiser.kernel.q_sample(x, 1.0, observed=denoiser.special(x))
    assert z.tolist() == [[1, 3, 3, 3, 2, 0]]
    loss = nelbo(denoiser(z), x, z, 1.0, denoiser.kernel, observed=denoiser.special(x))
    assert (loss[0, [0, 4, 5]] == 0).all()
    assert (loss[0, 1:4] > 0).all()


def test_attention_mask_is_passed_on(bert):
    denoise = MaskedLMDenoiser(bert, tokenizer()).denoiser(attention_mask=torch.tensor([[1, 1, 1, 0]]))
    z = torch.tensor([[1, 3, 2, 0]])
    torch.testing.assert_close(denoise(z, torch.ones(1))[:, :3], bert(z[:, :3]).logits[..., :10])


def test_modernbert():
    special = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(vocab_size=12, **special, **SIZES)).eval()
    denoiser = MaskedLMDenoiser(model, tokenizer())
    prompt = torch.tensor([[1, 5, 3, 3, 2]])
    assert torch.equal(denoiser(prompt), model(prompt).logits[..., :10])
    drawn = sample(denoiser, denoiser.kernel, prompt=prompt, steps=3)
    assert torch.equal(drawn[:, [0, 1, 4]], prompt[:, [0, 1, 4]])
    assert (drawn != 3).all()


def test_classes_are_passed_on():
    config = XDLMConfig(vocab_size=9, mask_token_id=8, hidden_size=32, num_hidden_layers=1, num_classes=2)
    model, labels = XDLMForMaskedLM(config).eval(), torch.tensor([1])
    z = torch.tensor([[3, 8, 8]])
    found = MaskedLMDenoiser(model).denoiser(class_labels=labels)(z, torch.ones(1))
    assert torch.equal(found, model(z, class_labels=labels).logits)


def test_a_model_may_give_bare_logits():
    class Model(torch.nn.Module):
        def forward(self, input_ids):
            return torch.zeros(*input_ids.shape, 12)

    assert MaskedLMDenoiser(Model(), mask_id=3, vocab_size=10)(torch.tensor([[1, 3]])).shape == (1, 2, 10)


def test_a_llada_like_model_needs_its_mask_id():
    class Model(torch.nn.Module):
        """Takes tokens, gives logits; its config and tokenizer know no mask, as LLaDA's do not."""

        config = transformers.PreTrainedConfig(vocab_size=12)

        def forward(self, input_ids, attention_mask=None):
            return transformers.modeling_outputs.CausalLMOutputWithPast(logits=torch.zeros(*input_ids.shape, 12))

    with pytest.raises(ValueError, match="mask_id: neither the tokenizer nor the model"):
        MaskedLMDenoiser(Model(), tokenizer(mask=None))
    denoiser = MaskedLMDenoiser(Model(), tokenizer(mask=None), mask_id=11, vocab_size=12)
    drawn = sample(denoiser, denoiser.kernel, prompt=torch.tensor([[5, 11, 11]]), steps=2, sampler="refine")
    assert drawn[0, 0] == 5
    assert (drawn < 11).all()


def test_flags_are_passed_on_and_blocks_cut_what_has_tokens(bert):
    denoiser = MaskedLMDenoiser(bert, tokenizer())
    prompt = torch.tensor([[1, 5, 3, 3, 2]])
    denoise = denoiser.denoiser(attention_mask=torch.ones(1, 5), output_attentions=False)
    drawn = sample(denoise, denoiser.kernel, prompt=prompt, steps=2, block_size=3)
    assert torch.equal(drawn[:, [0, 1, 4]], prompt[:, [0, 1, 4]])


def test_bad_arguments(bert):
    with pytest.raises(ValueError, match="z: got 513 tokens, expected at most 512"):
        MaskedLMDenoiser(bert, mask_id=3)(torch.full((1, 513), 3))
    with pytest.raises(ValueError, match="mask_id: got 10, expected an id from 0 to 9"):
        MaskedLMDenoiser(bert, tokenizer(), mask_id=10)
    with pytest.raises(ValueError, match=r"vocab_size: got 20, but the model gives 12 logits"):
        MaskedLMDenoiser(bert, mask_id=3, vocab_size=20)(torch.tensor([[3]]))
    with pytest.raises(TypeError, match=r"model: BertModel gave BaseModelOutput\w+, expected one with logits"):
        MaskedLMDenoiser(bert.bert, mask_id=3)(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="tokenizer: got none"):
        MaskedLMDenoiser(bert, mask_id=3).special(torch.tensor([[3]]))
    with pytest.raises(ValueError, match="parameterization: got 'other'"):
        MaskedLMDenoiser(bert, mask_id=3, parameterization="other")
