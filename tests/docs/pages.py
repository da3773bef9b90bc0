"""Documents as tests see them: their code blocks, and running those as a reader would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from shell import Done, fedveil, script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of every code block of a page under docs, in order."""
    return [(found[1], found[2]) for found in _BLOCK.finditer((DOCS / page).read_text(encoding="utf-8"))]


def commands(text: str) -> list[str]:
    """The commands of a console block that are fedveil's, or call a script of ours."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    lines = [line.partition(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line.startswith(("fedveil ", "python examples/"))]


def typed(page: str, folder: Path, *, small: Mapping[str, str] | None = None) -> dict[str, str]:
    """Run a page's console and Python blocks in order, in `folder`; what each command or block has said.

    A Python or TOML block that begins with `# name.py` or `# name.toml` is saved under that name, not run. `small` says
    what to put in the place of settings that take too long for a test.
    """
    said: dict[str, str] = {}
    shrunk = dict.fromkeys(small or {}, 0)
    for language, text in blocks(page):
        for long, short in (small or {}).items():
            shrunk[long] += text.count(long)
            text = text.replace(long, short)
        named = re.match(r"# (\w+\.(?:py|toml))\n", text)
        if language in ("python", "toml") and named:
            (folder / named[1]).write_text(text, encoding="utf-8")
        elif language == "console":
            for command in commands(text):
                done = _entered(command, folder)
                assert done.code == 0, f"{command}: {done.error}"
                said[command] = " ".join(done.output.split())
        elif language == "python":
            done = script(text, folder=folder)
            assert done.code == 0, f"{text}\n{done.error}"
            said[text] = done.output
    assert all(shrunk.values()), f"{page} has nothing of {[long for long, times in shrunk.items() if not times]}"
    return said


def _entered(command: str, folder: Path) -> Done:
    program, *words = shlex.split(command)
    if program == "fedveil":
        return fedveil(*words)
    path = ROOT / words[0]
    return script(path.read_text(encoding="utf-8"), *words[1:], folder=folder, name=path.name)
