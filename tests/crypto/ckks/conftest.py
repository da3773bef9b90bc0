"""One key for all tests of a file, and no worker left from another test's settings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedveil.crypto import ciphertexts, ckks


@pytest.fixture(scope="module")
def key() -> ckks.SecretKey:
    pytest.importorskip("tenseal")
    return ckks.generate(ckks.choose(addends=10, largest=2.0))


@pytest.fixture
def alone() -> Iterator[None]:
    ciphertexts.set_workers(1)
    yield
    ciphertexts.set_workers(None)


@pytest.fixture
def two() -> Iterator[None]:
    ciphertexts.set_workers(2)
    yield
    ciphertexts.set_workers(None)
