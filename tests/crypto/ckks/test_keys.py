"""Keys: what travels, what does not, and what is refused."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from fedveil.crypto import ckks
from fedveil.errors import ProtocolError


def test_a_restored_pair_works_with_the_first_one(key: ckks.SecretKey) -> None:
    public = ckks.PublicKey.from_bytes(key.public_bytes())
    secret = ckks.SecretKey.from_bytes(key.secret_bytes())
    assert public.key_id == secret.key_id == key.key_id
    assert len(key.key_id) == 8
    assert public.parameters == secret.parameters == key.parameters
    values = np.array([1.0, -2.0])
    assert ckks.decrypt(ckks.encrypt(values, public), secret).tolist() == [1.0, -2.0]
    assert ckks.decrypt(ckks.encrypt(values, secret.public), key).tolist() == [1.0, -2.0]


def test_a_key_is_restored_once_however_many_clients_hold_it(key: ckks.SecretKey) -> None:
    assert ckks.SecretKey.from_bytes(key.secret_bytes()) is ckks.SecretKey.from_bytes(key.secret_bytes())
    assert ckks.PublicKey.from_bytes(key.public_bytes()) is ckks.PublicKey.from_bytes(key.public_bytes())


def test_the_public_bytes_cannot_decrypt_and_hold_no_more_keys_than_needed(key: ckks.SecretKey) -> None:
    context = ckks.PublicKey.from_bytes(key.public_bytes()).material.context
    assert not context.has_secret_key()
    assert not context.has_relin_keys()
    assert not context.has_galois_keys()
    assert key.material.serialized not in key.public_bytes()
    # Two polynomials of 4096 coefficients under 54 and 55 bits, stored as 64; the secret is one such polynomial.
    assert len(key.public_bytes()) < 2 * 2 * 8 * 4096
    assert len(key.secret_bytes()) < 3 * 2 * 8 * 4096


def test_the_secret_is_neither_printed_nor_pickled_nor_copied(key: ckks.SecretKey) -> None:
    for secret in (key, key.material):
        assert repr(secret) == str(secret) == f"{secret}" == f"<{type(secret).__name__}: hidden>"
        for refuse in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="holds secrets"):
                refuse(secret)


def test_two_keys_have_two_names(key: ckks.SecretKey) -> None:
    assert ckks.generate(key.parameters).key_id != key.key_id


@pytest.mark.parametrize("place", [7, 30, 60, 5000, -1])
@pytest.mark.parametrize("kind", ["public", "secret"])
def test_damaged_keys_are_refused(key: ckks.SecretKey, kind: str, place: int) -> None:
    content, restore = _kind(key, kind)
    damaged = bytearray(content)
    damaged[place] ^= 1
    with pytest.raises(ProtocolError, match=f"a CKKS {kind} key was damaged"):
        restore(bytes(damaged))


@pytest.mark.parametrize("kind", ["public", "secret"])
def test_keys_that_are_cut_lengthened_or_something_else_are_refused(key: ckks.SecretKey, kind: str) -> None:
    content, restore = _kind(key, kind)
    for wrong in (b"", b"FV", content[:5], content[:21], content[:40], content[:-1], content + b"\0"):
        with pytest.raises(ProtocolError, match=f"not a CKKS {kind} key|damaged"):
            restore(wrong)
    other, _ = _kind(key, "secret" if kind == "public" else "public")
    with pytest.raises(ProtocolError, match=f"not a CKKS {kind} key"):
        restore(other)


def _kind(key: ckks.SecretKey, kind: str):
    if kind == "public":
        return key.public_bytes(), ckks.PublicKey.from_bytes
    return key.secret_bytes(), ckks.SecretKey.from_bytes


def test_forged_keys_with_a_right_checksum_are_refused(key: ckks.SecretKey) -> None:
    """Whoever makes the bytes can compute the checksum too."""
    body = ckks._packed(key.parameters)
    public = key.public_bytes()
    weak = bytearray(body)
    weak[ckks._FIELDS.size] = 60  # 60 + 55 bits
    other = ckks._packed(ckks.choose(addends=10, largest=1e-3))
    stranger = ckks.generate(key.parameters).material.serialized
    length = ckks._LENGTH.pack(len(public))
    forged = {
        "too short": ckks._sealed(ckks._PUBLIC, body[:9]),
        "below 128-bit": ckks._sealed(ckks._PUBLIC, bytes(weak) + key.public.material.serialized),
        "other parameters than it says": ckks._sealed(ckks._PUBLIC, other + key.public.material.serialized),
        "was refused": ckks._sealed(ckks._PUBLIC, body + os.urandom(500)),
        "does not encrypt": ckks._sealed(ckks._PUBLIC, body + key.material.serialized),
    }
    for words, content in forged.items():
        with pytest.raises(ProtocolError, match=words):
            ckks.PublicKey.from_bytes(content)
    for words, content in {
        "too short": ckks._sealed(ckks._SECRET, b"\0"),
        "not a CKKS public key": ckks._sealed(ckks._SECRET, ckks._LENGTH.pack(0)),
        "was refused": ckks._sealed(ckks._SECRET, length + public),
        "does not belong": ckks._sealed(ckks._SECRET, length + public + stranger),
    }.items():
        with pytest.raises(ProtocolError, match=words):
            ckks.SecretKey.from_bytes(content)


WITHOUT = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"tenseal", "_tenseal_cpp"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Finder())
from fedveil.crypto import ckks
from fedveil.errors import MissingExtraError

parameters = ckks.choose(addends=10, largest=2.0)
for attempt in (lambda: ckks.generate(parameters), lambda: ckks.PublicKey.from_bytes(sys.stdin.buffer.read())):
    try:
        attempt()
    except MissingExtraError as error:
        print(error)
"""


def test_without_tenseal_the_one_command_that_installs_it_is_named(key: ckks.SecretKey) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], input=key.public_bytes(), capture_output=True, check=False)
    assert (done.returncode, done.stderr.decode()) == (0, "")
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 2
    assert all(line.endswith("Install it with: pip install 'fedveil[he]'") for line in lines)
