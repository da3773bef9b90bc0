"""A client's desk that does as it is told: waits in the middle of its work, fails, or answers rubbish.

Orders lie in HOME/orders.json, a list of {"what": kind of request, "round": from 1 on or null, "do": …}; each is
carried out once. A worker that is started anew, by a courier, has an honest desk again.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from desks import until
from fedveil.flower import message_handler as desk
from fedveil.flower.messages import Present
from fedveil.framing import pack, unpack
from fedveil.protocol.codec import decode, encode
from fedveil.protocol.directory import from_bytes
from fedveil.protocol.messages import Reply, Upload

ORDERS = "orders.json"
_LONGEST_WAIT = 300.0


class Ordered(desk.MessageHandler):
    """The real desk, with orders."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._folder = home

    def handle(self, parcel: bytes) -> bytes:
        do = self._ordered(parcel)
        if do in RUBBISH:
            return RUBBISH[do](super().handle(parcel))
        if do is not None and do.startswith("fail: "):
            raise ValueError(do.removeprefix("fail: "))
        if do == "wait, then answer":
            self._wait()
        reply = super().handle(parcel)
        if do == "answer, then wait":
            self._wait()
        return reply

    def _ordered(self, parcel: bytes) -> str | None:
        request = decode(unpack(parcel)[1]["common"])
        number = getattr(request, "round", None)
        this = (type(request).__name__, None if number is None else number + 1)
        file = self._folder / ORDERS
        orders = json.loads(file.read_text()) if file.exists() else []
        found = next((one for one in orders if (one["what"], one["round"]) == this), None)
        if found is None:
            return None
        file.write_text(json.dumps([one for one in orders if one is not found]))
        return str(found["do"])

    def _wait(self) -> None:
        (self._folder / "waiting").touch()
        until((self._folder / "go").exists, _LONGEST_WAIT)


def _with(reply: bytes, content: bytes) -> bytes:
    return pack(unpack(reply)[0], {"reply": content})


def _answer(reply: bytes) -> Reply:
    found = decode(unpack(reply)[1]["reply"])
    assert isinstance(found, Reply)
    return found


def _changed(reply: bytes, change: str) -> bytes:
    said = _answer(reply)
    assert isinstance(said, Upload)
    payload = {"longer": torch.cat([said.payload, said.payload]), "not a number": said.payload * float("nan")}[change]
    return _with(reply, encode(Upload(said.client, said.round, said.attempt, payload)))


def _stale(reply: bytes) -> bytes:
    said = _answer(reply)
    assert isinstance(said, Upload)
    return _with(reply, encode(Upload(said.client, said.round + 5, said.attempt, said.payload)))


RUBBISH = {
    "no parcel": lambda reply: b"rubbish" * 100,
    "no message": lambda reply: _with(reply, b"rubbish" * 100),
    "cut off": lambda reply: _with(reply, encode(_answer(reply))[:-7]),
    "unknown code": lambda reply: pack({"client": 0, "code": "PLANTED-CODE"}, {}),
    "another message": lambda reply: _with(
        reply, encode(Present(_answer(reply).client, from_bytes(b""), from_bytes(b"")))
    ),
    "another's name": lambda reply: _with(reply, encode(Upload(0, 0, 0, torch.zeros(3)))),
    "longer": lambda reply: _changed(reply, "longer"),
    "not a number": lambda reply: _changed(reply, "not a number"),
    "another round": _stale,
}
