"""Every field that leaves a role is declared, for every named scheme."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from client_held.relaying import HELD_MESSAGES, HELD_SCHEMES
from federation import job, server_of, trained
from fedveil.downlink.messages import Broadcast, ClipBroadcast, PublicHead, SketchBroadcast
from fedveil.engine.local import Absent
from fedveil.errors import ProtocolError
from fedveil.ledger.releases import Released
from fedveil.protocol.codec import registered
from fedveil.protocol.directory import Announce, Directory, Epoch, Hello, Nonce, Nonces, Ready
from fedveil.protocol.messages import SECTIONS, Reply, Request, Round, Train, Upload, releases_of
from fedveil.protocol.phases import Ask, Heard, Inbox, RoundBegins
from fedveil.roles.client import ClientRole
from fedveil.roles.server import ServerRole
from fedveil.runs.job import Job
from fedveil.runs.loop import client_role
from fedveil.schemes import find, schemes
from fedveil.shapes import words
from fedveil.tensors import Layout
from fedveil.uplink.functional import FunctionalUpload, FunctionKeys, KeyFor, RoundKey, RoundKeys, SetupRound
from fedveil.uplink.lwe import LweUpload
from fedveil.uplink.noised import Repair, Repaired
from fedveil.uplink.selected import SelectedUpload
from fedveil.uplink.threshold import Deal, Dealt, Decrypt, Decrypted, EncryptedUpload, SealedShare, Taken, TakeShare
from fedveil.uplink.unmasking import Evidence, MaskedUpload, Relayed, Revealed, Unmask

# Schemes whose model lives with the clients, and their messages, have a file of their own.
NAMES = [info.name for info in schemes() if info.name not in HELD_SCHEMES]
# Messages that travel inside another one, under that one's name.
INSIDE = {
    Broadcast: "train",
    ClipBroadcast: "train",
    SketchBroadcast: "train",
    PublicHead: "train.head",
    Epoch: "epoch",
    Directory: "setupround.directory",
}
REQUESTS = (
    *(Hello, Directory, Nonces, Train, Unmask, Relayed, Evidence, Repair),
    *(Deal, TakeShare, SealedShare, Decrypt, SetupRound, RoundKey, KeyFor),
)
REPLIES = (
    *(Announce, Nonce, Ready, Upload, MaskedUpload, SelectedUpload, Revealed, Repaired),
    *(Dealt, Taken, EncryptedUpload, Decrypted, LweUpload, RoundKeys, FunctionalUpload, FunctionKeys),
)
PREFIXES = {kind: kind.__name__.lower() for kind in (*REQUESTS, *REPLIES)} | {
    MaskedUpload: "upload",
    SelectedUpload: "upload",
    EncryptedUpload: "upload",
    LweUpload: "upload",
    FunctionalUpload: "upload",
}
COMMON = {Train, Upload}
SIZES = {Hello, Directory, Announce, Ready}
KEYS = SIZES | {Nonce, Nonces}
REPAIR = {Repair, Repaired}
KEY = {Deal, Dealt, TakeShare, SealedShare, Taken, EncryptedUpload, Decrypt, Decrypted}
AUTHORITY = {SetupRound, RoundKeys, RoundKey, FunctionalUpload, KeyFor, FunctionKeys}
MASKS = {MaskedUpload, Unmask, Relayed, Revealed, Evidence}
# The message classes that each scheme sends, where every client arrives in one round and one is missing in another.
SPEAKS: dict[str, set[type]] = {
    "fedavg": COMMON,
    "lossless": COMMON,
    "pbpfl": COMMON,
    "dbcl": COMMON,
    "spn": COMMON,
    "ppdl": {Train, SelectedUpload},
    "ppdl, laplace": {Train, SelectedUpload},
    "ldp": COMMON | SIZES,
    "cdp": COMMON | SIZES,
    "nadp": COMMON | KEYS | REPAIR,
    "dp-fedavg": COMMON | SIZES,
    "varying-dp": COMMON | SIZES,
    "mpdp": COMMON | KEYS,
    "mpdp-naive": COMMON | SIZES,
    "mp-cdp": COMMON | SIZES,
    "secagg": (COMMON | KEYS | MASKS) - {Upload},
    "veil-secagg": (COMMON | KEYS | MASKS) - {Upload},
    "tp-smc": (COMMON | KEYS | KEY) - {Upload},
    "pile": (COMMON | KEYS | KEY) - {Upload},
    "hybridalpha": (COMMON | KEYS | AUTHORITY) - {Upload},
    "lwe-secagg": (COMMON | KEYS | MASKS | {LweUpload}) - {Upload, MaskedUpload},
    "veil-dp": COMMON | KEYS | REPAIR,
    "veil-dp, masks": (COMMON | KEYS | MASKS) - {Upload},
    "veil-secagg, on dropout": (COMMON | KEYS | MASKS) - {Upload, Evidence},
    "nadp, tolerant": COMMON | KEYS,
    "dp-fedavg, adaptive": COMMON | SIZES,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "ppdl, laplace": {"scheme": "ppdl", "upload_noise": "laplace"},
    "veil-dp, masks": {"scheme": "veil-dp", "cover": "masks"},
    "veil-secagg, on dropout": {"scheme": "veil-secagg", "unmask": "on-dropout"},
    "nadp, tolerant": {"scheme": "nadp", "dropouts": "tolerate"},
    "dp-fedavg, adaptive": {"scheme": "dp-fedavg", "adaptive_clip": True},
}
NOISED = {
    *("ldp", "nadp", "veil-dp", "veil-dp, masks", "nadp, tolerant", "tp-smc", "lwe-secagg"),
    *("dp-fedavg", "dp-fedavg, adaptive", "varying-dp", "hybridalpha"),
}


def of(name: str, **settings: Any) -> Job:
    """A small run of a scheme; batch norms wherever it takes them, so that there are statistics."""
    scheme = VARIANTS.get(name, {"scheme": name})
    width = 2 if name == "hybridalpha" else 8  # where every number takes as long as hundreds elsewhere
    options = {"depth": 2, "width": width, **({} if plans(name) else {"norm": "batch"})}
    return job(
        options=options,
        loss=None if find(scheme["scheme"]).default_loss != "square" else "square",
        **scheme,
        **settings,
    )


def plans(name: str) -> bool:
    return name in NOISED or name == "cdp"


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


def declared(one: Job) -> set[str]:
    return {release.field for release in one.scheme.releases(one.architecture)}


class Listening(ClientRole):
    """Clients that keep every message; `said` is shared by all roles of one test."""

    said: list[Any]

    def handle_many(self, states: Any, request: Any, clients: Any, private: Any = None) -> Any:
        self.said.append(request)
        self.said += (private or {}).values()
        for state, reply in super().handle_many(states, request, clients, private):
            assert not isinstance(reply, Exception), reply
            self.said.append(reply)
            yield state, reply


def overheard(one: Job, absent: Absent | None) -> list[Any]:
    role = client_role(one)
    role.__class__ = Listening
    role.said = []  # type: ignore[attr-defined]
    seat = one.scheme.uplink.authority

    def hear(heard: Heard) -> None:
        if seat is not None and seat in (heard.client, *heard.to):
            role.said.append(heard.message)  # type: ignore[attr-defined]

    trained(one, role=role, absent=absent, listen=hear)
    return role.said  # type: ignore[attr-defined, no-any-return]


def last_is_missing_in_round_two(request: Any, client: int) -> bool:
    return isinstance(request, Train) and request.round == 1 and client == 5


def test_every_message_class_has_its_place_here() -> None:
    # An engine may have messages of its own, and declares them where it stands.
    ours = {kind for kind in registered() if kind.__module__.startswith("fedveil.")}
    ours -= {kind for kind in ours if kind.__module__.startswith("fedveil.flower.")}
    assert ours == {*INSIDE, *REQUESTS, *REPLIES, *HELD_MESSAGES}
    assert set(SPEAKS) == {*NAMES, *VARIANTS}
    assert set.union(*SPEAKS.values()) == {*REQUESTS, *REPLIES}


@pytest.mark.parametrize("name", SPEAKS)
def test_every_field_of_every_message_class_that_a_scheme_sends_is_declared(name: str) -> None:
    one = of(name, clients=6, rounds=4)
    kinds = SPEAKS[name]
    possible = {field for kind in kinds for field in fields_by_class(kind, PREFIXES[kind])}
    possible -= {"upload.payload", "upload.hidden"}  # their sections are what leaves
    possible |= {f"upload.{section}" for section in one.scheme.layout(one.architecture).names}
    if one.scheme.downlink.head_tensors(one.architecture) == 1:
        possible = {field for field in possible if not field.startswith("train.head.")}
    if Hello not in kinds:
        possible.discard("train.cohort")
    if "adaptive" not in name:
        possible.discard("train.clip")
    if name != "dbcl":
        possible.discard("train.seed")
    assert possible - declared(one) == set()


@pytest.mark.parametrize("name", SPEAKS)
def test_every_field_that_was_really_sent_is_declared(name: str) -> None:
    """With everybody there, with somebody missing, and in the round after."""
    one = of(name, clients=6, rounds=4)
    sent = overheard(one, last_is_missing_in_round_two)
    assert {type(message) for message in sent} == SPEAKS[name]
    seen = {field for message in sent for field in fields_sent(message, PREFIXES[type(message)])}
    seen -= {"upload.payload", "upload.hidden"}
    for message in sent:
        if isinstance(message, Upload):
            layout = one.scheme.layout(one.architecture)
            seen |= {f"upload.{section}" for section in layout.split(message.dense(layout.length))}
    assert {"train.parameters", "train.epsilon", "upload.gradients", "upload.statistics", "upload.weight"} <= seen
    assert seen - declared(one) == set()


@pytest.mark.parametrize("name", SPEAKS)
def test_nothing_is_declared_twice_or_without_words_or_by_the_wrong_party(name: str) -> None:
    one = of(name)
    releases = one.scheme.releases(one.architecture)
    names = [release.field for release in releases]
    assert sorted(set(names)) == sorted(names)
    senders = (
        {"epoch": "server"}
        | {PREFIXES[kind]: "server" for kind in REQUESTS}
        | {PREFIXES[kind]: "client" for kind in REPLIES}
        | {PREFIXES[kind]: "authority" for kind in (RoundKeys, FunctionKeys)}
    )
    for release in releases:
        assert release.what
        assert release.to
        assert release.sender == senders[release.field.split(".")[0]]


@pytest.mark.parametrize("name", SPEAKS)
def test_nothing_is_declared_that_no_message_of_the_scheme_could_carry(name: str) -> None:
    """A declaration without a message would let a later field slip through under its name."""
    one = of(name)
    possible = {field for kind in SPEAKS[name] for field in fields_by_class(kind, PREFIXES[kind])}
    possible |= {f"upload.{section}" for section in one.scheme.layout(one.architecture).names}
    assert declared(one) - possible == set()


def uploads(name: str) -> dict[str, Any]:
    one = of(name)
    sections = {f"upload.{section}" for section in one.scheme.layout(one.architecture).names}
    return {release.field: release for release in one.scheme.releases(one.architecture) if release.field in sections}


def test_exactly_the_schemes_with_noise_of_their_own_claim_it_on_what_depends_on_data() -> None:
    """The ledger must not count protection that is not there; a weight is public and stays as it is."""
    for name in SPEAKS:
        found = uploads(name)
        claimed = {field for field, release in found.items() if release.protection == "noised"}
        assert claimed == (set(found) - {"upload.weight"} if name in NOISED else set()), name
        for field in claimed:
            assert found[field].noise != "none"
            assert found[field].about == "data"


def test_exactly_the_masking_schemes_claim_masks_and_on_everything_a_client_uploads() -> None:
    for name in SPEAKS:
        found = uploads(name)
        hidden = {field for field, release in found.items() if release.hiding != "none"}
        hides = {MaskedUpload, EncryptedUpload, LweUpload, FunctionalUpload} & SPEAKS[name]
        assert hidden == (set(found) if hides else set()), name
        masked = {field for field, release in found.items() if release.protection == "masked"}
        assert masked == (hidden if name not in NOISED else hidden & {"upload.weight"}), name


def test_noise_of_an_assumed_size_is_named_but_not_claimed() -> None:
    for name in ("mpdp", "mpdp-naive"):
        found = uploads(name)
        assert "assumed, not enforced" in found["upload.gradients"].noise
        assert {release.protection for release in found.values()} == {"open"}
        assert {release.noise for field, release in found.items() if field != "upload.gradients"} == {"none"}


@pytest.mark.parametrize("scheme", ["nadp", "mpdp"])
def test_noise_left_out_to_save_time_is_declared_as_left_out(scheme: str) -> None:
    one = job(scheme=scheme, skip_cancelling=True, loss="square")
    found = {release.field: release for release in one.scheme.releases(one.architecture)}
    assert "LEFT OUT" in found["upload.gradients"].noise
    assert found["upload.gradients"].protection == "open"


def test_bare_uplinks_cover_nothing_and_say_so() -> None:
    for name in ("fedavg", "lossless", "pbpfl", "cdp", "mp-cdp"):
        for release in uploads(name).values():
            assert (release.sensitivity, release.noise, release.hiding) == (None, "none", "none")
            assert release.about == "data"


def test_a_veil_says_what_hides_the_parameters_and_plain_averaging_says_nothing_does() -> None:
    plain = {
        *("fedavg", "secagg", "spn", "ppdl", "ppdl, laplace", "ldp", "cdp", "nadp", "nadp, tolerant", "tp-smc"),
        *("lwe-secagg", "hybridalpha"),
        *("dp-fedavg", "dp-fedavg, adaptive", "varying-dp"),
    }
    for name in SPEAKS:
        one = of(name)
        by_field = {release.field: release for release in one.scheme.releases(one.architecture)}
        assert (by_field["train.parameters"].hiding != "none") is (name not in plain)


class Chatty:
    """Local work whose uploads have one more section than anybody declared."""

    returns = "gradient"
    unit = "record"

    def __init__(self, work: Any) -> None:
        self._work = work

    def layout(self, architecture: Any, *, tensors: int) -> Layout:
        return Layout((*self._work.layout(architecture, tensors=tensors).sections, ("diary", (3,))))

    def sensitivity(self, samples: int) -> float:
        return float(self._work.sensitivity(samples))


@pytest.mark.parametrize("name", SPEAKS)
def test_an_undeclared_section_stops_the_server_before_anything_is_sent(name: str) -> None:
    one = of(name)
    object.__setattr__(one.scheme, "work", Chatty(one.scheme.work))
    with pytest.raises(
        ProtocolError, match=r"undeclared release: upload\.diary.* releases_of\(Upload, sections=layout\.names\)"
    ):
        server_of(one)


@pytest.mark.parametrize(
    "forgotten",
    ["train.round", "unmask.survivors", "relayed.bundles", "evidence.signers", "nonces.nonces", "epoch.seed"],
)
def test_a_request_with_an_undeclared_field_is_never_sent(forgotten: str) -> None:
    """Also in phases that come late, and in what is sent to one client alone."""
    one = of("veil-secagg", rounds=2)
    known = one.scheme.releases(one.architecture)

    class Forgetful(type(one.scheme)):  # type: ignore[misc]
        def releases(self, architecture: Any) -> Any:
            return tuple(release for release in known if release.field != forgotten)

    object.__setattr__(one.scheme, "__class__", Forgetful)
    with pytest.raises(ProtocolError, match=f"undeclared release: {forgotten}"):
        trained(one)


@pytest.mark.parametrize("forgotten", ["announce.samples", "nonce.nonce", "upload.holders", "revealed.keys"])
def test_nobody_is_asked_for_a_reply_with_an_undeclared_field(forgotten: str) -> None:
    one = of("veil-secagg", rounds=2)
    known = one.scheme.releases(one.architecture)
    heard: list[Any] = []

    class Forgetful(type(one.scheme)):  # type: ignore[misc]
        def releases(self, architecture: Any) -> Any:
            return tuple(release for release in known if release.field != forgotten)

    class Listener(Listening):
        said = heard

    object.__setattr__(one.scheme, "__class__", Forgetful)
    role = client_role(one)
    role.__class__ = Listener
    with pytest.raises(ProtocolError, match=f"undeclared release: {forgotten}"):
        trained(one, role=role)
    kind = forgotten.split(".")[0]
    assert kind not in {PREFIXES[type(message)] for message in heard}


def test_a_server_with_declared_sections_starts() -> None:
    steps = server_of(job()).run()
    assert isinstance(next(steps), RoundBegins)
    assert isinstance(next(steps), Ask)


@dataclasses.dataclass(frozen=True, eq=False)
class Told(Request):
    """A private part of an uplink of somebody's own, of which most clients get less than one does."""

    round: Round
    secret: Annotated[int | None, Released("something about another client", about="data")] = None


