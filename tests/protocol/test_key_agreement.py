"""How a run begins: whatever is changed on the way is noticed, and by whom it was said is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from driving import drive
from federation import job, next_ask, same_bits, server_of, trained
from fedveil.crypto.keys import Roster
from fedveil.engine import LocalEngine
from fedveil.errors import ConfigError, ProtocolError
from fedveil.protocol import directory as epoch
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import (
    Announce,
    Directory,
    Epoch,
    Hello,
    Nonce,
    Nonces,
    Ready,
    committed,
    from_bytes,
    to_bytes,
)
from fedveil.protocol.key_agreement import Keyring
from fedveil.protocol.messages import Reply, Train
from fedveil.protocol.phases import Gathered, RoundDone
from fedveil.roles.client import ClientRole
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role, fresh_state, train_job
from fedveil.runs.terms import create_identities
from fedveil.secrets import SeededSecrets
from fedveil.uplink.unmasking import Unmask
from uplink.masking import epoch_of, nonces_of

KEY = bytes(range(32))
PAIRED = ("nadp", "veil-secagg", "veil-dp", "mpdp")
SIZED = ("ldp", "cdp", "mp-cdp")


IMPOSTORS = bytes(32)
"""What an impostor commits to."""


@dataclass
class Village:
    """Clients that have announced themselves for the run "spring"."""

    job: Job
    role: ClientRole
    states: dict[int, ClientState]
    announced: dict[int, Announce]

    def directory(self, **changed: Announce) -> Directory:
        said = ({**self.announced} | {one.client: one for one in changed.values()}).values()
        return Directory.of("spring", said, self.epoch)

    @property
    def epoch(self) -> Epoch:
        return epoch_of(self.job.cohort.clients)

    def send(self, client: int, directory: Directory) -> ClientState:
        state, reply = self.role.handle(self.states[client], directory, self.job.pool.clients[client])
        assert isinstance(reply, Nonce if reply_has_nonce(directory) else Ready)
        assert to_bytes(reply.digest) == directory.digest
        return state

    def _nonce(self, client: int, directory: Directory) -> bytes:
        own = self.states[client].ring()._nonce
        said = committed(own, run="spring", epoch=0, client=client)
        return own if directory.commitment(client) == said else IMPOSTORS

    def train(self, client: int, directory: Directory) -> Reply:
        """Send a directory, then everybody's nonces, then a round."""
        state = self.send(client, directory)
        if reply_has_nonce(directory):
            shown = [Nonce(k, directory.present, from_bytes(self._nonce(k, directory))) for k in self.states]
            state, _ = self.role.handle(state, nonces_of(directory, shown), self.job.pool.clients[client])
        broadcast = self.job.scheme.downlink.veil(
            self.job.architecture, self.job.weights, stream=SeededSecrets(3).stream("veil"), head_level=None
        ).broadcast()
        request = Train(0, 0, broadcast, directory.clients)
        return self.role.handle(state, request, self.job.pool.clients[client])[1]


def reply_has_nonce(directory: Directory) -> bool:
    return directory.commitments.shape[1] > 0


def village(scheme: str = "nadp", *, pinned: bool = False, clients: int = 5, run: str = "spring") -> Village:
    one = job(scheme=scheme, clients=clients, loss="square")
    bare = ClientRole(one.scheme, one.architecture, secrets=SeededSecrets(5))
    states, announced = {}, {}
    for data in one.pool.clients:
        states[data.client], reply = bare.handle(ClientState(data.client), Hello(run, epoch_of(clients)), data)
        assert isinstance(reply, Announce)
        announced[data.client] = reply
    roster = Roster({k: to_bytes(reply.identity) for k, reply in announced.items()}) if pinned else None
    role = ClientRole(one.scheme, one.architecture, secrets=SeededSecrets(5), roster=roster)
    return Village(one, role, states, announced)


