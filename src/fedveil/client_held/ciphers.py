"""Hiding vectors from a server that adds them: what a cipher must offer, and the one made of masks and pads."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.client_held.group import OpeningKeys
from fedveil.crypto import ciphertexts, ckks
from fedveil.crypto.linear_mac import MAC_WORDS, MODULUS, linear_mac, mac_words
from fedveil.errors import ConfigError, ProtocolError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Cover, Protection, Release, Released
from fedveil.protocol.client_state import ClientState, Group
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.messages import FromClient, Reply, Request, releases_of, releases_of_all
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.phases import Ask, Gathered
from fedveil.secrets import SecretSource
from fedveil.shapes import octets
from fedveil.uplink.grid import FixedPoint, check_value_range, saturated
from fedveil.uplink.masked import UNMASKING_MESSAGES, Masked
from fedveil.uplink.unmasking import MaskedSum, MaskedUpload

_PAD, _MAC = "pad", "mac"
_NOTHING: NDArray[np.uint64] = np.empty(0, dtype=np.uint64)


@message
@dataclass(frozen=True, eq=False)
class Ciphertext(FromClient):
    """A vector under the group's public key."""

    data: Annotated[Tensor, octets("ciphertext"), Released("the hidden part, encrypted")]


Hidden = Ciphertext | MaskedUpload


class HiddenSum(Protocol):
    """Server side: a sum that only clients can read."""

    def add(self, part: Hidden) -> None:
        """Fold one in, or refuse it and stay unchanged."""
        ...

    def open(self, gathered: Gathered) -> Ask | None:
        """The next phase needed before the sum can be read by clients, or None when they can."""
        ...

    def total(self) -> Tensor:
        """The sum, as it is sent to clients; a ProtocolError says why there is none."""
        ...


