"""Which strategies are taken: those that use replies for their weighted mean alone, and where clients hold the model
those whose step clients can take."""

from __future__ import annotations

from collections.abc import Collection

from flwr.serverapp.strategy import (
    Bulyan,
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedMedian,
    FedProx,
    FedTrimmedAvg,
    FedXgbBagging,
    FedXgbCyclic,
    FedYogi,
    Krum,
    MultiKrum,
    QFedAvg,
    Strategy,
)

from fedveil.errors import ConfigError, spelled
from fedveil.flower.app_held import NoModelError
from fedveil.flower.app_setup import Metrics, Step

_COMPARES = (
    *(FedMedian, FedTrimmedAvg, Krum, MultiKrum, Bulyan, QFedAvg, FedXgbBagging, FedXgbCyclic),
    *(DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping),
    *(DifferentialPrivacyServerSideAdaptiveClipping, DifferentialPrivacyServerSideFixedClipping),
)
_STEPPING = (FedAvgM, FedAdam, FedAdagrad, FedYogi)
_KNOWN = (FedAvg, FedProx, *_STEPPING)
_REPLACED = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
_AVERAGING = FedAvg().train_metrics_aggr_fn


def step_of(strategy: Strategy, evaluation: Metrics | None) -> Step:
    """The step that clients take in the strategy's place; what the server cannot do without the model's numbers is
    refused."""
    kind = type(strategy)
    averages = getattr(kind, "aggregate_train", None) in (FedAvg.aggregate_train, FedProx.aggregate_train)
    if kind not in _STEPPING and not averages:
        raise NoModelError(
            f"{kind.__name__} computes on the mean that a round has brought, in a way of its own",
            "use FedAvg, FedProx, FedAvgM, FedAdam, FedAdagrad or FedYogi as they are, or scheme='secagg'",
        )
    if evaluation == "pass":
        raise NoModelError(
            "Evaluations that pass as they are come with the server's arrays", "use evaluation='average', or 'drop'"
        )
    return Step.of(strategy) if kind in _STEPPING else Step()


def check_averages(strategy: Strategy, *, stated: bool, passed: Collection[str]) -> None:
    """Refuse a strategy that needs single updates, or may."""
    kind = type(strategy)
    if isinstance(strategy, _COMPARES):
        raise ConfigError(
            f"{kind.__name__} works on single updates, which nobody sees under protection: use FedAvg, FedProx, "
            "FedAvgM, FedAdam, FedAdagrad or FedYogi."
        )
    if stated:
        return
    say = f"if it does, say so with {spelled('averages', True)}"
    if not isinstance(strategy, FedAvg):
        raise ConfigError(f"{kind.__name__} is not known to use replies for their weighted mean alone: {say}.")
    for name in _REPLACED:
        if not any(getattr(kind, name) is getattr(known, name) for known in _KNOWN):
            raise ConfigError(
                f"{kind.__name__} has a {name} of its own, which is not known to use replies for their weighted mean "
                f"alone, and to ask everybody for the same: {say}."
            )
    for phase in ("train", "evaluate"):
        # Where figures pass, it is handed everybody's own.
        name = f"{phase}_metrics_aggr_fn"
        if phase not in passed and getattr(strategy, name) is not _AVERAGING:
            raise ConfigError(
                f"{name} is a function of your own, and would be handed one reply with the averages: leave it out, let "
                f"figures pass uncovered, or state with {spelled('averages', True)} that averages are what it needs."
            )
