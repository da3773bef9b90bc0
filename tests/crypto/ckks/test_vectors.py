"""Encrypted vectors: round trips, sums, and everything that is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch

from fedveil.crypto import ciphertexts, ckks
from fedveil.crypto.ckks import Summary
from fedveil.errors import NumericError, ProtocolError

LENGTHS = [0, 1, 2047, 2048, 2049, 5000, 100_000]


def drawn(length: int, seed: int = 0, largest: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-largest, largest, length)


@pytest.mark.parametrize("asked", [{"degree": 8192, "scale_bits": 40}, {"degree": 16384, "scale_bits": 44}])
def test_sums_in_a_ring_that_was_asked_for_are_as_exact_as_it_says(asked: dict[str, int], alone: None) -> None:
    pytest.importorskip("tenseal")
    secret = ckks.generate(ckks.choose(addends=3, largest=2.0, **asked))
    values = np.random.default_rng(1).uniform(-2.0, 2.0, (3, 9000))
    adder = ckks.Adder(secret.public, length=9000)
    for row in values:
        adder.add(ckks.encrypt(row, secret.public))
    error = np.abs(ckks.decrypt(adder.total(), secret) - values.sum(0)).max()
    assert 0 < error <= secret.parameters.error <= ckks.PRECISION


@pytest.mark.parametrize("length", LENGTHS)
def test_what_was_encrypted_is_read_again(key: ckks.SecretKey, length: int) -> None:
    values = drawn(length)
    read = ckks.decrypt(ckks.encrypt(values, key.public), key, length=length)
    assert read.shape == (length,)
    assert read.dtype == np.float64
    assert np.abs(read - values).max(initial=0.0) <= key.parameters.error <= ckks.PRECISION


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_of_ten_are_right_to_a_millionth(key: ckks.SecretKey, length: int) -> None:
    """4.8·10⁻⁷ measured, of which 4.77·10⁻⁷ is the rounding to multiples of 2⁻²⁰."""
    adder = ckks.Adder(key.public, length=length)
    values = [drawn(length, seed) for seed in range(10)]
    for one in values:
        adder.add(ckks.encrypt(one, key.public))
    assert adder.addends == 10
    total = adder.total()
    assert ckks.summary(total) == Summary(key.key_id, length, 10)
    read = ckks.decrypt(total, key)
    assert np.abs(read - np.sum(values, axis=0)).max(initial=0.0) <= key.parameters.error <= 1e-6
    assert np.array_equal(read, np.rint(read / ckks.ROUNDED) * ckks.ROUNDED)


def test_sums_at_the_edge_of_the_range_do_not_wrap(key: ckks.SecretKey) -> None:
    adder = ckks.Adder(key.public, length=3000)
    signs = np.random.default_rng(1).choice([-2.0, 2.0], 3000)
    for _ in range(10):
        adder.add(ckks.encrypt(signs, key.public))
    assert ckks.decrypt(adder.total(), key).tolist() == (10.0 * signs).tolist()


@pytest.mark.parametrize(("addends", "largest"), [(10, 1e5), (4, 1e7), (1000, 0.5)])
def test_other_moduli_and_rings_are_right_to_a_millionth_too(addends: int, largest: float) -> None:
    key = ckks.generate(ckks.choose(addends=addends, largest=largest))
    adder = ckks.Adder(key.public, length=5000)
    values = [drawn(5000, seed, largest) for seed in range(min(addends, 10))]
    for one in values:
        adder.add(ckks.encrypt(one, key.public))
    exact = np.array([math.fsum(column) for column in zip(*values, strict=True)])
    assert np.abs(ckks.decrypt(adder.total(), key) - exact).max() <= 1e-6


def test_decrypting_gives_what_the_values_alone_determine(key: ckks.SecretKey) -> None:
    """Without the grain, about one value in 10⁵ would fall to the other side of a rounding."""
    assert key.parameters.grain is not None
    values = drawn(200_000)
    other = ckks.generate(key.parameters)
    once, again = (ckks.decrypt(ckks.encrypt(values, one.public), one) for one in (key, other))
    assert once.tobytes() == again.tobytes()
    assert not np.any(np.signbit(once[once == 0.0]))


def test_sums_of_sums_count_all_their_addends(key: ckks.SecretKey) -> None:
    one = ckks.encrypt(np.ones(3), key.public)
    left = ckks.Adder(key.public, length=3)
    for _ in range(4):
        left.add(one)
    both = ckks.Adder(key.public, length=3)
    both.add(left.total())
    both.add(left.total())
    assert (both.addends, ckks.decrypt(both.total(), key).tolist()) == (8, [8.0] * 3)
    with pytest.raises(ProtocolError, match=r"8 \+ 4 encrypted vectors are more than the 10"):
        both.add(left.total())
    assert ckks.decrypt(both.total(), key).tolist() == [8.0] * 3


def test_the_total_can_be_asked_for_between_additions(key: ckks.SecretKey) -> None:
    adder = ckks.Adder(key.public, length=2)
    with pytest.raises(ProtocolError, match="no encrypted vector has been added"):
        adder.total()
    for count in (1, 2, 3):
        adder.add(ckks.encrypt(np.array([0.5, -1.0]), key.public))
        assert ckks.decrypt(adder.total(), key).tolist() == [0.5 * count, -1.0 * count]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_tensors_are_taken_as_they_are(key: ckks.SecretKey, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.5, -1.25, 0.0], dtype=dtype, requires_grad=True)
    assert ckks.decrypt(ckks.encrypt(tensor, key.public), key).tolist() == [0.5, -1.25, 0.0]


def test_strided_arrays_of_float32_are_taken_too(key: ckks.SecretKey) -> None:
    values = np.linspace(-1, 1, 9, dtype=np.float32)[::-2]
    assert ckks.decrypt(ckks.encrypt(values, key.public), key).tolist() == values.tolist()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (math.nan, "Number 3000 of a vector to encrypt is nan: training has diverged"),
        (math.inf, "is inf: training has diverged"),
        (-2.5, "is -2.5, beyond the largest of ± 2 its key is made for"),
    ],
)
def test_values_out_of_range_are_not_encrypted(key: ckks.SecretKey, wrong: float, words: str) -> None:
    values = drawn(5000)
    values[3000] = wrong
    with pytest.raises(NumericError, match=words):
        ckks.encrypt(values, key.public)


def test_two_encryptions_of_one_vector_share_nothing(key: ckks.SecretKey) -> None:
    one, other = (ckks.encrypt(np.zeros(10), key.public) for _ in range(2))
    assert one != other


def test_tenseal_never_prints(key: ckks.SecretKey, capfd: pytest.CaptureFixture[str]) -> None:
    sealed = ckks.encrypt(drawn(50_000), key.public)
    adder = ckks.Adder(key.public, length=50_000)
    adder.add(sealed)
    ckks.decrypt(adder.total(), key)
    assert capfd.readouterr() == ("", "")


def refusals(key: ckks.SecretKey) -> dict[str, bytes]:
    """Words of the refusal → an encrypted vector of 3000 values that must be refused with them."""
    good = ckks.encrypt(drawn(3000), key.public)
    summary, (first, second) = ckks.unpack(good, key_id=key.key_id, length=3000, slots=2048)
    flipped, header = bytearray(good), bytearray(good)
    flipped[20_000] ^= 4
    header[17] ^= 4  # the vector's length
    stranger = ckks.generate(key.parameters)
    coarse = ckks.generate(ckks.Parameters(4096, (54, 55), 40, 10, 2.0))
    other_scale = bytes(ckks.unpack(ckks.encrypt(drawn(3000), coarse.public), key_id=coarse.key_id, length=None,
                                     slots=2048)[1][0])  # fmt: skip
    end = len(first) - 8
    return {
        "not a CKKS-encrypted vector": b"GIF89a" + good,
        "less than its header": good[:20],
        "cut short": good[:-1],
        r"cut short: \d+ bytes of at least 41": good[:35],
        "1 bytes too many": good + b"\0",
        "checksum is wrong": bytes(flipped),
        "holds 3004 values, where 3000 are expected": bytes(header),
        f"belongs to the key {stranger.key_id.hex()}": ckks.encrypt(drawn(3000), stranger.public),
        "holds 2999 values, where 3000": ckks.encrypt(drawn(2999), key.public),
        "sum of nothing": ckks.pack(Summary(key.key_id, 3000, 0), [first, second]),
        "3000 values has 1 ciphertexts": ckks.pack(summary, [first]),
        "not one ciphertext of 952 values": ckks.pack(summary, [first, first]),
        "not one ciphertext of 2048 values": ckks.pack(summary, [second, second]),
        "not one ciphertext of 2048": ckks.pack(summary, [other_scale, second]),
        "made with other parameters": ckks.pack(summary, [other_scale[:-8] + bytes(first[end:]), second]),
        "was refused": ckks.pack(summary, [bytes(first[:9000]) + bytes(90) + bytes(first[9090:]), second]),
    }


@pytest.mark.usefixtures("alone")
def test_what_is_malformed_foreign_or_damaged_is_refused_and_leaves_the_sum_alone(key: ckks.SecretKey) -> None:
    ones = ckks.encrypt(np.ones(3000), key.public)
    for words, content in refusals(key).items():
        adder = ckks.Adder(key.public, length=3000)
        adder.add(ones)
        with pytest.raises(ProtocolError, match=words):
            adder.add(content)
        assert (adder.addends, ckks.decrypt(adder.total(), key).tolist()) == (1, [1.0] * 3000)
        with pytest.raises(ProtocolError, match=words):
            ckks.decrypt(content, key, length=3000)


def test_a_first_vector_that_is_refused_leaves_no_sum(key: ckks.SecretKey) -> None:
    adder = ckks.Adder(key.public, length=3000)
    for content in refusals(key).values():
        with pytest.raises(ProtocolError):
            adder.add(content)
    with pytest.raises(ProtocolError, match="no encrypted vector"):
        adder.total()


@pytest.mark.parametrize(
    "sizes",
    [b"\x04\x80\x80\x80\x01", b"\x03\xff\x0f\x01", b"\x02\x81\x10", b"\x00"],
    ids=["2²¹", "2047 + 1", "2049", ""],
)
def test_sizes_that_tenseal_would_read_past_its_memory_for_are_refused(key: ckks.SecretKey, sizes: bytes) -> None:
    good = ckks.encrypt(drawn(2048), key.public)
    summary, (chunk,) = ckks.unpack(good, key_id=key.key_id, length=2048, slots=2048)
    assert bytes(chunk[:4]) == b"\x0a\x02\x80\x10"
    forged = b"\x0a" + sizes + bytes(chunk[4:])
    appended = bytes(chunk) + b"\x0a\x01\x01"
    short = [bytes(chunk[:4]) + b"\x12" + bytes(filler) + bytes(chunk[-9:]) for filler in range(4)]
    for content in (forged, appended, b"", bytes(chunk[:3]), *short):
        packed = ckks.pack(summary, [content])
        with pytest.raises(ProtocolError, match="not one ciphertext of 2048 values"):
            ckks.decrypt(packed, key)
        with pytest.raises(ProtocolError, match="not one ciphertext of 2048 values"):
            ckks.Adder(key.public, length=2048).add(packed)


def test_random_damage_behind_a_right_checksum_never_shows_an_error_of_tenseals(key: ckks.SecretKey) -> None:
    good = ckks.encrypt(drawn(2048), key.public)
    summary, (chunk,) = ckks.unpack(good, key_id=key.key_id, length=2048, slots=2048)
    random = np.random.default_rng(0)
    refused = 0
    for end in [20] * 50 + [200] * 50 + [len(chunk)] * 50:
        damaged = bytearray(chunk)
        damaged[random.integers(end)] ^= 1 << random.integers(8)
        packed = ckks.pack(summary, [bytes(damaged[: random.choice([end, len(chunk)])])])
        for use in (lambda: ckks.Adder(key.public, length=2048).add(packed), lambda: ckks.decrypt(packed, key)):
            try:
                use()
            except ProtocolError:
                refused += 1
    assert refused > 150


def test_an_addition_that_fails_halfway_is_taken_back(key: ckks.SecretKey) -> None:
    """SEAL refuses a sum that anybody could read: x + (−x)."""
    adder = ckks.Adder(key.public, length=3000)
    values = drawn(3000)
    adder.add(ckks.encrypt(values, key.public))
    whole = ckks.unpack(adder.total(), key_id=key.key_id, length=3000, slots=2048)[1]
    second = ciphertexts.load(key.public.material.context, bytes(whole[1]), size=952, level=key.public.level)
    second.neg_()
    first = ckks.unpack(ckks.encrypt(np.ones(3000), key.public), key_id=key.key_id, length=3000, slots=2048)[1][0]
    with pytest.raises(ProtocolError, match="transparent"):
        adder.add(ckks.pack(Summary(key.key_id, 3000, 1), [first, second.serialize()]))
    assert np.abs(ckks.decrypt(adder.total(), key) - values).max() <= 1e-6


def test_a_vector_that_is_not_encrypted_at_all_is_refused(key: ckks.SecretKey) -> None:
    content = ckks.encrypt(np.ones(3), key.public)
    parts = ckks.unpack(content, key_id=key.key_id, length=3, slots=2048)[1]
    open_to_all = ciphertexts.load(key.public.material.context, bytes(parts[0]), size=3, level=key.public.level)
    with pytest.raises(RuntimeError, match="transparent"):
        open_to_all.sub_(open_to_all)
    with pytest.raises(ProtocolError, match="anybody could read it"):
        ckks.Adder(key.public, length=3).add(ckks.pack(Summary(key.key_id, 3, 1), [open_to_all.serialize()]))


def test_a_sum_that_cannot_be_one_is_refused(key: ckks.SecretKey) -> None:
    one = ckks.encrypt(np.full(3, 2.0), key.public)
    adder = ckks.Adder(key.public, length=3)
    adder.add(one)
    adder.add(one)
    parts = ckks.unpack(adder.total(), key_id=key.key_id, length=3, slots=2048)[1]
    with pytest.raises(ProtocolError, match="values beyond 2"):
        ckks.decrypt(ckks.pack(Summary(key.key_id, 3, 1), parts), key)
    with pytest.raises(ProtocolError, match="sum of 11 vectors"):
        ckks.decrypt(ckks.pack(Summary(key.key_id, 3, 11), parts), key)


def test_a_header_with_absurd_numbers_is_refused_before_memory_is_taken(key: ckks.SecretKey) -> None:
    good = ckks.encrypt(np.ones(1), key.public)
    for length, count in ((2**62, 2**32 - 1), (2**40, 2**29)):
        absurd = good[:9] + struct.pack("<8sQII", key.key_id, length, 1, count) + good[33:]
        with pytest.raises(ProtocolError, match=r"ciphertexts|cut short"):
            ckks.decrypt(absurd, key)
