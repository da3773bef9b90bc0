"""Which loss a run trains on: from its settings and its task, and, for balanced weights, how often classes occur."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedveil.config import OBJECT, RunConfig
from fedveil.errors import ConfigError, DataError, spelled
from fedveil.protocol.parts import Scheme
from fedveil.work import ClientData, Loss, make_loss
from fedveil.work.losses import check_smoothing
from fedveil.work.messages import Source
from fedveil.work.own_loss import OwnLoss, is_own, own_loss, tried

BALANCED = "balanced"
_TRIED = 16
_OF_NAMED_LOSSES = ("class_weights", "label_smoothing", "target_scale", "true_weight")


def loss_of(config: RunConfig, task: str, usual: str, *, counted: Sequence[int] | None = None) -> Loss:
    """The loss that settings name, or the scheme's usual one.

    Args:
        config: The run's settings.
        task: classification, regression or multilabel.
        usual: The scheme's own: a name, or auto, which goes by the task.
        counted: How many samples there are, and how many of each class (or with each label), where somebody counts
            them.

    Raises:
        ConfigError: The loss, its weights or its smoothing do not go with the task.
    """
    name = config.loss or usual
    if name.startswith(OBJECT):
        raise ConfigError(
            f"This run's loss {name.removeprefix(OBJECT)!r} was given as an object from Python: go on with it there, "
            "train(…, loss=…, resume=True)."
        )
    if name == "auto":
        name = {"regression": "square", "multilabel": "binary-cross-entropy"}.get(task, "cross-entropy")
        if (config.target_scale, config.true_weight) != (1.0, 1.0):
            name = "square"
    if name == "cross-entropy" and task != "classification":
        fitting = "square for regression" if task == "regression" else "binary-cross-entropy for several labels"
        raise ConfigError(f"Cross-entropy needs classes; use {spelled('loss', fitting)}.")
    if name == "binary-cross-entropy" and task != "multilabel":
        raise ConfigError(
            "Binary cross-entropy needs labels of 0 and 1, and the task is "
            f"{task}: use {spelled('task', 'multilabel')}, or {spelled('loss', 'cross-entropy')} for classes."
        )
    if config.class_weights is not None and (task == "regression" or (task == "multilabel" and name == "square")):
        raise ConfigError(
            f"class_weights are for classes, or for several labels with {spelled('loss', 'binary-cross-entropy')}: "
            "leave them out."
        )
    check_smoothing(config.label_smoothing, classes=task == "classification")
    return make_loss(
        name,
        target_scale=config.target_scale,
        true_weight=config.true_weight,
        class_weights=_weights(config, task, counted),
        smoothing=config.label_smoothing,
    )


def _weights(config: RunConfig, task: str, counted: Sequence[int] | None) -> tuple[float, ...]:
    if config.class_weights is None:
        return ()
    if config.class_weights != BALANCED:
        return weights_given(config.class_weights)
    if counted is None:
        raise ConfigError(
            "class_weights = 'balanced' counts the classes of all clients, and here nobody may: give the weights as "
            f"numbers, {spelled('class_weights', '1,4.5')}, from what is known of the classes without the clients' "
            "data."
        )
    samples, *counts = counted
    if not all(counts):
        raise DataError(
            f"class_weights = 'balanced': class {counts.index(0)} has no sample in the training part. Give the weights "
            "as numbers."
        )
    if task == "multilabel":
        return tuple((samples - count) / count for count in counts)
    return tuple(samples / (len(counts) * count) for count in counts)


def weights_given(text: str) -> tuple[float, ...]:
    """Class weights as they are typed, 1,4.5,2."""
    try:
        return tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(
            f"class_weights is balanced, or one number per class like 1,4.5,2 (got {text[:60]!r})."
        ) from None


def class_counts(targets: Tensor, outputs: int) -> list[int]:
    """How many samples there are, and how many of each class, or with each label."""
    if targets.is_floating_point():
        return [len(targets), *(targets > 0.5).sum(0).tolist()]
    return [len(targets), *torch.bincount(targets, minlength=outputs).tolist()]


def check_weights(config: RunConfig, loss: Loss, scheme: Scheme, *, outputs: int) -> None:
    """Refuse weights of another number than there are classes, and counts that a scheme promises to protect."""
    weights = getattr(loss, "class_weights", ())
    if weights and len(weights) != outputs:
        raise ConfigError(
            f"class_weights has {len(weights)} numbers, and the data have {outputs} classes: give one number each."
        )
    if config.class_weights == BALANCED and (scheme.plan is not None or not scheme.readable):
        raise ConfigError(
            f"class_weights = 'balanced' counts everybody's classes in the open, and {scheme.name} promises something "
            "about clients' data that does not cover such counts. Give the weights as numbers, "
            f"{spelled('class_weights', '1,4.5')}, from what is known of the classes without these data."
        )


def weights_note(config: RunConfig, loss: Loss) -> tuple[str, ...]:
    """What a ledger says of class weights."""
    weights = getattr(loss, "class_weights", ())
    if not weights:
        return ()
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:10]) + (", …" if len(weights) > 10 else "")
    if config.class_weights == BALANCED:
        return (f"class weights ({shown}) are public and tell how often each class occurs among all clients' samples",)
    return (
        f"class weights ({shown}) are public and were given: what they tell of clients' data, if they come from there, "
        "is not counted",
    )


def own_assumptions(
    loss: Loss, model: nn.Module, sources: Sequence[Source], *, unit: str, augmented: bool, together: bool = False
) -> tuple[str, ...]:
    """What a guarantee takes for granted of code that is the caller's own, beyond what is checked as it runs."""
    said = []
    owned = [*(["the loss"] if isinstance(loss, OwnLoss) else []), *(["the network"] if is_own(model) else [])]
    if owned:
        said.append(
            f"the caller's own code ({' and '.join(owned)}) keeps nothing from one sample for another: asked again "
            "after others, it gave the same for one sample of every batch; the rest is taken for granted"
        )
        if together and unit == "record":
            said.append(
                "the caller's own code does with a sample among others what it does with it alone, also where an "
                "operation raises for one of them (vectorise): taken for granted"
            )
    if (sources or augmented) and unit == "record":
        said.append(
            "samples are read or augmented by the caller's own code, and each is made of one record alone (no mixing "
            "of several): taken for granted"
        )
        if not all(source.repeats for source in sources):
            said.append(
                "samples differ each time they are read, with equal seeds: that this comes from generators of the "
                "caller's own, and not from other samples, could not be tried and is taken for granted"
            )
    return tuple(said)


