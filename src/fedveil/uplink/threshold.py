"""Contributions under threshold Paillier: the server multiplies ciphertexts, and clients together decrypt the product.

Before the first round (`Dealing`; the server relays what it cannot open)

    Deal → Dealt             one client, the dealer, makes the key once a run: the modulus, and a share for everybody,
                             each sealed under the secret that the two of them have
    TakeShare → Taken        everybody is told the modulus and handed its share. Who comes later is dealt one then

A round, after `Train`

    Train → EncryptedUpload  whole numbers on a grid, under noise where there is a plan, packed and encrypted
    Decrypt → Decrypted      as many clients as it takes are shown the product and whose uploads are in it, and send
                             their partial decryptions; where some do not, others are asked

What a client remembers (`ClientState`): `share`, its part of the key and how many ciphertexts it has sent; `cohort`, of
the round it answered; `revealed`, since it decrypts once for a round: a second product could open a single upload.

What it refuses: a second share in a run, or a modulus other than its dealer's; to decrypt twice, for a round that it
has not answered last, for a sum without itself or of strangers, for a sum of too few, more or fewer numbers than it
sent, and what is no ciphertext. What it cannot check is whether the product is that of the uploads: this is the
server's word.

With c of n clients on the server's side, t = n − c are honest: c + 1 shares decrypt, which those c have not; and sums
are of at least max(t, c + 2), so that two honest clients are in each (`noise_plan.smallest_sum`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedveil.crypto.paillier import (
    KEY_BITS,
    MOST_HOLDERS,
    KeyShare,
    Modulus,
    Packing,
    check_key_bits,
    fresh_primes,
    key_of,
)
from fedveil.errors import Code, ConfigError, ProtocolError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Cover, Release, Released
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import SECTIONS, Attempt, Reply, Request, Round, Upload, releases_of, releases_of_all
from fedveil.protocol.parts import Dealing, RoundContext, Summing, Terms, Uplink, bounded, planned
from fedveil.protocol.phases import Ask, Confirmations, Gathered, Inbox
from fedveil.secrets import SecretSource, SecretStream
from fedveil.shapes import Sizes, clients, counts, octets
from fedveil.tensors import Layout
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.grid import FixedPoint, check_value_range
from fedveil.uplink.noise_plan import NoisePlan, dishonest, smallest_sum
from fedveil.uplink.noised import add_residual, gridded
from fedveil.uplink.unmasking import packed, unpacked

DIGEST_BYTES = 32
_DEALERS_TRIED = 3
_TAIL = 14.0
"""Noise is cut off at so many deviations, by who adds it; a chance of 10⁻⁴³ a number."""


@message
@dataclass(frozen=True, eq=False)
class Deal(Request):
    """Server → one client: make the run's key, or take the one you have made, and deal these their shares."""

    newcomers: Annotated[Tensor, clients("newcomers"), Released("who is to be dealt a share of the key")]


@message
@dataclass(frozen=True, eq=False)
class Dealt(Reply):
    """Client → server: the modulus, and everybody's share under a seal."""

    public: Annotated[Tensor, octets("public"), Released("the public key", ("server", "clients"))]
    receivers: Annotated[Tensor, clients("receivers"), Released("who is dealt a share")]
    lengths: Annotated[Tensor, counts("receivers"), Released("how long the sealed shares are")]
    bundles: Annotated[
        Tensor,
        octets("bundles"),
        Released("shares of the key that decrypts", ("server", "clients"), hiding="sealed for each holder"),
    ]


@message
@dataclass(frozen=True, eq=False)
class TakeShare(Request):
    """Server → client: who has dealt the key, and the modulus."""

    dealer: Annotated[int, Released("who has dealt the key")]
    public: Annotated[Tensor, octets("public"), Released("the public key")]


@message
@dataclass(frozen=True, eq=False)
class SealedShare(Request):
    """Server → one client: its share of the key."""

    sealed: Annotated[Tensor, octets("sealed"), Released("a share of the key", hiding="sealed for its holder")]


