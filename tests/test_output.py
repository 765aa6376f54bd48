"""Where a command's output goes: full, closed, or of a narrow encoding, it ends in one line and no traceback."""

import os
import subprocess
import sys

import pytest

from spotlights.runtime.errors import is_out_of_memory

INFO = [sys.executable, "-m", "spotlights.cli", "info"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_full_device():
    with open("/dev/full", "w") as full:
        done = subprocess.run(INFO, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "spotlights: error: [Errno 28] No space left on device\n"


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_closed_output():
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *INFO], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_output_that_knows_ascii_alone():
    program = "from spotlights.cli import main; main(['info']); print('ä')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "\\xe4"


def test_lack_of_memory_is_known_from_other_errors():
    message = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    assert is_out_of_memory(RuntimeError(message))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shapes differ"))
