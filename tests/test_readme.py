"""The READMEs: their code runs, their commands and code agree, and what they link to exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
READMES = ("README.md", "README.zh-CN.md")
COMMANDS = ("pip install '.[vision]' && spotlights wbmm demo", "pip install '.[all,dev]' && pytest")


def blocks(name, language):
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_there_is_code():
    assert len(blocks("README.md", "python")) >= 2


@pytest.mark.parametrize("number", range(len(blocks("README.md", "python"))))
def test_python_runs(number, tmp_path):
    pytest.importorskip("timm", reason="needs the vision extra")
    # Each in a process of its own, as a reader who copies one block alone.
    code = blocks("README.md", "python")[number]
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("language", ["python", "sh", "bibtex"])
def test_languages_agree(language):
    ours, theirs = (blocks(name, language) for name in READMES)
    assert ours == theirs


@pytest.mark.parametrize("name", READMES)
def test_the_two_commands_stand_alone(name):
    assert [block.strip() for block in blocks(name, "sh")][:2] == list(COMMANDS)


def test_ci_runs_the_test_command():
    assert f'test_command="{COMMANDS[1]}"' in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", READMES)
def test_backend_table_is_complete(name):
    from spotlights.wbmm.backends import BACKENDS

    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [backend.name for backend in BACKENDS]


@pytest.mark.parametrize("name", [*READMES, "CONTRIBUTING.md", "src/spotlights/wbmm/README.md"])
def test_link_targets_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"""(?:src|href)=["']([^"']+)["']""", text)
    files = {target.partition("#")[0] for target in targets if "://" not in target} - {""}
    missing = [file for file in sorted(files) if not ((ROOT / name).parent / file).exists()]
    assert not missing


def test_anchors_exist():
    for name in READMES:
        for file, anchor in re.findall(r"\]\(([^)\s:#]+\.md)#([^)\s]+)\)", (ROOT / name).read_text(encoding="utf-8")):
            headings = re.findall(r"^#+ (.+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{name}: {file}#{anchor}"
