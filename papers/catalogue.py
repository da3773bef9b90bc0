"""Every entry, found by name."""

from __future__ import annotations

from fedveil.errors import unknown_name
from papers import (
    dropout,
    inversion_tables,
    membership_tables,
    mpdp,
    nadp_attacks,
    paraaegis,
    paraaegis_strategies,
    reconstruction_tables,
    sampling,
    strengths,
    table1,
    veil_dp,
)
from papers.entry import Entry

_ENTRIES = (
    strengths.ENTRY,
    table1.ENTRY,
    sampling.ENTRY,
    dropout.ENTRY,
    nadp_attacks.ENTRY,
    mpdp.ENTRY,
    membership_tables.MPDP_ENTRY,
    membership_tables.LOSSLESS_ENTRY,
    reconstruction_tables.ENTRY,
    inversion_tables.ENTRY,
    paraaegis.ENTRY,
    paraaegis_strategies.ENTRY,
    veil_dp.ENTRY,
)


def entries() -> tuple[Entry, ...]:
    """Every entry."""
    return _ENTRIES


def find(name: str) -> Entry:
    """An entry by name; an unknown name suggests the nearest."""
    known = {entry.name: entry for entry in _ENTRIES}
    if name not in known:
        raise unknown_name("entry", name, known)
    return known[name]
