"""What travels between roles: frozen dataclasses, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Annotated, Any

import torch
from torch import Tensor

from fedveil.downlink.messages import Broadcast, ClipBroadcast, PublicHead, SketchBroadcast
from fedveil.ledger.releases import ContributionSections, Cover, Party, Release, Released, check_declared
from fedveil.protocol.codec import message, released
from fedveil.shapes import REALS, Shape, clients, declared, words

message(PublicHead)
message(Broadcast)
message(ClipBroadcast)
message(SketchBroadcast)


@dataclass(frozen=True, eq=False)
class Request:
    """Anything the server sends to clients."""


class FromClient:
    """What clients send, by itself or inside another message."""


@dataclass(frozen=True, eq=False)
class Reply(FromClient):
    """Anything a client sends back; `client` is its number."""

    client: Annotated[int, Released("the client's number")]


Round = Annotated[int, Released("the round's number")]
Attempt = Annotated[int, Released("the round's repetition")]


def releases_of(
    kind: type[Any],
    *,
    name: str = "",
    sections: Collection[str] = (),
    but: Collection[str] = (),
    covers: Mapping[str, Cover] = MappingProxyType({}),
    sender: Party | None = None,
    receivers: tuple[Party, ...] = (),
) -> tuple[Release, ...]:
    """The releases of a kind of message, as its fields declare them.

    What does not go from clients to the server or from the server to clients says so: `released_by`, `released_to`.

    Args:
        kind: the message, which may travel under another `name` (train.parameters).
        sections: of the vector in it, where there is one; those that it does not know stay undeclared.
        but: fields that are never there, or whose releases somebody else declares.
        covers: by field or section, what a part makes of it.
        sender, receivers: of the message that it travels in, where it does.
    """
    name = name or _name_of(kind)
    usual: Party = "client" if issubclass(kind, FromClient) or sender == "client" else "server"
    by: Party = getattr(kind, "released_by", usual)
    usually: tuple[Party, ...] = ("clients",) if by == "server" else ("server",)
    to: tuple[Party, ...] = receivers or getattr(kind, "released_to", usually)
    releases: list[Release] = []
    for field in declared(kind):
        said = released(kind, field)
        if field in but:
            continue
        if isinstance(said, ContributionSections):
            known = [section for section in sections if section in said.what]
            releases += [Release(f"{name}.{section}", by, to, said.what[section], about="data") for section in known]
        elif isinstance(said, Released):
            releases.append(Release(f"{name}.{field}", by, **{**vars(said), "to": said.to or to}))
        else:
            given = getattr(kind, "released_to", ())
            inside = getattr(said, "released_as", f"{name}.{field}")
            releases += releases_of(said, name=inside, sender=by, receivers=receivers or given)
    return tuple(
        dataclasses.replace(release, **cover) if (cover := covers.get(release.field.rsplit(".", 1)[1])) else release
        for release in releases
    )


def _name_of(kind: type[Any]) -> str:
    name: str = getattr(kind, "released_as", kind.__name__.lower())
    return name


def awaited_fields(kind: type[Any], *, name: str = "") -> list[str]:
    """The name of every field that a kind of message always carries, as releases name them; sections excepted."""
    name = name or _name_of(kind)
    names: list[str] = []
    for field, layout in declared(kind).items():
        said = released(kind, field)
        if type(None) in layout.types or isinstance(said, ContributionSections):
            continue
        if isinstance(said, Released):
            names.append(f"{name}.{field}")
        else:
            names += awaited_fields(said, name=getattr(said, "released_as", f"{name}.{field}"))
    return names


def releases_of_all(*kinds: type[Any]) -> tuple[Release, ...]:
    """The releases of several kinds of messages, each once: what travels inside several has one name."""
    return each_once(release for kind in kinds for release in releases_of(kind))


def each_once(releases: Iterable[Release]) -> tuple[Release, ...]:
    """Releases in order, those of a name that was there already left out."""
    unique: dict[str, Release] = {}
    for release in releases:
        unique.setdefault(release.field, release)
    return tuple(unique.values())


def released_fields(sent: Request | Reply, *, name: str = "", among: Collection[str] = ()) -> list[str]:
    """The name of every field a message carries, as releases name them (train.parameters, train.head.vector).

    What travels inside several messages has a name of its own, `released_as`. A vector whose sections are releases of
    their own counts as one of those that are `among` the declared ones, and under its own name where none is.
    """

    known = frozenset(among)

    def walk(value: Any, prefix: str) -> list[str]:
        names: list[str] = []
        for field, own in _field_names(type(value), prefix, known):  # type: ignore[arg-type]
            inner = getattr(value, field)
            if inner is not None:
                names += own or walk(inner, getattr(type(inner), "released_as", f"{prefix}.{field}"))
        return names

    return walk(sent, name or _name_of(type(sent)))


@lru_cache(maxsize=256)
def _field_names(kind: type[Any], prefix: str, among: frozenset[str]) -> list[tuple[str, list[str]]]:
    """What each field of a kind of message is called; nothing for a message inside it, which declares for itself."""
    fields = []
    for field in dataclasses.fields(kind):
        said = released(kind, field.name)
        sections = said.what if isinstance(said, ContributionSections) else ()
        named = [full for section in sections if (full := f"{prefix}.{section}") in among]
        fields.append((field.name, [] if isinstance(said, type) else named or [f"{prefix}.{field.name}"]))
    return fields


@dataclass(frozen=True)
class DeclaredReleases:
    """The releases that a run's scheme declares, in order, and whether what is about to pass is among them."""

    releases: tuple[Release, ...]

    @cached_property
    def fields(self) -> frozenset[str]:
        """Their fields."""
        return frozenset(release.field for release in self.releases)

    def check(self, fields: Collection[str]) -> None:
        """Refuse fields that nobody declared (UndeclaredError)."""
        if not self.fields.issuperset(fields):
            check_declared(fields, self.releases)


