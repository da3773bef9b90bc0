"""Clients in groups, a sum each: a bad upload is outvoted, and nobody picks who is with whom."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from federation import accuracy, job, trained
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Directory, Epoch, Hello
from fedveil.protocol.messages import Train
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.plausible import trimmed_mean
from fedveil.roles.client import ClientRole
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import Job
from fedveil.runs.loop import fresh_state, train_job
from fedveil.secrets import SeededSecrets
from fedveil.uplink.graph import split
from fedveil.uplink.grouped import Grouped
from fedveil.uplink.unmasking import MaskedUpload, Unmask
from interrupting import interrupted_run, same_tensors

BAD = 7
MASKS: dict[str, Any] = {"scheme": "veil-secagg", "head_noise": False, "family": "isometry"}


def federation(rounds: int = 3, **settings: Any) -> Job:
    given = {"scheme": "fedavg", "lr": 0.5, "local_steps": 10, "robust_groups": 4, **settings}
    return job(clients=20, rounds=rounds, loss="cross-entropy", **given)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Client BAD sends 1,000 times its gradient, the other way, in every round."""
    protect = ClientRole._protect

    def spoilt(self: ClientRole, state: ClientState, vector: Tensor, context: RoundContext) -> Any:
        if state.client == BAD:
            vector = torch.cat([vector[:-1] * -1000, vector[-1:]])
        return protect(self, state, vector, context)

    monkeypatch.setattr(ClientRole, "_protect", spoilt)


@pytest.mark.parametrize("scheme", [{}, MASKS], ids=["fedavg", "masks under a veil"])
@pytest.mark.usefixtures("hostile")
def test_one_bad_upload_of_twenty_ruins_the_mean_and_not_that_of_groups(scheme: dict[str, Any]) -> None:
    plain, robust = federation(robust_groups=None, **scheme), federation(**scheme)
    assert accuracy(plain, trained(plain)[0]) < 0.3
    assert accuracy(robust, trained(robust)[0]) > 0.65


def test_without_a_bad_upload_groups_cost_little() -> None:
    plain, robust = federation(robust_groups=None), federation()
    assert abs(accuracy(plain, trained(plain)[0]) - accuracy(robust, trained(robust)[0])) < 0.05


def test_a_veil_and_masks_change_nothing_of_what_groups_recover() -> None:
    """Trimming happens to what was recovered: the server's own basis, whatever the veil."""
    step = {**MASKS, "local_steps": None, "rounds": 2}
    states = [trained(federation(**step | {"family": family}))[0] for family in ("scale", "full")]
    assert torch.allclose(states[0].weights.parameters, states[1].weights.parameters, rtol=1e-6, atol=1e-9)
    assert states[0].round == 2


def test_groups_are_masked_and_opened_by_themselves() -> None:
    one = federation(rounds=3, **MASKS)
    uplink = one.scheme.summing
    assert isinstance(uplink, Grouped)
    asked: list[tuple[int, ...]] = []
    uploaded: dict[int, frozenset[int]] = {}

    class Listening(ClientRole):
        def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
            if isinstance(request, Unmask):
                asked.append(tuple(request.survivors.tolist()))
            for state, reply in super().handle_many(states, request, clients, private):
                if isinstance(reply, MaskedUpload):
                    uploaded[state.client] = frozenset(reply.holders.tolist())
                yield state, reply

    role = Listening(one.scheme, one.architecture, secrets=SeededSecrets(3))
    _, rounds = trained(one, role=role)
    assert [done.failed for done in rounds] == ["", "", ""]
    # Everybody deals shares to its group and nobody else.
    groups = {frozenset({*holders, client}) for client, holders in uploaded.items()}
    assert sorted(map(len, groups)) == [5, 5, 5, 5]
    assert frozenset.union(*groups) == frozenset(range(20))
    assert {frozenset(survivors) for survivors in asked[-4:]} == groups
    assert {frozenset(survivors) for survivors in asked} == groups, "they stay for the whole run"


