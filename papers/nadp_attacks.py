"""NADP-FL, Table 4: DLG and iDLG on uploads without noise, with local noise, and with noise that annihilates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.isolation import AttackProcess
from fedveil.audit.judge import Judge, train_judge
from fedveil.audit.metrics import feature_mse, mse, ssim
from fedveil.audit.views import View, to_bytes
from fedveil.work.batches import mixed_seed
from papers.attacking import as_text, short
from papers.cells import Cell, Figures
from papers.entry import Entry
from papers.nadp_attacks_report import report
from papers.nadp_attacks_round import Seen, seen_round
from papers.nadp_attacks_sheet import sheet_rows
from papers.nadp_attacks_table import (
    ALL,
    BOTH,
    CHANCE,
    FEDAVG,
    LDP,
    QUICK,
    ROUNDS,
    SHARPEST,
    STRONGER,
    Form,
    cell_of,
    form_of,
    nadp_row,
)
from papers.stage import OnRound, Stage

EPSILON = 5.0
STRENGTH = 1.2
DELTA = 1e-5
COHORT = 0.8
ROUNDS_OF_THE_RUN = 200
_STILL = 1e-9
_LEAST = 1 / 3

_JUDGES: WeakKeyDictionary[Stage, dict[str, tuple[Judge, float]]] = WeakKeyDictionary()


def equal_utility(epsilon: float, *, cohort: int, rate: float) -> float:
    """ε·√(q·k/2): LDP's ε for which the mean of k uploads has the noise of NADP at ε (20√2 for 5, k = 80, q = 0.8)."""
    return epsilon * math.sqrt(rate * cohort / 2)


def _cells(quick: bool) -> tuple[Cell, ...]:
    form = form_of(quick)
    base: dict[str, object] = {
        "model": "lenet-sigmoid",
        "loss": "cross-entropy",
        "clients": form.clients,
        "cohort": COHORT,
        "rounds": ROUNDS_OF_THE_RUN,
        "record": True,
        "record_rounds": "1",
        "record_clients": f"0-{form.clients - 1}",
    }
    noise: dict[str, object] = {"clip": form.clip, "delta": DELTA, "accounting": "paper"}
    found = [
        Cell(cell_of(data, None, FEDAVG), {**base, "dataset": data, "scheme": "fedavg"}, form.clients)
        for data in form.data
    ]
    # What decides the verdict first, so that a run that is cut short has it.
    for size, data in itertools.product(sorted(form.sizes, key=lambda one: one != form.fitted), form.data):
        shared = {**base, **noise, "dataset": data}
        nadp = {**shared, "scheme": "nadp", "pair_strength": STRENGTH, "epsilon": EPSILON * size}
        fair = equal_utility(EPSILON * size, cohort=form.cohort, rate=COHORT)
        found.append(Cell(cell_of(data, size, LDP), {**shared, "scheme": "ldp", "epsilon": fair}, form.clients))
        found.append(Cell(cell_of(data, size, BOTH), nadp, form.clients))
        if size == form.fitted:
            still = {**nadp, "lr": _STILL, "record_rounds": f"1-{form.rounds}"}
            found.append(Cell(cell_of(data, size, ROUNDS), still, form.clients))
    return tuple(found)


@dataclass(frozen=True)
class _Row:
    """What is attacked in one row: so many colluders, and whether the honest others' contributions are known."""

    name: str
    colluders: int = 0
    sharpest: bool = False


def rows_of(kind: str, form: Form) -> tuple[_Row, ...]:
    """The rows that a cell fills."""
    if kind in (FEDAVG, LDP):
        return (_Row(kind),)
    coalitions = tuple(_Row(nadp_row(tau), round(tau * form.cohort)) for tau in form.taus)
    return (*coalitions, _Row(ALL, form.cohort - 1), _Row(SHARPEST, form.cohort - form.honest, sharpest=True))


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    form, kind = form_of(cell.settings["dataset"] in QUICK.data), cell.name.rsplit("/", 1)[-1]
    with TemporaryDirectory(prefix="fedveil-nadp-") as folder:
        seen = seen_round(
            stage.job(cell, seed=seed),
            Path(folder),
            victims=form.victims if kind != ROUNDS else form.averaged,
            honest=form.honest if kind == BOTH else 1,
            least=form.clip * _LEAST,
            rounds=form.rounds if kind == ROUNDS else 1,
        )
        figures = _facts(stage, seen)
        if kind == FEDAVG:
            guess = stage.split(str(cell.settings["dataset"])).test.x.mean(0, keepdim=True).cpu()
            figures |= _measured(stage, cell, seen, CHANCE, guess.expand(len(seen.victims), *guess.shape[1:]))
        if kind == ROUNDS:
            return figures | _over_rounds(stage, cell, seen, form, seed=seed, on_round=on_round)
        return figures | _of_rows(stage, cell, seen, form, rows_of(kind, form), seed=seed, on_round=on_round)


def _facts(stage: Stage, seen: Seen) -> Figures:
    x, y = seen.pictures()
    job = seen.subject.job
    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "parameters": job.blueprint.size,
        "labels": [float(one) for one in y],
        "lengths": [round(float(seen.contribution(one).norm()), 4) for one in seen.victims],
        "originals": as_text(x, box=_box(seen)),
        "shape": [float(one) for one in x.shape[1:]],
    }
    return figures


