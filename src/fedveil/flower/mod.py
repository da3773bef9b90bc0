"""The client's line of a protected app: `ClientApp(mods=[fedveil.flower.protect()])`.

The mod stands between Flower and the app. It answers key agreement and unmasking by itself; for a round it lets the app
train on what it was sent, and of the app's reply nothing leaves but what the scheme covers (and figures, where the run
says so: the server's ledger lists them). The role is `fedveil.roles.client.ClientRole`, as everywhere.

A process answers one message and ends, so what a client remembers lies in `context.state`: in its SuperNode's memory,
for one run. Where the machine's owner gives a folder (`--node-config 'fedveil-state="…"'`), what was spent in all runs
is kept there, sealed, and `fedveil-policy` names the owner's limits.

What goes wrong is logged here. The server is told a code, never a text: Flower would send it an exception's words,
which may hold data. Whoever submits the run ships the app, this line included: against a submitter who is not trusted a
mod is no protection, and the ledger says so (a worker is: `fedveil.flower.worker`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedveil.config import RunConfig
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError, unknown_name
from fedveil.flower.app_records import (
    AppModel,
    FormError,
    metric_record,
    only_arrays,
    only_metrics,
    update_between,
    weight_in,
)
from fedveil.flower.app_setup import AgreedApp, AppSetup, agreed_app, no_model
from fedveil.flower.client_app import HEADER, PARTS, in_array, out_of_array
from fedveil.flower.client_memory import DamagedError, Memory
from fedveil.flower.messages import TEXTS, request_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState
from fedveil.protocol.codec import encode
from fedveil.protocol.directory import Directory, Hello
from fedveil.protocol.messages import Request
from fedveil.roles.client import ClientRole
from fedveil.runs.terms import Accepted, RequiredError, check_terms, read_required
from fedveil.schemes.on_updates import SLOTS, scheme_info
from fedveil.work.messages import ClientData

_LOG = logging.getLogger(__name__)

METRICS = "fedveil.metrics"
"""The record of an app's figures, where they leave beside the answer."""
NAMES = "names"
"""In the header of an answer: what the figures under the masks are called."""
STATE, POLICY = "fedveil-state", "fedveil-policy"
_MEMORY = "fedveil"
_KEY_BYTES = 32
_RAISED = 2
"""Flower's code for an app that raised an exception."""
_APPS_OWN = ("metrics", "evaluation")
MOST_NAME = 64


class AppError(FedVeilError):
    """The app itself failed."""

    code = Code.APP


class BareError(ProtocolError):
    """A server that asks for the app's updates as they are."""

    code = Code.BARE


def protect(*, require: Mapping[str, Any] | None = None, policy: Policy | None = None) -> Mod:
    """A mod that lets updates leave an app under protection alone.

    Args:
        require: What a run's settings must be for this client to take part, by name: a value, a list of them, or
            {"min": …, "max": …}; like {"scheme": ["secagg"], "cohort": {"min": 5}, "epsilon": {"max": 3}}. What proofs
            rest on has bounds in any case. `metrics` and `evaluation` may be named as well.
        policy: This client's own limits (max_epsilon, min_cohort, collusion, …); a file that the machine's owner
            names with `--node-config 'fedveil-policy="…"'` takes its place.

    Returns:
        The mod, for `ClientApp(mods=[…])`: first in the list, so that others see what the app sees.

    Raises:
        ConfigError: A setting to require that does not exist.
    """
    known = {*(setting.name for setting in fields(RunConfig)), *_APPS_OWN}
    for name in require or {}:
        if name not in known:
            raise unknown_name("setting to require:", name, known)
    return _Protection(read_required(require or {}, where="protect"), policy)


@dataclass(frozen=True, eq=False)
class _Asked:
    """A message of the protocol, read."""

    setup: AppSetup
    client: int
    request: Request
    private: Request | None

    @staticmethod
    def read(content: RecordDict) -> _Asked:
        """What a server sent; anything malformed is refused."""
        try:
            header = content.config_records[HEADER]
            client = header["client"]
            parts = content.array_records[PARTS]
            common = request_of(out_of_array(parts["common"]))
            private = request_of(out_of_array(parts["private"])) if "private" in parts else None
            setup = AppSetup.parse(str(header["setup"]))
        except FedVeilError:
            raise
        except Exception as reason:
            raise ProtocolError("a message of the protocol is malformed") from reason
        if type(client) is not int or client < 0:
            raise ProtocolError("a message names no client's number")
        return _Asked(setup, client, common, private)


