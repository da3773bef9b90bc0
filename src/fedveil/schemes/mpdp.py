"""MP-DP as its paper has it, and the two baselines it is compared with."""

from __future__ import annotations

from fedveil.downlink.decomposed import Decomposed
from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import ConfigError, spelled
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import AssumedBudget, AssumedPairOptions, GroupedHeadOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.assumed import AssumedNoise, Law
from fedveil.uplink.central import AssumedCentral
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients

_FORMULAS = {
    "equations": "(ε − ϑ/2)² = 2·ln(2/(δ·√(2π)))·ϑ, ϑ = (1 + σ_η²/σ_Δ²)·S²/σ² (MP-DP, Eq. (23))",
    "tail": "σ = S·√(2·ln(1/δ))/ε (NADP-FL's formula, by which MP-DP was run here at first)",
}


def _caveats(budget: AssumedBudget) -> Caveats:
    return Caveats(
        paper=f"{_FORMULAS[budget.calibration]} for each round, S = {budget.sensitivity:g}",
        notes=("epsilon is that of one round, as in the paper; a run of T rounds composes to far more",),
    )


def _noise(law: Law, budget: AssumedBudget, pairs: AssumedPairOptions) -> AssumedNoise:
    return AssumedNoise(
        budget.sigma(pairs.pair_strength),
        law,
        sensitivity=budget.sensitivity,
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
    budget: AssumedBudget,
    pairs: AssumedPairOptions,
    head: GroupedHeadOptions,
) -> Scheme:
    """MP_Server down, DDP_Client up."""
    return Scheme(
        name="mpdp",
        downlink=Decomposed(head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=_noise("decomposed", budget, pairs),
        caveats=_caveats(budget),
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
    budget: AssumedBudget,
    pairs: AssumedPairOptions,
    head: GroupedHeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """Gaussian noise of MP-DP's size added in the perturbed domain: σ by every client (Eq. (7))."""
    if budget.calibration == "tail":
        noise = _noise("gaussian", budget, pairs)
    elif pairs != AssumedPairOptions():
        raise ConfigError(
            "The clients of mpdp-naive share no noise (MP-DP, Eq. (7)): leave neighbours, pair_strength and "
            f"skip_cancelling out, or say {spelled('calibration', 'tail')} for the form in which they share it."
        )
    else:
        noise = AssumedNoise(budget.sigma(), "gaussian", shared=False, sensitivity=budget.sensitivity)
    return Scheme(
        name="mpdp-naive",
        downlink=Rescaling(spread, head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=noise,
        caveats=_caveats(budget),
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
    budget: AssumedBudget,
    head: GroupedHeadOptions,
    spread: float = 4.0,
) -> Scheme:
    """The accuracy that noise on the true aggregate would give."""
    return Scheme(
        name="mp-cdp",
        downlink=Rescaling(spread, head.noise(setting)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=Bare(acquainted=True),
        central=AssumedCentral(budget.sigma(), budget.sensitivity),
        caveats=_caveats(budget),
    )
