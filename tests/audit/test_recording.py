from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch

import federation
from audit.recorded import overheard, recorded, recorded_once
from fedveil.audit.record import Choice, Record, RecordWriter, outsider_view, server_view
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, ConfigError
from fedveil.protocol.codec import decode, encode, from_stored
from fedveil.protocol.messages import Train
from fedveil.runs import session
from fedveil.runs.folder import Recording
from fedveil.runs.loop import fresh_state, train_job
from shell import fedveil

EVERYTHING: list[dict[str, Any]] = [
    {"scheme": "fedavg"},
    {"scheme": "lossless"},
    {"scheme": "veil-secagg"},
    {"scheme": "nadp", "simulate_dropout": 0.2, "clients": 5, "rounds": 3, "record_rounds": "1,2,3"},
    {"scheme": "paraaegis", "cipher": "pads", "share": 0.2},
]


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda one: one["scheme"])
def test_the_bytes_kept_are_those_that_passed(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with overheard(monkeypatch) as passed:
        job, _, record = recorded(tmp_path / "record", **settings)
    chosen = set(record.clients)
    heard = [
        encode(one.message)
        for one in passed
        if (one.client in chosen if one.client is not None else chosen & set(one.to))
    ]
    assert [one.raw for one in outsider_view(record).messages] == heard
    assert {one.round for one in record.entries if one.phase in ("train", "begin")} == set(
        range(1, job.config.rounds + 1)
    )


@pytest.mark.parametrize("settings", EVERYTHING, ids=lambda one: one["scheme"])
def test_recording_changes_no_bit_of_the_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    _, outcome, _ = recorded(tmp_path / "record", **settings)
    unrecorded = {name: value for name, value in settings.items() if not name.startswith("record")}
    twin = federation.job(**{"clients": 3, "rounds": 2, **unrecorded})
    alone = train_job(twin, state=fresh_state(twin))
    assert torch.equal(outcome.state.weights.parameters, alone.state.weights.parameters)


def test_only_chosen_rounds_and_clients_are_kept(tmp_path: Path) -> None:
    _, _, record = recorded(tmp_path / "record", scheme="nadp", rounds=4, record_rounds="2,4", record_clients="1")
    assert record.rounds == ((2, 0), (4, 0))
    assert record.clients == (1,)
    assert {one.client for one in record.entries} == {None, 1}
    assert len(record.find(kind="request", phase="train")) == 2
    assert all(set(one.to) == {0, 1, 2} for one in record.find(kind="request", phase="train"))


def test_what_clients_share_is_kept_for_pairs_with_a_victim_only(tmp_path: Path) -> None:
    settings = {"scheme": "nadp", "clients": 4, "rounds": 1, "record_rounds": "1", "record_clients": "0,1,2,3"}
    _, _, whole = recorded(tmp_path / "whole", **settings)
    job = federation.job(**settings, record=True)
    train_job(job, state=fresh_state(job), record=Recording(tmp_path / "some", victims=(2,)))
    some = Record(tmp_path / "some")

    def shared(record: Record) -> dict[frozenset[int | None], bytes]:
        return {frozenset((one.client, one.peer)): record.read(one) for one in record.find(kind="shared")}

    assert len(shared(whole)) == 6
    assert shared(some) == {pair: raw for pair, raw in shared(whole).items() if 2 in pair}
    assert [one.raw for one in outsider_view(some).messages] == [one.raw for one in outsider_view(whole).messages]
    views = [server_view(record, 2, round=1, colluders=(0, 3)) for record in (whole, some)]
    assert views[0].uncovered is not None
    assert views[1].uncovered is not None
    assert torch.equal(views[0].uncovered, views[1].uncovered)


def test_a_victim_that_is_not_recorded_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 is none"):
        Choice(frozenset({1}), frozenset({0, 1}), frozenset({1, 3}))


def test_a_run_that_is_not_recorded_has_nobody_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **named: Any) -> None:
        raise AssertionError("something was heard")

    monkeypatch.setattr("fedveil.engine.local.Heard", never)
    config = RunConfig(clients=3, rounds=1, seed=1, scheme="fedavg")
    session.run(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "record").exists()


