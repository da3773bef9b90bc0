"""Keys: a signing key per client that the roster knows, a fresh agreement key per run, a secret per pair.

A pair's secret is X25519(own, peer), extracted with the run's name; everything used in a round is
expanded from it for that round, attempt, purpose and pair alone, so that revealing one round's seed
reveals nothing else.
"""

from __future__ import annotations

import os
import struct
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hmac import HMAC
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from fedveil.errors import ConfigError, ProtocolError
from fedveil.secrets import Guarded, SecretStream

SEED_BYTES = 32
_CONTEXT = b"fedveil agreement 1"


def _raw(public: X25519PublicKey | Ed25519PublicKey) -> bytes:
    return public.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _announcement(*, run: str, client: int, public: bytes, samples: int) -> bytes:
    name = run.encode()
    return _CONTEXT + struct.pack("<IQQ", len(name), client, samples) + name + public


class Identity(Guarded):
    """A client's long-term signing key; its public half stands in the roster."""

    def __init__(self, stream: SecretStream) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(stream.bytes(32))

    @property
    def public(self) -> bytes:
        """The 32 bytes that belong into a roster."""
        return _raw(self._key.public_key())

    def sign_key(self, *, run: str, client: int, public: bytes, samples: int = 0) -> bytes:
        """Vouch for an agreement key and a number of samples, for this run and client only."""
        return self._key.sign(_announcement(run=run, client=client, public=public, samples=samples))

    def sign(self, content: bytes, *, purpose: str) -> bytes:
        """Vouch for `content`, for this purpose only."""
        return self._key.sign(_statement(content, purpose))


def _statement(content: bytes, purpose: str) -> bytes:
    label = purpose.encode()
    return b"fedveil statement 1" + struct.pack("<I", len(label)) + label + content


def check_key_signature(
    identity: bytes, signature: bytes, *, run: str, client: int, public: bytes, samples: int = 0
) -> None:
    """Refuse an agreement key that `identity` did not vouch for, naming the client."""
    if not _signed(identity, signature, _announcement(run=run, client=client, public=public, samples=samples)):
        raise ProtocolError(
            f"the announcement of client {client} is not signed by the key the roster pins for it: "
            "somebody on the way has replaced it, or the roster is out of date"
        )


def signed_by(identity: bytes, signature: bytes, content: bytes, *, purpose: str) -> bool:
    """Whether `identity` vouched for `content` for this purpose."""
    return _signed(identity, signature, _statement(content, purpose))


@lru_cache(maxsize=1 << 16)
def _signed(identity: bytes, signature: bytes, content: bytes) -> bool:
    # Remembered, because in a simulation every client checks the same statements.
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, content)
    except (InvalidSignature, ValueError):
        return False
    return True


class PairSecret(Guarded):
    """What two clients share for one run; only they can expand it."""

    __slots__ = ("_extracted", "_pair", "_run")

    def __init__(self, extracted: bytes, *, run: str, pair: tuple[int, int]) -> None:
        self._extracted = extracted
        self._run = run
        self._pair = pair

    def seed(self, *, round: int, attempt: int, purpose: str) -> bytes:
        """32 bytes for one round, attempt and purpose (HKDF-Expand)."""
        low, high = self._pair
        name, label = self._run.encode(), purpose.encode()
        info = struct.pack("<IQQQQ", len(name), round, attempt, low, high) + name + label
        return HKDFExpand(hashes.SHA256(), SEED_BYTES, info).derive(self._extracted)


class RunKey(Guarded):
    """A client's agreement key for one run."""

    def __init__(self, stream: SecretStream) -> None:
        self._key = X25519PrivateKey.from_private_bytes(stream.bytes(32))

    @property
    def public(self) -> bytes:
        """The 32 bytes to announce."""
        return _raw(self._key.public_key())

    def agree(self, peer_public: bytes, *, run: str, own: int, peer: int) -> PairSecret:
        """The secret shared with `peer`; both sides get the same (HKDF-Extract of X25519)."""
        if own == peer:
            raise ProtocolError(f"client {own} was asked to agree on a key with itself")
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(peer_public))
        except ValueError as reason:  # wrong length, or a point of small order
            raise ProtocolError(f"client {peer} presented a key that is not a usable X25519 key") from reason
        return PairSecret(extract(shared, salt=run.encode()), run=run, pair=(min(own, peer), max(own, peer)))


def extract(shared: bytes, *, salt: bytes) -> bytes:
    """HKDF-Extract with SHA-256 (RFC 5869): HMAC(salt, input key)."""
    mac = HMAC(salt or bytes(32), hashes.SHA256())
    mac.update(shared)
    return mac.finalize()


