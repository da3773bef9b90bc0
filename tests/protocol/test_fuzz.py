"""Changed messages of every scheme, both ways: only our own errors, no hang, little memory, and the run goes on.

In the suite each message of a run is tried a few times changed; `slow` tries many more. Seeds are fixed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedveil.engines import LocalEngine
from fedveil.runs.roles import client_role
from fedveil.schemes import schemes
from protocol.fuzzing import Fuzzed, Lying, Mutator, driven, little_memory, missing_once, small

torch.set_num_threads(1)

VARIANTS: dict[str, dict[str, Any]] = {
    **{info.name: {"name": info.name} for info in schemes()},
    "veil-dp, masks": {"name": "veil-dp", "cover": "masks"},
    "veil-secagg, on dropout": {"name": "veil-secagg", "unmask": "on-dropout"},
    "paraaegis, pads": {"name": "paraaegis", "cipher": "pads", "vote": "histogram"},
}
TIMES, LONGER = 100, 3000


@pytest.mark.parametrize("times", [TIMES, pytest.param(LONGER, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_changed_messages_end_nothing_and_leave_no_trace(variant: str, times: int) -> None:
    """Whatever one client and the server are sent beside honest messages: the run ends as if nothing had been sent."""
    given = VARIANTS[variant]
    if given["name"] in ("paraaegis", "serial", "ckks-fedavg"):
        pytest.importorskip("tenseal")
    plain = LocalEngine(client_role(small(**given)), small(**given).pool, absent=missing_once)
    expected, stopped, models = driven(small(**given), plain)
    one = small(**given)
    engine = Fuzzed(one, Mutator(len(variant)), victim=2, times=times, absent=missing_once)
    with little_memory():
        rounds, stops, found = driven(one, engine)
    assert [bool(done.failed) for done in rounds] == [bool(done.failed) for done in expected]
    assert stops == stopped
    assert len(found) == len(models) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, models, strict=True))
    for tried in (engine.server, engine.client):
        # A test of changes that nobody can read, or that nobody refuses, would show little.
        assert tried.total >= 3 * times
        assert tried.refused > 0
        assert tried.unread > 0


@pytest.mark.parametrize("seeds", [4, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_that_lies_whenever_it_is_believed_costs_rounds_and_not_the_run(variant: str, seeds: int) -> None:
    """Changed replies that are taken (numbers of any size, wrong shares, wrong keys): rounds fail or bring a model."""
    given, sent = VARIANTS[variant], 0
    if given["name"] in ("paraaegis", "serial", "ckks-fedavg"):
        pytest.importorskip("tenseal")
    for seed in range(seeds):
        one = small(**given)
        engine = Lying(one, Mutator(seed), liar=2, absent=missing_once)
        rounds, stops, _ = driven(one, engine)
        assert len(rounds) == 3 or stops
        sent += engine.sent
    assert sent > 0
