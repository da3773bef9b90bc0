"""FedVeil's own schemes for both directions: masks under a veil, and honest noise under a veil."""

from __future__ import annotations

from dataclasses import replace

from fedveil.downlink.rescaling import Rescaling
from fedveil.errors import unknown_name
from fedveil.ledger.remarks import Remarks
from fedveil.protocol import Scheme
from fedveil.protocol.masked import Masked, Unmasking
from fedveil.protocol.noised import Dropouts
from fedveil.protocol.parts import Uplink
from fedveil.protocol.shares import Quorum
from fedveil.schemes import remarks
from fedveil.schemes.noised import CLIP, DELTA, EPSILON, clipped_work, pairwise, target_of
from fedveil.schemes.registry import Setting, scheme
from fedveil.schemes.veiled import lossless
from fedveil.uplink.plan import Accounting, NoisePlan
from fedveil.work.gradients import Gradients

COVERS = ("noise", "masks")


def masked_assumptions(threshold: float, unmask: Unmasking) -> tuple[str, ...]:
    """How many neighbours may side with the server, and what else masks rest on."""
    share = Quorum(threshold).colluding
    few = "a third" if abs(share - 1 / 3) < 1e-3 else f"{share:.3g}"
    collusion = f"fewer than {few} of each client's neighbours collude (threshold {threshold:.3g})"
    if share < 1e-9:
        collusion = f"none of a client's neighbours collude (threshold {threshold:.3g})"
    return (collusion, remarks.HONEST_ARRIVALS) if unmask == "on-dropout" else (collusion,)


@scheme(
    "veil-secagg",
    paper="FedVeil: rescaling + secure aggregation (Bonawitz et al. 2017, Bell et al. 2020)",
    summary="veiled model down; up, everything masked modulo 2^64: the server learns the sum",
    protects=(
        "client data from the server: it learns only sums (proven, with fewer than a third of a neighbourhood "
        "colluding); the model from clients up to secret scales (measured)"
    ),
    default_loss="square",
)
def veil_secagg(
    setting: Setting,
    *,
    head_groups: int | None = None,
    head_strength: float = 1.0,
    spread: float = 4.0,
    head_noise: bool = True,
    unmask: Unmasking = "always",
    threshold: float = 2 / 3,
    neighbours: int | None = None,
    value_range: float = 2.0**24,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """`lossless`, with everything a client sends under masks."""
    veiled = lossless(
        setting,
        head_groups=head_groups,
        head_strength=head_strength,
        spread=spread,
        head_noise=head_noise,
        local_steps=local_steps,
        local_epochs=local_epochs,
    )
    return replace(
        veiled,
        name="veil-secagg",
        work=Gradients(setting.loss, setting.batches, setting.vectorise, refuses=False),
        uplink=Masked(value_range, unmask, Quorum(threshold), neighbours),
        remarks=Remarks(
            assumptions=(
                remarks.KEYS,
                *masked_assumptions(threshold, unmask),
            ),
            unprotected=(
                "the sum itself: no differential privacy is claimed for it",
                remarks.DIFFERENCES,
                remarks.CRAFTED,
                remarks.VEIL,
            ),
        ),
    )


@scheme(
    "veil-dp",
    paper="FedVeil: rescaling + clipped, noised perturbed gradients",
    summary="veiled model down; up, per-sample clipped perturbed gradients under residual and pair noise",
    protects=(
        "each client's records from the server and other clients, (ε, δ), whatever scales the server chose; the model "
        "from clients up to secret scales (measured)"
    ),
)
def veil_dp(
    setting: Setting,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    collusion: float = 0.0,
    spread: float = 1.5,
    cover: str = "noise",
    pair_strength: float | None = None,
    dropouts: Dropouts = "repair",
    repair_limit: float = 1 / 3,
    honest_arrivals: bool = False,
    neighbours: int | None = None,
    unmask: Unmasking = "always",
    threshold: float = 2 / 3,
) -> Scheme:
    """Rescaling without head noise, so that any loss works and one tensor is enough."""
    if cover not in COVERS:
        raise unknown_name("cover", cover, COVERS)
    uplink: Uplink
    if cover == "masks":
        plan = NoisePlan(
            target_of(setting, epsilon, delta),
            "sum",
            accounting,
            collusion=collusion,
            neighbours=neighbours,
            quorum=threshold,
        )
        uplink = Masked(unmask=unmask, quorum=Quorum(threshold), degree=neighbours, noise=plan)
    else:
        uplink = pairwise(
            setting,
            epsilon=epsilon,
            delta=delta,
            accounting=accounting,
            collusion=collusion,
            pair_strength=pair_strength,
            dropouts=dropouts,
            repair_limit=repair_limit,
            neighbours=neighbours,
        )
    return Scheme(
        name="veil-dp",
        downlink=Rescaling(spread),
        work=clipped_work(setting, clip),
        uplink=uplink,
        honest_arrivals=honest_arrivals,
        remarks=Remarks(
            assumptions=(
                remarks.SIZES,
                remarks.KEYS,
                *remarks.shared_noise(collusion, accounting),
                *(masked_assumptions(threshold, unmask) if cover == "masks" else ()),
                *((remarks.REPAIRS,) if cover == "noise" and dropouts == "repair" else ()),
            ),
            unprotected=(
                remarks.VEIL,
                "the model's outputs: without head noise clients compute them exactly",
            ),
        ),
    )
