"""Does the ledger tell the truth? A distinguishing game, played against the clients' own code.

Two data sets differ in one record of client 0: the record's clipped gradient is +C·v in one and −C·v in the other.
In every game the adversary sees what it would see in a run, knows everything but the noise that is hidden from it,
and computes the likelihood ratio of its whole view. Its scores have two normal laws, μ apart in units of their
deviation, and the ledger says how large μ is.

μ is estimated by the difference of the means over the pooled deviation d, with the 99 % interval
d ± 2.576·√(1/n₀ + 1/n₁ + d²/(2·(n₀ + n₁))): an honest ledger fails each test that asks whether μ lies in it with
probability 0.01, for a new seed; the seeds are fixed. Noise a third too small makes d half as large again: six
deviations of d away with FEW games, so that they miss it with probability 5e-4, and more than seven with GAMES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedveil.config import RunConfig
from fedveil.downlink import Broadcast
from fedveil.engine import ClientPool
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import WINDOW, Directory, Hello, Nonce
from fedveil.protocol.messages import Request, Train, Upload
from fedveil.protocol.parts import RoundContext, planned
from fedveil.protocol.phases import Gathered, RoundBegins, RoundDone
from fedveil.runs.job import Job, ModelFacts, assemble_job
from fedveil.runs.loop import client_role
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.uplink import noised as grid_module
from fedveil.uplink import noised as noised_module
from fedveil.uplink.grid import ROUNDING, add_noise
from fedveil.uplink.noised import add_residual, add_shared, gridded, pair_seed
from fedveil.work.messages import ClientData, Workspace
from uplink.masking import epoch_of, nonces_of

INPUTS, RECORDS, CLIENTS, CLIP = 4, 6, 4, 1.0
EPSILON = epsilon_of(1.5, 1e-5)
FEW, GAMES, MANY = 400, 640, 20_000
Z99 = 2.5758


def worlds(clients: int) -> tuple[list[ClientData], ClientData]:
    """Everybody's data, and client 0's with the canary the other way round."""
    random = torch.Generator().manual_seed(3)
    pairs = [
        (
            torch.randn(RECORDS, INPUTS, generator=random, dtype=torch.float64),
            torch.randn(RECORDS, 1, generator=random, dtype=torch.float64),
        )
        for _ in range(clients)
    ]
    x, y = pairs[0]
    # So large a target that the gradient is ∓target × the network's own, and clipped in both data sets.
    y[0] = 1e7
    other = y.clone()
    other[0] = -1e7
    return [ClientData(k, *pair) for k, pair in enumerate(pairs)], ClientData(0, x, other)


def job_of(scheme: str, rounds: int, clients: int = CLIENTS, **settings: Any) -> Job:
    """A small network on clipped regression gradients, with simulated secrets from a fixed seed."""
    given = {"scheme": scheme, "dtype": "float64", "loss": "square", "seed": 11, "clip": CLIP, "epsilon": EPSILON}
    config = RunConfig.from_mapping({**given, "rounds": rounds, "clients": clients, **settings}, where="test")
    random = torch.Generator().manual_seed(5)
    net = nn.Sequential(nn.Linear(INPUTS, 6), nn.ReLU(), nn.Linear(6, 1))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5, generator=random)
    facts = ModelFacts("custom", {}, (INPUTS,), 1, "regression")
    one = assemble_job(config, net, ClientPool(tuple(worlds(clients)[0])), None, facts)
    return replace(one, scheme=replace(one.scheme, work=Remembered(one.scheme.work)))


class Remembered:
    """The scheme's local work, done once for each model and client: only noise is new in every game."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done: dict[tuple[int, int], tuple[Broadcast, ClientData, Tensor]] = {}
        self.returns, self.unit, self.clip, self.largest = work.returns, work.unit, work.clip, work.largest
        self.sensitivity, self.layout, self.reports = work.sensitivity, work.layout, work.reports

    def run(self, workspace: Workspace, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        key = (id(broadcast), id(data))  # both are kept, so that no other object takes their place
        if key not in self._done:
            self._done[key] = (broadcast, data, self._work.run(workspace, broadcast, data, round=round))
        return self._done[key][2]

    def run_many(
        self, workspace: Workspace, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor]]:
        for position, data in enumerate(clients):
            yield position, self.run(workspace, broadcast, data, round=round)


@dataclass(frozen=True, eq=False)
class Seen:
    """One round, as whoever knows all data and all models sees it: noise (and canary), and what is known of it."""

    residue: dict[int, Tensor]
    shift: Tensor
    noise_layout: NoiseLayout
    context: RoundContext
    states: Sequence[ClientState]
    step: float


