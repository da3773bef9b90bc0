"""What an uplink has whose rounds are over with the upload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Reply, Request, Upload
from fedveil.protocol.parts import UPLOAD_FIELDS, RoundContext, Summing, Terms, UploadSum, bounded
from fedveil.protocol.phases import Ask, Gathered
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.noise_plan import NoisePlan


class OnePhase:
    """One phase a round: uploads are summed exactly, and nothing has to be opened or given away."""

    @property
    def repairs(self) -> bool:
        """Nothing is given away."""
        return False

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """There are no phases beyond the upload."""
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def gives_away(self, state: ClientState, request: Request) -> tuple[tuple[int, int], ...]:
        """Nothing."""
        return ()

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """An exact sum."""
        return UploadSum(terms.layout, context, device=device)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Already open; noise shared with missing clients, if there is any, stays in it."""
        return None

    def parting(self, total: Summing) -> Mapping[int, Request]:
        """Nothing."""
        return {}

    def revealed(self, total: Summing) -> tuple[tuple[int, int], ...]:
        """Nothing."""
        return ()


@dataclass(frozen=True)
class Bare(OnePhase):
    """No protection on the way up: the server sees every contribution.

    `acquainted` clients announce their sample counts, where the size of a central noise depends on them.
    """

    acquainted: bool = False

    @property
    def introduction(self) -> Introduction:
        """Clients need not know of each other."""
        return "sizes" if self.acquainted else "none"

    @property
    def plan(self) -> NoisePlan | None:
        """No noise."""
        return None

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Any number will do."""

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Every round is as good as another."""
        return state

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """As it is."""
        return state, Upload(state.client, context.round, context.attempt, vector)

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """An exact sum. Of clipped contributions none can be longer than their bound, and is refused if it is.

        A sum is rounded by its size before noise is put on it, and nobody is to make others' part of it coarser.
        """
        most = None
        if context.directory is not None and hasattr(terms.work, "sensitivity"):
            reach = bounded(terms.work).largest
            most = {one: count * reach for one, count in zip(context.cohort, context.samples(), strict=True)}
        return UploadSum(terms.layout, context, device=device, most=most)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything, to the server and whoever listens, uncovered."""
        # A section this uplink does not know stays undeclared, and the server refuses to start with it.
        known = [name for name in layout.names if name in UPLOAD_FIELDS]
        return tuple(
            Release(f"upload.{name}", "client", ("server",), UPLOAD_FIELDS[name], about="data") for name in known
        )