class Cipher(OpeningKeys, Protocol):
    """Hides numbers of up to ± `value_range` from the server, which can add them; clients read the sum.

    What is beyond the range is cut off, and nobody is told: a refusal would let the server measure it.
    """

    @property
    def value_range(self) -> float:
        """The largest number it takes."""
        ...

    @property
    def masks(self) -> Masked | None:
        """The masks under which it hides, where it does."""
        ...

    def prepare(self) -> None:
        """Refuse to begin where a package is missing; start what takes long to start."""
        ...

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Refuse rounds of so few, or so many, clients that it could not hide or hold their sum (ConfigError)."""
        ...

    def hide(
        self,
        state: ClientState,
        values: Tensor,
        context: RoundContext,
        *,
        secrets: SecretSource,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> tuple[ClientState, Hidden]:
        """Client side: cover a vector before it leaves; `transcript` is what others must have been told, too.

        `beside` are the words that travel openly with it, which a cipher that authenticates sums takes in as well.
        """
        ...

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> HiddenSum:
        """Server side: where a round's hidden vectors are added."""
        ...

    def read(
        self,
        group: Group,
        total: Tensor,
        contributors: Sequence[int],
        context: RoundContext,
        *,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> Tensor:
        """Client side: the sum of what `contributors` of the round have hidden, in float64.

        `transcript` is what this client was told before it has hidden its own, `beside` the sum of what went openly.
        """
        ...

    @property
    def authentic(self) -> bool:
        """Whether clients notice a sum that was changed on its way."""
        ...

    @property
    def with_client(self) -> Protection:
        """What is left of the hiding against a server with one client on its side."""
        ...

    @property
    def hiding(self) -> str:
        """How it hides, in a few words."""
        ...

    def releases(self) -> tuple[Release, ...]:
        """What else it gives away, field by field."""
        ...

    def assumptions(self, run: RunFacts) -> tuple[str, ...]:
        """What hiding under it assumes."""
        ...


@dataclass(frozen=True)
class Pads(OpeningKeys):
    """Fixed point modulo 2⁶⁴ under masks that cancel in the sum, and pads that only clients can take off.

    Every padding client adds a stream that follows from the group key, its number and the round. Members
    know the streams, so they can read the sum once the masks have cancelled; the server sees uniform
    words, before and after adding; and a client on the server's side takes off the pads but no mask.

    As many clients pad as it takes for one of them to be among any quorum of survivors: with a single
    padding client, a server could say that just this one did not arrive, and read the sum.

    With every vector travels a code of it that adds up, under the same masks and pads, and of what is `beside` it
    (`crypto/linear_mac.py`); of each contributor's there is something that only it adds. So members refuse sums that
    are not those of the contributors named, whatever is hidden in them: what they refuse tells a server nothing.

    The last `bare` words have no pad: of those the server is to read the sum, and nothing else.
    """

    masks: Masked
    bare: int = 0

    hiding = "masks modulo 2^64 that cancel in the sum, and pads that only clients can take off"
    with_client: ClassVar[Protection] = "masked"  # between honest clients they stay
    authentic = True

    def prepare(self) -> None:
        """Nothing."""

    @property
    def value_range(self) -> float:
        """The largest number it takes."""
        return self.masks.value_range

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As masks have it."""
        self.masks.fits(clients, asked=asked)

    def codec(self, context: RoundContext) -> FixedPoint:
        """Fixed point for this cohort."""
        return FixedPoint(self.value_range, len(context.cohort))

    def padding(self, context: RoundContext) -> tuple[int, ...]:
        """Who pads: the lowest numbers of the cohort, one more than may be missing."""
        members = tuple(sorted(context.cohort))
        return members[: len(members) - self.masks.quorum.of(len(members)) + 1]

    def hide(
        self,
        state: ClientState,
        values: Tensor,
        context: RoundContext,
        *,
        secrets: SecretSource,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> tuple[ClientState, Hidden]:
        """Encode, authenticate, pad, mask."""
        words = self.codec(context).encode(values)
        return self.hide_words(state, words, context, secrets=secrets, transcript=transcript, beside=beside)

    def hide_words(
        self,
        state: ClientState,
        words: NDArray[np.uint64],
        context: RoundContext,
        *,
        secrets: SecretSource,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> tuple[ClientState, MaskedUpload]:
        """Authenticate, pad and mask integers."""
        from fedveil.crypto.keys import add_mask

        context.check_member(state.client)
        code = _code(state.membership(), (state.client,), context, transcript, words, beside)
        words = np.concatenate([mac_words(code), words])
        if state.client in self.padding(context):
            add_mask(self._padded(words), _pad_seed(state.membership(), state.client, context), wide=MAC_WORDS)
        return self.masks.cover(state, words, context, secrets=secrets, transcript=transcript, wide=MAC_WORDS)

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Reveal shares of masks."""
        return self.masks.answer(state, request, private)

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> PaddedSum:
        """A sum modulo 2⁶⁴ that stays padded."""
        masked = self.masks.sum_of(length + MAC_WORDS, context, codec=None, name="vote", wide=MAC_WORDS)
        return PaddedSum(self.masks, masked, context)

    def read(
        self,
        group: Group,
        total: Tensor,
        contributors: Sequence[int],
        context: RoundContext,
        *,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> Tensor:
        """Take off the contributors' pads, check, decode."""
        codec = self.codec(context)
        words = self.read_words(group, total, contributors, context, transcript=transcript, beside=beside)
        if not codec.plausible(words, addends=len(contributors)):
            raise ProtocolError(f"the sum of round {context.round // 2 + 1} is beyond what clients may send")
        return torch.from_numpy(codec.decode(words))

    def read_words(
        self,
        group: Group,
        total: Tensor,
        contributors: Sequence[int],
        context: RoundContext,
        *,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> NDArray[np.uint64]:
        """Take off the contributors' pads, and refuse what they have not sent, or not after this `transcript`."""
        code, words = np.split(self.unpadded(group, total, contributors, context), [MAC_WORDS])
        if not np.array_equal(code, mac_words(_code(group, contributors, context, transcript, words, beside))):
            raise ProtocolError(
                f"the sum of round {context.round // 2 + 1} is not what clients have sent: it was changed on its way, "
                "its list of contributors is wrong, or a client has spoilt it or has another group key"
            )
        return words

    def unpadded(
        self, group: Group, total: Tensor, contributors: Sequence[int], context: RoundContext
    ) -> NDArray[np.uint64]:
        """Take off the contributors' pads: the code, then the words that it is of."""
        from fedveil.crypto.keys import add_mask

        if total.dtype != torch.int64 or total.dim() != 1 or len(total) < MAC_WORDS + self.bare:
            raise ProtocolError("a padded sum is malformed")
        words = total.cpu().numpy().copy().view(np.uint64)
        for client in sorted(set(self.padding(context)) & set(contributors)):
            add_mask(self._padded(words), _pad_seed(group, client, context), subtract=True, wide=MAC_WORDS)
        return words

    def _padded(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return words[: max(len(words) - self.bare, 0)]

    def read_bare(self, total: Tensor, contributors: Sequence[int], context: RoundContext) -> Tensor:
        """Server side: the sum of what has no pad, in float64."""
        words = total.cpu().numpy()[len(total) - self.bare :].copy().view(np.uint64)
        codec = self.codec(context)
        if not codec.plausible(words, addends=len(contributors)):
            raise ProtocolError(f"the sum of round {context.round // 2 + 1} is beyond what clients may send")
        return torch.from_numpy(codec.decode(words))

    def releases(self) -> tuple[Release, ...]:
        """The shares dealt, and what opens masks."""
        return (*releases_of(MaskedUpload, name="hidden"), *releases_of_all(*UNMASKING_MESSAGES))

    def assumptions(self, run: RunFacts) -> tuple[str, ...]:
        """The group's secrets, and what masks rest on."""
        return (caveats.GROUP, *self.masks.collusion_assumptions(run))


def _pad_seed(group: Group, client: int, context: RoundContext) -> bytes:
    return group.seed(round=context.round, attempt=context.attempt, purpose=f"{_PAD} of {client}")


def _code(
    group: Group, clients: Sequence[int], context: RoundContext, transcript: bytes, *vectors: NDArray[np.uint64]
) -> int:
    """The code of what these clients of the round's cohort have sent in all, after they were told this."""
    # The cohort is the server's word, and with it steps and pads.
    told = hashlib.sha256(repr((sorted(context.cohort), transcript)).encode()).hexdigest()

    def seed(what: str) -> bytes:
        return group.seed(round=context.round, attempt=context.attempt, purpose=f"{what} among {told}")

    own = sum(int.from_bytes(seed(f"{_MAC} of {client}")) for client in clients)
    return (linear_mac(seed(_MAC), *vectors) + own) % MODULUS


class PaddedSum:
    """Σ of masked and padded words; opening it takes off the masks and leaves the pads."""

    def __init__(self, masks: Masked, masked: MaskedSum, context: RoundContext) -> None:
        self._masks = masks
        self.masked = masked
        self._context = context

    def add(self, part: Hidden) -> None:
        """Fold one in."""
        if not isinstance(part, MaskedUpload):
            raise ProtocolError("a ciphertext arrived where masked words belong")
        self.masked.add(part)

    def open(self, gathered: Gathered) -> Ask | None:
        """Have the survivors reveal."""
        return self._masks.open(self.masked, gathered, self._context)

    def spoilers(self, *, but: Collection[int] = ()) -> tuple[int, ...]:
        """Who has dealt shares of its mask that cannot be opened, by the word of others than `but`."""
        return self.masked.spoilers(but=but)

    def total(self) -> Tensor:
        """The sum, masks off, pads on."""
        return torch.from_numpy(self.masked.words().view(np.int64))


@dataclass(frozen=True)
class Ckks:
    """Public-key encryption that the server can add under; all clients share the secret key.

    Any client together with the server therefore opens what any other client has sent. Ring and scale are the smallest
    and largest that do, unless `degree` and `scale_bits` say which.
    """

    value_range: float
    degree: int | None = None
    scale_bits: int | None = None

    def __post_init__(self) -> None:
        check_value_range(self.value_range)
        if self.degree is not None or self.scale_bits is not None:
            try:
                self._parameters(1)  # what does not do for one does not for many
            except ConfigError as reason:
                raise ConfigError(
                    f"{spelled('ckks_degree')} and {spelled('ckks_scale')} (scale_bits) as given do not do. {reason}"
                ) from reason

    def _parameters(self, clients: int) -> ckks.Parameters:
        """The ring, the moduli and the scale for sums of so many."""
        return ckks.choose(addends=clients, largest=self.value_range, degree=self.degree, scale_bits=self.scale_bits)

    masks = None
    hiding = "CKKS under a key that all clients share"
    with_client: ClassVar[Protection] = "open"  # every client holds the key
    authentic = False  # its sums are approximate, and whoever adds can add what it likes

    def prepare(self) -> None:
        """Find the package, and start the processes that share its work."""
        ckks.require()
        ciphertexts.workers()

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As far as there are parameters for it; the sum of two gives each of them the other's contribution."""
        if clients < 3:
            raise ConfigError(
                f"Hidden sums need at least three clients in a round, not {clients}: of two, either could subtract its "
                "own contribution from the sum and read the other's. Use more clients."
            )
        try:
            self._parameters(clients)
        except ConfigError as reason:
            raise ConfigError(f"value_range = {self.value_range:g} does not fit CKKS. {reason}") from reason

    def assumptions(self, run: RunFacts) -> tuple[str, ...]:
        """The lattice, and the key that all clients share."""
        lattice = caveats.LATTICE
        if self.degree is not None or self.scale_bits is not None:
            ring = self._parameters(max(run.cohort, 1))
            moduli = " + ".join(map(str, ring.moduli))
            lattice += f": a ring of degree {ring.degree}, moduli of {moduli} bits and a scale of 2^{ring.scale_bits}"
        return (lattice, caveats.SHARED_KEY)

    def fresh_opening(self, clients: int) -> bytes:
        """A secret key for sums of up to `clients`."""
        return ckks.generate(self._parameters(clients)).secret_bytes()

    def public_of(self, opening: bytes) -> bytes:
        """The public key that belongs to it."""
        return ckks.SecretKey.from_bytes(opening).public_bytes()

    def check_public(self, public: bytes) -> None:
        """Refuse bytes that are no key under which anything can be added."""
        ckks.PublicKey.from_bytes(public)

    def hide(
        self,
        state: ClientState,
        values: Tensor,
        context: RoundContext,
        *,
        secrets: SecretSource,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> tuple[ClientState, Hidden]:
        """Encrypt; what is beyond the range is cut off."""
        key = ckks.SecretKey.from_bytes(state.membership().opening)
        return state, Ciphertext(from_bytes(ckks.encrypt(saturated(values, self.value_range), key.public)))

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> EncryptedSum:
        """A sum of ciphertexts."""
        return EncryptedSum(ckks.PublicKey.from_bytes(public), length)

    def read(
        self,
        group: Group,
        total: Tensor,
        contributors: Sequence[int],
        context: RoundContext,
        *,
        transcript: bytes = b"",
        beside: NDArray[np.uint64] = _NOTHING,
    ) -> Tensor:
        """Decrypt the sum, rounded to multiples of 2⁻²⁰."""
        if total.dtype != torch.uint8 or total.dim() != 1:
            raise ProtocolError("a sum of ciphertexts is malformed")
        content = to_bytes(total)
        if ckks.summary(content).addends != len(contributors):
            raise ProtocolError(
                f"the sum of round {context.round // 2 + 1} is of {ckks.summary(content).addends} ciphertexts, and "
                f"{len(contributors)} contributors are named"
            )
        return torch.from_numpy(ckks.decrypt(content, ckks.SecretKey.from_bytes(group.opening)))

    def releases(self) -> tuple[Release, ...]:
        """Ciphertexts."""
        return releases_of(Ciphertext, name="hidden", covers={"data": Cover(hiding=self.hiding)})


class EncryptedSum:
    """Σ of ciphertexts, on the server, which has no key to open it."""

    def __init__(self, key: ckks.PublicKey, length: int) -> None:
        self._adder = ckks.Adder(key, length=length)

    def add(self, part: Hidden) -> None:
        """Fold one in."""
        if not isinstance(part, Ciphertext) or part.data.dtype != torch.uint8:
            raise ProtocolError("masked words arrived where a ciphertext belongs")
        content = to_bytes(part.data)
        # A sum counts for more than its sender, and clients would refuse the round's sum for it.
        if ckks.summary(content).addends != 1:
            raise ProtocolError("a sum of ciphertexts arrived where one client's belongs")
        self._adder.add(content)

    def open(self, gathered: Gathered) -> Ask | None:
        """Whoever is missing is simply not in it."""
        return None

    def total(self) -> Tensor:
        """The sum, encrypted."""
        return from_bytes(self._adder.total())
