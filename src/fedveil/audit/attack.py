"""What an attack is: one decorated function that says what it sees, what it is after and where it proves itself.

    @attack("labels", sees=("upload", "sum"), asset="labels", reference="lenet", needs=("classes",), how="…")
    def labels_attack(view: View, context: AttackContext, *, own_setting: int = 3) -> dict[str, Tensor]: ...

An audit follows from the declaration: in which trials the attack is made, on which views, with which truth its results
are compared and what has to come out on its reference run before it is believed. The function runs in a process of its
own, with a view, the context and its settings (its keyword arguments), and nothing else. What it returns are tensors,
by what it is after:

    data                     inputs, shaped like the samples of the upload (a batch's order does not matter)
    labels                   labels
    the model's function     class scores (or predictions) for known["queries"]; several ways may be tried, by name
    the model's parameters   parameters, flat
    the server's updates     update, flat, and in whatever basis the model it was added to: frame
    members                  scores of the candidates whose membership is unknown, and the threshold for "member"
    what classes look like   inputs, and the labels they were made for

Attacks of the package are found in `fedveil.audit.attacks`, one's own by FILE.py:function or package.module:function.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from fedveil.audit.findings import ASSETS, Found, Settings
from fedveil.audit.views import ClientView, Facts, OutsiderView, ServerHistory, ServerView, View
from fedveil.errors import ConfigError, NotApplicableError, unknown_name
from fedveil.own_code import load_file

OnProgress = Callable[[float], None]

SIGHTS = {
    "upload": ("server", "an upload"),
    "masked upload": ("server", "an upload"),
    "bare tensors": ("server", "Ψ and Φ"),
    "sum": ("server", "a sum"),
    "rounds": ("server", "many uploads"),
    "coalition": ("server", "an upload"),
    "wire": ("wire", "an upload"),
    "bare tensors on the wire": ("wire", "Ψ and Φ"),
    "model": ("client", "the model"),
}
"""What can be seen, by whom, in words. A coalition is a server with clients; bare tensors travel beside a gradient
under head noise; rounds are uploads of one client that trains on the same samples each time."""

MODEL = "model"
_CERTAIN = ("the model's function", "the model's parameters", "the server's updates")
"""What the model itself is worth without protection is known without trying."""
_OF_THE_MODEL = (*_CERTAIN, "members", "what classes look like")
Need = Literal["classes", "pictures", "numbers", "head noise", "veil", "sketch", "private head"]
Grant = Literal["public", "labelled"]
TARGETS = ("upload", "sum")
CPU = torch.device("cpu")
STANDSTILL = 1e-12
"""A learning rate at which the model all but stands still, so that every round shows the same."""


@dataclass(frozen=True)
class ReferenceRun:
    """A small unprotected run on embedded digits: in words, its settings, how many samples a client keeps."""

    what: str
    settings: Mapping[str, Any]
    samples: int | None = None


SINGLE = {"clients": 4, "rounds": 4, "lr": STANDSTILL, "record_rounds": "1-4", "record_clients": "0-3"}
REFERENCES = {
    "mlp": ReferenceRun("plain averaging, an mlp, one digit a client", {**SINGLE, "scheme": "fedavg"}, 1),
    "lenet": ReferenceRun(
        "plain averaging, a sigmoid LeNet, one digit a client",
        {**SINGLE, "scheme": "fedavg", "model": "lenet-sigmoid", "loss": "cross-entropy"},
        1,
    ),
    "bare": ReferenceRun("lossless, whose uploads nothing covers, an mlp, one digit a client", SINGLE, 1),
    "overfitted": ReferenceRun(
        "plain averaging, an mlp that knows its few digits by heart",
        {
            "scheme": "fedavg",
            "loss": "square",
            "clients": 8,
            "rounds": 400,
            "lr": 0.05,
            "momentum": 0.9,
            "record_rounds": "400",
        },
        12,
    ),
    "trained": ReferenceRun(
        "plain averaging, a well-trained mlp",
        {"scheme": "fedavg", "clients": 4, "rounds": 150, "lr": 0.2, "momentum": 0.9, "record_rounds": "150"},
    ),
}


def silent(_: float) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class AttackContext:
    """What an auditor tells every attack beside its view.

    `quick` asks for minutes on two cores; `box` is the least and the greatest value of an input, where that is known.
    `target` is the upload or the sum, and `batch` of how many samples it is, where that is not what was announced; on
    the wire, `client` and `round` say which upload is meant. `clipped` False says that no gradient reaches the
    clipping bound, so that sizes count. `progress` takes fractions from 0 to 1.
    """

    seed: int = 0
    quick: bool = False
    device: torch.device = CPU
    box: tuple[float, float] | None = None
    target: str = "upload"
    batch: int | None = None
    client: int | None = None
    round: int | None = None
    clipped: bool | None = None
    progress: OnProgress = silent

    @staticmethod
    def of(settings: Settings, progress: OnProgress = silent) -> AttackContext:
        """From plain data; settings that are an attack's own are left out."""
        told = {field.name for field in fields(AttackContext)} - {"progress"}
        given = {name: value for name, value in settings.items() if name in told}
        return AttackContext(
            **{
                **given,
                "device": _device(str(given.get("device", "cpu"))),
                "box": _box(given.get("box")),
                "target": _target(str(given.get("target", "upload"))),
                "batch": counted("batch", given.get("batch")),
            },
            progress=progress,
        )

    def generator(self) -> torch.Generator:
        """The attacker's own randomness, on the CPU, from the seed."""
        return torch.Generator().manual_seed(int(self.seed))

    def part(self, first: float, last: float) -> OnProgress:
        """Progress of a part of the work, from one fraction of all of it to another."""
        return lambda done: self.progress(first + (last - first) * done)


