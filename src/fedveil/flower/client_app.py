"""The client app on Flower: a thin process per message that hands it to the machine's worker; no torch, no data."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Protocol

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedveil.errors import Code
from fedveil.flower.worker_client import WorkerError, hand_over
from fedveil.framing import pack, unpack

HOME = "fedveil-home"
HEADER = "fedveil"
PARTS = "fedveil.parts"
_KIND = "fedveil"
ONE_PIECE = 4 << 20
"""Bytes up to which a part travels as a value. Flower moves a record of arrays in pieces, with requests for each on
every hop, and a record of values as one; it cuts arrays at five MiB, and values never."""

_LOG = logging.getLogger(__name__)


class Deliver(Protocol):
    """Gets a parcel to whoever deals with it, and the reply back; see `worker_client.hand_over`."""

    def __call__(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
        """The reply."""
        ...


def answer(message: Message, context: Context, *, deliver: Deliver = hand_over) -> Message:
    """A reply to any message: an answer, or the code of a refusal. Nothing else leaves, whatever goes wrong."""
    try:
        content = _answered(message, context, deliver)
    except WorkerError as reason:
        content = _refused(reason.code)
    except Exception:
        # Flower would send the exception's text to the server: it ends here, and its type alone is logged.
        _LOG.error("a message could not be handed over (%s)", _kind_of_failure())
        content = _refused(Code.INTERNAL)
    return Message(content, reply_to=message)


def _answered(message: Message, context: Context, deliver: Deliver) -> RecordDict:
    home = context.node_config.get(HOME)
    if not isinstance(home, str) or not home:
        return _refused(Code.HOMELESS)
    header = message.content.config_records[HEADER]
    parts = parts_of(message.content)
    # A request that was lost on its way is sent again, as another message of Flower's.
    facts = {"setup": header["setup"], "message": header.get("request") or message.metadata.message_id}
    reply = deliver(Path(home), pack(facts, parts), timeout=float(header["patience"]))  # type: ignore[arg-type]
    said, answers = unpack(reply)
    if said["code"]:
        return _refused(str(said["code"]))
    done = answers["reply"]
    if len(done) <= ONE_PIECE:
        return RecordDict({HEADER: ConfigRecord({"code": "", "reply": done})})
    return RecordDict({HEADER: ConfigRecord({"code": ""}), PARTS: ArrayRecord({"reply": in_array(done)})})


def _refused(code: str) -> RecordDict:
    return RecordDict({HEADER: ConfigRecord({"code": code})})


def _kind_of_failure() -> str:
    kind = sys.exc_info()[0]
    return "unknown" if kind is None else kind.__name__


def parts_of(content: RecordDict) -> dict[str, bytes]:
    """The parts of a message, as values or in arrays."""
    configs, arrays = content.config_records, content.array_records
    records = [configs[name] for name in (HEADER, PARTS) if name in configs]
    values = {name: part for record in records for name, part in record.items() if isinstance(part, bytes)}
    return values | ({name: out_of_array(one) for name, one in arrays[PARTS].items()} if PARTS in arrays else {})


def in_array(content: bytes) -> Array:
    """Bytes as something that Flower carries."""
    return Array(dtype="uint8", shape=(len(content),), stype=_KIND, data=content)


def out_of_array(array: Array) -> bytes:
    """The bytes back; an array of another making is refused."""
    if array.stype != _KIND:
        raise ValueError("an array of another kind")
    return array.data