@message
@dataclass(frozen=True, eq=False)
class Taken(Reply):
    """Client → server: it has its share of this key."""

    digest: Annotated[Tensor, octets(DIGEST_BYTES), Released("of which key it has a share")]


@message
@dataclass(frozen=True, eq=False)
class EncryptedUpload(Upload):
    """Client → server: packed numbers, encrypted."""

    payload: Annotated[Tensor, octets("ciphertexts", "width"), SECTIONS]

    released_as = "upload"

    def dense(self, length: int) -> Tensor:
        """All that an onlooker has in place of numbers: the words of the ciphertexts."""
        content = torch.zeros(8 * length, dtype=torch.uint8)
        sent = self.payload.cpu().flatten()[: len(content)]
        content[: len(sent)] = sent
        return content.view(torch.int64)


@message
@dataclass(frozen=True, eq=False)
class Decrypt(Request):
    """Server → client: whose uploads are in the product, and the product."""

    round: Round
    attempt: Attempt
    contributors: Annotated[Tensor, clients("contributors"), Released("whose uploads are in the sum")]
    product: Annotated[
        Tensor, octets("ciphertexts", "width"), Released("the encrypted sum", hiding="threshold Paillier")
    ]


@message
@dataclass(frozen=True, eq=False)
class Decrypted(Reply):
    """Client → server: its partial decryption of the product."""

    round: Round
    attempt: Attempt
    partial: Annotated[Tensor, octets("ciphertexts", "width"), Released("its partial decryption of the sum")]


