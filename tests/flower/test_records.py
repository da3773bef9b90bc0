"""What passes on Flower is recorded where it is seen: the server's part in the run folder, a client's own at home."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedveil.audit.record import Record, RecordEntry, client_view
from fedveil.audit.running import audit_run
from fedveil.audit.subject import from_folder
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, Code, ConfigError, FedVeilError
from fedveil.flower import messages
from fedveil.flower.server_app import serve
from fedveil.runs import session
from flower.in_process import InProcessGrid, context_of, make_homes

TINY: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 8},
    "clients": 3,
    "rounds": 2,
    "seed": 1,
    "batch_size": 16,
    "lr": 0.1,
    "record": True,
}


def with_homes(folder: Path, text: str = "record = true") -> list[Path]:
    homes = make_homes(folder, 3)
    for number, home in enumerate(homes):
        (home / "client.toml").write_text(f"client = {number}\nsimulation = true\n{text}\n")
    return homes


def told(record: Record, *kinds: str, exact: bool) -> list[tuple[object, ...]]:
    """Everything of these kinds, whatever order the pieces of a phase lie in; to the last bit where it is `exact`."""

    def key(entry: RecordEntry) -> tuple[object, ...]:
        where = entry.round, entry.attempt, entry.phase, entry.kind, entry.client, entry.to
        return (*where, entry.digest if exact else entry.length)

    return sorted((key(entry) for entry in record.entries if entry.kind in kinds), key=repr)


@pytest.mark.parametrize("scheme", ["lossless", "veil-secagg"])
def test_the_server_and_its_clients_record_what_the_local_engine_does(scheme: str, tmp_path: Path) -> None:
    settings = {**TINY, "scheme": scheme, "head_groups": 2}
    homes = with_homes(tmp_path / "homes")
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "flower"), deadline=5.0, **settings))
    session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    there, here = (Record(tmp_path / name / "record") for name in ("flower", "local"))
    kinds = ("request", "private", "reply", "weights", "recovered", "opened")
    # Masks are drawn otherwise where each client has a process of its own; what they cancel to is the same.
    exact = scheme == "lossless"
    assert told(there, *kinds, exact=exact) == told(here, *kinds, exact=exact)
    assert there.facts == here.facts
    for client in there.clients:
        (kept,) = (homes[client] / "records").iterdir()
        own, by_server = client_view(Record(kept), client).messages, client_view(there, client).messages
        assert {(said.round, said.phase, said.raw) for said in own} == {
            (said.round, said.phase, said.raw) for said in by_server
        }
        assert kept.stat().st_mode & 0o077 == 0
        # A client's record holds nothing of the server's, nor another client's answers.
        assert {entry.client for entry in Record(kept).entries} <= {None, client}
        assert not Record(kept).find(kind="weights")


@pytest.mark.slow
def test_an_audit_of_a_run_on_flower_finds_what_one_of_a_local_run_does(tmp_path: Path) -> None:
    settings = {**TINY, "scheme": "lossless", "head_groups": 2}
    homes = with_homes(tmp_path / "homes")
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "flower"), deadline=5.0, **settings))
    session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    (kept,) = (homes[0] / "records").iterdir()
    said: list[str] = []
    chosen: dict[str, Any] = {"attacks": ["received"], "quick": True, "workers": 1}
    there = audit_run(tmp_path / "flower", seen=[kept], say=said.append, **chosen)
    here = audit_run(tmp_path / "local", **chosen)
    assert [(one.attack, one.verdict, one.value) for one in there.findings] == [
        (one.attack, one.verdict, one.value) for one in here.findings
    ]
    assert any("Client 0 kept" in line for line in said)


def test_a_server_that_sent_a_client_something_else_than_it_records_is_found_out(tmp_path: Path) -> None:
    runs = []
    for number, rate in enumerate((0.1, 0.2)):  # the second run's record is laid before the first one's client
        homes = with_homes(tmp_path / f"homes-{number}")
        out = tmp_path / f"run-{number}"
        serve(InProcessGrid(homes), context_of(out=str(out), deadline=5.0, scheme="fedavg", **{**TINY, "lr": rate}))
        runs.append((out, next((homes[0] / "records").iterdir())))
    from_folder(runs[0][0], seen=[runs[0][1]])
    with pytest.raises(CheckpointError, match="another train to client 0 in round 2"):
        from_folder(runs[1][0], seen=[runs[0][1]])


def test_an_owner_may_forbid_that_a_server_records(tmp_path: Path) -> None:
    homes = with_homes(tmp_path / "homes", "[require]\nrecord = false")
    plain = {**TINY, "record": False, "scheme": "fedavg"}
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "plain"), deadline=2.0, **plain))
    assert not (homes[0] / "records").exists()
    with pytest.raises(FedVeilError) as refused:
        serve(InProcessGrid(homes), context_of(out=str(tmp_path / "run"), deadline=2.0, scheme="fedavg", **TINY))
    assert messages.TEXTS[Code.REQUIRED] in str(refused.value)


def test_where_the_model_lives_with_clients_they_alone_record(tmp_path: Path) -> None:
    homes = with_homes(tmp_path / "homes")
    settings = {**TINY, "scheme": "ckks-fedavg", "cipher": "pads"}
    with pytest.raises(ConfigError, match="have clients record"):
        serve(InProcessGrid(homes), context_of(out=str(tmp_path / "run"), deadline=2.0, **settings))
    settings["record"] = False
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "run"), deadline=2.0, **settings))
    (kept,) = (homes[0] / "records").iterdir()
    assert {round for round, _ in Record(kept).rounds} == {1, 2}


def test_data_that_stayed_with_clients_are_not_guessed_by_an_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (
        "import torch\nFACTS = dict(input_shape=(5,), outputs=3, task='classification')\n"
        "def test():\n    return torch.zeros(6, 5), torch.zeros(6).long()\n"
        "def client(number):\n    return torch.randn(9, 5), torch.arange(9) % 3\n"
    )
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "recorded_own_data.py").write_text(own)
    monkeypatch.syspath_prepend(str(tmp_path / "app"))
    homes = with_homes(tmp_path / "homes", 'data = "data.py"')
    for home in homes:
        (home / "data.py").write_text(own)
    settings = {name: value for name, value in TINY.items() if name != "dataset"}
    out = tmp_path / "run"
    serve(
        InProcessGrid(homes),
        context_of(out=str(out), deadline=2.0, scheme="fedavg", data="recorded_own_data", **settings),
    )
    with pytest.raises(ConfigError, match="stayed with its clients"):
        from_folder(out)
