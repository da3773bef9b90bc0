"""ParaAegis's rows: which scheme each is, how much of the model it encrypts, and on what it is run."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedveil import models
from fedveil.client_held.client import HolderRole
from fedveil.client_held.server import Votes
from fedveil.config import RunConfig
from fedveil.downlink.messages import Broadcast
from fedveil.engine import ClientPool, LocalEngine
from fedveil.errors import ConfigError, NumericError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.phases import Accumulator, Ask, Gathered, RoundDone, Steps, asked
from fedveil.roles.client import Answer, ClientRole
from fedveil.roles.server import ServerState
from fedveil.runs.folder import write_atomically
from fedveil.runs.job import Job, ModelFacts, assemble_job
from fedveil.runs.loop import Row as RoundRow
from fedveil.runs.loop import client_role, fresh_state, server_role, train_job
from fedveil.work.clipping import ClippedUpdate, DividedUpdate
from fedveil.work.gradients import weighted
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.messages import Bench as Workbench
from fedveil.work.messages import ClientData, LocalWork
from papers.cells import EMPTY, Cell, Check, Figures, Report, Results, Store, chosen, mean, numbers, paper, shown
from papers.nadp import PARAAEGIS_TABLE2, paraaegis_table1
from papers.stage import Entry, OnRound, Stage, accuracy_of, spent_figures

Cipher = Literal["none", "ckks", "pads"]

TRAINED_UNDER = "pads"
"""Full-size cells train under pads: the same sums as under CKKS up to rounding to 2⁻²⁰, in a fraction of the time."""

PARTITIONS: dict[str, dict[str, object]] = {
    "iid": {"partition": "iid"},
    "dirichlet-1": {"partition": "dirichlet", "alpha": 1.0},
    "dirichlet-0.5": {"partition": "dirichlet", "alpha": 0.5},
}
PARTITION_TITLES = {"iid": "IID", "dirichlet-1": "Dir(1)", "dirichlet-0.5": "Dir(0.5)"}


@dataclass(frozen=True)
class Row:
    """One algorithm of Table 1.

    `encrypted` is the share r of the parameters under the cipher in the first round, multiplied by `decay`
    every round. A row with a `twin` trains what its twin trains by construction, up to rounding.
    """

    label: str
    title: str
    scheme: str
    encrypted: float = 0.0
    decay: float = 1.0
    cipher: Cipher = "none"
    noisy: bool = False
    twin: str | None = None
    usual: bool = True
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def votes(self) -> bool:
        """Whether clients elect what is encrypted."""
        return self.scheme == "paraaegis" and self.encrypted < 1.0

    def mean_share(self, rounds: int) -> float:
        """r̄ = r·(1 − λᵀ)/(T·(1 − λ)): the encrypted share of a mean round."""
        if math.isclose(self.decay, 1.0):
            return self.encrypted
        return self.encrypted * (1.0 - self.decay**rounds) / (rounds * (1.0 - self.decay))


def _static(percent: int) -> Row:
    share = percent / 100
    options: dict[str, object] = {"share": share}
    return Row(f"r{percent}", f"ParaAegis {percent} %", "paraaegis", share, 1.0, "ckks", True, options=options)


def _dynamic(percent: int, decay: float, *, usual: bool = False) -> Row:
    share = percent / 100
    return Row(
        f"r{percent}-x{decay:g}",
        f"ParaAegis {percent} % × {decay:g}",
        "paraaegis",
        share,
        decay,
        "ckks",
        True,
        usual=usual,
        options={"share": share, "share_decay": decay},
    )


STATIC = tuple(_static(percent) for percent in (1, 5, 10, 20))
ROWS = (
    Row("fedavg", "FedAvg", "fedavg"),
    Row("dp-fedavg", "DP-FedAvg", "dp-fedavg", noisy=True),
    Row("ckks-fedavg", "CKKS-FedAvg", "ckks-fedavg", 1.0, cipher="ckks", twin="fedavg", usual=False),
    Row("serial", "Serial", "serial", 1.0, cipher="ckks", noisy=True, twin="dp-fedavg", usual=False),
    *STATIC,
    _dynamic(5, 0.99),
    _dynamic(10, 0.99, usual=True),
    _dynamic(10, 0.95),
    _dynamic(10, 0.9),
    Row(
        "pads100",
        "ours: pads, 100 %",
        "paraaegis",
        1.0,
        cipher="pads",
        twin="fedavg",
        usual=False,
        options={"share": 1.0},
    ),
)
BY_LABEL = {row.label: row for row in ROWS}
DIAL = ("dp-fedavg", *(row.label for row in STATIC), "ckks-fedavg")
"""From r = 0 to r = 100 %."""

DIAL_NAMES = ("0 % (DP-FedAvg)", *(f"{100 * row.encrypted:g} %" for row in STATIC), "100 % (CKKS-FedAvg)")


@dataclass(frozen=True)
class Bench:
    """A data set with a network and the settings of its federation."""

    name: str
    data: str
    shape: tuple[int, ...]
    network: Mapping[str, object]
    federation: Mapping[str, object]
    noise: Mapping[str, object]
    words: str
    usual: bool = True
    outputs: int = 10
    trained_under: Cipher = TRAINED_UNDER  # type: ignore[assignment]

    @property
    def rounds(self) -> int:
        """T."""
        return _whole(self.federation["rounds"])

    @property
    def clients(self) -> int:
        """N."""
        return _whole(self.federation["clients"])

    def cell(self, partition: str, row: str) -> str:
        """The name of the cell that trains a row."""
        return f"{self.name}/{partition}/{row}"

    def cost(self, row: str) -> str:
        """The name of the cell that times a row's protection."""
        return f"{self.name}/cost/{row}"

    @property
    def pace(self) -> str:
        """The name of the cell that times training alone."""
        return f"{self.name}/pace"

    def settings(
        self, row: Row, partition: str, *, cipher: Cipher | None = None, **changes: object
    ) -> dict[str, object]:
        """A row's run."""
        under = row.cipher if row.cipher == "none" else cipher or self.trained_under
        return {
            "dataset": self.data,
            **self.network,
            **self.federation,
            **PARTITIONS[partition],
            "scheme": row.scheme,
            **(self.noise if row.noisy else {}),
            **row.options,
            **({} if under == "none" else {"cipher": under}),
            **changes,
        }


