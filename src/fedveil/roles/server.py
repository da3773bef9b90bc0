"""The server of a run, as a generator: it yields what it wants done and is sent what came of it.

It knows no clock, thread, socket or file. Whoever drives it (`runs/loop.py`) carries out each step:

    Ask          send a request, fold the replies into an accumulator    → is sent a Gathered: who answered, who refused
    RoundBegins  a round is about to be asked for                        → the privacy journal is written first
    RoundDone    a round is over                                         → metrics, checkpoint
    RunStopped   the run ends before its last round                      → somebody is told why
    RunJudged    clients that hold back samples have judged the model    → the summary

The run (`Conductor.run`)

    epoch ──► round ──► round ──► … ──► finish
      ▲          │
      └──────────┘   where clients know each other, an epoch lasts up to 64 rounds; every tenth round latecomers are let
                     in, and a client without privacy left to spend is left out of the next one

    Before a round is asked for: its cohort is drawn (from a seed, or from the epoch's beacon where masks or noise are
    shared: there it is nobody's choice); clients that the round would bring over the privacy target are left out; and
    the uplink is asked whether so few still hide each other. If not, the run stops, with what it has; where each client
    is drawn by chance, and enough are there for another draw, that round alone is skipped, before anybody is asked.

A round (`ServerRole._round`)

    RoundBegins
    Ask(…) *        what must be dealt for this round alone, by the uplink's `dealing`: keys of an authority
    Ask(Train)      the model under this round's veil; uploads fold into the uplink's sum as they come
    Ask(…) *        phases of the uplink's own, as long as `uplink.open` names one: unmasking, repair of noise
    RoundDone       the sum is recovered under the veil, averaged, and the model has moved one step

    What goes wrong in a round costs the round and never the run: nobody uploads, too few to open the sum, a sum that
    would cost more privacy than is left, or one that honest clients cannot have sent. `RoundDone.failed` then says why,
    and the model stays as it was.

Who keeps what

    ServerState     model, velocity, round, attempt: all that a checkpoint holds, changed at round boundaries alone
    the veil        drawn anew for every round from the server's secrets, and forgotten with it
    introductions   who has announced what in this run, the epoch's directory and beacon (`protocol/key_agreement.py`)
    owed            what a client must be told in private with the next model, until it has answered

    Nothing leaves that is not declared: every request is held to the scheme's releases (`Conductor.run`), so the
    ledger, which is computed from them, speaks of all there is.

Where clients hold the model, `client_held/server.py` has another round and the same run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from fedveil.downlink.architecture import Architecture, Weights, batch_norms
from fedveil.downlink.messages import ClipBroadcast, Mean, Recovered, Veil
from fedveil.errors import ConfigError, ProtocolError, Refusal
from fedveil.ledger.accountant import Accountant
from fedveil.ledger.releases import UndeclaredError
from fedveil.protocol.directory import Cohort
from fedveil.protocol.key_agreement import Introductions
from fedveil.protocol.messages import DeclaredReleases, Request, Train, released_fields
from fedveil.protocol.parts import RoundContext, Scheme, Summing, adapting, check_length, clip_factor
from fedveil.protocol.phases import (
    Ask,
    DeclaredOnly,
    Gathered,
    HeldBack,
    Inbox,
    RoundDone,
    RunJudged,
    RunStopped,
    Step,
    Steps,
)
from fedveil.protocol.plausible import check_sum, outvoted
from fedveil.secrets import SecretSource
from fedveil.work.batches import Schedule
from fedveil.work.held_back import FIGURES

_LATECOMERS_EVERY = 10
_NOBODY = Gathered((), {}, (), 0, 0)


class RunPosition(Protocol):
    """How far a run has come."""

    round: int
    attempt: int


class RunTerms(TypedDict, total=False):
    """What every server is told of its run.

    `name` is how the run's name begins, where clients on other machines hold the server to it; `announced` are the
    sizes that clients have announced in it before.
    """

    secrets: Required[SecretSource]
    cohort: Required[Cohort]
    rounds: Required[int]
    accountant: Accountant | None
    name: str
    announced: Mapping[int, int] | None


class Conductor(ABC):
    """A server's run, up to the question what a round is."""

    def __init__(self, scheme: Scheme, architecture: Architecture, state: RunPosition, **run: Unpack[RunTerms]) -> None:
        self._scheme = scheme
        self._secrets, self._cohort, self._rounds = run["secrets"], run["cohort"], run["rounds"]
        self._terms = scheme.terms(architecture)
        self._accountant = run.get("accountant")
        self._position = state
        self._first = state.round
        self._stopped = False
        self._declared = DeclaredReleases(scheme.releases(architecture))
        self._introductions: Introductions | None = None
        self._judged = FIGURES in self._terms.layout.names
        drawn = self._secrets.stream("run", state.attempt).bytes(16).hex()
        if scheme.uplink.introduction != "none":
            self._introductions = Introductions(
                scheme.uplink.introduction,
                run.get("name", "") + drawn,
                cohort=self._cohort,
                rounds=max(self._rounds, 1) + self._judged,
                max_size_ratio=scheme.max_size_ratio,
                earlier=run.get("announced"),
            )

    def run(self) -> Steps:
        """Train until the last round; every boundary yields a `RoundDone`, and no `Ask` carries or takes what is
        undeclared."""
        return self._declared_alone(self._steps())

    def _declared_alone(self, steps: Steps) -> Steps:
        answer = None
        while True:
            try:
                step = steps.send(answer)
            except StopIteration:
                return
            if isinstance(step, Ask):
                self._check_declared(step)
                if isinstance(step.into, Inbox):
                    step.into.hold_to(self._declared)
                else:
                    step = replace(step, into=DeclaredOnly(step.into, self._declared))
            answer = yield step

    def end(self) -> None:
        """Let the round that is done be the last."""
        self._stopped = True

    def _steps(self) -> Steps:
        if self._introductions is not None:
            yield from self._introductions.steps(self._position.round)
        while not self._stopped and self._position.round < self._rounds:
            try:
                context, able = yield from self._assembled()
            except ConfigError as reason:  # no noise would do for so few
                if self._drawn_too_few():
                    yield self._skipped(str(reason))
                    continue
                if self._position.round == self._first:
                    raise
                yield RunStopped(str(reason).rstrip("."))
                yield from self._broken_off()
                return
            few = self._too_few(context, able)
            if few and not self._drawn_too_few():
                yield RunStopped(few)
                yield from self._broken_off()
                return
            if few:
                yield self._skipped(few)
            else:
                yield from self._round(context, able)
        yield from self._finish()

    def _too_few(self, context: RoundContext, able: tuple[int, ...]) -> str:
        """Why a round is not to be asked for; empty where it is."""
        if len(able) < self._fewest:
            return self._why_stopped(context, able)
        try:
            self._scheme.uplink.fits(len(able))
            self._scheme.uplink.check_round(context)
        except ConfigError as reason:
            return self._refusal() or str(reason).rstrip(".")
        return ""

    def _drawn_too_few(self) -> bool:
        """Whether chance alone has left a round too small: of those that are there, another may draw enough."""
        return bool(self._cohort.rate) and not self._unfit(self._here)

    @property
    def _here(self) -> int:
        """How many clients a round could have, of those that are there."""
        known = self._introductions
        return min(self._cohort.clients if known is None else len(known.present), self._cohort.size)

    def _unfit(self, clients: int) -> str:
        """Why no round is held of so many clients; empty where one is."""
        if clients < self._cohort.least:
            return f"{clients} clients are there, and a round must have {self._cohort.least}"
        try:
            self._scheme.uplink.fits(clients)
        except ConfigError as reason:
            return str(reason).rstrip(".")
        return ""

    def _skipped(self, why: str) -> RoundDone:
        """A round that is over before anybody was asked: there is nothing to charge."""
        round = self._position.round
        self._position.round += 1
        return RoundDone(round, None, (), Gathered((), {}, (), 0, 0), failed=why.rstrip("."), skipped=True)

    def _assembled(self) -> Generator[Step, Gathered | None, tuple[RoundContext, tuple[int, ...]]]:
        """This round's clients, with privacy left to spend, and those of them that know everything they must.

        Where clients know each other the cohort is the epoch's schedule and nobody's choice: one that is away stays in
        it and counts as missing, and one without privacy left to spend leaves with a new epoch.
        """
        at, known = self._position, self._introductions
        if known is None:
            cohort = self._cohort.draw(at.round)
            return RoundContext(at.round, at.attempt, cohort), cohort
        yield from known.steps(at.round, again=self._asks_again())
        while True:
            cohort = known.cohort(at.round)
            context = RoundContext(at.round, at.attempt, cohort, known.directory, known.beacon)
            able = known.known(cohort)
            over = self._over(context) if able else set()
            if not over:
                return context, (yield from self._acquainted(able))
            known.leave_out(over)
            yield from known.steps(at.round)

    def _asks_again(self) -> bool:
        return self._position.round % _LATECOMERS_EVERY == 0

    def _over(self, context: RoundContext) -> set[int]:
        """Whom this round would bring over the privacy target."""
        noise_layout = None if self._accountant is None else self._scheme.noise_layout(context, self._terms)
        return set() if noise_layout is None or self._accountant is None else self._accountant.exceeded_by(noise_layout)

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        """Those of `clients` that can take part, once everything they share has been dealt out."""
        yield from ()
        return tuple(clients)

    @abstractmethod
    def _round(self, context: RoundContext, able: tuple[int, ...]) -> Steps:
        """One round, to its boundary; of its cohort, `able` can be asked."""

    def _finish(self) -> Steps:
        """What follows the last round."""
        yield from ()

    def _broken_off(self) -> Steps:
        """What follows where a run ends earlier, since too few are left."""
        yield from ()

    def _check_declared(self, ask: Ask) -> None:
        """Refuse a request with a field that no release names."""
        fields = [field for sent in (ask.common, *ask.each.values()) for field in released_fields(sent)]
        if isinstance(ask.into, Inbox):
            fields += ask.into.awaits()
        self._declared.check(fields)

    @property
    def left_out(self) -> dict[int, str]:
        """Who takes no part because of the size it claims, and why."""
        return {} if self._introductions is None else self._introductions.left_out

    @property
    def _fewest(self) -> int:
        limited = self._accountant is not None and self._accountant.limit is not None
        return min(2, self._cohort.size) if limited and not self._cohort.rate else 1

    def _refusal(self) -> str:
        """Why somebody could not be made acquainted with the others; empty where nobody refused."""
        refused = {} if self._introductions is None else self._introductions.refused
        return too_few("have agreed on keys", refused) or too_few("have a size that compares", self.left_out)

    def _why_stopped(self, context: RoundContext, able: tuple[int, ...]) -> str:
        if not context.cohort and self._drawn_too_few():
            return f"fewer clients were drawn for it than the {self._cohort.least} that a round must have"
        refusal = self._refusal()
        if refusal:
            return refusal
        if self._accountant is not None and self._accountant.limit is not None:
            return (
                f"round {context.round + 1} would bring clients over the privacy target, and {len(able)} are "
                "left that it would not"
            )
        return (self._here and self._unfit(self._here)) or "no client has introduced itself"


