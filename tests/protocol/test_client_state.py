"""A client's state: sealed bytes that only the right key opens, and a memory of what was answered."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedveil.crypto.keys import seal, unseal
from fedveil.errors import ProtocolError
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import from_stored

KEY = bytes(range(32))
ROUNDS = st.tuples(st.integers(-1, 10**6), st.integers(0, 10**6))
STATES = st.builds(
    ClientState,
    st.integers(0, 10**9),
    answered=ROUNDS,
    revealed=ROUNDS,
    cohort=st.lists(st.integers(0, 10**9), max_size=5).map(tuple),
    survivor_digest=st.binary(max_size=32).map(bytes.hex),
    spent=st.floats(0, 1e9),
    graph=st.binary(max_size=32).map(bytes.hex),
)


@given(STATES)
def test_a_sealed_state_comes_back(state: ClientState) -> None:
    assert ClientState.unseal(state.seal(KEY), KEY) == state


def test_a_state_is_stored_under_the_names_that_earlier_versions_read() -> None:
    state = ClientState(3, cohort=(1, 3), survivor_digest="0a", transcript="0b")
    facts, _ = from_stored(unseal(state.seal(KEY), key=KEY, purpose="client state"))
    assert (facts["seat"], facts["listed"], facts["story"]) == ([1, 3], "0a", "0b")


def test_a_sealed_state_shows_nothing_and_differs_every_time() -> None:
    state = ClientState(123456, (7, 1))
    first, second = state.seal(KEY), state.seal(KEY)
    assert first != second
    assert b"123456" not in first
    assert b"client" not in first


@given(STATES, st.data())
def test_a_flipped_byte_is_refused(state: ClientState, data: st.DataObject) -> None:
    sealed = bytearray(state.seal(KEY))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ProtocolError, match="damaged, or sealed under another key"):
        ClientState.unseal(bytes(sealed), KEY)


def test_a_sealed_state_cut_anywhere_is_refused() -> None:
    sealed = ClientState(3).seal(KEY)
    for length in range(len(sealed)):
        with pytest.raises(ProtocolError):
            ClientState.unseal(sealed[:length], KEY)


@pytest.mark.parametrize("key", [os.urandom(32), bytes(32), b"", b"short"], ids=["other", "zeros", "none", "short"])
def test_another_key_is_refused(key: bytes) -> None:
    with pytest.raises(ProtocolError):
        ClientState.unseal(ClientState(3).seal(KEY), key)


def test_bytes_sealed_for_another_purpose_are_refused() -> None:
    with pytest.raises(ProtocolError):
        ClientState.unseal(seal(b'{"client": 1, "answered": [0, 0]}', key=KEY, purpose="something else"), KEY)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=30))
def test_whatever_is_asked_no_round_and_attempt_is_answered_twice(asked: list[tuple[int, int]]) -> None:
    state, answered = ClientState(0), []
    for round_, attempt in asked:
        try:
            state = state.answering(round_, attempt)
        except ProtocolError:
            continue
        answered.append((round_, attempt))
    assert len(set(answered)) == len(answered)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_whatever_is_asked_nothing_is_revealed_twice_or_for_a_round_not_answered_last(
    asked: list[tuple[bool, int, int]],
) -> None:
    state, revealed = ClientState(0), []
    for reveal, round_, attempt in asked:
        try:
            state = state.revealing(round_, attempt) if reveal else state.answering(round_, attempt)
        except ProtocolError:
            continue
        if reveal:
            assert state.answered == (round_, attempt)
            revealed.append((round_, attempt))
    assert len(set(revealed)) == len(revealed)


def test_a_client_without_keys_says_so() -> None:
    with pytest.raises(ProtocolError, match="client 7 was asked to work before keys were agreed on"):
        ClientState(7).ring()


def test_rounds_are_answered_in_order_and_old_ones_refused() -> None:
    state = ClientState(0)
    for round_ in range(4):
        state = state.answering(round_, 0)
    for round_ in range(4):
        with pytest.raises(ProtocolError, match="left behind"):
            state.answering(round_, 0)


def test_a_resumed_server_may_repeat_rounds_as_a_new_attempt() -> None:
    """Killed in round 6, resumed from the checkpoint after round 3: clients must go back with it."""
    state = ClientState(0).answering(5, 0)
    for round_ in (3, 4, 5, 6):
        state = state.answering(round_, 1)
    with pytest.raises(ProtocolError):
        state.answering(7, 0)


def test_within_a_run_rounds_go_forward_whatever_the_attempt() -> None:
    """Two sums of one round that differ by a client show what it sent: a resumed run has another name, and new keys."""
    state = ClientState(0).answering(5, 0, run="spring", epoch=2)
    for round_, attempt in ((5, 1), (4, 1), (0, 7)):
        with pytest.raises(ProtocolError, match="answered or left behind: a run that is resumed begins with new keys"):
            state.answering(round_, attempt, run="spring", epoch=3)
    assert state.answering(9, 0, run="spring", epoch=2).answered == (9, 0)
    resumed = replace(state, unexplained=2, misread=1).answering(3, 1, run="autumn", epoch=0)
    assert (resumed.answered, resumed.epoch, resumed.unexplained, resumed.misread) == ((3, 1), 0, 0, 0)


def test_a_state_unsealed_in_another_process_still_refuses_what_was_answered() -> None:
    sealed = ClientState(4).answering(2, 1).seal(KEY)
    with pytest.raises(ProtocolError):
        ClientState.unseal(sealed, KEY).answering(2, 1)
