"""Epochs: what a stretch of rounds rests on, settled before anybody can know the graphs that follow from it.

A server that could search for a masking graph would look for one in which its allies surround a client. So
graphs follow from a beacon to which every client of the epoch contributes:

    Hello      → Announce   each client commits to a nonce of its own
    Directory  → Nonce      all commitments are fixed, and with them who takes part and which rounds there are; only
                            then does a client show its nonce
    Nonces     → Ready      everybody checks all nonces against all commitments; beacon = SHA-256(directory, nonces)

After a client has shown its nonce nothing that its graphs depend on is open to choice: not the clients, not a
round's cohort (the beacon's, or everybody), not the nonces of others (their commitments stand in the directory the
client took). The argument is each client's own: its graphs are as random as its nonce, whatever the server told
others. If a nonce is missing the epoch is void, and a new one begins with new nonces: leaving one out would be a
choice between two graphs. An epoch begun anew is a new draw, so a client counts epochs, and the bound on what a
server can find (`uplink/graph.py`) is taken over all draws that clients allow.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Protocol

import numpy as np
import torch
from torch import Tensor

from fedveil.errors import ConfigError, ProtocolError, spelled
from fedveil.ledger.releases import Party, Released
from fedveil.protocol.codec import message
from fedveil.protocol.messages import Reply, Request
from fedveil.shapes import MOST, clients, counts, octets
from fedveil.work.batches import mixed_seed

# --- who takes part in a round: a function of public facts
#
# A seed is enough where nothing rests on who is asked with whom. Where masks or noise are shared it is not: whoever
# picks the seed can try many, until some round asks one client and allies. There cohorts are `shuffled`: the rounds of
# an epoch go around a table, `size` seats at a time, and who sits where follows from a beacon that nobody picks
# (`protocol/directory.py`).
#
# With a sampling rate q every client is drawn for every round by itself, with probability q, from the same seed or
# beacon. Two bounds keep what is said of a run's rounds true of each: of more than `size` that are drawn, those with
# the lowest draws are asked, and a draw of fewer than `least` asks nobody. Given how many are asked, they are any of
# all clients with equal chances, as the bounds on surrounded clients (`uplink/graph.py`) take them to be. Nobody's
# privacy is said to gain by it: the server and all clients know who is drawn.

WINDOW = 64
"""The most rounds of one epoch."""
_PURPOSE = 0xC0408
RARELY = 0.01
"""The chance that some round draws more clients than planned for, or fewer; and that some client is drawn too often."""
FEWEST_HIDDEN = 3
"""Of how many sampled clients a round is at least, where their sum is to hide each of them."""


class Fitting(Protocol):
    """What takes rounds of so many clients, or refuses them (ConfigError)."""

    def fits(self, clients: int) -> None:
        """Refuse rounds of so few clients."""


@dataclass(frozen=True)
class Cohort:
    """`size` of `clients` clients, drawn without replacement each round (all of them by default).

    With a sampling `rate` each is drawn by itself, and a round asks from `least` to `size` clients, or nobody.
    """

    clients: int
    size: int
    seed: int
    shuffled: bool = False
    rate: float = 0.0
    least: int = 1

    @staticmethod
    def of(
        clients: int, *, cohort: float | None, seed: int, sampling_rate: float | None = None, rounds: int = 1
    ) -> Cohort:
        """A cohort given as a fraction (0 < f ≤ 1, not the whole number 1) or as a count; or a chance for each client,
        in a run of so many rounds."""
        seed %= MOST  # clients are told it, to draw cohorts for themselves
        if sampling_rate is not None and cohort is not None:
            raise ConfigError("Give cohort, or sampling_rate, not both: a fixed number of clients, or chance.")
        if sampling_rate is not None and sampling_rate < 1:
            least, most = _usual(clients, sampling_rate, max(rounds, 1))
            return Cohort(clients, max(most, 1), seed, rate=sampling_rate, least=max(least, 1))
        if cohort is None:
            return Cohort(clients, clients, seed)
        fraction = isinstance(cohort, float) and cohort <= 1.0
        size = 0
        if math.isfinite(cohort):
            size = round(cohort * clients) if fraction else int(cohort)
        if not 1 <= size <= clients or not (fraction or size == cohort):
            raise ConfigError(
                f"cohort = {cohort} of {clients} clients leaves {max(size, 0)} per round: give a fraction in (0, 1] "
                f"(like 0.1) or a count from 1 to {clients}."
            )
        return Cohort(clients, size, seed)

    def most_participations(self, rounds: int) -> int:
        """The largest number of rounds that any one client takes part in, whatever the beacons of full epochs are.

        Under a sampling rate, the number that noise is made for: whoever has spent its target sits out.
        """
        if self.everybody:
            return rounds
        if self.rate:
            return max(_usual(rounds, self.rate, self.clients)[1], 1)
        if self.shuffled:
            stretches = (min(WINDOW, rounds - first) for first in range(0, rounds, WINDOW))
            return sum(-(-length * self.size // self.clients) for length in stretches)
        counts = [0] * self.clients
        for round in range(rounds):
            for client in self.draw(round):
                counts[client] += 1
        return max(counts)

    def draw(self, round: int, beacon: bytes = b"") -> tuple[int, ...]:
        """The round's clients, ascending; of shuffled cohorts those of the epoch with this beacon."""
        if self.everybody:
            return tuple(range(self.clients))
        if self.rate:
            return self._sampled(round, beacon)
        if self.shuffled:
            seated = _seated(self.clients, beacon)
            first = round * self.size
            return tuple(sorted(seated[seat % self.clients] for seat in range(first, first + self.size)))
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, _PURPOSE, round))
        return tuple(sorted(torch.randperm(self.clients, generator=generator)[: self.size].tolist()))

    @property
    def everybody(self) -> bool:
        """Whether every round asks all clients."""
        return self.size == self.clients and not self.rate

    @property
    def expected(self) -> int:
        """How many clients a round asks, on average where that is left to chance."""
        return min(max(round(self.rate * self.clients), self.least), self.size) if self.rate else self.size

    def check_fits(self, uplink: Fitting) -> None:
        """Refuse rounds in which an uplink could hide nothing, and say so where it is the sampling rate's doing."""
        try:
            uplink.fits(self.size)
        except ConfigError as reason:
            if not self.rate:
                raise
            raise ConfigError(
                f"{reason} With {spelled('sampling_rate', self.rate)} of {self.clients} clients a round has "
                f"{self.size} at most."
            ) from reason

    def hiding(self) -> Cohort:
        """The same where sums are to hide their parts."""
        return replace(self, least=max(self.least, min(FEWEST_HIDDEN, self.size))) if self.rate else self

    def _sampled(self, round: int, beacon: bytes) -> tuple[int, ...]:
        """Each client has a 64-bit draw of its own, and is asked if that lies below rate·2⁶⁴, a whole number."""
        key = beacon if self.shuffled else struct.pack("<Q", mixed_seed(self.seed, _PURPOSE, round))
        stream = hashlib.shake_256(b"fedveil sampled 1" + struct.pack("<QQ", len(key), round) + key)
        draws = np.frombuffer(stream.digest(8 * self.clients), dtype="<u8")
        drawn = np.flatnonzero(draws < np.uint64(int(self.rate * 2.0**64)))
        if len(drawn) < self.least:
            return ()
        lowest = drawn[np.argsort(draws[drawn], kind="stable")[: self.size]]
        return tuple(sorted(lowest.tolist()))


