"""NADP-FL's Table 4: how large ours is, what the paper prints, and how figures are found again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedveil.audit.attacks.averaging import averaged
from fedveil.audit.attacks.gradients import client_gradient
from fedveil.audit.judge import Judge, train_judge
from fedveil.audit.metrics import feature_mse, mse, ssim
from fedveil.audit.record import server_history, server_view
from fedveil.audit.sandbox import AttackProcess
from fedveil.audit.subject import Subject, enacted, model_of
from fedveil.audit.views import Opened, ServerHistory, ServerView, View, to_bytes
from fedveil.errors import ConfigError
from fedveil.ledger.correlated import Covering, charges
from fedveil.ledger.gaussian import epsilon_of
from fedveil.protocol.parts import bounded
from fedveil.runs.job import Job
from fedveil.work.batches import mixed_seed
from fedveil.work.clipping import ClippedSamples
from papers.attacking import as_text, from_text, short
from papers.cells import EMPTY, Cell, Check, Figures, Report, Results
from papers.collusion import remaining_variance, sharpest_estimate, sharpest_variance
from papers.stage import Entry, OnRound, Stage

FEDAVG, LDP, BOTH, ROUNDS = "fedavg", "ldp", "nadp", "nadp-rounds"
ALL, SHARPEST = "nadp-all", "nadp-sharpest"
CHANCE = "chance"
TAUS = (0.9, 0.7, 0.5, 0.3, 0.1)
ATTACKS = ("dlg", "idlg")
STRONGER = "inverting"

Pair = tuple[float, float]
Printed = dict[str, Pair]


def nadp_row(tau: float) -> str:
    """A row's name."""
    return f"nadp-{tau:g}"


@dataclass(frozen=True)
class Form:
    """The size of a run of the table. `sizes` are the |D_i| put into the formula of the noise; at `fitted`, LDP's
    figure here is the one that the paper prints. `stronger` rows are attacked by Inverting Gradients too, for `few`
    victims."""

    data: tuple[str, ...]
    clients: int
    cohort: int
    clip: float
    sizes: tuple[int, ...]
    fitted: int
    taus: tuple[float, ...]
    victims: int
    rounds: int
    averaged: int
    stronger: tuple[str, ...]
    few: int

    @property
    def honest(self) -> int:
        """How many clients of a round the largest coalition of the table leaves."""
        return self.cohort - round(TAUS[0] * self.cohort)


FULL = Form(
    data=("mnist", "fashion-mnist"),
    clients=100,
    cohort=80,
    clip=30.0,
    sizes=(1, 5000),
    fitted=5000,
    taus=TAUS,
    victims=5,
    rounds=12,
    averaged=2,
    stronger=(LDP, nadp_row(0.9)),
    few=2,
)
QUICK = Form(
    data=("digits",),
    clients=40,
    cohort=32,
    clip=6.0,
    sizes=(1, 8000),
    fitted=8000,
    taus=(0.9, 0.5, 0.1),
    victims=2,
    rounds=4,
    averaged=1,
    stronger=(),
    few=0,
)


def form_of(quick: bool) -> Form:
    """The size of a run."""
    return QUICK if quick else FULL


def cell_of(data: str, size: int | None, kind: str) -> str:
    """A cell's name."""
    return f"{data}/{kind}" if size is None else f"{data}/d{size}/{kind}"


def _printed(mse: Sequence[Pair], lpips: Sequence[Pair], ssim: Sequence[Pair]) -> dict[str, Printed]:
    rows = (FEDAVG, LDP, *(nadp_row(tau) for tau in TAUS))
    return {row: {"mse": mse[place], "features": lpips[place], "ssim": ssim[place]} for place, row in enumerate(rows)}


