"""Plain federated averaging: the baseline that hides nothing."""

from __future__ import annotations

from dataclasses import replace

from fedveil.downlink.plain import Plain
from fedveil.downlink.rescaling import HeadNoise, Rescaling
from fedveil.errors import ConfigError
from fedveil.ledger.releases import Remarks
from fedveil.protocol.parts import Scheme
from fedveil.schemes import caveats as remarks
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.losses import SquareLoss, refuse_head_noise
from fedveil.work.messages import LocalWork

_OPEN = ("client data: the server sees every client's gradient", remarks.MODEL_OPEN)


@scheme(
    "fedavg",
    paper="McMahan et al. 2017",
    summary="plain federated averaging; one local step is FedSGD",
    protects="nothing: clients see the model, the server sees every client's gradient",
)
def fedavg(setting: Setting, *, local_steps: int | None = None, local_epochs: int | None = None) -> Scheme:
    """Local steps or epochs, averaged by |D_k|; neither given means one step."""
    if local_steps is not None and local_epochs is not None:
        raise ConfigError("Give local_steps or local_epochs, not both.")
    for name, value in (("local_steps", local_steps), ("local_epochs", local_epochs)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1 (got {value}).")
    one = local_epochs is None and local_steps in (None, 1)
    work: LocalWork = (
        Gradients(setting.loss, setting.batches, setting.vectorise)
        if one
        else LocalSteps(setting.loss, setting.batches, setting.schedule, local_steps, local_epochs)
    )
    return Scheme(name="fedavg", downlink=Plain(), work=work, uplink=Bare(), remarks=Remarks(unprotected=_OPEN))


_PROTECTS = (
    "the server's parameters from clients up to secret scales (measured, not proven; the head noise falls to a "
    "client with ten inputs, labelled or not); client data from the server: not at all"
)


def head_of(setting: Setting, head_noise: bool, groups: int | None, strength: float) -> HeadNoise | None:
    """The head noise that fits the loss, if it is wanted."""
    if not head_noise:
        return None
    refuse_head_noise(setting.loss)
    weighted = isinstance(setting.loss, SquareLoss) and setting.loss.true_weight != 1.0
    if not strength > 0:
        raise ConfigError(f"head_strength must be positive (got {strength}); 1 is the default.")
    return HeadNoise(groups, strength, weighted)


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
    head_groups: int | None = None,
    head_strength: float = 1.0,
    spread: float = 4.0,
    head_noise: bool = True,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """Rescaling + head noise, m groups; m = the number of outputs unless given."""
    if local_steps not in (None, 1) or local_epochs is not None:
        raise ConfigError(
            "Training under a veil takes exactly one gradient per round: the recovery identity holds at the "
            "broadcast point, and a second local step would start from parameters the server cannot undo. Use more "
            "rounds instead, or --scheme fedavg for local training without a veil."
        )
    return Scheme(
        name="lossless",
        downlink=Rescaling(spread, head_of(setting, head_noise, head_groups, head_strength)),
        work=Gradients(setting.loss, setting.batches, setting.vectorise),
        uplink=Bare(),
        remarks=Remarks(unprotected=("client data: the server recovers every client's gradient", remarks.VEIL)),
    )


@scheme(
    "pbpfl",
    paper="PBPFL (Feng, Yang et al. 2020)",
    summary="rescaled model and head noise with one secret γ",
    protects=_PROTECTS,
    default_loss="square",
)
def pbpfl(
    setting: Setting,
    *,
    head_strength: float = 1.0,
    spread: float = 4.0,
    head_noise: bool = True,
    local_steps: int | None = None,
    local_epochs: int | None = None,
) -> Scheme:
    """`lossless` with m = 1."""
    own = {"head_strength": head_strength, "spread": spread, "head_noise": head_noise}
    same = lossless(setting, head_groups=1, local_steps=local_steps, local_epochs=local_epochs, **own)
    return replace(same, name="pbpfl")
