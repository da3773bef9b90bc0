"""Sealing: what one key and purpose sealed, nothing else opens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.crypto.keys import seal, unseal
from fedveil.errors import ProtocolError

KEYS = st.binary(min_size=32, max_size=32)


@given(st.binary(max_size=200), KEYS)
def test_sealed_bytes_come_back(plain: bytes, key: bytes) -> None:
    assert unseal(seal(plain, key=key, purpose="test"), key=key, purpose="test") == plain


@given(st.binary(max_size=50), KEYS, KEYS)
def test_only_the_same_key_opens(plain: bytes, key: bytes, other: bytes) -> None:
    sealed = seal(plain, key=key, purpose="test")
    if key != other:
        with pytest.raises(ProtocolError):
            unseal(sealed, key=other, purpose="test")


def test_the_purpose_is_part_of_the_seal() -> None:
    sealed = seal(b"x", key=bytes(32), purpose="a")
    with pytest.raises(ProtocolError, match="sealed b was damaged"):
        unseal(sealed, key=bytes(32), purpose="b")


def test_equal_contents_look_different() -> None:
    assert len({seal(b"same", key=bytes(32), purpose="test") for _ in range(100)}) == 100


@given(st.binary(max_size=60))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal(noise, key=bytes(32), purpose="test")
