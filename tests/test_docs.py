"""The documentation builds, its commands parse, its code runs, and no command is left out."""

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from spotlights.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *PAGES]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path, language):
    text = path.read_text(encoding="utf-8")
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", code, flags=re.MULTILINE) for indent, code in found]


def commands(path):
    """Every `spotlights ...` command of the page's shell blocks, as words after the program's name."""
    for block in blocks(path, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words:
                end = words.index("&&") if "&&" in words else len(words)
                if words[:1] == ["spotlights"]:
                    yield words[1:end]
                words = words[end + 1 :]


def subparsers(parser):
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: child for action in actions for name, child in action.choices.items()}


VERBS = {(m, v): p for m, method in subparsers(build_parser()).items() for v, p in subparsers(method).items()}
COMMANDS = [(name_of(path), words) for path in TEXTS for words in commands(path)]


def test_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="needs the dev extra")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "site" / "api" / "wbmm.html").read_text(encoding="utf-8")
    for part in ("local_weight", "Returns", "Raises", "ValueError"):
        assert part in page


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}: {' '.join(words)}" for page, words in COMMANDS])
def test_command_parses(page, words):
    build_parser().parse_args(words)


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_verb_and_its_options_are_described(verb):
    pages = [path for path in PAGES if any(tuple(words[:2]) == verb for words in commands(path))]
    assert pages, f"no page shows the command {' '.join(verb)}"
    text = "\n".join(path.read_text(encoding="utf-8") for path in pages)
    options = {option for action in VERBS[verb]._actions for option in action.option_strings} - {"-h", "--help"}
    missing = [option for option in sorted(options) if not re.search(rf"`[^`\n]*{option}(?![\w-])", text)]
    assert not missing


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_named_verbs_exist(path):
    named = re.findall(r"`spotlights (\w+) (\w+)", path.read_text(encoding="utf-8"))
    assert [verb for verb in named if verb not in VERBS] == []


@pytest.mark.parametrize("path", [path for path in PAGES if blocks(path, "python")], ids=name_of)
def test_python_runs(path, tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="needs the vision extra")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(path, "python")), name_of(path), "exec"), {"__name__": "example"})
