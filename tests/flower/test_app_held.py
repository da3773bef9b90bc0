"""Somebody's own Flower app whose clients hold its model: under pads the server sees nothing of it, under paraaegis
what is not hidden, with noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from safetensors.numpy import load_file

from fedveil.client_held import group
from fedveil.client_held.client import Keeper
from fedveil.client_held.group import Founded
from fedveil.client_held.messages import Divide, Finish
from fedveil.crypto.linear_mac import MAC_WORDS
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.flower import Protected, protect
from fedveil.flower.app_held import NoModelError, behind, form_of
from fedveil.flower.app_setup import AppSetup, Step
from fedveil.flower.client_app import HEADER, PARTS, in_array, out_of_array
from fedveil.flower.client_memory import Memory
from fedveil.ledger.gaussian import mu_of, sigma_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.codec import decode, encode
from fedveil.runs.folder import RunFolder, read_ledger
from fedveil.schemes.on_updates import VALUE_RANGE
from fedveil.secrets import SeededSecrets
from fedveil.uplink.grid import FixedPoint
from fedveil.uplink.unmasking import packed, unpacked
from flower_apps import (
    SIZES,
    AppGrid,
    MeddlingGrid,
    app_of,
    assert_alike,
    everything_in,
    given_otherwise,
    kind_of,
    lost_where,
    numbers,
    plain_run,
    request_in,
    start_arrays,
    told_otherwise,
    trained,
)

Twist = Callable[[Message, Message], list[Message]]


def padded(strategy: Strategy | None = None, **settings: Any) -> Protected:
    inner = FedAvg() if strategy is None else strategy
    return Protected(inner, **{"scheme": "pads", "deadline": 0.1, "evaluation": "drop", **settings})


def grid_of(folder: Path, *, twist: Twist | None = None, train: Any = trained, **own: Any) -> AppGrid:
    """Nodes that remember in `folder`, whoever asks them, and write their models there."""
    own = {"models": folder / "models", **own}
    return AppGrid(
        app_of([protect(**own)], train=train),
        twist=twist,
        node_config=lambda number: {"fedveil-state": str(folder / f"node-{number}")},
    )


def models_in(folder: Path) -> list[ArrayRecord]:
    """What clients have written, for nobody else to read."""
    order = list(start_arrays())
    assert {path.stat().st_mode & 0o777 for path in (folder / "models").iterdir()} == {0o600}
    files = [load_file(path) for path in sorted((folder / "models").iterdir())]
    return [ArrayRecord({name: Array(arrays[name]) for name in order}) for arrays in files]


def assert_everybody_has(expected: ArrayRecord, folder: Path, *, clients: int = len(SIZES)) -> None:
    models = models_in(folder)
    assert len(models) == clients
    for model in models:
        assert_alike(model, expected)
        assert [array.shape for array in model.values()] == [array.shape for array in expected.values()]
    assert len({everything_in(RecordDict({"arrays": model})) for model in models}) == 1


def codes_in(grid: AppGrid) -> list[str]:
    return [reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed]


@pytest.mark.parametrize(
    ("make", "first"),
    [
        pytest.param(lambda: FedAvg(fraction_evaluate=1.0), "server", id="FedAvg from public arrays"),
        pytest.param(lambda: FedAvg(fraction_evaluate=1.0), "client", id="FedAvg from a client's"),
        pytest.param(lambda: FedProx(fraction_evaluate=1.0, proximal_mu=0.1), "server", id="FedProx"),
    ],
)
def test_clients_end_where_the_strategy_would_without_protection(
    make: Callable[[], Strategy], first: Any, tmp_path: Path
) -> None:
    plain = plain_run(make(), 2)
    strategy = padded(make(), first=first, evaluation=None)
    given = (
        start_arrays()
        if first == "server"
        else ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in start_arrays().items()})
    )
    result = strategy.start(grid_of(tmp_path, first=lambda context: start_arrays()), given, num_rounds=2)
    assert not result.arrays
    assert_everybody_has(plain.arrays, tmp_path)
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        averaged, wanted = getattr(result, name), getattr(plain, name)
        assert averaged.keys() == wanted.keys() == {1, 2}
        for number in wanted:
            assert averaged[number].keys() == wanted[number].keys()
            for metric, value in wanted[number].items():
                assert averaged[number][metric] == pytest.approx(value, abs=1e-5)


def assert_stepped(folder: Path, expected: ArrayRecord, *, clients: int = len(SIZES)) -> None:
    """Everybody has what Flower's own step leads to, which may have widened what was single precision."""
    for model in assert_everybody_has_the_same(folder, clients=clients):
        for name in expected:
            np.testing.assert_allclose(model[name].numpy(), expected[name].numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: FedAdam(eta=0.3), id="FedAdam"),
        pytest.param(lambda: FedAdagrad(eta=0.2, tau=0.01), id="FedAdagrad"),
        pytest.param(lambda: FedYogi(eta=0.1, beta_2=0.9), id="FedYogi"),
        pytest.param(lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9), id="FedAvgM"),
    ],
)
def test_clients_take_the_step_that_flowers_strategy_would(make: Callable[[], Strategy], tmp_path: Path) -> None:
    """With momenta that outlast a killed run, a lost folder and a round missed: they are lent with the model."""
    out, kills = tmp_path / "run", [1]

    def twist(message: Message, reply: Message) -> list[Message]:
        if kind_of(message) == ("Begin", 2) and kills:
            kills.pop()
            raise _KilledError
        return [reply]

    with pytest.raises(_KilledError):
        padded(make(), out=out).start(grid_of(tmp_path, twist=twist), start_arrays(), 3)
    (tmp_path / "node-1").rename(tmp_path / "lost")
    grid = grid_of(tmp_path, twist=lost_where(("Unmask", 4, 2)))
    result = padded(make(), out=out, resume=True).start(grid, start_arrays(), 3)
    assert set(result.train_metrics_clientapp) == {2, 3}
    assert {"Lend", "Finish"} <= {kind_of(message)[0] for message, _ in grid.crossed}
    assert_stepped(tmp_path, plain_run(make(), 3).arrays)


_STEPPING = (FedAdam(), FedAdagrad(), FedYogi(), FedAvgM(server_learning_rate=0.7, server_momentum=0.9))


