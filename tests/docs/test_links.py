"""Every relative link and anchor of the README and of everything under docs leads somewhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs.pages import DOCS, ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("[A-Z]*.md")), *sorted(DOCS.rglob("*.md"))]
PAGES = list(dict.fromkeys(PAGES))

_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", flags=re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")


def prose(path: Path) -> str:
    """A page without its code, where brackets are not links."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def links(text: str) -> list[str]:
    return _LINK.findall(_CODE.sub("", text))


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and the site make it."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words))


@cache
def anchors(path: Path) -> frozenset[str]:
    text = prose(path)
    headings = re.findall(r"^#{1,6} (.+?)#*$", text, flags=re.MULTILINE)
    named = re.findall(r"(?:id|name)=\"([^\"]+)\"", text)
    return frozenset([*(slug(one) for one in headings), *named])


def broken(page: Path) -> list[str]:
    found = []
    for link in links(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[x](gone.md) [y](#a-b-c) [z](#nowhere) `[code](gone.md)` [w](page.md#a-b-c)\n")
    assert broken(page) == ["gone.md: no such file", "#nowhere: no such heading"]


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_of_the_site_do_not_point_out_of_it(page: Path) -> None:
    """What lies outside docs is not on the site: a link to it works on GitHub alone."""
    for link in links(prose(page)):
        if not re.match(r"[a-z]+:|#", link):
            assert (page.parent / link.partition("#")[0]).resolve().is_relative_to(DOCS), link