def test_weights_before_the_round_and_single_uploads_as_the_server_reads_them() -> None:
    """Without a veil, what is recovered from one upload is the gradient in it, and weights are those sent."""
    job, record = recorded_once(scheme="fedavg")
    for number in (1, 2):
        (weights,) = record.find(kind="weights", round=number)
        (sent,) = record.find(kind="request", phase="train", round=number)
        request = decode(record.read(sent))
        assert isinstance(request, Train)
        assert torch.equal(from_stored(record.read(weights))[1]["parameters"], request.broadcast.parameters)
        for client in range(3):
            (reply,) = record.find(kind="reply", phase="train", round=number, client=client)
            sections = record.facts.contributed(decode(record.read(reply)).payload)
            (own,) = record.find(kind="recovered", round=number, client=client)
            fields, tensors = from_stored(record.read(own))
            assert torch.allclose(tensors["gradient"], sections["gradients"][0] / sections["weight"])
            assert fields["loss"] == pytest.approx(float(sections["values"][0] / sections["weight"]))
    assert torch.equal(
        from_stored(record.read(record.find(kind="weights")[0]))[1]["parameters"], job.weights.parameters
    )


def test_under_a_veil_the_recovered_gradients_are_those_without_one() -> None:
    """Same seed, same first weights: what the server recovers from each client under the veil is what it sends bare."""
    _, veiled = recorded_once(scheme="lossless")
    _, bare = recorded_once(scheme="fedavg")
    for client in range(3):
        ours, theirs = (
            from_stored(one.read(one.find(kind="recovered", round=1, client=client)[0]))[1]["gradient"]
            for one in (veiled, bare)
        )
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-10)
        assert theirs.norm() > 1e-3


def test_uploads_under_masks_are_not_recovered_but_their_sum_is() -> None:
    _, record = recorded_once(scheme="veil-secagg")
    assert record.find(kind="recovered") == ()
    assert [one.round for one in record.find(kind="opened")] == [1, 2]


def test_a_killed_run_leaves_whole_pieces_and_its_record_goes_on(tmp_path: Path) -> None:
    _, _, record = recorded(tmp_path / "record", scheme="fedavg", record_rounds="1,2")
    index, content = (tmp_path / "record" / name for name in ("index.jsonl", "messages.bin"))
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    content.write_bytes(content.read_bytes() + b"half a message")
    torn = Record(tmp_path / "record")
    assert torn.entries == record.entries[:-1]
    _, _, again = recorded(tmp_path / "record", scheme="fedavg", record_rounds="1,2")
    assert len(again.entries) == 2 * len(lines) - 1
    assert all(again.read(one) for one in again.entries)


def test_every_piece_is_there_as_soon_as_it_has_been_written(tmp_path: Path) -> None:
    """Nothing waits in the process for somebody to close the record: a kill could come at any time."""
    _, record = recorded_once(scheme="fedavg")
    writer = RecordWriter(tmp_path / "record", record.facts)
    for number, kind in enumerate(("request", "weights", "reply", "recovered")):
        writer.add(bytes([number] * 40), round=1, attempt=0, phase="train", kind=kind, client=number)
        found = Record(tmp_path / "record")
        assert [found.read(one) for one in found.entries] == [bytes([one] * 40) for one in range(number + 1)]
    writer.close()


def flipped(raw: bytes) -> bytes:
    return raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:]


