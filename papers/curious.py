"""What one client rebuilds of another's picture from the models it is sent: two clients, a picture each, two rounds.

The server's update between two rounds is the mean of both gradients. Under plain averaging it is the difference of two
models. Under a veil each comes under secrets of its own, and their difference says nothing; matched within the
network's own symmetries (attack `alignment`) it is the update, with rows of the first layer on unknown scales. A unit
that the client's own picture leaves at rest has nothing of its own in its row: that is δ·(x, 1), x the other's picture,
whatever covers the last layer. So the first right singular vector of those rows is x.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from fedveil.audit.findings import Score
from fedveil.audit.metrics import psnr
from fedveil.audit.record import client_view
from fedveil.audit.subject import enacted
from fedveil.engine import ClientPool
from fedveil.errors import AttackError
from fedveil.runs.job import Job
from fedveil.work.batches import mixed_seed
from papers.attacks import as_text, from_text, interval, level, scale_of, short, tried
from papers.cells import Cell, Figures, Results, figures_of, listed
from papers.entries import Table
from papers.reconstruction import BLIND, between
from papers.report import EMPTY, Check
from papers.stage import OnRound, Stage

RECEIVED, ALIGNED = WAYS = ("as received", "aligned")
CURIOUS = "curious"
_HOW = {RECEIVED: "models taken as they are sent", ALIGNED: "models of two rounds aligned"}
_ROUNDS = 2
_ATTACKER, _VICTIM = range(2)


def cells(table: Table, quick: bool) -> Iterator[Cell]:
    """A cell for every scheme that the table tries on clients."""
    form, shared = table.form(quick)[CURIOUS], table[CURIOUS]["settings"]
    for label, own in table[CURIOUS]["schemes"].items():
        settings = {"dataset": form["data"], "clients": 2, "rounds": _ROUNDS, **shared, **own}
        yield Cell(cell_name(form["data"], label), settings, samples=2 * form["victims"])


def cell_name(data: str, label: str) -> str:
    """A cell's name."""
    return f"{data}/{CURIOUS}/{label}"


def work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """One run for each pair of pictures; the client that has the first of them looks for the second."""
    data, pairs = cell.settings["dataset"], (cell.samples or 2) // 2
    scale, split = scale_of(stage, data), stage.split(data, samples=cell.samples)
    job = between(stage.job(cell, seed=seed), scale)
    blind = scale(stage.split(data).test.x.mean(0, keepdim=True)).cpu()
    truths: list[Tensor] = []
    found: dict[str, list[Tensor]] = {}
    for number in range(pairs):
        pair = [scale(split.train.x[2 * number + place][None]) for place in range(2)]
        labels = [split.train.y[2 * number + place][None] for place in range(2)]
        made = _rebuilt(_between_two(job, pair, labels), seed=mixed_seed(seed, number) % 2**31)
        truths.append(pair[_VICTIM].cpu())
        for way, picture in made.items():
            found.setdefault(way, []).append(picture)
        on_round(number + 1, pairs)
    truth, shape = torch.cat(truths).double(), job.facts.input_shape
    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "shape": [float(one) for one in shape],
        "originals": as_text(truth, box=(0.0, 1.0)),
        f"{BLIND} psnr": [short(float(one)) for one in psnr(blind.double().expand_as(truth), truth)],
    }
    for way, pictures in found.items():
        made_up = torch.cat(pictures).double()
        figures[f"{way} psnr"] = [short(float(one)) for one in psnr(made_up, truth)]
        figures[f"{way} pictures"] = as_text(made_up, box=(0.0, 1.0))
    return figures


def _between_two(job: Job, pictures: Sequence[Tensor], labels: Sequence[Tensor]) -> Job:
    """The same job between two clients that have one of these pictures each."""
    clients = [
        replace(client, x=x, y=y, rows=None) for client, x, y in zip(job.pool.clients, pictures, labels, strict=True)
    ]
    return replace(job, pool=ClientPool(tuple(clients)))


def _rebuilt(job: Job, *, seed: int) -> dict[str, Tensor]:
    """The other's picture, from two models as they were sent, and from their difference once they are aligned."""
    with TemporaryDirectory(prefix="fedveil-curious-") as folder:
        subject = enacted(job, Path(folder) / "record", rounds=_ROUNDS)
        x, y = (part.cpu() for part in subject.own(_ATTACKER))
        view = client_view(subject.record, _ATTACKER, data=(x, y))
        first, second = (sent.broadcast.parameters.double() for sent in view.broadcasts)
        steps = {RECEIVED: (first, second - first)}
        if view.facts.traced:
            (outcome,) = tried("alignment", [view], [{"seed": seed, "quick": True}])
            if isinstance(outcome, str):
                raise AttackError(f"alignment: {outcome}")
            steps[ALIGNED] = outcome["frame"].double(), outcome["update"].double()
        return {way: read_other(view.facts.module(), *step, own=x.double()) for way, step in steps.items()}


