"""Keys: the public one encrypts and adds, the secret one decrypts.

Both travel as bytes with their parameters and a checksum in front. TenSEAL draws them from the operating
system; there is no way to derive them from a seed.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np

from fedveil.crypto import ciphertexts
from fedveil.crypto.ciphertexts import Context, Level
from fedveil.crypto.ckks.ring import Parameters
from fedveil.errors import ConfigError, MissingExtraError, ProtocolError, missing_extra
from fedveil.secrets import Guarded

KEY_ID_BYTES = 8
_PUBLIC, _SECRET = b"FVCP\x01", b"FVCS\x01"
_CHECKSUM = 16
_FIELDS = struct.Struct("<IBBQd")
_LENGTH = struct.Struct("<I")
_KEPT = 8
_PROBE = 0.5

Key = TypeVar("Key")


class _Generated(Context, Protocol):
    """A context that TenSEAL has just made."""

    global_scale: float

    def serialize(
        self, save_public_key: bool, save_secret_key: bool, save_galois_keys: bool, save_relin_keys: bool
    ) -> bytes: ...


class Material(Guarded):
    """A TenSEAL context, its bytes, and their digest, by which worker processes know it."""

    __slots__ = ("context", "digest", "serialized")

    def __init__(self, serialized: bytes) -> None:
        self.context: Context = ciphertexts.restored(serialized)
        self.serialized = serialized
        self.digest = hashlib.sha256(serialized).digest()


class PublicKey:
    """Encrypts and adds; `public_bytes` is what everybody may have."""

    def __init__(self, parameters: Parameters, material: Material, level: Level) -> None:
        self.parameters = parameters
        self.material = material
        self.level = level
        self._bytes = _sealed(_PUBLIC, _packed(parameters) + material.serialized)
        self.key_id = hashlib.sha256(self._bytes).digest()[:KEY_ID_BYTES]

    def public_bytes(self) -> bytes:
        """Everything needed to encrypt and to add, and nothing that decrypts."""
        return self._bytes

    @staticmethod
    def from_bytes(content: bytes) -> PublicKey:
        """The key that `public_bytes` gave; a ProtocolError if the bytes are damaged."""
        return _public_keys.get(content, _restore_public)

    def __repr__(self) -> str:
        return f"<PublicKey {self.key_id.hex()}>"


class SecretKey(Guarded):
    """Decrypts; `secret_bytes` must leave the process only under encryption."""

    def __init__(self, public: PublicKey, material: Material) -> None:
        self._public = public
        self._material = material

    @property
    def public(self) -> PublicKey:
        """The half that encrypts and adds."""
        return self._public

    @property
    def parameters(self) -> Parameters:
        """The ring, the scale and the sums they are meant for."""
        return self._public.parameters

    @property
    def key_id(self) -> bytes:
        """Eight bytes that tell this pair of keys from others; they vouch for nothing."""
        return self._public.key_id

    @property
    def material(self) -> Material:
        """TenSEAL's context with the secret key in it."""
        return self._material

    def public_bytes(self) -> bytes:
        """Everything needed to encrypt and to add, and nothing that decrypts."""
        return self._public.public_bytes()

    def secret_bytes(self) -> bytes:
        """Everything needed to encrypt, add and decrypt."""
        public = self.public_bytes()
        return _sealed(_SECRET, _LENGTH.pack(len(public)) + public + self._material.serialized)

    @staticmethod
    def from_bytes(content: bytes) -> SecretKey:
        """The key that `secret_bytes` gave; a ProtocolError if the bytes are damaged."""
        return _secret_keys.get(content, _restore_secret)


def generate(parameters: Parameters) -> SecretKey:
    """A fresh pair of keys; no Galois and no relinearisation keys leave it, as sums need none."""
    context = _fresh(parameters)
    public, secret = context.serialize(True, False, False, False), context.serialize(False, True, False, False)
    return SecretKey(_public_key(parameters, public), Material(secret))