class OpenedByKey(Uplink):
    """Sums that a key opens, which the server does not have: two honest clients are in each.

    A share `collusion` of a round's clients, of the `cohort` that it asks, may side with the server.
    """

    noise: NoisePlan | None
    collusion: float
    cohort: int

    def __post_init__(self) -> None:
        if not 0 <= self.collusion < 1:
            raise ConfigError(f"collusion must lie in [0, 1) (got {self.collusion}).")

    @property
    def introduction(self) -> Introduction:
        """Keys are sealed by the secrets of pairs."""
        return "keys"

    @property
    def plan(self) -> NoisePlan | None:
        """The integer noise, if there is any."""
        return self.noise

    @property
    def readable(self) -> bool:
        """Sums alone."""
        return False

    def fewest(self, count: int) -> int:
        """Of how many of a round's `count` clients a sum is at least."""
        return smallest_sum(count, dishonest(max(count, self.cohort), self.collusion))

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Two honest clients must be in every sum."""
        against = dishonest(max(clients, self.cohort, asked or 0), self.collusion)
        if clients < 3 or clients - against < 2:
            raise ConfigError(
                f"Of {clients} clients a round {min(against, clients)} may side with the server (collusion "
                f"{self.collusion:g}), and a sum must hide each of two others. Use more clients, or lower "
                f"{spelled('collusion')}."
            )

    def absences(self, clients: int) -> int:
        """As many as leave the smallest sum."""
        return max(clients - self.fewest(clients), 0)


@dataclass(frozen=True)
class ThresholdPaillier(OpenedByKey):
    """Sums under a key of `key_bits` that `quorum` of all `holders` open; with `noise`, integer Gaussian noise in them.

    A share `collusion` of a round's clients, and of all of them, may side with the server. Without noise, numbers
    beyond ± `value_range` are cut off. `cohort` is how many clients a round asks.
    """

    key_bits: int = KEY_BITS
    collusion: float = COLLUSION
    holders: int = 0
    cohort: int = 0
    value_range: float = 2.0**24
    noise: NoisePlan | None = None

    def __post_init__(self) -> None:
        check_key_bits(self.key_bits)
        check_value_range(self.value_range)
        super().__post_init__()

    @property
    def quorum(self) -> int:
        """How many shares decrypt: one more than may side with the server, n − t + 1."""
        return dishonest(self.holders, self.collusion) + 1

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Two honest clients must be in every sum, and a quorum in every round."""
        super().fits(clients, asked=asked)
        if self.holders > MOST_HOLDERS:
            raise ConfigError(f"{self.holders:,} clients cannot share one key: at most {MOST_HOLDERS:,} do.")
        if self.quorum > self.fewest(clients):
            raise ConfigError(
                f"{self.quorum} of all {self.holders} clients decrypt together, and a round has {clients}. Ask more "
                f"clients a round ({spelled('cohort')}), or lower {spelled('collusion')}."
            )

    def caveats(self, run: RunFacts) -> Caveats:
        """The dealer, the quorum, the server's word for the product; and what a sum still says."""
        keys = (caveats.KEYS, caveats.DEALER, caveats.threshold_key(self.key_bits, self.quorum, run.clients))
        weak = (caveats.short_key(self.key_bits),) if self.key_bits < KEY_BITS else ()
        if self.noise is not None:
            shared = caveats.shared_noise(self.noise.collusion, self.noise.accounting)
            given = (caveats.SIZES, *keys, caveats.PRODUCT, *shared)
            return Caveats(given, (*weak, caveats.UNPROVEN_SUM), opened="clients decrypt")
        crafted = caveats.CRAFTED_VEILED if run.veiled else caveats.CRAFTED
        left = (*weak, caveats.BARE_SUM, caveats.DIFFERENCES, crafted, caveats.UNPROVEN_SUM)
        return Caveats((*keys, caveats.PRODUCT), left, opened="clients decrypt")

    def dealing(self) -> KeyDealing:
        """Server side: how clients come to have their shares."""
        return KeyDealing(self)

    def public_key(self, content: bytes) -> Modulus:
        """The run's key; refuses bytes that are none."""
        return Modulus.from_bytes(content, bits=self.key_bits, holders=self.holders, quorum=self.quorum)

    def _packing(self, context: RoundContext, terms: Terms) -> tuple[FixedPoint, Packing]:
        """The grid of a round and the slots on it: public facts, the same for everybody."""
        size = len(context.cohort)
        if self.noise is None:
            most = max(context.samples())
            if most > self.value_range:
                raise ConfigError(
                    f"A client with {most} samples sends that number too, which is more than value_range = "
                    f"{self.value_range:g}. Raise value_range."
                )
            codec = FixedPoint(self.value_range, size)
            return codec, Packing(math.ceil(codec.range / codec.step), size, self.key_bits)
        codec, layout = gridded(self.noise, context, terms), planned(self.noise, context, terms.work)
        largest = max(context.samples()) * max(1.0, bounded(terms.work).largest)
        reach = largest + _TAIL * math.sqrt(float(layout.residual.max(initial=0.0)))
        if reach > codec.range:  # cut off earlier, noise would no longer be what is counted on in the sum
            raise ConfigError(
                f"Numbers of up to {largest:g} and their noise, together {reach:.2g}, do not fit slots for {size} "
                "clients. Raise clip or epsilon, or lower the number of clients a round."
            )
        return codec, Packing(math.ceil(reach / codec.step), size, self.key_bits)

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Refuse a round without this client, without its share, or whose sample counts are not vouched for."""
        context.check_member(state.client)
        _share(state)
        self.fits(len(context.cohort), asked=None if context.directory is None else context.directory.epoch.size)
        if self.noise is not None:  # its size rests on everybody's sample count
            state.ring().vouch_for(context.cohort)
        return state

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Encode, add integer noise, pack, encrypt."""
        share, (codec, packing) = _share(state), self._packing(context, terms)
        words = codec.encode(vector)
        if self.noise is not None:  # the weight is public
            add_residual(words[:-1], state.client, self.noise, context, terms, secrets=secrets)
        plain = packing.packed(words.view(np.int64).tolist())
        stream = secrets.stream("paillier", state.client, context.round, context.attempt)
        payload = _octets(share.public, share.public.encrypt(plain, stream))
        upload = EncryptedUpload(state.client, context.round, context.attempt, payload)
        return replace(state, cohort=context.cohort, share=share.having_sent(len(plain))), upload

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Deal, take a share, or decrypt: that once per round and attempt."""
        if isinstance(request, Deal):
            return self._deal(state, request)
        if isinstance(request, TakeShare):
            return self._take(state, request, private)
        if not isinstance(request, Decrypt):
            raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")
        advanced, share = state.revealing(request.round, request.attempt), _share(state)
        contributors, needed = request.contributors.tolist(), self.fewest(len(state.cohort))
        if state.client not in contributors or not set(state.cohort).issuperset(contributors):
            raise ProtocolError(f"client {state.client} was asked to decrypt a sum without itself, or of strangers")
        if len(contributors) < needed:
            raise ProtocolError(
                f"client {state.client} does not decrypt a sum of {len(contributors)}: {needed} of "
                f"{len(state.cohort)} are needed for it to hide each of them"
            )
        if tuple(request.product.shape) != (share.sent, share.public.width):
            raise ProtocolError(f"client {state.client} was asked to decrypt something else than a sum of uploads")
        partial = share.partial(share.public.read(to_bytes(request.product)))
        reply = Decrypted(state.client, request.round, request.attempt, _octets(share.public, partial))
        return advanced, reply

    def _deal(self, state: ClientState, request: Deal) -> tuple[ClientState, Dealt]:
        from fedveil.crypto.keys import seal

        ring, share = state.ring(), state.share
        if not isinstance(share, KeyShare) or share.run != ring.run:
            made = _stream(state, "primes")
            primes = fresh_primes(self.key_bits, made)
            public = key_of(primes, holders=self.holders, quorum=self.quorum)
            whole = KeyShare(ring.run, public, 0, primes)
            own = int.from_bytes(whole.dealt(state.client, _stream(state, "polynomial")), "big")
            share = KeyShare(ring.run, public, own, primes)
        bundles = {}
        for newcomer in request.newcomers.tolist():
            if newcomer != state.client:
                if newcomer >= self.holders:
                    raise ProtocolError(f"client {newcomer} is not one of the {self.holders} that share the key")
                content = share.dealt(newcomer, _stream(state, "polynomial"))
                key = _sealing_key(state, dealer=state.client, holder=newcomer)
                bundles[newcomer] = seal(content, key=key, purpose=_purpose(state.client, newcomer, share.public))
        public_bytes = from_bytes(share.public.to_bytes())
        return replace(state, share=share), Dealt(state.client, public_bytes, *packed(bundles))

    def _take(self, state: ClientState, request: TakeShare, private: Request | None) -> tuple[ClientState, Taken]:
        from fedveil.crypto.keys import unseal

        public, run = self.public_key(to_bytes(request.public)), state.ring().run
        held = state.share if isinstance(state.share, KeyShare) else None
        if held is not None and held.run == run and held.public != public:
            raise ProtocolError(f"client {state.client} has a share of this run's key and was handed one of another")
        if not isinstance(private, SealedShare):
            raise ProtocolError(f"client {state.client} was told to take a share and was sent none")
        key = _sealing_key(state, dealer=request.dealer, holder=state.client)
        content = unseal(to_bytes(private.sealed), key=key, purpose=_purpose(request.dealer, state.client, public))
        if len(content) != public.width:
            raise ProtocolError("a share of a key has another length than it should")
        if held is None or held.run != run:
            held = KeyShare(run, public, int.from_bytes(content, "big"))
        return replace(state, share=held), Taken(state.client, from_bytes(_digest(public)))

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> CiphertextProduct:
        """A product of ciphertexts."""
        codec, packing = self._packing(context, terms)
        return CiphertextProduct(self.public_key(context.public), codec, packing, terms.layout.length, context)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Ask a quorum to decrypt; where somebody does not, as many others as are then short."""
        assert isinstance(total, CiphertextProduct)
        if not total.contributors:
            needed = self.fewest(len(context.cohort))
            if len(gathered.arrived) < needed:
                raise ProtocolError(f"{len(gathered.arrived)} of {needed} needed uploads arrived")
            total.close(gathered.arrived)
        short = self.quorum - len(total.partials)
        if short <= 0:
            return None
        left = [client for client in total.contributors if client not in total.asked]
        if len(left) < short:
            raise ProtocolError(f"{len(total.partials)} of {self.quorum} needed partial decryptions arrived")
        turn = context.round % len(left)  # not the same ones every round: it is work
        return total.ask(sorted((left[turn:] + left[:turn])[:short]))

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything encrypted; what the key and the sum are opened by is declared too."""
        hidden = Cover(hiding="threshold Paillier: the server learns the sum", protection="masked")
        noised = Cover(noise="integer Gaussian, in the sum", protection="noised")
        covers = {name: hidden if self.noise is None or name == "weight" else hidden | noised for name in layout.names}
        return (
            *releases_of(EncryptedUpload, sections=layout.names, covers=covers),
            *releases_of_all(Deal, Dealt, TakeShare, SealedShare, Taken, Decrypt, Decrypted),
        )


def _share(state: ClientState) -> KeyShare:
    if not isinstance(state.share, KeyShare) or state.share.run != state.ring().run:
        raise ProtocolError(f"client {state.client} was asked to work before it was dealt its share of the key")
    return state.share


def _stream(state: ClientState, purpose: str) -> SecretStream:
    """What the dealer draws from: its own secret of the run, so that who comes later is dealt from the same numbers."""
    return SecretStream(state.ring().own(round=0, attempt=0, purpose=f"threshold {purpose}"))


def _purpose(dealer: int, holder: int, public: Modulus) -> str:
    """What a share is sealed for: by this key's dealer, since the server relays the modulus and may have another."""
    return f"key share {dealer} > {holder} of {_digest(public).hex()}"