def too_few(have: str, refused: Mapping[int, Refusal | str]) -> str:
    """Who of those that refused was the first, and why; empty where nobody did."""
    for client, reason in refused.items():
        return f"too few clients {have}; client {client}: {reason}"
    return ""


@dataclass(eq=False)
class ServerState:
    """Everything a run needs to go on from a round boundary; `velocity` is what the optimiser remembers."""

    weights: Weights
    velocity: Tensor
    round: int = 0
    attempt: int = 0
    head_level: float | None = None
    clip: float | None = None
    """The next round's clip, where it follows the updates; None: that of the settings."""
    bad_rounds: int = 0
    """How many rounds since the last good one have failed because of what clients sent in them."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Who is summed with whom through the whole run, where clients are in groups that the server cannot see into."""

    @staticmethod
    def fresh(weights: Weights, velocity: Tensor | None = None) -> ServerState:
        """The state before the first round."""
        still = torch.zeros_like(weights.parameters, dtype=torch.float64)
        return ServerState(weights, still if velocity is None else velocity)


class ServerRole(Conductor):
    """The server of one run. Its secrets come from one source and are drawn anew every round."""

    def __init__(
        self,
        scheme: Scheme,
        architecture: Architecture,
        state: ServerState,
        *,
        optimiser: Optimiser,
        **run: Unpack[RunTerms],
    ) -> None:
        super().__init__(scheme, architecture, state, **run)
        self._architecture = architecture
        self._uplink = scheme.summing
        self._dealing = self._uplink.dealing()
        self._adaptive = adapting(scheme.work)
        self._mover = Mover(architecture, optimiser)
        self._owed: dict[int, Request] = {}
        self._figures: Tensor | None = None
        self.state: ServerState = state
        try:
            self._declared.check([f"upload.{name}" for name in self._terms.layout.names])
        except UndeclaredError as reason:
            raise UndeclaredError(
                f"{reason} Of a contribution an uplink declares every section, whatever message it travels in: "
                "releases_of(Upload, sections=layout.names), with your own kind of Upload where there is one "
                "(docs/how-to/own-uplink.md)."
            ) from reason

    def _acquainted(self, clients: Sequence[int]) -> Generator[Step, Gathered | None, tuple[int, ...]]:
        return tuple(clients) if self._dealing is None else (yield from self._dealing.steps(clients))

    def _refusal(self) -> str:
        dealt = {} if self._dealing is None else self._dealing.refused
        return too_few("have been dealt their share", dealt) or super()._refusal()

    def _finish(self) -> Steps:
        """Where clients hold back samples, have them judge the last model: a round that moves nothing."""
        if not self._judged:
            return
        try:
            context, able = yield from self._assembled()
            self._scheme.uplink.fits(len(able))
        except ConfigError as reason:
            yield RunJudged(None, str(reason).rstrip("."))
            return
        yield from self._round(context, able, moves=False)

    def _round(self, context: RoundContext, able: tuple[int, ...], *, moves: bool = True) -> Steps:
        state, uplink = self.state, self._uplink
        veil = self._scheme.downlink.veil(
            self._architecture,
            state.weights,
            stream=self._secrets.stream("veil", state.round),
            head_level=state.head_level,
        )
        state.groups = state.groups or uplink.lasting_groups(context)
        if state.groups:
            context = replace(context, groups=state.groups)
            able = uplink.asked(context, able)
        if self._dealing is not None:
            context = replace(context, public=self._dealing.public)
        total = uplink.accumulator(context, self._terms, device=state.weights.parameters.device)
        named = None if self._introductions is None else torch.tensor(context.cohort, dtype=torch.int64)
        broadcast = veil.broadcast()
        if self._adaptive is not None:
            broadcast = ClipBroadcast.of(broadcast, self._clip)
        request = Train(context.round, context.attempt, broadcast, named)
        owed = {client: self._owed[client] for client in able if client in self._owed}
        begins = context.begins()
        if moves:
            yield begins
        try:
            handed = {} if self._dealing is None else (yield from self._dealing.of_round(context))
        except ProtocolError as reason:  # nobody is asked
            state.round += moves
            done = RoundDone(context.round, None, context.cohort, _NOBODY, failed=str(reason), code=reason.code)
            yield done if moves else RunJudged(None, str(reason))
            return
        owed |= {client: handed[client] for client in able if client in handed}
        gathered = yield Ask(able, request, total, each=owed)
        assert gathered is not None
        for client in gathered.arrived:  # whoever is missing may not have been told, and is told again
            self._owed.pop(client, None)
        failed, traffic = "", gathered
        revealed: tuple[tuple[int, int], ...] = ()
        try:
            if not gathered.arrived:
                raise ProtocolError("no upload arrived")
            phase = uplink.open(total, gathered, context)
            self._check_affordable(context, gathered, uplink.revealed(total))
            while phase is not None:
                revealed = uplink.revealed(total)
                if len(traffic.arrived) < len(context.cohort):
                    yield replace(begins, arrived=traffic.arrived, revealed=revealed, seen=traffic.seen)
                answer = yield phase
                assert answer is not None
                of_clients = set(phase.to) <= set(context.cohort)
                booked = answer if of_clients else replace(answer, bytes_down=0, bytes_up=0)
                gathered, traffic = answer, traffic.and_then(booked)
                phase = uplink.open(total, gathered, context)
            self._figures = None
            recovered, clip = self._recovered(veil, total, context, arrived=traffic.arrived)
        except ProtocolError as reason:
            failed, code = str(reason), reason.code
        self._owe(uplink.parting(total))
        held_back = None if failed else self._held_back(veil)
        if not moves:
            yield RunJudged(held_back, failed)
            return
        state.round += 1
        if failed:
            yield RoundDone(context.round, None, context.cohort, traffic, failed=failed, revealed=revealed, code=code)
            return
        self._take(recovered, round=context.round)
        state.clip = clip
        yield RoundDone(context.round, recovered.loss, context.cohort, traffic, revealed=revealed, held_back=held_back)

    def _held_back(self, veil: Veil) -> HeldBack | None:
        """What clients' held-back samples say of the model under this veil."""
        sums = self._figures
        if sums is None or not float(sums[0]) > 0:
            return None
        tensors, size = self._terms.layout.sections[0][1]
        values = sums[1 : 1 + tensors] / sums[0]
        loss = veil.recover(Mean(values.new_zeros(tensors, size), values, values.new_zeros(0))).loss
        assert loss is not None
        return HeldBack(float(sums[0]), loss, sums[1 + tensors :])

    def _take(self, recovered: Recovered, *, round: int) -> None:
        """Move the model by what a round has brought."""
        self._mover.move(self.state.weights, self.state.velocity, recovered, round=round)
        self.state.head_level = recovered.head_level

    def _check_affordable(
        self, context: RoundContext, gathered: Gathered, revealed: tuple[tuple[int, int], ...]
    ) -> None:
        """Fewer uploads leave less noise in the sum, and revealed noise covers nobody: is it still enough?"""
        if self._accountant is None or len(gathered.arrived) == len(context.cohort):
            return
        noise_layout = self._scheme.noise_layout(context, self._terms)
        if noise_layout is None:
            return
        seen = gathered.seen
        over = self._accountant.exceeded_by(noise_layout, arrived=gathered.arrived, revealed=revealed, seen=seen)
        spoilt = over & {client for client in seen if client not in gathered.arrived}
        if spoilt and self._introductions is not None:
            # Whoever sends what must be refused pays for having been seen; once it cannot, others do without it.
            self._introductions.leave_out(spoilt)
            raise ProtocolError(
                f"the upload of client {min(spoilt)} was refused, and taking off the noise that others share with it "
                "would bring it over the privacy target: it takes no further part"
            )
        if over and (not revealed or self._accountant.honest_arrivals):
            raise ProtocolError(
                f"{len(context.cohort) - len(gathered.arrived)} of {len(context.cohort)} uploads are missing, and with "
                f"them their noise: publishing the sum would bring client {min(over)} over the privacy target"
            )
        if over:
            raise ProtocolError(
                f"taking off the noise shared with missing clients would bring client {min(over)} over the privacy "
                "target, since its upload may have been seen after all; use dropouts = 'tolerate', or state that the "
                "server is honest about arrivals (honest_arrivals)"
            )

    @property
    def _clip(self) -> float:
        """The round's clip."""
        if self.state.clip is not None:
            return self.state.clip
        assert self._scheme.work.clip is not None
        return self._scheme.work.clip

    def _recovered(
        self, veil: Veil, total: Summing, context: RoundContext, *, arrived: Sequence[int]
    ) -> tuple[Recovered, float | None]:
        """What came of a round, and the next one's clip where that follows the updates."""
        groups = self._uplink.group_sums(total)
        if groups:
            recovered = outvoted([self._recovered_group(veil, summed, context, here) for here, summed in groups])
            check_length(recovered.gradient, self._scheme.max_update_norm, "the mean of the groups")
            return recovered, None
        summed, central = total.total().to(self.state.weights.parameters.device), self._scheme.central
        if self._uplink.plan is not None:
            repaired = self._uplink.repairs
            check_sum(summed, self._uplink.plan, context, self._terms, arrived=arrived, repaired=repaired)
        if central is not None:
            stream = self._secrets.stream("central noise", context.round, context.attempt)
            summed = central.on_sum(summed, context, self._terms, stream=stream)
        sums = self._weighed(summed, context, arrived)
        recovered = veil.recover(_mean(sums))
        check_length(recovered.gradient, self._scheme.max_update_norm, "the mean of the uploads")
        if central is not None:
            central.on_gradient(recovered.gradient, context, stream=stream)
        shrunk = clip_factor(self._scheme.work, context.round)
        if shrunk != 1:
            recovered = replace(recovered, gradient=recovered.gradient * shrunk)  # it came in units of the clip
        if self._adaptive is None:
            return recovered, None
        start, now = self._scheme.work.clip, self._clip
        assert start is not None
        answers = float(sums["within"] / sums["weight"]) / (start * self._adaptive.mark)
        in_full = replace(recovered, gradient=recovered.gradient * (now / start))  # it came in units of the clip
        return in_full, self._adaptive.following(now, answers, start=start)

    def _weighed(self, summed: Tensor, context: RoundContext, arrived: Sequence[int]) -> dict[str, Tensor]:
        """A sum by its sections, with the weight of those that are in it."""
        sums = dict(self._terms.layout.split(summed))
        if self._judged:
            self._figures = sums[FIGURES] if self._figures is None else self._figures + sums[FIGURES]
        sums["weight"] = self._weight(sums["weight"], context, arrived)
        if not float(sums["weight"]) > 0:
            raise ProtocolError("the uploads' weights do not add up to a positive number")
        return sums

    def _recovered_group(self, veil: Veil, summed: Tensor, context: RoundContext, here: Sequence[int]) -> Recovered:
        sums = self._weighed(summed.to(self.state.weights.parameters.device), context, here)
        return veil.recover(_mean(sums))

    def _weight(self, summed: Tensor, context: RoundContext, arrived: Sequence[int]) -> Tensor:
        """What the sum is divided by."""
        if self._uplink.equal:
            return torch.full_like(summed, float(len(arrived)))
        if context.directory is None:
            return summed
        # Whoever has announced its size is held to it: what an upload says is not asked.
        return torch.full_like(summed, float(sum(context.directory.samples_of(arrived))))

    def _owe(self, told: Mapping[int, Request | None]) -> None:
        """Tell clients with the next round what they are owed; where that cannot be had, they wait for a new epoch."""
        for client, owed in told.items():
            if owed is not None:
                self._owed[client] = owed
            elif self._introductions is not None:
                self._owed.pop(client, None)
                self._introductions.renew()


