"""How far a protected app's run has come, on disk: the last round's arrays, and what its strategy remembers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedveil.client_held.messages import Finish
from fedveil.errors import CheckpointError, ProtocolError
from fedveil.flower.app_held import Standing
from fedveil.flower.app_setup import AppSetup
from fedveil.framing import pack, unpack
from fedveil.protocol.codec import decode, encode
from fedveil.runs.folder import write_atomically

_REMEMBERED = ("m_t", "v_t", "momentum_vector")
"""What Flower's own strategies keep from round to round, besides the arrays themselves."""
_TYPE = "numpy.ndarray"
_FAREWELL = "farewell"
Memory = dict[str, Any]


@dataclass(frozen=True, eq=False)
class AppProgress:
    """After `round` rounds: the model, and the strategy's memory by attribute (a dictionary or a list of arrays).

    `nodes` are the clients by number, and `uncovered` the figures that have left as they were. Where clients hold the
    model there are no arrays, and `standing` says how they come to its last version.
    """

    round: int
    arrays: ArrayRecord
    memory: Memory = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    uncovered: tuple[str, ...] = ()
    standing: Standing | None = None

    @staticmethod
    def of(
        strategy: Strategy,
        arrays: ArrayRecord,
        *,
        round: int,
        nodes: Sequence[int],
        uncovered: Iterable[str],
        standing: Standing | None = None,
    ) -> AppProgress:
        """What is to be kept of a run."""
        kept = {name: getattr(strategy, name) for name in _REMEMBERED if getattr(strategy, name, None) is not None}
        return AppProgress(round, arrays, kept, tuple(nodes), tuple(uncovered), standing)

    def give_back(self, strategy: Strategy) -> None:
        """Let a strategy go on where it was."""
        for name, value in self.memory.items():
            setattr(strategy, name, value)

    def write(self, path: Path) -> None:
        """Replace what was kept."""
        parts: dict[str, bytes] = {}
        facts: dict[str, Any] = {
            "round": self.round,
            "arrays": _described(self.arrays, "arrays", parts),
            "memory": {},
            "nodes": [str(node) for node in self.nodes],
            "uncovered": list(self.uncovered),
        }
        for name, value in self.memory.items():
            listed = not isinstance(value, Mapping)
            named = {str(place): array for place, array in enumerate(value)} if listed else value
            record = ArrayRecord({key: Array(np.asarray(array)) for key, array in named.items()})
            facts["memory"][name] = {"list": listed, "arrays": _described(record, name, parts)}
        if self.standing is not None:
            facts["setup"], parts[_FAREWELL] = self.standing.setup.to_text(), encode(self.standing.farewell)
        write_atomically(path, pack(facts, parts))

    @staticmethod
    def read(path: Path) -> AppProgress | None:
        """What was kept; None where no round has ended yet."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            facts, parts = unpack(content)
            memory: Memory = {}
            for name, said in dict(facts["memory"]).items():
                if name not in _REMEMBERED:
                    raise ValueError(name)
                kept = {key: array.numpy() for key, array in _restored(said["arrays"], name, parts).items()}
                memory[name] = list(kept.values()) if said["list"] else kept
            nodes, uncovered = tuple(map(int, facts["nodes"])), tuple(map(str, facts["uncovered"]))
            arrays = _restored(facts["arrays"], "arrays", parts)
            standing = None
            if "setup" in facts:
                farewell = decode(parts[_FAREWELL])
                if not isinstance(farewell, Finish):
                    raise ValueError(_FAREWELL)
                standing = Standing(AppSetup.parse(facts["setup"]), farewell)
            return AppProgress(int(facts["round"]), arrays, memory, nodes, uncovered, standing)
        except (ProtocolError, KeyError, ValueError, TypeError, AttributeError) as reason:
            raise CheckpointError(f"{path} is damaged: the run cannot be resumed from it.") from reason


def _described(record: ArrayRecord, where: str, parts: dict[str, bytes]) -> list[list[Any]]:
    described = []
    for place, (name, array) in enumerate(record.items()):
        parts[f"{where}.{place}"] = bytes(array.data)
        described.append([name, array.dtype, list(array.shape)])
    return described


def _restored(described: list[list[Any]], where: str, parts: Mapping[str, bytes]) -> ArrayRecord:
    arrays: dict[str, Array] = {}
    for place, (name, dtype, shape) in enumerate(described):
        array = Array(dtype=str(dtype), shape=tuple(shape), stype=_TYPE, data=bytes(parts[f"{where}.{place}"]))
        numbers: NDArray[Any] = array.numpy()
        if numbers.shape != tuple(shape) or str(numbers.dtype) != dtype:
            raise ValueError(name)
        arrays[str(name)] = array
    return ArrayRecord(arrays)
