"""The passing bar shows on a terminal only."""

import contextlib
import os
import sys

from spotlights.runtime.progress import passing_bar


def everything_from(terminal: int) -> bytes:
    """Read until the other side is closed: what it wrote arrives in pieces, and the end is an error."""
    pieces = []
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 65536):
            pieces.append(piece)
    return b"".join(pieces)


def test_bar_on_a_terminal_and_lines_above_it(monkeypatch, capfd):
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with passing_bar("counting") as show:
            show(1, 4)
            print("a line for the file")
    shown = everything_from(ours).decode()
    os.close(ours)
    assert "counting" in shown
    assert "25%" in shown
    assert "a line" not in shown
    assert capfd.readouterr().out == "a line for the file\n"


def test_no_bar_elsewhere(capfd):
    with passing_bar("counting") as show:
        show(1, 4)
    assert capfd.readouterr() == ("", "")
