"""A FedVeil message in a Flower message: a few plain facts, and bytes that Flower splits, stores and carries as arrays.

Arrays are stored by their content, so that what goes to all clients is uploaded to the SuperLink once.
"""

from __future__ import annotations

from flwr.app import Array

HEADER = "fedveil"
PARTS = "fedveil.parts"
_KIND = "fedveil"


def in_array(content: bytes) -> Array:
    """Bytes as something that Flower carries."""
    return Array(dtype="uint8", shape=(len(content),), stype=_KIND, data=content)


def out_of_array(array: Array) -> bytes:
    """The bytes back; an array of another making is refused."""
    if array.stype != _KIND:
        raise ValueError("an array of another kind")
    return array.data