def stepped(own: Any, x: float, by: float, first: float, second: float, *, round: int) -> tuple[float, float, float]:
    """A strategy's step on one number, rounded after every operation."""
    if isinstance(own, FedAvgM):
        first = own.server_momentum * first + by
        return x + own.server_learning_rate * first, first, second
    first, square, rate = own.beta_1 * first + (1 - own.beta_1) * by, by * by, own.eta
    if isinstance(own, FedAdam):
        second = own.beta_2 * second + (1 - own.beta_2) * square
        rate *= math.sqrt(1 - math.prod([own.beta_2] * (round + 2))) / (1 - math.prod([own.beta_1] * (round + 2)))
    elif isinstance(own, FedYogi):
        second -= (1 - own.beta_2) * square * np.sign(second - square)
    else:
        second += square
    return x + rate * first / (math.sqrt(second) + own.tau), first, second


@pytest.mark.parametrize("strategy", _STEPPING, ids=lambda strategy: type(strategy).__name__)
def test_a_step_is_rounded_after_every_operation_so_that_all_machines_agree(strategy: Any) -> None:
    """To the last bit: where a product and a sum were rounded at once, copies of one model could part."""
    step = Step.of(strategy)
    rows, means, *moments = np.random.default_rng(1).random((4, 101))
    row, memory = rows.copy(), np.concatenate(moments[: step.remembers])
    apart = list(zip(rows.tolist(), *(moment.tolist() for moment in moments), strict=True))
    for round in range(3):
        step.take(torch.from_numpy(row), torch.from_numpy(memory), torch.from_numpy(means), round=round)
        apart = [stepped(strategy, x, by, *kept, round=round) for (x, *kept), by in zip(apart, means, strict=True)]
    assert row.tolist() == [x for x, *_ in apart]


