"""FedVeil's own schemes for both directions: masks under a veil, and honest noise under a veil."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedveil.downlink.rescaling import Rescaling
from fedveil.protocol.parts import Scheme, Uplink
from fedveil.schemes.lossless import lossless
from fedveil.schemes.options import DpOptions, GroupedHeadOptions, LocalOptions, MaskOptions, PairOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.graph import COLLUSION
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.work.gradients import Gradients
from fedveil.work.messages import LocalWork

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
        plan = NoisePlan(
            dp.target(setting),
            "sum",
            dp.accounting,
            collusion=pairs.collusion,
            neighbours=masking.neighbours,
            quorum=masking.threshold,
            asked=setting.cohort,
        )
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