@lru_cache(maxsize=64)
def _usual(trials: int, rate: float, times: int) -> tuple[int, int]:
    """Between which numbers of `trials` succeed with a chance of `rate` each, in all of `times` repetitions: below the
    first, and above the second, with a chance of RARELY at most (a union bound over binomial tails)."""
    from scipy.special import bdtr, bdtrc  # which takes longer to load than most of what needs no sampling

    counts = range(trials + 1)
    most = bisect_left(counts, True, key=lambda count: bool(times * bdtrc(count, trials, rate) <= RARELY))
    least = bisect_left(counts, True, key=lambda count: bool(times * bdtr(count, trials, rate) > RARELY))
    return least, most


@lru_cache(maxsize=4)
def _seated(clients: int, beacon: bytes) -> tuple[int, ...]:
    """Who has which seat: a permutation that is as random as the beacon."""

    def drawn(client: int) -> bytes:
        return hashlib.sha256(b"fedveil seats 1" + beacon + struct.pack("<Q", client)).digest()

    return tuple(sorted(range(clients), key=drawn))


_BOTH: tuple[Party, ...] = ("server", "clients")
NONCE_BYTES = 32
SPARE = 32
"""Epochs beyond those that the rounds take, for latecomers and for clients that leave."""
_GRAPHS_A_ROUND = 2
_MOST_CLIENTS = 1 << 20
_MOST_ROUNDS = 1 << 32


