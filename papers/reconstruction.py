"""One kind of table: a server reconstructs pictures from what one client sent in the first round of a run.

Attacks get views of a recorded round; each victim's PSNR and errors are kept, beside those of who answers with the mean
picture or with a random one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedveil.audit.attacks.gradients import client_gradient
from fedveil.audit.findings import Found, Score, Truth
from fedveil.audit.measures import Likeness, matched
from fedveil.audit.record import server_view
from fedveil.audit.subject import Effort, Subject, enacted
from fedveil.audit.trials import uploads_of
from fedveil.audit.views import ServerView
from fedveil.engine import ClientPool
from fedveil.runs.job import Job
from fedveil.work.batches import mixed_seed
from fedveil.work.messages import ClientData
from papers.attacks import (
    INEFFECTIVE,
    REFERENCES,
    Scale,
    VerdictRow,
    as_text,
    interval,
    judge_of,
    level,
    meaning,
    proven,
    reason_of,
    reference_figures,
    scale_of,
    short,
    side_by_side,
    told,
    tried,
)
from papers.cells import Cell, Figures, Results, figures_of, listed
from papers.entries import Table, built
from papers.report import Check
from papers.stage import OnRound, Stage

PHI, ADAPTIVE = "Φ", "phi"
BLIND, RANDOM = "mean picture", "random picture"
_BOX = (0.0, 1.0)


@dataclass(frozen=True)
class Place:
    """A data set, a network, a batch size, and the attacks that are tried there."""

    data: str
    model: str
    batch: int
    attacks: list[str]
    usual: bool = True

    @property
    def name(self) -> str:
        """As cells begin."""
        return f"{self.data}/{self.model}/b{self.batch}"

    @property
    def matching(self) -> list[str]:
        """The attacks that read the gradient itself, as the paper's does."""
        return [one for one in self.attacks if one != ADAPTIVE]

    def cell(self, scheme: str) -> str:
        """A cell's name."""
        return f"{self.name}/{scheme}"


