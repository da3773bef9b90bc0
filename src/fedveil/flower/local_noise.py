"""Local differential privacy for any Flower app, and an accountant for Flower's own strategies, both exact.

`local_dp` is a mod in the place of Flower's `LocalDpMod`: the update is clipped and noised on the client, and the
server needs nothing of FedVeil. Where that one sizes noise for one round by a formula that holds for ε ≤ 1, adds it
in floating point and counts nothing, here the target is for a number of rounds together, the noise is an integer
Gaussian on a grid (`fedveil.uplink.grid`), every release is counted, and none leaves that would exceed the target.

`ExactAccountant` speaks Flower's `PrivacyAccountant` for Gaussian releases that no sampling amplifies: their strengths
add in squares, and the ε of the sum is exact, where Rényi accounting rounds up.
"""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.supercore.privacy_accounting import (
    GaussianPrivacyEvent,
    PrivacyConfig,
    PrivacySpent,
    SamplingMethod,
)
from torch import Tensor

from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError
from fedveil.flower.app_memory import folder_of, held, written
from fedveil.flower.app_setup import (
    AppModel,
    checked_number,
    checked_path,
    figures_alone,
    metric_record,
    only_arrays,
    only_metrics,
    update_between,
)
from fedveil.flower.messages import TEXTS
from fedveil.flower.mod import called
from fedveil.ledger.gaussian import delta_of, epsilon_of
from fedveil.plain import whole
from fedveil.runs.folder import write_atomically
from fedveil.uplink.grid import add_noise, grid_of
from fedveil.uplink.noise_plan import NoisePlan, Target
from fedveil.work.clipping import check_bound
from fedveil.work.per_sample import clipped

_LOG = logging.getLogger(__name__)
_LEDGER = "local-dp.json"
_RAISED = 2
_ROUNDING = 1e-9
_METHOD = "exact Gaussian composition"


def local_dp(*, epsilon: float, clip: float, rounds: int, delta: float = 1e-5, home: str | Path | None = None) -> Mod:
    """A mod that clips an app's update and adds noise for (ε, δ) over `rounds` rounds together.

    What is covered is the update, against everybody, for all data of the client: replacing them changes what leaves in
    `rounds` rounds by no more than (ε, δ) allows. Metrics leave as they are, single numbers alone: a list may hold a
    whole update, and is refused. ConfigRecords of replies do not leave, nor do arrays of an evaluation.

    Args:
        epsilon: ε of all rounds together.
        clip: The L2 norm to which the update is clipped, over all arrays.
        rounds: How many rounds this client answers; it refuses the next one.
        delta: δ of all rounds together.
        home: Where nodes remember what they have spent, as in `protect`.

    Returns:
        The mod, for `ClientApp(mods=[…])`. What is spent counts over all runs of a node, in its folder, with a ledger
        in `local-dp.json`.

    Raises:
        ConfigError: A number that cannot be.
    """
    bound, numbers = checked_number("clip", clip), (checked_number("epsilon", epsilon), checked_number("delta", delta))
    if not whole(rounds):
        raise ConfigError(f"rounds must be a whole number (got {rounds!r}).")
    check_bound(bound)
    return _LocalDp(Target(*numbers, rounds, rounds), bound, checked_path("home", home))


