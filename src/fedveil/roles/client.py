"""A client, as a reducer: `handle(state, request, data) -> (state, reply)`, or an error that says why not.

It knows no clock, thread, socket or file, keeps nothing between messages but the `ClientState` it is handed, and never
holds a secret of the server: the model arrives veiled, and what a client can reach is walked by a test.

What it is asked, in this order

    Hello → Announce     an epoch begins (`protocol/key_agreement.py`): who it is, how many samples it has, and a
    Directory → Nonce    commitment; then everybody's, and the nonce; then everybody's nonces. Schemes whose clients
    Nonces → Ready       need not know each other leave this out
    Train → Upload       a round: train on the veiled model, protect the contribution, send it
    …                    phases of the uplink's own (`uplink.answer`): unmasking, repair

A Train is taken in four steps

    check      every field has the size and the type that scheme, architecture and directory call for (`RequestCheck`)
    begin      is the round of the epoch, with the cohort its beacon draws, and this client in it? Are sizes in
               proportion? What does it cost, and do the client's own limits allow that?
    promise    the round is written into the state as answered, and its price as spent, before anything is computed:
               whatever happens to the computation, it is never answered again (`promised`)
    answer     local work on the broadcast; the uplink covers the contribution

What it remembers (`protocol/client_state.py`): the last round answered and opened, and the run and epoch of both; the
cohort and graph of that round; what it has spent by its own account; its keys and the directory it has taken; and what
its work keeps for itself, where it does.

What it refuses

    a round again, an earlier one, or one of another epoch        two sums of one round that differ by a client show it
    a cohort that is not the schedule's, or a size out of line    somebody would choose who hides with whom
    what its own policy does not allow                            the refusal's code is ENDED where that is for good
    anything malformed, or not for the present step               no message ends a client: it costs its own answer only
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict, Unpack

from torch import Tensor

from fedveil.crypto.linear_mac import MAC_WORDS
from fedveil.downlink.architecture import Architecture
from fedveil.downlink.decomposed import transitional
from fedveil.downlink.messages import ClipBroadcast
from fedveil.downlink.rescaling import head_site
from fedveil.errors import ConfigError, FedVeilError, ProtocolError
from fedveil.ledger.policy import OwnLimits, Policy, SampledRounds
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Cohort, Directory, Hello, Nonces
from fedveil.protocol.key_agreement import KEY_SIZES, introduce
from fedveil.protocol.messages import Reply, Request, Train
from fedveil.protocol.parts import RoundContext, Scheme, adapting, answered, clip_factor, planned
from fedveil.secrets import OsSecrets, SecretSource
from fedveil.shapes import Sizes, check
from fedveil.tensors import statistics_in
from fedveil.work.held_back import FIGURES
from fedveil.work.messages import ClientData, KeptTensors, RunMany, Workspace, keeps_for_itself

if TYPE_CHECKING:
    from fedveil.crypto.keys import Roster


MOST_CLIENTS = 1 << 20
"""Of how many clients a directory may be."""

_LISTS = ("cohort", "missing", "survivors", "senders", "signers", "asked", "contributors", "voters", "newcomers")


class RequestCheck:
    """What a client expects of every request: sizes that follow from the scheme, the architecture and who is known."""

    def __init__(self, scheme: Scheme, architecture: Architecture) -> None:
        self._heads, self._sent = scheme.downlink.head_tensors(architecture), scheme.downlink.sends
        layers = () if architecture.table is None else transitional(architecture.table).sizes
        outputs = 0 if self._heads == 1 else head_site(architecture).outputs
        divisible = scheme.terms(architecture).divisible
        self._fixed: Sizes = {
            **KEY_SIZES[scheme.uplink.introduction],
            "clients": range(1, MOST_CLIENTS + 1),
            "present": range(1, MOST_CLIENTS + 1),
            "parameters": architecture.size,
            "epsilon": sum(len(norm.epsilon) for norm in architecture.epsilon_norms(architecture.skeleton)),
            "statistics": (0, architecture.statistics_size),
            "multipliers": (0, sum(layers)),
            "outputs": outputs,
            "head groups": range(1, outputs + 1),
            "rest": range(divisible + 1),
            "tags": range(divisible + 1),
            "ballot": divisible + MAC_WORDS,
        }
        self._passed: tuple[Request, int] | None = None
        self._lists: tuple[int, Sizes] | None = None

    def check(self, state: ClientState, request: Request, private: Request | None) -> None:
        """Refuse what cannot be meant for this client as it stands."""
        directory = None if state.keys is None else state.keys.directory
        known = MOST_CLIENTS if directory is None else len(directory.clients)
        if self._lists is None or self._lists[0] != known:
            self._lists = (known, {**self._fixed, **dict.fromkeys(_LISTS, range(known + 1))})
        if private is not None:
            check(private, self._lists[1])
        # Simulated clients are sent the same request: once is enough.
        if self._passed is not None and self._passed[0] is request and self._passed[1] == known:
            return
        check(request, self._lists[1])
        if isinstance(request, Train):
            head = request.broadcast.head
            if (1 if head is None else head.tensors) != self._heads:
                raise ProtocolError("a model comes with another head noise than the scheme has")
            if not isinstance(request.broadcast, self._sent):
                raise ProtocolError("a model comes without what the scheme sends with it")
        self._passed = (request, known)


@contextmanager
def own_errors(state: ClientState, request: Request) -> Iterator[None]:
    """Whatever goes wrong over a request is a refusal of it: no message ends a client."""
    try:
        yield
    except (FedVeilError, ImportError):
        raise
    except Exception as reason:
        what, why = type(request).__name__, type(reason).__name__
        raise ProtocolError(f"client {state.client} cannot deal with the {what} it was sent ({why})") from reason


Answer = Reply | FedVeilError
Promised = Callable[[ClientState], None]
"""Told the state in which a client has promised to answer a round, with its price, before anything is computed. Whoever
stores it then loses neither, whatever happens to the computation."""


def _unstored(state: ClientState) -> None:
    pass


def _kept(state: ClientState) -> KeptTensors:
    """For work to change: the state has what it had until the work is done."""
    return KeptTensors() if state.kept is None else KeptTensors(state.kept.tensors)


def own_target(scheme: Scheme) -> Policy:
    """The target a scheme names, as a limit."""
    plan = scheme.uplink.plan
    if plan is None or plan.accounting != "exact":
        return Policy()
    if plan.sampling is not None:
        return SampledRounds(rounds=plan.target.participations)
    if plan.target.each and plan.layout == "local":
        return OwnLimits(delta=plan.target.delta, each=plan.target.each)
    return Policy(max_epsilon=plan.target.epsilon, delta=plan.target.delta)


class ClientTerms(TypedDict, total=False):
    """What is a client's own: `policy`, which no message to it can widen; `roster`, which pins everybody's signing key;
    `identities`, this machine's own private ones; `told`, a digest of what its local work is told besides the request,
    which others under the same masks must have been told, too; `schedule`, how many rounds the run has and who is asked
    in them, by the settings that the client has agreed to."""

    secrets: SecretSource | None
    policy: Policy | None
    roster: Roster | None
    identities: Mapping[int, bytes] | None
    told: bytes
    schedule: tuple[int, Cohort]


class Participant(ABC):
    """What every client has, wherever the model lives: terms, a request check, limits of its own, and an identity."""

    def __init__(self, scheme: Scheme, architecture: Architecture, **own: Unpack[ClientTerms]) -> None:
        self._scheme = scheme
        self._architecture = architecture
        self._terms = scheme.terms(architecture)
        self._secrets = own.get("secrets") or OsSecrets()
        self._request_check = RequestCheck(scheme, architecture)
        self._workspace = Workspace(architecture, self._terms.layout, self._secrets)
        self._run_many: RunMany = scheme.work.run_many
        policy = own.get("policy")
        # Without an ε of its own a client holds the rounds it joins to the target it was told of, and leaves the price
        # of repairs to the server's books.
        self._books_repairs = policy is not None and policy.max_epsilon is not None
        self._policy = own_target(scheme)
        if policy is not None:
            self._policy = policy if self._books_repairs else policy.held_to(self._policy)
        self._roster = own.get("roster")
        self._identities = own.get("identities") or {}
        self._told = own.get("told", b"")
        self._schedule = own.get("schedule")

    def handle(
        self,
        state: ClientState,
        request: Request,
        data: ClientData,
        private: Request | None = None,
        *,
        promised: Promised = _unstored,
    ) -> tuple[ClientState, Reply]:
        """Answer one message, or raise why not; `private` is what the server sent to this client alone.

        Whoever raises forgets what it refused: `handle_many` gives the state that counts it.
        """
        told = {} if private is None else {state.client: private}
        advanced, answer = next(self.handle_many([state], request, [data], told, promised=promised))
        if isinstance(answer, FedVeilError):
            raise answer
        return advanced, answer

    def work_by(self, run_many: RunMany) -> None:
        """Have local work done by what gives the same, in a way of its own."""
        self._run_many = run_many

    @abstractmethod
    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
        *,
        promised: Promised = _unstored,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Answer one message for many simulated clients, as `handle` would for each, in any order.

        A client that would have raised gives its error in place of a reply. `promised` is told a state in which a round
        is promised and paid for.
        """

    def _check_shrunk(self, client: int, round: int) -> None:
        """Refuse a round whose clip has shrunk below what the policy allows."""
        clip, factor = self._scheme.work.clip, clip_factor(self._scheme.work, round)
        if clip is not None and factor != 1:
            self._policy.check_clip(client, clip * factor)

    def _introduced(
        self, state: ClientState, request: Hello | Directory | Nonces, data: ClientData
    ) -> tuple[ClientState, Reply]:
        plan = self._scheme.uplink.plan
        if isinstance(request, (Hello, Directory)):
            request.epoch.check()
            if self._schedule is not None:
                rounds, cohort = self._schedule
                request.epoch.check_agreed(max(rounds, 1) + (FIGURES in self._terms.layout.names), cohort)
        if isinstance(request, Hello) and plan is not None:
            plan.check_draws(request.epoch.draws, size=request.epoch.size)
        return introduce(
            state,
            request,
            samples=len(data),
            how=self._scheme.uplink.introduction,
            secrets=self._secrets,
            roster=self._roster,
            identity=self._identities.get(state.client),
        )


