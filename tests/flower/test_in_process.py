"""The Flower engine, its server app and the clients' desks in one process: every scheme, every fault of a reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, RecordDict
from safetensors.torch import load_file

from federation import FEW_GROUPS, HEADED
from fedveil import schemes
from fedveil.client_held.messages import Begin
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, Code, ConfigError, NumericError, ProtocolError
from fedveil.flower import client_app, engine
from fedveil.flower.client_app import HEADER, PARTS, in_array, parts_of
from fedveil.flower.message_handler import MessageHandler
from fedveil.flower.messages import Setup
from fedveil.flower.server_app import serve
from fedveil.framing import pack, unpack
from fedveil.protocol import key_agreement as handshake
from fedveil.protocol import key_agreement as keyring
from fedveil.protocol.codec import decode, encode
from fedveil.runs import session
from fedveil.secrets import OsSecrets, SeededSecrets
from flower.in_process import InProcessGrid, context_of, make_homes
from pairs import chosen, crossed

COMMON: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "model_options": {"depth": 2, "width": 8},
    "clients": 3,
    "rounds": 2,
    "seed": 1,
    "lr": 0.1,
    "batch_size": 16,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "paraaegis": {"cipher": "pads", "share": 0.1, "clip": 0.01},
    "ckks-fedavg": {"cipher": "pads"},
    "serial": {"cipher": "pads", "clip": 0.01},
    "dp-fedavg": {"clip": 0.01},
    "hybridalpha": {"model_options": {"depth": 2, "width": 2}},
    **{scheme: {"head_groups": FEW_GROUPS} for scheme in HEADED},
}


def run_on_grid(grid: InProcessGrid, out: Path, **settings: Any) -> dict[str, Any]:
    serve(grid, context_of(out=str(out), deadline=5.0, **{**COMMON, **settings}))
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def events(out: Path) -> list[dict[str, Any]]:
    """What befell clients and messages, without a run's own course and what was said before it."""
    noted = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [one for one in noted if one["event"] not in ("began", "ended") and not one["text"].startswith("warning: ")]


def model_of(out: Path, homes: list[Path]) -> dict[str, torch.Tensor]:
    file = out / "model.safetensors"
    if file.exists():
        return load_file(file)
    kept = [load_file(next((home / "models").iterdir())) for home in homes]
    for one in kept[1:]:
        assert all(torch.equal(one[name], kept[0][name]) for name in one)
    return kept[0]


AUTHORISED = ("hybridalpha",)
ALIKE = ("pbpfl", "cdp", "ldp", "mpdp-naive", "mp-cdp")
"""Made of the parts of others here; that they run is seen where an error's text is looked for under every scheme."""


@pytest.mark.parametrize("scheme", chosen({one.name: one.name for one in schemes.schemes()}, slow=ALIKE))
def test_every_scheme_gives_the_same_model_as_the_local_engine(scheme: str, tmp_path: Path) -> None:
    settings = {**COMMON, "scheme": scheme, **OPTIONS.get(scheme, {})}
    homes = make_homes(tmp_path / "homes", 3, authority=scheme in AUTHORISED)
    on_flower = run_on_grid(InProcessGrid(homes), tmp_path / "flower", **settings)
    local = session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    expected, found = load_file(tmp_path / "local" / "model.safetensors"), model_of(tmp_path / "flower", homes)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert on_flower["rounds"] == local["rounds"] == 2
    assert on_flower["engine"] == "flower"
    told = {one["field"] for one in on_flower["ledger"]["releases"]} if "releases" in on_flower["ledger"] else set()
    assert not told or "present.client" in told


RECIPES: dict[str, dict[str, Any]] = {
    "a step by the server": {"scheme": "lossless", "optimiser": "yogi", "lr": 0.02, "augment": "crop:2,flip"},
    "local training": {"scheme": "fedavg", "local_steps": 3, "client_lr": 0.05, "client_momentum": 0.9, "lr": 0.5},
    "adam of clients under a veil": {
        "scheme": "veil-secagg",
        "head_noise": False,
        "local_steps": 3,
        "client_lr": 0.005,
        "client_optimiser": "adam",
        "lr": 0.5,
    },
    "the model with clients": {
        "scheme": "ckks-fedavg",
        "cipher": "pads",
        "optimiser": "adam",
        "client_lr": 0.05,
        "client_weight_decay": 1e-3,
        "augment": "cutout:3",
    },
}


