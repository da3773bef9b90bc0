"""Somebody's own Flower app under pads: clients hold its model, and the server sees nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi, Strategy
from safetensors.numpy import load_file

from fedveil.client_held.messages import Finish
from fedveil.errors import CheckpointError, ConfigError, ProtocolError
from fedveil.flower import Protected, protect
from fedveil.flower.app_held import NoModelError, behind, form_of
from fedveil.flower.client_app import HEADER, PARTS, in_array
from fedveil.protocol.codec import encode
from fedveil.runs.folder import RunFolder, read_ledger
from fedveil.schemes.on_updates import VALUE_RANGE
from fedveil.uplink.fixed_point import FixedPoint
from flower_apps import (
    SIZES,
    AppGrid,
    app_of,
    assert_alike,
    everything_in,
    kind_of,
    lost_where,
    numbers,
    plain_run,
    request_in,
    start_arrays,
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
    assert len(read) == len(true) + 3
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


class _Meddling(AppGrid):
    """A server that changes what one client is sent; `meddle` is told the message."""

    def __init__(self, *own: Any, meddle: Callable[[AppGrid, Message], Message], **more: Any) -> None:
        super().__init__(*own, **more)
        self._meddle = meddle

    def answered(self, message: Message, node: int) -> list[Message]:
        return super().answered(self._meddle(self, message) if node == 101 else message, node)


def test_changed_sums_are_refused_three_times_and_then_the_client_leaves() -> None:
    said: list[str] = []

    def meddle(grid: AppGrid, message: Message) -> Message:
        if kind_of(message) == ("Begin", 2):
            latest = request_in(message).latest
            forged = Finish(1, replace(latest, hidden=latest.hidden + (1 << 62)))
            done = len(grid.crossed)
            for _ in range(4):
                AppGrid.answered(grid, _changed(message, forged), 101)
            said.extend(codes_in(grid)[done:])
        return message

    padded().start(_Meddling(app_of([protect()]), meddle=meddle), start_arrays(), num_rounds=2)
    assert said == ["unreadable"] * 3 + ["ended"]


def test_clients_who_are_sent_different_first_models_have_no_sum(tmp_path: Path) -> None:
    """A server that could begin with one model for one client, and another for the rest, would read it off the sum."""

    def meddle(grid: AppGrid, message: Message) -> Message:
        if kind_of(message) != ("Begin", 1):
            return message
        other = {name: Array(np.asarray(array.numpy() + 1)) for name, array in message.content["arrays"].items()}
        return Message(RecordDict({**message.content, "arrays": ArrayRecord(other)}), metadata=message.metadata)

    grid = _Meddling(app_of([protect()]), meddle=meddle)
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


def test_a_run_is_resumed_with_a_model_of_its_own_form_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "run"
    padded(out=out).start(grid_of(tmp_path), start_arrays(), 1)
    other = ArrayRecord({"weight": Array(np.zeros((4, 4)))})
    with pytest.raises(CheckpointError, match="other names"):
        padded(out=out, resume=True).start(grid_of(tmp_path), other, 2)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: padded(FedAdam(eta=0.1)), id="FedAdam"),
        pytest.param(lambda: padded(FedYogi()), id="FedYogi"),
        pytest.param(lambda: padded(FedAdagrad()), id="FedAdagrad"),
        pytest.param(lambda: padded(FedAvgM(), averages=True), id="FedAvgM, whatever is said of it"),
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
    nobody = behind(1 << 33)
    assert (nobody.version, len(nobody.weights.parameters)) == (-1, 1 << 33)
    assert nobody.weights.parameters.untyped_storage().nbytes() == 8


def test_a_form_holds_no_number() -> None:
    form = form_of(start_arrays())
    assert [(name, array.dtype, tuple(array.shape)) for name, array in form.items()] == [
        ("weight", "float32", (4, 3)),
        ("bias", "float64", (3,)),
        ("steps", "int64", ()),
    ]
    assert {array.data for array in form.values()} == {b""}
