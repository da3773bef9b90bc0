"""The divided uplink, where the model lives with the clients: a part of each update hidden, the rest under noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.client_held.ciphers import Cipher, Pads
from fedveil.client_held.group import Found, Founded, Invitation, Join, Joined
from fedveil.client_held.messages import Begin, Borrowed, Divide, Divided, Finish, Finished, Lend, Lent, Vote
from fedveil.errors import ConfigError, ProtocolError, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Cover, Release
from fedveil.protocol.client_state import ClientState, Group
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Aggregate, each_once, releases_of, releases_of_all
from fedveil.protocol.parts import Channel, RoundContext, Terms, bounded, clip_factor
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.masked import UNMASKING_MESSAGES
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import add_residual, gridded
from fedveil.uplink.unmasking import MaskedUpload
from fedveil.uplink.vote import (
    STRATEGIES,
    Ranking,
    Ratio,
    Strategy,
    choice,
    elected,
    indices_of,
    random_choice,
    tags,
    vote_label,
)
from fedveil.work.per_sample import clipped

Voting = Literal["tags", "histogram"]


@dataclass(frozen=True)
class Parallel(Channel):
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
    def readable(self) -> bool:
        """In part only."""
        return False

    @property
    def loss_limit(self) -> float | None:
        """What the cipher takes: losses travel hidden."""
        return None if self.cipher is None else self.cipher.value_range

    @property
    def masks(self) -> bool:
        """Whether anything travels under masks."""
        return self.ballots is not None or (self.cipher is not None and self.cipher.masks is not None)

    def prepare(self) -> None:
        """As the cipher has it."""
        if self.cipher is not None:
            self.cipher.prepare()

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """As the cipher has it."""
        if clients < 2:
            raise ConfigError("A model that lives with its clients needs at least two of them in a round.")
        for part in (self.cipher, self.ballots):
            if part is not None:
                part.fits(clients, asked=asked)

    @property
    def _ranks(self) -> bool:
        """Whether what is hidden is chosen by how large changes are, and so by data."""
        return self.strategy in get_args(Ranking)

    def caveats(self, run: RunFacts) -> Caveats:
        """What hiding and noise assume side by side, and what each leaves open."""
        partly = self.cipher is not None and self.noise is not None and not self.throughout
        votes = partly and self._ranks
        assumed, open_ = [caveats.KEYS], []
        if self.noise is not None:
            assumed.append(caveats.OWN_NOISE)
        if partly:
            assumed.append(caveats.GIVEN_WINNERS if votes else caveats.GIVEN_SUMS)
        if partly and not (votes and self.ballots is None):
            assumed.append(caveats.IN_ANY_CASE)
        if self.cipher is not None:
            unchanged = () if self.cipher.authentic else (caveats.UNCHANGED,)
            assumed += [*self.cipher.assumptions(run), *unchanged, caveats.LENDERS]
        if self.ballots is not None:
            shared = isinstance(self.cipher, Pads)
            assumed += [one for one in self.ballots.assumptions(run) if shared or one != caveats.GROUP]
        if votes:
            open_.append(caveats.TAGS if self.ballots is None else caveats.COUNTS)
        if self.cipher is not None and not self.noises_all:
            open_ += [caveats.SUMS_OPEN, caveats.DIFFERENCES]
        if partly:
            open_.append(caveats.REST_OPEN)
        if self.cipher is None:
            open_.append(caveats.CHANGES_OPEN)
        notes = [caveats.RANDOM_VOTES] if partly and self.strategy == "random-votes" else []
        if self.cipher is not None and self.cipher.authentic:
            notes.append(caveats.AUTHENTIC)
        else:
            open_.append(caveats.FORGED)
        return Caveats((*assumed, caveats.START), tuple(open_), notes=tuple(notes))

    def count(self, round: int, size: int) -> int:
        """How many of `size` coordinates are hidden in a round."""
        return self.ratio.winners(round, size)

    def votes(self, round: int, size: int) -> bool:
        """Whether a round begins with a vote: where there is something to choose, and not by lot."""
        return 0 < self.count(round, size) < size and self.strategy != "random"

    # --- the vote, client side

    def chosen(
        self, contribution: Tensor, *, client: int, round: int, attempt: int, size: int, secrets: SecretSource
    ) -> Tensor:
        """The indices that a client votes for: by its changes, or, for random votes, by its own secrets alone."""
        count = self.count(round, size)
        if self.strategy == "random-votes":
            return random_choice(size, count, seed=secrets.stream("vote", client, round, attempt).bytes(32))
        assert self.strategy != "random"
        return choice(contribution[:size], count, self.strategy)

    def vote(self, indices: Tensor, group: Group, *, round: int, attempt: int) -> Tensor:
        """The tags of chosen indices."""
        return tags(indices, key=_vote_key(group), label=vote_label(round, attempt))

    def winners(self, winning: Tensor, group: Group, *, round: int, attempt: int, size: int) -> Tensor:
        """The indices behind winning tags."""
        label, count = vote_label(round, attempt), self.count(round, size)
        return indices_of(winning, key=_vote_key(group), label=label, size=size, winners=count)

    def counted(
        self,
        counts: Tensor,
        group: Group,
        context: RoundContext,
        voters: Sequence[int],
        size: int,
        *,
        transcript: bytes,
    ) -> Tensor:
        """The indices that a padded sum of ballots elects."""
        assert self.ballots is not None
        words = self.ballots.read_words(group, counts, voters, context.stage(0), transcript=transcript)
        if len(words) != size:
            raise ProtocolError(f"a sum of ballots has {len(words)} numbers where {size} belong")
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
        self, state: ClientState, context: RoundContext, terms: Terms, *, secrets: SecretSource, transcript: bytes = b""
    ) -> tuple[ClientState, Divided]:
        """Divide this round's contribution, cover both parts."""
        pending = state.pending
        assert pending is not None
        assert pending.winners is not None
        contribution, unit = pending.contribution, 1.0
        if self.noise is not None and self.throughout:
            contribution = self._noised(contribution, state, context, terms, secrets)
            unit = gridded(self.noise, context, terms).step
        rest, hidden = divided(contribution, pending.winners, terms.divisible)
        if self.noise is not None and not self.throughout:
            rest = self._noised(rest, state, context, terms, secrets)
        part = None
        if self.cipher is not None:
            values = hidden.to(torch.float64).cpu() * (unit / sum(context.samples()))
            state, part = self.cipher.hide(
                state, values, context.stage(1), secrets=secrets, transcript=transcript, beside=_words(rest)
            )
        # Without noise everything is hidden, and the rest is empty.
        return state, Divided(state.client, context.round, context.attempt, rest.to(torch.int64), part)

    def _noised(
        self, part: Tensor, state: ClientState, context: RoundContext, terms: Terms, secrets: SecretSource
    ) -> Tensor:
        """n_k·u·min(1, θ/‖u‖) + N(0, σ²), in whole steps; where θ shrinks, u is in units of the round's."""
        assert self.noise is not None
        part = part / clip_factor(terms.work, context.round)
        samples = context.samples()[context.cohort.index(state.client)]
        short = clipped(part, samples * bounded(terms.work).largest)
        words = gridded(self.noise, context, terms).encode(short)
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
        transcript: bytes = b"",
    ) -> Tensor:
        """(Σ of contributions) / Σ n_k, put together from both sums, in float64."""
        size, length = terms.divisible, terms.layout.length - 1
        if tuple(rest.shape) != (size - len(winners),) or rest.dtype != torch.int64:
            raise ProtocolError(
                f"a sum under noise has shape {tuple(rest.shape)} and type {rest.dtype} where "
                f"({size - len(winners)},) and torch.int64 belong"
            )
        unit = 0.0 if self.noise is None else gridded(self.noise, context, terms).step
        device = terms.architecture.trainable.device
        whole = torch.zeros(length, dtype=torch.float64, device=device)
        opened = torch.empty(0, dtype=torch.float64)
        if self.cipher is not None:
            if hidden is None:
                raise ProtocolError("a round's hidden sum is missing")
            opened = self.cipher.read(
                group, hidden, contributors, context.stage(1), transcript=transcript, beside=_words(rest)
            )
            opened *= float(sum(context.samples()))
        if len(opened) != len(winners) + length - size:
            raise ProtocolError(f"a hidden sum has {len(opened)} numbers where {len(winners) + length - size} belong")
        shrunk = clip_factor(terms.work, context.round)
        if self.throughout:
            opened = opened * shrunk
        put_together(whole, winners, size, rest=rest.double() * (unit * shrunk), hidden=opened)
        assert context.directory is not None
        return whole / float(sum(context.directory.samples_of(contributors)))

    # --- the sums, server side

    def bare(self, sums: Aggregate, *, samples: int) -> Tensor:
        """The sum of what has no pad, of a round whose clients have announced so many samples, in float64."""
        assert isinstance(self.cipher, Pads)
        assert sums.hidden is not None
        stage = RoundContext(sums.round, sums.attempt, tuple(sums.asked.tolist())).stage(1)
        return self.cipher.read_bare(sums.hidden, sums.contributors.tolist(), stage) * float(samples)

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """What clients and server tell each other: the group, the vote, both parts of an upload, lent models."""
        exposes = self.noise is not None and not self.throughout
        rest, total = Cover(), Cover()
        if exposes:
            total = Cover(noise="Gaussian", about="data", protection="noised")
            what = "the update where it is not hidden, clipped; where its coordinates belong is not said"
            rest = Cover(what=what, **total)
        hidden, opened = Cover(), Cover(protection="masked")
        if self.cipher is not None:
            hidden = Cover(hiding=self.cipher.hiding, protection="encrypted", with_client=self.cipher.with_client)
        if self.throughout:
            hidden |= Cover(what="the update where it is hidden, under noise", noise="Gaussian", with_client="noised")
            opened = Cover(noise="Gaussian", protection="noised")
        absent = () if self.cipher is not None else ("hidden",)
        sums = {"rest": total, "hidden": opened}
        return each_once(
            (
                *releases_of_all(Found, Founded, Join, Invitation, Joined),
                *releases_of(Begin, but=("latest",)),
                *releases_of(Aggregate, but=("rest", "hidden")),
                *self._vote_releases(),
                *releases_of(Divided, but=absent, covers={"rest": rest, "hidden": hidden}),
                *releases_of(Aggregate, but=("rest", *absent), covers=sums),
                *(() if self.cipher is None else self.cipher.releases()),
                *releases_of(Aggregate, but=absent, covers=sums),
                *releases_of(Lend, but=("latest",)),
                *releases_of_all(Lent, Borrowed),
                *releases_of(Finish, but=("latest",)),
                *releases_of(Finished),
            )
        )

    def _vote_releases(self) -> tuple[Release, ...]:
        start, decay = self.ratio.start, self.ratio.decay
        if start == 0 or (start == 1 and decay == 1) or self.strategy == "random":
            return ()
        asked = releases_of(Divide, but=("winners", "counts"))
        drawn = Cover() if self._ranks else Cover(what="indices that each client draws for itself", about="public")
        if self.ballots is None:
            cast = Cover() if self._ranks else drawn | Cover(protection="open", with_client=None)
            return (
                *releases_of(Vote, but=("tags",)),
                *asked,
                *releases_of(Vote, covers={"tags": cast}),
                *releases_of(Divide, but=("counts",)),
            )
        cover = drawn | Cover(hiding=self.ballots.hiding, protection="encrypted", with_client="masked")
        ballot = releases_of(MaskedUpload, name="vote", sections=("ballot",), covers={"ballot": cover})
        shares = ("holders", "lengths", "bundles")
        # A cipher under masks declares by itself what opens them.
        opened_too = self.cipher is not None and self.cipher.masks is not None
        return (
            *releases_of(MaskedUpload, name="vote", but=shares),
            *asked,
            *(release for release in ballot if release.field == "vote.ballot"),
            *releases_of(Divide, but=("winners",)),
            *ballot,
            *(() if opened_too else releases_of_all(*UNMASKING_MESSAGES)),
        )


def _words(rest: Tensor) -> NDArray[np.uint64]:
    return rest.to(torch.int64).cpu().numpy().view(np.uint64)


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
