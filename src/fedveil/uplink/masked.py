"""Contributions under masks: the server learns their sum, modulo 2⁶⁴, and nothing of any one of them.

A round under masks, after `Train` (`roles/server.py` asks, `MaskedSum.open` says for what)

    Train → MaskedUpload     a client adds whole numbers: its contribution on a grid; one mask with each neighbour in
                             the round's graph, + on one side and − on the other; and a mask of its own. With it go
                             sealed shares of the seeds of all these, one bundle for each neighbour
    Unmask → Revealed        everybody is told who has arrived (the survivors) and handed its neighbours' bundles. It
                             signs the list, and reveals its share, for each neighbour, of that one's own mask if it
                             has arrived, of the pair's if not; never of both
    the next Train           with it, in private, comes what its neighbours signed: all must have been told the same

What a client remembers (`ClientState`): `cohort` and `graph` of the round it answered, the only ones it reveals for;
`revealed`, since it reveals once for a round; `survivor_digest`, of the list it signed; `unexplained`, how many rounds
passed in which it revealed and was never shown its neighbours' signatures; `transcript`, to which masks are bound
besides the graph where clients hold the model, or where local work is told more than a request says.

What it refuses: a graph that is not the beacon's; too few neighbours for the collusion that is counted on; a second
list of survivors; a list without itself, or with so few that a sum would show somebody; its neighbours' signatures
under another list than its own. With `unmask = "on-dropout"` there is no mask of one's own and, while nobody is
missing, no second phase: pair masks cancel by themselves.

`uplink/unmasking.py` has the shares, the locks and the server's sum, and says why lying about survivors gains nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedveil.errors import ConfigError, ProtocolError, unknown_name
from fedveil.ledger import caveats
from fedveil.ledger.caveats import RunFacts
from fedveil.ledger.releases import Caveats, Cover, Release
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.directory import Epoch, draws_of, from_bytes, to_bytes
from fedveil.protocol.key_agreement import Introduction, Keyring
from fedveil.protocol.messages import Reply, Request, releases_of, releases_of_all
from fedveil.protocol.parts import RoundContext, Summing, Terms, Uplink
from fedveil.protocol.phases import Ask, Gathered
from fedveil.secrets import SecretSource
from fedveil.tensors import Layout
from fedveil.uplink.graph import (
    COLLUSION,
    LEAST_BITS,
    Graph,
    GraphFacts,
    colluding,
    masking_degree,
    ring,
    surrounded_bits,
    withstood,
)
from fedveil.uplink.grid import FixedPoint, check_value_range
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import add_residual, gridded
from fedveil.uplink.unmasking import (
    LOCK,
    MORE_NEIGHBOURS,
    SHARE_BYTES,
    SIGNATURE_BYTES,
    Evidence,
    Item,
    Label,
    MaskedSum,
    MaskedUpload,
    Quorum,
    Relayed,
    Revealed,
    Unmask,
    deal,
    list_digest,
    listed,
    lock_shares,
    open_bundle,
    packed,
    unpacked,
)

Unmasking = Literal["always", "on-dropout"]
UNMASKING: tuple[Unmasking, ...] = get_args(Unmasking)
UNMASKING_MESSAGES = (Unmask, Relayed, Revealed)
_MASK = "mask"
_REVELATION = "revelation"
MOST_UNEXPLAINED = 3
"""After so many rounds of a run that nobody accounted for a client leaves."""


_RINGS: dict[tuple[int, bytes], Graph] = {}
_RINGS_KEPT = 8


def _ring(members: tuple[int, ...], degree: int, seed: bytes) -> Graph:
    """A ring; remembered, because in a simulation every client derives the same graph."""
    known = _RINGS.get((degree, seed))
    if known is None or (known.members is not members and known.members != members):
        known = ring(members, degree=degree, seed=seed)
        if known.members == members:  # the very same numbers: comparing thousands would take every client long
            known = replace(known, members=members)
        while len(_RINGS) >= _RINGS_KEPT:
            _RINGS.pop(next(iter(_RINGS)), None)
        _RINGS[degree, seed] = known
    return known


@dataclass(frozen=True, eq=False)
class _Survivors:
    """Whom a list names, whether paths join them, and what is signed of it."""

    alive: frozenset[int]
    inside: bool
    connected: bool
    digest: bytes


@lru_cache(maxsize=4)
def _survivors(request: Unmask, graph: Graph, seed: bytes) -> _Survivors:
    # Remembered, because simulated clients are all sent the same list.
    alive = frozenset(listed(request.survivors))
    inside = all(client in graph for client in alive)
    return _Survivors(alive, inside, inside and graph.connected(alive), list_digest(sorted(alive), graph=seed))


def _label(state: ClientState, round: int, attempt: int) -> Label:
    """What ties a client's masks and shares to those of others: round, graph, and what it was told besides."""
    graph, transcript = bytes.fromhex(state.graph), bytes.fromhex(state.transcript)
    bound = hashlib.sha256(b"fedveil told 1" + graph + transcript).digest() if transcript else graph
    return Label(round, attempt, bound)


