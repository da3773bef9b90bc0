"""Trials of a client: what the model it receives tells it about the server's model, and about others' data."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fedveil.audit.attacks.membership import UNKNOWN
from fedveil.audit.attacks.probe import fit_probe
from fedveil.audit.findings import Attempt, Measure, Score, Settings, Trial, Truth
from fedveil.audit.measures import Accuracy, Classes, Fit, Members, Numbers
from fedveil.audit.record import client_view, server_view
from fedveil.audit.scene import Scene
from fedveil.audit.subject import unprotected_model
from fedveil.audit.views import ClientView, ServerView, weights_by_name
from fedveil.downlink.architecture import Weights, draw
from fedveil.runs.evaluation import predict

CLIENT = "a client"
_CHOICE = 0xCA9D
MEMBERSHIP = ("membership", "membership-layers", "likelihood")
_TAKES_OFF = ("calibration", "probe", "parameters")


def model_trials(scene: Scene, wanted: Collection[str] = ()) -> Iterator[Trial]:
    """Every trial on the model a client holds after the last recorded round; costly ones only if they are wanted."""
    maker = _Maker(scene)
    yield from maker.function()
    if scene.run.classes and _any(MEMBERSHIP, wanted):
        yield from maker.members()
    if scene.run.classes and scene.run.pictures and _any(("class-inversion",), wanted):
        yield from maker.pictures()


def _any(attacks: Collection[str], wanted: Collection[str]) -> bool:
    return not wanted or bool(set(attacks) & set(wanted))


class _Maker:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.run = scene.run
        self.client = _attacker(scene)
        self.public, self.asked = scene.run.halves()
        view = client_view(self.run.record, self.client, data=_cpu(self.run.own(self.client)))
        self.held = self.run.held
        if self.held:
            named = weights_by_name(_weights(scene))
            view = replace(view, known={f"weights.{name}": value for name, value in named.items()})
        self.view = view
        last = None if self.held else view.broadcasts[-1]
        self.head = last is not None and last.broadcast.head is not None
        when = "at the end" if last is None else f"in round {last.round}"
        self.seen = f"the model it {'holds' if self.held else 'receives'} {when}"

    def trial(
        self,
        attack: str,
        *,
        asset: str,
        measure: Measure,
        truth: Truth,
        known: dict[str, Tensor],
        adaptive: bool = False,
        settings: Settings | None = None,
        unprotected: Score | None = None,
    ) -> Trial:
        view = replace(self.view, known={**self.view.known, **known})
        twin = None if unprotected is not None else self._twin(view)
        base = self.scene.settings
        return Trial(
            f"client/{attack}{'/adaptive' * adaptive}",
            CLIENT,
            asset,
            attack,
            self.seen,
            measure,
            (Attempt(view, twin, truth),),
            settings={**base, **(settings or {}), **({"adaptive": True} if adaptive else {})},
            twin_settings={**base, **(settings or {})},
            adaptive=adaptive or attack in _TAKES_OFF,
            unprotected=unprotected,
        )

    def _twin(self, view: ClientView) -> ClientView | None:
        """What the client would have without protection: the model as it is, from a training without noise."""
        plain = self.scene.noiseless(None if self.held else view.broadcasts[-1].round)
        if plain is None:
            return None if self.held else unprotected_model(self.run, view)
        client = plain.record.clients[0]
        sent = client_view(plain.record, client, data=_cpu(self.run.own(self.client)))
        return replace(sent, known={name: one for name, one in view.known.items() if not name.startswith("weights.")})

    def function(self) -> Iterator[Trial]:
        """The model's function: as received, calibrated, and by a head of one's own; and its numbers."""
        y = self.asked.y.cpu()
        truth, known = {"y": y}, {"queries": self.asked.x.cpu()}
        measure: Measure = Fit()
        if self.run.classes:
            measure = Accuracy("accuracy", chance=float(y.bincount().max()) / len(y))
        true = measure.score([{"the true model": self._true_outputs()}], [truth])
        yield self._use("received", measure, truth, known, true)
        if self.head:
            more = {"labelled.x": self.public.x.cpu(), "labelled.y": self.public.y.cpu()}
            yield self._use("calibration", measure, truth, {**known, **more}, true)
        if self.run.classes and self.run.test.x.is_floating_point():
            # Whoever has labels can train without any model: only what a probe gets beyond that is the model's.
            without = Accuracy("accuracy", chance=self._without_a_model())
            yield self._use("probe", without, truth, known, true)
        weights = _weights(self.scene) if self.held else self._server().weights
        assert weights is not None
        yield self.trial(
            "parameters",
            asset="the model's parameters",
            measure=Numbers(self.run.record.facts.blueprint()),
            truth={"parameters": weights.parameters.double().cpu()},
            known={},
            unprotected=Score(1.0, more={"exact": 1.0, "signs": 1.0}),
        )

    def _use(self, attack: str, measure: Measure, truth: Truth, known: dict[str, Tensor], unprotected: Score) -> Trial:
        asset = "the model's function"
        return self.trial(attack, asset=asset, measure=measure, truth=truth, known=known, unprotected=unprotected)

    def _without_a_model(self) -> float:
        """The accuracy of the same linear probe on the inputs themselves, with the client's own labels."""
        x, y = _cpu(self.run.own(self.client))
        probe = fit_probe(x.flatten(1), y, outputs=self.run.job.facts.outputs)
        guess = probe(self.asked.x.cpu().flatten(1)).argmax(1)
        return float((guess == self.asked.y.cpu()).double().mean())

    def _server(self) -> ServerView:
        """What the server held when it sent the last recorded model."""
        last = self.view.broadcasts[-1]
        return server_view(self.run.record, self.client, round=last.round, attempt=last.attempt)

    def _true_outputs(self) -> Tensor:
        """What the server's model of that round says to the queries."""
        model = self.run.model if self.held else self._server().model().eval()
        x = self.asked.x.cpu()
        return predict(model, x.to(next(model.parameters()).dtype) if x.is_floating_point() else x).cpu()

    def members(self) -> Iterator[Trial]:
        """Who was among the others' training samples; half of the candidates are known to the attacker."""
        known, member = self.candidates()
        truth = {"member": member}
        for attack in MEMBERSHIP:
            for adaptive in (False, True) if self.head else (False,):
                yield self.trial(
                    attack, asset="members", measure=Members(), truth=truth, known=known, adaptive=adaptive
                )

    def candidates(self) -> tuple[dict[str, Tensor], Tensor]:
        """Candidates with half of their memberships, and the truth about the other half."""
        generator = torch.Generator().manual_seed(_CHOICE + self.scene.effort.seed)
        cohort = self.run.job.cohort
        took_part = {one for round in range(self.run.config.rounds) for one in cohort.draw(round)}
        if cohort.shuffled:  # by beacons that only the record tells of
            took_part = {one for asked in self.run.record.find(kind="request") if asked.round for one in asked.to}
        others = sorted(took_part - {self.client}) or [self.client]
        x, y = _cpu(self.run.samples_of(others))
        inside, outside = _paired(y, self.asked.y.cpu(), most=self.scene.effort.candidates, generator=generator)
        count = len(inside)
        order = torch.randperm(2 * count, generator=generator)
        both_x = torch.cat([x[inside], self.asked.x.cpu()[outside]])[order]
        both_y = torch.cat([y[inside], self.asked.y.cpu()[outside]])[order]
        truth = (torch.arange(2 * count) < count).long()[order]
        told = truth.clone()
        for kind in (0, 1):
            rows = (truth == kind).nonzero().flatten()
            told[rows[len(rows) // 2 :]] = UNKNOWN
        known = {
            "candidates.x": both_x,
            "candidates.y": both_y,
            "candidates.membership": told,
            "public.x": self.public.x.cpu(),
            "public.y": self.public.y.cpu(),
        }
        return known, truth[told == UNKNOWN]

    def pictures(self) -> Iterator[Trial]:
        """What the classes look like, by a prior and the model."""
        outputs = self.run.job.facts.outputs
        measure = Classes("recognised", chance=1.0 / outputs, judge=self.scene.judge, private=self.run.own(0)[0].cpu())
        known = {"public.x": self.public.x.cpu()}
        settings = {"per_class": self.scene.effort.per_class}
        for adaptive in (False, True) if self.head else (False,):
            yield self.trial(
                "class-inversion",
                asset="what classes look like",
                measure=measure,
                truth={},
                known=known,
                adaptive=adaptive,
                settings=settings,
            )


def _paired(members: Tensor, others: Tensor, *, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Equally many rows of both with the same labels: whose labels differ could be told apart without any model."""
    inside, outside = [], []
    for label in range(int(max(members.max(), others.max())) + 1):
        ours, theirs = ((one == label).nonzero().flatten() for one in (members, others))
        count = min(len(ours), len(theirs))
        inside.append(ours[torch.randperm(len(ours), generator=generator)[:count]])
        outside.append(theirs[torch.randperm(len(theirs), generator=generator)[:count]])
    left, right = torch.cat(inside), torch.cat(outside)
    kept = torch.randperm(len(left), generator=generator)[: min(most, len(left)) // 2 * 2]
    return left[kept], right[kept]


def _attacker(scene: Scene) -> int:
    """A recorded client; of those that are sent models, one that has the newest and answered."""
    record = scene.run.record
    answered = [one for one in record.find(kind="reply", phase="train") if one.client is not None]
    if not answered:
        return record.clients[0]
    newest = max((one.round, one.attempt) for one in answered)
    return min(one.client for one in answered if (one.round, one.attempt) == newest and one.client is not None)


def _weights(scene: Scene) -> Weights:
    """The true model's values, as clients that hold it have them."""
    job = scene.run.job
    example = scene.run.test.x[:2].cpu()
    model = copy.deepcopy(scene.run.model).cpu().train()  # the run's own stays in evaluation mode
    return draw(model, example, traced=job.scheme.downlink.traced)[1]


def _cpu(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return pair[0].cpu(), pair[1].cpu()
