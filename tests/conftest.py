"""Fixtures shared by all tests: a headless browser that looks at the pages we write."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",  # Chromium refuses to sandbox itself as root, as in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and CHROMIUM is None:
        pytest.skip("no browser found: install chromium: apt-get install chromium")


def run_chromium(body: str, *flags: str, dark: bool = False) -> str:
    """Open a bare page with this body and return what Chromium prints.

    Pages are looked at inside a frame because a Chromium window cannot be narrower than 500 pixels.
    """
    assert CHROMIUM is not None
    flags += ("--force-dark-mode",) * dark
    with tempfile.TemporaryDirectory(prefix="browser-") as folder:
        shell = Path(folder) / "shell.html"
        style = ":root { color-scheme: light dark } body { margin: 0 } iframe { display: block; border: 0 }"
        shell.write_text(f'<!doctype html><meta charset="utf-8"><style>{style}</style>{body}', encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/profile", *flags, shell.as_uri()]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


@pytest.fixture(scope="session")
def browser_screenshot() -> Callable[..., Path]:
    """Function (path_or_url, png_path, width=1280, height=1600, dark=False) that takes a picture of a page."""

    def screenshot(
        page: str | Path, png: str | Path, width: int = 1280, height: int = 1600, dark: bool = False
    ) -> Path:
        url = page if isinstance(page, str) and "://" in page else Path(page).resolve().as_uri()
        frame = f'<iframe src="{html.escape(url)}" width="{width}" height="{height}"></iframe>'
        target = Path(png).resolve()
        run_chromium(frame, f"--window-size={width},{height}", f"--screenshot={target}", dark=dark)
        assert target.exists(), f"{CHROMIUM} wrote no screenshot of {url}"
        return target

    return screenshot


@pytest.fixture(scope="session")
def browser_evaluate() -> Callable[..., Any]:
    """Function (path, expression, width=1280, dark=False): a JavaScript expression's value as JSON.

    The expression sees the loaded page as ``page`` (its document) and ``view`` (its window).
    """

    def evaluate(path: str | Path, expression: str, width: int = 1280, dark: bool = False) -> Any:
        source = html.escape(Path(path).read_text(encoding="utf-8"))
        script = (
            "frame.onload = () => { const page = frame.contentDocument, view = frame.contentWindow;"
            f"answer.textContent = JSON.stringify({expression}) }};"
        )
        body = (
            f'<pre id="answer"></pre><iframe id="frame" width="{width}" height="900"></iframe>'
            f'<script>{script}</script><script>frame.srcdoc = document.getElementById("source").content'
            ".textContent</script>"
        )
        template = f'<template id="source">{source}</template>'
        printed = run_chromium(template + body, "--window-size=1600,1000", "--dump-dom", dark=dark)
        answer = printed.partition('<pre id="answer">')[2].partition("</pre>")[0]
        return json.loads(html.unescape(answer))

    return evaluate
