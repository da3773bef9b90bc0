"""Plain federated averaging: the baseline that hides nothing."""

from __future__ import annotations

from fedveil.downlink.plain import Plain
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
    work: LocalWork = Gradients(setting.loss, setting.batches, setting.vectorise)
    if local.one_gradient:
        local.refuse_training()
    else:
        work = local.training(setting)
    return Scheme(name="fedavg", downlink=Plain(), work=work, uplink=Bare())
