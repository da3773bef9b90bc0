"""Contributions under functional encryption: a key authority, the third role, lets the server learn a round's sum.

A round. The authority is asked like one more client, by a number of its own, the one after the last client's

    SetupRound → RoundKeys    server and authority, before `Train`: the round's keys, drawn for it alone, each sealed
                              for the client that encrypts with it; the server relays what it cannot open (`RoundKey`)
    Train → FunctionalUpload  whole numbers on a grid, under noise, each of them encrypted
    KeyFor → FunctionKeys     server and authority: a key for the sum over those that arrived. Whoever is missing has
                              the weight 0; clients are not asked a second time

What the authority remembers, in the state that every seat has (`ClientState`): `keys`, its own and the run's directory;
`answered`, the last round it has drawn keys for, and its `cohort`; `revealed`, the last one it gave a key for, and
`survivor_digest`, for which weights. A round's secrets follow from its keys, so that nothing else is kept. What it is
never shown is an upload.

What it refuses: keys for a round again or an earlier one, for strangers, or for so few that a sum would show somebody;
a directory that contradicts an earlier one, or the roster; and (code `withheld`) keys for a round that is not of the
directory's epoch, a key for weights of which too few are not zero or two differ, for more numbers than an upload may
have, or a second key for a round.

What a client refuses: a round without keys, or with another round's, of another cohort, or sealed by anybody else than
the authority that it has met first in the run, which a roster pins; for all of this is in what they are sealed for.
Hence a server that tells authority and clients of different cohorts gets no upload.

With c of n clients on the server's side a sum is of at least max(n − c, c + 2) clients (`noise_plan.smallest_sum`).
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.crypto.functional import (
    CIPHERTEXT_BYTES,
    HALVES_BYTES,
    KEY_BYTES,
    SCALAR_BYTES,
    AuthoritySecrets,
    EncryptionKey,
    FunctionKey,
    check_ciphertexts,
    opened,
    points,
)
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError, Refusal, spelled
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Release, Released
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import message
from fedveil.protocol.directory import Directory, from_bytes, to_bytes
from fedveil.protocol.key_agreement import Keyring
from fedveil.protocol.messages import SECTIONS, Attempt, Reply, Request, Round, Upload, releases_of, releases_of_all
from fedveil.protocol.parts import Dealing, RoundContext, Summing, Terms, bounded, planned
from fedveil.protocol.phases import Ask, Gathered, Inbox
from fedveil.secrets import Guarded, SecretSource
from fedveil.shapes import check, clients, counts, octets
from fedveil.tensors import Layout
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.grid import MOST_SHORT, SHORT_BITS, FixedPoint
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import add_residual, gridded, noised_in_sum
from fedveil.uplink.threshold import OpenedByKey

if TYPE_CHECKING:
    from fedveil.crypto.keys import Roster

IDENTITY_BYTES, PUBLIC_BYTES, SIGNATURE_BYTES = 32, 32, 64
SEALED_BYTES = 12 + KEY_BYTES + 16  # a nonce and a tag
MOST_NUMBERS = 1 << 20
"""Of an upload: 0.08 ms each for a client, 32 bytes of the key, which an authority makes for whoever asks."""
_TAIL = 14.0
"""Noise is cut off at so many deviations, by who adds it; a chance of 10⁻⁴³ a number."""
_USUAL = 4.0
"""Deviations of the noise in a sum within which most of its numbers are looked for."""


@message
@dataclass(frozen=True, eq=False)
class SetupRound(Request):
    """Server → authority: draw a round's keys for these clients."""

    round: Round
    attempt: Attempt
    cohort: Annotated[Tensor, clients("cohort"), Released("who takes part in the round")]
    directory: Directory

    released_to = ("authority",)


