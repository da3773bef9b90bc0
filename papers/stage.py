"""Where cells are trained: data sets are read and placed once, and every cell trains on them."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedveil import data
from fedveil.config import RunConfig, as_before
from fedveil.data import Dataset, Split
from fedveil.data.sources import EMBEDDED
from fedveil.engine import ClientPool
from fedveil.errors import ConfigError, DataError, NumericError
from fedveil.ledger.accountant import SERVER
from fedveil.ledger.gaussian import epsilon_of
from fedveil.roles.server import ServerState
from fedveil.runs.evaluation import score_weights
from fedveil.runs.job import Job, ModelFacts, assemble_job, dealt, device_of, dtype_of
from fedveil.runs.loop import fresh_state, train_job
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.schemes.options import MaskOptions
from papers.cells import Cell, Figures

DATA_VARIABLE = "FEDVEIL_DATA"
Adapt = Callable[[Job], Job]
OnRound = Callable[[int, int], None]
"""Told (rounds done, rounds in all)."""

_READING: dict[str, dict[str, Any]] = {
    "imdb": {"target": "label", "text": "text", "vocabulary": 2000},
    "bank": {"target": "y", "task": "regression", "test_fraction": 0.1, "seed": 1},
}

_WHEN_STORED = {"evaluate_every": 0, "checkpoint_every": 0, "family": "scale", "bn_eps": "secret"}
"""What a cell means by what it does not say: the defaults when figures were first stored, which go by its settings."""


class Stage:
    """A device and the data sets that were placed on it, for cells of the full or of the `quick` form."""

    def __init__(self, *, device: str = "cpu", folder: str | Path | None = None, quick: bool = False) -> None:
        self.device = str(device_of(RunConfig(device=device)))
        self.quick = quick
        given = folder if folder is not None else os.environ.get(DATA_VARIABLE)
        self._root = None if given is None else Path(given).expanduser()
        self._splits: dict[tuple[str, int | None], Split] = {}

    def describe(self) -> str:
        """The device in words."""
        if self.device.startswith("cuda"):
            return torch.cuda.get_device_name(torch.device(self.device))
        return f"cpu, {torch.get_num_threads()} threads"

    def split(self, name: str, *, samples: int | None = None) -> Split:
        """A data set on the device; `samples` keeps that many of its training part, drawn once and for all."""
        if (name, samples) not in self._splits:
            if samples is not None:
                whole = self.split(name)
                order = torch.randperm(len(whole.train), generator=torch.Generator().manual_seed(0))
                made = replace(whole, train=whole.train.subset(order[:samples]))
            else:
                loaded = self._read(name)
                made = Split(loaded.train.to(device=self.device), loaded.test.to(device=self.device))
            self._splits[name, samples] = made
        return self._splits[name, samples]

    def _read(self, name: str) -> Split:
        if name in EMBEDDED:
            return data.load(name)
        place = self.place(name)
        return data.load(place, **_READING.get(name, {}))

    def place(self, name: str) -> Path:
        """The folder of a data set."""
        if self._root is None:
            raise DataError(
                f"This needs the data set {name!r}: give --data, or set {DATA_VARIABLE}, to the folder that holds it."
            )
        for place in (self._root / name, *([self._root] if self._root.name == name else [])):
            if place.is_dir():
                return place
        raise DataError(f"No data set {name!r} under {self._root}: it would be the folder {self._root / name}.")

    def job(self, cell: Cell, *, seed: int) -> Job:
        """A cell's run, ready to start; equal seeds give equal data, batches and first weights to all schemes."""
        config = RunConfig.from_mapping(
            as_before({**_WHEN_STORED, **cell.settings, "seed": seed, "device": self.device}),
            where=f"cell {cell.name}",
        )
        split = self.split(config.dataset, samples=cell.samples)
        train = split.train
        facts = ModelFacts.of(config, train)
        model = facts.build(seed=seed)
        if cell.tiers is None:
            parts = dealt(config, train)
        else:
            parts = tiered(train, clients=config.clients, tiers=cell.tiers, ratio=config.ratio, seed=seed)
        placed = train if dtype_of(config) is torch.float32 else train.to(dtype=dtype_of(config))
        job = assemble_job(config, model, ClientPool.shared(placed.x, placed.y, parts), split.test, facts)
        return under_masks(job) if cell.more.get("masked") else job

    def train(
        self, cell: Cell, *, seed: int, on_round: OnRound = lambda done, total: None, adapt: Adapt = lambda job: job
    ) -> Figures:
        """Train a cell to its end and judge it; a run that diverges is judged by its last finite model."""
        judged = adapt(self.job(cell, seed=seed))
        job = replace(judged, test=None)  # judged once, below
        state, total = fresh_state(job), job.config.rounds
        figures: Figures = {"device": self.describe(), "torch": torch.__version__, "parameters": job.architecture.size}
        try:
            outcome = train_job(job, state=state, on_round=lambda row, now: on_round(now.round, total))
        except NumericError as reason:
            figures["stopped"] = f"diverged in round {state.round}: {reason}"
        else:
            figures["seconds"] = round(outcome.seconds, 2)
            figures |= spent_figures(job, outcome.privacy_journal)
            if outcome.stopped:
                figures["stopped"] = outcome.stopped
        assert judged.test is not None
        figures["rounds"] = state.round
        figures |= scored(job, state, judged.test)
        del judged, job, state
        self.tidy()
        return figures

    def tidy(self) -> None:
        """Give back a GPU's memory that nobody uses any more."""
        if self.device.startswith("cuda"):
            # Captured steps hold memory of their own, and sit in circles that only the collector breaks.
            gc.collect()
            torch.cuda.empty_cache()