@pytest.mark.parametrize("at", [1, 3], ids=["without a checkpoint", "from a checkpoint"])
def test_groups_stay_through_epochs_and_attempts_and_so_do_the_bits(at: int, tmp_path: Path) -> None:
    settings = {**MASKS, "dataset": "digits", "model": "mlp", "model_options": {"depth": 2, "width": 8}, "clients": 20}
    settings |= {"robust_groups": 4, "loss": "cross-entropy", "rounds": 4, "seed": 3, "checkpoint_every": 2}
    config = RunConfig.from_mapping({**settings, "evaluate_every": 0})
    session.run(config, tmp_path / "whole", quiet=True)
    interrupted_run(config, tmp_path / "run", at=at)
    before = RunFolder(tmp_path / "run").groups()
    assert sorted(client for group in before for client in group) == list(range(20))
    session.resume(tmp_path / "run", quiet=True)
    assert RunFolder(tmp_path / "run").groups() == before
    assert same_tensors(tmp_path / "run" / "model.safetensors", tmp_path / "whole" / "model.safetensors")


def test_a_run_does_not_go_on_with_groups_that_nobody_remembers(tmp_path: Path) -> None:
    settings = {**MASKS, "dataset": "digits", "model": "mlp", "model_options": {"depth": 2, "width": 8}, "clients": 20}
    settings |= {"robust_groups": 4, "loss": "cross-entropy", "rounds": 3, "seed": 3, "checkpoint_every": 1}
    interrupted_run(RunConfig.from_mapping({**settings, "evaluate_every": 0}), tmp_path / "run", at=1)
    file = tmp_path / "run" / "attempts.json"
    facts = json.loads(file.read_text())
    for wrong in ([], [[0, 1], [1, 2]], "four"):
        file.write_text(json.dumps({**facts, "groups": wrong}))
        with pytest.raises(CheckpointError, match="groups"):
            session.resume(tmp_path / "run", quiet=True)


def entered(first: int, beacon: bytes, present: int = 20) -> RoundContext:
    """The context of a round in an epoch that begins with it."""
    samples, no = torch.ones(present, dtype=torch.int64), torch.zeros(present, 0, dtype=torch.uint8)
    here = torch.arange(present)
    epoch = Epoch(first, first, 100, 20, 20, 0)
    return RoundContext(
        first, 0, tuple(range(present)), Directory("run", here, samples, no, no, no, epoch, here, no), beacon
    )


def test_clients_hold_the_server_to_their_groups_and_newcomers_stay_out() -> None:
    uplink = federation(**MASKS).scheme.summing
    assert isinstance(uplink, Grouped)
    first, later = entered(0, b"one"), entered(7, b"two")
    own = uplink._own(first, ClientState(3)).cohort
    state = replace(ClientState(3), grouped=own)
    assert uplink._own(later, state).cohort == own, "whatever a later beacon says"
    assert uplink._own(replace(later, attempt=2), ClientState.unseal(state.seal(b"k" * 32), b"k" * 32)).cohort == own
    with pytest.raises(ProtocolError, match="comes after this run's groups were drawn"):
        uplink._own(later, ClientState(3))
    last = replace(later, cohort=tuple(client for client in range(20) if client == 3 or client not in own))
    with pytest.raises(ProtocolError, match="would hide each among too few"):
        uplink._own(last, state)
    # The server asks nobody who is in no group, or in one that is too small.
    groups = uplink.lasting_groups(first)
    assert own in groups
    assert uplink.asked(replace(last, groups=groups), last.cohort) == tuple(c for c in last.cohort if c != 3)


def test_a_latecomer_begins_a_new_epoch_and_changes_no_group() -> None:
    one = job(clients=21, rounds=12, scheme="veil-secagg", head_noise=False, loss="cross-entropy", robust_groups=4)

    def late(request: Any, client: int) -> bool:
        return client == 20 and isinstance(request, Hello) and request.epoch.first == 0

    sums: list[frozenset[int]] = []

    class Listening(ClientRole):
        def handle_many(self, states: Any, request: Any, *told: Any) -> Any:
            if isinstance(request, Unmask):
                sums.append(frozenset(request.survivors.tolist()))
            return super().handle_many(states, request, *told)

    role = Listening(one.scheme, one.architecture, secrets=SeededSecrets(3))
    _, rounds = trained(one, role=role, absent=late)
    assert 20 not in rounds[9].cohort
    assert 20 in rounds[11].cohort
    assert [done.failed for done in rounds] == [""] * 12
    assert len(sums) == 4 * 12
    assert len(set(sums)) == 4
    assert frozenset.union(*sums) == frozenset(range(20))