@dataclasses.dataclass(frozen=True, eq=False)
class Aside:
    """What travels inside a reply, without a word about who sends it."""

    diary: Annotated[int, Released("what the client did all day", about="data")]


@dataclasses.dataclass(frozen=True, eq=False)
class Chat(Reply):
    """A reply of somebody's own, with fields that are not always there, and one inside another."""

    extra: Annotated[int | None, Released("a number of the client's", about="data")] = None
    aside: Aside | None = None
    vector: Annotated[Tensor | None, words("vector"), SECTIONS] = None


class Folding:
    """An accumulator of somebody's own, which checks nothing."""

    def __init__(self) -> None:
        self.taken: list[Any] = []

    def add(self, reply: Any) -> None:
        self.taken.append(reply)


def steps_with(one: Job, ask: Ask) -> Any:
    class Own(ServerRole):
        def _steps(self) -> Any:
            yield ask

    server = server_of(one)
    server.__class__ = Own
    return server.run()


@pytest.mark.parametrize("first", [True, False])
def test_every_private_part_is_held_to_what_is_declared_not_one_of_its_kind(first: bool) -> None:
    one = of("fedavg")
    known = (*one.scheme.releases(one.architecture), *releases_of(Told, but=("secret",)))

    class Forgetful(type(one.scheme)):  # type: ignore[misc]
        def releases(self, architecture: Any) -> Any:
            return known

    object.__setattr__(one.scheme, "__class__", Forgetful)
    parts = {0: Told(0, 7 if first else None), 1: Told(0, None if first else 7)}
    with pytest.raises(ProtocolError, match=r"undeclared release: told\.secret"):
        next(steps_with(one, Ask((0, 1), Told(0), Folding(), each=parts)))


