"""The privacy journal of a run: every round is written down before clients are asked, and the ledger follows from it.

A line of the journal is one JSON object: `plan` (how noise is planned from here on, and how far each client's data
reach), `joined` (clients of other machines, as they announce themselves), `begin` and `end` of a round, and `skipped`,
a round for which chance has drawn too few, so that nobody was asked. What was begun and never ended is charged as if
everything had been seen; a round that every client has declined is `void`, costs nothing, and ends an attempt. Lines
are chained. For noise whose size is only assumed there is nothing to book: what its paper's figure would be worth is
said in the ledger's notes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedveil.downlink import Architecture
from fedveil.errors import CheckpointError, ConfigError, naming, spelled
from fedveil.ledger import caveats
from fedveil.ledger.accountant import Accountant, SampledAccountant
from fedveil.ledger.correlated import NoiseLayout
from fedveil.ledger.gaussian import delta_floor, delta_floor_even, epsilon_of
from fedveil.ledger.releases import Release
from fedveil.ledger.statement import Ledger, PaperFigure, state
from fedveil.plain import read_raw, read_text
from fedveil.protocol.parts import Scheme, bounded
from fedveil.protocol.phases import RoundBegins, RoundDone
from fedveil.runs.job import Job
from fedveil.secrets import SecretStream
from fedveil.uplink.grid import ROUNDING
from fedveil.uplink.noise_plan import COMPLETE_UP_TO, NoisePlan, Target

# --- the file of a privacy journal: a line is a JSON object, and ends with a digest of itself and of all lines before
#
# So a line that was lost, changed, moved or written by hand is noticed when the file is read, as long as a later line
# stands. That is for accidents and naive edits: whoever may write the file can compute all digests anew.

_CHAIN = "chain"
_DIGITS = 32


class JournalFile:
    """A journal that is read once and then grows.

    Journals from before lines had digests are read as they are; the first line that has one covers them all.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest = ""
        self._said: list[str | None] = []

    def entries(self) -> list[dict[str, Any]]:
        """The journal's lines. Only what a kill has torn may be missing: the last line of an attempt.

        Nobody was asked for what it says, and the next attempt begins with a plan, which may be torn as well. Any
        other line that cannot be read may tell of something spent.

        Raises:
            ValueError: A line is not one that was written, or others were before it.
        """
        self._digest, self._said = "", []
        if not self.path.exists():
            return []
        self._mend()
        entries: list[dict[str, Any]] = []
        torn = 0
        for number, line in enumerate(read_text(self.path).split("\n"), start=1):
            if not line:
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as reason:
                if not (_half_a_plan(line) if torn else _half_a_line(line)):
                    raise ValueError(f"line {torn or number} is not one that was written") from reason
                torn = torn or number
                continue
            if torn and "plan" not in entry:
                raise ValueError(f"line {torn} is not one that was written")
            torn = 0
            self._follow(entry, number)
            entries.append(entry)
        return entries

    def write(self, entry: dict[str, Any]) -> None:
        """Add a line, which is on the disk afterwards."""
        body = json.dumps(entry, separators=(",", ":"))
        self._digest = _digest_of(self._digest, body)
        self._said.append(self._digest)
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(f'{body[:-1]},"{_CHAIN}":"{self._digest}"}}\n')
            file.flush()
            os.fsync(file.fileno())

    @property
    def mark(self) -> tuple[int, str]:
        """How many lines there are and the last one's digest, to hold the file to later on."""
        return len(self._said), self._digest

    def has(self, mark: object) -> bool:
        """Whether the journal still has the lines of a mark, digests included; `mark` is as it was read."""
        match mark:
            case [int(count), str(digest)] if 0 < count <= len(self._said):
                return self._said[count - 1] == digest
        return False

    def _follow(self, entry: dict[str, Any], number: int) -> None:
        """Hold a line to those before it."""
        said = entry.pop(_CHAIN, None)
        self._digest = _digest_of(self._digest, json.dumps(entry, separators=(",", ":")))
        if said is None and self._said and self._said[-1] is not None:
            raise ValueError(f"line {number} has no digest, unlike those before it: it was written by somebody else")
        if said is not None and said != self._digest:
            raise ValueError(f"line {number} does not follow from those before it: one was changed, moved or lost")
        self._said.append(said)

    def _mend(self) -> None:
        """End a line that a kill has torn, so that what is written next stands on its own."""
        if (content := read_raw(self.path)) and not content.endswith(b"\n"):
            with naming(self.path), self.path.open("ab") as file:
                file.write(b"\n")