def _sealing_key(state: ClientState, *, dealer: int, holder: int) -> bytes:
    other = holder if state.client == dealer else dealer
    return state.ring().pair(other).seed(round=0, attempt=0, purpose=f"key share {dealer} > {holder}")


def _digest(public: Modulus) -> bytes:
    return hashlib.sha256(b"fedveil threshold key 1" + public.to_bytes()).digest()


def _octets(public: Modulus, numbers: Sequence[int]) -> Tensor:
    return from_bytes(public.written(numbers)).reshape(-1, public.width)


class CiphertextProduct(Inbox[Any]):
    """Π of ciphertexts, and the partial decryptions that open it."""

    def __init__(
        self, public: Modulus, codec: FixedPoint, packing: Packing, length: int, context: RoundContext
    ) -> None:
        self._public, self._codec, self._packing, self._length = public, codec, packing, length
        self._context = context
        self._product = [1] * packing.count(length)
        self.contributors: tuple[int, ...] = ()
        self.asked: set[int] = set()
        self.partials: dict[int, list[int]] = {}
        self._sizes: Sizes = {"ciphertexts": len(self._product), "width": public.width}
        self.expect(EncryptedUpload, context.cohort, which=context.which, sizes=self._sizes)

    def _fold(self, reply: EncryptedUpload | Decrypted) -> None:
        if isinstance(reply, EncryptedUpload):
            self._product = self._public.product(self._product, self._public.read(to_bytes(reply.payload)))
        else:
            self.partials[reply.client] = self._public.read(to_bytes(reply.partial))

    def close(self, arrived: Sequence[int]) -> None:
        """No more uploads: from here on only partial decryptions count."""
        self.contributors = tuple(sorted(arrived))

    def ask(self, clients: Sequence[int]) -> Ask:
        """Have these decrypt."""
        self.asked.update(clients)
        self.expect(Decrypted, clients, which=self._context.which, sizes=self._sizes)
        who = torch.tensor(self.contributors, dtype=torch.int64)
        request = Decrypt(self._context.round, self._context.attempt, who, _octets(self._public, self._product))
        return Ask(tuple(clients), request, self, quorum=0)

    def total(self) -> Tensor:
        """The sum of what arrived; partial decryptions or plaintexts that cannot be are refused."""
        try:
            plain = self._public.opened(self.partials)
            numbers = self._packing.unpacked(plain, self._length, addends=len(self.contributors))
        except ProtocolError as reason:
            raise ProtocolError(
                f"{reason}: a client has encrypted what it should not, or sent a wrong partial decryption",
                code=Code.IMPLAUSIBLE,
            ) from reason
        return torch.from_numpy(self._codec.decode(np.array(numbers, dtype=np.int64).view(np.uint64)))


