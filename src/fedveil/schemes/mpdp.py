"""MP-DP as its paper has it, and the two baselines it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fedveil.downlink.decomposed import Decomposed
from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import ConfigError, spelled
from fedveil.ledger.gaussian import mpdp_epsilon
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import ASSUMED_STEPS, AssumedBudget, AssumedPairOptions, GroupedHeadOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.assumed import AssumedNoise, Law
from fedveil.uplink.plain import AssumedCentral, Bare
from fedveil.work.gradients import Gradients

_FORMULAS = {
    "equations": "(ε − ϑ/2)² = 2·ln(2/(δ·√(2π)))·ϑ, ϑ = (1 + σ_η²/σ_Δ²)·S²/σ² (MP-DP, Eq. (23))",
    "tail": "σ = S·√(2·ln(1/δ))/ε (NADP-FL's formula, by which MP-DP was run here at first)",
}


ClientWeights = Literal["samples", "equal"]
_EQUAL = "every client's gradient counts the same, 1/K, as the paper has it, whatever its number of samples"


def _caveats(budget: AssumedBudget, weights: ClientWeights, paper: str = "") -> Caveats:
    return Caveats(
        paper=paper or f"{_FORMULAS[budget.calibration]} for each round, S = {budget.sensitivity:g}",
        notes=(
            "epsilon is that of one round, as in the paper; a run of T rounds composes to far more",
            *((_EQUAL,) if weights == "equal" else ()),
        ),
    )


@dataclass(frozen=True)
class SigmaOptions:
    """The deviations themselves in place of an ε: of what a client adds for itself, and of what a pair shares."""

    sigma_own: float | None = None
    sigma_pair: float | None = None

    def noise(self, calibrated: AssumedNoise, clients: int) -> AssumedNoise:
        """The noise of these deviations, in rounds of so many clients, where they are given."""
        own, pair = self.sigma_own, self.sigma_pair
        if own is None and pair is None:
            return calibrated
        if own is None or pair is None or not (0 < own < math.inf and 0 <= pair < math.inf):
            raise ConfigError(
                f"{spelled('sigma_own')} (σ_η) and {spelled('sigma_pair')} (σ_Δ) are given together, the first above 0 "
                "and the second at least 0, which leaves noise of pairs out."
            )
        return replace(calibrated, sigma=own * math.sqrt(clients), own=own, strength=pair / own)

    def told(self, budget: AssumedBudget, clients: int) -> str:
        """What ε follows from them in one round; nothing where they are not given."""
        own, pair = self.sigma_own, self.sigma_pair
        if own is None or pair is None:
            return ""
        given = f"σ_η = {own:g} and σ_Δ = {pair:g} as given, S = {budget.sensitivity:g}, K = {clients}"
        if pair == 0:
            return f"{given}: without noise of pairs MP-DP's Eq. (23) gives no ε"
        sigma = own * math.sqrt(clients) / budget.sensitivity
        follows = mpdp_epsilon(sigma, budget.delta, pair / own)
        return f"{given}: for each round ε = {follows:.4g} at δ = {budget.delta:g} by {_FORMULAS['equations']}"


def _noise(law: Law, budget: AssumedBudget, pairs: AssumedPairOptions, weights: ClientWeights) -> AssumedNoise:
    return AssumedNoise(
        budget.sigma(pairs.pair_strength),
        law,
        sensitivity=budget.sensitivity,
        strength=pairs.pair_strength,
        neighbours=pairs.neighbours,
        cancelling=not pairs.skip_cancelling,
        alike=weights == "equal",
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
    compared=ASSUMED_STEPS,
)
def mpdp(
    setting: Setting,
    *,
    budget: AssumedBudget,
    pairs: AssumedPairOptions,
    deviations: SigmaOptions,
    client_weights: ClientWeights = "samples",
    head: GroupedHeadOptions,
) -> Scheme:
    """MP_Server down, DDP_Client up; `client_weights` equal is the paper's mean, 1/K."""
    clients = max(setting.cohort, 1)
    if setting.least and deviations != SigmaOptions():
        raise ConfigError(
            f"{spelled('sigma_own')} and {spelled('sigma_pair')} are the noise of rounds of one size, and under "
            f"{spelled('sampling_rate')} sizes differ: leave one of them out."
        )
    return Scheme(
        name="mpdp",
        downlink=Decomposed(head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=deviations.noise(_noise("decomposed", budget, pairs, client_weights), clients),
        caveats=_caveats(budget, client_weights, deviations.told(budget, clients)),
    )


@scheme(
    "mpdp-naive",
    paper="MP-DP's baseline MP-DP-Naive",
    summary="rescaling and head noise down; up, Gaussian noise that the scales then blow up",
    protects="client data from the server: not at all; the model from clients up to secret scales (measured)",
    default_loss="square",
    compared=ASSUMED_STEPS,
)
def mpdp_naive(
    setting: Setting,
    *,
    budget: AssumedBudget,
    pairs: AssumedPairOptions,
    client_weights: ClientWeights = "samples",
    head: GroupedHeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """Gaussian noise of MP-DP's size added in the perturbed domain: σ by every client (Eq. (7))."""
    if budget.calibration == "tail":
        noise = _noise("gaussian", budget, pairs, client_weights)
    elif pairs != AssumedPairOptions():
        raise ConfigError(
            "The clients of mpdp-naive share no noise (MP-DP, Eq. (7)): leave neighbours, pair_strength and "
            f"skip_cancelling out, or say {spelled('calibration', 'tail')} for the form in which they share it."
        )
    else:
        alike = client_weights == "equal"
        noise = AssumedNoise(budget.sigma(), "gaussian", shared=False, sensitivity=budget.sensitivity, alike=alike)
    return Scheme(
        name="mpdp-naive",
        downlink=Rescaling(spread, head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=noise,
        caveats=_caveats(budget, client_weights),
    )


@scheme(
    "mp-cdp",
    paper="MP-DP's baseline MP-CDP",
    summary="rescaling and head noise down; a trusted server adds noise once to the recovered gradient",
    protects="client data from the server: not at all; the model from clients up to secret scales (measured)",
    default_loss="square",
    compared=ASSUMED_STEPS,
)
def mp_cdp(
    setting: Setting,
    *,
    budget: AssumedBudget,
    client_weights: ClientWeights = "samples",
    head: GroupedHeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """The accuracy that noise on the true aggregate would give."""
    return Scheme(
        name="mp-cdp",
        downlink=Rescaling(spread, head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=Bare(acquainted=True, alike=client_weights == "equal"),
        central=AssumedCentral(budget.sigma(), budget.sensitivity),
        caveats=_caveats(budget, client_weights),
    )
