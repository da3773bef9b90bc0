"""Somebody's own Flower app, protected: it trains what it would train, and the server never sees an update."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvg, FedAvgM, FedMedian, FedProx, Krum, Strategy

import fedveil.flower
import fedveil.flower.strategy as strategy_module
from docs.pages import blocks
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.flower import Protected, protect
from fedveil.flower.app_setup import AppSetup, agreed_app
from fedveil.flower.client_app import HEADER, PARTS, in_array, out_of_array
from fedveil.ledger.policy import Policy
from fedveil.ledger.statement import Ledger
from fedveil.runs.folder import RunFolder, read_ledger
from fedveil.runs.privacy_journal import PrivacyJournal
from flower_apps import (
    SIZES,
    AppGrid,
    MeddlingGrid,
    app_of,
    assert_alike,
    everything_in,
    given_otherwise,
    greedy_reader,
    kind_of,
    lost_where,
    numbers,
    plain_run,
    start_arrays,
    told_otherwise,
    trained,
)

ROUNDS = 2


def protected(strategy: Strategy, **settings: Any) -> Protected:
    return Protected(strategy, **{"scheme": "secagg", "deadline": 0.3, "evaluation": "drop", **settings})


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(FedAvg, id="FedAvg"),
        pytest.param(lambda: FedAdam(eta=0.05), id="FedAdam"),
        pytest.param(lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9), id="FedAvgM"),
        pytest.param(lambda: FedProx(proximal_mu=0.1), id="FedProx"),
    ],
)
def test_a_strategy_ends_where_it_would_without_protection(make: Callable[[], Strategy]) -> None:
    plain = plain_run(make())
    strategy = protected(make(), evaluation=None)
    result = strategy.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=ROUNDS)
    assert_alike(result.arrays, plain.arrays)
    for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp"):
        averaged, wanted = getattr(result, name), getattr(plain, name)
        assert averaged.keys() == wanted.keys() == {1, 2}
        for number in wanted:
            assert averaged[number].keys() == wanted[number].keys()
            for metric, value in wanted[number].items():
                assert averaged[number][metric] == pytest.approx(value, abs=1e-5)
    assert strategy.ledger.line("server").verdict == "aggregate only"
    assert strategy.ledger.rounds == ROUNDS


@pytest.mark.parametrize(
    ("kind", "counted"),
    [
        # Before the upload: it is not in the sum, whose pair masks others help to take off.
        pytest.param("Train", False, id="after keys were agreed on"),
        # After it: its own mask is opened by its neighbours, and it counts.
        pytest.param("Unmask", True, id="after its upload"),
    ],
)
def test_a_node_that_dies_costs_at_most_its_own_update(kind: str, counted: bool) -> None:
    grid = AppGrid(app_of([protect()]), twist=lost_where((kind, 2, 1)))
    result = protected(FedAvg()).start(grid, start_arrays(), num_rounds=3)
    plain = plain_run(FedAvg(), 3, without=lambda number, client: not counted and (number, client) == (2, 1))
    assert_alike(result.arrays, plain.arrays)


def test_a_round_that_cannot_be_opened_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    grid = AppGrid(app_of([protect()]), twist=lost_where(*(("Train", 1, client) for client in range(3))))
    result = protected(FedAvg(), out=tmp_path / "run").start(grid, start_arrays(), num_rounds=2)
    # The second round begins where the first did.
    assert_alike(result.arrays, plain_run(FedAvg(), 1).arrays)
    first, second = RunFolder(tmp_path / "run").metrics()
    assert "failed" in first
    assert "failed" not in second


@pytest.mark.parametrize("settings", [{}, {"metrics": "pass", "evaluation": "pass"}], ids=["averaged", "passed"])
@pytest.mark.parametrize(
    "scheme", [{"scheme": "secagg"}, {"scheme": "dp-secagg"}, {"scheme": "dp-fedavg"}, {"scheme": "nadp"}], ids=str
)
def test_nothing_that_crosses_the_grid_holds_an_update(scheme: dict[str, Any], settings: dict[str, Any]) -> None:
    seen: list[tuple[int, dict[str, np.ndarray], dict[str, np.ndarray]]] = []

    def watched(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = trained(arrays, number)
        if number == 2:
            raise ValueError(f"no luck with {float(moved['weight'][0, 0])!r}")
        seen.append((number, arrays, moved))
        # A matrix that nobody moves is public, and its numbers are everywhere.
        return moved, figures

    consent = {"metrics": ["pass", "average", "drop"], "evaluation": ["pass", "average", "drop"]}
    grid = AppGrid(app_of([protect(require=consent)], train=watched), 5)
    inner = FedAvg(fraction_evaluate=1.0)
    settings = {"evaluation": None, **scheme, **settings}
    protected(inner, **settings).start(grid, start_arrays(), num_rounds=1)
    assert len(seen) == 4  # everybody but the one whose app fails
    sent = b"".join(
        everything_in(reply.content) if reply.has_content() else repr(reply.error).encode() for _, reply in grid.crossed
    )
    for number, arrays, moved in seen:
        update = {name: moved[name] - arrays[name] for name in ("weight", "bias")}
        secret = {name: moved[name] for name in ("weight", "bias")}
        weighted = {name: SIZES[number] * update[name].astype(np.float64) for name in update}
        for look in (*numbers(update), *numbers(secret), *numbers(weighted)):
            assert look not in sent
    assert b"no luck" not in sent


def test_the_search_for_updates_finds_those_of_an_app_without_protection() -> None:
    grid = AppGrid(app_of())
    FedAvg().start(grid, start_arrays(), num_rounds=1)
    arrays = {name: array.numpy() for name, array in start_arrays().items()}
    moved, _ = trained(arrays, 0)
    sent = b"".join(everything_in(reply.content) for _, reply in grid.crossed)
    assert all(look in sent for look in numbers({"bias": moved["bias"]})[::3])


def _with_bias(value: Any) -> Callable[[dict[str, np.ndarray], int], Any]:
    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = trained(arrays, number)
        return ({**moved, "bias": np.asarray(value)} if number == 1 else moved), figures

    return train


def _with_figures(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, np.ndarray], int], Any]:
    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = trained(arrays, number)
        return moved, (change(figures) if number == 1 else figures)

    return train


@pytest.mark.parametrize(
    "train",
    [
        pytest.param(_with_bias(np.zeros(4)), id="another shape"),
        pytest.param(_with_bias(np.array(["a", "b", "c"])), id="no numbers"),
        pytest.param(_with_figures(lambda known: {"train_loss": 1.0}), id="no num-examples"),
        pytest.param(_with_figures(lambda known: {**known, "num-examples": 0}), id="no examples"),
        pytest.param(_with_figures(lambda known: {**known, "num-examples": 2.0**30}), id="too many examples"),
        pytest.param(_with_figures(lambda known: {**known, "all": [1.0, 2.0]}), id="a list among the metrics"),
    ],
)
def test_an_app_that_replies_in_another_form_is_missed_and_named_by_a_code(train: Any, tmp_path: Path) -> None:
    grid = AppGrid(app_of([protect()], train=train))
    result = protected(FedAvg(), out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    assert_alike(result.arrays, plain_run(FedAvg(), 1, without=lambda number, client: client == 1).arrays)
    (row,) = RunFolder(tmp_path / "run").metrics()
    assert row["clients"] == 4
    assert list(row["refused"]) == ["1"]
    codes = [reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed]
    assert [code for code in codes if code] == ["form"]


def test_an_update_that_is_no_number_weighs_nothing_and_tells_nobody() -> None:
    grid = AppGrid(app_of([protect()], train=_with_bias(np.full(3, np.nan))))
    result = protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    assert_alike(result.arrays, plain_run(FedAvg(), 1, without=lambda number, client: client == 1).arrays)
    codes = [reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed]
    assert set(codes) == {""}


@pytest.mark.parametrize("mods", [False, True], ids=["an app without the mod", "a server without the strategy"])
def test_two_lines_of_which_one_is_missing_train_nothing(mods: bool) -> None:
    if not mods:
        with pytest.raises(ProtocolError, match=r"mods=\[fedveil.flower.protect\(\)\]"):
            protected(FedAvg()).start(AppGrid(app_of()), start_arrays(), num_rounds=1)
        return
    grid = AppGrid(app_of([protect()]))
    result = FedAvg(fraction_evaluate=0.0).start(grid, start_arrays(), num_rounds=1)
    assert not result.arrays
    assert all("fedveil.flower.Protected" in str(reply.error.reason) for _, reply in grid.crossed)


def _cut(message: Message, reply: Message) -> Message:
    content = out_of_array(reply.content.array_records[PARTS]["reply"])[:-7]
    return _saying(reply, content)


def _saying(reply: Message, content: bytes) -> Message:
    return Message(
        RecordDict({HEADER: reply.content[HEADER], PARTS: ArrayRecord({"reply": in_array(content)})}),
        metadata=reply.metadata,
    )


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(_cut, id="cut off"),
        pytest.param(lambda message, reply: _saying(reply, b"rubbish" * 99), id="rubbish"),
        pytest.param(
            lambda message, reply: _saying(reply, out_of_array(message.content.array_records[PARTS]["common"])),
            id="the request itself",
        ),
        pytest.param(
            lambda message, reply: Message(
                RecordDict({"x": ArrayRecord({"y": Array(np.ones(3))})}), metadata=reply.metadata
            ),
            id="no message of ours",
        ),
    ],
)
def test_forged_uploads_cost_the_forger_its_own_round(forge: Callable[[Message, Message], Message]) -> None:
    def twist(message: Message, reply: Message) -> list[Message]:
        mine = (*kind_of(message), message.metadata.dst_node_id) == ("Train", 1, 101)
        return [forge(message, reply)] if mine else [reply]

    result = protected(FedAvg()).start(AppGrid(app_of([protect()]), twist=twist), start_arrays(), num_rounds=1)
    assert_alike(result.arrays, plain_run(FedAvg(), 1, without=lambda number, client: client == 1).arrays)


def test_a_node_that_answers_twice_counts_once() -> None:
    grid = AppGrid(app_of([protect()]), twist=lambda message, reply: [reply, reply])
    result = protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    assert_alike(result.arrays, plain_run(FedAvg(), 1).arrays)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"setup": "{}"}, id="no setup"),
        pytest.param({"client": -1}, id="no client"),
        pytest.param({"client": 3}, id="another client's number"),
        pytest.param({"setup": "x" * 100_000}, id="a setup without end"),
    ],
)
def test_a_client_refuses_messages_that_contradict_the_run(change: dict[str, Any]) -> None:
    """A server that changes its mind about a client in the middle of a run is told a code and gets nothing."""
    grid = AppGrid(app_of([protect()]))
    protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    message = next(message for message, _ in grid.crossed if kind_of(message)[0] == "Hello")
    for name, value in change.items():
        message.content.config_records[HEADER][name] = value
    before = len(grid.crossed)
    grid.push_messages([message])
    _, reply = grid.crossed[before]
    assert reply.content.config_records[HEADER]["code"] == "protocol"
    assert not reply.content.array_records


def test_a_round_is_answered_once_whatever_the_server_says_about_it() -> None:
    grid = AppGrid(app_of([protect()]))
    protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    before = len(grid.crossed)
    for message in [message for message, _ in grid.crossed if kind_of(message)[0] in ("Train", "Unmask")]:
        content = RecordDict({**message.content, "arrays": start_arrays()})
        grid.push_messages([Message(content, metadata=message.metadata)])
    codes = {reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed[before:]}
    assert codes == {"protocol"}


_OTHERS = (0, 2, 3, 4)


def _other_config(grid: AppGrid, message: Message) -> Message:
    return told_otherwise(message, lr=0.0) if kind_of(message)[0] == "Train" else message


def _unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedveil.flower.mod.told_with", lambda *told: b"")


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "were masks not bound"])
@pytest.mark.parametrize("unmask", ["always", "on-dropout"])
@pytest.mark.parametrize("scheme", ["secagg", "dp-secagg"])
def test_a_server_that_has_all_but_one_learn_nothing_reads_nothing_of_that_one(
    scheme: str, unmask: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its 16 numbers none; all of them, were masks not bound to what clients are told to do.

    Noise of dp-secagg stays on what is read: there a number counts as read within ten deviations. Uniform words come
    that near by chance in fewer than one of 2²⁰ cases.
    """
    if not bound:
        _unbound(monkeypatch)
    read = greedy_reader(monkeypatch)
    consent = {"unmask": ["on-dropout"]} if unmask != "always" else {}
    grid = MeddlingGrid(app_of([protect(require=consent)]), meddle=_other_config, of=_OTHERS)
    noise = {} if scheme == "secagg" else {"epsilon": 8.0, "clip": 50.0}
    strategy = protected(FedAvg(), scheme=scheme, unmask=unmask, metrics="drop", **noise)
    strategy.start(grid, start_arrays(), num_rounds=1)
    start = {name: array.numpy() for name, array in start_arrays().items()}
    moved, figures = trained(start, 1)
    true = np.concatenate([np.asarray(moved[name] - start[name], dtype=np.float64).reshape(-1) for name in start])
    near = 1e-3
    if noise:
        assert strategy._run is not None
        layout = strategy._run.train.course.journal.first
        assert layout is not None
        near = 10 * math.sqrt(float(layout.residual.sum()))
    else:
        true *= figures["num-examples"]
    (seen,) = read
    assert int((np.abs(seen[:16] - true) < near).sum()) == (0 if bound else 16)


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "were masks not bound"])
@pytest.mark.parametrize("scheme", ["secagg", "pads", "paraaegis"])
def test_a_server_that_has_all_but_one_evaluate_nothing_reads_no_figure_of_that_one(
    scheme: str, bound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an evaluation releases is the sum of figures times the number of examples, under masks of its own."""
    if not bound:
        _unbound(monkeypatch)
    read, said = greedy_reader(monkeypatch), dict[int, float]()

    def meddle(grid: AppGrid, message: Message) -> Message:
        return _other_config(grid, message) if message.metadata.message_type == "evaluate" else message

    def listening(message: Message, context: Any, call_next: Any) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type == "evaluate":
            said[int(context.node_config["partition-id"])] = reply.content["metrics"]["eval_loss"]
        return reply

    grid = MeddlingGrid(app_of([protect(), listening]), meddle=meddle, of=_OTHERS)
    settings = {"epsilon": 8.0, "share": 0.3} if scheme == "paraaegis" else {}
    strategy = protected(FedAvg(), scheme=scheme, evaluation="average", **settings)
    strategy.start(grid, start_arrays(), num_rounds=1)
    assert [said[client] for client in _OTHERS] == [0.0] * 4
    assert said[1] > 1
    assert (abs(float(read[-1][0]) - SIZES[1] * said[1]) < 1e-3) == (not bound)


def _by_envelope(message: Message, context: Any) -> bool:
    said = message.metadata
    return bool(said.group_id != "off" and said.ttl > 1e-3 and said.message_id != "off" and said.created_at > 1)


def _by_type(message: Message, context: Any) -> bool:
    return bool(message.content.config_records.get("more", {}).get("work", True))


def _by_order(message: Message, context: Any) -> bool:
    first = next(record for name, record in message.content.items() if name.startswith("more"))
    return bool(next(iter(first.values())))


def _by_run(message: Message, context: Any) -> bool:
    return bool(context.run_id != 0 and context.series_id == 0)


def _by_settings_order(message: Message, context: Any) -> bool:
    return next(iter(context.run_config)) == "a"


def _enveloped(name: str, value: Any) -> Callable[[Message, Any, bool], None]:
    def change(message: Message, context: Any, victim: bool) -> None:
        if not victim:
            message.metadata.__dict__[name] = value

    return change


def _typed(message: Message, context: Any, victim: bool) -> None:
    message.content["more"] = (MetricRecord if victim else ConfigRecord)({"work": 0})


def _ordered(message: Message, context: Any, victim: bool) -> None:
    for name in ("more 1", "more 0") if victim else ("more 0", "more 1"):
        message.content[name] = ConfigRecord({"work": int(name[-1])})


def _keyed(message: Message, context: Any, victim: bool) -> None:
    work = {"yes": 1, "no": 0} if victim else {"no": 0, "yes": 1}
    message.content["more"] = ConfigRecord(work)


def _run(name: str, value: int) -> Callable[[Message, Any, bool], None]:
    def change(message: Message, context: Any, victim: bool) -> None:
        if not victim:
            setattr(context, name, value)

    return change


def _settings(message: Message, context: Any, victim: bool) -> None:
    context.run_config = {"a": 1, "b": 2} if victim else {"b": 2, "a": 1}


@pytest.mark.parametrize("phase", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("works", "change"),
    [
        pytest.param(_by_envelope, _enveloped("_group_id", "off"), id="the message's group"),
        pytest.param(_by_envelope, _enveloped("_ttl", 1e-6), id="how long it lives"),
        pytest.param(_by_envelope, _enveloped("_message_id", "off"), id="its identifier"),
        pytest.param(_by_envelope, _enveloped("_created_at", 0.0), id="its age"),
        pytest.param(_by_type, _typed, id="a record's type"),
        pytest.param(_by_order, _ordered, id="the order of records"),
        pytest.param(_by_order, _keyed, id="the order of a record's keys"),
        pytest.param(_by_run, _run("run_id", 0), id="the run's number"),
        pytest.param(_by_run, _run("series_id", 3), id="its series"),
        pytest.param(_by_settings_order, _settings, id="the order of the run's configuration"),
    ],
)
def test_an_app_may_go_by_anything_it_is_told_and_one_that_is_told_otherwise_is_not_read(
    works: Callable[[Message, Any], bool],
    change: Callable[[Message, Any, bool], None],
    phase: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that has all but client 1 do nothing by something beside their configuration: either the apps never see
    it, or masks stay on. Uniform words come within 10⁻³ of one of 17 numbers by chance in fewer than one of 2³⁰ cases.
    """
    read, said = greedy_reader(monkeypatch), dict[int, float]()

    def meddling(message: Message, context: Any, call_next: Any) -> Message:
        number, identifier = int(context.node_config["partition-id"]), message.metadata.message_id
        if kind_of(message)[0] == "Train" and message.metadata.message_type == phase:
            change(message, context, number == 1)
        reply = call_next(message, context)
        reply.metadata.__dict__["_reply_to_message_id"] = identifier
        return reply

    def going_by_it(message: Message, context: Any, call_next: Any) -> Message:
        reply, given = call_next(message, context), message.content["arrays"]
        working = works(message, context) if message.metadata.message_type == phase else True
        if "arrays" in reply.content and not working:
            reply.content["arrays"] = given
        if "eval_loss" in reply.content["metrics"]:
            reply.content["metrics"]["eval_loss"] *= working
            said[int(context.node_config["partition-id"])] = reply.content["metrics"]["eval_loss"]
        return reply

    grid = AppGrid(app_of([meddling, protect(), going_by_it]))
    strategy = protected(FedAvg(), metrics="drop", evaluation="average" if phase == "evaluate" else "drop")
    strategy.start(grid, start_arrays(), num_rounds=1)
    if phase == "evaluate":
        assert said[1] > 1
        assert abs(float(read[-1][0]) - SIZES[1] * said[1]) > 1e-3
        return
    start = {name: array.numpy() for name, array in start_arrays().items()}
    moved, figures = trained(start, 1)
    true = np.concatenate([np.asarray(moved[name] - start[name], dtype=np.float64).reshape(-1) for name in start])
    assert not (np.abs(read[0][:16] - true * figures["num-examples"]) < 1e-3).any()


@pytest.mark.parametrize("what", ["its model", "the run's configuration"])
def test_clients_who_are_given_something_else_than_the_rest_have_no_sum(what: str, tmp_path: Path) -> None:
    """Of the run's configuration a SuperLink tells every node by itself."""

    def meddle(grid: AppGrid, message: Message) -> Message:
        return given_otherwise(message) if (what, kind_of(message)[0]) == ("its model", "Train") else message

    def run_config(number: int) -> dict[str, Any]:
        return {"epochs": 1 + (what != "its model" and number == 1)}

    grid = MeddlingGrid(app_of([protect()]), meddle=meddle, run_config=run_config)
    protected(FedAvg(), out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    assert "own mask cannot be taken off" in RunFolder(tmp_path / "run").metrics()[0]["failed"]


@pytest.mark.parametrize(
    ("own", "settings", "code"),
    [
        pytest.param({"require": {"scheme": ["dp-secagg", "nadp"]}}, {}, "required", id="another scheme"),
        pytest.param({"require": {"clients": {"min": 6}}}, {}, "required", id="too few clients"),
        pytest.param(
            {"require": {"collusion": {"min": 0.3}}}, {"collusion": 0.2}, "required", id="too little collusion"
        ),
        pytest.param({"require": {"metrics": "average"}}, {"metrics": "pass"}, "required", id="metrics in the clear"),
        pytest.param({}, {"metrics": "pass"}, "required", id="metrics in the clear, of which nobody spoke"),
        pytest.param({"require": {"cohort": {"min": 6}}}, {}, "required", id="rounds of all, who are too few"),
        pytest.param({"require": {"epsilon": {"max": 3}}}, {}, "required", id="an ε under masks alone"),
        pytest.param({"require": {"epsilon": {"max": 2}}}, {"scheme": "dp-fedavg"}, "required", id="too large an ε"),
        pytest.param({}, {"scheme": "dp-fedavg", "epsilon": 50.0}, "required", id="an ε that proves nothing"),
        pytest.param(
            {"require": {"epsilon": {"max": 3}}}, {"scheme": "nadp"}, "required", id="an ε beside noise that is shown"
        ),
        pytest.param({"require": {"first": "client"}}, {}, "required", id="a model that the server holds"),
        pytest.param({"policy": Policy(max_epsilon=1.0)}, {}, "settings", id="a limit on ε under masks alone"),
        pytest.param(
            {"policy": Policy(max_epsilon=3.0)},
            {"scheme": "dp-fedavg", "metrics": "pass"},
            "required",
            id="a limit on ε beside metrics in the clear",
        ),
    ],
)
def test_a_client_takes_part_on_its_own_terms(own: dict[str, Any], settings: dict[str, Any], code: str) -> None:
    grid = AppGrid(app_of([protect(**own)]))
    with pytest.raises(ProtocolError, match="cannot start"):
        protected(FedAvg(), **settings).start(grid, start_arrays(), num_rounds=1)
    codes = [reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed]
    assert codes
    assert set(codes) == {code}


def test_the_owners_policy_is_a_file_of_the_machine_and_counts_over_all_runs(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text("max_epsilon = 2.5\nmin_cohort = 3\n")

    def node_config(number: int) -> dict[str, Any]:
        state = str(tmp_path / f"node-{number}")
        return {"fedveil-state": state, "fedveil-policy": str(tmp_path / "policy.toml")}

    settings = {"scheme": "dp-fedavg", "epsilon": 2.0, "clip": 0.5}
    app = app_of([protect()])
    first = protected(FedAvg(), **settings)
    first.start(AppGrid(app, node_config=node_config), start_arrays(), num_rounds=1)
    again = AppGrid(app, node_config=node_config)  # nodes that were started anew, and another run
    second = protected(FedAvg(), **settings).start(again, start_arrays(), num_rounds=1)
    codes = {reply.content.config_records[HEADER]["code"] for _, reply in again.crossed}
    assert codes == {"", "ended"}
    assert not second.train_metrics_clientapp


@pytest.mark.parametrize("scheme", ["dp-fedavg", "nadp", "dp-secagg"])
def test_noise_is_what_the_ledger_says_it_is(scheme: str) -> None:
    """The mean's error over 3,000 numbers, beside the variance that the plan gives the sum.

    The sample variance of so many Gaussian numbers is within 12 % of the true one but for a chance of 4·10⁻⁶.
    """
    size, clients = 3000, 5

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        return {"flat": arrays["flat"] + 3.0 * (number + 1)}, {"num-examples": 5 + number}  # far beyond the clip

    arrays = ArrayRecord({"flat": Array(np.zeros(size))})
    strategy = protected(FedAvg(), scheme=scheme, epsilon=2.0, clip=0.5)
    result = strategy.start(AppGrid(app_of([protect()], train=train)), arrays, num_rounds=1)
    moved = result.arrays["flat"].numpy()
    assert strategy._run is not None
    layout = strategy._run.train.course.journal.first
    assert layout is not None
    planned = float(layout.residual.sum()) / clients**2
    error = moved - 0.5 / np.sqrt(size)  # everybody's clipped update is the same
    assert abs(error.mean()) < 5 * np.sqrt(planned / size)
    assert 0.88 < float(np.mean(error**2)) / planned < 1.12
    line = strategy.ledger.line("server")
    assert line.verdict == "differential privacy"
    assert line.unit == "all data of one client"
    worst = max(known.epsilon for known in strategy.ledger.lines if known.epsilon is not None)
    assert worst == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize("scheme", ["dp-fedavg", "nadp", "dp-secagg"])
def test_decaying_noise_is_charged_round_by_round_and_ends_at_the_target(scheme: str, tmp_path: Path) -> None:
    """Clients book every round for themselves, by the noise it had, and a journal that is read again says the same.

    The sample variance of 3,000 numbers is within 12 % of the true one but for a chance of 4·10⁻⁶ a round.
    """
    size, clients, rounds, decay = 3000, 5, 3, 0.5
    models: list[np.ndarray] = []

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        models.append(arrays["flat"])
        return {"flat": arrays["flat"] + 3.0}, {"num-examples": 5}

    start, app = ArrayRecord({"flat": Array(np.zeros(size))}), app_of([protect()], train=train)
    settings = {"scheme": scheme, "epsilon": 2.0, "clip": 0.5, "noise_decay": decay, "out": tmp_path / "run"}
    strategy = protected(FedAvg(), **settings)
    result = strategy.start(AppGrid(app), start, num_rounds=rounds)
    steps = np.diff(np.stack([*models[::clients], result.arrays["flat"].numpy()]), axis=0) - 0.5 / np.sqrt(size)
    variances = np.mean(steps**2, axis=1)
    assert strategy._run is not None
    journal = strategy._run.train.course.journal
    assert journal.first is not None
    assert journal.accountant is not None
    planned = float(journal.first.residual.sum()) / clients**2 * decay ** (2 * np.arange(rounds))
    np.testing.assert_allclose(variances / planned, 1.0, atol=0.12)
    worst = max(known.epsilon for known in strategy.ledger.lines if known.epsilon is not None)
    assert worst == pytest.approx(2.0, rel=1e-6)
    assert worst <= 2.0
    assert any("multiplied by 0.5 from each round to the next" in note for note in strategy.ledger.notes)
    again = PrivacyJournal(journal._job, tmp_path / "run" / "privacy.jsonl")
    assert again.accountant is not None
    for adversary, spent in journal.accountant.spent.items():
        np.testing.assert_allclose(again.accountant.spent[adversary], spent, rtol=1e-12)


@pytest.mark.parametrize("dropouts", ["repair", "tolerate"])
def test_noise_shared_with_a_node_that_dies_is_dealt_with(dropouts: str) -> None:
    grid = AppGrid(app_of([protect()]), twist=lost_where(("Train", 1, 1)))
    settings = {"scheme": "nadp", "epsilon": 8.0, "clip": 100.0, "dropouts": dropouts, "honest_arrivals": False}
    strategy = protected(FedAvg(), **settings)
    result = strategy.start(grid, start_arrays(), num_rounds=2)
    assert strategy._run is not None
    assert [len(row.get("refused", {})) for row in strategy._run._outcome.rows] == [0, 0]
    assert result.arrays or dropouts == "repair"  # where repairing would cost more than is left, rounds fail


def test_figures_that_pass_are_named_and_settle_the_verdict() -> None:
    strategy = protected(FedAvg(), metrics="pass", evaluation="pass")
    plain = plain_run(FedAvg())
    consent = protect(require={"metrics": "pass", "evaluation": "pass"})
    result = strategy.start(AppGrid(app_of([consent])), start_arrays(), num_rounds=ROUNDS)
    assert_alike(result.arrays, plain.arrays)
    assert result.train_metrics_clientapp[2]["train_loss"] == pytest.approx(
        plain.train_metrics_clientapp[2]["train_loss"], abs=1e-5
    )
    ledger = strategy.ledger
    named = {release.field: release.about for release in ledger.releases}
    assert (named["metrics.train_loss"], named["evaluate.eval_loss"]) == ("data", "data")
    assert named["metrics.num-examples"] == "public"
    assert ledger.line("server").verdict == "none"


def test_the_folder_holds_ledger_report_and_summary(tmp_path: Path) -> None:
    out = tmp_path / "run"
    strategy = protected(FedAvg(), out=out)
    strategy.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=ROUNDS)
    ledger = read_ledger(out)
    assert isinstance(ledger, Ledger)
    assert ledger.as_data() == strategy.ledger.as_data()
    assert any(note.startswith("trust level mod") for note in ledger.notes)
    report = (out / "report.md").read_text()
    assert "aggregate only" in report
    assert "upload.gradients" in report
    summary = RunFolder(out).summary()
    assert summary is not None
    assert (summary["rounds"], summary["scheme"], summary["parameters"]) == (ROUNDS, "secagg", 16)


class _KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        pytest.param(lambda: FedAdam(eta=0.05), {}, id="FedAdam under masks"),
        pytest.param(lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.9), {}, id="FedAvgM under masks"),
        pytest.param(FedAvg, {"scheme": "dp-fedavg", "epsilon": 2.0}, id="FedAvg under noise"),
    ],
)
def test_a_run_that_was_killed_goes_on_where_it_was(
    make: Callable[[], Strategy], settings: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def killed(message: Message, reply: Message) -> list[Message]:
        if kind_of(message) == ("Train", 3):
            raise _KilledError
        return [reply]

    with pytest.raises(_KilledError):
        protected(make(), out=out, **settings).start(AppGrid(app_of([protect()]), twist=killed), start_arrays(), 4)
    judged: list[int] = []
    strategy = protected(make(), out=out, resume=True, **settings)
    fresh = AppGrid(app_of([protect()]))  # another run of Flower's: nodes remember nothing
    result = strategy.start(fresh, start_arrays(), 4, evaluate_fn=lambda number, arrays: judged.append(number))
    assert judged == [2, 3, 4]
    rows = [row["round"] for row in RunFolder(out).metrics()]
    if settings:
        # The round that was asked for before the kill is paid for, and the last one then is one too many.
        assert (set(result.train_metrics_clientapp), rows) == ({3}, [1, 2, 3])
        line = read_ledger(out).line("server")
        assert line.epsilon is not None
        assert line.epsilon <= 2.0 + 1e-6
    else:
        assert (set(result.train_metrics_clientapp), rows) == ({3, 4}, [1, 2, 3, 4])
        assert_alike(result.arrays, plain_run(make(), 4).arrays)
        again = protected(make(), out=out, resume=True).start(fresh, start_arrays(), 4)
        assert_alike(again.arrays, result.arrays)


@pytest.mark.parametrize(
    ("scheme", "phase"), [("dp-fedavg", "Train"), ("dp-secagg", "Unmask"), ("nadp", "Train"), ("paraaegis", "Divide")]
)
@pytest.mark.parametrize("last", [1, 2])
def test_a_run_that_is_interrupted_in_a_round_has_it_in_its_ledger(
    last: int, scheme: str, phase: str, tmp_path: Path
) -> None:
    """As does whoever reads the journal later."""

    def killed(message: Message, reply: Message) -> list[Message]:
        if (*kind_of(message), message.metadata.dst_node_id) == (phase, last, 104):
            raise _KilledError
        return [reply]

    strategy, out = protected(FedAvg(), scheme=scheme, out=tmp_path / "run"), tmp_path / "run"
    with pytest.raises(_KilledError):
        strategy.start(AppGrid(app_of([protect()]), twist=killed), start_arrays(), num_rounds=3)
    whole = protected(FedAvg(), scheme=scheme, out=tmp_path / "whole")
    whole.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=3)
    ledger, ended = read_ledger(out).line("server").epsilon, read_ledger(tmp_path / "whole").line("server").epsilon
    assert ledger is not None
    assert ended is not None
    assert 0 < ledger < ended
    assert strategy.ledger.line("server").epsilon == ledger
    assert any("since a run was interrupted: 1; they count" in note for note in read_ledger(out).notes)
    assert strategy._run is not None
    now = strategy._run.train.course
    assert now.journal.accountant is not None
    read = PrivacyJournal(now.job, RunFolder(out).privacy_journal).accountant
    assert read is not None
    for adversary, spent in now.journal.accountant.spent.items():
        assert spent.tolist() == read.spent[adversary].tolist()


