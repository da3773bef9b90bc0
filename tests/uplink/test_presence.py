"""A server that says of most clients that they are away, until its allies are many among those that are left.

Ten of a hundred surround nobody. Of twenty-four, all of them neighbours of each other, the same ten are enough to tell
two stories about anybody; and of eleven they need tell none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedveil.errors import ConfigError
from fedveil.ledger.accountant import COLLUSION, Accountant
from fedveil.ledger.policy import Policy
from fedveil.protocol.directory import Directory, Epoch, beacon, draws_of
from fedveil.protocol.parts import RoundContext
from fedveil.uplink import masked
from fedveil.uplink.graph import LEAST_BITS, surrounded_bits, withstood
from fedveil.uplink.masked import Masked
from fedveil.uplink.noise_plan import NoisePlan, Target, worst_of
from uplink.masking import nonces_of
from uplink.test_grinding import ALLIES, RUN, Grinder, surrounded, two_stories

VICTIM = 3


def among(server: Grinder, present: tuple[int, ...]) -> RoundContext:
    """Round 1 of an epoch from which all others are said to be away."""
    server.commit(server.epoch())
    server.directory = Directory.of(RUN, server.announced, server.epoch(), present)
    nonces = nonces_of(server.directory, [server.told(client, server.directory) for client in present])
    server.beacon = beacon(server.directory, nonces)
    for client in present:
        server.told(client, nonces)
    return server.context(0, present)


def read_among(server: Grinder, present: tuple[int, ...]) -> tuple[NDArray[np.uint64] | None, RoundContext]:
    """What two stories about the victim give."""
    context = among(server, present)
    train = server.train(context)
    uploads = {client: server.told(client, train) for client in present}
    return two_stories(server, context, server.uplink.graph(context), VICTIM, uploads), context


@pytest.mark.parametrize("honest", [1, 14, 17])
def test_clients_take_part_in_no_round_from_which_so_many_are_away_that_ten_allies_surround_them(honest: int) -> None:
    server = Grinder()
    present = (*range(VICTIM, VICTIM + honest), *ALLIES)
    context = among(server, present)
    with pytest.raises(ConfigError, match="Of the 100 clients that a round asks"):
        server.told(VICTIM, server.train(context))


def test_so_many_as_clients_ask_for_are_enough_for_two_stories_to_open_nothing() -> None:
    """One client fewer and the round is refused; with as many as this, ten allies are one too few."""
    server = Grinder()
    fewest = next(n for n in range(11, 100) if withstood(n, share=0.1, needed=server.uplink.quorum.of, asked=100))
    read, context = read_among(server, (*range(fewest - len(ALLIES)), *ALLIES))
    assert server.uplink.graph(context).degree(VICTIM) == fewest - 1
    assert read is None


def test_the_attack_still_reads_an_upload_where_clients_count_allies_of_those_present_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the tests above can fail."""
    monkeypatch.setattr(masked, "withstood", lambda *_, **__: True)
    server = Grinder()
    read, context = read_among(server, (*range(14), *ALLIES))
    assert read is not None
    assert np.array_equal(read, server.sent(VICTIM, context))


def drawn_among(server: Grinder, present: tuple[int, ...], *, epochs: int) -> Iterator[RoundContext]:
    """The rounds of so many epochs from which all but those present are said to be away."""
    cohort = server.job.cohort
    said = (cohort.clients, cohort.size, cohort.seed, cohort.shuffled, cohort.rate, cohort.least)
    for number in range(epochs):
        epoch = Epoch(number, 0, 100, *said)
        server.commit(epoch)
        server.directory = Directory.of(RUN, server.announced, epoch, present)
        nonces = nonces_of(server.directory, [server.told(client, server.directory) for client in present])
        server.beacon = beacon(server.directory, nonces)
        for round in range(epoch.window):
            yield server.context(round, server.directory.cohort(round, server.beacon))