def _mean(sums: Mapping[str, Tensor]) -> Mean:
    weight = sums["weight"]
    return Mean(sums["gradients"] / weight, sums["values"] / weight, sums["statistics"] / weight)


@dataclass(frozen=True)
class Optimiser:
    """The server's step in float64, by what was recovered: g, the mean gradient or how far clients moved on average.

        sgd       v ← μ·v + g + λ·w;  w ← w − lr_t·v
        adaptive  g ← g + λ·w;  m ← β₁·m + (1 − β₁)·g;  w ← w − lr_t·m/(√v + τ)   (Reddi et al. 2021)
                  adagrad  v ← v + g²
                  adam     v ← β₂·v + (1 − β₂)·g²
                  yogi     v ← v − (1 − β₂)·g²·sign(v − g²)

    Nothing but g comes from clients: whatever holds of it by way of a ledger or a veil holds of the step.
    """

    schedule: Schedule
    momentum: float = 0.0
    weight_decay: float = 0.0
    kind: str = "sgd"
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def start(self, parameters: Tensor) -> Tensor:
        """What is remembered before the first step: v = 0 of sgd; m = 0 above v = τ² of the others."""
        still = torch.zeros_like(parameters, dtype=torch.float64)
        return still if self.kind == "sgd" else torch.stack([still, torch.full_like(still, self.tau**2)])

    def step(self, parameters: Tensor, gradient: Tensor, velocity: Tensor, *, round: int) -> Tensor:
        """The moved parameters; `velocity`, what is remembered, is updated in place."""
        if self.kind != "sgd":
            return self._adapted(parameters, gradient, velocity, round=round)
        velocity *= self.momentum
        velocity += gradient
        if self.weight_decay:
            velocity.add_(parameters, alpha=self.weight_decay)
        return parameters - self.schedule.at(round) * velocity

    def _adapted(self, parameters: Tensor, gradient: Tensor, memory: Tensor, *, round: int) -> Tensor:
        gradient = gradient.to(memory.dtype)
        if self.weight_decay:
            gradient = gradient.add(parameters, alpha=self.weight_decay)
        first, second = memory
        first.mul_(self.beta1).add_(gradient, alpha=1.0 - self.beta1)
        squared = gradient.square()
        if self.kind == "adagrad":
            second += squared
        elif self.kind == "adam":
            second.mul_(self.beta2).add_(squared, alpha=1.0 - self.beta2)
        else:
            second.sub_(squared * torch.sign(second - squared), alpha=1.0 - self.beta2)
        moved: Tensor = parameters - self.schedule.at(round) * first / (second.sqrt() + self.tau)
        return moved


