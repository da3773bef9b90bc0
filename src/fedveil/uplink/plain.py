"""The uplink without protection: every contribution as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Reply, Upload, releases_of
from fedveil.protocol.parts import RoundContext, Summing, Terms, Uplink, UploadSum, bounded
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout


@dataclass(frozen=True)
class Bare(Uplink):
    """No protection on the way up: the server sees every contribution.

    `acquainted` clients announce their sample counts, where the size of a central noise depends on them. With `alike`
    every client counts the same.
    """

    acquainted: bool = False
    alike: bool = False

    @property
    def equal(self) -> bool:
        """As given."""
        return self.alike

    @property
    def introduction(self) -> Introduction:
        """Clients need not know of each other."""
        return "sizes" if self.acquainted else "none"

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """As it is; where clients count alike, over its weight, which stands last."""
        payload = vector / vector[-1] if self.alike else vector
        return state, Upload(state.client, context.round, context.attempt, payload)

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """An exact sum. Of clipped contributions none can be longer than their bound, and is refused if it is.

        A sum is rounded by its size before noise is put on it, and nobody is to make others' part of it coarser.
        """
        most = None
        if context.directory is not None and terms.work.clip is not None:
            reach = bounded(terms.work).largest
            most = {client: count * reach for client, count in zip(context.cohort, context.samples(), strict=True)}
        return UploadSum(terms.layout, context, device=device, most=most, longest=terms.longest)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything, to the server and whoever listens, uncovered."""
        return releases_of(Upload, sections=layout.names)

    def caveats(self, run: RunFacts) -> Caveats:
        """The server has what every client sent."""
        if run.central:
            return Caveats(unprotected=(caveats.SEEN_BEFORE_NOISE,))
        return Caveats(unprotected=(caveats.DATA_RECOVERED if run.veiled else caveats.DATA_SEEN,))