_CONSENT = {"metrics": ["pass", "average", "drop"], "evaluation": ["pass", "average", "drop"]}


def _figures_in(ledger: Ledger) -> set[str]:
    fields = {release.field for release in ledger.releases}
    return {field for field in fields if field.startswith(("metrics.", "evaluate.", "evaluation.", "header.names"))}


@pytest.mark.parametrize("scheme", ["secagg", "dp-secagg"])
def test_figures_of_a_round_that_failed_have_left_all_the_same(scheme: str) -> None:
    lost = lost_where(*(("Train", 1, client) for client in range(3)))
    grid = AppGrid(app_of([protect(require=_CONSENT)]), twist=lost)
    strategy = protected(FedAvg(), scheme=scheme, metrics="pass")
    strategy.start(grid, start_arrays(), num_rounds=1)
    assert any(reply.content.metric_records for _, reply in grid.crossed)
    assert _figures_in(strategy.ledger) == {"metrics.*"}
    assert strategy.ledger.line("server").verdict == "none"


def _killed_in(*where: Any, phase: str = "train") -> Callable[[Message, Message], list[Message]]:
    def twist(message: Message, reply: Message) -> list[Message]:
        if (*kind_of(message), message.metadata.dst_node_id - 100) == where and message.metadata.message_type == phase:
            raise _KilledError
        return [reply]

    return twist


