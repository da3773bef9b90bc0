"""Functional encryption of sums: its algebra, what a key opens and what it leaves closed, and logarithms."""

from __future__ import annotations

import pickle
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from fedveil.crypto import functional
from fedveil.crypto.functional import (
    CIPHERTEXT_BYTES,
    KEY_BYTES,
    ORDER,
    PAD_BLOCK,
    POINT_BYTES,
    AuthoritySecrets,
    EncryptionKey,
    FunctionKey,
    Logarithms,
    check_ciphertexts,
    opened,
    pads_of,
    points,
)
from fedveil.errors import MissingExtraError, ProtocolError
from fedveil.secrets import SecretStream

SEED = bytes(range(32))


def key_of(client: int, secrets: AuthoritySecrets) -> EncryptionKey:
    return EncryptionKey("run", b"authority", secrets.key_of(client))


def encrypted(secrets: AuthoritySecrets, numbers: dict[int, list[int]]) -> dict[int, bytes]:
    return {
        client: key_of(client, secrets).encrypt(own, SecretStream(bytes([client]) * 32))
        for client, own in numbers.items()
    }


vectors = some.integers(1, 4).flatmap(
    lambda length: some.dictionaries(
        some.integers(0, 9),
        some.tuples(some.integers(-3, 3), some.lists(some.integers(-500, 500), min_size=length, max_size=length)),
        min_size=1,
        max_size=4,
    )
)


@settings(max_examples=25, deadline=None)
@given(vectors, some.binary(min_size=32, max_size=32))
def test_a_key_opens_the_weighted_sum(numbers: dict[int, tuple[int, list[int]]], seed: bytes) -> None:
    """Whatever the weights, negative ones and zeros included, and by a key that has travelled as bytes."""
    secrets = AuthoritySecrets(seed)
    uploads = encrypted(secrets, {client: own for client, (_, own) in numbers.items()})
    weights = {client: weight for client, (weight, _) in numbers.items()}
    length = len(next(iter(numbers.values()))[1])
    made = secrets.key_for(weights, length)
    key = FunctionKey.from_bytes(made.weights, *made.to_bytes())
    expected = [sum(weight * own[at] for weight, own in numbers.values()) for at in range(length)]
    assert opened(uploads, key, bound=4 * 3 * 500, usual=500) == expected


def test_what_a_key_leaves_of_one_upload_is_under_pads_of_which_no_two_are_alike() -> None:
    """With one pad for all of a client's numbers, whoever has the key for a sum would read their differences."""
    secrets, numbers = AuthoritySecrets(SEED), {0: [5, 5, 7], 1: [1, 2, 3]}
    uploads, key = encrypted(secrets, numbers), secrets.key_for({0: 1, 1: 1}, 3)
    # Client 0's ciphertexts up to their pads: what a server with the key makes of them.
    first, second = (half.to_bytes(32, "big") for half in key.halves[0])
    left = []
    for at in range(0, 3 * CIPHERTEXT_BYTES, CIPHERTEXT_BYTES):
        one, other, hidden = (
            points()(uploads[0][start : start + POINT_BYTES]) for start in range(at, at + CIPHERTEXT_BYTES, POINT_BYTES)
        )
        parts = [one.multiply(first), other.multiply(second)]
        negated = [part.multiply((ORDER - 1).to_bytes(32, "big")) for part in parts]
        left.append(points().combine_keys([hidden, *negated]))
    pads = pads_of(secrets.key_of(0)[-32:], 3)
    padded = [(number + pad) % ORDER for number, pad in zip([5, 5, 7], pads, strict=True)]
    known = [points().from_secret(number.to_bytes(32, "big")) for number in padded]
    assert [one.format() for one in left] == [one.format() for one in known]  # as much as that is left, and no less
    table, minus = Logarithms(1 << 10), (ORDER - 1).to_bytes(32, "big")
    for one, other in ((0, 1), (0, 2), (1, 2)):
        difference = points().combine_keys([left[one], left[other].multiply(minus)])
        assert table.of(difference, 1 << 15) is None
    assert len(set(pads)) == 3


