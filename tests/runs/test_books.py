"""The journal of spent privacy: whatever a kill leaves of it, nothing that was shown is forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from federation import job
from fedveil.errors import CheckpointError
from fedveil.protocol.phases import RoundBegins
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal


@pytest.fixture
def run() -> Job:
    return job(scheme="nadp", rounds=3, loss=None)


def spent(one: Job, journal: Path) -> float:
    accountant = PrivacyJournal(one, journal).accountant
    assert accountant is not None
    return accountant.worst("server")[1] ** 2


def test_a_journal_read_again_says_what_was_spent(run: Job, tmp_path: Path) -> None:
    journal = tmp_path / "privacy.jsonl"
    outcome = train_job(run, state=fresh_state(run), journal=journal)
    assert outcome.privacy_journal.accountant is not None
    assert spent(run, journal) == pytest.approx(outcome.privacy_journal.accountant.worst("server")[1] ** 2, rel=1e-12)
    assert spent(run, tmp_path / "absent.jsonl") == 0.0


@pytest.mark.parametrize("torn", ["{", '{"begin":[1,0],"coho', '{"end":[2,0],"arr', "\0\0\0"])
def test_what_is_written_after_a_torn_line_counts(run: Job, tmp_path: Path, torn: str) -> None:
    """Killed while writing, resumed, and resumed again: the second attempt's rounds are in the third's books."""
    journal = tmp_path / "privacy.jsonl"
    train_job(run, state=fresh_state(run), journal=journal)
    whole = spent(run, journal)
    with journal.open("a") as file:
        file.write(torn)
    privacy_journal = PrivacyJournal(run, journal)  # the second attempt begins a round, and is killed in it
    privacy_journal.begin(RoundBegins(2, 1, (0, 1, 2, 3, 4), bytes(32)))
    assert spent(run, journal) == pytest.approx(whole * 4 / 3, rel=1e-9)


def test_a_round_that_began_and_never_ended_counts_and_so_does_each_repetition(run: Job, tmp_path: Path) -> None:
    journal = tmp_path / "privacy.jsonl"
    train_job(run, state=fresh_state(run), journal=journal)
    whole = spent(run, journal)
    lines = journal.read_text().splitlines()
    last = next(number for number in range(len(lines) - 1, 0, -1) if "end" in json.loads(lines[number]))
    journal.write_text("\n".join([*lines[:last], *lines[last + 1 :]]) + "\n")
    assert spent(run, journal) == pytest.approx(whole, rel=1e-9)
    # As if the number of attempts had been lost: the same round and attempt, begun twice.
    begun = next(line for line in reversed(lines) if "begin" in json.loads(line))
    with journal.open("a") as file:
        file.write(begun + "\n")
    assert spent(run, journal) == pytest.approx(whole * 4 / 3, rel=1e-9)


def _flipped(line: str) -> str:
    return line.replace('":', '";', 1)


def _cut(line: str) -> str:
    return line[: len(line) // 2]


@pytest.mark.parametrize("harm", [_flipped, _cut, lambda line: ""], ids=["flipped", "cut", "gone"])
@pytest.mark.parametrize("what", ["begin", "end"])
def test_no_damaged_line_lowers_what_was_spent(run: Job, tmp_path: Path, what: str, harm: Callable[[str], str]) -> None:
    """Every line but the last that was written: it is refused, or the round is charged as if all had been seen."""
    journal = tmp_path / "privacy.jsonl"
    train_job(run, state=fresh_state(run), journal=journal)
    whole, lines = spent(run, journal), journal.read_text().splitlines()
    for number in [place for place, line in enumerate(lines[:-1]) if what in json.loads(line)]:
        journal.write_text("\n".join([*lines[:number], harm(lines[number]), *lines[number + 1 :]]) + "\n")
        with suppress(CheckpointError):
            assert spent(run, journal) >= whole * (1 - 1e-9)