def _of_rows(
    stage: Stage, cell: Cell, seen: Seen, form: Form, rows: Sequence[_Row], *, seed: int, on_round: OnRound
) -> Figures:
    figures: Figures = {}
    fitted = f"/d{form.fitted}/" in cell.name
    with ExitStack() as open_processes:
        both = {name: open_processes.enter_context(AttackProcess(name)) for name in ("dlg", "idlg")}
        stronger = AttackProcess(STRONGER)
        open_processes.callback(stronger.close)
        for done, row in enumerate(rows):
            views = [
                seen.sharpest_view(one, colluders=row.colluders)
                if row.sharpest
                else seen.view(one, colluders=row.colluders)
                for one in seen.victims
            ]
            figures |= {f"{row.name} noise": [seen.noise(view) for view in views]}
            left = seen.left(seen.victims[0], colluders=row.colluders)
            if left is not None:
                told = left.sharpest if row.sharpest else left.alone
                figures |= {f"{row.name} ledger": told, f"{row.name} epsilon": left.epsilon}
            figures |= _attacked(stage, cell, seen, row.name, both, views, seed=seed)
            if fitted and row.name in form.stronger:
                figures |= _attacked(stage, cell, seen, row.name, {STRONGER: stronger}, views[: form.few], seed=seed)
            on_round(done + 1, len(rows))
    return figures


def _over_rounds(stage: Stage, cell: Cell, seen: Seen, form: Form, *, seed: int, on_round: OnRound) -> Figures:
    """The same samples round after round, on a model that all but stands still: the mean of the uploads is attacked."""
    honest = seen.order[: form.honest]
    found = [seen.history(one, honest=honest) for one in seen.victims]
    figures: Figures = {
        f"{ROUNDS} rounds": [float(len(variances)) for _, variances in found],
        f"{ROUNDS} noise": [seen.averaged_noise(history, variances) for history, variances in found],
        f"{ROUNDS} ledger": [math.sqrt(1 / math.fsum(1 / one for one in variances)) for _, variances in found],
    }
    views, told = [one for one, _ in found], [{"variances": one, "with": "idlg"} for _, one in found]
    with AttackProcess("averaging") as process:
        figures |= _attacked(stage, cell, seen, ROUNDS, {"averaging": process}, views, seed=seed, told=told)
    on_round(1, 1)
    return figures


def _attacked(
    stage: Stage,
    cell: Cell,
    seen: Seen,
    row: str,
    processes: dict[str, AttackProcess],
    views: Sequence[View],
    *,
    seed: int,
    told: Sequence[Mapping[str, object]] = (),
) -> Figures:
    """Each attack on each view, attacks side by side; MSE, SSIM and distance in the judge's features of each."""
    y = seen.pictures()[1][: len(views)]
    shared = {"quick": True, "box": list(seen.subject.box or (0.0, 1.0)), "device": stage.device}
    settings = [{**shared, "seed": mixed_seed(seed, place) % 2**31} for place in range(len(views))]
    settings = [{**one, **other} for one, other in zip(settings, told or [{}] * len(views), strict=True)]
    # The clipping bound lies above every gradient, so their sizes count, as in the papers' own attacks.
    sizes = {name: {} if name == STRONGER else {"clipped": False} for name in processes}

    def run(name: str) -> tuple[Tensor, Tensor]:
        pairs = zip(views, settings, strict=True)
        found = [processes[name].run(to_bytes(view), settings={**each, **sizes[name]}) for view, each in pairs]
        return torch.cat([one["inputs"].float() for one in found]), torch.cat([one["labels"] for one in found])

    with ThreadPoolExecutor(len(processes)) as pool:
        results = dict(zip(processes, pool.map(run, processes), strict=True))
    figures: Figures = {}
    for name, (inputs, labels) in results.items():
        figures |= _measured(stage, cell, seen, f"{row} {name}", inputs)
        figures[f"{row} {name} labels"] = [float(one) for one in labels == y]
        if name == "idlg":
            figures[f"{row} {name} pictures"] = as_text(inputs, box=_box(seen))
    return figures


def _measured(stage: Stage, cell: Cell, seen: Seen, what: str, inputs: Tensor) -> Figures:
    """MSE and SSIM on a scale from 0 to 1, and the distance in the judge's features over that of two pictures."""
    x = seen.pictures()[0][: len(inputs)]
    judge, apart = _judge(stage, str(cell.settings["dataset"]))
    ours, theirs = _unit(seen, inputs), _unit(seen, x)
    measured = {
        "mse": mse(ours, theirs),
        "ssim": ssim(ours, theirs),
        "features": feature_mse(inputs, x, extractor=judge.features).cpu() / apart,
    }
    return {f"{what} {name}": [short(float(one)) for one in values] for name, values in measured.items()}


def _judge(stage: Stage, data: str) -> tuple[Judge, float]:
    """A classifier in whose features pictures are compared, and how far apart two different pictures are there."""
    kept = _JUDGES.setdefault(stage, {})
    if data not in kept:
        test = stage.split(data).test
        generator = torch.Generator().manual_seed(0)
        judge = train_judge(test.x, test.y, outputs=test.outputs, generator=generator, quick=True, device=stage.device)
        some = test.x[:500]
        kept[data] = judge, float(feature_mse(some, some.roll(1, 0), extractor=judge.features).mean())
    return kept[data]


def _unit(seen: Seen, x: Tensor) -> Tensor:
    """Pictures with values from 0 to 1."""
    low, high = _box(seen)
    return ((x - low) / (high - low)).clamp(0.0, 1.0)


def _box(seen: Seen) -> tuple[float, float]:
    return seen.subject.box or (0.0, 1.0)


ENTRY = Entry(
    name="nadp-table4",
    paper="NADP-FL",
    what="Table 4: DLG and iDLG under collusion, against what the ledger says is left, with stronger attacks beside",
    takes="fifteen minutes on two cores",
    takes_quick="a minute",
    needs="mnist and fashion-mnist (--quick: nothing), and the package cryptography",
    cells=_cells,
    report=report,
    work=_work,
    pictures=sheet_rows,
)