@dataclass(frozen=True)
class Pictures:
    """A table of reconstructions: its section of the paper's TOML file has places, schemes, settings and efforts."""

    table: Table

    def places(self, quick: bool) -> list[Place]:
        """Where attacks are tried; the first is the table's main row."""
        return [Place(**one) for one in self.table.form(quick)["places"]]

    def attacks(self, quick: bool) -> list[str]:
        """Every attack that is tried anywhere."""
        return list(dict.fromkeys(one for place in self.places(quick) for one in place.attacks))

    def cells(self, quick: bool) -> tuple[Cell, ...]:
        """A recorded round of every scheme at every place, and one cell in which attacks prove themselves."""
        clients, found = (
            self.table.form(quick)["clients"],
            [Cell(REFERENCES, {"attacks": ", ".join(self.attacks(quick))})],
        )
        for place, (label, own) in itertools.product(self.places(quick), self.table["schemes"].items()):
            if built(own["scheme"]):
                where = {"dataset": place.data, "model": place.model, "clients": clients}
                settings = {**where, **self.table["settings"], "record_clients": f"0-{clients - 1}", **own}
                found.append(Cell(place.cell(label), settings, clients * place.batch, usual=place.usual))
        return tuple(found)

    def work(self, stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
        """Record a cell's round and attack every upload of it."""
        if cell.name == REFERENCES:
            names = cell.settings["attacks"].split(", ")
            # With the small budget, which most attacks get in the full form too: what they show with it, they can.
            return reference_figures(names, Effort(quick=True, seed=seed, device=stage.device))
        place = next(one for one in self.places(stage.quick) if cell.name.startswith(f"{one.name}/"))
        return attacked(stage, cell, place, self.table, seed=seed)


def attacked(stage: Stage, cell: Cell, place: Place, table: Table, *, seed: int) -> Figures:
    """What attacks make of the uploads of a recorded round; efforts are the table's."""
    scale = scale_of(stage, place.data)
    with TemporaryDirectory(prefix="fedveil-pictures-") as folder:
        subject = enacted(between(stage.job(cell, seed=seed), scale), Path(folder) / "record", rounds=1)
        return _attacked(stage, subject, place, scale, table, seed=seed)


def between(job: Job, scale: Scale) -> Job:
    """The same job on pictures from 0 to 1: on standardised ones sigmoids saturate, and attacks lose their signal."""
    clients = job.pool.clients
    parts = [one.take(torch.arange(len(one))) for one in clients]
    assert job.test is not None
    return replace(
        job,
        pool=ClientPool(tuple(ClientData(one.client, scale(x), y) for one, (x, y) in zip(clients, parts, strict=True))),
        test=replace(job.test, x=scale(job.test.x)),
    )


def _victims(subject: Subject, place: Place) -> tuple[list[ServerView], list[Truth]]:
    """Views of uploads, and the samples behind them."""
    views: list[ServerView] = []
    truths: list[Truth] = []
    for one in uploads_of(subject):
        x, y = (part.cpu() for part in subject.batch(one.client, round=one.round))
        # Among several samples classes are granted to the attacker, as the literature does: an upper bound.
        labels = y if place.batch > 1 else None
        views.append(server_view(subject.record, one.client, round=one.round, attempt=one.attempt, labels=labels))
        truths.append({"x": x, "y": y})
    return views, truths


def _attacked(stage: Stage, subject: Subject, place: Place, scale: Scale, table: Table, *, seed: int) -> Figures:
    views, truths = _victims(subject, place)
    public = subject.halves()[0].x.cpu().float()
    judge, apart = judge_of(stage, place.data, scale=scale)
    measure = Likeness(peak=1.0, chance=0.0, random=0.0, judge=lambda: judge)
    generator = torch.Generator().manual_seed(seed)
    blind: list[Found] = [{"inputs": public.mean(0).expand_as(truth["x"]), "labels": truth["y"]} for truth in truths]
    random: list[Found] = [
        {"inputs": torch.rand(truth["x"].shape, generator=generator), "labels": truth["y"]} for truth in truths
    ]

    def scored(name: str, found: Sequence[Found], *, labels: bool = False) -> Figures:
        """Each victim's PSNR, squared error in the data's own units, and that of the judge's features over that of
        two different pictures."""
        scores = [measure.score([one], [truth]) for one, truth in zip(found, truths, strict=True)]
        kept: dict[str, list[float]] = {
            "psnr": [score.value for score in scores],
            "mse": [score.more["mse"] * scale.square for score in scores],
            "features": [score.more["feature mse"] / apart for score in scores],
        }
        if labels:
            right = [matched(one["labels"], each["y"]) for one, each in zip(found, truths, strict=True)]
            kept["labels"] = [float(hits.double().mean()) for hits in right]
        return {f"{name} {what}": [short(one) for one in values] for what, values in kept.items()}

    def run(name: str) -> list[Found | str]:
        seen = [replace(one, known={"public.x": public}) for one in views] if name == "generative" else views
        return tried(name, seen, [_told(stage, name, table, seed=seed, victim=victim) for victim in range(len(views))])

    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "parameters": subject.job.architecture.size,
        "victims": len(views),
        "judge": short(judge.accuracy),
        "noise": [short(_distance(*pair)) for pair in zip(views, truths, strict=True)],
        "shape": [float(one) for one in subject.job.facts.input_shape],
        "originals": as_text(torch.cat([one["x"] for one in truths])[: table["shown"]], box=_BOX),
        **scored(BLIND, blind),
        **scored(RANDOM, random),
    }
    for name, outcome in side_by_side(place.attacks, run).items():
        if reason := reason_of(outcome):
            figures[f"{name} reason"] = reason
            continue
        found = [one for one in outcome if not isinstance(one, str)]
        figures |= scored(name, found, labels=True)
        figures[f"{name} pictures"] = as_text(torch.cat([one["inputs"] for one in found])[: table["shown"]], box=_BOX)
    return figures


