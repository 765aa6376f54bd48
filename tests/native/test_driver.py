"""The CPU library alone, against plain loops: here, under sanitizers, and emulated on aarch64."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
CROSS_COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
REQUIRE_AARCH64 = "SPOTLIGHTS_REQUIRE_AARCH64"


def run_driver(program, compiler, flags, emulator=()):
    sources = [*(ROOT / "csrc").glob("*.cpp"), ROOT / "tests" / "native" / "driver.cpp"]
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", *flags, *sources, "-o", program]
    subprocess.run(command, check=True)
    run = subprocess.run([*emulator, program], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "worst relative error" in run.stdout


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler: install g++")
@pytest.mark.parametrize("flags", [["-O2"], ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]])
def test_driver(flags, tmp_path):
    run_driver(tmp_path / "driver", COMPILER, flags)


@pytest.mark.skipif(
    not (CROSS_COMPILER and EMULATOR) and not os.environ.get(REQUIRE_AARCH64),
    reason="no aarch64 compiler or emulator: install g++-aarch64-linux-gnu and qemu-user",
)
def test_driver_on_aarch64(tmp_path):
    assert CROSS_COMPILER, f"{REQUIRE_AARCH64} is set: install g++-aarch64-linux-gnu"
    assert EMULATOR, f"{REQUIRE_AARCH64} is set: install qemu-user"
    run_driver(tmp_path / "driver", CROSS_COMPILER, ["-O2", "-static"], [EMULATOR])