View = Callable[[Seen], tuple[float, float]]
"""The likelihood ratio's exponent of one round's view, and its variance: ⟨Σ⁻¹·view, shift⟩ and ⟨Σ⁻¹·shift, shift⟩."""


class Table:
    """Where games are played: clients with keys, and a round number that never repeats."""

    def __init__(self, one: Job) -> None:
        self.job = one
        # Games are not rounds of one run: no client keeps count of them.
        self.role = client_role(one)
        self.role._policy = Policy()  # a game has more rounds than a run would pay for
        self.role._schedule = None  # or than its settings name
        self.honest, self.canary = worlds(len(one.pool))
        self.states = [ClientState(data.client) for data in self.honest]
        self.workspace = Workspace(one.architecture, one.scheme.layout(one.architecture))
        self.cohort = tuple(range(len(self.honest)))
        self.ratios: list[float] = []
        self.round = 0
        self.enter()
        self.broadcast = self.veiled()

    def enter(self) -> None:
        """The next epoch of a run of a great many rounds."""
        epoch = epoch_of(len(self.honest), rounds=1 << 20, number=self.round // WINDOW, first=self.round)
        announced = self.told(Hello("games", epoch))
        self.directory = Directory.of("games", announced, epoch)
        shown = self.told(self.directory)
        if isinstance(shown[0], Nonce):
            self.told(nonces_of(self.directory, shown))
        self.beacon = self.states[0].ring().beacon

    def told(self, request: Request) -> list[Any]:
        replies = []
        for k, data in enumerate(self.honest):
            self.states[k], reply = self.role.handle(self.states[k], request, data)
            replies.append(reply)
        return replies

    def veiled(self) -> Broadcast:
        """The model as clients see it; the server knows what it hid."""
        one = self.job
        stream = one.secrets.stream("veil", self.round)
        return one.scheme.downlink.veil(one.architecture, one.weights, stream=stream, head_level=None).broadcast()

    def play(self, changed: bool) -> Seen:
        """One round in one of the two worlds."""
        one, number = self.job, self.round
        if number not in self.directory.epoch:
            self.enter()
        self.round += 1
        if one.scheme.downlink.traced and number % 20 == 19:
            self.broadcast = self.veiled()
        train = Train(number, 0, self.broadcast, torch.tensor(self.cohort))
        data = [self.canary if changed and k == 0 else own for k, own in enumerate(self.honest)]
        sent = {}
        for state, reply in self.role.handle_many(self.states, train, data):
            assert isinstance(reply, Upload), reply
            self.states[state.client] = state
            sent[state.client] = reply.payload
        work = one.scheme.work
        bare = [work.run(self.workspace, train.broadcast, own, round=number) for own in (*self.honest, self.canary)]
        shift = (bare[-1] - bare[0])[:-1]
        context = RoundContext(number, 0, self.cohort, self.directory, self.beacon)
        plan = one.scheme.uplink.plan
        assert plan is not None
        noise_layout = planned(plan, context, one.scheme.work)
        self.ratios.append(float(shift.norm() / noise_layout.sensitivity[0]))
        codec = gridded(plan, context, one.scheme.terms(one.architecture))
        residue = {k: sent[k].double()[:-1] * codec.step - bare[k][:-1] for k in sent}
        return Seen(residue, shift, noise_layout, context, tuple(self.states), codec.step)


def sigma_of(noise_layout: NoiseLayout, left_out: set[frozenset[int]]) -> np.ndarray:
    """Σ over all members, without the pairs whose noise is known."""
    sigma = np.diag(noise_layout.residual)
    for i, j, pair in zip(noise_layout.first.tolist(), noise_layout.second.tolist(), noise_layout.pairs, strict=True):
        if frozenset((i, j)) not in left_out:
            sigma[[i, j], [i, j]] += pair
            sigma[[i, j], [j, i]] -= pair
    return sigma


def shared_noise(seen: Seen, one: int, other: int, by: int) -> Tensor:
    """What `one` added for the sake of `other`, by the keys of `by`, who is one of them."""
    seed = pair_seed(seen.states[by], one if by == other else other, seen.context)
    variance = dict(seen.noise_layout.partners(seen.noise_layout.members[one]))[other]
    words = np.zeros(len(seen.shift), dtype=np.uint64)
    add_shared(words, seed, client=one, peer=other, variance=variance, step=seen.step)
    return torch.from_numpy(words.view(np.int64)).double() * seen.step


def server(seen: Seen, *, colluding: Sequence[int] = (), late: bool = False) -> tuple[float, float]:
    """Sees all uploads; colluders tell it their noise, and with `late` all of client 0's pairs were revealed."""
    honest = [k for k in seen.residue if k not in colluding]
    informers = {k: k for k in colluding} | ({k: k for k in honest if k != 0} if late else {})
    left_out = {frozenset((i, j)) for i in colluding for j in seen.residue if i != j}
    if late:
        left_out |= {frozenset((0, k)) for k in honest if k != 0}
    view = {k: seen.residue[k].clone() for k in honest}
    for pair in left_out:
        for one in pair & set(honest):
            (other,) = pair - {one}
            by = other if other in informers else one
            view[one] -= shared_noise(seen, one, other, by)
    inverse = np.linalg.inv(sigma_of(seen.noise_layout, left_out)[np.ix_(honest, honest)])
    score = sum(inverse[0, at] * float(view[k] @ seen.shift) for at, k in enumerate(honest))
    return score, float(inverse[0, 0]) * float(seen.shift @ seen.shift)


def one_upload(seen: Seen) -> tuple[float, float]:
    """Looks at client 0's upload alone, and hopes that there is no pair noise on it."""
    variance = float(seen.noise_layout.residual[0])
    return float(seen.residue[0] @ seen.shift) / variance, float(seen.shift @ seen.shift) / variance


def another_client(seen: Seen, *, one: Job) -> tuple[float, float]:
    """Client 1 sees the sum and knows its own residual noise."""
    words = np.zeros(len(seen.shift), dtype=np.uint64)
    secrets, plan = one.secrets.branch("clients"), one.scheme.uplink.plan  # type: ignore[attr-defined]
    assert plan is not None
    add_residual(words, 1, plan, seen.context, one.scheme.terms(one.architecture), secrets=secrets)
    own = torch.from_numpy(words.view(np.int64)).double() * seen.step
    total = torch.stack(list(seen.residue.values())).sum(0) - own
    variance = float(seen.noise_layout.residual.sum() - seen.noise_layout.residual[1])
    return float(total @ seen.shift) / variance, float(seen.shift @ seen.shift) / variance


@dataclass(frozen=True)
class Estimate:
    """μ with its 99 % interval, and how much of the sensitivity the canary uses."""

    mu: float
    low: float
    high: float
    ratio: float


def played(one: Job, *views: View, games: int, rounds: int) -> list[Estimate]:
    """Half of the games in each world; a game is as many rounds as the run has. Every view is of the same games."""
    table = Table(one)
    scores: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(games):
        changed = number % 2 == 1
        seen = [table.play(changed) for _ in range(rounds)]
        # Normal with variance 1 if the noise is as promised, whatever each round's shift.
        scores[changed].append([_score([view(each) for each in seen]) for view in views])
    zeros, others = (np.array(scores[world]).T for world in (False, True))
    return [_estimate(zero, other, min(table.ratios)) for zero, other in zip(zeros, others, strict=True)]


def _score(viewed: Sequence[tuple[float, float]]) -> float:
    return sum(score for score, _ in viewed) / math.sqrt(sum(variance for _, variance in viewed))


def _estimate(zero: NDArray[np.float64], other: NDArray[np.float64], ratio: float) -> Estimate:
    pooled = math.sqrt((zero.var(ddof=1) + other.var(ddof=1)) / 2)
    mu = float(other.mean() - zero.mean()) / pooled
    margin = Z99 * math.sqrt(1 / len(zero) + 1 / len(other) + mu**2 / (2 * (len(zero) + len(other))))
    return Estimate(mu, mu - margin, mu + margin, ratio)


def ledger_mu(one: Job, adversary: str, *, rounds: int, late: bool = False) -> float:
    """What the ledger says after a run of `rounds`; with `late`, client 0 was repaired for in each."""
    privacy_journal = PrivacyJournal(one)
    cohort = tuple(range(len(one.pool)))
    revealed = tuple((0, k) for k in cohort[1:]) if late else ()
    arrived = cohort[1:] if late else cohort
    for number in range(rounds):
        privacy_journal.begin(RoundBegins(number, 0, cohort))
        gathered = Gathered(arrived, {}, (), 0, 0)
        privacy_journal.end(RoundDone(number, None, cohort, gathered, revealed=revealed))
    mu = privacy_journal.ledger().line(adversary).mu
    assert mu is not None
    return mu


def check_contains(found: Estimate, mu: float) -> None:
    assert 0.95 <= found.ratio <= 1 + 1e-9
    assert found.low < mu * found.ratio < found.high, (found, mu)


SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ldp": ("ldp", 1, {}),
    "nadp": ("nadp", 2, {}),
    "nadp, weak pairs": ("nadp", 1, {"pair_strength": 1.0}),
    "veil-dp": ("veil-dp", 1, {"cover": "noise", "spread": 4.0}),
}


