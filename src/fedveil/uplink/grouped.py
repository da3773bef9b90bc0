"""A run's clients in groups, a sum for each: one bad upload spoils the mean of its group, and the others outvote it.

Where the server sees sums alone, groups are drawn once and stay for the whole run. Redrawn ones would be equations with
every client an unknown: over a dozen rounds of a slowly moving model, or two on the same one, they can be solved for
single clients. Who is in which group follows from the beacon of the run's first epoch, to which every client adds a
nonce, so that nobody picks it, and every client works its group out for itself when it first takes part. It remembers
it through later epochs and attempts (`ClientState.grouped`), and so does the server (`ServerState.groups`, and in the
run's folder). Then a round's group is what of it is in the round's cohort:

    who is away     is missing in its group, as in a round without groups
    who leaves      is missing from it for good; a group of fewer than five is summed no more
    who comes later is in no group, and takes part in the next run: on whose word should it believe who is with it?

Where the server reads every upload there is nothing to solve for, and groups are drawn anew every round.

To the uplink inside, a group is a cohort of its own: it masks, drops out and is opened by itself, and a group that
cannot be opened is left out. What the server then does with the groups' means is in `protocol/plausible.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from fedveil.errors import ConfigError, ProtocolError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import graph_seed
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import RoundContext, Scheme, Summing, Terms, Uplink
from fedveil.protocol.phases import Ask, Gathered
from fedveil.protocol.plausible import FEWEST_GROUPS
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.graph import split
from fedveil.uplink.masked import Masked

FEWEST_CLIENTS = 5
"""A sum of fewer would hide a client among too few others."""


FEWEST_AT_FIRST = FEWEST_GROUPS + 1
"""One client can close its group, by shares that open nothing, and enough have to be left."""


@lru_cache(maxsize=8)
def _drawn(context: RoundContext, count: int) -> tuple[tuple[int, ...], ...]:
    # Remembered by context, which simulated clients share.
    beacon, first = b"", context.round
    if context.directory is not None and context.beacon:  # the same in every round of an epoch
        beacon, first = context.beacon, context.directory.epoch.first
    seed = graph_seed(beacon=beacon, round=first, members=context.cohort)
    return split(context.cohort, groups=count, seed=seed)


@lru_cache(maxsize=1024)
def _within(context: RoundContext, members: tuple[int, ...]) -> RoundContext:
    """The round of a group: of those that are of it, whoever is of the round's cohort."""
    here = frozenset(context.cohort)
    cohort = tuple(client for client in members if client in here)
    return RoundContext(context.round, context.attempt, cohort, context.directory, context.beacon)


@lru_cache(maxsize=8)
def _groups(context: RoundContext, count: int) -> tuple[RoundContext, ...]:
    """The rounds of all groups that are large enough."""
    groups = [_within(context, members) for members in context.groups or _drawn(context, count)]
    return tuple(group for group in groups if len(group.cohort) >= FEWEST_CLIENTS)


