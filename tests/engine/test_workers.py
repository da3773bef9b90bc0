"""Clients' work in several processes: the same model bit for bit, whatever becomes of them, and none is left behind."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedveil
from federation import job, same_bits, trained
from fedveil.engine import SharedWork
from fedveil.errors import DataError, NumericError
from fedveil.processes import descendants
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.runs.loop import Outcome, client_role, fresh_state, train_job
from fedveil.work.messages import ManyAtOnce

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")

PICTURES = {"model": "cnn", "options": {"width": 4}, "reshape": (1, 8, 8)}
CASES: dict[str, dict[str, Any]] = {
    "local epochs": {"scheme": "fedavg", "local_epochs": 2, "batch_size": 16, "client_momentum": 0.5, **PICTURES},
    "local epochs in groups": {"scheme": "fedavg", "local_epochs": 2, "batch_size": 8, "clients": 40},
    "adam of clients": {
        "scheme": "fedavg",
        "local_epochs": 2,
        "batch_size": 16,
        "client_optimiser": "adam",
        **PICTURES,
    },
    "head noise": {"scheme": "lossless", "vectorise": False},
    "in groups, some of one client": {"scheme": "lossless", "how": "size", "ratio": 3.0, "clients": 7},
    "batch norm": {"scheme": "fedavg", "vectorise": False, "options": {"depth": 2, "width": 16, "norm": "batch"}},
    "augmentation": {"scheme": "fedavg", "local_steps": 2, "augment": "crop:2,flip,cutout:3", **PICTURES},
    "clipped samples": {"scheme": "nadp", "how": "size", "clients": 6, "dtype": "float32"},
    "sampled in secret": {"scheme": "ldp", "secret_sampling": 0.05, "clients": 3},
    "clipped updates": {"scheme": "cdp", "local_epochs": 1, "batch_size": 16, **PICTURES},
    "clipped updates in groups": {"scheme": "cdp", "local_epochs": 1, "batch_size": 8, "clients": 40},
    "masks": {"scheme": "veil-secagg", "vectorise": False},
    "a vote": {"scheme": "paraaegis", "cipher": "pads", "vote": "histogram", "local_steps": 2, **PICTURES},
}


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """With more than one, copies of this process meet a pool of threads that is not there."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.randn(512, 512) @ torch.randn(512, 512)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units this process has computed itself, each time that it did."""
    counts: list[int] = []
    for kind in ManyAtOnce.__subclasses__():
        for each in (kind, *kind.__subclasses__()):
            if "run_units" in vars(each):
                monkeypatch.setattr(each, "run_units", counting(each.run_units, counts))
    return counts


def counting(run_units: Callable[..., Iterator[Any]], counts: list[int]) -> Callable[..., Iterator[Any]]:
    def counted(self: Any, workspace: Any, broadcast: Any, clients: Any, units: Any, *, round: int) -> Iterator[Any]:
        counts.append(len(units))
        return run_units(self, workspace, broadcast, clients, units, round=round)

    return counted


def done(one: Job) -> Outcome:
    return train_job(one, state=fresh_state(one))


def facts(outcome: Outcome) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in outcome.rows]


SLOW = {"sampled in secret"}


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES])
def test_any_number_of_workers_gives_the_same_model_bit_for_bit(case: str, computed: list[int]) -> None:
    settings = {"rounds": 2, "dtype": "float32", "evaluate_every": 0, **CASES[case]}
    alone = done(job(**settings, workers=1))
    assert computed
    computed.clear()
    shared = done(job(**settings, workers=2))
    assert not computed  # all of it was done by others
    assert same_bits(alone.state.weights.parameters, shared.state.weights.parameters)
    assert same_bits(alone.state.weights.statistics, shared.state.weights.statistics)
    assert facts(alone) == facts(shared)
    assert not descendants(os.getpid())


def in_a_copy(then: Callable[[], None]) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss that does something in other processes than this one."""
    here = os.getpid()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if os.getpid() != here:
            then()
        return nn.functional.cross_entropy(output, target)

    return loss


def federation(clients: int = 6, *, loss: Any = "cross-entropy", **settings: Any) -> fedveil.Trained:
    generator = torch.Generator().manual_seed(3)
    data = [(torch.randn(20, 6, generator=generator), torch.arange(20) % 3) for _ in range(clients)]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    given = {"rounds": 2, "local_epochs": 1, "batch_size": 5, "seed": 1, "progress": False, **settings}
    return fedveil.train(net, data, scheme="fedavg", loss=loss, **given)


def vector(trained: fedveil.Trained) -> Tensor:
    return nn.utils.parameters_to_vector(trained.model.parameters()).detach()


def test_what_a_killed_worker_was_at_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    expected = vector(federation(loss=in_a_copy(lambda: None), workers=1))
    killed = federation(loss=in_a_copy(lambda: os.kill(os.getpid(), signal.SIGKILL)), workers=2)
    assert same_bits(vector(killed), expected)
    assert [record.levelname for record in caplog.records].count("WARNING") == 2  # a line for each of them
    assert "signal 9" in caplog.text
    assert not descendants(os.getpid())


def test_one_of_two_workers_is_killed(tmp_path: Path) -> None:
    marker = tmp_path / "killed"

    def once() -> None:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    killed = federation(clients=12, loss=in_a_copy(once), workers=2)
    assert marker.exists()
    assert same_bits(vector(killed), vector(federation(clients=12, loss=in_a_copy(lambda: None), workers=1)))


class Fading(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples drawn anew each time, of which one cannot be read from some round on."""

    gone = False

    def __init__(self, client: int) -> None:
        self.client = client

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        if Fading.gone and (self.client, number) == (2, 7):
            raise OSError("the disk is gone")
        return number + torch.rand(4), number % 3