def read_other(module: nn.Module, model: Tensor, update: Tensor, *, own: Tensor) -> Tensor:
    """The other client's input, as far as rows say it in which the own one has no part; within 0 and 1."""
    layer = next(one for one in module.modules() if isinstance(one, nn.Linear))
    assert layer.bias is not None
    count, outputs = layer.weight.numel(), len(layer.bias)  # the first of the network's parameters

    def rows(flat: Tensor) -> Tensor:
        return torch.cat([flat[:count].reshape(layer.weight.shape), flat[count : count + outputs, None]], dim=1)

    with_one = torch.cat([own.flatten(), own.new_ones(1)])
    at_rest = rows(model) @ with_one < 0
    _, _, directions = torch.linalg.svd(rows(update)[at_rest], full_matrices=False)
    other = directions[0, :-1] / directions[0, -1]
    found: Tensor = other.nan_to_num().clamp(0.0, 1.0).reshape(own.shape)
    return found


def lines(table: Table, results: Results, quick: bool) -> Iterator[tuple[str, ...]]:
    """A row for every scheme and way."""
    form = table.form(quick)[CURIOUS]
    for label, title in table[CURIOUS]["names"].items():
        name = cell_name(form["data"], label)
        for way in WAYS:
            got = interval(listed(results, name, f"{way} psnr"))
            if got is not None or way == RECEIVED:
                blind = level(interval(listed(results, name, f"{BLIND} psnr")))
                what = title if label == "fedavg" else f"{title}, {way}"
                yield (
                    form["data"],
                    table[CURIOUS]["settings"]["model"],
                    f"by a client: {what}",
                    EMPTY,
                    level(got),
                    blind,
                )


def checks(table: Table, results: Results, quick: bool, *, beside: Score | None) -> Iterator[Check]:
    """The paper's claims of clients: that they are left nothing of each other's data, as by much noise `beside` it."""
    form, margin = table.form(quick)[CURIOUS], table["margin"]

    def found(label: str) -> tuple[dict[str, Score], Score | None]:
        name = cell_name(form["data"], label)
        got = {way: one for way in WAYS if (one := interval(listed(results, name, f"{way} psnr"))) is not None}
        return got, interval(listed(results, name, f"{BLIND} psnr"))

    start = f"{form['data']}, a picture each of two clients"
    bare, blind = found("fedavg")
    works = None if not bare or blind is None else bare[RECEIVED].surely > blind.value + margin
    seen = "" if blind is None else f"{level(bare[RECEIVED])}; mean picture {blind.value:.1f}"
    claim = f"{start}: one rebuilds the other's from FedAvg's models"
    yield Check(claim, works, seen, premise=True, topic=CURIOUS)
    for label, title in table[CURIOUS]["names"].items():
        if label == "fedavg":
            continue
        got, blind = found(label)
        ours = label in table[CURIOUS]["ours"]
        for way in WAYS:
            claim = f"{start}: {title} leaves one nothing of the other's, {_HOW[way]}"
            check = Check(claim, None, level(got.get(way)), ours=ours, adaptive=way == ALIGNED, topic=CURIOUS)
            if way not in got or blind is None or works is not True:
                yield check
            else:
                seen = f"{level(got[way])}; mean picture {blind.value:.1f}"
                yield replace(check, held=got[way].surely <= blind.value + margin, seen=seen)
        claim = f"{start}: {title} defends as PPDL with the most noise does, {_HOW[RECEIVED]}"
        if RECEIVED not in got or beside is None:
            yield Check(claim, None, ours=ours, topic=CURIOUS)
        else:
            seen = f"{level(got[RECEIVED])} and {level(beside)} dB"
            yield Check(claim, got[RECEIVED].surely <= beside.value + margin, seen, ours=ours, topic=CURIOUS)


def sheet_rows(table: Table, results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Originals, then what a client made of them."""
    form, rows = table.form(quick)[CURIOUS], []
    for label, title in table[CURIOUS]["names"].items():
        for figures in figures_of(results, cell_name(form["data"], label))[:1]:
            if label == "fedavg" and (originals := from_text(figures, "originals")) is not None:
                rows.append(("what the other client has", originals))
            made = {way: from_text(figures, f"{way} pictures") for way in WAYS}
            rows += [(f"{title}, {way}", one) for way, one in made.items() if one is not None]
    return rows