def _half_a_line(line: str) -> bool:
    """Whether a kill may have left this. Half a line ends like a whole one only where it has objects inside."""
    return not line.endswith("}") or line.startswith(('{"plan"', '{"joined"'))


def _half_a_plan(line: str) -> bool:
    """Whether a kill may have left this of the line that begins an attempt; a power cut leaves zeros."""
    begun, head = line.rstrip("\0"), '{"plan":'
    return begun.startswith(head) or head.startswith(begun)


def _digest_of(before: str, body: str) -> str:
    return hashlib.sha256(f"{before}\n{body}".encode()).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class Composed:
    """ε of one round and of all, if the noise were Gaussian for everybody and S were enforced."""

    sigma: float
    delta: float
    rounds: int
    one_round: float
    all_rounds: float

    def said(self) -> str:
        """In a sentence."""
        return (
            f"were the noise Gaussian for whom it is meant against and S enforced, σ = {self.sigma:.4g} would give "
            f"ε = {self.one_round:.3g} in one round and ε = {self.all_rounds:.3g} in {self.rounds} "
            f"(exactly, δ = {self.delta:g})"
        )


@dataclass(frozen=True)
class Floors:
    """The least δ, at any ε, given the scales of one draw: a change on one coordinate, and one spread over all."""

    sharpest: float
    even: float
    coordinates: int

    def said(self) -> str:
        """In a sentence."""
        return (
            "if Ψ and Φ were hidden: given R, one round's bounded noise leaves δ of at least "
            f"{self.sharpest:.2g} at every ε for a change of the coordinate with the smallest R, and {self.even:.2g} "
            f"for one spread evenly over {self.coordinates:,} coordinates (one draw of R; a small number is no promise)"
        )


def composed(scheme: Scheme, *, rounds: int, delta: float) -> Composed | None:
    """MP-DP's figure for one round, and for `rounds` of them; None for other schemes."""
    noise = scheme.assumed_noise
    if noise is None:
        return None
    mu = noise.sensitivity / noise.sigma
    return Composed(noise.sigma, delta, rounds, epsilon_of(mu, delta), epsilon_of(mu * math.sqrt(rounds), delta))


def floors(scheme: Scheme, architecture: Architecture, *, clients: int, stream: SecretStream) -> Floors | None:
    """The δ floors of a round of `clients` under decomposed noise, for one draw of R; None for other schemes."""
    scale, noise = scheme.uplink.own_sigma(clients), scheme.assumed_noise
    factors = None if scale is None else scheme.downlink.noise_factors(architecture, stream=stream)
    if scale is None or noise is None or factors is None or not len(factors):
        return None
    reach = noise.sensitivity
    return Floors(
        delta_floor(scale=scale, clients=clients, shift=reach / float(factors.min())),
        abs(delta_floor_even(scale=scale, clients=clients, sensitivity=reach, factors=factors.numpy())),
        len(factors),
    )


def notes_on(
    scheme: Scheme, architecture: Architecture, *, clients: int, rounds: int, delta: float, stream: SecretStream
) -> tuple[str, ...]:
    """What a ledger says about noise of an assumed size."""
    figures = (
        composed(scheme, rounds=rounds, delta=delta),
        floors(scheme, architecture, clients=clients, stream=stream),
    )
    return tuple(figure.said() for figure in figures if figure is not None)


_DELTA = 1e-5
_NAMED = 20