def check_server(name: str, games: int) -> Estimate:
    scheme, rounds, settings = SETTINGS[name]
    one = job_of(scheme, rounds, **settings)
    mu = ledger_mu(one, "server", rounds=rounds)
    assert 1.0 < mu < 2.0
    (found,) = played(one, server, games=games, rounds=rounds)
    check_contains(found, mu)
    return found


@pytest.mark.parametrize("name", ["ldp", "veil-dp"])
def test_a_server_that_knows_all_but_the_noise_gains_what_the_ledger_says(name: str) -> None:
    """False-alarm rate 0.01. Under a veil the server knows its scales, new ones every twenty games."""
    check_server(name, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_with_many_games(name: str) -> None:
    """False-alarm rate 0.01; the interval is a few per cent wide."""
    found = check_server(name, MANY)
    assert found.high - found.low < 0.1


def less_noise(monkeypatch: pytest.MonkeyPatch, *, residual: float, pairs: float) -> None:
    share = [residual]

    def shared(words: NDArray[np.uint64], seed: bytes, **rest: Any) -> None:
        share[0] = pairs
        add_shared(words, seed, **rest)
        share[0] = residual

    def drawn(words: NDArray[np.uint64], *, variance: float, **rest: Any) -> None:
        add_noise(words, variance=share[0] ** 2 * variance, **rest)

    monkeypatch.setattr(noised_module, "add_shared", shared)
    monkeypatch.setattr(grid_module, "add_noise", drawn)


@pytest.mark.parametrize(
    ("name", "residual", "pairs", "view"),
    [
        ("ldp", 2 / 3, 1.0, server),
        pytest.param("nadp", 2 / 3, 2 / 3, server, marks=pytest.mark.slow),
        ("nadp", 2 / 3, 1.0, server),
        ("nadp", 1.0, 0.0, one_upload),
        pytest.param("veil-dp", 2 / 3, 2 / 3, server, marks=pytest.mark.slow),
    ],
    ids=["ldp", "nadp", "nadp, residual noise", "nadp, no pair noise", "veil-dp"],
)
def test_noise_that_is_secretly_too_small_is_found_out(
    name: str, residual: float, pairs: float, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval lies above the ledger's μ; missed with probability below 1e-6."""
    less_noise(monkeypatch, residual=residual, pairs=pairs)
    scheme, _, settings = SETTINGS[name]
    one = job_of(scheme, 1, **settings)
    (found,) = played(one, view, games=GAMES, rounds=1)
    assert found.low > ledger_mu(one, "server", rounds=1)


@pytest.mark.parametrize("scheme", ["nadp", pytest.param("veil-dp", marks=pytest.mark.slow)])
def test_colluders_gain_what_the_ledger_says(scheme: str) -> None:
    """Two of five tell the server their noise and their pairs'. False-alarm rate 0.01, and again for it alone."""
    one = job_of(scheme, 1, clients=5, collusion=0.4)
    mu, less = (ledger_mu(one, who, rounds=1) for who in ("server and colluding clients", "server"))
    assert 1.0 < less < 0.9 * mu < 2.0
    found, alone = played(one, lambda seen: server(seen, colluding=(2, 4)), server, games=FEW, rounds=1)
    check_contains(found, mu)
    check_contains(alone, less)


def test_views_of_nadp_gain_what_the_ledger_says() -> None:
    """Three adversaries look at the same games of two rounds. False-alarm rate 0.01 for each of them.

    The server sees uploads; or also a late one of a repaired client, for whose sake every other has revealed the noise
    it shared with it; or another client sees the sum, and takes its own noise out.
    """
    one = job_of("nadp", 2)
    mu, late, other = (
        ledger_mu(one, "server", rounds=2),
        ledger_mu(one, "server", rounds=2, late=True),
        ledger_mu(one, "clients", rounds=2),
    )
    assert 1.0 < mu < 2.0
    assert 1.5 * mu < late < 5.0
    assert 1.48 < other <= 1.5  # the server with one client on its side is the stricter line
    views = (server, lambda seen: server(seen, late=True), lambda seen: another_client(seen, one=one))
    for found, said in zip(played(one, *views, games=FEW, rounds=2), (mu, late, other), strict=True):
        check_contains(found, said)


def test_the_canary_moves_its_clients_upload_by_the_whole_sensitivity_and_no_others() -> None:
    table = Table(job_of("veil-dp", 1, cover="noise", spread=4.0))
    bare = [table.play(changed=False) for _ in range(3)]
    assert min(table.ratios) >= 0.99
    assert all(float(seen.noise_layout.sensitivity[0]) == 2 * CLIP * (1 + ROUNDING) for seen in bare)
