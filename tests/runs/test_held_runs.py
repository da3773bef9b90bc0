"""Whole runs whose model lives with the clients: stopped and resumed, booked, and the same in any order of arrival."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from federation import held_run, job, same_bits
from fedveil.client_held import divided as parallel
from fedveil.client_held.client import HolderRole
from fedveil.client_held.messages import Begin, Divide
from fedveil.config import RunConfig
from fedveil.crypto import ckks
from fedveil.ledger.accountant import SERVER
from fedveil.ledger.gaussian import mu_of
from fedveil.protocol.messages import Request
from fedveil.runs import loop as training
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.loop import fresh_state, train_job
from fedveil.uplink import grid

pytest.importorskip("tenseal")

Small = Callable[..., RunConfig]
Interrupted = Callable[..., Path]
HELD: dict[str, Any] = {
    "rounds": 5,
    "checkpoint_every": 2,
    "local_steps": 2,
    "value_range": 64.0,
    "model_options": {"depth": 1, "width": 8},
    "lr": 0.1,
}
BATCH_NORM = {"model_options": {"depth": 1, "width": 8, "norm": "batch"}}
WHOLE: dict[str, dict[str, Any]] = {
    "pads": {"scheme": "ckks-fedavg", "cipher": "pads", **BATCH_NORM},
    "pads, on dropout": {"scheme": "ckks-fedavg", "cipher": "pads", "unmask": "on-dropout"},
    "pads, some of many": {"scheme": "ckks-fedavg", "cipher": "pads", "clients": 6, "cohort": 4},
    "ckks": {"scheme": "ckks-fedavg", **BATCH_NORM},
}
DIVIDED: dict[str, Any] = {"scheme": "paraaegis", "share": 0.2, "cipher": "pads"}


def parameters(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def check_whole(folder: Path, *, rounds: int = 5) -> None:
    assert [row["round"] for row in RunFolder(folder).metrics()] == list(range(1, rounds + 1))


def apart(ours: Path, theirs: Path) -> float:
    mine, other = parameters(ours), parameters(theirs)
    assert mine.keys() == other.keys()
    return max(float((mine[name].double() - other[name].double()).abs().max()) for name in mine)


# ---- stopped and resumed


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Runs that were never interrupted, one of each kind."""
    from runs.conftest import SMALL

    done: dict[str, Path] = {}

    def run(**settings: Any) -> Path:
        name = json.dumps(settings, sort_keys=True)
        if name not in done:
            done[name] = tmp_path_factory.mktemp("straight") / "run"
            session.run(RunConfig.from_mapping({**SMALL, **HELD, **settings}), done[name], quiet=True)
        return done[name]

    return run


MOMENTS = [*((way, after) for way in ("pads", "ckks") for after in (1, 3, 4, 5)), *((way, 3) for way in WHOLE)]


@pytest.mark.parametrize(
    ("way", "after"),
    [
        pytest.param(way, after, marks=pytest.mark.slow if way == "ckks" and after != 3 else ())
        for way, after in sorted(set(MOMENTS))
    ],
)
def test_a_run_stopped_after_any_round_resumes_to_the_same_model(
    tmp_path: Path, interrupted: Interrupted, straight: Callable[..., Path], way: str, after: int
) -> None:
    """Under pads to the same bits, though keys, masks and pads are all new."""
    folder = interrupted(tmp_path / "run", after=after, **{**HELD, **WHOLE[way]})
    session.resume(folder, quiet=True)
    check_whole(folder)
    reference = straight(**WHOLE[way])
    if "cipher" in WHOLE[way]:
        mine, other = parameters(folder), parameters(reference)
        assert all(same_bits(mine[name], other[name]) for name in other)
    error = ckks.choose(addends=4, largest=64.0).error
    assert apart(folder, reference) < 2 * 5 / (1 - 0.9) * error


