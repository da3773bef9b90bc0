"""What the books say when something went wrong: a lost journal, a policy that ends a run, an interruption."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from federation import job
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.ledger import caveats
from fedveil.protocol.phases import RoundBegins
from fedveil.runs import session
from fedveil.runs.callbacks import Callback, StopTraining
from fedveil.runs.folder import read_ledger
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal


def small(**settings: object) -> RunConfig:
    given = {
        "scheme": "nadp",
        "dropouts": "tolerate",
        "clients": 4,
        "rounds": 4,
        "seed": 1,
        "evaluate_every": 0,
        "checkpoint_every": 1,
        "model_options": {"depth": 2, "width": 8},
    }
    return RunConfig.from_mapping({**given, **settings})


@pytest.mark.parametrize("kept", [0, 3])
def test_a_lost_or_shortened_journal_is_refused_and_not_taken_for_privacy_to_spend(tmp_path: Path, kept: int) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    journal = tmp_path / "run" / "privacy.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:kept]))
    with pytest.raises(CheckpointError, match=r"privacy.jsonl tells of .* but the checkpoint is of round 4"):
        session.resume(tmp_path / "run", changes={"rounds": 6}, quiet=True)


def test_a_journal_that_tells_of_fewer_rounds_than_the_metrics_is_refused(tmp_path: Path) -> None:
    session.run(small(checkpoint_every=2), tmp_path / "run", quiet=True)
    run = tmp_path / "run"
    for file in (run / "summary.json", *sorted((run / "checkpoints").glob("round-00000004*"))):
        file.unlink()
    journal = run / "privacy.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    third = next(number for number, line in enumerate(lines) if json.loads(line).get("begin") == [2, 0])
    journal.write_text("".join(lines[:third]))
    with pytest.raises(CheckpointError, match=r"but metrics.jsonl has rows of 4"):
        session.resume(run, quiet=True)


def test_a_round_that_every_clients_policy_declined_is_not_charged(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("max_epsilon = 2.0\n")
    summary = session.run(small(scheme="ldp", dropouts=None, policy=str(policy)), tmp_path / "run", quiet=True)
    assert "limit is 2" in summary["stopped"]
    ledger = read_ledger(tmp_path / "run")
    assert ledger.rounds == summary["rounds"] < 4
    assert ledger.line("server").epsilon is not None
    assert ledger.line("server").epsilon <= 2.0  # type: ignore[operator]
    entries = [json.loads(line) for line in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert entries[-1]["void"] is True
    again = session.resume(tmp_path / "run", quiet=True)
    assert again["ledger"]["lines"][0]["epsilon"] == ledger.line("server").epsilon


def test_a_run_that_was_killed_can_be_asked_what_it_has_spent(tmp_path: Path) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    whole = read_ledger(tmp_path / "run")
    (tmp_path / "run" / "ledger.json").unlink()
    found = read_ledger(tmp_path / "run")
    assert found.line("server") == whole.line("server")
    assert "has not ended" in found.notes[0]


class _Stopping(Callback):
    def round(self, row: dict[str, object]) -> None:
        raise StopTraining("enough")


def test_a_ledger_of_an_earlier_attempt_does_not_stand_for_one_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    session.run(small(), run, quiet=True, follow=[_Stopping()])
    before = read_ledger(run)
    begin = PrivacyJournal.begin

    def killed(self: PrivacyJournal, begins: RoundBegins) -> None:
        begin(self, begins)
        raise KeyboardInterrupt

    monkeypatch.setattr(PrivacyJournal, "begin", killed)
    with pytest.raises(KeyboardInterrupt):
        session.resume(run, quiet=True)
    after = read_ledger(run)
    assert (before.rounds, after.rounds) == (1, 2)
    assert after.line("server").epsilon > before.line("server").epsilon  # type: ignore[operator]


def test_rounds_begun_again_are_told_and_the_papers_figure_keeps_its_rounds(tmp_path: Path) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    before = read_ledger(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    # As if killed before its end: a finished run's model would stay, with all of its rounds.
    for lost in (newest, tmp_path / "run" / "model.safetensors", tmp_path / "run" / "summary.json"):
        lost.unlink()
    session.resume(tmp_path / "run", changes={"rounds": 40}, quiet=True)
    after = read_ledger(tmp_path / "run")
    assert any("not in the model" in note and ": 1;" in note for note in after.notes)
    assert after.rounds == 4
    assert before.paper is not None
    assert after.paper is not None
    assert after.paper.saving == before.paper.saving


def test_a_run_in_which_every_round_failed_is_an_error() -> None:
    one = job(scheme="nadp", loss=None, rounds=3, clients=12, simulate_dropout=0.3, epsilon=1.0)
    with pytest.raises(ProtocolError, match="Every round failed; the last because"):
        train_job(one, state=fresh_state(one))


def test_with_a_roster_the_ledger_says_so(tmp_path: Path) -> None:
    from fedveil.runs.terms import create_identities

    roster = create_identities(tmp_path / "keys", clients=4)
    session.run(small(roster=str(roster)), tmp_path / "run", quiet=True)
    assumed = read_ledger(tmp_path / "run").line("server").assumptions
    assert caveats.ROSTER in assumed
    assert caveats.KEYS not in assumed


def test_secret_sampling_is_not_resumed_with_another_number_of_rounds(tmp_path: Path) -> None:
    settings = small(scheme="ldp", dropouts=None, secret_sampling=0.3, epsilon=0.5, rounds=2)
    session.run(settings, tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="rounds = 2"):
        session.resume(tmp_path / "run", changes={"rounds": 20}, quiet=True)


def test_secret_sampling_does_not_go_with_dropout() -> None:
    import torch
    from torch import nn

    from fedveil.downlink import draw
    from fedveil.work import Batches, make_loss
    from fedveil.work.clipping import ClippedSamples

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    architecture, _ = draw(model, torch.randn(2, 4), traced=False)
    work = ClippedSamples(make_loss("cross-entropy"), Batches(0, 1), 1.0, sampling=0.5)
    with pytest.raises(ConfigError, match="does not go with dropout"):
        work.layout(architecture, tensors=1)


def test_a_lost_checkpoint_under_a_privacy_target_says_that_this_is_why(tmp_path: Path) -> None:
    session.run(small(), tmp_path / "run", quiet=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    said: list[str] = []
    with pytest.raises(ProtocolError, match=r"4 rounds were begun before that no checkpoint holds"):
        session.resume(tmp_path / "run", quiet=True, say=said.append)
    assert said == ["The checkpoints of 4 rounds are gone: starting from the first round."]
