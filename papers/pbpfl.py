"""PBPFL: Tables 1 to 3 and Figure 3, which accuracy-lossless perturbation repeats. Settings are in pbpfl.toml."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch

from papers.cells import Cell, Figures, Results, number
from papers.costs import columns_of, forward_seconds
from papers.entries import read_paper
from papers.lossless import BASELINES, accuracy_cells, accuracy_report, curve_work, draw_accuracy
from papers.report import EMPTY, Check, Report, ratio, short
from papers.stage import OnRound, Stage

_PAPER = read_paper("pbpfl")
_BANK, _T2, _T3 = (_PAPER.table(one) for one in ("bank", "table2", "table3"))

# Table 1: errors of regressions.

RIVALS = {**BASELINES, **_BANK["slower"]}
"""The paper's other defences, and again with a smaller rate where the common one is too large."""
_LARGE = 10.0


def cell(clients: int, layers: int, scheme: str) -> str:
    """A cell's name."""
    return f"n{clients}/l{layers}/{scheme}"


def pictures_cell(clients: int, scheme: str) -> str:
    """The name of a cell on pictures of retinas."""
    return f"abd/n{clients}/{scheme}"


def _cells(quick: bool) -> tuple[Cell, ...]:
    own = {one: {"scheme": one} for one in _BANK["schemes"]} | RIVALS
    found = []
    for schemes in (_BANK["schemes"], RIVALS):
        for (clients, layers, *_), scheme in itertools.product(_BANK["printed"], schemes):
            options = {"depth": layers, "width": _BANK["width"]}
            settings = {**_BANK["settings"], "clients": clients, "model_options": options, **own[scheme]}
            found.append(Cell(cell(clients, layers, scheme), settings))
    for (clients, *_), scheme in itertools.product(_BANK["printed_abd"], _BANK["schemes"][:2]):
        settings = {**_BANK["abd"], "clients": clients, "scheme": scheme}
        found.append(Cell(pictures_cell(clients, scheme), settings, usual=False))
    return tuple(found)


def _report(results: Results, quick: bool) -> Report:
    rows, spreads = [], []
    errors: dict[str, dict[str, float | None]] = {}
    for clients, layers, *printed in _BANK["printed"]:
        every = {one: number(results, cell(clients, layers, one), "mse") for one in (*_BANK["schemes"], *RIVALS)}
        errors[f"{clients} clients, {layers} layers"] = every
        ours = [every[one] for one in _BANK["schemes"]]
        there = [one for one in ours if one is not None]
        spread = max(there) - min(there) if len(there) == len(ours) else None
        spreads.append(spread)
        theirs = dict(zip(every, printed, strict=False))
        figures = [f"{short(theirs.get(one), '{:.3f}')} / {_error(found)}" for one, found in every.items()]
        rows.append(("bank", str(clients), f"mlp of {layers}", *figures[:3], short(spread, "{:.1e}"), *figures[3:]))
    for clients, *printed in _BANK["printed_abd"]:
        ours = [number(results, pictures_cell(clients, one), "mse") for one in _BANK["schemes"][:2]]
        figures = [f"{one:.3f} / {_error(found)}" for one, found in zip(printed, ours, strict=True)]
        rows.append(("retinas (ABD)", str(clients), "ResNet-20", *figures, *(EMPTY,) * 6))
    known = [one for one in spreads if one is not None]
    held = None if len(known) < len(spreads) else max(known) < _BANK["decimals"]
    seen = f"largest difference {max(known):.1e}" if known else ""
    checks = [Check("pbpfl and lossless end at FedAvg's error, to three decimals", held, seen), *_lower(errors)]
    return _BANK.report(rows, checks, quick=quick, notes=_BANK.notes())


def _error(value: float | None) -> str:
    return short(value, "{:.6f}" if value is None or value < _LARGE else "{:.0e}, diverged")


def _lower(errors: Mapping[str, Mapping[str, float | None]]) -> Iterator[Check]:
    """The paper's claim: the own scheme's error is below every other defence's; what is equal to it decides nothing."""
    for name in BASELINES:
        gaps = {where: _gap(_best(found, name), found["lossless"]) for where, found in errors.items()}
        there = {where: gap for where, gap in gaps.items() if gap is not None}
        near = [where for where, gap in there.items() if abs(gap) < _BANK["decimals"]]
        above = [where for where, gap in there.items() if gap <= -_BANK["decimals"]]
        seen = f"in {len(there) - len(above) - len(near)} of {len(there)} settings"
        seen += f"; too near to tell with {', '.join(near)}" if near else ""
        seen += f"; not with {', '.join(above)}" if above else ""
        held = False if above else None if near or len(there) < len(gaps) else True
        yield Check(f"lossless ends at a lower error than {name}", held, seen if there else "")


def _best(found: Mapping[str, float | None], name: str) -> float | None:
    """The lower error of a defence's own rates."""
    both = [found[name], *([found[f"{name}-slow"]] if f"{name}-slow" in found else [])]
    return None if None in both else min(one for one in both if one is not None)


def _gap(theirs: float | None, ours: float | None) -> float | None:
    return None if theirs is None or ours is None else theirs - ours


# Table 3: what a step costs.