def test_with_a_vote_and_without_noise_a_resumed_run_ends_in_the_same_model(
    tmp_path: Path, interrupted: Interrupted, small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Winners may differ, by ties that the new group breaks another way; what is put together does not."""
    monkeypatch.setattr(parallel, "add_residual", lambda *noise, **named: None)
    monkeypatch.setattr(grid, "ROUNDING", 2.0**-44)
    settings = {**HELD, **DIVIDED, "clip": 10.0, "dtype": "float64", "epsilon": 1000.0, "accounting": "paper"}
    folder = interrupted(tmp_path / "run", after=3, **settings)
    session.resume(folder, quiet=True)
    session.run(small(**settings), tmp_path / "straight", quiet=True)
    check_whole(folder)
    assert apart(folder, tmp_path / "straight") < 1e-9


def test_a_kill_between_vote_and_upload_is_survived(tmp_path: Path, small: Small, killed_at: Any) -> None:
    settings = {**HELD, **DIVIDED, "epsilon": 1000.0, "accounting": "paper"}
    folder = killed_at(tmp_path / "run", Divide, within=4, **settings)
    session.resume(folder, quiet=True)
    check_whole(folder)


def test_more_rounds_extend_a_run(tmp_path: Path, small: Small, straight: Callable[..., Path]) -> None:
    session.run(small(**{**HELD, **WHOLE["pads"], "rounds": 3}), tmp_path / "run", quiet=True)
    session.resume(tmp_path / "run", changes={"rounds": 5}, quiet=True)
    check_whole(tmp_path / "run")
    mine, other = parameters(tmp_path / "run"), parameters(straight(**WHOLE["pads"]))
    assert all(same_bits(mine[name], other[name]) for name in other)


def test_a_run_leaves_a_clients_model_a_loss_and_a_summary(straight: Callable[..., Path]) -> None:
    folder = straight(**WHOLE["pads"])
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["rounds"] == 5
    assert summary["train_loss"] == RunFolder(folder).metrics()[-1]["loss"] > 0.0
    assert 0.0 < summary["test_accuracy"] <= 1.0
    assert not (folder / "privacy.jsonl").exists()


# ---- books


class Killed(BaseException):
    """Stands in for kill -9."""


@pytest.fixture
def killed_at(monkeypatch: pytest.MonkeyPatch, small: Small) -> Callable[..., Path]:
    """A run, or its resumption, that dies while clients answer a kind of request in round `within`."""

    def stop(folder: Path, kind: type[Request], *, within: int, resumed: bool = False, **changes: Any) -> Path:
        original = HolderRole.handle_many

        def fatal(self: HolderRole, states: Any, request: Any, *rest: Any) -> Any:
            if isinstance(request, kind) and request.round + 1 == within:  # type: ignore[attr-defined]
                raise Killed
            return original(self, states, request, *rest)

        with monkeypatch.context() as patched:
            patched.setattr(HolderRole, "handle_many", fatal)
            start = session.resume if resumed else lambda out, **how: session.run(small(**changes), out, **how)
            with pytest.raises(Killed):
                start(folder, quiet=True)
        return folder

    return stop


BOOKED: dict[str, dict[str, Any]] = {
    "a vote": {**HELD, **DIVIDED, "rounds": 4, "checkpoint_every": 1},
    "no vote": {**HELD, **DIVIDED, "share": 0.0, "rounds": 4, "checkpoint_every": 1},
    "serial": {**HELD, "scheme": "serial", "cipher": "pads", "rounds": 4, "checkpoint_every": 1},
}


def ledger_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ledger.json").read_text())  # type: ignore[no-any-return]


def server_line(folder: Path) -> dict[str, Any]:
    return next(one for one in ledger_in(folder)["lines"] if one["adversary"] == SERVER)


@pytest.mark.parametrize("name", ["a vote", "no vote"])
def test_a_whole_run_spends_its_target_and_not_more(name: str, small: Small, tmp_path: Path) -> None:
    session.run(small(**BOOKED[name], epsilon=2.0), tmp_path / "run", quiet=True)
    epsilon = server_line(tmp_path / "run")["epsilon"]
    assert epsilon <= 2.0
    assert epsilon == pytest.approx(2.0, rel=1e-6)
    rows = [json.loads(row) for row in (tmp_path / "run" / "privacy.jsonl").read_text().splitlines()]
    assert [row["begin"] for row in rows if "begin" in row] == [[number, 0] for number in range(4)]
    assert [row["end"] for row in rows if "end" in row] == [[number, 0] for number in range(4)]


@pytest.mark.parametrize(("name", "kind"), [("a vote", Begin), ("a vote", Divide), ("no vote", Begin)])
def test_a_round_killed_again_and_again_is_paid_for_every_time(
    killed_at: Any, tmp_path: Path, name: str, kind: type[Request]
) -> None:
    """Rounds 3 and 4 are in the model once, and round 3 in the ledger four times."""
    folder = killed_at(tmp_path / "run", kind, within=3, **BOOKED[name], accounting="paper")
    for _ in range(2):
        killed_at(folder, kind, within=3, resumed=True)
    session.resume(folder, quiet=True)
    check_whole(folder, rounds=4)
    assert ledger_in(folder)["rounds"] == 4 + 3


def test_a_target_stops_the_run_before_repetitions_exceed_it(interrupted: Interrupted, tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "run", after=3, **{**BOOKED["no vote"], "checkpoint_every": 2, "epsilon": 3.0})
    said: list[str] = []
    summary = session.resume(folder, quiet=True, say=said.append)
    assert summary["rounds"] == 3
    assert "would bring clients over the privacy target" in summary["stopped"]
    line = server_line(folder)
    assert line["epsilon"] <= 3.0
    assert line["mu"] == pytest.approx(mu_of(3.0, 1e-5), rel=1e-9)


def test_the_run_books_whoever_was_asked_and_a_client_what_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload that came too late may have been seen: only the client knows that it sent none."""
    settings = {"loss": "cross-entropy", "lr": 0.1, "local_steps": 1, **DIVIDED, "cipher": "ckks"}
    one = job(clients=5, rounds=4, epsilon=2.0, **settings)

    def absent(request: Any, client: int) -> bool:
        return isinstance(request, Divide) and client == 3 and request.round < 2

    monkeypatch.setattr(training, "_simulated_dropout", lambda job: absent)
    accountant = train_job(one, state=fresh_state(one)).privacy_journal.accountant
    assert accountant is not None
    whole = mu_of(2.0, 1e-5) ** 2
    run = held_run(one, absent=absent)
    for client in range(5):
        assert math.isclose(float(accountant.spent[SERVER][client]), whole, rel_tol=1e-9)
        own = run.engine.state_of(client).spent
        assert math.isclose(own, whole / 2 if client == 3 else whole, rel_tol=1e-9)


# ---- in any order


ORDERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "backwards": lambda replies: replies[::-1],
    "shuffled": lambda replies: random.Random(len(replies)).sample(replies, len(replies)),
}
ANYHOW: dict[str, dict[str, Any]] = {
    "pads": {"scheme": "ckks-fedavg", "cipher": "pads"},
    "tags": DIVIDED,
    "ballots": {**DIVIDED, "vote": "histogram"},
    "by lot": {**DIVIDED, "strategy": "random", "unmask": "on-dropout"},
    "ckks": {**DIVIDED, "cipher": "ckks"},
    "serial": {"scheme": "serial", "cipher": "pads"},
}


@pytest.mark.parametrize("way", ANYHOW)
def test_the_order_of_arrival_changes_no_bit(way: str) -> None:
    settings = {"loss": "cross-entropy", "lr": 0.1, "momentum": 0.9, "local_steps": 2, "batch_size": 16, "how": "size"}
    one = job(clients=6, cohort=5, rounds=3, value_range=64.0, **settings, **ANYHOW[way])
    runs = [held_run(one), *(held_run(one, reorder=order) for order in ORDERS.values())]
    assert not any(done.failed or done.gathered.refused for run in runs for done in run.rounds)
    assert all(same_bits(run.model, runs[0].model) for run in runs[1:])
    assert all(torch.equal(run.state.velocity, runs[0].state.velocity) for run in runs[1:])
    arrived = {tuple(run.rounds[0].gathered.arrived) for run in runs}
    assert len(arrived) == 1  # what the server passes on names clients in order
