"""Candidates in turns: every one runs a few rounds, then the next; who is disturbed, or ends elsewhere, is marked."""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.peers.environments import HOW_TO_MAKE, PEERS, ROOT, interpreter, made
from benchmarks.peers.workloads import NETWORKS, WARM_ROUNDS, WORKLOADS, Plan, Workload, flat

SLACK = 0.5
"""So much more load than the benchmark makes itself is not yet called a disturbance."""
APART = 5e-3
"""Two models that are further apart than this share of the way they went are not the same mathematics: a CNN's sums in
another order were up to 0.002 apart, and 0.025 with one client of a hundred left out."""
_SECONDS = 900


@dataclass(frozen=True)
class Candidate:
    """Somebody who runs a workload: `command` in the environment of `peer` (None: FedVeil's own)."""

    name: str
    command: tuple[str, ...]
    peer: str | None = None
    processes: int = 1
    same_model: bool = True

    @property
    def there(self) -> bool:
        """Whether its environment is."""
        return self.peer is None or made(self.peer)


_OURS = ("-m", "benchmarks.peers.ours")
_PFL = "benchmarks.peers.pfl_backend"
_RAY = "from benchmarks.peers.flower_ray import main; main()"
FEDVEIL_2 = "FedVeil, two processes"
TRAINING = (
    Candidate("plain PyTorch loop", (*_OURS, "plain")),
    Candidate("FedVeil", (*_OURS, "fedveil")),
    Candidate(FEDVEIL_2, (*_OURS, "fedveil-2"), processes=2),
    Candidate("pfl 0.6", ("-m", _PFL), "pfl"),
    Candidate(
        "pfl 0.6, two processes",
        ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", _PFL),
        "pfl",
        processes=2,
    ),
    Candidate("Flower, Ray", ("-c", _RAY), "flower", processes=os.cpu_count() or 1),
)
CLIPPING = (
    Candidate("vmap over grad", (*_OURS, "vmap")),
    Candidate("FedVeil", (*_OURS, "clipped")),
    Candidate("Opacus, ghost clipping", ("-m", "benchmarks.peers.opacus_ghost", "ghost"), "opacus"),
    Candidate("Opacus, per-sample gradients", ("-m", "benchmarks.peers.opacus_ghost", "samples"), "opacus"),
    Candidate("plain step, no clipping", (*_OURS, "bare"), same_model=False),
)
"""The first of each is what the others' models are held against."""


@dataclass(frozen=True)
class Cell:
    """One candidate on one workload: seconds a round in each turn, the load it was taken at, where the model ended."""

    workload: str
    what: str
    candidate: str
    seconds: tuple[float, ...]
    load: float
    disturbed: bool
    apart: float | None
    """‖w − w₁‖ / ‖w₁ − w₀‖ for the first candidate's model w₁; None where another model is meant to come out."""

    @property
    def median(self) -> float:
        """Of the turns."""
        return statistics.median(self.seconds)

    @property
    def agrees(self) -> bool:
        """Whether it computed what the others did."""
        return self.apart is None or self.apart <= APART


def prepared(workload: Workload, rounds: int, *, data: Path | None, seed: int) -> Plan:
    """A plan with FedVeil's batches and cohorts, on real MNIST where the folder `data` has it, else random samples."""
    from fedveil.protocol.directory import Cohort
    from fedveil.work.batches import Batches

    generator = torch.Generator().manual_seed(0)
    shape = (workload.clients, workload.samples)
    x = torch.randn(*shape, *workload.shape, generator=generator)
    y = torch.randint(0, 10, shape, generator=generator)
    if data is not None and workload.shape == (1, 28, 28) and (data / "mnist").is_dir():
        import fedveil.data

        train = fedveil.data.load(data / "mnist").train
        count = workload.clients * workload.samples
        x, y = train.x[:count].reshape(x.shape), train.y[:count].reshape(y.shape)
    cohort, batches = Cohort(workload.clients, workload.cohort, seed), Batches(workload.batch, seed)
    cohorts = np.array([cohort.draw(round) for round in range(rounds)], dtype=np.int64)

    def rows(round: int, client: int) -> NDArray[np.int64]:
        steps = [
            batches.indices(client=client, samples=workload.samples, step=round * workload.steps + step)
            for step in range(workload.steps)
        ]
        return torch.cat(steps).numpy()

    taken = np.array([[rows(round, client) for client in drawn] for round, drawn in enumerate(cohorts.tolist())])
    torch.manual_seed(0)
    return Plan(workload, rounds, x, y, cohorts, taken, flat(NETWORKS[workload.network]()))