@pytest.mark.parametrize("case", RECIPES)
def test_a_recipe_gives_the_same_model_as_with_the_local_engine(case: str, tmp_path: Path) -> None:
    settings = {**COMMON, **RECIPES[case], "warm_up": 0.5, "lr_schedule": "cosine"}
    homes = make_homes(tmp_path / "homes", 3)
    run_on_grid(InProcessGrid(homes), tmp_path / "flower", **settings)
    session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    expected, found = load_file(tmp_path / "local" / "model.safetensors"), model_of(tmp_path / "flower", homes)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_clients_judge_by_what_they_hold_back_as_with_the_local_engine(tmp_path: Path) -> None:
    settings = {**COMMON, "scheme": "veil-secagg", "head_noise": False, "client_test_fraction": 0.2}
    on_flower = run_on_grid(InProcessGrid(make_homes(tmp_path / "homes", 3)), tmp_path / "flower", **settings)
    local = session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    judged = {name for name in local if name.startswith("client_test_")}
    assert {"client_test_loss", "client_test_accuracy", "client_test_f1", "client_test_samples"} <= judged
    assert {name: on_flower[name] for name in judged} == pytest.approx({name: local[name] for name in judged}, rel=1e-5)
    rows = [
        [json.loads(line) for line in (tmp_path / engine / "metrics.jsonl").read_text().splitlines()]
        for engine in ("flower", "local")
    ]
    for there, here in zip(*rows, strict=True):
        assert there["client_test_loss"] == pytest.approx(here["client_test_loss"], rel=1e-5)


