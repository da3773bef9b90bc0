"""ParaAegis: Tables 1, 2 and 3. Settings and printed numbers are in paraaegis.toml.

Full-size cells train under pads: the same sums as under CKKS up to rounding to 2⁻²⁰, in a fraction of the time. What
protection costs is timed apart, in rounds of the real protocol whose local training takes no time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedveil import models
from fedveil.downlink.messages import Broadcast
from fedveil.runs.job import Job
from fedveil.work.clipping import ClippedUpdate, DividedUpdate
from fedveil.work.gradients import weighted
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.messages import ClientData, LocalWork, Workspace
from papers.cells import Cell, Figures, Results, difference, mean, mean_of, numbers
from papers.costs import job_of, one_thread, timed_rounds
from papers.entries import read_paper
from papers.report import EMPTY, Check, Report, above, all_above, decided, paper, rising, shown
from papers.report import short as text
from papers.stage import OnRound, Stage

_PAPER = read_paper("paraaegis")
_T1, _T2, _T3 = (_PAPER.table(one) for one in ("table1", "table2", "table3"))
PARTITIONS = tuple(_PAPER["partitions"])
_FEW = 10.0
_NORM = str(_PAPER["group_norm"])
CHANCE = 2.0
"""Points of accuracy that two runs of the same training may differ by."""
TIMED = 0.05
"""The share of its longest that a time may be off by."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm of Table 1. A row with a `twin` trains what its twin trains by construction, up to rounding."""

    label: str
    title: str
    scheme: str
    cipher: str = "none"
    noisy: bool = False
    twin: str | None = None
    usual: bool = True
    masked: bool = False
    """Whether it is trained under masks, which give the same sums, instead of what hides its uploads."""
    printed_as: str = ""
    options: Mapping[str, float] = field(default_factory=dict)

    @property
    def encrypted(self) -> float:
        """The share r of the parameters that the cipher covers in the first round."""
        return self.options.get("share", 0.0 if self.cipher == "none" else 1.0)

    @property
    def protected(self) -> bool:
        """Whether a round costs more than training."""
        return self.cipher != "none" or self.noisy

    def mean_share(self, rounds: int) -> float:
        """r̄ = r·(1 − λᵀ)/(T·(1 − λ)): the encrypted share of a mean round."""
        decay = self.options.get("share_decay", 1.0)
        if math.isclose(decay, 1.0):
            return self.encrypted
        return self.encrypted * (1.0 - decay**rounds) / (rounds * (1.0 - decay))


ROWS = tuple(Algorithm(label, **own) for label, own in _T1["rows"].items())
BY_LABEL = {row.label: row for row in ROWS}
STATIC = tuple(BY_LABEL[one] for one in ("r1", "r5", "r10", "r20"))
DIAL = {row.label: f"{100 * row.encrypted:g} %" for row in STATIC}
"""By the share r that is encrypted."""
LEAST, MOST = "dp-fedavg", "ckks-fedavg"
"""What r = 0 and r = 100 % would be."""


@dataclass(frozen=True)
class Bench:
    """A data set with a network and the settings of its federation."""

    name: str
    data: str
    shape: Sequence[int]
    network: Mapping[str, Any]
    words: str
    federation: Mapping[str, Any] = field(default_factory=dict)
    noise: Mapping[str, Any] = field(default_factory=dict)
    usual: bool = True
    trained_under: str = "pads"
    outputs: int = 10

    def __getitem__(self, name: str) -> Any:
        """A setting of the federation or of the noise."""
        return {**_PAPER["federation"], **_PAPER["noise"], **self.federation, **self.noise}[name]

    def cell(self, partition: str, row: str) -> str:
        """The name of the cell that trains a row; under "cost", of the one that times its protection."""
        return f"{self.name}/{partition}/{row}"

    def cost(self, row: str) -> str:
        """The name of the cell that times a row's protection."""
        return self.cell("cost", row)

    @property
    def pace(self) -> str:
        """The name of the cell that times training alone."""
        return f"{self.name}/pace"

    def settings(
        self, row: Algorithm, partition: str = "iid", *, cipher: str = "", **changes: object
    ) -> dict[str, Any]:
        """A row's run."""
        return {
            "dataset": self.data,
            **self.network,
            **_PAPER["federation"],
            **self.federation,
            **_PAPER["partitions"][partition]["settings"],
            "scheme": row.scheme,
            **({**_PAPER["noise"], **self.noise} if row.noisy else {}),
            **row.options,
            **({} if row.cipher == "none" else {"cipher": cipher or self.trained_under}),
            **changes,
        }