def accountant_for(scheme: Scheme, clients: int) -> Accountant | None:
    """An empty account, where the scheme claims anything; exact accounting makes the target a limit."""
    plan = scheme.plan
    if plan is None:
        return None
    if plan.sampling is not None:
        return SampledAccountant(
            clients,
            limit=float(plan.target.participations),
            noise_multiplier=plan.noise_multiplier(),
            rate=plan.sampling,
            delta=plan.target.delta,
        )
    limits = None
    if plan.target.each and plan.accounting == "exact":
        own = [plan.target_of(client) for client in range(clients)]
        most = {target: target.mu**2 for target in set(own)}
        limits = np.asarray([most[target] for target in own])
    return Accountant(
        clients,
        limits=limits,
        limit=plan.target.mu**2 if plan.accounting == "exact" else None,
        collusion=plan.collusion,
        least=plan.least_dishonest,
        asked=plan.asked or 0,
        trusted=scheme.central is not None,
        honest_arrivals=scheme.honest_arrivals,
    )


@dataclass(frozen=True)
class _Terms:
    """On what a round's noise depends beside its cohort: the plan, every client's samples, and how far one reaches."""

    plan: NoisePlan
    sizes: Mapping[int, int]
    reach: Mapping[int, float]

    @staticmethod
    def of(scheme: Scheme, sizes: Mapping[int, int]) -> _Terms:
        """As the scheme has it now."""
        assert scheme.plan is not None
        limits = bounded(scheme.work)
        return _Terms(scheme.plan, sizes, {client: limits.sensitivity(count) for client, count in sizes.items()})

    def parsed(self, entry: dict[str, Any]) -> _Terms:
        """As a journal has it from here on; where it names no samples, they stay."""
        given, reach = dict(entry["plan"]), entry["reach"]
        if given["layout"] == "pairs" and "graph" not in given:
            if "draws" in given and len(reach) > COMPLETE_UP_TO:
                raise CheckpointError(
                    "The run's journal tells of noise around a circle, but not around which: an unreleased version has "
                    f"written it, and what was spent cannot be told. Start anew with another {spelled('out')}."
                )
            given["graph"] = "everybody"  # as it was when nobody wrote it down
        plan = NoisePlan(**{**given, "target": Target(**given["target"])})
        return _Terms(
            plan,
            {**self.sizes, **_numbered(entry.get("samples", {}))},
            _numbered(reach) if isinstance(reach, dict) else dict(enumerate(reach)),
        )

    def joined(self, sizes: Mapping[int, int], reach: Mapping[int, float]) -> _Terms:
        """The same with clients that have come later."""
        return replace(self, sizes={**self.sizes, **sizes}, reach={**self.reach, **reach})

    def agrees_with(self, other: _Terms) -> bool:
        """Whether the plan is the same, and the reach of every client that both know."""
        both = self.reach.keys() & other.reach.keys()
        return self.plan == other.plan and all(self.reach[client] == other.reach[client] for client in both)

    def noise_layout(self, cohort: Sequence[int], graph: bytes, *, round: int) -> NoiseLayout:
        """The noise of a round."""
        samples, reach = [self.sizes[client] for client in cohort], [self.reach[client] for client in cohort]
        return self.plan.noise_layout(cohort, samples, reach, seed=graph, round=round)


