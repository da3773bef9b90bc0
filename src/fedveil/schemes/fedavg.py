"""Plain federated averaging: the baseline that hides nothing."""

from __future__ import annotations

from fedveil.downlink.plain import Plain
from fedveil.errors import ConfigError
from fedveil.ledger.remarks import Remarks
from fedveil.protocol import Bare, Scheme
from fedveil.schemes import remarks
from fedveil.schemes.registry import Setting, scheme
from fedveil.work.gradients import Gradients
from fedveil.work.messages import LocalWork
from fedveil.work.updates import LocalSteps

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
