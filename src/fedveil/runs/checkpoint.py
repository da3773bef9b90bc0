"""Checkpoints: a server's state at a round boundary, checksummed and bound to its run; and beside it, sealed, what
simulated clients keep for themselves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from fedveil.downlink import Weights
from fedveil.errors import CheckpointError, ProtocolError, spelled
from fedveil.framing import pack, unpack
from fedveil.plain import made, named, parsed, read_raw
from fedveil.protocol.client_state import KEY_BYTES, ClientState
from fedveil.roles.server import ServerState
from fedveil.runs.folder import digest_of, write_atomically
from fedveil.work.messages import KeptTensors

_FORMAT = "fedveil-checkpoint-1"
_KEPT = 2
_HEADER_LENGTH = 8


@dataclass(frozen=True)
class _Metadata:
    format: str
    facts: str
    digest: str


@dataclass(frozen=True)
class _Facts:
    fingerprint: str
    round: int
    head_level: float | None
    bad_rounds: int = 0
    clip: float | None = None


def save_checkpoint(folder: Path, state: ServerState, *, fingerprint: str) -> Path:
    """Write the state of a round boundary atomically. Of earlier ones the newest is kept, of later ones all."""
    path = folder / f"round-{state.round:08d}.safetensors"
    write_state(path, state, fingerprint=fingerprint)
    keep_two(path, "round-*.safetensors")
    return path


def keep_two(path: Path, pattern: str) -> None:
    """Remove what is older than a file and the one before it."""
    earlier = sorted(file for file in path.parent.glob(pattern) if file.name < path.name)
    for old in earlier[: 1 - _KEPT]:
        old.unlink()


def write_state(path: Path, state: ServerState, *, fingerprint: str) -> None:
    """Write a state atomically, checksummed and bound to its run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(state)
    known = {"fingerprint": fingerprint, "round": state.round, "head_level": state.head_level}
    # Only where there are any: what has none is the file that it always was.
    known |= {"bad_rounds": state.bad_rounds} if state.bad_rounds else {}
    known |= {} if state.clip is None else {"clip": state.clip}
    facts = json.dumps(known, sort_keys=True)
    metadata = {"format": _FORMAT, "facts": facts, "digest": digest_of(tensors, facts)}
    write_atomically(path, save_tensors(tensors, metadata))


def load_checkpoint(path: Path, like: Weights, *, fingerprint: str, velocity: Tensor | None = None) -> ServerState:
    """Read a checkpoint; a damaged one, or one of another run, is refused with the reason.

    `velocity` is like what its optimiser remembers, where that is not one number per parameter.
    """
    try:
        raw = read_raw(path)
        tensors = load_tensors(raw)
        length = int.from_bytes(raw[:_HEADER_LENGTH], "little")
        header = named(raw[_HEADER_LENGTH : _HEADER_LENGTH + length], where=path.name)
        metadata = made(_Metadata, header.get("__metadata__"), where=path.name)
        facts = made(_Facts, parsed(metadata.facts, where=path.name), where=path.name)
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, CheckpointError) as reason:
        raise CheckpointError(f"Checkpoint {path.name} is damaged or not a checkpoint.") from reason
    if metadata.format != _FORMAT or metadata.digest != digest_of(tensors, metadata.facts):
        raise CheckpointError(f"Checkpoint {path.name} is damaged: its checksum does not match.")
    if facts.fingerprint != fingerprint:
        raise CheckpointError(f"Checkpoint {path.name} belongs to a run with other settings.")
    if facts.round < 0 or facts.bad_rounds < 0 or not math.isfinite(facts.head_level or 0.0):
        raise CheckpointError(f"Checkpoint {path.name} is damaged: it names no round.")
    if facts.clip is not None and not 0 < facts.clip < math.inf:
        raise CheckpointError(f"Checkpoint {path.name} is damaged: its clip is no number to clip by.")
    device = like.parameters.device
    expected = _tensors(ServerState.fresh(like, velocity))
    if {name: _form(tensor) for name, tensor in tensors.items()} != {
        name: _form(tensor) for name, tensor in expected.items()
    }:
        raise CheckpointError(f"Checkpoint {path.name} belongs to another model.")
    placed = {name: value.to(device) for name, value in tensors.items()}
    return ServerState(
        Weights.from_named(placed),
        placed["velocity"],
        round=facts.round,
        head_level=facts.head_level,
        clip=facts.clip,
        bad_rounds=facts.bad_rounds,
    )


def newest_good(
    folder: Path, like: Weights, *, fingerprint: str, velocity: Tensor | None = None
) -> tuple[ServerState | None, list[str]]:
    """The newest usable checkpoint (None where there is none at all), and why newer ones were refused."""
    refused: list[str] = []
    files = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in files:
        try:
            return load_checkpoint(path, like, fingerprint=fingerprint, velocity=velocity), refused
        except CheckpointError as reason:
            refused.append(str(reason))
    if files:
        raise CheckpointError(
            " ".join(refused) + " No usable checkpoint is left: resume with the settings the run was started with, "
            f"or start anew with another {spelled('out')}."
        )
    return None, refused


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tuple(tensor.shape)


def _tensors(state: ServerState) -> dict[str, Tensor]:
    own = {**state.weights.named(), "velocity": state.velocity}
    return {name: value.detach().cpu().contiguous() for name, value in own.items()}


class ClientMemory:
    """What the work of simulated clients keeps for itself: a file beside each checkpoint, sealed client by client under
    a key that lies beside it. On machines of their own, clients keep it themselves."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.kept: Callable[[], Mapping[int, KeptTensors]] = dict
        """Asked for what clients keep now."""

    def save(self, round: int) -> None:
        """Write down what clients keep after a round; of earlier files the newest stays."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, key = self._file(round), self._key()
        sealed = {str(client): ClientState(client, kept=kept).seal(key) for client, kept in self.kept().items()}
        write_atomically(path, pack({}, sealed), mode=0o600)
        keep_two(path, "round-*.clients")

    def load(self, round: int) -> None:
        """Begin with what clients kept after a round; refused where that is not there."""
        try:
            _, sealed = unpack(read_raw(self._file(round)))
            states = [ClientState.unseal(content, self._key()) for content in sealed.values()]
        except (OSError, ProtocolError, CheckpointError) as reason:
            raise CheckpointError(
                f"{self._file(round).name} is missing or damaged, and with it what clients keep for themselves: the "
                f"run cannot go on after round {round}. Put the file back with clients.key, or start anew with another "
                f"{spelled('out')}."
            ) from reason
        found = {state.client: state.kept for state in states if state.kept is not None}
        self.kept = lambda: found

    def _file(self, round: int) -> Path:
        return self._folder / f"round-{round:08d}.clients"

    def _key(self) -> bytes:
        path = self._folder / "clients.key"
        if not path.exists():
            write_atomically(path, os.urandom(KEY_BYTES), mode=0o600)
        return read_raw(path)
