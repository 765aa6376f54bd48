"""The closed gradients of the bound, with and without the head, against autograd through the dense definition."""

import pytest
import torch

from spotlights.diffusion import NoiseKernel, chunks, linear_nelbo, loss, nelbo

# vocabulary, mask, k
NOISES = [(5, 4, 0.0), (4, 0, 0.0), (5, 0, 0.1), (6, 2, 0.5), (9, 8, 1e-3), (9, 8, 1.0), (4, None, 1.0), (2, 1, 0.5)]
CUSTOM = torch.tensor([0.3, 0.0, 0.2, 0.5, 0.0], dtype=torch.float64)  # the mask is token 3


def random(*shape, seed=0, scale=2.0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * scale


class TestGradients:
    @pytest.mark.parametrize("chunk", [None, 3])
    @pytest.mark.parametrize("steps", [None, 4])
    @pytest.mark.parametrize("parameterization", ["loo", "denoiser"])
    @pytest.mark.parametrize("noise", [*NOISES, "custom"], ids=str)
    def test_logits(self, definition, monkeypatch, noise, parameterization, steps, chunk):
        size, mask_id, k = (5, 3, None) if noise == "custom" else noise
        pi = CUSTOM if noise == "custom" else definition.pi(size, mask_id, k)
        kernel = NoiseKernel(pi, mask_id=mask_id) if k is None else NoiseKernel.mixed(size, mask_id, k)
        if chunk is not None:
            monkeypatch.setattr(chunks, "CPU_LOGITS", chunk * size)
        x, z, t = definition.batch(pi, mask_id)
        t = t if steps is None else torch.tensor([0.25, 0.5, 0.75, 0.75], dtype=torch.float64)[:, None].expand(x.shape)
        observed = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.3
        logits, upstream = random(*x.shape, size).requires_grad_(), random(*x.shape, seed=9)
        given_z = definition.loo_logits(logits, z, 1 - t, pi, mask_id) if parameterization == "denoiser" else logits
        p = definition.probabilities(given_z, mask_id)
        if steps is None:
            expected = definition.nelbo(p, x, z, 1 - t, -1.0, pi)
        else:
            expected = steps * definition.step_kl(p, x, z, 1 - t, 1 - t + 1 / steps, pi)
        expected = expected.masked_fill(observed, 0)
        (expected_grad,) = torch.autograd.grad(expected, logits, upstream)
        actual = nelbo(logits, x, z, t, kernel, observed=observed, parameterization=parameterization, steps=steps)
        (actual_grad,) = torch.autograd.grad(actual, logits, upstream)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(actual_grad, expected_grad, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("chunk", [None, 2])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("noise", [NOISES[0], NOISES[2], NOISES[5], "custom"], ids=str)
    def test_head(self, definition, monkeypatch, noise, reduction, bias, chunk):
        size, mask_id, k = (5, 3, None) if noise == "custom" else noise
        pi = CUSTOM if noise == "custom" else definition.pi(size, mask_id, k)
        kernel = NoiseKernel(pi, mask_id=mask_id) if k is None else NoiseKernel.mixed(size, mask_id, k)
        if chunk is not None:
            monkeypatch.setattr(chunks, "CPU_LOGITS", chunk * size)
            monkeypatch.setattr(loss, "_HEAD_ROWS", 5)
        x, z, t = definition.batch(pi, mask_id)
        observed = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) < 0.3
        inputs = [random(*x.shape, 7, scale=1.0), random(size, 7, seed=1, scale=1.0)]
        inputs += [random(size, seed=2)] if bias else []
        inputs = [value.requires_grad_() for value in inputs]
        logits = inputs[0] @ inputs[1].T + (inputs[2] if bias else 0)
        dense = definition.nelbo(definition.probabilities(logits, mask_id), x, z, 1 - t, -1.0, pi)
        dense = dense.masked_fill(observed, 0)
        dense = {"mean": dense.sum() / (~observed).sum(), "sum": dense.sum(), "none": dense}[reduction]
        upstream = random(*dense.shape, seed=9)
        options = {"bias": inputs[2] if bias else None, "observed": observed, "reduction": reduction}
        actual = linear_nelbo(inputs[0], inputs[1], x, z, t, kernel, **options)
        torch.testing.assert_close(actual, dense, rtol=1e-9, atol=1e-9)
        pair = [torch.autograd.grad(value, inputs, upstream) for value in (actual, dense)]
        torch.testing.assert_close(*pair, rtol=1e-9, atol=1e-9)

    def test_head_with_steps_and_a_denoiser(self, definition):
        kernel, pi = NoiseKernel.mixed(6, 2, 0.5), definition.pi(6, 2, 0.5)
        x, z, _ = definition.batch(pi, 2)
        hidden, weight = random(*x.shape, 7), random(6, 7, seed=1)
        options = {"steps": 4, "parameterization": "denoiser"}
        expected = nelbo(hidden @ weight.T, x, z, 0.75, kernel, **options)
        actual = linear_nelbo(hidden, weight, x, z, 0.75, kernel, reduction="none", **options)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)

    def test_only_what_asks_for_a_gradient_gets_one(self, definition):
        kernel = NoiseKernel.mixed(6, 2, 0.5)
        x, z, t = definition.batch(definition.pi(6, 2, 0.5), 2)
        hidden, weight = random(*x.shape, 7), random(6, 7, seed=1)
        for reduction in ("mean", "none"):
            assert not linear_nelbo(hidden, weight, x, z, t, kernel, reduction=reduction).requires_grad
            head = weight.clone().requires_grad_()
            linear_nelbo(hidden, head, x, z, t, kernel, reduction=reduction).sum().backward()
            full = hidden.clone().requires_grad_()
            linear_nelbo(full, weight, x, z, t, kernel, reduction=reduction).sum().backward()
            assert head.grad.abs().sum() > 0
            assert full.grad.abs().sum() > 0

    def test_a_second_backward_pass(self, definition):
        kernel = NoiseKernel.mixed(6, 2, 0.5)
        x, z, t = definition.batch(definition.pi(6, 2, 0.5), 2)
        hidden, weight = random(*x.shape, 7), random(6, 7, seed=1).requires_grad_()
        value = linear_nelbo(hidden, weight, x, z, t, kernel, reduction="none").mean()
        pair = [torch.autograd.grad(value, weight, retain_graph=True)[0] for _ in range(2)]
        assert torch.equal(*pair)
        value = linear_nelbo(hidden, weight, x, z, t, kernel)
        torch.testing.assert_close(torch.autograd.grad(value, weight, retain_graph=True)[0], pair[0])
        with pytest.raises(RuntimeError, match=r"^linear_nelbo: one backward pass only"):
            value.backward()

    def test_nothing_is_kept_without_gradients(self, definition, monkeypatch):
        def refuse(*_):
            raise AssertionError("a gradient was computed")

        monkeypatch.setattr(loss, "_gradient", refuse)
        kernel = NoiseKernel.mixed(6, 2, 0.5)
        x, z, t = definition.batch(definition.pi(6, 2, 0.5), 2)
        hidden, weight = random(*x.shape, 7), random(6, 7, seed=1).requires_grad_()
        with torch.no_grad():
            value = linear_nelbo(hidden, weight, x, z, t, kernel)
            torch.testing.assert_close(value, nelbo(hidden @ weight.T, x, z, t, kernel).mean())

    def test_observed_tokens_and_padding_have_no_loss_and_no_gradient(self, definition):
        kernel = NoiseKernel.mixed(6, 2, 0.5)
        x, z, t = definition.batch(definition.pi(6, 2, 0.5), 2)
        x[0, 3] = 2  # an observed token may be the mask
        observed = torch.zeros(x.shape, dtype=torch.bool)
        observed[:, 3:5] = observed[3] = True
        logits = random(*x.shape, 6)
        logits[observed] = torch.nan
        logits.requires_grad_()
        values = nelbo(logits, x, z, t, kernel, observed=observed)
        values.sum().backward()
        assert values[observed].abs().max() == 0
        assert logits.grad[observed].abs().max() == 0
        assert values[~observed].min() > 0
        alone = nelbo(logits.detach()[:3, :3], x[:3, :3], z[:3, :3], t[:3, :3], kernel)
        assert torch.equal(values[:3, :3].detach(), alone)

    def test_chunks_do_not_change_the_loss(self, monkeypatch):
        kernel = NoiseKernel.mixed(101, 100, 0.1)
        x = torch.randint(100, (3, 17), generator=torch.Generator().manual_seed(0))
        z = kernel.q_sample(x, 0.5, generator=torch.Generator().manual_seed(1))
        logits, hidden, weight = random(3, 17, 101).float(), random(3, 17, 8).float(), random(101, 8).float()
        results = []
        for rows in (1, 2, 7, 1000):
            monkeypatch.setattr(chunks, "CPU_LOGITS", rows * 101)
            leaf = logits.clone().requires_grad_()
            values = nelbo(leaf, x, z, 0.5, kernel)
            values.sum().backward()
            results.append((values.detach(), leaf.grad))
        for values, grad in results[1:]:
            assert torch.equal(values, results[0][0])
            assert torch.equal(grad, results[0][1])
        fused = linear_nelbo(hidden, weight, x, z, 0.5, kernel)
        torch.testing.assert_close(fused, nelbo(hidden @ weight.T, x, z, 0.5, kernel).mean())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_autocast_changes_nothing(reduction):
    kernel = NoiseKernel.mixed(9, 8, 0.3)
    hidden, weight = random(2, 5, 4).float().requires_grad_(), random(9, 4, seed=1).float().requires_grad_()
    x = torch.randint(8, (2, 5), generator=torch.Generator().manual_seed(2))
    z = kernel.q_sample(x, 0.5, generator=torch.Generator().manual_seed(3))
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            total = linear_nelbo(hidden, weight, x, z, 0.5, kernel, reduction=reduction).sum()
        found.append((total.detach(), *torch.autograd.grad(total, (hidden, weight))))
    assert all(torch.equal(plain, cast) for plain, cast in zip(*found, strict=True))
