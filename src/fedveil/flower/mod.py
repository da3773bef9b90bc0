"""The client's line of a protected app: `ClientApp(mods=[fedveil.flower.protect()])`.

The mod stands between Flower and the app. It answers key agreement and unmasking by itself; for a round it lets the app
train on what it was sent, and of the app's reply nothing leaves but what the scheme covers (and figures, where the run
says so: the server's ledger lists them). The role is `fedveil.roles.client.ClientRole`, as everywhere.

A process answers one message and ends, so what a client remembers lies in a folder of its node's own (`app_memory`),
on disk before a reply leaves; nothing that safety rests on is in `context.state`. The machine's owner may name it
(`--node-config 'fedveil-state="…"'`), and with `fedveil-policy` a file of limits.

What goes wrong is logged here. The server is told a code, never a text: Flower would send it an exception's words,
which may hold data. Whoever submits the run ships the app, this line included: against a submitter who is not trusted a
mod is no protection, and the ledger says so (a worker is: `fedveil.flower.worker`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor

from fedveil.client_held.messages import Begin, Finish, Finished, Lend
from fedveil.config import RunConfig
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError, unknown_name
from fedveil.flower.app_held import AppHolder, behind, check_form, filled, first_model, write_model
from fedveil.flower.app_memory import AppMemory, folder_of, held, node_name, written
from fedveil.flower.app_setup import (
    MOST_EXAMPLES,
    AgreedApp,
    AppModel,
    AppSetup,
    FormError,
    Step,
    agreed_app,
    checked_number,
    checked_path,
    figures_alone,
    for_app,
    metric_record,
    no_model,
    only_arrays,
    only_metrics,
    told_with,
    update_between,
    weight_in,
)
from fedveil.flower.client_app import HEADER, PARTS, in_array, out_of_array
from fedveil.flower.messages import TEXTS, request_of
from fedveil.ledger.gaussian import epsilon_of
from fedveil.ledger.policy import Policy
from fedveil.protocol.client_state import ClientState, Held
from fedveil.protocol.codec import encode
from fedveil.protocol.directory import Directory, Hello
from fedveil.protocol.messages import Reply, Request, Train
from fedveil.roles.client import ClientRole, Participant
from fedveil.runs.terms import Accepted, Between, RequiredError, check_terms, read_required
from fedveil.schemes.on_updates import HELD, SLOTS, scheme_info
from fedveil.work.messages import ClientData

_LOG = logging.getLogger(__name__)

METRICS = "fedveil.metrics"
"""The record of an app's figures, where they leave beside the answer."""
NAMES = "names"
"""In the header of an answer: what the figures under the masks are called."""
VERSION = "version"
"""In the header of a message: which version of the model is to be evaluated, where clients hold it."""
POLICY = "fedveil-policy"
MODEL = "fedveil-model"
"""In a SuperNode's configuration: the file for its copy of the model, by the machine's owner."""
_RAISED = 2
"""Flower's code for an app that raised an exception."""
_APPS_OWN = ("metrics", "evaluation", "first")
_OF_NOISE = ("epsilon", "delta", "clip")
_ROUNDING = 1e-9
MOST_NAME = 64


class AppError(FedVeilError):
    """The app itself failed."""

    code = Code.APP


class BareError(ProtocolError):
    """A server that asks for the app's updates as they are."""

    code = Code.BARE


