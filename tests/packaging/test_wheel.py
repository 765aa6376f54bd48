"""The wheel: one for every Python and torch, and installable without a compiler."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INPUTS = ("csrc", "src", "setup.py", "pyproject.toml", "README.md", "LICENSE")
WBMM_TESTS = [ROOT / "tests" / "wbmm" / name for name in ("test_operator.py", "test_layers.py", "test_cpu.py")]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at Linux libraries, hides Linux compilers")


def install(folder, **environment):
    """Build a wheel with what is installed here, from a copy: a build folder would hold an older library."""
    for name in INPUTS:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / "source" / name, ignore=shutil.ignore_patterns("lib", "*.egg-info"))
        else:
            shutil.copy(path, folder / "source")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder / "wheels"]
    subprocess.run([*build, folder / "source"], check=True, env=os.environ | environment)
    wheels = list((folder / "wheels").iterdir())
    assert len(wheels) == 1
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", folder / "site", *wheels], check=True)
    return wheels[0].name, folder / "site"


def run(site, *arguments):
    """Run Python with the package in ``site`` in place of the one under test."""
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler: install g++")
def test_one_wheel_serves_every_python_and_torch(tmp_path):
    name, site = install(tmp_path)
    assert "-py3-none-linux_" in name
    library = site / "spotlights" / "lib" / "libspotlights.so"
    dynamic = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = {line.split("[")[1].split(".so")[0] for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc", "libm", "libstdc++", "libgcc_s"}
    symbols = ["nm", "-D", "--undefined-only", library]
    undefined = subprocess.run(symbols, check=True, capture_output=True, text=True).stdout
    assert "aligned_alloc" in undefined
    assert not [word for word in undefined.split() if word.startswith(("Py", "_Py", "_ZN2at", "_ZN3c10", "_ZN5torch"))]
    assert "loaded" in run(site, "-m", "spotlights.cli", "info")


def test_without_a_compiler_the_operator_runs_on_torch(tmp_path):
    _, site = install(tmp_path, CC="/bin/false", CXX="/bin/false")
    assert not list(site.rglob("*.so"))
    assert run(site, "-c", "import spotlights; print(spotlights.__file__)").startswith(str(site))
    reason = "the CPU library was not built: no C++ compiler when the package was installed"
    assert f"cpu library      {reason}" in run(site, "-m", "spotlights.cli", "info")
    report = run(site, "-m", "pytest", "-p", "no:cacheprovider", *WBMM_TESTS)
    assert reason in report
    assert " passed" in report
