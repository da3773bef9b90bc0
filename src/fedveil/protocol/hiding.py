"""Hiding vectors from a server that adds them: what a cipher must offer, and the one made of masks and pads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Protection, Release
from fedveil.protocol.asking import Ask, Gathered
from fedveil.protocol.group import Group, OpeningKeys
from fedveil.protocol.masked import Masked
from fedveil.protocol.masked_releases import dealing_releases, unmasking_releases
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.state import ClientState
from fedveil.protocol.unmasking import MaskedSum, MaskedUpload
from fedveil.protocol.wire import message
from fedveil.secrets import SecretSource
from fedveil.shapes import octets
from fedveil.uplink.fixed_point import FixedPoint

_PAD = "pad"
_ENVELOPE = (
    Release("hidden.client", "client", ("server",), "the client's number"),
    Release("hidden.round", "client", ("server",), "the round's number"),
    Release("hidden.attempt", "client", ("server",), "the round's repetition"),
)


@message
@dataclass(frozen=True, eq=False)
class Ciphertext:
    """A vector under the group's public key."""

    data: Annotated[Tensor, octets("ciphertext")]


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
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def value_range(self) -> float:
        """The largest number it takes."""
        ...

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Refuse rounds of so few, or so many, clients that it could not hide or hold their sum (ConfigError)."""
        ...

    def hide(
        self, state: ClientState, values: Tensor, context: RoundContext, *, secrets: SecretSource, story: bytes = b""
    ) -> tuple[ClientState, Hidden]:
        """Client side: cover a vector before it leaves; `story` is what others must have been told, too."""
        ...

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> HiddenSum:
        """Server side: where a round's hidden vectors are added."""
        ...

    def read(self, group: Group, total: Tensor, contributors: Sequence[int], context: RoundContext) -> Tensor:
        """Client side: the sum of what `contributors` of the round have hidden, in float64."""
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


@dataclass(frozen=True)
class Pads:
    """Fixed point modulo 2⁶⁴ under masks that cancel in the sum, and pads that only clients can take off.

    Every padding client adds a stream that follows from the group key, its number and the round. Members
    know the streams, so they can read the sum once the masks have cancelled; the server sees uniform
    words, before and after adding; and a client on the server's side takes off the pads but no mask.

    As many clients pad as it takes for one of them to be among any quorum of survivors: with a single
    padding client, a server could say that just this one did not arrive, and read the sum.
    """

    masks: Masked

    @property
    def name(self) -> str:
        """What it is called."""
        return "pads"

    @property
    def value_range(self) -> float:
        """The largest number it takes."""
        return self.masks.value_range

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As masks have it."""
        self.masks.fits(clients, asked=asked)

    def fresh_opening(self, clients: int) -> bytes:
        """The group key is enough."""
        return b""

    def public_of(self, opening: bytes) -> bytes:
        """There is none."""
        return b""

    def check_public(self, public: bytes) -> None:
        """There must be none."""
        if public:
            raise ProtocolError("a founder sent a public key where nothing is encrypted")

    def codec(self, context: RoundContext) -> FixedPoint:
        """Fixed point for this cohort."""
        return FixedPoint(self.value_range, len(context.cohort))

    def padding(self, context: RoundContext) -> tuple[int, ...]:
        """Who pads: the lowest numbers of the cohort, one more than may be missing."""
        members = tuple(sorted(context.cohort))
        return members[: len(members) - self.masks.quorum.of(len(members)) + 1]

    def hide(
        self, state: ClientState, values: Tensor, context: RoundContext, *, secrets: SecretSource, story: bytes = b""
    ) -> tuple[ClientState, Hidden]:
        """Encode, pad, mask."""
        return self.hide_words(state, self.codec(context).encode(values), context, secrets=secrets, story=story)

    def hide_words(
        self,
        state: ClientState,
        words: NDArray[np.uint64],
        context: RoundContext,
        *,
        secrets: SecretSource,
        story: bytes = b"",
    ) -> tuple[ClientState, MaskedUpload]:
        """Pad and mask integers, in place."""
        from fedveil.crypto.stream import add_mask

        context.check_member(state.client)
        if state.client in self.padding(context):
            add_mask(words, _pad_seed(state.membership(), state.client, context))
        return self.masks.cover(state, words, context, secrets=secrets, story=story)

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Reveal shares of masks."""
        return self.masks.answer(state, request, private)

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> PaddedSum:
        """A sum modulo 2⁶⁴ that stays padded."""
        return PaddedSum(self.masks, self.masks.sum_of(length, context, codec=None), context)

    def read(self, group: Group, total: Tensor, contributors: Sequence[int], context: RoundContext) -> Tensor:
        """Take off the contributors' pads and decode."""
        codec = self.codec(context)
        words = self.read_words(group, total, contributors, context)
        if not codec.plausible(words, addends=len(contributors)):
            raise ProtocolError(
                f"the sum of round {context.round // 2 + 1} is beyond what clients may send: its list of contributors "
                "is wrong, or a client has another group key"
            )
        return torch.from_numpy(codec.decode(words))

    def read_words(
        self, group: Group, total: Tensor, contributors: Sequence[int], context: RoundContext
    ) -> NDArray[np.uint64]:
        """Take off the contributors' pads."""
        from fedveil.crypto.stream import add_mask

        if total.dtype != torch.int64 or total.dim() != 1:
            raise ProtocolError("a padded sum is malformed")
        words = total.cpu().numpy().copy().view(np.uint64)
        for client in sorted(set(self.padding(context)) & set(contributors)):
            add_mask(words, _pad_seed(group, client, context), subtract=True)
        return words

    @property
    def with_client(self) -> Protection:
        """Masks between honest clients stay."""
        return "masked"

    @property
    def hiding(self) -> str:
        """How it hides."""
        return "masks modulo 2^64 that cancel in the sum, and pads that only clients can take off"

    def releases(self) -> tuple[Release, ...]:
        """The shares dealt, and what opens masks."""
        return (*_ENVELOPE, *dealing_releases("hidden"), *unmasking_releases(evidence=False))


def _pad_seed(group: Group, client: int, context: RoundContext) -> bytes:
    return group.seed(round=context.round, attempt=context.attempt, purpose=f"{_PAD} of {client}")


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

    def total(self) -> Tensor:
        """The sum, masks off, pads on."""
        return torch.from_numpy(self.masked.words().view(np.int64))