def test_a_damaged_record_is_refused_with_the_reason(tmp_path: Path) -> None:
    recorded(tmp_path / "record", scheme="fedavg")
    folder = tmp_path / "record"
    for name in ("messages.bin", "secrets.bin"):
        whole = (folder / name).read_bytes()
        for damaged, reason in ((flipped(whole), "checksum does not match"), (whole[:-9], "cut short")):
            (folder / name).write_bytes(damaged)
            found = Record(folder)
            with pytest.raises(CheckpointError, match=reason):
                [found.read(one) for one in found.entries]
        (folder / name).write_bytes(whole)
    index = (folder / "index.jsonl").read_bytes()
    lines = index.splitlines(keepends=True)
    for bad in (b"rubbish\n", b"{}\n", lines[1].replace(b'"request"', b'"rumour"').replace(b'"weights"', b'"rumour"')):
        (folder / "index.jsonl").write_bytes(b"".join([lines[0], bad, *lines[2:]]))
        with pytest.raises(CheckpointError, match="line 2"):
            Record(folder)
    (folder / "index.jsonl").write_bytes(index)
    (folder / "facts.json").write_text("{}")
    with pytest.raises(CheckpointError, match="facts"):
        Record(folder)
    with pytest.raises(CheckpointError, match="--record"):
        Record(tmp_path)


def test_secrets_lie_apart_and_are_nobody_elses_to_read(tmp_path: Path) -> None:
    _, _, record = recorded(tmp_path / "record", scheme="lossless", rounds=1, record_rounds="1")
    for name in ("index.jsonl", "messages.bin", "secrets.bin"):
        assert stat.S_IMODE((tmp_path / "record" / name).stat().st_mode) == 0o600
    (weights,) = record.find(kind="weights")
    raw = from_stored(record.read(weights))[1]["parameters"].numpy().tobytes()
    assert raw in (tmp_path / "record" / "secrets.bin").read_bytes()
    assert raw not in (tmp_path / "record" / "messages.bin").read_bytes()


def test_a_run_in_a_folder_is_recorded_and_resumed(tmp_path: Path) -> None:
    config = RunConfig(clients=3, rounds=2, seed=1, scheme="fedavg", record=True, checkpoint_every=1)
    session.run(config, tmp_path / "run", quiet=True)
    session.resume(tmp_path / "run", changes={"rounds": 3, "record_rounds": "3"}, quiet=True)
    record = Record(tmp_path / "run" / "record")
    assert record.rounds == ((1, 0), (2, 0), (3, 1))
    assert record.clients == (0, 1)


def test_recording_from_the_command_line(tmp_path: Path) -> None:
    small = ("--scheme", "fedavg", "--clients", 4, "--rounds", 3, "--seed", 1, "--quiet", "--out", tmp_path / "run")
    done = fedveil("run", *small, "--record", "--record-rounds", "2,3", "--record-clients", "1,3")
    assert (done.code, done.error) == (0, "")
    record = Record(tmp_path / "run" / "record")
    assert (record.rounds, record.clients) == (((2, 0), (3, 0)), (1, 3))
    refused = fedveil("run", "--record-rounds", "2", "--out", tmp_path / "other")
    assert refused.code == 2
    assert "--record" in refused.error


def test_what_cannot_be_recorded_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--record"):
        RunConfig(record_rounds="1")
    with pytest.raises(ConfigError, match="whole numbers like 1,2,10"):
        RunConfig(record=True, record_clients="0,x")
    for bad in ({"record_rounds": "0"}, {"record_rounds": "1,9"}, {"record_clients": "3"}):
        config = RunConfig(clients=3, rounds=2, seed=1, scheme="fedavg", record=True, **bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="must lie between"):
            session.run(config, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
    one = federation.job(record=True)
    with pytest.raises(ConfigError, match="give one"):
        train_job(one, state=fresh_state(one))


def test_by_default_the_first_three_rounds_the_last_one_and_two_clients_are_recorded() -> None:
    assert Choice.of(rounds=None, clients=None, last=50, count=10) == Choice(
        frozenset({1, 2, 3, 50}), frozenset({0, 1})
    )
    assert Choice.of(rounds=None, clients=None, last=1, count=1) == Choice(frozenset({1}), frozenset({0}))
