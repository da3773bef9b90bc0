"""The model under a veil that costs no accuracy."""

from __future__ import annotations

from dataclasses import replace

from fedveil.downlink.rescaling import Rescaling
from fedveil.downlink.symmetry import STEP_BY_STEP
from fedveil.errors import ConfigError, spelled
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import GroupedHeadOptions, HeadOptions, LocalOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients
from fedveil.work.losses import CrossEntropy
from fedveil.work.messages import LocalWork

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
    many = "full" if local.one_gradient else "isometry"
    family = setting.family_or(many if noise is None or stream_rotations else "scale")
    work: LocalWork = Gradients(setting.loss, setting.batches, setting.vectorise)
    if stream_rotations and not local.one_gradient:
        raise ConfigError(
            "Stream rotations fold gains into the layers that read them, and a client's own steps would train the "
            f"folded network: take one gradient per round, or {spelled('stream_rotations', False)}."
        )
    if local.one_gradient:
        local.refuse_training()
    elif family in STEP_BY_STEP and noise is None:
        work = local.training(setting)
    else:
        raise ConfigError(
            "Training under this veil takes exactly one gradient per round: the recovery identity holds at the "
            "broadcast point, and a second local step would start from parameters the server cannot undo. Without "
            f"head noise ({spelled('head_noise', False)}) and scales ({spelled('family', 'auto')}, the default, then "
            f"takes isometries) clients train step by step; or use more rounds, or {spelled('scheme', 'fedavg')} for "
            "local training without a veil."
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
