"""MP-DP: Figure 3, Tables 2 and 4. Settings and printed numbers are in mpdp.toml."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedveil.audit.attacks.gradients import client_gradient
from fedveil.audit.findings import Found, Score, Truth
from fedveil.audit.measures import Likeness, matched
from fedveil.audit.record import server_view
from fedveil.audit.subject import Effort, Subject, enacted
from fedveil.audit.trials import uploads_of
from fedveil.audit.views import ServerView
from fedveil.engine import ClientPool
from fedveil.ledger.gaussian import paper_sigma
from fedveil.runs.job import Job
from fedveil.uplink.assumed import AssumedNoise
from fedveil.work.batches import mixed_seed
from fedveil.work.messages import ClientData
from papers import membership
from papers.attacks import (
    INEFFECTIVE,
    REFERENCES,
    Scale,
    VerdictRow,
    as_text,
    draw_sheet,
    from_text,
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
from papers.cells import Cell, Figures, Results, difference, figures_of, listed, mean, numbers
from papers.entries import read_paper
from papers.report import EMPTY, Check, Report, paper, shown
from papers.stage import OnRound, Stage, composed

_PAPER = read_paper("mpdp")
_ACCURACY, _T2, _T4 = (_PAPER.table(one) for one in ("accuracy", "table2", "table4"))
Bench = Mapping[str, Any]

# Figure 3: accuracy against ε.

LOCAL = "mp-ldp"
NOISY = tuple(_ACCURACY["schemes"])


def accuracy_cell(bench: Bench, scheme: str, epsilon: float | None = None) -> str:
    """The name of a cell of Figure 3."""
    start = f"{bench['data']}/k{bench['clients']}"
    return f"{start}/{scheme}" if epsilon is None else f"{start}/eps{epsilon:g}/{scheme}"


def _settings(bench: Bench) -> dict[str, Any]:
    return {**_ACCURACY["networks"][bench["data"]], **bench["settings"]}


def _accuracy_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for bench in _ACCURACY.form(quick)["benches"]:
        shared = {**_settings(bench), "dataset": bench["data"], "clients": bench["clients"], "loss": "square"}
        samples, usual = bench.get("samples"), bench.get("usual", True)
        found.append(Cell(accuracy_cell(bench, "fedavg"), {**shared, "scheme": "fedavg"}, samples, usual=usual))
        for epsilon, (label, own) in itertools.product(bench["epsilons"], _ACCURACY["schemes"].items()):
            settings = {**shared, **own, "epsilon": epsilon, "delta": _ACCURACY["delta"]}
            found.append(Cell(accuracy_cell(bench, label, epsilon), settings, samples, usual=usual))
    return tuple(found)


def _accuracy_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    """Training; LDP is not a named scheme, but plain averaging under assumed noise."""
    if cell.settings["scheme"] != LOCAL:
        return stage.train(cell, seed=seed, on_round=on_round)
    noise = AssumedNoise(paper_sigma(cell.settings["epsilon"], cell.settings["delta"]), "gaussian", shared=False)

    def under_noise(job: Job) -> Job:
        return replace(job, scheme=replace(job.scheme, name=LOCAL, uplink=noise))

    ours = {key: value for key, value in cell.settings.items() if key not in ("epsilon", "delta")}
    plain = replace(cell, settings={**ours, "scheme": "fedavg"})
    return stage.train(plain, seed=seed, on_round=on_round, adapt=under_noise)


def _accuracy_report(results: Results, quick: bool) -> Report:
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    delta = _ACCURACY["delta"]
    for bench in _ACCURACY.form(quick)["benches"]:
        plain = numbers(results, accuracy_cell(bench, "fedavg"))
        for epsilon in bench["epsilons"]:
            ours = {one: numbers(results, accuracy_cell(bench, one, epsilon)) for one in NOISY}
            whole = composed(epsilon, delta=delta, rounds=_settings(bench)["rounds"], sigma=paper_sigma)
            rows.append(
                (
                    *(bench["data"], str(bench["clients"]), f"{epsilon:g}", f"{whole:.3g}", shown(plain)),
                    *(shown(ours[one]) for one in NOISY),
                    shown(difference(ours["mpdp"], ours["mp-cdp"]), signed=True),
                )
            )
            checks += _gaps(ours, plain, f"{bench['data']} K = {bench['clients']} ε = {epsilon:g}")
    nothing = "no cell lies in the window in which MP-CDP loses 1 to 10 points"
    unjudged = [
        Check(f"MP-DP within {_ACCURACY['close']} points of MP-CDP", None, nothing),
        Check("MP-DP-Naive collapses", None, nothing),
    ]
    return _ACCURACY.report(rows, checks or unjudged, quick=quick, notes=_ACCURACY.notes())


def _gaps(ours: Mapping[str, Mapping[int, float]], plain: Mapping[int, float], where: str) -> Iterator[Check]:
    """Two claims, where FedAvg − MP-CDP lies in the window."""
    loss, (low, high) = mean(difference(plain, ours["mp-cdp"])), _ACCURACY["window"]
    if loss is None or not low <= loss <= high:
        return
    close, collapse = _ACCURACY["close"], _ACCURACY["collapse"]
    for scheme, claim in (
        ("mpdp", f"MP-DP within {close} points of MP-CDP"),
        ("mpdp-naive", f"MP-DP-Naive {collapse:g} points below or more"),
    ):
        gaps = difference(ours[scheme], ours["mp-cdp"])
        gap = mean(gaps)
        seen = "not run" if gap is None else f"{shown(gaps, signed=True)}, {len(gaps)} seed{'s' * (len(gaps) != 1)}"
        held = None if gap is None else abs(gap) <= close if scheme == "mpdp" else gap <= -collapse
        yield Check(f"{where}: {claim}", held, seen)


# Table 4: members told by a client.


def _table4_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for bench in _T4.form(quick)["benches"]:
        for method in _T4["methods"].values():
            scheme = {name: value for name, value in method.items() if name != "cell"}
            slow = bench["noisy"] if method["cell"] in _T4["slow"] else {}
            found.append(membership.attacked_cell(bench, method["cell"], {**scheme, **slow}))
    return tuple(found)


def _table4_report(results: Results, quick: bool) -> Report:
    benches = _T4.form(quick)["benches"]
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for bench in benches:
        where, plain = membership.shown_as(bench), membership.name_of(bench, "fedavg")
        printed = _T4["printed"].get(bench["data"], {})
        for method, own in _T4["methods"].items():
            cell = membership.name_of(bench, own["cell"])
            rows += _members(results, where, method, cell, plain, printed.get(method))
        for method in (one for one in _PAPER["not_built"] if one in printed):
            accuracy, success = map(paper, printed[method])
            rows.append((where, method, accuracy, "not built", EMPTY, EMPTY, EMPTY, success, *(EMPTY,) * 4))
        checks.append(membership.told_without_protection(results, plain, where))
        noisy, quiet = (membership.name_of(bench, one) for one in ("mpdp", "mpdp-quiet"))
        words = f"{where}, MP-DP at ε = {_T4['epsilon']:g}"
        checks.append(membership.close_accuracy(results, noisy, plain, words, points=_T4["points"]))
        for epsilon, cell in ((_T4["epsilon"], noisy), (_T4["quiet"], quiet)):
            checks += membership.guesses(results, cell, plain, f"{where}, MP-DP, ε = {epsilon:g}")
    notes = [_T4["words"]["first"], *membership.notes(_T4, benches)]
    return _T4.report(rows, checks, quick=quick, notes=notes)


def _members(
    results: Results, where: str, method: str, cell: str, plain: str, printed: Sequence[float] | None
) -> Iterator[tuple[str, ...]]:
    """A method's rows: one for each attack, the accuracies on the first."""
    for place, row in enumerate(membership.NAMES):
        first = place == 0
        theirs = printed if printed is not None and first else (None, None)
        fits = [membership.percent(results, cell, one) if first else EMPTY for one in ("accuracy", "train accuracy")]
        ours = membership.verdict_row(results, cell, plain, row)
        yield (
            *(where, method, paper(theirs[0]), *fits, ours.attack, ours.chance, paper(theirs[1])),
            *(membership.written(results, cell, row, membership.RECEIVED), ours.gets, ours.unprotected, ours.verdict),
        )


