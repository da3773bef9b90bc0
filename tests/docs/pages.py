"""Documents as tests see them: their code blocks, and running those as a reader would type them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from shell import fedveil, script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every code block of a page under docs, in order."""
    return [(found[1], found[2]) for found in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))]


def commands(text: str) -> list[str]:
    """The fedveil commands of a console block."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [line.partition(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line.startswith("fedveil ")]


def typed(page: str, folder: Path) -> dict[str, str]:
    """Run a page's console and Python blocks in order, in `folder`; what each command or block has said.

    A Python block that begins with `# name.py` is saved under that name, not run.
    """
    said: dict[str, str] = {}
    for language, text in blocks(page):
        if language == "console":
            for command in commands(text):
                done = fedveil(*shlex.split(command)[1:])
                assert done.code == 0, f"{command}: {done.error}"
                said[command] = " ".join(done.output.split())
        elif language == "python":
            named = re.match(r"# (\w+\.py)\n", text)
            if named:
                (folder / named[1]).write_text(text, encoding="utf-8")
                continue
            done = script(text, folder=folder)
            assert done.code == 0, f"{text}\n{done.error}"
            said[text] = done.output
    return said
