"""CKKS for sums: ring and scale (how large a sum may be, how exact, how safe), keys, and encrypted vectors.

A ciphertext of TenSEAL's CKKS that was only ever added to others carries, per coefficient, the
rounding of its two halves when the special (last) modulus is divided away, the second times the
ternary secret, and the rounding of the encoding: a variance of (2 + 2N/3)/12. A slot reads N
coefficients through cosines, so one ciphertext's slots are off by

    σ₁ = √(N/2 · (2 + 2N/3)/12) / scale,      a sum of n by σ = √n · σ₁ on average.

(Measured on N = 4096 and 8192, scales 2³⁰ to 2⁶⁰: within 2 % of it.) The secret is the same in all
ciphertexts, so slots where its transform is large are always worse: by √E with probability e⁻ᴱ. With
8 standard deviations for the rest, no slot of a key is off by more than

    8 · √(ln(N/2) + 20) · σ

but with probability 2·10⁻⁹. float64 arithmetic adds 2⁻⁴⁸ of the largest sum (measured: a quarter of that).

Where that is little enough, the noise is taken away altogether: values are rounded to multiples of a
`grain` of more than twice the noise before they are encrypted, so that the sum is such a multiple too and
the nearest one to what was decrypted is the sum. Decrypting then gives what the values alone determine,
and n addends are off by n · grain/2 at most. Rounding to multiples of 2⁻²⁰ comes last, and adds half of that.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedveil.crypto import ciphertexts
from fedveil.crypto.ciphertexts import Context, Level, Values, Vector
from fedveil.errors import ConfigError, MissingExtraError, NumericError, ProtocolError, missing_extra
from fedveil.secrets import Guarded

PRECISION = 1e-6
"""The largest absolute error a decrypted sum may have."""

ROUNDED = 2.0**-20
"""Decrypted values are rounded to multiples of this.

