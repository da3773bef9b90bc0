"""Every error FedVeil raises on purpose: what was wrong, where, and what to do about it.

People read an error's text; programs go by its class and its `code`, and never by the words of the text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum


class Code(StrEnum):
    """Why a client did not answer, or why its answer was not taken: what programs go by."""

    PROTOCOL = "protocol"
    """Something the protocol does not allow at this point."""
    UNREADABLE = "unreadable"
    """Sums do not open to numbers that clients could have sent: the server takes them back."""
    IMPLAUSIBLE = "implausible"
    """An upload or a sum of them is beyond what honest clients can send."""
    SPOILT = "spoilt"
    """A client has spoilt a round for everybody: it is asked no more in this run."""
    JUMPED = "jumped"
    """A round has made the loss on held-out samples jump."""
    WITHHELD = "withheld"
    """A key authority gives no key for what it was asked."""
    ENDED = "ended"
    """A client's own limits end the run for it."""
    NUMBERS = "numbers"
    """Numbers that are not finite, or have run away."""
    SETTINGS = "settings"
    REQUIRED = "required"
    DATA = "data"
    STATEFUL = "stateful"
    """Code of the caller's own remembers other samples, where a claim needs each sample's part to be its own."""
    PUBLIC_START = "public-start"
    """Weights are loaded under a veil, and nobody has said whether others know them."""
    EXTRA = "extra"
    STATE = "state"
    FULL = "full"
    """A client keeps as many runs as its owner allows."""
    INTERNAL = "internal"
    LOST = "lost"
    SILENT = "silent"
    UNSTARTABLE = "unstartable"
    FAILED = "failed"
    HOMELESS = "homeless"
    UNWRITABLE = "unwritable"
    """A client has no folder to remember in what it has answered and spent."""
    APP = "app"
    """Somebody's own Flower app failed."""
    FORM = "form"
    """A Flower app's reply has another form than the model that it was sent."""
    BARE = "bare"
    """A Flower app, or a Flower server, that does not speak the protocol."""
    UNKNOWN = "unknown"
    """A code that another version sent."""


class FedVeilError(Exception):
    """Base of all errors a user can cause and mend. Its `code` is its class's, unless it is given one of its own."""

    exit_code = 1
    code = Code.INTERNAL

    def __init__(self, text: str = "", *, code: Code | None = None) -> None:
        super().__init__(text)
        if code is not None:
            self.code = code


@dataclass(frozen=True)
class Refusal:
    """Why a client did not answer, or why its answer was not taken: programs go by the code, people read the text.

    `came` tells the two apart: what came and was not taken, the server has all the same.
    """

    code: Code
    text: str
    came: bool = False

    @staticmethod
    def of(error: FedVeilError, *, came: bool = False) -> Refusal:
        """An error as a refusal."""
        return Refusal(error.code, str(error), came)

    def __str__(self) -> str:
        return self.text


class ConfigError(FedVeilError):
    """A setting is unknown, out of range, or contradicts another one."""

    exit_code = 2
    code = Code.SETTINGS


class DataError(FedVeilError):
    """A data set cannot be read, or does not fit the task."""

    exit_code = 3
    code = Code.DATA


class TraceError(FedVeilError):
    """A network cannot be veiled safely."""

    exit_code = 4
    code = Code.SETTINGS


class NumericError(FedVeilError):
    """Training produced NaN or infinity; the message names the client and the batch."""

    exit_code = 5
    code = Code.NUMBERS


class ProtocolError(FedVeilError):
    """A message does not belong to the protocol's present step."""

    exit_code = 6
    code = Code.PROTOCOL


class CheckpointError(FedVeilError):
    """A checkpoint or run folder is damaged or belongs to another run."""

    exit_code = 7


class MissingExtraError(FedVeilError):
    """An optional dependency is needed; the message names the command that installs it."""

    exit_code = 8
    code = Code.EXTRA


