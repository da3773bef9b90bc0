"""Threshold Paillier: sums of packed numbers come out exact, by any quorum of shares and by no fewer."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from sympy import isprime

from fedveil.crypto import paillier
from fedveil.crypto.paillier import KeyShare, Modulus, Packing, fresh_primes, key_of, safe_prime
from fedveil.errors import ConfigError, ProtocolError
from fedveil.secrets import OsSecrets, SecretStream

STORED = json.loads((Path(__file__).parents[2] / "benchmarks" / "safe_primes.json").read_text())["key bits"]
PRIMES = {int(bits): tuple(int(prime, 16) for prime in primes) for bits, primes in STORED.items()}
ANY = OsSecrets().stream()


def dealt(bits: int, *, holders: int, quorum: int) -> tuple[Modulus, dict[int, KeyShare]]:
    """A key and everybody's share, as a dealer makes them: one stream, from its beginning, for each."""
    public = key_of(PRIMES[bits], holders=holders, quorum=quorum)
    dealer = KeyShare("run", public, 0, PRIMES[bits])
    shares = {}
    for holder in range(holders):
        content = dealer.dealt(holder, SecretStream(b"the dealer's own"))
        shares[holder] = KeyShare("run", public, int.from_bytes(content, "big"))
    return public, shares


@pytest.mark.parametrize("bits", PRIMES)
def test_the_stored_primes_are_safe_and_make_keys_of_their_length(bits: int) -> None:
    assert all(isprime(prime) and isprime(prime // 2) for prime in PRIMES[bits])
    assert math.prod(PRIMES[bits]).bit_length() == bits


def test_fresh_primes_are_safe_differ_and_follow_from_their_stream() -> None:
    primes = fresh_primes(256, SecretStream(b"one"))
    assert all(isprime(prime) and isprime(prime // 2) and prime.bit_length() == 128 for prime in primes)
    assert math.prod(primes).bit_length() == 256
    assert len({*primes, *fresh_primes(256, SecretStream(b"two"))}) == 4
    assert safe_prime(128, SecretStream(b"one")) == primes[0]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(some.data())
def test_any_quorum_opens_the_sum_of_what_was_encrypted(data: some.DataObject) -> None:
    holders = data.draw(some.integers(1, 5))
    quorum = data.draw(some.integers(1, holders))
    public, shares = dealt(256, holders=holders, quorum=quorum)
    addends = data.draw(some.lists(some.integers(0, public.modulus - 1), min_size=1, max_size=4))
    joint = [1]
    for value in addends:
        joint = public.product(joint, public.encrypt([value], ANY))
    partials = {holder: share.partial(joint) for holder, share in shares.items()}
    for chosen in itertools.combinations(range(holders), quorum):
        opened = public.opened({holder: partials[holder] for holder in chosen})
        assert opened == [sum(addends) % public.modulus]


def test_one_share_too_few_opens_nothing() -> None:
    public, shares = dealt(256, holders=5, quorum=3)
    sealed = public.encrypt([7], ANY)
    few = {holder: shares[holder].partial(sealed) for holder in (1, 4)}
    with pytest.raises(ProtocolError, match="2 of 3"):
        public.opened(few)
    # Taken for a quorum, two shares give nothing of the form that a plaintext has.
    with pytest.raises(ProtocolError, match="belong together"):
        Modulus(public.modulus, 5, 2).opened(few)


def test_equal_values_look_different_and_a_wrong_partial_decryption_is_noticed() -> None:
    public, shares = dealt(256, holders=3, quorum=2)
    first, second = public.encrypt([5, 5], ANY)
    assert first != second
    partials = {holder: shares[holder].partial([first]) for holder in (0, 2)}
    assert public.opened(partials) == [5]
    partials[2] = [partials[2][0] * 2 % public.square]
    with pytest.raises(ProtocolError, match="belong together"):
        public.opened(partials)


def test_python_and_gmpy2_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def encrypted() -> list[int]:
        return key_of(PRIMES[512], holders=3, quorum=2).encrypt([1, 2, 3], SecretStream(b"fixed"))

    by_default = encrypted()
    monkeypatch.setattr(paillier, "_power", lambda: pow)
    assert encrypted() == by_default


@settings(max_examples=60, deadline=None, derandomize=True)
@given(some.data())
def test_packed_numbers_add_up_slot_by_slot(data: some.DataObject) -> None:
    bound, addends = data.draw(some.integers(1, 2**40)), data.draw(some.integers(1, 200))
    packing = Packing(bound, addends, 256)
    length = data.draw(some.integers(1, 3 * packing.slots))
    extreme = some.one_of(some.integers(-bound, bound), some.sampled_from([-bound, bound]))
    here = data.draw(some.integers(1, min(addends, 3)))
    vectors = [data.draw(some.lists(extreme, min_size=length, max_size=length)) for _ in range(here)]
    plain = [sum(column) for column in zip(*(packing.packed(vector) for vector in vectors), strict=True)]
    assert len(plain) == packing.count(length)
    assert all(value < 2**254 for value in plain)
    assert packing.unpacked(plain, length, addends=here) == [sum(column) for column in zip(*vectors, strict=True)]


@pytest.mark.parametrize(("bound", "addends", "width", "slots"), [(2**34, 16, 40, 51), (2**59, 8, 64, 31)])
def test_slots_are_as_wide_as_sums_are(bound: int, addends: int, width: int, slots: int) -> None:
    """40 bits, 51 slots of a key of 2048; unclipped numbers of 64 bits, 31."""
    packing = Packing(bound, addends, 2048)
    assert (packing.width, packing.slots) == (width, slots)
    assert packing.packed([10 * bound]) == packing.packed([bound])


def test_plaintexts_that_are_no_sums_are_refused() -> None:
    packing = Packing(100, 3, 256)
    for value in (2 * 100 * 2 + 1, 1 << packing.width * packing.slots, (1 << packing.width) - 1):
        with pytest.raises(ProtocolError, match="beyond what clients may send"):
            packing.unpacked([value], packing.slots, addends=2)
    with pytest.raises(ConfigError, match="do not fit"):
        _ = Packing(1 << 300, 3, 256).slots


def test_what_is_no_ciphertext_is_refused() -> None:
    public, _ = dealt(256, holders=3, quorum=2)
    wrong = (0, public.square, public.modulus, PRIMES[256][0])
    for number in wrong:
        with pytest.raises(ProtocolError, match="no unit"):
            public.read(number.to_bytes(public.width, "big"))
    for content in (b"", bytes(32), public.to_bytes()[:-1], (public.modulus - 1).to_bytes(32, "big")):
        with pytest.raises(ProtocolError, match="odd number of 256 bits"):
            Modulus.from_bytes(content, bits=256, holders=3, quorum=2)


def test_a_share_refuses_to_be_printed_is_stored_and_deals_only_if_it_has_the_primes() -> None:
    public, shares = dealt(256, holders=3, quorum=2)
    share = shares[1].having_sent(4)
    assert f"{share!r}{share}" == "<KeyShare: hidden>" * 2
    again = KeyShare.restored(share.stored())
    sealed = public.encrypt([9], ANY)
    assert again.partial(sealed) == share.partial(sealed)
    assert (again.sent, again.run, again.public) == (4, "run", public)
    with pytest.raises(ProtocolError, match="not dealt"):
        share.dealt(0, ANY)
    for broken in ({}, {**share.stored(), "value": "no number"}, {**share.stored(), "key": []}):
        with pytest.raises(ProtocolError, match="malformed"):
            KeyShare.restored(broken)


@pytest.mark.parametrize("bits", [0, 255, 264, 1 << 14])
def test_lengths_that_no_key_should_have_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match="key_bits"):
        paillier.check_key_bits(bits)
