"""The parts a scheme is made of, as the protocol sees them: downlink × local work × uplink × who holds the model.

`RoundContext` is what both roles know of a round and check it by; `Terms` what they have in common for a whole run. An
`Uplink` has two sides, and a round calls them in this order:

    client: acquaint → admit → protect → answer *
                                               refuse or enter the round; cover the contribution; phases of its own
    server: accumulator → open * → parting     where uploads are folded; the next phase it takes; what clients are owed
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from fedveil.downlink.architecture import Architecture
from fedveil.downlink.messages import ClipBroadcast, Downlink
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError, Refusal
from fedveil.ledger.caveats import KNOWN_START, RunFacts, adaptive_clip, shrinking_clip, shrinking_noise
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.releases import Caveats, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Directory, graph_seed
from fedveil.protocol.key_agreement import INTRODUCTIONS, Introduction
from fedveil.protocol.messages import Reply, Request, Train, Upload, each_once, releases_of, releases_of_all
from fedveil.protocol.phases import Accumulator, Ask, Gathered, Inbox, RoundBegins
from fedveil.secrets import SecretSource, SecretStream
from fedveil.shapes import REALS
from fedveil.tensors import ExactSum, Layout
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.work.clipping import AdaptiveClip
from fedveil.work.messages import LocalWork

if TYPE_CHECKING:
    from fedveil.crypto.keys import Roster

Holder = Literal["server", "clients"]


@dataclass(frozen=True, eq=False)
class RoundContext:
    """What both roles know about a round; of the server alone, who is in which of the run's `groups`, and the `public`
    key that was dealt, where one was; of a client alone, a digest of what its local work was `told` besides.

    `drawn` is how many clients the schedule has drawn, where the round's number no longer says so (`stage`).
    """

    round: int
    attempt: int
    cohort: tuple[int, ...]
    directory: Directory | None = None
    beacon: bytes = b""
    groups: tuple[tuple[int, ...], ...] = ()
    public: bytes = b""
    told: bytes = b""
    drawn: int = 0

    @property
    def asked(self) -> int:
        """How many clients the schedule asks, whoever of them is not of the epoch."""
        if self.directory is None:
            return len(self.cohort)
        epoch = self.directory.epoch
        return (self.drawn or len(epoch.drawn(self.round, self.beacon))) if epoch.rate else epoch.size

    def check_scheduled(self) -> None:
        """Refuse a round that is not of the epoch, or with other clients than were settled before graphs were drawn."""
        if self.directory is None:
            return
        if not self.beacon:
            raise ProtocolError("a round was asked for before its epoch's nonces were shown")
        if self.round not in self.directory.epoch:
            raise ProtocolError(
                f"round {self.round + 1} is not of the epoch that begins with round {self.directory.epoch.first + 1}: "
                "a server that skips rounds could pick the graph that suits it"
            )
        if not self._as_scheduled:
            raise ProtocolError(
                f"round {self.round + 1} names other clients than the epoch's schedule: a server that picks them could "
                "pick the graph that suits it"
            )

    @cached_property
    def _as_scheduled(self) -> bool:
        return self.directory is None or self.cohort == self.directory.cohort(self.round, self.beacon)

    @cached_property
    def _members(self) -> frozenset[int]:
        return frozenset(self.cohort)

    def check_member(self, client: int) -> None:
        """Refuse a round to a client that is not of its cohort."""
        if client not in self._members:
            raise ProtocolError(f"client {client} was sent a round in which it has no part")

    @property
    def which(self) -> tuple[int, int]:
        """Round and attempt."""
        return self.round, self.attempt

    def check_sizes(self, client: int, ratio: float, *, samples: int) -> None:
        """Refuse a round to `client` in which somebody claims a number of samples that is out of proportion.

        Or if it no longer has as many `samples` as it has announced: noise is made for those.
        """
        odd = {} if self.directory is None else self.directory.outsized(ratio)
        for other in sorted(odd):
            if other in self._members:
                raise ProtocolError(f"client {client} takes part in no round with client {other}, which {odd[other]}")
        if self.directory is not None and self.directory.samples_of([client]) != [samples]:
            raise ProtocolError(
                f"client {client} has other data than when it announced how many samples it has, and noise is made for "
                "those: a run needs the same data from beginning to end"
            )

    def stage(self, number: int) -> RoundContext:
        """One of a round's two stages, each with keys of its own: stage s of round t counts as round 2t + s."""
        known = (self.cohort, self.directory, self.beacon)
        return RoundContext(2 * self.round + number, self.attempt, *known, drawn=self.asked)

    def begins(self) -> RoundBegins:
        """What whoever keeps books is told before anything is asked."""
        if self.directory is None:
            return RoundBegins(self.round, self.attempt, self.cohort)
        counts = tuple(self.samples())
        return RoundBegins(self.round, self.attempt, self.cohort, self.graph_seed(), samples=counts)

    def samples(self) -> list[int]:
        """The cohort's sample counts, as announced."""
        if self.directory is None:
            raise ProtocolError("this round's clients have not introduced themselves")
        return self._samples

    @cached_property
    def _samples(self) -> list[int]:
        return [] if self.directory is None else self.directory.samples_of(self.cohort)

    def graph_seed(self) -> bytes:
        """From what every client derives the round's graph."""
        return self._graph_seed

    @cached_property
    def _graph_seed(self) -> bytes:
        if self.directory is None or not self.beacon:
            raise ProtocolError("this round's clients have not introduced themselves")
        return graph_seed(beacon=self.beacon, round=self.round, members=self.cohort)


