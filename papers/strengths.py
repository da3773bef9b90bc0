"""NADP-FL, Table 3: how strong pair noise must be against a share of colluders."""

from __future__ import annotations

from fedveil.uplink.allocation import collusion_strength
from papers.cells import Cell, Figures, Results
from papers.entry import Entry
from papers.published import COLLUDING, TABLE3
from papers.report import EMPTY, Check, Report
from papers.stage import OnRound, Stage


def _name(ratio: float, clients: float) -> str:
    return f"ratio{ratio:g}/k{clients:g}"


_KEYS = {_name(*key): key for key in TABLE3}


def _cells(quick: bool) -> tuple[Cell, ...]:
    return tuple(Cell(name) for name in _KEYS)


def _work(stage: Stage, cell: Cell, seed: int, on_round: OnRound) -> Figures:
    ratio, clients = _KEYS[cell.name]
    return {"strengths": [collusion_strength(clients=clients, colluding=one, ratio_squared=ratio) for one in COLLUDING]}


def _report(results: Results, quick: bool) -> Report:
    rows, equal, compared = [], 0, 0
    for name, (ratio, clients) in _KEYS.items():
        published = TABLE3[ratio, clients]
        ours = results.get(name, {}).get(1, {}).get("strengths", [])
        assert isinstance(ours, list)
        equal += sum(round(one, 4) == other for one, other in zip(ours, published, strict=False))
        compared += len(ours)
        cells = [f"{theirs:.4f} / {f'{ours[place]:.4f}' if ours else EMPTY}" for place, theirs in enumerate(published)]
        rows.append((f"{ratio:g}", "∞" if clients == float("inf") else f"{clients:g}", *cells))
    held = None if compared < 60 else equal == 60
    return Report(
        title="NADP-FL, Table 3: λ against a share τ of colluders (paper / ours)",
        columns=("(|D_max|/|D_min|)²", "k", *(f"τ = {one:g}" for one in COLLUDING)),
        rows=tuple(rows),
        checks=(Check("all 60 values agree to four decimals", held, f"{equal} of {compared} agree"),),
        notes=(
            "λ = √((k·α² − 1)/((1 − τ)·k − 1)); it covers pair noise only: colluders also know their own residual "
            "noise, so that `nadp` with accounting = exact asks for more.",
        ),
    )


ENTRY = Entry(
    name="nadp-table3",
    paper="NADP-FL",
    what="Table 3: the strength of pair noise, 60 values to four decimals",
    takes="a second",
    needs="nothing",
    cells=_cells,
    report=_report,
    work=_work,
    random=False,
    has_quick=False,
)