def protect(
    *,
    require: Mapping[str, Any] | None = None,
    policy: Policy | None = None,
    home: str | Path | None = None,
    first: Callable[[Context], ArrayRecord] | None = None,
    models: str | Path | None = None,
    keep_days: float = 180.0,
) -> Mod:
    """A mod that lets updates leave an app under protection alone.

    Args:
        require: What a run's settings must be for this client to take part, by name: a value, a list of them, or
            {"min": …, "max": …}; like {"scheme": ["dp-secagg"], "cohort": {"min": 5}, "epsilon": {"max": 3}}. What
            proofs rest on has bounds in any case. The largest ε is one for all runs of this node together, and no
            scheme without noise keeps it. `metrics` and `evaluation` may be named as well: figures leave uncovered
            ("pass") only where they say so.
        policy: This client's own limits (max_epsilon, min_cohort, collusion, …); a file that the machine's owner
            names with `--node-config 'fedveil-policy="…"'` takes its place.
        home: Where nodes remember what they have answered and spent, each in a folder of its own (default:
            `$XDG_STATE_HOME/fedveil/flower-apps`, or `~/.local/state/fedveil/flower-apps`); a folder that the
            machine's owner names with `--node-config 'fedveil-state="…"'` takes its place. Apps over different data
            have different homes.
        first: Where clients hold the model, with `first="client"`: makes the arrays that the run begins with, on the
            one client that is asked for them; the others are lent them, sealed.
        models: Where clients hold the model: a folder where each node writes it, as `node-….safetensors`; a file
            that the machine's owner names with `--node-config 'fedveil-model="…"'` takes its place.
        keep_days: Days after a run's last message until what the node remembers of it is deleted. What it has spent
            stays, and that it took part: a server that takes the run up again later is refused.

    Returns:
        The mod, for `ClientApp(mods=[…])`: first in the list, so that others see what the app sees.

    Raises:
        ConfigError: A setting to require that does not exist, or an argument that is not what it should be.
    """
    days = checked_number("keep_days, in days,", keep_days, positive=True)
    if not isinstance(require or {}, Mapping):
        raise ConfigError(f"require must name settings, like {{'scheme': ['secagg']}} (got {require!r}).")
    if not isinstance(policy, (Policy, NoneType)):
        raise ConfigError(
            f"policy must be a fedveil.ledger.policy.Policy, like Policy(max_epsilon=3.0) (got {policy!r})."
        )
    if first is not None and not callable(first):
        raise ConfigError(f"first must be a function that makes arrays from a context (got {first!r}).")
    known = {*(setting.name for setting in fields(RunConfig)), *_APPS_OWN}
    for name in require or {}:
        if name not in known:
            raise unknown_name("setting to require:", name, known)
    own = _Own(first, checked_path("models", models), days)
    return _Protection(read_required(require or {}, where="protect"), policy, checked_path("home", home), own)


@dataclass(frozen=True, eq=False)
class _Own:
    """What a client has of its own: how long it remembers a run and, where clients hold the model, what makes the first
    one, and where copies go."""

    first: Callable[[Context], ArrayRecord] | None
    models: Path | None
    keep_days: float

    def made(self, context: Context, setup: AppSetup, step: Step) -> Held:
        """The model that a run begins with, by this client's own code."""
        if self.first is None:
            raise AppError("a first model was asked for, and protect(first=…) names nothing that makes one")
        try:
            record = self.first(context)
        except (Exception, SystemExit) as reason:
            _LOG.exception("the first model could not be made")
            raise AppError(f"protect(first=…) failed ({type(reason).__name__})") from None
        check_form(record, setup)
        return first_model(record, step)

    def path(self, context: Context) -> Path | None:
        """Where this node's copy of the model goes; None: nowhere."""
        if owners := context.node_config.get(MODEL):
            return Path(str(owners))
        return None if self.models is None else self.models / f"{node_name(context)}.safetensors"


@dataclass(frozen=True, eq=False)
class _Asked:
    """A message of the protocol, read."""

    setup: AppSetup
    client: int
    request: Request
    private: Request | None
    version: int | None = None

    @staticmethod
    def read(content: RecordDict) -> _Asked:
        """What a server sent; anything malformed is refused."""
        try:
            header = content.config_records[HEADER]
            client, version = header["client"], header.get(VERSION)
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
        return _Asked(setup, client, common, private, version if type(version) is int else None)