@pytest.mark.parametrize(
    ("settings", "before", "now", "killed", "left"),
    [
        pytest.param(
            {"scheme": "dp-fedavg"},
            {"metrics": "pass"},
            {"metrics": "drop"},
            _killed_in("Train", 1, 4),
            {"metrics.*"},
            id="figures that passed in a round that never ended",
        ),
        pytest.param(
            {"scheme": "dp-fedavg"},
            {"evaluation": "pass"},
            {"evaluation": "drop"},
            _killed_in("evaluate", 0, 4, phase="evaluate"),
            {"evaluate.*"},
            id="evaluations that passed, before the first was over",
        ),
        pytest.param(
            {"scheme": "paraaegis", "epsilon": 8.0, "share": 0.3},
            {"evaluation": "average"},
            {"evaluation": "drop"},
            _killed_in("Begin", 2, 4),
            {"evaluation.behind", "header.names"},
            id="evaluations that were averaged",
        ),
        pytest.param(
            {"scheme": "secagg"},
            {"metrics": "average"},
            {"metrics": "drop"},
            _killed_in("Train", 1, 4),
            {"header.names"},
            id="figures that were averaged",
        ),
    ],
)
def test_a_resumed_run_has_in_its_ledger_what_earlier_attempts_have_sent(
    settings: dict[str, Any],
    before: dict[str, Any],
    now: dict[str, Any],
    killed: Callable[[Message, Message], list[Message]],
    left: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, out = app_of([protect(require={**_CONSENT, "scheme": settings["scheme"]})]), tmp_path / "run"
    folders = {"node_config": lambda number: {"fedveil-state": str(tmp_path / f"node-{number}")}}
    with monkeypatch.context() as patched:
        patched.setattr(strategy_module._Run, "end", lambda run: run.release())  # as where nothing is left to write
        with pytest.raises(_KilledError):
            protected(FedAvg(), out=out, **settings, **before).start(
                AppGrid(app, twist=killed, **folders), start_arrays(), num_rounds=3
            )
    strategy = protected(FedAvg(), out=out, resume=True, **settings, **now)
    strategy.start(AppGrid(app, **folders), start_arrays(), num_rounds=3)
    assert _figures_in(strategy.ledger) == left
    assert read_ledger(out).as_data() == strategy.ledger.as_data()


def test_while_a_run_goes_on_no_ledger_of_an_earlier_attempt_stands_for_it(tmp_path: Path) -> None:
    app, out, there = app_of([protect()]), tmp_path / "run", set[bool]()

    def looking(message: Message, reply: Message) -> list[Message]:
        there.add(RunFolder(out).ledger_file.exists())
        return [reply]

    for rounds in (1, 2):
        strategy = protected(FedAvg(), out=out, resume=rounds > 1)
        strategy.start(AppGrid(app, twist=looking), start_arrays(), num_rounds=rounds)
        assert RunFolder(out).ledger_file.exists()
    assert there == {False}


def test_a_run_that_has_nothing_left_to_do_has_its_whole_ledger(tmp_path: Path) -> None:
    app, out = app_of([protect()]), tmp_path / "run"
    for resume in (False, True):
        strategy = protected(FedAvg(), out=out, resume=resume, metrics="drop", evaluation="average")
        strategy.start(AppGrid(app), start_arrays(), num_rounds=1)
        assert _figures_in(strategy.ledger) == {"header.names"}


@pytest.mark.parametrize(
    ("make", "settings", "match"),
    [
        pytest.param(FedAvg, {"scheme": "pads", "first": "client"}, "first = 'server' and has 'client'", id="first"),
        pytest.param(
            lambda: FedAvg(weighted_by_key="epochs"),
            {"scheme": "pads"},
            "weighted_by_key = 'num-examples' and has 'epochs'",
            id="weights",
        ),
    ],
)
def test_what_a_ledger_rests_on_is_not_changed_by_going_on(
    make: Callable[[], Strategy], settings: dict[str, Any], match: str, tmp_path: Path
) -> None:
    app = app_of([protect(first=lambda context: start_arrays())])
    with pytest.raises(_KilledError):
        protected(FedAvg(), scheme="pads", out=tmp_path / "run").start(
            AppGrid(app, twist=_killed_in("Begin", 1, 4)), start_arrays(), num_rounds=2
        )
    with pytest.raises(CheckpointError, match=match):
        protected(make(), out=tmp_path / "run", resume=True, **settings).start(AppGrid(app), start_arrays(), 2)


def _telling(figures: dict[str, float] | None = None, names: list[str] | None = None) -> Any:
    """A client 1 that says other figures than it has, or calls them otherwise."""

    def twist(message: Message, reply: Message) -> list[Message]:
        kind, mine = kind_of(message)[0], message.metadata.dst_node_id == 101
        if not mine or kind not in ("Train", "evaluate"):
            return [reply]
        content = dict(reply.content)
        if figures is not None:
            content["metrics" if kind == "evaluate" else "fedveil.metrics"] = MetricRecord(figures)
        if names is not None:
            content[HEADER] = ConfigRecord({"code": "", "names": names})
        return [Message(RecordDict(content), metadata=reply.metadata)]

    return twist


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"num-examples": math.nan}, id="a weight that is no number"),
        pytest.param({"num-examples": math.inf}, id="one without measure"),
        pytest.param({"num-examples": -150}, id="one below nothing"),
        pytest.param({"num-examples": 5, "x": 1.0}, id="other names"),
        pytest.param({}, id="nothing"),
    ],
)
@pytest.mark.parametrize("phase", ["train", "evaluate"])
def test_a_client_whose_figures_pass_harms_neither_the_model_nor_the_run(
    phase: str, said: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """All the replies that a strategy is handed hold the same mean, whatever is said beside it."""
    own = {"train_loss": 1.0, "epochs": 2} if phase == "train" else {"eval_loss": 1.0}
    figures = {**own, **said} if "num-examples" in said and "x" not in said else said
    settings = {"metrics": "pass"} if phase == "train" else {"metrics": "drop", "evaluation": "pass"}
    grid = AppGrid(app_of([protect(require=_CONSENT)]), twist=_telling(figures))
    result = protected(FedAvg(), **settings).start(grid, start_arrays(), num_rounds=ROUNDS)
    assert_alike(result.arrays, plain_run(FedAvg(), ROUNDS).arrays)
    found = result.train_metrics_clientapp if phase == "train" else result.evaluate_metrics_clientapp
    assert set(found) == {1, 2}
    assert all(set(one) == set(own) and all(map(math.isfinite, one.values())) for one in found.values())
    assert ("node 101" in caplog.text) == (figures is said)


def test_one_client_does_not_decide_what_figures_are_called(caplog: pytest.LogCaptureFixture) -> None:
    grid = AppGrid(app_of([protect()]), twist=_telling(names=["loss"]))
    result = protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    assert dict(result.train_metrics_clientapp[1]) == pytest.approx(
        dict(plain_run(FedAvg(), 1).train_metrics_clientapp[1]), abs=1e-6
    )
    assert "client 1 (node 101)" in caplog.text


@pytest.mark.parametrize("first", [100, 102, 500], ids=["the same nodes", "some of them", "others"])
def test_whoever_cannot_be_recognised_is_charged_for_the_one_that_spent_most(first: int, tmp_path: Path) -> None:
    settings = {"scheme": "dp-fedavg", "epsilon": 2.0, "out": tmp_path / "run"}
    begun = protected(FedAvg(fraction_train=0.6), **settings)
    begun.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=1)
    resumed = protected(FedAvg(fraction_train=0.6), resume=True, **settings)
    with pytest.raises(ProtocolError, match="cannot start again: round 2 would bring clients over the privacy target"):
        resumed.start(AppGrid(app_of([protect()]), first=first), start_arrays(), num_rounds=2)
    assert begun._run is not None
    assert resumed._run is not None
    before, after = (run._run.train.course.journal.accountant for run in (begun, resumed))
    assert before is not None
    assert after is not None
    assert before.spent["server"].tolist().count(0.0) == 2
    assert after.spent["server"].tolist().count(0.0) <= (2 if first == 100 else 0)
    assert [resumed._run._nodes[number] for number in range(5)] == {
        100: [100, 101, 102, 103, 104],
        102: [105, 106, 102, 103, 104],
        500: [500, 501, 502, 503, 504],
    }[first]


