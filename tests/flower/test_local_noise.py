"""The mod that noises on the client alone, and the accountant for Flower's own strategies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import PrivacyAccountant
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyConfig,
    SamplingMethod,
)

from fedveil.errors import ConfigError
from fedveil.flower import ExactAccountant, local_dp
from fedveil.ledger.gaussian import epsilon_of, sigma_of
from flower_apps import AppGrid, app_of, start_arrays

SIZE = 4000


def far(arrays: dict[str, np.ndarray], number: int) -> Any:
    """An update far beyond any clip; one client's is no number."""
    step = math.nan if number == 3 else 7.0
    return {"flat": arrays["flat"] + step}, {"num-examples": 10, "train_loss": 1.0}


def test_updates_leave_clipped_and_noised_for_all_rounds_together() -> None:
    """The sample variance of 4,000 Gaussian numbers is within 12 % of the true one but for a chance of 10⁻⁷."""
    rounds, clip = 2, 0.5
    grid = AppGrid(app_of([local_dp(epsilon=2.0, clip=clip, rounds=rounds)], train=far), 4)
    FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord({"flat": Array(np.zeros(SIZE))}), num_rounds=rounds)
    sigma = 2 * clip * sigma_of(2.0, 1e-5) * math.sqrt(rounds)
    for message, reply in grid.crossed:
        sent, back = (each.content["arrays"]["flat"].numpy() for each in (message, reply))
        signal = 0.0 if message.metadata.dst_node_id == 103 else clip / math.sqrt(SIZE)
        error = back - sent - signal
        assert 0.88 < float(np.mean(error**2)) / sigma**2 < 1.12
        assert abs(float(error.mean())) < 5 * sigma / math.sqrt(SIZE)
        assert dict(reply.content["metrics"]) == {"num-examples": 10, "train_loss": 1.0}


def test_no_round_leaves_beyond_the_target_and_the_machine_remembers(tmp_path: Path) -> None:
    app = app_of(
        [local_dp(epsilon=1.0, clip=0.5, rounds=2)], train=lambda arrays, number: (arrays, {"num-examples": 1})
    )

    def folder(number: int) -> dict[str, Any]:
        return {"fedveil-state": str(tmp_path / str(number))}

    for kept, answered in ((folder, 2), (folder, 0), (lambda number: {}, 2)):  # the last: nodes of their own
        grid = AppGrid(app, 2, node_config=kept)
        FedAvg(fraction_evaluate=0.0).start(grid, start_arrays(), num_rounds=3)
        assert [reply.has_content() for _, reply in grid.crossed] == [True] * 2 * answered + [False] * 2 * (
            3 - answered
        )
    told = json.loads((tmp_path / "0" / "local-dp.json").read_text())
    assert told["epsilon"] == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("kind", ["a list", "a config"])
def test_what_could_hold_an_update_does_not_leave_beside_it(kind: str) -> None:
    app = ClientApp(mods=[local_dp(epsilon=1.0, clip=0.5, rounds=2)])

    @app.train()
    def on_train(message: Message, context: Context) -> Message:
        context.state = RecordDict()  # an app's own to use
        secret = [0.25, 0.5]
        beside: Any = (
            MetricRecord({"num-examples": 1, "all": secret}) if kind == "a list" else ConfigRecord({"w": secret})
        )
        metrics = {} if kind == "a list" else {"metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict({**message.content, "beside": beside, **metrics}), reply_to=message)

    grid = AppGrid(app, 2)
    for _ in range(3):
        FedAvg(fraction_evaluate=0.0).start(grid, start_arrays(), num_rounds=1)
    replies = [reply for _, reply in grid.crossed]
    assert all(reply.has_error() or "beside" not in reply.content for reply in replies)
    # Counted in the node's folder, whatever becomes of the context.
    assert sum(reply.has_content() for reply in replies) == (0 if kind == "a list" else 4)


def test_an_app_that_fails_tells_the_server_nothing_of_it() -> None:
    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        raise ValueError(f"record 17 of client {number}")

    grid = AppGrid(app_of([local_dp(epsilon=1.0, clip=0.5, rounds=2)], train=train), 2)
    FedAvg(fraction_evaluate=0.0).start(grid, start_arrays(), num_rounds=1)
    assert all("record" not in str(reply.error.reason) for _, reply in grid.crossed)


@pytest.mark.parametrize(
    "given",
    [
        *({"epsilon": 0.0}, {"clip": -1.0}, {"rounds": 0}, {"delta": 2.0}),
        *({"epsilon": "8"}, {"clip": "1"}, {"rounds": 2.5}, {"delta": None}, {"home": 3}),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        local_dp(**{"epsilon": 1.0, "clip": 1.0, "rounds": 1, **given})


def _config(sampling: SamplingMethod = SamplingMethod.NO_AMPLIFICATION, limit: float | None = None) -> PrivacyConfig:
    return PrivacyConfig(1e-5, 5, NeighboringRelation.ADD_OR_REMOVE_ONE, sampling, limit)


def test_an_account_of_gaussian_releases_is_exact() -> None:
    account: PrivacyAccountant = ExactAccountant(_config(limit=3.0))
    event = GaussianPrivacyEvent(4.0, 5, 5)
    account.compose(event, 4)
    assert account.get_epsilon(1e-5) == epsilon_of(0.5, 1e-5)
    assert account.get_delta(account.get_epsilon(1e-6)) <= 1e-6
    assert account.get_privacy_spent().num_releases == account.num_releases == 4
    assert not account.would_exceed(event)
    assert account.would_exceed(event, count=1000)
    other = ExactAccountant(_config(limit=3.0))
    other.load_state_dict(json.loads(json.dumps(account.state_dict())))
    assert other.get_privacy_spent() == account.get_privacy_spent()
    for bad in (
        {},
        {"backend": "rdp"},
        {**account.state_dict(), "spent": -1.0},
        {**account.state_dict(), "releases": "4"},
    ):
        with pytest.raises(ConfigError):
            other.load_state_dict(bad)
    with pytest.raises(ConfigError, match="no-amplification"):
        ExactAccountant(_config(SamplingMethod.POISSON))
    with pytest.raises(ConfigError, match="account of 5"):
        account.compose(GaussianPrivacyEvent(4.0, 5, 6))
    with pytest.raises(ConfigError, match="max_epsilon"):
        ExactAccountant(_config()).would_exceed(event)


def test_it_never_claims_less_privacy_than_flowers_own() -> None:
    pytest.importorskip("dp_accounting")
    from flwr.serverapp import RdpAccountant

    event = GaussianPrivacyEvent(2.0, 5, 5)
    exact, renyi = ExactAccountant(_config()), RdpAccountant(_config())
    for account in (exact, renyi):
        account.compose(event, 30)
    assert exact.get_epsilon(1e-5) < renyi.get_epsilon(1e-5)


def test_flowers_own_strategy_takes_it() -> None:
    account = ExactAccountant(_config(limit=50.0))
    strategy = DifferentialPrivacyServerSideFixedClipping(
        FedAvg(fraction_evaluate=0.0),
        noise_multiplier=1.0,
        clipping_norm=1.0,
        num_sampled_clients=5,
        accountant=account,
    )

    def train(arrays: dict[str, np.ndarray], number: int) -> Any:
        return {"a": arrays["a"] + 1.0}, {"num-examples": 1}

    strategy.start(AppGrid(app_of(train=train)), ArrayRecord({"a": Array(np.zeros(3))}), num_rounds=3)
    spent = strategy.privacy_spent()
    assert spent is not None
    assert spent.epsilon == epsilon_of(math.sqrt(3.0), 1e-5)