@dataclass(frozen=True, eq=False)
class Terms:
    """What both roles have in common: the architecture, the layout of a contribution, the local work.

    `longest` is how long a client's gradient or update may be, where the server reads it and somebody has said so.
    """

    architecture: Architecture
    layout: Layout
    work: LocalWork
    longest: float | None = None

    @property
    def divisible(self) -> int:
        """How many numbers of a contribution, the first ones, an uplink may divide: the model's, or as work says."""
        count: int = getattr(self.work, "divisible", self.architecture.size)
        return count


class BoundedWork(LocalWork, Protocol):
    """Local work whose contribution one unit of data can change by a known amount at most."""

    @property
    def unit(self) -> str:
        """ "record" or "client": what may change."""
        ...

    @property
    def largest(self) -> float:
        """How long a contribution can be, over the client's number of samples."""
        ...

    def sensitivity(self, samples: int) -> float:
        """The largest L2 change of the contribution of a client with `samples` samples."""
        ...


def bounded(work: LocalWork) -> BoundedWork:
    """Local work on which a proof can rest; anything else is refused."""
    if work.clip is None:
        raise ConfigError(
            f"Noise on {type(work).__name__} proves nothing: one record can change it without bound. Clip per sample "
            "(ClippedSamples) or clip the update (ClippedUpdate)."
        )
    return work  # type: ignore[return-value]


def adapting(work: LocalWork) -> AdaptiveClip | None:
    """How the clip follows the updates, where it does."""
    rule: AdaptiveClip | None = getattr(work, "adaptive", None)
    return rule


def clip_factor(work: LocalWork, round: int) -> float:
    """What a round's clip is over that of the settings, where it shrinks by a schedule that everybody knows."""
    decay: float = getattr(work, "clip_decay", 1.0)
    return decay**round


def planned(plan: NoisePlan, context: RoundContext, work: LocalWork) -> NoiseLayout:
    """The noise a plan gives a round: a function of public facts, the same for everybody."""
    return _planned(plan, context, work)  # type: ignore[arg-type]


@lru_cache(maxsize=8)
def _planned(plan: NoisePlan, context: RoundContext, work: LocalWork) -> NoiseLayout:
    # Remembered by context, which simulated clients share.
    samples, limits = context.samples(), bounded(work)
    reach = [limits.sensitivity(count) for count in samples]
    return plan.noise_layout(context.cohort, samples, reach, seed=context.graph_seed(), round=context.round)


def answered(plan: NoisePlan, state: ClientState, work: LocalWork) -> NoiseLayout:
    """The noise of the round a client answered last, by what it remembers."""
    samples = state.ring().known().samples_of(state.cohort)
    reach = [bounded(work).sensitivity(count) for count in samples]
    return plan.noise_layout(state.cohort, samples, reach, seed=bytes.fromhex(state.graph), round=state.answered[0])


@dataclass(frozen=True)
class Assumed:
    """Noise of deviation `sigma` in a sum of gradients that are taken to lie within a ball of radius `sensitivity`."""

    sigma: float
    sensitivity: float


