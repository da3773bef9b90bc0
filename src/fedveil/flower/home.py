"""A client's own folder: who it is, where its data are, and what it agrees to. Read here, never from a message.

Data come from the user's own loader, or are a share of a named data set, dealt by the run's seed; what a server knows
of data that it does not have is read here too (`described`).
"""

from __future__ import annotations

import importlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import torch
from torch import Tensor

from fedveil.config import RunConfig
from fedveil.crypto.keys import Roster
from fedveil.data import Dataset
from fedveil.data.dataset import Task, check_labels
from fedveil.data.sources import EMBEDDED
from fedveil.errors import ConfigError, DataError, unknown_name
from fedveil.flower.worker_client import SETTINGS, settings_of
from fedveil.ledger.policy import Policy
from fedveil.models.catalogue import CATALOGUE
from fedveil.own_code import OwnCode, load_file
from fedveil.plain import toml_of
from fedveil.runs.job import ModelFacts, dealt, device_of, dtype_of, loaded, read_policy, read_roster
from fedveil.runs.terms import Accepted, RequiredError, Term, check_terms, read_identity, read_required, terms_of
from fedveil.work.messages import ClientData

_KINDS: dict[str, type | tuple[type, ...]] = {
    "client": int,
    "data": str,
    "roster": str,
    "identity": str,
    "policy": str,
    "models": list,
    "idle_hours": (int, float),
    "keep_days": (int, float),
    "max_runs": int,
    "socket": str,
    "worker_user": (str, int),
    "courier_user": (str, int),
    "device": str,
    "simulation": bool,
    "record": bool,
    "authority": bool,
    "require": dict,
}


@dataclass(frozen=True, eq=False)
class Home:
    """What a client's folder says."""

    path: Path
    client: int
    data: Path | None = None
    roster: Roster | None = None
    identity: bytes | None = field(default=None, repr=False)
    policy: Policy | None = None
    models: tuple[str, ...] = ()
    simulation: bool = False
    record: bool = False
    device: str = "cpu"
    keep_days: float = 180.0
    max_runs: int = 256
    authority: bool = False
    require: Mapping[str, Accepted] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """Where sealed state is kept."""
        return self.path / "state"

    @property
    def records(self) -> Path:
        """Where this client keeps what it saw."""
        return self.path / "records"

    @property
    def kept_models(self) -> Path:
        """Where the models of schemes are kept that let clients hold them."""
        return self.path / "models"

    @staticmethod
    def read(path: Path) -> Home:
        """The folder's client.toml and the files it names; every mistake is named."""
        where = path / SETTINGS
        given = _settings(where)
        client = given.get("client")
        if client is None or client < 0:
            raise ConfigError(f"{where}: client must be this client's number, 0 or more.")
        files = _files(path, given)
        for name, file in files.items():
            if not file.is_file():
                raise ConfigError(f"{where}: {name} names {file}, where no file is.")
        if not 0 < given.get("keep_days", Home.keep_days) < math.inf:
            raise ConfigError(f"{where}: keep_days must be a positive number of days (got {given['keep_days']}).")
        if given.get("max_runs", Home.max_runs) < 1:
            raise ConfigError(f"{where}: max_runs must be 1 or more (got {given['max_runs']}).")
        require = given.get("require", {})
        known = {setting.name for setting in fields(RunConfig)}
        for name in require:
            if name.replace("-", "_") not in known:
                raise unknown_name(f"setting in {where}, [require]:", name, known)
        return Home(
            path=path,
            client=client,
            data=files.get("data"),
            roster=read_roster(files["roster"]) if "roster" in files else None,
            identity=read_identity(files["identity"]) if "identity" in files else None,
            policy=read_policy(files["policy"]) if "policy" in files else None,
            models=tuple(given.get("models", ())),
            simulation=given.get("simulation", False),
            record=given.get("record", False),
            device=given.get("device", "cpu"),
            keep_days=float(given.get("keep_days", Home.keep_days)),
            max_runs=given.get("max_runs", Home.max_runs),
            authority=given.get("authority", False),
            require=read_required({name.replace("-", "_"): value for name, value in require.items()}, where=str(where)),
        )

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """When the files were changed that this was read from."""
        file = self.path / SETTINGS
        named = _files(self.path, _settings(file)).values()
        stamps = [(path, path.stat()) for path in (file, *named) if path.exists()]
        return tuple((str(path), at.st_mtime_ns, at.st_size) for path, at in stamps)

    def accepts(self, config: RunConfig) -> RunConfig:
        """A run's settings as this client will use them; settings that its owner does not agree to are refused."""
        if config.simulated_secrets and not self.simulation:
            raise RequiredError(
                "the run is a simulation: its secrets follow from a seed that the server knows, and protect nothing. "
                f"Leave the seed out, or write simulation = true into {self.path / SETTINGS}"
            )
        check_terms(config, self.require, where=str(self.path / SETTINGS))
        if self.authority and self.client != config.clients:
            raise RequiredError(
                f"this is number {self.client}, the key authority of {self.client} clients, and the run has "
                f"{config.clients}"
            )
        if not self.authority and not 0 <= self.client < config.clients:
            raise RequiredError(f"this is client {self.client}, and the run has clients 0 to {config.clients - 1}")
        model = config.model
        if model not in CATALOGUE:
            # A name from a message would otherwise be imported and called: only what the owner has listed is.
            if model not in self.models:
                raise RequiredError(f"the run's model {model!r} is not listed under models in {self.path / SETTINGS}")
            file, _, factory = model.rpartition(":")
            model = OwnCode(f"{self.path / file}:{factory}" if file.endswith(".py") else model)
        return config.with_changes(model=model, device=self.device)

    def terms(self) -> list[Term]:
        """Everything that this client accepts, and on whose word."""
        own = ", ".join(self.models) or "none"
        simulated = "yes: the server knows their secrets" if self.simulation else "no"
        lines = [
            *terms_of(self.require, where=SETTINGS),
            Term("model", f"those of `fedveil models`; own architectures: {own}", SETTINGS),
            Term("simulations", simulated, SETTINGS),
            *([Term("role", "key authority: it draws keys, and has no data", SETTINGS)] if self.authority else []),
            Term("own record", "of what it sees, under records/" if self.record else "none", SETTINGS),
            Term("runs", f"{self.max_runs} kept, each for {self.keep_days:g} days after its last message", SETTINGS),
        ]
        if self.policy is None:
            what = "what it aims at, in each run anew"
            return [*lines, Term("ε over all runs", what, "default: limit it in a policy file (max_epsilon)")]
        limits = [(limit.name, getattr(self.policy, limit.name)) for limit in fields(self.policy)]
        return [*lines, *(Term(f"policy: {name}", _limit(value), "the policy file") for name, value in limits)]