def impostor(client: int, samples: int) -> Announce:
    """A self-consistent announcement under a client's number: its own identity, key and signature."""
    ring = Keyring(client, "spring", identity=bytes([7]) * 32, key=bytes([9]) * 32)
    ring.enter(epoch_of(5), lambda: IMPOSTORS)
    return ring.announce(samples)


def stolen(announced: Announce) -> Announce:
    """A client's announcement with the server's agreement key in it; identity and signature stay."""
    return replace(announced, key=impostor(announced.client, announced.samples).key)


def more(announced: Announce) -> Announce:
    return replace(announced, samples=announced.samples * 2)


@pytest.mark.parametrize("scheme", PAIRED)
def test_what_clients_announce_makes_a_directory_that_all_of_them_take(scheme: str) -> None:
    there = village(scheme, pinned=True)
    directory = there.directory()
    for client in range(5):
        assert there.send(client, directory).ring().known().digest == directory.digest
    assert directory.samples_of(range(5)) == [len(one) for one in there.job.pool.clients]


SWAPPED: dict[str, Callable[[Announce], Announce]] = {
    "everything, signed by the server itself": lambda one: impostor(one.client, one.samples),
    "the agreement key alone": stolen,
    "the signature alone": lambda one: replace(one, signature=from_bytes(bytes(64))),
    "the number of samples": more,
}


@pytest.mark.parametrize("swap", SWAPPED.values(), ids=SWAPPED)
@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg"])
def test_with_a_roster_whatever_is_swapped_is_caught_at_once_and_its_client_named(
    scheme: str, swap: Callable[[Announce], Announce]
) -> None:
    there = village(scheme, pinned=True)
    directory = there.directory(swapped=swap(there.announced[2]))
    for client in (0, 1, 3, 4):
        with pytest.raises(ProtocolError, match=r"the announcement of client 2 is not signed"):
            there.send(client, directory)


@pytest.mark.parametrize("swap", list(SWAPPED)[1:])
@pytest.mark.parametrize("scheme", PAIRED)
def test_without_a_roster_a_signature_that_does_not_fit_is_caught_before_anything_is_uploaded(
    scheme: str, swap: str
) -> None:
    there = village(scheme)
    directory = there.directory(swapped=SWAPPED[swap](there.announced[2]))
    for client in (0, 1, 3, 4):
        with pytest.raises(ProtocolError, match="the announcement of client 2 is not signed"):
            there.train(client, directory)
    honest = village(scheme)
    assert isinstance(honest.train(0, honest.directory()), Reply)


def test_known_limit_without_a_roster_a_server_that_signs_for_itself_is_believed() -> None:
    """As the ledger says: pair secrets are then unknown only to a server that did not swap keys."""
    there = village("nadp")
    assert isinstance(there.train(0, there.directory(swapped=impostor(2, there.announced[2].samples))), Reply)


def test_an_identity_that_differs_from_the_rosters_is_not_used() -> None:
    """The roster's key fits the signature, the directory shows another identity: nobody works with it."""
    there = village("veil-secagg", pinned=True)
    other = impostor(2, there.announced[2].samples).identity
    directory = there.directory(swapped=replace(there.announced[2], identity=other))
    with pytest.raises(ProtocolError, match="client 2"):
        there.train(0, directory)


def test_a_client_outside_the_roster_is_named() -> None:
    there = village(pinned=True)
    with pytest.raises(ProtocolError, match="client 9 is not in the roster"):
        there.send(0, there.directory(stranger=impostor(9, 10)))


@pytest.mark.parametrize("alter", [lambda one: impostor(one.client, one.samples), stolen, more])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_client_notices_that_its_own_entry_was_altered(alter: Callable[[Announce], Announce], pinned: bool) -> None:
    there = village(pinned=pinned)
    with pytest.raises(ProtocolError, match="shows client 2 another key or sample count than its own"):
        there.send(2, there.directory(altered=alter(there.announced[2])))


