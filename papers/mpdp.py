"""MP-DP: Figure 3, Tables 1 to 6. Settings and printed numbers are in mpdp.toml."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedveil.audit.findings import Score
from fedveil.ledger.gaussian import paper_sigma
from fedveil.runs.job import Job
from fedveil.uplink.assumed import AssumedNoise
from papers import costs, membership
from papers.attacks import REFERENCES, VerdictRow, draw_sheet, from_text, interval, level, proven, sheet_note
from papers.cells import Cell, Figures, Results, difference, figures_of, mean, mean_of, number, numbers
from papers.entries import Table, built, read_paper
from papers.lossless import curve_work
from papers.reconstruction import ADAPTIVE, BLIND, PHI, RANDOM, Pictures, Place, Tried, attacked
from papers.report import EMPTY, POINTS, Check, Report, above, decided, paper, ratio, rising, short, shown, trained
from papers.stage import OnRound, Stage, composed

_PAPER = read_paper("mpdp")
_ACCURACY, _T1, _T2, _T3, _T4, _T5 = (
    _PAPER.table(one) for one in ("accuracy", "table1", "table2", "table3", "table4", "table5")
)
NOT_BUILT, NOT_HAD = "not built", "cannot be had"
Bench = Mapping[str, Any]

# Figure 3: accuracy against ε.

LOCAL = "mp-ldp"
NOISY = tuple(_ACCURACY["schemes"])
HONEST: dict[str, Callable[[int], int]] = {
    "tp-smc": lambda clients: clients,
    "tp-smc-half": lambda clients: math.ceil(clients / 2),
    "tp-smc-two": lambda clients: 2,
}
"""Of TP-SMC's rows: how many of so many clients are honest."""


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
        for epsilon, (label, own) in itertools.product(_epsilons(bench), _ACCURACY["schemes"].items()):
            settings = {**shared, **own, "epsilon": epsilon, "delta": _ACCURACY["delta"]}
            expected = usual and epsilon in bench["epsilons"]
            more = {}
            if label in HONEST:
                clients = bench["clients"]
                settings |= hybrid_settings(bench["data"], clients, HONEST[label](clients))
                more = {"masked": True}
            found.append(Cell(accuracy_cell(bench, label, epsilon), settings, samples, usual=expected, more=more))
    return tuple(found)


def _epsilons(bench: Bench) -> list[float]:
    """Every ε of a bench: those that are run by default, and the paper's own."""
    return sorted([*bench["epsilons"], *bench.get("more_epsilons", ())])


def hybrid_settings(data: str, clients: int, honest: int) -> dict[str, Any]:
    """What TP-SMC needs: how many clients may side with the server, and a network on which records can be clipped."""
    return {"collusion": (clients - honest) / clients, **_PAPER["without_batch_norm"].get(data, {})}


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
        every = {
            epsilon: {one: numbers(results, accuracy_cell(bench, one, epsilon)) for one in NOISY}
            for epsilon in _epsilons(bench)
        }
        where = f"{bench['data']} K = {bench['clients']}"
        judged: list[Check] = []
        for epsilon, ours in every.items():
            whole = composed(epsilon, delta=delta, rounds=_settings(bench)["rounds"], sigma=paper_sigma)
            rows.append(
                (
                    *(bench["data"], str(bench["clients"]), f"{epsilon:g}", f"{whole:.3g}", shown(plain)),
                    *(shown(ours[one]) for one in NOISY),
                    shown(difference(ours["mpdp"], ours["mp-cdp"]), signed=True),
                )
            )
            if ours["mpdp"] or ours["mpdp-naive"]:
                judged += _gaps(every, epsilon, plain, f"{where} ε = {epsilon:g}")
            else:
                judged.append(Check(f"{where} ε = {epsilon:g}: the same claims", None, "not run"))
        judged += _over_budgets(every, where)
        checks.append(trained({"FedAvg": mean(plain)}, least=_ACCURACY["trained"], where=f"{where}: ", topic=where))
        checks += [replace(one, topic=where) for one in judged]
    return _ACCURACY.report(rows, checks, quick=quick, notes=_ACCURACY.notes())


Accuracies = Mapping[str, Mapping[int, float]]


def _over_budgets(every: Mapping[float, Accuracies], where: str) -> Iterator[Check]:
    """The paper's claim of the curves: all but MP-DP-Naive's lose less as the budget grows."""
    named = [f"ε = {epsilon:g}" for epsilon in every]
    for label in ("mpdp", "mp-cdp", *HONEST):
        values = [one[label] for one in every.values()]
        yield rising(f"{where}: the accuracy of {_title_of(label)} grows with ε", values, named, signed=False)
    naive = [one["mpdp-naive"] for one in every.values() if one["mpdp-naive"]]
    gain = difference(naive[-1], naive[0]) if len(naive) > 1 else {}
    yield above(f"{where}: the accuracy of MP-DP-Naive does not grow with ε", gain, below=True)


