"""What an uplink has whose rounds are over with the upload."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedveil.errors import ProtocolError
from fedveil.protocol.asking import Ask, Gathered
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import RoundContext, Summing, Terms, UploadSum
from fedveil.protocol.state import ClientState


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
