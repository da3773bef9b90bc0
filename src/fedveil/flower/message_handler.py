"""A client's side of a run, built on its own machine: its role and its data. The server's model is no part of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch

from fedveil.client_held.client import HolderRole, told_settings
from fedveil.client_held.messages import Finish, Finished
from fedveil.config import RunConfig
from fedveil.data.dataset import Task
from fedveil.downlink import Architecture, assemble
from fedveil.downlink.architecture import draw_secret_epsilon
from fedveil.engine.local import Listen
from fedveil.errors import Code, ConfigError, FedVeilError, ProtocolError
from fedveil.flower.client_memory import Memory, Promise, Remembered
from fedveil.flower.home import Home, own_data
from fedveil.flower.messages import RollCall, Setup, present, request_of
from fedveil.flower.worker_client import SETTINGS
from fedveil.framing import pack, unpack
from fedveil.protocol.client_state import ClientState, Held
from fedveil.protocol.codec import encode
from fedveil.protocol.directory import Directory, Hello
from fedveil.protocol.messages import Reply, Request
from fedveil.protocol.parts import Authority
from fedveil.protocol.phases import Heard
from fedveil.roles.client import ClientRole, ClientTerms, Participant
from fedveil.runs.job import Agreed, ModelFacts, agreed, device_of, drawn, dtype_of, secret_epsilon
from fedveil.runs.model_file import save_model
from fedveil.runs.recipe import augmentation_of
from fedveil.runs.terms import RequiredError
from fedveil.secrets import OsSecrets, SecretSource, SecretStream, SeededSecrets
from fedveil.work.held_back import holding_back
from fedveil.work.messages import ClientData


@dataclass(frozen=True, eq=False)
class Side:
    """A client's role and data in one attempt at a run; of a key authority, which has neither data nor a model, the
    role alone.

    `start` is the model it begins with, where it holds one, unless that follows from a secret of the group (`hidden`).
    """

    config: RunConfig
    facts: ModelFacts
    role: ClientRole | HolderRole | Authority
    architecture: Architecture | None
    data: ClientData | None
    start: Held | None
    common: Agreed
    hidden: bool = False


def build_side(home: Home, setup: Setup, *, start: Held | None = None) -> Side:
    """The side of the client in `home`; `start` replaces the model of the seed where the run is resumed."""
    try:
        config = RunConfig.from_mapping(setup.settings, where="the run's settings")
    except ConfigError as reason:
        raise ProtocolError(f"a run's settings cannot be read: {reason}") from reason
    seed = config.seed
    if seed is None:
        raise ProtocolError("a run's settings name no seed")
    config = home.accepts(config)
    facts = _facts(config, setup.facts)
    common = agreed(config, clients=config.clients, task=facts.task, outputs=facts.outputs)
    if home.authority:
        return _authority(home, config, facts, common)
    augment = augmentation_of(config, facts.input_shape, text=facts.vocabulary is not None)
    data = replace(own_data(config, facts, client=home.client, loader=home.data), augment=augment)
    if config.client_test_fraction is not None:
        data = holding_back(data, config.client_test_fraction, seed=seed)
    example = data.x[: min(2, len(data))].repeat(2, *([1] * (data.x.dim() - 1)))[:2].cpu()
    device = device_of(config)

    def beginning(own: int | SecretStream, source: SeededSecrets) -> tuple[Architecture, Held]:
        model = facts.build(seed=own).to(dtype_of(config)).cpu()
        architecture, weights = drawn(common.scheme, model, example, facts)
        if secret_epsilon(config, common.scheme):
            # Every client must begin with the same one, so it follows from what they share.
            draw_secret_epsilon(weights, source.stream("epsilon"))
        placed = weights.to(device=device)
        return architecture.to(device=device), Held.fresh(placed, common.optimiser.start(placed.parameters))

    def agreed_upon(secret: bytes) -> Held:
        """The first model that follows from all of a secret of the group, which the server does not know."""
        source = SeededSecrets(int.from_bytes(secret, "big"))
        return beginning(source.stream("first model"), source)[1]

    architecture, template = beginning(seed, SeededSecrets(seed))
    source: SecretSource = SeededSecrets(seed).branch("clients") if config.simulated_secrets else OsSecrets()
    own: ClientTerms = {
        "secrets": source,
        "policy": home.policy,
        "roster": home.roster,
        "identities": None if home.identity is None else {home.client: home.identity},
        "schedule": (config.rounds, common.cohort),
    }
    if common.scheme.holder == "server":
        role = ClientRole(common.scheme, architecture, **own)
        return Side(config, facts, role, architecture, data, None, common)
    # The server knows the seed. A run that is no simulation begins with a model that it cannot make from it.
    hidden = start is None and setup.start == 0 and not config.simulated_secrets
    begin = template if start is None else start
    holder = HolderRole(
        common.scheme,
        architecture,
        start=begin,
        optimiser=common.optimiser,
        first=agreed_upon if hidden else None,
        **own,
    )
    return Side(config, facts, holder, architecture, data, begin, common, hidden)


def _authority(home: Home, config: RunConfig, facts: ModelFacts, common: Agreed) -> Side:
    """The side of a key authority: no data, and no model."""
    assert config.seed is not None
    drawn = config.simulated_secrets
    source: SecretSource = SeededSecrets(config.seed).branch("authority") if drawn else OsSecrets()
    identities = None if home.identity is None else {home.client: home.identity}
    role = common.scheme.uplink.authority_role(secrets=source, roster=home.roster, identities=identities)
    if role is None:
        raise RequiredError(f"this is a key authority, and {config.scheme} has none")
    return Side(config, facts, role, None, None, None, common)


def _facts(config: RunConfig, given: Mapping[str, Any]) -> ModelFacts:
    shape, outputs, vocabulary = given["input_shape"], given["outputs"], given["vocabulary"]
    numbers = [*(shape if isinstance(shape, list) else [0]), outputs, 1 if vocabulary is None else vocabulary]
    if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers):
        raise ProtocolError("a run's setup describes its data wrongly")
    if given["task"] not in get_args(Task):
        raise ProtocolError("a run's setup names no task")
    return ModelFacts(config.model, config.model_options, tuple(shape), outputs, given["task"], vocabulary)


_LOG = logging.getLogger(__name__)
_BEHIND = -1
_MOST_TRIES = 2


class MessageHandler:
    """One client. What it does for a message is decided by its role; here is only what outlives a process."""

    def __init__(self, home: Path) -> None:
        self._home = Home.read(home)
        self._read_at = self._home.stamp()
        self._memory = Memory(self._home.state)
        self._side: tuple[tuple[str, str], Side] | None = None
        self._latest: tuple[str, Remembered] | None = None
        self._listen: Listen | None = None
        self._prune("")

    def handle(self, parcel: bytes) -> bytes:
        """The reply to a parcel: an answer, or the code of a refusal. Details stay in this machine's log."""
        try:
            header, parts = unpack(parcel)
            setup = Setup.parse(str(header.get("setup")))
            message = str(header.get("message"))
            request = request_of(parts["common"])
            private = request_of(parts["private"]) if "private" in parts else None
        except (ProtocolError, KeyError) as reason:
            _LOG.warning("a message cannot be read: %s", reason)
            return self._refused(Code.PROTOCOL)
        try:
            self._look_at_home()
            self._admit(setup)
            if isinstance(request, RollCall):
                return self._present(setup, request)
            return self._answered(setup, message, request, private)
        except FedVeilError as reason:
            _LOG.warning("refused a %s: %s", type(request).__name__, reason)
            return self._refused(reason.code)

    def _look_at_home(self) -> None:
        """What the owner has changed since counts from the next message on."""
        if (now := self._home.stamp()) != self._read_at:
            self._home, self._read_at, self._side = Home.read(self._home.path), now, None

    def _prune(self, lineage: str) -> None:
        """Let go of runs of which nothing was heard for long."""
        for name in self._memory.prune(days=self._home.keep_days, spare=lineage):
            _LOG.info("run %s: nothing came for %g days, its state is deleted", name, self._home.keep_days)

    def _admit(self, setup: Setup) -> None:
        """Refuse a new run where as many as the owner allows are kept, before anything is built for it."""
        if (self._latest is not None and self._latest[0] == setup.lineage) or setup.lineage in self._memory.runs():
            return
        self._prune(setup.lineage)
        if len(self._memory.runs()) >= self._home.max_runs:
            raise ProtocolError(
                f"{self._home.max_runs} runs are kept here, and no more are allowed: raise max_runs in "
                f"{self._home.path / SETTINGS}, or lower keep_days there",
                code=Code.FULL,
            )

    @property
    def _device(self) -> torch.device:
        return torch.device(self._home.device)

    def _refused(self, code: Code) -> bytes:
        return pack({"client": self._home.client, "code": code.value}, {})

    def _present(self, setup: Setup, call: RollCall) -> bytes:
        self._built(setup, self._recalled(setup))
        home = self._home
        answer = present(home.client, call, lineage=setup.lineage, roster=home.roster, identity=home.identity)
        return self._packed(answer)

    def _packed(self, answer: Reply) -> bytes:
        return pack({"client": self._home.client, "code": ""}, {"reply": encode(answer)})

    def _answered(self, setup: Setup, message: str, request: Request, private: Request | None) -> bytes:
        known = self._recalled(setup)
        if known is not None and message and known.message == message:
            _LOG.info("the same message again: it gets the same reply")
            return known.reply
        tries = 0
        if known is not None and (begun := known.promise) is not None:
            tries = begun.tries if message and begun.message == message else 0
            if not tries:
                known = replace(known, state=known.promised, promise=None)
            elif tries < _MOST_TRIES:
                # A process died over it, and nothing left: it is worked on again, and paid for again.
                known = replace(known, state=replace(known.state, spent=begun.state.spent), promise=None)
            else:
                _LOG.error("work on a message was broken off %d times: it is not begun again", tries)
                return self._broken_off(setup, known.replied(known.promised, message, b""))
        if known is not None and isinstance(request, Finish) and _long_finished(setup, known, request):
            return self._packed(Finished(self._home.client, request.version))
        side = self._built(setup, known)
        now = self._entered(setup, known, side)
        _check_name(setup, now.state, request)
        told = {} if private is None else {now.state.client: private}
        begun_with = now

        def promised(state: ClientState) -> None:
            nonlocal now
            # First what was spent: a kill in between then counts it twice, and never not at all.
            self._memory.spend(state.spent - begun_with.state.spent)
            promise = Promise(state, message, tries + 1)
            self._memory.promise(setup.lineage, promise)
            now = replace(begun_with, state=state, promise=promise)
            self._latest = (setup.lineage, replace(begun_with, promise=promise))

        try:
            if isinstance(side.role, Participant):
                assert side.data is not None
                answers = side.role.handle_many([now.state], request, [side.data], told, promised=promised)
            else:
                answers = side.role.handle_many([now.state], request)
            state, answer = next(iter(answers))
        except BaseException as reason:
            if now is begun_with:
                raise
            # Whatever it was: the round was promised and paid for, and this message is not worked on again.
            reply = self._broken_off(setup, now.replied(now.promised, message, b""))
            if not isinstance(reason, Exception):
                raise
            _LOG.exception("work on a %s was broken off", type(request).__name__)
            return reply
        if isinstance(answer, FedVeilError):
            _LOG.warning("refused a %s: %s", type(request).__name__, answer)
            reply = self._refused(answer.code)
        else:
            reply = self._packed(answer)
        self._memory.spend(state.spent - now.state.spent)
        self._keep(setup, now.replied(state, message, reply))
        if not isinstance(answer, FedVeilError):
            self._record(request, private, answer)
            if isinstance(request, Finish):
                self._write_model(setup, side, state.held)
        return reply

    def _broken_off(self, setup: Setup, remembered: Remembered) -> bytes:
        """Remember, and give, the reply to a message that this client cannot deal with."""
        reply = self._refused(Code.INTERNAL)
        self._keep(setup, replace(remembered, reply=reply))
        return reply

    def _recalled(self, setup: Setup) -> Remembered | None:
        if self._latest is not None and self._latest[0] == setup.lineage:
            return self._latest[1]
        return self._memory.recall(setup.lineage, device=self._device)

    def _keep(self, setup: Setup, remembered: Remembered) -> None:
        self._memory.keep(setup.lineage, remembered)
        self._latest = (setup.lineage, remembered)

    def _built(self, setup: Setup, known: Remembered | None) -> Side:
        """The side of this attempt, from the last message or anew."""
        which = (setup.lineage, setup.digest())
        if known is not None and known.attempt == setup.attempt and known.setup != which[1]:
            raise ProtocolError("a run's settings have changed in the middle of an attempt")
        if known is not None and known.attempt > setup.attempt:
            raise ProtocolError(f"attempt {setup.attempt} of a run is over: attempt {known.attempt} has begun")
        if self._side is None or self._side[0] != which:
            begun = known is not None and known.attempt == setup.attempt
            start = self._memory.start(setup.lineage, device=self._device) if begun else self._carried(setup, known)
            self._side = (which, build_side(self._home, setup, start=start))
            self._listen = self._recorder(setup, self._side[1])
        return self._side[1]

    def _recorder(self, setup: Setup, side: Side) -> Listen | None:
        if not self._home.record or side.architecture is None:
            return None
        from fedveil.runs.folder import own_recorder  # which a client that records nothing does not need

        place, parts = self._home.records / setup.lineage, (side.config, side.common, side.facts, side.architecture)
        return own_recorder(place, *parts, client=self._home.client, attempt=setup.attempt).hear

    def _record(self, request: Request, private: Request | None, answer: Reply) -> None:
        """Keep what has passed; a full disk costs the record, and not the round."""
        if self._listen is None:
            return
        me = self._home.client
        try:
            self._listen(Heard("request", request, request, to=(me,)))
            if private is not None:
                self._listen(Heard("private", request, private, to=(me,), client=me))
            self._listen(Heard("reply", request, answer, client=me))
        except OSError as reason:
            _LOG.warning("the record of this run ends here: %s", reason)
            self._listen = None

    def _carried(self, setup: Setup, known: Remembered | None) -> Held | None:
        """The model that a new attempt begins with: what an earlier one has left, if it is of the right version.

        Version 0 is nobody's work: a new attempt makes it anew. What has led to another stays with it, the settings
        that were told among it: masks are bound to it, so that clients who were told different things do not upload
        together after a resume either.
        """
        held = None if known is None else known.state.held
        if not setup.start or held is None or known is None or held.version < 0:
            return None
        if known.base + held.version != setup.start:
            return None
        # Where nothing was added up, nothing was made by this attempt's settings, and some may have missed it.
        told = told_settings(held.transcript, known.setup) if held.version else held.transcript
        return replace(held.carried(), transcript=told)

    def _entered(self, setup: Setup, known: Remembered | None, side: Side) -> Remembered:
        """What is remembered, as this attempt begins with it."""
        if known is not None and known.attempt == setup.attempt:
            return self._counted(known)
        _LOG.info("run %s, attempt %d begins", setup.lineage, setup.attempt)
        held = None if side.hidden else side.start
        if held is not None and setup.start and self._carried(setup, known) is None:
            # Counted as before the beginning: it refuses to train on this, and is lent the model by another.
            held = replace(held, version=_BEHIND)
            _LOG.warning("version %d of the model is not here: another client has to lend it", setup.start)
        self._memory.keep_start(setup.lineage, None if side.hidden else side.start)
        before = ClientState(self._home.client) if known is None else known.state
        self._keep_model(setup, known, side, held)
        entered = Remembered(before.anew(before.client, held=held), setup.attempt, setup.digest(), base=setup.start)
        self._keep(setup, entered)
        return self._counted(entered)

    def _counted(self, remembered: Remembered) -> Remembered:
        """Limits of one's own hold for all runs on these data, however many a server opens and whenever it goes on with
        which; without an ε among them a run is held to its own target."""
        if self._home.policy is None or self._home.policy.max_epsilon is None:
            return remembered
        return replace(
            remembered, state=replace(remembered.state, spent=max(remembered.state.spent, self._memory.spent()))
        )

    def _keep_model(self, setup: Setup, known: Remembered | None, side: Side, begins: Held | None) -> None:
        """A model that sums have made here, and with which an attempt does not begin: it is the server's word that
        others have a later one."""
        held = None if known is None else known.state.held
        if held is None or known is None or held.version + known.base < 1 or held.version < 0:
            return
        if begins is not None and torch.equal(begins.weights.parameters, held.weights.parameters):
            return
        if side.architecture is None or held.weights.parameters.shape != side.architecture.trainable.shape:
            _LOG.warning("the model that was here is of another network than this attempt's, and is not kept")
            return
        made = known.base + held.version
        self._write_model(setup, side, held, name=f"{setup.lineage}.version-{made}")
        _LOG.warning("version %d of the model, which this attempt does not begin with, is kept as a file", made)

    def _write_model(self, setup: Setup, side: Side, held: Held | None, *, name: str = "") -> None:
        """The model that this client holds, as a file of its own."""
        if held is None or side.architecture is None:
            return
        folder = self._home.kept_models
        folder.mkdir(exist_ok=True, mode=0o700)
        module = assemble(side.architecture, held.weights).eval()
        save_model(
            folder / f"{name or setup.lineage}.safetensors",
            module,
            side.facts,
            kind="client",
            config=dict(setup.settings),
            shape=None,
        )


def _long_finished(setup: Setup, known: Remembered, request: Finish) -> bool:
    """Whether a later attempt has begun with just what an earlier one's last sums lead to: the server that asks again
    was itself interrupted since."""
    held = known.state.held
    carried = held is not None and held.version > _BEHIND
    return carried and known.attempt > setup.attempt and known.base == setup.start + request.version


def _check_name(setup: Setup, state: ClientState, request: Request) -> None:
    """Hold a run's name to what this client was told: keys, masks and signatures are bound to the name."""
    request = getattr(request, "directory", request)
    if not isinstance(request, (Hello, Directory)):
        return
    if not request.run.startswith(setup.name):
        raise ProtocolError("a run's name does not say the settings that this client was told")
    if state.keys is not None and state.keys.run != request.run:
        raise ProtocolError("a run was given a second name in one attempt")
