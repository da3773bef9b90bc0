"""FedVeil's own schemes for both directions: masks under a veil, and honest noise under a veil."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from fedveil.downlink.rescaling import Rescaling
from fedveil.ledger.releases import Caveats
from fedveil.protocol.directory import draws_of
from fedveil.protocol.parts import Scheme, Uplink
from fedveil.schemes import caveats
from fedveil.schemes.lossless import lossless
from fedveil.schemes.options import DpOptions, HeadOptions, LocalOptions, MaskOptions, PairOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.graph import COLLUSION, LEAST_BITS, colluding, masking_degree, surrounded_bits
from fedveil.uplink.masked import Masked
from fedveil.uplink.noise_plan import NoisePlan
from fedveil.work.gradients import Gradients

Cover = Literal["noise", "masks"]


def masked_assumptions(setting: Setting, masks: Masked) -> tuple[str, ...]:
    """How many clients may side with the server, what that means for a neighbourhood, and what else masks rest on."""
    threshold = masks.quorum.fraction
    share = masks.quorum.colluding
    few = "a third" if abs(share - 1 / 3) < 1e-3 else f"{share:.3g}"
    collusion = f"at most {few} of each client's neighbours collude (threshold {threshold:.3g})"
    if share < 1e-9:
        collusion = f"none of a client's neighbours collude (threshold {threshold:.3g})"
    given = (collusion, *((_surrounded(setting, masks),) if setting.cohort > 2 else ()))
    return (*given, caveats.HONEST_ARRIVALS) if masks.unmask == "on-dropout" else given


def _surrounded(setting: Setting, masks: Masked) -> str:
    """What share of clients may collude so that this holds, and with which chance it does not."""
    size, draws, needed = setting.cohort, draws_of(setting.rounds), masks.quorum.of
    everybody, sampled = max(setting.clients, size), setting.clients > size
    degree = masks.degree_of(size, of=everybody, draws=draws)
    bits = surrounded_bits(size, of=everybody, degree=degree, share=masks.collusion, needed=needed, draws=draws)
    whose, chosen = ("all", "asked with whom or ") if sampled else ("a round's", "")
    who = (
        f"at most {colluding(everybody, masks.collusion)} of {whose} {everybody} clients collude (collusion "
        f"{masks.collusion:g}), and not by who is {chosen}whose neighbour; "
    )
    if math.isinf(bits):
        return f"{who}that many surround nobody who has {degree} neighbours"
    chance = f"the chance that they surround an honest client of {degree} neighbours anywhere in the run is "
    if degree == size - 1 and not sampled:
        return f"{who}with everybody a neighbour of everybody that is TOO MANY: raise threshold, or lower collusion"
    if bits >= LEAST_BITS:
        return f"{who}{chance}at most 2^-{bits:.1f}"
    bound = "not bounded" if bits <= 0 else f"bounded by 2^-{bits:.1f} only"
    fitting = masking_degree(size, of=everybody, share=masks.collusion, needed=needed, draws=draws)
    mend = f"give {fitting} neighbours or leave the choice to FedVeil"
    if degree >= fitting:
        mend = f"cohorts of {size} are too small for such a share, give a larger cohort"
    return f"{who}{chance}{bound}, MORE than 2^-{LEAST_BITS}: {mend}"


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
    head_groups: int | None = None,
    head: HeadOptions,
    spread: float = 4.0,
    masking: MaskOptions,
    value_range: float = 2.0**24,
    collusion: float = COLLUSION,
    local: LocalOptions,
) -> Scheme:
    """`lossless`, with everything a client sends under masks; `collusion` is the share of clients they withstand."""
    masks = masking.masks(value_range, collusion=collusion)
    veiled = lossless(setting, head_groups=head_groups, head=head, spread=spread, local=local)
    return replace(
        veiled,
        name="veil-secagg",
        work=Gradients(setting.loss, setting.batches, setting.vectorise, refuses=False),
        uplink=masks,
        caveats=Caveats(
            assumptions=(
                caveats.KEYS,
                *masked_assumptions(setting, masks),
            ),
            unprotected=(
                "the sum itself: no differential privacy is claimed for it",
                caveats.DIFFERENCES,
                caveats.CRAFTED,
                caveats.VEIL,
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
    dp: DpOptions,
    spread: float = 1.5,
    cover: Cover = "noise",
    pairs: PairOptions,
    masking: MaskOptions,
) -> Scheme:
    """Rescaling without head noise, so that any loss works and one tensor is enough."""
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
    return Scheme(
        name="veil-dp",
        downlink=Rescaling(spread),
        work=LocalOptions().clipped(setting, dp.clip),
        uplink=uplink,
        honest_arrivals=pairs.honest_arrivals,
        caveats=Caveats(
            assumptions=(
                caveats.SIZES,
                caveats.KEYS,
                *caveats.shared_noise(pairs.collusion, dp.accounting),
                *(masked_assumptions(setting, uplink) if isinstance(uplink, Masked) else ()),
                *((caveats.REPAIRS,) if cover == "noise" and pairs.dropouts == "repair" else ()),
            ),
            unprotected=(
                caveats.VEIL,
                "the model's outputs: without head noise clients compute them exactly",
            ),
        ),
    )