def loss_settings(given: Any) -> dict[str, Any]:
    """The settings that say what a module or function given as the loss does; one that none say is an object's name."""
    # A subclass may compute anything.
    if type(given) is nn.CrossEntropyLoss and given.ignore_index == -100 and given.reduction != "sum":
        smoothed = {"label_smoothing": float(given.label_smoothing)} if given.label_smoothing else {}
        return {"loss": "cross-entropy", **_weights_of(given.weight), **smoothed}
    if type(given) is nn.BCEWithLogitsLoss and given.weight is None and given.reduction != "sum":
        return {"loss": "binary-cross-entropy", **_weights_of(given.pos_weight)}
    if isinstance(given, type):
        raise ConfigError(f"The loss {given.__name__} is a class: give an object of it, {given.__name__}(…).")
    named = type(given).__name__ if isinstance(given, nn.Module) else getattr(given, "__name__", type(given).__name__)
    return {"loss": f"{OBJECT}{named}"}


def _weights_of(weights: Tensor | None) -> dict[str, str]:
    return {} if weights is None else {"class_weights": listed_weights(weights)}


def listed_weights(weights: Any) -> str:
    """Class weights as settings write them."""
    try:
        return ",".join(repr(float(weight)) for weight in torch.as_tensor(weights, dtype=torch.float64).reshape(-1))
    except (TypeError, ValueError, RuntimeError) as reason:
        raise ConfigError("class_weights is 'balanced', or one number per class.") from reason


def own_objective(
    given: Any, config: RunConfig, model: nn.Module, client: ClientData, *, dtype: torch.dtype, device: torch.device
) -> OwnLoss:
    """The caller's own loss, after it was tried on what the model makes of some samples of a client."""
    for name in _OF_NAMED_LOSSES:
        if getattr(config, name) != getattr(RunConfig(), name):
            raise ConfigError(f"{name} belongs to losses that go by a name: build it into your own loss.")
    loss = own_loss(given, dtype=dtype, device=device)
    x, y = (torch.cat([part, part])[: _TRIED + 1] for part in client.take(torch.arange(min(_TRIED, len(client)))))
    with torch.no_grad():
        output = copy.deepcopy(model).eval().to(device, dtype)(x)
    if len(y) == output.shape[1]:  # targets of one number each would then broadcast to something else
        output, y = output[1:], y[1:]
    if not y.is_floating_point():  # whatever classes these samples have, a loss must show how it treats different ones
        y = torch.arange(len(y), device=device) % output.shape[1]
    return tried(loss, output, y)