A CKKS decryption is the sum plus the ciphertext's noise, and the noise is a linear function of the
secret key: whoever holds a ciphertext and is handed its exact decryption can solve for the key (Li
and Micciancio, EUROCRYPT 2021). Rounded to steps far wider than the noise, almost every decryption
is what the sum alone would have given; with a `grain`, every one.
"""

MODULUS_BITS = {4096: 109, 8192: 218, 16384: 438}
"""Degree of the ring → most bits of all moduli together at 128-bit security (HomomorphicEncryption.org)."""

_LARGE = (16384, (60, 60, 60))
_SHAPES = ((4096, (54, 55)), (4096, (60, 49)), (8192, (60, 60, 60)))
_MODULUS_RANGE = range(20, 61)
_MOST_SCALE_BITS = 60
_FLOAT_ERROR = 2.0**-48


@dataclass(frozen=True)
class Parameters:
    """A ring that is safe, and a scale that leaves room and precision for a sum of `addends` values of ± `largest`.

    `moduli` are bit lengths, the special one last. The sum must stay within half of the other moduli's
    product q, with a factor of two to spare: addends · largest · 2^scale_bits ≤ q/4.
    """

    degree: int
    moduli: tuple[int, ...]
    scale_bits: int
    addends: int
    largest: float

    def __post_init__(self) -> None:
        if self.addends < 1:
            raise ConfigError(f"A sum has at least one addend, not {self.addends}.")
        if not 0.0 < self.largest < math.inf:
            raise ConfigError(f"The largest value to encrypt must be a positive number, not {self.largest}.")
        self._check_security()
        self._check_room()
        if not self.error <= PRECISION:
            raise ConfigError(
                f"{self._named()} gives sums of {self.addends} values of up to {self.largest:g} with an error of up "
                f"to {self.error:.2g}, where {PRECISION:g} is needed. Raise scale_bits, or lower the number of "
                "addends or the largest value."
            )

    @property
    def slots(self) -> int:
        """How many values one ciphertext holds."""
        return self.degree // 2

    @property
    def scale(self) -> float:
        """What values are multiplied by before they are rounded to integers."""
        return 2.0**self.scale_bits

    @property
    def deviation(self) -> float:
        """σ: the standard deviation of the noise in a sum of `addends` ciphertexts."""
        coefficient = math.sqrt((2.0 + 2.0 * self.degree / 3.0) / 12.0)
        return math.sqrt(self.addends * self.degree / 2.0) * coefficient / self.scale

    @property
    def noise(self) -> float:
        """What the noise of such a sum exceeds in no slot, but with probability 2·10⁻⁹ per key."""
        return 8.0 * math.sqrt(math.log(self.slots) + 20.0) * self.deviation

    @property
    def grain(self) -> float | None:
        """What values are rounded to multiples of before encryption, a power of two; None where that costs too much."""
        grain = 2.0 ** math.ceil(math.log2(2.0 * self._inexact))
        affordable = grain <= ROUNDED and self.addends * grain / 2.0 + ROUNDED / 2.0 <= PRECISION
        return grain if affordable else None

    @property
    def error(self) -> float:
        """The largest error of a decrypted and rounded sum."""
        return (self._inexact if self.grain is None else self.addends * self.grain / 2.0) + ROUNDED / 2.0

    @property
    def _inexact(self) -> float:
        return self.noise + self.addends * self.largest * _FLOAT_ERROR

    def _named(self) -> str:
        return f"CKKS with degree {self.degree}, moduli {list(self.moduli)} and scale 2^{self.scale_bits}"

    def _check_security(self) -> None:
        _check_degree(self.degree)
        if len(self.moduli) < 2 or not all(bits in _MODULUS_RANGE for bits in self.moduli):
            raise ConfigError(
                f"CKKS needs two or more moduli of {_MODULUS_RANGE[0]} to {_MODULUS_RANGE[-1]} bits, "
                f"the special one last, not {list(self.moduli)}."
            )
        most = MODULUS_BITS[self.degree]
        if sum(self.moduli) > most:
            raise ConfigError(
                f"{self._named()} is below 128-bit security: its moduli have {sum(self.moduli)} bits together, "
                f"and at most {most} are safe. Lower the moduli, or take a larger degree."
            )

    def _check_room(self) -> None:
        if not 1 <= self.scale_bits <= min(sum(self.moduli[:-1]) - 2, _MOST_SCALE_BITS):
            raise ConfigError(
                f"{self._named()} does not work: scale_bits must leave two bits of the moduli before the last one "
                f"and be at most {_MOST_SCALE_BITS}."
            )
        if self.addends * self.largest * self.scale > 2.0 ** (sum(self.moduli[:-1]) - 2):
            raise ConfigError(
                f"{self._named()} has no room for sums of {self.addends} values of up to {self.largest:g}. "
                "Lower scale_bits, the number of addends or the largest value."
            )


def choose(*, addends: int, largest: float, degree: int | None = None, scale_bits: int | None = None) -> Parameters:
    """The smallest safe ring with room and precision for the sum, and the largest scale it has room for.

    A larger scale costs nothing. Of several moduli for one ring, the smallest that allow a grain are taken,
    or the smallest if none do. With a `degree` or `scale_bits` given, one that does not do is refused.
    """
    if degree is not None:
        _check_degree(degree)
    shapes = _SHAPES if degree is None else [shape for shape in (*_SHAPES, _LARGE) if shape[0] == degree]
    candidates: list[Parameters] = []
    for ring, moduli in shapes:
        bits = _scale_bits(moduli, addends * largest) if scale_bits is None else scale_bits
        try:
            candidates.append(Parameters(ring, moduli, bits, addends, largest))
        except ConfigError:
            given = degree is not None or scale_bits is not None
            if (
                addends < 1
                or not 0.0 < largest < math.inf
                or (given and (ring, moduli) == shapes[-1] and not candidates)
            ):
                raise
    if not candidates:
        raise ConfigError(
            f"No CKKS parameters keep an absolute precision of {PRECISION:g} for sums of {addends} values of up to "
            f"{largest:g}. Lower the largest value, or the number of addends."
        )
    smallest = [parameters for parameters in candidates if parameters.degree == candidates[0].degree]
    return next((parameters for parameters in smallest if parameters.grain is not None), smallest[0])


def _check_degree(degree: int) -> None:
    if degree not in MODULUS_BITS:
        raise ConfigError(
            f"The degree of a CKKS ring must be one of {', '.join(map(str, MODULUS_BITS))}, not {degree}: "
            "smaller ones are not both safe and precise enough."
        )


def _scale_bits(moduli: tuple[int, ...], size: float) -> int:
    bits = sum(moduli[:-1]) - 2
    whole = math.ceil(math.log2(size)) if 0.0 < size < math.inf else 0
    return min(bits - max(whole, 0), _MOST_SCALE_BITS)


# --- keys: the public one encrypts and adds, the secret one decrypts
#
# Both travel as bytes with their parameters and a checksum in front. TenSEAL draws them from the operating
# system; there is no way to derive them from a seed.

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


# --- how an encrypted vector travels: a header, the sizes of its ciphertexts, the ciphertexts
#
#     magic 5 · checksum 4 · key id 8 · vector length 8 · addends 4 · number of ciphertexts 4 · sizes 4 each ·
#     ciphertexts
#
# The checksum (CRC-32 of everything behind it) finds damage, not malice: whoever can write a ciphertext can
# encrypt another one.

_MAGIC = b"FVCV\x01"
_VECTOR_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<8sQII")
_BODY = len(_MAGIC) + _VECTOR_CHECKSUM.size


@dataclass(frozen=True)
class Summary:
    """What an encrypted vector says about itself."""

    key_id: bytes
    length: int
    addends: int


def pack(summary: Summary, chunks: Sequence[bytes | bytearray | memoryview]) -> bytes:
    """The bytes of an encrypted vector."""
    header = _HEADER.pack(summary.key_id, summary.length, summary.addends, len(chunks))
    sizes = struct.pack(f"<{len(chunks)}I", *map(len, chunks))
    checksum = zlib.crc32(sizes, zlib.crc32(header))
    for chunk in chunks:
        checksum = zlib.crc32(chunk, checksum)
    return b"".join((_MAGIC, _VECTOR_CHECKSUM.pack(checksum), header, sizes, *chunks))


def unpack(content: bytes, *, key_id: bytes, length: int | None, slots: int) -> tuple[Summary, list[memoryview]]:
    """The header and the ciphertexts of a vector under this key and of this length (None: of any)."""
    summary, count = _header(content)
    if summary.key_id != key_id:
        raise ProtocolError(
            f"an encrypted vector belongs to the key {summary.key_id.hex()}, where {key_id.hex()} is used"
        )
    if length is not None and summary.length != length:
        raise ProtocolError(f"an encrypted vector holds {summary.length} values, where {length} are expected")
    if summary.addends < 1:
        raise ProtocolError("an encrypted vector says that it is a sum of nothing")
    if count != -(-summary.length // slots):
        raise ProtocolError(f"an encrypted vector of {summary.length} values has {count} ciphertexts")
    start = _BODY + _HEADER.size + 4 * count
    sizes = struct.unpack_from(f"<{count}I", content, _BODY + _HEADER.size) if len(content) >= start else ()
    end = start + sum(sizes)
    if len(content) < end:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes of at least {end}")
    if len(content) > end:
        raise ProtocolError(f"an encrypted vector has {len(content) - end} bytes too many")
    whole = memoryview(content)
    if zlib.crc32(whole[_BODY:]) != _VECTOR_CHECKSUM.unpack_from(content, len(_MAGIC))[0]:
        raise ProtocolError("an encrypted vector was damaged on its way: its checksum is wrong")
    parts = []
    for size in sizes:
        parts.append(whole[start : start + size])
        start += size
    return summary, parts


def _header(content: bytes) -> tuple[Summary, int]:
    if content[: len(_MAGIC)] != _MAGIC[: len(content)]:
        raise ProtocolError("these bytes are not a CKKS-encrypted vector")
    if len(content) < _BODY + _HEADER.size:
        raise ProtocolError(f"an encrypted vector is cut short: {len(content)} bytes are less than its header")
    key_id, length, addends, count = _HEADER.unpack_from(content, _BODY)
    return Summary(key_id, length, addends), count


Reals = NDArray[np.float32] | NDArray[np.float64]


def encrypt(values: Tensor | Reals, key: PublicKey) -> bytes:
    """The encrypted vector; values that are not finite, or beyond the key's `largest`, are refused."""
    numbers = _checked(values, key.parameters.largest)
    if key.parameters.grain is not None:
        numbers = _rounded(numbers, key.parameters.grain)
    parts = ciphertexts.encrypt_all(numbers, slots=key.parameters.slots, material=key.material)
    return pack(Summary(key.key_id, len(numbers), 1), parts)


