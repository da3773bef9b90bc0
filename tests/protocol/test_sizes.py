"""Sizes are claims: what one client says of itself must not cost another its privacy, nor the run its model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from driving import drive
from federation import job, relay_of, same_bits, server_of, trained
from fedveil.engine import ClientPool, LocalEngine
from fedveil.errors import Code, ConfigError, ProtocolError
from fedveil.ledger.accountant import CLIENTS, COLLUSION, SERVER, Accountant
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Announce, Cohort, Directory, Epoch, Hello
from fedveil.protocol.key_agreement import Introductions
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import RoundContext
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, server_role, train_job
from fedveil.uplink.noise_plan import NoisePlan, Target
from fedveil.work.messages import ClientData
from pairs import crossed

DELTA = 1e-5
MILLION = 10**6
SHARED: dict[str, dict[str, Any]] = {
    "nadp": {"scheme": "nadp"},
    "nadp, tolerant": {"scheme": "nadp", "dropouts": "tolerate"},
    "nadp, sparse": {"scheme": "nadp", "neighbours": 5},
    "nadp, updates": {"scheme": "nadp", "local_steps": 2},
    "veil-dp": {"scheme": "veil-dp"},
    "veil-dp, masks": {"scheme": "veil-dp", "cover": "masks"},
}


@dataclass(frozen=True, eq=False)
class Boaster(ClientData):
    """A client that claims to have more samples than it has, and contributes as if it had."""

    claimed: int = MILLION

    def __len__(self) -> int:
        return self.claimed

    def take(self, chosen: Tensor, *, step: int = 0) -> tuple[Tensor, Tensor]:
        everything = torch.arange(len(self.y)) if self.rows is None else self.rows
        return self.x[everything], self.y[everything]


def boasted(one: Job, boasters: tuple[int, ...], claimed: int = MILLION) -> Job:
    clients = [
        Boaster(data.client, data.x, data.y, data.rows, claimed=claimed) if data.client in boasters else data
        for data in one.pool.clients
    ]
    return replace(one, pool=ClientPool(clients))


@pytest.fixture
def one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph in every run, where what is compared is something else."""
    monkeypatch.setattr(RoundContext, "graph_seed", lambda context: bytes(32))


def covariance(noise_layout: NoiseLayout, honest: list[int]) -> np.ndarray:
    """Σ of the honest members' uploads, dense, once everybody else's noise is known or missing."""
    sigma = np.diag(noise_layout.residual)
    for i, j, pair in zip(noise_layout.first, noise_layout.second, noise_layout.pairs, strict=True):
        if i in honest and j in honest:
            sigma[[i, j], [i, j]] += pair
            sigma[[i, j], [j, i]] -= pair
    return sigma[np.ix_(honest, honest)]


def seen(noise_layout: NoiseLayout, dishonest: tuple[int, ...], *, uploads: bool = True) -> np.ndarray:
    """μ² of every honest member (0 for the others) against whoever knows the noise of `dishonest` positions.

    They see the uploads, or the sum alone; under masks, the smallest sum that can be opened.
    """
    honest = [place for place in range(len(noise_layout.members)) if place not in dishonest]
    result = np.zeros(len(noise_layout.members))
    if uploads and not noise_layout.summed:
        result[honest] = np.diag(np.linalg.inv(covariance(noise_layout, honest)))
    else:
        for place in honest:
            others = sorted(noise_layout.residual[one] for one in honest if one != place)
            left = others[: len(others) - (noise_layout.removable if uploads else 0)]
            result[place] = 1 / (noise_layout.residual[place] + sum(left))
    return result * noise_layout.sensitivity**2


@pytest.mark.parametrize(("name", "boasters"), crossed(list(SHARED), {"one": (3,), "two": (3, 7)}))
def test_who_claims_a_million_samples_and_adds_no_noise_gains_what_the_ledger_says(
    name: str, boasters: tuple[int, ...]
) -> None:
    """When noise was shared by size, two of ten brought the others from ε = 3 to 1,274."""
    share = 0.2 if len(boasters) > 1 else 0.0
    given = {"clients": 10, "rounds": 1, "loss": None, "epsilon": 3.0, "collusion": share, "max_size_ratio": 1e9}
    one = boasted(job(**given, **SHARED[name]), boasters)
    state = fresh_state(one)
    engine = LocalEngine(client_role(one), one.pool)
    privacy_journal = train_job(one, state=state).privacy_journal
    assert privacy_journal.first is not None
    left = epsilon_of(math.sqrt(float(seen(privacy_journal.first, boasters).max())), DELTA)
    assert left <= privacy_journal.ledger().line(COLLUSION).epsilon * (1 + 1e-9)  # type: ignore[operator]
    assert privacy_journal.ledger().line(COLLUSION).epsilon == pytest.approx(3.0, rel=1e-2)
    # What each client counts for itself covers it too.
    drive(engine, server_of(one).run(), on_round=lambda done: None)
    for data in one.pool.clients:
        if data.client not in boasters:
            mine = seen(privacy_journal.first, boasters)[data.client]
            assert engine.state_of(data.client).spent >= mine * (1 - 1e-9)


