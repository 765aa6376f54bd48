"""What a training shows while it runs: a live bar on a terminal, one line an epoch anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any


def describe(metrics: Mapping[str, float]) -> str:
    """Return metrics in one short line; accuracies as percentages.

    Example:
        >>> describe({"train_loss": 0.5, "val_accuracy": 0.975})
        'train loss 0.5000, val accuracy 97.50 %'
    """
    parts = []
    for name, value in metrics.items():
        words = name.replace("_", " ")
        parts.append(f"{words} {100 * value:.2f} %" if name.endswith("accuracy") else f"{words} {value:.4f}")
    return ", ".join(parts)


@contextmanager
def passing_bar(words: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on standard error, where that is a terminal, until the block ends; yields what takes done and total.

    Example:
        >>> with passing_bar("counting") as show:
        ...     for number in range(3):
        ...         show(number + 1, 3)
    """
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # Where both are the terminal, lines printed meanwhile appear above the bar; a redirected output stays as it is.
    shared = sys.stdout.isatty()
    with Progress(console=Console(stderr=True), transient=True, redirect_stdout=shared) as bar:
        task = bar.add_task(words, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class EpochProgress:
    """A progress display over ``epochs`` epochs of ``steps`` steps, or other units; quiet unless ``enabled``."""

    def __init__(self, epochs: int, *, unit: str = "epoch", enabled: bool = True) -> None:
        self.epochs = epochs
        self.unit = unit
        self.enabled = enabled
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> EpochProgress:
        if self.enabled and sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f} %"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, epoch: int, step: int, steps: int) -> None:
        """Show that ``step`` of ``steps`` in ``epoch`` (both from 1) are done."""
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=self.epochs * steps)
        self._bar.update(
            self._task, completed=(epoch - 1) * steps + step, description=f"{self.unit} {epoch}/{self.epochs}"
        )

    def epoch(self, epoch: int, metrics: Mapping[str, float], *, seconds: float, best: bool) -> None:
        """Report a finished epoch."""
        if not self.enabled:
            return
        width = len(str(self.epochs))
        place = f"{self.unit} {epoch:>{width}}/{self.epochs}"
        line = f"{place}  {describe(metrics)}  ({seconds:.1f} s){'  best' if best else ''}"
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def show(self, content: Any) -> None:
        """Print text or anything that rich renders, above the bar."""
        from rich.console import Console

        if self.enabled:
            console = self._bar.console if self._bar is not None else Console(highlight=False, markup=False)
            console.print(content, highlight=False, markup=False)
