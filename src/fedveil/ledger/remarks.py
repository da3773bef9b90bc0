"""What a scheme's author has to say beside the numbers: assumptions, gaps, and the paper's own claim."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remarks:
    """`assumptions` are what a proof rests on, `unprotected` what nobody should expect, `paper` the paper's claim,
    `notes` what else a reader must know."""

    assumptions: tuple[str, ...] = ()
    unprotected: tuple[str, ...] = ()
    paper: str = ""
    notes: tuple[str, ...] = ()