def _whole(value: object) -> int:
    assert isinstance(value, int)
    return value


PAPER_FEDERATION: dict[str, object] = {
    "clients": 10,
    "rounds": 50,
    "local_epochs": 3,
    "batch_size": 32,
    "lr": 0.01,
    "loss": "cross-entropy",
}
PAPER_NOISE: dict[str, object] = {"epsilon": 1.0, "delta": 1e-5, "clip": 1.0, "accounting": "paper"}
_RESNET: dict[str, object] = {"model": "resnet18", "model_options": {"norm": "group"}}

_STEM7: dict[str, object] = {"model": "resnet18", "model_options": {"norm": "group", "stem": "large"}}


def _stem7(name: str, epsilon: float, words: str, *, usual: bool) -> Bench:
    noise = {**PAPER_NOISE, "epsilon": epsilon}
    return Bench(name, "imagenette", (3, 64, 64), _STEM7, PAPER_FEDERATION, noise, words, usual=usual)


BENCHES = (
    _stem7(
        "imagenette",
        1.0,
        "Imagenette at 64 × 64, ResNet-18 with GroupNorm and the usual 7 × 7 stem with pooling (maps of 16 to 2 px)",
        usual=True,
    ),
    _stem7("imagenette-30", 30.0, "the same with the noise of ε = 30 by the paper's formula, a thirtieth", usual=False),
    _stem7(
        "imagenette-100", 100.0, "the same with the noise of ε = 100 by the paper's formula, a hundredth", usual=False
    ),
    Bench(
        "imagenette-stem3",
        "imagenette",
        (3, 64, 64),
        _RESNET,
        PAPER_FEDERATION,
        PAPER_NOISE,
        "Imagenette at 64 × 64, ResNet-18 with GroupNorm and a 3 × 3 stem (maps of 64 to 8 pixels: fifteen times the "
        "work)",
        usual=False,
    ),
    Bench(
        "cifar10",
        "cifar10",
        (3, 32, 32),
        _RESNET,
        PAPER_FEDERATION,
        PAPER_NOISE,
        "CIFAR-10, ResNet-18 with GroupNorm and the 3 × 3 stem",
        usual=False,
    ),
)
QUICK = Bench(
    "digits",
    "digits",
    (1, 8, 8),
    {"model": "mlp", "model_options": {"depth": 3, "width": 256}},
    {**PAPER_FEDERATION, "rounds": 10, "lr": 0.3},
    {**PAPER_NOISE, "epsilon": 0.5},
    "digits, mlp 64-256-256-10, 10 rounds, learning rate 0.3, ε = 0.5 by the paper's formula, real CKKS in training",
    trained_under="ckks",
)

Keep = Callable[[Figures], None]


def run_piece(
    name: str,
    only: Iterable[str],
    *,
    out: str | Path,
    device: str = "cpu",
    data: str | Path | None = None,
    seed: int = 1,
    every: int = 5,
    quick: bool = False,
) -> None:
    """Run the cells that `only` names into OUT/NAME.json; those that OUT has to their last round are left alone.

    Cells without a round of their own (costs, the pace of training) are run as the entry runs them.
    """
    from papers.runner import find

    entry, label = find(name), f"{name}-quick" if quick else name
    store = Store(Path(out) / f"{label}.json", entry=label)
    stage = Stage(device=device, folder=data)
    for cell in chosen(entry.cells(quick), only):
        if store.has(cell, seed) and "unfinished" not in store.results()[cell.name][seed]:
            continue
        if trains(cell):
            watched(stage, cell, seed=seed, every=every, keep=_keeper(store, cell, seed))
        else:
            _keeper(store, cell, seed)(entry.work(stage, cell, seed, lambda done, total: None))


