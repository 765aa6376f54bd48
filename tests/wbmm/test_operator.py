"""The operator against its definition, every backend against the reference, and torch's own checks."""

import functools
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from spotlights.wbmm import wbmm2d
from spotlights.wbmm.backends import BACKENDS, Call
from spotlights.wbmm.backends.matmul import build_matrix
from spotlights.wbmm.windows import layout_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "wbmm"
PLAIN_CALL = Call(torch.device("cpu"), torch.float32, (7, 7), None)
# Those that run here; test_cpu.py says why the CPU library does not, where it does not.
NAMES = [backend.name for backend in BACKENDS if backend.why_not(PLAIN_CALL) is None]
# What each backend is tested in: the best it computes in, and how close that must come to float64.
DTYPES = {"cpu": torch.float32}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}


def dtype_of(backend):
    return DTYPES.get(backend, torch.float64)


def each_backend(*shapes, dtype=None):
    """Every pair of shape and backend, skipped with the backend's own reason where it cannot run."""
    pairs = []
    for shape in shapes:
        for backend in NAMES:
            call = Call(torch.device("cpu"), dtype or dtype_of(backend), shape[4], shape[5])
            reason = BACKENDS[backend].why_not(call)
            marks = pytest.mark.skip(reason=f"{backend}: {reason}") if reason else ()
            pairs.append(pytest.param(shape, backend, marks=marks, id=f"{shape}-{backend}"))
    return pairs


