"""A federation of bare vectors under masks, without any training: clients, and a server that may misbehave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.downlink.architecture import Architecture
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Announce, Directory, Epoch, Hello, Nonce, Nonces, beacon, from_bytes
from fedveil.protocol.key_agreement import introduce
from fedveil.protocol.messages import Request
from fedveil.protocol.parts import RoundContext, Terms
from fedveil.protocol.phases import Ask, Gathered
from fedveil.secrets import SecretSource, SeededSecrets
from fedveil.shapes import check
from fedveil.tensors import Layout
from fedveil.uplink.graph import Graph
from fedveil.uplink.masked import Masked
from fedveil.uplink.unmasking import MaskedSum, MaskedUpload, Revealed, Unmask
from fedveil.work.messages import LocalWork

CPU = torch.device("cpu")
RUN = "a run"


def epoch_of(clients: int, *, rounds: int = 1000, number: int = 0, first: int = 0) -> Epoch:
    """An epoch of a run in which all clients take part in every round."""
    return Epoch(number, first, rounds, clients, clients, 0)


def nonces_of(directory: Directory, shown: Iterable[Nonce]) -> Nonces:
    """What a server makes of the nonces of all."""
    by_client = {one.client: one.nonce for one in shown}
    return Nonces(from_bytes(directory.digest), torch.stack([by_client[one] for one in directory.present.tolist()]))


class Federation:
    """Clients who know each other's keys; every method is one message."""

    def __init__(
        self,
        clients: int,
        uplink: Masked | None = None,
        *,
        length: int = 40,
        seed: int = 0,
        secrets: SecretSource | None = None,
    ) -> None:
        self.uplink = Masked() if uplink is None else uplink
        self.secrets = SeededSecrets(seed) if secrets is None else secrets
        layout = Layout((("gradients", (1, length - 1)), ("weight", ())))
        self.terms = Terms(cast(Architecture, None), layout, cast(LocalWork, None))
        self.members = tuple(range(clients))
        self.states = {client: ClientState(client) for client in self.members}
        self.enter(epoch_of(clients))

    def enter(self, epoch: Epoch) -> None:
        """Everybody goes into an epoch."""
        announced = [cast(Announce, self._introduced(client, Hello(RUN, epoch))) for client in self.members]
        self.directory = Directory.of(RUN, announced, epoch)
        shown = [cast(Nonce, self._introduced(client, self.directory)) for client in self.members]
        told = nonces_of(self.directory, shown)
        self.beacon = beacon(self.directory, told)
        for client in self.members:
            self._introduced(client, told)

    def _introduced(self, client: int, request: Hello | Directory | Nonces) -> object:
        self.states[client], reply = introduce(
            self.states[client], request, samples=1, how="keys", secrets=self.secrets, roster=None, identity=None
        )
        return reply

    def context(self, round: int = 0, attempt: int = 0, cohort: Sequence[int] | None = None) -> RoundContext:
        members = self.members if cohort is None else tuple(cohort)
        return RoundContext(round, attempt, members, self.directory, self.beacon)

    def graph(self, context: RoundContext) -> Graph:
        return self.uplink.graph(context)

    def vectors(self, seed: int = 0) -> dict[int, Tensor]:
        """Everybody's contribution, in whole multiples of 1/8, so that sums are exact in fixed point."""
        random = np.random.default_rng(seed)
        return {
            client: torch.from_numpy(random.integers(-800, 800, self.terms.layout.length) / 8.0)
            for client in self.members
        }

    def upload(
        self, client: int, vector: Tensor, context: RoundContext, private: Request | None = None
    ) -> MaskedUpload:
        state = self.states[client]
        if private is not None:
            check(private)
        state = self.uplink.admit(state, context, private)
        # A resumed run has another name; here attempts share their keys, so that what differs is the attempt.
        run = f"{RUN}{f', attempt {context.attempt}' * (context.attempt > 0)}"
        state = state.answering(context.round, context.attempt, run=run, epoch=self.directory.epoch.number)
        self.states[client], reply = self.uplink.protect(state, vector, context, self.terms, secrets=self.secrets)
        return cast(MaskedUpload, reply)

    def uploads(
        self,
        vectors: Mapping[int, Tensor],
        context: RoundContext,
        told: Mapping[int, Request] | None = None,
        *,
        only: Iterable[int] | None = None,
    ) -> dict[int, MaskedUpload]:
        told = {} if told is None else told
        chosen = context.cohort if only is None else tuple(only)
        return {client: self.upload(client, vectors[client], context, told.get(client)) for client in chosen}

    def answer(self, client: int, request: Request, private: Request | None) -> Revealed:
        for sent in (request, *([] if private is None else [private])):
            check(sent)  # as the role does, before it hands anything on
        self.states[client], reply = self.uplink.answer(self.states[client], request, private)
        return cast(Revealed, reply)

    def accumulator(self, context: RoundContext) -> MaskedSum:
        return cast(MaskedSum, self.uplink.accumulator(context, self.terms, device=CPU))

    def collected(self, uploads: Mapping[int, MaskedUpload], context: RoundContext) -> tuple[MaskedSum, Ask | None]:
        """The uploads summed, and what the server asks next."""
        total = self.accumulator(context)
        for reply in uploads.values():
            total.add(reply)
        return total, self.uplink.open(total, arrivals(uploads), context)

    def unmask(self, context: RoundContext, survivors: Iterable[int]) -> Unmask:
        return Unmask(context.round, context.attempt, torch.tensor(sorted(survivors), dtype=torch.int64))


def arrivals(uploads: Iterable[int]) -> Gathered:
    return Gathered(tuple(uploads), {}, (), 0, 0)


def mask_purpose(context: RoundContext) -> str:
    """What a pair's mask of a round is for, where clients are told nothing but its graph."""
    return f"mask on {context.graph_seed().hex()}"


def words(upload: MaskedUpload) -> NDArray[np.uint64]:
    return upload.payload.numpy().view(np.uint64)