class Central(Protocol):
    """Noise that the server adds once: to the sum of uploads, or to the mean gradient that it recovers from it."""

    @property
    def plan(self) -> NoisePlan | None:
        """How much noise there is, where a guarantee rests on it."""
        ...

    @property
    def assumed_noise(self) -> Assumed | None:
        """The noise that rests on an assumption, where it is such noise."""
        ...

    def caveats(self) -> Caveats:
        """What it assumes and leaves open, for the ledger."""
        return Caveats()

    def on_sum(self, total: Tensor, context: RoundContext, terms: Terms, *, stream: SecretStream) -> Tensor:
        """The sum of uploads as it may be used."""
        ...

    def on_gradient(self, gradient: Tensor, context: RoundContext, *, stream: SecretStream) -> None:
        """Noise on the recovered mean gradient, in place."""
        ...


class Summing(Accumulator, Protocol):
    """An accumulator that ends in one summed vector."""

    def total(self) -> Tensor:
        """The sum of what arrived; a ProtocolError says why it cannot be opened."""
        ...


class Dealing(ABC):
    """Server side: what clients must be dealt before they take part, and the `public` part of it."""

    def __init__(self) -> None:
        self.public = b""
        self.refused: dict[int, Refusal] = {}

    @abstractmethod
    def steps(self, clients: Sequence[int]) -> Generator[Ask, Gathered | None, tuple[int, ...]]:
        """Have it dealt to those of `clients` who lack it; gives who of them has it then."""

    def of_round(self, context: RoundContext) -> Generator[Ask, Gathered | None, Mapping[int, Request]]:
        """Have dealt what is for one round alone; gives what each client is handed with its model, or refuses it."""
        yield from ()
        return {}


class Authority(Protocol):
    """A third role, neither server nor client, that is asked like one more client, by a number of its own."""

    @property
    def seat(self) -> int:
        """That number."""
        ...

    def handle_many(
        self, states: Sequence[ClientState], request: Request
    ) -> Iterator[tuple[ClientState, Reply | FedVeilError]]:
        """Its answer, or its error in place of one."""
        ...


class Channel(Protocol):
    """How contributions travel, as far as everybody needs to know.

    What others ask of an uplink, they ask here; a class that inherits from this one answers for itself where the
    answer given here is not its own.
    """

    @property
    def introduction(self) -> Introduction:
        """What clients must know of each other: nothing, sample counts, or keys."""
        return "none"

    @property
    def plan(self) -> NoisePlan | None:
        """How much noise there is, where a guarantee rests on it."""
        return None

    @property
    def noises_all(self) -> bool:
        """Whether nothing leaves a client but under that noise."""
        return self.plan is not None

    @property
    def assumed_noise(self) -> Assumed | None:
        """The noise in the sum that rests on an assumption, where there is such noise."""
        return None

    def own_sigma(self, clients: int) -> float | None:
        """The deviation of such noise that each of a round's `clients` adds for itself."""
        return None

    @property
    def noise_neighbours(self) -> int | None:
        """With how many others each client shares noise; None: with nobody, or with all."""
        return None if self.plan is None else self.plan.neighbours

    @property
    def repairs(self) -> bool:
        """Whether clients give away, on the server's word, noise that they share with others."""
        return False

    @property
    def readable(self) -> bool:
        """Whether the server can read one client's upload, under noise or not."""
        return True

    @property
    def authority(self) -> int | None:
        """The number by which a key authority is asked, where there is one: no client's."""
        return None

    def authority_role(
        self, *, secrets: SecretSource, roster: Roster | None, identities: Mapping[int, bytes] | None
    ) -> Authority | None:
        """That authority, with secrets of its own, whoever drives it."""
        return None

    @property
    def equal(self) -> bool:
        """Whether every client of a round counts the same, whatever its number of samples."""
        return False

    def absences(self, clients: int) -> int | None:
        """How many of a round's `clients` may be missing before its sum cannot be opened; None: all but the first."""
        return None

    def summed_with(self, clients: int) -> int:
        """Of how many of a round's `clients` a sum is that the server sees, at least."""
        return clients

    @property
    def loss_limit(self) -> float | None:
        """Beyond which number a reported loss is cut off, where the uplink cuts it."""
        return None

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Refuse rounds of so few clients, of those `asked`, that this uplink could hide nothing (ConfigError)."""
        return

    def check_round(self, context: RoundContext) -> None:
        """Refuse a round that this uplink could hide nothing in, of those that are there (ConfigError)."""
        self.fits(len(context.cohort), asked=context.asked)

    def prepare(self) -> None:
        """Refuse to begin where a package is missing; start what takes long to start."""
        return

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """What a client that has answered shares with `peer` in its upload; the peer's holds −1 × that.

        Whole numbers modulo 2⁶⁴ come as int64, real ones as float64; None where the two share nothing.
        """
        return None

    def unit(self, context: RoundContext, terms: Terms) -> float:
        """What one of an upload's numbers is in the units of a contribution."""
        return 1.0

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """What clients give away, field by field."""
        ...

    def caveats(self, run: RunFacts) -> Caveats:
        """What it assumes and leaves open, for the ledger."""
        return Caveats()


