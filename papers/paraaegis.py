"""ParaAegis, Table 1: accuracy, time and their ratio as more of the model is encrypted and less of it noised."""

from __future__ import annotations

from collections.abc import Iterator

from papers.cells import Cell, Figures, Results
from papers.entry import Entry
from papers.paraaegis_costs import SLICE, measure
from papers.paraaegis_figures import Trained, efficiency, pace, protection, seconds, training_of
from papers.paraaegis_rows import BENCHES, BY_LABEL, PARTITION_TITLES, PARTITIONS, QUICK, ROWS, Bench, Row
from papers.paraaegis_verdicts import checks
from papers.published import paraaegis_table1
from papers.report import EMPTY, Check, Report
from papers.stage import OnRound, Stage

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

ENTRY = Entry(
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