class _Protection:
    """The mod. It holds nothing of a run: that is in the node's folder."""

    def __init__(self, require: Mapping[str, Accepted], policy: Policy | None, home: Path | None, own: _Own) -> None:
        self._require = require
        self._policy = policy
        self._home = home
        self._own = own

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
        self._accept_figures("evaluation", "pass")
        return figures_alone(message, called(message, context, call_next))

    def _answered(self, message: Message, context: Context, call_next: ClientAppCallable) -> RecordDict:
        asked = _Asked.read(message.content)
        setup = asked.setup
        agreed = agreed_app(setup)
        agreed.scheme.uplink.prepare()
        self._accept(agreed, setup)
        told: dict[str, Any] = {}
        for name in (HEADER, PARTS):
            del message.content[name]

        policy, folder = self._limits(context), folder_of(context, self._home)
        # As many samples as it has votes: what an update weighs travels with it.
        data = ClientData(asked.client, torch.zeros(1, 0), torch.zeros(1))
        with held(folder) as stored:
            with written(folder):
                old = stored.prune(days=self._own.keep_days, spare=setup.lineage)
            for name in old:
                _LOG.info("run %s: nothing came for %g days, its state is deleted", name, self._own.keep_days)
            memory = AppMemory(stored, folder, setup)
            if isinstance(asked.request, Finish) and memory.long_finished(asked.request):
                return _answer(Finished(asked.client, asked.request.version), told)
            own = memory.entered(asked.client)
            working = isinstance(asked.request, (Train, Begin))
            judged = memory.model() if working and agreed.config.scheme in HELD and not agreed.work.held else None
            # Of a model that is here, and did not come with the message, masks are bound to what has made it.
            made_by = () if judged is None else (str(judged[1]).encode(), judged[0].transcript)
            bound = told_with(message, context, *made_by) if working else b""

            def trained(row: Tensor) -> Tensor:
                assert isinstance(asked.request, (Train, Begin))
                if judged is not None:
                    _give(message.content, asked, judged[0].weights.parameters, judged[1])
                elif agreed.work.held:
                    _give(message.content, asked, row, None)
                given = for_app(message, context, round=asked.request.round)
                return self._contribution(given, context, call_next, agreed=agreed, setup=setup, told=told)

            role = self._role(agreed, asked, message, context, policy=policy, told=bound, trained=trained)
            _check_agreed(agreed, setup, own, asked.request)
            # A policy's limit is one for all runs, a target for its own.
            before, plan = memory.spent, agreed.scheme.uplink.plan
            delta = 1.0 if plan is None else plan.target.delta
            entered = own if policy is None or policy.max_epsilon is None else replace(own, spent=before)

            def kept(state: ClientState) -> None:
                more = state.spent - entered.spent
                memory.keep(replace(state, spent=own.spent + more), delta=delta)

            def promised(state: ClientState) -> None:
                if plan is not None:
                    self._afford(before + state.spent - entered.spent, folder, delta=min(delta, memory.delta))
                kept(state)

            private = {} if asked.private is None else {asked.client: asked.private}
            answers = role.handle_many([entered], asked.request, [data], private, promised=promised)
            advanced, reply = next(iter(answers))
            if isinstance(reply, FedVeilError):
                if advanced.misread > entered.misread:  # which it does not do as often as it is asked
                    kept(advanced)
                raise reply
            promised(advanced)  # again: where a vote comes first, a round is charged with its upload
            path = self._own.path(context) if isinstance(asked.request, Finish) else None
            if path is not None and advanced.held is not None:
                _write(path, message.content, asked, advanced.held)
        return _answer(reply, told)

    def _role(
        self,
        agreed: AgreedApp,
        asked: _Asked,
        message: Message,
        context: Context,
        *,
        policy: Policy | None,
        told: bytes,
        trained: Callable[[Tensor], Tensor],
    ) -> Participant:
        """The client's side of the protocol; where clients hold the model, with what it is to begin with."""
        if not agreed.work.held:
            return ClientRole(agreed.training(trained), no_model()[0], policy=policy, told=told)
        setup, request, made = asked.setup, asked.request, None
        start = behind(setup.size, agreed.step)
        if setup.start == 0 and setup.first == "client" and isinstance(request, Lend):

            def made(_: bytes) -> Held:
                return self._own.made(context, setup, agreed.step)

        elif setup.start == 0 and setup.first == "server" and isinstance(request, Begin) and request.version == 0:
            record = only_arrays(message.content)
            check_form(record, setup)
            start = first_model(record, agreed.step)
        return AppHolder(agreed, start, trained=trained, first=made, told=told, policy=policy)

    def _limits(self, context: Context) -> Policy | None:
        return _owners_policy(context) or self._policy

    def _accept_figures(self, name: str, how: str) -> None:
        accepted = self._require.get(name)
        if accepted is not None and not accepted.admits(how):
            raise RequiredError(f"the run has {name} = {how!r}, and protect requires {accepted}")
        if how == "pass" and accepted is None:
            raise RequiredError(
                f"the run has {name} = 'pass', which sends this client's own figures uncovered, for any model and as "
                f'often as the server asks: allow it with protect(require={{{name!r}: ["pass", …]}}) if that is meant'
            )

    def _afford(self, spent: float, folder: Path, *, delta: float) -> None:
        """Refuse a round that would bring all runs of this node beyond the ε that is required of one.

        At the largest δ that is required, or at the smallest of all runs: by a larger one, which a server may name, as
        much noise is worth a smaller ε.
        """
        most = _largest(self._require.get("epsilon"))
        if most is None:
            return
        delta = _largest(self._require.get("delta")) or delta
        reached = epsilon_of(math.sqrt(spent), delta)
        if reached > most * (1 + _ROUNDING):
            raise ProtocolError(
                f"this client takes no further part: this round would bring its runs together to ε = {reached:.3g} "
                f"(δ = {delta:g}), and protect(require=…) allows {most:g}. What was spent is kept in {folder}",
                code=Code.ENDED,
            )

    def _accept(self, agreed: AgreedApp, setup: AppSetup) -> None:
        scheme = agreed.config.scheme
        if "first" in self._require and scheme not in HELD:
            raise RequiredError(
                f"protect(require=…) names first, and under {scheme} the server holds the model: require a scheme in "
                "which clients do, or leave first out"
            )
        if setup.first:
            self._accept_figures("first", setup.first)
        own = scheme_info(scheme).options
        consents_to_repairs = "dropouts" in self._require or "honest_arrivals" in self._require
        if "epsilon" in self._require and agreed.scheme.repairs and not consents_to_repairs:
            raise RequiredError(
                "protect(require=…) names epsilon, and with dropouts = 'repair' a server that calls this client "
                "missing is given noise that covers it: require dropouts = 'tolerate', or name 'repair' there if "
                "that is meant"
            )
        for name in _OF_NOISE:
            if name in self._require and name not in own:
                raise RequiredError(
                    f"protect(require=…) names {name}, and {scheme} adds no noise: nothing would be "
                    f"bounded. Require a scheme that has {name}, or leave {name} out"
                )
            consents = "scheme" if setup.phase == "train" else "evaluation"
            if name in self._require and not agreed.scheme.uplink.noises_all and consents not in self._require:
                raise RequiredError(
                    f"protect(require=…) names {name}, and a part of what {scheme} sends has no noise "
                    f"that would bound it: others read it in sum. Name {consents} there, too, if that is meant"
                )
        settings = {name: value for name, value in self._require.items() if name not in _APPS_OWN}
        check_terms(agreed.config, settings, where="protect(require=…)", own=own)
        self._accept_figures("metrics" if setup.phase == "train" else "evaluation", setup.metrics)

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
            weight = weight_in(figures, setup.weighted_by, most=MOST_EXAMPLES)
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
    except (Exception, SystemExit) as reason:
        _LOG.exception("the app failed")
        raise AppError(f"the app failed ({type(reason).__name__})") from None
    if not reply.has_content():
        raise AppError("the app replied with an error")
    return reply


