"""The story a client has been told: digests that masks are bound to, so that only clients with one story cancel.

A server that tells clients different outcomes of a vote, or different sums, could otherwise have some
of them hide what matters and others what does not, and read the first off the sum.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from fedveil.flat import raw
from fedveil.protocol.dividing import Aggregate, Divide

_NOTHING = b"-"


def told_sums(before: bytes, sums: Aggregate) -> bytes:
    """The story up to and including a round's sums."""
    facts = f"{sums.version} {sums.round} {sums.attempt}".encode()
    return _digest(b"sums", before, facts, sums.asked, sums.contributors, sums.rest, sums.hidden)


def told_outcome(before: bytes, outcome: Divide) -> bytes:
    """The story up to and including the outcome of a vote."""
    facts = f"{outcome.round} {outcome.attempt}".encode()
    return _digest(b"outcome", before, facts, outcome.cohort, outcome.winners, outcome.counts, outcome.voters)


def _digest(what: bytes, *parts: bytes | Tensor | None) -> bytes:
    digest = hashlib.sha256(b"fedveil story 1 " + what)
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype} {part.numel()}".encode())
            digest.update(raw(part).data)
        else:
            content = _NOTHING if part is None else part
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