@pytest.mark.parametrize("asked", [{"cohort": 5}, {"sampling_rate": 0.6}], ids=["fixed", "sampled"])
def test_shuffled_cohorts_of_a_real_run_are_the_same_as_with_the_local_engine(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No simulation; what would differ from run to run, secrets and beacons, is held fixed."""
    fixed = SeededSecrets(5)
    monkeypatch.setattr(OsSecrets, "stream", lambda self, *label: fixed.stream(*label))

    def beacons(fill: int) -> None:
        for module in (handshake, keyring):
            monkeypatch.setattr(module, "beacon", lambda directory, told: bytes([fill]) * 32)

    beacons(1)
    settings = {**COMMON, "scheme": "veil-secagg", "clients": 7, "rounds": 4, "secrets": "os", **asked}
    homes = make_homes(tmp_path / "homes", 7)
    run_on_grid(InProcessGrid(homes), tmp_path / "flower", **settings)
    session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    beacons(2)
    session.run(RunConfig(**settings), tmp_path / "other", quiet=True)
    expected, found = load_file(tmp_path / "local" / "model.safetensors"), model_of(tmp_path / "flower", homes)
    others = load_file(tmp_path / "other" / "model.safetensors")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    assert any(not torch.allclose(others[name], value, rtol=1e-3) for name, value in expected.items())


@pytest.mark.parametrize(
    ("settings", "per_round", "before"),
    [
        pytest.param({"scheme": "lossless"}, 1, 1, id="unmasked"),
        pytest.param({"scheme": "nadp"}, 1, 4, id="noised"),
        pytest.param({"scheme": "veil-secagg", "unmask": "on-dropout"}, 1, 4, id="on-dropout"),
        pytest.param({"scheme": "veil-secagg"}, 2, 4, id="always"),
    ],
)
def test_a_round_takes_as_many_phases_as_it_must(
    settings: dict[str, Any], per_round: int, before: int, tmp_path: Path
) -> None:
    grid = InProcessGrid(make_homes(tmp_path / "homes", 3))
    run_on_grid(grid, tmp_path / "run", rounds=4, **settings)
    assert len(grid.sent) == 3 * (before + 4 * per_round)


class Kept(InProcessGrid):
    """Replies are kept as they cross."""

    def __init__(self, homes: list[Path]) -> None:
        super().__init__(homes)
        self.replies: list[Message] = []

    def answered(self, message: Message, node: int) -> list[Message]:
        self.replies += (answered := super().answered(message, node))
        return answered


def test_parts_that_are_too_long_for_a_value_travel_in_arrays_and_nothing_else_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit between the two: keys as values, models and uploads in arrays."""
    settings = {"scheme": "veil-secagg", "secrets": "seeded", "head_groups": FEW_GROUPS}
    settings["model_options"] = {"depth": 2, "width": 16}
    models, kinds = [], []
    for name, limit in (("values", client_app.ONE_PIECE), ("both", 4000)):
        monkeypatch.setattr(client_app, "ONE_PIECE", limit)
        monkeypatch.setattr(engine, "ONE_PIECE", limit)
        grid = Kept(make_homes(tmp_path / name, 3))
        run_on_grid(grid, tmp_path / f"run-{name}", **settings)
        models.append(load_file(tmp_path / f"run-{name}" / "model.safetensors"))
        kinds.append([{PARTS in one.content.array_records for one in way} for way in (grid.sent, grid.replies)])
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert kinds == [[{False}, {False}], [{False, True}, {False, True}]]


def phase_of(reply: Message, grid: InProcessGrid) -> str:
    """The name of the request that a reply answers."""
    asked = next(one for one in grid.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
    return type(decode(parts_of(asked.content)["common"])).__name__


class Twisted(InProcessGrid):
    """A grid on which one client's answers to one kind of request are twisted."""

    def __init__(self, homes: list[Path], *, client: int, what: str) -> None:
        super().__init__(homes, twist=self._twisted)
        self._client, self._what, self.done = client, what, 0

    def _twisted(self, reply: Message) -> list[Message]:
        mine = reply.metadata.src_node_id == 100 + self._client or self._answers(reply)
        if not mine or phase_of(reply, self) != self._what:
            return [reply]
        self.done += 1
        return self.change(reply)

    def _answers(self, reply: Message) -> bool:
        asked = next(one for one in self.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
        return asked.metadata.dst_node_id == 100 + self._client

    def change(self, reply: Message) -> list[Message]:
        raise NotImplementedError


class Dropping(Twisted):
    def change(self, reply: Message) -> list[Message]:
        return []


class Repeating(Twisted):
    def change(self, reply: Message) -> list[Message]:
        return [reply, reply]


class Garbling(Twisted):
    def change(self, reply: Message) -> list[Message]:
        header = ConfigRecord({"code": ""})
        reply.content = RecordDict({HEADER: header, PARTS: ArrayRecord({"reply": in_array(b"\x00garbage")})})
        return [reply]


class Emptied(Twisted):
    def change(self, reply: Message) -> list[Message]:
        reply.content = RecordDict({})
        return [reply]


class Impersonating(Twisted):
    def change(self, reply: Message) -> list[Message]:
        said = decode(parts_of(reply.content)["reply"])
        object.__setattr__(said, "client", 0)
        reply.content.config_records[HEADER]["reply"] = encode(said)
        return [reply]


class Failing(Twisted):
    def change(self, reply: Message) -> list[Message]:
        asked = next(one for one in self.sent if one.metadata.message_id == reply.metadata.reply_to_message_id)
        return [Message(Error(code=2, reason="ValueError:<'4711 is the PLANTED secret'>"), reply_to=asked)]


FAULTS: dict[str, tuple[type[Twisted], int, str | None]] = {
    "silent": (Dropping, 2, "missing"),
    "twice": (Repeating, 3, None),
    "garbage": (Garbling, 2, "refused"),
    "empty": (Emptied, 2, "refused"),
    "another's name": (Impersonating, 2, "refused"),
    "an error of Flower's": (Failing, 2, "error"),
}


@pytest.mark.parametrize(("fault", "scheme"), crossed(FAULTS, ["lossless", "veil-secagg"]))
def test_one_bad_client_costs_its_own_contribution_and_no_more(
    fault: tuple[type[Twisted], int, str | None], scheme: str, tmp_path: Path
) -> None:
    kind, counted, event = fault
    homes = make_homes(tmp_path / "homes", 4)
    grid = kind(homes, client=2, what="Train")
    settings = {"scheme": scheme, "clients": 4, "rounds": 2, **({"threshold": 0.5} if scheme == "veil-secagg" else {})}
    serve(grid, context_of(out=str(tmp_path / "run"), deadline=0.3, **{**COMMON, **settings}))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert grid.done
    assert [row["clients"] for row in rows] == [counted + 1, counted + 1]
    if event is not None:
        assert [one["client"] for one in events(tmp_path / "run") if one["event"] == event] == [2, 2]
    assert "PLANTED" not in "".join(path.read_text(errors="replace") for path in (tmp_path / "run").glob("*.json*"))


def test_a_late_answer_is_noted_and_not_counted(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    kept: list[Message] = []

    class Late(Twisted):
        def change(self, reply: Message) -> list[Message]:
            if not kept:
                kept.append(reply)
                return []
            return [reply, kept[0]]  # with the answer to the next round comes the one to the last

    grid = Late(homes, client=1, what="Train")
    serve(grid, context_of(out=str(tmp_path / "run"), deadline=0.3, **{**COMMON, "scheme": "lossless"}))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [2, 3]
    assert [one["event"] for one in events(tmp_path / "run")] == ["missing", "late"]


def test_two_nodes_of_one_number_are_both_turned_away_and_end_no_run(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 4)
    (homes[2] / "client.toml").write_text("client = 1\nsimulation = true\n")
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "run"), deadline=0.3, **{**COMMON, "clients": 4}))
    noted = events(tmp_path / "run")
    assert [one["node"] for one in noted if one["event"] == "turned away"] == [101, 102]
    assert [one["clients"] for one in noted if one["event"] == "absent"] == [[1, 2]]


def test_nobody_takes_the_number_of_a_client_that_is_there(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    thief = make_homes(tmp_path / "thief", 1)[0]

    class Taken(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            found = super().push_messages(messages)
            self.homes[300] = thief
            self.away.add(102)  # somebody is missing, so that newcomers are asked
            return found

    run_on_grid(Taken(homes), tmp_path / "run", scheme="lossless", rounds=3)
    turned = [one for one in events(tmp_path / "run") if one["event"] == "turned away"]
    assert [one["node"] for one in turned] == [300]
    assert "client 0, and node 100 is" in turned[0]["text"]


def test_a_node_without_a_home_is_turned_away_and_the_run_goes_on(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    grid = InProcessGrid([*homes, tmp_path / "nowhere"])
    run_on_grid(grid, tmp_path / "run", scheme="lossless")
    assert [one["event"] for one in events(tmp_path / "run")] == ["turned away"]


def test_a_client_that_leaves_is_missing_and_comes_back_under_another_node(tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)

    class Moving(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            given = list(messages)
            names = {type(decode(parts_of(one.content)["common"])).__name__ for one in given}
            found = super().push_messages(given)
            if names == {"Train"}:
                self.rounds += 1
                if self.rounds == 1:
                    self.away.add(101)
                if self.rounds == 2:
                    self.homes[200] = self.homes[101]
            return found

        rounds = 0

    run_on_grid(Moving(homes), tmp_path / "run", scheme="lossless", rounds=3)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 2, 3]
    assert [one["event"] for one in events(tmp_path / "run")] == ["missing", "moved"]


class KilledError(Exception):
    """The server's process ends here."""


class Dying(InProcessGrid):
    """The server dies as it sends its n-th phase of a kind."""

    def __init__(self, homes: list[Path], *, what: str, at: int) -> None:
        super().__init__(homes)
        self._what, self._left = what, at

    def push_messages(self, messages: Any) -> list[str]:
        given = list(messages)
        name = type(decode(parts_of(given[0].content)["common"])).__name__
        if name == self._what:
            self._left -= 1
            if self._left < 0:
                raise KilledError
        return super().push_messages(given)


def test_clients_of_a_killed_run_stay_in_the_groups_they_remember(tmp_path: Path) -> None:
    """Killed before a checkpoint was written: the next attempt begins with the first round, and the same groups."""
    settings = {"scheme": "veil-secagg", "head_noise": False, "loss": "cross-entropy", "robust_groups": 4}
    settings |= {"clients": 20, "rounds": 2, "model_options": {"depth": 2, "width": 8}, "checkpoint_every": 2}
    homes, out = make_homes(tmp_path / "homes", 20), tmp_path / "run"
    with pytest.raises(KilledError):
        run_on_grid(Dying(homes, what="Unmask", at=1), out, **settings)
    before = json.loads((out / "attempts.json").read_text())["groups"]
    summary = run_on_grid(InProcessGrid(homes), out, **settings, resume=True)
    assert json.loads((out / "attempts.json").read_text())["groups"] == before
    assert summary["rounds"] == 2
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [("failed" in row, row["clients"]) for row in rows] == [(False, 20)] * 2


@pytest.mark.parametrize(
    ("scheme", "what"),
    [
        pytest.param("lossless", "Train", id="lossless"),
        pytest.param("veil-secagg", "Unmask", id="veil-secagg"),
        pytest.param("nadp", "Train", id="nadp"),
        pytest.param("paraaegis", "Begin", id="paraaegis before a vote", marks=pytest.mark.slow),
        pytest.param("paraaegis", "Divide", id="paraaegis between vote and upload"),
        pytest.param("paraaegis", "Finish", id="paraaegis at the end", marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_goes_on_from_its_last_round(scheme: str, what: str, tmp_path: Path) -> None:
    """The model is that of a run never interrupted, for schemes whose sums do not depend on the attempt."""
    settings = {**COMMON, "scheme": scheme, "rounds": 4, "checkpoint_every": 1, **OPTIONS.get(scheme, {})}
    homes = make_homes(tmp_path / "homes", 3)
    out = tmp_path / "run"
    with pytest.raises(KilledError):
        run_on_grid(Dying(homes, what=what, at=0 if what == "Finish" else 2), out, **settings)
    # A new process on every side: desks read what they remember from their disks.
    resumed = InProcessGrid(homes)
    summary = run_on_grid(resumed, out, **settings, resume=True)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    # A round that was asked for and lost has cost what it costs: where a target binds, the last one is missing.
    done = 3 if scheme in ("nadp", "paraaegis") and what != "Finish" else 4
    assert [row["round"] for row in rows] == list(range(1, done + 1))
    assert summary["rounds"] == done
    assert not any("failed" in row for row in rows)
    assert "resumed" in [one["event"] for one in events(out)]
    if scheme in ("lossless", "veil-secagg"):
        session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
        expected = load_file(tmp_path / "local" / "model.safetensors")
        for name, value in model_of(out, homes).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)
    if scheme == "nadp":
        again = [note for note in summary["ledger"]["notes"] if "rounds asked for that are not in the model" in note]
        assert again, "a repeated round counts in the ledger"
    if scheme == "paraaegis":
        model_of(out, homes)  # all clients hold the same


def test_two_interruptions_in_a_row_lose_no_model(tmp_path: Path) -> None:
    """The second server dies before anybody was sent a model: what clients carried from the first must not be lost."""
    settings = {**COMMON, "scheme": "ckks-fedavg", "cipher": "pads", "rounds": 4}
    homes, out = make_homes(tmp_path / "homes", 3), tmp_path / "run"
    with pytest.raises(KilledError):
        run_on_grid(Dying(homes, what="Begin", at=2), out, **settings)
    with pytest.raises(KilledError):
        run_on_grid(Dying(homes, what="Begin", at=0), out, **settings, resume=True)
    run_on_grid(InProcessGrid(homes), out, **settings, resume=True)
    session.run(RunConfig(**settings), tmp_path / "local", quiet=True)
    expected = load_file(tmp_path / "local" / "model.safetensors")
    for name, value in model_of(out, homes).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_who_misses_the_last_sums_of_an_interrupted_run_is_lent_the_model(tmp_path: Path) -> None:
    settings = {**COMMON, "scheme": "ckks-fedavg", "cipher": "pads", "rounds": 4}
    homes, out = make_homes(tmp_path / "homes", 3), tmp_path / "run"
    with pytest.raises(KilledError):
        run_on_grid(Dying(homes, what="Begin", at=2), out, **settings)

    class Away(InProcessGrid):
        def push_messages(self, messages: Any) -> list[str]:
            given = list(messages)
            found = super().push_messages(given)
            if type(decode(parts_of(given[0].content)["common"])).__name__ == "Finish":
                self.away.clear()
            return found

    grid = Away(homes)
    grid.away.add(102)
    serve(grid, context_of(out=str(out), deadline=0.3, resume=True, **settings))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 3, 3, 3]
    model_of(out, homes)


class Announcing(Twisted):
    """Client 2 announces itself with one part changed."""

    part: ClassVar[dict[str, Any]] = {}

    def change(self, reply: Message) -> list[Message]:
        said = decode(parts_of(reply.content)["reply"])
        for name, value in self.part.items():
            object.__setattr__(said, name, value)
        reply.content.config_records[HEADER]["reply"] = encode(said)
        return [reply]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"samples": 10**30}, id="more samples than there are"),
        pytest.param({"identity": torch.zeros(4, 8, dtype=torch.uint8)}, id="a key of another shape"),
        pytest.param({"identity": torch.zeros(32)}, id="a key of other numbers"),
        pytest.param({"signature": torch.zeros(64, dtype=torch.uint8)}, id="a wrong signature"),
    ],
)
def test_a_malformed_announcement_keeps_its_sender_out_and_ends_no_run(part: dict[str, Any], tmp_path: Path) -> None:
    grid = Announcing(make_homes(tmp_path / "homes", 4), client=2, what="Hello")
    grid.part = part  # type: ignore[misc]
    settings = {**COMMON, "scheme": "veil-secagg", "clients": 4}
    serve(grid, context_of(out=str(tmp_path / "run"), deadline=0.3, **settings))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["clients"] for row in rows] == [3, 3]


