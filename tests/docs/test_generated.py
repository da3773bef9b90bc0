"""Pages that follow from the code say what the code says now."""

from __future__ import annotations

import re
import sys

import pytest

from docs.pages import DOCS, ROOT
from fedveil import errors
from fedveil.cli import _STOPPED

sys.path.insert(0, str(ROOT))

from tools import architecture_picture, command_page

MEND = "run `make docs` (or python -m tools.{})"


def test_the_command_line_page_is_what_the_commands_say() -> None:
    stored = command_page.PAGE.read_text(encoding="utf-8")
    assert stored == command_page.page(), MEND.format("command_page")


def test_every_command_is_on_the_page() -> None:
    import typer

    from fedveil.cli.app import app

    for name in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"## fedveil {name}" in command_page.PAGE.read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_table() -> None:
    stored = architecture_picture.PICTURE.read_text(encoding="utf-8")
    assert stored == architecture_picture.picture(architecture_picture.table()), MEND.format("architecture_picture")


def test_the_picture_says_as_much_as_the_table() -> None:
    """Following the drawn arrows from any part reaches exactly what following allowed imports does."""
    allowed = architecture_picture.table()
    picture = architecture_picture.picture(allowed)
    assert set(re.findall(r'data-part="([^"]+)"', picture)) == set(allowed)
    drawn: dict[str, set[str]] = {part: set() for part in allowed}
    for one, other in re.findall(r'data-from="([^"]+)" data-to="([^"]+)"', picture):
        assert other in allowed[one]
        drawn[one].add(other)

    def reach(table: dict[str, set[str]], part: str) -> set[str]:
        return table[part].union(*(reach(table, one) for one in table[part]))

    for part in allowed:
        assert reach(drawn, part) == reach(allowed, part)


def test_arrows_point_down() -> None:
    allowed = architecture_picture.table()
    level = {part: at for at, row in enumerate(architecture_picture.layers(allowed)) for part in row}
    assert all(level[part] < level[one] for part, imports in allowed.items() for one in imports)


@pytest.mark.parametrize("part", sorted(architecture_picture.table()))
def test_every_part_has_a_word_of_explanation(part: str) -> None:
    assert part in architecture_picture._WORDS, "add it to tools/architecture_picture.py"


def test_the_exit_codes_page_has_every_error() -> None:
    page = (DOCS / "exit-codes.md").read_text(encoding="utf-8")
    named = {name: int(code) for code, name in re.findall(r"^\| (\d+) \| `(\w+)`", page, flags=re.MULTILINE)}
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.FedVeilError)]
    own = {one.__name__: one.exit_code for one in classes if "exit_code" in vars(one)}
    assert named == own
    assert f"| {_STOPPED} | |" in page