def test_a_run_is_resumed_with_its_own_settings_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    protected(FedAvg(), out=out).start(AppGrid(app_of([protect()])), start_arrays(), 1)
    with pytest.raises(CheckpointError, match="other settings"):
        protected(FedAvg(), out=out, resume=True, threshold=0.9).start(AppGrid(app_of([protect()])), start_arrays(), 2)
    (out / "app.state").write_bytes(b"rubbish")
    with pytest.raises(CheckpointError, match="damaged"):
        protected(FedAvg(), out=out, resume=True).start(AppGrid(app_of([protect()])), start_arrays(), 2)
    with pytest.raises(CheckpointError, match="holds another run"):
        protected(FedAvg(), out=out).start(AppGrid(app_of([protect()])), start_arrays(), 2)


class _Median(FedAvg):
    """A mean by its class, and none by what it does."""

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        raise AssertionError


class _Custom(Strategy):
    """A strategy of somebody's own, of which nobody knows what it does."""

    configure_train = configure_evaluate = aggregate_train = aggregate_evaluate = summary = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        pytest.param(lambda: Protected(FedMedian()), "single updates", id="medians"),
        pytest.param(lambda: Protected(Krum()), "single updates", id="Krum"),
        pytest.param(lambda: Protected(_Custom()), "averages=True", id="an unknown strategy"),
        pytest.param(lambda: Protected(_Median()), "aggregate_train of its own", id="an aggregation of one's own"),
        pytest.param(
            lambda: Protected(FedAvg(train_metrics_aggr_fn=lambda records, key: None)), "one reply", id="own figures"
        ),
        pytest.param(lambda: Protected(Protected(FedAvg())), "already", id="twice"),
        pytest.param(lambda: Protected(FedAvg(), scheme="secag"), "secagg", id="a mistyped scheme"),
        pytest.param(lambda: Protected(FedAvg(), epsilon=3.0), "epsilon", id="an option of another scheme"),
        pytest.param(lambda: Protected(FedAvg(), threshold=7.0), "threshold", id="a threshold out of range"),
        pytest.param(lambda: Protected(FedAvg(), metrics="mean"), "average", id="an unknown way with metrics"),
        pytest.param(lambda: Protected(FedAvg(), scheme="nadp", metrics="average"), "claim", id="averages under noise"),
        pytest.param(lambda: Protected(FedAvg(), scheme="nadp", noise_decay=1.5), "noise_decay", id="noise that grows"),
        pytest.param(lambda: Protected(FedAvg(), noise_decay=0.9), "noise_decay", id="a decay of no noise"),
        pytest.param(lambda: Protected(FedAvg(), resume=True), "out", id="resuming nothing"),
        pytest.param(lambda: protect(require={"schem": "secagg"}), "scheme", id="an unknown requirement"),
        pytest.param(lambda: Protected(FedAvg()).ledger, "start", id="a ledger before the run"),
        pytest.param(lambda: Protected(FedAvg(), clients="5"), r"clients .* '5'", id="clients as text"),  # type: ignore[arg-type]
        pytest.param(lambda: Protected(FedAvg(), clients=-1), r"clients .* -1", id="fewer clients than none"),
        pytest.param(lambda: Protected(FedAvg(), scheme=None), "scheme must", id="no scheme"),  # type: ignore[arg-type]
        pytest.param(lambda: Protected(FedAvg(), metrics=["pass"]), "metrics", id="several ways"),  # type: ignore[arg-type]
        pytest.param(
            lambda: Protected(FedAvg(), scheme="pads", first=["client"]),  # type: ignore[arg-type]
            "Unknown first",
            id="several first models",
        ),
        pytest.param(lambda: Protected(FedAvg(), keep_days="3"), "keep_days", id="days as text"),  # type: ignore[arg-type]
        pytest.param(lambda: Protected(FedAvg(), out=3), "out must be a path", id="no path"),  # type: ignore[arg-type]
        pytest.param(lambda: Protected(FedAvg(), deadline=-1), r"deadline.* -1", id="a deadline before the run"),
        pytest.param(lambda: Protected(FedAvg(), deadline="5"), "deadline", id="a deadline as text"),  # type: ignore[arg-type]
        pytest.param(
            lambda: Protected(FedAdam(eta=None), scheme="pads"),  # type: ignore[arg-type]
            "eta of FedAdam must be a number",
            id="a step without a rate",
        ),
        pytest.param(
            lambda: Protected(FedAvg(), out="/dev/null/run").start(AppGrid(app_of()), start_arrays(), 1),
            "/dev/null/run.* cannot be used",
            id="a folder below a file",
        ),
        pytest.param(
            lambda: Protected(FedAvg()).start(AppGrid(app_of()), {}, 1),  # type: ignore[arg-type]
            "initial_arrays must be an ArrayRecord",
            id="arrays in a dictionary",
        ),
        pytest.param(
            lambda: Protected(FedAvg()).start(AppGrid(app_of()), start_arrays(), 1, timeout="9"),  # type: ignore[arg-type]
            "timeout",
            id="a timeout as text",
        ),
        pytest.param(lambda: protect(keep_days="3"), "keep_days", id="a client's days as text"),  # type: ignore[arg-type]
        pytest.param(lambda: protect(home=3), "home must be a path", id="no home"),  # type: ignore[arg-type]
        pytest.param(lambda: protect(models=3), "models must be a path", id="no folder"),  # type: ignore[arg-type]
        pytest.param(lambda: protect(first="arrays"), "first must be", id="no function"),  # type: ignore[arg-type]
        pytest.param(lambda: protect(require=["secagg"]), "require must", id="names alone"),  # type: ignore[arg-type]
        pytest.param(
            lambda: protect(policy={"max_epsilon": 3}),  # type: ignore[arg-type]
            r"Policy\(max_epsilon=3.0\)",
            id="a policy in a dictionary",
        ),
    ],
)
def test_mistakes_are_named_where_they_are_made(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()


def test_what_is_required_may_be_a_tuple_as_well_as_a_list() -> None:
    grid = AppGrid(app_of([protect(require={"scheme": ("dp-fedavg", "secagg")})]))
    assert protected(FedAvg()).start(grid, start_arrays(), num_rounds=1).train_metrics_clientapp


@pytest.mark.parametrize("own", [{}, {"require": {"evaluation": ["average", "drop"]}}], ids=["default", "refused"])
def test_evaluations_in_the_clear_need_the_clients_consent(own: dict[str, Any]) -> None:
    grid = AppGrid(app_of([protect(**own)]))
    strategy = protected(FedAvg(), evaluation="pass")
    result = strategy.start(grid, start_arrays(), num_rounds=1)
    assert result.arrays
    assert not result.evaluate_metrics_clientapp
    assert all(reply.has_error() for message, reply in grid.crossed if message.metadata.message_type == "evaluate")


class _Personal(FedAvg):
    """Sends every node a configuration of its own."""

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Any) -> Any:
        for message in super().configure_train(server_round, arrays, config, grid):
            own = ConfigRecord({"for": message.metadata.dst_node_id})
            yield Message(
                RecordDict({**message.content, "config": own}),
                dst_node_id=message.metadata.dst_node_id,
                message_type="train",
            )


