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
    PrivacyJournal(run, journal).begin(RoundBegins(2, 0, (0, 1, 2, 3, 4), bytes(32)))
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


def _by_hand(line: str) -> str:
    """A round declared to be one that everybody declined, as exactly as somebody who read a journal would do it."""
    entry = json.loads(line)
    return json.dumps({"end": entry["end"], "void": True}, separators=(",", ":")) if "end" in entry else line


def _dated(lines: list[str]) -> list[str]:
    """A journal from before lines had digests."""
    entries = [json.loads(line) for line in lines]
    return [json.dumps({key: entry[key] for key in entry if key != "chain"}) for entry in entries]


@pytest.mark.parametrize("dated", [False, True], ids=["chained", "from before"])
@pytest.mark.parametrize("number", [2, 4, 6])
def test_a_round_declared_void_by_hand_is_noticed(run: Job, tmp_path: Path, number: int, dated: bool) -> None:
    journal = tmp_path / "privacy.jsonl"
    outcome = train_job(run, state=fresh_state(run), journal=journal)
    lines = journal.read_text().splitlines()
    lines = _dated(lines) if dated else lines
    journal.write_text("\n".join([*lines[:number], _by_hand(lines[number]), *lines[number + 1 :]]) + "\n")
    with pytest.raises(CheckpointError):  # the last line has none after it: there the metrics tell
        PrivacyJournal(run, journal).check_rounds(row["round"] for row in outcome.rows)


@pytest.mark.parametrize("cut", [(1, 3), (3, 5), (2, 3), (1, 2)])
def test_lines_cut_from_the_middle_are_noticed(run: Job, tmp_path: Path, cut: tuple[int, int]) -> None:
    journal = tmp_path / "privacy.jsonl"
    train_job(run, state=fresh_state(run), journal=journal)
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[: cut[0]], *lines[cut[1] :]]) + "\n")
    with pytest.raises(CheckpointError):
        PrivacyJournal(run, journal)


def test_a_journal_from_before_goes_on_and_its_lines_are_covered_from_then_on(run: Job, tmp_path: Path) -> None:
    journal = tmp_path / "privacy.jsonl"
    train_job(run, state=fresh_state(run), journal=journal)
    whole, old = spent(run, journal), _dated(journal.read_text().splitlines())
    journal.write_text("\n".join(old) + "\n")
    assert spent(run, journal) == pytest.approx(whole, rel=1e-12)
    PrivacyJournal(run, journal).begin(RoundBegins(3, 0, (0, 1, 2, 3, 4), bytes(32)))
    assert spent(run, journal) == pytest.approx(whole * 4 / 3, rel=1e-9)
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join([*lines[:1], *lines[3:]]) + "\n")
    with pytest.raises(CheckpointError):
        PrivacyJournal(run, journal)
    journal.write_text("\n".join([*lines, *old[1:3]]) + "\n")  # what has no digest cannot come after what has one
    with pytest.raises(CheckpointError):
        PrivacyJournal(run, journal)