class NotApplicableError(ConfigError):
    """An attack cannot be tried on what it was given; the message says why, in a few plain words."""


class AttackError(FedVeilError):
    """An attack's process failed, was killed, or took too long."""

    exit_code = 9


class ContradictionError(FedVeilError):
    """An audit has measured more than is proven."""

    exit_code = 10


class StopTraining(Exception):  # noqa: N818 (nothing is wrong)
    """Raised by a callback: the run ends after this round, with what it has. Its text says why."""


_IN_PYTHON: ContextVar[bool] = ContextVar("settings are written as in Python", default=False)


@contextmanager
def settings_as_arguments() -> Iterator[None]:
    """Within, texts name settings as whoever called from Python writes them."""
    before = _IN_PYTHON.set(True)
    try:
        yield
    finally:
        _IN_PYTHON.reset(before)


def spelled(name: str, value: object = None, *, argument: str = "") -> str:
    """A setting as whoever is told of it writes it: --loss square on a command line, loss='square' in Python.

    Args:
        name: As `RunConfig` has it, or out or resume.
        value: A value to give it; of what is on or off, whether it is on.
        argument: What Python has instead, where train() has no such setting.
    """
    if _IN_PYTHON.get():
        return argument or (name if value is None else f"{name}={value!r}")
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}" if value is None else f"--{flag} {value}"


_MOST_LISTED = 20
_NEAREST = 3
_ALSO_CALLED = {"square": "mse", "cross-entropy": "ce", "binary-cross-entropy": "bce"}
_LONGEST = 300  # of a name: one of 100,000 characters, out of a file that was handed over, takes seconds to compare


def unknown_name(
    kind: str, name: str, choices: Iterable[str], *, hint: str = "", words: Mapping[str, str] | None = None
) -> ConfigError:
    """A ConfigError for an unknown name that suggests the nearest known ones; a few are all listed.

    `words` says of names what they mean, for those who know the thing and not its name: learning_rate is near to lr.
    """
    known, name = sorted(choices), _shortened(name)

    def likeness(choice: str) -> float:
        said, meant = (words or _ALSO_CALLED).get(choice, "").lower()[: 2 * len(name)], name.lower().replace("_", " ")
        first = said.partition(";")[0]
        return max(_alike(name.lower(), choice.lower()), _alike(meant, said), _alike(meant, first))

    near = sorted(known, key=likeness, reverse=True)
    guess = f" Did you mean {near[0]!r}?" if near and likeness(near[0]) >= 0.5 else ""
    few = len(known) <= _MOST_LISTED
    listed = f"Known: {', '.join(known)}" if few else f"The nearest are {', '.join(near[:_NEAREST])}"
    return ConfigError(f"Unknown {kind} {name!r}.{guess} {listed}.{f' {hint}' if hint else ''}")


def _shortened(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"


def _alike(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left, right).ratio()


def unknown_option(owner: str, option: str, known: Iterable[str], *, hint: str = "") -> ConfigError:
    """A ConfigError that names the options the owner (Model 'mlp') takes and the nearest of them."""
    takes, option = list(known), _shortened(option)
    near = difflib.get_close_matches(option, takes, n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    listing = f"It takes: {', '.join(takes)}." if takes else "It takes no options of its own."
    return ConfigError(f"{owner} has no option {option!r}.{guess} {listing}{f' {hint}' if hint else ''}")


@contextmanager
def naming(file: object) -> Iterator[None]:
    """Give an OSError the name of the file that was at work: of a full disk the system does not say which."""
    try:
        yield
    except OSError as reason:
        if reason.filename is None and reason.errno is not None:
            reason.filename = str(file)
        raise


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtraError:
    """A MissingExtraError that names the one command that mends it."""
    return MissingExtraError(
        f"{purpose} needs the package {package!r}, which is not installed. "
        f"Install it with: pip install 'fedveil[{extra}]'"
    )
