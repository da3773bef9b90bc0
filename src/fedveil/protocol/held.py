"""A model that lives with the clients: what each of them holds, and what it remembers of a round's work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedveil.downlink.blueprint import Weights
from fedveil.errors import ProtocolError

_BUFFER = "held.buffer."


@dataclass(frozen=True, eq=False)
class Held:
    """The model after `version` aggregates of this run's group; `loss` is the last one's mean training loss.

    `story` is the digest of all those aggregates, where masks are bound to it.
    """

    weights: Weights = field(repr=False)
    velocity: Tensor = field(repr=False)
    version: int = 0
    loss: float | None = None
    story: bytes = b""

    @staticmethod
    def fresh(weights: Weights, velocity: Tensor | None = None) -> Held:
        """What a run begins with."""
        still = torch.zeros_like(weights.parameters, dtype=torch.float64)
        return Held(weights, still if velocity is None else velocity)

    def facts(self) -> dict[str, Any]:
        """Everything but tensors."""
        return {"version": self.version, "loss": self.loss, "story": self.story.hex()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything else."""
        weights = self.weights
        return {
            "held.parameters": weights.parameters,
            "held.epsilon": weights.epsilon,
            "held.statistics": weights.statistics,
            "held.velocity": self.velocity,
            **{f"{_BUFFER}{name}": value for name, value in weights.buffers.items()},
        }

    @staticmethod
    def restored(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Held:
        """The model that `facts` and `tensors` described."""
        weights = Weights(
            tensors["held.parameters"],
            tensors["held.epsilon"],
            tensors["held.statistics"],
            {name.removeprefix(_BUFFER): one for name, one in tensors.items() if name.startswith(_BUFFER)},
        )
        try:
            story = bytes.fromhex(str(facts.get("story", "")))
        except ValueError as reason:
            raise ProtocolError("a stored model's story is malformed") from reason
        loss = facts.get("loss")
        if type(facts["version"]) is not int or not isinstance(loss, (float, type(None))):
            raise ProtocolError("a stored model's version or loss is malformed")
        return Held(weights, tensors["held.velocity"], facts["version"], loss, story)


@dataclass(frozen=True, eq=False)
class Pending:
    """A round in work: the client's contribution without its weight (n_k × everything) and, once known, the winners.

    `winners` are indices into the contribution, ascending; None before the vote has been counted.
    """

    round: int
    attempt: int
    contribution: Tensor = field(repr=False)
    winners: Tensor | None = field(default=None, repr=False)

    def facts(self) -> dict[str, Any]:
        """Everything but tensors."""
        return {"round": self.round, "attempt": self.attempt}

    def tensors(self) -> dict[str, Tensor]:
        """Everything else."""
        decided = {} if self.winners is None else {"pending.winners": self.winners}
        return {"pending.contribution": self.contribution, **decided}

    @staticmethod
    def restored(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Pending:
        """The work that `facts` and `tensors` described."""
        return Pending(
            facts["round"], facts["attempt"], tensors["pending.contribution"], tensors.get("pending.winners")
        )


def tensors_of(held: Held | None, pending: Pending | None) -> dict[str, Tensor]:
    """The tensors of both, by name."""
    return {**({} if held is None else held.tensors()), **({} if pending is None else pending.tensors())}