def _title_of(label: str) -> str:
    return str(_ACCURACY["titles"][label])


def _gaps(every: Mapping[float, Accuracies], epsilon: float, plain: Mapping[int, float], where: str) -> Iterator[Check]:
    """The paper's claims at one ε; that of a collapse only where MP-CDP's loss lies in the window."""
    ours = every[epsilon]

    def limited(found: Check, label: str) -> Check:
        return _limited(found, [reached for one in every.values() if (reached := mean(one[label])) is not None])

    if epsilon == _ACCURACY["small"]:
        most = _ACCURACY["small_loss"]
        claim = f"{where}: MP-DP loses less than {most:g} points of FedAvg's"
        yield above(claim, difference(ours["mpdp"], plain), -most)
        label, *_ = HONEST
        claim = f"{where}: {_title_of(label)} loses more than that (up to 20 points, as printed)"
        yield limited(above(claim, difference(ours[label], plain), -most, below=True), label)
    central, (low, high) = ours["mp-cdp"], _ACCURACY["window"]
    loss, reached = mean(difference(plain, central)), mean(central)
    close, collapse = _ACCURACY["close"], _ACCURACY["collapse"]
    claim = f"{where}: MP-DP at most {close} points below MP-CDP"
    yield above(claim, difference(ours["mpdp"], central), -close)
    claim, fall = (
        f"{where}: MP-DP-Naive {collapse:g} points below MP-CDP or more",
        difference(ours["mpdp-naive"], central),
    )
    if loss is not None and reached is not None and low <= loss <= high:
        room = f"{shown(fall, signed=True)}, of {reached:.1f} %: no room for it"
        short_of = reached < _ACCURACY["room"]
        yield Check(claim, None, room) if short_of else above(claim, fall, -collapse, below=True)
    for label in HONEST:
        yield limited(above(f"{where}: MP-DP above {_title_of(label)}", difference(ours["mpdp"], ours[label])), label)


def _limited(found: Check, curve: Sequence[float]) -> Check:
    """A rival's accuracies over ε tell about noise only where noise is what stops it."""
    if not found.held or len(curve) < 2 or max(curve) - min(curve) >= POINTS:
        return found
    why = f"the rival has {min(curve):.1f} to {max(curve):.1f} % at every ε: its clipped steps stop it, not noise"
    return replace(found, held=None, seen=f"{found.seen}; {why}")


# Table 4: members told by a client.


def _table4_cells(quick: bool) -> tuple[Cell, ...]:
    found = []
    for bench in _T4.form(quick)["benches"]:
        for method in (one for one in _T4["methods"].values() if built(one["scheme"])):
            scheme = {name: value for name, value in method.items() if name not in ("cell", "masked")}
            slow = bench["noisy"] if method["cell"] in _T4["slow"] else {}
            # What has no veil takes no setting of one.
            own = {name: value for name, value in bench.items() if name != "veiled" or not method.get("masked")}
            if method["scheme"] in _T4["clipped"]:
                slow = {**slow, **_PAPER["without_batch_norm"].get(bench["data"], {})}
            cell = membership.attacked_cell(own, method["cell"], {**scheme, **slow})
            masked = {"masked": True} if method.get("masked") else {}
            found.append(replace(cell, more={**cell.more, **masked}))
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
            if built(own["scheme"]):
                rows += _members(results, where, method, cell, plain, printed.get(method))
            elif method in printed:
                accuracy, success = map(paper, printed[method])
                rows.append((where, method, accuracy, NOT_BUILT, EMPTY, EMPTY, EMPTY, success, *(EMPTY,) * 4))
        checks.append(membership.told_without_protection(results, plain, where))
        noisy, quiet = (membership.name_of(bench, one) for one in ("mpdp", "mpdp-quiet"))
        words = f"{where}, MP-DP at ε = {_T4['epsilon']:g}"
        near = membership.close_accuracy(results, noisy, plain, words, points=_T4["points"])
        slow = membership.percent(results, membership.name_of(bench, "fedavg-slow"))
        checks.append(replace(near, seen=f"{near.seen}; FedAvg with the same small steps: {slow}"))
        checks += membership.guesses(results, noisy, plain, words)
        alone = membership.guesses(results, quiet, plain, f"{where}, MP-DP at ε = {_T4['quiet']:g}")
        checks += [replace(one, ours=True) for one in alone]  # of the veil by itself, which the paper does not try
        for method, rival in _T4["rivals"].items():
            gain = difference(numbers(results, noisy), numbers(results, membership.name_of(bench, rival)))
            checks.append(replace(above(f"{words}: more accurate than {method}", gain), topic=RIVALS))
            checks.append(membership.advantage(results, membership.name_of(bench, rival), plain, f"{where}, {method}"))
        without = difference(*(numbers(results, membership.name_of(bench, one)) for one in ("tp-smc-quiet", "mpdp")))
        claim = f"{where}: TP-SMC's training gets as far as MP-DP's where next to no noise is left"
        checks.append(replace(above(claim, without), premise=True, topic=RIVALS))
        checks.append(_blind(results, membership.name_of(bench, "pile"), plain, f"{where}, PILE"))
    if not quick:
        for method, (accuracy, success) in _T4["printed"]["cifar100"].items():
            empty = (EMPTY,) * 3
            rows.append(("cifar100", method, paper(accuracy), NOT_HAD, *empty, paper(success), *empty, EMPTY))
    notes = [_T4["words"]["first"], *membership.notes(_T4, benches)]
    return _T4.report(rows, checks, quick=quick, notes=notes)


