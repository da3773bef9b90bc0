"""A client's own folder: who it is, where its data are, and what it agrees to. Read here, never from a message."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig, toml_of
from fedveil.crypto.keys import Roster
from fedveil.errors import ConfigError, unknown_name
from fedveil.ledger.policy import Policy
from fedveil.models.catalogue import CATALOGUE
from fedveil.models.custom import Factory
from fedveil.runs.job import read_policy, read_roster
from fedveil.runs.terms import Accepted, RequiredError, Term, check_terms, read_identity, read_required, terms_of

_FILE = "client.toml"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "client": int,
    "data": str,
    "roster": str,
    "identity": str,
    "policy": str,
    "models": list,
    "idle_hours": (int, float),
    "socket": str,
    "worker_user": (str, int),
    "courier_user": (str, int),
    "device": str,
    "simulation": bool,
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
    device: str = "cpu"
    require: Mapping[str, Accepted] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        """Where sealed state is kept."""
        return self.path / "state"

    @property
    def kept_models(self) -> Path:
        """Where the models of schemes are kept that let clients hold them."""
        return self.path / "models"

    @staticmethod
    def read(path: Path) -> Home:
        """The folder's client.toml and the files it names; every mistake is named."""
        where = path / _FILE
        given = _settings(where)
        client = given.get("client")
        if client is None or client < 0:
            raise ConfigError(f"{where}: client must be this client's number, 0 or more.")
        files = _files(path, given)
        for name, file in files.items():
            if not file.is_file():
                raise ConfigError(f"{where}: {name} names {file}, where no file is.")
        require = given.get("require", {})
        known = {one.name for one in fields(RunConfig)}
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
            device=given.get("device", "cpu"),
            require=read_required({name.replace("-", "_"): value for name, value in require.items()}, where=str(where)),
        )

    def stamp(self) -> tuple[tuple[str, int, int], ...]:
        """When the files were changed that this was read from."""
        file = self.path / _FILE
        named = _files(self.path, _settings(file)).values()
        found = [(one, one.stat()) for one in (file, *named) if one.exists()]
        return tuple((str(one), at.st_mtime_ns, at.st_size) for one, at in found)

    def accepts(self, config: RunConfig) -> RunConfig:
        """A run's settings as this client will use them; settings that its owner does not agree to are refused."""
        if config.simulated_secrets and not self.simulation:
            raise RequiredError(
                "the run is a simulation: its secrets follow from a seed that the server knows, and protect nothing. "
                f"Leave the seed out, or write simulation = true into {self.path / _FILE}"
            )
        check_terms(config, self.require, where=str(self.path / _FILE))
        if not 0 <= self.client < config.clients:
            raise RequiredError(f"this is client {self.client}, and the run has clients 0 to {config.clients - 1}")
        model = config.model
        if model not in CATALOGUE:
            # A name from a message would otherwise be imported and called: only what the owner has listed is.
            if model not in self.models:
                raise RequiredError(f"the run's model {model!r} is not listed under models in {self.path / _FILE}")
            file, _, factory = model.rpartition(":")
            model = Factory(f"{self.path / file}:{factory}" if file.endswith(".py") else model)
        return config.with_changes(model=model, device=self.device)

    def terms(self) -> list[Term]:
        """Everything that this client accepts, and on whose word."""
        own = ", ".join(self.models) or "none"
        simulated = "yes: the server knows their secrets" if self.simulation else "no"
        lines = [
            *terms_of(self.require, where=_FILE),
            Term("model", f"those of `fedveil models`; own architectures: {own}", _FILE),
            Term("simulations", simulated, _FILE),
        ]
        if self.policy is None:
            what = "what it aims at, in each run anew"
            return [*lines, Term("ε over all runs", what, "default: limit it in a policy file (max_epsilon)")]
        limits = [(one.name, getattr(self.policy, one.name)) for one in fields(self.policy)]
        return [*lines, *(Term(f"policy: {name}", _limit(value), "the policy file") for name, value in limits)]


def _limit(value: float | None) -> str:
    return "no limit" if value is None else f"{value:g}"


def _files(path: Path, given: Mapping[str, Any]) -> dict[str, Path]:
    """The files that a client.toml names, where they lie."""
    return {name: path / given[name] for name in ("data", "roster", "identity", "policy") if name in given}


def _settings(where: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(where.read_text(encoding="utf-8"))
    except OSError as reason:
        raise ConfigError(f"Cannot read {where}: {reason.strerror}. Make it with `fedveil flower client`.") from reason
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise ConfigError(f"{where} is not valid TOML: {reason}.") from reason
    for name, value in given.items():
        if name not in _KINDS:
            raise unknown_name(f"setting in {where}:", name, _KINDS)
        if not isinstance(value, _KINDS[name]) or (isinstance(value, bool) and _KINDS[name] is not bool):
            raise ConfigError(f"{where}: {name} has a value of the wrong kind ({value!r}).")
    return given


Required = str | int | float | bool | Mapping[str, float]
CLIENT_FILE = "client.toml"


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
) -> Path:
    """A home for one client, with client.toml in it; returns that file. Nothing is overwritten.

    Files are named as seen from here; a file inside the home is written down relative to it.
    """
    folder = Path(folder).expanduser().resolve()
    if client < 0:
        raise ConfigError(f"Clients are numbered from 0 (got {client}).")
    if (roster is None) != (identity is None):
        raise ConfigError("A roster and the client's own signing key (identity) belong together: give both or neither.")
    target = folder / CLIENT_FILE
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
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / "state").mkdir(exist_ok=True, mode=0o700)
    target.write_text(text, encoding="utf-8")
    return target


def parse_required(pairs: Sequence[str]) -> dict[str, Required | list[Required]]:
    """setting=value pairs from a command line; a setting given more than once may have any of its values."""
    found: dict[str, list[Required]] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"A requirement is written setting=value, like scheme=veil-secagg (got {pair!r}).")
        try:
            value = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


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

# Where this client computes, whatever a run says: cpu or cuda.
device = "cpu"

# The worker ends when nothing came for so many hours; the next message starts it again.
idle_hours = 24

# What a run's settings must be for this client to take part: a value, a list of them, or {{ min = …, max = … }}. What
# proofs rest on has bounds in any case, which this replaces; `fedveil flower client HOME --show` lists all of them.
{require}
"""


def _line(name: str, value: str | None, example: str) -> str:
    return f"# {name} = {toml_of(example)}" if value is None else f"{name} = {toml_of(value)}"


def _inside(folder: Path, path: str | Path, name: str) -> str:
    """The file as client.toml writes it: relative where it lies in the home, absolute elsewhere."""
    given = Path(path).expanduser()
    found = next((one.resolve() for one in (given, folder / given) if one.is_file()), None)
    if found is None:
        raise ConfigError(f"{name}: there is no file {path}.")
    return str(found.relative_to(folder)) if found.is_relative_to(folder) else str(found)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {_value(one)}' for name, one in value.items())} }}"
    several = isinstance(value, Sequence) and not isinstance(value, str)
    return f"[{', '.join(map(_value, value))}]" if several else toml_of(value)  # type: ignore[call-overload]


def _requirements(require: Mapping[str, Required | Sequence[Required]]) -> str:
    if not require:
        return '# [require]\n# scheme = ["veil-secagg", "veil-dp"]\n# unmask = "always"'
    known = {one.name for one in fields(RunConfig)}
    lines = ["[require]"]
    for name, value in require.items():
        if name.replace("-", "_") not in known:
            raise unknown_name("setting to require:", name, known)
        lines.append(f"{name.replace('-', '_')} = {_value(value)}")
    return "\n".join(lines)