class Player:
    """A candidate's process, and the turns it is given."""

    def __init__(self, candidate: Candidate, folder: Path) -> None:
        self.candidate = candidate
        python = sys.executable if candidate.peer is None else str(interpreter(candidate.peer))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "FLWR_HOME": str(folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [python, "-W", "ignore", *candidate.command, str(folder)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.hear("ready")
        except RuntimeError:
            self.close()
            raise

    def turn(self, rounds: int) -> list[float]:
        """Seconds of each of so many rounds."""
        self._say(rounds)
        seconds = self.hear("seconds")
        if len(seconds) != rounds:
            raise RuntimeError(f"{self.candidate.name} was given {rounds} rounds and tells of {len(seconds)}.")
        return [float(value) for value in seconds]

    def model(self, folder: Path) -> NDArray[np.float32]:
        """Where it ended."""
        self._say(0)
        name = Path(str(self.hear("model"))).name
        return np.load(folder / name, allow_pickle=False)

    def hear(self, what: str) -> Any:
        """The next thing that it tells, which must be this."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _SECONDS)
        line = self._process.stdout.readline() if ready else ""
        try:
            return json.loads(line)[what]
        except (ValueError, KeyError, TypeError):
            told = f"told {line.strip()!r}" if line else "told nothing" if ready else f"was silent for {_SECONDS} s"
            raise self._failure(f"{told} instead of its {what}") from None

    def _failure(self, how: str) -> RuntimeError:
        self._log.seek(0)
        return RuntimeError(f"{self.candidate.name} {how}. Its log ends:\n{self._log.read()[-2000:]}")

    def close(self) -> None:
        """End it, if it has not ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _say(self, rounds: int) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{rounds}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None


def measured(turns: int, *, only: Sequence[str] = (), data: Path | None = None) -> tuple[list[Cell], list[str]]:
    """Every workload (or `only` these) by whoever is there, and a line for each who is not."""
    from benchmarks.peers.ours import spreads

    absent = () if spreads() else (FEDVEIL_2,)
    cells: list[Cell] = []
    for workload in WORKLOADS:
        if not only or workload.name in only:
            candidates = CLIPPING if workload.clipped else TRAINING
            there = [candidate for candidate in candidates if candidate.there and candidate.name not in absent]
            cells += contest(workload, there, turns=turns, data=data)
    missing = [f"{peer} has no environment: {HOW_TO_MAKE}" for peer in PEERS if not made(peer)]
    return cells, missing


def contest(
    workload: Workload, candidates: Sequence[Candidate], *, turns: int, data: Path | None = None
) -> Iterable[Cell]:
    """One workload by every candidate that is there, A-B-C-A-B-C."""
    from benchmarks.peers.ours import SEED

    plan = prepared(workload, WARM_ROUNDS + turns * workload.block, data=data, seed=SEED)
    with tempfile.TemporaryDirectory(prefix="fedveil-peers-") as scratch, ExitStack() as stack:
        folder = Path(scratch)
        plan.write(folder)
        players: list[Player] = []
        for candidate in candidates:
            try:
                players.append(Player(candidate, folder))
            except RuntimeError as reason:
                if candidate.peer is None:  # others are held against these
                    raise
                print(f"{workload.what}: {reason}", file=sys.stderr)
            else:
                stack.callback(players[-1].close)
        for player in players:
            player.turn(WARM_ROUNDS)
        seconds: list[list[float]] = [[] for _ in players]
        loads: list[list[float]] = [[] for _ in players]
        for _ in range(turns):
            for number, player in enumerate(players):
                seconds[number].append(statistics.fmean(player.turn(workload.block)))
                loads[number].append(os.getloadavg()[0])
        models = [player.model(folder) for player in players]
    way = float(np.linalg.norm(models[0] - plan.first.numpy()))
    most = max(candidate.processes for candidate in candidates)
    for player, taken, load, model in zip(players, seconds, loads, models, strict=True):
        apart = float(np.linalg.norm(model - models[0])) / way if player.candidate.same_model else None
        yield cell(workload, player.candidate.name, taken, load, most=most, apart=apart)


def cell(
    workload: Workload, name: str, seconds: Sequence[float], loads: Sequence[float], *, most: int, apart: float | None
) -> Cell:
    """A cell, marked where the machine had more to do than `most` processes of the benchmark's own."""
    load = max(loads)
    return Cell(workload.name, workload.what, name, tuple(seconds), load, load > most + SLACK, apart)
