"""Who takes part in a run: numbers, sample counts and, where clients share secrets, signed keys."""

from __future__ import annotations

import hashlib
import statistics
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.epoch import NONCE_BYTES, Epoch, committed
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.wire import message
from fedveil.shapes import clients, counts, octets


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
    identity: Annotated[Tensor, octets("identity")]
    key: Annotated[Tensor, octets("key")]
    signature: Annotated[Tensor, octets("signature")]
    commitment: Annotated[Tensor, octets("commitment")]


@message
@dataclass(frozen=True, eq=False)
class Directory(Request):
    """Server → client: everybody's announcement, ordered by client number.

    `present` are those of the epoch, and `commitments` theirs; whoever has left keeps its entry.
    """

    run: str
    clients: Annotated[Tensor, clients("clients")]
    samples: Annotated[Tensor, counts("clients")]
    identities: Annotated[Tensor, octets("clients", "identity")]
    keys: Annotated[Tensor, octets("clients", "key")]
    signatures: Annotated[Tensor, octets("clients", "signature")]
    epoch: Epoch
    present: Annotated[Tensor, clients("present")]
    commitments: Annotated[Tensor, octets("present", "commitment")]

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
        """Refuse a directory without clients, with one that has no samples, or of an epoch that cannot be."""
        if not len(self.clients) or int(self.samples.min()) < 1:
            raise ProtocolError("a directory names nobody, or a client without samples")
        self.epoch.check()
        if not set(self.present.tolist()) <= set(self.clients.tolist()):
            raise ProtocolError("a directory names clients of its epoch that it has no entry for")

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

    def cohort(self, round: int, beacon: bytes) -> tuple[int, ...]:
        """A round's clients: those that the schedule names, as far as they are of the epoch."""
        return tuple(one for one in self.epoch.drawn(round, beacon) if one in self._here)

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
        return outsized(dict(zip(self.clients.tolist(), self._counts, strict=True)), ratio)

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

    digest: Annotated[Tensor, octets(32)]
    nonce: Annotated[Tensor, octets(NONCE_BYTES)]


@message
@dataclass(frozen=True, eq=False)
class Nonces(Request):
    """Server → client: the nonces of everybody in the epoch, in the order of the directory's `present`."""

    digest: Annotated[Tensor, octets(32)]
    nonces: Annotated[Tensor, octets("present", NONCE_BYTES)]


@message
@dataclass(frozen=True, eq=False)
class Ready(Reply):
    """Client → server: it has everything a round needs; the digest is the beacon, or the directory's without one."""

    digest: Annotated[Tensor, octets(32)]


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
def beacon(directory: Directory, told: Nonces) -> bytes:
    """SHA-256 of a directory and all its clients' nonces; refused unless each nonce is what was committed to."""
    # Remembered, because simulated clients share both messages.
    if len(told.nonces) != len(directory.present) or to_bytes(told.digest) != directory.digest:
        raise ProtocolError("the nonces of an epoch belong to another directory")
    for client, nonce in zip(directory.present.tolist(), told.nonces, strict=True):
        check_nonce(directory, client, to_bytes(nonce))
    return hashlib.sha256(b"fedveil beacon 1" + directory.digest + to_bytes(told.nonces)).digest()


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