RIVALS = "rivals"


def _blind(results: Results, cell: str, plain: str, where: str) -> Check:
    """The paper's claim of veiled models: who is sent one tells members no better than by a guess."""
    every = membership.guesses(results, cell, plain, where)
    return next(one for one in every if f"as received, {membership.NAMES['three']}" in one.claim)


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

SCHEMES = tuple(_T2["schemes"])
_EXACT = 1e-12
"""Errors below this are none."""
_PICTURES = Pictures(_T2)
places, attacks = _PICTURES.places, _PICTURES.attacks


def _table2_report(results: Results, quick: bool) -> Report:
    found = [Tried(results, place, _T2["margin"]) for place in places(quick)]
    notes = [*([_T2["quick"]["note"]] if quick else []), *_T2.notes(clients=_T2.form(quick)["clients"])]
    rows, checks = list(_table2_rows(found)), list(_table2_checks(found))
    if not quick:
        for scheme, theirs in _T2["printed_cifar100"].items():
            numbers_of = ", ".join(f"{one:.2f}" for one in theirs)
            rows.append(("cifar100", "ResNet", "1", _T2["names"][scheme], numbers_of, NOT_HAD, *(EMPTY,) * 6))
    more = [*_table2_notes(results, found, quick), *sheet_note(sheet_rows(results, quick))]
    return _T2.report(rows, checks, quick=quick, notes=[*notes, *more])


def _table2_rows(found: Sequence[Tried]) -> Iterator[tuple[str, ...]]:
    for one in found:
        main = one is found[0]
        where = (one.place.data, one.place.model, str(one.place.batch))
        for scheme in SCHEMES:
            if not built(_T2["schemes"][scheme]["scheme"]):
                if main:
                    nothing = (*(EMPTY,) * 3, NOT_BUILT, *(EMPTY,) * 3)
                    yield (*where, _T2["names"][scheme], _printed(scheme), *nothing)
            elif main or figures_of(one.results, one.place.cell(scheme)):
                yield (*where, *_table2_row(one, scheme, main=main))


def _table2_row(found: Tried, scheme: str, *, main: bool) -> tuple[str, ...]:
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


def _table2_checks(found: Sequence[Tried]) -> Iterator[Check]:
    main = found[0]
    name, phi = main.place.name, main.score("mpdp", ADAPTIVE)
    claim = f"{name}: MP-DP's noise keeps attacks on the gradient from reconstructing"
    yield main.nothing("mpdp", main.place.matching, claim)
    yield from _hides_most(main, [one for one in _T2["printed"] if one != "mpdp"], _T2["measures"])
    yield replace(_cdp_hides(main), ours=True)
    for one in found:
        if one.place.batch == 1 and (one is main or figures_of(one.results, one.place.cell("mpdp"))):
            yield _gives_away(one)
    claim, blind = f"{name}: MP-DP keeps the server from reconstructing, {PHI} included", main.score("mpdp", BLIND)
    if phi is None or blind is None or not proven(main.results, ADAPTIVE):
        yield Check(claim, None, adaptive=True)
    else:
        seen = f"{level(phi)} dB; the mean picture has {blind.value:.1f}"
        yield Check(claim, phi.surely <= blind.value + _T2["margin"], seen, adaptive=True)
    claim, noise = (
        f"{name}: lossless hides nothing from the server (it protects the model, not uploads)",
        main.listed("lossless", "noise"),
    )
    seen = f"its gradient is FedAvg's up to {max(noise):.1g} of its length" if noise else ""
    yield Check(claim, max(noise) < 1e-2 if noise else None, seen, ours=True)
    claim = "veil-secagg leaves every attack at what one gets who saw nothing (mean picture + 3 dB)"
    there = [one for one in found if figures_of(one.results, one.place.cell("veil-secagg"))]
    parts = {one.place.name: one.nothing("veil-secagg", one.place.attacks, claim) for one in there}
    failed = any(part.held is False for part in parts.values())
    held = False if failed else parts[name].held if name in parts else None
    yield Check(claim, held, "; ".join(f"{place}: {part.seen}" for place, part in parts.items()), ours=True)


