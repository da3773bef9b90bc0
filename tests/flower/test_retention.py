"""Old state is let go of by age and by number; what was spent, and that a run was taken part in, never is."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from fedveil.errors import CheckpointError, Code, ConfigError, FedVeilError
from fedveil.flower import messages
from fedveil.flower.client_memory import DamagedError, Memory
from fedveil.flower.home import Home
from fedveil.flower.server_app import serve
from flower.in_process import InProcessGrid, context_of, make_homes

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


@pytest.mark.parametrize("setting", ["keep_days = 0", "keep_days = inf", "max_runs = 0", 'keep_days = "long"'])
def test_limits_that_cannot_be_are_named(setting: str, tmp_path: Path) -> None:
    (tmp_path / "client.toml").write_text(f"client = 0\n{setting}\n")
    with pytest.raises(ConfigError, match=setting.split(" ", 1)[0]):
        Home.read(tmp_path)