def summary(content: bytes) -> Summary:
    """Key, length and number of addends an encrypted vector claims; only `Adder` and `decrypt` check them."""
    return _header(content)[0]


class Adder:
    """Adds encrypted vectors of one length under one key; needs no secret.

    Stays in this process: a sum costs a few percent of an encryption, about what sending the ciphertext to
    a worker would cost.
    """

    def __init__(self, key: PublicKey, *, length: int) -> None:
        self._key = key
        self._length = length
        self._sum: list[Vector] = []
        self._addends = 0

    @property
    def addends(self) -> int:
        """How many vectors the sum consists of."""
        return self._addends

    def add(self, content: bytes) -> None:
        """Add one encrypted vector; a refused one (ProtocolError) leaves the sum as it was."""
        key = self._key
        header, parts = unpack(content, key_id=key.key_id, length=self._length, slots=key.parameters.slots)
        if self._addends + header.addends > key.parameters.addends:
            raise ProtocolError(
                f"{self._addends} + {header.addends} encrypted vectors are more than the {key.parameters.addends} "
                "this key's sums have room for"
            )
        sizes = _sizes(self._length, key.parameters.slots)
        try:
            loaded = [
                ciphertexts.load(key.material.context, bytes(part), size=size, level=key.level)
                for part, size in zip(parts, sizes, strict=True)
            ]
            if self._addends:
                _add(self._sum, loaded)
            else:
                self._sum = loaded
        except ciphertexts.Refused as reason:
            raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
        self._addends += header.addends

    def total(self) -> bytes:
        """The encrypted sum so far."""
        if not self._addends:
            raise ProtocolError("there is no sum: no encrypted vector has been added")
        whole = Summary(self._key.key_id, self._length, self._addends)
        return pack(whole, [vector.serialize() for vector in self._sum])