Function = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Attack:
    """A declared attack; called with a view, plain settings and progress."""

    name: str
    sees: tuple[str, ...]
    asset: str
    how: str
    reference: ReferenceRun | None
    asked: float
    needs: tuple[str, ...]
    granted: tuple[str, ...]
    adaptive: bool
    learns: bool
    slow: bool
    function: Function
    target: str
    digest: str = ""

    def __call__(self, view: View, settings: Settings, progress: OnProgress = silent) -> Found:
        """What the attack finds on a view; settings that it does not take are other attacks', and are left out."""
        own = {spelt: settings[name] for name, spelt in self._spelt.items() if name in settings}
        return self.function(view, AttackContext.of(settings, progress), **own)

    @functools.cached_property
    def _spelt(self) -> dict[str, str]:
        """Settings by name; one that is a word of Python's is spelt with an underscore behind it."""
        parameters = inspect.signature(self.function).parameters.values()
        return {
            parameter.name.rstrip("_"): parameter.name
            for parameter in parameters
            if parameter.kind is parameter.KEYWORD_ONLY
        }

    @property
    def settings(self) -> Mapping[str, Any]:
        """Its own settings and their defaults: the function's keyword arguments."""
        parameters = inspect.signature(self.function).parameters
        return {name: parameters[spelt].default for name, spelt in self._spelt.items()}

    @property
    def listing(self) -> tuple[str, str, str]:
        """Who makes it, on what, how."""
        by, on = (dict.fromkeys(SIGHTS[sight][place] for sight in self.sees) for place in (0, 1))
        return ", ".join(by), ", ".join(on), self.how


def attack(
    name: str,
    *,
    sees: str | Sequence[str],
    asset: str,
    reference: str | ReferenceRun | None,
    how: str,
    asked: float | None = None,
    needs: Sequence[Need] = (),
    granted: Sequence[Grant] = (),
    adaptive: bool = False,
    learns: bool = False,
    slow: bool = False,
) -> Callable[[Function], Attack]:
    """Declare a function (view, context, *, settings) → tensors as an attack.

    Args:
        name: By which it is asked for and reported.
        sees: One or several of SIGHTS: on which views it is made.
        asset: One of ASSETS: what it is after. With what is seen, that decides truth and figure.
        reference: One of REFERENCES, or a run of one's own, on which it has to work before it is believed; None only
            where what it gets without protection is known without trying.
        how: A line on how it works, with its source.
        asked: The figure it has to exceed on its reference; the asset's usual one by default.
        needs: What a run must have for it to be made.
        granted: What the auditor puts into known besides: public data, or labelled samples.
        adaptive: Whether it is made for a kind of protection. A setting `adaptive` of the function's own means that
            it is also made with that set to True where a model comes with head noise.
        learns: Whether it fits a model of its own, so that chance is what that gets without the received one.
        slow: Whether it searches or trains for long: it is given fewer victims and begins first.
    """
    seen = (sees,) if isinstance(sees, str) else tuple(sees)
    for what, given, known in (
        ("sight of an attack", seen, SIGHTS),
        ("asset", (asset,), ASSETS),
        ("need of an attack", tuple(needs), get_args(Need)),
        ("grant to an attack", tuple(granted), get_args(Grant)),
        ("reference run", (reference,) if isinstance(reference, str) else (), REFERENCES),
    ):
        for word in given:
            if word not in known:
                raise unknown_name(what, word, known)
    if {asset in _OF_THE_MODEL} != {sight == MODEL for sight in seen}:
        raise ConfigError(
            f"The attack {name!r} sees {', '.join(seen) or 'nothing'} and is after {asset}, of which that shows "
            "nothing an audit could score: data and labels are looked for in uploads, all else in the model."
        )
    if reference is None and asset not in _CERTAIN:
        raise ConfigError(f"The attack {name!r} needs a reference run on which it works: nothing follows without one.")

    def declare(function: Function) -> Attack:
        return Attack(
            name=name,
            sees=seen,
            asset=asset,
            how=how,
            reference=REFERENCES[reference] if isinstance(reference, str) else reference,
            asked=ASSETS[asset].asked if asked is None else asked,
            needs=tuple(needs),
            granted=tuple(granted),
            adaptive=adaptive,
            learns=learns,
            slow=slow,
            function=function,
            target=f"{function.__module__}:{function.__qualname__}",
        )

    return declare


