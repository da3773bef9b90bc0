"""Cases of a test, or two lists of them crossed: what the default suite takes, and what `make test-all` adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest


def crossed(first: Mapping[str, Any] | Sequence[Any], second: Mapping[str, Any] | Sequence[Any]) -> list[Any]:
    """Every pair as a parameter; each value of either is in a pair of the default suite, and further pairs are slow."""
    rows, columns = _named(first), _named(second)
    pairs = []
    for row, (name, one) in enumerate(rows):
        for column, (beside, other) in enumerate(columns):
            marks = () if row % len(columns) == column % len(rows) else pytest.mark.slow
            pairs.append(pytest.param(one, other, id=f"{name}-{beside}", marks=marks))
    return pairs


def chosen(cases: Mapping[str, Any], *, slow: Sequence[str]) -> list[Any]:
    """Every case as a parameter; those named are slow."""
    assert set(slow) < set(cases)
    return [pytest.param(case, id=name, marks=pytest.mark.slow if name in slow else ()) for name, case in cases.items()]


def _named(cases: Mapping[str, Any] | Sequence[Any]) -> list[tuple[str, Any]]:
    return list(cases.items()) if isinstance(cases, Mapping) else [(str(case), case) for case in cases]
