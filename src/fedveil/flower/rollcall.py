"""The roll call: which client is behind a node, before the protocol itself begins."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedveil.crypto.keys import Identity, Roster, signed_by
from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Release, Released
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request, releases_of_all
from fedveil.secrets import StoredSecret
from fedveil.shapes import check, octets

_PURPOSE = "presence on Flower"


@message
@dataclass(frozen=True, eq=False)
class RollCall(Request):
    """Server → node: who are you? `nonce` makes the answer good for this question alone."""

    nonce: Annotated[str, Released("a random number for this question")]


@message
@dataclass(frozen=True, eq=False)
class Present(Reply):
    """Node → server: a client's number, the digest of its roster (empty: it has none), and its signature, if it has a
    signing key (else empty)."""

    roster: Annotated[Tensor, octets("roster"), Released("which roster of public keys it has, if any")]
    signature: Annotated[Tensor, octets("signature"), Released("its signature on number and question")]


RELEASES = (
    *releases_of_all(RollCall, Present),
    Release("setup.settings", "server", ("clients",), "the run's settings"),
    Release("setup.facts", "server", ("clients",), "the shape of a sample and the number of outputs"),
    Release("setup.run", "server", ("clients",), "the run's name, attempt, and the version it begins with"),
    Release(
        "refusal.code",
        "client",
        ("server",),
        "why a client does not answer, as one of a few fixed codes; before the first round it follows from its owner's "
        "own file and description of the data, not from samples",
    ),
    Release("flower.envelope", "client", ("server", "outsider"), "the node's id, sizes and times of its messages"),
    Release("flower.group", "server", ("clients", "outsider"), "the round's number, on the envelope"),
)
"""What the engine itself lets out, beside the scheme's own releases."""


def present(client: int, call: RollCall, *, lineage: str, roster: Roster | None, identity: bytes | None) -> Present:
    """A client's answer."""
    signature = b""
    if identity is not None:
        said = _statement(client, call.nonce, lineage)
        signature = Identity(StoredSecret(identity)).sign(said, purpose=_PURPOSE)
    pinned = b"" if roster is None else hashlib.sha256(roster.to_toml().encode()).digest()
    return Present(client, from_bytes(pinned), from_bytes(signature))


def check_present(answer: Reply, call: RollCall, *, lineage: str, clients: int, roster: Roster | None) -> Present:
    """Refuse an answer that names no client of the run or, where keys are known, is not signed by that client."""
    if not isinstance(answer, Present):
        raise ProtocolError(f"a {type(answer).__name__} arrived where a client's number belongs")
    check(answer, {"roster": (0, 32), "signature": (0, 64)})
    if not 0 <= answer.client < clients:
        raise ProtocolError(f"a node says it is client {answer.client}, but the run has clients 0 to {clients - 1}")
    if roster is not None:
        key = roster.keys.get(answer.client)
        said = _statement(answer.client, call.nonce, lineage)
        if key is None or not signed_by(key, to_bytes(answer.signature), said, purpose=_PURPOSE):
            raise ProtocolError(f"a node says it is client {answer.client}, but cannot sign as that client")
    return answer


def _statement(client: int, nonce: str, lineage: str) -> bytes:
    return f"{client} {nonce} {lineage}".encode()
