"""What clients and server tell each other where the model lives with the clients, field by field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedveil.client_held.ciphers import Cipher, Pads
from fedveil.client_held.messages import Divided
from fedveil.errors import ConfigError, ProtocolError, unknown_name
from fedveil.ledger.releases import Party, Protection, Release
from fedveil.protocol.client_state import ClientState, Group
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.parts import RoundContext, Terms
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.grid_noise import add_residual, gridded
from fedveil.uplink.masked import dealing_releases, unmasking_releases
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.vote import (
    STRATEGIES,
    Ratio,
    Strategy,
    ballot,
    choice,
    elected,
    indices_of,
    random_choice,
    tags,
    vote_label,
)
from fedveil.work.per_sample import clipped

_SERVER: tuple[Party, ...] = ("server",)
_CLIENTS: tuple[Party, ...] = ("clients",)
_BOTH: tuple[Party, ...] = ("server", "clients")


def parallel_releases(uplink: Parallel) -> tuple[Release, ...]:
    """Every field, with what covers it."""
    return (*_GROUP, *_ROUND, *_vote(uplink), *_upload(uplink), *_LENDING)


def _vote(uplink: Parallel) -> tuple[Release, ...]:
    start, decay = uplink.ratio.start, uplink.ratio.decay
    if start == 0 or (start == 1 and decay == 1) or uplink.strategy == "random":
        return ()
    outcome = (
        Release("divide.round", "server", _CLIENTS, "the round's number"),
        Release("divide.attempt", "server", _CLIENTS, "the round's repetition"),
        Release("divide.cohort", "server", _CLIENTS, "who has voted"),
        Release("divide.voters", "server", _CLIENTS, "whose ballots are in the sum"),
    )
    envelope = (
        Release("vote.client", "client", _SERVER, "the client's number"),
        Release("vote.round", "client", _SERVER, "the round's number"),
        Release("vote.attempt", "client", _SERVER, "the round's repetition"),
    )
    if uplink.ballots is None:
        hiding = "AES tags in the order of the tags: the server sees which clients' votes overlap"
        return (
            *envelope,
            *outcome,
            Release(
                "vote.tags",
                "client",
                _SERVER,
                "the indices of the client's largest changes",
                hiding=hiding,
                about="data",
                protection="linked",
                with_client="open",
            ),
            Release("divide.winners", "server", _CLIENTS, "the tags with most votes", hiding=hiding, about="model"),
        )
    return (
        *envelope,
        *outcome,
        Release(
            "vote.ballot",
            "client",
            _SERVER,
            "a one for each of the client's largest changes",
            hiding=uplink.ballots.hiding,
            about="data",
            protection="encrypted",
            with_client="masked",
        ),
        Release("divide.counts", "server", _CLIENTS, "how many voted for each index", hiding="pads", about="model"),
        *dealing_releases("vote"),
        # A cipher of pads declares what opens masks by itself.
        *(() if uplink.cipher is not None and uplink.cipher.name == "pads" else unmasking_releases(evidence=False)),
    )


def _upload(uplink: Parallel) -> tuple[Release, ...]:
    hides = uplink.cipher is not None
    fields = [
        Release("divided.client", "client", _SERVER, "the client's number"),
        Release("divided.round", "client", _SERVER, "the round's number"),
        Release("divided.attempt", "client", _SERVER, "the round's repetition"),
    ]
    exposes = uplink.noise is not None and not uplink.throughout
    if exposes:
        fields.append(
            Release(
                "divided.rest",
                "client",
                _SERVER,
                "the update where it is not hidden, clipped; where its coordinates belong is not said",
                noise="Gaussian",
                about="data",
                protection="noised",
            )
        )
    else:
        fields.append(Release("divided.rest", "client", _SERVER, "nothing: all of the update is hidden"))
    covered: Protection = "noised" if uplink.throughout else "masked"
    if hides:
        assert uplink.cipher is not None
        left = uplink.cipher.with_client
        fields += [
            Release(
                "divided.hidden",
                "client",
                _SERVER,
                "the update where it is hidden" + (", under noise" if uplink.throughout else ""),
                noise="Gaussian" if uplink.throughout else "none",
                hiding=uplink.cipher.hiding,
                about="data",
                protection="encrypted",
                with_client="noised" if uplink.throughout else left,
            ),
            Release(
                "aggregate.hidden",
                "server",
                _CLIENTS,
                "the sum of what was hidden, which every client can open",
                noise="Gaussian" if uplink.throughout else "none",
                about="data",
                protection=covered,
            ),
            *uplink.cipher.releases(),
        ]
    fields.append(
        Release(
            "aggregate.rest",
            "server",
            _CLIENTS,
            "the sum of what was not hidden",
            noise="Gaussian" if exposes else "none",
            about="data" if exposes else "public",
            protection="noised" if exposes else "open",
        )
    )
    return tuple(fields)


_ROUND = (
    Release("begin.round", "server", _CLIENTS, "the round's number"),
    Release("begin.attempt", "server", _CLIENTS, "the round's repetition"),
    Release("begin.cohort", "server", _CLIENTS, "who takes part in the round"),
    Release("begin.version", "server", _CLIENTS, "which version of the model to work on"),
    Release("aggregate.version", "server", _CLIENTS, "the version that the sums lead to"),
    Release("aggregate.round", "server", _CLIENTS, "the round's number"),
    Release("aggregate.attempt", "server", _CLIENTS, "the round's repetition"),
    Release("aggregate.asked", "server", _CLIENTS, "who was asked to upload"),
    Release("aggregate.contributors", "server", _CLIENTS, "whose uploads are in the sums"),
)

_GROUP = (
    Release("found.newcomers", "server", _CLIENTS, "who is to be let into the group"),
    Release("found.clients", "server", _CLIENTS, "how many clients a round has"),
    Release("founded.client", "client", _SERVER, "the client's number"),
    Release("founded.public", "client", _SERVER, "the public key of the group's cipher"),
    Release("founded.fingerprint", "client", _SERVER, "which group it is"),
    Release("founded.receivers", "client", _SERVER, "who is invited"),
    Release("founded.lengths", "client", _SERVER, "how long the invitations are"),
    Release("founded.bundles", "client", _BOTH, "the group's secrets", hiding="sealed for each newcomer"),
    Release("join.founder", "server", _CLIENTS, "who invites"),
    Release("invitation.sealed", "server", _CLIENTS, "the group's secrets", hiding="sealed for the newcomer"),
    Release("joined.client", "client", _SERVER, "the client's number"),
    Release("joined.fingerprint", "client", _SERVER, "which group it has joined"),
)

_LENDING = (
    Release("lend.version", "server", _CLIENTS, "which version of the model to lend"),
    Release("lent.client", "client", _SERVER, "the client's number"),
    Release("lent.version", "client", _SERVER, "which version it is"),
    Release("lent.sealed", "client", _BOTH, "the model", hiding="sealed under the group key", about="model"),
    Release("borrowed.sealed", "server", _CLIENTS, "the model", hiding="sealed under the group key", about="model"),
    Release("finish.version", "server", _CLIENTS, "the last version of the model"),
    Release("finished.client", "client", _SERVER, "the client's number"),
    Release("finished.version", "client", _SERVER, "which version it holds"),
)


Voting = Literal["tags", "histogram"]
VOTES = ("tags", "histogram")


@dataclass(frozen=True)
class Parallel:
    """`ratio` of the coordinates hidden by `cipher`, the others under `noise`; `throughout`, noise lies on all of them.

    `ballots` are the pads under which a vote by histogram travels.
    """

    ratio: Ratio
    cipher: Cipher | None = None
    noise: NoisePlan | None = None
    strategy: Strategy = "max"
    ballots: Pads | None = None
    throughout: bool = False

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise unknown_name("strategy", self.strategy, STRATEGIES)
        if self.cipher is None and self.ratio.start > 0:
            raise ConfigError("A share of the coordinates is to be hidden, and there is no cipher to hide them with.")
        if self.noise is None and (self.ratio.start, self.ratio.decay) != (1.0, 1.0):
            raise ConfigError("Coordinates that are not hidden need noise; without noise, share must be 1.")

    @property
    def introduction(self) -> Introduction:
        """Every pair shares a secret: under it the group's secrets are passed on."""
        return "keys"

    @property
    def plan(self) -> NoisePlan | None:
        """The noise on what is not hidden."""
        return self.noise

    @property
    def noises_all(self) -> bool:
        """Whether nothing leaves a client without noise: what is only hidden, every client reads in the sum."""
        return self.noise is not None and (self.throughout or self.ratio.start == 0)

    @property
    def repairs(self) -> bool:
        """No noise is shared by pairs."""
        return False

    @property
    def masks(self) -> bool:
        """Whether anything travels under masks."""
        return isinstance(self.cipher, Pads) or self.ballots is not None

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As the cipher has it."""
        if clients < 2:
            raise ConfigError("A model that lives with its clients needs at least two of them in a round.")
        for one in (self.cipher, self.ballots):
            if one is not None:
                one.fits(clients, asked=asked)

    def count(self, round: int, size: int) -> int:
        """How many of `size` coordinates are hidden in a round."""
        return self.ratio.winners(round, size)

    def votes(self, round: int, size: int) -> bool:
        """Whether a round begins with a vote: where there is something to choose, and not by lot."""
        return 0 < self.count(round, size) < size and self.strategy != "random"

    # --- the vote, client side

    def vote(self, contribution: Tensor, group: Group, *, round: int, attempt: int, size: int) -> Tensor:
        """This client's tags."""
        return tags(self._chosen(contribution, round, size), key=_vote_key(group), label=vote_label(round, attempt))

    def marked(self, contribution: Tensor, *, round: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """This client's ballot: a one for every chosen index."""
        return ballot(self._chosen(contribution, round, size), size)

    def _chosen(self, contribution: Tensor, round: int, size: int) -> Tensor:
        assert self.strategy != "random"
        return choice(contribution[:size], self.count(round, size), self.strategy)

    def winners(self, winning: Tensor, group: Group, *, round: int, attempt: int, size: int) -> Tensor:
        """The indices behind winning tags."""
        label, count = vote_label(round, attempt), self.count(round, size)
        return indices_of(winning, key=_vote_key(group), label=label, size=size, winners=count)

    def counted(self, counts: Tensor, group: Group, context: RoundContext, voters: Sequence[int], size: int) -> Tensor:
        """The indices that a padded sum of ballots elects."""
        assert self.ballots is not None
        if tuple(counts.shape) != (size,):
            raise ProtocolError(f"a sum of ballots has shape {tuple(counts.shape)} where ({size},) belongs")
        words = self.ballots.read_words(group, counts, voters, context.stage(0))
        count = self.count(context.round, size)
        label = vote_label(context.round, context.attempt)
        return elected(words, count, voters=len(voters), most=count, key=_vote_key(group), label=label)

    def unvoted(self, group: Group, *, round: int, attempt: int, size: int) -> Tensor:
        """The hidden indices of a round without a vote: none, all, or a lot that every member draws alike."""
        count = self.count(round, size)
        if count in (0, size):
            return torch.arange(count)
        return random_choice(size, count, seed=group.seed(round=round, attempt=attempt, purpose="lot"))

    # --- the upload, client side

    def protect(
        self, state: ClientState, context: RoundContext, terms: Terms, *, secrets: SecretSource, story: bytes = b""
    ) -> tuple[ClientState, Divided]:
        """Divide this round's contribution, cover both parts."""
        pending = state.pending
        assert pending is not None
        assert pending.winners is not None
        contribution, unit = pending.contribution, 1.0
        if self.noise is not None and self.throughout:
            contribution = self._noised(contribution, state, context, terms, secrets)
            unit = gridded(self.noise, context, terms).step
        rest, hidden = divided(contribution, pending.winners, terms.blueprint.size)
        if self.noise is not None and not self.throughout:
            rest = self._noised(rest, state, context, terms, secrets)
        part = None
        if self.cipher is not None:
            values = hidden.to(torch.float64).cpu() * (unit / sum(context.samples()))
            state, part = self.cipher.hide(state, values, context.stage(1), secrets=secrets, story=story)
        # Without noise everything is hidden, and the rest is empty.
        return state, Divided(state.client, context.round, context.attempt, rest.to(torch.int64), part)

    def _noised(
        self, part: Tensor, state: ClientState, context: RoundContext, terms: Terms, secrets: SecretSource
    ) -> Tensor:
        """n_k·u·min(1, θ/‖u‖) + N(0, σ²), in whole steps."""
        assert self.noise is not None
        samples = context.samples()[context.cohort.index(state.client)]
        bounded = clipped(part, samples * terms.work.clip)  # type: ignore[attr-defined]
        words = gridded(self.noise, context, terms).encode(bounded)
        add_residual(words, state.client, self.noise, context, terms, secrets=secrets)
        return torch.from_numpy(words.view(np.int64))

    # --- the sums, client side

    def mean(
        self,
        group: Group,
        *,
        rest: Tensor,
        hidden: Tensor | None,
        winners: Tensor,
        context: RoundContext,
        contributors: Sequence[int],
        terms: Terms,
    ) -> Tensor:
        """(Σ of contributions) / Σ n_k, put together from both sums, in float64."""
        size, length = terms.blueprint.size, terms.layout.length - 1
        if tuple(rest.shape) != (size - len(winners),) or rest.dtype != torch.int64:
            raise ProtocolError(
                f"a sum under noise has shape {tuple(rest.shape)} and type {rest.dtype} where "
                f"({size - len(winners)},) and torch.int64 belong"
            )
        unit = 0.0 if self.noise is None else gridded(self.noise, context, terms).step
        device = terms.blueprint.trainable.device
        whole = torch.zeros(length, dtype=torch.float64, device=device)
        opened = torch.empty(0, dtype=torch.float64)
        if self.cipher is not None:
            if hidden is None:
                raise ProtocolError("a round's hidden sum is missing")
            opened = self.cipher.read(group, hidden, contributors, context.stage(1)) * float(sum(context.samples()))
        if len(opened) != len(winners) + length - size:
            raise ProtocolError(f"a hidden sum has {len(opened)} numbers where {len(winners) + length - size} belong")
        put_together(whole, winners, size, rest=rest.double() * unit, hidden=opened)
        assert context.directory is not None
        return whole / float(sum(context.directory.samples_of(contributors)))

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """What clients and server tell each other, field by field."""
        return parallel_releases(self)


def _vote_key(group: Group) -> bytes:
    return group.seed(round=0, attempt=0, purpose="vote")


def divided(contribution: Tensor, winners: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(rest, hidden): of the first `size` numbers the winners are hidden, and so is everything after them."""
    outside = torch.ones(size, dtype=torch.bool, device=contribution.device)
    outside[winners.to(contribution.device)] = False
    hidden = torch.cat([contribution[:size][~outside], contribution[size:]])
    return contribution[:size][outside], hidden


def put_together(whole: Tensor, winners: Tensor, size: int, *, rest: Tensor, hidden: Tensor) -> None:
    """The inverse of `divided`, into `whole`."""
    outside = torch.ones(size, dtype=torch.bool, device=whole.device)
    outside[winners.to(whole.device)] = False
    whole[:size][outside] = rest.to(whole)
    whole[:size][~outside] = hidden[: len(winners)].to(whole)
    whole[size:] = hidden[len(winners) :].to(whole)
