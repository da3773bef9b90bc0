"""Schemes whose model lives with the server: averaging in the clear, differential privacy, veils, and both together."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedveil.downlink.plain import Plain
from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import ConfigError, spelled
from fedveil.ledger import caveats
from fedveil.ledger.releases import Caveats
from fedveil.protocol.parts import Scheme, Uplink
from fedveil.schemes.options import (
    CLIPPED_STEPS,
    AdaptiveOptions,
    DpOptions,
    GroupedHeadOptions,
    HeadOptions,
    LocalOptions,
    MaskOptions,
    PairOptions,
)
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.uplink.noised import Noised
from fedveil.uplink.plain import Bare, PlannedCentral
from fedveil.work.gradients import Gradients
from fedveil.work.losses import CrossEntropy
from fedveil.work.messages import LocalWork


@scheme(
    "fedavg",
    paper="McMahan et al. 2017",
    summary="plain federated averaging; one local step is FedSGD",
    protects="nothing: clients see the model, the server sees every client's gradient",
)
def fedavg(setting: Setting, *, local: LocalOptions) -> Scheme:
    """Local steps or epochs, averaged by |D_k|; neither given means one step."""
    work: LocalWork = Gradients(setting.loss, setting.batches, setting.vectorise)
    if local.one_gradient:
        local.refuse_training()
    else:
        work = local.training(setting)
    return Scheme(name="fedavg", downlink=Plain(), work=work, uplink=Bare())


# --- differential privacy on the way up: each client for itself, by a trusted server, or by noise that annihilates


@scheme(
    "ldp",
    paper="LDP-FL (Wei et al. 2020), the baseline of NADP-FL",
    summary="every client adds enough Gaussian noise for itself",
    protects="each client's records from everybody, (ε, δ); the model from nobody",
    compared=CLIPPED_STEPS,
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
    compared=CLIPPED_STEPS,
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
    compared=CLIPPED_STEPS,
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


# --- the model under a veil that costs no accuracy

_PROTECTS = (
    "the server's parameters from clients up to secret scales, without head noise orders and signs too (measured, not "
    "proven; the head noise falls to a client with ten inputs, labelled or not); client data from the server: not at "
    "all"
)


@scheme(
    "lossless",
    paper="Accuracy-lossless perturbation (Yang et al. 2022)",
    summary="rescaled model and head noise with m secrets γ_1…γ_m (default: one per output)",
    protects=_PROTECTS,
    default_loss="square",
)
def lossless(
    setting: Setting,
    *,
    head: GroupedHeadOptions,
    spread: float = 4.0,
    stream_rotations: bool = False,
    local: LocalOptions,
) -> Scheme:
    """Rescaling + head noise, m groups or a partition of the outputs; m = the number of outputs unless given."""
    noise = head.noise(setting)
    many = "full" if local.one_gradient else local.families[0]
    family = setting.family_or(many if noise is None or stream_rotations else "scale")
    work: LocalWork = Gradients(setting.loss, setting.batches, setting.vectorise)
    if stream_rotations and not local.one_gradient:
        raise ConfigError(
            "Stream rotations fold gains into the layers that read them, and a client's own steps would train the "
            f"folded network: take one gradient per round, or {spelled('stream_rotations', False)}."
        )
    if local.one_gradient:
        local.refuse_training()
    elif family in local.families and noise is None:
        work = local.training(setting)
    elif noise is None and local.client_optimiser == "adam":
        raise ConfigError(
            "Adam divides every number's step by the size of that number's gradients, which the server can undo under "
            f"secret orders and signs alone: {spelled('family', family)} mixes or scales numbers. Take "
            f"{spelled('family', 'signed')} ({spelled('family', 'auto')}, the default, does), or "
            f"{spelled('client_optimiser', 'sgd')} under {spelled('family', 'isometry')}."
        )
    else:
        raise ConfigError(
            "Training under this veil takes exactly one gradient per round: the recovery identity holds at the "
            "broadcast point, and a second local step would start from parameters the server cannot undo. Without "
            f"head noise ({spelled('head_noise', False)}) and scales ({spelled('family', 'auto')}, the default, then "
            f"takes isometries, for clients' own adam orders and signs) clients train step by step; or use more "
            f"rounds, or {spelled('scheme', 'fedavg')} for local training without a veil."
        )
    shifted = family == "full" and noise is None and isinstance(setting.loss, CrossEntropy)
    downlink = Rescaling(spread, noise, family, stream_rotations, shifted)
    return Scheme(name="lossless", downlink=downlink, work=work, uplink=Bare())


@scheme(
    "pbpfl",
    paper="PBPFL (Feng, Yang et al. 2020)",
    summary="rescaled model and head noise with one secret γ",
    protects=_PROTECTS,
    default_loss="square",
)
def pbpfl(setting: Setting, *, head: HeadOptions, spread: float = 4.0, local: LocalOptions) -> Scheme:
    """`lossless` with m = 1."""
    grouped = GroupedHeadOptions(head.head_strength, head.head_noise, head_groups=1)
    return replace(lossless(setting, head=grouped, spread=spread, local=local), name="pbpfl")


# --- FedVeil's own schemes for both directions: masks under a veil, and honest noise under a veil

Cover = Literal["noise", "masks"]


@scheme(
    "veil-secagg",
    paper="FedVeil: rescaling + secure aggregation (Bonawitz et al. 2017, Bell et al. 2020)",
    summary="veiled model down; up, everything masked modulo 2^64: the server learns the sum",
    protects=(
        "client data from the server: it learns only sums (proven, with a tenth of the clients colluding, but for a "
        "chance that the ledger prints: 2^-30 a run unless cohorts are small); the model from clients up to "
        "secret scales (measured)"
    ),
    default_loss="square",
)
def veil_secagg(
    setting: Setting,
    *,
    head: GroupedHeadOptions,
    spread: float = 4.0,
    masking: MaskOptions,
    value_range: float = 2.0**24,
    collusion: float = COLLUSION,
    stream_rotations: bool = False,
    local: LocalOptions,
) -> Scheme:
    """`lossless`, with everything a client sends under masks; `collusion` is the share of clients they withstand."""
    masks = masking.masks(value_range, collusion=collusion)
    veiled = lossless(setting, head=head, spread=spread, stream_rotations=stream_rotations, local=local)
    work: LocalWork = Gradients(setting.loss, setting.batches, setting.vectorise, refuses=False)
    if not local.one_gradient:
        work = replace(local.training(setting), refuses=False)
    return replace(veiled, name="veil-secagg", work=work, uplink=masks)


@scheme(
    "veil-dp",
    paper="FedVeil: a veil + clipped, noised perturbed gradients",
    summary="veiled model down; up, per-sample clipped perturbed gradients under residual and pair noise",
    protects=(
        "each client's records from the server and other clients, (ε, δ), whatever secrets the server chose; the model "
        "from clients up to secret orders and signs of hidden units, or scales (measured)"
    ),
    compared=CLIPPED_STEPS,
)
def veil_dp(
    setting: Setting,
    *,
    dp: DpOptions,
    spread: float | None = None,
    cover: Cover = "noise",
    pairs: PairOptions,
    masking: MaskOptions,
) -> Scheme:
    """A veil without head noise, so that any loss works and one tensor is enough.

    Isometries leave noise at the price of `nadp`; a `spread` asks for scales instead, which make it dearer.
    """
    uplink: Uplink
    if cover == "masks":
        plan = masking.plan(setting, dp, collusion=pairs.collusion)
        # Less than that share is only what the noise is sized for.
        uplink = masking.masks(noise=plan, collusion=max(pairs.collusion, COLLUSION))
    else:
        uplink = pairs.noised(setting, dp)
    family = setting.family_or("isometry" if spread is None else "scale")
    return Scheme(
        name="veil-dp",
        downlink=Rescaling(1.5 if spread is None else spread, family=family),
        work=LocalOptions().clipped(setting, dp),
        uplink=uplink,
        honest_arrivals=pairs.honest_arrivals,
    )