@message
@dataclass(frozen=True)
class Epoch:
    """Epoch `number` of a run of `rounds` rounds: `window` of them, from round `first` on.

    A round asks `size` of `clients` clients, as far as they are of the epoch: if `shuffled`, by the epoch's beacon,
    otherwise by `seed`, which the server picks. With a `rate` above 0 each is asked with that chance, `size` of them at
    most, and nobody where fewer than `least` are drawn.
    """

    number: Annotated[int, Released("the epoch's number")]
    first: Annotated[int, Released("its first round")]
    rounds: Annotated[int, Released("how many rounds the run has")]
    clients: Annotated[int, Released("how many clients there may be")]
    size: Annotated[int, Released("how many of them a round asks")]
    seed: Annotated[int, Released("from which a round's clients are drawn, unless the beacon decides")]
    shuffled: Annotated[bool, Released("whether the beacon decides who is asked in a round")] = False
    rate: Annotated[float, Released("with which chance a round asks each, where it asks no fixed number")] = 0.0
    least: Annotated[int, Released("how many it asks then, at least")] = 1

    released_as = "epoch"

    def check(self) -> None:
        """Refuse numbers that make no sense, and an epoch too many."""
        within = 1 <= self.size <= self.clients <= _MOST_CLIENTS and 0 <= self.first < self.rounds <= _MOST_ROUNDS
        if not within or self.number < 0 or not (0 <= self.rate < 1 and 1 <= self.least <= self.size):
            raise ProtocolError("an epoch is described by numbers that cannot be")
        if self.rate:
            own = Cohort.of(self.clients, cohort=None, seed=0, sampling_rate=self.rate, rounds=self.rounds)
            if self.size != own.size or self.least < own.least:
                raise ProtocolError(
                    f"an epoch speaks of rounds of {self.least} to {self.size} clients, and those that follow from its "
                    f"sampling rate have {own.least} to {own.size}"
                )
        if self.number >= self.most:
            raise ProtocolError(
                f"epoch {self.number + 1} of a run of {self.rounds} rounds, which has {self.most} at most: a server "
                "that begins anew again and again could wait for a graph that suits it"
            )

    @property
    def window(self) -> int:
        """How many rounds an epoch has at most."""
        return min(WINDOW, self.rounds)

    @property
    def most(self) -> int:
        """How many epochs clients take part in."""
        return -(-self.rounds // self.window) + SPARE

    @property
    def draws(self) -> int:
        """How many graphs a server can see in a run, by every epoch and every round that clients allow."""
        return _GRAPHS_A_ROUND * self.window * self.most

    def check_agreed(self, rounds: int, cohort: Cohort) -> None:
        """Refuse another schedule than that of the settings a client has agreed to.

        Who hides whom, how many collude of how many, and how often a graph is drawn anew all follow from it. A server
        may ask for more clients than `least`, and leave to a beacon what a seed could decide; which seed is all the
        same.
        """
        shuffled, least = cohort.shuffled or self.shuffled, max(cohort.least, self.least)
        own = replace(cohort, seed=self.seed, shuffled=shuffled, least=least)
        if (self.rounds, self.cohort) != (rounds, own):
            raise ProtocolError(
                f"an epoch is of {self.rounds} rounds that ask {self.size} of {self.clients} clients, and the settings "
                f"that this client has agreed to have {rounds} rounds that ask {cohort.size} of {cohort.clients}"
                f"{f', each with probability {cohort.rate:g}' if cohort.rate or self.rate else ''}: a server that "
                "names others could pick who hides whom"
            )

    @property
    def schedule(self) -> tuple[int, Cohort]:
        """What stays as it is through a run."""
        return self.rounds, self.cohort

    def __contains__(self, round: int) -> bool:
        return self.first <= round < min(self.first + self.window, self.rounds)

    @property
    def cohort(self) -> Cohort:
        """How a round's clients are drawn."""
        return Cohort(self.clients, self.size, self.seed, self.shuffled, self.rate, self.least)

    def drawn(self, round: int, beacon: bytes) -> tuple[int, ...]:
        """The schedule's clients of a round."""
        return _drawn(self.cohort, round, beacon if self.shuffled else b"")

    def check_shuffled(self) -> None:
        """Refuse cohorts that follow from a seed: a server that picks it could pick who is asked with whom."""
        if not self.cohort.everybody and not self.shuffled:
            some = f"some of {self.clients} clients" if self.rate else f"{self.size} of {self.clients} clients"
            raise ProtocolError(
                f"{some} are asked each round by a seed that the server has picked, and not by the epoch's beacon: a "
                "server that tries seeds could ask this client along with its allies only"
            )
        if self.cohort.hiding() != self.cohort:
            raise ProtocolError(
                f"rounds of {self.least} sampled clients could be asked for, and a sum of so few hides none of them"
            )

    def packed(self) -> bytes:
        """The same bytes for the same epoch."""
        numbers = (self.number, self.first, self.rounds, self.clients, self.size, self.shuffled)
        sampled = struct.pack("<dQ", self.rate, self.least) if self.rate else b""
        return struct.pack("<QQQQQ?", *numbers) + sampled + f"{self.seed}".encode()


def draws_of(rounds: int) -> int:
    """How many graphs a run of `rounds` rounds allows."""
    return Epoch(0, 0, rounds, 1, 1, 0).draws


@lru_cache(maxsize=8)
def _drawn(cohort: Cohort, round: int, beacon: bytes) -> tuple[int, ...]:
    # Remembered, because in a simulation every client draws the same.
    return cohort.draw(round, beacon)


def committed(nonce: bytes, *, run: str, epoch: int, client: int) -> bytes:
    """A commitment to a nonce, of one client and epoch; empty for none."""
    if not nonce:
        return b""
    name = run.encode()
    head = struct.pack("<QQQ", len(name), epoch, client)
    return hashlib.sha256(b"fedveil nonce 1" + head + name + nonce).digest()


@message
@dataclass(frozen=True, eq=False)
class Hello(Request):
    """Server → client: an epoch of a run begins; introduce yourself, and commit to a nonce."""

    run: Annotated[str, Released("the run's name")]
    epoch: Epoch


@message
@dataclass(frozen=True, eq=False)
class Announce(Reply):
    """Client → server: how many samples it has and, if the uplink needs them, its signed keys and a commitment.

    The commitment needs no signature: a client's graphs are as random as its own nonce, and clients that were shown
    different commitments derive different graphs, on which no mask cancels.
    """

    client: Annotated[int, Released("the client's number", _BOTH)]
    samples: Annotated[int, Released("how many samples a client has", _BOTH)]
    identity: Annotated[Tensor, octets("identity"), Released("a client's public signing key", _BOTH)]
    key: Annotated[Tensor, octets("key"), Released("a client's public key for this run", _BOTH)]
    signature: Annotated[Tensor, octets("signature"), Released("its signature on key, if any, and sample count", _BOTH)]
    commitment: Annotated[Tensor, octets("commitment"), Released("a commitment to its nonce of the epoch", _BOTH)]


@message
@dataclass(frozen=True, eq=False)
class Directory(Request):
    """Server → client: everybody's announcement, ordered by client number.

    `present` are those of the epoch, and `commitments` theirs; whoever has left keeps its entry.
    """

    run: Annotated[str, Released("the run's name")]
    clients: Annotated[Tensor, clients("clients"), Released("who takes part")]
    samples: Annotated[Tensor, counts("clients"), Released("of each: how many samples a client has")]
    identities: Annotated[Tensor, octets("clients", "identity"), Released("of each: a client's public signing key")]
    keys: Annotated[Tensor, octets("clients", "key"), Released("of each: a client's public key for this run")]
    signatures: Annotated[
        Tensor, octets("clients", "signature"), Released("of each: its signature on key, if any, and sample count")
    ]
    epoch: Epoch
    present: Annotated[Tensor, clients("present"), Released("who is of the epoch")]
    commitments: Annotated[
        Tensor, octets("present", "commitment"), Released("of each: a commitment to its nonce of the epoch")
    ]

    @staticmethod
    def of(run: str, announced: Iterable[Announce], epoch: Epoch, present: Collection[int] | None = None) -> Directory:
        """A directory of announcements; all of them are of the epoch unless `present` says who."""
        entries = sorted(announced, key=lambda entry: entry.client)
        here = [entry for entry in entries if present is None or entry.client in present]
        return Directory(
            run,
            torch.tensor([entry.client for entry in entries], dtype=torch.int64),
            torch.tensor([entry.samples for entry in entries], dtype=torch.int64),
            torch.stack([entry.identity for entry in entries]),
            torch.stack([entry.key for entry in entries]),
            torch.stack([entry.signature for entry in entries]),
            epoch,
            torch.tensor([entry.client for entry in here], dtype=torch.int64),
            torch.stack([entry.commitment for entry in here]),
        )

    def check(self) -> None:
        """Refuse a directory without clients, with one that has no samples, or of an epoch that cannot be."""
        assert self._in_order

    @cached_property
    def _in_order(self) -> bool:
        # What follows from a directory is worked out once for it: simulated clients are all sent the same object.
        if not len(self.clients) or int(self.samples.min()) < 1:
            raise ProtocolError("a directory names nobody, or a client without samples")
        self.epoch.check()
        if not set(self.present.tolist()) <= set(self.clients.tolist()):
            raise ProtocolError("a directory names clients of its epoch that it has no entry for")
        return True

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.clients.tolist())}

    @cached_property
    def _counts(self) -> list[int]:
        return [int(count) for count in self.samples.tolist()]

    def __contains__(self, client: int) -> bool:
        return client in self._places

    @cached_property
    def _here(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.present.tolist())}

    def cohort(self, round: int, beacon: bytes) -> tuple[int, ...]:
        """A round's clients: those that the schedule names, as far as they are of the epoch.

        Of sampled clients nobody, where fewer of them are left than a round must have.
        """
        here = tuple(client for client in self.epoch.drawn(round, beacon) if client in self._here)
        return () if self.epoch.rate and len(here) < self.epoch.least else here

    def commitment(self, client: int) -> bytes:
        """A client's commitment; refused for one that is not of the epoch."""
        if client not in self._here:
            raise ProtocolError(f"client {client} is not of the epoch whose directory it was sent")
        return to_bytes(self.commitments[self._here[client]])

    def place(self, client: int) -> int:
        """A client's row."""
        if client not in self._places:
            raise ProtocolError(f"client {client} is not in the run's directory")
        return self._places[client]

    def samples_of(self, clients: Sequence[int]) -> list[int]:
        """How many samples each of `clients` has announced."""
        return [self._counts[self.place(client)] for client in clients]

    def outsized(self, ratio: float) -> dict[int, str]:
        """The clients that claim a number of samples out of proportion to that of everybody, and the words for it."""
        if ratio not in self._outsized:
            self._outsized[ratio] = outsized(dict(zip(self.clients.tolist(), self._counts, strict=True)), ratio)
        return self._outsized[ratio]

    @cached_property
    def _outsized(self) -> dict[float, dict[int, str]]:
        return {}

    @cached_property
    def _columns(self) -> tuple[tuple[bytes, int], ...]:
        """Identities, keys and signatures, each as all its bytes and how many are one client's."""
        columns = (self.identities, self.keys, self.signatures)
        return tuple((to_bytes(column), column.shape[1]) for column in columns)

    def entry(self, client: int) -> tuple[bytes, bytes, bytes, int]:
        """(identity, key, signature, samples) of a client."""
        place = self.place(client)
        identity, key, signature = (data[place * size : (place + 1) * size] for data, size in self._columns)
        return identity, key, signature, self._counts[place]

    def vouched(self, client: int) -> tuple[bytes, bytes, int]:
        """(identity, key, samples) of a client, whose signature has been checked: once for each entry."""
        identity, key, signature, samples = self.entry(client)
        if client not in self._vouched:
            from fedveil.crypto.keys import check_key_signature

            check_key_signature(identity, signature, run=self.run, client=client, public=key, samples=samples)
            self._vouched.add(client)
        return identity, key, samples

    def vouch_for(self, clients: tuple[int, ...]) -> None:
        """Check the signatures of all `clients`, once each."""
        if self._vouched_last and self._vouched_last[0] is clients:
            return
        for client in clients:
            self.vouched(client)
        self._vouched_last[:] = [clients]

    @cached_property
    def _vouched(self) -> set[int]:
        return set()

    @cached_property
    def _vouched_last(self) -> list[tuple[int, ...]]:
        return []  # the cohort itself: comparing its numbers would take every client of a round as long as checking

    def agrees_with(self, earlier: Directory) -> bool:
        """Whether every entry of an earlier directory of this run stands here unchanged."""
        return self is earlier or _agree(self, earlier)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 over everything."""
        state = hashlib.sha256(self.run.encode())
        for column in (self.clients, self.samples, self.identities, self.keys, self.signatures):
            state.update(column.contiguous().numpy().tobytes())
        state.update(self.epoch.packed() + struct.pack("<Q", len(self.present)))
        for column in (self.present, self.commitments):
            state.update(column.contiguous().numpy().tobytes())
        return state.digest()


@message
@dataclass(frozen=True, eq=False)
class Nonce(Reply):
    """Client → server: the directory is in order, as its digest says, and this is what the client committed to."""

    digest: Annotated[Tensor, octets(32), Released("which directory it has taken")]
    nonce: Annotated[Tensor, octets(NONCE_BYTES), Released("random bytes that graphs are drawn from", _BOTH)]


@message
@dataclass(frozen=True, eq=False)
class Nonces(Request):
    """Server → client: the nonces of everybody in the epoch, in the order of the directory's `present`."""

    digest: Annotated[Tensor, octets(32), Released("which directory the nonces belong to")]
    nonces: Annotated[Tensor, octets("present", NONCE_BYTES), Released("everybody's random bytes")]


