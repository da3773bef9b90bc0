"""Plain federated averaging: the baseline that hides nothing."""

from __future__ import annotations

from fedveil.downlink.plain import Plain
from fedveil.errors import ConfigError
from fedveil.protocol.parts import Scheme
from fedveil.schemes.options import LocalOptions
from fedveil.schemes.registry import Setting, scheme
from fedveil.uplink.plain import Bare
from fedveil.work.gradients import Gradients
from fedveil.work.messages import LocalWork


@scheme(
    "fedavg",
    paper="McMahan et al. 2017",
    summary="plain federated averaging; one local step is FedSGD",
    protects="nothing: clients see the model, the server sees every client's gradient",
)
def fedavg(setting: Setting, *, local: LocalOptions) -> Scheme:
    """Local steps or epochs, averaged by |D_k|; neither given means one step."""
    for name, value in vars(local).items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1 (got {value}).")
    gradient = Gradients(setting.loss, setting.batches, setting.vectorise)
    work: LocalWork = gradient if local.one_gradient else local.training(setting)
    return Scheme(name="fedavg", downlink=Plain(), work=work, uplink=Bare())