# Table 2: reconstruction by the server from one upload.

PHI, ADAPTIVE = "Φ", "phi"
SCHEMES = tuple(_T2["schemes"])
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


def places(quick: bool) -> list[Place]:
    """Where attacks are tried; the first is the table's main row."""
    return [Place(**one) for one in _T2.form(quick)["places"]]


def attacks(quick: bool) -> list[str]:
    """Every attack that is tried anywhere."""
    return list(dict.fromkeys(one for place in places(quick) for one in place.attacks))


def _table2_cells(quick: bool) -> tuple[Cell, ...]:
    clients = _T2.form(quick)["clients"]
    found = [Cell(REFERENCES, {"attacks": ", ".join(attacks(quick))})]
    for place, (label, own) in itertools.product(places(quick), _T2["schemes"].items()):
        where = {"dataset": place.data, "model": place.model, "clients": clients}
        settings = {**where, **_T2["settings"], "record_clients": f"0-{clients - 1}", **own}
        found.append(Cell(place.cell(label), settings, clients * place.batch, usual=place.usual))
    return tuple(found)


def _table2_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    if cell.name == REFERENCES:
        names = cell.settings["attacks"].split(", ")
        # With the small budget, which most attacks get in the full form too: what they show with it, they can.
        return reference_figures(names, Effort(quick=True, seed=seed, device=stage.device))
    place = next(one for one in places(stage.quick) if cell.name.startswith(f"{one.name}/"))
    scale = scale_of(stage, place.data)
    with TemporaryDirectory(prefix="fedveil-mpdp-") as folder:
        subject = enacted(between(stage.job(cell, seed=seed), scale), Path(folder) / "record", rounds=1)
        return _attacked(stage, subject, place, scale, seed=seed)


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