def test_a_client_that_is_behind_trains_on_nothing(tmp_path: Path) -> None:
    """Not on the model that follows from the server's seed either, whatever version the server calls it."""
    home = make_homes(tmp_path, 1)[0]
    config = RunConfig(scheme="ckks-fedavg", cipher="pads", clients=3, seed=1, rounds=3)
    facts = {"input_shape": [1, 8, 8], "outputs": 10, "task": "classification", "vocabulary": None}
    setup = Setup.of(config, facts, lineage="ab" * 16, attempt=1, start=7)
    desk = MessageHandler(home)
    for version in (-1, 0):
        request = Begin(0, 1, torch.tensor([0, 1, 2]), version, None)
        parcel = pack({"setup": setup.to_text(), "message": f"m{version}"}, {"common": encode(request)})
        assert unpack(desk.handle(parcel))[0]["code"] == Code.PROTOCOL


def test_the_run_folder_is_its_owners_alone(tmp_path: Path) -> None:
    run_on_grid(InProcessGrid(make_homes(tmp_path / "homes", 3)), tmp_path / "run", scheme="lossless")
    for path in (tmp_path / "run", *(tmp_path / "run").rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_run_on_flower_is_not_resumed_with_the_local_engine(tmp_path: Path) -> None:
    run_on_grid(InProcessGrid(make_homes(tmp_path / "homes", 3)), tmp_path / "run", scheme="lossless")
    with pytest.raises(CheckpointError, match="fedveil flower run --resume"):
        session.resume(tmp_path / "run", changes={"rounds": 5})


def test_a_full_folder_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    grid = InProcessGrid(make_homes(tmp_path / "homes", 3))
    run_on_grid(grid, tmp_path / "run", scheme="lossless")
    asked = len(grid.sent)
    with pytest.raises(CheckpointError, match="holds another run"):
        run_on_grid(grid, tmp_path / "run", scheme="lossless")
    assert len(grid.sent) == asked


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        pytest.param({"simulate_dropout": 0.5}, ConfigError, "drop out by themselves", id="simulated dropout"),
        pytest.param({"lr": 1e30, "rounds": 30}, NumericError, "lower the learning rate", id="diverged"),
        pytest.param({"dataset": "nothing"}, ConfigError, "digits", id="unknown data"),
    ],
)
def test_what_cannot_be_is_said(settings: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        run_on_grid(InProcessGrid(make_homes(tmp_path / "homes", 3)), tmp_path / "run", **settings)


def test_nobody_there_ends_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="fedveil-home"):
        serve(InProcessGrid([]), context_of(out=str(tmp_path / "run"), deadline=0.3, **COMMON))