class Uplink(Channel, Protocol):
    """How contributions travel to a server that holds the model, and become a sum.

    Inherit from it and write `protect` and `releases`: the rest is as in a round that is over with the upload, whose
    sum is exact and needs no opening.
    """

    def acquaint(self, state: ClientState, private: Request | None, roster: Roster | None) -> None:
        """Client side: refuse whoever takes part in a round, is in no directory, and is not as the roster has it."""
        return

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Client side: refuse a round before any work is done for it, or go into it."""
        return state

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Client side: cover a contribution before it leaves."""
        ...

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Client side: answer a phase of the uplink's own (unmasking, repair)."""
        raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")

    def gives_away(self, state: ClientState, request: Request) -> tuple[tuple[int, int], ...]:
        """Client side: the pairs whose noise is known to the server once clients have answered `request`."""
        return ()

    def dealing(self) -> Dealing | None:
        """Server side: what is dealt to clients before their first round, where something is."""
        return None

    def lasting_groups(self, context: RoundContext) -> tuple[tuple[int, ...], ...]:
        """Server side: who is with whom from this round to the end of the run; none where one sum is all."""
        return ()

    def asked(self, context: RoundContext, able: tuple[int, ...]) -> tuple[int, ...]:
        """Server side: whom a round asks, of all that are able to take part."""
        return able

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """Server side: where this round's uploads are folded."""
        return UploadSum(terms.layout, context, device=device, longest=terms.longest)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Server side: the next phase needed to open the sum, or None when it is open."""
        return None

    def group_sums(self, total: Summing) -> tuple[tuple[tuple[int, ...], Tensor], ...]:
        """Server side: the sums of a round's groups, and whose uploads are in each; none where one sum is all."""
        return ()

    def parting(self, total: Summing) -> Mapping[int, Request | None]:
        """Server side: what each client is owed in private with the next round's model; None where it cannot be had."""
        return {}

    def revealed(self, total: Summing) -> tuple[tuple[int, int], ...]:
        """Server side: the pairs whose noise this round gives away, once its phases have been asked for."""
        return ()


class UploadSum(Inbox[Upload]):
    """An exact sum of real numbers.

    No upload is longer than its sender's number in `most`, where there is one, and no gradient or update, over the
    weight it claims, than `longest`.
    """

    def __init__(
        self,
        layout: Layout,
        context: RoundContext,
        *,
        device: torch.device,
        most: Mapping[int, float] | None = None,
        longest: float | None = None,
    ) -> None:
        self._sum = ExactSum(layout.length, device=device)
        self._most = {} if most is None else most
        self._longest = longest
        self._layout = layout
        sizes = {"contribution": layout.length}
        self.expect(Upload, context.cohort, which=context.which, sizes=sizes, types={"payload": REALS})

    def _fold(self, reply: Upload) -> None:
        most = self._most.get(reply.client)
        # The weight, at the end, is not asked.
        if most is not None and float(reply.payload[:-1].double().norm()) > most * (1 + 1e-9):  # NaN is refused below
            raise ProtocolError(
                f"an upload is longer than {most:g}, and clipping leaves none that is", code=Code.IMPLAUSIBLE
            )
        if self._longest is not None:
            sent = self._layout.split(reply.payload)
            check_length(sent["gradients"].double() / sent["weight"].double(), self._longest, "an upload")
        self._sum.add(reply.payload)

    def total(self) -> Tensor:
        """The sum of what arrived."""
        return self._sum.total()