def _attacked(stage: Stage, subject: Subject, place: Place, scale: Scale, *, seed: int) -> Figures:
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
        return tried(name, seen, [_told(stage, name, seed=seed, victim=victim) for victim in range(len(views))])

    figures: Figures = {
        "device": stage.describe(),
        "torch": torch.__version__,
        "parameters": subject.job.architecture.size,
        "victims": len(views),
        "judge": short(judge.accuracy),
        "noise": [short(_distance(*pair)) for pair in zip(views, truths, strict=True)],
        "shape": [float(one) for one in subject.job.facts.input_shape],
        "originals": as_text(torch.cat([one["x"] for one in truths])[: _T2["shown"]], box=_BOX),
        **scored(BLIND, blind),
        **scored(RANDOM, random),
    }
    for name, outcome in side_by_side(place.attacks, run).items():
        if reason := reason_of(outcome):
            figures[f"{name} reason"] = reason
            continue
        found = [one for one in outcome if not isinstance(one, str)]
        figures |= scored(name, found, labels=True)
        figures[f"{name} pictures"] = as_text(torch.cat([one["inputs"] for one in found])[: _T2["shown"]], box=_BOX)
    return figures


def _told(stage: Stage, attack: str, *, seed: int, victim: int) -> dict[str, Any]:
    return {
        "quick": stage.quick or attack in _T2.form(stage.quick)["hasty"],
        "seed": mixed_seed(seed, victim) % 2**31,
        "device": stage.device,
        "box": list(_BOX),
        **(_T2["long_search"] if attack == ADAPTIVE and not stage.quick else {}),
        "thorough_prior": not stage.quick,
    }


def _distance(view: ServerView, truth: Truth) -> float:
    """‖ĝ − g‖/‖g‖ of the gradient that the server reads from the upload; −1 where it cannot read one."""
    if view.recovered is None:
        return -1.0
    plain = client_gradient(view.model().double(), view.facts.objective(), truth["x"].double(), truth["y"])
    return float((view.recovered.gradient.double() - plain).norm() / plain.norm())