def test_a_client_that_deals_damaged_shares_costs_its_group_and_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    protect = ClientRole._protect

    def spoilt(self: ClientRole, state: ClientState, vector: Tensor, context: RoundContext) -> Any:
        after, reply = protect(self, state, vector, context)
        if state.client == BAD:
            assert isinstance(reply, MaskedUpload)
            reply = replace(reply, bundles=reply.bundles ^ 255)
        return after, reply

    monkeypatch.setattr(ClientRole, "_protect", spoilt)
    _, rounds = trained(federation(rounds=2, **MASKS))
    assert [done.failed for done in rounds] == ["", ""]


@pytest.mark.parametrize(("missing", "opened"), [(1, 4), (2, 3)], ids=["a group without one", "a group that fails"])
def test_dropouts_cost_at_most_their_own_group(missing: int, opened: int) -> None:
    one = federation(rounds=2, **MASKS)
    gone: list[int] = []
    asked: list[int] = []

    class Watching(ClientRole):
        def _begin(self, state: ClientState, request: Train, samples: int, private: Any) -> Any:
            begun = super()._begin(state, request, samples, private)
            if request.round == 1 and not gone:
                assert isinstance(self._uplink, Grouped)
                gone.extend(self._uplink._own(begun[1], begun[0]).cohort[:missing])
            if request.round == 1 and state.client in gone:
                raise ProtocolError("gone")
            return begun

        def handle_many(self, states: Any, request: Any, *told: Any) -> Any:
            if isinstance(request, Unmask) and request.round == 1:
                asked.append(len(request.survivors))
            return super().handle_many(states, request, *told)

    _, rounds = trained(one, role=Watching(one.scheme, one.architecture, secrets=SeededSecrets(3)))
    assert [done.failed for done in rounds] == ["", ""]
    assert sorted(rounds[1].gathered.refused) == sorted(gone)
    assert sorted(asked) == sorted([5 - missing, 5, 5, 5])[4 - opened :]


def test_a_client_works_its_group_out_and_its_policy_asks_for_the_size_of_that() -> None:
    seed = b"of the beacon"
    groups = split(range(22), groups=4, seed=seed)
    assert sorted(map(len, groups)) == [5, 5, 6, 6]
    assert sorted(client for group in groups for client in group) == list(range(22))
    assert groups == split(range(22), groups=4, seed=seed) != split(range(22), groups=4, seed=b"another")
    one = federation(rounds=1, **MASKS)
    for least, failed in ((5, False), (6, True)):
        role = ClientRole(one.scheme, one.architecture, secrets=SeededSecrets(3), policy=Policy(min_cohort=least))
        _, rounds = trained(one, role=role)
        assert [bool(done.failed) for done in rounds] == [failed]


def test_the_ledger_says_that_sums_are_of_groups_and_who_may_collude_in_one() -> None:
    one = federation(rounds=1, **MASKS)
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    server = ledger.line("server")
    assert server.verdict == "aggregate only"
    assert "groups" in server.why
    assert any("4 sums a round, of 5 clients" in text for text in ledger.unprotected)
    assert any("cohorts of 5 are too small" in text for text in server.assumptions)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheme": "nadp", "lr": None}, "noise that is made for one sum"),
        ({"scheme": "cdp", "lr": None}, "noise that is made for one sum"),
        ({"scheme": "dp-fedavg", "lr": None}, "noise that is made for one sum"),
        ({"scheme": "ckks-fedavg", "cipher": "pads", "lr": None}, "reads no sums to compare"),
        ({"robust_groups": 3}, "at least 4"),
        ({**MASKS, "cohort": 10, "lr": None}, "rounds that ask everybody"),
        ({"robust_groups": 5}, "do not make 5 groups"),
    ],
)
def test_groups_are_refused_where_they_would_cost_or_do_nothing(settings: dict[str, Any], words: str) -> None:
    given = {"scheme": "fedavg", "robust_groups": 4, **settings}
    with pytest.raises(ConfigError, match=words):
        job(clients=20, **{**given, "loss": "cross-entropy"})


def test_a_trimmed_mean_hears_no_single_row() -> None:
    rows = torch.arange(12.0).reshape(4, 3)
    honest = trimmed_mean(rows)
    assert torch.equal(honest, torch.tensor([4.5, 5.5, 6.5]))
    for bad in (torch.nan, torch.inf, 1e30):
        spoilt = rows.clone()
        spoilt[3] = bad
        assert torch.equal(trimmed_mean(spoilt), honest)
    spoilt = rows.clone()
    spoilt[1] = -torch.inf
    assert bool((trimmed_mean(spoilt) >= rows.min(dim=0).values).all())
