"""What a protected app's client remembers: whatever becomes of its context, and whoever asks at the same time."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from fedveil.errors import ProtocolError
from fedveil.flower import Protected, protect
from fedveil.flower.app_memory import default_home, held
from fedveil.flower.app_setup import AppSetup
from fedveil.flower.client_app import HEADER, PARTS, in_array, out_of_array
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.codec import decode, encode
from flower_apps import AppGrid, app_of, start_arrays, trained

NOISE: dict[str, Any] = {"scheme": "dp-fedavg", "epsilon": 1.0, "clip": 1.0}


def run(grid: AppGrid, **settings: Any) -> Any:
    settings = {"scheme": "secagg", "deadline": 0.3, "evaluation": "drop", **settings}
    return Protected(FedAvg(), **settings).start(grid, start_arrays(), num_rounds=1)


def requests(grid: AppGrid, *kinds: str) -> list[Message]:
    """What was sent to the first client, of these kinds."""
    asked = [message for message, _ in grid.crossed if message.metadata.dst_node_id == 100]
    return [message for message in asked if type(request_in(message)).__name__ in kinds]


def request_in(message: Message) -> Any:
    return decode(out_of_array(message.content.array_records[PARTS]["common"]))


def code_of(reply: Message) -> str:
    return str(reply.content.config_records[HEADER]["code"])


def forgetting(app: ClientApp) -> ClientApp:
    """The same app; its node loses the context after every message, as where it is killed once a reply has left."""

    class Forgetful(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = app(message, context)
            context.state = RecordDict()
            return reply

    return Forgetful()


@pytest.mark.parametrize("kind", ["Train", "Unmask"])
def test_a_lost_context_lets_nothing_be_answered_twice(kind: str) -> None:
    grid = AppGrid(forgetting(app_of([protect()])))
    assert run(grid).arrays
    before = len(grid.crossed)
    grid.push_messages(requests(grid, kind))
    assert [code_of(reply) for _, reply in grid.crossed[before:]] == ["protocol"]


def test_of_messages_that_arrive_together_one_is_answered() -> None:
    """Each meets a snapshot of the context from before the others."""
    asked: list[Message] = []
    replies: list[Message] = []

    class SideBySide(AppGrid):
        def _push(self, message: Message) -> str:
            if message.metadata.dst_node_id != 100 or "arrays" not in message.content:
                return super()._push(message)
            asked.append(message)
            several = [threading.Thread(target=lambda: replies.append(self._alone(message))) for _ in range(3)]
            for thread in several:
                thread.start()
            for thread in several:
                thread.join()
            return super()._push(message)

        def _alone(self, message: Message) -> Message:
            context = Context(
                7, 100, {"partition-id": 0, "fedveil-state": f"{self._folder.name}/100"}, RecordDict(), {}
            )
            return self.app(Message(RecordDict({**message.content}), metadata=message.metadata), context)

    run(SideBySide(app_of([protect()])))
    assert len(asked) == 1
    assert sorted(code_of(reply) for reply in replies) == ["", "protocol", "protocol"]


def test_a_round_whose_work_was_ended_is_neither_free_nor_answered_again() -> None:
    ended = []

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        if number == 0 and not ended:
            ended.append(number)
            raise KeyboardInterrupt
        return trained(arrays, number)

    grid = AppGrid(app_of([protect(require={"epsilon": {"max": 1.0}})], train=train))
    with pytest.raises(KeyboardInterrupt):
        run(grid, **NOISE)
    with held(Path(grid._folder.name) / "100") as stored:
        assert stored.spent() > 0


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({"require": {"epsilon": {"max": 1.0}}}, id="require"),
        pytest.param({"require": {"epsilon": 1.0}}, id="require a value"),
        pytest.param({"policy": Policy(max_epsilon=1.0001)}, id="policy"),
    ],
)
def test_a_server_that_begins_a_new_run_every_round_spends_the_same_budget(own: dict[str, Any]) -> None:
    grid = AppGrid(app_of([protect(**own)]))
    answered = [bool(run(grid, **NOISE).train_metrics_clientapp) for _ in range(3)]
    assert answered == [True, False, False]
    codes = [code_of(reply) for message, reply in grid.crossed if "arrays" in message.content]
    assert codes == [""] * 5 + ["ended"] * 10


@pytest.mark.parametrize("own", [{}, {"delta": {"max": 1e-5}}], ids=["of the runs", "its own"])
def test_a_larger_delta_that_a_server_names_reopens_no_limit(own: dict[str, Any], tmp_path: Path) -> None:
    """What was spent at δ = 10⁻⁵ is worth less at 10⁻⁴, and the limit was reached before."""
    app = app_of([protect(require={"epsilon": {"max": 3.0}, **own})])
    asked = [(3.0, 1e-5, False), (0.5, 1e-5, True), (1.0, 1e-4, True), (0.4, 1e-4, True)]
    for epsilon, delta, over in asked:
        grid = AppGrid(app, node_config=lambda number: {"fedveil-state": str(tmp_path / str(number))})
        with contextlib.suppress(ProtocolError):
            run(grid, scheme="dp-fedavg", epsilon=epsilon, delta=delta)
        refused = {code_of(reply) for _, reply in grid.crossed} - {""}
        assert bool(refused) == over
    with held(tmp_path / "1") as memory:
        assert epsilon_of(math.sqrt(memory.spent()), 1e-5) <= 3.0 + 1e-6
        assert memory.smallest_delta() == 1e-5


def test_a_policy_that_names_no_epsilon_leaves_a_run_to_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of one's own are added to those that a run has: a server that takes it up again gets no more rounds."""
    grid = AppGrid(app_of([protect(policy=Policy(max_clip=1.0))]))

    def answered(lineage: str, attempt: int) -> bool:
        def setup(*given: Any, **named: Any) -> AppSetup:
            return replace(AppSetup(*given, **named), lineage=lineage * 32, attempt=attempt)

        monkeypatch.setattr("fedveil.flower.strategy.AppSetup", setup)
        return bool(run(grid, **NOISE).train_metrics_clientapp)

    assert [answered("a", attempt) for attempt in range(3)] == [True, False, False]
    assert answered("b", 0)  # another run has its own