@pytest.mark.parametrize("name", SHARED)
def test_no_claim_makes_the_noise_of_others_smaller(name: str, one_graph: None) -> None:
    """The noise of clients that are all honest, and that of the same clients beside one that claims a million."""
    one = job(clients=10, rounds=1, loss=None, max_size_ratio=1e9, **SHARED[name])
    modest, bold = (
        train_job(each, state=fresh_state(each)).privacy_journal.first for each in (one, boasted(one, (3,)))
    )
    assert modest is not None
    assert bold is not None
    assert (bold.residual >= modest.residual * (1 - 1e-9)).all()
    assert (bold.pairs >= modest.pairs * (1 - 1e-9)).all()


def test_the_papers_shares_go_by_claims_and_the_ledger_says_so() -> None:
    one = boasted(job(scheme="nadp", clients=10, rounds=2, loss=None, accounting="paper", max_size_ratio=1e9), (3,))
    ledger = train_job(one, state=fresh_state(one)).privacy_journal.ledger()
    assert any("claims much and adds none" in text for text in ledger.line(SERVER).assumptions)
    assert ledger.line(COLLUSION).epsilon > 100 * ledger.line(SERVER).epsilon  # type: ignore[operator]


def test_one_dishonest_client_costs_hardly_any_noise_that_another_clients_view_would_not() -> None:
    """What the sum must keep against one curious client nearly is what uploads need against one that tells."""
    target = Target(3.0, DELTA, 10, 10)
    for clients in (3, 10, 100):
        found = NoisePlan(target, "pairs").noise_layout(range(clients), [600] * clients, [2.0] * clients, seed=b"")
        curious = clients / (clients - 1) * 4.0 / target.per_round()
        assert 1 <= float(found.residual.sum()) / curious < 1.012


# --- property: nobody within `collusion` sees more than the ledger and the client's policy have charged


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(10, 1000), min_size=3, max_size=8),
    layout=st.sampled_from(["pairs", "sparse", "tolerant", "masks"]),
    reach=st.sampled_from(["record", "batch", "client"]),
    collusion=st.sampled_from([0.0, 0.1, 0.3, 0.5]),
    accounting=st.sampled_from(["exact", "paper"]),
)
def test_no_set_of_dishonest_clients_sees_more_than_was_charged(
    sizes: list[int], layout: str, reach: str, collusion: float, accounting: Any
) -> None:
    target = Target(2.0, DELTA, 5, 5)
    plan = NoisePlan(
        target,
        "sum" if layout == "masks" else "pairs",
        accounting,
        collusion=collusion,
        neighbours=3 if layout == "sparse" else None,
        tolerant=layout == "tolerant",
        quorum=2 / 3 if layout == "masks" else None,
    )
    far = {"record": lambda n: 2.0, "batch": lambda n: 2.0 * n / min(n, 16), "client": lambda n: 2.0 * n}[reach]
    count = len(sizes)
    try:
        noise_layout = plan.noise_layout(range(count), sizes, [far(one) for one in sizes], seed=bytes(32))
    except ConfigError:  # so many colluders that a sum of one honest client could be opened
        assert layout in ("masks", "sparse")
        return
    accountant = Accountant(count, collusion=collusion, least=plan.least_dishonest)
    prices = accountant.prices(noise_layout)
    dishonest = plan.colluders(count)
    assert dishonest == accountant.dishonest(count) >= 1
    own = [Policy().charged(noise_layout, client=one, spent=0.0, colluders=dishonest) for one in range(count)]
    for chosen in combinations(range(count), dishonest):
        by_server, by_clients = seen(noise_layout, chosen), seen(noise_layout, chosen, uploads=False)
        assert (by_server <= prices[COLLUSION] * (1 + 1e-6)).all()
        assert (by_clients <= prices[CLIENTS] * (1 + 1e-9)).all()
        assert (np.maximum(by_server, by_clients) <= np.array(own) * (1 + 1e-6)).all()
        if accounting == "exact":
            assert 5 * by_server.max() <= target.mu**2 * (1 + 1e-6)