def _table3_cells(quick: bool) -> tuple[Cell, ...]:
    form = _T3.form(quick)
    shared = {**form["settings"], "rounds": _T3["rounds"], "lr": _T3["lr"], "clients": 1, "loss": "square"}
    return tuple(
        Cell(name, {**shared, **own}, more={"shape": form["shape"], "samples": form["samples"]})
        for name, own in _T3["schemes"].items()
    )


def _table3_work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    shape, samples = cell.more["shape"], cell.more["samples"]
    found = columns_of(cell.settings, shape=shape, samples=samples)
    options = cell.settings.get("model_options", {})
    forward = forward_seconds(cell.settings["model"], options, shape=shape, samples=samples)
    return {"device": "cpu, 1 thread", "torch": torch.__version__, **found, "forward": forward}


def _parts(results: Results, name: str, times: float, scale: float) -> dict[str, float | None]:
    """Seconds of all iterations: perturbing, forward, backward (with all that recovery needs), updating the model."""

    def part(what: str) -> float | None:
        return number(results, name, what)

    step, forward = part("training"), part("forward")
    back = None if step is None or forward is None else step - forward
    server = [part(one) for one in ("adding", "recovering")]
    update = None if None in server else sum(one for one in server if one is not None)
    found = {"PP": part("perturbing"), "LFP": forward, "LBP": back, "MU": update}
    by_batch = {"LFP": scale, "LBP": scale}
    return {name: None if one is None else one * times * by_batch.get(name, 1.0) for name, one in found.items()}


def _table3_report(results: Results, quick: bool) -> Report:
    form, rows, found = _T3.form(quick), [], {}
    for name, title in _T3["titles"].items():
        found[name] = parts = _parts(results, name, _T3["iterations"], _T3["batch"] / form["samples"])
        for place, columns in (("client", ("LFP", "LBP")), ("server", ("PP", "MU"))):
            theirs = _T3["printed"][name][place]
            ours = [parts[one] if one in columns else 0.0 for one in ("PP", "LFP", "LBP", "MU")]
            whole = None if None in ours else sum(one for one in ours if one is not None)
            rows.append((title, place, *(f"{a:g} / {short(b)}" for a, b in zip(theirs, [*ours, whole], strict=True))))
    plain, ours = ([found[one][what] for what in ("LFP", "LBP")] for one in ("fedavg", "pbpfl"))
    over = None if None in plain or None in ours else ratio(sum(map(float, ours)), sum(map(float, plain)))  # type: ignore[arg-type]
    told = "" if over is None else f"{over:.2f} times"
    claim = "a client of pbpfl works two to three times as long as FedAvg's (2.50 printed)"
    checks = [Check(claim, None if over is None else 2 <= over <= 3, told)]
    more = ratio(*(number(results, one, "bytes up") for one in ("pbpfl", "fedavg")))
    claim = "a client of pbpfl sends three times as much (2.55 and 0.85 MB printed)"
    checks.append(
        Check(claim, None if more is None else 2.9 <= more <= 3.1, "" if more is None else f"{more:.2f} times")
    )
    more = ratio(*(number(results, one, "bytes down") for one in ("pbpfl", "fedavg")))
    claim = "the server sends a client of pbpfl as much as one of FedAvg (0.85 MB each printed)"
    checks.append(Check(claim, None if more is None else more < 1.01, "" if more is None else f"{more:.4f} times"))
    theirs, plainly = (_sum(found[one][what] for what in ("PP", "MU")) for one in ("pbpfl", "fedavg"))
    added = None if theirs is None or plainly is None else theirs - plainly
    part, most = ratio(added, _sum(found["pbpfl"][what] for what in ("LFP", "LBP"))), _T3["negligible"]
    claim = f"what the server adds is negligible: at most {most:.1%} of a client's time, as printed"
    checks.append(Check(claim, None if part is None else part <= most, _grown(part, theirs, plainly)))
    added, trained = found["pbpfl"]["PP"], found["pbpfl"]["LBP"]
    part = ratio(added, trained)
    claim = "the server's perturbing takes less than a tenth of a client's backward pass"
    seen = "" if part is None else f"{part:.1%}"
    checks.append(Check(claim, None if part is None else part < 0.1, seen, ours=True))
    return _T3.report(rows, checks, quick=quick, notes=_T3.notes(shape=form["shape"], samples=form["samples"]))


def _grown(part: float | None, theirs: float | None, plainly: float | None) -> str:
    """What the server adds beside a client's time, and by how much its own grows, here and in the paper."""
    over, printed = ratio(theirs, plainly), [_T3["printed"][one]["server"][-1] for one in ("pbpfl", "fedavg")]
    if part is None or over is None:
        return ""
    by = f"{plainly:.3g} to {theirs:.3g} s, {over:.2f} times (printed: {printed[0] / printed[1]:.2f})"
    return f"{part:.2%}; its own time grows from {by}"


def _sum(parts: Iterable[float | None]) -> float | None:
    there = list(parts)
    return None if None in there else sum(one for one in there if one is not None)


ENTRIES = (
    _BANK.entry(_cells, _report),
    _T2.entry(partial(accuracy_cells, _T2), partial(accuracy_report, _T2), work=curve_work, draw=draw_accuracy(_T2)),
    _T3.entry(_table3_cells, _table3_report, work=_table3_work),
)
