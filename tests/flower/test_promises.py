"""A client that has promised to answer a round keeps that promise and its price, whatever happens in the middle."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedveil.errors import Code, FedVeilError
from fedveil.flower.client_memory import DamagedError, Memory
from fedveil.flower.message_handler import MessageHandler
from fedveil.flower.server_app import serve
from fedveil.framing import unpack
from fedveil.protocol.codec import decode
from fedveil.work.clipping import ClippedSamples, ClippedUpdate
from flower.in_process import InProcessGrid, context_of, make_homes

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "rounds": 1,
    "seed": 1,
    "batch_size": 16,
    "deadline": 2.0,
    "epsilon": 3.0,
}
SCHEMES = ["ldp", "dp-fedavg"]


class Listening(InProcessGrid):
    """Keeps the parcels that each home was handed."""

    def __init__(self, homes: list[Path]) -> None:
        super().__init__(homes)
        self.parcels: dict[Path, list[bytes]] = {home: [] for home in homes}
        self.before: Callable[[Path, str], None] = lambda home, kind: None

    def _deliver(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
        self.parcels[home].append(parcel)
        self.before(home, kind_of(parcel))
        return super()._deliver(home, parcel, timeout=timeout)


def kind_of(parcel: bytes) -> str:
    return type(decode(unpack(parcel)[1]["common"])).__name__


def code(reply: bytes) -> str:
    return str(unpack(reply)[0]["code"])


def breaking(monkeypatch: pytest.MonkeyPatch, error: BaseException | Callable[[], Any]) -> None:
    """From now on local work fails in the middle, in a way that is nobody's idea."""

    def run_many(*arguments: Any, **named: Any) -> Any:
        if isinstance(error, BaseException):
            raise error
        error()
        yield

    for kind in (ClippedSamples, ClippedUpdate):
        monkeypatch.setattr(kind, "run_many", run_many)


def asked_to_train(tmp_path: Path, scheme: str) -> tuple[Path, bytes]:
    """A home as it was before the first round's work, and the message that asks for it."""
    homes = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(homes):
        (home / "policy.toml").write_text("max_epsilon = 9.0\n")
        (home / "client.toml").write_text(f'client = {number}\nsimulation = true\npolicy = "policy.toml"\n')
    grid = Listening(homes)

    class AskedError(Exception):
        pass

    def stop(home: Path, kind: str) -> None:
        if kind in ("Train", "Begin"):
            raise AskedError

    grid.before = stop
    with pytest.raises(FedVeilError):
        serve(grid, context_of(out=str(tmp_path / "run"), scheme=scheme, **SETTINGS))
    found = grid.parcels[homes[0]][-1]
    assert kind_of(found) in ("Train", "Begin")
    assert Memory(homes[0] / "state").spent() == 0.0
    return homes[0], found


def answered(home: Path) -> tuple[int, int]:
    (file,) = (home / "state").glob("*.run.sealed")
    kept = Memory(home / "state").recall(file.name.removesuffix(".run.sealed"), device=CPU)
    assert kept is not None
    return kept.promised.answered


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "error", [RuntimeError("out of ideas"), MemoryError(), KeyboardInterrupt()], ids=lambda one: type(one).__name__
)
def test_whatever_is_raised_in_the_middle_leaves_the_promise_and_its_price(
    scheme: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, parcel = asked_to_train(tmp_path, scheme)
    with monkeypatch.context() as broken:
        breaking(broken, error)
        desk = MessageHandler(home)
        if isinstance(error, Exception):
            assert code(desk.handle(parcel)) == Code.INTERNAL
        else:
            with pytest.raises(KeyboardInterrupt):
                desk.handle(parcel)
    spent = Memory(home / "state").spent()
    assert spent > 0
    assert answered(home) > (-1, 0)
    # Well again, it does not answer what it was charged for and refused, whichever process is asked.
    for one in (desk, MessageHandler(home)):
        assert code(one.handle(parcel)) == Code.INTERNAL
    assert Memory(home / "state").spent() == spent


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_worker_killed_in_the_middle_has_promised_and_paid(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, parcel = asked_to_train(tmp_path, scheme)

    def killed() -> None:
        pid = os.fork()
        if pid == 0:
            breaking(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
            MessageHandler(home).handle(parcel)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    killed()
    once = Memory(home / "state").spent()
    assert once > 0
    assert answered(home) > (-1, 0)
    # Nothing has left: handed over again, the message is answered, and paid for once more.
    assert code(MessageHandler(home).handle(parcel)) == ""
    assert math.isclose(Memory(home / "state").spent(), 2 * once)


def test_a_worker_that_dies_of_a_message_is_not_made_to_die_of_it_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it dies may depend on its data: a server that could try as often as it likes would learn them."""
    home, parcel = asked_to_train(tmp_path, "ldp")
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            breaking(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
            MessageHandler(home).handle(parcel)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    spent = Memory(home / "state").spent()
    assert code(MessageHandler(home).handle(parcel)) == Code.INTERNAL
    assert Memory(home / "state").spent() == spent


def test_a_promise_that_is_deleted_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, parcel = asked_to_train(tmp_path, "ldp")
    pid = os.fork()
    if pid == 0:
        breaking(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        MessageHandler(home).handle(parcel)
    os.waitpid(pid, 0)
    (promise,) = (home / "state").glob("*.promise.sealed")
    promise.unlink()
    with pytest.raises(DamagedError, match="restored"):
        answered(home)
    assert code(MessageHandler(home).handle(parcel)) == Code.STATE
