"""What a server and the nodes tell each other before, and beside, the protocol itself.

With every message goes a `Setup`: the settings of this attempt at a run. The first one is a roll call: which client is
behind a node. A client that does not answer says why with a code, and one fixed text for each is put in by the server:
what went wrong in detail, an exception's words above all, stays in the client's own log, as it may hold data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from fedveil.config import RunConfig
from fedveil.crypto.keys import Identity, Roster, signed_by
from fedveil.errors import Code, ProtocolError, Refusal
from fedveil.ledger.releases import Release, Released
from fedveil.protocol.codec import decode, message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import Reply, Request, releases_of_all
from fedveil.secrets import StoredSecret
from fedveil.shapes import check, octets

# Where the server keeps things, what it does with them, and the limits that clients set themselves.
_SERVERS_OWN = frozenset(
    {
        *("policy", "roster", "identities", "simulate_dropout", "min_coverage", "device", "vectorise", "workers"),
        *("checkpoint_every", "evaluate_every", "record", "record_rounds", "record_clients"),
        *("weights", "early_stopping", "monitor"),
    }
)
_FACTS = ("input_shape", "outputs", "task", "vocabulary")


@dataclass(frozen=True)
class Told:
    """What goes with every message of a run: its name through all attempts, which attempt this is, and its settings."""

    lineage: str
    attempt: int

    @property
    def start(self) -> int:
        """The version of the model that clients begin with, where they hold it."""
        return 0

    def to_text(self) -> str:
        """As it travels."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """SHA-256 over everything."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def well_named(self) -> bool:
        """Whether name and attempt are what a server may say."""
        hexadecimal = isinstance(self.lineage, str) and set(self.lineage) <= set("0123456789abcdef")
        return hexadecimal and len(self.lineage) == 32 and is_count(self.attempt)


def is_count(number: object) -> bool:
    """Whether something is a whole number that counts attempts or versions."""
    return type(number) is int and 0 <= number < 1 << 31


@dataclass(frozen=True)
class Setup(Told):
    """One attempt at a run. `start` is the version of the model that its clients begin with where they hold it
    themselves."""

    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    start: int = 0

    @staticmethod
    def of(config: RunConfig, facts: Mapping[str, Any], *, lineage: str, attempt: int, start: int = 0) -> Setup:
        """What clients are told of a server's configuration."""
        told = {name: value for name, value in dataclasses.asdict(config).items() if name not in _SERVERS_OWN}
        kept = {name: value for name, value in told.items() if value is not None}
        if config.record:
            kept["record"] = True  # an owner may forbid it
        return Setup(lineage, attempt, kept, {name: facts.get(name) for name in _FACTS}, start)

    @staticmethod
    def parse(text: str) -> Setup:
        """A setup from what arrived; anything malformed is refused."""
        try:
            given = json.loads(text)
            setup = Setup(**given)
        except (ValueError, TypeError, RecursionError) as reason:
            raise ProtocolError("a run's setup is malformed") from reason
        well = (
            setup.well_named
            and is_count(setup.start)
            and isinstance(setup.settings, dict)
            and isinstance(setup.facts, dict)
            and set(setup.facts) == set(_FACTS)
        )
        if not well:
            raise ProtocolError("a run's setup is malformed")
        return setup

    @property
    def name(self) -> str:
        """How the run's name begins. Every key, mask and signature is bound to that name, so that clients who were told
        different settings, or are in different attempts, share nothing.

        A simulation protects nothing, and is to give the numbers of the local engine: its name says nothing.
        """
        return f"{self.digest()}." if self.settings.get("secrets") == "os" else ""


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


TEXTS: dict[Code, str] = {
    Code.PROTOCOL: "it was asked for something that the protocol does not allow at this point",
    Code.UNREADABLE: "a sum cannot be read: what it was sent does not open to numbers that clients could have sent",
    Code.IMPLAUSIBLE: "it was shown more than honest clients can send",
    Code.SPOILT: "it was told that it has spoilt a round for everybody",
    Code.JUMPED: "a round has made the loss on its samples jump",
    Code.WITHHELD: "it gives no keys for such a round or sum, or has given one for this round already",
    Code.ENDED: "it takes no further part: its own limits would be exceeded",
    Code.SETTINGS: "it cannot work with the run's settings",
    Code.REQUIRED: "the run's settings are not those that its owner requires",
    Code.DATA: "its data cannot be read, or do not fit the run",
    Code.STATEFUL: "code of the run's own remembers other samples, and what it says of one would not be about that one",
    Code.PUBLIC_START: "the model begins with loaded weights, and no setting says whether others know them",
    Code.NUMBERS: "its training gave numbers that are not finite or too large",
    Code.EXTRA: "a package that the scheme needs is not installed on its machine",
    Code.STATE: "what it remembers of the run is damaged or belongs to another run",
    Code.FULL: "it keeps as many runs as its owner allows, and takes part in no other one until some are old enough",
    Code.INTERNAL: "something failed on its machine; its own log says what",
    Code.LOST: "its worker died twice over one message",
    Code.SILENT: "its worker did not answer in time",
    Code.UNSTARTABLE: "its worker cannot be started; its own log says why",
    Code.FAILED: "its worker failed; its own log says why",
    Code.APP: "its app failed; its own log says how",
    Code.FORM: (
        "its app's reply is not one ArrayRecord with the names and shapes that it was sent and one MetricRecord of "
        "single numbers, the number of examples among them"
    ),
    Code.BARE: (
        "its app does not answer FedVeil's messages, or failed before it could: give it the mod, "
        "ClientApp(mods=[fedveil.flower.protect()])"
    ),
    Code.UNWRITABLE: "it has no folder that it can write, to remember in what it has answered and spent",
    Code.HOMELESS: "its SuperNode names no folder of a FedVeil client (fedveil-home)",
    Code.UNKNOWN: "it refused with a code that is not known here",
}


def request_of(content: bytes) -> Request:
    """The request in what arrived; anything else is refused."""
    request = decode(content)
    if not isinstance(request, Request):
        raise ProtocolError(f"a {type(request).__name__} arrived where a request belongs")
    return request


def refusal_of(code: str) -> Refusal:
    """The refusal behind a code that arrived; one that nobody knows is not repeated."""
    try:
        known = Code(code)
    except ValueError:
        known = Code.UNKNOWN
    return Refusal(known, TEXTS[known])