def test_a_client_that_was_left_out_of_the_directory_refuses_it() -> None:
    there = village()
    del there.announced[3]
    with pytest.raises(ProtocolError, match="client 3 is not in the run's directory"):
        there.send(3, there.directory())


@pytest.mark.parametrize("change", ["an entry", "a missing client"])
@pytest.mark.parametrize("sealed", [False, True], ids=["in memory", "sealed in between"])
def test_a_directory_that_contradicts_an_earlier_one_is_refused(change: str, sealed: bool) -> None:
    there = village()
    there.states[0] = there.send(0, there.directory())
    if sealed:
        there.states[0] = ClientState.unseal(there.states[0].seal(KEY), KEY)
    if change == "an entry":
        there.announced[2] = impostor(2, there.announced[2].samples)
    else:
        del there.announced[2]
    with pytest.raises(ProtocolError, match="sent to client 0 contradicts the one of this run it already has"):
        there.send(0, there.directory())
    assert there.states[0].ring().known().entry(2)[1] == to_bytes(village().announced[2].key)


def test_a_directory_that_only_grew_is_taken_with_the_next_epoch() -> None:
    there = village()
    late = there.announced.pop(4)
    there.states[0] = there.send(0, there.directory())
    later = epoch_of(5, number=1, first=3)
    for client in range(4):
        data = there.job.pool.clients[client]
        there.states[client], there.announced[client] = there.role.handle(
            there.states[client], Hello("spring", later), data
        )
    there.announced[4] = late
    grown = Directory.of("spring", there.announced.values(), later)
    assert there.send(0, grown).ring().known().digest == grown.digest


def test_the_directory_of_another_run_is_refused_and_another_run_has_other_keys() -> None:
    spring, autumn = village(), village(run="autumn")
    with pytest.raises(ProtocolError, match="client 0 was sent the directory of another run"):
        spring.send(0, Directory.of("autumn", autumn.announced.values(), autumn.epoch))
    assert not torch.equal(spring.announced[0].key, autumn.announced[0].key)
    # Signed for one run, a key is worth nothing in another.
    with pytest.raises(ProtocolError, match="client 2"):
        spring.train(0, spring.directory(replayed=autumn.announced[2]))


def test_a_repeated_hello_is_answered_alike_and_a_new_run_replaces_the_keys() -> None:
    there = village()
    data = there.job.pool.clients[1]
    state, again = there.role.handle(there.states[1], Hello("spring", there.epoch), data)
    assert isinstance(again, Announce)
    assert torch.equal(again.signature, there.announced[1].signature)
    assert state.keys is there.states[1].keys
    state, _ = there.role.handle(there.states[1], Hello("autumn", there.epoch), data)
    assert state.ring().run == "autumn"
    assert state.ring().directory is None


def changed(directory: Directory, **columns: torch.Tensor) -> Directory:
    return replace(directory, **columns)


MALFORMED: dict[str, Callable[[Directory], Directory]] = {
    "a client twice": lambda d: changed(d, clients=torch.tensor([0, 1, 1, 3, 4])),
    "clients out of order": lambda d: changed(d, clients=torch.tensor([0, 2, 1, 3, 4])),
    "a negative number": lambda d: changed(d, clients=torch.tensor([-1, 0, 1, 2, 3])),
    "no samples": lambda d: changed(d, samples=torch.tensor([60, 60, 0, 60, 60])),
    "negative samples": lambda d: changed(d, samples=torch.tensor([60, 60, -60, 60, 60])),
    "one count too few": lambda d: changed(d, samples=d.samples[:-1]),
    "one key too few": lambda d: changed(d, keys=d.keys[:-1]),
    "keys without rows": lambda d: changed(d, keys=d.keys.reshape(-1)),
    "counts as floats": lambda d: changed(d, samples=d.samples.double()),
    "numbers as bytes": lambda d: changed(d, clients=d.clients.to(torch.uint8)),
    "signatures as numbers": lambda d: changed(d, signatures=d.signatures.long()),
    "a scalar": lambda d: changed(d, clients=torch.tensor(0)),
    "nobody": lambda d: changed(
        d, **{name: getattr(d, name)[:0] for name in ("clients", "samples", "identities", "keys", "signatures")}
    ),
    "a commitment too few": lambda d: changed(d, commitments=d.commitments[:-1]),
    "a short commitment": lambda d: changed(d, commitments=d.commitments[:, :-1]),
    "commitments as numbers": lambda d: changed(d, commitments=d.commitments.long()),
    "the present out of order": lambda d: changed(d, present=d.present.flip(0)),
    "a stranger present": lambda d: changed(d, present=torch.tensor([0, 1, 2, 3, 77])),
    "rounds that cannot be": lambda d: replace(d, epoch=replace(d.epoch, first=-1)),
}