def test_clients_who_are_told_different_steps_share_nothing_and_a_run_keeps_its_own(tmp_path: Path) -> None:
    def meddle(grid: AppGrid, message: Message) -> Message:
        header = message.content.config_records[HEADER]
        setup = AppSetup.parse(str(header["setup"]))
        other = replace(setup, numbers={**setup.numbers, "eta": 0.0})
        changed = ConfigRecord({**header, "setup": other.to_text()})
        return Message(RecordDict({**message.content, HEADER: changed}), metadata=message.metadata)

    grid = MeddlingGrid(app_of([protect(models=tmp_path / "models")]), meddle=meddle)
    padded(FedAdam(), out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    told = {code for (message, _), code in zip(grid.crossed, codes_in(grid), strict=True) if _to(message) == 101}
    assert told == {"protocol"}  # the run's name does not say what this client was told
    assert len(models_in(tmp_path)) == len(SIZES) - 1
    with pytest.raises(CheckpointError, match="other numbers in its step"):
        padded(FedAdam(eta=1.0), out=tmp_path / "run", resume=True).start(grid_of(tmp_path), start_arrays(), 2)


def _to(message: Message) -> int:
    return message.metadata.dst_node_id


@pytest.mark.parametrize("first", ["server", "client"])
def test_nothing_that_crosses_the_grid_holds_a_model_or_an_update(first: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def watched(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = trained(arrays, number)
        seen.append((number, arrays, moved))
        return moved, figures

    # Somebody misses a round, so that a model is lent; everything is evaluated.
    lost = lost_where(("Begin", 1, 2))
    grid = grid_of(tmp_path, twist=lost, train=watched, first=lambda context: start_arrays())
    padded(FedAvg(fraction_evaluate=1.0), first=first, evaluation=None).start(grid, start_arrays(), num_rounds=2)
    kinds = {kind_of(message)[0] for message, _ in grid.crossed}
    assert {"Found", "Join", "Begin", "Unmask", "Lend", "Finish", "Train"} <= kinds
    crossed = b"".join(everything_in(part.content) for pair in grid.crossed for part in pair)
    start = {name: start_arrays()[name].numpy() for name in ("weight", "bias")}
    assert all(look in crossed for look in numbers({"bias": start["bias"]})[::3]) == (first == "server")
    secret = [{name: array.numpy() for name, array in model.items()} for model in models_in(tmp_path)]
    for number, arrays, moved in seen:
        if not np.array_equal(arrays["weight"], start["weight"]):
            secret.append(arrays)
        update = {name: moved[name] - arrays[name] for name in start}
        secret += [moved, update, {name: SIZES[number] * update[name].astype(np.float64) for name in update}]
    assert len(seen) == 10
    for model in secret:
        for look in numbers({name: model[name] for name in start}):
            assert look not in crossed


def test_of_a_rounds_sum_the_server_reads_the_weight_and_not_the_update() -> None:
    grid = AppGrid(app_of([protect()]))
    padded(metrics="drop").start(grid, start_arrays(), num_rounds=1)
    sums = next(request_in(message).latest for message, _ in grid.crossed if kind_of(message)[0] == "Finish")
    words = sums.hidden.numpy().view(np.uint64)
    read = FixedPoint(VALUE_RANGE, len(SIZES)).decode(words) * len(SIZES)
    assert read[-1] == sum(SIZES)
    start = {name: array.numpy() for name, array in start_arrays().items()}
    moved = [trained(start, number)[0] for number in range(len(SIZES))]
    true = sum(
        size * np.concatenate([np.asarray(after[name] - start[name], dtype=np.float64).reshape(-1) for name in start])
        for size, after in zip(SIZES, moved, strict=True)
    )
    assert len(read) == len(true) + MAC_WORDS + 3
    # Uniform words are as near as this to a given number in one of 2³⁶ cases.
    assert np.abs(read[: len(true)] - true).min() > 1.0


@pytest.mark.parametrize(
    ("place", "counted"),
    [
        pytest.param(("Begin", 2, 1), False, id="before its upload"),
        # Two stages a round, of which pads have the second: the fourth is that of round 2.
        pytest.param(("Unmask", 4, 1), True, id="after its upload"),
        pytest.param(("Finish", 0, 1), True, id="before an evaluation and at the end"),
    ],
)
def test_a_node_that_is_away_for_a_while_is_lent_what_it_has_missed(
    place: tuple[str, int, int], counted: bool, tmp_path: Path
) -> None:
    strategy = padded(FedAvg(fraction_evaluate=1.0), evaluation=None)
    strategy.start(grid_of(tmp_path, twist=lost_where(place)), start_arrays(), num_rounds=3)
    plain = plain_run(FedAvg(), 3, without=lambda number, client: not counted and (number, client) == (2, 1))
    assert_everybody_has(plain.arrays, tmp_path)


def test_a_round_that_cannot_be_opened_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    lost = lost_where(*(("Begin", 1, client) for client in range(3)))
    result = padded(out=tmp_path / "run").start(grid_of(tmp_path, twist=lost), start_arrays(), num_rounds=2)
    assert set(result.train_metrics_clientapp) == {2}
    assert ["failed" in row for row in RunFolder(tmp_path / "run").metrics()] == [True, False]
    assert_everybody_has(plain_run(FedAvg(), 1).arrays, tmp_path)


class _KilledError(BaseException):
    """What ends a process at once."""


class _MortalGrid(AppGrid):
    """A node whose process is killed answers nothing, and keeps what is on its disk."""

    def answered(self, message: Message, node: int) -> list[Message]:
        try:
            return super().answered(message, node)
        except _KilledError:
            return []


def test_a_node_that_is_killed_over_its_training_does_not_answer_that_round_again(tmp_path: Path) -> None:
    kills = [1]

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        if number == 1 and kills:
            kills.pop()
            raise _KilledError
        return trained(arrays, number)

    grid = _MortalGrid(
        app_of([protect(models=tmp_path / "models")], train=train),
        node_config=lambda number: {"fedveil-state": str(tmp_path / f"node-{number}")},
    )
    padded().start(grid, start_arrays(), num_rounds=2)
    plain = plain_run(FedAvg(), 2, without=lambda number, client: (number, client) == (1, 1))
    assert_everybody_has(plain.arrays, tmp_path)
    (first, *_) = (message for message, _ in grid.crossed if kind_of(message) == ("Begin", 1))
    before = len(grid.crossed)
    grid.answered(first, 101)  # as a network does that delivers twice
    assert codes_in(grid)[before:] == ["protocol"]


def test_a_message_that_comes_again_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    grid = grid_of(tmp_path)
    padded().start(grid, start_arrays(), num_rounds=2)
    before = models_in(tmp_path)
    asked = [message for message, _ in grid.crossed if message.metadata.dst_node_id == 101]
    again = [message for message in asked if kind_of(message)[0] in ("Begin", "Unmask")]
    done = len(grid.crossed)
    for message in again:
        grid.answered(message, 101)
    assert set(codes_in(grid)[done:]) == {"protocol"}
    assert len(again) == 4
    for now, then in zip(models_in(tmp_path), before, strict=True):
        assert_alike(now, then)


def _changed(message: Message, request: Any) -> Message:
    parts = ArrayRecord({**message.content[PARTS], "common": in_array(encode(request))})
    return Message(RecordDict({**message.content, PARTS: parts}), metadata=message.metadata)


def test_changed_sums_are_refused_three_times_and_then_the_client_leaves() -> None:
    said: list[str] = []

    def meddle(grid: AppGrid, message: Message) -> Message:
        if kind_of(message) == ("Begin", 2):
            latest = request_in(message).latest
            done = len(grid.crossed)
            for by in range(4):
                forged = Finish(1, replace(latest, hidden=latest.hidden + (by + 1)))
                AppGrid.answered(grid, _changed(message, forged), 101)
            said.extend(codes_in(grid)[done:])
        return message

    padded().start(MeddlingGrid(app_of([protect()]), meddle=meddle), start_arrays(), num_rounds=2)
    assert said == ["unreadable"] * 3 + ["ended"]


def _spoilt(reply: Message, spoil: Callable[[Any], Any]) -> Message:
    content = encode(spoil(decode(out_of_array(reply.content.array_records[PARTS]["reply"]))))
    records = {**reply.content, HEADER: ConfigRecord({"code": ""}), PARTS: ArrayRecord({"reply": in_array(content)})}
    return Message(RecordDict(records), metadata=reply.metadata)


def _shifted(divided: Any, *places: int) -> Any:
    payload = divided.hidden.payload.clone()
    payload[list(places)] += 1 << 62
    return replace(divided, hidden=replace(divided.hidden, payload=payload))


def _unopenable(divided: Any) -> Any:
    return replace(divided, hidden=replace(divided.hidden, bundles=divided.hidden.bundles ^ 1))


class _BadClient:
    """Client 1 sends what `spoil` makes of its upload in round 2; with `bluffs`, it answers as if it could read it."""

    def __init__(self, spoil: Callable[[Any], Any], *, bluffs: bool = False) -> None:
        self._spoil, self._bluffs, self._last = spoil, bluffs, None

    def __call__(self, message: Message, reply: Message) -> list[Message]:
        kind, number = kind_of(message)
        if message.metadata.dst_node_id != 101 or kind != "Begin":
            return [reply]
        if number == 2:
            self._last = reply
            return [_spoilt(reply, self._spoil)]
        if self._bluffs and reply.content.config_records[HEADER]["code"] == "unreadable":
            said = _spoilt(self._last, lambda divided: replace(divided, round=number - 1))
            said = _spoilt(said, lambda divided: replace(divided, hidden=replace(divided.hidden, round=2 * number - 1)))
            return [Message(said.content, metadata=reply.metadata)]
        return [reply]


@pytest.mark.parametrize("evaluation", ["drop", "average"])
def test_a_client_that_spoils_a_sum_and_says_it_can_read_it_is_named_and_asked_no_more(
    evaluation: Any, tmp_path: Path
) -> None:
    """Its word would keep sums from being taken back that nobody else can read, until everybody has left."""
    bad = _BadClient(lambda divided: _shifted(divided, 0), bluffs=True)
    run = padded(FedAvg(fraction_evaluate=1.0), out=tmp_path / "run", evaluation=evaluation)
    run.start(grid_of(tmp_path, twist=bad), start_arrays(), num_rounds=5)
    rows = RunFolder(tmp_path / "run").metrics()
    spoilt = ["failed" in row for row in rows]
    if evaluation == "drop":
        assert spoilt == [False, False, True, False, False]
        assert "takes no further part" in rows[2]["refused"]["1"]
        assert [row["clients"] for row in rows[3:]] == [4, 4]
        plain = plain_run(FedAvg(), 3, without=lambda number, client: number > 1 and client == 1)
    else:  # everybody is asked to read it before the next round, and there is nothing to bluff with
        assert spoilt == [False] * 5
        plain = plain_run(FedAvg(), 4)
    for model in models_in(tmp_path)[:1] + models_in(tmp_path)[2:]:
        assert_alike(model, plain.arrays)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda divided: _shifted(divided, -1), False, id="a weight beyond measure"),
        pytest.param(_unopenable, True, id="shares that nobody can open"),
    ],
)
def test_what_the_server_can_see_of_a_spoilt_upload_costs_that_round_and_no_clients_patience(
    spoil: Callable[[Any], Any], named: bool, tmp_path: Path
) -> None:
    grid = grid_of(tmp_path, twist=_BadClient(spoil))
    padded(out=tmp_path / "run").start(grid, start_arrays(), num_rounds=4)
    rows = RunFolder(tmp_path / "run").metrics()
    assert ["failed" in row for row in rows] == [False, True, False, False]
    assert {client for row in rows for client in row.get("refused", {})} == ({"1"} if named else set())
    assert "unreadable" not in codes_in(grid)
    plain = plain_run(FedAvg(), 3, without=lambda number, client: named and number > 1 and client == 1)
    for model in models_in(tmp_path)[:1] + models_in(tmp_path)[2:]:
        assert_alike(model, plain.arrays)