def _answer(reply: Reply, told: Mapping[str, Any]) -> RecordDict:
    """An answer, with what leaves beside it."""
    header = ConfigRecord({"code": "", **({NAMES: told[NAMES]} if NAMES in told else {})})
    records: dict[str, Any] = {HEADER: header, PARTS: ArrayRecord({"reply": in_array(encode(reply))})}
    if METRICS in told:
        records[METRICS] = told[METRICS]
    return RecordDict(records)


def _give(content: RecordDict, asked: _Asked, row: Tensor, version: int | None) -> None:
    """Put the model that this client holds where the app looks for it; `version` is that of an evaluation."""
    form, setup, request = only_arrays(content), asked.setup, asked.request
    check_form(form, setup)
    if version is None:
        assert isinstance(request, Begin)
        version = setup.start + request.version
    elif version != asked.version:
        raise ProtocolError(f"version {asked.version} of the model is to be evaluated, and this client holds {version}")
    (name,) = content.array_records
    content[name] = filled(form, row, moved=version > 0)


def _write(path: Path, content: RecordDict, asked: _Asked, model: Held) -> None:
    """Write this client's copy of the model; a full disk costs the copy, and not the run."""
    form, setup = only_arrays(content), asked.setup
    check_form(form, setup)
    try:
        write_model(path, filled(form, model.weights.parameters, moved=setup.start + model.version > 0))
    except OSError as reason:
        _LOG.warning("the model was not written to %s: %s", path, reason.strerror)


def _check_agreed(agreed: AgreedApp, setup: AppSetup, state: ClientState, request: Request) -> None:
    """Hold a request to the settings that this client was told, and a run's name too: keys, masks and signatures are
    bound to it."""
    rounds = agreed.config.rounds
    if isinstance(request, (Train, Begin)) and (request.attempt != setup.attempt or request.round >= rounds):
        raise ProtocolError(f"round {request.round + 1}, attempt {request.attempt}, is none of the run's settings")
    if not isinstance(request, (Hello, Directory)):
        return
    if not request.run.startswith(setup.name):
        raise ProtocolError("a run's name does not say the settings that this client was told")
    if request.epoch.schedule != (agreed.config.rounds, agreed.cohort):
        raise ProtocolError("an epoch has other clients, cohorts or rounds than the settings that this client was told")
    if state.keys is not None and state.keys.run != request.run:
        raise ProtocolError("a run was given a second name in one attempt")


def _largest(accepted: Accepted | None) -> float | None:
    """The largest number that is accepted; None where there is no limit."""
    if accepted is None or isinstance(accepted, Between):
        return None if accepted is None else accepted.most
    return max(float(value) for value in accepted.values)


def _owners_policy(context: Context) -> Policy | None:
    path = context.node_config.get(POLICY)
    if not path:
        return None
    try:
        text = Path(str(path)).read_text(encoding="utf-8")
    except OSError as reason:
        raise ConfigError(f"{POLICY} names {path}, which cannot be read: {reason.strerror}.") from reason
    return Policy.parse(text, where=str(path))
