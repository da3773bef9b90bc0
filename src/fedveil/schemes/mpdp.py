"""MP-DP as its paper has it, and the two baselines it is compared with."""

from __future__ import annotations

import math

from fedveil.downlink.decomposed import Decomposed
from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import ConfigError
from fedveil.ledger.gaussian import paper_sigma
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import AssumedPairOptions, Budget, HeadOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.assumed import AssumedNoise, Law
from fedveil.uplink.central import AssumedCentral
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients

SENSITIVITY = 1.0
_CAVEATS = Caveats(
    paper="σ = S·√(2·ln(1/δ))/ε for each round, S = 1 (MP-DP, Theorems 10 and 11)",
    notes=("epsilon is that of one round, as in the paper; a run of T rounds composes to far more",),
)


def _sigma(budget: Budget) -> float:
    if not (math.isfinite(budget.epsilon) and budget.epsilon > 0):
        raise ConfigError(f"epsilon must be a positive number (got {budget.epsilon}).")
    if not 0 < budget.delta < 1:
        raise ConfigError(f"delta must lie strictly between 0 and 1 (got {budget.delta}); 1e-5 is usual.")
    return SENSITIVITY * paper_sigma(budget.epsilon, budget.delta)


def _noise(law: Law, budget: Budget, pairs: AssumedPairOptions) -> AssumedNoise:
    return AssumedNoise(
        _sigma(budget),
        law,
        strength=pairs.pair_strength,
        neighbours=pairs.neighbours,
        cancelling=not pairs.skip_cancelling,
    )


@scheme(
    "mpdp",
    paper="MP-DP (bidirectional, faithful)",
    summary="decomposed scales and head noise down; up, bounded noise that the scales turn Gaussian, shared by pairs",
    protects=(
        "client data from the server: not at all (Ψ and Φ travel bare, and the server knows the scales); the model "
        "from clients up to secret scales (measured)"
    ),
    default_loss="square",
)
def mpdp(
    setting: Setting,
    *,
    budget: Budget,
    pairs: AssumedPairOptions,
    head_groups: int | None = None,
    head: HeadOptions,
) -> Scheme:
    """MP_Server down, DDP_Client up."""
    return Scheme(
        name="mpdp",
        downlink=Decomposed(head.noise(setting, head_groups)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=_noise("decomposed", budget, pairs),
        caveats=_CAVEATS,
    )


@scheme(
    "mpdp-naive",
    paper="MP-DP's baseline MP-DP-Naive",
    summary="rescaling and head noise down; up, Gaussian noise that the scales then blow up",
    protects="client data from the server: not at all; the model from clients up to secret scales (measured)",
    default_loss="square",
)
def mpdp_naive(
    setting: Setting,
    *,
    budget: Budget,
    pairs: AssumedPairOptions,
    head_groups: int | None = None,
    head: HeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """Gaussian noise of MP-DP's size added in the perturbed domain."""
    return Scheme(
        name="mpdp-naive",
        downlink=Rescaling(spread, head.noise(setting, head_groups)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=_noise("gaussian", budget, pairs),
        caveats=_CAVEATS,
    )


@scheme(
    "mp-cdp",
    paper="MP-DP's baseline MP-CDP",
    summary="rescaling and head noise down; a trusted server adds noise once to the recovered gradient",
    protects="client data from the server: not at all; the model from clients up to secret scales (measured)",
    default_loss="square",
)
def mp_cdp(
    setting: Setting,
    *,
    budget: Budget,
    head_groups: int | None = None,
    head: HeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """The accuracy that noise on the true aggregate would give."""
    return Scheme(
        name="mp-cdp",
        downlink=Rescaling(spread, head.noise(setting, head_groups)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=Bare(acquainted=True),
        central=AssumedCentral(_sigma(budget)),
        caveats=_CAVEATS,
    )
