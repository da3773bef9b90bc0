"""Recipes of whole runs: stopped and resumed to the same bits, refused where they would be wrong, free of charge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from federation import distance, held_run, job, same_bits, trained
from fedveil.client_held.messages import Begin
from fedveil.config import RunConfig
from fedveil.errors import CheckpointError, Code, ConfigError
from fedveil.protocol.messages import Request
from fedveil.runs import session
from fedveil.runs.folder import RunFolder
from fedveil.runs.job import agreed

Small = Callable[..., RunConfig]
Interrupted = Callable[..., Path]
ADAPTIVE = ("adam", "adagrad", "yogi")
SHORT: dict[str, Any] = {"rounds": 5, "checkpoint_every": 2, "momentum": 0.0}
LOCAL: dict[str, Any] = {"local_steps": 2, "client_lr": 0.1}
RESUMED: dict[str, dict[str, Any]] = {
    **{kind: {"optimiser": kind, "lr": 0.02, "warm_up": 0.4} for kind in ADAPTIVE},
    "crops, flips and holes": {"augment": "crop:2,flip,cutout:3", "momentum": 0.9, "lr_schedule": "polynomial"},
    "local training": {
        "scheme": "fedavg",
        "local_steps": 2,
        "client_lr": 0.1,
        "client_momentum": 0.9,
        "augment": "crop",
    },
    "adam of clients": {"scheme": "fedavg", "local_epochs": 1, "client_optimiser": "adam", "client_weight_decay": 0.1},
    "adam of clients under a veil": {
        "scheme": "lossless",
        "head_noise": False,
        "local_steps": 2,
        "client_optimiser": "adam",
    },
    "with clients": {
        "scheme": "ckks-fedavg",
        "cipher": "pads",
        "local_steps": 2,
        "optimiser": "yogi",
        "client_lr": 0.1,
    },
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_run_that_was_stopped_ends_in_the_same_bits(
    case: str, tmp_path: Path, interrupted: Interrupted, small: Small
) -> None:
    settings = {**SHORT, **RESUMED[case]}
    session.resume(interrupted(tmp_path / "run", after=3, **settings), quiet=True)
    session.run(small(**settings), tmp_path / "straight", quiet=True)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "straight"))
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_of_another_optimiser_is_refused(tmp_path: Path, interrupted: Interrupted) -> None:
    folder = interrupted(tmp_path / "run", after=3, **SHORT)
    with pytest.raises(CheckpointError, match="other settings"):
        session.resume(folder, changes={"optimiser": "adam"}, quiet=True)


@pytest.mark.parametrize("kind", ["sgd", *ADAPTIVE])
@pytest.mark.parametrize("scheme", ["ckks-fedavg", "paraaegis"])
def test_clients_that_hold_the_model_take_the_step_of_plain_averaging(scheme: str, kind: str) -> None:
    given = {"optimiser": kind, "client_lr": 0.1, "lr": 0.02 if kind != "sgd" else 0.8, "rounds": 3, "local_steps": 2}
    plain, _ = trained(job(scheme="fedavg", **given))
    hidden = {"cipher": "pads", "value_range": 64.0, **({"share": 1.0} if scheme == "paraaegis" else {})}
    held = held_run(job(scheme=scheme, **hidden, **given))
    assert not any(done.failed for done in held.rounds)
    assert distance(held.model, plain.weights.parameters) < 1e-8


ALL_BUT_BARE: dict[str, Any] = {"epsilon": 1e12, "clip": 10.0, "noise_decay": 1.0}


@pytest.mark.parametrize(
    "scheme", ["secagg", "ldp", "cdp", "nadp", "dp-fedavg", "varying-dp", "ckks-fedavg", "paraaegis"]
)
def test_adam_of_clients_is_the_same_under_every_protection(scheme: str) -> None:
    """With next to no noise, and a clip that reaches nobody, all of them end where plain averaging does.

    After one round: in a second one Adam would divide little gradients by themselves, and make noise of any size large.
    """
    given = {"local_epochs": 2, "batch_size": 20, "client_optimiser": "adam", "lr": 0.01, "rounds": 1}
    plain, by_sgd = (
        trained(job(scheme="fedavg", **given | {"client_optimiser": kind}))[0].weights.parameters
        for kind in ("adam", "sgd")
    )
    if scheme in ("ckks-fedavg", "paraaegis"):
        noised = ALL_BUT_BARE if scheme == "paraaegis" else {}
        ended = held_run(job(scheme=scheme, cipher="pads", value_range=64.0, **noised, **given)).model
    else:
        ended = trained(job(scheme=scheme, **ALL_BUT_BARE if scheme != "secagg" else {}, **given))[0].weights.parameters
    assert distance(ended, plain) < 1e-3
    assert distance(by_sgd, plain) > 0.05


def test_who_has_missed_a_round_is_lent_what_the_optimiser_remembers() -> None:
    one = job(scheme="ckks-fedavg", cipher="pads", value_range=64.0, rounds=3, optimiser="yogi", **LOCAL)

    def absent(request: Request, client: int) -> bool:
        return client == 2 and isinstance(request, Begin) and request.round == 0

    held = held_run(one, absent=absent)
    assert [2 in done.gathered.arrived for done in held.rounds] == [False, True, True]
    memories = [held.engine.state_of(client).held.velocity for client in range(5)]  # type: ignore[union-attr]
    assert memories[0].shape == (2, one.architecture.size)
    assert all(same_bits(memory, memories[0]) for memory in memories)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *(
        (scheme, {"optimiser": "adam", "local_steps": 2}, "takes two rates: give the clients' as --client-lr")
        for scheme in ("fedavg", "nadp", "paraaegis", "ckks-fedavg", "serial", "dp-fedavg")
    ),
    *(
        (
            scheme,
            settings,
            f"{next(iter(settings))} is for local training, and here a client gives one gradient a round",
        )
        for scheme in ("fedavg", "lossless", "veil-secagg", "cdp", "ppdl", "spn", "dbcl")
        for settings in (
            {"client_lr": 0.1},
            {"client_optimiser": "adam"},
            {"client_optimiser": "adam", "client_beta2": 0.9, "local_steps": 1},
            {"client_momentum": 0.1},
            {"client_weight_decay": 0.1},
        )
    ),
    ("veil-dp", {"client_optimiser": "adam"}, "has no option 'client_optimiser'"),
    ("lossless", {"local_steps": 2, "client_momentum": 0.9}, "exactly one gradient per round"),
    ("veil-dp", {"client_momentum": 0.9}, "has no option 'client_momentum'"),
]


@pytest.mark.parametrize(("scheme", "settings", "complaint"), REFUSED)
def test_what_would_be_wrong_is_refused(scheme: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        agreed(RunConfig(scheme=scheme, seed=1, **settings), clients=5, task="classification")
    assert caught.value.code is Code.SETTINGS


def test_the_clients_rate_leaves_the_schedule_to_the_server() -> None:
    config = RunConfig(scheme="fedavg", seed=1, local_steps=2, client_lr=0.3, lr_schedule="cosine", rounds=10)
    common = agreed(config, clients=5, task="classification")
    assert common.scheme.work.schedule.at(9) == 0.3  # type: ignore[attr-defined]
    assert [common.optimiser.schedule.at(0), common.optimiser.schedule.at(5)] == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize(
    "settings", [{"scheme": "fedavg"}, {"scheme": "fedavg", "local_steps": 2}, {"scheme": "lossless", "momentum": 0.9}]
)
def test_every_round_tells_its_learning_rate(settings: dict[str, Any], small: Small, tmp_path: Path) -> None:
    recipe = {"lr": 0.2, "warm_up": 0.5, "lr_schedule": "step", "lr_steps": "0.75", "rounds": 4}
    session.run(small(**{"momentum": 0.0, **settings, **recipe}), tmp_path / "run", quiet=True)
    assert [row["lr"] for row in RunFolder(tmp_path / "run").metrics()] == pytest.approx([0.2 / 3, 0.4 / 3, 0.2, 0.02])


@pytest.mark.parametrize("scheme", ["nadp", "cdp", "dp-fedavg"])
def test_what_is_done_with_noised_sums_and_single_records_costs_nothing(
    scheme: str, small: Small, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"scheme": scheme, "rounds": 2, "momentum": 0.0, "model_options": {"depth": 1}}
    rates = {"client_lr": 0.1, "client_momentum": 0.9} if scheme == "dp-fedavg" else {}
    recipe = {"optimiser": "adam", "lr": 0.01, "warm_up": 0.5, "augment": "crop:2,flip", **rates}
    plain = session.run(small(**given), tmp_path / "plain", quiet=True)
    cooked = session.run(small(**given, **recipe), tmp_path / "cooked", quiet=True)
    assert plain["ledger"]["lines"] == cooked["ledger"]["lines"]
    assert plain["test_loss"] != cooked["test_loss"]


def test_a_warm_up_carries_a_rate_at_which_training_otherwise_explodes() -> None:
    """The square loss is steep at first: the same rate that ends low after a warm-up runs away without."""
    options = {"depth": 3, "width": 64, "norm": "batch"}
    given: dict[str, Any] = {"scheme": "fedavg", "lr": 0.8, "momentum": 0.9, "rounds": 40, "options": options}
    (_, cold), (_, warm) = trained(job(**given)), trained(job(**given, warm_up=0.5))
    assert max(done.loss for done in cold if done.loss is not None) > 50 * cold[0].loss
    assert cold[-1].failed
    assert max(done.loss for done in warm) < 1.5 * warm[0].loss
    assert warm[-1].loss < 0.1


@pytest.mark.parametrize("scheme", ["fedavg", "cdp"])
def test_pictures_are_the_same_however_clients_are_grouped(scheme: str) -> None:
    given: dict[str, Any] = {"scheme": scheme, "rounds": 3, "batch_size": 8, "lr": 0.5, "how": "size"}
    together, alone, plain = (
        trained(job(**given, augment=augment, vectorise=vectorise))[0].weights.parameters
        for augment, vectorise in (("crop:2,flip,cutout:3", True), ("crop:2,flip,cutout:3", False), (None, True))
    )
    assert distance(together, alone) < 1e-10
    assert distance(together, plain) > 1e-4


def test_a_function_of_pythons_is_taken_from_there_and_from_no_file() -> None:
    config = RunConfig(scheme="fedavg", seed=1, lr_schedule="python:halved")
    with pytest.raises(ConfigError, match=r"lr_schedule 'halved' was given as a function from Python"):
        agreed(config, clients=5, task="classification")
    common = agreed(config, clients=5, task="classification", shape=lambda round, rounds: 0.5)
    assert common.optimiser.schedule.at(0) == 0.05