class ClientRole(Participant):
    """What a client does, whoever drives it. Holds the architecture and settings, never a secret of the server."""

    def __init__(self, scheme: Scheme, architecture: Architecture, **own: Unpack[ClientTerms]) -> None:
        super().__init__(scheme, architecture, **own)
        self._uplink = scheme.summing
        self._latest: tuple[Train, RoundContext] | None = None
        self._keeps = keeps_for_itself(scheme.work)
        policy = own.get("policy")
        if policy is not None:
            policy.check_scheme(
                noised=scheme.uplink.noises_all and not statistics_in(self._terms.layout),
                clip=scheme.work.clip,
                acquainted=scheme.uplink.introduction != "none",
                repaired=scheme.repairs and not scheme.honest_arrivals,
            )

    def handle_many(
        self,
        states: Sequence[ClientState],
        request: Request,
        clients: Sequence[ClientData],
        private: Mapping[int, Request] | None = None,
        *,
        promised: Promised = _unstored,
    ) -> Iterator[tuple[ClientState, Answer]]:
        """Answer one message; a Train in three passes, so that local work of many can be done together."""
        told = {} if private is None else private
        begun: list[tuple[ClientState, RoundContext]] = []
        able: list[ClientData] = []
        for state, data in zip(states, clients, strict=True):
            private_too = told.get(state.client)
            try:
                with own_errors(state, request):
                    self._request_check.check(state, request, private_too)
                    if isinstance(request, Train):
                        begun.append(self._begin(state, request, len(data), private_too))
                        promised(begun[-1][0])
                        able.append(replace(data, kept=_kept(state)) if self._keeps else data)
                        continue
                    answer = self._answer(state, request, data, private_too)
                yield answer
            except (ProtocolError, ConfigError) as reason:
                yield state, reason
        if not isinstance(request, Train):
            return
        for position, vector in self._run_many(self._workspace, request.broadcast, able, round=request.round):
            state, context = begun[position]
            if isinstance(vector, FedVeilError):
                yield state, vector
                continue
            if self._keeps:
                state = replace(state, kept=able[position].kept)
            try:
                with own_errors(state, request):
                    answer = self._protect(state, vector, context)
                yield answer
            except FedVeilError as reason:
                yield state, reason

    def _begin(
        self, state: ClientState, request: Train, samples: int, private: Request | None
    ) -> tuple[ClientState, RoundContext]:
        ring = state.keys
        context = self._context(request, *((None, b"") if ring is None else (ring.directory, ring.beacon)))
        context.check_scheduled()
        self._uplink.acquaint(state, private, self._roster)
        state = self._uplink.admit(state, context, private)
        together = [peer for peer in state.grouped if peer in context.cohort]
        size = len(together) if together else self._uplink.summed_with(len(context.cohort))
        self._policy.check_cohort(state.client, size)
        self._check_clip(state, request)
        if context.directory is not None:
            context.check_sizes(state.client, self._policy.size_ratio(self._scheme.max_size_ratio), samples=samples)
        spent = state.spent
        plan = self._uplink.plan
        if plan is not None:
            noise_layout = planned(plan, context, self._terms.work)
            colluders = plan.colluders(len(context.cohort))
            spent = self._policy.charged(
                noise_layout, client=state.client, spent=spent, colluders=colluders, asked=plan.asked
            )
        # Recorded before anything is computed: whatever happens later, this round is never answered again.
        known = context.directory
        run, epoch = ("", -1) if known is None else (known.run, known.epoch.number)
        return state.answering(request.round, request.attempt, run=run, epoch=epoch, spent=spent), context

    def _check_clip(self, state: ClientState, request: Train) -> None:
        """Refuse a clip where the scheme has a fixed one, and one that no answers lead to or the policy forbids."""
        rule, start, sent = adapting(self._scheme.work), self._scheme.work.clip, request.broadcast
        if (rule is not None) != isinstance(sent, ClipBroadcast):
            raise ProtocolError("a model comes with a clip where the scheme has a fixed one, or without one")
        if rule is not None and start is not None and isinstance(sent, ClipBroadcast):
            rule.check(float(sent.clip), start=start, round=request.round)
            self._policy.check_clip(state.client, float(sent.clip))
        self._check_shrunk(state.client, request.round)

    def _context(self, request: Train, directory: Directory | None, beacon: bytes) -> RoundContext:
        """One context per message: simulated clients that were sent the same one share it."""
        last = self._latest
        if last is None or last[0] is not request or last[1].directory is not directory or last[1].beacon != beacon:
            cohort = () if request.cohort is None else tuple(request.cohort.tolist())
            context = RoundContext(request.round, request.attempt, cohort, directory, beacon, told=self._told)
            self._latest = (request, context)
            return context
        return last[1]

    def _protect(self, state: ClientState, vector: Tensor, context: RoundContext) -> tuple[ClientState, Reply]:
        return self._uplink.protect(state, vector, context, self._terms, secrets=self._secrets)

    def _answer(
        self, state: ClientState, request: Request, data: ClientData, private: Request | None
    ) -> tuple[ClientState, Reply]:
        if isinstance(request, (Hello, Directory, Nonces)):
            if self._uplink.introduction == "none":
                raise ProtocolError(f"client {state.client} was asked to introduce itself, which this scheme needs not")
            return self._introduced(state, request, data)
        advanced, reply = self._uplink.answer(state, request, private)
        plan = self._uplink.plan
        given = self._uplink.gives_away(state, request) if self._books_repairs else ()
        if plan is None or not given:
            return advanced, reply
        noise_layout = answered(plan, state, self._terms.work)
        spent = self._policy.surcharged(
            noise_layout,
            client=state.client,
            spent=state.spent,
            revealed=given,
            colluders=plan.colluders(len(noise_layout.members)),
            asked=plan.asked,
        )
        return replace(advanced, spent=spent), reply