@pytest.mark.parametrize(
    ("reply", "forgotten"),
    [
        (Chat(0, extra=3), "chat.extra"),
        (Chat(0, aside=Aside(3)), "chat.aside.diary"),
        (Chat(0, vector=torch.arange(3)), "chat.vector"),
    ],
)
@pytest.mark.parametrize("checked", [True, False])
def test_a_reply_with_an_undeclared_field_is_not_taken(reply: Chat, forgotten: str, checked: bool) -> None:
    """Also where the field is rarely there, inside another message, or the accumulator looks at nothing itself."""
    one = of("fedavg")
    known = (*one.scheme.releases(one.architecture), *releases_of(Told), *releases_of(Chat, but=("extra", "aside")))

    class Forgetful(type(one.scheme)):  # type: ignore[misc]
        def releases(self, architecture: Any) -> Any:
            return known

    class Checked(Folding, Inbox[Chat]):
        def __init__(self) -> None:
            super().__init__()
            self.expect(Chat, (0,))

        add = Inbox.add

        def _fold(self, reply: Chat) -> None:
            self.taken.append(reply)

    object.__setattr__(one.scheme, "__class__", Forgetful)
    into = Checked() if checked else Folding()
    ask = next(steps_with(one, Ask((0,), Told(0), into)))
    with pytest.raises(ProtocolError, match=f"undeclared release: {forgotten}"):
        ask.into.add(reply)
    assert into.taken == []
    ask.into.add(Chat(0))
    assert len(into.taken) == 1


def test_what_travels_inside_a_reply_is_declared_as_the_clients() -> None:
    (found,) = (one for one in releases_of(Chat) if one.field == "chat.aside.diary")
    assert (found.sender, found.to) == ("client", ("server",))