@message
@dataclass(frozen=True, eq=False)
class RoundKeys(Reply):
    """Authority → server: who it is, and everybody's key under a seal, in the order of the cohort."""

    client: Annotated[int, Released("the authority's number")]
    round: Round
    attempt: Attempt
    identity: Annotated[Tensor, octets(IDENTITY_BYTES), Released("the authority's public signing key")]
    key: Annotated[Tensor, octets(PUBLIC_BYTES), Released("the authority's public key for this run")]
    signature: Annotated[Tensor, octets(SIGNATURE_BYTES), Released("the authority's signature on that key")]
    sealed: Annotated[
        Tensor,
        octets("cohort", SEALED_BYTES),
        Released("what each client encrypts with", ("server", "clients"), hiding="sealed for each client"),
    ]

    released_by = "authority"


@message
@dataclass(frozen=True, eq=False)
class RoundKey(Request):
    """Server → one client, with a round's model: who the authority is, and this client's key."""

    identity: Annotated[Tensor, octets(IDENTITY_BYTES), Released("the authority's public signing key")]
    key: Annotated[Tensor, octets(PUBLIC_BYTES), Released("the authority's public key for this run")]
    signature: Annotated[Tensor, octets(SIGNATURE_BYTES), Released("the authority's signature on that key")]
    sealed: Annotated[Tensor, octets(SEALED_BYTES), Released("what it encrypts with", hiding="sealed for this client")]


@message
@dataclass(frozen=True, eq=False)
class FunctionalUpload(Upload):
    """Client → server: encrypted numbers, three points each."""

    payload: Annotated[Tensor, octets("numbers", CIPHERTEXT_BYTES), SECTIONS]

    released_as = "upload"

    def dense(self, length: int) -> Tensor:
        """All that an onlooker has in place of numbers: words of the last of each number's points."""
        content = torch.zeros(length, 8, dtype=torch.uint8)
        sent = self.payload.cpu()[:length, -8:]
        content[: len(sent)] = sent
        return content.view(torch.int64).flatten()


@message
@dataclass(frozen=True, eq=False)
class KeyFor(Request):
    """Server → authority: give me a key for the sum with these weights, in the order of the cohort."""

    round: Round
    attempt: Attempt
    weights: Annotated[Tensor, counts("cohort"), Released("whose uploads a sum is to be of")]
    numbers: Annotated[int, Released("how many numbers an upload has")]

    released_to = ("authority",)


@message
@dataclass(frozen=True, eq=False)
class FunctionKeys(Reply):
    """Authority → server: the key."""

    client: Annotated[int, Released("the authority's number")]
    round: Round
    attempt: Attempt
    halves: Annotated[Tensor, octets("contributors", HALVES_BYTES), Released("what opens ciphertexts up to their pads")]
    pads: Annotated[Tensor, octets("numbers", SCALAR_BYTES), Released("the sum of the pads of a round's sum")]

    released_by = "authority"