@pytest.mark.parametrize("spoil", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_directory_is_refused(spoil: Callable[[Directory], Directory]) -> None:
    there = village()
    with pytest.raises(ProtocolError, match=r"directory|epoch"):
        there.send(0, spoil(there.directory()))
    assert there.states[0].ring().directory is None


def test_a_directory_before_any_hello_and_a_round_before_any_directory_are_refused() -> None:
    there = village()
    data = there.job.pool.clients[0]
    with pytest.raises(ProtocolError, match="client 0 was asked to work before keys were agreed on"):
        there.role.handle(ClientState(0), there.directory(), data)
    veil = there.job.scheme.downlink.veil(
        there.job.architecture, there.job.weights, stream=there.job.secrets.stream("veil"), head_level=None
    )
    fresh = Train(0, 0, veil.broadcast(), torch.arange(5))
    with pytest.raises(ProtocolError, match=r"have not introduced themselves|before it knew who takes part"):
        there.role.handle(there.states[0], fresh, data)


def test_a_scheme_without_introductions_refuses_to_introduce_itself() -> None:
    one = job()
    role = ClientRole(one.scheme, one.architecture)
    with pytest.raises(ProtocolError, match="client 0 was asked to introduce itself"):
        role.handle(ClientState(0), Hello("spring", epoch_of(5)), one.pool.clients[0])


@pytest.mark.parametrize("scheme", SIZED)
def test_where_only_sizes_matter_they_are_signed_and_no_key_is_made_or_sent(scheme: str) -> None:
    there = village(scheme)
    for announced in there.announced.values():
        assert (announced.identity.numel(), announced.key.numel(), announced.signature.numel()) == (32, 0, 64)
        assert announced.commitment.numel() == 0
    state = there.send(1, there.directory())
    with pytest.raises(ProtocolError, match="client 1 has no keys"):
        state.ring().pair(2)
    with pytest.raises(ProtocolError, match="shows client 1 another key or sample count"):
        there.send(1, there.directory(altered=more(there.announced[1])))


@pytest.mark.parametrize("scheme", SIZED)
def test_with_a_roster_no_server_changes_a_size(scheme: str) -> None:
    there = village(scheme, pinned=True)
    of_the_server = Keyring(2, "spring", identity=bytes([7]) * 32, key=b"").announce(there.announced[2].samples)
    for swapped in (more(there.announced[2]), of_the_server):
        for client in (0, 1, 3, 4):
            with pytest.raises(ProtocolError, match=r"announcement of client 2 is not signed by the key the roster"):
                there.send(client, there.directory(swapped=swapped))
    for client in range(5):
        there.send(client, there.directory())


@pytest.mark.parametrize("scheme", [*SIZED, "nadp"])
def test_a_run_with_a_roster_trains(scheme: str, tmp_path: Path) -> None:
    create_identities(tmp_path, clients=5)
    one = job(scheme=scheme, clients=5, loss="square", rounds=1, roster=str(tmp_path / "roster.toml"))
    (done,) = run_with(one, lambda request, client: False)[0]
    assert not done.failed
    assert len(done.gathered.arrived) == 5


# --- the state, sealed ------------------------------------------------------------------------------------------


def seeds(state: ClientState) -> list[bytes]:
    ring = state.ring()
    return [ring.pair(peer).seed(round=3, attempt=1, purpose="mask") for peer in range(5) if peer != state.client]


def test_a_sealed_state_comes_back_with_keys_and_directory_and_the_same_pair_seeds() -> None:
    there = village()
    states = {client: there.send(client, there.directory()) for client in (1, 3)}
    back = {client: ClientState.unseal(state.seal(KEY), KEY) for client, state in states.items()}
    for client, state in states.items():
        assert replace(back[client], keys=None) == replace(state, keys=None)
        assert back[client].ring().run == "spring"
        assert back[client].ring().known().digest == state.ring().known().digest
        assert seeds(back[client]) == seeds(state)
        assert torch.equal(back[client].ring().announce(60).signature, state.ring().announce(60).signature)
    both = [back[1].ring().pair(3), states[3].ring().pair(1)]
    assert len({one.seed(round=0, attempt=0, purpose="mask") for one in both}) == 1
    assert len({*seeds(states[1]), *seeds(states[3])}) == 7  # one of four is shared


def test_a_sealed_state_shows_no_key() -> None:
    there = village()
    state = there.send(1, there.directory())
    sealed, fields = state.seal(KEY), state.ring().stored()
    for secret in (fields["identity"], fields["key"]):
        assert len(secret) == 64
        assert secret.encode() not in sealed
        assert bytes.fromhex(secret) not in sealed
        assert secret not in repr(state)
        assert secret not in f"{state}"


def test_a_ring_without_a_directory_survives_sealing_too() -> None:
    back = ClientState.unseal(village().states[2].seal(KEY), KEY)
    assert back.ring().directory is None
    with pytest.raises(ProtocolError, match="client 2 was asked to work before it knew who takes part"):
        back.ring().known()


def test_clients_sealed_between_all_messages_train_the_same_model() -> None:
    class Forgetful(ClientRole):
        """Clients that go to sleep after every message."""

        def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
            woken = [ClientState.unseal(state.seal(KEY), KEY) for state in states]
            yield from super().handle_many(woken, request, clients, private)

    for scheme in ("veil-secagg", "nadp"):
        one = job(scheme=scheme, rounds=3, loss="square")
        sleepy = client_role(one)
        sleepy.__class__ = Forgetful
        ours, boundaries = trained(one, role=sleepy)
        assert [done.failed for done in boundaries] == ["", "", ""]
        theirs, _ = trained(job(scheme=scheme, rounds=3, loss="square"))
        assert same_bits(ours.weights.parameters, theirs.weights.parameters)


# --- the server's side ------------------------------------------------------------------------------------------


class Slow:
    """Clients that do not answer their first `misses` hellos."""

    def __init__(self, misses: dict[int, int]) -> None:
        self.left = dict(misses)
        self.asked: list[tuple[str, int]] = []

    def __call__(self, request: Any, client: int) -> bool:
        self.asked.append((type(request).__name__, client))
        if isinstance(request, Hello) and self.left.get(client, 0) > 0:
            self.left[client] -= 1
            return True
        return False


NEVER = 10**9


def run_with(one: Job, absent: Any) -> tuple[list[RoundDone], list[str]]:
    server, boundaries, stops = server_of(one), [], []
    engine = LocalEngine(client_role(one), one.pool, absent=absent)
    drive(engine, server.run(), on_round=boundaries.append, on_stop=stops.append)
    return boundaries, stops


@pytest.mark.parametrize(
    "settings", [{"scheme": "nadp"}, {"scheme": "veil-secagg", "neighbours": 4}, {"scheme": "ldp"}]
)
def test_a_latecomer_is_asked_again_in_every_tenth_round_and_then_takes_part(settings: dict[str, Any]) -> None:
    """Absent at the start and when asked again before the first round: it joins with the eleventh."""
    one = job(rounds=13, clients=12, loss="square", **settings)
    boundaries, stops = run_with(one, Slow({4: 2}))
    assert stops == []
    assert [done.failed for done in boundaries] == [""] * 13
    assert all(not done.gathered.refused for done in boundaries)
    without, everybody = tuple(client for client in range(12) if client != 4), tuple(range(12))
    assert [done.cohort for done in boundaries] == [without] * 10 + [everybody] * 3
    assert [sorted(done.gathered.arrived) for done in boundaries] == [[*without]] * 10 + [[*everybody]] * 3


@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg"])
def test_a_directory_that_grew_reaches_clients_that_were_not_drawn_when_it_did(scheme: str) -> None:
    """Drawn cohorts: whoever comes later is told what is new when its turn comes, and is not left out."""
    one = job(scheme=scheme, rounds=18, clients=9, cohort=5, loss="square")
    late = next(client for client in one.cohort.draw(10))
    boundaries, stops = run_with(one, Slow({late: 1 + (late in one.cohort.draw(0))}))
    assert stops == []
    for done in boundaries:
        drawn = one.cohort.draw(done.round)
        assert done.cohort == (drawn if done.round >= 10 else tuple(k for k in drawn if k != late))
        assert set(done.gathered.arrived) == set(done.cohort)
    assert any(late in done.cohort for done in boundaries)


def test_a_client_that_never_introduces_itself_is_left_out_and_the_run_goes_on() -> None:
    one = job(scheme="nadp", rounds=12, loss=None)
    absent = Slow({2: NEVER})
    boundaries, stops = run_with(one, absent)
    assert stops == []
    assert [done.cohort for done in boundaries] == [(0, 1, 3, 4)] * 12
    assert absent.asked.count(("Hello", 2)) == 3  # at the start, with round 1, with round 11
    assert ("Train", 2) not in absent.asked
    others = sorted(entry for entry in absent.asked if entry[0] == "Directory")
    assert others == [("Directory", client) for client in (0, 1, 3, 4)]
    assert ("Nonces", 2) not in absent.asked


def test_a_client_that_refuses_the_directory_is_left_out_and_not_asked_every_round() -> None:
    one = job(scheme="nadp", rounds=12, loss=None)
    asked: list[int] = []

    class Stubborn(ClientRole):
        def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
            for state, reply in super().handle_many(states, request, clients, private):
                refuses = isinstance(request, Directory) and state.client == 2
                asked.extend([2] * refuses)
                yield state, ProtocolError("I do not like it") if refuses else reply

    role = client_role(one)
    role.__class__ = Stubborn
    _, boundaries = trained(one, role=role)
    assert [done.cohort for done in boundaries] == [(0, 1, 3, 4)] * 12
    assert len(asked) == 3  # at the start, with round 1, with round 11


class Silent:
    """A client that does not answer `kind` the first `misses` times."""

    def __init__(self, kind: type, client: int, misses: int) -> None:
        self.kind, self.client, self.left = kind, client, misses
        self.epochs: list[int] = []

    def __call__(self, request: Any, client: int) -> bool:
        if isinstance(request, Hello) and client == 0:
            self.epochs.append(request.epoch.number)
        if isinstance(request, self.kind) and client == self.client and self.left > 0:
            self.left -= 1
            return True
        return False


@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg"])
def test_a_client_that_keeps_back_its_nonce_voids_the_epoch_and_is_asked_three_times(scheme: str) -> None:
    """All or none: a beacon of those who showed theirs would be one of several to choose from."""
    one = job(scheme=scheme, rounds=22, loss="square")
    silent = Silent(Directory, 2, NEVER)
    boundaries, stops = run_with(one, silent)
    assert stops == []
    assert [done.cohort for done in boundaries] == [(0, 1, 3, 4)] * 22
    assert silent.left == NEVER - 3  # at the start, with round 1, with round 11
    assert silent.epochs == [0, 1, 2, 3, 4, 5]  # each void one is followed by another, with new nonces


def test_a_client_that_missed_everybodys_nonces_is_a_dropout_until_it_is_told_them() -> None:
    """It stays in the graph: who is asked is no choice."""
    one = job(scheme="veil-secagg", rounds=12, clients=8)
    boundaries, _ = run_with(one, Silent(Nonces, 3, 2))  # at the start, with round 1
    assert [done.failed for done in boundaries] == [""] * 12
    assert all(done.cohort == tuple(range(8)) for done in boundaries)
    assert [3 in done.gathered.arrived for done in boundaries] == [False] * 10 + [True] * 2


def test_an_epoch_is_followed_by_another_when_its_rounds_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch, "WINDOW", 3)
    seen = Silent(Nonces, 0, 0)
    boundaries, stops = run_with(job(scheme="veil-secagg", rounds=8, clients=6), seen)
    assert stops == []
    assert [done.failed for done in boundaries] == [""] * 8
    assert all(not done.gathered.refused for done in boundaries)
    assert seen.epochs == [0, 1, 2]