def test_what_is_sent_is_the_same_for_everybody() -> None:
    strategy = protected(_Personal(), averages=True)
    with pytest.raises(ConfigError, match="of their own"):
        strategy.start(AppGrid(app_of([protect()])), start_arrays(), num_rounds=1)


def test_a_strategy_is_started_once() -> None:
    strategy, grid = protected(FedAvg()), AppGrid(app_of([protect()]))
    strategy.start(grid, start_arrays(), num_rounds=1)
    with pytest.raises(ConfigError, match="of its own"):
        strategy.start(grid, start_arrays(), num_rounds=1)


def test_a_run_that_cannot_be_resumed_says_so(tmp_path: Path) -> None:
    protected(FedAvg(), out=tmp_path / "run").start(AppGrid(app_of([protect()])), start_arrays(), 1)
    with pytest.raises(ProtocolError, match="cannot start again"):
        protected(FedAvg(), out=tmp_path / "run", resume=True).start(AppGrid(app_of()), start_arrays(), 2)


def _large(arrays: dict[str, np.ndarray], number: int) -> Any:
    """A counter of batches, as BatchNorm has it, and a figure in milliseconds, of 60,000 examples."""
    moved, figures = trained(arrays, number)
    moved["steps"] = arrays["steps"] + 1875
    return moved, {**figures, "num-examples": 60_000, "ms": 1500.0}


