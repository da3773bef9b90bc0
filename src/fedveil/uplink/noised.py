"""The noised uplink: residual noise that stays in the sum, and pair noise that annihilates there.

An upload is one vector of whole numbers modulo 2⁶⁴: the contribution rounded to the round's grid, and integer noise.
What a pair shares is the same integers with opposite signs, so that it cancels to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, ProtocolError, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.releases import Caveats, Cover, Release, Released
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import message
from fedveil.protocol.directory import from_bytes, to_bytes
from fedveil.protocol.key_agreement import Introduction
from fedveil.protocol.messages import Attempt, Reply, Request, Round, Upload, releases_of, releases_of_all
from fedveil.protocol.parts import RoundContext, Summing, Terms, Uplink, bounded, planned
from fedveil.protocol.phases import Ask, Gathered, Inbox
from fedveil.protocol.plausible import clipped_part, upload_reach
from fedveil.secrets import SecretSource
from fedveil.shapes import clients, octets
from fedveil.tensors import STATISTICS_CUT, Layout, statistics_in
from fedveil.uplink.graph import Graph
from fedveil.uplink.grid import FixedPoint, add_noise, grid_of
from fedveil.uplink.noise_plan import NoisePlan, noise_graph

# --- noise under a claim, as every role adds it: on the grid that a round's public facts give

_PAIR = "pair noise"


@lru_cache(maxsize=8)  # simulated clients share context and terms
def gridded(plan: NoisePlan, context: RoundContext, terms: Terms) -> FixedPoint:
    """The grid of a round: a function of public facts, the same for everybody."""
    # The weight is a number of the upload, too, but not of one in short words.
    noise_layout, most = planned(plan, context, terms.work), max(context.samples())
    whole = 1.0 if plan.word_bits == 64 else 0.0
    widest = max(whole, bounded(terms.work).largest, STATISTICS_CUT if statistics_in(terms.layout) else 0.0)
    return grid_of(noise_layout, length=terms.layout.length, largest=most * widest, word_bits=plan.word_bits)


def add_residual(
    words: NDArray[np.uint64],
    client: int,
    plan: NoisePlan,
    context: RoundContext,
    terms: Terms,
    *,
    secrets: SecretSource,
) -> None:
    """Add a client's own noise, from fresh randomness, in place."""
    noise_layout = planned(plan, context, terms.work)
    variance = float(noise_layout.residual[noise_layout.place(client)])
    seed = secrets.stream("residual", client, context.round, context.attempt).bytes(32)
    add_noise(words, variance=variance, step=gridded(plan, context, terms).step, seed=seed)


def noised_in_sum(layout: Layout, hiding: str) -> dict[str, Cover]:
    """What covers an upload whose noise is in its sum alone, and whose weight was announced."""
    covers = dict.fromkeys(
        layout.names, Cover(hiding=hiding, noise="integer Gaussian, in the sum", protection="noised")
    )
    return {**covers, "weight": Cover(hiding="not sent: it was announced before", protection="masked")}


def pair_purpose(graph: str) -> str:
    """What a round's pair noise is drawn for: the cohort of this graph seed and no other.

    Clients that were told of different cohorts would add noise of different size. Did they draw it from one
    seed, it could be cancelled in part; so they draw unlike numbers, and each keeps all of its cover.
    """
    return f"{_PAIR} {graph}"


def pair_seed(state: ClientState, peer: int, context: RoundContext) -> bytes:
    """The seed of the noise that a client shares with `peer` in a round."""
    purpose = pair_purpose(context.graph_seed().hex())
    return state.ring().pair(peer).seed(round=context.round, attempt=context.attempt, purpose=purpose)


def add_shared(
    words: NDArray[np.uint64], seed: bytes, *, client: int, peer: int, variance: float, step: float, sign: int = 1
) -> None:
    """Add `sign` × what `client` shares with `peer`, in place; −1 × that is in the peer's upload."""
    add_noise(words, variance=variance, step=step, seed=seed, subtract=(client < peer) != (sign > 0))