TABLE4: dict[str, dict[str, Printed]] = {
    "mnist": _printed(
        (
            *((3.48e-4, 1.89e-4), (3.33e-3, 2.78e-3), (0.0291, 0.0251), (0.0331, 0.0265), (0.0768, 0.0536)),
            *((0.141, 0.149), (0.224, 0.212)),
        ),
        (
            *((4.81e-5, 4.63e-5), (1.55e-2, 1.23e-2), (0.0663, 0.0737), (0.0821, 0.0847), (0.105, 0.115)),
            *((0.188, 0.194), (0.355, 0.353)),
        ),
        (
            *((0.9390, 0.9439), (0.8228, 0.8186), (0.6527, 0.6840), (0.6665, 0.6841), (0.6165, 0.6488)),
            *((0.5287, 0.5201), (0.2900, 0.2922)),
        ),
    ),
    "fashion-mnist": _printed(
        (
            *((3.54e-4, 2.67e-4), (3.84e-3, 5.94e-3), (0.0171, 0.0163), (0.0756, 0.0577), (0.0468, 0.0821)),
            *((0.0718, 0.0871), (0.117, 0.105)),
        ),
        (
            *((2.41e-5, 3.24e-5), (7.56e-3, 4.05e-3), (0.0886, 0.0774), (0.0811, 0.0939), (0.0985, 0.1092)),
            *((0.179, 0.213), (0.257, 0.318)),
        ),
        (
            *((0.9875, 0.9647), (0.8817, 0.9105), (0.8444, 0.8135), (0.8220, 0.7669), (0.8164, 0.7250)),
            *((0.6842, 0.6703), (0.5994, 0.5060)),
        ),
    ),
}
"""(DLG, iDLG) by data, row and figure; "features" is the paper's LPIPS."""


def cell_of_row(data: str, size: int | None, row: str) -> str:
    """The name of the cell that fills a row."""
    if row in (FEDAVG, CHANCE):
        return cell_of(data, None, FEDAVG)
    return cell_of(data, size, row if row in (LDP, ROUNDS) else BOTH)


def figures_of(results: Results, data: str, size: int | None, row: str) -> list[Figures]:
    """The figures of the cell that fills a row, one for each seed."""
    return list(results.get(cell_of_row(data, size, row), {}).values())


def listed(results: Results, data: str, size: int | None, row: str, what: str) -> list[float]:
    """One figure for every victim of every seed."""
    found: list[float] = []
    for figures in figures_of(results, data, size, row):
        value = figures.get(f"{row} {what}", [])
        found += [float(one) for one in value] if isinstance(value, list) else []
    return found


def average(results: Results, data: str, size: int | None, row: str, what: str) -> float | None:
    """Its mean over victims."""
    values = listed(results, data, size, row, what)
    return sum(values) / len(values) if values else None


def ledger(results: Results, data: str, size: int | None, row: str, what: str = "ledger") -> float | None:
    """What the ledger says of a row."""
    for figures in figures_of(results, data, size, row):
        value = figures.get(f"{row} {what}")
        if isinstance(value, int | float):
            return float(value)
    return None


NAMES = {
    "originals": "originals",
    FEDAVG: "no DP",
    LDP: "LDP",
    ALL: "NADP, all others collude",
    SHARPEST: "NADP τ = 0.9, others' parts known",
}


def name_of(row: str) -> str:
    """A row as it is shown."""
    return NAMES.get(row, f"NADP τ = {row.removeprefix('nadp-')}")


_ORDER = 0x7AB1E4


@dataclass(frozen=True)
class Left:
    """By the ledger: the standard deviation left on each number of an upload, seen alone and by one who knows what the
    honest others computed, and ε of the whole run against that coalition."""

    alone: float
    sharpest: float
    epsilon: float


