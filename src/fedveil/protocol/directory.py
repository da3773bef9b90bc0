"""Who takes part in a run: numbers, sample counts and, where clients share secrets, signed keys."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.epoch import NONCE_BYTES, Epoch, committed
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.wire import message


@message
@dataclass(frozen=True, eq=False)
class Hello(Request):
    """Server → client: an epoch of a run begins; introduce yourself, and commit to a nonce."""

    run: str
    epoch: Epoch


@message
@dataclass(frozen=True, eq=False)
class Announce(Reply):
    """Client → server: how many samples it has and, if the uplink needs them, its signed keys and a commitment.

    The commitment needs no signature: a client's graphs are as random as its own nonce, and clients that were shown
    different commitments derive different graphs, on which no mask cancels.
    """

    samples: int
    identity: Tensor
    key: Tensor
    signature: Tensor
    commitment: Tensor


@message
@dataclass(frozen=True, eq=False)
class Directory(Request):
    """Server → client: everybody's announcement, ordered by client number.

    `present` are those of the epoch, and `commitments` theirs; whoever has left keeps its entry.
    """

    run: str
    clients: Tensor
    samples: Tensor
    identities: Tensor
    keys: Tensor
    signatures: Tensor
    epoch: Epoch
    present: Tensor
    commitments: Tensor

    @staticmethod
    def of(run: str, announced: Iterable[Announce], epoch: Epoch, present: Collection[int] | None = None) -> Directory:
        """A directory of announcements; all of them are of the epoch unless `present` says who."""
        entries = sorted(announced, key=lambda one: one.client)
        here = [one for one in entries if present is None or one.client in present]
        return Directory(
            run,
            torch.tensor([one.client for one in entries], dtype=torch.int64),
            torch.tensor([one.samples for one in entries], dtype=torch.int64),
            torch.stack([one.identity for one in entries]),
            torch.stack([one.key for one in entries]),
            torch.stack([one.signature for one in entries]),
            epoch,
            torch.tensor([one.client for one in here], dtype=torch.int64),
            torch.stack([one.commitment for one in here]),
        )

    def check(self) -> None:
        """Refuse a directory that is malformed or names a client twice."""
        count = len(self.clients) if self.clients.dim() == 1 else -1
        columns = (self.samples, self.identities, self.keys, self.signatures)
        well = (
            all(len(one) == count for one in columns if one.dim())
            and [one.dim() for one in columns] == [1, 2, 2, 2]
            and self.clients.dtype == self.samples.dtype == torch.int64
            and all(one.dtype == torch.uint8 for one in columns[1:])
        )
        if not well or count < 1:
            raise ProtocolError("a directory of clients is malformed")
        numbers = self.clients.tolist()
        if numbers[0] < 0 or any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise ProtocolError("a directory must name every client once, in ascending order")
        if int(self.samples.min()) < 1:
            raise ProtocolError("a directory names a client without samples")
        self.epoch.check()
        shapes = [(one.dim(), one.dtype) for one in (self.present, self.commitments)]
        if shapes != [(1, torch.int64), (2, torch.uint8)]:
            raise ProtocolError("a directory of clients is malformed")
        here = self.present.tolist()
        well = (
            len(here) == len(self.commitments)
            and self.commitments.shape[1] in (0, NONCE_BYTES)
            and all(earlier < later for earlier, later in itertools.pairwise(here))
            and set(here) <= set(numbers)
        )
        if not well:
            raise ProtocolError("a directory must name the clients of its epoch once each, with a commitment")

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.clients.tolist())}

    @cached_property
    def _counts(self) -> list[int]:
        return [int(one) for one in self.samples.tolist()]

    def __contains__(self, client: int) -> bool:
        return client in self._places

    @cached_property
    def _here(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.present.tolist())}

    def cohort(self, round: int) -> tuple[int, ...]:
        """A round's clients: those that the schedule names, as far as they are of the epoch."""
        return tuple(one for one in self.epoch.drawn(round) if one in self._here)

    def commitment(self, client: int) -> bytes:
        """A client's commitment; None of a client that is not of the epoch."""
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

    def entry(self, client: int) -> tuple[bytes, bytes, bytes, int]:
        """(identity, key, signature, samples) of a client."""
        place = self.place(client)
        identity, key, signature = (to_bytes(column[place]) for column in (self.identities, self.keys, self.signatures))
        return identity, key, signature, int(self.samples[place])

    def agrees_with(self, earlier: Directory) -> bool:
        """Whether every entry of an earlier directory of this run stands here unchanged."""
        return self.run == earlier.run and all(
            client in self and self.entry(client) == earlier.entry(client) for client in earlier.clients.tolist()
        )

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

    digest: Tensor
    nonce: Tensor


@message
@dataclass(frozen=True, eq=False)
class Nonces(Request):
    """Server → client: the nonces of everybody in the epoch, in the order of the directory's `present`."""

    digest: Tensor
    nonces: Tensor


@message
@dataclass(frozen=True, eq=False)
class Ready(Reply):
    """Client → server: it has everything a round needs; the digest is the beacon, or the directory's without one."""

    digest: Tensor


@lru_cache(maxsize=4)
def beacon(directory: Directory, told: Nonces) -> bytes:
    """SHA-256 of a directory and all its clients' nonces; refused unless each nonce is what was committed to."""
    # Remembered, because simulated clients share both messages.
    count = len(directory.present)
    well = told.nonces.dtype == torch.uint8 and tuple(told.nonces.shape) == (count, NONCE_BYTES)
    if not well or to_bytes(told.digest) != directory.digest:
        raise ProtocolError("the nonces of an epoch are malformed, or belong to another directory")
    for client, nonce in zip(directory.present.tolist(), told.nonces, strict=True):
        check_nonce(directory, client, to_bytes(nonce))
    return hashlib.sha256(b"fedveil beacon 1" + directory.digest + to_bytes(told.nonces)).digest()


def check_nonce(directory: Directory, client: int, nonce: bytes) -> None:
    """Refuse a nonce that is not what a client committed to."""
    made = committed(nonce, run=directory.run, epoch=directory.epoch.number, client=client)
    if len(nonce) != NONCE_BYTES or made != directory.commitment(client):
        raise ProtocolError(f"client {client}'s nonce is not the one it committed to: somebody has changed it")


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor of bytes as bytes."""
    return tensor.contiguous().numpy().tobytes()


def from_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor that may travel."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