@message
@dataclass(frozen=True, eq=False)
class Ready(Reply):
    """Client → server: it has everything a round needs; the digest is the beacon, or the directory's without one."""

    digest: Annotated[Tensor, octets(32), Released("which directory, and which nonces, it has taken")]


def outsized(samples: Mapping[int, int], ratio: float) -> dict[int, str]:
    """The clients that claim more than `ratio` times the median number of samples, and the words for it.

    Of an even number the lower median counts: of two clients, the larger one is the odd one out.
    """
    usual = statistics.median_low(samples.values()) if samples else 0
    return {
        client: f"claims {count:,} samples, more than {ratio:g} times the median of {usual:,} (max_size_ratio)"
        for client, count in samples.items()
        if count > ratio * usual
    }


@lru_cache(maxsize=4)
def _agree(later: Directory, earlier: Directory) -> bool:
    return later.run == earlier.run and all(
        client in later and later.entry(client) == earlier.entry(client) for client in earlier.clients.tolist()
    )


@lru_cache(maxsize=4)
def beacon(directory: Directory, told: Nonces) -> bytes:
    """SHA-256 of a directory and all its clients' nonces; refused unless each nonce is what was committed to."""
    # Remembered, because simulated clients share both messages.
    if len(told.nonces) != len(directory.present) or to_bytes(told.digest) != directory.digest:
        raise ProtocolError("the nonces of an epoch belong to another directory")
    for client, nonce in zip(directory.present.tolist(), told.nonces, strict=True):
        check_nonce(directory, client, to_bytes(nonce))
    return hashlib.sha256(b"fedveil beacon 1" + directory.digest + to_bytes(told.nonces)).digest()


def graph_seed(*, beacon: bytes, round: int, members: Sequence[int]) -> bytes:
    """SHA-256 of beacon, round and the sorted members; not of the attempt: repeating a round draws nothing anew."""
    ordered = sorted(members)
    head = struct.pack("<QQQ", round, len(beacon), len(ordered))
    return hashlib.sha256(b"fedveil graph 2" + head + beacon + struct.pack(f"<{len(ordered)}Q", *ordered)).digest()


def check_nonce(directory: Directory, client: int, nonce: bytes) -> None:
    """Refuse a nonce that is not what a client committed to."""
    made = committed(nonce, run=directory.run, epoch=directory.epoch.number, client=client)
    if made != directory.commitment(client):
        raise ProtocolError(f"client {client}'s nonce is not the one it committed to: somebody has changed it")


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor of bytes as bytes."""
    return tensor.contiguous().numpy().tobytes()


def from_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor that may travel."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