def _limit(value: float | None) -> str:
    return "no limit" if value is None else f"{value:g}"


def _files(path: Path, given: Mapping[str, Any]) -> dict[str, Path]:
    """The files that a client.toml names, where they lie."""
    return {name: path / given[name] for name in ("data", "roster", "identity", "policy") if name in given}


def _settings(where: Path) -> dict[str, Any]:
    given = settings_of(where.parent)
    for name, value in given.items():
        if name not in _KINDS:
            raise unknown_name(f"setting in {where}:", name, _KINDS)
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and _KINDS[name] is not bool):
            raise ConfigError(f"{where}: {name} has a value of the wrong kind ({value!r}).")
    return given


Required = str | int | float | bool | Mapping[str, float]


def create_home(
    folder: str | Path,
    *,
    client: int,
    data: str | Path | None = None,
    roster: str | Path | None = None,
    identity: str | Path | None = None,
    policy: str | Path | None = None,
    models: Sequence[str] = (),
    require: Mapping[str, Required | Sequence[Required]] | None = None,
    simulation: bool = False,
    authority: bool = False,
) -> Path:
    """A home for one client, with client.toml in it; returns that file. Nothing is overwritten.

    Or, as `authority`, for a key authority, whose number is the one after the last client's.
    Files are named as seen from here; a file inside the home is written down relative to it.
    """
    folder = Path(folder).expanduser().resolve()
    if client < 0:
        raise ConfigError(f"Clients are numbered from 0 (got {client}).")
    if (roster is None) != (identity is None):
        raise ConfigError("A roster and the client's own signing key (identity) belong together: give both or neither.")
    target = folder / SETTINGS
    if target.exists():
        raise ConfigError(f"{target} exists already: change it there, or give another folder.")
    named = {
        name: _inside(folder, path, name)
        for name, path in (("data", data), ("roster", roster), ("identity", identity), ("policy", policy))
        if path is not None
    }
    text = _TEXT.format(
        client=client,
        data=_line("data", named.get("data"), "data.py"),
        roster=_line("roster", named.get("roster"), "roster.toml"),
        identity=_line("identity", named.get("identity"), f"client-{client}.key"),
        policy=_line("policy", named.get("policy"), "policy.toml"),
        models=f"models = {json.dumps(list(models))}" if models else '# models = ["net.py:make"]',
        require=_requirements(require or {}),
        simulation=toml_of(simulation),
        authority=toml_of(authority),
        keep_days=Home.keep_days,
        max_runs=Home.max_runs,
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "state").mkdir(exist_ok=True, mode=0o700)
    target.write_text(text, encoding="utf-8")
    return target


