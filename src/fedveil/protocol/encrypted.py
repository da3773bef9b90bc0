"""CKKS as a cipher: every client encrypts under the group's public key, every client can open the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.crypto import ckks
from fedveil.errors import ConfigError, ProtocolError
from fedveil.ledger.releases import Protection, Release
from fedveil.protocol.asking import Ask, Gathered
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.group import Group
from fedveil.protocol.hiding import Ciphertext, Hidden
from fedveil.protocol.parts import RoundContext
from fedveil.protocol.state import ClientState
from fedveil.secrets import SecretSource
from fedveil.uplink.fixed_point import check_value_range, saturated


@dataclass(frozen=True)
class Ckks:
    """Public-key encryption that the server can add under; all clients share the secret key.

    Any client together with the server therefore opens what any other client has sent.
    """

    value_range: float

    def __post_init__(self) -> None:
        check_value_range(self.value_range)

    @property
    def name(self) -> str:
        """What it is called."""
        return "ckks"

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As far as there are parameters for it; the sum of two gives each of them the other's contribution."""
        if clients < 3:
            raise ConfigError(
                f"Hidden sums need at least three clients in a round, not {clients}: of two, either could subtract its "
                "own contribution from the sum and read the other's. Use more clients."
            )
        try:
            ckks.choose(addends=clients, largest=self.value_range)
        except ConfigError as reason:
            raise ConfigError(f"value_range = {self.value_range:g} does not fit CKKS. {reason}") from reason

    def fresh_opening(self, clients: int) -> bytes:
        """A secret key for sums of up to `clients`."""
        return ckks.generate(ckks.choose(addends=clients, largest=self.value_range)).secret_bytes()

    def public_of(self, opening: bytes) -> bytes:
        """The public key that belongs to it."""
        return ckks.SecretKey.from_bytes(opening).public_bytes()

    def check_public(self, public: bytes) -> None:
        """Refuse bytes that are no key under which anything can be added."""
        ckks.PublicKey.from_bytes(public)

    def hide(
        self, state: ClientState, values: Tensor, context: RoundContext, *, secrets: SecretSource, story: bytes = b""
    ) -> tuple[ClientState, Hidden]:
        """Encrypt; what is beyond the range is cut off."""
        key = ckks.SecretKey.from_bytes(state.membership().opening)
        return state, Ciphertext(from_bytes(ckks.encrypt(saturated(values, self.value_range), key.public)))

    def accumulator(self, length: int, context: RoundContext, *, public: bytes) -> EncryptedSum:
        """A sum of ciphertexts."""
        return EncryptedSum(ckks.PublicKey.from_bytes(public), length)

    def read(self, group: Group, total: Tensor, contributors: Sequence[int], context: RoundContext) -> Tensor:
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

    @property
    def with_client(self) -> Protection:
        """Nothing: every client holds the key."""
        return "open"

    @property
    def hiding(self) -> str:
        """How it hides."""
        return "CKKS under a key that all clients share"

    def releases(self) -> tuple[Release, ...]:
        """Ciphertexts."""
        return (
            Release(
                "hidden.data", "client", ("server",), "the hidden part, encrypted", hiding=self.hiding, about="public"
            ),
        )


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
