"""The bound in float32 and half precision, of any token in 60 digits, and alone or beside others to the bit."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import one_hot

from spotlights.diffusion import NoiseKernel, linear_nelbo, nelbo


class TestBatchMates:
    @pytest.mark.parametrize("length", [1, 3])
    @pytest.mark.parametrize("k", [0.0, 0.1])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("size", [126464, 50257])
    def test_a_large_vocabulary(self, two_threads, size, k, length, dtype):
        kernel = NoiseKernel.mixed(size, size - 1, k)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(size - 1, (5, length), generator=draw)
        t = torch.tensor([0.9, 0.3, 0.6, 0.99, 0.8], dtype=torch.float64)
        z = kernel.q_sample(x, t, generator=draw)
        logits = torch.randn(5, length, size, generator=draw).to(dtype).requires_grad_()
        values = nelbo(logits, x, z, t, kernel)
        values.sum().backward()
        for row in range(5):
            here = slice(row, row + 1)
            alone = logits.detach()[here].clone().requires_grad_()
            value = nelbo(alone, x[here], z[here], t[here], kernel)
            value.sum().backward()
            assert torch.equal(value, values[here])
            assert torch.equal(alone.grad, logits.grad[here])

    def test_observed_neighbours_do_not_matter(self, two_threads, definition):
        kernel = NoiseKernel.mixed(40000, 0, 0.5)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(1, 40000, (2, 30), generator=draw)
        z = kernel.q_sample(x, 0.6, generator=draw)
        logits = torch.randn(2, 30, 40000, generator=draw)
        observed = torch.rand(2, 30, generator=draw) < 0.9
        plain = nelbo(logits, x, z, 0.6, kernel)
        assert torch.equal(nelbo(logits, x, z, 0.6, kernel, observed=observed), plain.masked_fill(observed, 0))


class TestPrecision:
    @pytest.mark.parametrize("gap", [50.0, 800.0, 1e30])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("k", [0.0, 1e-30, 0.5, 1.0])
    @pytest.mark.parametrize(("t", "steps"), [(0.5, None), (0.5, 4), (0.25, 4)])
    def test_probabilities_too_small_for_a_number(self, k, dtype, gap, t, steps):
        kernel = NoiseKernel.mixed(4, 3, k)
        logits = torch.tensor([[[gap, 0, 0, 0], [gap, 0, 0, 0], [-gap, 0, 0, 0]]], dtype=dtype, requires_grad=True)
        x, z = torch.tensor([[1, 1, 0]]), torch.tensor([[3, 1, 3]])
        values = nelbo(logits, x, z, t, kernel, steps=steps)
        values.sum().backward()
        assert values.isfinite().all()
        assert logits.grad.isfinite().all()
        if k == 0:
            expected = torch.tensor([gap, 0.0, gap + math.log(2)], dtype=dtype) / t
            torch.testing.assert_close(values.detach()[0], expected, rtol=1e-6, atol=0)
            p = logits.detach()[0, :, :3].softmax(-1) - one_hot(x[0], 3)
            torch.testing.assert_close(logits.grad[0, [0, 2], :3], p[[0, 2]] / t, rtol=1e-6, atol=1e-6)

    def test_a_float16_mean_can_be_scaled(self):
        size, length = 5000, 2048
        kernel = NoiseKernel.mixed(size, size - 1, 0.1)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(size - 1, (1, length), generator=draw)
        z = kernel.q_sample(x, 0.5, generator=draw)
        given = [(torch.randn(*shape, generator=draw) * 0.1).half() for shape in ((1, length, 8), (size, 8))]
        grads = []
        for dtype in (torch.float64, torch.float16):
            hidden, weight = (values.to(dtype).requires_grad_() for values in given)
            (linear_nelbo(hidden, weight, x, z, 0.5, kernel) * 4096).backward()
            grads.append((hidden.grad.double(), weight.grad.double()))
        for exact, half in zip(*grads, strict=True):
            assert (half - exact).norm() < 1e-3 * exact.norm()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("t", [1e-4, 0.5, 1 - 1e-4])
    @pytest.mark.parametrize("k", [0.0, 1e-3, 0.1, 1.0])
    @pytest.mark.parametrize("steps", [None, 10000])
    def test_half_precision(self, k, t, dtype, steps):
        size = 2003
        kernel = NoiseKernel.mixed(size, 7, k)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(8, size, (2, 24), generator=draw)
        # Each kind of z occurs, however rare: kept, masked, another token.
        z = x.clone()
        z[:, ::3] = 7
        if k > 0:
            z[:, ::4] = torch.randint(size, z[:, ::4].shape, generator=draw)
        logits = torch.randn(2, 24, size, generator=draw) * 4
        logits[1] += 20 * one_hot(x[1], size)  # a model that is sure
        logits = logits.to(dtype)
        exact_logits = logits.double().requires_grad_()
        exact = nelbo(exact_logits, x, z, t, kernel, steps=steps)
        exact.mean().backward()
        logits.requires_grad_()
        values = nelbo(logits, x, z, t, kernel, steps=steps)
        values.mean().backward()
        assert values.dtype == torch.float32
        assert values.isfinite().all()
        assert (values >= 0).all()
        torch.testing.assert_close(values.double(), exact, rtol=2e-4, atol=2e-6 * float(exact.detach().max()))
        assert logits.grad.dtype == dtype
        assert logits.grad.isfinite().all()
        error = (logits.grad.double() - exact_logits.grad).abs().max() / exact_logits.grad.abs().max().clamp_min(1e-6)
        assert error < {torch.bfloat16: 4e-3, torch.float16: 2e-3, torch.float32: 1e-4}[dtype]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("t", [1e-4, 1 - 1e-4])
    @pytest.mark.parametrize("k", [0.0, 0.1, 1.0])
    def test_half_precision_head(self, k, t, dtype):
        size = 503
        kernel = NoiseKernel.mixed(size, 502, k)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(502, (2, 20), generator=draw)
        z = kernel.q_sample(x, 0.5, generator=draw)
        inputs = [torch.randn(2, 20, 32, generator=draw).to(dtype), torch.randn(size, 32, generator=draw).to(dtype) / 4]
        results = []
        for convert in (dtype, torch.float32):
            leaves = [value.to(convert, copy=True).requires_grad_() for value in inputs]
            value = linear_nelbo(*leaves, x, z, t, kernel)
            value.backward()
            assert value.dtype == torch.float32
            assert value >= 0
            results.append((value.detach(), [leaf.grad.float() for leaf in leaves]))
        (value, grads), (exact, exact_grads) = results
        torch.testing.assert_close(value, exact, rtol=2e-2, atol=1e-6)
        for grad, exact_grad in zip(grads, exact_grads, strict=True):
            assert grad.isfinite().all()
            assert (grad - exact_grad).abs().max() < 3e-2 * exact_grad.abs().max() + 1e-6

    @pytest.mark.parametrize("t", [1e-4, 1 - 1e-4])
    @pytest.mark.parametrize("k", [0.0, 0.1, 1.0])
    def test_a_real_vocabulary_in_float32(self, k, t):
        size = 50258
        kernel = NoiseKernel.mixed(size, size - 1, k)
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(size - 1, (1, 6), generator=draw)
        z = x.clone()
        z[0, :3] = size - 1
        logits = torch.randn(1, 6, size, generator=draw) * 3
        values = nelbo(logits, x, z, t, kernel)
        torch.testing.assert_close(values.double(), nelbo(logits.double(), x, z, t, kernel), rtol=1e-4, atol=1e-6)


def exact_nelbo(p, x, z, alpha, pi):
    """The definition in 60 digits for one token; p and pi are lists."""
    with mpmath.workdps(60):
        alpha = mpmath.mpf(alpha)
        f = [alpha * (e == x) + (1 - alpha) * mpmath.mpf(n) for e, n in enumerate(pi)]
        g = [alpha * q + (1 - alpha) * mpmath.mpf(n) for q, n in zip(p, pi, strict=True)]
        kl = sum(a * mpmath.log(a / b) for a, b in zip(f, g, strict=True) if a > 0)
        rho = f[z] / g[z]
        return float(mpmath.mpf(pi[z]) / alpha / f[z] * (kl + rho - mpmath.log(rho) - 1))


@st.composite
def tokens(draw):
    """A noise, one token with what it became, a time, and logits."""
    size = draw(st.integers(2, 9))
    k = draw(st.one_of(st.sampled_from([0.0, 1.0, 0.1, 1e-12]), st.floats(1e-9, 1)))
    mask_id = draw(st.integers(0, size - 1)) if k < 1 else draw(st.one_of(st.none(), st.integers(0, size - 1)))
    x = draw(st.integers(0, size - 1).filter(lambda token: token != mask_id))
    z = draw(st.integers(0, size - 1)) if k > 0 else draw(st.sampled_from([x, mask_id]))
    t = draw(st.floats(1e-6, 1 - 1e-6))
    logits = draw(st.lists(st.floats(-25, 25), min_size=size, max_size=size))
    return size, mask_id, k, x, z, t, logits


class TestAnyToken:
    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(tokens())
    def test_the_definition_in_60_digits(self, case):
        size, mask_id, k, x, z, t, logits = case
        kernel = NoiseKernel.mixed(size, mask_id, k)
        with mpmath.workdps(60):
            weights = [mpmath.mpf(0) if e == mask_id else mpmath.exp(mpmath.mpf(v)) for e, v in enumerate(logits)]
            p = [weight / sum(weights) for weight in weights]
            pi = [mpmath.mpf(k) / size + (1 - mpmath.mpf(k)) * (e == mask_id) for e in range(size)]
            expected = exact_nelbo(p, x, z, 1 - t, pi)
        arguments = (torch.tensor([[x]]), torch.tensor([[z]]), t, kernel)
        value = nelbo(torch.tensor([[logits]], dtype=torch.float64), *arguments).item()
        assert value >= 0
        scale = pi[z] / ((1 - t) * (x == z) + t * pi[z])
        assert value == pytest.approx(expected, rel=1e-8, abs=1e-12 * max(1.0, float(scale)))
        narrow = nelbo(torch.tensor([[logits]], dtype=torch.float32), *arguments).item()
        assert math.isfinite(narrow)
        assert narrow >= 0
        assert narrow == pytest.approx(expected, rel=1e-3, abs=1e-5 * max(1.0, float(scale)))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(tokens(), st.integers(1, 5000))
    def test_steps_are_finite_and_not_negative(self, case, steps):
        size, mask_id, k, x, z, t, logits = case
        step = max(1, min(steps, round(t * steps)))
        kernel = NoiseKernel.mixed(size, mask_id, k)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            scores = torch.tensor([[logits]], dtype=dtype).requires_grad_()
            value = nelbo(scores, torch.tensor([[x]]), torch.tensor([[z]]), step / steps, kernel, steps=steps)
            value.backward()
            assert value.isfinite()
            assert value >= 0
            assert scores.grad.isfinite().all()