def under_masks(job: Job) -> Job:
    """The same run whose sums are hidden by masks instead of a cipher: the same whole numbers, the same noise.

    A cipher that only adds changes nothing in a model, and takes hours where masks take seconds.
    """
    uplink = job.scheme.uplink
    masks = MaskOptions().masks(getattr(uplink, "value_range", 2.0**24), noise=uplink.plan)
    return replace(job, scheme=replace(job.scheme, uplink=masks))


def tiered(train: Dataset, *, clients: int, tiers: int, ratio: float, seed: int) -> list[Tensor]:
    """Rows of clients in `tiers` sizes, growing geometrically up to `ratio`, with equally many clients of each.

    The same distribution as partition "size", in fewer sizes: clients of one size are computed together.
    A tier's rows that its clients cannot share evenly are left out.
    """
    if clients % tiers:
        raise ConfigError(f"{clients} clients cannot be dealt evenly to {tiers} sizes.")
    each = clients // tiers
    order = torch.Generator().manual_seed(seed)
    parts = []
    for rows in data.partition(train, clients=tiers, how="size", ratio=ratio, seed=seed):
        mixed = rows[torch.randperm(len(rows), generator=order)]
        parts += list(mixed[: len(mixed) // each * each].reshape(each, -1))
    return parts


def scored(job: Job, state: ServerState, test: Dataset) -> Figures:
    """The present model's test accuracy in percent, or the mean squared error of a regression."""
    scores = score_weights(job.architecture, state.weights, test, job.loss)
    if scores.accuracy is None:
        return {"mse": scores.mse}
    return {"accuracy": round(100.0 * scores.accuracy, 3)}


def spent_figures(job: Job, privacy_journal: PrivacyJournal) -> Figures:
    """ε of the whole run against the server, and the noise on the first round's mean gradient."""
    if privacy_journal.accountant is None or privacy_journal.first is None or job.scheme.plan is None:
        return {}
    first = privacy_journal.first
    weight = sum(len(job.pool.clients[member]) for member in first.members)
    figures: Figures = {"noise": math.sqrt(float(first.residual.sum())) / weight}
    if SERVER in privacy_journal.accountant.spent:
        figures["epsilon"] = round(privacy_journal.accountant.epsilon(SERVER, job.scheme.plan.target.delta), 4)
    return figures


def composed(epsilon: float, *, delta: float, rounds: int, sigma: Callable[[float, float], float]) -> float:
    """ε of `rounds` rounds, each with noise σ(ε, δ) for a sensitivity of 1: exactly, by μ = √T/σ."""
    return epsilon_of(math.sqrt(rounds) / sigma(epsilon, delta), delta)