def test_a_round_that_fails_while_clients_reveal_is_followed_by_a_new_epoch() -> None:
    class Gone(Silent):
        def __call__(self, request: Any, client: int) -> bool:
            super().__call__(request, client)
            return isinstance(request, Unmask) and request.round == 1 and client > 2

    seen = Gone(Nonces, 0, 0)
    boundaries, stops = run_with(job(scheme="veil-secagg", rounds=4, clients=6), seen)
    assert stops == []
    assert [bool(done.failed) for done in boundaries] == [False, True, False, False]
    assert sorted(boundaries[2].gathered.arrived) == [0, 1, 2, 3, 4, 5]
    assert seen.epochs == [0, 1]


def test_without_any_introduction_the_run_stops_and_says_why() -> None:
    one = job(scheme="nadp", rounds=2, loss=None)
    boundaries, stops = run_with(one, Slow(dict.fromkeys(range(5), NEVER)))
    assert boundaries == []
    assert stops == ["no client has introduced itself"]


@pytest.mark.parametrize("clients", [1, 2])
def test_fewer_than_three_clients_are_too_few_to_mask(clients: int) -> None:
    with pytest.raises(ConfigError, match="at least three clients"):
        job(scheme="veil-secagg", clients=clients, rounds=2)


def test_when_only_two_of_three_introduce_themselves_masking_stops_and_says_why() -> None:
    boundaries, stops = run_with(job(scheme="veil-secagg", clients=3, rounds=2), Slow({1: NEVER}))
    assert boundaries == []
    assert len(stops) == 1
    assert "at least three clients" in stops[0]