def trains(cell: Cell) -> bool:
    """Whether a cell is one of accuracy."""
    return "/cost/" not in cell.name and not cell.name.endswith("/pace")


def _keeper(store: Store, cell: Cell, seed: int) -> Keep:
    def keep(figures: Figures) -> None:
        store.keep(cell, seed, figures)
        sys.stdout.write(f"{cell.name} seed {seed}: {figures}\n")
        sys.stdout.flush()

    return keep


def watched(stage: Stage, cell: Cell, *, seed: int, every: int, keep: Keep) -> None:
    """Train a cell; `keep` is given its figures every so many rounds, marked `unfinished`, and at the end."""
    judged = stage.job(cell, seed=seed)
    assert judged.test is not None
    job, test, total = replace(judged, test=None), judged.test, judged.config.rounds
    state, started, judging = fresh_state(job), time.perf_counter(), 0.0
    figures: Figures = {"device": stage.describe(), "parameters": job.blueprint.size}
    curve: list[float] = []

    def judge(now: ServerState) -> None:
        nonlocal judging
        begun = time.perf_counter()
        curve.append(accuracy_of(cell, job, now, test))
        judging += time.perf_counter() - begun
        seconds = round(time.perf_counter() - started - judging, 2)
        figures.update(rounds=now.round, accuracy=curve[-1], seconds=seconds, curve=list(curve))

    def on_round(row: RoundRow, now: ServerState) -> None:
        if now.round % every == 0 and now.round < total:
            judge(now)
            keep({**figures, "unfinished": f"round {now.round} of {total}"})

    try:
        outcome = train_job(job, state=state, on_round=on_round)
    except NumericError as reason:
        judge(state)
        keep({**figures, "stopped": f"diverged in round {state.round}: {reason}"})
        return
    judge(state)
    keep({**figures, **spent_figures(job, outcome.books), **({"stopped": outcome.stopped} if outcome.stopped else {})})


def gather(name: str, pieces: Iterable[str | Path], *, out: str | Path, quick: bool = False) -> Report:
    """Bring the figures of `pieces` (NAME.json files) into OUT/NAME.json and write the report beside it.

    Of two figures for one cell and seed the one of more rounds is kept, and of equal ones the first.
    """
    from papers.runner import find

    entry = find(name)
    label = f"{name}-quick" if quick else name
    cells = {cell.name: cell for cell in entry.cells(quick)}
    store = Store(Path(out) / f"{label}.json", entry=label)
    for path in map(Path, pieces):
        if not path.exists():
            raise ConfigError(f"{path}: no such file of figures.")
        piece = Store(path, entry=label)
        for cell_name, seeds in piece.results().items():
            if cell_name not in cells:
                raise ConfigError(f"{path}: {name} has no cell {cell_name!r}. Was the file written by another version?")
            for seed, figures in seeds.items():
                piece.has(cells[cell_name], seed)  # refuses figures that were taken under other settings
                present = store.results().get(cell_name, {}).get(seed)
                if present is None or _rounds(figures) > _rounds(present):
                    store.keep(cells[cell_name], seed, figures)
    report = entry.report(store.results(), quick)
    if store.path.exists():
        write_atomically(store.path.with_suffix(".md"), report.markdown())
    return report


def _rounds(figures: Figures) -> int:
    rounds = figures.get("rounds", 0)
    return rounds if isinstance(rounds, int) else 0


SLICE = 1 << 21
"""Larger models are timed on one of about this many parameters, and the time is scaled."""

_ROUNDS = 3
_SAMPLES = 4
_SLICE_SIDE = 64
_PER_UNIT = _SLICE_SIDE**2 + 1 + 10
_SEED = 1
_WORKERS = "FEDVEIL_WORKERS"


@dataclass
class Spent:
    """Seconds of a round: one client's, the server's, and of those the counting of votes."""

    client: float = 0.0
    server: float = 0.0
    counting: float = 0.0

    @property
    def all(self) -> float:
        """What a round takes longer."""
        return self.client + self.server


@dataclass
class Clocks:
    """The round under way, and those before it.

    Of the clients, the first to answer each phase is timed: it pays for what simulated clients share,
    such as the decrypted sum, and it pads.
    """

    now: Spent = field(default_factory=Spent)
    rounds: list[Spent] = field(default_factory=list)
    voting: bool = False

    def serve(self, seconds: float) -> None:
        """The server has worked."""
        self.now.server += seconds
        if self.voting:
            self.now.counting += seconds

    def boundary(self) -> None:
        """A round is over."""
        self.rounds.append(self.now)
        self.now = Spent()


class _TimedRole:
    """A client role whose first client is timed in every phase."""

    def __init__(self, role: ClientRole | HolderRole, clocks: Clocks) -> None:
        self._role = role
        self._clocks = clocks

    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """The role's answers."""
        answers = self._role.handle_many(states, request, clients, private)
        started = time.process_time()
        for number, answer in enumerate(answers):
            if number == 0:
                self._clocks.now.client += time.process_time() - started
            yield answer


