"""What a client accepts of a run's settings: bounds that hold unless its owner says otherwise, and what the owner says.

A server proposes settings; a client that only pins the scheme must not find that they hollow it out. So what the proofs
of a scheme rest on has bounds here, and [require] in client.toml, the owner's own file, is all that moves them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil import schemes
from fedveil.config import RunConfig
from fedveil.crypto.keys import Identity, Roster
from fedveil.errors import Code, ConfigError, FedVeilError
from fedveil.plain import list_of
from fedveil.protocol.directory import Cohort, draws_of
from fedveil.secrets import OsSecrets, StoredSecret
from fedveil.uplink.graph import COLLUSION, default_degree, masking_degree
from fedveil.uplink.unmasking import Quorum


class RequiredError(FedVeilError):
    """A run's settings are not those that the client's owner requires."""

    code = Code.REQUIRED


@dataclass(frozen=True)
class Between:
    """Numbers from `least` to `most`."""

    least: float | None = None
    most: float | None = None

    def admits(self, value: object) -> bool:
        """Whether a value is one of them."""
        return (
            isinstance(value, (int, float))
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        if self.most is None:
            return f"at least {self.least:g}"
        return f"at most {self.most:g}" if self.least is None else f"{self.least:g} to {self.most:g}"


@dataclass(frozen=True)
class OneOf:
    """Any of these values."""

    values: tuple[Any, ...]

    def admits(self, value: object) -> bool:
        """Whether a value is one of them."""
        return value in self.values

    def __str__(self) -> str:
        return " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in self.values)


Accepted = Between | OneOf

# By default: why, after what. The scheme's own default is always accepted with the scheme.
DEFAULTS: Mapping[str, tuple[Accepted, str]] = {
    "epsilon": (Between(most=10.0), "more proves next to nothing"),
    "delta": (Between(most=1e-4), "one record in so many may be published outright"),
    "clip": (Between(1e-3, 1e3), "noise is as large as the clip, and rounding as small"),
    "threshold": (Between(least=0.6), "a fifth of the neighbours may side with the server"),
    "value_range": (Between(16.0, 2.0**30), "what is sent is cut off at it, and rounded by it"),
    "unmask": (OneOf(("always",)), "masks would be opened on the server's word"),
    "honest_arrivals": (OneOf((False,)), "the server would vouch for itself"),
    "accounting": (OneOf(("exact",)), "the paper's noise counts for more than it is"),
    "skip_cancelling": (OneOf((False,)), "noise would be left out"),
}
_NEIGHBOURS = "neighbours"
_MANY_ENOUGH = "as many as the scheme takes by itself, or more"
_COLLUSION = "collusion"
_COHORT = "cohort"
_FEWEST = 3


@dataclass(frozen=True)
class Term:
    """One line of what a client accepts."""

    setting: str
    accepted: str
    source: str


def read_required(given: Mapping[str, Any], *, where: str) -> dict[str, Accepted]:
    """[require] of client.toml: a value, a list of values, or { min = …, max = … }."""
    required: dict[str, Accepted] = {}
    for name, value in given.items():
        if isinstance(value, dict):
            known = {"min": "least", "max": "most"}
            numbers = all(isinstance(bound, (int, float)) and not isinstance(bound, bool) for bound in value.values())
            if not value or not set(value) <= set(known) or not numbers:
                raise ConfigError(f"{where}, [require]: {name} must be a value, a list, or {{ min = …, max = … }}.")
            required[name] = Between(**{known[end]: float(bound) for end, bound in value.items()})
        else:
            required[name] = OneOf(tuple(value) if isinstance(value, (list, tuple)) else (value,))
    return required


def check_terms(
    config: RunConfig, required: Mapping[str, Accepted], *, where: str, own: Mapping[str, Any] | None = None
) -> None:
    """Refuse settings that the owner does not agree to, or that nobody has said they agree to.

    `own` are the scheme's options and their defaults, where it is none of `fedveil schemes`.
    """
    own = schemes.find(config.scheme).options if own is None else own
    for name, accepted in required.items():
        value = _said(config, name)
        value = own.get(name) if value is None else value
        if name == _COHORT:
            value = _asked(config, accepted, hiding=_NEIGHBOURS in own)
        # A range bounds what a scheme has, or leaves to itself; a value asks for it.
        if not accepted.admits(value) and not (value is None and isinstance(accepted, Between)):
            raise RequiredError(f"the run has {name} = {value!r}, and {where} requires {accepted}")
    # Nothing is protected in a simulation, whose owner has agreed to that.
    if config.simulated_secrets:
        return
    agreed = {*required, *(("epsilon",) if "epsilon_per_client" in required else ())}
    for name, (accepted, why) in DEFAULTS.items():
        value = _said(config, name)
        if name in agreed or name not in own or value is None or value == own[name] or accepted.admits(value):
            continue
        raise RequiredError(
            f"the run has {name} = {value!r}, and this client accepts {accepted} ({why}): allow it under [require] in "
            f"{where} if that is meant"
        )
    share, usual = config.collusion, float(own.get(_COLLUSION) or 0.0)
    if _COLLUSION not in required and share is not None and share < usual:
        raise RequiredError(
            f"the run has collusion = {share:g}, and this client accepts {usual:g} or more (that share of all clients "
            f"may side with the server): allow it under [require] in {where} if that is meant"
        )
    if _NEIGHBOURS not in own:
        return
    least, size = _sizes(config, hiding=True)
    # Too few for any scheme of this kind is said by the scheme itself.
    if _COHORT not in required and least < min(_FEWEST, config.clients):
        raise RequiredError(
            f"the run's rounds have {least} clients, and this client accepts {_FEWEST} or more: allow the cohort under "
            f"[require] in {where} if that is meant"
        )
    wanted = config.neighbours
    if _NEIGHBOURS in required or wanted is None or wanted == own[_NEIGHBOURS] or size < 2:
        return
    least = _own_degree(config, own, size)
    if wanted < least:
        raise RequiredError(
            f"the run has neighbours = {wanted}, and this client accepts {_MANY_ENOUGH}, which is {least} here: allow "
            f"it under [require] in {where} if that is meant"
        )


def _said(config: RunConfig, name: str) -> Any:
    """What the run says of a setting; of ε the largest that any client is given."""
    if name == "epsilon" and config.epsilon_per_client is not None:
        return max(list_of(config.epsilon_per_client, "epsilon_per_client"))
    return getattr(config, name)


def _asked(config: RunConfig, accepted: Accepted, *, hiding: bool) -> float | None:
    """How many clients a round asks, whether the run says so as a number, as a share, or by leaving it out."""
    if isinstance(accepted, OneOf) and accepted.admits(config.cohort):
        return config.cohort
    bounds = (accepted.least, accepted.most) if isinstance(accepted, Between) else accepted.values
    shares = any(isinstance(bound, float) and 0 < bound < 1 for bound in bounds)
    sizes = [size / config.clients if shares else size for size in _sizes(config, hiding=hiding)]
    # Where chance decides, both the smallest round and the largest are to be accepted.
    return next((size for size in sizes if not accepted.admits(size)), sizes[-1])


def _sizes(config: RunConfig, *, hiding: bool) -> tuple[int, int]:
    """How many clients a round asks, at least and at most, where sums are to hide their parts or are not."""
    rate, rounds = config.sampling_rate, config.rounds
    drawn = Cohort.of(config.clients, cohort=config.cohort, seed=0, sampling_rate=rate, rounds=rounds)
    drawn = drawn.hiding() if hiding else drawn
    return (drawn.least if drawn.rate else drawn.size), drawn.size


def _own_degree(config: RunConfig, own: Mapping[str, Any], size: int) -> int:
    """How many neighbours a scheme takes where nobody says how many."""
    cover = own.get("cover") if config.cover is None else config.cover
    if "threshold" not in own or cover == "noise":
        return default_degree(size)
    threshold = own["threshold"] if config.threshold is None else config.threshold
    share = max(config.collusion or 0.0, COLLUSION)
    draws = draws_of(config.rounds)
    return masking_degree(size, of=config.clients, share=share, needed=Quorum(threshold).of, draws=draws)


def terms_of(required: Mapping[str, Accepted], *, where: str) -> list[Term]:
    """What settings a client accepts, and on whose word."""
    mine = {name: Term(name, str(accepted), f"require in {where}") for name, accepted in required.items()}
    anything = Term("scheme", "any, also those that protect no data", "default: pin it with --require scheme=…")
    lines = [mine.pop("scheme", anything)]
    for name, (accepted, why) in DEFAULTS.items():
        lines.append(mine.pop(name, Term(name, str(accepted), f"default: {why}")))
    usual = Term(_COLLUSION, "the scheme's own share or more", "default: who may side with the server")
    lines.append(mine.pop(_COLLUSION, usual))
    lines.append(mine.pop(_NEIGHBOURS, Term(_NEIGHBOURS, _MANY_ENOUGH, "default: a neighbourhood is what hides it")))
    few = Term(_COHORT, f"{_FEWEST} clients or more", "default: where a sum hides its parts")
    return [*lines, mine.pop(_COHORT, few), *mine.values()]


_KEY_BYTES = 32
ROSTER = "roster.toml"


def create_identities(folder: str | Path, *, clients: int) -> Path:
    """A signing key per client, readable by its owner only, and roster.toml; nothing is overwritten."""
    folder = Path(folder)
    if clients < 1:
        raise ConfigError(f"There must be at least one client (got {clients}).")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"The folder {folder} is not empty: keys are never overwritten. Give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    public = {}
    for client in range(clients):
        secret = OsSecrets().stream("identity").bytes(_KEY_BYTES)
        public[client] = Identity(StoredSecret(secret)).public
        handle = os.open(_file(folder, client), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    roster = folder / ROSTER
    roster.write_text(Roster(public).to_toml(), encoding="utf-8")
    return roster


def read_identities(folder: str | Path, *, clients: int) -> dict[int, bytes]:
    """The private keys of clients 0 … clients − 1, and a key authority's, which is the next, where it is there."""
    everybody = clients + _file(Path(folder), clients).exists()
    return {client: read_identity(_file(Path(folder), client)) for client in range(everybody)}


def read_identity(path: Path) -> bytes:
    """The private key in a file."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as reason:
        raise ConfigError(
            f"The signing key {path} cannot be read: {reason.strerror}. Make keys with `fedveil keys`, or name their "
            "folder with --identities."
        ) from reason
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} does not hold a signing key of {2 * _KEY_BYTES} hexadecimal digits.")
    return key


def _file(folder: Path, client: int) -> Path:
    return folder / f"client-{client}.key"