def check_length(vector: Tensor, longest: float | None, what: str) -> None:
    """Refuse a gradient or update that holds what is no number, or is longer than somebody has said any is."""
    norm = float(vector.norm())
    if not norm <= (math.inf if longest is None else longest):
        most = "" if longest is None else f", and max_update_norm is {longest:g}"
        raise ProtocolError(f"{what} is {norm:.3g} long{most}", code=Code.IMPLAUSIBLE)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Downlink × local work × uplink × who holds the model; and noise that a trusted server adds, if any.

    `max_size_ratio` is how many times the median number of samples a client may announce, `max_update_norm` how long a
    gradient or update that nobody clips may be. `caveats` are sentences of the scheme's own: its parts answer for
    themselves. `known_start`: others know the weights that the model begins
    with, so that a veil hides nothing.
    """

    name: str
    downlink: Downlink
    work: LocalWork
    uplink: Channel
    holder: Holder = "server"
    central: Central | None = None
    honest_arrivals: bool = False
    max_size_ratio: float = math.inf
    max_update_norm: float | None = None
    known_start: bool = False
    caveats: Caveats = field(default_factory=Caveats)

    @property
    def summing(self) -> Uplink:
        """The uplink of a scheme whose server holds the model."""
        if self.holder != "server":
            raise ConfigError(f"The model of {self.name} lives with its clients: its server only relays.")
        return self.uplink  # type: ignore[return-value]

    @property
    def repairs(self) -> bool:
        """Whether clients give away, on the server's word, noise that they share with others."""
        return self.uplink.repairs

    @property
    def plan(self) -> NoisePlan | None:
        """The noise plan, wherever the noise is added."""
        return self.uplink.plan if self.central is None else self.central.plan

    @property
    def assumed_noise(self) -> Assumed | None:
        """The noise in the sum that rests on an assumption, wherever it is added."""
        return self.uplink.assumed_noise if self.central is None else self.central.assumed_noise

    @property
    def noisy(self) -> bool:
        """Whether noise goes into the training."""
        return self.plan is not None or self.assumed_noise is not None

    @property
    def readable(self) -> bool:
        """Whether the server can read one client's upload."""
        return self.holder == "server" and self.uplink.readable

    def stating(self, *, rounds: int, cohort: int, clients: int, least: int = 0) -> Scheme:
        """The same, with what its parts assume and leave open in such a run behind what it says itself."""
        run = RunFacts(rounds, cohort, clients, bool(self.downlink.covers()), self.central is not None, least)
        central = Caveats() if self.central is None else self.central.caveats()
        downlink = Caveats(unprotected=(KNOWN_START,)) if self._seen_through else self.downlink.caveats()
        rule = adapting(self.work)
        work = Caveats() if rule is None else Caveats(notes=(adaptive_clip(rule.share, rule.longer),))
        decay = clip_factor(self.work, 1)
        if decay != 1:
            work = Caveats(notes=(shrinking_clip(decay, rounds, clip_factor(self.work, rounds - 1)),))
        shrinking = Caveats()
        if self.plan is not None and self.plan.target.decay != 1:
            shrinking = Caveats(notes=(shrinking_noise(*self.plan.target.shrinking()),))
        parts = (self.uplink.caveats(run), downlink, central, work, shrinking)
        return replace(self, caveats=self.caveats.followed_by(*parts))

    @property
    def _seen_through(self) -> bool:
        return self.known_start and self.downlink.traced

    def layout(self, architecture: Architecture) -> Layout:
        """The layout of one contribution."""
        return self.work.layout(architecture, tensors=self.downlink.head_tensors(architecture))

    def terms(self, architecture: Architecture) -> Terms:
        """What both roles have in common."""
        # Under a veil, how long a gradient is shows once it has been recovered.
        longest = None if self.downlink.traced else self.max_update_norm
        return Terms(architecture, self.layout(architecture), self.work, longest)

    def noise_layout(self, context: RoundContext, terms: Terms) -> NoiseLayout | None:
        """The noise of a round, wherever it is added, where a guarantee rests on it."""
        return None if self.plan is None else planned(self.plan, context, terms.work)

    def releases(self, architecture: Architecture) -> tuple[Release, ...]:
        """Every declared release of a run, from the kinds of messages that it sends."""
        how, uplink = self.uplink.introduction, self.uplink.releases(self.layout(architecture))
        introduced = releases_of_all(*INTRODUCTIONS[how])
        if self.holder == "clients":
            return (*introduced, *uplink)
        unnamed = ("cohort",) if how == "none" else ()
        covers, sent = self.downlink.covers(), self.downlink.sends if adapting(self.work) is None else ClipBroadcast
        if self._seen_through:
            covers = {name: {**cover, "hiding": "none"} for name, cover in covers.items()}
        return each_once(
            (
                *releases_of(Train, but=("broadcast", "cohort")),
                *releases_of(Upload),
                *introduced,
                *releases_of(Train, but=("broadcast", *unnamed)),
                *releases_of(sent, but=() if self.downlink.head_noise else ("head",), covers=covers),
                *uplink,
            )
        )