def parse_required(pairs: Sequence[str]) -> dict[str, Required | list[Required]]:
    """setting=value pairs from a command line; a setting given more than once may have any of its values."""
    required: dict[str, list[Required]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"A requirement is written setting=value, like scheme=veil-secagg (got {pair!r}).")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        required.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {name: values[0] if len(values) == 1 else values for name, values in required.items()}


_TEXT = """\
# What this client is and what it agrees to. Read by its worker, on its own machine; no message can change it.

client = {client}  # this client's number in the federation

# A Python file of yours whose function client(number) returns this client's samples and labels. Left out: the data
# set that a run names, dealt to the clients by the run's seed, which is for demonstrations.
{data}

# Everybody's public signing keys, and the private one of this client (made by `fedveil keys`): with them, no server
# can pose as another client.
{roster}
{identity}

# This client's own limits: max_epsilon, delta, collusion, min_cohort, max_clip, min_clip, max_size_ratio.
{policy}

# Own architectures that this client is willing to build, file:function; others must be names of `fedveil models`.
{models}

# Whether this client takes part in simulations: runs whose secrets follow from a seed that the server knows, so that
# nothing is protected.
simulation = {simulation}

# Whether this is no client but the key authority of schemes that have one (hybridalpha). It has no data; its number is
# the one after the last client's, and nobody who runs the server may run it.
authority = {authority}

# Whether this client keeps, under records/, what passes between it and the server in the first three rounds and the
# last, for audits. (That a server records is forbidden by `record = false` under [require].)
record = false

# Where this client computes, whatever a run says: cpu or cuda.
device = "cpu"

# The worker ends when nothing came for so many hours; the next message starts it again.
idle_hours = 24

# What only going on with a run needs is deleted so many days after its last message; this client then stays out of
# that run. What all runs together have spent is kept. While max_runs of them are kept, new ones are refused.
keep_days = {keep_days:g}
max_runs = {max_runs}

# What a run's settings must be for this client to take part: a value, a list of them, or {{ min = …, max = … }}. What
# proofs rest on has bounds in any case, which this replaces; `fedveil flower client HOME --show` lists all of them.
{require}
"""


def _line(name: str, value: str | None, example: str) -> str:
    return f"# {name} = {toml_of(example)}" if value is None else f"{name} = {toml_of(value)}"


def _inside(folder: Path, path: str | Path, name: str) -> str:
    """The file as client.toml writes it: relative where it lies in the home, absolute elsewhere."""
    given = Path(path).expanduser()
    file = next((place.resolve() for place in (given, folder / given) if place.is_file()), None)
    if file is None:
        raise ConfigError(f"{name}: there is no file {path}.")
    return str(file.relative_to(folder)) if file.is_relative_to(folder) else str(file)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_value(item)}' for name, item in value.items())} }}"
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return f"[{', '.join(map(_value, value))}]" if several else toml_of(value)  # type: ignore[call-overload]