@message
@dataclass(frozen=True, eq=False)
class Train(Request):
    """Server → client: compute on this model. `attempt` counts repetitions of a round.

    `cohort` names the round's clients where the uplink ties them together.
    """

    round: Round
    attempt: Attempt
    broadcast: Broadcast | ClipBroadcast | SketchBroadcast
    cohort: Annotated[Tensor | None, clients("cohort"), Released("who takes part in the round")] = None


SECTIONS = ContributionSections(
    {
        "gradients": "the client's gradient(s) on its batch, or its update",
        "values": "the training loss on its batch, or the φ values that combine into it",
        "statistics": "BatchNorm mean and variance of its batch",
        "figures": "sums over samples that the client holds back: how many, their loss, and how they were answered",
        "within": "whether its update is within the round's clip, as plus or minus its number of samples",
        "weight": "how many samples it has",
        "ballot": "a one for each of the client's largest changes",
    }
)
"""The sections of a contribution, as local work names them, and the one of a vote by histogram."""


@message
@dataclass(frozen=True, eq=False)
class Upload(Reply):
    """Client → server: one flat vector, in the layout both sides know; of which numbers, the uplink says."""

    round: Round
    attempt: Attempt
    payload: Annotated[Tensor, Shape((*REALS, torch.int64), ("contribution",)), SECTIONS]

    def dense(self, length: int) -> Tensor:
        """The contribution of `length` numbers, as one vector; a part of it where that is what was sent."""
        return self.payload


@message
@dataclass(frozen=True, eq=False)
class Aggregate:
    """A round's sums, which bring a model to `version`.

    `asked` is the cohort of the uploads, `contributors` those of it that are in the sums. `rest` is the
    sum of what travelled under noise, `hidden` the sum of what the server could not read.
    """

    version: Annotated[int, Released("the version that the sums lead to")]
    round: Round
    attempt: Attempt
    asked: Annotated[Tensor, clients("asked"), Released("who was asked to upload")]
    contributors: Annotated[Tensor, clients("contributors"), Released("whose uploads are in the sums")]
    rest: Annotated[Tensor, words("rest"), Released("the sum of what was not hidden")]
    hidden: Annotated[
        Tensor | None,
        Shape((torch.int64, torch.uint8), ("hidden",)),
        Released("the sum of what was hidden, which every client can open", about="data"),
    ]

    released_as = "aggregate"