class _OneDealer(Inbox[Dealt]):
    """Takes one dealer's reply."""

    def __init__(self, dealer: int, newcomers: Sequence[int], uplink: ThresholdPaillier) -> None:
        self._uplink = uplink
        self._newcomers = [client for client in newcomers if client != dealer]
        self.reply: Dealt | None = None
        self.shares: dict[int, bytes] = {}
        most = len(self._newcomers) * uplink.key_bits  # a sealed share has a quarter as many bytes, and a seal
        sizes: Sizes = {
            "receivers": len(self._newcomers),
            "public": uplink.key_bits // 8,
            "bundles": range(most + 1),
        }
        self.expect(Dealt, (dealer,), sizes=sizes)

    def _fold(self, reply: Dealt) -> None:
        shares = unpacked(reply.receivers, reply.lengths, reply.bundles)
        if list(shares) != self._newcomers:
            raise ProtocolError("a dealer deals shares to others than it was told to")
        self._uplink.public_key(to_bytes(reply.public))
        self.shares, self.reply = shares, reply


class KeyDealing(Dealing):
    """Server side: who has dealt the run's key, and who holds a share of it."""

    def __init__(self, uplink: ThresholdPaillier) -> None:
        super().__init__()
        self._uplink = uplink
        self._holders: list[int] = []

    def steps(self, clients: Sequence[int]) -> Generator[Ask, Gathered | None, tuple[int, ...]]:
        """Have everybody of `clients` who has no share dealt one: by who has made the key, or by one who makes it."""
        newcomers = tuple(client for client in clients if client not in self._holders)
        dealers = self._holders[:1] or newcomers[:_DEALERS_TRIED]
        for dealer in dealers if newcomers else ():
            dealt = _OneDealer(dealer, newcomers, self._uplink)
            answer = yield Ask((dealer,), Deal(torch.tensor(newcomers, dtype=torch.int64)), dealt)
            self.refused.update({} if answer is None else answer.refused)
            if dealt.reply is None or (self.public and to_bytes(dealt.reply.public) != self.public):
                continue
            yield from self._handed_out(dealer, dealt.reply, dealt.shares)
            break
        return tuple(client for client in clients if client in self._holders)

    def _handed_out(
        self, dealer: int, reply: Dealt, shares: Mapping[int, bytes]
    ) -> Generator[Ask, Gathered | None, None]:
        self.public = to_bytes(reply.public)
        if dealer not in self._holders:
            self._holders.append(dealer)
        if not shares:
            return
        digest = _digest(self._uplink.public_key(self.public))
        other = "a client has taken a share of another key"
        into = Confirmations(Taken, shares, "digest", digest, otherwise=other)
        each = {client: SealedShare(from_bytes(sealed)) for client, sealed in shares.items()}
        answer = yield Ask(tuple(shares), TakeShare(dealer, reply.public), into, each=each)
        assert answer is not None
        self.refused.update(answer.refused)
        self._holders += answer.arrived