@dataclass(frozen=True)
class FunctionalEncryption(OpenedByKey):
    """Sums that a key authority gives a key for, under integer Gaussian `noise`, of clients 0 to `clients` − 1.

    A share `collusion` of a round's clients may side with the server. `cohort` is how many clients a round asks.
    """

    noise: NoisePlan
    clients: int
    cohort: int
    collusion: float = COLLUSION

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.noise.word_bits != SHORT_BITS:
            raise ConfigError(f"Logarithms are found of numbers of {SHORT_BITS} bits: plan the noise for those.")

    @property
    def authority(self) -> int:
        """The number after the last client's."""
        return self.clients

    def authority_role(
        self, *, secrets: SecretSource, roster: Roster | None, identities: Mapping[int, bytes] | None
    ) -> KeyAuthority:
        """That authority."""
        return KeyAuthority(self, secrets=secrets, roster=roster, identities=identities)

    def prepare(self) -> None:
        """Refuse to begin without the package."""
        points()

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Two honest clients must be in every sum, and logarithms be found of it."""
        super().fits(clients, asked=asked)
        if clients > MOST_SHORT:
            raise ConfigError(
                f"{clients:,} clients are too many for one sum under functional encryption: at most {MOST_SHORT:,} "
                f"a round. Lower {spelled('cohort')}."
            )

    def caveats(self, run: RunFacts) -> Caveats:
        """The authority, DDH and the pads; and what a sum still says."""
        shared = caveats.shared_noise(self.noise.collusion, self.noise.accounting)
        given = (caveats.SIZES, caveats.KEYS, caveats.AUTHORITY, caveats.FUNCTIONAL, *shared)
        notes = (caveats.short_words(SHORT_BITS),)
        return Caveats(given, (caveats.UNPROVEN_SUM,), notes=notes, opened="the authority gives a key for")

    def dealing(self) -> AuthorityDealing:
        """Server side: how clients come by a round's keys."""
        return AuthorityDealing(self)

    def _grid(self, context: RoundContext, terms: Terms) -> tuple[FixedPoint, int, int]:
        """The grid of a round, how many steps one client's number has at most, and a sum's usually: public facts."""
        if terms.layout.length - 1 > MOST_NUMBERS:
            raise ConfigError(
                f"The network has {terms.layout.length - 1:,} numbers to encrypt, and a key authority gives keys for "
                f"{MOST_NUMBERS:,} at most: use a smaller network, or train the same model with "
                f"{spelled('cover', 'masks')}."
            )
        codec, layout = gridded(self.noise, context, terms), planned(self.noise, context, terms.work)
        largest = max(context.samples()) * bounded(terms.work).largest
        reach = largest + _TAIL * math.sqrt(float(layout.residual.max(initial=0.0)))
        usual = _USUAL * math.sqrt(float(layout.residual.sum()))
        return codec, math.ceil(reach / codec.step), math.ceil(usual / codec.step)

    def acquaint(self, state: ClientState, private: Request | None, roster: Roster | None) -> None:
        """Refuse an authority that the roster does not pin, and another one than before in the run."""
        from fedveil.crypto.keys import check_key_signature

        if not isinstance(private, RoundKey):
            raise ProtocolError(f"client {state.client} was sent a round without the key authority's key for it")
        run, (identity, key, signature) = state.ring().run, _announced(private)
        said: dict[str, Any] = {"run": run, "client": self.authority, "public": key}
        try:
            if roster is not None:
                roster.check(signature=signature, **said)
            check_key_signature(identity, signature, **said)
        except ProtocolError as reason:
            raise ProtocolError(
                f"client {state.client} was shown a key authority whose key is not signed as number {self.authority} "
                "of the roster should sign it: somebody on the way has replaced it, or the roster does not have it"
            ) from reason
        held = state.share
        if isinstance(held, EncryptionKey) and held.run == run and held.authority != identity + key:
            raise ProtocolError(f"client {state.client} was shown another key authority than before in this run")

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Refuse a round without this client, without the authority's keys for it, or with sizes nobody vouches for."""
        from fedveil.crypto.keys import unseal

        context.check_member(state.client)
        self.fits(len(context.cohort), asked=None if context.directory is None else context.directory.epoch.size)
        ring = state.ring()
        ring.vouch_for(context.cohort)  # the noise's size rests on everybody's sample count
        assert isinstance(private, RoundKey)
        identity, key, _ = _announced(private)
        purpose = self.sealed_for(ring.run, *context.which, context.cohort)
        shared = ring.meet(self.authority, key).seed(round=context.round, attempt=context.attempt, purpose=purpose)
        content = unseal(to_bytes(private.sealed), key=shared, purpose=purpose)
        return replace(state, share=EncryptionKey(ring.run, identity + key, content))

    def sealed_for(self, run: str, round: int, attempt: int, cohort: Sequence[int]) -> str:
        """What a round's keys are sealed for: this round, these clients, and sums of no fewer than so many of them."""
        numbers = struct.pack(f"<QQQQ{len(cohort)}Q", round, attempt, self.fewest(len(cohort)), len(cohort), *cohort)
        digest = hashlib.sha256(b"fedveil round keys 1" + numbers + run.encode()).hexdigest()
        return f"key of a round {digest}"

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Encode, add integer noise, encrypt; the weight is not sent, since it was announced."""
        key = state.share
        if not isinstance(key, EncryptionKey) or key.run != state.ring().run:
            raise ProtocolError(f"client {state.client} was asked to encrypt without a key")
        codec, bound, _ = self._grid(context, terms)
        words = codec.encode(vector)[:-1]
        add_residual(words, state.client, self.noise, context, terms, secrets=secrets)
        numbers = np.clip(words.view(np.int64), -bound, bound).tolist()
        sent = key.encrypt(numbers, secrets.stream("functional", state.client, context.round, context.attempt))
        payload = from_bytes(sent).reshape(-1, CIPHERTEXT_BYTES)
        upload = FunctionalUpload(state.client, context.round, context.attempt, payload)
        return replace(state, cohort=context.cohort, share=key.used()), upload

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> FunctionalSum:
        """Ciphertexts, until there is a key for their sum."""
        return FunctionalSum(self.authority, *self._grid(context, terms), terms.layout.length - 1, context)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Ask the authority for a key, once."""
        assert isinstance(total, FunctionalSum)
        if total.key is not None:
            return None
        if total.asked:
            why = gathered.refused.get(self.authority, "it did not answer")
            code = why.code if isinstance(why, Refusal) else Code.PROTOCOL
            raise ProtocolError(f"the key authority has given no key for the sum: {why}", code=code)
        needed = self.fewest(len(context.cohort))
        if len(gathered.arrived) < needed:
            raise ProtocolError(f"{len(gathered.arrived)} of {needed} needed uploads arrived")
        return total.ask(gathered.arrived)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything encrypted; what passes between server and authority is declared too."""
        covers = noised_in_sum(layout, "functional encryption: the server learns the sum")
        return (
            *releases_of(FunctionalUpload, sections=layout.names, covers=covers),
            *releases_of_all(SetupRound, RoundKeys, RoundKey, KeyFor, FunctionKeys),
        )


def _announced(said: RoundKeys | RoundKey) -> tuple[bytes, bytes, bytes]:
    return to_bytes(said.identity), to_bytes(said.key), to_bytes(said.signature)


class FunctionalSum(Inbox[Any]):
    """A round's ciphertexts, and the key for their sum."""

    def __init__(
        self, authority: int, codec: FixedPoint, bound: int, usual: int, numbers: int, context: RoundContext
    ) -> None:
        self._authority, self._codec, self._context = authority, codec, context
        self._bound, self._usual, self._numbers = bound, usual, numbers
        self._uploads: dict[int, bytes] = {}
        self._contributors: tuple[int, ...] = ()
        self.key: FunctionKey | None = None
        self.expect(FunctionalUpload, context.cohort, which=context.which, sizes={"numbers": numbers})

    @property
    def asked(self) -> bool:
        """Whether the authority has been asked for the key."""
        return bool(self._contributors)

    def _fold(self, reply: FunctionalUpload | FunctionKeys) -> None:
        if isinstance(reply, FunctionKeys):
            weights = dict.fromkeys(self._contributors, 1)
            self.key = FunctionKey.from_bytes(weights, to_bytes(reply.halves), to_bytes(reply.pads))
            return
        content = to_bytes(reply.payload)
        check_ciphertexts(content)
        self._uploads[reply.client] = content

    def ask(self, arrived: Sequence[int]) -> Ask:
        """Have the authority give a key for the sum of what these have sent."""
        self._contributors = tuple(sorted(arrived))
        weights = [int(client in self._contributors) for client in self._context.cohort]
        sizes = {"contributors": len(self._contributors), "numbers": self._numbers}
        self.expect(FunctionKeys, (self._authority,), which=self._context.which, sizes=sizes)
        request = KeyFor(*self._context.which, torch.tensor(weights, dtype=torch.int64), self._numbers)
        return Ask((self._authority,), request, self, quorum=0)

    def total(self) -> Tensor:
        """The sum of what arrived, and what its contributors have announced to weigh; refuses sums that cannot be."""
        directory = self._context.directory
        assert self.key is not None
        assert directory is not None
        try:
            sums = opened(self._uploads, self.key, bound=len(self._contributors) * self._bound, usual=self._usual)
        except ProtocolError as reason:
            raise ProtocolError(
                f"{reason}: a client has encrypted what it should not, or the authority has given another key",
                code=Code.IMPLAUSIBLE,
            ) from reason
        numbers = self._codec.decode(np.array(sums, dtype=np.int64).view(np.uint64))
        return torch.from_numpy(np.append(numbers, float(sum(directory.samples_of(self._contributors)))))


