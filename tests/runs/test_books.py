"""The journal of spent privacy: whatever a kill leaves of it, nothing that was shown is forgotten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from federation import job
from fedveil.errors import CheckpointError
from fedveil.protocol.phases import RoundBegins
from fedveil.runs import privacy_journal
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, privacy_journal_of, train_job
from fedveil.runs.privacy_journal import JournalFile, PrivacyJournal
from fedveil.uplink import noise_plan


def _job() -> Job:
    return job(scheme="nadp", rounds=3, loss=None)


@pytest.fixture
def run() -> Job:
    return _job()


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


_PLAN = {"plan": {"target": {"epsilon": 8.0, "rounds": 3}, "strength": None}, "reach": {"0": 2.0}, "samples": {"0": 40}}
_LINES = [
    _PLAN,
    {"joined": {"3": [40, 2.0]}},
    {"begin": [0, 0], "cohort": [0, 3], "graph": "ab"},
    {"end": [0, 0], "arrived": None, "revealed": []},
]


@pytest.mark.parametrize("last", range(len(_LINES)), ids=lambda last: next(iter(_LINES[last])))
@pytest.mark.parametrize("zeros", [0, 3], ids=["killed", "zeros"])
def test_a_kill_at_any_byte_and_again_at_any_byte_leaves_all_whole_lines(tmp_path: Path, last: int, zeros: int) -> None:
    """Torn, resumed with a plan that is torn at every byte, and once more; then a plan and a round stand, and count."""
    journal = tmp_path / "privacy.jsonl"

    def attempt(*entries: dict[str, object]) -> list[dict[str, object]]:
        file = JournalFile(journal)
        known = file.entries()
        for entry in entries:
            file.write(entry)
        return known

    attempt(*_LINES[:last])
    before = journal.read_bytes() if last else b""
    attempt(_LINES[last])
    line = journal.read_bytes()[len(before) :]
    journal.write_bytes(before)
    attempt(_PLAN)
    plan = journal.read_bytes()[len(before) :].rstrip(b"\n")
    torn = [line[:cut] + bytes(zeros) for cut in range(len(line) - 1)]
    again = [plan[:cut] + bytes(zeros) for cut in range(len(plan))]
    pairs = [*((first, again[len(again) // 2]) for first in torn), *((torn[-1], second) for second in again)]
    for first, second in pairs:
        for rest in ([first], [first, second, second]):
            journal.unlink()  # a new file is not flushed when it is closed
            journal.write_bytes(before + b"\n".join(rest))
            assert attempt() == _LINES[:last], rest
    attempt(_PLAN, _LINES[2])
    assert attempt() == [*_LINES[:last], _PLAN, _LINES[2]]


def test_a_second_line_that_cannot_be_read_and_is_no_plan_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "privacy.jsonl"
    journal.write_text('{"begin":[0,0],"coh\n{"end":[0,0],"arr')
    with pytest.raises(ValueError, match="line 1 "):
        JournalFile(journal).entries()


class Killed(BaseException):
    """A run that is killed."""


def _killed(run: Job, folder: RunFolder, *, attempt: int) -> None:
    """An attempt that dies when its first round is over, before metrics tell of that."""
    state = fresh_state(run)
    state.attempt = attempt

    def end(row: object, now: object) -> None:
        raise Killed

    with pytest.raises(Killed):
        train_job(run, state=state, journal=folder.privacy_journal, on_round=end)


@pytest.fixture(scope="module")
def killed_thrice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a run that was killed three times; the journal as each attempt left it."""
    run, journals = _job(), []
    folder = RunFolder(tmp_path_factory.mktemp("killed") / "run", engine="flower")
    folder.start(run.config)
    for attempt in range(3):
        _killed(run, folder, attempt=folder.resume(run.config) if attempt else 0)
        journals.append(folder.privacy_journal.read_text())
    return folder.path, journals


@pytest.fixture
def attempts(killed_thrice: tuple[Path, list[str]], tmp_path: Path) -> tuple[RunFolder, list[str]]:
    """A copy of it."""
    path, journals = killed_thrice
    return RunFolder(Path(shutil.copytree(path, tmp_path / "run")), engine="flower"), journals


