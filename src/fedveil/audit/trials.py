"""Trials: what declared attacks are shown of a recorded run, with which truth their results are compared.

Those who see uploads are the server, the server with clients on its side, and somebody on the wire; a client sees the
model. A run is shown in sights (see `attack.SIGHTS`), and every attack is tried on those that it declares, as far as
the run has what it needs.
"""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedveil.audit.attack import MODEL, Attack, ReferenceRun, attacks
from fedveil.audit.attacks.alignment import FIRST, as_sent, pair_of, received
from fedveil.audit.attacks.extraction import fit_probe
from fedveil.audit.attacks.gradients import MOST_READ
from fedveil.audit.attacks.membership import UNKNOWN
from fedveil.audit.findings import ASSETS, NOT_TRIED, Attempt, Finding, Measure, Score, Settings, Trial, Truth
from fedveil.audit.measures import FALSE_ALARMS, Accuracy, ClassMeasure, Fit, Labels, Members, Numbers, Updates
from fedveil.audit.record import client_view, outsider_view, server_history, server_view
from fedveil.audit.subject import (
    Effort,
    Scene,
    Subject,
    alike,
    cut,
    enacted,
    less_colluders,
    unprotected_history,
    unprotected_model,
    unprotected_upload,
)
from fedveil.audit.views import ClientView, OutsiderView, Sent, ServerHistory, ServerView, View
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.downlink.architecture import Weights, draw
from fedveil.errors import ConfigError
from fedveil.runs.evaluation import predict
from fedveil.runs.job import job_from_config
from fedveil.work.messages import keeps_for_itself

SERVER = "the server"
OUTSIDER = "somebody on the wire"
CLIENT = "a client"
COALITION = "the server with some clients"
_FEWEST_ROUNDS = 3
_CHOICE = 0xCA9D


def all_trials(scene: Scene, tried: Iterable[Attack] | None = None) -> Iterator[Trial]:
    """Every trial of these attacks (all of the package's, unless some are given) that fits a run."""
    chosen = list(attacks().values() if tried is None else tried)
    yield from upload_trials(scene, chosen)
    yield from model_trials(scene, chosen)


def _fits(attack: Attack, subject: Subject, *, head: bool) -> bool:
    there = {
        "classes": subject.classes,
        "pictures": subject.pictures,
        "numbers": subject.test.x.is_floating_point(),
        "head noise": head,
        "veil": not subject.held and subject.job.scheme.downlink.traced,
        "sketch": subject.job.scheme.downlink.spared(subject.job.architecture) > 0,
        "private head": keeps_for_itself(subject.job.scheme.work),
    }
    return all(there[need] for need in (*attack.needs, *ASSETS[attack.asset].needs))


def _grants(public: Dataset, attack: Attack) -> dict[str, Tensor]:
    """What the auditor lets an attack know besides: of the half of the held-out data that it is not asked about."""
    given = {name: {f"{name}.x": public.x.cpu(), f"{name}.y": public.y.cpu()} for name in attack.granted}
    return {name: tensor for parts in given.values() for name, tensor in parts.items()}


@dataclass(frozen=True)
class SeenUpload:
    """Where an upload is found in a record."""

    client: int
    round: int
    attempt: int
    cohort: tuple[int, ...]


def uploads_of(subject: Subject) -> list[SeenUpload]:
    """Every recorded upload, one round after the other."""
    record = subject.record
    asked = {(entry.round, entry.attempt): entry.to for entry in record.find(kind="request", phase="train")}
    return [
        SeenUpload(entry.client, entry.round, entry.attempt, tuple(sorted(asked[entry.round, entry.attempt])))
        for entry in record.find(kind="reply", phase="train")
        if entry.client is not None
    ]


def upload_trials(scene: Scene, tried: Iterable[Attack]) -> Iterator[Trial]:
    """Trials on uploads; none where the server holds no model, for it then reads no gradient."""
    subject = scene.close
    chosen = [attack for attack in tried if MODEL not in attack.sees]
    if subject.held or not chosen or not (uploads := uploads_of(subject)):
        return
    if subject.config.secret_sampling:
        return  # nobody knows which records were in an upload, so nothing can be scored
    shown = _Uploads(scene, uploads)
    for sight, exhibit in shown.exhibits({sight for attack in chosen for sight in attack.sees}):
        for attack in chosen:
            if sight in attack.sees and _fits(attack, subject, head=shown.bare_tensors):
                yield shown.trial(attack, sight, exhibit)