class _OneRound(Inbox[RoundKeys]):
    """Takes the authority's keys of a round."""

    def __init__(self, authority: int, context: RoundContext) -> None:
        self.reply: RoundKeys | None = None
        self.expect(RoundKeys, (authority,), which=context.which, sizes={"cohort": len(context.cohort)})

    def _fold(self, reply: RoundKeys) -> None:
        self.reply = reply


class AuthorityDealing(Dealing):
    """Server side: has every round's keys drawn, and hands each client its own."""

    def __init__(self, uplink: FunctionalEncryption) -> None:
        super().__init__()
        self._authority = uplink.authority

    def steps(self, clients: Sequence[int]) -> Generator[Ask, Gathered | None, tuple[int, ...]]:
        """Nothing lasts longer than a round."""
        yield from ()
        return tuple(clients)

    def of_round(self, context: RoundContext) -> Generator[Ask, Gathered | None, Mapping[int, Request]]:
        """Have a round's keys drawn; without them it cannot be."""
        assert context.directory is not None
        drawn, who = _OneRound(self._authority, context), torch.tensor(context.cohort, dtype=torch.int64)
        answer = yield Ask((self._authority,), SetupRound(*context.which, who, context.directory), drawn)
        if drawn.reply is None:
            why = None if answer is None else answer.refused.get(self._authority)
            code = Code.PROTOCOL if why is None else why.code
            raise ProtocolError(f"the key authority has drawn no keys: {why or 'it did not answer'}", code=code)
        said = drawn.reply
        return {
            client: RoundKey(said.identity, said.key, said.signature, sealed)
            for client, sealed in zip(context.cohort, said.sealed, strict=True)
        }