def _hides_most(found: Tried, rivals: Sequence[str], measures: Mapping[str, str]) -> Iterator[Check]:
    """The paper's claim: its scheme outperforms all others in defence against reconstruction, by each measure.

    Errors are taken as decibels, of which more is more like the original. What lies no higher than the mean picture,
    up to the margin, shows nothing: schemes that both lie there are level, whichever is lower.
    """
    start = f"{found.place.name}: attacks on the gradient get less of MP-DP than of any other scheme of the paper's"

    def scores(what: str) -> Iterator[tuple[str, Score, tuple[float, float]]]:
        for label in ("mpdp", *rivals):
            best = found.best(label, found.place.matching)
            score = None if best is None else found.score(label, best, what)
            if score is not None and score.low is not None and score.high is not None:
                yield label, score, _decibels(what, score.low, score.high)

    for what, title in measures.items():
        there, nothing = list(scores(what)), found.score("fedavg", BLIND, what)
        claim = f"{start}, by {title}"
        if nothing is None or found.effective() is None or len(there) < 2 or there[0][0] != "mpdp":
            yield Check(claim, None)
            continue
        floor = _decibels(what, nothing.value, nothing.value)[0] + found.margin
        seen = ", ".join(f"{_T2['names'][label]} {level(score, '{:.3g}')}" for label, score, _ in there)
        (_, _, (low, high)), *others = there
        if any(low > max(floor, most) for _, _, (_, most) in others):
            yield Check(claim, False, seen)
            continue
        alike = [_T2["names"][label] for label, _, (least, _) in others if least <= max(floor, high)]
        seen += f"; no more than of MP-DP, or than the mean picture: {', '.join(alike)}" if alike else ""
        yield Check(claim, None if alike or len(others) < len(rivals) else True, seen)


def _decibels(what: str, low: float, high: float) -> tuple[float, float]:
    """An interval of PSNR as it is, one of errors as that of −10·log₁₀."""
    if what == "psnr":
        return low, high
    return -10 * math.log10(max(high, _EXACT)), -10 * math.log10(max(low, _EXACT))


def _cdp_hides(found: Tried) -> Check:
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


def _gives_away(found: Tried) -> Check:
    claim = (
        f"{found.place.name}: {PHI}, which travels bare, gives a batch of one away whatever noise covers the gradient"
    )
    ours, blind = found.score("mpdp", ADAPTIVE), found.score("mpdp", BLIND)
    if ours is None or blind is None or not proven(found.results, ADAPTIVE):
        return Check(claim, None, ours=True)
    labels, worst = interval(found.listed("mpdp", f"{ADAPTIVE} labels")), min(found.listed("mpdp", f"{ADAPTIVE} psnr"))
    seen = f"PSNR {level(ours)} dB, worst {worst:.1f}" + ("" if labels is None else f", labels told {labels.value:.0%}")
    exact = " (indistinguishable)" if worst > _T2["exact"] else ""
    return Check(claim, ours.surely > max(20.0, blind.value + _T2["margin"]), seen + exact, ours=True)


def _table2_notes(results: Results, found: Sequence[Tried], quick: bool) -> Iterator[str]:
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
                for attack in (Tried(results, place).best(scheme, place.matching), ADAPTIVE)
                if (made := from_text(figures, f"{attack} pictures")) is not None
            ]
    return rows


# Tables 1 and 5: what rounds cost, and how long it takes to a target.

_COSTS = _PAPER["costs"]
METHODS = tuple(_COSTS["methods"])
VARIANT = "mpdp-record"
"""MP-DP trained for another sensitivity: it costs what MP-DP costs."""
SERVER_PARTS, CLIENT_PARTS = ("MP", "Recover", "Agg", "Grad_Dec"), ("Train", "Grad_Enc", "DP", "decrypting")
COLUMNS = ("MP", "Recover", "Agg", "Grad_Dec", "Key_Gen", "Train", "Grad_Enc", "DP")
_TIMED = {
    "Agg": "adding",
    "Grad_Dec": "decrypting (server)",
    "Key_Gen": "making keys",
    "Grad_Enc": "encrypting",
    "DP": "noise",
    "decrypting": "decrypting (client)",
}
"""The paper's columns, and what is timed for them on a slice of the network; on the whole of it: MP, Recover, Train."""


