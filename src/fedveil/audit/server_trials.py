"""Trials of those who see uploads: the server, the server with clients on its side, and somebody on the wire."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fedveil.audit.findings import Attempt, Measure, Settings, Trial, Truth
from fedveil.audit.measures import Labels, blind_labels
from fedveil.audit.record import outsider_view, server_history, server_view
from fedveil.audit.scene import Scene
from fedveil.audit.subject import Subject, alike, less_colluders, unprotected_history, unprotected_upload
from fedveil.audit.views import OutsiderView, ServerView

SERVER = "the server"
OUTSIDER = "somebody on the wire"
_FEWEST_ROUNDS = 3
SEARCHES = ("dlg", "idlg", "inverting", "generative")
READERS = ("closed-form", "idlg")
"""The two that are tried on every kind of upload: exact where the first layer is linear, and a search."""


@dataclass(frozen=True)
class Upload:
    """Where an upload is found in a record."""

    client: int
    round: int
    attempt: int
    cohort: tuple[int, ...]


def uploads_of(subject: Subject) -> list[Upload]:
    """Every recorded upload, one round after the other."""
    record = subject.record
    asked = {(one.round, one.attempt): one.to for one in record.find(kind="request", phase="train")}
    return [
        Upload(one.client, one.round, one.attempt, tuple(sorted(asked[one.round, one.attempt])))
        for one in record.find(kind="reply", phase="train")
        if one.client is not None
    ]


def upload_trials(scene: Scene) -> Iterator[Trial]:
    """Every trial on uploads; none where the server holds no model, for it then reads no gradient."""
    subject = scene.close
    if subject.held or not (uploads := uploads_of(subject)):
        return
    if subject.config.secret_sampling:
        return  # nobody knows which records were in an upload, so nothing can be scored
    maker = _Maker(scene, uploads)
    yield from maker.alone()
    yield from maker.of_the_sum()
    yield from maker.over_rounds()
    yield from maker.with_clients()
    yield from maker.on_the_wire()


class _Maker:
    def __init__(self, scene: Scene, uploads: Sequence[Upload]) -> None:
        self.scene = scene
        self.subject = scene.close
        self.facts = scene.close.record.facts
        self.uploads = uploads
        self.masked = not self.subject.job.scheme.readable
        self.largest = max(len(self.truth(one)["y"]) for one in uploads)
        self.sent = self.view(uploads[0]).broadcast
        self.bare_tensors = not self.masked and self.sent is not None and self.sent.head is not None
        self.of = f"of {self.largest} sample{'s' * (self.largest != 1)}"

    def truth(self, upload: Upload, clients: Sequence[int] | None = None) -> Truth:
        """The samples behind an upload, or behind several clients' of that round."""
        parts = [self.subject.batch(one, round=upload.round) for one in clients or (upload.client,)]
        return {"x": torch.cat([x for x, _ in parts]).cpu(), "y": torch.cat([y for _, y in parts]).cpu()}

    def view(self, upload: Upload, colluders: Sequence[int] = ()) -> ServerView:
        return server_view(
            self.subject.record, upload.client, round=upload.round, attempt=upload.attempt, colluders=colluders
        )

    def attempts(self, attack: str) -> int:
        effort = self.scene.effort
        return effort.attempts if attack in SEARCHES else effort.easy_attempts

    def trial(
        self,
        where: str,
        adversary: str,
        attack: str,
        seen: str,
        attempts: Sequence[Attempt],
        *,
        asset: str = "data",
        measure: Measure | None = None,
        settings: Settings | None = None,
        adaptive: bool = False,
    ) -> Trial:
        base = self.scene.settings
        return Trial(
            f"{where}/{attack}",
            adversary,
            asset,
            attack,
            seen,
            measure or self.scene.likeness,
            tuple(self._granted(one) if attack == "generative" else one for one in attempts),
            settings={**base, **(settings or {})},
            twin_settings=base,
            adaptive=adaptive,
        )

    def _granted(self, attempt: Attempt) -> Attempt:
        """The attempt of one who also has public pictures."""
        public, _ = self.scene.run.halves()
        known = {"public.x": public.x, "public.y": public.y}
        assert isinstance(attempt.view, ServerView)
        assert isinstance(attempt.twin, ServerView)
        return replace(attempt, view=replace(attempt.view, known=known), twin=replace(attempt.twin, known=known))

    def alone(self) -> Iterator[Trial]:
        """One client's upload, by the server alone."""
        seen = f"one upload {self.of}" + (" under masks" if self.masked else "")
        every = [
            Attempt(view, unprotected_upload(self.subject, view), self.truth(one))
            for one in self.uploads[: self.scene.effort.easy_attempts]
            for view in (self.view(one),)
        ]
        names: tuple[str, ...] = READERS
        if not self.masked:
            names = ("closed-form", *SEARCHES) if self.subject.pictures else ("closed-form", "dlg", "idlg", "inverting")
            if self.subject.classes:
                measure = Labels("labels told", chance=self._blind(self.largest))
                yield self.trial("server", SERVER, "labels", seen, every, asset="labels", measure=measure)
        for name in names:
            yield self.trial("server", SERVER, name, seen, every[: self.attempts(name)])
        if self.bare_tensors:
            beside = f"what travels beside one upload's gradient, {self.of}"
            yield self.trial("server", SERVER, "phi", beside, every[: self.attempts("phi")], adaptive=True)

    def of_the_sum(self) -> Iterator[Trial]:
        """The sum of all uploads, which masks and noise that cancels leave in the open."""
        one = self.uploads[0]
        view, truth = self.view(one), self.truth(one, one.cohort)
        twin = unprotected_upload(self.subject, view)
        if view.summed is None or alike(view, twin):
            return  # an upload that lies open says more than any sum
        samples = len(truth["y"])
        seen = f"the sum of {len(one.cohort)} uploads ({samples} samples)"
        attempt = Attempt(view, twin, truth, twin_truth=self.truth(one))
        settings = {"target": "sum", "batch": samples}
        if self.subject.classes:
            measure = Labels("labels told", chance=self._blind(samples))
            yield self.trial(
                "server/sum", SERVER, "labels", seen, [attempt], asset="labels", measure=measure, settings=settings
            )
        for name in READERS:
            yield self.trial("server/sum", SERVER, name, seen, [attempt], settings=settings)

    def over_rounds(self) -> Iterator[Trial]:
        """Many rounds' uploads of one client that trains on the same samples each time."""
        came = Counter(one.client for one in self.uploads)
        often = [client for client, rounds in came.most_common(self.scene.effort.attempts) if rounds >= _FEWEST_ROUNDS]
        if self.masked or self.subject.config.batch_size != 0 or not often:
            return
        found, rounds = [], came[often[0]]
        for client in often:
            history = server_history(self.subject.record, client)
            first = next(one for one in self.uploads if one.client == client)
            found.append(Attempt(history, unprotected_history(self.subject, history), self.truth(first)))
        still = self.scene.replayed and self.facts.returns == "gradient"
        total = self.scene.run.config.rounds
        seen = f"{rounds} of {total} rounds' uploads of one client, {self.of}" + ", the model standing still" * still
        yield self.trial("server/rounds", SERVER, "averaging", seen, found, adaptive=True)

    def with_clients(self) -> Iterator[Trial]:
        """The server and τ clients, who take off what they share with the victim, or put into the sum."""
        scheme, recorded = self.subject.job.scheme, self.subject.record.clients
        if scheme.uplink.introduction != "keys" or len(recorded) < 2:
            return  # clients share nothing: they can add nothing to what the server sees
        if self.masked and scheme.uplink.plan is not None:
            return  # colluders would take off their own noise too, which no record holds; the ledger counts it
        others = min(len(set(recorded) & set(one.cohort)) for one in self.uploads) - 1
        if not others:
            return
        for count in sorted({max(1, others // 2), others}):
            adversary = f"the server with {count} of {self.subject.config.clients} clients"
            found, seen = [], ""
            for one in self.uploads[: max(map(self.attempts, READERS))]:
                others_there = [each for each in recorded if each in one.cohort and each != one.client]
                attempt, seen = self._less(one, others_there[:count])
                found.append(attempt)
            for name in READERS:
                some = found[: self.attempts(name)]
                yield self.trial(f"server+{count}", adversary, name, seen, some, adaptive=True)

    def _less(self, upload: Upload, colluders: list[int]) -> tuple[Attempt, str]:
        view = self.view(upload, colluders)
        twin = unprotected_upload(self.subject, view)
        if not self.masked:
            seen = f"one upload {self.of}, less what the others share with it"
            return Attempt(view, twin, self.truth(upload)), seen
        honest = [one for one in upload.cohort if one not in colluders]
        view, samples = less_colluders(self.subject, view, cohort=upload.cohort)
        seen = f"the sum less the others' own parts ({samples} sample{'s' * (samples != 1)})"
        truth, settings = self.truth(upload, honest), {"target": "sum", "batch": samples}
        return Attempt(view, twin, truth, settings, self.truth(upload)), seen

    def on_the_wire(self) -> Iterator[Trial]:
        """Somebody who reads every message and knows no secret: what encryption in transit has to hide."""
        if self.sent is None:
            return
        names = ("phi",) if self.bare_tensors else READERS
        everything = outsider_view(self.subject.record)
        found = []
        for one in self.uploads[: max(map(self.attempts, names))]:
            heard = tuple(each for each in everything.messages if each.round in (0, one.round))
            twin = unprotected_upload(self.subject, self.view(one))
            where = {"client": one.client, "round": one.round}
            found.append(Attempt(OutsiderView(everything.facts, heard), twin, self.truth(one), where))
        seen = f"messages both ways, no secret; one upload {self.of}"
        for name in names:
            yield self.trial("wire", OUTSIDER, name, seen, found[: self.attempts(name)], adaptive=name == "phi")

    def _blind(self, batch: int) -> float:
        _, asked = self.scene.run.halves()
        return blind_labels(asked.y.cpu().bincount() / len(asked), batch=batch)
