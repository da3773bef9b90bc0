"""Everything trials are made from: the run, a close-up of its uploads, and who judges."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from fedveil.audit.attacks.matching import MOST_SAMPLES
from fedveil.audit.judge import Judge, train_judge
from fedveil.audit.measures import Likeness
from fedveil.audit.metrics import psnr, random_level
from fedveil.audit.subject import Subject, noisy, plainly_trained, replayed
from fedveil.errors import ConfigError

MOST_CLIENTS = 10


@dataclass(frozen=True)
class Effort:
    """How much an audit may take: attempts of a trial, candidates, rounds to average over, pictures of a class."""

    quick: bool = False
    seed: int = 0
    device: str = "cpu"

    @property
    def attempts(self) -> int:
        """Victims of attacks that search."""
        return 2 if self.quick else 6

    @property
    def easy_attempts(self) -> int:
        """Victims of attacks that only compute."""
        return 4 if self.quick else 10

    @property
    def candidates(self) -> int:
        """Members, and as many others."""
        return 200 if self.quick else 1000

    @property
    def rounds(self) -> int:
        """Rounds whose uploads are averaged."""
        return 8 if self.quick else 32

    @property
    def per_class(self) -> int:
        """Pictures made of each class."""
        return 2 if self.quick else 8


@dataclass(frozen=True, eq=False)
class Scene:
    """The run; the rounds in which its uploads are attacked; and a judge of pictures, trained when first asked for.

    A gradient of more than eight samples is out of reach of reconstruction, and so is one of many local steps. Such
    a run's first rounds are replayed with one sample a client: what a server gets in the worst case. Where pictures
    are not `judged`, reconstructions are compared by their pixels alone.
    """

    run: Subject
    close: Subject
    replayed: bool
    effort: Effort
    judged: bool = True
    scratch: Path | None = None
    say: Callable[[str], None] = lambda text: None
    _lock: Lock = field(default_factory=Lock, repr=False)
    _plain: dict[int, Subject] = field(default_factory=dict, repr=False)

    def judge(self) -> Judge:
        """An independent classifier of everybody's data, held-out ones included."""
        with self._lock:
            return self._judge

    @cached_property
    def _judge(self) -> Judge:
        x, y = self.run.samples_of(range(len(self.run.job.pool)))
        generator = torch.Generator().manual_seed(self.effort.seed)
        return train_judge(
            torch.cat([x, self.run.test.x]).float(),
            torch.cat([y, self.run.test.y]),
            outputs=self.run.job.facts.outputs,
            generator=generator,
            quick=self.effort.quick,
            device=self.effort.device,
        )

    def noiseless(self, round: int | None = None) -> Subject | None:
        """The same training without its noise up to `round` (all of it), made once; None where the run had none.

        Noise is what keeps a model from learning samples by heart, so that the run's own model is no yardstick.
        """
        if self.scratch is None or not noisy(self.run):
            return None
        last = round or self.run.config.rounds
        with self._lock:
            if last not in self._plain:
                self.say("The run is trained once more without its noise, to compare with.")
                folder = Path(tempfile.mkdtemp(prefix="plain-", dir=self.scratch))
                self._plain[last] = plainly_trained(self.run, folder / "record", round=last)
            return self._plain[last]

    @property
    def settings(self) -> dict[str, Any]:
        """What every attack is told: public knowledge, and how much it may take."""
        effort = self.effort
        box = self.run.box
        return {
            "quick": effort.quick,
            "seed": effort.seed,
            "device": effort.device,
            "box": None if box is None else list(box),
        }

    @cached_property
    def likeness(self) -> Likeness:
        """How reconstructions of this run are judged."""
        public, _ = self.run.halves()
        mean = public.x.double().mean(0, keepdim=True)
        others = self.run.own(0)[0][:200].double()
        blind = float(psnr(mean.expand_as(others), others, peak=self.run.peak).mean())
        judged = self.judged and self.run.pictures and self.run.classes
        low, high = self.run.box or (0.0, 1.0)
        unit = ((others - low) / (high - low)).float()
        return Likeness(
            peak=self.run.peak,
            chance=blind,
            random=random_level(unit, generator=torch.Generator().manual_seed(0), draws=4),
            blind=mean.cpu(),
            judge=self.judge if judged else None,
            private=self.run.own(0)[0] if judged else None,
        )


def scene_of(run: Subject, effort: Effort, scratch: Path, *, say: Callable[[str], None] = lambda text: None) -> Scene:
    """The scene of a run; replays its first rounds where its batches are too large to reconstruct."""
    facts = run.record.facts
    if facts.model is None:
        raise ConfigError(
            "This run's model was built in Python, and an audit has to build it again: name it as "
            "package.module:factory, or FILE.py:factory, in the run."
        )
    if not (run.record.clients if run.held else run.record.find(kind="reply", phase="train")):
        raise ConfigError(
            "No recorded client answered in a recorded round: record more clients (--record-clients 0-9) or rounds."
        )
    reason = _out_of_reach(run)
    if not reason or run.held:
        return Scene(run, run, False, effort, scratch=scratch, say=say)
    say(f"{reason}: the first rounds are replayed with one sample a client.")
    folder = Path(tempfile.mkdtemp(prefix="replay-", dir=scratch))
    close = replayed(run, folder / "record", samples=1, clients=MOST_CLIENTS, rounds=effort.rounds)
    return Scene(run, close, True, effort, scratch=scratch, say=say)


def _out_of_reach(run: Subject) -> str:
    """Why the uploads of a run are not attacked as they are; "" where they are."""
    largest = max(len(run.batch(client, round=1)[1]) for client in run.record.clients)
    if largest > MOST_SAMPLES:
        return f"Batches of {largest} samples are out of reconstruction's reach"
    if run.record.facts.returns == "update":
        return "Updates of local training are out of reconstruction's reach"
    if run.config.simulate_dropout and not run.record.facts.readable:
        return "Which uploads a sum holds is not recorded where clients vanish"
    return ""
