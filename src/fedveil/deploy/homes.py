"""Client homes: the folder that tells a client's worker who it is, which data it trains on and what it agrees to."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from fedveil.config import RunConfig, toml_of
from fedveil.errors import ConfigError, unknown_name

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