@dataclass(frozen=True)
class Roster:
    """Clients' public signing keys by number."""

    keys: Mapping[int, bytes]

    def check(self, *, client: int, run: str, public: bytes, signature: bytes, samples: int = 0) -> None:
        """Refuse an agreement key that was swapped on the way, naming whose it was said to be."""
        identity = self.keys.get(client)
        if identity is None:
            raise ProtocolError(f"client {client} is not in the roster")
        check_key_signature(identity, signature, run=run, client=client, public=public, samples=samples)

    def to_toml(self) -> str:
        """The roster as a file."""
        return "[clients]\n" + "".join(f'{number} = "{key.hex()}"\n' for number, key in sorted(self.keys.items()))

    @staticmethod
    def parse(text: str, *, where: str = "the roster") -> Roster:
        """A roster from its file's text; every mistake is named, with `where` it stands."""
        try:
            clients = tomllib.loads(text).get("clients")
        except tomllib.TOMLDecodeError as reason:
            raise ConfigError(f"{where} is not valid TOML: {reason}.") from reason
        if not isinstance(clients, dict) or not clients:
            raise ConfigError(f"{where} has no [clients] table with keys in it.")
        keys: dict[int, bytes] = {}
        for number, digits in clients.items():
            try:
                key = bytes.fromhex(digits)
            except (TypeError, ValueError):
                key = b""
            if not str(number).isdecimal() or len(key) != 32:
                raise ConfigError(f"{where}: client {number!r} must be a number with a key of 64 hexadecimal digits.")
            keys[int(number)] = key
        if len(set(keys.values())) < len(keys):
            raise ConfigError(f"{where} gives two clients the same key.")
        return Roster(keys)


_NONCE = 12


def seal(plain: bytes, *, key: bytes, purpose: str) -> bytes:
    """AES-256-GCM under a fresh nonce; `purpose` is authenticated with it."""
    nonce = os.urandom(_NONCE)
    return nonce + AESGCM(key).encrypt(nonce, plain, purpose.encode())


def unseal(sealed: bytes, *, key: bytes, purpose: str) -> bytes:
    """The plain bytes, or a ProtocolError if key, purpose or content do not match."""
    try:
        return AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], purpose.encode())
    except (InvalidTag, ValueError) as reason:
        raise ProtocolError(f"a sealed {purpose} was damaged, or sealed under another key") from reason


# --- keyed streams: words for masks and noise that both ends of a pair can make again
#
# AES-128 in counter mode over zeros, written straight into the array it is for. The 32-byte seed
# gives the key (first half) and the first counter block (second half).

Words = NDArray[np.uint64]
Blocks = Callable[[NDArray[np.int64], int], Words]

_BLOCK = 16
_CHUNK = 1 << 14
_ZEROS = memoryview(bytes(8 * _CHUNK))


class WordStream:
    """The 64-bit words of one seed, in order; reading goes on where the last read ended."""

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise ValueError(f"a stream's seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._cipher = Cipher(algorithms.AES128(seed[:16]), modes.CTR(seed[16:])).encryptor()
        # update_into wants room for one more block than it writes.
        self._room = np.empty(8 * _CHUNK + _BLOCK, dtype=np.uint8)

    def take(self, count: int) -> Words:
        """The next `count` (at most 2¹⁴) words; valid until the next call."""
        written = self._cipher.update_into(_ZEROS[: 8 * count], self._room.data)
        return self._room[:written].view(np.uint64)


def block_function(key: bytes) -> Blocks:
    """Random access to words: two for each (place, purpose), the AES-128 of that pair under a 16-byte key."""
    cipher = Cipher(algorithms.AES128(key), modes.ECB()).encryptor()

    def blocks(places: NDArray[np.int64], purpose: int) -> Words:
        pairs = np.empty((len(places), 2), dtype="<u8")
        pairs[:, 0], pairs[:, 1] = places, purpose
        room = np.empty(pairs.nbytes + _BLOCK, dtype=np.uint8)
        written = cipher.update_into(pairs.view(np.uint8).reshape(-1).data, room.data)
        return room[:written].view("<u8").reshape(-1, 2)

    return blocks


def add_mask(total: Words, seed: bytes, *, subtract: bool = False, wide: int = 0) -> None:
    """total ± the seed's words, as `add_words` adds."""
    stream = WordStream(seed)
    for start in range(0, len(total), _CHUNK):
        part = total[start : start + _CHUNK]
        add_words(part, stream.take(len(part)), subtract=subtract, wide=wide if start == 0 else 0)


def add_words(total: Words, part: Words, *, subtract: bool = False, wide: int = 0) -> None:
    """total ± part in place, each word modulo 2⁶⁴; the first `wide` of them are one number, the least word first."""
    if wide:
        own, other = (int.from_bytes(words[:wide].tobytes(), "little") for words in (total, part))
        number = (own - other if subtract else own + other) % (1 << 64 * wide)
        total[:wide] = np.frombuffer(number.to_bytes(8 * wide, "little"), dtype="<u8")
    operation = np.subtract if subtract else np.add
    operation(total[wide:], part[wide:], out=total[wide:])