@pytest.mark.parametrize("back", [0, 1, None], ids=["first", "second", "lost"])
def test_a_journal_put_back_to_an_earlier_attempt_is_refused(
    run: Job, attempts: tuple[RunFolder, list[str]], back: int | None
) -> None:
    folder, journals = attempts
    folder.resume(run.config)
    privacy_journal_of(run, folder.privacy_journal, fresh_state(run))
    folder.privacy_journal.unlink()
    if back is not None:
        folder.privacy_journal.write_text(journals[back])
    with pytest.raises(CheckpointError, match=r"attempts\.json"):
        privacy_journal_of(run, folder.privacy_journal, fresh_state(run))
    assert json.loads((folder.path / "attempts.json").read_text())["engine"] == "flower"


def test_a_journal_that_had_digests_is_not_taken_for_one_from_before(
    run: Job, attempts: tuple[RunFolder, list[str]]
) -> None:
    folder, journals = attempts
    lines = _dated(journals[-1].splitlines())
    folder.privacy_journal.write_text("\n".join([*lines[:-1], _by_hand(lines[-1])]) + "\n")
    with pytest.raises(CheckpointError, match=r"attempts\.json"):
        privacy_journal_of(run, folder.privacy_journal, fresh_state(run))
    (folder.path / "attempts.json").write_text('{"attempts": 3, "engine": "flower"}')  # as older versions leave it
    privacy_journal_of(run, folder.privacy_journal, fresh_state(run))


def test_an_attempt_killed_before_it_asked_anybody_is_no_reason_to_refuse(
    run: Job, attempts: tuple[RunFolder, list[str]]
) -> None:
    """It has no plan in the journal, or half of one: there are more attempts than plans, and nothing is missing."""
    folder, _ = attempts
    whole = spent(run, folder.privacy_journal)
    for torn in ("", '{"plan":{"tar', '{"plan"'):
        folder.resume(run.config)
        with folder.privacy_journal.open("a") as file:
            file.write(torn)
        privacy_journal_of(run, folder.privacy_journal, fresh_state(run))
    assert spent(run, folder.privacy_journal) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("mark", [[], [1], "1", {}, [0, ""], [10**9, "00"], [-1, "00"], [1, None]], ids=str)
def test_a_mark_that_is_none_refuses_without_a_traceback(
    run: Job, attempts: tuple[RunFolder, list[str]], mark: object
) -> None:
    folder, _ = attempts
    (folder.path / "attempts.json").write_text(json.dumps({"attempts": 3, "engine": "local", "journal": mark}))
    with pytest.raises(CheckpointError, match=r"attempts\.json"):
        privacy_journal_of(run, folder.privacy_journal, fresh_state(run))


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


@pytest.mark.parametrize("kept", [(), ("draws",), ("draws", "graph")], ids=["before", "unreleased", "now"])
def test_rounds_from_before_there_were_circles_stay_what_they_were(
    kept: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_plan, "COMPLETE_UP_TO", 16)
    monkeypatch.setattr(privacy_journal, "COMPLETE_UP_TO", 16)
    noise_plan._noise_layout.cache_clear()
    one, journal = job(scheme="nadp", rounds=3, loss=None, clients=24), tmp_path / "privacy.jsonl"
    assert one.scheme.plan is not None
    circle = one.scheme.plan.circle(24)
    assert circle is not None
    PrivacyJournal(one, journal).begin(RoundBegins(0, 0, tuple(range(24)), bytes(32)))
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert lines[0]["plan"]["graph"] == "circle"
    for name in {"draws", "graph"}.difference(kept):
        del lines[0]["plan"][name]
    journal.write_text("".join(json.dumps(line) + "\n" for line in _unchained(lines)))
    if kept == ("draws",):
        with pytest.raises(CheckpointError, match="unreleased version"):
            PrivacyJournal(one, journal)
        return
    books = PrivacyJournal(one, journal)
    assert books.first is not None
    assert len(books.first.pairs) == (24 * circle.degree // 2 if "graph" in kept else 24 * 23 // 2)
    if "graph" in kept:
        assert privacy_journal_of(one, journal, fresh_state(one)).first is not None
        return
    assert any("before there was one" in note for note in books.ledger(rounds=1).notes)
    with pytest.raises(CheckpointError, match="by other rules"):
        privacy_journal_of(one, journal, fresh_state(one))


def _unchained(lines: list[dict[str, object]]) -> list[dict[str, object]]:
    """As journals were written before lines had digests."""
    return [{name: value for name, value in line.items() if name != "chain"} for line in lines]