class _LocalDp:
    def __init__(self, target: Target, clip: float, home: Path | None) -> None:
        self._target = target
        self._clip = clip
        self._home = home

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Let the app train, and cover what it has learnt; of anything else figures leave."""
        try:
            if message.metadata.message_type.partition(".")[0] != "train":
                return figures_alone(message, called(message, context, call_next))
            return self._covered(message, context, call_next)
        except FedVeilError as reason:
            _LOG.warning("FedVeil refused a round: %s", reason)
            text = TEXTS[reason.code]
        except Exception:
            _LOG.exception("FedVeil could not cover an update")
            text = TEXTS[Code.INTERNAL]
        return Message(Error(_RAISED, f"FedVeil: {text}"), reply_to=message)

    def _covered(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        received = AppModel.read(only_arrays(message.content))
        self._spend(context)  # before anything is computed: whatever happens later, it is paid for
        reply = called(message, context, call_next)
        update = update_between(received, reply.content)
        if not bool(update.isfinite().all()):
            _LOG.warning("the app's update is not finite: noise alone leaves in this round")
        (key,) = reply.content.array_records
        records: dict[str, Any] = {key: received.moved(self._noised(update).numpy())}
        if reply.content.metric_records:
            (name,) = reply.content.metric_records
            records[name] = metric_record(only_metrics(reply.content))
        return Message(RecordDict(records), reply_to=message)

    def _noised(self, update: Tensor) -> Tensor:
        plan = NoisePlan(self._target, "local")
        layout = plan.noise_layout((0,), (1,), (2.0 * self._clip,), seed=b"")
        codec = grid_of(layout, length=len(update), largest=self._clip)
        words = codec.encode(clipped(update, self._clip))
        add_noise(words, variance=float(layout.residual[0]), step=codec.step, seed=os.urandom(32))
        return torch.from_numpy(codec.decode(words))

    def _spend(self, context: Context) -> None:
        """Book one release, or refuse it."""
        folder, price, target = folder_of(context, self._home), self._target.per_round(), self._target
        with held(folder) as stored:
            spent = stored.spent() + price
            if spent > target.mu**2 * (1 + _ROUNDING):
                reached = epsilon_of(math.sqrt(spent - price), target.delta)
                raise _EndedError(
                    f"this client has spent ε = {reached:.4g} of {target.epsilon:g}: it takes no further part. What "
                    f"was spent is kept in {folder}"
                )
            told = {
                "spent": spent,
                "epsilon": epsilon_of(math.sqrt(spent), target.delta),
                "delta": target.delta,
                "target": target.epsilon,
                "clip": self._clip,
                "unit": "all data of this client, replaced",
            }
            with written(folder):
                stored.spend(price)
                write_atomically(folder / _LEDGER, json.dumps(told, indent=2) + "\n", mode=0o600)
        _LOG.info("ε = %.4g of %g is spent, at δ = %g", told["epsilon"], target.epsilon, target.delta)


class _EndedError(ProtocolError):
    code = Code.ENDED


class ExactAccountant:
    """Flower's `PrivacyAccountant`, exact: for the strategies that take one (`accountant=…`).

    A release of noise multiplier z is a Gaussian mechanism of strength μ = 1/z against adding or removing one client,
    and μ² adds over releases. It is the strategy that adds the noise: this counts it.
    """

    def __init__(self, config: PrivacyConfig) -> None:
        """Raises ConfigError where clients are sampled so that sampling is to count: that is not Gaussian."""
        if config.sampling_method is not SamplingMethod.NO_AMPLIFICATION:
            raise ConfigError(
                f"sampling_method = {config.sampling_method.value!r} is no Gaussian composition: use no-amplification, "
                "or Flower's RdpAccountant."
            )
        self._config = config
        self._spent = 0.0
        self._releases = 0

    @property
    def config(self) -> PrivacyConfig:
        """What it was made for."""
        return self._config

    @property
    def num_releases(self) -> int:
        """How many releases it has counted."""
        return self._releases

    def compose(self, event: GaussianPrivacyEvent, count: int = 1) -> None:
        """Count `count` releases."""
        self._spent += self._price(event, count)
        self._releases += count

    def get_epsilon(self, delta: float) -> float:
        """ε of all releases at δ."""
        return epsilon_of(math.sqrt(self._spent), delta)

    def get_delta(self, epsilon: float) -> float:
        """δ of all releases at ε."""
        return delta_of(math.sqrt(self._spent), epsilon)

    def get_privacy_spent(self, delta: float | None = None) -> PrivacySpent:
        """ε of all releases, at δ or at the target's."""
        at = self._config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(at), at, self._releases, _METHOD)

    def would_exceed(self, event: GaussianPrivacyEvent, max_epsilon: float | None = None, count: int = 1) -> bool:
        """Whether so many releases more would exceed a limit; nothing is counted."""
        limit = self._config.max_epsilon if max_epsilon is None else max_epsilon
        if limit is None:
            raise ConfigError("There is no limit: give max_epsilon here, or in the PrivacyConfig.")
        return epsilon_of(math.sqrt(self._spent + self._price(event, count)), self._config.target_delta) > limit

    def state_dict(self) -> dict[str, object]:
        """What it has counted, as plain data."""
        return {"backend": _METHOD, "spent": self._spent, "releases": self._releases}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from there."""
        spent, releases = state.get("spent"), state.get("releases")
        well = isinstance(spent, float) and 0 <= spent < math.inf and type(releases) is int and releases >= 0
        if state.get("backend") != _METHOD or not well:
            raise ConfigError("This is not the state of an ExactAccountant.")
        self._spent, self._releases = spent, releases  # type: ignore[assignment]

    def _price(self, event: GaussianPrivacyEvent, count: int) -> float:
        if event.population_size != self._config.population_size:
            raise ConfigError(
                f"A release among {event.population_size} clients does not belong to an account of "
                f"{self._config.population_size}."
            )
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"count must be a whole number above 0 (got {count}).")
        return count / event.noise_multiplier**2
