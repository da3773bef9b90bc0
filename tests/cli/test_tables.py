"""Tables on terminals of any width: no word is broken, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.cli import tables
from shell import fedveil

_WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=20), max_size=12).map(" ".join)


@given(
    rows=st.lists(st.tuples(_WORDS.filter(bool), _WORDS, _WORDS), min_size=1, max_size=4),
    width=st.integers(40, 120),
    ruled=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_word_is_broken_and_none_is_lost(rows: list[tuple[str, str, str]], width: int, ruled: bool) -> None:
    tables.console.width = width
    try:
        with tables.console.capture() as shown:
            tables.table("What there is", ("name", "what it is", "needs"), rows, ruled=ruled)
    finally:
        tables.console._width = None
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for word in " ".join(cell for row in rows for cell in row).split():
        assert words.count(word) >= 1, (word, lines)
        words.remove(word)


@pytest.mark.parametrize("columns", [60, 80])
def test_what_can_be_run_again_is_readable_on_a_usual_terminal(columns: int) -> None:
    shown = fedveil("reproduce", "--list", columns=columns)
    assert max(map(len, shown.output.splitlines())) <= columns
    for words in ("nadp-table3", "60 values", "ten minutes on a GPU", "the package cryptography"):
        assert words in " ".join(shown.output.split()), words