def assert_near(actual, expected):
    """Compare with float64 values, relative to the largest of them."""
    assert actual.shape == expected.shape
    if expected.numel():
        error = (actual.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error < TOLERANCES[actual.dtype]


# batch, channels, height, width, window, local window
SHAPES = [
    (2, 8, 14, 21, (7, 7), None),
    (1, 3, 14, 17, (14, 14), None),
    (2, 5, 13, 20, (5, 9), None),
    (1, 16, 10, 9, (8, 8), None),
    (1, 4, 5, 30, (7, 7), None),
    (3, 2, 11, 17, (3, 4), None),
    (1, 1, 1, 1, (7, 7), None),
    (2, 3, 6, 5, (1, 1), None),
    (2, 3, 19, 1, (2, 16), None),
    (0, 3, 14, 14, (7, 7), None),
    (2, 3, 0, 14, (7, 7), None),
    (1, 4, 16, 14, (14, 14), (7, 7)),
    (2, 3, 13, 17, (4, 6), (2, 3)),
    (1, 2, 9, 9, (6, 6), (1, 6)),
    (1, 2, 9, 9, (5, 5), (5, 5)),
]


def make(shape, dtype=torch.float64, seed=0):
    batch, channels, height, width, (wh, ww), local = shape
    generator = torch.Generator().manual_seed(seed)

    def randn(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    input = randn(batch, channels, height, width)
    weight = randn(channels, 2 * wh - 1, 2 * ww - 1)
    bias = randn(channels)
    local_weight = None if local is None else randn(channels, 2 * local[0] - 1, 2 * local[1] - 1)
    return input, weight, bias, local_weight


def by_definition(input, weight, bias, shortcut, local_weight):
    """Equation of the paper as loops over windows and pairs of positions."""
    wh, ww = (weight.shape[1] + 1) // 2, (weight.shape[2] + 1) // 2
    height, width = input.shape[2:]
    output = torch.zeros_like(input)
    for top, left in itertools.product(range(0, height, wh), range(0, width, ww)):
        positions = list(itertools.product(range(top, min(top + wh, height)), range(left, min(left + ww, width))))
        for (ho, wo), (hi, wi) in itertools.product(positions, positions):
            factor = weight[:, hi - ho + wh - 1, wi - wo + ww - 1]
            if local_weight is not None:
                lh, lw = (local_weight.shape[1] + 1) // 2, (local_weight.shape[2] + 1) // 2
                if ho // lh == hi // lh and wo // lw == wi // lw:
                    factor = factor + local_weight[:, hi - ho + lh - 1, wi - wo + lw - 1]
            output[:, :, ho, wo] += input[:, :, hi, wi] * factor
    if shortcut:
        output += input
    return output + bias[:, None, None]


@functools.cache
def defined(shape):
    """Output and gradients of the definition with the shortcut, for a random upstream gradient."""
    arguments = [t if t is None else t.requires_grad_() for t in make(shape)]
    output = by_definition(arguments[0], arguments[1], arguments[2], True, arguments[3])
    upstream = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tracked = [t for t in arguments if t is not None]
    # An empty map leaves no loop to differentiate: its gradients are zeros.
    gradients = torch.autograd.grad(output, tracked, upstream, allow_unused=True, materialize_grads=True)
    return output.detach(), upstream, gradients


@pytest.mark.parametrize(("shape", "backend"), each_backend(*SHAPES))
def test_definition(shape, backend):
    input, weight, bias, local_weight = make(shape, dtype_of(backend))
    for shortcut in (False, True):
        expected = defined(shape)[0] if shortcut else defined(shape)[0] - make(shape)[0]
        actual = wbmm2d(input, weight, bias, shortcut=shortcut, local_weight=local_weight, backend=backend)
        assert_near(actual, expected)


@pytest.mark.parametrize(("shape", "backend"), each_backend(*SHAPES))
def test_gradients_equal_those_of_the_definition(shape, backend):
    dtype = dtype_of(backend)
    tracked = [t.requires_grad_() for t in make(shape, dtype) if t is not None]
    local_weight = tracked[3] if len(tracked) > 3 else None
    _, upstream, expected = defined(shape)
    output = wbmm2d(*tracked[:3], shortcut=True, local_weight=local_weight, backend=backend)
    gradients = torch.autograd.grad(output, tracked, upstream.to(dtype))
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        assert_near(gradient, expected_gradient)


@pytest.mark.parametrize("backend", [name for name in NAMES if dtype_of(name) == torch.float64])
@pytest.mark.parametrize("shape", [(2, 2, 5, 4, (3, 2), None), (1, 2, 5, 6, (4, 4), (2, 2))], ids=str)
def test_gradcheck_and_gradgradcheck(shape, backend):
    input, weight, bias, local_weight = (t if t is None else t.requires_grad_() for t in make(shape))

    def operator(input, weight, bias, local_weight):
        return wbmm2d(input, weight, bias, shortcut=True, local_weight=local_weight, backend=backend)

    assert torch.autograd.gradcheck(operator, (input, weight, bias, local_weight))
    assert torch.autograd.gradgradcheck(operator, (input, weight, bias, local_weight))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", range(6))
def test_release_fixtures(case, backend):
    tensors = load_file(FIXTURES / "operator.safetensors")
    window = tensors[f"{case}.window"].tolist()
    input, table, grad_output = (tensors[f"{case}.{name}"] for name in ("x", "table", "grad_y"))
    weight = table.unflatten(1, (2 * window[0] - 1, 2 * window[1] - 1)).requires_grad_()
    input.requires_grad_()
    output = wbmm2d(input, weight, shortcut=True, backend=backend)
    output.backward(grad_output)
    for actual, name in ((output, "y"), (input.grad, "grad_x"), (weight.grad.flatten(1), "grad_table")):
        expected = tensors[f"{case}.{name}"]
        assert (actual - expected).abs().max() / expected.abs().max() < 1e-5, name


LOW = [torch.float32, torch.bfloat16, torch.float16]
LARGE = (2, 8, 27, 20, (14, 14), (7, 7))


@pytest.mark.parametrize(
    ("dtype", "shape", "backend"),
    [pytest.param(d, *p.values, marks=p.marks, id=f"{d}-{p.id}") for d in LOW for p in each_backend(LARGE, dtype=d)],
)
def test_low_precision_is_as_good_as_its_inputs(dtype, shape, backend):
    input, weight, bias, local_weight = make(shape, dtype)
    output = wbmm2d(input, weight, bias, shortcut=True, local_weight=local_weight, backend=backend)
    exact = wbmm2d(
        input.double(), weight.double(), bias.double(), shortcut=True, local_weight=local_weight.double(),
        backend="reference",
    )  # fmt: skip
    assert output.dtype == dtype
    # Low precision accumulates in float32 and rounds a few times; float32 rounds at each of the 14*14 sums.
    roundings = 14 if dtype == torch.float32 else 4
    assert (output.double() - exact).abs().max() / exact.abs().max() < roundings * torch.finfo(dtype).eps


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels-last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second row": lambda x: torch.repeat_interleave(x, 2, dim=2)[:, :, ::2],
    "some channels of a channels-last map": lambda x: torch.cat([x, x], 1).contiguous(
        memory_format=torch.channels_last
    )[:, : x.shape[1]],
    "expanded batch": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_layouts(layout, backend):
    input, weight, bias, _ = make((2, 6, 13, 15, (7, 7), None), dtype_of(backend))
    input = LAYOUTS[layout](input).requires_grad_()
    output = wbmm2d(input, weight, bias, backend=backend)
    assert_near(output, by_definition(input.double(), weight.double(), bias.double(), False, None))
    channels_last = "channels-last" in layout
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    assert output.is_contiguous(memory_format=wanted)
    output.sum().backward()
    assert input.grad.shape == input.shape


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3), channels=st.integers(1, 20), height=st.integers(1, 12), width=st.integers(1, 12),
    wh=st.integers(1, 6), ww=st.integers(1, 6), layout=st.sampled_from([*LAYOUTS]),
    layout_of_gradient=st.sampled_from([*LAYOUTS]), backend=st.sampled_from(NAMES),
)  # fmt: skip
def test_any_shape(batch, channels, height, width, wh, ww, layout, layout_of_gradient, backend):
    input, weight, bias, _ = make((batch, channels, height, width, (wh, ww), None), dtype_of(backend))
    tensors = [LAYOUTS[layout](input), weight, bias]
    upstream = LAYOUTS[layout_of_gradient](torch.randn_like(input))

    def gradients(backend, *tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        output = wbmm2d(*tensors, shortcut=True, backend=backend)
        return [output.detach(), *torch.autograd.grad(output, tensors, upstream.to(output.dtype))]

    actual = gradients(backend, *tensors)
    exact = [t.double() for t in tensors]
    assert_near(actual[0], by_definition(*exact, True, None))
    for value, expected in zip(actual[1:], gradients("reference", *exact)[1:], strict=True):
        assert_near(value, expected)


def test_matrix_is_the_operator_on_unit_vectors():
    _, weight, _, local_weight = make((1, 3, 4, 6, (4, 6), (2, 3)))
    units = torch.eye(24, dtype=torch.float64).reshape(24, 1, 4, 6).expand(24, 3, 4, 6)
    columns = by_definition(units, weight, torch.zeros(3, dtype=torch.float64), True, local_weight)
    matrix = build_matrix(weight, local_weight, shortcut=True)
    torch.testing.assert_close(matrix, columns.flatten(2).permute(1, 2, 0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("shape", "backend"),
    each_backend((2, 3, 9, 8, (4, 3), None), (1, 2, 8, 7, (4, 4), (2, 2)), dtype=torch.float32),
)
def test_opcheck(shape, backend):
    for layout in (torch.contiguous_format, torch.channels_last):
        input, weight, bias, local_weight = (t if t is None else t.requires_grad_() for t in make(shape, torch.float32))
        input = input.detach().contiguous(memory_format=layout).requires_grad_()
        torch.library.opcheck(torch.ops.spotlights.wbmm2d, (input, weight, bias, True, local_weight, backend))
        grad_output = torch.randn_like(input).requires_grad_()
        window = [(weight.shape[1] + 1) // 2, (weight.shape[2] + 1) // 2]
        torch.library.opcheck(torch.ops.spotlights.wbmm2d_weight_gradient, (grad_output, input, window, backend))


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("channels_last", [False, True])
def test_compiles_whole_without_recompiling(backend, channels_last):
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    def step(input, weight):
        return wbmm2d(input * 2, weight, shortcut=True, backend=backend).relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counting)
    for size in ((13, 9), (15, 22), (30, 11)):
        input, weight, _, _ = make((2, 3, *size, (4, 4), None), dtype_of(backend))
        if channels_last:
            input = input.contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(compiled(input, weight), step(input, weight))
    assert len(graphs) == 1


def test_compiles_with_inductor_and_backward():
    torch._dynamo.reset()

    def step(input, weight, bias):
        return (wbmm2d(input.sin(), weight, bias, shortcut=True) ** 2).sum()

    tensors = [t.requires_grad_() for t in make((2, 4, 9, 10, (4, 4), None), torch.float32)[:3]]
    expected = torch.autograd.grad(step(*tensors), tensors)
    actual = torch.autograd.grad(torch.compile(step, fullgraph=True)(*tensors), tensors)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("dims", [(0, None, None), (0, 0, 0), (None, 1, None), (2, None, 1)], ids=str)
def test_vmap(backend, dims):
    size = 3
    input, weight, bias, _ = make((2, 4, 6, 7, (3, 3), None), dtype_of(backend))

    def batched(tensor, dim):
        if dim is None:
            return tensor
        return torch.stack([tensor * (k + 1) for k in range(size)], dim)

    arguments = [batched(t, d) for t, d in zip((input, weight, bias), dims, strict=True)]

    def operator(input, weight, bias):
        return wbmm2d(input, weight, bias, shortcut=True, backend=backend)

    actual = torch.func.vmap(operator, in_dims=dims)(*arguments)
    for k in range(size):
        single = [t if d is None else t.select(d, k) for t, d in zip(arguments, dims, strict=True)]
        assert_near(actual[k], operator(*single).double())


def test_forward_mode():
    tensors = make((2, 3, 7, 9, (4, 4), None))[:3]
    tangents = make((2, 3, 7, 9, (4, 4), None), seed=1)[:3]
    input, weight, _ = tensors
    expected = wbmm2d(tangents[0], weight) + wbmm2d(input, tangents[1], tangents[2])
    _, tangent = torch.func.jvp(wbmm2d, tensors, tangents)
    torch.testing.assert_close(tangent, expected)
    with forward_ad.dual_level():
        output = wbmm2d(*(forward_ad.make_dual(*pair) for pair in zip(tensors, tangents, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(output).tangent, expected)


def test_per_sample_gradients():
    input, weight, _, local_weight = make((3, 4, 7, 9, (4, 4), (2, 2)))

    def loss(weight, local_weight, sample):
        return (wbmm2d(sample[None], weight, local_weight=local_weight, shortcut=True) ** 2).sum()

    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, None, 0))(weight, local_weight, input)
    for k in range(3):
        expected = torch.func.grad(loss, argnums=(0, 1))(weight, local_weight, input[k])
        torch.testing.assert_close((grads[0][k], grads[1][k]), expected)


def test_autocast():
    input, weight, bias, local_weight = make((2, 4, 9, 9, (4, 4), (2, 2)), torch.float32)
    weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = wbmm2d(input, weight, bias, local_weight=local_weight)
    assert output.dtype == torch.bfloat16
    expected = wbmm2d(input, weight, bias, local_weight=local_weight)
    assert (output - expected).abs().max() < 0.02 * expected.abs().max()
    output.float().sum().backward()
    assert weight.grad.dtype == torch.float32


def test_flop_count():
    input, weight, _, _ = make((2, 3, 14, 21, (7, 7), None))
    input.requires_grad_()
    weight.requires_grad_()
    multiply_adds = 2 * 3 * 14 * 21 * 49
    with FlopCounterMode(display=False) as counter:
        output = wbmm2d(input, weight)
        assert counter.get_total_flops() == 2 * multiply_adds
        output.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * multiply_adds


def test_meta_device():
    input, weight, bias, _ = (t if t is None else t.to("meta") for t in make((2, 4, 9, 9, (4, 4), None)))
    assert wbmm2d(input, weight, bias).shape == (2, 4, 9, 9)


def test_layout_of_ambiguous_map_is_contiguous():
    assert layout_of(torch.zeros(2, 5, 1, 1)) is torch.contiguous_format


def table(*shape):
    return torch.zeros(shape)


X = torch.zeros(2, 4, 14, 14)
REFUSED = [
    ((X[0], table(4, 13, 13)), {}, ValueError, r"input: got shape \(4, 14, 14\), expected \(B, C, H, W\)"),
    ((X.long(), table(4, 13, 13)), {}, TypeError, "input: got torch.int64, expected a floating-point dtype"),
    ((X, table(4, 13, 12)), {}, ValueError, r"weight: got shape \(4, 13, 12\).*2\*ww-1\) with C = 4"),
    ((X, table(5, 13, 13)), {}, ValueError, r"weight: got shape \(5, 13, 13\).*C = 4 for input \(2, 4, 14, 14\)"),
    ((X, table(4, 169)), {}, ValueError, r"weight: got shape \(4, 169\)"),
    ((X, None), {}, TypeError, "weight: got NoneType, expected a tensor"),
    ((X, table(4, 13, 13), table(5)), {}, ValueError, r"bias: got shape \(5,\), expected \(4,\)"),
    ((X, table(4, 13, 13).double()), {}, TypeError, "weight: got torch.float64, expected torch.float32"),
    ((X, table(4, 13, 13).to("meta")), {}, ValueError, "weight: is on meta, expected cpu"),
    ((X, table(4, 13, 13)), {"backend": "nope"}, ValueError, "backend: got 'nope', expected None or one of 'cpu'"),
    ((X, table(4, 13, 13)), {"local_weight": table(4, 5, 5)}, ValueError, r"local_weight: .*of \(3, 3\).*\(7, 7\)"),
    ((X, table(4, 13, 13)), {"local_weight": table(4, 4, 5)}, ValueError, r"local_weight: got shape \(4, 4, 5\)"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "options", "error", "message"), REFUSED, ids=[r[3][:24] for r in REFUSED])
def test_bad_arguments(arguments, options, error, message):
    with pytest.raises(error, match=message):
        wbmm2d(*arguments, **options)