class _Protection:
    """The mod. It holds nothing of a run: that is in the context."""

    def __init__(self, require: Mapping[str, Accepted], policy: Policy | None) -> None:
        self._require = require
        self._policy = policy

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """Answer one message, or say with a code why not."""
        mine = message.has_content() and HEADER in message.content
        try:
            if mine:
                return Message(self._answered(message, context, call_next), reply_to=message)
            return self._passed(message, context, call_next)
        except FedVeilError as reason:
            _LOG.warning("FedVeil refused a message: %s", reason)
            code = reason.code
        except Exception:
            _LOG.exception("FedVeil could not deal with a message")
            code = Code.INTERNAL
        if mine:
            return Message(RecordDict({HEADER: ConfigRecord({"code": code.value})}), reply_to=message)
        return Message(Error(_RAISED, f"FedVeil: {_BARE if code is Code.BARE else TEXTS[code]}"), reply_to=message)

    def _passed(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        """A message of the app's own: its figures leave, and nothing that could hold an update."""
        kind = message.metadata.message_type.partition(".")[0]
        if kind == "train":
            raise BareError("a server asked for a training round without protection")
        self._accept_figures("evaluation", "pass", context)
        reply = called(message, context, call_next)
        if reply.content.array_records or reply.content.config_records:
            raise FormError(f"the app's reply to a {kind} message holds more than metrics, which alone leave")
        figures = only_metrics(reply.content)
        name = next(iter(reply.content.metric_records))
        return Message(RecordDict({name: metric_record(figures)}), reply_to=message)

    def _answered(self, message: Message, context: Context, call_next: ClientAppCallable) -> RecordDict:
        asked = _Asked.read(message.content)
        setup = asked.setup
        agreed = agreed_app(setup)
        self._accept(agreed, setup, context)
        policy = self._limits(context)
        memory = _Memory(context, setup, counted=policy is not None)
        state = memory.entered(asked.client)
        _check_name(setup, state, asked.request)
        told: dict[str, Any] = {}
        for name in (HEADER, PARTS):
            del message.content[name]

        def trained() -> Tensor:
            return self._contribution(message, context, call_next, agreed=agreed, setup=setup, told=told)

        role = ClientRole(agreed.training(trained), no_model()[0], policy=policy)
        # As many samples as it has votes: what an update weighs travels with it.
        data = ClientData(asked.client, torch.zeros(1, 0), torch.zeros(1))
        promises: list[ClientState] = []
        try:
            advanced, reply = role.handle(state, asked.request, data, asked.private, promised=promises.append)
        except BaseException:
            if promises:  # it was promised and paid for, whatever has happened since
                memory.keep(promises[-1])
            raise
        memory.keep(advanced)
        header = ConfigRecord({"code": "", **({NAMES: told[NAMES]} if NAMES in told else {})})
        records: dict[str, Any] = {HEADER: header, PARTS: ArrayRecord({"reply": in_array(encode(reply))})}
        if METRICS in told:
            records[METRICS] = told[METRICS]
        return RecordDict(records)

    def _limits(self, context: Context) -> Policy | None:
        return _owners_policy(context) or self._policy

    def _accept_figures(self, name: str, how: str, context: Context) -> None:
        accepted, policy = self._require.get(name), self._limits(context)
        if accepted is not None and not accepted.admits(how):
            raise RequiredError(f"the run has {name} = {how!r}, and protect requires {accepted}")
        if how == "pass" and accepted is None and policy is not None and policy.max_epsilon is not None:
            raise RequiredError(
                f"the run has {name} = 'pass', and no ε covers what passes: the policy's max_epsilon = "
                f"{policy.max_epsilon:g} could not be kept. Allow it in require if that is meant"
            )

    def _accept(self, agreed: AgreedApp, setup: AppSetup, context: Context) -> None:
        own = scheme_info(agreed.config.scheme).options
        settings = {name: value for name, value in self._require.items() if name not in _APPS_OWN}
        check_terms(agreed.config, settings, where="protect(require=…)", own=own)
        self._accept_figures("metrics" if setup.phase == "train" else "evaluation", setup.metrics, context)

    @staticmethod
    def _contribution(
        message: Message,
        context: Context,
        call_next: ClientAppCallable,
        *,
        agreed: AgreedApp,
        setup: AppSetup,
        told: dict[str, Any],
    ) -> Tensor:
        """Let the app work on what it was sent; `told` is what leaves beside its contribution."""
        training = setup.phase == "train"
        received = AppModel.read(only_arrays(message.content))
        if training and len(received.row) != setup.size:
            raise FormError(f"a model of {len(received.row)} numbers came in a run of one of {setup.size}")
        reply = called(message, context, call_next)
        if not training and reply.content.array_records:
            raise FormError("the app's reply to an evaluation holds arrays, which do not leave")
        update = update_between(received, reply.content) if training else torch.zeros(0, dtype=torch.float64)
        figures = only_metrics(reply.content) if reply.content.metric_records else {}
        weight = 1.0
        if agreed.work.clip is None:
            weight = weight_in(figures, setup.weighted_by, most=agreed.config.value_range or 2.0**24)
        if not bool(update.isfinite().all()):
            _LOG.warning("the app's update is not finite: it counts as no update in this round")
        averaged: list[str] = []
        if setup.metrics == "pass" and figures:
            told[METRICS] = metric_record(figures)
        elif setup.metrics == "average":
            averaged = sorted(name for name in figures if name != setup.weighted_by and len(name) <= MOST_NAME)
            if len(averaged) > SLOTS:
                _LOG.warning("%d metrics are averaged, of the app's %d", SLOTS, len(averaged))
            told[NAMES] = averaged = averaged[:SLOTS]
        return agreed.work.contribution(update, weight, [figures[name] for name in averaged])


_BARE = (
    "this app's updates leave under protection alone: wrap the server's strategy, "
    'fedveil.flower.Protected(FedAvg(…), scheme="secagg")'
)


def called(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The app's own reply. The words of its exceptions stay here."""
    try:
        reply = call_next(message, context)
    except Exception as reason:
        _LOG.exception("the app failed")
        raise AppError(f"the app failed ({type(reason).__name__})") from None
    if not reply.has_content():
        raise AppError("the app replied with an error")
    return reply


def _check_name(setup: AppSetup, state: ClientState, request: Request) -> None:
    """Hold a run's name to what this client was told: keys, masks and signatures are bound to the name."""
    if not isinstance(request, (Hello, Directory)):
        return
    if not request.run.startswith(setup.name):
        raise ProtocolError("a run's name does not say the settings that this client was told")
    if state.keys is not None and state.keys.run != request.run:
        raise ProtocolError("a run was given a second name in one attempt")


def _owners_policy(context: Context) -> Policy | None:
    path = context.node_config.get(POLICY)
    if not path:
        return None
    try:
        text = Path(str(path)).read_text(encoding="utf-8")
    except OSError as reason:
        raise ConfigError(f"{POLICY} names {path}, which cannot be read: {reason.strerror}.") from reason
    return Policy.parse(text, where=str(path))


class _Memory:
    """What this client remembers of one phase of a run, in its node's memory, and what it spent in all of them.

    The state is sealed because that is how it is written; its key lies beside it, and both are as private as the node.
    """

    def __init__(self, context: Context, setup: AppSetup, *, counted: bool) -> None:
        self._records = context.state.config_records
        self._state = context.state
        self._setup = setup
        self._place = f"{_MEMORY}.{setup.phase}"
        folder = context.node_config.get(STATE)
        self._kept = Memory(Path(str(folder)) / "state") if folder and counted else None
        self._counted = counted
        self._spent = 0.0

    def entered(self, client: int) -> ClientState:
        """The state that a message of this setup meets; a setup that contradicts what was told before is refused."""
        setup, known = self._setup, self._records.get(self._place)
        state, before = ClientState(client), 0.0
        if known is not None:
            try:
                stored = ClientState.unseal(bytes(known["sealed"]), bytes(known["key"]))  # type: ignore[arg-type]
                lineage, attempt, digest = known["lineage"], int(known["attempt"]), known["setup"]  # type: ignore[arg-type]
            except (KeyError, TypeError, ValueError, ProtocolError) as reason:
                raise DamagedError("what this client remembers of the run is damaged") from reason
            before = stored.spent
            if lineage == setup.lineage:
                if attempt > setup.attempt:
                    raise ProtocolError(f"attempt {setup.attempt} of a run is over: attempt {attempt} has begun")
                if stored.client != client:
                    raise ProtocolError(f"client {stored.client} of a run was called client {client}")
                if attempt == setup.attempt and digest != setup.digest():
                    raise ProtocolError("a run's settings have changed in the middle of an attempt")
                # Keys belong to one attempt; what was answered and spent is never forgotten.
                fresh = {"keys": None, "cohort": (), "survivor_digest": "", "graph": "", "transcript": ""}
                state = stored if attempt == setup.attempt else replace(stored, **fresh)  # type: ignore[arg-type]
        if self._counted:  # a policy's limit is one for all runs
            earlier = 0.0 if self._kept is None else self._kept.spent()
            state = replace(state, spent=max(state.spent, before, earlier))
        self._spent = state.spent
        return state

    def keep(self, state: ClientState) -> None:
        """Remember a state, and what it has spent."""
        if self._kept is not None:
            self._kept.spend(state.spent - self._spent)
        self._spent = state.spent
        key = os.urandom(_KEY_BYTES)
        self._state[self._place] = ConfigRecord(
            {
                "sealed": state.seal(key),
                "key": key,
                "lineage": self._setup.lineage,
                "attempt": self._setup.attempt,
                "setup": self._setup.digest(),
            }
        )
