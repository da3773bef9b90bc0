"""What local work takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.messages import Broadcast
from fedveil.errors import NumericError
from fedveil.flat import Layout
from fedveil.secrets import OsSecrets, SecretSource


@dataclass(frozen=True, eq=False)
class ClientData:
    """One client's samples; `client` is its public number.

    `rows` selects them from a larger tensor (None: all), so that simulated clients share one copy.
    """

    client: int
    x: Tensor
    y: Tensor
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y) if self.rows is None else len(self.rows)

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen samples; copies, because a model may change its input in place."""
        if self.rows is not None:
            chosen = self.rows if len(chosen) == len(self) else self.rows[chosen.to(self.rows.device)]
        elif len(chosen) == len(self):
            return self.x.clone(), self.y
        chosen = chosen.to(self.x.device)
        return self.x[chosen], self.y[chosen]


class LocalWork(Protocol):
    """What a client computes in a round, before the uplink protects it."""

    @property
    def returns(self) -> str:
        """ "gradient" at the broadcast point, or "update" after local steps."""
        ...

    def layout(self, blueprint: Blueprint, *, tensors: int) -> Layout:
        """The sections of one contribution."""
        ...

    def run(self, bench: Bench, broadcast: Broadcast, data: ClientData, *, round: int) -> Tensor:
        """One client's contribution: n_k × everything, and n_k, in one flat vector."""
        ...

    def run_many(
        self, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
    ) -> Iterator[tuple[int, Tensor | NumericError]]:
        """The same for many clients at once: (position, contribution or why there is none), in any order."""
        ...


@dataclass(eq=False)
class Bench:
    """A client machine's workbench: skeletons to fill, kept between rounds to save time.

    It holds nothing but the architecture, the client's own source of secrets and, during a round, the
    broadcast values.
    """

    blueprint: Blueprint
    layout: Layout
    secrets: SecretSource = field(default_factory=OsSecrets)

    def __post_init__(self) -> None:
        self.module = self.blueprint.new_skeleton()
        self.functional = self.blueprint.new_skeleton(fused=False)
        self.vectorisable = True
        self.captured: dict[object, Callable[..., Tensor]] = {}


def one_by_one(
    work: LocalWork, bench: Bench, broadcast: Broadcast, clients: Sequence[ClientData], *, round: int
) -> Iterator[tuple[int, Tensor | NumericError]]:
    """`run_many` for work that shares nothing between clients."""
    for position, data in enumerate(clients):
        try:
            yield position, work.run(bench, broadcast, data, round=round)
        except NumericError as reason:
            yield position, reason