class KeyAuthority(Guarded):
    """The third role, as a reducer like a client: `handle(state, request) -> (state, reply)`, or why not.

    It has neither data nor a model, and no upload is ever sent to it. `secrets` are its own.
    """

    def __init__(
        self,
        uplink: FunctionalEncryption,
        *,
        secrets: SecretSource,
        roster: Roster | None,
        identities: Mapping[int, bytes] | None,
    ) -> None:
        uplink.prepare()
        self._uplink = uplink
        self._secrets = secrets
        self._roster = roster
        self._identity = (identities or {}).get(uplink.authority)

    @property
    def seat(self) -> int:
        """Its number."""
        return self._uplink.authority

    def handle_many(
        self, states: Sequence[ClientState], request: Request
    ) -> Iterator[tuple[ClientState, Reply | FedVeilError]]:
        """As a client's: engines drive both in the same way."""
        for state in states:
            try:
                yield self.handle(state, request)
            except FedVeilError as reason:
                yield state, reason
            except Exception as reason:  # no message ends it
                what, why = type(request).__name__, type(reason).__name__
                yield state, ProtocolError(f"the key authority cannot deal with the {what} it was sent ({why})")

    def handle(self, state: ClientState, request: Request) -> tuple[ClientState, Reply]:
        """Draw a round's keys, or give the key for its sum."""
        if isinstance(request, SetupRound):
            check(request)
            return self._set_up(state, request)
        if isinstance(request, KeyFor):
            check(request)
            return self._key_for(state, request)
        raise ProtocolError(f"the key authority was sent a {type(request).__name__}, which is not for it")

    def _set_up(self, state: ClientState, request: SetupRound) -> tuple[ClientState, RoundKeys]:
        from fedveil.crypto.keys import seal

        directory, cohort = request.directory, tuple(request.cohort.tolist())
        ring = self._ring(state, directory)
        if not set(directory.present.tolist()).issuperset(cohort):
            raise ProtocolError("the key authority was asked for keys of clients that are not of the epoch")
        self._uplink.fits(len(cohort), asked=directory.epoch.size)
        which, epoch = (request.round, request.attempt), directory.epoch
        if request.round not in epoch:
            raise _withheld(f"round {request.round + 1} is not of the epoch that begins with round {epoch.first + 1}")
        try:
            state = state.answering(*which, run=ring.run, epoch=epoch.number)
        except ProtocolError as reason:  # in a client's words
            raise ProtocolError(
                f"the key authority was asked for keys of round {request.round + 1}, attempt {request.attempt}, which "
                "it has drawn before or left behind: a run that is resumed begins with new keys",
                code=reason.code,
            ) from reason
        secrets, purpose = self._drawn(ring, *which, cohort), self._uplink.sealed_for(ring.run, *which, cohort)
        sealed = b""
        for client in cohort:
            key = ring.pair(client).seed(round=request.round, attempt=request.attempt, purpose=purpose)
            sealed += seal(secrets.key_of(client), key=key, purpose=purpose)
        said = ring.announce(0)
        bundles = from_bytes(sealed).reshape(-1, SEALED_BYTES)
        reply = RoundKeys(self.seat, *which, said.identity, said.key, said.signature, bundles)
        return replace(state, keys=ring, cohort=cohort), reply

    def _ring(self, state: ClientState, directory: Directory) -> Keyring:
        """Its keys in the directory's run, and the directory with them; refuses one that says other than before."""
        directory.check()
        ring = state.keys
        if ring is None or ring.run != directory.run:
            identity = self._identity or self._secrets.stream("identity", self.seat).bytes(32)
            key = self._secrets.stream("run key", self.seat, directory.run).bytes(32)
            ring = Keyring(self.seat, directory.run, identity=identity, key=key)
        elif ring.directory is not None and not directory.agrees_with(ring.directory):
            raise ProtocolError("the key authority was sent a directory that contradicts the one of this run it has")
        ring.take(directory, roster=self._roster)
        return ring

    def _drawn(self, ring: Keyring, round: int, attempt: int, cohort: Sequence[int]) -> AuthoritySecrets:
        purpose = self._uplink.sealed_for(ring.run, round, attempt, cohort)
        return AuthoritySecrets(ring.own(round=round, attempt=attempt, purpose=purpose))

    def _key_for(self, state: ClientState, request: KeyFor) -> tuple[ClientState, FunctionKeys]:
        which, weights = (request.round, request.attempt), request.weights.tolist()
        if which != state.answered:
            raise _withheld(f"round {request.round + 1} is not the one it has drawn keys for last")
        if len(weights) != len(state.cohort):
            raise _withheld(f"{len(weights)} weights were given for {len(state.cohort)} clients")
        if not 1 <= request.numbers <= MOST_NUMBERS:
            raise _withheld(f"an upload of {request.numbers:,} numbers cannot be: it has {MOST_NUMBERS:,} at most")
        chosen, needed = [weight for weight in weights if weight], self._uplink.fewest(len(state.cohort))
        if len(chosen) < needed:
            raise _withheld(f"a sum of {len(chosen)} is too small: {needed} of {len(state.cohort)} are needed")
        if len(set(chosen)) > 1:
            raise _withheld("weights differ: a second sum with others would show single uploads")
        digest = hashlib.sha256(struct.pack(f"<Q{len(weights)}Q", request.numbers, *weights)).hexdigest()
        if state.revealed == which and state.survivor_digest != digest:
            raise _withheld("it has given another key for this round")
        secrets = self._drawn(state.ring(), *which, state.cohort)
        key = secrets.key_for(dict(zip(state.cohort, weights, strict=True)), request.numbers)
        halves, pads = key.to_bytes()
        # No copy of the pads: the largest key there is has 32 MiB of them.
        parts = from_bytes(halves), torch.frombuffer(pads, dtype=torch.uint8)
        shaped = (part.reshape(-1, width) for part, width in zip(parts, (HALVES_BYTES, SCALAR_BYTES), strict=True))
        return replace(state, revealed=which, survivor_digest=digest), FunctionKeys(self.seat, *which, *shaped)


def _withheld(why: str) -> ProtocolError:
    return ProtocolError(f"the key authority gives no key: {why}", code=Code.WITHHELD)
