"""Depthwise convolutions turned into WBMM: what is exact, what is refused, and the way back."""

import copy
import csv
import importlib.util
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from spotlights.wbmm import ConvertedDepthwise2d, convert_depthwise, wbmm2d


def depthwise(channels=3, kernel=7, dilation=1, bias=True, **options):
    sides = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    steps = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    options.setdefault("padding", tuple(d * (k // 2) for k, d in zip(sides, steps, strict=True)))
    options = {"groups": channels, "bias": bias, "dtype": torch.float64} | options
    return nn.Conv2d(channels, channels, kernel, dilation=dilation, **options)


def mixed(dtype=torch.float32):
    """7x7 (twice), 5x5, 3x3 and strided depthwise convolutions between dense ones."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        depthwise(6, 7, dtype=dtype),
        nn.Sequential(nn.GELU(), depthwise(6, 5, bias=False, dtype=dtype), nn.Conv2d(6, 8, 1)),
        depthwise(8, 3, dtype=dtype),
        depthwise(8, 5, stride=2, dtype=dtype),
        depthwise(8, 7, dtype=dtype),
        nn.Dropout(0.5),
        nn.AdaptiveAvgPool2d(1),
    ).to(dtype)


def responses(layer, size):
    """Matrix [c, output position, input position] of the linear part, from one impulse a position."""
    height, width = size
    channels = layer.op.channels if isinstance(layer, ConvertedDepthwise2d) else layer.out_channels
    impulses = torch.eye(height * width, dtype=torch.float64).view(height * width, 1, height, width)
    impulses = impulses.expand(-1, channels, -1, -1)
    with torch.no_grad():
        output = layer(impulses) - layer(torch.zeros_like(impulses))
    return output.flatten(2).permute(1, 2, 0)


def positions(size):
    return torch.cartesian_prod(torch.arange(size[0]), torch.arange(size[1]))


KERNELS = [
    {"kernel": 7},
    {"kernel": 13, "bias": False},
    {"kernel": 3},
    {"kernel": (5, 11)},
    {"kernel": (1, 9)},
    {"kernel": 5, "dilation": 3},
    {"kernel": (3, 5), "dilation": (5, 2), "bias": False},
    {"kernel": 7, "padding": "same"},
]


@pytest.mark.parametrize("keep_local", [True, False])
@pytest.mark.parametrize("options", KERNELS, ids=str)
def test_exact_on_maps_of_one_window(options, keep_local):
    convolution = depthwise(**options)
    converted = ConvertedDepthwise2d(convolution, keep_local=keep_local)
    assert (converted.op.bias is None) == (convolution.bias is None)
    for size in ((7, 7), (5, 7), (1, 3)):
        torch.testing.assert_close(responses(converted, size), responses(convolution, size), rtol=0, atol=1e-14)
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        torch.testing.assert_close(converted(x), convolution(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", KERNELS, ids=str)
@pytest.mark.parametrize("size", [(9, 16), (14, 13)])
def test_exact_for_neighbours_and_inside_windows_on_any_map(options, size):
    convolution = depthwise(**options)
    expected, place = responses(convolution, size), positions(size)
    distance = (place[:, None] - place[None]).abs().amax(-1)
    same_window = (place[:, None] // 7 == place[None] // 7).all(-1)
    for keep_local, exact in ((True, same_window | (distance <= 1)), (False, same_window)):
        found = responses(ConvertedDepthwise2d(convolution, keep_local=keep_local), size)
        torch.testing.assert_close(found, torch.where(exact, expected, 0), rtol=0, atol=1e-14)
    assert expected[:, distance <= 1].abs().sum() > 0


def test_other_windows():
    convolution = depthwise(4, (5, 9))
    for window in ((3, 5), (4, 8), 14, (1, 5)):
        if window == (1, 5):
            convolution = depthwise(4, (1, 9))
        converted = ConvertedDepthwise2d(convolution, window)
        size = converted.op.window_size
        torch.testing.assert_close(responses(converted, size), responses(convolution, size), rtol=0, atol=1e-14)


def test_the_centre_is_moved_not_copied():
    convolution = depthwise(3, 5)
    converted = ConvertedDepthwise2d(convolution)
    assert torch.equal(converted.local.weight, convolution.weight[:, :, 1:4, 1:4])
    assert converted.op.weight[:, 5:8, 5:8].eq(0).all()
    table = converted.op.weight + F.pad(converted.local.weight[:, 0], (5, 5, 5, 5))
    assert torch.equal(table, F.pad(convolution.weight[:, 0], (4, 4, 4, 4)))
    assert list(converted.state_dict()) == ["op.weight", "op.bias", "local.weight"]
    assert converted.op.weight.dtype == torch.float64
    x = torch.randn(1, 3, 20, 15, dtype=torch.float64)
    alone = wbmm2d(x, converted.op.weight, backend="reference") + convolution.bias[:, None, None]
    torch.testing.assert_close(converted(x), alone + F.conv2d(x, converted.local.weight, padding=1, groups=3))


def test_drift_is_what_the_lost_pairs_make():
    """On white noise the relative drift squared is the lost share of squared kernel entries, pair by pair."""
    torch.manual_seed(0)
    convolution = depthwise(16, 7, bias=False)
    x = torch.randn(8, 16, 28, 28, dtype=torch.float64)
    expected = convolution(x)
    drift = {
        keep: ((ConvertedDepthwise2d(convolution, keep_local=keep)(x) - expected).norm() / expected.norm()).item()
        for keep in (True, False)
    }
    for keep, found in drift.items():
        full = responses(convolution, (28, 28))
        lost = full - responses(ConvertedDepthwise2d(convolution, keep_local=keep), (28, 28))
        assert found == pytest.approx((lost.norm() / full.norm()).item(), rel=0.02)
    assert 0.4 < drift[True] < drift[False] < 0.8


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (depthwise(4, 7, stride=2), "stride 2x2"),
        (depthwise(4, 4, padding=1), "even kernel 4x4"),
        (depthwise(4, (7, 6)), "even kernel 7x6"),
        (depthwise(4, 3), "kernel 3x3 below min_kernel_size=5"),
        (depthwise(4, 15), "kernel 15x15 needs window_size=(8, 8)"),
        (depthwise(4, (5, 7), dilation=3), "kernel 5x7 with dilation 3x3 needs window_size=(7, 10)"),
        (depthwise(4, 7, padding=2), "padding (2, 2), 'same' would be (3, 3)"),
        (depthwise(4, 7, padding="valid"), "padding valid, 'same' would be (3, 3)"),
        (depthwise(4, 7, padding_mode="reflect"), "padding_mode 'reflect'"),
        (nn.Conv2d(4, 8, 7, padding=3, groups=4), "4 to 8 channels in 4 groups"),
        (nn.utils.parametrizations.weight_norm(depthwise(4, 7)), "parametrised, hooked or patched"),
    ],
)
def test_left_with_a_reason(layer, reason):
    model = nn.Sequential(nn.ReLU(), layer)
    report = convert_depthwise(model, dry_run=True)
    assert [tuple(left) for left in report.left] == [("1", reason)]
    with pytest.raises(ValueError, match="nothing to convert") as error:
        convert_depthwise(model)
    assert str(error.value) == f"convert_depthwise: nothing to convert: {reason}: 1"
    assert model[1] is layer
    if "min_kernel_size" not in reason:
        with pytest.raises(ValueError, match="ConvertedDepthwise2d: convolution: "):
            ConvertedDepthwise2d(layer)


def forward_hook(layer):
    layer.register_forward_hook(lambda module, args, output: 2 * output)


def backward_hook(layer):
    layer.register_full_backward_hook(lambda module, input, output: None)


def patched(layer):
    layer.forward = lambda x: x


@pytest.mark.parametrize("change", [forward_hook, backward_hook, patched, nn.utils.spectral_norm])
def test_layers_that_somebody_changed_are_left(change):
    layer = depthwise(4, 7)
    change(layer)
    report = convert_depthwise(nn.Sequential(layer), dry_run=True)
    assert report.left == (("0", "parametrised, hooked or patched"),)


def test_what_our_blocks_fold_is_left_to_them():
    timm = pytest.importorskip("timm")
    pytest.importorskip("spotlights.wbmm.models")
    with pytest.raises(ValueError, match=r"its LocalBranches folds it: stages\.3\.blocks\.0\.op\.conv5"):
        convert_depthwise(timm.create_model("wbmm_pico", num_classes=2))


def test_nothing_to_convert_is_said_briefly():
    with pytest.raises(ValueError, match=r"^convert_depthwise: nothing to convert: the model has no depthwise"):
        convert_depthwise(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=2)))
    with pytest.raises(ValueError, match=r"stride 2x2: 0 and 2 more; kernel 3x3 below min_kernel_size=5: 3$"):
        convert_depthwise(nn.Sequential(*(depthwise(2, 3, stride=2) for _ in range(3)), depthwise(2, 3)))
    with pytest.raises(ValueError, match="it is the model itself, which cannot be replaced in place: the model"):
        convert_depthwise(depthwise(2, 7))
    tied = nn.Sequential(depthwise(2, 7), depthwise(2, 7))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="its weight belongs to another layer too: 0 and 1 more"):
        convert_depthwise(tied)
    model = mixed()
    convert_depthwise(model)
    with pytest.raises(ValueError, match="nothing to convert"):
        convert_depthwise(model)


@pytest.mark.parametrize("keep_local", [True, False])
def test_the_local_path_is_not_converted_again(keep_local):
    model = mixed()
    convert_depthwise(model, keep_local=keep_local)
    report = convert_depthwise(model, min_kernel_size=3)
    assert [layer.name for layer in report.layers] == ["4"]
    assert report.left == (("5", "stride 2x2"),)


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"convert_depthwise: window_size: got \(7, 0\)"):
        convert_depthwise(mixed(), window_size=(7, 0))
    with pytest.raises(ValueError, match="measure: needs an input_size"):
        convert_depthwise(mixed(), measure=True)
    with pytest.raises(ValueError, match=r"input_size: got \(1, 3, 0, 8\)"):
        convert_depthwise(mixed(), input_size=(1, 3, 0, 8))
    with pytest.raises(ValueError, match="min_kernel_size: got '5'"):
        convert_depthwise(mixed(), min_kernel_size="5")
    with pytest.raises(TypeError, match=r"model: got dict, expected an nn\.Module"):
        convert_depthwise({})
    model = mixed()
    with pytest.raises(ValueError, match=r"input_size: the model fails on an input 1x4x20x20: .*channels"):
        convert_depthwise(model, input_size=(4, 20, 20))
    assert isinstance(model[2], nn.Conv2d)
    assert model.training
    assert not model[2]._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:`?torch.jit:DeprecationWarning", "ignore:`?torch.jit:FutureWarning")
def test_a_scripted_model_is_refused():
    scripted = torch.jit.script(nn.Sequential(depthwise(3, 7)))
    with pytest.raises(TypeError, match=r"expected an nn\.Module that is not scripted"):
        convert_depthwise(scripted)


def test_converted_in_inference_mode_it_still_trains():
    model = mixed()
    with torch.inference_mode():
        convert_depthwise(model)
    model(torch.randn(1, 3, 20, 20)).sum().backward()
    assert model[2].op.weight.grad.abs().sum() > 0


def test_filter_sees_only_what_could_be_converted():
    model, seen = mixed(), []

    def without_the_last(module, name):
        seen.append((type(module), name))
        return name != "6"

    report = convert_depthwise(model, module_filter_fn=without_the_last)
    assert seen == [(nn.Conv2d, "2"), (nn.Conv2d, "3.1"), (nn.Conv2d, "6")]
    assert [layer.name for layer in report.layers] == ["2", "3.1"]
    assert ("6", "module_filter_fn said no") in report.left
    assert isinstance(model[2], ConvertedDepthwise2d)
    assert isinstance(model[6], nn.Conv2d)


def test_subclasses_are_judged_by_what_they_compute():
    layers = pytest.importorskip("timm.layers")
    same = layers.Conv2dSame(4, 4, 5, groups=4)
    assert same.padding == (0, 0)
    model = nn.Sequential(same, layers.ScaledStdConv2d(4, 4, 5, padding=2, groups=4))
    expected = same(x := torch.randn(1, 4, 7, 7))
    report = convert_depthwise(model)
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.left == (("1", "ScaledStdConv2d computes something else than a convolution of the same size"),)
    torch.testing.assert_close(model[0](x), expected)
    assert convert_depthwise(nn.Sequential(layers.Conv2dSame(4, 4, 5, stride=2, groups=4)), dry_run=True).left == (
        ("0", "stride 2x2"),
    )


def test_a_shared_module_stays_shared():
    shared = depthwise(4, 7, dtype=torch.float32)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    report = convert_depthwise(model)
    assert [layer.name for layer in report.layers] == ["a"]
    assert model["a"] is model["b"][0]
    x = torch.randn(1, 4, 7, 7)
    torch.testing.assert_close(model["b"](model["a"](x)), shared(shared(x)))
    report.undo()
    assert model["a"] is model["b"][0] is shared


def test_dry_run_changes_nothing():
    model = mixed()
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    random = torch.get_rng_state()
    report = convert_depthwise(model, dry_run=True, input_size=(40, 56), measure=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert list(model.modules()) == modules
    assert model.training
    assert all(module.training for module in modules)
    assert all(not module._forward_pre_hooks for module in modules)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    report.undo()
    assert list(model.modules()) == modules


def test_undo_restores_state_and_outputs_to_the_bit():
    model = mixed().eval()
    x = torch.randn(2, 3, 40, 33)
    state, output, modules = copy.deepcopy(model.state_dict()), model(x), list(model.modules())
    report = convert_depthwise(model)
    assert not torch.equal(model(x), output)
    model.train()
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    report.undo()
    assert list(model.modules()) == modules
    assert all(module.training for module in model.modules())
    untouched = {name: tensor for name, tensor in state.items() if name.startswith(("2.", "3.1.", "6."))}
    assert len(untouched) == 5
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in untouched.items())
    model.load_state_dict(state)
    assert torch.equal(model.eval()(x), output)
    report.undo()


def test_undo_refuses_a_model_changed_meanwhile():
    model = mixed()
    report = convert_depthwise(model)
    model[6] = nn.Identity()
    with pytest.raises(ValueError, match="undo: 6 of Sequential is no longer the converted layer"):
        report.undo()
    assert isinstance(model[2], ConvertedDepthwise2d)


def test_undo_follows_the_dtype():
    model = mixed()
    report = convert_depthwise(model)
    model.double().eval()
    report.undo()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert not any(module.training for module in model.modules())


def test_state_dict_round_trip(tmp_path):
    model = mixed()
    convert_depthwise(model, keep_local=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.randn(2, 3, 20, 20)).square().mean().backward()
    optimizer.step()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = mixed()
    convert_depthwise(fresh, keep_local=True)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    x = torch.randn(1, 3, 30, 22)
    assert torch.equal(fresh.eval()(x), model.eval()(x))
    for other in (copy.deepcopy(model), saved_whole(model)):
        assert torch.equal(other(x), model(x))
        with torch.no_grad():
            other[2].op.weight.add_(1)
        assert not torch.equal(other(x), model(x))
    with pytest.raises(RuntimeError, match=r"2\.local\.weight"):
        mixed().load_state_dict(model.state_dict())


def saved_whole(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_gradients_flow_and_agree_with_the_convolution():
    convolution = depthwise(3, 5)
    converted = ConvertedDepthwise2d(convolution)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64, requires_grad=True)
    output = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    expected = torch.autograd.grad(convolution(x), [x, convolution.weight, convolution.bias], output)
    found = torch.autograd.grad(converted(x), [x, *converted.parameters()], output)
    by_name = dict(zip(["x", *(name for name, _ in converted.named_parameters())], found, strict=True))
    torch.testing.assert_close(by_name["x"], expected[0])
    torch.testing.assert_close(by_name["op.weight"][:, 4:9, 4:9], expected[1][:, 0])
    torch.testing.assert_close(by_name["local.weight"], expected[1][:, :, 1:4, 1:4])
    torch.testing.assert_close(by_name["op.bias"], expected[2])
    small = ConvertedDepthwise2d(depthwise(2, 3), 2)
    assert torch.autograd.gradcheck(small, torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True))


def test_frozen_layers_stay_frozen_and_modes_are_kept():
    model = mixed().eval()
    model[2].requires_grad_(False)
    model[6].bias.requires_grad_(False)
    convert_depthwise(model)
    assert not any(parameter.requires_grad for parameter in model[2].parameters())
    wanted = {name: parameter.requires_grad for name, parameter in model[6].named_parameters()}
    assert wanted == {"op.weight": True, "op.bias": False, "local.weight": True}
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("keep_local", [True, False])
def test_channels_last_stays_channels_last(keep_local):
    convolution = depthwise(8, 7, dtype=torch.float32)
    converted = ConvertedDepthwise2d(convolution, keep_local=keep_local)
    x = torch.randn(2, 8, 9, 10)
    plain = converted(x)
    assert plain.is_contiguous()
    for module in (converted, copy.deepcopy(converted).to(memory_format=torch.channels_last)):
        output = module(x.to(memory_format=torch.channels_last))
        assert output.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-5)


def test_autocast():
    model = mixed()
    convert_depthwise(model)
    x = torch.randn(2, 3, 32, 32)
    exact = model.eval()(x)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(x)
        model.train()(x).float().sum().backward()
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), exact, rtol=0.1, atol=0.05)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_compiles_without_a_break():
    converted = ConvertedDepthwise2d(depthwise(4, 7, dtype=torch.float32)).eval()
    compiled = torch.compile(converted, fullgraph=True, backend="aot_eager")
    x = torch.randn(1, 4, 15, 9)
    torch.testing.assert_close(compiled(x), converted(x))
    compiled(x).sum().backward()
    assert converted.op.weight.grad.abs().sum() > 0


def test_exports_for_any_size():
    model = nn.Sequential(depthwise(3, 7, dtype=torch.float32), nn.ReLU()).eval()
    convert_depthwise(model)
    free = torch.export.Dim.DYNAMIC
    exported = torch.export.export(model, (torch.randn(2, 3, 20, 16),), dynamic_shapes=({0: free, 2: free, 3: free},))
    x = torch.randn(3, 3, 9, 30)
    torch.testing.assert_close(exported.module()(x), model(x))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_half_precision(dtype, error):
    exact = depthwise(3, 7)
    x = torch.randn(2, 3, 7, 7, dtype=dtype)
    model = nn.Sequential(copy.deepcopy(exact).to(dtype)).eval()
    convert_depthwise(model)
    assert model(x).dtype == dtype
    torch.testing.assert_close(model(x).double(), exact(x.double()), rtol=error, atol=error)


def test_after_folding_a_norm_into_the_convolution():
    convolution, norm = depthwise(3, 7, bias=False).eval(), nn.BatchNorm2d(3, dtype=torch.float64).eval()
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    model = nn.Sequential(nn.utils.fuse_conv_bn_eval(convolution, norm))
    convert_depthwise(model)
    x = torch.randn(2, 3, 7, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), norm(convolution(x)), rtol=1e-12, atol=1e-13)


def test_report():
    model = mixed()
    report = convert_depthwise(model, window_size=(7, 14), dry_run=True, input_size=(3, 46, 60))
    first, second, third = report.layers
    assert (first.name, first.channels, first.kernel_size, first.map_size) == ("2", 6, (7, 7), (23, 30))
    assert first.macs_before == 6 * 23 * 30 * 49
    assert first.macs_after == 6 * (28 * 42 * 98 + 23 * 30 * 9)
    assert first.padding == pytest.approx(28 * 42 / (23 * 30))
    assert (second.name, second.kernel_size) == ("3.1", (5, 5))
    assert (third.name, third.channels, third.map_size) == ("6", 8, (12, 15))
    assert report.input_size == (1, 3, 46, 60)
    lines = str(report).splitlines()
    assert lines[0] == "input 1x3x46x60"
    assert lines[1].split()[:4] == ["layer", "channels", "kernel", "dilation"]
    assert len({line.index("7x14") for line in lines[2:5]}) == 1
    assert lines[5:] == ["left: 4 (kernel 3x3 below min_kernel_size=5)", "left: 5 (stride 2x2)"]
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [row["layer"] for row in rows] == ["2", "3.1", "6", "4", "5"]
    assert rows[0]["map"] == "23x30"
    assert int(rows[0]["macs_after"]) == first.macs_after
    assert rows[4]["left_because"] == "stride 2x2"
    assert str(convert_depthwise(nn.ReLU(), dry_run=True)) == "no depthwise convolution"


def test_a_layer_that_the_run_does_not_reach_has_no_map():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = depthwise(3, 7, dtype=torch.float32), depthwise(3, 7, dtype=torch.float32)

        def forward(self, x):
            return self.used(x)

    used, spare = convert_depthwise(Unused(), dry_run=True, input_size=14).layers
    assert used.map_size == (14, 14)
    assert (spare.map_size, spare.macs_before, spare.macs_after, spare.padding) == (None, None, None, None)


def test_measured_speeds():
    model = nn.Sequential(*(depthwise(4, 13, dtype=torch.float32) for _ in range(3))).to(
        memory_format=torch.channels_last
    )
    report = convert_depthwise(model, input_size=(2, 4, 14, 14), measure=True)
    _, first, second = (layer.seconds for layer in report.layers)
    assert first == second  # layers of one kind are timed once
    assert all(0 < seconds < 1 for seconds in first)
    assert report.layers[0].batch == 2
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "x)" in str(report)
    assert model.training
    assert model[0].op.training


def test_known_networks_with_real_weights_and_images():
    """ImageNet weights on photographs: what moves to the 3x3 path loses nothing, and moving is not copying."""
    path = Path(__file__).parents[2] / "benchmarks" / "wbmm-conversion" / "run.py"
    spec = importlib.util.spec_from_file_location("conversion_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    if not (benchmark.CACHE / "elpv").exists() or not (benchmark.CACHE / "weights").exists():
        pytest.skip("needs the data that tests/data/fetch.sh fetches")
    images, defective = benchmark.solar_cells(112)
    assert (len(images), int(defective.sum())) == (2624, 821)
    images = benchmark.normalised(images[:4])
    drifts = {}
    for name, (_, min_kernel_size) in benchmark.PRETRAINED.items():
        network = benchmark.pretrained(name)
        rows = benchmark.drift_rows(name, "ImageNet", "solar cells", network, images, min_kernel_size)
        drifts[name] = [row["drift"] for row in rows]
    moved, without, twice = drifts["mobilenet_v2"]
    assert moved < 1e-4  # its kernels are 3x3
    assert min(without, twice) > 0.3
    moved, without, twice = drifts["tf_efficientnet_lite0"]
    assert 0.01 < moved < without < twice