def test_one_client_has_nobody_to_share_noise_with_and_two_have() -> None:
    with pytest.raises(ConfigError, match="at least two clients"):
        job(scheme="nadp", clients=1, loss=None)
    one = job(scheme="nadp", clients=2, rounds=2, loss=None)
    outcome = train_job(one, state=fresh_state(one))
    assert [row["clients"] for row in outcome.rows] == [2, 2]
    epsilon = outcome.privacy_journal.ledger().line("server").epsilon
    assert epsilon is not None
    assert epsilon <= 3.0 * (1 + 1e-6)


def test_when_only_one_of_two_introduces_itself_shared_noise_stops_and_says_why() -> None:
    boundaries, stops = run_with(job(scheme="nadp", clients=2, rounds=2, loss=None), Slow({1: NEVER}))
    assert boundaries == []
    assert len(stops) == 1
    assert "at least two clients" in stops[0]


SPOILT_ANNOUNCEMENTS: dict[str, tuple[Callable[[Announce], Reply], str]] = {
    "no samples": (lambda one: replace(one, samples=0), "without samples"),
    "a short key": (lambda one: replace(one, key=one.key[:-1]), "key is 32 here"),
    "no signature": (lambda one: replace(one, signature=one.signature[:0]), "signature is 64"),
    "a long identity": (lambda one: replace(one, identity=torch.cat([one.identity, one.identity])), "identity is 32"),
    "a key of other numbers": (lambda one: replace(one, key=one.key.float()), "is torch.float32"),
    "more samples than there are": (lambda one: replace(one, samples=10**30), "out of range"),
    "another's signature": (lambda one: replace(one, signature=one.signature.flip(0)), "not signed"),
    "a stranger's number": (lambda one: replace(one, client=77), "not asked"),
    "another message": (lambda one: Reply(one.client), "a Reply arrived where an announce belongs"),
}