def decrypt(content: bytes, key: SecretKey, *, length: int | None = None) -> Values:
    """The values, rounded to multiples of `ROUNDED` (which says why), of a vector of this length (None: of any)."""
    parameters = key.parameters
    header, parts = unpack(content, key_id=key.key_id, length=length, slots=parameters.slots)
    if header.addends > parameters.addends:
        raise ProtocolError(
            f"an encrypted sum of {header.addends} vectors: this key's sums have room for {parameters.addends}"
        )
    sizes = _sizes(header.length, parameters.slots)
    try:
        pieces = ciphertexts.decrypt_all(parts, sizes, level=key.public.level, material=key.material)
    except ciphertexts.Refused as reason:
        raise ProtocolError(f"a ciphertext of an encrypted vector was refused: {reason}") from reason
    values = np.concatenate(pieces) if pieces else np.empty(0)
    limit = header.addends * parameters.largest + parameters.error
    if len(values) and not (values.min() >= -limit and values.max() <= limit):
        raise ProtocolError(
            f"a decrypted sum of {header.addends} vectors has values beyond {limit:g}: one of them did not keep to "
            f"the agreed ± {parameters.largest:g}, or was damaged"
        )
    if parameters.grain is not None:
        values = _rounded(values, parameters.grain)
    return _rounded(values, ROUNDED) + 0.0  # no negative zeros


def _add(total: list[Vector], more: list[Vector]) -> None:
    """In place; if one addition fails, it and those before it are taken back (SEAL refuses only after adding)."""
    for done, (here, other) in enumerate(zip(total, more, strict=True)):
        try:
            here.add_(other)
        except Exception as reason:  # TenSEAL's errors are of many kinds
            for changed, added in zip(total[: done + 1], more, strict=False):
                changed.sub_(added)
            raise ciphertexts.Refused(str(reason)) from reason


def _rounded(values: Values, step: float) -> Values:
    """The nearest multiples of a power of two; multiplying by one is exact."""
    rounded = values * (1.0 / step)
    np.rint(rounded, out=rounded)
    rounded *= step
    return rounded


def _sizes(length: int, slots: int) -> list[int]:
    return [min(slots, length - start) for start in range(0, length, slots)]


def _checked(values: Tensor | Reals, largest: float) -> Values:
    plain = values.detach().cpu().double().numpy() if isinstance(values, Tensor) else values
    numbers = np.ascontiguousarray(plain, dtype=np.float64)
    if numbers.ndim != 1:
        raise ValueError(f"a flat vector is encrypted, not one of shape {numbers.shape}")
    if len(numbers) and not (numbers.min() >= -largest and numbers.max() <= largest):  # also catches NaN
        place = int(np.argmin(np.abs(numbers) <= largest))
        number = float(numbers[place])
        if not math.isfinite(number):
            raise NumericError(f"Number {place} of a vector to encrypt is {number}: training has diverged.")
        raise NumericError(
            f"Number {place} of a vector to encrypt is {number:g}, beyond the largest of ± {largest:g} its key is "
            "made for. Allow larger values, or lower the learning rate if training has diverged."
        )
    return numbers
