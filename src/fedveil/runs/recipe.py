"""The recipe of a training: learning rate, schedule, the server's optimiser, and what is done to pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from fedveil.config import ADAPTIVE, OBJECT, RunConfig
from fedveil.data.lazy import Transform
from fedveil.errors import ConfigError, spelled
from fedveil.plain import IN_PYTHON, augmenting, shares_of
from fedveil.protocol.parts import Scheme
from fedveil.roles.server import Optimiser
from fedveil.work import Loss, Schedule
from fedveil.work.batches import Factor, PictureAugmentation, mixed_seed
from fedveil.work.messages import Augmentation

_CROP, _CUTOUT = 4, 8
_TRANSFORMED = 0x7F0
_USUAL_RATES = {"square": 0.02}
_USUAL_RATE = 0.1
_ADAPTIVE_RATE, _LOCAL_ADAPTIVE_RATE = 0.01, 0.001


def rate_of(config: RunConfig, loss: Loss) -> float:
    """The learning rate before any schedule: as given, or what usually goes with the loss and the optimiser.

    The gradient of the square loss grows with the error, so that a step too large makes the next one larger.
    """
    return config.lr if isinstance(config.lr, float) else usual_rate(config, loss.name)


def usual_rate(config: RunConfig, loss: str) -> float:
    """The learning rate that usually goes with the optimiser, and with a loss."""
    if config.optimiser in ADAPTIVE:
        return _ADAPTIVE_RATE
    if config.client_lr is not None:
        return 1.0
    if config.client_optimiser == "adam":
        return _LOCAL_ADAPTIVE_RATE
    return _USUAL_RATES.get(loss, _USUAL_RATE)


def schedule_of(config: RunConfig, rate: float, shape: Factor | None = None) -> Schedule:
    """How the learning rate goes over the rounds; `shape` is the caller's own."""
    if shape is None and config.lr_schedule.startswith(OBJECT):
        raise ConfigError(
            f"This run's lr_schedule {config.lr_schedule.removeprefix(OBJECT)!r} was given as a function from Python: "
            "go on with it there, train(…, lr_schedule=…, resume=True)."
        )
    steps = None if config.lr_steps is None else shares_of(config.lr_steps)
    given = {"warm_up": config.warm_up, "steps": steps, "drop": config.lr_drop, "power": config.lr_power}
    schedule = Schedule(rate, config.lr_decay, shape or config.lr_schedule, config.rounds, **_said(given))
    if shape is not None:
        for round in (0, config.rounds - 1):  # what fails is told before anything is trained
            schedule.at(round)
    return schedule


def optimiser_of(config: RunConfig, scheme: Scheme, schedule: Schedule) -> Optimiser:
    """The step that is taken with what clients bring together."""
    if scheme.work.returns != "gradient" and config.client_lr is None:
        if config.optimiser in ADAPTIVE:
            raise ConfigError(
                f"optimiser = {config.optimiser!r} makes steps of a size of their own from the clients' updates, so it "
                f"takes two rates: give the clients' as {spelled('client_lr')}; {spelled('lr')} and its schedule are "
                "then the server's."
            )
        # Updates are already multiplied by the local learning rate: the server takes them whole.
        schedule = Schedule(1.0)
    beta1 = 0.0 if config.beta1 is None and config.optimiser == "adagrad" else config.beta1
    given = {"kind": config.optimiser, "beta1": beta1, "beta2": config.beta2, "tau": config.tau}
    return Optimiser(schedule, config.momentum, config.weight_decay, **_said(given))


def _said(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are given; the others are what they are by default."""
    return {name: value for name, value in settings.items() if value is not None}


def augmentation_of(
    config: RunConfig,
    input_shape: tuple[int, ...],
    *,
    text: bool = False,
    own: Callable[[Tensor], Tensor] | None = None,
) -> Augmentation | None:
    """What is done to inputs in training; `own` is the caller's function of one input, `text` says that they are words.

    Raises:
        ConfigError: The samples are no pictures, or smaller than what is to be cut off or out.
    """
    named = config.augment
    if named is None:
        return None
    assert config.seed is not None
    if own is not None:
        return Transform(own, partial(mixed_seed, config.seed, _TRANSFORMED))
    if named.startswith(OBJECT):
        raise ConfigError(
            f"This run's augment {named.removeprefix(OBJECT)!r} was given as a function from Python: go on with it "
            "there, train(…, augment=…, resume=True)."
        )
    if len(input_shape) != 3 or text:
        sort = "texts" if text else f"numbers of shape {input_shape}"
        whose = "" if config.dataset == IN_PYTHON else f" of {config.dataset}"
        raise ConfigError(
            f"augment = {named!r} is for pictures (channels, height, width), and the samples{whose} are {sort}: leave "
            "it out, or give a function of your own in Python, train(…, augment=…)."
        )
    asked, side = augmenting(named), min(input_shape[1:])
    sizes = {name: asked[name] or usual for name, usual in (("crop", _CROP), ("cutout", _CUTOUT)) if name in asked}
    for name, size in sizes.items():
        if size >= side:
            instead = f"write a smaller one, like {name}:{max(1, side // 4)}" if side > 1 else f"leave {name} out"
            raise ConfigError(
                f"augment = {named!r}: {name}:{size} is as large as the pictures of {input_shape[1]}×{input_shape[2]} "
                f"pixels; {instead}."
            )
    return PictureAugmentation(
        config.seed, (input_shape[1], input_shape[2]), sizes.get("crop", 0), "flip" in asked, sizes.get("cutout", 0)
    )