def _told(stage: Stage, attack: str, table: Table, *, seed: int, victim: int) -> dict[str, Any]:
    return {
        "quick": stage.quick or attack in table.form(stage.quick)["hasty"],
        "seed": mixed_seed(seed, victim) % 2**31,
        "device": stage.device,
        "box": list(_BOX),
        **(table["long_search"] if attack == ADAPTIVE and not stage.quick else {}),
        "thorough_prior": not stage.quick,
    }


def _distance(view: ServerView, truth: Truth) -> float:
    """‖ĝ − g‖/‖g‖ of the gradient that the server reads from the upload; −1 where it cannot read one."""
    if view.recovered is None:
        return -1.0
    plain = client_gradient(view.model().double(), view.facts.objective(), truth["x"].double(), truth["y"])
    return float((view.recovered.gradient.double() - plain).norm() / plain.norm())


@dataclass(frozen=True)
class Tried:
    """What attacks got at one place, read back."""

    results: Results
    place: Place
    margin: float = 3.0
    """Decibels above the mean picture below which nothing was reconstructed."""

    def listed(self, scheme: str, what: str) -> list[float]:
        """A figure of every victim."""
        return listed(self.results, self.place.cell(scheme), what)

    def score(self, scheme: str, attack: str, what: str = "psnr") -> Score | None:
        """A figure's mean over victims, with its interval."""
        return interval(self.listed(scheme, f"{attack} {what}"))

    def best(self, scheme: str, attacks: Sequence[str]) -> str | None:
        """The attack with the highest mean PSNR."""
        there = {name: one.value for name in attacks if (one := self.score(scheme, name)) is not None}
        return max(there, key=lambda name: there[name]) if there else None

    def row(self, scheme: str, attack: str) -> VerdictRow:
        """What an attack's figure means beside the mean picture's and the same attack's without protection.

        Φ does not exist without protection: beside it stands the best of the others, or what it gets itself if more.
        """
        ours, blind = self.score(scheme, attack), self.score(scheme, BLIND)
        other = self.best("fedavg", self.place.matching) if attack == ADAPTIVE else attack
        bare = None if other is None else self.score("fedavg", other)
        word = None
        if ours is not None and blind is not None:
            if attack == ADAPTIVE and bare is not None and ours.value > bare.value:
                bare = ours
            chance = Likeness(peak=1.0, chance=blind.value, random=blind.value)
            word = meaning(chance, ours, bare, works=proven(self.results, attack))
        refused = any(f"{attack} reason" in one for one in figures_of(self.results, self.place.cell(scheme)))
        gets = "not applicable" if ours is None and refused else level(ours)
        return VerdictRow(
            attack, attack == ADAPTIVE, gets, level(blind), level(bare), "" if word is None else told(word)
        )

    def effective(self) -> str | None:
        """The best attack without protection, if it gets anywhere there."""
        attack = self.best("fedavg", self.place.matching)
        works = attack is not None and self.row("fedavg", attack).verdict == "as if unprotected"
        return attack if works else None

    def nothing(self, scheme: str, attacks: Sequence[str], claim: str) -> Check:
        """Whether every attack stays within the margin of the mean picture; open where none works unprotected."""
        there = {name: one for name in attacks if (one := self.score(scheme, name)) is not None}
        blind, seen = self.score(scheme, BLIND), ", ".join(f"{name}: {level(one)}" for name, one in there.items())
        if not there or blind is None:
            return Check(claim, None, seen)
        seen = f"{seen}; mean picture {blind.value:.1f} dB"
        beyond = any(one.surely > blind.value + self.margin for one in there.values())
        if not beyond and self.effective() is None:
            return Check(claim, None, f"{seen}; {INEFFECTIVE} even without protection")
        return Check(claim, not beyond, seen)
