import time

import numpy as np
import pytest
import torch

from spotlights.runtime.bench import Timing, control_kernel, interleave, machine_line


def test_timing_summaries():
    timing = Timing(seconds=(4.0, 1.0, 2.0, 3.0))
    assert timing.minimum == 1.0
    assert timing.median == 2.5
    assert timing.quantile(0.25) == 1.75


def test_measures_known_durations():
    timings = interleave({"short": lambda: time.sleep(0.006), "long": lambda: time.sleep(0.018)}, rounds=5)
    assert list(timings) == ["short", "long"]
    assert len(timings["short"].seconds) == len(timings["long"].seconds) == 5
    assert 0.006 <= timings["short"].minimum < 0.012
    assert 0.018 <= timings["long"].minimum < 0.036
    assert timings["short"].calls == 1
    assert timings["short"].discarded == 0


def test_fast_functions_are_repeated_within_a_sample():
    matrix = torch.ones(8, 8)
    timing = interleave({"tiny": lambda: matrix + 1}, rounds=3, min_seconds=0.005)["tiny"]
    assert timing.calls > 50
    assert timing.calls * max(timing.seconds) >= 0.0025
    assert timing.minimum < 1e-3  # per call, not per sample


def test_every_round_runs_every_function_once_in_changing_order():
    seen: list[str] = []

    def record(name: str):
        def function() -> None:
            seen.append(name)
            time.sleep(0.001)

        return function

    names = ["a", "b", "c"]
    interleave({name: record(name) for name in names}, rounds=12, warmup=0, min_seconds=0.0005)
    rounds = np.array(seen[-36:]).reshape(12, 3)
    assert all(sorted(row) == names for row in rounds)
    assert len({tuple(row) for row in rounds}) > 1


def test_disturbed_rounds_are_discarded_and_repeated():
    calls = 0
    disturbed = False

    def control() -> None:
        nonlocal calls, disturbed
        calls += 1
        disturbed = calls in (6, 7, 10, 11)  # calibration takes 3, then each round 2
        time.sleep(0.06 if disturbed else 0.02)

    timing = interleave({"work": lambda: time.sleep(0.05 if disturbed else 0.006)}, rounds=4, control=control)["work"]
    assert timing.discarded >= 2
    assert 1 <= len(timing.seconds) <= 4
    assert max(timing.seconds) < 0.05


def test_gives_up_on_a_machine_that_never_calms_down():
    pauses = iter([0.008] * 5 + [0.04] * 100)  # three for calibration, then one calm round
    timing = interleave(
        {"work": lambda: time.sleep(0.006)}, rounds=3, control=lambda: time.sleep(next(pauses)), seed=1
    )["work"]
    assert timing.discarded == 8
    assert len(timing.seconds) == 1


def test_control_kernel_does_fixed_work():
    assert torch.equal(control_kernel()(), torch.full((256, 256), 64.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_events_time_the_device():
    matrix = torch.ones(4096, 4096, device="cuda")
    timings = interleave({"one": lambda: matrix @ matrix, "two": lambda: matrix @ matrix @ matrix}, device="cuda")
    assert timings["two"].median / timings["one"].median == pytest.approx(2, rel=0.3)


@pytest.mark.parametrize(("arguments", "message"), [({"functions": {}}, "functions"), ({"rounds": 0}, "rounds: got 0")])
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        interleave(**{"functions": {"work": int}, **arguments})


def test_machine_line_names_what_ran():
    line = machine_line()
    assert f"{torch.get_num_threads()} thread" in line
    assert f"torch {torch.__version__}" in line
    assert "core" in line
    assert "\n" not in line
    assert not line.startswith(",")


def test_slow_functions_get_fewer_samples_but_three():
    seen = []
    timings = interleave(
        {"slow": lambda: time.sleep(0.03), "quick": lambda: time.sleep(0.006)},
        rounds=8,
        max_seconds=0.05,
        on_round=lambda done, wanted: seen.append((done, wanted)),
    )
    assert len(timings["slow"].seconds) == 3
    assert len(timings["quick"].seconds) in (7, 8)
    assert seen[-1] == (len(seen), len(seen))
