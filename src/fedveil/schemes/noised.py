"""Differential privacy on the way up: each client for itself, by a trusted server, or by noise that annihilates."""

from __future__ import annotations

from fedveil.downlink.plain import Plain
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import AdaptiveOptions, DpOptions, LocalOptions, PairOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.central import PlannedCentral
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.plain import Bare


@scheme(
    "ldp",
    paper="LDP-FL (Wei et al. 2020), the baseline of NADP-FL",
    summary="every client adds enough Gaussian noise for itself",
    protects="each client's records from everybody, (ε, δ); the model from nobody",
)
def ldp(
    setting: Setting,
    *,
    dp: DpOptions,
    secret_sampling: float | None = None,
    local: LocalOptions,
    adaptive: AdaptiveOptions,
) -> Scheme:
    """Per-sample clipping and local noise; records may be sampled by the client's own secrets."""
    plan = NoisePlan(dp.target(setting), "local", dp.accounting, sampling=secret_sampling)
    return Scheme(
        name="ldp",
        downlink=Plain(),
        work=local.clipped(setting, dp, secret_sampling, adaptive.rule(), statistics=dp.by_paper),
        uplink=Noised(plan),
        caveats=Caveats(paper="σ_i = 2C·√(2qT·ln(1/δ))/(ε·|D_i|) (Wei et al. 2020, as NADP-FL quotes it)"),
    )


@scheme(
    "cdp",
    paper="central DP (the baseline)",
    summary="a trusted server adds Gaussian noise once to the sum",
    protects="each client's records from others who see models, (ε, δ); from the server: not at all",
)
def cdp(setting: Setting, *, dp: DpOptions, local: LocalOptions, adaptive: AdaptiveOptions) -> Scheme:
    """Per-sample clipping, bare uploads, noise by the server."""
    plan = NoisePlan(dp.target(setting), "sum", dp.accounting, trusted=True)
    return Scheme(
        name="cdp",
        downlink=Plain(),
        work=local.clipped(setting, dp, adaptive=adaptive.rule()),
        uplink=Bare(acquainted=True),
        central=PlannedCentral(plan),
        # Stored ledgers have the model first, before what the uplink leaves open.
        caveats=Caveats(unprotected=(caveats.MODEL_OPEN,), paper="σ = 2C·√(2T·ln(1/δ))/(ε·|D|)"),
    )


@scheme(
    "nadp",
    paper="NADP-FL (noise annihilation)",
    summary="noise shared by pairs of clients covers each upload and cancels in the sum",
    protects="each client's records from the server and other clients, (ε, δ); the model from nobody",
)
def nadp(
    setting: Setting,
    *,
    dp: DpOptions,
    pairs: PairOptions,
    skip_cancelling: bool = False,
    local: LocalOptions,
    adaptive: AdaptiveOptions,
) -> Scheme:
    """Per-sample clipping, residual and pair noise: equal shares, or with paper accounting the paper's, by size."""
    return Scheme(
        name="nadp",
        downlink=Plain(),
        work=local.clipped(setting, dp, adaptive=adaptive.rule(), statistics=dp.by_paper),
        uplink=pairs.noised(setting, dp, cancelling=not skip_cancelling),
        honest_arrivals=pairs.honest_arrivals,
        caveats=Caveats(paper="σ_down = 4C·√(T·ln(1/δ))/(ε·|D|), pair noise by Algorithm 2 (NADP-FL)"),
    )
