"""Many clients in one process: what a client's round takes does not grow with the others, and sums stay exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from federation import distance, job, same_bits, trained
from fedveil.crypto import keys
from fedveil.protocol.messages import Request, Train
from fedveil.uplink import grid, noise_plan

NADP = {"scheme": "nadp", "neighbours": 7, "loss": "cross-entropy"}
MASKS = {"scheme": "veil-secagg", "neighbours": 8, "head_noise": False, "min_coverage": 0.0}
SMALL = {"depth": 1}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everybody shares noise with everybody up to 16 clients only: thousands would take too long here."""
    monkeypatch.setattr(noise_plan, "COMPLETE_UP_TO", 16)
    yield
    noise_plan._noise_layout.cache_clear()
    noise_plan.noise_graph.cache_clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often keys are agreed on, signatures looked at and noise drawn."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counting(*args: Any, **given: Any) -> Any:
            calls[name] += 1
            return real(*args, **given)

        monkeypatch.setattr(owner, name, counting)

    count(keys.RunKey, "agree")
    count(keys, "check_key_signature")
    count(keys, "signed_by")
    count(grid, "add_discrete_gaussian")
    return calls


@pytest.mark.parametrize(
    ("settings", "agreed", "drawn", "signed"),
    [pytest.param(NADP, 14, 15, 0, id="nadp"), pytest.param(MASKS, 16, 0, 1, id="veil-secagg")],
)
def test_a_clients_round_takes_as_much_however_many_there_are(
    settings: dict[str, Any], agreed: int, drawn: int, signed: int, counted: Counter[str]
) -> None:
    for clients in (40, 80):
        counted.clear()
        trained(job(options=SMALL, clients=clients, rounds=1, **settings))
        assert counted["agree"] == agreed * clients
        assert counted["add_discrete_gaussian"] == drawn * clients
        assert counted["check_key_signature"] <= 2 * clients  # by the server, and once for the one directory
        assert counted["signed_by"] == signed * clients


def some_drop_out(request: Request, client: int) -> bool:
    return isinstance(request, Train) and client % 30 == request.round


def test_pair_noise_on_a_circle_cancels_to_the_last_bit_whoever_drops_out() -> None:
    told = {**NADP, "neighbours": None, "honest_arrivals": True, "rounds": 2, "clients": 60, "options": SMALL}
    whole, rounds = trained(job(**told), absent=some_drop_out)
    without, _ = trained(job(skip_cancelling=True, **told), absent=some_drop_out)
    assert [(len(done.gathered.arrived), done.failed) for done in rounds] == [(58, "")] * 2
    assert same_bits(whole.weights.parameters, without.weights.parameters)


def test_masks_of_few_neighbours_leave_the_sum_of_whoever_arrived() -> None:
    told = {"clients": 60, "rounds": 2, "head_noise": False, "min_coverage": 0.0, "options": SMALL}
    fresh = job(scheme="lossless", **told)
    bare, _ = trained(fresh, absent=some_drop_out)
    masked, rounds = trained(job(scheme="veil-secagg", neighbours=12, **told), absent=some_drop_out)
    assert [(len(done.gathered.arrived), done.failed) for done in rounds] == [(58, "")] * 2
    assert distance(masked.weights.parameters, bare.weights.parameters) < 1e-9
    assert not torch.equal(bare.weights.parameters, fresh.weights.parameters)