def _cost_cells(networks: Mapping[str, Any], counts: Sequence[int], *, quick: bool) -> Iterator[Cell]:
    """The local work of one client on the whole network, and a round of every method: with ciphers on a small one."""
    form = _COSTS["quick" if quick else "full"]
    for name, network in networks.items():
        own = {"model": network["model"], "rounds": 1}
        more = {"shape": network["shape"], "outputs": network["outputs"]}
        for work, settings in _COSTS["works"].items():
            alone = {"clients": 1, **own, "rounds": _COSTS["rounds"], "lr": _COSTS["lr"], **settings}
            yield Cell(f"{name}/pace/{work}", alone, more={**more, "samples": network["batch"]})
        for clients, (label, method) in itertools.product(counts, _COSTS["methods"].items()):
            settings = {"clients": clients, **own, **method["settings"]}
            facts = {**more, "samples": _COSTS["samples"]}
            if method.get("sliced"):
                width = form["widths"][label][clients > _COSTS["few"]]
                settings |= {"model": "mlp", "model_options": {"depth": 2, "width": width}, **form["cipher"][label]}
                facts |= {"shape": [1, 8, 8], "outputs": 10, "key_bits": form["key_bits"]}
            if built(method["settings"]["scheme"]):
                yield Cell(f"{name}/k{clients}/{label}", settings, more=facts)


def _cost_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    return {"device": "cpu, 1 thread", **costs.columns_of(cell.settings, **cell.more)}


@dataclass(frozen=True)
class Costs:
    """Seconds of one core that rounds of a network take with so many clients, read back."""

    results: Results
    name: str
    network: Mapping[str, Any]
    clients: int

    @property
    def rounds(self) -> float:
        """Rounds of an epoch."""
        return float(self.network["samples"] / (self.clients * self.network["batch"]))

    def part(self, label: str, column: str) -> float | None:
        """One column: of a round, of one client or the server, for the whole network."""
        method, cell = _COSTS["methods"][label], f"{self.name}/k{self.clients}/{label}"
        pace = f"{self.name}/pace/{method['work']}"
        if column in ("MP", "Recover", "Train"):
            what = {"MP": "perturbing", "Recover": "recovering", "Train": "training"}[column]
            return number(self.results, pace, what) if column == "Train" or method.get("veiled") else 0.0
        size, whole, found = (
            *(number(self.results, one, "parameters") for one in (cell, pace)),
            number(self.results, cell, _TIMED[column]),
        )
        if found is None or size is None or whole is None:
            return None
        return found if column == "Key_Gen" else found * whole / size

    def total(self, label: str, columns: Sequence[str]) -> float | None:
        """The sum of some columns."""
        found = [self.part(label, one) for one in columns]
        return None if None in found else sum(one for one in found if one is not None)

    def round(self, label: str) -> float | None:
        """The server's part and one client's, one after the other; keys are made once."""
        return self.total(label, (*SERVER_PARTS, *CLIENT_PARTS))


def _all_costs(table: Table, results: Results, quick: bool) -> list[Costs]:
    form = table.form(quick)
    return [Costs(results, name, one, count) for name, one in form["networks"].items() for count in form["clients"]]


def _both(theirs: float | None, ours: float | None) -> str:
    """Seconds: the paper's and ours, or dashes."""
    return f"{paper(theirs)} / {short(ours)}"


def _title(label: str) -> str:
    return str(_COSTS["methods"][label]["title"])


def _table5_cells(quick: bool) -> tuple[Cell, ...]:
    form = _T5.form(quick)
    return tuple(_cost_cells(form["networks"], form["clients"], quick=quick))


def _table5_report(results: Results, quick: bool) -> Report:
    rows = []
    checks: list[Check] = []
    for found in _all_costs(_T5, results, quick):
        printed = _T5["printed"].get(found.name, {}).get(str(found.clients), {})
        for label in METHODS:
            theirs = printed.get(label, (None,) * 9)
            parts = [_both(one, found.part(label, name)) for one, name in zip(theirs, COLUMNS, strict=False)]
            whole, each = found.round(label), found.part(label, "decrypting")
            epoch = None if whole is None else whole * found.rounds
            name = _title(label) + ("" if built(_COSTS["methods"][label]["settings"]["scheme"]) else f" ({NOT_BUILT})")
            rows.append(
                (
                    found.name,
                    str(found.clients),
                    name,
                    *parts,
                    short(each),
                    short(whole),
                    paper(theirs[8]),
                    short(epoch),
                )
            )
        checks += _cost_checks(found, printed.get("mpdp", ())[8:9] + printed.get("fedavg", ())[8:9], quick=quick)
        checks += _nothing_more(found, quick=quick)
    form = _COSTS["quick" if quick else "full"]
    return _T5.report(rows, checks, quick=quick, notes=_T5.notes(bits=form["key_bits"]))


