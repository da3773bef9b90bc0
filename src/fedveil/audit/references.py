"""Where attacks prove themselves: small unprotected runs on embedded digits, on the models they are known to break.

A reference is an ordinary trial of an ordinary recorded run: the attack goes the same way as in the audit itself.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from fedveil.audit.client_trials import model_trials
from fedveil.audit.findings import Trial
from fedveil.audit.measures import RECOGNISABLE
from fedveil.audit.scene import Effort, Scene
from fedveil.audit.server_trials import upload_trials
from fedveil.audit.subject import STANDSTILL, cut, enacted
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs.job import job_from_config

TOLD_APART = 0.6
"""Membership inference has to be right this often on an overfitted model."""

RECOGNISED = 0.5
"""Pictures of classes have to be recognised this often on a well-trained model; chance is 0.1."""

LABELS_TOLD = 0.9


@dataclass(frozen=True)
class _Run:
    """A small run: its settings, how many samples a client keeps, and what it is in words."""

    what: str
    settings: dict[str, Any]
    samples: int | None = None


_SINGLE = {"clients": 4, "rounds": 4, "lr": STANDSTILL, "record_rounds": "1-4", "record_clients": "0-3"}
_RUNS = {
    "mlp": _Run("plain averaging, an mlp, one digit a client", {**_SINGLE, "scheme": "fedavg"}, 1),
    "lenet": _Run(
        "plain averaging, a sigmoid LeNet, one digit a client",
        {**_SINGLE, "scheme": "fedavg", "model": "lenet-sigmoid", "loss": "cross-entropy"},
        1,
    ),
    "bare": _Run("lossless, whose uploads nothing covers, an mlp, one digit a client", _SINGLE, 1),
    "overfitted": _Run(
        "plain averaging, an mlp that knows its few digits by heart",
        {
            "scheme": "fedavg",
            "loss": "square",
            "clients": 8,
            "rounds": 400,
            "lr": 0.05,
            "momentum": 0.9,
            "record_rounds": "400",
        },
        12,
    ),
    "trained": _Run(
        "plain averaging, a well-trained mlp",
        {"scheme": "fedavg", "clients": 4, "rounds": 150, "lr": 0.2, "momentum": 0.9, "record_rounds": "150"},
    ),
}

_PLACES: dict[str, tuple[str, float]] = {
    "labels": ("lenet", LABELS_TOLD),
    "closed-form": ("mlp", RECOGNISABLE),
    "averaging": ("mlp", RECOGNISABLE),
    "phi": ("bare", RECOGNISABLE),
    **dict.fromkeys(("dlg", "idlg", "inverting", "generative"), ("lenet", RECOGNISABLE)),
    **dict.fromkeys(("membership", "membership-layers", "likelihood"), ("overfitted", TOLD_APART)),
    "class-inversion": ("trained", RECOGNISED),
}
"""Calibration and probes need none: what they are after is the true model's accuracy, which is known."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A trial in which an attack has to pass a figure before it is believed."""

    what: str
    trial: Trial
    threshold: float


@dataclass(frozen=True, eq=False)
class References:
    """References by attack; runs are made when first asked for, and shared."""

    scratch: Path
    effort: Effort
    _scenes: dict[str, Scene] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def of(self, attack: str) -> Reference | None:
        """An attack's reference, on one attempt."""
        if attack not in _PLACES:
            return None
        place, threshold = _PLACES[attack]
        with self._lock:
            scene = self._scene(place)
            for trial in (*upload_trials(scene), *model_trials(scene, (attack,))):
                if trial.attack == attack:
                    return Reference(_RUNS[place].what, replace(trial, attempts=trial.attempts[:1]), threshold)
        raise ConfigError(f"The attack {attack!r} is not tried in its own reference run.")

    def _scene(self, place: str) -> Scene:
        if place not in self._scenes:
            run = _RUNS[place]
            given = {"dataset": "digits", "seed": 3, "record": True, "evaluate_every": 0, **run.settings}
            job = job_from_config(RunConfig.from_mapping(given, where="a reference run"))
            if run.samples is not None:
                job = cut(job, samples=run.samples)
            folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self.scratch))
            subject = enacted(job, folder / "record")
            self._scenes[place] = Scene(subject, subject, False, self.effort, judged=False)
        return self._scenes[place]
