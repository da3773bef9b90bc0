"""Local work: what a client computes from a broadcast and its data."""

from fedveil.work.batches import Batches, Schedule
from fedveil.work.gradients import Gradients
from fedveil.work.local_sgd import LocalSteps
from fedveil.work.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquareLoss, make_loss, refuse_head_noise
from fedveil.work.messages import ClientData, LocalWork, Workspace

__all__ = [
    "Batches",
    "BinaryCrossEntropy",
    "ClientData",
    "CrossEntropy",
    "Gradients",
    "LocalSteps",
    "LocalWork",
    "Loss",
    "Schedule",
    "SquareLoss",
    "Workspace",
    "make_loss",
    "refuse_head_noise",
]