@pytest.mark.parametrize("neighbours", [None, 5], ids=["complete", "sparse"])
def test_a_policy_counts_dishonest_clients_that_the_run_does_not(neighbours: int | None, one_graph: None) -> None:
    """Its limit holds although three of ten cheat; the run, which counts one, would have let them."""
    given = {"scheme": "nadp", "clients": 10, "rounds": 1, "loss": None, "epsilon": 2.0, "honest_arrivals": True}
    one = job(**given, neighbours=neighbours)
    noise_layout = train_job(one, state=fresh_state(one)).privacy_journal.first
    assert noise_layout is not None
    worst = max(float(seen(noise_layout, three)[0]) for three in combinations(range(1, 10), 3))
    for share in (0.0, 0.3):
        for limit in (100.0, 2.0):
            policy = Policy(max_epsilon=limit, collusion=share)
            # The same keys, and with them the same graph, every time.
            secrets = one.secrets.branch("clients")  # type: ignore[attr-defined]
            role = ClientRole(one.scheme, one.architecture, policy=policy, secrets=secrets)
            engine = LocalEngine(role, one.pool)
            boundaries: list[Any] = []
            drive(engine, server_of(one).run(), on_round=boundaries.append)
            refused = boundaries[0].gathered.refused
            ended = [client for client, why in refused.items() if why.code is Code.ENDED]
            assert (0 in ended) == (share > 0 and limit == 2.0)
            if not refused:
                assert (engine.state_of(0).spent >= worst * (1 - 1e-9)) == (share > 0)


# --- claims out of proportion


def test_a_claim_out_of_proportion_is_left_out_by_name_and_the_run_goes_on() -> None:
    one = boasted(job(scheme="nadp", clients=10, rounds=2, loss=None), (3,))
    said: list[str] = []
    found = train_job(one, state=fresh_state(one), say=said.append)
    assert [row["clients"] for row in found.rows] == [9, 9]
    assert said == [
        "Client 3 took no part: it claims 1,000,000 samples, more than 100 times the median of 30 (max_size_ratio)."
    ]


@pytest.mark.parametrize(("liars", "left_out"), [(1, []), (4, []), (5, [0, 1, 2, 3, 4])])
def test_only_half_of_all_clients_can_have_others_left_out(liars: int, left_out: list[int]) -> None:
    """Who claims one sample pulls the median down; while honest clients compare, fewer than half leave nobody out."""
    empty = torch.empty(0, dtype=torch.uint8)
    sizes = [200, 250, 300, 400, 900, *([1] * liars)]
    announced = [Announce(k, count, empty, empty, empty, empty) for k, count in enumerate(sizes)]
    directory = Directory.of("run", announced, Epoch(0, 0, 1, len(sizes), len(sizes), 0))
    assert sorted(directory.outsized(100.0)) == left_out


def test_a_run_in_which_nobody_compares_says_why_it_cannot_start() -> None:
    one = boasted(job(scheme="nadp", clients=2, rounds=1, loss=None), (1,))
    with pytest.raises(ProtocolError, match=r"client 1: claims 1,000,000 samples, more than 100 times the median"):
        train_job(one, state=fresh_state(one))


@pytest.mark.parametrize("scheme", ["nadp", "ldp", "veil-secagg", "cdp"])
def test_a_client_refuses_a_round_with_a_claim_that_its_policy_finds_too_large(scheme: str) -> None:
    """The server allows what the client does not: no message widens a policy."""
    one = boasted(job(scheme=scheme, clients=5, rounds=1, loss=None, max_size_ratio=1e9), (3,), claimed=700)
    for ratio, refuses in ((10.0, True), (12.0, False)):
        role = ClientRole(one.scheme, one.architecture, policy=Policy(max_size_ratio=ratio))
        boundaries: list[Any] = []
        drive(LocalEngine(role, one.pool), server_of(one).run(), on_round=boundaries.append)
        refused = boundaries[0].gathered.refused
        assert (len(refused) == 5) == refuses
        assert all(
            "takes part in no round with client 3, which claims 700 samples" in why.text for why in refused.values()
        )


def test_a_policy_on_sizes_needs_clients_that_know_of_each_other() -> None:
    one = job(scheme="fedavg", rounds=1, loss=None)
    with pytest.raises(ConfigError, match="drop max_size_ratio from the policy"):
        ClientRole(one.scheme, one.architecture, policy=Policy(max_size_ratio=10.0))


@pytest.mark.parametrize("ratio", [0.5, math.nan, -1.0])
def test_a_ratio_below_one_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="max_size_ratio must be"):
        job(scheme="nadp", max_size_ratio=ratio)
    with pytest.raises(ConfigError, match="max_size_ratio must be"):
        Policy(max_size_ratio=ratio)


# --- held to what was announced


class Weighty(ClientRole):
    """Clients of which one says in its upload that it has a million samples, after announcing what it has."""

    def _protect(self, state: ClientState, vector: Tensor, context: RoundContext) -> tuple[ClientState, Reply]:
        if state.client == 3:
            vector = vector.clone()
            vector[-1] = MILLION
        return super()._protect(state, vector, context)