def test_runs_at_the_same_time_spend_one_budget(tmp_path: Path) -> None:
    together = threading.Barrier(2, timeout=0.3)
    answered: list[int] = []

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait()
        return trained(arrays, number)

    def one() -> None:
        app = app_of([protect(policy=Policy(max_epsilon=1.0001))], train=train)
        grid = AppGrid(app, 2, node_config=lambda number: {"fedveil-state": str(tmp_path / str(number))})
        run(grid, deadline=10.0, **NOISE)
        asked = [
            (message.metadata.dst_node_id, reply) for message, reply in grid.crossed if "arrays" in message.content
        ]
        answered.extend(node for node, reply in asked if not code_of(reply))

    several = [threading.Thread(target=one) for _ in range(2)]
    for thread in several:
        thread.start()
    for thread in several:
        thread.join()
    assert sorted(answered) == [100, 101]  # whichever run came first


@pytest.mark.parametrize(
    "lie",
    [
        pytest.param(lambda epoch: replace(epoch, size=3, shuffled=True), id="smaller rounds"),
        pytest.param(lambda epoch: replace(epoch, rounds=20), id="more rounds"),
        pytest.param(lambda epoch: replace(epoch, clients=4, size=4), id="fewer clients"),
    ],
)
def test_an_epoch_is_held_to_the_settings(lie: Callable[[Any], Any]) -> None:
    grid = AppGrid(app_of([protect()]))
    run(grid)
    hello = requests(grid, "Hello")[0]
    fresh = AppGrid(app_of([protect()]))
    content = RecordDict({**hello.content})
    told = request_in(hello)
    content.array_records[PARTS]["common"] = in_array(encode(replace(told, epoch=lie(told.epoch))))
    fresh.push_messages([Message(content, metadata=hello.metadata)])
    assert code_of(fresh.crossed[0][1]) == "protocol"


def test_a_folder_that_cannot_be_written_is_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    grid = AppGrid(app_of([protect()]), node_config=lambda number: {"fedveil-state": str(tmp_path / "file" / "x")})
    with pytest.raises(ProtocolError, match="no folder that it can write"):
        run(grid)
    assert {code_of(reply) for _, reply in grid.crossed} == {"unwritable"}


def test_the_folder_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_home().is_relative_to(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert default_home().is_absolute()
    grid = AppGrid(app_of([protect(home=tmp_path / "own")]), node_config=lambda number: {"fedveil-state": ""})
    run(grid)
    folders = sorted((tmp_path / "own").iterdir())
    assert [folder.name for folder in folders] == [f"node-{node:016x}" for node in range(100, 105)]
    for path in (tmp_path / "own").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)
