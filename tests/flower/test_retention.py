"""Old state is let go of by age and by number; what was spent, and that a run was taken part in, never is."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message
from flwr.serverapp.strategy import FedAvg

from fedveil.errors import CheckpointError, Code, ConfigError, FedVeilError, ProtocolError
from fedveil.flower import Protected, messages, protect
from fedveil.flower.client_memory import DamagedError, Memory
from fedveil.flower.home import Home
from fedveil.flower.server_app import serve
from fedveil.ledger.policy import Policy
from flower.in_process import InProcessGrid, context_of, make_homes
from flower_apps import AppGrid, app_of, start_arrays

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 8},
    "clients": 3,
    "rounds": 1,
    "seed": 1,
    "batch_size": 16,
    "deadline": 2.0,
    "checkpoint_every": 1,
}
NOISY = {**TINY, "scheme": "ldp", "epsilon": 3.0}
OPTIONS: dict[str, dict[str, Any]] = {"fedavg": {}, "ldp": {"epsilon": 3.0}, "ckks-fedavg": {"cipher": "pads"}}
DAY = 86_400.0


class Anew(InProcessGrid):
    """Its clients' processes are new, its messages' numbers are not."""

    count = 0

    def _push(self, message: Message) -> str:
        Anew.count += 1
        self._count = Anew.count
        return super()._push(message)


def aged(folder: Path, *, days: float) -> None:
    then = time.time() - DAY * days
    for file in folder.rglob("*"):
        os.utime(file, (then, then))


def written(home: Path, number: int, **settings: object) -> None:
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    (home / "client.toml").write_text("\n".join([f"client = {number}", "simulation = true", *lines]) + "\n")


@pytest.fixture
def homes(tmp_path: Path) -> list[Path]:
    made = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(made):
        (home / "policy.toml").write_text("max_epsilon = 4.0\n")
        written(home, number, policy="policy.toml", keep_days=30)
    return made


def test_state_is_deleted_by_age_and_what_was_spent_is_not(homes: list[Path], tmp_path: Path) -> None:
    serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "first"), **NOISY))
    (lineage,) = Memory(homes[0] / "state").runs()
    spent = [Memory(home / "state").spent() for home in homes]
    assert min(spent) > 0
    for home in homes:
        aged(home / "state", days=31)
    with pytest.raises(FedVeilError) as refused:  # 3 of 4 are spent: a run of 3 more is too much, as without pruning
        serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "second"), **NOISY))
    assert messages.TEXTS[Code.ENDED] in str(refused.value)
    for home, before in zip(homes, spent, strict=True):
        memory = Memory(home / "state")
        assert lineage not in memory.runs()
        assert memory.spent() >= before
        assert not list((home / "state").glob(f"{lineage}.*"))
        with pytest.raises(DamagedError, match="keep_days"):
            memory.recall(lineage, device=CPU)
    settings = {**NOISY, "rounds": 2, "resume": True}
    with pytest.raises(FedVeilError) as late:  # nor is the old run taken up again as if it were new
        serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "first"), **settings))
    assert messages.TEXTS[Code.STATE] in str(late.value)


@pytest.mark.parametrize("scheme", ["fedavg", "ckks-fedavg"])
def test_a_client_keeps_as_many_runs_as_its_owner_allows(scheme: str, tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(homes):
        written(home, number, max_runs=1, keep_days=30)
    settings = {**TINY, "scheme": scheme, **OPTIONS[scheme]}
    serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "first"), **settings))
    with pytest.raises(FedVeilError) as full:
        serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "second"), **settings))
    assert messages.TEXTS[Code.FULL] in str(full.value)
    for home in homes:  # younger state is kept, and its run goes on
        aged(home / "state", days=29)
    again = {**settings, "rounds": 2, "resume": True}
    serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "first"), **again))
    for home in homes:
        aged(home / "state", days=31)
    serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "third"), **settings))


@pytest.mark.parametrize("scheme", ["ldp", "ckks-fedavg"])
def test_a_servers_finished_runs_lose_their_checkpoints_and_nothing_else(scheme: str, tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    settings = {**TINY, "scheme": scheme, **OPTIONS[scheme], "keep_days": 30}
    old, new = tmp_path / "runs" / "old", tmp_path / "runs" / "new"
    serve(Anew(homes), context_of(out=str(old), **settings))
    before = {file.name: file.read_bytes() for file in old.iterdir() if file.is_file()}
    going_on = "checkpoints" if scheme == "ldp" else "relay.state"
    serve(Anew(homes), context_of(out=str(new), **settings))
    assert (old / going_on).exists()
    aged(old, days=31)
    serve(Anew(homes), context_of(out=str(tmp_path / "runs" / "third"), **settings))
    assert not (old / going_on).exists()
    assert (new / going_on).exists()
    for name in {*before} - {"relay.state", "events.jsonl"}:
        assert (old / name).read_bytes() == before[name]
    assert '"pruned"' in (old / "events.jsonl").read_text()
    if scheme == "ckks-fedavg":  # a server that no longer knows how far clients came does not begin again in silence
        with pytest.raises(CheckpointError, match="cannot go on"):
            serve(Anew(homes), context_of(out=str(old), **{**settings, "rounds": 2, "resume": True}))


def app_run(folder: Path, name: str, *, keep_days: float = 30.0, resume: bool = False, **settings: Any) -> AppGrid:
    """A protected app's run of one round, or one more, whose nodes remember in `folder`."""
    own = {"node_config": lambda number: {"fedveil-state": str(folder / f"node-{number}")}}
    policy = Policy(max_epsilon=9.0) if "epsilon" in settings else None
    grid = AppGrid(app_of([protect(keep_days=keep_days, policy=policy)]), **own)
    settings = {"deadline": 0.3, "out": folder / "runs" / name, "resume": resume, "keep_days": 30.0, **settings}
    Protected(FedAvg(), **settings).start(grid, start_arrays(), num_rounds=2 if resume else 1)
    return grid


