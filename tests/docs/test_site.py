"""The site builds without a warning, and asks no network for anything when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import ROOT

pytest.importorskip("material", reason="the site needs the extra docs: pip install 'fedveil[docs]'")
pytest.importorskip("mkdocstrings", reason="the site needs the extra docs: pip install 'fedveil[docs]'")

_FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_has_its_pages(site: Path) -> None:
    for page in ("index", "tutorial", "mathematics", "command-line", "python", "results/index", "how-to/own-scheme"):
        assert (site / f"{page}.html").is_file()


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    found = {
        str(page.relative_to(site)): addresses
        for page in site.rglob("*.html")
        if (addresses := _FETCHED.findall(page.read_text(encoding="utf-8")))
    }
    assert found == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"@import|url\([\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_a_page_that_asked_the_network_would_be_found() -> None:
    assert _FETCHED.findall('<link rel="stylesheet" href="https://fonts.example/x.css">') == [
        "https://fonts.example/x.css"
    ]


def test_the_reference_is_made_from_docstrings(site: Path) -> None:
    text = (site / "python.html").read_text(encoding="utf-8")
    assert "federatedly on each client" in text
    assert 'id="fedveil.train"' in text