class PrivacyJournal:
    """Books every round of a run, those of earlier attempts included.

    A round is written to the journal before anything is asked of clients and again when it is over, so
    that a killed run has paid for every round it may have shown.
    """

    def __init__(self, job: Job, journal: Path | None = None) -> None:
        self._job = job
        self._file = None if journal is None else JournalFile(journal)
        self._headed = False
        self.on_plan: Callable[[tuple[int, str]], None] = lambda mark: None
        """Told the journal's mark once an attempt's plan is written, before anybody is asked."""
        self._open: RoundBegins | None = None
        self.pinned = job.guard.identities is not None
        """Whether clients know everybody's keys beforehand; on other machines they say so, and an engine sets it."""
        self.accountant = None if job.unbounded else accountant_for(job.scheme, len(job.pool))
        self.first: NoiseLayout | None = None
        self._first_plan = self._earlier = job.scheme.plan
        if self.accountant is None:
            return
        self._terms = _Terms.of(job.scheme, {data.client: len(data) for data in job.pool.clients})
        self._charged: set[int] = set()
        if self._file is not None:
            try:
                sizes = self._replay(self._file.entries())
            except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as reason:
                raise CheckpointError(
                    f"{journal} is damaged ({type(reason).__name__}: {reason}): what was spent is no longer known. Put "
                    f"the file back, or start anew with another {spelled('out')}."
                ) from reason
            self._terms = _Terms.of(job.scheme, sizes)

    def begin(self, begins: RoundBegins) -> None:
        """Write down what clients are about to be asked for."""
        if self.accountant is None:
            return
        self._meet(begins)
        self._head()
        cohort = None if len(begins.cohort) == len(self._job.pool) else list(begins.cohort)
        entry: dict[str, Any] = {"begin": [begins.round, begins.attempt], "cohort": cohort, "graph": begins.graph.hex()}
        if begins.arrived is not None:
            entry |= {"arrived": list(begins.arrived), "revealed": [list(pair) for pair in begins.revealed]}
            entry |= _besides(begins.seen, begins.arrived)
        self._write(entry)
        self._open = begins

    def _head(self) -> None:
        """Begin an attempt's lines with how its noise is planned."""
        if self._headed:
            return
        self._headed = True
        self._write({"plan": dataclasses.asdict(self._terms.plan), **self._known()})
        if self._file is not None:
            self.on_plan(self._file.mark)

    def _meet(self, begins: RoundBegins) -> None:
        """Learn the sample counts of clients on other machines, as they were announced."""
        said = dict(zip(begins.cohort, begins.samples, strict=False))
        new = {client: count for client, count in said.items() if self._terms.sizes.get(client) != count}
        if not new:
            return
        reach = _Terms.of(self._job.scheme, new).reach
        self._terms = self._terms.joined(new, reach)
        if self._headed:
            self._write({"joined": {str(client): [count, reach[client]] for client, count in new.items()}})

    def _known(self) -> dict[str, Any]:
        """What a journal's head says of the clients; sample counts only where no pool remembers them."""
        if self._job.pool.clients:
            return {"reach": [self._terms.reach[client] for client in range(len(self._job.pool))]}
        return {"reach": dict(self._terms.reach), "samples": dict(self._terms.sizes)}

    def end(self, done: RoundDone, *, void: bool = False) -> None:
        """Book a round that is over; a `void` one, which every client has declined, costs nothing."""
        if self.accountant is not None and done.skipped:
            self._head()
            self._write({"skipped": done.round})
            self.accountant.rounds += 1  # it is one of the run's, and cost nobody anything
        if self.accountant is None or self._open is None:
            return
        begins, self._open = self._open, None
        if void:
            self._write({"end": [begins.round, begins.attempt], "void": True})
            return
        arrived = list(done.gathered.arrived)
        entry = {
            "end": [begins.round, begins.attempt],
            "arrived": None if len(arrived) == len(done.cohort) else arrived,
            "revealed": [list(pair) for pair in done.revealed],
        }
        seen = done.gathered.seen
        self._write(entry | _besides(seen, arrived) | ({} if done.published else {"failed": True}))
        told = (begins.round, done.cohort, begins.graph, arrived, done.revealed)
        self._charge(self._terms, *told, done.published, seen=seen)

    def interrupted(self) -> None:
        """Charge a round that was begun and will not end, as reading the journal does: whatever was asked for may have
        been seen."""
        begins, self._open = self._open, None
        if self.accountant is not None and begins is not None:
            seen = begins.cohort if begins.arrived is None else {*begins.arrived, *(begins.seen or ())}
            told = (begins.round, begins.cohort, begins.graph, begins.arrived, begins.revealed)
            self._charge(self._terms, *told, seen=sorted(seen))

    def _charge(
        self,
        terms: _Terms,
        round: int,
        cohort: Sequence[int],
        graph: bytes,
        arrived: Sequence[int] | None,
        revealed: Sequence[Sequence[int]],
        published: bool = True,
        seen: Sequence[int] | None = None,
    ) -> None:
        assert self.accountant is not None
        noise_layout = terms.noise_layout(cohort, graph, round=round)
        if self.first is None:
            self.first, self._first_plan = noise_layout, terms.plan
        pairs = [(client, other) for client, other in revealed]
        self.accountant.charge(noise_layout, arrived=arrived, revealed=pairs, published=published, seen=seen)

    def _replay(self, entries: list[dict[str, Any]]) -> Mapping[int, int]:
        """Charge every round in the journal, for the noise it had then: a run may go on with another target.

        Returns:
            how many samples each client has, as far as they were announced.
        """
        terms, everybody = self._terms, list(range(len(self._job.pool)))
        begun: list[tuple[_Terms, dict[str, Any]]] = []
        ended = False
        for entry in entries:
            if ended and "plan" not in entry:
                raise ValueError("an attempt goes on after a round that everybody declined")
            ended = False
            if "plan" in entry:
                terms = terms.parsed(entry)
                self._earlier = terms.plan
                if terms.plan.sampling is not None and not terms.agrees_with(self._terms):
                    raise ConfigError(
                        "Under secret sampling the noise of all rounds is found together: resume with the settings the "
                        f"run was started with (rounds = {terms.plan.target.rounds}), or start anew with another "
                        f"{spelled('out')}."
                    )
            elif "joined" in entry:
                came = _numbered(entry["joined"])
                sizes = {client: count for client, (count, _) in came.items()}
                terms = terms.joined(sizes, {client: reach for client, (_, reach) in came.items()})
            elif "skipped" in entry:
                if entry != {"skipped": int(entry["skipped"])}:
                    raise ValueError("a round is skipped, and says more than that")
                self._charged.add(entry["skipped"])
                assert self.accountant is not None
                self.accountant.rounds += 1
            elif "begin" in entry:
                # The same round again, with what opens it: that replaces what was written before.
                if "arrived" in entry and begun and begun[-1][1]["begin"] == entry["begin"]:
                    begun.pop()
                begun.append((terms, entry))
            else:
                if not begun or begun[-1][1]["begin"] != entry["end"]:
                    raise ValueError(f"round {entry['end']} ends that was not begun")
                noise, begins = begun.pop()
                if "void" in entry:
                    if entry != {"end": begins["begin"], "void": True} or begins.get("arrived"):
                        raise ValueError(f"round {entry['end']} is void, and not one that everybody declined")
                    ended = True
                else:
                    self._charged.add(begins["begin"][0])
                    cohort = everybody if begins["cohort"] is None else begins["cohort"]
                    graph, published = bytes.fromhex(begins["graph"]), not entry.get("failed", False)
                    arrived = cohort if entry["arrived"] is None else entry["arrived"]
                    seen, revealed = [*arrived, *entry.get("refused", ())], entry["revealed"]
                    told = (begins["begin"][0], cohort, graph, arrived, revealed, published)
                    self._charge(noise, *told, seen=seen)
        for noise, begins in begun:  # killed in the middle: whatever was asked for may have been seen
            self._charged.add(begins["begin"][0])
            cohort = everybody if begins["cohort"] is None else begins["cohort"]
            graph = bytes.fromhex(begins["graph"])
            got = begins.get("arrived")
            seen = [*(cohort if got is None else got), *begins.get("refused", ())]
            self._charge(noise, begins["begin"][0], cohort, graph, got, begins.get("revealed", ()), seen=seen)
        return terms.sizes

    @property
    def announced(self) -> dict[int, int]:
        """The sizes that clients on other machines have announced in earlier attempts: they are held to them."""
        return {} if self.accountant is None or self._job.pool.clients else dict(self._terms.sizes)

    def remembered(self) -> dict[int, float]:
        """μ² that each client has spent in earlier attempts, against whomever it spent most."""
        if self.accountant is None or isinstance(self.accountant, SampledAccountant) or self.accountant.trusted:
            return {}
        most = np.maximum.reduce(list(self.accountant.spent.values()))
        return dict(enumerate(most.tolist()))

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(entry)

    def check_mark(self, mark: object) -> None:
        """Refuse a journal that lacks what it had when the newest attempt began; None where nobody has written that."""
        if self.accountant is None or self._file is None or mark is None or self._file.has(mark):
            return
        raise CheckpointError(
            f"{self._file.path} is not the journal that the last attempt went on with, of which attempts.json tells: "
            f"lines are missing or their digests are. What was spent is no longer known. Put the file back, or start "
            f"anew with another {spelled('out')}."
        )

    @property
    def _before_circles(self) -> bool:
        """Whether the rounds so far shared noise among all, or those each has picked, and new ones would not."""
        plan, earlier = self._job.scheme.plan, self._earlier
        changed = plan is not None and earlier is not None and earlier.graph != plan.graph
        return changed and plan is not None and plan.circle(self._job.cohort.size) is not None

    def check_graph(self) -> None:
        """Refuse to go on around a circle where rounds were not: the ledger of a run speaks of one or the other."""
        if self._before_circles:
            raise CheckpointError(
                f"The run's rounds so far shared noise by other rules than there are now for {self._job.cohort.size} "
                "clients a round, and its ledger could not speak of both. Finish it with the version that began it, or "
                f"start anew with another {spelled('out')}."
            )

    def check_rounds(self, rounds: Iterable[int]) -> None:
        """Refuse a journal in which a round, counted from 1, was not paid for although metrics tell of it.

        A round that every client has declined leaves no metrics.
        """
        if self.accountant is None or self._file is None:
            return
        free = sorted({round for round in rounds if round - 1 not in self._charged})
        if free:
            raise CheckpointError(
                f"{self._file.path} has no charge for round {free[0]}, of which metrics.jsonl has figures: what was "
                f"spent is no longer known. Put the file back, or start anew with another {spelled('out')}."
            )

    def ledger(self, *, rounds: int = 0) -> Ledger:
        """What a run of `rounds` rounds proves."""
        job = self._job
        unlimited = bool(job.cohort.rate) and self.accountant is None  # nobody sits out
        notes = notes_on(
            job.scheme,
            job.architecture,
            clients=job.cohort.size,
            rounds=job.config.rounds if unlimited else job.cohort.most_participations(job.config.rounds),
            delta=job.config.delta or _DELTA,
            stream=job.secrets.stream("ledger"),
        )
        releases = (*job.scheme.releases(job.architecture), *job.around.releases)
        again = 0 if self.accountant is None or not rounds else self.accountant.rounds - rounds
        if again > 0:
            lost = f"rounds asked for that are not in the model, since a run was interrupted: {again}; they count"
            notes = (*notes, lost)
        plan = job.scheme.plan
        if job.cohort.rate and self.accountant is not None and plan is not None:
            often = {"most": plan.target.participations, "rounds": plan.target.rounds}
            notes = (*notes, caveats.sampled_clients(job.cohort.rate, **often))
        if self._before_circles:
            notes = (*notes, "what is said of a circle is not so of these rounds: they are from before there was one")
        ledger = ledger_of(
            job.scheme,
            releases,
            self.accountant,
            self.first,
            simulation=job.secrets.simulation,
            rounds=rounds,
            notes=(*notes, *job.around.notes, *job.notes),
            plan=self._first_plan,
        )
        ledger = _assuming(ledger, job.own_assumptions)
        return _with_roster(ledger) if self.pinned else ledger


