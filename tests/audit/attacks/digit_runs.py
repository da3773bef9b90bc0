"""Recorded runs on digits, with what an auditor grants and what attempts are judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fedveil import data, models
from fedveil.audit.record import Record, client_view, server_view
from fedveil.audit.views import ClientView
from fedveil.config import RunConfig
from fedveil.data import Dataset
from fedveil.downlink.architecture import Weights, assemble
from fedveil.engine import ClientPool
from fedveil.runs.job import Job, ModelFacts, assemble_job, settled
from fedveil.runs.loop import fresh_state, train_job

_KEPT: list[TemporaryDirectory[str]] = []  # removed when the interpreter ends


@dataclass(frozen=True, eq=False)
class Run:
    job: Job
    record: Record
    members: Dataset
    others: Dataset
    test: Dataset

    def view(self, client: int = 0, **known: Tensor) -> ClientView:
        """A client's view with its own samples; `known` with dots for double underscores."""
        own = self.job.pool.clients[client]
        view = client_view(self.record, client, data=own.take(torch.arange(len(own))))
        return replace(view, known={name.replace("__", "."): one for name, one in known.items()})

    @property
    def weights(self) -> Weights:
        """The server's own in the last recorded round."""
        found = server_view(self.record, 0, round=self.record.rounds[-1][0]).weights
        assert found is not None
        return found

    def true_outputs(self, x: Tensor) -> Tensor:
        """Those of the server's model in the last recorded round."""
        model = assemble(self.job.architecture, self.weights).eval()
        with torch.no_grad():
            found: Tensor = model(x.to(self.weights.parameters.dtype))
        return found.double()


def percent(scores: Tensor, labels: Tensor) -> float:
    return 100.0 * float((scores.argmax(1) == labels).double().mean())


def digits_run(*, samples: int, model: str = "mlp", options: Mapping[str, Any], **settings: Any) -> Run:
    """A run of two clients on the first digits of a seed, of which the last round is recorded."""
    return _run(samples, model, tuple(sorted(options.items())), tuple(sorted(settings.items())))


@cache
def _run(samples: int, model: str, options: tuple[tuple[str, Any], ...], settings: tuple[tuple[str, Any], ...]) -> Run:
    given: dict[str, Any] = {"loss": "square", "seed": 1, "clients": 2, "record": True, "record_clients": "0,1"}
    given |= dict(settings)
    given.setdefault("record_rounds", str(given["rounds"]))
    config = settled(RunConfig.from_mapping(given, where="test"))
    assert config.seed is not None
    split = data.load("digits", seed=config.seed)
    train, others = (split.train.subset(torch.arange(start, stop)) for start, stop in ((0, samples), (samples, 1300)))
    net = models.build(model, input_shape=train.input_shape, outputs=10, seed=config.seed, **dict(options))
    parts = data.partition(train, clients=2, how="iid", seed=config.seed)
    placed = train.to(dtype=getattr(torch, config.dtype))
    facts = ModelFacts(model, dict(options), train.input_shape, 10, "classification")
    job = assemble_job(config, net, ClientPool.shared(placed.x, placed.y, parts), split.test, facts)
    _KEPT.append(TemporaryDirectory(prefix="fedveil-test-"))
    train_job(job, state=fresh_state(job), record=Path(_KEPT[-1].name))
    return Run(job, Record(Path(_KEPT[-1].name)), placed, others, split.test)