@functools.cache
def attacks() -> Mapping[str, Attack]:
    """The package's own attacks by name: by what they see, then by what they are after, the quick ones first."""
    from fedveil.audit import attacks as package

    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    modules = [importlib.import_module(f"{package.__name__}.{name}") for name in names]
    declared = [attack for module in modules for attack in _declared_in(module)]
    sights, assets = list(SIGHTS), list(ASSETS)
    declared.sort(key=lambda attack: (sights.index(attack.sees[0]), assets.index(attack.asset), attack.slow))
    return {attack.name: attack for attack in declared}


def attack_at(target: str) -> Attack:
    """The attack that FILE.py:function or package.module:function names; whoever runs the program must have named it.

    What is read from a file, a folder or a message is never imported.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ConfigError(f"The attack {target!r} is not of the form FILE.py:function or package.module:function.")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        module, digest = load_file(path, what="an attack"), hashlib.sha256(path.read_bytes()).hexdigest()
        target = f"{path}:{name}"
    else:
        try:
            module, digest = importlib.import_module(place), ""
        except Exception as reason:
            raise ConfigError(f"The attack {target} cannot be loaded: {type(reason).__name__}: {reason}.") from reason
    member = getattr(module, name, None)
    if not isinstance(member, Attack):
        known = ", ".join(attack.target.rpartition(":")[2] for attack in _declared_in(module))
        raise ConfigError(
            f"The attack {target} cannot be loaded: {module.__file__} declares no attack {name!r}"
            + (f" (but {known})." if known else "; put @attack(…) of fedveil.audit.attack over the function.")
        )
    return replace(member, target=target, digest=digest)


def with_own(own: Sequence[str] = ()) -> Mapping[str, Attack]:
    """The package's attacks and, by FILE.py:function or package.module:function, one's own."""
    known = dict(attacks())
    for attack in map(attack_at, own):
        if attack.name in known:
            raise ConfigError(f"There is an attack {attack.name!r} already: give {attack.target} another name.")
        known[attack.name] = attack
    return known


def _declared_in(module: ModuleType) -> Iterator[Attack]:
    return (
        member for member in vars(module).values() if isinstance(member, Attack) and _home(member) == module.__name__
    )


def _home(attack: Attack) -> str:
    return attack.function.__module__


_ROLES: dict[type, str] = {
    ClientView: "a client",
    OutsiderView: "an outsider",
    ServerView: "the server",
    ServerHistory: "the server over several rounds",
}
Kind = TypeVar("Kind", ClientView, OutsiderView, ServerView, ServerHistory)


def seen_by(view: View, kind: type[Kind]) -> Kind:
    """The view, if it is of this kind; refused otherwise."""
    if not isinstance(view, kind):
        raise NotApplicableError(f"what {_ROLES[type(view)]} sees: this attack is made on what {_ROLES[kind]} sees")
    return view


def require_classes(facts: Facts) -> None:
    """Refuse tasks whose targets are numbers."""
    if facts.task != "classification":
        raise NotApplicableError(f"a {facts.task} task: this attack needs classes")


def require_numbers(facts: Facts) -> None:
    """Refuse inputs that are tokens, through which no gradient passes."""
    if facts.input_dtype.startswith("int"):
        raise NotApplicableError("text as input: words are no numbers that a gradient could lead to")


@contextlib.contextmanager
def applicable() -> Iterator[None]:
    """Around an attack on inputs that were checked: what it then refuses, it cannot be tried on."""
    try:
        yield
    except NotApplicableError:
        raise
    except ConfigError as reason:
        raise NotApplicableError(str(reason)) from reason


def counted(name: str, given: object) -> int | None:
    """A setting that is a count of at least one; None where it is not given."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, int) or given < 1):
        raise ConfigError(f"{name} must be a whole number of at least 1 (got {given!r}).")
    return given


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as reason:
        raise ConfigError(f"The device {name!r} of an attack is not one of this machine.") from reason


def _box(given: Any) -> tuple[float, float] | None:
    if given is None:
        return None
    try:
        low, high = (float(end) for end in given)
    except (TypeError, ValueError) as reason:
        raise ConfigError(f"box must be two numbers, the least and the greatest input value (got {given}).") from reason
    return low, high


def _target(name: str) -> str:
    if name not in TARGETS:
        raise unknown_name("target", name, TARGETS)
    return name