@pytest.mark.parametrize(
    "settings", [{"scheme": "pads"}, {"scheme": "dp-fedavg", "epsilon": 1.0}], ids=lambda own: own["scheme"]
)
def test_runs_of_protected_apps_are_pruned_on_both_sides_and_what_was_spent_is_not(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    app_run(tmp_path, "first", **settings)
    state = tmp_path / "node-1" / "state"
    phases = {"train", "evaluate"} if settings["scheme"] == "pads" else {"train"}
    first = Memory(state).runs().keys()
    assert {name.partition(".")[2] for name in first} == phases
    before = Memory(state).spent()
    assert (before > 0) == ("epsilon" in settings)
    for number in range(5):
        aged(tmp_path / f"node-{number}" / "state", days=31)
    aged(tmp_path / "runs" / "first", days=31)
    app_run(tmp_path, "second", **settings)
    assert not Memory(state).runs().keys() & first
    assert not [file for name in first for file in state.glob(f"{name}*")]
    assert Memory(state).spent() == pytest.approx(2 * before)
    # A server that holds the model keeps it; one that does not has nothing but sums that nobody can add to any more.
    assert (tmp_path / "runs" / "first" / "app.state").exists() == (settings["scheme"] != "pads")
    if settings["scheme"] == "pads":
        with pytest.raises(CheckpointError, match="cannot go on"):
            app_run(tmp_path, "first", resume=True, **settings)
    else:
        with pytest.raises(ProtocolError, match="cannot start again"):
            app_run(tmp_path, "first", resume=True, **settings)
    assert not Memory(state).runs().keys() & first  # nor is the old run taken up again as if it were new


def test_a_protected_app_keeps_the_state_of_a_run_that_goes_on(tmp_path: Path) -> None:
    app_run(tmp_path, "first", scheme="pads")
    for number in range(5):
        aged(tmp_path / f"node-{number}" / "state", days=31)
    app_run(tmp_path, "first", scheme="pads", resume=True)  # of itself nothing is too old
    with pytest.raises(ConfigError, match="keep_days"):
        protect(keep_days=0.0)
    with pytest.raises(ConfigError, match="keep_days"):
        Protected(FedAvg(), keep_days=math.inf)


@pytest.mark.parametrize("setting", ["keep_days = 0", "keep_days = inf", "max_runs = 0", 'keep_days = "long"'])
def test_limits_that_cannot_be_are_named(setting: str, tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(f"client = 0\n{setting}\n")
    with pytest.raises(ConfigError, match=setting.split(" ", 1)[0]):
        Home.read(tmp_path)