@dataclass(frozen=True)
class _Tried:
    """What attacks got at one place, read back."""

    results: Results
    place: Place

    def listed(self, scheme: str, what: str) -> list[float]:
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
        beyond = any(one.surely > blind.value + _T2["margin"] for one in there.values())
        if not beyond and self.effective() is None:
            return Check(claim, None, f"{seen}; {INEFFECTIVE} even without protection")
        return Check(claim, not beyond, seen)


def _table2_report(results: Results, quick: bool) -> Report:
    found = [_Tried(results, place) for place in places(quick)]
    notes = [*([_T2["quick"]["note"]] if quick else []), *_T2.notes(clients=_T2.form(quick)["clients"])]
    rows, checks = list(_table2_rows(found)), list(_table2_checks(found))
    return _T2.report(rows, checks, quick=quick, notes=[*notes, *_table2_notes(results, found, quick)])


def _table2_rows(found: Sequence[_Tried]) -> Iterator[tuple[str, ...]]:
    for number, one in enumerate(found):
        where = (one.place.data, one.place.model, str(one.place.batch))
        for scheme in SCHEMES:
            if number == 0 or figures_of(one.results, one.place.cell(scheme)):
                yield (*where, *_table2_row(one, scheme, main=number == 0))
        for name in _PAPER["not_built"] if number == 0 else ():
            yield (*where, name, _printed(name), *(EMPTY,) * 3, "not built", *(EMPTY,) * 3)


def _table2_row(found: _Tried, scheme: str, *, main: bool) -> tuple[str, ...]:
    place, noise = found.place, found.listed(scheme, "noise")
    top, bare = found.best(scheme, place.attacks), found.best("fedavg", place.matching)
    beside = EMPTY
    if top is not None:
        parts = [found.score(scheme, top, what) for what in ("mse", "features", "labels")]
        forms = ("{:.3g}", "{:.2g}", "{:.0%}")
        shown = [EMPTY if one is None else form.format(one.value) for one, form in zip(parts, forms, strict=True)]
        beside = f"{', '.join(shown)} ({top})"
    return (
        *(_T2["names"][scheme], _printed(scheme) if main else EMPTY),
        EMPTY if not noise else "unreadable" if min(noise) < 0 else f"{sum(noise) / len(noise):.2g}",
        "; ".join(f"{one} {_got(found.row(scheme, one))}" for one in place.matching),
        _got(found.row(scheme, ADAPTIVE)),
        *(beside, level(found.score(scheme, BLIND)), level(found.score(scheme, RANDOM))),
        EMPTY if bare is None else f"{level(found.score('fedavg', bare))} ({bare})",
    )


def _got(row: VerdictRow) -> str:
    return " ".join(filter(None, (row.gets, row.verdict)))


def _printed(scheme: str) -> str:
    return ", ".join(f"{one:.2f}" for one in _T2["printed"][scheme]) if scheme in _T2["printed"] else EMPTY


def _table2_checks(found: Sequence[_Tried]) -> Iterator[Check]:
    main = found[0]
    name, phi = main.place.name, main.score("mpdp", ADAPTIVE)
    claim = f"{name}: MP-DP's noise keeps attacks on the gradient from reconstructing (the paper's claim)"
    yield main.nothing("mpdp", main.place.matching, claim)
    yield _cdp_hides(main)
    for one in found:
        if one.place.batch == 1 and (one is main or figures_of(one.results, one.place.cell("mpdp"))):
            yield _gives_away(one)
    claim, blind = f"{name}: MP-DP keeps the server from reconstructing, {PHI} included", main.score("mpdp", BLIND)
    if phi is None or blind is None or not proven(main.results, ADAPTIVE):
        yield Check(claim, None)
    else:
        seen = f"{level(phi)} dB; the mean picture has {blind.value:.1f}"
        yield Check(claim, phi.surely <= blind.value + _T2["margin"], seen)
    claim, noise = (
        f"{name}: lossless hides nothing from the server (ours: it protects the model, not uploads)",
        main.listed("lossless", "noise"),
    )
    seen = f"its gradient is FedAvg's up to {max(noise):.1g} of its length" if noise else ""
    yield Check(claim, max(noise) < 1e-2 if noise else None, seen)
    claim = "veil-secagg leaves every attack at what one gets who saw nothing (mean picture + 3 dB)"
    there = [one for one in found if figures_of(one.results, one.place.cell("veil-secagg"))]
    parts = {one.place.name: one.nothing("veil-secagg", one.place.attacks, claim) for one in there}
    failed = any(part.held is False for part in parts.values())
    held = False if failed else parts[name].held if name in parts else None
    yield Check(claim, held, "; ".join(f"{place}: {part.seen}" for place, part in parts.items()))


