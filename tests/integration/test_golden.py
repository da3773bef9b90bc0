"""Every scheme still does what it did: model, ledger, stored names, and what attacks get. See tests/golden.py."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from golden import STORED, audited, cases, differences, schemes, trained

GOLDEN: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8"))


def test_every_scheme_is_kept() -> None:
    assert set(GOLDEN["runs"]) == set(cases())
    assert set(GOLDEN["verdicts"]) == set(schemes())


@pytest.mark.parametrize("case", GOLDEN["runs"])
def test_a_seeded_run_is_what_it_was(case: str, tmp_path: Path) -> None:
    assert not list(differences(GOLDEN["runs"][case], trained(case, tmp_path / "run")))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", GOLDEN["verdicts"])
def test_attacks_get_what_they_got(scheme: str, tmp_path: Path) -> None:
    assert not list(differences(GOLDEN["verdicts"][scheme], audited(scheme, tmp_path / "run")))


def test_what_is_compared_is_told_apart_beyond_its_tolerance_and_only_there() -> None:
    stored = GOLDEN["runs"]["veil-dp"]

    def changed(change: Any) -> list[str]:
        now = copy.deepcopy(stored)
        change(now, next(iter(now["model"].values())), now["ledger"]["lines"][0])
        return list(differences(stored, now))

    assert not changed(lambda run, tensor, line: tensor.update(norm=tensor["norm"] * (1 + 5e-6)))
    assert not changed(lambda run, tensor, line: line.update(epsilon=line["epsilon"] * (1 + 5e-10)))
    assert changed(lambda run, tensor, line: tensor.update(norm=tensor["norm"] * (1 + 2e-5)))
    assert changed(lambda run, tensor, line: tensor.update(projection=tensor["projection"] + 2e-5 * tensor["norm"]))
    assert changed(lambda run, tensor, line: tensor.update(shape=[1, *tensor["shape"]]))
    assert changed(lambda run, tensor, line: line.update(epsilon=line["epsilon"] * (1 + 2e-9)))
    assert changed(lambda run, tensor, line: line.update(epsilon=None))
    assert changed(lambda run, tensor, line: line.update(why=line["why"] + "."))
    assert changed(lambda run, tensor, line: run["ledger"]["unprotected"].pop())
    assert changed(lambda run, tensor, line: run["files"].pop("summary.json"))
    assert changed(lambda run, tensor, line: run["files"]["metrics.jsonl"].append("another"))
    assert changed(lambda run, tensor, line: tensor.update(norm=float("nan")))
