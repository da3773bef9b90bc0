"""The two things worth spreading over processes: encrypting a vector's pieces, and decrypting its ciphertexts."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from fedveil.crypto.ckks import chunks
from fedveil.crypto.ckks.chunks import Values
from fedveil.crypto.ckks.keys import PublicKey, SecretKey
from fedveil.crypto.ckks.processes import Task
from fedveil.crypto.ckks.worker import DECRYPT, ENCRYPT, LEVEL, Part


def encrypting(values: Values, key: PublicKey) -> Task[Part]:
    """Serialised ciphertexts of N/2 values each, the last one of fewer."""
    slots = key.parameters.slots

    def here(index: int) -> Part:
        return chunks.encrypt(key.material.context, values[index * slots : (index + 1) * slots]).serialize()

    def request(job: range) -> list[Part]:
        return [ENCRYPT, struct.pack("<I", slots), values[job.start * slots : job.stop * slots].tobytes()]

    return Task(-(-len(values) // slots), key.material, here, request, lambda parts: parts)


def decrypting(parts: Sequence[memoryview], sizes: Sequence[int], key: SecretKey) -> Task[Values]:
    """The values of each ciphertext, with their noise."""
    level = key.public.level
    head = LEVEL.pack(level.scale, *level.parms)

    def here(index: int) -> Values:
        return chunks.decrypt(key.material.context, bytes(parts[index]), size=sizes[index], level=level)

    def request(job: range) -> list[Part]:
        chosen = slice(job.start, job.stop)
        return [DECRYPT, head, struct.pack(f"<{len(job)}I", *sizes[chosen]), *parts[chosen]]

    return Task(len(parts), key.material, here, request, lambda found: [np.frombuffer(one) for one in found])