@dataclass(frozen=True, eq=False)
class Seen:
    """A recorded run; `order` are the clients of its first round, victims first."""

    subject: Subject
    order: tuple[int, ...]
    victims: tuple[int, ...]

    def coalition(self, victim: int, colluders: int) -> tuple[int, ...]:
        """That many clients on the server's side, against one."""
        others = tuple(one for one in self.order if one != victim)
        if not 0 <= colluders <= len(others):
            raise ConfigError(f"{colluders} of {len(self.order)} clients cannot collude: the victim does not.")
        return others[len(others) - colluders :]

    def pictures(self) -> tuple[Tensor, Tensor]:
        """The victims' samples and labels."""
        parts = [self.subject.batch(one, round=1) for one in self.victims]
        return torch.cat([x for x, _ in parts]).cpu(), torch.cat([y for _, y in parts]).cpu()

    def view(self, victim: int, *, colluders: int) -> ServerView:
        """What the server and its clients have of a victim in the first round."""
        return server_view(self.subject.record, victim, round=1, colluders=self.coalition(victim, colluders))

    def sharpest_view(self, victim: int, *, colluders: int) -> ServerView:
        """The same for one who also knows what every honest other computed: the most the noise can be narrowed down."""
        covering = covering_of(self.subject.job)
        assert covering is not None
        members = self.coalition(victim, colluders)
        honest = [one for one in self.order if one not in members]
        uploads = {one: self._uncovered(one, members) for one in honest}
        known = {one: self.contribution(one) for one in honest if one != victim}
        estimate = sharpest_estimate(uploads, known, covering, victim, colluders=members)
        view = self.view(victim, colluders=colluders)
        opened = Opened(estimate / (view.samples or 1), None, torch.empty(0, dtype=estimate.dtype))
        return replace(view, recovered=opened)

    def contribution(self, client: int) -> Tensor:
        """What a client's upload would be without noise: n_k × its (clipped) gradient."""
        job = self.subject.job
        x, y = self.subject.batch(client, round=1)
        gradient = client_gradient(model_of(job, job.weights).train(), job.loss, x, y).double().cpu()
        if isinstance(job.scheme.work, ClippedSamples):
            gradient = gradient * min(1.0, job.scheme.work.clip / float(gradient.norm()))
        return gradient * len(job.pool.clients[client])

    def noise(self, view: ServerView) -> float:
        """√(mean of (what is seen − what is true)²): the noise that is on the upload, measured."""
        return float((_upload(view) - self.contribution(view.victim)).square().mean().sqrt())

    def left(self, victim: int, *, colluders: int) -> Left | None:
        """What the ledger says of it; None where there is no noise."""
        job = self.subject.job
        covering, plan = covering_of(job), job.scheme.plan
        if covering is None or plan is None:
            return None
        known = self.coalition(victim, colluders)
        spent = float(charges(covering, colluding=known)[covering.members.index(victim)])
        return Left(
            math.sqrt(remaining_variance(covering, victim, colluders=known)),
            math.sqrt(sharpest_variance(covering, victim, colluders=known)),
            epsilon_of(math.sqrt(spent * plan.target.participations), plan.target.delta),
        )

    def history(self, victim: int, *, honest: Collection[int]) -> tuple[ServerHistory, list[float]]:
        """A victim's recorded rounds, all but `honest` colluding, and the variance left in each by the ledger."""
        colluders = tuple(one for one in self.subject.record.clients if one not in honest)
        found = server_history(self.subject.record, victim, colluders=colluders)
        left = []
        for one in found.rounds:
            covering = covering_of(self.subject.job, round=one.round)
            assert covering is not None
            left.append(remaining_variance(covering, victim, colluders=colluders))
        return found, left

    def averaged_noise(self, history: ServerHistory, variances: Sequence[float]) -> float:
        """The noise on the best mean of a victim's uploads, measured."""
        uploads = [_upload(one) for one in history.rounds]
        estimate = averaged(uploads, variances=variances).estimate
        return float((estimate - self.contribution(history.rounds[0].victim)).square().mean().sqrt())

    def _uncovered(self, client: int, colluders: tuple[int, ...]) -> Tensor:
        return _upload(server_view(self.subject.record, client, round=1, colluders=colluders))


