"""From a run's model to one that clients can use."""

from __future__ import annotations

from pathlib import Path

import torch

from fedveil import models
from fedveil.downlink import draw
from fedveil.downlink.blueprint import weights_of
from fedveil.downlink.export import export
from fedveil.downlink.report import Coverage, coverage
from fedveil.errors import CheckpointError, ConfigError
from fedveil.runs.model_file import load_model, save_model
from fedveil.secrets import OsSecrets


def export_run(run: Path, out: Path, *, spread: float = 4.0) -> Coverage:
    """Export the model of a run folder to a file; the scales are drawn from the operating system.

    Returns what is hidden in the file: everything but the last bias, which the outputs determine.
    """
    loaded = load_model(run)
    if loaded.kind != "server":
        raise ConfigError(f"{run} is an export already.")
    if out.exists():
        raise CheckpointError(f"{out} exists already: give another --out.")
    facts = loaded.facts
    assert facts.name is not None
    bare = models.build(
        facts.name,
        input_shape=facts.input_shape,
        outputs=facts.outputs,
        seed=0,
        vocabulary=facts.vocabulary,
        **facts.options,
    )
    tokens = facts.vocabulary is not None
    example = torch.zeros(2, *facts.input_shape, dtype=torch.int64 if tokens else torch.float32)
    blueprint, _ = draw(bare.train(), example, traced=True)
    assert blueprint.table is not None
    weights = weights_of(loaded.module, blueprint)
    module, shape = export(blueprint, weights, stream=OsSecrets().stream("export"), spread=spread)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(out, module, facts, kind="export", config=loaded.config, shape=shape)
    return coverage(blueprint.table, head_noise=False)
