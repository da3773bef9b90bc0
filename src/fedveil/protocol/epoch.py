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
server can find (`uplink/surrounding.py`) is taken over all draws that clients allow.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import lru_cache

from fedveil.errors import ProtocolError
from fedveil.protocol.cohort import WINDOW, Cohort
from fedveil.protocol.wire import message

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
    otherwise by `seed`, which the server picks.
    """

    number: int
    first: int
    rounds: int
    clients: int
    size: int
    seed: int
    shuffled: bool = False

    released_as = "epoch"

    def check(self) -> None:
        """Refuse numbers that make no sense, and an epoch too many."""
        within = 1 <= self.size <= self.clients <= _MOST_CLIENTS and 0 <= self.first < self.rounds <= _MOST_ROUNDS
        if not within or self.number < 0:
            raise ProtocolError("an epoch is described by numbers that cannot be")
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

    @property
    def schedule(self) -> tuple[int, Cohort]:
        """What stays as it is through a run."""
        return self.rounds, self.cohort

    def __contains__(self, round: int) -> bool:
        return self.first <= round < min(self.first + self.window, self.rounds)

    @property
    def cohort(self) -> Cohort:
        """How a round's clients are drawn."""
        return Cohort(self.clients, self.size, self.seed, self.shuffled)

    def drawn(self, round: int, beacon: bytes) -> tuple[int, ...]:
        """The schedule's clients of a round."""
        return _drawn(self.cohort, round, beacon if self.shuffled else b"")

    def check_shuffled(self) -> None:
        """Refuse cohorts that follow from a seed: a server that picks it could pick who is asked with whom."""
        if self.size < self.clients and not self.shuffled:
            raise ProtocolError(
                f"{self.size} of {self.clients} clients are asked each round by a seed that the server has picked, and "
                "not by the epoch's beacon: a server that tries seeds could ask this client along with its allies only"
            )

    def packed(self) -> bytes:
        """The same bytes for the same epoch."""
        numbers = (self.number, self.first, self.rounds, self.clients, self.size, self.shuffled)
        return struct.pack("<QQQQQ?", *numbers) + f"{self.seed}".encode()


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
