"""Leaving out pair noise, as simulations of accuracy do, changes a run by rounding only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from federation import distance, job
from fedveil.runs.loop import fresh_state, train_job


def final(**settings: Any) -> torch.Tensor:
    made = job(rounds=4, clients=5, **settings)
    return train_job(made, state=fresh_state(made)).state.weights.parameters


SETTINGS: dict[str, dict[str, Any]] = {
    "nadp as in the paper": {"scheme": "nadp", "accounting": "paper", "loss": "cross-entropy", "epsilon": 50.0},
    "nadp exact": {
        "scheme": "nadp",
        "pair_strength": 10.0,
        "loss": "cross-entropy",
        "epsilon": 50.0,
        "how": "size",
        "cohort": 0.8,
    },
    "mpdp": {"scheme": "mpdp", "neighbours": 3, "epsilon": 100.0, "lr": 0.02},
    "mpdp-naive": {"scheme": "mpdp-naive", "calibration": "tail", "neighbours": 3, "epsilon": 1000.0, "lr": 0.02},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_runs_with_and_without_pair_noise_end_in_the_same_model_up_to_rounding(settings: dict[str, Any]) -> None:
    whole, skipped = final(**settings), final(**settings, skip_cancelling=True)
    assert torch.isfinite(whole).all()
    assert distance(skipped, whole) < 1e-9
    # The noise that stays is the same in both; a run with other secrets ends elsewhere.
    assert distance(final(**{**settings, "epsilon": settings["epsilon"] / 2}), whole) > 1e-4