class Mover:
    """Steps parameters by the optimiser and running statistics by their momenta."""

    def __init__(self, architecture: Architecture, optimiser: Optimiser) -> None:
        self._architecture = architecture
        self._optimiser = optimiser
        self._momenta = _statistics_momenta(architecture)
        sizes = [torch.tensor([False, True]).repeat_interleave(size) for _, size in architecture.statistics_sizes]
        marks = torch.cat(sizes) if sizes else torch.empty(0, dtype=torch.bool)
        self._variances = marks.to(architecture.trainable.device)

    def move(self, weights: Weights, velocity: Tensor, recovered: Recovered, *, round: int) -> None:
        """Change `weights` and `velocity` in place; frozen parameters stay."""
        before = weights.parameters.to(torch.float64)
        moved = self._optimiser.step(before, recovered.gradient * self._architecture.trainable, velocity, round=round)
        weights.parameters.copy_(torch.where(self._architecture.trainable, moved, before))
        if recovered.statistics.numel():
            running = weights.statistics.to(torch.float64)
            running += self._momenta * (recovered.statistics - running)
            # Under noise a variance may come out below 0, of which there is no root.
            weights.statistics.copy_(torch.where(self._variances, running.clamp(min=0.0), running))


def _statistics_momenta(architecture: Architecture) -> Tensor:
    parts = [
        torch.full((2 * len(norm.running_mean),), norm.momentum if norm.training else 0.0, dtype=torch.float64)
        for _, norm in batch_norms(architecture.skeleton)
    ]
    device = architecture.trainable.device
    return torch.cat(parts).to(device) if parts else torch.empty(0, dtype=torch.float64, device=device)