def test_a_founder_who_deals_everybody_another_key_does_not_end_the_run(tmp_path: Path, monkeypatch: Any) -> None:
    real = group.found

    def found(state: Any, request: Any, **how: Any) -> Any:
        if state.client or state.group is not None:
            return real(state, request, **how)
        dealt = {}
        for newcomer in request.newcomers.tolist():
            one = replace(request, newcomers=torch.tensor([newcomer], dtype=torch.int64))
            founded, reply = real(state, one, **how)
            dealt |= unpacked(reply.receivers, reply.lengths, reply.bundles)
        return founded, Founded(0, reply.public, reply.fingerprint, *packed(dealt))

    monkeypatch.setattr("fedveil.client_held.client.found", found)
    padded(out=tmp_path / "run").start(grid_of(tmp_path), start_arrays(), num_rounds=2)
    assert [row["clients"] for row in RunFolder(tmp_path / "run").metrics()] == [5, 5]
    assert_everybody_has(plain_run(FedAvg(), 2).arrays, tmp_path)


def test_clients_who_are_sent_different_first_models_have_no_sum(tmp_path: Path) -> None:
    """A server that could begin with one model for one client, and another for the rest, would read it off the sum."""

    def meddle(grid: AppGrid, message: Message) -> Message:
        return given_otherwise(message) if kind_of(message) == ("Begin", 1) else message

    grid = MeddlingGrid(app_of([protect()]), meddle=meddle)
    result = padded(out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    assert not result.train_metrics_clientapp
    assert "failed" in RunFolder(tmp_path / "run").metrics()[0]


@pytest.mark.parametrize(
    ("where", "first"),
    [
        pytest.param(("Begin", 2), "client", id="in a round"),
        pytest.param(("Finish", 0), "server", id="at the end of a round"),
    ],
)
def test_a_run_that_was_killed_goes_on_with_the_model_that_clients_hold(
    where: tuple[str, int], first: Any, tmp_path: Path
) -> None:
    out, own = tmp_path / "run", {"first": lambda context: start_arrays()}
    settings = {"first": first, "out": out, "evaluation": None if where[0] == "Finish" else "drop"}
    answered = [0]

    def killed(message: Message, reply: Message) -> list[Message]:
        if kind_of(message) == where:
            answered[0] += 1
            if answered[0] == 3:  # two clients have answered, and have what the others have not
                raise _KilledError
        return [reply]

    for _ in range(2):  # and once more, before the resumed run has come anywhere
        answered[0] = 0
        with pytest.raises(_KilledError):
            padded(FedAvg(fraction_evaluate=1.0), resume=out.exists(), **settings).start(
                grid_of(tmp_path, twist=killed, **own), start_arrays(), 3
            )
    strategy = padded(FedAvg(fraction_evaluate=1.0), resume=True, **settings)
    result = strategy.start(grid_of(tmp_path, **own), start_arrays(), 3)
    assert max(result.train_metrics_clientapp) == 3
    assert_everybody_has(plain_run(FedAvg(), 3).arrays, tmp_path)
    again = padded(FedAvg(fraction_evaluate=1.0), resume=True, **settings).start(
        grid_of(tmp_path, **own), start_arrays(), 3
    )
    assert not again.arrays


def test_a_node_that_has_lost_its_folder_is_lent_the_model_by_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    padded(out=out).start(grid_of(tmp_path), start_arrays(), 2)
    (tmp_path / "node-1").rename(tmp_path / "lost")
    padded(out=out, resume=True).start(grid_of(tmp_path), start_arrays(), 3)
    assert_everybody_has(plain_run(FedAvg(), 3).arrays, tmp_path)


def test_nobody_is_put_out_of_a_resumed_run_for_a_false_model_that_it_was_lent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks are bound to another model than everybody else's: it is lent one anew, and the run ends with all."""
    lend, lied, out = Keeper.lend, list[int](), tmp_path / "run"

    def falsely(self: Any, state: Any) -> Any:
        if state.client == 0 and not lied:
            lied.append(0)
            held = self.held(state)
            weights = replace(held.weights, parameters=held.weights.parameters + 0.25)
            state = replace(state, held=replace(held, weights=weights))
        return lend(self, state)

    def killed(message: Message, reply: Message) -> list[Message]:
        if kind_of(message) == ("Begin", 4) and message.metadata.message_type == "train":
            raise _KilledError
        return [reply]

    monkeypatch.setattr(Keeper, "lend", falsely)
    grid = grid_of(tmp_path, twist=killed)
    grid.lost = {("Begin", 2, 3)}
    with pytest.raises(_KilledError):
        padded(out=out).start(grid, start_arrays(), 6)
    assert lied
    padded(out=out, resume=True).start(grid_of(tmp_path), start_arrays(), 6)
    rows = list(RunFolder(out).metrics())
    assert [row["round"] for row in rows if "failed" in row] == [4]
    assert not any("takes no further part" in text for row in rows for text in row.get("refused", {}).values())
    assert rows[-1]["clients"] == 5
    assert_everybody_has_the_same(tmp_path)


def test_a_run_is_resumed_with_a_model_of_its_own_form_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    padded(out=out).start(grid_of(tmp_path), start_arrays(), 1)
    other = ArrayRecord({"weight": Array(np.zeros((4, 4)))})
    with pytest.raises(CheckpointError, match="other names"):
        padded(out=out, resume=True).start(grid_of(tmp_path), other, 2)


class _OwnStep(FedAvg):
    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        return super().aggregate_train(server_round, replies)


class _Renamed(FedAdam):
    pass


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: padded(_OwnStep(), averages=True), id="a step of one's own, whatever is said of it"),
        pytest.param(lambda: padded(_Renamed(), averages=True), id="a subclass of a strategy that is known"),
        pytest.param(lambda: padded(evaluation="pass"), id="evaluations of the server's arrays"),
        pytest.param(
            lambda: padded().start(AppGrid(app_of()), start_arrays(), evaluate_fn=lambda number, arrays: None),
            id="evaluations on the server",
        ),
    ],
)
def test_what_needs_the_models_numbers_on_the_server_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(NoModelError, match="never holds the model"):
        make()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        pytest.param({"scheme": "secagg", "first": "client"}, "the server holds it", id="a first model under secagg"),
        pytest.param({"first": "clients"}, "client", id="a mistyped first"),
        pytest.param({"epsilon": 2.0}, "epsilon", id="an option of another scheme"),
        pytest.param({"strategy": FedAdam(beta_1=1.0)}, "beta_1", id="a step that divides by nothing"),
        pytest.param({"strategy": FedYogi(tau=0.0)}, "tau", id="another"),
    ],
)
def test_mistakes_are_named_where_they_are_made(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        padded(**settings)


@pytest.mark.parametrize(
    ("own", "settings", "code"),
    [
        pytest.param({"require": {"first": "client"}}, {}, "required", id="a public first model"),
        pytest.param({"require": {"scheme": "secagg"}}, {}, "required", id="another scheme"),
        pytest.param({"first": None}, {"first": "client"}, "app", id="nothing that makes a first model"),
        pytest.param(
            {"first": lambda context: ArrayRecord({"other": Array(np.zeros(16))})},
            {"first": "client"},
            "form",
            id="a first model of another form",
        ),
    ],
)
def test_a_run_that_clients_do_not_agree_to_does_not_begin(
    own: dict[str, Any], settings: dict[str, Any], code: str, tmp_path: Path
) -> None:
    grid = grid_of(tmp_path, **own)
    with pytest.raises(ProtocolError, match="cannot start"):
        padded(**settings).start(grid, start_arrays(), num_rounds=1)
    assert {said for said in codes_in(grid) if said} == {code}


@pytest.mark.parametrize("first", ["server", "client"])
def test_the_ledger_says_what_the_server_sees_and_whose_the_first_model_is(first: Any, tmp_path: Path) -> None:
    strategy = padded(first=first, out=tmp_path / "run")
    strategy.start(grid_of(tmp_path, first=lambda context: start_arrays()), start_arrays(), num_rounds=1)
    ledger = strategy.ledger
    assert ledger.as_data() == read_ledger(tmp_path / "run").as_data()
    hidden = {release.field: release.protection for release in ledger.releases if release.about == "data"}
    assert (hidden["divided.hidden"], hidden["upload.behind"]) == ("encrypted", "masked")
    assert "of upload.behind" in ledger.line("server").why
    assert ledger.line("clients").verdict == "aggregate only"
    public = any(release.field == "app.arrays" for release in ledger.releases)
    assert public == (first == "server")
    assert any("first version" in text for text in ledger.unprotected) == public
    assert any("first version" in text for text in ledger.line("server").assumptions) != public


def test_a_size_that_a_server_claims_takes_no_memory() -> None:
    nobody = behind(1 << 33, Step.of(FedAdam()))
    assert (nobody.version, len(nobody.weights.parameters), len(nobody.velocity)) == (-1, 1 << 33, 1 << 34)
    for claimed in (nobody.weights.parameters, nobody.velocity):
        assert claimed.untyped_storage().nbytes() == 8


def test_a_form_holds_no_number() -> None:
    form = form_of(start_arrays())
    assert [(name, array.dtype, tuple(array.shape)) for name, array in form.items()] == [
        ("weight", "float32", (4, 3)),
        ("bias", "float64", (3,)),
        ("steps", "int64", ()),
    ]
    assert {array.data for array in form.values()} == {b""}


# --- paraaegis: a share is hidden, the rest is clipped and under noise


def divided(strategy: Strategy | None = None, **settings: Any) -> Protected:
    return padded(strategy, **{"scheme": "paraaegis", "share": 0.3, "epsilon": 8.0, "clip": 0.01, **settings})


def moved_by_everybody(**settings: Any) -> list[np.ndarray]:
    """What clients are given to train on in a run's rounds, of a model of zeros, once each."""
    seen: list[np.ndarray] = []

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        if number == 0:
            seen.append(arrays["flat"])
        return {"flat": arrays["flat"] + _UPDATES[number]}, {"num-examples": SIZES[number]}

    grid = AppGrid(app_of([protect()], train=train))
    divided(**settings).start(grid, ArrayRecord({"flat": Array(np.zeros(_NUMBERS))}), num_rounds=2)
    return seen


_NUMBERS, _HIDDEN = 2000, 200
_UPDATES = np.random.default_rng(5).normal(size=(len(SIZES), _NUMBERS)) * 1e-3
_UPDATES[:, ::10] += 2.0  # of which everybody votes for these


@pytest.mark.parametrize(
    ("settings", "rounding"),
    [
        pytest.param({"vote": "histogram"}, 1e-12, id="pads, votes under masks"),
        pytest.param({"vote": "tags"}, 1e-12, id="pads, votes by tags"),
        pytest.param({"cipher": "ckks"}, 2.0**-20, id="CKKS"),
    ],
)
def test_the_hidden_share_is_the_mean_and_the_rest_has_the_planned_noise(
    settings: dict[str, Any], rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets are of a fixed seed; of others, one in 10⁶ would have the variance of 1,800 numbers beyond 16.5 %."""
    if settings.get("cipher") == "ckks":
        pytest.importorskip("tenseal")
    monkeypatch.setattr("fedveil.roles.client.OsSecrets", lambda: SeededSecrets(11))
    share, clip, epsilon = 0.1, 0.5, 4.0
    start, after = moved_by_everybody(share=share, clip=clip, epsilon=epsilon, **settings)
    assert not start.any()
    error = after - _UPDATES.mean(axis=0)
    hidden = np.zeros(_NUMBERS, dtype=bool)
    hidden[::10] = True
    assert hidden.sum() == _HIDDEN
    assert np.abs(error[hidden]).max() <= rounding
    # Nobody's rest is longer than the clip, so that the mean of the rests is that of what was noised.
    assert max(np.linalg.norm(update[~hidden]) for update in _UPDATES) < clip
    planned = 2 * clip * sigma_of(epsilon, 1e-5) * np.sqrt(2) / np.sqrt(len(SIZES))  # two rounds, five clients
    assert 0.835 < np.mean(error[~hidden] ** 2) / planned**2 < 1.165
    assert abs(error[~hidden].mean()) < 5 * planned / np.sqrt((~hidden).sum())


def test_updates_that_are_long_or_not_finite_neither_pass_the_clip_nor_end_a_run() -> None:
    """The rest is clipped whatever it is; an update that is not finite counts as one that has moved nothing."""

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        update = np.full(40, np.nan) if number == 0 else np.full(40, 1e3)
        return {"flat": arrays["flat"] + update}, {"num-examples": 5}

    seen: list[np.ndarray] = []

    def watched(arrays: dict[str, np.ndarray], number: int) -> Any:
        seen.append(arrays["flat"])
        return train(arrays, number)

    grid = AppGrid(app_of([protect()], train=watched))
    divided(share=0.1, clip=1e-3).start(grid, ArrayRecord({"flat": Array(np.zeros(40))}), num_rounds=2)
    second = seen[-1]
    # Four of five voted for the first places, and moved them by 1,000 each; noise is 2·10⁻³ times a few.
    assert np.abs(second[:4] - 800.0).max() < 1e-6
    assert np.abs(second[4:]).max() < 0.1


def _uploads(grid: AppGrid) -> list[Any]:
    return [
        decode(out_of_array(reply.content.array_records[PARTS]["reply"]))
        for _, reply in grid.crossed
        if PARTS in reply.content
    ]


@pytest.mark.parametrize("vote", ["histogram", "tags"])
def test_nothing_in_the_clear_crosses_the_grid_where_updates_are_divided(vote: str, tmp_path: Path) -> None:
    seen: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def watched(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = trained(arrays, number)
        seen.append((arrays, moved))
        return moved, figures

    lost = lost_where(("Begin", 1, 2))  # so that a model is lent
    grid = grid_of(tmp_path, twist=lost, train=watched, first=lambda context: start_arrays())
    strategy = divided(FedAvg(fraction_evaluate=1.0), first="client", vote=vote, evaluation="average")
    strategy.start(grid, start_arrays(), num_rounds=2)
    kinds = {kind_of(message)[0] for message, _ in grid.crossed}
    assert {"Found", "Join", "Begin", "Divide", "Unmask", "Lend", "Finish", "Train"} <= kinds
    crossed = b"".join(everything_in(part.content) for pair in grid.crossed for part in pair)
    names = ("weight", "bias")
    secret = [{name: model[name].numpy() for name in names} for model in models_in(tmp_path)]
    for arrays, moved in seen:
        secret += [arrays, moved, {name: moved[name] - arrays[name] for name in names}]
    assert len(seen) == 10
    for model in secret:
        for look in numbers({name: model[name] for name in names}):
            assert look not in crossed
    # What the server adds up itself: of 16 numbers 5 are hidden, and the words of the rest are noise of its own size.
    rests = [reply.rest for reply in _uploads(grid) if type(reply).__name__ == "Divided"]
    assert {len(rest) for rest in rests} == {11}


def assert_everybody_has_the_same(folder: Path, *, clients: int = len(SIZES)) -> list[ArrayRecord]:
    models = models_in(folder)
    assert len(models) == clients
    assert len({everything_in(RecordDict({"arrays": model})) for model in models}) == 1
    return models


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(("Begin", 2, 1), id="before its vote"),
        pytest.param(("Divide", 2, 1), id="between its vote and its upload"),
        pytest.param(("Unmask", 4, 1), id="after its upload"),
    ],
)
def test_a_node_that_is_lost_in_a_divided_round_is_lent_what_it_has_missed(
    place: tuple[str, int, int], tmp_path: Path
) -> None:
    run = divided(out=tmp_path / "run")
    run.start(grid_of(tmp_path, twist=lost_where(place)), start_arrays(), num_rounds=3)
    rows = RunFolder(tmp_path / "run").metrics()
    assert ["failed" in row for row in rows] == [False] * 3
    assert [row["clients"] for row in rows] == [5, 5 if place[0] == "Unmask" else 4, 5]
    assert_everybody_has_the_same(tmp_path)


def test_a_killed_node_and_a_killed_run_go_on_with_a_divided_model_and_pay_for_every_round(tmp_path: Path) -> None:
    """Of three rounds that ε is for, the second is asked for twice: the third is not asked for any more."""
    out, deaths = tmp_path / "run", ["node", "run", "nobody"]

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        if number == 1 and deaths[0] == "node":
            deaths.pop(0)
            raise _KilledError
        return trained(arrays, number)

    def killed(message: Message, reply: Message) -> list[Message]:
        if kind_of(message) == ("Divide", 2) and deaths[0] == "run" and message.metadata.dst_node_id == 103:
            deaths.pop(0)
            raise RuntimeError("the server is gone")
        return [reply]

    def grid() -> _MortalGrid:
        return _MortalGrid(
            app_of([protect(models=tmp_path / "models")], train=train),
            twist=killed,
            node_config=lambda number: {"fedveil-state": str(tmp_path / f"node-{number}")},
        )

    with pytest.raises(RuntimeError, match="gone"):
        divided(out=out).start(grid(), start_arrays(), num_rounds=3)
    strategy = divided(out=out, resume=True)
    result = strategy.start(grid(), start_arrays(), num_rounds=3)
    assert deaths == ["nobody"]
    assert set(result.train_metrics_clientapp) == {2}
    assert_everybody_has_the_same(tmp_path)
    mu2 = mu_of(8.0, 1e-5) ** 2 / 3  # of a round
    spent = [Memory(tmp_path / f"node-{number}" / "state").spent() / mu2 for number in range(len(SIZES))]
    # Clients 0 to 3 had uploaded in the second round when the server died; client 1 has missed the first.
    assert spent == pytest.approx([3, 2, 3, 3, 2])
    line = strategy.ledger.line("server")
    assert (line.verdict, line.epsilon) == ("conditional", pytest.approx(8.0))
    assert any("rounds asked for that are not in the model" in note for note in strategy.ledger.notes)


def _other_winners(grid: AppGrid, outcome: Divide) -> Divide:
    """The same number of tags that somebody was sent to vote with, one of them no winner."""
    winners = {bytes(tag) for tag in outcome.winners.numpy()}
    cast = {bytes(tag) for reply in _uploads(grid) if type(reply).__name__ == "Vote" for tag in reply.tags.numpy()}
    chosen = sorted([*list(winners)[1:], next(iter(cast - winners))])
    return replace(outcome, winners=torch.tensor([list(tag) for tag in chosen], dtype=torch.uint8))


def _other_counts(grid: AppGrid, outcome: Divide) -> Divide:
    counts = outcome.counts.clone()
    counts[0] += 1
    counts[1] -= 1
    return replace(outcome, counts=counts)


def _told_one(tmp_path: Path, vote: str, forged: Callable[[AppGrid, Divide], Divide]) -> MeddlingGrid:
    """A run of one round, in which one client is told another outcome of the vote."""

    def meddle(grid: AppGrid, message: Message) -> Message:
        told = kind_of(message) == ("Divide", 1)
        return _changed(message, forged(grid, request_in(message))) if told else message

    grid = MeddlingGrid(app_of([protect(models=tmp_path / "models")]), meddle=meddle)
    divided(vote=vote, out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    return grid


def test_clients_who_are_told_different_outcomes_of_a_vote_have_no_sum(tmp_path: Path) -> None:
    """Two that hide different coordinates would show by their difference what one of them hides."""
    grid = _told_one(tmp_path, "tags", _other_winners)
    assert set(codes_in(grid)) == {""}  # each of them could follow what it was told
    assert "mask cannot be taken off" in RunFolder(tmp_path / "run").metrics()[0]["failed"]
    for model in models_in(tmp_path):  # nobody has moved
        assert_alike(model, start_arrays())


def test_a_client_that_is_told_another_sum_of_ballots_refuses_it_and_the_others_go_on(tmp_path: Path) -> None:
    grid = _told_one(tmp_path, "histogram", _other_counts)
    assert [code for code in codes_in(grid) if code] == ["unreadable"]
    row = RunFolder(tmp_path / "run").metrics()[0]
    assert "failed" not in row
    assert row["clients"] == len(SIZES) - 1
    assert_everybody_has_the_same(tmp_path)


def test_a_vote_is_followed_by_one_upload_whatever_is_asked_in_between(tmp_path: Path) -> None:
    """Asked for what it has answered, and for more, between a vote and its upload; and for another upload after it."""
    said: list[tuple[str, str]] = []

    def meddle(grid: AppGrid, message: Message) -> Message:
        if kind_of(message) != ("Divide", 2):
            return message
        outcome, kinds = request_in(message), ("Begin", "Divide", "Unmask", "Train", "Finish")
        mine = [sent for sent, _ in grid.crossed if sent.metadata.dst_node_id == 101]
        asked = [
            *(sent for sent in mine if kind_of(sent)[0] in kinds),
            _changed(message, Finish(2, None)),
            _changed(message, replace(outcome, round=0)),
            message,
            message,
            _changed(message, _other_counts(grid, outcome)),
            _changed(message, replace(outcome, voters=outcome.voters[:-1])),
        ]
        for again in asked:
            done = len(grid.crossed)
            AppGrid.answered(grid, again, 101)
            said.append((kind_of(again)[0], codes_in(grid)[done]))
        return message

    folder = {"node_config": lambda number: {"fedveil-state": str(tmp_path / f"node-{number}")}}
    grid = MeddlingGrid(app_of([protect(models=tmp_path / "models")]), meddle=meddle, **folder)
    strategy = divided(FedAvg(fraction_evaluate=1.0), evaluation="average")
    strategy.start(grid, start_arrays(), num_rounds=3)
    # What changes nothing is answered: which version it holds, as often as that is asked.
    answered = [kind for kind, code in said if not code and kind != "Finish"]
    assert answered == ["Divide"]
    assert {code for _, code in said} == {"", "protocol"}
    # That one upload did not reach the sum, since the server has thrown it away; nobody else is the worse for it.
    assert_everybody_has_the_same(tmp_path)
    spent = [Memory(tmp_path / f"node-{number}" / "state").spent() for number in range(len(SIZES))]
    assert spent == pytest.approx([mu_of(8.0, 1e-5) ** 2] * len(SIZES))


@pytest.mark.parametrize(
    "settings",
    [{"scheme": "pads"}, {"vote": "histogram"}, {"vote": "tags"}],
    ids=lambda settings: str(*settings.values()),
)
def test_clients_who_are_told_to_train_otherwise_than_the_rest_have_no_sum(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Had all but one been told to do nothing, whoever reads the sum would read that one's update."""

    def meddle(grid: AppGrid, message: Message) -> Message:
        return told_otherwise(message, lr=0.0) if kind_of(message) == ("Begin", 1) else message

    grid = MeddlingGrid(app_of([protect(models=tmp_path / "models")]), meddle=meddle)
    run = padded if settings.get("scheme") == "pads" else divided
    run(out=tmp_path / "run", **settings).start(grid, start_arrays(), num_rounds=1)
    assert "failed" in RunFolder(tmp_path / "run").metrics()[0]
    for model in models_in(tmp_path):  # nobody has moved
        assert_alike(model, start_arrays())


def test_clients_who_are_sent_different_first_models_elect_nothing(tmp_path: Path) -> None:
    def meddle(grid: AppGrid, message: Message) -> Message:
        return given_otherwise(message) if kind_of(message) == ("Begin", 1) else message

    grid = MeddlingGrid(app_of([protect()]), meddle=meddle)
    divided(out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    assert "failed" in RunFolder(tmp_path / "run").metrics()[0]
    assert not [reply for reply in _uploads(grid) if type(reply).__name__ == "Divided"]


@pytest.mark.parametrize(
    ("own", "settings", "code"),
    [
        pytest.param({"policy": Policy(max_epsilon=8.0)}, {}, "settings", id="a policy's ε, of what is hidden without"),
        pytest.param({"require": {"epsilon": {"max": 8.0}}}, {}, "required", id="a largest ε alone"),
        pytest.param(
            {"require": {"scheme": "paraaegis", "epsilon": {"max": 4.0}}}, {}, "required", id="a larger ε than agreed"
        ),
        pytest.param({"require": {"vote": "histogram"}}, {"vote": "tags"}, "required", id="votes that can be compared"),
        pytest.param({}, {"epsilon": 20.0}, "required", id="an ε that proves nothing"),
        pytest.param({"require": {"cipher": "pads"}}, {"cipher": "ckks"}, "required", id="a key that all share"),
    ],
)
def test_a_client_divides_its_update_on_its_own_terms(own: dict[str, Any], settings: dict[str, Any], code: str) -> None:
    if settings.get("cipher") == "ckks":
        pytest.importorskip("tenseal")
    grid = AppGrid(app_of([protect(**own)]))
    with pytest.raises(ProtocolError, match="cannot start"):
        divided(**settings).start(grid, start_arrays(), num_rounds=1)
    assert set(codes_in(grid)) == {code}


def test_a_largest_epsilon_counts_divided_rounds_of_all_runs_and_no_evaluation_without_consent(tmp_path: Path) -> None:
    def run(**settings: Any) -> tuple[set[str], int]:
        own = {"require": {"scheme": "paraaegis", "epsilon": {"max": 8.0}}}
        grid = grid_of(tmp_path, **own)
        divided(FedAvg(fraction_evaluate=1.0), **settings).start(grid, start_arrays(), num_rounds=1)
        uploads = [reply for reply in _uploads(grid) if type(reply).__name__ == "Divided"]
        return set(codes_in(grid)), len(uploads)

    with pytest.raises(ProtocolError, match="cannot start"):
        run(evaluation="average")
    assert run() == ({"", "ended"}, 0)


@pytest.mark.parametrize("vote", ["histogram", "tags"])
def test_the_ledger_of_divided_updates_is_the_schemes_and_says_what_averages_cost(vote: str, tmp_path: Path) -> None:
    strategy = divided(vote=vote, out=tmp_path / "run")
    strategy.start(grid_of(tmp_path), start_arrays(), num_rounds=1)
    ledger = strategy.ledger
    assert ledger.as_data() == read_ledger(tmp_path / "run").as_data()
    line = ledger.line("server")
    assert (line.verdict, line.epsilon, line.unit) == ("conditional", pytest.approx(8.0), "all data of one client")
    assert (line.outright is None) == (vote == "tags")
    assert ledger.line("clients").verdict == "aggregate only"
    assert ledger.line("server and colluding clients").verdict == ("none" if vote == "tags" else "aggregate only")
    assert any(note.startswith("trust level mod") for note in ledger.notes)
    assert any("of the rest under noise, which it can" in note for note in ledger.notes)
    assert not [release for release in ledger.releases if release.field.endswith(".behind")]
    judged = divided(FedAvg(fraction_evaluate=1.0), vote=vote, evaluation="average")
    result = judged.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=1)
    assert set(result.evaluate_metrics_clientapp[1]) == {"eval_loss"}
    assert judged.ledger.line("server").verdict == "aggregate only"
    assert "evaluation.behind" in judged.ledger.line("server").why


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        pytest.param({"share": 1.0}, "'pads'", id="everything hidden"),
        pytest.param({"share": 0.0}, "'dp-fedavg'", id="nothing hidden"),
        pytest.param({"share": 1.5}, "share", id="more than everything"),
        pytest.param({"metrics": "average"}, "claim", id="averages under noise"),
        pytest.param({"cipher": "paillier"}, "cipher", id="another cipher"),
        pytest.param({"evaluation": "pass"}, "never holds", id="evaluations of the server's arrays"),
    ],
)
def test_mistakes_about_dividing_are_named_where_they_are_made(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        divided(**settings)


def test_momenta_of_divided_updates_are_everybodys(tmp_path: Path) -> None:
    """The noise is in the mean that the step is taken on, so that all that can be compared is everybody's result."""
    lost = lost_where(("Divide", 2, 1))
    divided(FedAdam(eta=0.1), first="client").start(
        grid_of(tmp_path, twist=lost, first=lambda context: start_arrays()), start_arrays(), num_rounds=3
    )
    (model, *_) = assert_everybody_has_the_same(tmp_path)
    # In the first round every number moves by η at most, times 0.74 for Flower's correction; the third's is below 1.
    assert 0 < np.abs(model["weight"].numpy() - start_arrays()["weight"].numpy()).max() < 0.3


def test_a_run_that_hides_less_from_round_to_round_is_charged_where_something_shows(tmp_path: Path) -> None:
    divided(share=1.0, share_decay=0.5).start(grid_of(tmp_path), start_arrays(), num_rounds=2)
    assert_everybody_has_the_same(tmp_path)
    spent = [Memory(tmp_path / f"node-{number}" / "state").spent() for number in range(len(SIZES))]
    assert spent == pytest.approx([mu_of(8.0, 1e-5) ** 2 / 2] * len(SIZES))
