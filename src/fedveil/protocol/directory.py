"""Who takes part in a run: numbers, sample counts and, where clients share secrets, signed keys."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.wire import message
from fedveil.shapes import clients, counts, octets


@message
@dataclass(frozen=True, eq=False)
class Hello(Request):
    """Server → client: a run begins; introduce yourself."""

    run: str


@message
@dataclass(frozen=True, eq=False)
class Announce(Reply):
    """Client → server: how many samples it has and, if the uplink needs them, its signed keys."""

    samples: int
    identity: Annotated[Tensor, octets("identity")]
    key: Annotated[Tensor, octets("key")]
    signature: Annotated[Tensor, octets("signature")]


@message
@dataclass(frozen=True, eq=False)
class Directory(Request):
    """Server → client: everybody's announcement, ordered by client number."""

    run: str
    clients: Annotated[Tensor, clients("clients")]
    samples: Annotated[Tensor, counts("clients")]
    identities: Annotated[Tensor, octets("clients", "identity")]
    keys: Annotated[Tensor, octets("clients", "key")]
    signatures: Annotated[Tensor, octets("clients", "signature")]

    @staticmethod
    def of(run: str, announced: Iterable[Announce]) -> Directory:
        """A directory of announcements."""
        entries = sorted(announced, key=lambda one: one.client)
        return Directory(
            run,
            torch.tensor([one.client for one in entries], dtype=torch.int64),
            torch.tensor([one.samples for one in entries], dtype=torch.int64),
            torch.stack([one.identity for one in entries]),
            torch.stack([one.key for one in entries]),
            torch.stack([one.signature for one in entries]),
        )

    def check(self) -> None:
        """Refuse a directory without clients, or with one that has no samples."""
        if not len(self.clients) or int(self.samples.min()) < 1:
            raise ProtocolError("a directory names nobody, or a client without samples")

    @cached_property
    def _places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.clients.tolist())}

    @cached_property
    def _counts(self) -> list[int]:
        return [int(one) for one in self.samples.tolist()]

    def __contains__(self, client: int) -> bool:
        return client in self._places

    def place(self, client: int) -> int:
        """A client's row."""
        if client not in self._places:
            raise ProtocolError(f"client {client} is not in the run's directory")
        return self._places[client]

    def samples_of(self, clients: Sequence[int]) -> list[int]:
        """How many samples each of `clients` has announced."""
        return [self._counts[self.place(client)] for client in clients]

    def outsized(self, ratio: float) -> dict[int, str]:
        """The clients that claim more than `ratio` times the median number of samples, and the words for it.

        Of an even number the lower median counts: of two clients, the larger one is the odd one out.
        """
        usual = statistics.median_low(self._counts)
        return {
            client: f"claims {count:,} samples, more than {ratio:g} times the median of {usual:,} (max_size_ratio)"
            for client, count in zip(self.clients.tolist(), self._counts, strict=True)
            if count > ratio * usual
        }

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
        return state.digest()


@message
@dataclass(frozen=True, eq=False)
class Ready(Reply):
    """Client → server: the directory is in order, as its digest says."""

    digest: Annotated[Tensor, octets(32)]


def to_bytes(tensor: Tensor) -> bytes:
    """A tensor of bytes as bytes."""
    return tensor.contiguous().numpy().tobytes()


def from_bytes(data: bytes) -> Tensor:
    """Bytes as a tensor that may travel."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