@pytest.mark.parametrize("how", [{"sampling_rate": 0.5}, {"cohort": 50}])
def test_rounds_drawn_from_few_that_are_there_are_held_only_where_ten_of_all_surround_nobody(
    how: dict[str, Any],
) -> None:
    """With 16 honest clients left, ten allies surrounded one of them in a third of the rounds that were held."""
    for honest, some in ((16, False), (60, True)):
        server, held = Grinder(rounds=100, secrets="os", **how), 0
        assert any("surround nobody" in said for said in server.job.scheme.caveats.assumptions)
        for context in drawn_among(server, (*range(honest), *ALLIES), epochs=2):
            try:
                graph = server.uplink.graph(context)
            except ConfigError:
                continue
            held += 1
            assert surrounded(graph, server.uplink) is None
        assert (held > 0) is some


def test_ten_allies_surround_somebody_where_only_those_drawn_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above can fail. Sampled rounds of so few are not held at all: they are fewer than `least`."""
    monkeypatch.setattr(Masked, "check_round", lambda self, context: self.fits(len(context.cohort)))
    server = Grinder(rounds=100, secrets="os", cohort=50)
    contexts = (one for one in drawn_among(server, (*range(16), *ALLIES), epochs=8) if len(one.cohort) > 2)
    assert any(surrounded(server.uplink.graph(context), server.uplink) is not None for context in contexts)


@pytest.mark.parametrize(("given", "asked"), [(None, 100), (30, 100), (60, 200)])
def test_the_fewer_are_there_the_more_neighbours_they_have_so_that_the_chance_is_no_larger(
    given: int | None, asked: int
) -> None:
    masks, draws = Masked(degree=given), draws_of(100)
    facts: Any = {"share": masks.collusion, "needed": masks.quorum.of, "draws": draws}
    full = surrounded_bits(asked, of=asked, degree=masks.degree_of(asked, of=asked, draws=draws), **facts)
    for present in range(asked - 1, asked // 2, -17):
        degree = masks.degree_of(present, of=present, draws=draws, asked=asked)
        assert surrounded_bits(present, of=present, degree=degree, asked=asked, **facts) >= min(full, LEAST_BITS)
    whole = masks.degree_of(asked, of=asked, draws=draws)
    assert masks.degree_of(asked, of=asked, draws=draws, asked=asked) == whole


@pytest.mark.parametrize("layout", ["pairs", "sum"])
def test_shared_noise_counts_allies_of_all_that_are_asked_too(layout: Any) -> None:
    """Of eleven that are there, ten may be the allies among a hundred: counted as two, nadp's μ² was 8.9 times the
    target's."""
    target = Target(epsilon=4.0, delta=1e-5, rounds=50, participations=50)
    plan = NoisePlan(target, layout, collusion=0.1, asked=100)
    noise_layout = plan.noise_layout(range(11), (50,) * 11, (1.0,) * 11, seed=b"")
    assert worst_of(noise_layout, 10).max() <= target.per_round()
    careless = replace(plan, asked=None).noise_layout(range(11), (50,) * 11, (1.0,) * 11, seed=b"")
    assert worst_of(careless, 10).max() > 5 * target.per_round()


@pytest.mark.parametrize("layout", ["pairs", "sum"])
def test_ledger_and_policy_count_allies_of_all_that_are_asked_too(layout: Any) -> None:
    """What is charged for such a round is what ten colluders of the eleven really get, by noise made for fewer too."""
    target = Target(epsilon=4.0, delta=1e-5, rounds=50, participations=50)
    plan = NoisePlan(target, layout, collusion=0.1)
    noise_layout = plan.noise_layout(range(11), (50,) * 11, (1.0,) * 11, seed=b"")
    real = worst_of(noise_layout, 10).max()
    accountant = Accountant(100, collusion=0.1, least=1, asked=100)
    accountant.charge(noise_layout)
    assert accountant.spent[COLLUSION].max() >= real * (1 - 1e-9)
    cautious = Policy(collusion=0.1)
    charged = max(cautious.charged(noise_layout, client=k, spent=0.0, asked=100) for k in range(11))
    assert charged >= real * (1 - 1e-9)
    careless = Accountant(100, collusion=0.1, least=1)
    careless.charge(noise_layout)
    assert careless.spent[COLLUSION].max() < 0.9 * real  # so that the lines above can fail