def _upload(view: ServerView) -> Tensor:
    """What is seen of a contribution: n_k × the gradient that the server recovers."""
    assert view.recovered is not None
    return view.recovered.gradient.double().cpu() * (view.samples or 1)


def covering_of(job: Job, *, round: int = 1) -> Covering | None:
    """A round's noise, as every client plans it."""
    plan = job.scheme.plan
    if plan is None:
        return None
    cohort = job.cohort.draw(round - 1)
    samples = [len(job.pool.clients[one]) for one in cohort]
    reach = [bounded(job.scheme.work).sensitivity(count) for count in samples]
    return plan.covering(cohort, samples, reach, seed=b"")


def seen_round(job: Job, folder: Path, *, victims: int, honest: int, least: float, rounds: int = 1) -> Seen:
    """Train and record the first `rounds` rounds.

    Victims are the first clients, in an order drawn by the seed, whose first gradient is at least `least` long: one
    that the model already classifies has next to no gradient, and drowns in any noise. `honest` is how many clients
    the largest coalition that is attacked leaves: what colluders know is kept for those.
    """
    order = list(job.cohort.draw(0))
    seed = job.config.seed
    assert seed is not None
    mixed = torch.randperm(len(order), generator=torch.Generator().manual_seed(_ORDER + seed)).tolist()
    order = [order[place] for place in mixed]
    model = model_of(job, job.weights).train()

    def length(client: int) -> float:
        data = job.pool.clients[client]
        x, y = data.take(torch.arange(len(data)))
        return float(client_gradient(model, job.loss, x, y).norm())

    loud = [one for one in order if length(one) >= least][:victims]
    if not loud:
        raise ConfigError(f"No client of the first round has a gradient of length {least:g}: nobody can be a victim.")
    order = [*loud, *(one for one in order if one not in loud)]
    kept: Sequence[int] = order[: max(honest, len(loud))]
    subject = enacted(job, folder, rounds=rounds, victims=kept)
    return Seen(subject, tuple(order), tuple(loud))


