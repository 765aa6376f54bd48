"""The diffusion written out from its formulas, dense and in float64, for the tests to compare with."""

import pytest
import torch
from torch.nn.functional import one_hot


class Definition:
    """Formulas of a few lines each: for p, x and z of one shape (..., ) with the vocabulary last, alpha likewise."""

    @staticmethod
    def pi(size, mask_id, k):
        pi = torch.full((size,), k / size, dtype=torch.float64)
        if k < 1:
            pi[mask_id] += 1 - k
        return pi

    @staticmethod
    def probabilities(logits, mask_id):
        if mask_id is not None:
            logits = logits.index_fill(-1, torch.tensor([mask_id]), -torch.inf)
        return logits.softmax(-1)

    @staticmethod
    def marginal(p, alpha, pi):
        return alpha[..., None] * p + (1 - alpha[..., None]) * pi

    @staticmethod
    def matrix(alpha, pi):
        """One forward step as a matrix (from, to)."""
        return alpha * torch.eye(len(pi), dtype=torch.float64) + (1 - alpha) * pi

    @classmethod
    def bayes(cls, p, z, alpha_t, alpha_s, pi):
        """q(z_s | z_t = z) for one token, by summing the joint of x, z_s and z_t; numbers but p and pi, (N,)."""
        joint = p[:, None, None] * cls.matrix(alpha_s, pi)[:, :, None] * cls.matrix(alpha_t / alpha_s, pi)[None]
        column = joint.sum(0)[:, z]
        return column / column.sum()

    @staticmethod
    def kl(f, g):
        some = f > 0
        return (f * (torch.where(some, f, 1).log() - torch.where(some, g, 1).log())).sum(-1)

    @classmethod
    def nelbo(cls, p, x, z, alpha, slope, pi):
        """The bound in continuous time, for alpha < 1 and alpha > 0."""
        f = cls.marginal(one_hot(x, len(pi)).double(), alpha, pi)
        g = cls.marginal(p, alpha, pi)
        f_z, g_z = (v.gather(-1, z[..., None])[..., 0] for v in (f, g))
        rho = f_z / g_z
        return -slope / alpha * pi[z] / f_z * (cls.kl(f, g) + rho - rho.log() - 1)

    @classmethod
    def step_kl(cls, p, x, z, alpha_t, alpha_s, pi):
        """The KL of one step back, from the two posteriors."""
        kept = (alpha_t / alpha_s)[..., None]
        to_z = kept * one_hot(z, len(pi)) + (1 - kept) * pi[z][..., None]
        both = [cls.marginal(v, alpha_s, pi) * to_z for v in (one_hot(x, len(pi)).double(), p)]
        return cls.kl(*(v / v.sum(-1, keepdim=True) for v in both))

    @staticmethod
    def pairs(pi, mask_id):
        """Every x and the z that it can become, (1, n) each."""
        size = len(pi)
        found = [(x, z) for x in range(size) if x != mask_id for z in range(size) if z == x or pi[z] > 0]
        return torch.tensor(found).T[:, None]

    @classmethod
    def batch(cls, pi, mask_id, rows=4, length=11):
        """Random x, z that can come of it, and times, (rows, length)."""
        pick = torch.Generator().manual_seed(0)
        found = cls.pairs(pi, mask_id)[:, 0].T
        x, z = found[torch.randint(len(found), (rows, length), generator=pick)].unbind(-1)
        return x, z, torch.rand(rows, length, dtype=torch.float64, generator=pick) * 0.98 + 0.01

    @staticmethod
    def loo_logits(logits, z, alpha, pi, mask_id):
        """A denoiser's logits less what z says of itself: log(1 + alpha / (beta pi(z))) at z, unless it is the mask."""
        own = torch.log1p(alpha / ((1 - alpha) * pi[z]))
        own = own.masked_fill((pi[z] == 0) | (z == (-1 if mask_id is None else mask_id)), 0)
        return logits - own[..., None] * one_hot(z, len(pi))


def _p_value(counts, probabilities):
    """Of Pearson's chi-square test; cells of probability 0 must be empty."""
    possible = probabilities > 1e-12
    assert int(counts[~possible].sum()) == 0
    counts, expected = counts[possible].double(), probabilities[possible] / probabilities[possible].sum()
    if len(counts) == 1:
        return 1.0
    expected = expected * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


@pytest.fixture(scope="session")
def definition():
    """The formulas."""
    return Definition


@pytest.fixture(scope="session")
def p_value():
    """Function (counts, probabilities) -> p of the chi-square test; asserts that what is impossible did not happen."""
    return _p_value


@pytest.fixture
def two_threads():
    """Two threads in torch, as a reduction may be split over them."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def word_tokenizer():
    """Function (**special tokens): a tokenizer of bytes merged into a few words."""

    def make(**special):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=300, special_tokens=[*special.values()], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
        tokenizer.train_from_iterator(["the cat and the dog and the bird"] * 4, trainer)
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)

    return make


@pytest.fixture(scope="session")
def tokenizer_folder(word_tokenizer, tmp_path_factory):
    """Folder of such a tokenizer with a mask and an end."""
    folder = tmp_path_factory.mktemp("tokenizer")
    word_tokenizer(mask_token="[MASK]", eos_token="[EOS]").save_pretrained(folder)
    return folder