def test_ordinary_numbers_of_many_examples_are_within_the_range() -> None:
    grid = AppGrid(app_of([protect()], train=_large))
    result = protected(FedAvg()).start(grid, start_arrays(), num_rounds=1)
    assert result.arrays["steps"].numpy() == pytest.approx(1877.0, abs=1e-9)
    assert result.train_metrics_clientapp[1]["ms"] == pytest.approx(1500.0, abs=1e-9)


@pytest.mark.parametrize("what", ["steps", "ms"])
def test_the_server_knows_that_numbers_were_cut_off_and_not_whose(what: str, tmp_path: Path) -> None:
    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        moved, figures = _large(arrays, number)
        if number == 1 and what == "steps":
            moved["steps"] = arrays["steps"] + 2**40
        if number == 1 and what == "ms":
            figures["ms"] = math.nan
        return moved, figures

    grid = AppGrid(app_of([protect()], train=train))
    result = protected(FedAvg(), out=tmp_path / "run").start(grid, start_arrays(), num_rounds=1)
    (row,) = RunFolder(tmp_path / "run").metrics()
    assert row.get("cut_off") == (pytest.approx(0.2) if what == "steps" else None)
    assert math.isnan(result.train_metrics_clientapp[1]["ms"]) == (what == "ms")
    assert {reply.content.config_records[HEADER]["code"] for _, reply in grid.crossed} == {""}