def _cdp_hides(found: _Tried) -> Check:
    claim = (
        f"{found.place.name}: MP-CDP hides uploads from the server better than FedAvg (12.15 against 13.56 dB printed)"
    )
    attack, noise = found.effective(), found.listed("mp-cdp", "noise")
    if not noise or attack is None:
        return Check(claim, None)
    ours, bare = (found.score(one, attack) for one in ("mp-cdp", "fedavg"))
    if ours is None or bare is None or bare.low is None:
        return Check(claim, None)
    seen = f"{attack}: {level(ours)} against {level(bare)}; the gradients differ by {max(noise):.1g} of their length"
    return Check(claim, ours.value < bare.low, seen)


def _gives_away(found: _Tried) -> Check:
    claim = (
        f"{found.place.name}: {PHI}, which travels bare, gives a batch of one away whatever noise covers the gradient"
    )
    ours, blind = found.score("mpdp", ADAPTIVE), found.score("mpdp", BLIND)
    if ours is None or blind is None or not proven(found.results, ADAPTIVE):
        return Check(claim, None)
    labels, worst = interval(found.listed("mpdp", f"{ADAPTIVE} labels")), min(found.listed("mpdp", f"{ADAPTIVE} psnr"))
    seen = f"PSNR {level(ours)} dB, worst {worst:.1f}" + ("" if labels is None else f", labels told {labels.value:.0%}")
    exact = " (indistinguishable)" if worst > _T2["exact"] else ""
    return Check(claim, ours.surely > max(20.0, blind.value + _T2["margin"]), seen + exact)


def _table2_notes(results: Results, found: Sequence[_Tried], quick: bool) -> Iterator[str]:
    reached: Figures = next(iter(figures_of(results, REFERENCES)), {})
    said = [
        f"{one} {float(value):.0f} dB of {reached[f'{one} asked']:g} asked"
        for one in attacks(quick)
        if isinstance(value := reached.get(f"{one} reference"), int | float)
    ]
    if said:
        yield f"References (unprotected digits): {', '.join(said)}."
    for one, scheme in itertools.product(found, SCHEMES[1:]):
        for figures in figures_of(results, one.place.cell(scheme)):
            for attack in one.place.attacks:
                if f"{attack} reason" in figures:
                    yield f"{one.place.cell(scheme)}, {attack}: {figures[f'{attack} reason']}"


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Originals, then for every scheme what the best attack on the gradient made of them, and what Φ gave away."""
    rows = []
    for place, scheme in itertools.product(places(quick)[:2], SCHEMES):
        for figures in figures_of(results, place.cell(scheme))[:1]:
            if scheme == SCHEMES[0] and (originals := from_text(figures, "originals")) is not None:
                rows.append((f"{place.name} originals", originals))
            rows += [
                (f"{place.cell(scheme)} {attack}", made)
                for attack in (_Tried(results, place).best(scheme, place.matching), ADAPTIVE)
                if (made := from_text(figures, f"{attack} pictures")) is not None
            ]
    return rows


ENTRIES = (
    _ACCURACY.entry(_accuracy_cells, _accuracy_report, work=_accuracy_work),
    _T4.entry(_table4_cells, _table4_report, work=membership.work),
    _T2.entry(_table2_cells, _table2_report, work=_table2_work, draw=draw_sheet(sheet_rows)),
)
