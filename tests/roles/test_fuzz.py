"""Changed messages of every scheme, both ways: only our own errors, no hang, little memory, and the run goes on.

In the suite each message of a run is tried a few times changed; `slow` tries many more. Seeds are fixed.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
import torch

from fedveil.client_held.messages import Vote
from fedveil.crypto.keys import seal, unseal
from fedveil.engine import LocalEngine
from fedveil.errors import FedVeilError
from fedveil.protocol.client_state import ClientState, Group
from fedveil.protocol.codec import decode, encode, from_stored, registered
from fedveil.protocol.messages import Reply
from fedveil.roles.client import _LISTS, RequestCheck
from fedveil.runs.loop import authority_role, client_role
from fedveil.schemes import schemes
from roles.fuzzing import (
    LONGEST,
    Fuzzed,
    Lying,
    Mutator,
    driven,
    little_memory,
    missing_once,
    names,
    small,
    within,
)

torch.set_num_threads(1)

VARIANTS: dict[str, dict[str, Any]] = {
    **{info.name: {"name": info.name} for info in schemes()},
    "veil-dp, masks": {"name": "veil-dp", "cover": "masks"},
    "veil-secagg, on dropout": {"name": "veil-secagg", "unmask": "on-dropout"},
    "paraaegis, pads": {"name": "paraaegis", "cipher": "pads", "vote": "histogram"},
}
TIMES, LONGER = 20, 3000


@pytest.mark.parametrize("times", [TIMES, pytest.param(LONGER, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_changed_messages_end_nothing_and_leave_no_trace(variant: str, times: int) -> None:
    """Whatever one client and the server are sent beside honest messages: the run ends as if nothing had been sent."""
    given = VARIANTS[variant]
    if given["name"] in ("paraaegis", "serial", "ckks-fedavg"):
        pytest.importorskip("tenseal")
    twin = small(**given)
    plain = LocalEngine(client_role(twin), twin.pool, absent=missing_once, authority=authority_role(twin))
    expected, stopped, models = driven(small(**given), plain)
    one = small(**given)
    engine = Fuzzed(one, Mutator(len(variant)), victim=2, times=times, absent=missing_once)
    with little_memory():
        rounds, stops, found = driven(one, engine)
    assert [bool(done.failed) for done in rounds] == [bool(done.failed) for done in expected]
    assert stops == stopped
    assert len(found) == len(models) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, models, strict=True))
    for tried in (engine.server, engine.client):
        # A test of changes that nobody can read, or that nobody refuses, would show little.
        assert tried.total >= 3 * times
        assert tried.refused > 0
        assert tried.unread > 0


@pytest.mark.parametrize("seeds", [1, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_that_lies_whenever_it_is_believed_costs_rounds_and_not_the_run(variant: str, seeds: int) -> None:
    """Changed replies that are taken (numbers of any size, wrong shares, wrong keys): rounds fail or bring a model."""
    given, sent = VARIANTS[variant], 0
    if given["name"] in ("paraaegis", "serial", "ckks-fedavg"):
        pytest.importorskip("tenseal")
    for seed in range(seeds):
        one = small(**given)
        engine = Lying(one, Mutator(seed), liar=2, absent=missing_once)
        rounds, stops, _ = driven(one, engine)
        assert len(rounds) == 3 or stops
        sent += engine.sent
    assert sent > 0


def stored_states() -> list[ClientState]:
    """What clients remember at the end of runs: keys and directory, a group and its keys, a model, a round in work."""
    found = []
    for given in ({"name": "veil-secagg"}, VARIANTS["paraaegis, pads"]):
        one = small(**given)
        engine = LocalEngine(client_role(one), one.pool)
        driven(one, engine)
        found.append(engine.state_of(1))
    return found


@pytest.mark.parametrize("times", [600, pytest.param(40_000, marks=pytest.mark.slow)])
def test_changed_stored_state_is_refused(times: int) -> None:
    """Under the right key: as a client writes it that lends a model, or an owner who edits what is stored."""
    mutator, key, refused = Mutator(7), bytes(32), 0
    for state in stored_states():
        plain = unseal(state.seal(key), key=key, purpose="client state")
        (length,) = struct.unpack("<Q", plain[:8])
        header, tail = json.loads(plain[8 : 8 + length]), plain[8 + length :]
        for turn in range(times):
            if turn % 2:
                changed = mutator.damaged(plain)
            else:
                text = json.dumps(mutator.edited_json(header)).encode()
                changed = struct.pack("<Q", len(text)) + text + tail
            try:
                with little_memory():
                    ClientState.unseal(seal(changed, key=key, purpose="client state"), key)
            except FedVeilError:
                refused += 1
        for damaged in (state.seal(key)[:-1], b"", mutator.damaged(state.seal(key))):
            with pytest.raises(FedVeilError):
                ClientState.unseal(damaged, key)
    assert refused > times / 2


def test_an_empty_tensor_of_many_rows_is_no_stored_state() -> None:
    header = json.dumps({"fields": {}, "tensors": {"x": ["torch.float32", [10**12, 0]]}}).encode()
    with pytest.raises(FedVeilError):
        from_stored(struct.pack("<Q", len(header)) + header)


def test_changed_secrets_of_a_group_are_refused() -> None:
    mutator, good = Mutator(3), Group("run", bytes(32), b"opening").stored()
    for _ in range(300):
        with contextlib.suppress(FedVeilError):
            Group.restored(mutator.edited_json(good))


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_reading_a_message_takes_memory_of_the_order_of_its_size(rows: int) -> None:
    """At most 80 bytes for each byte of a header, two for each of tensors, and 64 kB."""
    tags = Vote(0, 0, 0, torch.zeros(rows, 16, dtype=torch.uint8))
    nested = b"FVW1" + struct.pack("<I", 16384) + b"[" * 16384
    for data in (encode(tags), nested, b"FVW1" + struct.pack("<I", 2**32 - 1) + b"[" * 10**6):
        tracemalloc.start()
        with contextlib.suppress(FedVeilError):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 80 * min(len(data), 16384) + 2 * len(data) + 65536


@pytest.mark.parametrize("times", [300, pytest.param(50_000, marks=pytest.mark.slow)])
def test_a_changed_ciphertext_with_its_checksum_put_right_is_refused_or_a_ciphertext(times: int) -> None:
    """What stands behind the checksum is read by TenSEAL, which trusts the sizes that it finds there."""
    ckks = pytest.importorskip("fedveil.crypto.ckks")
    pytest.importorskip("tenseal")
    key = ckks.generate(ckks.choose(addends=5, largest=64.0))
    good = ckks.encrypt(torch.linspace(-1.0, 1.0, 600), key.public)
    chance, refused = random.Random(11), 0
    for turn in range(times):
        content = bytearray(good)
        for _ in range(chance.choice((1, 2, 4))):
            content[chance.randrange(9, chance.choice((120, 200, len(content))))] = chance.randrange(256)
        content[5:9] = struct.pack("<I", zlib.crc32(bytes(content[9:])))
        try:
            with within(LONGEST), little_memory():
                if turn % 2:
                    ckks.decrypt(bytes(content), key)
                else:
                    total = ckks.Adder(key.public, length=600)
                    total.add(bytes(content))
                    total.add(good)
        except FedVeilError:
            refused += 1
    assert refused > times / 2


def test_every_size_that_a_request_names_is_bounded_by_what_a_client_knows() -> None:
    """But for keys, sealed and encrypted bytes: they cost what they weigh, and are held to the key when read."""
    one = small("veil-secagg")
    octets = {"hidden", "sealed", "bundles", "public", "ciphertexts", "width"}
    bounded = {*RequestCheck(one.scheme, one.architecture)._fixed, *_LISTS, *octets}
    sent = [kind for kind in registered() if not issubclass(kind, Reply) and kind.__name__ not in ("Ciphertext",)]
    assert {name for kind in sent for name in names(kind)} <= bounded
    assert len(sent) > 15