@pytest.mark.parametrize(
    "size", [{"clients": 10**6}, {"rounds": 10**6}, {"clients": 9000, "cohort": 10, "rounds": 9000}], ids=str
)
def test_settings_without_measure_are_refused_before_any_work(size: dict[str, int]) -> None:
    settings = {"scheme": "nadp", "clients": 5, "rounds": 2, "secrets": "os", **size}
    with pytest.raises(ConfigError, match="more than"):
        agreed_app(AppSetup("0" * 32, 0, "train", settings, 1, "drop", ""))


def test_the_pages_lines_do_what_they_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [text for language, text in blocks("how-to/protect-flower-app.md") if language == "python"]
    first, held, divided, terms, alone = texts
    known: dict[str, Any] = {
        "ClientApp": app_of,
        "FedAvg": FedAvg,
        "Policy": Policy,
        "fedveil": fedveil.flower and fedveil,
    }
    client, _, server = first.partition("\n\n")[2].partition("\n\n")
    exec(client, known)
    known |= {"grid": AppGrid(known["client_app"]), "initial_arrays": start_arrays()}
    exec(server.replace("num_rounds=10", "num_rounds=1"), known)
    assert capsys.readouterr().out == "aggregate only\n"
    for text in (divided, terms, alone):
        exec(text, known)
    monkeypatch.chdir(tmp_path)
    arrays = {name: torch.from_numpy(np.asarray(array.numpy())) for name, array in start_arrays().items()}
    network = torch.nn.Module()
    network.state_dict = lambda: arrays  # type: ignore[method-assign,assignment,misc]
    client, _, server = held.partition("strategy = ")
    known |= {"ArrayRecord": ArrayRecord, "network": lambda: network, "initial_arrays": ArrayRecord(arrays)}
    exec(client, known)
    known["grid"] = AppGrid(known["client_app"])
    exec("strategy = " + server.replace("num_rounds=10", "num_rounds=1"), known)
    assert len(list((tmp_path / "models").glob("node-*.safetensors"))) == len(SIZES)


def test_of_a_fraction_the_size_is_taken_and_who_is_asked_is_the_beacons(tmp_path: Path) -> None:
    inner = FedAvg(fraction_train=0.6, min_train_nodes=3)
    strategy = protected(inner, out=tmp_path / "run")
    grid = AppGrid(app_of([protect()]))
    strategy.start(grid, start_arrays(), num_rounds=3)
    assert [row["clients"] for row in RunFolder(tmp_path / "run").metrics()] == [3, 3, 3]
    settings = json.loads(grid.crossed[0][0].content.config_records[HEADER]["setup"])["settings"]
    assert settings["cohort"] == 3