@dataclass(frozen=True, eq=False)
class _Exhibit:
    """What is shown to attacks that see it: by whom, in words, of how many samples each attempt is."""

    where: str
    adversary: str
    seen: str
    attempts: Sequence[Attempt]
    samples: int
    settings: Settings = field(default_factory=dict)
    adaptive: bool = False


class _Uploads:
    def __init__(self, scene: Scene, uploads: Sequence[SeenUpload]) -> None:
        self.scene = scene
        self.subject = scene.close
        self.facts = scene.close.record.facts
        self.uploads = uploads
        self.masked = not self.subject.job.scheme.readable
        self.largest = max(len(self.truth(upload)["y"]) for upload in uploads)
        self.sent = self.view(uploads[0]).broadcast
        self.bare_tensors = not self.masked and self.sent is not None and self.sent.head is not None
        self.of = f"of {self.largest} sample{'s' * (self.largest != 1)}"

    def truth(self, upload: SeenUpload, clients: Sequence[int] | None = None) -> Truth:
        """The samples behind an upload, or behind several clients' of that round."""
        parts = [self.subject.batch(client, round=upload.round) for client in clients or (upload.client,)]
        return {"x": torch.cat([x for x, _ in parts]).cpu(), "y": torch.cat([y for _, y in parts]).cpu()}

    def view(self, upload: SeenUpload, colluders: Sequence[int] = ()) -> ServerView:
        return server_view(
            self.subject.record, upload.client, round=upload.round, attempt=upload.attempt, colluders=colluders
        )

    def trial(self, attack: Attack, sight: str, exhibit: _Exhibit) -> Trial:
        effort, base = self.scene.effort, self.scene.settings
        measure = self._measure(attack.asset, exhibit.samples)
        attempts = exhibit.attempts[: effort.attempts if attack.slow else effort.easy_attempts]
        if isinstance(measure, Labels) and exhibit.samples <= MOST_READ:  # of more nothing is read
            attempts = self._readings(sight, exhibit, measure)
        public, _ = self.scene.run.halves()
        # Who has the victim's sample among its own has no need to rebuild it.
        apart = public.subset(self.scene.run.alone(public.x).nonzero().flatten()) if attack.granted else public
        known = _grants(apart, attack)
        return Trial(
            f"{exhibit.where}/{attack.name}",
            exhibit.adversary,
            attack.asset,
            attack.name,
            exhibit.seen,
            measure,
            tuple(_granted(attempt, known) if known else attempt for attempt in attempts),
            settings={**base, **exhibit.settings},
            twin_settings=base,
            adaptive=attack.adaptive or exhibit.adaptive,
            taken_out=len(public) - len(apart),
        )

    def _readings(self, sight: str, exhibit: _Exhibit, measure: Labels) -> list[Attempt]:
        """Attempts on different samples: as many as it takes to tell one who reads every label from a lucky guess.

        Where one class is frequent, that is more than there are uploads, and more are replayed.
        """
        wanted = max(len(exhibit.attempts), measure.attempts)
        attempts: list[Attempt] = []
        seen: set[bytes] = set()
        further = (attempt for subject in self.scene.further() for attempt in self._again(subject, sight))
        for attempt in itertools.chain(exhibit.attempts, further):
            if len(attempts) == wanted:
                break
            mark = attempt.truth["x"].numpy().tobytes()
            if mark not in seen:
                attempts.append(attempt)
            seen.add(mark)
        return attempts

    def _again(self, subject: Subject, sight: str) -> Iterator[Attempt]:
        shown = _Uploads(replace(self.scene, close=subject), uploads_of(subject))
        return (attempt for _, exhibit in shown.exhibits({sight}) for attempt in exhibit.attempts)

    def _measure(self, asset: str, samples: int) -> Measure:
        if asset == "data":
            return self.scene.likeness
        _, asked = self.scene.run.halves()
        return Labels(asked.y.cpu().bincount(minlength=self.facts.outputs) / len(asked), samples)

    def exhibits(self, wanted: Collection[str]) -> Iterator[tuple[str, _Exhibit]]:
        """Whatever of the run can be seen, by sight; what nobody wants is not made."""
        open_or_masked = "masked upload" if self.masked else "upload"
        if {open_or_masked, "bare tensors"} & set(wanted):
            attempts = self._alone()
            seen = f"one upload {self.of}" + (" under masks" if self.masked else "")
            yield open_or_masked, _Exhibit("server", SERVER, seen, attempts, self.largest)
            if self.bare_tensors:
                beside = f"what travels beside one upload's gradient, {self.of}"
                yield "bare tensors", _Exhibit("server", SERVER, beside, attempts, self.largest)
        for sight, shown in (("sum", self._sum), ("rounds", self._rounds), ("coalition", self._coalitions)):
            if sight in wanted:
                yield from ((sight, exhibit) for exhibit in shown())
        on_the_wire = "bare tensors on the wire" if self.bare_tensors else "wire"
        if on_the_wire in wanted and self.sent is not None:
            yield on_the_wire, self._wire()

    def _alone(self) -> list[Attempt]:
        """One client's upload, by the server alone."""
        return [
            Attempt(view, unprotected_upload(self.subject, view), self.truth(upload))
            for upload in self.uploads[: self.scene.effort.easy_attempts]
            for view in (self.view(upload),)
        ]

    def _sum(self) -> Iterator[_Exhibit]:
        """The sum of all uploads, which masks and noise that cancels leave in the open."""
        upload = self.uploads[0]
        view, truth = self.view(upload), self.truth(upload, upload.cohort)
        twin = unprotected_upload(self.subject, view)
        if view.summed is None or alike(view, twin):
            return  # an upload that lies open says more than any sum
        samples = len(truth["y"])
        seen = f"the sum of {len(upload.cohort)} uploads ({samples} samples)"
        attempt = Attempt(view, twin, truth, twin_truth=self.truth(upload))
        yield _Exhibit("server/sum", SERVER, seen, [attempt], samples, {"target": "sum", "batch": samples})

    def _rounds(self) -> Iterator[_Exhibit]:
        """Many rounds' uploads of one client that trains on the same samples each time."""
        came = Counter(upload.client for upload in self.uploads)
        often = [client for client, rounds in came.most_common(self.scene.effort.attempts) if rounds >= _FEWEST_ROUNDS]
        if self.masked or self.subject.config.batch_size != 0 or not often:
            return
        attempts = []
        for client in often:
            history = server_history(self.subject.record, client)
            first = next(upload for upload in self.uploads if upload.client == client)
            attempts.append(Attempt(history, unprotected_history(self.subject, history), self.truth(first)))
        still = self.scene.replayed and self.facts.returns == "gradient"
        seen = f"{came[often[0]]} of {self.scene.run.config.rounds} rounds' uploads of one client, {self.of}"
        yield _Exhibit("server/rounds", SERVER, seen + ", the model standing still" * still, attempts, self.largest)

    def _coalitions(self) -> Iterator[_Exhibit]:
        """The server and τ clients, who take off what they share with the victim, or put into the sum."""
        uplink, recorded = self.subject.job.scheme.uplink, self.subject.record.clients
        if uplink.introduction != "keys" or len(recorded) < 2:
            return  # clients share nothing: they can add nothing to what the server sees
        if self.masked and self.subject.job.scheme.plan is not None:
            return  # colluders would take off their own noise too, which no record holds; the ledger counts it
        others = min(len(set(recorded) & set(upload.cohort)) for upload in self.uploads) - 1
        if not others:
            return
        for count in sorted({max(1, others // 2), others}):
            adversary = f"the server with {count} of {self.subject.config.clients} clients"
            attempts, seen, samples = [], "", self.largest
            for upload in self.uploads[: self.scene.effort.easy_attempts]:
                there = [each for each in recorded if each in upload.cohort and each != upload.client]
                attempt, seen, samples = self._less(upload, there[:count])
                attempts.append(attempt)
            yield _Exhibit(f"server+{count}", adversary, seen, attempts, samples, adaptive=True)

    def _less(self, upload: SeenUpload, colluders: list[int]) -> tuple[Attempt, str, int]:
        view = self.view(upload, colluders)
        twin = unprotected_upload(self.subject, view)
        if not self.masked:
            seen = f"one upload {self.of}, less what the others share with it"
            return Attempt(view, twin, self.truth(upload)), seen, self.largest
        honest = [client for client in upload.cohort if client not in colluders]
        view, samples = less_colluders(self.subject, view, cohort=upload.cohort)
        seen = f"the sum less the others' own parts ({samples} sample{'s' * (samples != 1)})"
        truth, settings = self.truth(upload, honest), {"target": "sum", "batch": samples}
        return Attempt(view, twin, truth, settings, self.truth(upload)), seen, samples

    def _wire(self) -> _Exhibit:
        """Somebody who reads every message and knows no secret: what encryption in transit has to hide."""
        everything = outsider_view(self.subject.record)
        attempts = []
        for upload in self.uploads[: self.scene.effort.easy_attempts]:
            heard = tuple(each for each in everything.messages if each.round in (0, upload.round))
            twin = unprotected_upload(self.subject, self.view(upload))
            where = {"client": upload.client, "round": upload.round}
            attempts.append(Attempt(OutsiderView(everything.facts, heard), twin, self.truth(upload), where))
        seen = f"messages both ways, no secret; one upload {self.of}"
        return _Exhibit("wire", OUTSIDER, seen, attempts, self.largest)


def _granted(attempt: Attempt, known: dict[str, Tensor]) -> Attempt:
    twin = None if attempt.twin is None else _knowing(attempt.twin, known)
    return replace(attempt, view=_knowing(attempt.view, known), twin=twin)


def _knowing(view: View, known: dict[str, Tensor]) -> View:
    if isinstance(view, ServerHistory):
        return ServerHistory(tuple(replace(seen, known=known) for seen in view.rounds))
    return replace(view, known=known)


def model_trials(scene: Scene, tried: Iterable[Attack] | None = None) -> Iterator[Trial]:
    """Trials on the model a client holds after the last recorded round."""
    every = attacks().values() if tried is None else tried
    chosen = [attack for attack in every if MODEL in attack.sees]
    if not chosen:
        return
    shown = _Model(scene)
    for attack in chosen:
        if _fits(attack, scene.run, head=shown.head):
            yield shown.trial(attack)
            if shown.head and "adaptive" in attack.settings:
                yield shown.trial(attack, adaptive=True)


@dataclass(frozen=True, eq=False)
class _Case:
    """What is asked of attacks after one asset; `unprotected` where that figure needs no attack."""

    measure: Measure
    truth: Truth
    known: dict[str, Tensor] = field(default_factory=dict)
    unprotected: Score | None = None
    settings: Settings = field(default_factory=dict)
    taken_out: int = 0
    seen: str = ""
    """What is attacked, where that is not the last model."""


class _Model:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.run = scene.run
        self.client = _attacker(scene)
        self.public, self.asked = scene.run.halves()
        view = client_view(self.run.record, self.client, data=_cpu(self.run.own(self.client)))
        self.held = self.run.held
        if self.held:
            view = replace(view, known=_weights(scene).named("weights."))
        self.view = view
        last = None if self.held else view.broadcasts[-1]
        self.head = last is not None and last.broadcast.head is not None
        when = "at the end" if last is None else f"in round {last.round}"
        self.seen = f"the model it {'holds' if self.held else 'receives'} {when}"
        self.many = f"the models it receives in {len({sent.round for sent in view.broadcasts})} rounds"

    def trial(self, attack: Attack, *, adaptive: bool = False) -> Trial:
        case = self._case(attack)
        known = {**self.view.known, **case.known, **_grants(self.public, attack)}
        view = replace(self.view, known=known)
        told = {name: value for name, value in case.settings.items() if name in attack.settings}
        settings = {**self.scene.settings, **told}
        return Trial(
            f"client/{attack.name}{'/adaptive' * adaptive}",
            CLIENT,
            attack.asset,
            attack.name,
            case.seen or (self.many if "sketch" in attack.needs else self.seen),
            case.measure,
            (Attempt(view, None if case.unprotected is not None else self._twin(view), case.truth),),
            settings={**settings, **({"adaptive": True} if adaptive else {})},
            twin_settings=settings,
            adaptive=adaptive or attack.adaptive,
            unprotected=case.unprotected,
            taken_out=case.taken_out,
        )

    def _case(self, attack: Attack) -> _Case:
        if attack.asset == "the model's function":
            # Whoever has labels can train without any model: only what a probe gets beyond that is the model's.
            alone = attack.learns and self.run.classes
            return replace(self._function, measure=self._without_a_model) if alone else self._function
        cases = {
            "the model's parameters": self._parameters,
            "the server's updates": self._updates,
            "members": self._members,
        }
        return cases.get(attack.asset, self._classes)()

    def _twin(self, view: ClientView) -> ClientView | None:
        """What the client would have without protection: the model as it is, from a training without noise."""
        plain = self.scene.noiseless(None if self.held else view.broadcasts[-1].round)
        if plain is None:
            return None if self.held else unprotected_model(self.run, view)
        client = plain.record.clients[0]
        sent = client_view(plain.record, client, data=_cpu(self.run.own(self.client)))
        return replace(
            sent, known={name: tensor for name, tensor in view.known.items() if not name.startswith("weights.")}
        )

    @cached_property
    def _function(self) -> _Case:
        """What the model says to queries: as received, calibrated, by a head of one's own."""
        y = self.asked.y.cpu()
        measure: Measure = Fit()
        if self.run.classes:
            measure = Accuracy("accuracy", chance=float(y.bincount().max()) / len(y))
        true = measure.score([{"the true model": self._true_outputs()}], [{"y": y}])
        return _Case(measure, {"y": y}, {"queries": self.asked.x.cpu()}, true)

    @cached_property
    def _without_a_model(self) -> Measure:
        """Accuracy beside that of the same linear probe on the inputs themselves, with the client's own labels."""
        x, y = _cpu(self.run.own(self.client))
        probe = fit_probe(x.flatten(1), y, outputs=self.run.job.facts.outputs)
        guess = probe(self.asked.x.cpu().flatten(1)).argmax(1)
        return Accuracy("accuracy", chance=float((guess == self.asked.y.cpu()).double().mean()))

    def _parameters(self) -> _Case:
        weights = _weights(self.scene) if self.held else self._server().weights
        assert weights is not None
        return _Case(
            Numbers(self.run.record.facts.architecture()),
            {"parameters": weights.parameters.double().cpu()},
            unprotected=Score(1.0, more={"exact": 1.0, "signs": 1.0}),
        )

    def _updates(self) -> _Case:
        """What the server did between two rounds; and the model it began with, where that was recorded."""
        downlink = self.run.job.scheme.downlink
        architecture = self.run.job.architecture.to(device=torch.device("cpu"))
        shifted = downlink.shifted
        told = {"family": downlink.family, "streams": downlink.streams, "shifted": shifted}

        def true(sent: Sent) -> Tensor:
            return as_sent(architecture, self._true_parameters(sent), shifted=shifted)

        sent, known = self.view.broadcasts, {}
        truth: dict[str, Tensor] = {}
        covered: tuple[str, ...] = ()
        seen = ""
        if len({each.round for each in sent}) > 1:  # else the attack says that there is nothing to match
            pair = pair_of(sent)
            seen = f"the models it receives in rounds {pair[0].round} and {pair[1].round}"
            for name, each in zip(("before", "after"), pair, strict=True):
                model = received(architecture, each.broadcast, shifted=shifted)
                truth |= {name: true(each), f"sent {name}": model.flat}
                covered = model.covered
            if sent[0].round == 1:
                known[FIRST] = self._true_parameters(sent[0])
                truth |= {"first": true(sent[0]), "last": true(sent[-1])}
        return _Case(Updates(architecture, covered), truth, known, Score(1.0), told, seen=seen)

    def _members(self) -> _Case:
        """Who was among the others' training samples; half of the candidates are known to the attacker."""
        known, member, taken_out = self.candidates
        return _Case(Members(), {"member": member}, known, taken_out=taken_out)

    def _classes(self) -> _Case:
        """What the classes look like."""
        classes = self.run.job.facts.outputs
        private, chance = self.run.own(0, most=self.run.most)[0].cpu(), 1.0 / classes
        measure = ClassMeasure("recognised", chance=chance, judge=self.scene.judge, private=private)
        # Of two classes, four recognised pictures may be luck.
        fewest = math.ceil(math.log(FALSE_ALARMS) / math.log(min(chance, 0.5)))
        return _Case(measure, {}, settings={"per_class": max(self.scene.effort.per_class, -(-fewest // classes))})

    def _server(self, sent: Sent | None = None) -> ServerView:
        """What the server held when it sent a model, the last recorded one by default."""
        last = self.view.broadcasts[-1] if sent is None else sent
        return server_view(self.run.record, self.client, round=last.round, attempt=last.attempt)

    def _true_parameters(self, sent: Sent) -> Tensor:
        """What the server's model of a round was."""
        weights = self._server(sent).weights
        assert weights is not None
        return weights.parameters.double().cpu()

    def _true_outputs(self) -> Tensor:
        """What the server's model of that round says to the queries."""
        model = self.run.model if self.held else self._server().model().eval()
        x = self.asked.x.cpu()
        return predict(model, x.to(next(model.parameters()).dtype) if x.is_floating_point() else x).cpu()

    @cached_property
    def candidates(self) -> tuple[dict[str, Tensor], Tensor, int]:
        """Candidates with half of their memberships, the truth about the other half, and how many could be none.

        Inputs that occur more than once in the data are taken out: a member's may be a stranger's too, or public.
        """
        generator = torch.Generator().manual_seed(_CHOICE + self.scene.effort.seed)
        cohort = self.run.job.cohort
        took_part = {client for round in range(self.run.config.rounds) for client in cohort.draw(round)}
        if cohort.shuffled:  # by beacons that only the record tells of
            took_part = {client for asked in self.run.record.find(kind="request") if asked.round for client in asked.to}
        others = sorted(took_part - {self.client}) or [self.client]
        x, y = _cpu(self.run.samples_of(others))
        asked_x, asked_y = self.asked.x.cpu(), self.asked.y.cpu()
        ours, theirs = self.run.alone(x), self.run.alone(asked_x)
        taken_out = int((~ours).sum() + (~theirs).sum())
        x, y, asked_x, asked_y = x[ours], y[ours], asked_x[theirs], asked_y[theirs]
        most = min(self.scene.effort.candidates, self.run.most)
        inside, outside = _paired(y, asked_y, most=most, generator=generator)
        count = len(inside)
        order = torch.randperm(2 * count, generator=generator)
        both_x = torch.cat([x[inside], asked_x[outside]])[order]
        both_y = torch.cat([y[inside], asked_y[outside]])[order]
        truth = (torch.arange(2 * count) < count).long()[order]
        told = truth.clone()
        for kind in (0, 1):
            rows = (truth == kind).nonzero().flatten()
            told[rows[len(rows) // 2 :]] = UNKNOWN
        known = {
            "candidates.x": both_x,
            "candidates.y": both_y,
            "candidates.membership": told,
        }
        return known, truth[told == UNKNOWN], taken_out


def _paired(members: Tensor, others: Tensor, *, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Equally many rows of both with the same labels: whose labels differ could be told apart without any model."""
    inside, outside = [members.new_empty(0)], [members.new_empty(0)]
    for label in range(int(torch.cat([members, others, members.new_zeros(1)]).max()) + 1):
        ours, theirs = ((indices == label).nonzero().flatten() for indices in (members, others))
        count = min(len(ours), len(theirs))
        inside.append(ours[torch.randperm(len(ours), generator=generator)[:count]])
        outside.append(theirs[torch.randperm(len(theirs), generator=generator)[:count]])
    left, right = torch.cat(inside), torch.cat(outside)
    kept = torch.randperm(len(left), generator=generator)[: min(most, len(left)) // 2 * 2]
    return left[kept], right[kept]


def _attacker(scene: Scene) -> int:
    """A recorded client; of those that are sent models, one that has the newest and answered."""
    record = scene.run.record
    answered = [entry for entry in record.find(kind="reply", phase="train") if entry.client is not None]
    if not answered:
        return record.clients[0]
    newest = max((entry.round, entry.attempt) for entry in answered)
    return min(
        entry.client for entry in answered if (entry.round, entry.attempt) == newest and entry.client is not None
    )


def _weights(scene: Scene) -> Weights:
    """The true model's values, as clients that hold it have them."""
    job = scene.run.job
    example = scene.run.test.x[:2].cpu()
    model = copy.deepcopy(scene.run.model).cpu().train()  # the run's own stays in evaluation mode
    return draw(model, example, traced=job.scheme.downlink.traced)[1]


def _cpu(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].cpu(), pair[1].cpu()


@dataclass(frozen=True, eq=False)
class Reference:
    """A trial in which an attack has to pass a figure before it is believed."""

    what: str
    trial: Trial
    threshold: float


@dataclass(frozen=True, eq=False)
class References:
    """Where attacks prove themselves: ordinary trials of small unprotected runs, made when asked for, and shared."""

    scratch: Path
    effort: Effort
    _scenes: list[tuple[ReferenceRun, Scene]] = field(default_factory=list)

    def of(self, attack: Attack | str) -> Reference | None:
        """An attack's reference, on one attempt."""
        tried = attacks()[attack] if isinstance(attack, str) else attack
        if tried.reference is None:
            return None
        scene = self._scene(tried.reference)
        for trial in all_trials(scene, [tried]):
            return Reference(tried.reference.what, replace(trial, attempts=trial.attempts[:1]), tried.asked)
        raise ConfigError(f"The attack {tried.name!r} is not tried in its own reference run ({tried.reference.what}).")

    def _scene(self, run: ReferenceRun) -> Scene:
        for known, scene in self._scenes:
            if known == run:
                return scene
        given = {"dataset": "digits", "seed": 3, "record": True, "evaluate_every": 0, **run.settings}
        job = job_from_config(RunConfig.from_mapping(given, where="a reference run"))
        if run.samples is not None:
            job = cut(job, samples=run.samples)
        folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.scratch))
        subject = enacted(job, folder / "record")
        scene = Scene(subject, subject, False, self.effort, judged=False)
        self._scenes.append((run, scene))
        return scene


_HELD = "the server holds no model, and what it sees is hidden or noised: no attack on that is built; see ledger.json"
_TOLD = (
    "a client that sides with the server tells it the model and, under a cipher, the key: see ledger.json for what is "
    "then open"
)
_SECRET = "which records were in a secret batch is not recorded, so that nothing can be scored; see ledger.json"
_OWN_NOISE = "colluders would take their own noise off the sum, which no record holds; the ledger counts them"
_SUCCESSIVE = (
    "two successive models less a client's own part are the others' sum; where few take part that could say much, "
    "and no attack on it is built"
)


def missing_trials(scene: Scene) -> Iterator[Finding]:
    """Every adversary and asset of which this audit measures nothing, or not all."""
    scheme = scene.run.job.scheme
    if scene.run.held:
        yield _untried("server", SERVER, _HELD)
        yield _untried("coalition", COALITION, _TOLD)
        yield _untried("wire", OUTSIDER, _HELD)
    elif scene.run.config.secret_sampling:
        yield _untried("server", SERVER, _SECRET)
        yield _untried("wire", OUTSIDER, _SECRET)
    elif not scheme.readable and scheme.plan is not None:
        yield _untried("coalition", COALITION, _OWN_NOISE)
    yield _untried("client", CLIENT, _SUCCESSIVE)


def _untried(where: str, adversary: str, reason: str) -> Finding:
    return Finding(f"{where}/not tried", adversary, "data", NOT_TRIED, "–", False, "–", "not applicable", reason)