def _requirements(require: Mapping[str, Required | Sequence[Required]]) -> str:
    if not require:
        return '# [require]\n# scheme = ["veil-secagg", "veil-dp"]\n# unmask = "always"'
    known = {setting.name for setting in fields(RunConfig)}
    lines = ["[require]"]
    for name, value in require.items():
        if name.replace("-", "_") not in known:
            raise unknown_name("setting to require:", name, known)
        lines.append(f"{name.replace('-', '_')} = {_value(value)}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Described:
    """What a server knows of data it does not have, and what it has to judge the model by."""

    facts: ModelFacts
    test: Dataset | None
    validation: Dataset | None = None


def described(config: RunConfig, module: str) -> Described:
    """The server's side: the app's own module (FACTS, test()), or the data set that the settings name."""
    if not module:
        split = loaded(config)
        return Described(ModelFacts.of(config, split.train), split.test, split.validation)
    try:
        code = importlib.import_module(module)
    except Exception as reason:
        raise ConfigError(
            f"The app's module {module!r} cannot be imported: {type(reason).__name__}: {reason}"
        ) from reason
    facts = _given_facts(config, code, module)
    return Described(facts, _given_part(code, facts, module, "test"), _given_part(code, facts, module, "validation"))


def own_data(config: RunConfig, facts: ModelFacts, *, client: int, loader: Path | None) -> ClientData:
    """A client's side: its own loader's `client(number)`, or its share of the data set that the settings name.

    What a run says of the data is compared with what the owner says (FACTS), and the data with that alone: whether a
    client refuses a run then tells nothing about its samples.
    """
    if loader is None:
        if config.dataset not in EMBEDDED:
            raise DataError(
                f"the run names the data set {config.dataset!r}, which is not embedded, and client.toml names no loader"
            )
        train = loaded(config).train.to(dtype=dtype_of(config), device=device_of(config))
        rows = dealt(config, train)[client].to(train.x.device)
        data = ClientData(client, train.x[rows], train.y[rows])
        own = ModelFacts.of(config, train)
    else:
        try:
            code = load_file(loader, what="a client's data")
        except ConfigError as reason:
            raise DataError(str(reason)) from reason
        own = _given_facts(config, code, str(loader))
        data = _loaded(config, code, client=client, task=own.task, where=loader)
    for name in ("input_shape", "outputs", "task", "vocabulary"):
        said, ours = getattr(facts, name), getattr(own, name)
        if said != ours:
            raise DataError(f"the run is for data with {name} = {said}, and this client's have {ours}")
    _check(data, own)
    return data


def _check(data: ClientData, facts: ModelFacts) -> None:
    x, y = data.x, data.y
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(f"a sample has shape {tuple(x.shape[1:])}, FACTS says {facts.input_shape}")
    if facts.task == "classification":
        if y.is_floating_point() or y.dim() != 1 or int(y.min()) < 0 or int(y.max()) >= facts.outputs:
            raise DataError(f"the targets are not class numbers from 0 to {facts.outputs - 1}")
    elif not y.is_floating_point() or tuple(y.shape[1:]) != (facts.outputs,):
        raise DataError(f"the targets are not {facts.outputs} numbers per sample")
    elif facts.task == "multilabel":
        check_labels(y, where="the targets")
    if facts.vocabulary is not None and (
        x.dtype != torch.int64 or int(x.min()) < 0 or int(x.max()) >= facts.vocabulary
    ):
        raise DataError("the samples are not token numbers of the vocabulary that FACTS names")


def _given_facts(config: RunConfig, code: ModuleType, where: str) -> ModelFacts:
    given = getattr(code, "FACTS", None)
    known = {"input_shape", "outputs", "task", "vocabulary", "labels"}
    if not isinstance(given, dict) or not {"input_shape", "outputs", "task"} <= given.keys() <= known:
        raise ConfigError(
            f"{where} must say FACTS = dict(input_shape=(…), outputs=…, task='classification', 'regression' or "
            "'multilabel'), and may add vocabulary and labels."
        )
    shape, outputs, task = given["input_shape"], given["outputs"], given["task"]
    if not all(type(size) is int and size > 0 for size in (*shape, outputs)):
        raise ConfigError(f"{where}: input_shape and outputs must be positive whole numbers.")
    if task not in get_args(Task):
        raise ConfigError(f"{where}: task must be one of {', '.join(get_args(Task))} (got {task!r}).")
    labels = tuple(given.get("labels", ()))
    return ModelFacts(config.model, config.model_options, tuple(shape), outputs, task, given.get("vocabulary"), labels)


def _given_part(code: ModuleType, facts: ModelFacts, where: str, part: str) -> Dataset | None:
    load = getattr(code, part, None)
    pair = None if load is None else load()
    if pair is None:
        return None
    x, y = _pair(pair, facts.task, where=f"{where}.{part}()")
    if tuple(x.shape[1:]) != facts.input_shape:
        raise DataError(
            f"{where}.{part}() gives samples of shape {tuple(x.shape[1:])}, FACTS says {facts.input_shape}."
        )
    return Dataset(part, facts.task, x, y, outputs=facts.outputs, vocabulary=facts.vocabulary)  # type: ignore[arg-type]


def _loaded(config: RunConfig, code: ModuleType, *, client: int, task: str, where: Path) -> ClientData:
    load = getattr(code, "client", None)
    if load is None:
        raise DataError(f"{where} has no function client(number) that gives this client's samples")
    try:
        samples = load(client)
    except Exception as reason:
        raise DataError(f"{where}: client({client}) raised {type(reason).__name__}: {reason}") from reason
    x, y = _pair(samples, task, where=f"{where}: client({client})")
    device, dtype = device_of(config), dtype_of(config)
    x = x.to(device, dtype) if x.is_floating_point() else x.to(device)
    return ClientData(client, x, y.to(device, dtype) if y.is_floating_point() else y.to(device))


def _pair(pair: Any, task: str, *, where: str) -> tuple[Tensor, Tensor]:
    try:
        x, y = (torch.as_tensor(part) for part in pair)
    except (TypeError, ValueError) as reason:
        raise DataError(f"{where} must give (inputs, targets), two tensors or arrays.") from reason
    if x.dim() < 2 or y.dim() < 1 or len(x) != len(y) or not len(x):
        raise DataError(f"{where} gives inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}.")
    for what, tensor in (("inputs", x), ("targets", y)):
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DataError(f"{where}: the {what} hold NaN or infinity.")
    if y.is_floating_point() or task != "classification":
        y = y.to(torch.get_default_dtype()) if not y.is_floating_point() else y
        return x, y[:, None] if y.dim() == 1 else y.flatten(1)
    return x if x.is_floating_point() else x.to(torch.int64), y.to(torch.int64)