Dropouts = Literal["tolerate", "repair"]
DROPOUTS: tuple[Dropouts, ...] = get_args(Dropouts)


@message
@dataclass(frozen=True, eq=False)
class Repair(Request):
    """Server → client: who is missing, so that the noise shared with them can be taken off."""

    round: Round
    attempt: Attempt
    missing: Annotated[Tensor, clients("missing"), Released("who is missing")]


@message
@dataclass(frozen=True, eq=False)
class Repaired(Reply):
    """Client → server: this round's seeds of the noise it shared with missing clients."""

    round: Round
    attempt: Attempt
    vanished: Annotated[Tensor, clients("missing"), Released("with whom the noise was shared")]
    seeds: Annotated[Tensor, octets("missing", 32), Released("this round's seeds of that noise")]


@dataclass(frozen=True)
class Noised(Uplink):
    """Gaussian noise by a plan. `repair_limit` is the largest share of a cohort a client helps to repair for.

    Without `cancelling`, pair noise is left out altogether: for simulations of accuracy only, where it
    would cancel anyway; such an upload is not covered, and its release says so.
    """

    noise: NoisePlan
    dropouts: Dropouts = "repair"
    repair_limit: float = 1 / 3
    cancelling: bool = True

    def __post_init__(self) -> None:
        if self.dropouts not in DROPOUTS:
            raise unknown_name("way with dropouts", self.dropouts, DROPOUTS)
        if not 0 <= self.repair_limit < 1:
            raise ConfigError(f"repair_limit must lie in [0, 1) (got {self.repair_limit}).")

    @property
    def _paired(self) -> bool:
        return self.plan.layout == "pairs" and self.cancelling

    @property
    def plan(self) -> NoisePlan:
        """How much noise there is."""
        return self.noise

    @property
    def repairs(self) -> bool:
        """Whether survivors reveal noise that they share with missing clients."""
        return self._paired and self.dropouts == "repair"

    @property
    def introduction(self) -> Introduction:
        """Pairs share secrets; the size of noise depends on everybody's sample count."""
        return "keys" if self._paired else "sizes"

    def caveats(self, run: RunFacts) -> Caveats:
        """Whose noise covers a client, and what sharing it takes."""
        plan, paired = self.plan, self.plan.layout == "pairs"
        circle = plan.circle(run.cohort)
        colluders = 0 if circle is None else plan.colluders(run.cohort)
        if plan.layout == "local":
            return Caveats((caveats.OWN_NOISE, *(() if plan.sampling is None else (caveats.SECRET_BATCH,))))
        return Caveats(
            (
                caveats.SIZES,
                *((caveats.KEYS,) if paired else ()),
                *caveats.shared_noise(
                    plan.collusion,
                    plan.accounting,
                    whoever=circle is None or (circle.whoever(colluders) and not run.least),
                ),
                *(() if circle is None else (caveats.noise_circle(circle, colluders),)),
                *(() if circle is None or not run.least else (caveats.OWN_CIRCLES,)),
                *((caveats.REPAIRS,) if paired and self.dropouts == "repair" else ()),
            )
        )

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """Noise shared by pairs needs a pair."""
        if self.plan.layout == "pairs" and clients < 2:
            raise ConfigError(
                f"Noise that clients share needs at least two clients in a round, not {clients}: nobody is there to "
                "share it with. Use ldp, or more clients."
            )

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Refuse a round without this client, or one whose sample counts are not vouched for."""
        context.check_member(state.client)
        if self._paired:
            state.ring().vouch_for(context.cohort)
            state.ring().turn_to(context.round)
        return state

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Round, add residual noise from fresh randomness and pair noise from shared seeds; the weight is public."""
        client, codec = state.client, gridded(self.plan, context, terms)
        words = codec.encode(vector)
        add_residual(words[:-1], client, self.plan, context, terms, secrets=secrets)
        if self._paired:
            noise_layout = planned(self.plan, context, terms.work)
            for peer, variance in noise_layout.partners(client):
                seed = pair_seed(state, peer, context)
                add_shared(words[:-1], seed, client=client, peer=peer, variance=variance, step=codec.step)
        payload = torch.from_numpy(words.view(np.int64))
        upload = Upload(client, context.round, context.attempt, payload)
        return replace(state, cohort=context.cohort, graph=context.graph_seed().hex()), upload

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Reveal this round's seeds shared with missing clients, once, and for a limited share of the cohort."""
        if not isinstance(request, Repair) or not self.repairs:
            raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")
        advanced = state.revealing(request.round, request.attempt)
        missing, graph = request.missing.tolist(), self._answered_graph(state)
        most = math.floor(self.repair_limit * len(state.cohort))
        if state.client in missing or not all(client in graph for client in missing):
            raise ProtocolError(f"client {state.client} was asked to repair for itself, or for strangers")
        if len(missing) > most:
            raise ProtocolError(
                f"client {state.client} does not reveal noise shared with {len(missing)} clients: at most {most} of "
                f"{len(state.cohort)} a round"
            )
        keys, gone = state.ring(), set(missing)
        purpose = pair_purpose(state.graph)
        near = [peer for peer in graph.neighbours(state.client) if peer in gone]
        seeds = [keys.pair(p).seed(round=request.round, attempt=request.attempt, purpose=purpose) for p in near]
        reply = Repaired(
            state.client,
            request.round,
            request.attempt,
            torch.tensor(near, dtype=torch.int64),
            from_bytes(b"".join(seeds)).reshape(-1, 32),
        )
        return advanced, reply

    def gives_away(self, state: ClientState, request: Request) -> tuple[tuple[int, int], ...]:
        """Every pair of a client said to be missing and one that is not: the server may have both uploads."""
        if not isinstance(request, Repair):
            return ()
        gone, graph = set(request.missing.tolist()), self._answered_graph(state)
        return tuple(
            (client, other) for other in sorted(gone) for client in graph.neighbours(other) if client not in gone
        )

    def _answered_graph(self, state: ClientState) -> Graph:
        """Who shares noise with whom in the round a client answered last."""
        return noise_graph(self.plan, state.cohort, bytes.fromhex(state.graph))

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> Summing:
        """A sum modulo 2⁶⁴ from which left-over pair noise can be taken."""
        codec = gridded(self.plan, context, terms)
        return NoisedSum(planned(self.plan, context, terms.work), codec, terms, context)

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """With `repair`, ask the survivors for the noise they shared with whoever is missing, once."""
        assert isinstance(total, NoisedSum)
        if total.closed:
            total.check_repaired()
            return None
        missing = sorted(set(context.cohort) - set(gathered.arrived))
        if not self.repairs or not missing or not gathered.arrived:
            return None
        total.close(gathered.arrived)
        if len(missing) > math.floor(self.repair_limit * len(context.cohort)):
            raise ProtocolError(
                f"{len(missing)} of {len(context.cohort)} clients are missing, more than the share of "
                f"{self.repair_limit:g} that clients repair for"
            )
        owing = total.owing()
        if not owing:
            return None
        request = Repair(context.round, context.attempt, torch.tensor(missing, dtype=torch.int64))
        return Ask(tuple(sorted(owing)), request, total)

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """The noise of a pair, in whole steps."""
        noise_layout, client = planned(self.noise, context, terms.work), state.client
        variance = dict(noise_layout.partners(client)).get(peer)
        if not self._paired or variance is None:
            return None
        words, seed = np.zeros(terms.layout.length, dtype=np.uint64), pair_seed(state, peer, context)
        step = self.unit(context, terms)
        add_shared(words[:-1], seed, client=client, peer=peer, variance=variance, step=step)
        return torch.from_numpy(words.view(np.int64))

    def unit(self, context: RoundContext, terms: Terms) -> float:
        """The step of the round's grid."""
        return gridded(self.noise, context, terms).step

    def revealed(self, total: Summing) -> tuple[tuple[int, int], ...]:
        """Every survivor's pairs with whoever is missing, as soon as survivors are asked for their seeds."""
        assert isinstance(total, NoisedSum)
        return total.given_away()

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Gradients under noise; what repairs a round is declared too."""
        noise = "integer Gaussian"
        if not self.cancelling:
            noise += "; pair noise LEFT OUT to simulate accuracy: not covered"
        elif self.noise.layout == "pairs":
            noise += ", and the same shared by pairs, which cancels in the sum"
        covers = dict.fromkeys(layout.names, Cover(noise=noise, protection="noised" if self.cancelling else "open"))
        covers["weight"] = Cover(about="public")
        if statistics_in(layout):
            covers["statistics"] = Cover(noise=f"{noise}, on numbers that nobody clips", protection="open")
        return (
            *releases_of(Upload, sections=layout.names, covers=covers),
            *(releases_of_all(Repair, Repaired) if self.repairs else ()),
        )


class NoisedSum(Inbox[Any]):
    """A sum of whole numbers modulo 2⁶⁴; noise that vanished clients have left behind is taken off by their seeds."""

    def __init__(self, noise_layout: NoiseLayout, codec: FixedPoint, terms: Terms, context: RoundContext) -> None:
        self._context = context
        self._terms = terms
        self._noise_layout = noise_layout
        self._codec = codec
        self._words = np.zeros(terms.layout.length, dtype=np.uint64)
        self._arrived: frozenset[int] = frozenset()
        self._gone: frozenset[int] = frozenset()
        self._repairers: set[int] = set()
        self.expect(
            Upload,
            context.cohort,
            which=context.which,
            sizes={"contribution": terms.layout.length},
            types={"payload": (torch.int64,)},
        )

    @property
    def closed(self) -> bool:
        """Whether uploads are over."""
        return bool(self._arrived)

    def close(self, arrived: tuple[int, ...]) -> None:
        """No more uploads: one that comes late is refused, since its noise is being given away."""
        self._arrived = frozenset(arrived)
        self._gone = frozenset(self._context.cohort) - self._arrived
        most = range(1, len(self._gone) + 1)
        self.expect(Repaired, self.owing(), which=self._context.which, sizes={"missing": most})

    def given_away(self) -> tuple[tuple[int, int], ...]:
        """The pairs of a survivor and a missing client, once uploads are over."""
        return self._given_away if self.closed else ()

    @cached_property
    def _given_away(self) -> tuple[tuple[int, int], ...]:
        members = np.asarray(self._noise_layout.members, dtype=np.int64)
        gone = np.isin(members, list(self._gone))
        first, second = self._noise_layout.first, self._noise_layout.second
        cut = gone[first] != gone[second]
        return tuple(zip(members[first[cut]].tolist(), members[second[cut]].tolist(), strict=True))

    def owing(self) -> set[int]:
        """The survivors that share noise with missing clients."""
        return {client for pair in self.given_away() for client in pair if client in self._arrived}

    def check_repaired(self) -> None:
        """Refuse a sum that still holds noise shared with missing clients."""
        owing = self.owing() - self._repairers
        if owing:
            raise ProtocolError(
                f"{len(owing)} of {len(self._arrived)} clients did not help to take off the noise they shared with "
                f"missing clients, client {min(owing)} among them"
            )

    def _fold(self, reply: Upload | Repaired) -> None:
        if isinstance(reply, Upload):
            reach = upload_reach(self._noise_layout, self._context, self._terms, reply.client)
            reach.check(clipped_part(reply.payload, self._terms).double() * self._codec.step, "an upload")
            self._words += reply.payload.cpu().numpy().view(np.uint64)
            return
        vanished = reply.vanished.tolist()
        variances = {peer: each for peer, each in self._noise_layout.partners(reply.client) if peer in self._gone}
        if set(vanished) != set(variances):
            raise ProtocolError("a repair for others than those that are missing")
        words = self._words[:-1]
        for peer, seed in zip(vanished, reply.seeds, strict=True):
            left = {"variance": variances[peer], "step": self._codec.step}
            add_shared(words, to_bytes(seed), client=reply.client, peer=peer, sign=-1, **left)
        self._repairers.add(reply.client)

    def total(self) -> Tensor:
        """The sum of what arrived, in the units of contributions."""
        return torch.from_numpy(self._codec.decode(self._words))