def ledger_of(
    scheme: Scheme,
    releases: Sequence[Release],
    accountant: Accountant | None,
    first: NoiseLayout | None,
    *,
    simulation: bool,
    rounds: int = 0,
    notes: tuple[str, ...] = (),
    plan: NoisePlan | None = None,
) -> Ledger:
    """The ledger of a scheme with this account; `first` is the noise of its first round, `notes` what else to say."""
    told = plan
    plan = scheme.plan
    ledger = state(
        scheme=scheme.name,
        releases=releases,
        caveats=scheme.caveats,
        accountant=accountant,
        delta=_DELTA if plan is None else plan.target.delta,
        unit="record" if plan is None else bounded(scheme.work).unit,
        paper=_paper_figure(scheme, first, told or plan),
        simulation=simulation,
        rounds=rounds,
        notes=(*scheme.caveats.notes, *notes, *_no_guarantee(plan, accountant), *_each_client(plan, accountant)),
    )
    if any(line.assumptions for line in ledger.lines):
        return ledger
    # What nothing is claimed on is still worth knowing.
    return replace(ledger, notes=(*scheme.caveats.assumptions, *ledger.notes))


def _assuming(ledger: Ledger, taken: tuple[str, ...]) -> Ledger:
    """The same, where figures rest on code that is somebody's own as well: the line itself says so."""
    if not taken:
        return ledger
    lines = tuple(
        line
        if line.epsilon is None
        else replace(line, why=f"{line.why}; {caveats.OWN_CODE}", assumptions=(*line.assumptions, *taken))
        for line in ledger.lines
    )
    return replace(ledger, lines=lines)


