"""Differential privacy on the way up: each client for itself, by a trusted server, or by noise that annihilates."""

from __future__ import annotations

from fedveil.downlink.plain import Plain
from fedveil.errors import ConfigError
from fedveil.ledger.releases import Remarks
from fedveil.protocol.parts import Scheme
from fedveil.schemes import caveats as remarks
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.central import PlannedCentral
from fedveil.uplink.noise_plan import Accounting, NoisePlan, Target
from fedveil.uplink.noised import Dropouts, Noised
from fedveil.uplink.plain import Bare
from fedveil.work.clipping import ClippedSamples, ClippedUpdate
from fedveil.work.local_sgd import LocalSteps

EPSILON = 3.0
DELTA = 1e-5
CLIP = 1.0


def target_of(setting: Setting, epsilon: float, delta: float) -> Target:
    """The run's target."""
    return Target(epsilon, delta, setting.rounds, setting.participations, setting.rate)


def clipped_work(
    setting: Setting,
    clip: float,
    local_steps: int | None = None,
    local_epochs: int | None = None,
    secret_sampling: float | None = None,
) -> ClippedSamples | ClippedUpdate:
    """One step on clipped samples, or, with local training, a clipped update."""
    if local_steps in (None, 1) and local_epochs is None:
        return ClippedSamples(setting.loss, setting.batches, clip, setting.vectorise, secret_sampling)
    if secret_sampling is not None:
        raise ConfigError("secret_sampling draws the one batch of a round: it does not go with local training.")
    if local_steps is not None and local_epochs is not None:
        raise ConfigError("Give local_steps or local_epochs, not both.")
    local = LocalSteps(setting.loss, setting.batches, setting.schedule, local_steps, local_epochs)
    return ClippedUpdate(local, clip)


@scheme(
    "ldp",
    paper="LDP-FL (Wei et al. 2020), the baseline of NADP-FL",
    summary="every client adds enough Gaussian noise for itself",
    protects="each client's records from everybody, (ε, δ); the model from nobody",
)
def ldp(
    setting: Setting,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    secret_sampling: float | None = None,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """Per-sample clipping and local noise; records may be sampled by the client's own secrets."""
    plan = NoisePlan(target_of(setting, epsilon, delta), "local", accounting, sampling=secret_sampling)
    return Scheme(
        name="ldp",
        downlink=Plain(),
        work=clipped_work(setting, clip, local_steps, local_epochs, secret_sampling),
        uplink=Noised(plan),
        remarks=Remarks(
            assumptions=(remarks.OWN_NOISE, *(() if secret_sampling is None else (remarks.SECRET_BATCH,))),
            unprotected=(remarks.MODEL_OPEN,),
            paper="σ_i = 2C·√(2qT·ln(1/δ))/(ε·|D_i|) (Wei et al. 2020, as NADP-FL quotes it)",
        ),
    )


@scheme(
    "cdp",
    paper="central DP (the baseline)",
    summary="a trusted server adds Gaussian noise once to the sum",
    protects="each client's records from others who see models, (ε, δ); from the server: not at all",
)
def cdp(
    setting: Setting,
    *,
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """Per-sample clipping, bare uploads, noise by the server."""
    plan = NoisePlan(target_of(setting, epsilon, delta), "sum", accounting, trusted=True)
    return Scheme(
        name="cdp",
        downlink=Plain(),
        work=clipped_work(setting, clip, local_steps, local_epochs),
        uplink=Bare(acquainted=True),
        central=PlannedCentral(plan),
        remarks=Remarks(
            assumptions=(
                remarks.SIZES,
                "the server is trusted: it adds the noise, and shows nobody what it was sent",
            ),
            unprotected=(remarks.MODEL_OPEN, "clients' gradients: the server sees every one"),
            paper="σ = 2C·√(2T·ln(1/δ))/(ε·|D|)",
        ),
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
    epsilon: float = EPSILON,
    delta: float = DELTA,
    clip: float = CLIP,
    accounting: Accounting = "exact",
    collusion: float = 0.0,
    pair_strength: float | None = None,
    dropouts: Dropouts = "repair",
    repair_limit: float = 1 / 3,
    honest_arrivals: bool = False,
    neighbours: int | None = None,
    skip_cancelling: bool = False,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """Per-sample clipping, residual and pair noise: equal shares, or with paper accounting the paper's, by size."""
    return Scheme(
        name="nadp",
        downlink=Plain(),
        work=clipped_work(setting, clip, local_steps, local_epochs),
        uplink=pairwise(
            setting,
            epsilon=epsilon,
            delta=delta,
            accounting=accounting,
            collusion=collusion,
            pair_strength=pair_strength,
            dropouts=dropouts,
            repair_limit=repair_limit,
            neighbours=neighbours,
            skip_cancelling=skip_cancelling,
        ),
        honest_arrivals=honest_arrivals,
        remarks=Remarks(
            assumptions=(
                *(remarks.SIZES, remarks.KEYS, *remarks.shared_noise(collusion, accounting)),
                *((remarks.REPAIRS,) if dropouts == "repair" else ()),
            ),
            unprotected=(remarks.MODEL_OPEN,),
            paper="σ_down = 4C·√(T·ln(1/δ))/(ε·|D|), pair noise by Algorithm 2 (NADP-FL)",
        ),
    )


def pairwise(
    setting: Setting,
    *,
    epsilon: float,
    delta: float,
    accounting: Accounting,
    collusion: float,
    pair_strength: float | None,
    dropouts: Dropouts,
    repair_limit: float,
    neighbours: int | None,
    skip_cancelling: bool = False,
) -> Noised:
    """The uplink of residual and pair noise; `tolerate` keeps the paper's pair strength, since it may stay behind."""
    plan = NoisePlan(
        target_of(setting, epsilon, delta),
        "pairs",
        accounting,
        pair_strength,
        collusion,
        neighbours,
        tolerant=dropouts == "tolerate",
        asked=setting.cohort,
    )
    return Noised(plan, dropouts, repair_limit, cancelling=not skip_cancelling)