class _Cache(Generic[Key]):
    """Keys by the digest of their bytes: in a simulation many clients restore the same one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Key] = OrderedDict()

    def get(self, content: bytes, restore: Callable[[bytes], Key]) -> Key:
        digest = hashlib.sha256(content).digest()
        key = self._kept.pop(digest, None)
        if key is None:
            try:
                key = restore(content)
            except ciphertexts.Refused as reason:
                raise ProtocolError(f"a CKKS key was refused: {reason}") from reason
        self._kept[digest] = key
        while len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return key


_public_keys: _Cache[PublicKey] = _Cache()
_secret_keys: _Cache[SecretKey] = _Cache()


def _restore_public(content: bytes) -> PublicKey:
    body = _unsealed(_PUBLIC, content, "public key")
    parameters, serialized = _unpacked(body)
    return _public_key(parameters, serialized)


def _restore_secret(content: bytes) -> SecretKey:
    body = _unsealed(_SECRET, content, "secret key")
    if len(body) < _LENGTH.size:
        raise ProtocolError("a CKKS secret key is too short")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    public = PublicKey.from_bytes(body[_LENGTH.size : end])
    secret = Material(body[end:])
    probe = ciphertexts.encrypt(public.material.context, np.array([_PROBE])).serialize()
    (read,) = ciphertexts.decrypt(secret.context, probe, size=1, level=public.level)
    if not abs(read - _PROBE) <= public.parameters.error:
        raise ProtocolError("a CKKS secret key does not belong to the public key it came with")
    return SecretKey(public, secret)


def _public_key(parameters: Parameters, serialized: bytes) -> PublicKey:
    expected = _level(parameters)
    material = Material(serialized)
    try:
        level = ciphertexts.level(ciphertexts.encrypt(material.context, np.zeros(1)))
    except Exception as reason:
        raise ProtocolError("a CKKS public key does not encrypt") from reason
    if level != expected:
        raise ProtocolError("a CKKS public key has other parameters than it says")
    return PublicKey(parameters, material, expected)


@lru_cache(maxsize=_KEPT)
def _level(parameters: Parameters) -> Level:
    """What ciphertexts under these parameters look like, whatever a received key claims."""
    return ciphertexts.level(ciphertexts.encrypt(_fresh(parameters), np.zeros(1)))


def _fresh(parameters: Parameters) -> _Generated:
    try:
        import tenseal
    except ImportError as error:
        raise _missing() from error
    context: _Generated = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        parameters.degree,
        coeff_mod_bit_sizes=list(parameters.moduli),
        n_threads=1,
    )
    context.global_scale = parameters.scale
    return context


def require() -> None:
    """Refuse to go on where TenSEAL is not installed."""
    try:
        import tenseal  # noqa: F401
    except ImportError as error:
        raise _missing() from error


def _missing() -> MissingExtraError:
    return missing_extra("tenseal", "he", "Encrypting with CKKS")


def _sealed(magic: bytes, body: bytes) -> bytes:
    return magic + hashlib.sha256(magic + body).digest()[:_CHECKSUM] + body


def _unsealed(magic: bytes, content: bytes, what: str) -> bytes:
    start = len(magic) + _CHECKSUM
    if content[: len(magic)] != magic:
        raise ProtocolError(f"these bytes are not a CKKS {what}")
    body = content[start:]
    if content != _sealed(magic, body):
        raise ProtocolError(f"a CKKS {what} was damaged on its way: its checksum is wrong")
    return body


def _packed(parameters: Parameters) -> bytes:
    moduli = bytes(parameters.moduli)
    fields = (parameters.degree, parameters.scale_bits, len(moduli), parameters.addends, parameters.largest)
    return _FIELDS.pack(*fields) + moduli


def _unpacked(body: bytes) -> tuple[Parameters, bytes]:
    if len(body) < _FIELDS.size:
        raise ProtocolError("a CKKS public key is too short")
    degree, scale_bits, count, addends, largest = _FIELDS.unpack_from(body)
    end = _FIELDS.size + count
    moduli = tuple(body[_FIELDS.size : end])
    try:
        return Parameters(degree, moduli, scale_bits, addends, largest), body[end:]
    except ConfigError as reason:
        raise ProtocolError(f"a CKKS public key has unusable parameters: {reason}") from reason
