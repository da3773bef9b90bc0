"""What travels where the model lives with the clients: work to begin, votes, divided uploads, sums, lent models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedveil.client_held.ciphers import Ciphertext
from fedveil.ledger.releases import Released
from fedveil.protocol.codec import message
from fedveil.protocol.messages import Aggregate, Attempt, Reply, Request, Round
from fedveil.shapes import clients, octets, words
from fedveil.uplink.unmasking import MaskedUpload
from fedveil.uplink.vote import TAG_BYTES

_TAGS = "AES tags in the order of the tags: the server sees which clients' votes overlap"
_SEALED = "sealed under the group key"


@message
@dataclass(frozen=True, eq=False)
class Begin(Request):
    """Server → client: bring your model up to date, train, and vote (or, where nothing is voted on, upload)."""

    round: Round
    attempt: Attempt
    cohort: Annotated[Tensor, clients("cohort"), Released("who takes part in the round")]
    version: Annotated[int, Released("which version of the model to work on")]
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Vote(Reply):
    """Client → server: the chosen indices, each as the tag AES_k(round ‖ index), in the order of the tags."""

    round: Round
    attempt: Attempt
    tags: Annotated[
        Tensor,
        octets("tags", TAG_BYTES),
        Released(
            "the indices of the client's largest changes",
            hiding=_TAGS,
            about="data",
            protection="linked",
            with_client="open",
        ),
    ]


@message
@dataclass(frozen=True, eq=False)
class Divide(Request):
    """Server → client: the outcome of the vote among `cohort`: winning tags, or the padded sum of ballots.

    `voters` are those whose ballots are in the sum.
    """

    round: Round
    attempt: Attempt
    cohort: Annotated[Tensor, clients("cohort"), Released("who has voted")]
    winners: Annotated[
        Tensor | None,
        octets("tags", TAG_BYTES),
        Released("the tags with most votes", hiding=_TAGS, about="model"),
    ]
    counts: Annotated[
        Tensor | None, words("ballot"), Released("how many voted for each index", hiding="pads", about="model")
    ]
    voters: Annotated[Tensor, clients("voters"), Released("whose ballots are in the sum")]


@message
@dataclass(frozen=True, eq=False)
class Divided(Reply):
    """Client → server: the rest of the update under noise, and what the server is not to read."""

    round: Round
    attempt: Attempt
    rest: Annotated[Tensor, words("rest"), Released("nothing: all of the update is hidden")]
    hidden: Annotated[Ciphertext | MaskedUpload | None, Released("the update where it is hidden", about="data")]


@message
@dataclass(frozen=True, eq=False)
class Lend(Request):
    """Server → one client: bring your model up to date and seal it for clients that have missed rounds."""

    version: Annotated[int, Released("which version of the model to lend")]
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Lent(Reply):
    """Client → server: the model, sealed under the group key."""

    version: Annotated[int, Released("which version it is")]
    sealed: Annotated[
        Tensor, octets("sealed"), Released("the model", ("server", "clients"), hiding=_SEALED, about="model")
    ]


@message
@dataclass(frozen=True, eq=False)
class Borrowed(Request):
    """Server → one client: a model that a member has sealed."""

    sealed: Annotated[Tensor, octets("sealed"), Released("the model", hiding=_SEALED, about="model")]


@message
@dataclass(frozen=True, eq=False)
class Finish(Request):
    """Server → client: the last sums; the run is over."""

    version: Annotated[int, Released("the last version of the model")]
    latest: Aggregate | None


@message
@dataclass(frozen=True, eq=False)
class Finished(Reply):
    """Client → server: which version of the model it holds."""

    version: Annotated[int, Released("which version it holds")]