@dataclass(frozen=True)
class Grouped(Uplink):
    """The uplink `inner`, in `groups` groups."""

    inner: Uplink
    groups: int

    @property
    def introduction(self) -> Introduction:
        """As the uplink inside has it."""
        return self.inner.introduction

    @property
    def readable(self) -> bool:
        """As the uplink inside has it."""
        return self.inner.readable

    @property
    def loss_limit(self) -> float | None:
        """As the uplink inside has it."""
        return self.inner.loss_limit

    def summed_with(self, clients: int) -> int:
        """A sum is over a group."""
        return clients // self.groups

    def absences(self, clients: int) -> int | None:
        """As many as a group can do without, should they all be of one."""
        return self.inner.absences(clients // self.groups)

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Groups have at least five clients each, and what fits the uplink inside."""
        if clients // self.groups < FEWEST_CLIENTS:
            raise ConfigError(
                f"{clients} clients a round do not make {self.groups} groups of at least {FEWEST_CLIENTS}: a sum of "
                f"fewer would hide each of them among too few. Lower {spelled('robust_groups')}, or let more clients "
                "take part."
            )
        self.inner.fits(clients // self.groups, asked=None if asked is None else -(-asked // self.groups))

    def prepare(self) -> None:
        """As the uplink inside does."""
        self.inner.prepare()

    def _members(self, context: RoundContext, state: ClientState) -> tuple[int, ...]:
        """With whom a client is summed, itself included: as it remembers, or as the run's first epoch draws it."""
        if state.grouped:
            return state.grouped
        if context.directory is not None and context.directory.epoch.first > 0:
            raise ProtocolError(
                f"client {state.client} comes after this run's groups were drawn, and nobody it could believe tells it "
                "who is in them: it can take part in the next run"
            )
        context.check_member(state.client)
        return next(group for group in _drawn(context, self.groups) if state.client in group)

    def _own(self, context: RoundContext, state: ClientState) -> RoundContext:
        """The group of a client; where clients are not told of each other, groups are the server's alone."""
        if self.introduction == "none":
            return context
        own = _within(context, self._members(context, state))
        if len(own.cohort) < FEWEST_CLIENTS:
            raise ProtocolError(
                f"of the group of client {state.client} {len(own.cohort)} are left, and a sum of fewer than "
                f"{FEWEST_CLIENTS} would hide each among too few"
            )
        return own

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Go into the round of one's group, and stay in that."""
        entered = self.inner.admit(state, self._own(context, state), private)
        return entered if self.introduction == "none" else replace(entered, grouped=self._members(context, state))

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """As in a round of one's group alone."""
        return self.inner.protect(state, vector, self._own(context, state), terms, secrets=secrets)

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """As the uplink inside does: a client remembers its group as the cohort."""
        return self.inner.answer(state, request, private)

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """What two of one group share."""
        own = self._own(context, state)
        return self.inner.shared_part(state, peer, own, terms) if peer in own.cohort else None

    def unit(self, context: RoundContext, terms: Terms) -> float:
        """As the uplink inside has it."""
        return self.inner.unit(context, terms)

    def lasting_groups(self, context: RoundContext) -> tuple[tuple[int, ...], ...]:
        """Drawn once, where the server sees nothing but their sums."""
        return () if self.readable else _drawn(context, self.groups)

    def asked(self, context: RoundContext, able: tuple[int, ...]) -> tuple[int, ...]:
        """Whoever is in a group that is large enough."""
        grouped = {client for group in _groups(context, self.groups) for client in group.cohort}
        return tuple(client for client in able if client in grouped)

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> GroupedSum:
        """A sum for every group."""
        groups = _groups(context, self.groups)
        return GroupedSum([_Part(group, self.inner.accumulator(group, terms, device=device)) for group in groups])

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """The phases of one group after the other; a group that cannot be opened is left out."""
        assert isinstance(total, GroupedSum)
        total.hear(gathered)
        while total.place < len(total.parts):
            part = total.parts[total.place]
            try:
                phase = self.inner.open(part.total, part.gathered(total.arrived, gathered), part.context)
            except ProtocolError as reason:
                part.closed, phase = str(reason), None
            if phase is not None:
                return phase
            total.place += 1
        return None

    def group_sums(self, total: Summing) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """The sums of the groups that open, and whose uploads are in each; why, where too few do."""
        assert isinstance(total, GroupedSum)
        opened = []
        for part in total.parts:
            here = tuple(client for client in part.context.cohort if client in total.arrived)
            if part.closed or not here:
                continue
            try:
                opened.append((here, part.total.total()))
            except ProtocolError as reason:
                part.closed = str(reason)
        if len(opened) < FEWEST_GROUPS:
            why = next((part.closed for part in total.parts if part.closed), "no upload arrived in the others")
            raise ProtocolError(
                f"{len(opened)} of {len(total.parts)} groups can be opened, and {FEWEST_GROUPS} are needed: {why}"
            )
        return tuple(opened)

    def parting(self, total: Summing) -> Mapping[int, Request | None]:
        """What every group's clients are owed."""
        assert isinstance(total, GroupedSum)
        told: dict[int, Request | None] = {}
        for part in total.parts:
            told |= self.inner.parting(part.total)
        return told

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Those of the uplink inside."""
        return self.inner.releases(layout)

    def caveats(self, run: RunFacts) -> Caveats:
        """Those of the uplink inside for rounds of one group, and that there are several."""
        size = run.cohort // self.groups
        inside = self.inner.caveats(replace(run, cohort=size, clients=max(run.clients, run.cohort)))
        if self.readable:
            return inside
        said = Caveats(unprotected=(caveats.groups(self.groups, size),), over="each of a round's groups of clients")
        return replace(inside.followed_by(said), over=said.over)


@dataclass(eq=False)
class _Part:
    """One group: its round, its sum, and why that is left out, if it is."""

    context: RoundContext
    total: Summing
    closed: str = ""

    def gathered(self, arrived: frozenset[int], latest: Gathered) -> Gathered:
        """What has come of this group's uploads."""
        here = tuple(client for client in self.context.cohort if client in arrived)
        return replace(latest, arrived=here)


class GroupedSum:
    """The sums of a round's groups; every upload goes into that of its own."""

    def __init__(self, parts: list[_Part]) -> None:
        self.parts = parts
        self.place = 0
        """Which group is being opened."""
        self.arrived: frozenset[int] = frozenset()
        self._of = {client: part for part in parts for client in part.context.cohort}

    def add(self, reply: Reply) -> None:
        """Fold one upload into its group's sum, or refuse it and stay unchanged."""
        part = self._of.get(reply.client)
        if part is None:
            raise ProtocolError("an upload from a client that is in no group")
        part.total.add(reply)

    def hear(self, gathered: Gathered) -> None:
        """Remember whose uploads arrived: what comes later are phases that open them."""
        self.arrived = self.arrived or frozenset(gathered.arrived)

    def total(self) -> Tensor:
        """There is none: groups are not added up."""
        raise ProtocolError("the sums of groups are not added up")


def in_groups(scheme: Scheme, groups: int) -> Scheme:
    """A scheme with its round's clients in groups; refused where the sum of a group would be a release too many."""
    setting, name = spelled("robust_groups"), spelled("scheme", scheme.name)
    fitting = "Groups go with fedavg, lossless, pbpfl, secagg and veil-secagg."
    if groups < FEWEST_AT_FIRST:
        raise ConfigError(
            f"{setting} must be at least {FEWEST_AT_FIRST} (got {groups}): one client can keep its group from being "
            f"opened, and of fewer than {FEWEST_GROUPS} that are left nobody can tell which is bad."
        )
    if scheme.noisy:
        raise ConfigError(
            f"{setting} does not go with {name}: the sum of every group would be a release of its own, and noise that "
            "is made for one sum of all is too little for each. Uploads and sums of clipped updates under noise are "
            f"held to {spelled('clip')} without a setting. {fitting}"
        )
    if scheme.holder == "clients":
        raise ConfigError(
            f"{setting} does not go with {name}: its model lives with the clients, and its server reads no sums to "
            f"compare. {fitting}"
        )
    uplink = scheme.summing
    if uplink.dealing() is not None:
        raise ConfigError(f"{setting} does not go with {name}: clients hold one key together. {fitting}")
    inner: Uplink = replace(uplink, groups=groups) if isinstance(uplink, Masked) else uplink
    return replace(scheme, uplink=Grouped(inner, groups))


def check_grouped(scheme: Scheme, *, everybody: bool, recorded: bool) -> None:
    """Refuse groups under masks of which a round asks a part only, and records for audits."""
    if recorded:
        raise ConfigError(
            f"{spelled('record', True)} keeps one sum a round for audits, and {spelled('robust_groups')} has several: "
            "leave one of them out."
        )
    if not scheme.readable and not everybody:
        raise ConfigError(
            f"{spelled('robust_groups')} under masks goes with rounds that ask everybody, not some: clients stay in "
            "the groups they are drawn into, since sums of changing ones could be solved for single clients. Leave "
            f"{spelled('cohort')} and {spelled('sampling_rate')} out."
        )
