"""How a ledger looks on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fedveil.cli.tables import listed, percent, plainly, table

if TYPE_CHECKING:
    from fedveil.ledger.statement import Ledger, Line, PaperFigure


_MANY = 10.0
_SAME = 5e-4


def show_ledger(ledger: Ledger, *, title: str | None = None) -> None:
    """Against whom what is proven; assumptions; the paper's figure; what is not protected."""
    rows = [(one.adversary, one.result, one.unit or "–", _why(one)) for one in ledger.lines]
    counted = f" after {ledger.rounds} rounds" if ledger.rounds else ""
    table(
        title or f"Ledger of {ledger.scheme}{counted}",
        ("against", "result", "protected", "why"),
        rows,
        whole=(1,),
        ruled=True,
    )
    listed("Assumed", _assumptions(ledger.lines))
    listed("What may change", _distinct(one.relation for one in ledger.lines if one.relation))
    if ledger.paper is not None:
        listed("The paper's own figure", _paper(ledger.paper, summed(ledger)))
    listed("Not protected", ledger.unprotected)
    listed("Note", ledger.notes)
    if ledger.simulation:
        plainly("SIMULATION: secrets and noise follow from the seed; leave --seed out for real ones.")


def _why(line: Line) -> str:
    worst = f"; client {line.worst_client} is worst off" if line.worst_client is not None else ""
    return f"{line.why}{worst}"


def _assumptions(lines: Sequence[Line]) -> list[str]:
    everywhere = _distinct(one for line in lines for one in line.assumptions)
    claims = [line for line in lines if line.assumptions]
    shown = []
    for one in everywhere:
        where = [line.adversary for line in claims if one in line.assumptions]
        shown.append(one if len(where) == len(claims) else f"{one} (against {', '.join(where)})")
    return shown


def _paper(figure: PaperFigure, what: str) -> list[str]:
    lines = [figure.formula]
    if figure.noise_by_paper is not None and figure.noise_used is not None and figure.saving is not None:
        lines.append(
            f"for ε = {figure.claimed_epsilon:g} it puts noise of σ = {figure.noise_by_paper:.4g} into the sum of "
            f"{what}; used here: {figure.noise_used:.4g}, {compared(figure.noise_used, figure.noise_by_paper)}"
        )
    return lines


def summed(ledger: Ledger) -> str:
    """What clients' uploads are: gradients, or the updates of local training."""
    return "updates" if any(one.unit.startswith("all data") for one in ledger.lines) else "gradients"


def compared(noise: float, other: float) -> str:
    """How much noise this is, beside another."""
    if noise >= _MANY * other:
        return f"{noise / other:,.0f} times as much"
    saving = 1.0 - noise / other
    if abs(saving) < _SAME:
        return "as much"
    return f"{percent(abs(saving))} {'less' if saving > 0 else 'more'}"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