@pytest.mark.parametrize(("spoil", "why"), SPOILT_ANNOUNCEMENTS.values(), ids=SPOILT_ANNOUNCEMENTS)
def test_a_spoilt_announcement_is_refused_and_the_honest_one_still_welcome(
    spoil: Callable[[Announce], Reply], why: str
) -> None:
    ask = next_ask(server_of(village().job).run())
    assert isinstance(ask.common, Hello)
    there = village(run=ask.common.run)
    steps = server_of(there.job).run()
    ask = next_ask(steps)
    with pytest.raises(ProtocolError, match=why):
        ask.into.add(spoil(there.announced[0]))
    for announced in there.announced.values():
        ask.into.add(announced)
    with pytest.raises(ProtocolError, match="a second one"):
        ask.into.add(there.announced[0])
    told = next_ask(steps, Gathered(tuple(range(5)), {}, (), 0, 0))
    assert isinstance(told.common, Directory)
    assert told.common.clients.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(ProtocolError, match="has not taken the directory"):
        told.into.add(Nonce(0, from_bytes(bytes(32)), from_bytes(bytes(32))))
    with pytest.raises(ProtocolError, match="a Ready arrived where a nonce belongs"):
        told.into.add(Ready(0, from_bytes(told.common.digest)))
    with pytest.raises(ProtocolError, match="a Announce arrived where a nonce belongs"):
        told.into.add(there.announced[0])


