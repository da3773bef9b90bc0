"""Where the model lives with the clients, too, every field that leaves a role is declared, and nothing else is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from client_held.relaying import HELD_MESSAGES, HELD_SCHEMES, Recording
from federation import held_run, job, relay_of
from fedveil.client_held.ciphers import Ciphertext
from fedveil.client_held.group import Found, Founded, Invitation, Join, Joined
from fedveil.client_held.messages import Begin, Borrowed, Divide, Divided, Finish, Finished, Lend, Lent, Vote
from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Release, UndeclaredError
from fedveil.protocol.codec import registered
from fedveil.protocol.directory import Announce, Directory, Epoch, Hello, Nonce, Nonces, Ready
from fedveil.protocol.messages import Aggregate, Reply, Request
from fedveil.runs.job import Job
from fedveil.schemes import schemes
from fedveil.uplink.unmasking import MaskedUpload, Relayed, Revealed, Unmask

pytest.importorskip("tenseal")

GROUP = {Hello, Announce, Directory, Nonce, Nonces, Ready, Found, Founded, Join, Invitation, Joined}
ROUND = {Begin, Divided, Lend, Lent, Borrowed, Finish, Finished}
UNMASKING = {Unmask, Relayed, Revealed}
VOTED = GROUP | ROUND | {Vote, Divide}
BALLOTS = GROUP | ROUND | UNMASKING | {MaskedUpload, Divide}
# The messages that travel on their own; hidden parts and sums travel inside others.
SPEAKS: dict[str, tuple[dict[str, Any], set[type]]] = {
    "ckks-fedavg": ({"scheme": "ckks-fedavg"}, GROUP | ROUND),
    "ckks-fedavg, pads": ({"scheme": "ckks-fedavg", "cipher": "pads"}, GROUP | ROUND | UNMASKING),
    "serial": ({"scheme": "serial"}, GROUP | ROUND),
    "serial, pads": ({"scheme": "serial", "cipher": "pads"}, GROUP | ROUND | UNMASKING),
    "paraaegis": ({"scheme": "paraaegis"}, VOTED),
    "pads": ({"scheme": "paraaegis", "cipher": "pads"}, VOTED | UNMASKING),
    "pads, on dropout": ({"scheme": "paraaegis", "cipher": "pads", "unmask": "on-dropout"}, VOTED | UNMASKING),
    "ballots": ({"scheme": "paraaegis", "cipher": "pads", "vote": "histogram"}, BALLOTS),
    "ballots, ckks": ({"scheme": "paraaegis", "vote": "histogram"}, BALLOTS),
    "by lot": ({"scheme": "paraaegis", "strategy": "random"}, GROUP | ROUND),
    "random votes": ({"scheme": "paraaegis", "strategy": "random-votes"}, VOTED),
    "nothing hidden": ({"scheme": "paraaegis", "share": 0.0}, GROUP | ROUND),
    "everything hidden": ({"scheme": "paraaegis", "share": 1.0}, GROUP | ROUND),
    "ever less": ({"scheme": "paraaegis", "share": 1.0, "share_decay": 0.5}, VOTED),
}


def of(name: str) -> Job:
    settings, _ = SPEAKS[name]
    small = {"options": {"depth": 1, "width": 4}, "loss": "cross-entropy", "lr": 0.1, "local_steps": 1}
    return job(clients=6, rounds=4, **small, **settings)


def declared(one: Job) -> dict[str, Release]:
    return {release.field: release for release in one.scheme.releases(one.architecture)}


def named(message: Any) -> Iterator[str]:
    """Every field that a message carries, as releases name them."""
    if isinstance(message, MaskedUpload):  # on its own it is a ballot
        yield from (f"vote.{'ballot' if one == 'payload' else one}" for one in fields(message))
        return
    for one in fields(message):
        value = getattr(message, one)
        if isinstance(value, (Aggregate, Epoch)):
            yield from (f"{value.released_as}.{inner}" for inner in fields(value))
            continue
        yield f"{type(message).__name__.lower()}.{one}"
        if isinstance(value, (Ciphertext, MaskedUpload)):
            yield from (f"hidden.{inner}" for inner in fields(value) if inner != "payload")
        else:
            assert type(value) not in registered()


def fields(message: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(message) if getattr(message, one.name) is not None]


def somebody_is_missing(request: Any, client: int) -> bool:
    """One before the vote of the second round, another between vote and upload of the third."""
    if isinstance(request, Begin):
        return request.round == 1 and client == 5
    return isinstance(request, Divide) and request.round == 2 and client == 4


@pytest.fixture(scope="module")
def overheard() -> dict[str, list[Any]]:
    """All messages of a run: with everybody there, with somebody missing, and in the round after."""
    found = {}
    for name in SPEAKS:
        kept: list[Recording] = []

        def through(role: Any, kept: list[Recording] = kept) -> Recording:
            kept.append(Recording(role))
            return kept[0]

        run = held_run(of(name), through=through, absent=somebody_is_missing)
        assert not any(done.failed for done in run.rounds)
        found[name] = [*kept[0].received, *kept[0].replied]
    return found


def test_every_scheme_whose_model_lives_with_the_clients_is_here() -> None:
    assert {info.name for info in schemes() if job(scheme=info.name).scheme.holder == "clients"} == set(HELD_SCHEMES)
    spoken = set.union(*(kinds for _, kinds in SPEAKS.values()))
    assert spoken >= HELD_MESSAGES - {Aggregate, Ciphertext}  # those two travel inside others


@pytest.mark.parametrize("name", SPEAKS)
def test_exactly_the_fields_that_are_sent_are_declared(overheard: dict[str, list[Any]], name: str) -> None:
    """Not more either: a declaration without a message would let a later field slip through under its name."""
    _, kinds = SPEAKS[name]
    sent = overheard[name]
    assert {type(message) for message in sent} == kinds
    assert {field for message in sent for field in named(message)} == set(declared(of(name)))


@pytest.mark.parametrize("name", SPEAKS)
def test_nothing_is_declared_twice_or_without_words_or_by_the_wrong_party(
    overheard: dict[str, list[Any]], name: str
) -> None:
    one = of(name)
    releases = one.scheme.releases(one.architecture)
    assert len({release.field for release in releases}) == len(releases)
    assert all(release.what and release.to for release in releases)
    found = declared(one)
    for message in overheard[name]:
        for field in named(message):
            assert found[field].sender == ("server" if isinstance(message, Request) else "client"), field
            assert isinstance(message, (Request, Reply))


@pytest.mark.parametrize("name", SPEAKS)
def test_what_carries_data_says_what_covers_it(name: str) -> None:
    found = declared(of(name))
    settings, _ = SPEAKS[name]
    noised = settings["scheme"] != "ckks-fedavg" and name != "everything hidden"
    serial, pads = settings["scheme"] == "serial", settings.get("cipher") == "pads"
    data = {field for field, release in found.items() if release.about == "data"}
    hides = name != "nothing hidden"
    votes = {"vote.tags", "vote.ballot"} & set(found) if name != "random votes" else set()
    rests = {"divided.rest", "aggregate.rest"} if noised and not serial else set()
    assert data == rests | ({"divided.hidden", "aggregate.hidden"} if hides else set()) | votes
    for field in rests:
        assert (found[field].protection, found[field].noise) == ("noised", "Gaussian")
    if hides:
        upload, total = found["divided.hidden"], found["aggregate.hidden"]
        assert upload.protection == "encrypted"
        assert upload.with_client == ("noised" if serial else "masked" if pads else "open")
        assert total.protection == ("noised" if serial else "masked")
        assert {upload.noise, total.noise} == {"Gaussian" if serial else "none"}
    if "vote.tags" in found and votes:
        assert (found["vote.tags"].protection, found["vote.tags"].with_client) == ("linked", "open")
    if "vote.ballot" in found:
        assert (found["vote.ballot"].protection, found["vote.ballot"].with_client) == ("encrypted", "masked")
    assert {field for field, release in found.items() if release.about == "model"} >= {"lent.sealed", "borrowed.sealed"}


LATE = {
    "found.newcomers": "paraaegis",
    "invitation.sealed": "paraaegis",
    "begin.version": "paraaegis",
    "aggregate.hidden": "paraaegis",
    "aggregate.rest": "nothing hidden",
    "divide.winners": "paraaegis",
    "divide.counts": "ballots, ckks",
    "unmask.survivors": "ballots, ckks",
    "relayed.bundles": "pads",
    "lend.version": "pads",
    "borrowed.sealed": "ckks-fedavg",
    "finish.version": "ckks-fedavg",
}


@pytest.mark.parametrize(("forgotten", "name"), LATE.items())
def test_a_request_with_an_undeclared_field_is_never_sent(forgotten: str, name: str) -> None:
    """Also in phases that come late, in what is sent to one client alone, and in sums that travel inside."""
    one = of(name)
    known = one.scheme.releases(one.architecture)

    class Forgetful(type(one.scheme)):  # type: ignore[misc]
        def releases(self, architecture: Any) -> Any:
            return tuple(release for release in known if release.field != forgotten)

    object.__setattr__(one.scheme, "__class__", Forgetful)
    kept: list[Recording] = []

    def through(role: Any) -> Recording:
        kept.append(Recording(role))
        return kept[0]

    with pytest.raises(UndeclaredError, match=f"undeclared release: {forgotten}"):
        held_run(one, through=through, absent=somebody_is_missing)
    received = kept[0].received if kept else []
    assert not any(forgotten in set(named(message)) for message in received)


def test_a_server_without_a_model_is_not_made_for_a_scheme_that_needs_one() -> None:
    with pytest.raises(ProtocolError, match="the model of lossless lives with the server"):
        relay_of(job())
