"""The CPU library at every instruction set, on every number of threads, in forked processes."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

from spotlights.runtime.native import LEVEL_VARIABLE, LEVELS, load
from spotlights.wbmm import wbmm2d
from spotlights.wbmm.backends import cpu

pytestmark = pytest.mark.skipif(isinstance(cpu.LIBRARY, str), reason=str(cpu.LIBRARY))
BEST = 0 if isinstance(cpu.LIBRARY, str) else int(cpu.LIBRARY.functions.spotlights_best_level())

# batch, channels, height, width, window: whole and cut windows, full and narrow blocks of channels, every tile width
SHAPES = [
    (2, 32, 14, 21, (7, 7)),
    (1, 20, 13, 20, (5, 9)),
    (2, 5, 30, 17, (14, 14)),
    (1, 16, 40, 33, (16, 16)),
    (3, 33, 9, 50, (3, 20)),
    (5, 16, 20, 13, (14, 14)),
    (3, 17, 13, 5, (7, 7)),
    (1, 48, 24, 23, (8, 8)),
    (9, 8, 12, 12, (12, 12)),
    (1, 1, 1, 1, (7, 7)),
    (2, 3, 5, 70, (2, 33)),
]


def make(shape):
    batch, channels, height, width, (wh, ww) = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, channels, height, width), (channels, 2 * wh - 1, 2 * ww - 1), (channels,))
    return [torch.randn(size, generator=generator) for size in sizes]


def results(tensors, backend, shortcut):
    """The output and every gradient, of input, weight, bias and perhaps a local weight."""
    tensors = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
    input, weight, bias, local_weight = (*tensors, None)[:4]
    output = wbmm2d(input, weight, bias, shortcut=shortcut, local_weight=local_weight, backend=backend)
    # Exact in every dtype.
    upstream = (torch.arange(output.numel()) * 37 % 67 / 64 - 0.25).to(output.dtype).view_as(output)
    return [output.detach(), *torch.autograd.grad(output, tensors, upstream)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_reference(shape, channels_last, level, poison):
    tensors = make(shape)
    if channels_last:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    for shortcut in (False, True):
        expected = results([t.double() for t in tensors], "reference", shortcut)
        for actual, value in zip(results(tensors, "cpu", shortcut), expected, strict=True):
            assert (actual.double() - value).abs().max() / value.abs().max() < 3e-6


@pytest.mark.parametrize(
    ("shape", "local"),
    [
        ((2, 20, 29, 31, (14, 14)), (7, 7)),
        ((1, 33, 17, 26, (8, 12)), (4, 3)),
        ((2, 5, 40, 37, (4, 32)), (2, 16)),
        ((1, 16, 14, 14, (14, 14)), (14, 14)),
        ((1, 16, 9, 13, (9, 20)), (1, 1)),
        ((1, 8, 6, 41, (2, 40)), (2, 20)),
    ],
    ids=str,
)
def test_two_tables_equal_the_reference(shape, local, level, poison):
    tensors = make(shape)
    tensors.append(torch.randn(shape[1], 2 * local[0] - 1, 2 * local[1] - 1))
    expected = results([t.double() for t in tensors], "reference", True)
    for layout in (torch.contiguous_format, torch.channels_last):
        tensors[0] = tensors[0].contiguous(memory_format=layout)
        for actual, value in zip(results(tensors, "cpu", True), expected, strict=True):
            assert (actual.double() - value).abs().max() / value.abs().max() < 3e-6


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_equals_the_reference(shape, channels_last, level, poison):
    tensors = [t.bfloat16() for t in make(shape)]
    if channels_last:
        tensors[0] = tensors[0].contiguous(memory_format=torch.channels_last)
    expected = results([t.double() for t in tensors], "reference", True)
    for actual, value in zip(results(tensors, "cpu", True), expected, strict=True):
        assert actual.dtype == torch.bfloat16
        # bfloat16 keeps 8 bits. Products of bfloat16 also round the table, in which the shortcut is 1 more.
        once = 2**-8 if LEVELS[level] in ("avx512bf16", "amx") else 1e-4
        assert ((actual.double() - value).abs() <= 2**-8 * value.abs() + once * value.abs().max()).all()


def test_bfloat16_keeps_what_is_not_finite(level):
    input = torch.full((1, 16, 4, 4), 1.0, dtype=torch.bfloat16)
    input[0, 0, 0, 0], input[0, 1, 0, 0], input[0, 2, 0, 0] = float("nan"), float("inf"), 3e38
    weight = torch.zeros(16, 7, 7, dtype=torch.bfloat16)
    output = wbmm2d(input, weight, torch.zeros(16, dtype=torch.bfloat16), shortcut=True, backend="cpu")
    assert output[0, 0, 0, 0].isnan()
    assert output[0, 1, 0, 0] == float("inf")
    assert torch.equal(output[0, 2:], input[0, 2:])


@pytest.mark.parametrize("window", [(7, 7), (8, 8), (9, 13), (14, 14)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_what_is_not_finite_stays_in_its_window_and_channel(batch, dtype, window, level):
    wh, ww = window
    input = torch.ones(batch, 18, 2 * wh + 3, 2 * ww + 1, dtype=dtype)
    input[-1, 3, wh + 1, ww + 2] = float("nan")
    input[0, 17, 2 * wh, 0] = float("inf")
    expected = torch.zeros_like(input, dtype=torch.bool)
    expected[-1, 3, wh : 2 * wh, ww : 2 * ww] = True
    expected[0, 17, 2 * wh :, :ww] = True
    output = wbmm2d(input, torch.ones(18, 2 * wh - 1, 2 * ww - 1, dtype=dtype), backend="cpu")
    assert torch.equal(~output.isfinite(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(dtype, level):
    threads = torch.get_num_threads()
    try:
        for shape in [*SHAPES, (16, 16, 14, 14, (14, 14))]:
            tensors = [t.to(dtype) for t in make(shape)]
            torch.set_num_threads(1)
            single = results(tensors, "cpu", True)
            torch.set_num_threads(3)
            for a, b in zip(single, results(tensors, "cpu", True), strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("window", [(7, 7), (14, 14), (5, 9)], ids=str)
def test_outputs_beyond_the_caches_have_the_bits_of_their_images(window, level, poison):
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(2, 256, 129, 129, generator=generator).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(256, 2 * window[0] - 1, 2 * window[1] - 1, generator=generator)
    bias = torch.randn(256, generator=generator)
    assert input.numel() > 8 << 20, "kPast in wbmm.cpp: below it outputs are written through the caches"
    whole = wbmm2d(input, weight, bias, shortcut=True, backend="cpu")
    images = [wbmm2d(image[None], weight, bias, shortcut=True, backend="cpu") for image in input]
    assert torch.equal(whole, torch.cat(images))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forked_process_gets_the_same_answer():
    input, weight, bias = make((4, 64, 28, 28, (7, 7)))
    input = input.contiguous(memory_format=torch.channels_last)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        # The parent has used the thread pool, which a fork does not copy.
        expected = wbmm2d(input, weight, bias, backend="cpu")
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=_compute, args=(input, weight, bias, queue))
        process.start()
        answer = torch.from_numpy(queue.get(timeout=60))
        process.join(60)
    finally:
        torch.set_num_threads(threads)
    assert process.exitcode == 0
    assert torch.equal(answer, expected)


def _compute(input, weight, bias, queue):
    queue.put(wbmm2d(input, weight, bias, backend="cpu").numpy())


def _ask(value):
    code = (
        "from spotlights.runtime.native import load, LEVELS; library = load();"
        "print(library if isinstance(library, str) else LEVELS[library.level])"
    )
    environment = {**os.environ, LEVEL_VARIABLE: value}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def test_level_is_forced_by_the_environment():
    assert _ask("baseline") == "baseline"
    assert _ask(LEVELS[BEST]) == LEVELS[BEST]
    assert _ask("sse9") == f"{LEVEL_VARIABLE}: got 'sse9', expected one of baseline, avx2, avx512, avx512bf16, amx"


def test_falls_back_without_the_library(monkeypatch):
    monkeypatch.setattr(cpu, "LIBRARY", "not built")
    input, weight, _ = make((1, 4, 9, 9, (4, 4)))
    torch.testing.assert_close(wbmm2d(input, weight), wbmm2d(input, weight, backend="reference"), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="backend='cpu' cannot run this call: not built"):
        wbmm2d(input, weight, backend="cpu")


def test_slices_and_broadcasts_are_read_in_place():
    base = torch.randn(2, 40, 9, 20).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(24, 7, 7)
    for input in (base[:, 8:32], base[:, :24, ::2, 1:], base[:1, :24].expand(3, -1, -1, -1)):
        expected = wbmm2d(input.double(), weight.double(), backend="reference")
        actual = wbmm2d(input, weight, backend="cpu")
        assert (actual.double() - expected).abs().max() / expected.abs().max() < 3e-6


def test_default_dtype_does_not_matter():
    input, weight, bias = make((2, 20, 9, 11, (4, 4)))
    expected = results([input, weight, bias], "cpu", True)
    torch.set_default_dtype(torch.float64)
    try:
        actual = results([input, weight, bias], "cpu", True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_load_is_cached():
    assert load() is load()