def fading(round: int, rounds: int) -> float:
    """A schedule, which is asked wherever clients train."""
    Fading.gone = round == 1
    return 1.0


def train_lazily(**settings: Any) -> fedveil.Trained:
    Fading.gone = False
    torch.manual_seed(1)
    clients, given = [Fading(number) for number in range(4)], {"local_epochs": 1, "batch_size": 4, **settings}
    return fedveil.train(nn.Linear(4, 3), clients, scheme="fedavg", seed=1, progress=False, **given)


def test_samples_may_be_read_in_workers(computed: list[int]) -> None:
    expected = vector(train_lazily(rounds=2, workers=1))
    computed.clear()
    assert same_bits(vector(train_lazily(rounds=2, workers=2)), expected)
    assert not computed


def test_an_error_in_a_worker_is_the_one_that_a_single_process_raises() -> None:
    texts = set()
    for workers in (1, 2):
        with pytest.raises(DataError) as raised:
            train_lazily(rounds=3, workers=workers, lr_schedule=fading)
        texts.add(str(raised.value))
        assert isinstance(raised.value.__cause__, OSError)
    assert len(texts) == 1
    assert "Client 2, sample 7" in texts.pop()
    assert not descendants(os.getpid())


def test_numbers_that_run_away_are_refused_in_the_same_words() -> None:
    said = []
    for workers in (1, 2):
        with pytest.raises(NumericError) as raised:
            federation(loss="square", lr=1e12, workers=workers)
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    expected = vector(federation(rounds=3, workers=1))
    federation(rounds=1, workers=2, out=tmp_path / "run")
    resumed = federation(rounds=3, workers=1, out=tmp_path / "run", resume=True)
    assert same_bits(vector(resumed), expected)


class Threads(nn.Module):
    """Notes in how many threads it is computed."""

    seen: ClassVar[set[int]] = set()

    def forward(self, x: Tensor) -> Tensor:
        Threads.seen.add(torch.get_num_threads())
        return x


@pytest.mark.parametrize(
    ("clients", "workers", "threads"), [(1, None, 2), (2, None, 1), (1, 1, 1)], ids=["few", "many", "told"]
)
def test_units_are_computed_by_one_thread_where_there_are_as_many_as_cores(
    clients: int, workers: int | None, threads: int
) -> None:
    one = job(scheme="fedavg", clients=clients, local_steps=2, rounds=1, workers=workers)
    shared = SharedWork(one.scheme.work, one.pool.clients, workers=workers)
    role = client_role(one)
    assert isinstance(role, ClientRole)
    role._workspace.module.append(Threads())  # type: ignore[operator]
    role.work_by(shared)
    Threads.seen.clear()
    trained(one, role=role)
    assert Threads.seen == {threads}
    assert torch.get_num_threads() == 2


def test_processes_are_made_once_they_pay_and_not_for_samples_read_by_own_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, computed: list[int]
) -> None:
    monkeypatch.setattr("fedveil.engine.local._WORTH_COPIES", 0.0)
    monkeypatch.setattr("fedveil.engine.local._WORTH_ORDERS", 0.0)
    federation(rounds=3)
    assert computed == [6]  # the first round, by which their time is known
    computed.clear()
    with caplog.at_level(logging.INFO, "fedveil"):
        train_lazily(rounds=3)
    assert computed == [4, 4, 4]
    assert "workers" in caplog.text


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_run_ends_no_process_is_left(how: signal.Signals) -> None:
    reading, writing = os.pipe()
    run = os.fork()
    if not run:
        try:
            torch.set_num_threads(1)

            def told(row: dict[str, Any]) -> None:
                os.write(writing, " ".join(map(str, descendants(os.getpid()))).encode() + b"\n")

            federation(loss=in_a_copy(lambda: time.sleep(0.05)), rounds=10_000, workers=2, callbacks=[told])
        finally:
            os._exit(130)
    workers = [int(pid) for pid in os.read(reading, 1 << 10).split(b"\n")[0].split()]
    assert len(workers) == 2
    os.kill(run, how)
    os.waitpid(run, 0)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.close(reading)
    os.close(writing)