class _TimedSum:
    """An accumulator that is timed."""

    def __init__(self, into: Accumulator, clocks: Clocks) -> None:
        self._into = into
        self._clocks = clocks

    def add(self, reply: Reply) -> None:
        """Fold a reply in."""
        started = time.process_time()
        self._into.add(reply)
        self._clocks.serve(time.process_time() - started)


def _timed(steps: Steps, clocks: Clocks) -> Steps:
    """The server's run, timed."""
    answer: Gathered | None = None
    while True:
        started = time.process_time()
        try:
            step = steps.send(answer)
        except StopIteration:
            return
        clocks.serve(time.process_time() - started)
        if isinstance(step, RoundDone):
            clocks.boundary()
        if isinstance(step, Ask):
            clocks.voting = isinstance(step.into, Votes)
            step = replace(step, into=_TimedSum(step.into, clocks))
        answer = yield step


@dataclass(frozen=True)
class _Standing(LocalSteps):
    """Local training that takes no time: updates that clients half agree on, as a vote would find them."""

    def run(self, bench: Workbench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """The same update in every round."""
        length = self.layout(bench.blueprint, tensors=1).length - 1
        return weighted(_update(length, data.client), len(data))


@lru_cache(maxsize=64)
def _update(length: int, client: int) -> Tensor:
    common = torch.randn(length, generator=torch.Generator().manual_seed(0))
    own = torch.randn(length, generator=torch.Generator().manual_seed(1 + client))
    return (common + own) * 1e-3


def measure(bench: Bench, row: Row) -> Figures:
    """Seconds that protection adds to a round of a row: one client's and the server's, on one thread.

    Processor time, so that what else runs on the machine does not count. A share that shrinks is timed at
    its mean over the run.
    """
    whole = _parameters(bench)
    job = _standing_job(bench, row, large=whole > SLICE)
    timed = job.blueprint.size
    with _one_thread():
        rounds, traffic = _cost_rounds(job)
    fastest, scale = min(rounds, key=lambda one: one.all), whole / timed
    return {
        "protection": fastest.all * scale,
        "client_seconds": fastest.client * scale,
        "server_seconds": fastest.server * scale,
        "counting_seconds": fastest.counting * scale,
        "bytes_up": traffic.bytes_up / bench.clients * scale,
        "bytes_down": traffic.bytes_down / bench.clients * scale,
        "encrypted_share": row.mean_share(bench.rounds),
        "parameters": whole,
        "timed_on": timed,
    }


def _cost_rounds(job: Job) -> tuple[list[Spent], Gathered]:
    """Every round but the first, in which nothing is decrypted yet, and the last one's traffic."""
    clocks, state = Clocks(), fresh_state(job)
    engine = LocalEngine(_TimedRole(client_role(job, state), clocks), job.pool)  # type: ignore[arg-type]
    steps = asked(_timed(server_role(job, state).run(), clocks), engine)
    done = [step for step in steps if isinstance(step, RoundDone)]
    for one in done:
        if one.failed:
            raise ConfigError(f"A round that was to be timed failed: {one.failed}.")
    return clocks.rounds[1:], done[-1].gathered


def _standing_job(bench: Bench, row: Row, *, large: bool) -> Job:
    """A row's scheme on a few random samples and with local training that stands still."""
    slice_of = {"model": "mlp", "model_options": {"depth": 2, "width": SLICE // _PER_UNIT}}
    changes: dict[str, object] = {**(slice_of if large else {}), "rounds": _ROUNDS}
    if row.votes:
        changes |= {"share": row.mean_share(bench.rounds), "share_decay": 1.0}
    settings = bench.settings(row, "iid", cipher=row.cipher, **changes)
    config = RunConfig.from_mapping({**settings, "seed": _SEED}, where=f"the costs of {row.label}")
    shape = (1, _SLICE_SIDE, _SLICE_SIDE) if large else bench.shape
    generator = torch.Generator().manual_seed(_SEED)
    x = torch.randn((_SAMPLES * bench.clients, *shape), generator=generator)
    y = torch.arange(len(x)) % bench.outputs
    pool = ClientPool.shared(x, y, list(torch.split(torch.arange(len(x)), _SAMPLES)))
    model = models.build(
        config.model, input_shape=shape, outputs=bench.outputs, seed=_SEED, vocabulary=None, **config.model_options
    )
    facts = ModelFacts(config.model, config.model_options, shape, bench.outputs, "classification")
    job = assemble_job(config, model, pool, None, facts)
    return replace(job, scheme=replace(job.scheme, work=_still(job.scheme.work)))


def _still(work: LocalWork) -> LocalWork:
    """The same local work without the training."""
    if isinstance(work, ClippedUpdate | DividedUpdate):
        return replace(work, local=_standing(work.local))
    assert isinstance(work, LocalSteps)
    return _standing(work)


def _standing(local: LocalSteps) -> _Standing:
    return _Standing(local.loss, local.batches, local.schedule, local.steps, local.epochs)


def _parameters(bench: Bench) -> int:
    options = bench.network["model_options"]
    assert isinstance(options, dict)
    model = models.build(
        str(bench.network["model"]),
        input_shape=bench.shape,
        outputs=bench.outputs,
        seed=_SEED,
        vocabulary=None,
        **options,
    )
    return sum(one.numel() for one in model.parameters())


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread and, under CKKS, one process."""
    threads, workers = torch.get_num_threads(), os.environ.get(_WORKERS)
    torch.set_num_threads(1)
    os.environ[_WORKERS] = "1"
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if workers is None:
            del os.environ[_WORKERS]
        else:
            os.environ[_WORKERS] = workers


@dataclass(frozen=True)
class Trained:
    """A row's training: accuracies of finished runs by seed, those of unfinished ones, and whose run it was."""

    finished: Mapping[int, float]
    unfinished: Mapping[int, tuple[float, int]]
    epsilon: float | None
    noise: float | None
    seconds: float | None
    of: Row | None

    @property
    def accuracy(self) -> float | None:
        """The mean over the seeds that were run to the end."""
        return mean(self.finished)

    def text(self, row: Row) -> str:
        """The accuracy, as a table shows it: whose it is if not its own, and the round if it stopped early."""
        if self.of is None:
            return EMPTY
        whose = "" if self.of is row else f" (= {self.of.title})"
        if self.finished:
            return shown(self.finished) + whose
        reached = ", ".join(f"{value:.1f} at round {round}" for value, round in self.unfinished.values())
        return reached + whose


def trained(results: Results, cell: str, *, rounds: int) -> Trained:
    """A cell's training; runs of fewer than `rounds` rounds count as unfinished."""
    accuracies, reached = numbers(results, cell), numbers(results, cell, "rounds")
    done = {seed: value for seed, value in accuracies.items() if reached.get(seed, 0) >= rounds}
    short = {seed: (value, int(reached.get(seed, 0))) for seed, value in accuracies.items() if seed not in done}
    return Trained(
        done,
        short,
        mean(numbers(results, cell, "epsilon")),
        mean(numbers(results, cell, "noise")),
        mean({seed: one for seed, one in numbers(results, cell, "seconds").items() if seed in done}),
        None,
    )


def training_of(results: Results, bench: Bench, partition: str, row: Row) -> Trained:
    """A row's own training, or its twin's where it was not trained itself."""
    for candidate in (row, *([] if row.twin is None else [BY_LABEL[row.twin]])):
        found = trained(results, bench.cell(partition, candidate.label), rounds=bench.rounds)
        if found.finished or found.unfinished:
            return Trained(found.finished, found.unfinished, found.epsilon, found.noise, found.seconds, candidate)
    return trained({}, "", rounds=bench.rounds)


def pace(results: Results, bench: Bench) -> float | None:
    """Seconds of a round's training by all clients, one after the other, without protection; timed by itself."""
    return mean(numbers(results, bench.pace, "round_seconds"))


def protection(results: Results, bench: Bench, row: Row) -> float | None:
    """Seconds that protection adds to a round: 0 where there is none."""
    if row.cipher == "none" and not row.noisy:
        return 0.0
    return mean(numbers(results, bench.cost(row.label), "protection"))


def counting(results: Results, bench: Bench, row: Row) -> float | None:
    """Seconds of a round in which the server counts votes."""
    return mean(numbers(results, bench.cost(row.label), "counting_seconds"))


def seconds(results: Results, bench: Bench, partition: str, row: Row) -> float | None:
    """Training of all rounds, and T × the protection of one."""
    cost, each = protection(results, bench, row), pace(results, bench)
    training = training_of(results, bench, partition, row).seconds if each is None else each * bench.rounds
    return None if cost is None or training is None else training + bench.rounds * cost


def efficiency(accuracy: float | None, time: float | None) -> float | None:
    """The paper's ratio: 100 × accuracy / seconds."""
    return None if accuracy is None or not time else 100.0 * accuracy / time


CHANCE = 2.0
"""Points of accuracy that two runs of the same training may differ by."""

SAME_NOISE = (
    "by construction: noise first and encryption after it is the very noise of DP-FedAvg, so that only time can differ"
)


def checks(results: Results, bench: Bench, partition: str) -> tuple[Check, ...]:
    """Every claim, for one partition."""
    accuracy = {row.label: training_of(results, bench, partition, row).accuracy for row in ROWS}
    time = {row.label: seconds(results, bench, partition, row) for row in ROWS}
    shared = training_of(results, bench, partition, BY_LABEL["serial"]).of is BY_LABEL["dp-fedavg"]
    where = f"{bench.name} {PARTITION_TITLES[partition]}"
    found = (
        growing("accuracy grows with r", [accuracy[one] for one in DIAL], DIAL_NAMES, unit="%"),
        _time(results, bench, time),
        _serial_accuracy(accuracy, shared=shared),
        _serial_time(time),
        _dynamic_accuracy(accuracy),
        _dynamic_time(time),
        _pads(accuracy, time),
    )
    return tuple(Check(f"{where}: {one.claim}", one.held, one.seen) for one in found)


def _time(results: Results, bench: Bench, time: Mapping[str, float | None]) -> Check:
    found = growing("time grows with r", [time[one] for one in DIAL], DIAL_NAMES, unit="s")
    votes = {row.title: counting(results, bench, row) for row in STATIC}
    told = ", ".join(f"{title} {_short(one)} s" for title, one in votes.items() if one)
    if found.held is not False or not told:
        return found
    why = f"; counting votes alone takes, of a round: {told}; at 0 and at 100 % nobody votes"
    return Check(found.claim, found.held, found.seen + why)


def growing(claim: str, values: Sequence[float | None], names: Sequence[str], *, unit: str) -> Check:
    """Whether the numbers grow from the first to the last; where they do not, the steps down are named."""
    there = [(name, value) for name, value in zip(names, values, strict=True) if value is not None]
    seen = ", ".join(f"{name}: {_short(value)} {unit}" for name, value in there)
    if len(there) < 2:
        return Check(claim, None, seen)
    down = [
        f"{a} → {b} ({_short(other - one)} {unit})"
        for (a, one), (b, other) in itertools.pairwise(there)
        if not one < other
    ]
    return Check(claim, not down, seen + (f"; not from {', '.join(down)}" if down else ""))


def _serial_accuracy(accuracy: Mapping[str, float | None], *, shared: bool) -> Check:
    claim = f"serial is the least accurate (below DP-FedAvg by more than {CHANCE:g} points of chance)"
    serial, plain = accuracy["serial"], accuracy["dp-fedavg"]
    others = {name: one for name, one in accuracy.items() if name != "serial" and one is not None}
    if serial is None or plain is None:
        return Check(claim, None)
    lower = [name for name, one in others.items() if one < serial]
    held = serial < plain - CHANCE and not lower
    seen = f"serial {serial:.1f}, DP-FedAvg {plain:.1f}"
    if not held:
        which = f"; below serial: {', '.join(lower)}" if lower else ""
        seen += f"{which}; {SAME_NOISE}" + (" (the training was shared)" if shared else "")
    return Check(claim, held, seen)


def _serial_time(time: Mapping[str, float | None]) -> Check:
    claim = "serial takes longest"
    serial, others = time["serial"], {name: one for name, one in time.items() if name != "serial" and one is not None}
    if serial is None or not others:
        return Check(claim, None)
    longer = [f"{name} {_short(one)} s" for name, one in others.items() if one >= serial]
    seen = f"{_short(serial)} s; " + (
        f"longer: {', '.join(longer)}" if longer else f"next {_short(max(others.values()))} s"
    )
    return Check(claim, not longer, seen)


def _dynamic_accuracy(accuracy: Mapping[str, float | None]) -> Check:
    claim = f"dynamic 10 % × 0.99 lies between static 5 % and 10 % in accuracy (up to {CHANCE:g} points of chance)"
    low, one, high = (accuracy[name] for name in ("r5", "r10-x0.99", "r10"))
    if low is None or one is None or high is None:
        return Check(claim, None)
    held = min(low, high) - CHANCE <= one <= max(low, high) + CHANCE
    return Check(claim, held, f"static 5 %: {low:.1f}, dynamic: {one:.1f}, static 10 %: {high:.1f}")


def _dynamic_time(time: Mapping[str, float | None]) -> Check:
    claim = "dynamic 10 % × 0.99 takes less time than static 10 %"
    one, static = time["r10-x0.99"], time["r10"]
    if one is None or static is None:
        return Check(claim, None)
    return Check(claim, one < static, f"{_short(one)} and {_short(static)} s")


def _pads(accuracy: Mapping[str, float | None], time: Mapping[str, float | None]) -> Check:
    claim = f"ours: pads encrypt 100 %, within {CHANCE:g} points of FedAvg, in less time than CKKS encrypts 1 %"
    ours, plain, ours_time, ckks_time = accuracy["pads100"], accuracy["fedavg"], time["pads100"], time["r1"]
    if ours is None or plain is None or ours_time is None or ckks_time is None:
        return Check(claim, None)
    held = abs(ours - plain) <= CHANCE and ours_time < ckks_time
    return Check(claim, held, f"{ours:.1f} and {plain:.1f} %, {_short(ours_time)} and {_short(ckks_time)} s")


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


_PACE_ROUNDS = 3


def _benches(quick: bool) -> tuple[Bench, ...]:
    return (QUICK,) if quick else BENCHES


def _partitions(quick: bool) -> tuple[str, ...]:
    return ("iid",) if quick else tuple(PARTITIONS)


def _cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(cell for bench in _benches(quick) for cell in _of(bench, quick))


def _of(bench: Bench, quick: bool) -> Iterator[Cell]:
    plain = bench.settings(BY_LABEL["fedavg"], "iid", rounds=_PACE_ROUNDS)
    yield Cell(bench.pace, plain, usual=bench.usual)
    for row in ROWS:
        if row.cipher != "none" or row.noisy:
            settings = bench.settings(row, "iid", cipher=row.cipher)
            yield Cell(
                bench.cost(row.label), settings, usual=quick or (bench.usual and (row.usual or row.twin is not None))
            )
    for partition in _partitions(quick):
        for row in ROWS:
            expected = quick or (bench.usual and row.usual and partition == "iid")
            yield Cell(bench.cell(partition, row.label), bench.settings(row, partition), usual=expected)


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    bench, what = bench_of(cell.name), cell.name.split("/")[1]
    if what == "cost":
        return measure(bench, BY_LABEL[cell.name.split("/")[2]])
    figures = stage.train(cell, seed=seed, on_round=on_round)
    if what != "pace":
        return figures
    whole = figures["seconds"]
    assert isinstance(whole, float)
    return {"device": figures["device"], "round_seconds": whole / _PACE_ROUNDS}


def bench_of(cell: str) -> Bench:
    """The bench a cell is run on."""
    return next(bench for bench in (*BENCHES, QUICK) if bench.name == cell.split("/")[0])


def _report(results: Results, quick: bool) -> Report:
    shown = _to_show(results, quick)
    rows: list[tuple[str, ...]] = []
    judged: list[Check] = []
    for bench in shown:
        ran = [one for one in _partitions(quick) if _was_run(results, bench, one)]
        for partition in _partitions(quick):
            rows += [_row(results, bench, partition, row, quick) for row in ROWS]
            if partition in (ran or ["iid"]):
                judged += checks(results, bench, partition)
    return Report(
        title=f"ParaAegis, Table 1{' (quick form)' if quick else ''}: accuracy, time and their ratio (paper / ours)",
        columns=("run", "algorithm", "accuracy, %", "seconds", "efficiency", "protection, s a round", "ε proven"),
        rows=tuple(rows),
        checks=tuple(judged),
        notes=(
            *(f"{bench.name}: {bench.words}." for bench in shown),
            *_pace_notes(results, shown),
            *_noise_notes(results, shown),
            *_NOTES,
            *(() if quick else _FULL_NOTES),
        ),
        quick=quick,
    )


def _to_show(results: Results, quick: bool) -> list[Bench]:
    """Those that were trained on, or, before anything was, the usual."""
    benches = _benches(quick)
    ran = [bench for bench in benches if any(_was_run(results, bench, one) for one in PARTITIONS)]
    return ran or [bench for bench in benches if bench.usual]


def _was_run(results: Results, bench: Bench, partition: str) -> bool:
    return any(name.startswith(f"{bench.name}/{partition}/") for name in results)


def _row(results: Results, bench: Bench, partition: str, row: Row, quick: bool) -> tuple[str, ...]:
    def theirs(what: str, digits: int) -> str:
        value = None if quick else paraaegis_table1(row.label, partition, what=what)
        return EMPTY if value is None else f"{value:.{digits}f}"

    found = training_of(results, bench, partition, row)
    time, cost = seconds(results, bench, partition, row), protection(results, bench, row)
    ratio = efficiency(found.accuracy, time)
    return (
        f"{bench.name} {PARTITION_TITLES[partition]}",
        row.title,
        f"{theirs('accuracy', 1)} / {found.text(row)}",
        f"{theirs('seconds', 0)} / {_plain(time, 1)}",
        f"{theirs('efficiency', 2)} / {_plain(ratio, 2 if ratio is None or ratio < 100 else 0)}",
        _plain(cost, 3),
        _proven(row, found),
    )


def _plain(value: float | None, digits: int) -> str:
    return EMPTY if value is None else f"{value:,.{digits}f}"


def _proven(row: Row, found: Trained) -> str:
    if not row.noisy:
        return "no noise"
    return EMPTY if found.epsilon is None else f"{found.epsilon:,.0f}"


def _pace_notes(results: Results, benches: list[Bench]) -> list[str]:
    told = []
    for bench in benches:
        each = pace(results, bench)
        if each is not None:
            where = next(iter(results[bench.pace].values())).get("device", "")
            told.append(
                f"{bench.name}: a round's training by {bench.clients} clients, one after the other, takes {each:.3g} s "
                f"({where}), hence {each * bench.rounds:,.1f} s for {bench.rounds} rounds."
            )
    return told


def _noise_notes(results: Results, benches: list[Bench]) -> list[str]:
    """How the paper's noise compares with what it is added to."""
    told = []
    for bench in benches:
        found = training_of(results, bench, "iid", BY_LABEL["dp-fedavg"])
        size = next((one.get("parameters") for one in results.get(bench.cell("iid", "dp-fedavg"), {}).values()), None)
        if found.noise is None or not isinstance(size, int):
            continue
        told.append(
            f"{bench.name}: the paper's σ puts noise of standard deviation {found.noise:.3g} on every noised "
            f"coordinate of a round's mean update, over all {size:,} of them an L2 norm of "
            f"{found.noise * size**0.5:.3g}, where the clipped mean has at most {bench.noise['clip']:g}."
        )
    return told


_NOTES = (
    "seconds = training + T × protection. Training: all clients' local epochs one after the other, without protection, "
    f"timed by itself over {_PACE_ROUNDS} rounds (where that was not run: the row's own run). Protection: what one "
    "client and the server do in a round beside training (choosing, voting, noise, encryption, counting, adding, "
    "decryption), in seconds of one CPU thread, in rounds of the real protocol. Models of more than "
    f"{SLICE:,} parameters are timed on one of that size and scaled linearly; counting grows a little faster. "
    "`efficiency` is 100 × accuracy / seconds.",
    "The ε of the paper's formula is no DP guarantee: `ε proven` is what the same noise proves for all of a client's "
    "data, given the winning set.",
)
_FULL_NOTES = (
    "Trained under pads where the table says CKKS: both sum the same numbers up to rounding to 2⁻²⁰. A figure marked "
    "(= row) is that row's run: CKKS-FedAvg and pads at 100 % train what FedAvg trains, serial what DP-FedAvg trains "
    "(noise first, then encryption), and training amplifies what rounding leaves as it does any rounding.",
    "Not built: Varying DP and Stevens et al., two further rows of the paper. Its own row 10 % × 0.9 took longer than "
    "static 10 %, although it encrypts a fifth as much.",
)

TABLE1_ENTRY = Entry(
    name="paraaegis-table1",
    paper="ParaAegis",
    what="Table 1: FedAvg, DP, CKKS, serial and ParaAegis at 1 to 20 %, IID (--full: other partitions, CIFAR-10)",
    takes="half an hour on a GPU",
    takes_quick="a minute",
    needs="imagenette (--full: cifar10), and the packages cryptography and tenseal",
    cells=_cells,
    report=_report,
    work=_work,
)

_TABLE2_ROUNDS = 20
_QUICK_ROUNDS = 10
_CLEAR = 10.0
_TITLES = {"max": "max (the scheme)", "min": "min", "random": "random"}


def _table2_benches(quick: bool) -> tuple[Bench, ...]:
    return (QUICK,) if quick else BENCHES


def _table2_rounds(quick: bool) -> int:
    return _QUICK_ROUNDS if quick else _TABLE2_ROUNDS


def _name(bench: Bench, strategy: str) -> str:
    return f"{bench.name}/{strategy}"


def _table2_cells(quick: bool) -> tuple[Cell, ...]:
    row = BY_LABEL["r10"]
    return tuple(
        Cell(
            _name(bench, strategy),
            bench.settings(row, "iid", strategy=strategy, rounds=_table2_rounds(quick)),
            usual=bench.usual,
        )
        for bench in _table2_benches(quick)
        for strategy in _TITLES
    )


def _table2_report(results: Results, quick: bool) -> Report:
    rows, judged, words = [], [], []
    ran = [bench for bench in _table2_benches(quick) if any(_name(bench, one) in results for one in _TITLES)]
    for bench in ran or [bench for bench in _table2_benches(quick) if bench.usual]:
        found = {one: trained(results, _name(bench, one), rounds=_table2_rounds(quick)) for one in _TITLES}
        words.append(f"{bench.name}: {bench.words}.")
        rows += [
            (bench.name, _TITLES[one], f"{paper(None if quick else PARAAEGIS_TABLE2[one])} / {_text(found[one])}")
            for one in _TITLES
        ]
        judged.append(_clearly_best(bench, found))
    return Report(
        title=f"ParaAegis, Table 2{' (quick form)' if quick else ''}: which tenth is encrypted (paper / ours)",
        columns=("data", "strategy", "accuracy, %"),
        rows=tuple(rows),
        checks=tuple(judged),
        notes=(
            *words,
            f"r = 10 %, T = {_table2_rounds(quick)}, IID, "
            f"ε = {_table2_benches(quick)[0].noise['epsilon']:g} by the paper's formula, which is no DP guarantee. "
            "`random`: all clients draw the same tenth anew every round.",
        ),
        quick=quick,
    )


def _text(found: Trained) -> str:
    if found.finished:
        return shown(found.finished)
    return ", ".join(f"{value:.1f} at round {round}" for value, round in found.unfinished.values()) or EMPTY


def _clearly_best(bench: Bench, found: dict[str, Trained]) -> Check:
    claim = f"{bench.name}: max is better than min and random by at least {_CLEAR:g} points"
    best, *others = (found[one].accuracy for one in ("max", "min", "random"))
    there = [one for one in others if one is not None]
    if best is None or len(there) < len(others):
        return Check(claim, None)
    seen = f"max − min {best - there[0]:+.1f}, max − random {best - there[1]:+.1f}"
    return Check(claim, best - max(there) >= _CLEAR, seen)


TABLE2_ENTRY = Entry(
    name="paraaegis-table2",
    paper="ParaAegis",
    what="Table 2: encrypting the largest, the smallest or random updates, r = 10 %",
    takes="ten minutes on a GPU",
    takes_quick="half a minute",
    needs="imagenette (--full: cifar10), and the packages cryptography and tenseal",
    cells=_table2_cells,
    report=_table2_report,
)
