"""What travels where the model lives with the clients: work to begin, votes, divided uploads, sums, lent models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedveil.client_held.ciphers import Ciphertext
from fedveil.protocol.codec import message
from fedveil.protocol.messages import Aggregate, Reply, Request
from fedveil.shapes import clients, octets, words
from fedveil.uplink.unmasking import MaskedUpload
from fedveil.uplink.vote import TAG_BYTES


@message
@dataclass(frozen=True, eq=False)
class Begin(Request):
    """Server → client: bring your model up to date, train, and vote (or, where nothing is voted on, upload)."""

    round: int
    attempt: int
    cohort: Annotated[Tensor, clients("cohort")]
    version: int
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Vote(Reply):
    """Client → server: the chosen indices, each as the tag AES_k(round ‖ index), in the order of the tags."""

    round: int
    attempt: int
    tags: Annotated[Tensor, octets("tags", TAG_BYTES)]


@message
@dataclass(frozen=True, eq=False)
class Divide(Request):
    """Server → client: the outcome of the vote among `cohort`: winning tags, or the padded sum of ballots.

    `voters` are those whose ballots are in the sum.
    """

    round: int
    attempt: int
    cohort: Annotated[Tensor, clients("cohort")]
    winners: Annotated[Tensor | None, octets("tags", TAG_BYTES)]
    counts: Annotated[Tensor | None, words("ballot")]
    voters: Annotated[Tensor, clients("voters")]


@message
@dataclass(frozen=True, eq=False)
class Divided(Reply):
    """Client → server: the rest of the update under noise, and what the server is not to read."""

    round: int
    attempt: int
    rest: Annotated[Tensor, words("rest")]
    hidden: Ciphertext | MaskedUpload | None


@message
@dataclass(frozen=True, eq=False)
class Lend(Request):
    """Server → one client: bring your model up to date and seal it for clients that have missed rounds."""

    version: int
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Lent(Reply):
    """Client → server: the model, sealed under the group key."""

    version: int
    sealed: Annotated[Tensor, octets("sealed")]


@message
@dataclass(frozen=True, eq=False)
class Borrowed(Request):
    """Server → one client: a model that a member has sealed."""

    sealed: Annotated[Tensor, octets("sealed")]


@message
@dataclass(frozen=True, eq=False)
class Finish(Request):
    """Server → client: the last sums; the run is over."""

    version: int
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Finished(Reply):
    """Client → server: which version of the model it holds."""

    version: int
