"""Parcels and frames that somebody has changed: a desk answers every one of them, and goes on."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedveil.config import RunConfig
from fedveil.errors import Code, FedVeilError
from fedveil.flower import messages
from fedveil.flower.message_handler import MessageHandler
from fedveil.flower.messages import Setup
from fedveil.flower.worker_client import FrameKind
from fedveil.framing import pack, receive, unpack
from fedveil.protocol.codec import encode
from fedveil.protocol.directory import Epoch, Hello
from flower.in_process import make_homes
from roles.fuzzing import LONGEST, Mutator, little_memory, within

FACTS = {"input_shape": [1, 8, 8], "outputs": 10, "task": "classification", "vocabulary": None}


@pytest.mark.parametrize("times", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_a_desk_answers_whatever_it_is_handed(tmp_path: Path, times: int) -> None:
    home = make_homes(tmp_path, 1)[0]
    mutator, desk = Mutator(5), MessageHandler(home)
    config = RunConfig(scheme="veil-secagg", clients=3, rounds=2, seed=1, batch_size=16)
    setup = Setup.of(config, FACTS, lineage="0123456789abcdef" * 2, attempt=0)
    hello, told = Hello(setup.name + "run", Epoch(0, 0, 2, 3, 3, 1)), json.loads(setup.to_text())
    assert (
        unpack(desk.handle(pack({"setup": setup.to_text(), "message": "m"}, {"common": encode(hello)})))[0]["code"]
        == ""
    )
    codes: set[str] = set()
    for turn in range(times):
        facts = {"setup": setup.to_text(), "message": f"m{turn}"}
        content = encode(hello)
        if turn % 4 == 0:
            content = mutator.changed(hello)
        elif turn % 4 == 1:  # all but the settings, whose values have checks and tests of their own
            edited = mutator.edited_json({**told, "settings": {}})
            whole = {**edited, "settings": told["settings"]} if isinstance(edited, dict) else edited
            facts["setup"] = json.dumps(whole)
        parcel = pack(facts, {"common": content})
        if turn % 4 == 2:
            parcel = mutator.damaged(parcel)
        if turn % 4 == 3:
            (length,) = struct.unpack("<I", parcel[4:8])
            header = json.dumps(mutator.edited_json(json.loads(parcel[8 : 8 + length]))).encode()
            parcel = parcel[:4] + struct.pack("<I", len(header)) + header + parcel[8 + length :]
        with within(LONGEST), little_memory():
            codes.add(str(unpack(desk.handle(parcel))[0]["code"]))
    assert codes <= {"", *messages.TEXTS}
    assert Code.PROTOCOL in codes


def test_a_frame_takes_no_memory_for_what_it_only_claims() -> None:
    mutator = Mutator(9)
    for claimed in (0, 3, 1 << 33, 1 << 40, (1 << 64) - 1):
        for kind in (*FrameKind, 0, 77):
            ours, theirs = socket.socketpair()
            with ours, theirs, little_memory(), contextlib.suppress(FedVeilError):
                theirs.sendall(mutator.damaged(struct.pack(">BIQ", kind, 1, claimed) + b"abc"))
                theirs.shutdown(socket.SHUT_WR)
                receive(ours, FrameKind, deadline=time.monotonic() + LONGEST)