def _with_roster(ledger: Ledger) -> Ledger:
    """The same, where keys are known beforehand and nobody could swap or invent any."""

    def told(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(caveats.ROSTER if text == caveats.KEYS else text for text in texts)

    return replace(
        ledger,
        lines=tuple(replace(line, assumptions=told(line.assumptions)) for line in ledger.lines),
        notes=told(ledger.notes),
    )


def _no_guarantee(plan: NoisePlan | None, accountant: Accountant | None) -> tuple[str, ...]:
    if plan is None or accountant is None or plan.accounting != "paper" or not plan.per_sample:
        return ()
    delta = plan.target.delta
    real = max(accountant.epsilon(name, delta) for name in accountant.adversaries)
    said = f"ε = {real:,.0f}" if real >= 1000 else f"ε = {real:.4g}" if math.isfinite(real) else "no finite ε"
    return (
        f"not a DP guarantee: the paper's σ for ε = {plan.target.epsilon:g} gives {said}; use accounting = exact for "
        "noise that keeps what it promises",
    )


def _each_client(plan: NoisePlan | None, accountant: Accountant | None) -> tuple[str, ...]:
    """What is proven of each client, where they ask for different ε; those that ask for the same stand together."""
    if plan is None or accountant is None or not plan.target.each:
        return ()
    most, target = np.maximum.reduce(list(accountant.spent.values())), plan.target
    how = "each adds noise for its own"
    if plan.layout != "local":
        how = f"noise is shared, and made for the strictest, {target.epsilon:g}"
    said = []
    for asked in sorted(set(target.each)):
        clients = [client for client, epsilon in enumerate(target.each) if epsilon == asked]
        named = ", ".join(map(str, clients[:_NAMED])) + (
            f" and {len(clients) - _NAMED} more" if clients[_NAMED:] else ""
        )
        spent = float(most[clients].max())
        proven = f"ε = {epsilon_of(math.sqrt(spent), target.delta):.4g}" if spent > 0 else "nothing spent, or no more"
        said.append(f"{asked:g} by client{'s' * (len(clients) > 1)} {named}: {proven}")
    return (
        f"clients ask for different ε ({how}); of those that asked for each, the largest that is proven against "
        f"whomever, at δ = {target.delta:g}: " + "; ".join(said),
    )


def _paper_figure(scheme: Scheme, first: NoiseLayout | None, plan: NoisePlan | None) -> PaperFigure | None:
    formula = scheme.caveats.paper
    if plan is None or first is None or not formula:
        return PaperFigure(formula) if formula else None
    # Noise that stays in the sum, in the units of a summed contribution.
    used = math.sqrt(float(first.residual.sum()))
    reach = float(first.sensitivity.max()) / (1 + ROUNDING)  # the paper's numbers are real ones
    by_paper = plan.paper_scale(reach, 0)
    if plan.per_sample:
        by_paper /= reach / bounded(scheme.work).sensitivity(1)
    if plan.layout == "local":
        # By the formula noise goes as 1/ε.
        shares = [(plan.target.epsilon / plan.target_of(client).epsilon) ** 2 for client in first.members]
        by_paper *= math.sqrt(math.fsum(shares))
    return PaperFigure(formula, plan.target.epsilon, by_paper, used)


def _numbered(named: Mapping[str, Any]) -> dict[int, Any]:
    """By client number: JSON has names only."""
    return {int(client): value for client, value in named.items()}


def _besides(seen: Sequence[int] | None, arrived: Sequence[int]) -> dict[str, Any]:
    """Whose upload the server has got and refused, where there is such."""
    refused = sorted(set(seen or ()) - set(arrived))
    return {"refused": refused} if refused else {}
