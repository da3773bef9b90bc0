"""A table in pieces: cells that several processes train side by side, and the files they wrote put together.

A cell is judged and written down every few rounds, so that a process that is stopped leaves what it had.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from fedveil.errors import ConfigError, NumericError
from fedveil.protocol import ServerState
from fedveil.runs.files import write_atomically
from fedveil.runs.training import Row, fresh_state, train_job
from papers.catalogue import find
from papers.cells import Cell, Figures, Store, chosen
from papers.report import Report
from papers.stage import Stage, accuracy_of, spent_figures

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

    def on_round(row: Row, now: ServerState) -> None:
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
