"""The roll call: which client is behind a node, before the protocol itself begins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedveil.crypto.keys import Identity, signed_by
from fedveil.crypto.roster import Roster
from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Release
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.wire import message
from fedveil.secrets import StoredSecret

_PURPOSE = "presence on Flower"


@message
@dataclass(frozen=True, eq=False)
class RollCall(Request):
    """Server → node: who are you? `nonce` makes the answer good for this question alone."""

    nonce: str


@message
@dataclass(frozen=True, eq=False)
class Present(Reply):
    """Node → server: a client's number; whether it pins everybody's keys (`pinned`), and its signature, if it has a
    signing key (else empty)."""

    pinned: bool
    signature: Tensor


RELEASES = (
    Release("rollcall.nonce", "server", ("clients",), "a random number for this question"),
    Release("present.client", "client", ("server",), "the client's number"),
    Release("present.pinned", "client", ("server",), "whether it knows everybody's public keys beforehand"),
    Release("present.signature", "client", ("server",), "its signature on number and question"),
    Release("setup.settings", "server", ("clients",), "the run's settings"),
    Release("setup.facts", "server", ("clients",), "the shape of a sample and the number of outputs"),
    Release("setup.run", "server", ("clients",), "the run's name, attempt, and the version it begins with"),
    Release("refusal.code", "client", ("server",), "why a client does not answer, as one of a few fixed codes"),
)
"""What the engine itself lets out, beside the scheme's own releases."""


def present(client: int, call: RollCall, *, lineage: str, pinned: bool, identity: bytes | None) -> Present:
    """A client's answer."""
    signature = b""
    if identity is not None:
        said = _statement(client, call.nonce, lineage)
        signature = Identity(StoredSecret(identity)).sign(said, purpose=_PURPOSE)
    return Present(client, pinned, from_bytes(signature))


def check_present(answer: Reply, call: RollCall, *, lineage: str, clients: int, roster: Roster | None) -> Present:
    """Refuse an answer that names no client of the run or, where keys are known, is not signed by that client."""
    if not isinstance(answer, Present):
        raise ProtocolError(f"a {type(answer).__name__} arrived where a client's number belongs")
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