def pair_seed(state: ClientState, peer: int, *, round: int, attempt: int) -> bytes:
    """The seed of the mask that a client, as it was told this round, shares with `peer`."""
    purpose = f"{_MASK} on {_label(state, round, attempt).graph.hex()}"
    return state.ring().pair(peer).seed(round=round, attempt=attempt, purpose=purpose)


@dataclass(frozen=True)
class Masked(Uplink):
    """Masks modulo 2⁶⁴; with `noise`, integer Gaussian noise under them, on the grid that the noise asks for.

    `unmask = "always"`: a mask of one's own and a second phase every round. `"on-dropout"`: no such mask,
    and a second phase only when somebody is missing, which trusts the server to be honest about arrivals.

    Without a `degree`, neighbourhoods are as large as it takes for a share `collusion` of all clients, chosen before
    graphs are drawn, to surround nobody in a whole run, but with a chance of 2⁻³⁰; or the whole cohort, if that is
    too small.

    A round fails if a third of some neighbourhood is missing: where dropouts are frequent, raise `degree`.

    Where a round's clients are in `groups` that the beacon draws, what is a cohort here is one of those.
    """

    value_range: float = 2.0**24
    unmask: Unmasking = "always"
    quorum: Quorum = field(default_factory=Quorum)
    degree: int | None = None
    noise: NoisePlan | None = None
    collusion: float = COLLUSION
    groups: int = 1

    def __post_init__(self) -> None:
        if self.unmask not in UNMASKING:
            raise unknown_name("unmask mode", self.unmask, UNMASKING)
        check_value_range(self.value_range)
        if self.degree is not None and (self.degree < 2 or self.degree % 2):
            raise ConfigError(f"neighbours must be an even number, at least 2, under masks (got {self.degree}).")
        if not 0 <= self.collusion < 1:
            raise ConfigError(f"collusion must lie in [0, 1) (got {self.collusion}).")

    @property
    def introduction(self) -> Introduction:
        """Every pair shares a secret."""
        return "keys"

    @property
    def plan(self) -> NoisePlan | None:
        """The integer noise, if there is any."""
        return self.noise

    def fits(self, clients: int, *, asked: int | None = None) -> None:
        """The sum of two gives each of them the other's contribution, and so do too many that collude among few.

        Whoever colludes is counted of all that a round has `asked`: it is the server that says who is away.
        """
        if clients < 3:
            raise ConfigError(
                f"Masking needs at least three clients in a round, not {clients}: of two, either could subtract its "
                "own contribution from the sum and read the other's. Use more clients."
            )
        FixedPoint(self.value_range, clients)
        share, needed = self.collusion, self.quorum.of
        among = clients if asked is None else asked
        # Where even everybody is too few, the ledger has said so.
        if withstood(among, share=share, needed=needed) and not withstood(
            clients, share=share, needed=needed, asked=among
        ):
            raise ConfigError(
                f"Of the {among} clients that a round asks {clients} are there, and {colluding(among, share)} of them "
                f"may collude (collusion {share:g}): among so few, those could read others' uploads. Wait for more "
                "clients, or lower collusion."
            )

    def absences(self, clients: int) -> int:
        """As many as leave a quorum of a neighbourhood, where everybody is everybody's neighbour."""
        near = clients - 1
        return max(near - self.quorum.of(near), 0)

    @property
    def readable(self) -> bool:
        """Sums alone."""
        return False

    def caveats(self, run: RunFacts) -> Caveats:
        """Who may collude with the server, and what a sum still says."""
        assumed = self.collusion_assumptions(run)
        if self.noise is not None:
            shared = caveats.shared_noise(self.noise.collusion, self.noise.accounting)
            return Caveats((caveats.SIZES, caveats.KEYS, *shared, *assumed))
        crafted = caveats.CRAFTED_VEILED if run.veiled else caveats.CRAFTED
        return Caveats((caveats.KEYS, *assumed), (caveats.BARE_SUM, caveats.DIFFERENCES, crafted))

    def collusion_assumptions(self, run: RunFacts) -> tuple[str, ...]:
        """How many clients may side with the server, what that means for a neighbourhood, and what else masks need."""
        threshold, share = self.quorum.fraction, self.quorum.colluding
        few = "a third" if abs(share - 1 / 3) < 1e-3 else f"{share:.3g}"
        collusion = f"at most {few} of each client's neighbours collude (threshold {threshold:.3g})"
        if share < 1e-9:
            collusion = f"none of a client's neighbours collude (threshold {threshold:.3g})"
        given = (collusion, *((self._surrounded(run),) if run.cohort > 2 else ()))
        return (*given, caveats.HONEST_ARRIVALS) if self.unmask == "on-dropout" else given

    def _surrounded(self, run: RunFacts) -> str:
        """What share of clients may collude so that this holds, and with which chance it does not."""
        draws, needed = draws_of(run.rounds) * self.groups, self.quorum.of
        everybody, sampled = max(run.clients, run.cohort), run.clients > run.cohort or bool(run.least)

        bits, degree, size = self._weakest(everybody, run.cohort, run.least, draws)
        whose, chosen = ("all", "asked with whom or ") if sampled else ("a round's", "")
        who = (
            f"at most {colluding(everybody, self.collusion)} of {whose} {everybody} clients collude (collusion "
            f"{self.collusion:g}), and not by who is {chosen}whose neighbour; "
        )
        if math.isinf(bits):
            return f"{who}that many surround nobody who has {degree} neighbours"
        chance = f"the chance that they surround an honest client of {degree} neighbours anywhere in the run is "
        if degree == size - 1 and not sampled:
            return f"{who}with everybody a neighbour of everybody that is TOO MANY: raise threshold, or lower collusion"
        if bits >= LEAST_BITS:
            return f"{who}{chance}at most 2^-{bits:.1f}"
        bound = "not bounded" if bits <= 0 else f"bounded, with everybody there, by 2^-{bits:.1f} only"
        fitting = masking_degree(size, of=everybody, share=self.collusion, needed=needed, draws=draws)
        mend = f"give {fitting} neighbours or leave the choice to FedVeil"
        if degree >= fitting:
            mend = f"cohorts of {size} are too small for such a share, give a larger cohort"
        return f"{who}{chance}{bound}, MORE than 2^-{LEAST_BITS}: {mend}"

    def _weakest(self, clients: int, cohort: int, least: int, draws: int) -> tuple[float, int, int]:
        """−log₂ of the chance that somebody is surrounded in a run in which everybody is there; degree and size.

        Where chance decides how many a round has, these are of the size at which that chance is largest.
        """
        facts: GraphFacts = {"share": self.collusion, "needed": self.quorum.of, "draws": draws}

        def at(size: int) -> tuple[float, int, int]:
            degree = self.degree_of(size, of=clients, draws=draws)
            return surrounded_bits(size, of=clients, degree=degree, **facts), degree, size

        return min(map(at, range(max(least, 3), cohort + 1))) if least else at(cohort)

    def check_round(self, context: RoundContext) -> None:
        """Refuse a round from which so many are away that those who collude could surround somebody after all.

        They are counted of all clients of the run, whoever the server says is away and whoever chance has drawn. Where
        the ledger bounds no chance with everybody there, none is asked for.
        """
        self.fits(len(context.cohort), asked=-(-context.asked // self.groups))
        if context.directory is None:
            return
        epoch, size, present = context.directory.epoch, len(context.cohort), len(context.directory.present)
        if epoch.cohort.everybody and self.groups == 1:
            return  # nobody is left to chance: what fits is all there is to say
        there = max(size, min(present, self._there(size, epoch, present)))
        draws = epoch.draws * self.groups
        claimed, _, _ = self._weakest(epoch.clients, epoch.size // self.groups, epoch.least if epoch.rate else 0, draws)
        degree = self._graph_degree(size, epoch, present)
        facts: GraphFacts = {"share": self.collusion, "needed": self.quorum.of, "draws": draws}
        bits = surrounded_bits(size, of=there, degree=degree, asked=epoch.clients, **facts)
        if claimed >= LEAST_BITS and bits < (claimed if math.isinf(claimed) else LEAST_BITS):
            raise ConfigError(
                f"Of {epoch.clients} clients {there} are there, {size} of them in this round, and "
                f"{colluding(epoch.clients, self.collusion)} of all may collude (collusion {self.collusion:g}): among "
                "so few, those could read others' uploads. Wait for more clients, or lower collusion."
            )

    def graph(self, context: RoundContext) -> Graph:
        """Who masks with whom, derived from the epoch's beacon, the round and its cohort."""
        seed = context.graph_seed()
        assert context.directory is not None
        self.check_round(context)
        return self._graph_of(context.cohort, seed, context.directory.epoch, len(context.directory.present))

    def degree_of(self, size: int, *, of: int, draws: int, asked: int | None = None) -> int:
        """How many neighbours each of `size` clients has, drawn from `of`, in a run of so many graphs.

        `asked` counts those too whom the server calls away.
        """
        share, needed = self.collusion, self.quorum.of
        return masking_degree(size, of=of, share=share, needed=needed, draws=draws, asked=asked, given=self.degree)

    def _graph_of(self, cohort: tuple[int, ...], seed: bytes, epoch: Epoch, there: int) -> Graph:
        return _ring(cohort, self._graph_degree(len(cohort), epoch, there), seed)

    def _there(self, size: int, epoch: Epoch, present: int) -> int:
        """Of how many that are there a round's `size` clients are drawn, when `present` are of the epoch."""
        if epoch.rate:
            return present
        # As many of all clients are there as of the cohort: that is the seats' order, and nobody's word.
        return max(size, min(epoch.clients, epoch.clients * size * self.groups // epoch.size))

    def _graph_degree(self, size: int, epoch: Epoch, present: int) -> int:
        there, draws = self._there(size, epoch, present), epoch.draws * self.groups
        return self.degree_of(size, of=there, draws=draws, asked=epoch.clients)

    def _answered_graph(self, state: ClientState) -> Graph:
        # By what the client remembers: the epoch may have changed since it uploaded, the run's schedule has not.
        return self._graph_of(state.cohort, bytes.fromhex(state.graph), state.ring().known().epoch, state.there)

    def codec(self, context: RoundContext, terms: Terms) -> FixedPoint:
        """Fixed point for this cohort: by the range, or by what noise asks for."""
        if self.noise is not None:
            return gridded(self.noise, context, terms)
        most = max(context.samples())
        if most > self.value_range:
            raise ConfigError(
                f"A client with {most} samples sends that number too, which is more than value_range = "
                f"{self.value_range:g}. Raise value_range."
            )
        return FixedPoint(self.value_range, len(context.cohort))

    def admit(self, state: ClientState, context: RoundContext, private: Request | None) -> ClientState:
        """Refuse a server that does not show that others signed the survivor list of the round before.

        Whether that round could be opened makes no difference: the client's shares are out. A server that cannot show
        it begins a new epoch, and a client goes along with that a few times a run.
        """
        self.graph(context)
        context.check_member(state.client)
        if self.noise is not None:  # its size rests on everybody's sample count
            state.ring().vouch_for(context.cohort)
        keys = state.ring()
        keys.turn_to(context.round)
        revealed_last = bool(state.survivor_digest) and state.revealed == state.answered
        if self.unmask != "always" or not revealed_last or state.ran != keys.run:
            return state
        if isinstance(private, Evidence):
            self._check_evidence(state, private)
            return state
        if state.epoch == keys.known().epoch.number:
            raise ProtocolError(
                f"client {state.client} revealed shares in round {state.revealed[0] + 1} and was not shown what its "
                "neighbours signed there: it takes no further part in this epoch"
            )
        if state.unexplained >= MOST_UNEXPLAINED:
            raise ProtocolError(
                f"client {state.client} has revealed shares in {state.unexplained + 1} rounds of this run without "
                "being shown what its neighbours signed there, and takes no further part"
            )
        return replace(state, unexplained=state.unexplained + 1)

    def _check_evidence(self, state: ClientState, evidence: Evidence) -> None:
        from fedveil.crypto.keys import signed_by

        keys = state.ring()
        graph = self._answered_graph(state)
        near = set(graph.neighbours(state.client))
        digest = bytes.fromhex(state.survivor_digest)
        signers = listed(evidence.signers)
        agreed = 0
        for signer, signature in zip(signers, evidence.signatures, strict=True):
            if signer in near:
                near.discard(signer)
                identity, _, _ = keys.vouched(signer)
                agreed += signed_by(identity, to_bytes(signature), digest, purpose=f"survivors of {keys.run}")
        needed = self.quorum.of(graph.degree(state.client))
        if agreed < needed:
            raise ProtocolError(
                f"only {agreed} of {needed} needed neighbours of client {state.client} signed the survivor list it was "
                f"shown in round {state.revealed[0] + 1}: the server may have told others a different story"
            )

    def protect(
        self, state: ClientState, vector: Tensor, context: RoundContext, terms: Terms, *, secrets: SecretSource
    ) -> tuple[ClientState, Reply]:
        """Encode, add integer noise, mask, and deal shares of this round's secrets."""
        words = self.codec(context, terms).encode(vector)
        if self.noise is not None:  # the weight is public
            add_residual(words[:-1], state.client, self.noise, context, terms, secrets=secrets)
        return self.cover(state, words, context, secrets=secrets, transcript=context.told)

    def cover(
        self,
        state: ClientState,
        words: NDArray[np.uint64],
        context: RoundContext,
        *,
        secrets: SecretSource,
        transcript: bytes = b"",
        wide: int = 0,
    ) -> tuple[ClientState, MaskedUpload]:
        """Mask integers modulo 2⁶⁴, in place, and deal shares of this round's secrets.

        Masks cancel only between clients that saw the same graph and were told the same `transcript`. The first `wide`
        words are one number.
        """
        from fedveil.crypto.keys import add_mask

        known = context.directory
        there = len(known.present) if known is not None and known.epoch.rate else 0
        state = replace(
            state, cohort=context.cohort, graph=context.graph_seed().hex(), transcript=transcript.hex(), there=there
        )
        client, label = state.client, _label(state, context.round, context.attempt)
        keys, graph = state.ring(), self.graph(context)
        dealt = {LOCK: keys.own(round=context.round, attempt=context.attempt, purpose=_REVELATION)}
        for peer in graph.neighbours(client):
            dealt[peer] = pair_seed(state, peer, round=context.round, attempt=context.attempt)
            add_mask(words, dealt[peer], subtract=client > peer, wide=wide)
        if self.unmask == "always":
            dealt[client] = secrets.stream("self mask", client, context.round, context.attempt).bytes(32)
            add_mask(words, dealt[client], wide=wide)
        stream = secrets.stream("shares", client, context.round, context.attempt)
        bundles = deal(graph, keys, secrets=dealt, quorum=self.quorum, stream=stream, label=label)
        payload = torch.from_numpy(words.view(np.int64))
        return state, MaskedUpload(client, context.round, context.attempt, payload, *packed(bundles))

    def answer(self, state: ClientState, request: Request, private: Request | None) -> tuple[ClientState, Reply]:
        """Sign the survivor list, then reveal one kind of share per neighbour; once per round and attempt."""
        if not isinstance(request, Unmask):
            raise ProtocolError(f"client {state.client} was sent a {type(request).__name__}, which this scheme has not")
        advanced = state.revealing(request.round, request.attempt)
        keys, graph = state.ring(), self._answered_graph(state)
        label = _label(state, request.round, request.attempt)
        survivors = self._checked_survivors(state, graph, request)
        signature = keys.sign(survivors.digest, purpose="survivors")
        held = self._held(keys, graph, label, survivors.alive, private)
        revealed = self._reveal(keys, graph, label, survivors.alive, held, signature)
        return replace(advanced, survivor_digest=survivors.digest.hex()), revealed

    def _checked_survivors(self, state: ClientState, graph: Graph, request: Unmask) -> _Survivors:
        # Signed for the graph alone: the server, which checks it, need not know what clients were told besides.
        survivors = _survivors(request, graph, bytes.fromhex(state.graph))
        needed = self.quorum.of(len(graph.members))
        if not survivors.inside:
            raise ProtocolError("a survivor list names a client outside the round")
        if state.client not in survivors.alive:
            raise ProtocolError(f"client {state.client} was asked to reveal in a round that counts it as missing")
        if len(survivors.alive) < needed:
            raise ProtocolError(
                f"client {state.client} does not reveal for {len(survivors.alive)} survivors: {needed} of "
                f"{len(graph.members)} are needed for the sum to hide each of them"
            )
        if not survivors.connected:
            raise ProtocolError(
                f"client {state.client} does not reveal: the survivors fall into groups whose sums could be read"
            )
        return survivors

    def _held(
        self, keys: Keyring, graph: Graph, label: Label, alive: frozenset[int], private: Request | None
    ) -> dict[Item, bytes]:
        """The shares that survivors dealt to this client."""
        held: dict[Item, bytes] = {}
        if isinstance(private, Relayed):
            self_mask = self.unmask == "always"
            for sender, sealed in unpacked(private.senders, private.lengths, private.bundles).items():
                if sender in alive:
                    try:
                        held |= open_bundle(graph, keys, sealed, sender=sender, self_mask=self_mask, label=label)
                    except ProtocolError:
                        continue  # one dealer's damaged bundle must not cost the others their round
        return held

    @staticmethod
    def _reveal(
        keys: Keyring, graph: Graph, label: Label, alive: frozenset[int], held: Mapping[Item, bytes], signature: bytes
    ) -> Revealed:
        near = set(graph.neighbours(keys.client))
        opening = {dealer: share for (dealer, about), share in held.items() if about == LOCK}
        # One kind per neighbour: its own mask's seed if its upload arrived, its pairs' seeds if not.
        kept = {item: held[item] for item in held if item[1] in near and (item[0] == item[1]) == (item[1] in alive)}
        key = keys.own(round=label.round, attempt=label.attempt, purpose=_REVELATION)
        return Revealed(
            keys.client,
            label.round,
            label.attempt,
            from_bytes(signature),
            torch.tensor(list(opening), dtype=torch.int64),
            from_bytes(b"".join(opening.values())).reshape(-1, SHARE_BYTES),
            from_bytes(lock_shares(kept, client=keys.client, key=key)),
        )

    def shared_part(self, state: ClientState, peer: int, context: RoundContext, terms: Terms) -> Tensor | None:
        """The mask of a pair."""
        from fedveil.crypto.keys import add_mask

        if peer not in self.graph(context).neighbours(state.client):
            return None
        words = np.zeros(terms.layout.length, dtype=np.uint64)
        seed = pair_seed(state, peer, round=context.round, attempt=context.attempt)
        add_mask(words, seed, subtract=state.client > peer)
        return torch.from_numpy(words.view(np.int64))

    def accumulator(self, context: RoundContext, terms: Terms, *, device: torch.device) -> MaskedSum:
        """A sum modulo 2⁶⁴."""
        return self.sum_of(terms.layout.length, context, codec=self.codec(context, terms))

    def sum_of(
        self, length: int, context: RoundContext, *, codec: FixedPoint | None, name: str = "", wide: int = 0
    ) -> MaskedSum:
        """A sum of `length` words; without a codec, of words that stay covered when the masks are off.

        `name` is what releases call these uploads, if not uploads; the first `wide` words are one number.
        """
        return MaskedSum(
            codec,
            length,
            self.graph(context),
            context,
            quorum=self.quorum,
            self_mask=self.unmask == "always",
            signed=codec is not None,
            name=name,
            wide=wide,
        )

    def open(self, total: Summing, gathered: Gathered, context: RoundContext) -> Ask | None:
        """Ask the survivors to reveal, once; nobody needs to where nobody is missing and no mask is one's own."""
        assert isinstance(total, MaskedSum)
        if total.survivors:
            return None
        total.close(gathered.arrived)
        alive, needed = total.survivors, self.quorum.of(len(context.cohort))
        if len(alive) < needed:
            raise ProtocolError(f"{len(alive)} of {needed} needed uploads arrived")
        if not total.graph.connected(alive):
            raise ProtocolError(f"the survivors fall into groups without a mask between them; {MORE_NEIGHBOURS}")
        # Before anybody reveals: shares that open nothing would have to be accounted for all the same.
        total.check_reach()
        if self.unmask == "on-dropout" and len(alive) == len(context.cohort):
            return None
        if self.unmask == "on-dropout" and len(gathered.seen) > len(alive):
            refused = next(client for client in gathered.seen if client not in alive)
            raise ProtocolError(
                f"the upload of client {refused} was refused, and without masks of its own, opening those that others "
                "share with it would show the server what it holds"
            )
        total.asked = True
        request = Unmask(context.round, context.attempt, torch.tensor(alive, dtype=torch.int64))
        return Ask(alive, request, total, each=total.relayed())

    def parting(self, total: Summing) -> Mapping[int, Request | None]:
        """Each client's neighbours' signatures on the survivor list, whatever came of the round; None if too few."""
        assert isinstance(total, MaskedSum)
        if self.unmask != "always" or not total.asked:
            return {}
        told: dict[int, Request | None] = {}
        for client in total.survivors:
            near = total.graph.neighbours(client)
            signers = [peer for peer in near if peer in total.signatures]
            signed = from_bytes(b"".join(total.signatures[signer] for signer in signers)).reshape(-1, SIGNATURE_BYTES)
            enough = len(signers) >= self.quorum.of(len(near))
            told[client] = Evidence(torch.tensor(signers, dtype=torch.int64), signed) if enough else None
        return told

    def releases(self, layout: Layout) -> tuple[Release, ...]:
        """Everything masked; what opens masks is declared too."""
        masked = Cover(hiding="masks modulo 2^64: the server learns the sum", protection="masked")
        noised = Cover(noise="integer Gaussian, in the sum", protection="noised")
        covers = {name: masked if self.noise is None or name == "weight" else masked | noised for name in layout.names}
        return (
            *releases_of(MaskedUpload, sections=layout.names, covers=covers),
            *releases_of_all(*UNMASKING_MESSAGES, *((Evidence,) if self.unmask == "always" else ())),
        )