def _cost_checks(found: Costs, printed: Sequence[float], *, quick: bool) -> Iterator[Check]:
    """MP-DP's epoch beside FedAvg's, of which the table prints both, and the rivals' beside MP-DP's."""
    where, ours = f"{found.name}, K = {found.clients}", found.round("mpdp")
    most = printed[0] / printed[1] if printed else _T5["usual_ratio"]
    whose = "as printed" if printed else "as printed for CIFAR-10, K = 5"
    claim = f"{where}: MP-DP's round takes at most {most:.2f} times FedAvg's, {whose}"
    yield _at_most(claim, ratio(ours, found.round("fedavg")), most, quick=quick)
    for label in (one for one in METHODS if _COSTS["methods"][one].get("sliced")):
        over = ratio(found.round(label), ours)
        claim = f"{where}: {_title(label)}'s round takes at least ten times MP-DP's"
        yield Check(claim, None if over is None else over >= 10, "" if over is None else f"{over:.0f} times")
    over = ratio(found.round("pile"), found.round("veil-secagg"))
    claim = f"{where}: veil-secagg hides what PILE hides in a tenth of its time"
    seen = "" if over is None else f"{over:.0f} times less"
    yield Check(claim, None if over is None else over >= 10, seen, ours=True)


_TOY = "of a small network, whose training takes next to no time: the paper's ratio is that of a ResNet"


def _at_most(claim: str, over: float | None, most: float, *, quick: bool) -> Check:
    """A ratio of seconds; open where it is larger by no more than two timings of one thing differ."""
    if over is None:
        return Check(claim, None)
    if quick:
        return Check(claim, None, f"{over:.2f} times, {_TOY}")
    near = most < over <= most * _T5["apart"]
    seen = f"{over:.2f} times" + (f"; two timings of one thing differ by {_T5['apart']:.2f}" if near else "")
    return Check(claim, None if near else over <= most, seen)


def _nothing_more(found: Costs, *, quick: bool) -> Iterator[Check]:
    """The paper's words on Table 5: training and adding cost what FedAvg's do, its two mechanisms next to nothing."""
    where = f"{found.name}, K = {found.clients}"
    over = ratio(*(found.total(label, ("Train", "Agg")) for label in ("mpdp", "fedavg")))
    claim = f"{where}: MP-DP's training and adding take what FedAvg's do (up to {_T5['alike']:g} times)"
    yield _at_most(claim, over, _T5["alike"], quick=quick)
    part = ratio(found.total("mpdp", ("MP", "DP")), found.round("mpdp"))
    most = _T5["negligible"]
    claim = f"{where}: MP_Server and DDP_Client take at most {most:.0%} of MP-DP's round, as printed"
    seen = "" if part is None else f"{part:.1%}" + f", {_TOY}" * quick
    yield Check(claim, None if part is None or quick else part <= most, seen)


def trained_as(label: str) -> str:
    """Whose training a method's is: ciphers change nothing but rounding."""
    return str(_COSTS["methods"][label].get("trained", label))


