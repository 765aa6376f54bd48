"""Bootstrap intervals over test images, so that a table claims no more than its test set can carry."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_BLOCK = 1_000_000  # counts held in memory at once


def bootstrap_interval(
    correct: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean accuracy over test images.

    The interval says how much the accuracy would move with another draw of test images. Runs are averaged, not
    resampled: it does not cover the spread between trainings, and it has no width when every answer is right.

    Args:
        correct: (N,) or (runs, N) bool, whether each test image was classified correctly. With several runs the same
            images are drawn for all of them, since a hard image is hard for every run.
        level: share of the resampled means inside the interval, in (0, 1).
        resamples: number of bootstrap draws.
        seed: of the draws; equal input gives equal output.

    Raises:
        ValueError: ``correct`` has another shape or no image, ``level`` or ``resamples`` is out of range.
        TypeError: ``correct`` is not boolean.

    Example:
        >>> bootstrap_interval([True] * 985 + [False] * 15)
        (0.977, 0.992)
    """
    return _interval(_image_means("correct", correct), level, resamples, seed)


def bootstrap_difference(
    a: ArrayLike, b: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Return the bootstrap interval of ``mean(a) - mean(b)``, two accuracies on the same test images.

    Each draw takes the same images for both (a paired comparison), so what is equally hard for both cancels. When the
    interval holds 0, the test set does not rank them.

    Args:
        a: (N,) or (runs, N) bool, whether each test image was classified correctly.
        b: as ``a``, for the same N images in the same order; the number of runs may differ.
        level: as in `bootstrap_interval`.
        resamples: as in `bootstrap_interval`.
        seed: as in `bootstrap_interval`.

    Raises:
        ValueError: as `bootstrap_interval`, or the numbers of images differ.
        TypeError: an argument is not boolean.

    Example:
        >>> import numpy as np
        >>> a, b = np.ones(100, dtype=bool), np.arange(100) >= 10
        >>> low, high = bootstrap_difference(a, b)
        >>> round(low, 2), round(high, 2)
        (0.05, 0.16)
    """
    first, second = _image_means("a", a), _image_means("b", b)
    if first.size != second.size:
        raise ValueError(f"a, b: got {first.size} and {second.size} images, expected the same images in both")
    return _interval(first - second, level, resamples, seed)


def _image_means(name: str, correct: ArrayLike) -> NDArray[np.float64]:
    array = np.asarray(correct)
    if array.ndim not in (1, 2) or array.size == 0:
        raise ValueError(f"{name}: got shape {array.shape}, expected (N,) or (runs, N) with at least one image")
    if array.dtype != np.bool_:
        raise TypeError(f"{name}: got dtype {array.dtype}, expected bool (True where the answer was correct)")
    return np.atleast_2d(array).mean(axis=0)


def _interval(values: NDArray[np.float64], level: float, resamples: int, seed: int) -> tuple[float, float]:
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a number between 0 and 1, both excluded")
    if resamples < 1:
        raise ValueError(f"resamples: got {resamples}, expected at least 1")
    # Images of equal value are exchangeable: how often each value is drawn is multinomial, which has the very
    # distribution of drawing N indices, without the (resamples, N) table.
    distinct, counts = np.unique(values.round(12), return_counts=True)
    rng = np.random.default_rng(seed)
    block = max(1, _BLOCK // distinct.size)
    means = np.concatenate(
        [
            rng.multinomial(values.size, counts / values.size, size=min(block, resamples - start)) @ distinct
            for start in range(0, resamples, block)
        ]
    )
    low, high = np.quantile(means / values.size, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
