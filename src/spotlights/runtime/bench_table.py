"""Measured times as a table: one row a case and provider, kept as CSV with what each number was measured on.

The columns before ``provider`` name the case, so any operator's benchmark can use the same file format.
"""

from __future__ import annotations

import csv
import io
import math
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spotlights import __version__
from spotlights.runtime.bench import Timing, machine_line
from spotlights.runtime.errors import UserError
from spotlights.runtime.native import LEVELS, load
from spotlights.runtime.runs import write

Row = dict[str, Any]
LOW = "seconds_q25"  # the quantile that ratios are taken of
ENVIRONMENT = ("machine", "torch", "threads", "commit", "cpu_level")
_NEEDED = ("provider", LOW, "control_seconds", *ENVIRONMENT)


def environment(device: torch.device | str = "cpu") -> Row:
    """Return what numbers depend on besides the case: machine, torch, threads, commit, level of the CPU library.

    Example:
        >>> environment()["torch"] == torch.__version__
        True
    """
    library = load()
    level = "none" if isinstance(library, str) else LEVELS[library.level]
    values = (machine_line(device), torch.__version__, str(torch.get_num_threads()), commit(), level)
    return dict(zip(ENVIRONMENT, values, strict=True))


def commit() -> str:
    """Return the commit of this package's source, with ``+changes`` where files differ from it, or its version."""
    here = Path(__file__)

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True)

    try:
        # An installed copy may lie inside somebody else's repository.
        if git("ls-files", "--error-unmatch", here.name).returncode:
            return f"v{__version__}"
        changed = git("diff", "--quiet", "HEAD", "--", ":/src", ":/csrc").returncode
        return git("rev-parse", "--short=10", "HEAD").stdout.strip() + ("+changes" if changed else "")
    except OSError:
        return f"v{__version__}"


def measures(timing: Timing) -> Row:
    """Return the columns of a timing: seconds per call, samples, calls a sample, discarded rounds.

    Example:
        >>> measures(Timing(seconds=(0.25, 0.5, 0.375)))["seconds_q25"]
        0.3125
    """
    quantiles = {f"seconds_q{round(100 * q)}": timing.quantile(q) for q in (0.1, 0.25, 0.75)}
    return {
        "seconds_min": timing.minimum,
        **quantiles,
        "seconds_median": timing.median,
        "samples": len(timing.seconds),
        "calls": timing.calls,
        "discarded": timing.discarded,
    }


def peak_bytes(function: Callable[[], object], device: torch.device | str = "cpu") -> Row:
    """Return the most memory that one call holds beyond what was there before, under a name that says who counted.

    ``peak_bytes_cuda`` is ``torch.cuda.max_memory_allocated``; ``peak_bytes_profiler`` adds up the allocations and
    releases that torch's profiler sees, which leaves out memory that a library takes by itself.

    Example:
        >>> x = torch.ones(1000)
        >>> peak_bytes(lambda: (x + x) + x)["peak_bytes_profiler"] >= 8000
        True
    """
    where = torch.device(device)
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        torch.cuda.reset_peak_memory_stats(where)
        before = torch.cuda.memory_allocated(where)
        function()
        torch.cuda.synchronize(where)
        return {"peak_bytes_profiler": None, "peak_bytes_cuda": torch.cuda.max_memory_allocated(where) - before}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    trace = getattr(profile.profiler, "kineto_results", None)
    events = [] if trace is None else [event for event in trace.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return {"peak_bytes_profiler": most, "peak_bytes_cuda": None}


def case_of(row: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the case that a row belongs to: its columns before ``provider``.

    Example:
        >>> case_of({"batch": 4, "provider": "ours", "seconds_q25": 0.5})
        (('batch', 4),)
    """
    names = list(row)
    return tuple((name, row[name]) for name in names[: names.index("provider")])


def by_case(rows: Iterable[Row]) -> dict[tuple[tuple[str, Any], ...], list[Row]]:
    """Return the rows of each case, in order."""
    cases: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    for row in rows:
        cases.setdefault(case_of(row), []).append(row)
    return cases


def format_table(rows: Sequence[Row]) -> str:
    """Return rows as CSV; None becomes an empty field, and floats keep every digit."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def read_table(path: str | Path) -> list[Row]:
    """Return the rows of a CSV that :func:`format_table` made.

    Raises:
        UserError: no such file, or no table of measured times.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read it: {getattr(error, 'strerror', None) or error}") from error
    reader = csv.DictReader(io.StringIO(text))
    if missing := [name for name in _NEEDED if name not in (reader.fieldnames or ())]:
        raise UserError(f"{path}: no table of measured times (it has no column {missing[0]})")
    rows = []
    for raw in reader:
        if None in raw or None in raw.values():
            raise UserError(f"{path}: line {reader.line_num}: got another number of fields than columns")
        row = {name: value if name in ENVIRONMENT else _parse(value) for name, value in raw.items()}
        if any(not _positive(row[name]) for name in (LOW, "control_seconds")):
            raise UserError(f"{path}: line {reader.line_num}: got {raw[LOW]!r} seconds, expected a positive number")
        rows.append(row)
    return rows


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _parse(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text or None


class Results:
    """Rows that are kept in a CSV file, written anew after each case; an earlier file of the same kind is gone on with.

    Args:
        path: the file, or None to keep nothing.
        fixed: columns that all rows of the file must share with this run, such as :func:`environment`.

    Raises:
        UserError: the file is unreadable, or was measured otherwise.
    """

    def __init__(self, path: Path | None, fixed: Row) -> None:
        self.path = path
        self.rows: list[Row] = []
        if path is None or not path.exists():
            return
        self.rows = read_table(path)
        for row in self.rows:
            for name, value in fixed.items():
                if row.get(name) != value:
                    raise UserError(
                        f"{path} was measured with {name} = {row.get(name)!r}, this run has {value!r}; "
                        "name another folder by --out"
                    )

    def has(self, case: tuple[tuple[str, Any], ...]) -> bool:
        """Tell whether the case is there."""
        return any(case_of(row) == case for row in self.rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of one case and write the file, whole or not at all."""
        self.rows.extend(rows)
        if self.path is not None:
            write(self.path, format_table(self.rows))


@dataclass(frozen=True)
class Change:
    """How one provider's time in one case differs from an earlier one.

    Attributes:
        case: as `case_of` gives it.
        provider: its name.
        before: seconds then.
        now: seconds now.
        ratio: now / before, each divided by the control kernel's seconds of its own run.
    """

    case: tuple[tuple[str, Any], ...]
    provider: str
    before: float
    now: float
    ratio: float


def compare(rows: Iterable[Row], baseline: Iterable[Row]) -> list[Change]:
    """Return how each row differs from the baseline's row of the same case and provider, where there is one.

    Example:
        >>> then = [{"batch": 1, "provider": "ours", "seconds_q25": 0.5, "control_seconds": 1.0}]
        >>> now = [{"batch": 1, "provider": "ours", "seconds_q25": 0.5, "control_seconds": 0.5}]
        >>> compare(now, then)[0].ratio
        2.0
    """
    earlier = {(case_of(row), row["provider"]): row for row in baseline}
    changes = []
    for row in rows:
        key = (case_of(row), row["provider"])
        if (old := earlier.get(key)) is not None:
            ratio = row[LOW] / row["control_seconds"] / (old[LOW] / old["control_seconds"])
            changes.append(Change(*key, before=old[LOW], now=row[LOW], ratio=ratio))
    return changes