def _table1_cells(quick: bool) -> tuple[Cell, ...]:
    form, found = (
        _T1.form(quick),
        list(_cost_cells(_T1.form(quick)["networks"], _T1.form(quick)["clients"], quick=quick)),
    )
    for (name, network), clients in itertools.product(form["networks"].items(), form["clients"]):
        rounds = max(1, round(form["epochs"] * network["samples"] / (clients * network["batch"])))
        shared = {
            "dataset": name,
            "model": network["model"],
            "clients": clients,
            "batch_size": network["batch"],
            "rounds": rounds,
            "evaluate_every": max(1, rounds // form["epochs"]),
            **_T1["settings"],
            **form.get("settings", {}),
        }
        for label, own in _T1["trained"].items():
            more = {"masked": True} if own["scheme"] == "tp-smc" else {}
            norm = _PAPER["without_batch_norm"].get(name, {}) if more else {}
            usual = network.get("there", True) and clients == form["clients"][0]
            record = {"sensitivity": 1.0 / network["batch"]} if label == VARIANT else {}
            settings = {**shared, **norm, **own, **record}
            found.append(Cell(f"{name}/k{clients}/train/{label}", settings, usual=usual, more=more))
    return tuple(found)


def _table1_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    work = curve_work if "/train/" in cell.name else _cost_work
    return work(stage, cell, seed, on_round)


def _reached(results: Results, cell: str, target: float) -> tuple[float | None, float | None]:
    """The first round whose test accuracy reaches a target, and the last accuracy; of the first seed."""
    for figures in figures_of(results, cell)[:1]:
        rounds, curve = figures.get("evaluated"), figures.get("curve")
        if isinstance(rounds, list) and isinstance(curve, list) and curve:
            return next((one for one, got in zip(rounds, curve, strict=True) if got >= target), None), curve[-1]
    return None, None


def _ended(results: Results, cell: str, target: float) -> dict[int, float]:
    last = _reached(results, cell, target)[1]
    return {} if last is None else {1: last}


def _table1_report(results: Results, quick: bool) -> Report:
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for found in _all_costs(_T1, results, quick):
        printed = _T1["printed"].get(found.name, {}).get(str(found.clients), {})
        times: dict[str, float | None] = {}
        for row in (*METHODS, VARIANT):
            label, twin = ("mpdp", row) if row == VARIANT else (row, trained_as(row))
            theirs = printed.get(row, (None,) * 4)
            cell = f"{found.name}/k{found.clients}/train/{twin}"
            first, last = _reached(results, cell, found.network["target"])
            whole = found.round(label)
            times[row] = None if first is None or whole is None else first * whole
            parts = [found.total(label, one) for one in (SERVER_PARTS, CLIENT_PARTS)]
            ours = [None if one is None else one * found.rounds for one in (*parts, whole)]
            whose = "" if twin == row or last is None else f" (= {_title(twin)})"
            accuracy = _T2["accuracy"].get(found.name, {}).get(row)
            never = last is not None and first is None
            rows.append(
                (
                    *(found.name, str(found.clients), _T1["variant"] if row == VARIANT else _title(row)),
                    *(_both(one, other) for one, other in zip(theirs, ours, strict=False)),
                    f"{_both(theirs[3], None)[:-1]}never" if never else _both(theirs[3], times[row]),
                    f"{short(accuracy, '{:.2f}')} / {short(last, '{:.2f}')}{whose}",
                )
            )
        start = f"{found.name}/k{found.clients}/train"
        gain = difference(*(_ended(results, f"{start}/{one}", found.network["target"]) for one in ("mpdp", "tp-smc")))
        checks.append(above(f"{found.name}, K = {found.clients}: MP-DP ends more accurate than TP-SMC", gain))
        over = ratio(times["mpdp"], times["fedavg"])
        claim = f"{found.name}, K = {found.clients}: MP-DP reaches the target in at most three times FedAvg's time"
        seen = "" if over is None else f"{over:.2f} times"
        ended = figures_of(results, f"{found.name}/k{found.clients}/train/mpdp")
        never = bool(ended) and times["mpdp"] is None and found.round("mpdp") is not None
        yes = False if never else None if over is None else over <= 3
        checks.append(Check(claim, yes, "never" if never else seen))
        checks += _to_the_target(found, times, quick=quick)
    return _T1.report(rows, checks, quick=quick, notes=_T1.notes(epochs=_T1.form(quick)["epochs"]))


def _to_the_target(found: Costs, times: Mapping[str, float | None], *, quick: bool) -> Iterator[Check]:
    """The paper's abstract: given a target accuracy the others' training takes hundreds of times as long."""
    for label, least in _T1["longer"].items():
        over = ratio(times[label], times["mpdp"])
        claim = f"{_title(label)} takes at least {least:g} times MP-DP's time to the target"
        seen = "" if over is None else f"{over:.0f} times" + f", {_TOY}" * quick
        held = None if over is None or quick else over >= least
        yield Check(f"{found.name}, K = {found.clients}: {claim}", held, seen)


# Table 3: one network on pictures of patients: accuracy, time, reconstruction, membership.


def _table3_cells(quick: bool) -> tuple[Cell, ...]:
    found: list[Cell] = []
    for bench in _T3.form(quick)["benches"]:
        data, usual = bench["data"], bench.get("usual", True)
        network = {data: {"model": bench["settings"]["model"], **bench["network"]}}
        made = list(_cost_cells(network, [one["clients"] for one in bench["sizes"]], quick=quick))
        for size, (method, label) in itertools.product(bench["sizes"], _T3["methods"].items()):
            own = _T4["methods"][method]
            if built(own["scheme"]):
                slow = bench["noisy"] if own["cell"] in _T4["slow"] else {}
                scheme = {name: value for name, value in own.items() if name not in ("cell", "masked")}
                where = {**bench, **size, "settings": {**bench["settings"], **size.get("settings", {})}}
                cell = membership.attacked_cell({**where, "veiled": {}}, label, {**scheme, **slow})
                masked = {"masked": True} if own.get("masked") else {}
                name = f"{data}/k{size['clients']}/members/{label}"
                made.append(replace(cell, name=name, more={**cell.more, **masked}))
        for place in (Place(**one) for one in bench["places"]):
            for label in (one for one in _T3["methods"].values() if built(_T2["schemes"][one]["scheme"])):
                where = {"dataset": data, "model": place.model, "clients": _T3["victims"], **_T2["settings"]}
                settings = {**where, "record_clients": f"0-{_T3['victims'] - 1}", **_T2["schemes"][label]}
                made.append(Cell(place.cell(label), settings, _T3["victims"]))
        found += [replace(one, usual=usual) for one in made]
    return tuple(found)


def _table3_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    if "/members/" in cell.name:
        return membership.work(stage, cell, seed, on_round)
    for bench in _T3.form(stage.quick)["benches"]:
        for place in (Place(**one) for one in bench["places"]):
            if cell.name.startswith(f"{place.name}/"):
                return attacked(stage, cell, place, _T2, seed=seed)
    return _cost_work(stage, cell, seed, on_round)


def _table3_report(results: Results, quick: bool) -> Report:
    rows: list[tuple[str, ...]] = []
    checks: list[Check] = []
    for bench in _T3.form(quick)["benches"]:
        data, places = bench["data"], [Place(**one) for one in bench["places"]]
        network = {"model": bench["settings"]["model"], **bench["network"]}
        for size in bench["sizes"]:
            clients = size["clients"]
            found = Costs(results, data, network, clients)
            start, made = f"{data}/k{clients}/members", Tried(results, places[0]) if places else None
            for method, label in _T3["methods"].items():
                theirs = _T3["printed"].get(str(clients), {}).get(label, (None,) * 4)
                if not built(_T4["methods"][method]["scheme"]):
                    rows.append((data, str(clients), method, *(f"{short(one)} / {NOT_BUILT}" for one in theirs)))
                    continue
                best = None if made is None else made.best(label, made.place.attacks)
                score = None if made is None or best is None else made.score(label, best)
                members = membership.members_told(results, f"{start}/{label}", "three", membership.RECEIVED)
                epoch = found.round(label)
                ours = (
                    short(mean_of(results, f"{start}/{label}"), "{:.2f}"),
                    short(None if epoch is None else epoch * found.rounds),
                    EMPTY if score is None else f"{level(score)} ({best})",
                    level(members),
                )
                rows.append(
                    (
                        data,
                        str(clients),
                        method,
                        *(f"{short(a, '{:.2f}')} / {b}" for a, b in zip(theirs, ours, strict=True)),
                    )
                )
            checks.append(membership.told_without_protection(results, f"{start}/fedavg", f"{data}, K = {clients}"))
            checks.append(_closest(results, start, f"{data}, K = {clients}"))
            checks += _best_of_all(found, made if clients == bench["sizes"][0]["clients"] else None)
    return _T3.report(rows, checks, quick=quick, notes=_T3.notes())


def _best_of_all(found: Costs, made: Tried | None) -> Iterator[Check]:
    """What §6.5 says: no members told, the lowest PSNR, epochs far shorter than the rivals'."""
    where, start = f"{found.name}, K = {found.clients}", f"{found.name}/k{found.clients}/members"
    yield _blind(found.results, f"{start}/mpdp", f"{start}/fedavg", f"{where}, MP-DP")
    if made is not None:
        rivals = [one for one in _T3["methods"].values() if one != "mpdp"]
        yield from _hides_most(made, rivals, {"psnr": _T2["measures"]["psnr"]})
    for label in (one for one in METHODS if _COSTS["methods"][one].get("sliced")):
        over = ratio(found.round(label), found.round("mpdp"))
        claim = f"{where}: {_title(label)}'s epoch takes at least ten times MP-DP's"
        yield Check(claim, None if over is None else over >= 10, "" if over is None else f"{over:.0f} times")


def _closest(results: Results, start: str, where: str) -> Check:
    """The paper's claim: MP-DP's accuracy is close to FedAvg's; the others' stand beside it."""
    claim = f"{where}: MP-DP's accuracy is within {_T3['points']:g} points of FedAvg's"
    found = {label: numbers(results, f"{start}/{label}") for label in _T3["methods"].values()}
    seen = ", ".join(f"{_title(label)} {shown(one)}" for label, one in found.items() if one)
    fall = difference(found["mpdp"], found["fedavg"])
    return Check(claim, decided(fall, -_T3["points"]) if fall else None, seen)


ENTRIES = (
    _ACCURACY.entry(_accuracy_cells, _accuracy_report, work=_accuracy_work),
    _T5.entry(_table5_cells, _table5_report, work=_cost_work),
    _T1.entry(_table1_cells, _table1_report, work=_table1_work),
    _T3.entry(_table3_cells, _table3_report, work=_table3_work),
    _T4.entry(_table4_cells, _table4_report, work=membership.work),
    _T2.entry(_PICTURES.cells, _table2_report, work=_PICTURES.work, draw=draw_sheet(sheet_rows)),
)