@pytest.mark.parametrize("count", [1, PAD_BLOCK - 1, PAD_BLOCK, 2 * PAD_BLOCK + 1])
def test_a_key_has_what_the_clients_pads_add_up_to_across_blocks(count: int) -> None:
    """And no two pads of a client are alike, wherever a block begins."""
    secrets, weights = AuthoritySecrets(SEED), {0: 1, 3: 2}
    pads = {client: pads_of(secrets.key_of(client)[-32:], count) for client in weights}
    assert all(len(set(own)) == count for own in pads.values())
    added = [(own + 2 * other) % ORDER for own, other in zip(pads[0], pads[3], strict=True)]
    assert secrets.key_for(weights, count).pads == b"".join(one.to_bytes(32, "big") for one in added)


def test_another_rounds_key_opens_nothing() -> None:
    one, other = AuthoritySecrets(SEED), AuthoritySecrets(bytes(32))
    uploads, weights = encrypted(one, {0: [1], 1: [2]}), {0: 1, 1: 1}
    assert opened(uploads, one.key_for(weights, 1), bound=10, usual=10) == [3]
    for key in (other.key_for(weights, 1), one.key_for({0: 1}, 1)):
        wanted = FunctionKey(weights, {**one.key_for(weights, 1).halves, **key.halves}, key.pads)
        with pytest.raises(ProtocolError, match="beyond"):
            opened(uploads, wanted, bound=10_000, usual=10)


def test_ciphertexts_of_equal_numbers_differ() -> None:
    key = key_of(0, AuthoritySecrets(SEED))
    stream = SecretStream(bytes(32))
    first, again = key.encrypt([4, 4], stream), key.encrypt([4, 4], stream)
    pieces = {part[at : at + POINT_BYTES] for part in (first, again) for at in range(0, len(part), POINT_BYTES)}
    assert len(pieces) == 12


@pytest.mark.parametrize("size", [1, 3, 16])
def test_logarithms_are_found_within_the_bound_and_nowhere_else(size: int) -> None:
    table = Logarithms(size)
    for number in range(-40, 41):
        point = points().from_secret((number % ORDER).to_bytes(32, "big")) if number else None
        assert table.of(point, 37) == (number if abs(number) <= 37 else None)


SPOILT = {
    "zeros": bytes(POINT_BYTES),
    "not on the curve": b"\x02" + b"\xff" * 32,
    "no such form": b"\x05" + b"\x01" * 32,
    "too short": points().from_secret(b"\x01" * 32).format()[:-1],
}


@pytest.mark.parametrize("content", SPOILT.values(), ids=SPOILT)
def test_what_is_no_point_is_refused(content: bytes) -> None:
    good = points().from_secret(b"\x01" * 32).format()
    check_ciphertexts(3 * good)
    with pytest.raises(ProtocolError, match="no point"):
        check_ciphertexts(2 * good + content)


def test_a_key_encrypts_one_upload_and_is_kept_as_it_is() -> None:
    key = key_of(3, AuthoritySecrets(SEED))
    again = EncryptionKey.restored(key.stored())
    stream = SecretStream(bytes(32))
    assert len(again.encrypt([1], stream)) == CIPHERTEXT_BYTES
    used = key.used()
    assert (used.run, used.authority) == (key.run, key.authority)
    for one in (used, EncryptionKey.restored(used.stored())):
        with pytest.raises(ProtocolError, match="has been used"):
            one.encrypt([1], stream)
    for wrong in (bytes(KEY_BYTES), bytes(KEY_BYTES - 1)):
        with pytest.raises(ProtocolError):
            EncryptionKey("run", b"", wrong)
    with pytest.raises(ProtocolError, match="malformed"):
        EncryptionKey.restored({"run": "run"})


def test_secrets_are_neither_printed_nor_copied() -> None:
    secrets = AuthoritySecrets(SEED)
    for one in (secrets, key_of(0, secrets)):
        assert "hidden" in repr(one)
        with pytest.raises(TypeError, match="secrets"):
            pickle.dumps(one)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    functional.points.cache_clear()
    monkeypatch.setitem(sys.modules, "coincurve", None)
    with pytest.raises(MissingExtraError, match=r"fedveil\[functional\]"):
        functional.points()
    functional.points.cache_clear()
