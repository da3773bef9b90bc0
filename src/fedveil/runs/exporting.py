"""From a run's model to one that clients can use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fedveil.config import RunConfig
from fedveil.downlink import draw
from fedveil.downlink.blueprint import weights_of
from fedveil.downlink.export import export
from fedveil.downlink.report import Coverage, coverage
from fedveil.errors import CheckpointError, ConfigError
from fedveil.runs.model_file import load_model, save_model
from fedveil.secrets import OsSecrets


def export_run(
    run: Path,
    out: Path,
    *,
    spread: float = 4.0,
    model: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Coverage:
    """Export the model of a run folder to a file; the scales are drawn from the operating system.

    `model` is the caller's own code that builds it, where the run had such a model.

    Returns what is hidden in the file: everything but the last bias, which the outputs determine.
    """
    loaded = load_model(run, model=model, say=say)
    if loaded.kind == "export":
        raise ConfigError(f"{run} is an export already.")
    if out.exists():
        raise CheckpointError(f"{out} exists already: give another --out.")
    facts = loaded.facts
    tokens = facts.vocabulary is not None
    example = torch.zeros(2, *facts.input_shape, dtype=torch.int64 if tokens else torch.float32)
    blueprint, _ = draw(facts.build(seed=0).train(), example, traced=True)
    assert blueprint.table is not None
    weights = weights_of(loaded.module, blueprint)
    module, shape = export(blueprint, weights, stream=OsSecrets().stream("export"), spread=spread)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(out, module, facts, kind="export", config=_public(loaded.config), shape=shape)
    return coverage(blueprint.table, head_noise=False)


def _public(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a client may know of a run: where its data came from, and the seed of a simulation only.

    In a simulation the seed decides the model's first values and the secrets; otherwise it deals data and batches.
    """
    kept = {name: config.get(name) for name in ("dataset", "target", "task", "text", "group", "test_fraction")}
    if RunConfig.from_mapping(config).simulated_secrets:
        kept["seed"] = config.get("seed")
    return kept