def benches(quick: bool) -> tuple[Bench, ...]:
    """What tables are run on."""
    return tuple(Bench(**one) for one in _PAPER["benches_quick" if quick else "benches"])


def _where(bench: Bench, partition: str) -> str:
    return f"{bench.name} {_PAPER['partitions'][partition]['title']}"


def printed(row: str, partition: str, what: str = "accuracy") -> float | None:
    """Table 1's "accuracy", "seconds" or "efficiency"; None where the table has no such cell."""
    named = BY_LABEL[row].printed_as or row if row in BY_LABEL else row
    if named not in _T1["printed"] or partition not in PARTITIONS:
        return None
    figures = _T1["printed"][named][("accuracy", "seconds", "efficiency").index(what)]
    return float(figures[PARTITIONS.index(partition)])


# Seconds that protection adds to a round.

SLICE = 1 << 21
"""Larger models are timed on one of about this many parameters, and the time is scaled."""

_ROUNDS = 3
_SAMPLES = 4
_SLICE_SIDE = 64
_PER_UNIT = _SLICE_SIDE**2 + 1 + 10
_SEED = 1


@dataclass(frozen=True)
class _Standing(LocalSteps):
    """Local training that takes no time: updates that clients half agree on, as a vote would find them."""

    def run(self, bench: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """The same update in every round."""
        length = self.layout(bench.architecture, tensors=1).length - 1
        return weighted(_update(length, data.client), len(data))


@lru_cache(maxsize=64)
def _update(length: int, client: int) -> Tensor:
    common = torch.randn(length, generator=torch.Generator().manual_seed(0))
    own = torch.randn(length, generator=torch.Generator().manual_seed(1 + client))
    return (common + own) * 1e-3


def measure(bench: Bench, row: Algorithm) -> Figures:
    """Seconds that protection adds to a round of a row: one client's and the server's, on one thread.

    Processor time, so that what else runs on the machine does not count. A share that shrinks is timed at
    its mean over the run.
    """
    model, options = bench.network["model"], bench.network["model_options"]
    network = models.build(
        model, input_shape=tuple(bench.shape), outputs=bench.outputs, seed=_SEED, vocabulary=None, **options
    )
    whole = sum(one.numel() for one in network.parameters())
    job = _standing_job(bench, row, large=whole > SLICE)
    timed = job.architecture.size
    with one_thread():
        rounds, traffic, _ = timed_rounds(job)
    fastest, scale = min(rounds, key=lambda one: one.all), whole / timed
    return {
        "protection": fastest.all * scale,
        "client_seconds": fastest.client * scale,
        "server_seconds": fastest.server * scale,
        "counting_seconds": fastest.counting * scale,
        "bytes_up": traffic.bytes_up / bench["clients"] * scale,
        "bytes_down": traffic.bytes_down / bench["clients"] * scale,
        "encrypted_share": row.mean_share(bench["rounds"]),
        "parameters": whole,
        "timed_on": timed,
    }


def _standing_job(bench: Bench, row: Algorithm, *, large: bool) -> Job:
    """A row's scheme on a few random samples and with local training that stands still."""
    slice_of = {"model": "mlp", "model_options": {"depth": 2, "width": SLICE // _PER_UNIT}}
    changes: dict[str, Any] = {**(slice_of if large else {}), "rounds": _ROUNDS}
    if row.scheme == "paraaegis" and row.encrypted < 1.0:  # clients elect what is encrypted
        changes |= {"share": row.mean_share(bench["rounds"]), "share_decay": 1.0}
    settings = bench.settings(row, cipher=row.cipher, **changes)
    shape = (1, _SLICE_SIDE, _SLICE_SIDE) if large else bench.shape
    job = job_of(settings, shape=shape, samples=_SAMPLES, outputs=bench.outputs, where=f"the costs of {row.label}")
    return replace(job, scheme=replace(job.scheme, work=_still(job.scheme.work)))


def _still(work: LocalWork) -> LocalWork:
    """The same local work without the training."""
    if isinstance(work, ClippedUpdate | DividedUpdate):
        return replace(work, local=_still(work.local))  # type: ignore[arg-type]
    assert isinstance(work, LocalSteps)
    return _Standing(work.loss, work.batches, work.schedule, work.steps, work.epochs)


# Table 1: accuracy, time and their ratio.


def _table1_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for bench in benches(quick):
        pace = bench.settings(BY_LABEL["fedavg"], rounds=_T1["pace_rounds"])
        found.append(Cell(bench.pace, pace, usual=bench.usual))
        for row in (one for one in ROWS if one.protected):
            expected = quick or (bench.usual and (row.usual or row.twin is not None))
            found.append(Cell(bench.cost(row.label), bench.settings(row, cipher=row.cipher), usual=expected))
        for partition, row in itertools.product(PARTITIONS[:1] if quick else PARTITIONS, ROWS):
            expected = quick or (bench.usual and row.usual and partition == "iid")
            more = {"masked": True} if row.masked else {}
            settings = bench.settings(row, partition)
            found.append(Cell(bench.cell(partition, row.label), settings, usual=expected, more=more))
    return tuple(found)


def _table1_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    name, what, *row = cell.name.split("/")
    if what == "cost":
        return measure(next(one for one in benches(stage.quick) if one.name == name), BY_LABEL[row[0]])
    figures = stage.train(cell, seed=seed, on_round=on_round)
    if what != "pace":
        return figures
    whole = figures["seconds"]
    assert isinstance(whole, float)
    return {"device": figures["device"], "round_seconds": whole / _T1["pace_rounds"]}


@dataclass(frozen=True)
class Trained:
    """A cell's training: accuracies of finished runs by seed, of unfinished ones with the round, and whose it was."""

    finished: Mapping[int, float]
    unfinished: Mapping[int, tuple[float, int]]
    epsilon: float | None
    noise: float | None
    seconds: float | None
    of: Algorithm | None = None

    @property
    def accuracy(self) -> float | None:
        """The mean over the seeds that were run to the end."""
        return mean(self.finished)

    def __str__(self) -> str:
        reached = (f"{value:.1f} at round {round}" for value, round in self.unfinished.values())
        return shown(self.finished) if self.finished else ", ".join(reached) or EMPTY


def trained(results: Results, cell: str, *, rounds: int) -> Trained:
    """A cell's training; runs of fewer than `rounds` rounds count as unfinished."""
    accuracies, reached = numbers(results, cell), numbers(results, cell, "rounds")
    done = {seed: value for seed, value in accuracies.items() if reached.get(seed, 0) >= rounds}
    short = {seed: (value, int(reached.get(seed, 0))) for seed, value in accuracies.items() if seed not in done}
    seconds = {seed: one for seed, one in numbers(results, cell, "seconds").items() if seed in done}
    return Trained(done, short, mean_of(results, cell, "epsilon"), mean_of(results, cell, "noise"), mean(seconds))


@dataclass(frozen=True)
class Run:
    """What was measured of one bench with one partition."""

    results: Results
    bench: Bench
    partition: str = "iid"

    @property
    def there(self) -> bool:
        """Whether anything was trained."""
        return any(name.startswith(f"{self.bench.name}/{self.partition}/") for name in self.results)

    def training(self, row: Algorithm) -> Trained:
        """A row's own training, or its twin's where it was not trained itself."""
        for candidate in (row, *([] if row.twin is None else [BY_LABEL[row.twin]])):
            cell = self.bench.cell(self.partition, candidate.label)
            found = trained(self.results, cell, rounds=self.bench["rounds"])
            if found.finished or found.unfinished:
                return replace(found, of=candidate)
        return trained({}, "", rounds=self.bench["rounds"])

    def cost(self, row: Algorithm, what: str = "protection") -> float | None:
        """Seconds that protection adds to a round: 0 where there is none."""
        return mean_of(self.results, self.bench.cost(row.label), what) if row.protected else 0.0

    @property
    def pace(self) -> float | None:
        """Seconds of a round's training by all clients, one after the other, without protection; timed by itself."""
        return mean_of(self.results, self.bench.pace, "round_seconds")

    def seconds(self, row: Algorithm) -> float | None:
        """Training of all rounds, and T × the protection of one."""
        cost, pace, rounds = self.cost(row), self.pace, self.bench["rounds"]
        training = self.training(row).seconds if pace is None else pace * rounds
        return None if cost is None or training is None else training + rounds * cost


def _table1_report(results: Results, quick: bool) -> Report:
    found = benches(quick)
    ran = [one for one in found if any(Run(results, one, partition).there for partition in PARTITIONS)]
    # Those that were trained on, or, before anything was, the usual.
    wanted = ran or [one for one in found if one.usual]
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    notes = [f"{one.name}: {one.words}." for one in wanted]
    for bench in wanted:
        runs = [Run(results, bench, one) for one in (PARTITIONS[:1] if quick else PARTITIONS)]
        rows += [_table1_row(run, row, quick) for run in runs for row in ROWS]
        there = [one.partition for one in runs if one.there] or [runs[0].partition]
        for run in runs:
            where = _where(bench, run.partition)
            if run.partition in there:
                checks += [replace(one, claim=f"{where}: {one.claim}") for one in _table1_checks(run)]
            elif bench.usual:
                checks.append(Check(f"{where}: the same claims", None, "not run"))
    for kind in (_pace_note, _noise_note):
        notes += filter(None, (kind(Run(results, one)) for one in wanted))
    return _T1.report(
        rows, checks, quick=quick, notes=[*notes, *_T1.notes(), *([] if quick else [*_T1["notes_full"], _NORM])]
    )


def _table1_row(run: Run, row: Algorithm, quick: bool) -> tuple[str, ...]:
    found, time = run.training(row), run.seconds(row)
    ratio = None if found.accuracy is None or not time else 100.0 * found.accuracy / time
    whose = f" (= {found.of.title})" if found.of is not None and found.of is not row else ""

    def both(what: str, ours: str) -> str:
        return f"{paper(None if quick else printed(row.label, run.partition, what))} / {ours}"

    return (
        *(_where(run.bench, run.partition), row.title, both("accuracy", f"{found}{whose}")),
        both("seconds", text(time, "{:,.1f}")),
        both("efficiency", text(ratio, "{:,.2f}" if ratio is None or ratio < 100 else "{:,.0f}")),
        text(run.cost(row), "{:,.3f}"),
        text(found.epsilon, "{:,.0f}" if (found.epsilon or _FEW) >= _FEW else "{:.2g}") if row.noisy else "no noise",
    )


def _pace_note(run: Run) -> str:
    if run.pace is None:
        return ""
    bench, where = run.bench, next(iter(run.results[run.bench.pace].values())).get("device", "")
    return (
        f"{bench.name}: a round's training by {bench['clients']} clients, one after the other, takes {run.pace:.3g} s "
        f"({where}), hence {run.pace * bench['rounds']:,.1f} s for {bench['rounds']} rounds."
    )


def _noise_note(run: Run) -> str:
    """How the paper's noise compares with what it is added to."""
    bench, found = run.bench, run.training(BY_LABEL["dp-fedavg"])
    size = next(iter(numbers(run.results, bench.cell("iid", "dp-fedavg"), "parameters").values()), None)
    if found.noise is None or size is None:
        return ""
    return (
        f"{bench.name}: the paper's σ puts noise of standard deviation {found.noise:.3g} on every noised "
        f"coordinate of a round's mean update, over all {size:,.0f} of them an L2 norm of "
        f"{found.noise * size**0.5:.3g}, where the clipped mean has at most {bench['clip']:g}."
    )


SAME_NOISE = (
    "by construction: noise first and encryption after it is the very noise of DP-FedAvg, so that only time can differ"
)


def _table1_checks(run: Run) -> Iterator[Check]:
    """Every claim, for one partition."""
    trainings = {row.label: run.training(row).finished for row in ROWS}
    accuracy = {label: mean(found) for label, found in trainings.items()}
    time = {row.label: run.seconds(row) for row in ROWS}
    yield rising(
        "accuracy grows with r", [trainings[one] for one in DIAL], list(DIAL.values()), unit=" %", signed=False
    )
    yield _time_grows(run, time)
    yield from _extremes(trainings, time)
    shared = run.training(BY_LABEL["serial"]).of is BY_LABEL["dp-fedavg"]
    yield replace(_serial_accuracy(accuracy, shared=shared), ours=True)
    yield replace(_serial_time(time), ours=True)
    for rival in (BY_LABEL[one] for one in ("varying-dp", "stevens")):
        gain = difference(trainings["r1"], trainings[rival.label])
        yield above(f"ParaAegis 1 % is more accurate than {rival.title}", gain)
    yield _dynamic(trainings, time)
    claim = f"dynamic 10 % × 0.99 lies between static 5 % and 10 % in accuracy (up to {CHANCE:g} points of chance)"
    low, one, high = (accuracy[name] for name in ("r5", SHRINKING, "r10"))
    if low is None or one is None or high is None:
        yield Check(claim, None, ours=True)
    else:
        held = min(low, high) - CHANCE <= one <= max(low, high) + CHANCE
        yield Check(claim, held, f"static 5 %: {low:.1f}, dynamic: {one:.1f}, static 10 %: {high:.1f}", ours=True)
    yield replace(_sooner("dynamic 10 % × 0.99 takes less time than static 10 %", time, SHRINKING, "r10"), ours=True)
    claim = f"pads encrypt 100 %, within {CHANCE:g} points of FedAvg, in less time than CKKS encrypts 1 %"
    ours, plain, our_time, ckks_time = accuracy["pads100"], accuracy["fedavg"], time["pads100"], time["r1"]
    if ours is None or plain is None or our_time is None or ckks_time is None:
        yield Check(claim, None, ours=True)
    else:
        seen = f"{ours:.1f} and {plain:.1f} %, {_short(our_time)} and {_short(ckks_time)} s"
        yield Check(claim, abs(ours - plain) <= CHANCE and our_time < ckks_time, seen, ours=True)


SHRINKING = "r10-x0.99"
DYNAMIC = tuple(row for row in ROWS if "share_decay" in row.options)


def _dynamic(trainings: Mapping[str, Mapping[int, float]], time: Mapping[str, float | None]) -> Check:
    """The paper's fifth finding, of parameters that one selects: any dynamic row beside any static one will do."""
    claim, found, seen = "some dynamic share is more accurate than some static one, in less time", [], []
    for row, static in itertools.product(DYNAMIC, STATIC):
        gain = difference(trainings[row.label], trainings[static.label])
        more, sooner = decided(gain), _sooner(claim, time, row.label, static.label)
        held = False if False in (more, sooner.held) else None if None in (more, sooner.held) else True
        found.append(held)
        if held:
            seen.append(f"{row.title} beside {static.title}: {shown(gain, signed=True)}, {sooner.seen}")
    if True in found:
        return Check(claim, True, "; ".join(seen))
    missing = [row.title for row in (*DYNAMIC, *STATIC) if not trainings[row.label] or time[row.label] is None]
    told = f"of {len(found)} pairs {found.count(False)} are not" + (
        f"; not run: {', '.join(missing)}" if missing else ""
    )
    return Check(claim, False if all(one is False for one in found) else None, told)


def _extremes(trainings: Mapping[str, Mapping[int, float]], time: Mapping[str, float | None]) -> Iterator[Check]:
    """The paper's second and third findings: each end of the dial gives up one thing for the other, serial both."""
    for label, title, worse, sooner in (
        (LEAST, "DP-FedAvg (r = 0)", True, True),
        (MOST, "CKKS-FedAvg (r = 100 %)", False, False),
        ("serial", "serial", True, False),
    ):
        gains = {name: difference(trainings[label], trainings[row]) for row, name in DIAL.items()}
        yield all_above(f"{title} is {'less' if worse else 'more'} accurate than any r between", gains, below=worse)
        rows = [row for row in DIAL if time[row] is not None]
        nearest = (min if sooner else max)(rows, key=lambda row: time[row] or 0.0, default="r1")
        one, other = (label, nearest) if sooner else (nearest, label)
        yield _sooner(f"{title} takes {'less' if sooner else 'more'} time than any r between", time, one, other)


def _sooner(claim: str, time: Mapping[str, float | None], one: str, other: str) -> Check:
    """Whether a row takes less time than another; open where the two timings are too near each other to tell."""
    first, second = time[one], time[other]
    if first is None or second is None:
        return Check(claim, None)
    near = abs(first - second) <= TIMED * max(first, second)
    seen = f"{_short(first)} and {_short(second)} s" + (": too near to tell" if near else "")
    return Check(claim, None if near else first < second, seen)


def _time_grows(run: Run, time: Mapping[str, float | None]) -> Check:
    there = {one: seconds for one in DIAL if (seconds := time[one]) is not None}
    leeway = TIMED * max(there.values(), default=0.0)
    times = [{1: there[one]} if one in there else {} for one in DIAL]
    found = rising("time grows with r", times, list(DIAL.values()), unit=" s", signed=False, leeway=leeway)
    votes = {row.title: run.cost(row, "counting_seconds") for row in STATIC}
    counted = ", ".join(f"{title} {_short(one)} s" for title, one in votes.items() if one)
    if found.held is not False or not counted:
        return found
    why = f"; counting votes alone takes, of a round: {counted}; at 0 and at 100 % nobody votes"
    return replace(found, seen=found.seen + why)


def _serial_accuracy(accuracy: Mapping[str, float | None], *, shared: bool) -> Check:
    claim = f"serial is the least accurate (below DP-FedAvg by more than {CHANCE:g} points of chance)"
    serial, plain = accuracy["serial"], accuracy["dp-fedavg"]
    if serial is None or plain is None:
        return Check(claim, None)
    lower = [name for name, one in accuracy.items() if name != "serial" and one is not None and one < serial]
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
    longest = max(others, key=lambda name: others[name])
    near = abs(others[longest] - serial) <= TIMED * max(others[longest], serial)
    seen = f"{_short(serial)} s, {longest} {_short(others[longest])} s" + (": too near to tell" if near else "")
    return Check(claim, None if near else serial > others[longest], seen)


def _short(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


# Table 2: which tenth is encrypted.


def _table2_cells(quick: bool) -> tuple[Cell, ...]:
    rounds, row = _T2.form(quick)["rounds"], BY_LABEL["r10"]
    return tuple(
        Cell(f"{bench.name}/{strategy}", bench.settings(row, strategy=strategy, rounds=rounds), usual=bench.usual)
        for bench, strategy in itertools.product(benches(quick), _T2["titles"])
    )


def _table2_report(results: Results, quick: bool) -> Report:
    titles, rounds = _T2["titles"], _T2.form(quick)["rounds"]
    rows, checks, words = [], [], []
    ran = [bench for bench in benches(quick) if any(f"{bench.name}/{one}" in results for one in titles)]
    for bench in ran or [bench for bench in benches(quick) if bench.usual]:
        found = {one: trained(results, f"{bench.name}/{one}", rounds=rounds) for one in titles}
        words.append(f"{bench.name}: {bench.words}.")
        for strategy, title in titles.items():
            theirs = paper(None if quick else _T2["printed"][strategy])
            rows.append((bench.name, title, f"{theirs} / {found[strategy]}"))
        claim = f"{bench.name}: max is better than min and random by at least {_T2['clear']:g} points"
        worst = {one: numbers_of for one in ("min", "random") if (numbers_of := found[one].finished)}
        best, least, random = (found[one].accuracy for one in ("max", "min", "random"))
        if best is None or least is None or random is None:
            checks.append(Check(claim, None))
        else:
            seen = f"max − min {best - least:+.1f}, max − random {best - random:+.1f}"
            checks.append(Check(claim, best - max(least, random) >= _T2["clear"], seen))
        poor = f"{bench.name}: min and random do not train (below {_T2['poor']:g} %)"
        checks.append(all_above(poor, worst if len(worst) == 2 else {}, _T2["poor"], below=True))
    notes = [*words, *_T2.notes(rounds=rounds, epsilon=benches(quick)[0]["epsilon"]), *([] if quick else [_NORM])]
    return _T2.report(rows, checks, quick=quick, notes=notes)


# Table 3: clipping thresholds, numbers of clients.


def _table3_cells(quick: bool) -> tuple[Cell, ...]:
    form, row = _T3.form(quick), BY_LABEL["r10"]
    found = []
    for bench, (what, values) in itertools.product(benches(quick), form["values"].items()):
        for value in values:
            settings = bench.settings(row, rounds=form["rounds"], **{what: value})
            found.append(Cell(f"{bench.name}/{what}{value:g}", settings, usual=bench.usual))
    return tuple(found)


def _table3_report(results: Results, quick: bool) -> Report:
    form, rows, words = _T3.form(quick), [], []
    checks: list[Check] = []
    ran = [one for one in benches(quick) if any(name.startswith(f"{one.name}/") for name in results)]
    for bench in ran or [one for one in benches(quick) if one.usual]:
        words.append(f"{bench.name}: {bench.words}.")
        found: dict[str, dict[str, Mapping[int, float]]] = {}
        for what, values in form["values"].items():
            for value in values:
                ours = trained(results, f"{bench.name}/{what}{value:g}", rounds=form["rounds"])
                theirs = None if quick else _T3["printed"][what].get(f"{value:g}")
                found.setdefault(what, {})[f"{value:g}"] = ours.finished
                rows.append((bench.name, _T3["names"][what], f"{value:g}", f"{paper(theirs)} / {ours}"))
        checks += _table3_claims(bench.name, found)
    notes = [*words, *_T3.notes(rounds=form["rounds"], epsilon=benches(quick)[0]["epsilon"])]
    return _T3.report(rows, checks, quick=quick, notes=notes)


def _table3_claims(where: str, found: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Iterator[Check]:
    clips, counts = ({value: mean(one) for value, one in found["clip"].items()}, found["clients"])
    claim, best = f"{where}: θ = 1 is the most accurate (up to {CHANCE:g} points of chance)", clips.get("1")
    there = [one for one in clips.values() if one is not None]
    seen = ", ".join(f"θ = {name}: {text(one, '{:.1f}')}" for name, one in clips.items())
    yield Check(claim, None if best is None or len(there) < len(clips) else best >= max(there) - CHANCE, seen)
    falling = list(counts.items())[::-1]
    claim, names = f"{where}: accuracy falls as clients grow more", [f"N = {name}" for name, _ in falling]
    yield rising(claim, [one for _, one in falling], names, unit=" %", signed=False)


ENTRIES = (
    _T1.entry(_table1_cells, _table1_report, work=_table1_work),
    _T2.entry(_table2_cells, _table2_report),
    _T3.entry(_table3_cells, _table3_report),
)