@pytest.mark.parametrize("name", ["nadp", "ldp", "cdp", "veil-dp", "veil-dp, masks", "veil-secagg", "mpdp"])
def test_a_weight_other_than_the_announced_size_changes_nothing(name: str) -> None:
    """When weights came from uploads, one number of one client stopped the model from moving, also under masks."""
    given = SHARED.get(name, {"scheme": name})
    loss = None if name not in ("veil-secagg", "mpdp") else "square"
    one = job(clients=5, rounds=2, loss=loss, **given)
    secrets = one.secrets.branch("clients")  # type: ignore[attr-defined]
    honest, _ = trained(one)
    tampered, boundaries = trained(one, role=Weighty(one.scheme, one.architecture, secrets=secrets))
    assert all(not done.failed for done in boundaries)
    assert same_bits(tampered.weights.parameters, honest.weights.parameters)


class Inflating(ClientRole):
    """Clients of which one sends numbers that no clipped gradient has."""

    def _protect(self, state: ClientState, vector: Tensor, context: RoundContext) -> tuple[ClientState, Reply]:
        if state.client == 3:
            vector = torch.full_like(vector, 2.0**35)
        return super()._protect(state, vector, context)


def test_a_trusted_server_takes_no_upload_that_is_longer_than_clipping_leaves_any() -> None:
    """A sum is a float64 before it is whole steps: beside 2³⁵ the others' part of it was rounded to 2⁻¹⁸."""
    one = job(scheme="cdp", clients=5, rounds=1, loss=None)
    boundaries: list[Any] = []
    drive(
        LocalEngine(Inflating(one.scheme, one.architecture), one.pool), server_of(one).run(), on_round=boundaries.append
    )
    assert sorted(boundaries[0].gathered.arrived) == [0, 1, 2, 4]
    assert not boundaries[0].failed


@dataclass(eq=False)
class Growing:
    """A client role whose client 3 has ten times as many samples once it has announced how many it has."""

    role: Any

    def handle_many(self, states: Any, request: Request, clients: Any, private: Any = None, **more: Any) -> Any:
        if not isinstance(request, (Hello, Directory)):
            clients = [_tenfold(one) if one.client == 3 else one for one in clients]
        return self.role.handle_many(states, request, clients, private, **more)


def _tenfold(data: ClientData) -> ClientData:
    x, y = data.take(torch.arange(len(data)))
    return ClientData(data.client, x.repeat(10, *[1] * (x.dim() - 1)), y.repeat(10, *[1] * (y.dim() - 1)))


@pytest.mark.parametrize("name", ["ldp", "nadp", "veil-dp", "veil-dp, masks", "dp-fedavg", "veil-secagg", "paraaegis"])
def test_a_client_whose_data_have_grown_since_it_announced_them_sends_nothing(name: str) -> None:
    """Its noise would be made for the size it has announced, its batches' weight for the one it has: ε times ten."""
    given = SHARED.get(name, {"scheme": name})
    loss = "square" if name == "veil-secagg" else None
    one = job(clients=5, rounds=1, batch_size=5, loss=loss, **given)
    start = relay_of if one.scheme.holder == "clients" else server_of
    boundaries: list[Any] = []
    drive(LocalEngine(Growing(client_role(one)), one.pool), start(one).run(), on_round=boundaries.append)  # type: ignore[arg-type]
    assert list(boundaries[0].gathered.refused) == [3]
    assert "has other data than when it announced" in boundaries[0].gathered.refused[3].text


def test_a_client_is_held_to_what_it_announced_in_an_earlier_attempt_of_the_run() -> None:
    one = job(scheme="nadp", clients=5, rounds=1, loss=None)
    before = {data.client: len(data) for data in one.pool.clients} | {3: 61}
    server = server_role(one, fresh_state(one), announced=before)
    boundaries: list[Any] = []
    drive(LocalEngine(client_role(one), one.pool), server.run(), on_round=boundaries.append)
    assert sorted(boundaries[0].gathered.arrived) == [0, 1, 2, 4]


def test_the_word_for_it_names_both_sizes() -> None:
    one = job(scheme="ldp", clients=2, rounds=1, loss=None)
    known = Introductions("sizes", "run", cohort=Cohort(2, 2, 0), rounds=1, earlier={0: 61})
    steps = known.steps(0)
    ask = next(steps)
    role, data = client_role(one), one.pool.clients[0]
    assert isinstance(role, ClientRole)
    _, reply = role.handle(ClientState(0), ask.common, data)
    with pytest.raises(ProtocolError, match="announces 150 samples that announced 61 earlier in this run"):
        ask.into.add(reply)