# --- with keys in files -----------------------------------------------------------------------------------------


def test_a_run_with_a_roster_trains_and_a_wrong_private_key_stops_it_naming_the_client(tmp_path: Path) -> None:
    roster = create_identities(tmp_path / "keys", clients=5)
    settings = {"scheme": "nadp", "rounds": 2, "loss": None, "roster": str(roster)}
    one = job(**settings)
    outcome = train_job(one, state=fresh_state(one))
    assert [row["clients"] for row in outcome.rows] == [5, 5]
    (tmp_path / "keys" / "client-2.key").write_text((bytes([1]) * 32).hex())
    spoilt = job(**settings)
    with pytest.raises(ProtocolError, match=r"The run cannot start: .*the announcement of client 2 is not signed"):
        train_job(spoilt, state=fresh_state(spoilt))


def test_a_server_that_swaps_keys_cannot_start_a_run_with_a_roster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = create_identities(tmp_path / "keys", clients=5)
    honest = Directory.of

    def swapping(run: str, announced: Any, epoch: Epoch, present: Any = None) -> Directory:
        ring = Keyring(2, run, identity=bytes([7]) * 32, key=bytes([9]) * 32)
        ring.enter(epoch, lambda: bytes(32))
        said = [ring.announce(one.samples) if one.client == 2 else one for one in announced]
        return honest(run, said, epoch, present)

    monkeypatch.setattr(Directory, "of", staticmethod(swapping))
    guarded = job(scheme="nadp", rounds=1, loss=None, roster=str(roster))
    with pytest.raises(ProtocolError, match="client 2"):
        train_job(guarded, state=fresh_state(guarded))
    # Without a roster only the victim notices, and it takes no part.
    trusting = job(scheme="nadp", rounds=1, loss=None)
    (row,) = train_job(trusting, state=fresh_state(trusting)).rows
    assert row["clients"] == 4