def sheet_rows(results: Results, quick: bool) -> list[tuple[str, Tensor]]:
    """Pictures for a contact sheet: the originals, then what iDLG made of them, a row for each scheme."""
    form = form_of(quick)
    found = []
    for row in ("originals", FEDAVG, LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
        parts = [_pictures(results, data, form.fitted, row) for data in form.data]
        there = [one for one in parts if one is not None]
        if len(there) == len(parts):
            found.append((name_of(row), torch.cat(there)))
    return found


def _pictures(results: Results, data: str, size: int, row: str) -> Tensor | None:
    cell = cell_of_row(data, size, FEDAVG if row == "originals" else row)
    name = row if row == "originals" else f"{row} idlg pictures"
    found = (from_text(figures, name) for figures in results.get(cell, {}).values())
    return next((one for one in found if one is not None), None)


def notes(results: Results, form: Form, quick: bool) -> Iterator[str]:
    """What the paper claims, how it was run here, and what adaptive attacks get."""
    if quick:
        yield (
            f"Quick form: handwritten digits of 8 × 8, N = {form.clients}, τ = "
            f"{', '.join(f'{tau:g}' for tau in form.taus)}. It shows directions; its figures are not the paper's cells."
        )
    yield (
        f"The paper: N = 100, q = 0.8, T = 200, one sample a client, the first round, L-BFGS, 300 iterations, best of "
        f"10. Here: N = {form.clients}, {form.cohort} clients in the round, lenet-sigmoid, {form.victims} victims with "
        "two starts of up to 500 iterations each; figures are the best of them, means over victims in brackets, and "
        "claims are judged by the means. Views come from a recorded run, and attacks run in processes that get nothing "
        "else. The paper's LPIPS network is not to be had: beside it stands "
        "the squared distance in the features of a classifier trained on the held-out part, over that of two different "
        "pictures. The paper's table has a third data set without a name, which is left out."
    )
    yield (
        f"Clipping: C = {form.clip:g} instead of the paper's 10, above every gradient here, so that none is shortened "
        "and iDLG's hard labels can match; noise grows with C, and is beside these gradients about 1.3 times what it "
        "would be beside shortened ones. "
        "Victims are clients whose gradient is at least C/3 long: shorter ones drown sooner."
    )
    yield _on_noise(results, form)
    yield (
        "Is NADP's advantage real? At equal utility both leave the same noise in the sum, and NADP's pair noise comes "
        "on top for whoever cannot take it off: against few colluders the advantage is real, and it is what the ledger "
        "says. That it reads ε = 5 against 20√2 is bookkeeping: NADP's residual noise is LDP's (with one seed even "
        "the same draw), so that once all others collude it proves what LDP proves. "
        f"{_on_epsilon(results, form)}"
    )
    yield from _adaptive(results, form)


def _on_noise(results: Results, form: Form) -> str:
    spent = ledger(results, form.data[0], form.fitted, LDP, "epsilon")
    worth = "" if spent is None else f"; by the ledger, LDP's ε is then {spent:.2g}, which is no privacy"
    fitted = (
        f"LDP's printed figures need noise as if |D_i| were about {form.fitted}, though one sample is used{worth}. "
        "That size is our fit to LDP's printed MSE"
        if form is FULL
        else f"|D_i| = {form.fitted} is noise through which attacks see something{worth}"
    )
    return (
        "How much noise: LDP's σ is 2C·√(2qT·ln(1/δ))/(ε·|D_i|). With one sample a client, as the paper has it, |D_i| "
        "= 1, and the noise is hundreds of times as long as the gradient: nothing is reconstructed under LDP or NADP. "
        f"{fitted}: claims about attacks are judged there. {_not_met(results, form)}{_elsewhere(results, form)}"
    )


def _not_met(results: Results, form: Form) -> str:
    """How far NADP's figures are from the printed ones at the size that was fitted to LDP's."""
    told = []
    for data in form.data:
        ratios = []
        for row in map(nadp_row, form.taus):
            ours = listed(results, data, form.fitted, row, "idlg mse")
            if ours and data in TABLE4:
                ratios.append(f"{min(ours) / TABLE4[data][row]['mse'][1]:.2g}")
        if ratios:
            told.append(f"{data} {', '.join(ratios)}")
    if not told:
        return ""
    names = ", ".join(f"{tau:g}" for tau in form.taus)
    return (
        "That one fit does not bring NADP's printed figures about: iDLG's best MSE here over the printed one, at τ = "
        f"{names}: {'; '.join(told)}. "
    )


def _elsewhere(results: Results, form: Form) -> str:
    """How LDP and NADP compare under the other sizes."""
    told = []
    for size in (one for one in form.sizes if one != form.fitted):
        for data in form.data:
            found = [average(results, data, size, row, "idlg mse") for row in (LDP, *map(nadp_row, form.taus))]
            if None not in found:
                told.append(f"{data}, |D_i| = {size}: {', '.join(f'{one:.2g}' for one in found)}")
    names = ", ".join(f"τ = {tau:g}" for tau in form.taus)
    return f"iDLG's MSE under the other sizes (LDP, then NADP at {names}): {'; '.join(told)}." if told else ""


def _on_epsilon(results: Results, form: Form) -> str:
    rows = (LDP, ALL, *(nadp_row(tau) for tau in form.taus))
    spent = {name_of(row): ledger(results, form.data[0], 1, row, "epsilon") for row in rows}
    there = [f"{name}: {value:.3g}" for name, value in spent.items() if value is not None]
    if not there:
        return ""
    return (
        f"ε of the whole run by the ledger, |D_i| = 1: {', '.join(there)}. LDP's formula is one for small ε and for "
        "the expected number of rounds, so that it proves less than it states; NADP's has room, since it counts two "
        "queries a round and all rounds."
    )


def _adaptive(results: Results, form: Form) -> Iterator[str]:
    """What those get who adapt: to several rounds, to what others computed, to noise in the gradient."""
    size, most = form.fitted, nadp_row(TAUS[0])
    for data in form.data:
        told = []
        rounds = average(results, data, size, ROUNDS, "rounds")
        if rounds is not None and (both := _compared(results, data, size, (ROUNDS, "averaging"), (most, "idlg"))):
            told.append(
                f"the mean of {rounds:.3g} rounds' uploads, τ = 0.9: MSE {both[0]:.3g} instead of {both[1]:.3g}"
            )
        if both := _compared(results, data, size, (SHARPEST, "idlg"), (most, "idlg")):
            told.append(f"what honest others computed being known, τ = 0.9: {both[0]:.3g} instead of {both[1]:.3g}")
        told += [
            f"Inverting Gradients on {name_of(row)}: {both[0]:.3g} instead of iDLG's {both[1]:.3g}"
            for row in form.stronger
            if (both := _compared(results, data, size, (row, STRONGER), (row, "idlg")))
        ]
        if told:
            yield f"Who adapts, {data}, |D_i| = {size}: {'; '.join(told)} (the same victims in both)."
    yield (
        "Averaging leaves 1/√n of the noise after n rounds with the same samples; after the run's 160 it would be a "
        "thirteenth, which is what the ledger charges for. Labels are told by the sign of the last layer's bias "
        "gradient long after pictures are gone. Under much noise DLG fits the noise, and ends farther from the truth "
        "than the mean picture is: a large MSE is then a poor attack as much as a good defence. The closed form does "
        "not apply: the first layer is a convolution."
    )


def _compared(
    results: Results, data: str, size: int, one: tuple[str, str], other: tuple[str, str]
) -> tuple[float, float] | None:
    """The mean MSE of two (row, attack) over the victims that both have."""
    found = [listed(results, data, size, row, f"{attack} mse") for row, attack in (one, other)]
    common = list(zip(*found, strict=False))
    if not common:
        return None
    return sum(first for first, _ in common) / len(common), sum(second for _, second in common) / len(common)


FALSE_ALARMS = 1e-3
_RECOGNISED = 0.01
_ALIKE = 3.0
_MEASURES = ("mse", "ssim", "features")


def report(results: Results, quick: bool) -> Report:
    """The table and its verdict."""
    form = form_of(quick)
    return Report(
        title=f"NADP-FL, Table 4 ({'quick form, ' if quick else ''}paper / ours; each DLG, iDLG)",
        columns=(
            *("data", "|D_i| in σ", "row", "ε by the ledger", "noise / gradient", "measured / ledger"),
            *("MSE", "SSIM", "LPIPS / features", "labels told"),
        ),
        rows=tuple(_rows(results, form)),
        checks=tuple(checks(results, form)),
        notes=tuple(notes(results, form, quick)),
        quick=quick,
    )


def _rows(results: Results, form: Form) -> Iterator[tuple[str, ...]]:
    for data in form.data:
        blank = [_shortly(average(results, data, None, CHANCE, what)) for what in ("mse", "ssim", "features")]
        yield (
            data,
            EMPTY,
            "nothing seen: the mean picture",
            *([EMPTY] * 3),
            *(f"{EMPTY} / {one}" for one in blank),
            EMPTY,
        )
        yield _row(results, data, None, FEDAVG)
        for size in sorted(form.sizes, key=lambda one: one != form.fitted):
            for row in (LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
                yield _row(results, data, size, row)


def _row(results: Results, data: str, size: int | None, row: str) -> tuple[str, ...]:
    printed = TABLE4.get(data, {}).get(row)
    told, noise = ledger(results, data, size, row), listed(results, data, size, row, "noise")
    lengths = [
        float(one) for figures in figures_of(results, data, size, row) for one in _numbers(figures.get("lengths"))
    ]
    parameters = [figures.get("parameters") for figures in figures_of(results, data, size, row)]
    beside = EMPTY
    if told and lengths and isinstance(parameters[0], int):
        beside = f"{told * math.sqrt(parameters[0]) / (sum(lengths) / len(lengths)):.2g}"
    epsilon = ledger(results, data, size, row, "epsilon")
    same = f"{math.sqrt(sum(one**2 for one in noise) / len(noise)) / told:.4f}" if told and noise else EMPTY
    return (
        data,
        EMPTY if size is None else str(size),
        name_of(row),
        EMPTY if epsilon is None else f"{epsilon:.3g}",
        beside,
        same,
        *(_both(results, data, size, row, what, printed) for what in _MEASURES),
        _pair([average(results, data, size, row, f"{one} labels") for one in ATTACKS], "{:.0%}"),
    )


def _shortly(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.3g}"


def _numbers(value: object) -> list[float]:
    return [float(one) for one in value] if isinstance(value, list) else []


def _both(results: Results, data: str, size: int | None, row: str, what: str, printed: Printed | None) -> str:
    """The paper's (best of ten), ours (best of the victims), and our mean over victims."""
    best = max if what == "ssim" else min
    found = [listed(results, data, size, row, f"{one} {what}") for one in ATTACKS]
    theirs = EMPTY if printed is None else _pair(printed[what], "{:.3g}")
    ours = _pair([best(one, default=None) for one in found], "{:.3g}")
    mean = _pair([sum(one) / len(one) if one else None for one in found], "{:.3g}")
    return f"{theirs} / {ours} (mean {mean})"


def _pair(values: Sequence[float | None], form: str) -> str:
    return ", ".join(EMPTY if one is None else form.format(one) for one in values)


def checks(results: Results, form: Form) -> Iterator[Check]:
    """The paper's claims, and ours about the ledger."""
    yield _reconstructs(results, form)
    yield from (_same_sum(results, form), _disturbs_more(results, form), _falls(results, form))
    yield _as_ldp(results, form)
    yield _matches_ledger(results, form)
    if form is FULL:
        yield _figures_as_printed(results, form)


def _reconstructs(results: Results, form: Form) -> Check:
    worst = {
        f"{data} {attack}": average(results, data, None, FEDAVG, f"{attack} mse")
        for data in form.data
        for attack in ATTACKS
    }
    check = _all("without DP, DLG and iDLG reconstruct (MSE below 0.01)", worst, lambda one: one < _RECOGNISED)
    return replace(check, premise=True)


def _same_sum(results: Results, form: Form) -> Check:
    """LDP's noise on one upload is NADP's with nobody's pair noise left, so that their sums have the same noise too."""
    ratios = {
        data: _ratio(ledger(results, data, form.fitted, ALL), ledger(results, data, form.fitted, LDP))
        for data in form.data
    }
    claim = "NADP at ε = 5 and LDP at ε·√(qk/2) leave the same noise in the sum (residual noise, NADP over LDP)"
    return _all(claim, ratios, lambda one: abs(one - 1) < 1e-3, form_of_number="{:.5f}")


def _disturbs_more(results: Results, form: Form) -> Check:
    ratios = {}
    for data in form.data:
        for attack in ATTACKS:
            local = average(results, data, form.fitted, LDP, f"{attack} mse")
            for tau in form.taus:
                ours = average(results, data, form.fitted, nadp_row(tau), f"{attack} mse")
                ratios[f"{data} {attack} τ = {tau:g}"] = _ratio(ours, local)
    return _all("NADP disturbs more than LDP at equal utility (MSE, NADP over LDP)", ratios, lambda one: one > 1)


def _falls(results: Results, form: Form) -> Check:
    """The two ends decide; neighbouring τ are counted beside, since even the paper's own column is not in order."""
    apart: dict[str, float | None] = {}
    steps = []
    for data in form.data:
        for attack in ATTACKS:
            found = [average(results, data, form.fitted, nadp_row(tau), f"{attack} ssim") for tau in form.taus]
            there = [one for one in found if one is not None]
            apart[f"{data} {attack}"] = there[-1] - there[0] if len(there) == len(found) else None
            steps += [later < earlier for earlier, later in itertools.pairwise(there)]
    claim = f"protection falls as τ grows (SSIM at τ = {form.taus[-1]:g} less that at τ = {form.taus[0]:g})"
    check = _all(claim, apart, lambda one: one < 0, form_of_number="{:+.3f}")
    counted = f"; {sum(steps)} of {len(steps)} steps in between go this way" if steps else ""
    return replace(check, seen=check.seen + counted)


def _as_ldp(results: Results, form: Form) -> Check:
    ratios = {}
    for data in form.data:
        for attack in ATTACKS:
            pair = [average(results, data, form.fitted, row, f"{attack} mse") for row in (ALL, LDP)]
            ratios[f"{data} {attack}"] = _ratio(*pair)
    claim = f"once all others collude NADP is as LDP (MSE, NADP over LDP, within a factor of {_ALIKE:g})"
    return _all(claim, ratios, lambda one: 1 / _ALIKE < one < _ALIKE)


def _matches_ledger(results: Results, form: Form) -> Check:
    """Every victim's measured variance against the χ² interval of the ledger's, all together wrong once in 1000."""
    from scipy.stats import chi2

    trials = []
    for data in form.data:
        for size in form.sizes:
            for row in (LDP, ALL, SHARPEST, *(nadp_row(tau) for tau in form.taus)):
                told = ledger(results, data, size, row)
                cells = figures_of(results, data, size, row)
                if told is None or not isinstance(count := cells[0].get("parameters"), int):
                    continue
                trials += [(one / told, count) for one in listed(results, data, size, row, "noise")]
    claim = "the noise left on every upload is what the ledger says (standard deviation, measured over stated)"
    if not trials:
        return Check(claim, None)
    tail = FALSE_ALARMS / len(trials) / 2
    bounds = [(chi2.ppf(tail, count) / count, chi2.ppf(1 - tail, count) / count) for _, count in trials]
    held = all(low <= ratio**2 <= high for (ratio, _), (low, high) in zip(trials, bounds, strict=True))
    ratios = [ratio for ratio, _ in trials]
    low, high = (math.sqrt(bounds[0][place]) for place in (0, 1))
    seen = (
        f"{min(ratios):.4f} to {max(ratios):.4f} over {len(trials)} uploads; {low:.4f} to {high:.4f} is chance, with "
        f"one false alarm in {1 / FALSE_ALARMS:.0f}; runs of one seed share their draws, so that other sizes and data "
        "repeat the same test"
    )
    return Check(claim, held, seen)


def _figures_as_printed(results: Results, form: Form) -> Check:
    """Whether LDP's printed MSE comes about with σ by the formula for one sample a client, as the paper describes."""
    ratios = {}
    for data in form.data:
        for place, attack in enumerate(ATTACKS):
            ours = listed(results, data, 1, LDP, f"{attack} mse")
            ratios[f"{data} {attack}"] = _ratio(min(ours, default=None), TABLE4[data][LDP]["mse"][place])
    claim = f"LDP's printed MSE follows from its formula with one sample a client (best of ours over it, ≤ {_ALIKE:g})"
    return _all(claim, ratios, lambda one: one <= _ALIKE)


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None or other <= 0 else one / other


def _all(
    claim: str, values: dict[str, float | None], holds: Callable[[float], bool], *, form_of_number: str = "{:.3g}"
) -> Check:
    there = {name: value for name, value in values.items() if value is not None}
    seen = ", ".join(f"{name}: {form_of_number.format(value)}" for name, value in there.items())
    if not there or len(there) < len(values):
        failed = any(not holds(value) for value in there.values())
        return Check(claim, False if failed else None, seen)
    return Check(claim, all(holds(value) for value in there.values()), seen)


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
