"""Neither the model nor a key can be reached from the server: not from its role, nor from any message it saw."""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from client_held.relaying import Covered, Recording, watch_uploads
from federation import HeldRun, held_run, job
from fedveil.client_held import divided as parallel
from fedveil.client_held.client import HolderRole
from fedveil.client_held.messages import Begin, Divide, Divided
from fedveil.crypto import ckks
from fedveil.engine import LocalEngine
from fedveil.protocol.client_state import Held, Pending
from fedveil.protocol.phases import Ask, Gathered, RoundDone
from reach import CLIENT_SIDE, Secrets, leaks

pytest.importorskip("tenseal")

SMALL: dict[str, Any] = {
    "loss": "cross-entropy",
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 16,
    "options": {"depth": 1, "width": 8},
    "clients": 5,
    "rounds": 3,
}
FORBIDDEN = (*CLIENT_SIDE, HolderRole, Held, Pending)


class Watching(LocalEngine):
    """Keeps what the server's run asked for and got."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.seen: list[object] = []

    def gather(self, ask: Ask) -> Gathered:
        answer = super().gather(ask)
        self.seen += [ask, answer]
        return answer


@dataclass
class Overheard:
    """One run, everything the server had, and everything clients keep to themselves."""

    run: HeldRun
    server_side: list[object]
    uploads: list[Covered]
    secrets: Secrets

    def leaks(self, roots: list[object] | None = None) -> list[str]:
        """What the server can reach, from `roots` if given, that belongs to clients."""
        own: list[object] = [self.run.relay._secrets, self.run.job.secrets]
        if self.run.relay._group.public:
            material = ckks.PublicKey.from_bytes(self.run.relay._group.public).material
            assert not material.context.is_private()  # type: ignore[attr-defined]
            own.append(material)
        places = self.server_side if roots is None else roots
        return leaks(places, self.secrets, forbidden=FORBIDDEN, owned=(), allowed=own)


def chunks(secret: bytes) -> list[bytes]:
    """Pieces from all over a long secret."""
    return [secret[start : start + 32] for start in range(0, len(secret) - 32, len(secret) // 40)]


def overhear(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Overheard:
    """A client is away in the second round, so that a model is lent."""
    one = job(**{**SMALL, **settings})
    secrets, uploads, kept = Secrets(), watch_uploads(monkeypatch), []

    def through(role: HolderRole) -> Recording:
        kept.append(Recording(role))
        return kept[0]

    def absent(request: Any, client: int) -> bool:
        return isinstance(request, Begin) and request.round == 1 and client == 4

    run = held_run(one, through=through, absent=absent, engine=Watching)
    assert not any(done.failed for done in run.rounds)
    for version in (one.weights.parameters, *run.models):
        secrets.add("a parameter", version)
        secrets.add("a parameter (32 bits)", version.float())
    for upload in uploads:
        secrets.add("an uncovered update", upload.contribution)
    group = run.engine.state_of(2).membership()
    secrets.add_bytes("the group key", bytes.fromhex(group.stored()["key"]))
    for purpose in ("vote", "model", "fingerprint"):
        secrets.add_bytes(f"the seed of {purpose}", group.seed(round=0, attempt=0, purpose=purpose))
    for client in range(5):
        for stage in range(6):
            pad = group.seed(round=stage, attempt=0, purpose=f"pad of {client}")
            secrets.add_bytes(f"the pad of {client}", pad)
    if group.opening:
        public = run.relay._group.public
        private = [piece for piece in chunks(group.opening) if piece not in public]
        assert len(private) > 5
        for piece in private:
            secrets.add_bytes("the secret key of CKKS", piece)
    assert isinstance(run.engine, Watching)
    messages = [*kept[0].received, *kept[0].replied]
    server_side = [run.relay, run.engine.seen, messages, [as_given(done) for done in run.rounds]]
    return Overheard(run, server_side, uploads, secrets)


def as_given(done: RoundDone) -> RoundDone:
    """A boundary as the server gave it: the training loss was written into it by a client."""
    return replace(done, loss=None)


WAYS: dict[str, dict[str, Any]] = {
    "everything, ckks": {"scheme": "ckks-fedavg"},
    "everything, pads": {"scheme": "ckks-fedavg", "cipher": "pads"},
    "a share, ckks": {"scheme": "paraaegis", "share": 0.3},
    "a share, pads": {"scheme": "paraaegis", "share": 0.3, "cipher": "pads"},
    "a share, ballots": {"scheme": "paraaegis", "share": 0.3, "cipher": "pads", "vote": "histogram"},
    "by lot, on dropout": {
        "scheme": "paraaegis",
        "share": 0.3,
        "cipher": "pads",
        "strategy": "random",
        "unmask": "on-dropout",
    },
    "nothing": {"scheme": "paraaegis", "share": 0.0},
    "serial": {"scheme": "serial"},
}


@pytest.mark.parametrize("way", WAYS)
def test_no_parameter_update_or_key_can_be_reached_from_the_server(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    seen = overhear(monkeypatch, **WAYS[way])
    known = {*seen.secrets.strings.values(), *seen.secrets.numbers}
    assert {"a parameter", "an uncovered update", "the group key", "the pad of 0"} <= known
    assert ("the secret key of CKKS" in known) is ("ckks" in way or way == "serial")
    assert len(seen.uploads) == 14
    assert seen.secrets.numbers["a parameter"].size > 3 * seen.run.job.architecture.size
    assert seen.leaks() == []


PLANTED: dict[str, Any] = {
    "a state": lambda seen: seen.run.engine.state_of(2),
    "a group": lambda seen: seen.run.engine.state_of(2).group,
    "the group key": lambda seen: bytes.fromhex(seen.run.engine.state_of(2).group.stored()["key"]),
    "the group key in digits": lambda seen: seen.run.engine.state_of(2).group.stored(),
    "the secret key of CKKS": lambda seen: seen.run.engine.state_of(2).group.opening,
    "the same in base64": lambda seen: base64.b64encode(seen.run.engine.state_of(2).group.opening[90_000:]).decode(),
    "a secret key": lambda seen: ckks.SecretKey.from_bytes(seen.run.engine.state_of(2).group.opening),
    "a pad's seed": lambda seen: (
        seen.run.engine.state_of(2).group.seed(round=3, attempt=0, purpose="pad of 1") + b"and more"
    ),
    "a model": lambda seen: seen.run.engine.state_of(3).held,
    "its weights": lambda seen: seen.run.engine.state_of(3).held.weights,
    "one parameter": lambda seen: float(seen.run.models[1][5]),
    "parameters in 32 bits": lambda seen: seen.run.models[0].float().numpy(),
    "the first model": lambda seen: seen.run.job.weights.parameters,
    "an update": lambda seen: seen.uploads[3].contribution,
    "a client's role": lambda seen: seen.run.role,
    "a bound method": lambda seen: seen.run.role.moved,
    "a client's data": lambda seen: seen.run.job.pool.clients[1],
}


def test_each_secret_planted_in_the_server_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = overhear(monkeypatch, **WAYS["a share, ckks"])
    assert seen.leaks() == []
    for name, plant in PLANTED.items():
        seen.run.relay.souvenir = plant(seen)  # type: ignore[attr-defined]
        assert seen.leaks([seen.run.relay]), f"{name} was not found"
        del seen.run.relay.souvenir  # type: ignore[attr-defined]
    assert seen.leaks([seen.run.relay]) == []


def test_without_noise_the_server_would_hold_parts_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search finds what is there: what travels beside the winners is covered by its noise alone."""
    monkeypatch.setattr(parallel, "add_residual", lambda *noise, **named: None)
    seen = overhear(monkeypatch, **WAYS["a share, pads"], clip=10.0)
    size = seen.run.job.architecture.size
    sent = {(one.round, one.client): one.rest.double() for one in seen.server_side[2] if isinstance(one, Divided)}  # type: ignore[attr-defined]
    for one in seen.uploads:
        outside = torch.ones(size, dtype=torch.bool)
        outside[one.winners] = False
        rest, found = one.contribution[:size][outside], sent[one.round, one.client]
        assert float(rest @ found / (rest.norm() * found.norm())) > 1 - 1e-9


def test_the_server_is_never_sent_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Winners go out as tags or padded counts; what comes back names no coordinate."""
    seen = overhear(monkeypatch, **WAYS["a share, ckks"])
    winners = {tuple(one.winners.tolist()) for one in seen.uploads}
    messages: list[Any] = seen.server_side[2]  # type: ignore[assignment]
    for message in messages:
        if isinstance(message, (Divide, Divided)):
            for value in vars(message).values():
                if isinstance(value, torch.Tensor) and value.dim() == 1:
                    assert tuple(value.tolist()) not in winners
