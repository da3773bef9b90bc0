"""Every field that leaves a role is declared, for every named scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import UnionType
from typing import Any, get_args, get_type_hints

import pytest

from federation import job, server_of, trained
from fedveil.downlink.messages import Broadcast, PublicHead
from fedveil.errors import ProtocolError
from fedveil.flat import Layout
from fedveil.protocol import Ask, ClientRole, Train, Upload
from fedveil.protocol.wire import registered
from fedveil.schemes import schemes

NAMES = [info.name for info in schemes()]
OPTIONS = {"depth": 2, "width": 16, "norm": "batch"}
# Messages that travel inside another one, under that one's name.
INSIDE = {Broadcast: "train", PublicHead: "train.head"}
OUTERMOST = {Train: "train", Upload: "upload"}


def fields_by_class(kind: type, prefix: str) -> Iterator[str]:
    """Every field a message class could carry, however deep."""
    for name, hint in get_type_hints(kind).items():
        allowed = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        inner = [one for one in allowed if one in registered()]
        if not inner:
            yield f"{prefix}.{name}"
        for one in inner:
            yield from fields_by_class(one, INSIDE[one])


def fields_sent(message: Any, prefix: str) -> Iterator[str]:
    """Every field that one message does carry."""
    for one in dataclasses.fields(message):
        value = getattr(message, one.name)
        if type(value) in registered():
            yield from fields_sent(value, INSIDE[type(value)])
        elif value is not None:
            yield f"{prefix}.{one.name}"


def declared(scheme: str) -> set[str]:
    one = job(scheme=scheme, options=OPTIONS)
    return {release.field for release in one.scheme.releases(one.blueprint)}


def test_every_message_class_has_its_place_here() -> None:
    assert set(registered()) == {*INSIDE, *OUTERMOST}


@pytest.mark.parametrize("scheme", NAMES)
def test_every_field_of_every_message_class_is_declared(scheme: str) -> None:
    one = job(scheme=scheme, options=OPTIONS)
    known = declared(scheme)
    possible = {name for kind, prefix in OUTERMOST.items() for name in fields_by_class(kind, prefix)}
    possible.discard("upload.payload")  # its sections are what leaves
    possible |= {f"upload.{name}" for name in one.scheme.layout(one.blueprint).names}
    if one.scheme.downlink.head_tensors(one.blueprint) == 1:
        possible = {name for name in possible if not name.startswith("train.head.")}
    assert possible - known == set()


@pytest.mark.parametrize("scheme", NAMES)
def test_every_field_that_was_really_sent_is_declared(scheme: str) -> None:
    one = job(scheme=scheme, options=OPTIONS, rounds=2)
    sent: list[Any] = []

    class Listening(ClientRole):
        def handle_many(self, states: Any, request: Any, clients: Any) -> Any:
            sent.append(request)
            for state, reply in super().handle_many(states, request, clients):
                sent.append(reply)
                yield state, reply

    trained(one, role=Listening(one.scheme, one.blueprint))
    seen = {name for message in sent for name in fields_sent(message, OUTERMOST[type(message)])}
    seen.remove("upload.payload")
    for message in sent:
        if isinstance(message, Upload):
            seen |= {f"upload.{n}" for n in one.scheme.layout(one.blueprint).split(message.payload)}
    assert {"train.parameters", "train.epsilon", "upload.gradients", "upload.statistics", "upload.weight"} <= seen
    assert seen - declared(scheme) == set()


@pytest.mark.parametrize("scheme", NAMES)
def test_nothing_is_declared_twice_or_without_words(scheme: str) -> None:
    one = job(scheme=scheme)
    releases = one.scheme.releases(one.blueprint)
    names = [release.field for release in releases]
    assert len(set(names)) == len(names)
    for release in releases:
        assert release.what
        assert release.to
        assert release.sender in ("server", "client")
        assert release.field.startswith("train." if release.sender == "server" else "upload.")


def test_no_scheme_so_far_claims_noise_or_a_bound_on_uploads() -> None:
    """A bare uplink covers nothing, and says so: the ledger must not count protection that is not there."""
    for name in NAMES:
        one = job(scheme=name)
        for release in one.scheme.releases(one.blueprint):
            if release.sender == "client":
                assert (release.sensitivity, release.noise, release.hiding) == (None, "none", "none")


def test_a_veil_says_what_hides_the_parameters_and_plain_averaging_says_nothing_does() -> None:
    for name, hidden in (("fedavg", False), ("pbpfl", True), ("lossless", True)):
        one = job(scheme=name)
        by_field = {release.field: release for release in one.scheme.releases(one.blueprint)}
        assert (by_field["train.parameters"].hiding != "none") is hidden


class Chatty:
    """Local work whose uploads have one more section than anybody declared."""

    returns = "gradient"

    def __init__(self, work: Any) -> None:
        self._work = work

    def layout(self, blueprint: Any, *, tensors: int) -> Layout:
        return Layout((*self._work.layout(blueprint, tensors=tensors).sections, ("diary", (3,))))


def test_an_undeclared_section_stops_the_server_before_anything_is_sent() -> None:
    one = job()
    object.__setattr__(one.scheme, "work", Chatty(one.scheme.work))
    with pytest.raises(ProtocolError, match=r"undeclared release: upload\.diary"):
        server_of(one)


def test_a_server_with_declared_sections_starts() -> None:
    assert isinstance(next(server_of(job()).run()), Ask)
