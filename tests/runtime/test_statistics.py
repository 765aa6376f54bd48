import tracemalloc

import numpy as np
import pytest

from spotlights.runtime.statistics import bootstrap_difference, bootstrap_interval


def answers(right: int, total: int) -> np.ndarray:
    return np.arange(total) < right


# 2.5 % and 97.5 % quantiles (5 % and 95 %, where level is .9) of the binomial distribution, divided by N.
@pytest.mark.parametrize(
    ("right", "total", "level", "low", "high"),
    [
        (985, 1000, 0.95, 0.977, 0.992),
        (985, 1000, 0.90, 0.978, 0.991),
        (500, 1000, 0.95, 0.469, 0.531),
        (9200, 10_000, 0.95, 0.9146, 0.9253),
        (18, 20, 0.95, 0.75, 1.0),
    ],
)
def test_one_run_is_the_binomial_interval(right, total, level, low, high):
    interval = bootstrap_interval(answers(right, total), level=level, resamples=100_000)
    assert interval == pytest.approx((low, high), abs=1.01 / total)


def test_agrees_with_drawing_indices():
    rng = np.random.default_rng(1)
    correct = rng.random((3, 300)) < 0.9
    drawn = correct[:, rng.integers(0, 300, size=(20_000, 300))].mean(axis=(0, 2))
    assert bootstrap_interval(correct, resamples=20_000) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.002)


def test_repeating_a_run_adds_no_information():
    run = answers(450, 500)
    assert bootstrap_interval(np.stack([run] * 5)) == bootstrap_interval(run)


def test_independent_runs_narrow_the_interval():
    runs = np.random.default_rng(0).random((4, 2000)) < 0.8
    low, high = bootstrap_interval(runs)
    alone_low, alone_high = bootstrap_interval(runs[0])
    assert (high - low) / (alone_high - alone_low) == pytest.approx(0.5, abs=0.05)
    assert low < runs.mean() < high


def test_all_right_has_no_width():
    assert bootstrap_interval(np.ones(50, dtype=bool)) == (1.0, 1.0)


def test_difference_pairs_the_images():
    a = answers(900, 1000)
    b = answers(890, 1000)
    low, high = bootstrap_difference(a, b, resamples=50_000)
    # Ten discordant images: Binomial(1000, 0.01), quantiles 4 and 17; unpaired it would span about 0.054.
    assert (low, high) == pytest.approx((0.004, 0.017), abs=0.0011)
    assert bootstrap_difference(b, a, resamples=50_000) == pytest.approx((-high, -low), abs=0.0011)
    assert bootstrap_difference(a, a) == (0.0, 0.0)


def test_difference_takes_unequal_numbers_of_runs():
    a = answers(90, 100)
    assert bootstrap_difference(np.stack([a, a, a]), np.stack([a, a])) == (0.0, 0.0)


def test_same_seed_same_interval():
    correct = answers(77, 100)
    assert bootstrap_interval(correct, seed=3) == bootstrap_interval(correct, seed=3)


def test_memory_stays_bounded():
    correct = np.random.default_rng(0).random((40, 50_000)) < 0.9
    tracemalloc.start()
    bootstrap_interval(correct, resamples=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"correct": [1, 0]}, TypeError, "correct: got dtype int64, expected bool"),
        ({"correct": np.ones((2, 2, 2), dtype=bool)}, ValueError, r"correct: got shape \(2, 2, 2\)"),
        ({"correct": np.ones((3, 0), dtype=bool)}, ValueError, r"correct: got shape \(3, 0\)"),
        ({"correct": [True], "level": 95}, ValueError, "level: got 95"),
        ({"correct": [True], "resamples": 0}, ValueError, "resamples: got 0"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        bootstrap_interval(**arguments)


def test_difference_needs_the_same_images():
    with pytest.raises(ValueError, match="a, b: got 3 and 4 images"):
        bootstrap_difference(answers(1, 3), answers(1, 4))
