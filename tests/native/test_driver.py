"""The CPU library alone, built with sanitizers, against plain loops."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++")
@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]])
def test_driver(flags, tmp_path):
    program = tmp_path / "driver"
    sources = [ROOT / "csrc" / "wbmm.cpp", ROOT / "tests" / "native" / "driver.cpp"]
    command = [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", *flags, *sources, "-o", program]
    subprocess.run(command, check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "worst relative error" in run.stdout
