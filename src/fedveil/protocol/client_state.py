"""A client's state: explicit, small, and sealed whenever it leaves the process."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedveil.downlink.architecture import Weights
from fedveil.errors import ProtocolError
from fedveil.protocol.codec import as_bytes, from_stored
from fedveil.secrets import Guarded
from fedveil.work.messages import KeptTensors

if TYPE_CHECKING:
    from fedveil.crypto.functional import EncryptionKey
    from fedveil.crypto.paillier import KeyShare
    from fedveil.protocol.key_agreement import Keyring

_PURPOSE = "client state"
_NEVER = (-1, 0)
_STORED = {"cohort": "seat", "survivor_digest": "listed", "transcript": "story"}
"""Under which name a field is stored, where it is another one: states sealed by earlier versions are read."""


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between messages.

    `answered` and `revealed` are the last (round, attempt) it uploaded and opened masks for; `cohort`
    is that of the round it answered and `graph` the seed of its graph (the directory may have
    grown since); `survivor_digest` is of the survivor list it signed last; `spent` is the μ² its
    uploads have cost so far by its own account. `ran` and `epoch` are the run and the epoch in which it answered
    last, and `unexplained` counts rounds of that run in which it has revealed shares and was never shown what its
    neighbours signed. Where the model lives with clients, `group` is what they share, `held` the model, `pending`
    what the round it works on has brought so far, `transcript` what its last masks were bound to besides their
    graph, `misread` how many sums of that run it has refused, and `refused` a digest of the last of them. `grouped`
    is with whom it is summed through a whole run, all attempts at it included, where a round's clients are in
    groups. `there` is how many clients the epoch had in which it answered, where each is asked by chance. `kept` is
    what its work keeps for itself, and `share` its part of a key that clients hold together, or what a key
    authority has given it to encrypt with. An authority has such a state, too (`uplink/functional.py`).
    """

    client: int
    answered: tuple[int, int] = _NEVER
    revealed: tuple[int, int] = _NEVER
    cohort: tuple[int, ...] = ()
    survivor_digest: str = ""
    spent: float = 0.0
    keys: Keyring | None = None
    graph: str = ""
    group: Group | None = None
    held: Held | None = None
    pending: Pending | None = None
    transcript: str = ""
    ran: str = ""
    misread: int = 0
    epoch: int = -1
    unexplained: int = 0
    grouped: tuple[int, ...] = ()
    kept: KeptTensors | None = None
    share: KeyShare | EncryptionKey | None = None
    there: int = 0
    refused: str = ""

    def anew(self, client: int, *, held: Held | None) -> ClientState:
        """The state in which a new attempt begins, as `client` and with the model `held`.

        Keys and numbers belong to one attempt; what was answered and spent is never forgotten.
        """
        return replace(
            self,
            client=client,
            keys=None,
            group=None,
            held=held,
            pending=None,
            cohort=(),
            survivor_digest="",
            graph="",
            transcript="",
        )

    def answering(
        self, round: int, attempt: int, *, run: str = "", epoch: int = -1, spent: float | None = None
    ) -> ClientState:
        """The state after answering (round, attempt) in an epoch of a run, with so much `spent` by then; each is
        answered at most once.

        A new attempt may go back to an earlier round: the server resumes from a checkpoint. Where clients know each
        other it does so as another run, with new keys: within a run rounds only go forward, whatever the attempt,
        since two sums of one round that differ by a client show what it sent.
        """
        last_round, last_attempt = self.answered
        if round < 0 or attempt < 0:
            raise ProtocolError(f"client {self.client} was asked for round {round + 1}, attempt {attempt}")
        if run and run == self.ran and round <= last_round:
            raise ProtocolError(
                f"client {self.client} was asked for round {round + 1} of this run, which it has answered or left "
                "behind: a run that is resumed begins with new keys"
            )
        if (attempt, round) <= (last_attempt, last_round):
            raise ProtocolError(
                f"client {self.client} was asked for round {round + 1}, attempt {attempt}, which it has answered "
                "or left behind; a repeated round needs a new attempt"
            )
        spent = self.spent if spent is None else spent
        if run != self.ran:
            begun = replace(self, misread=0, refused="", unexplained=0)
            return replace(begun, answered=(round, attempt), ran=run, epoch=epoch, spent=spent)
        return replace(self, answered=(round, attempt), epoch=epoch, spent=spent)

    def revealing(self, round: int, attempt: int) -> ClientState:
        """The state after opening masks of the round it answered last; once per round and attempt."""
        if (round, attempt) != self.answered:
            raise ProtocolError(
                f"client {self.client} was asked to reveal for round {round + 1}, attempt {attempt}, "
                "which is not the one it answered last"
            )
        if (round, attempt) == self.revealed:
            raise ProtocolError(
                f"client {self.client} was asked to reveal twice for round {round + 1}: a second list of survivors "
                "could open what the first one kept closed"
            )
        return replace(self, revealed=(round, attempt))

    def ring(self) -> Keyring:
        """The client's keys."""
        if self.keys is None:
            raise ProtocolError(f"client {self.client} was asked to work before keys were agreed on")
        return self.keys

    def membership(self) -> Group:
        """What the client shares with all others."""
        if self.group is None or self.group.run != self.ring().run:
            raise ProtocolError(f"client {self.client} was asked to work before it was let into the group")
        return self.group

    def seal(self, key: bytes) -> bytes:
        """Encrypted and authenticated bytes, for storage outside the process."""
        from fedveil.crypto.keys import seal

        facts = {_STORED.get(fact.name, fact.name): getattr(self, fact.name) for fact in fields(self)}
        facts |= {
            "keys": None if self.keys is None else self.keys.stored(),
            "group": None if self.group is None else self.group.stored(),
            "share": None if self.share is None else self.share.stored(),
            "held": None if self.held is None else self.held.facts(),
            "pending": None if self.pending is None else self.pending.facts(),
            "kept": self.kept is not None,
        }
        kept = {} if self.kept is None else {f"{_KEPT}{name}": value for name, value in self.kept.tensors.items()}
        return seal(as_bytes(facts, tensors_of(self.held, self.pending) | kept), key=key, purpose=_PURPOSE)

    @staticmethod
    def unseal(sealed: bytes, key: bytes) -> ClientState:
        """The state back; damaged or foreign bytes are refused."""
        from fedveil.crypto.functional import EncryptionKey
        from fedveil.crypto.keys import unseal
        from fedveil.crypto.paillier import KeyShare
        from fedveil.protocol.key_agreement import Keyring

        facts, tensors = from_stored(unseal(sealed, key=key, purpose=_PURPOSE))
        # Of what earlier versions did not know.
        later: dict[str, Any] = {"grouped": [], "kept": False, "share": None, "there": 0, "refused": ""}
        facts = later | facts
        try:
            known = {fact.name: facts[_STORED.get(fact.name, fact.name)] for fact in fields(ClientState)}
            names = ("keys", "group", "held", "pending", "share")
            part = EncryptionKey if "authority" in (known["share"] or {}) else KeyShare
            keys, group, held, pending, share = (known[name] for name in names)
            kept = {name.removeprefix(_KEPT): value for name, value in tensors.items() if name.startswith(_KEPT)}
            known |= {name: tuple(known[name]) for name in ("answered", "revealed", "cohort", "grouped")}
            known |= {
                "keys": None if keys is None else Keyring.restored(known["client"], keys),
                "group": None if group is None else Group.restored(group),
                "held": None if held is None else Held.restored(held, tensors),
                "pending": None if pending is None else Pending.restored(pending, tensors),
                "kept": KeptTensors(kept) if known["kept"] else None,
                "share": None if share is None else part.restored(share),
            }
            return ClientState(**known)
        except (KeyError, TypeError, ValueError, AttributeError) as reason:
            raise ProtocolError("a client's stored state is damaged") from reason


_HELD, _KEPT = "held.", "kept."


@dataclass(frozen=True, eq=False)
class Held:
    """The model after `version` aggregates of this run's group; `loss` is the last one's mean training loss.

    `transcript` is the digest of all those aggregates, where masks are bound to it; `borrowed` models are others' word,
    and `own` is the version that a client had come to by sums of its own before.
    """

    weights: Weights = field(repr=False)
    velocity: Tensor = field(repr=False)
    version: int = 0
    loss: float | None = None
    transcript: bytes = b""
    borrowed: bool = False
    own: int = 0

    @property
    def reached(self) -> int:
        """The version below which nothing takes its place."""
        return self.own if self.borrowed else self.version

    @staticmethod
    def fresh(weights: Weights, velocity: Tensor | None = None) -> Held:
        """What a run begins with."""
        still = torch.zeros_like(weights.parameters, dtype=torch.float64)
        return Held(weights, still if velocity is None else velocity)

    def carried(self) -> Held:
        """What a new attempt begins with: the model, and the story that has led to it."""
        return replace(Held.fresh(self.weights, self.velocity), transcript=self.transcript, borrowed=self.borrowed)

    def facts(self) -> dict[str, Any]:
        """Everything but tensors."""
        lent = {"borrowed": True, "own": self.own} if self.borrowed else {}
        return {"version": self.version, "loss": self.loss, "story": self.transcript.hex(), **lent}

    def tensors(self) -> dict[str, Tensor]:
        """Everything else."""
        return {**self.weights.named(_HELD), f"{_HELD}velocity": self.velocity}

    @staticmethod
    def restored(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Held:
        """The model that `facts` and `tensors` described."""
        weights = Weights.from_named(tensors, _HELD)
        try:
            transcript = bytes.fromhex(str(facts.get("story", "")))
        except ValueError as reason:
            raise ProtocolError("a stored model's transcript is malformed") from reason
        loss = facts.get("loss")
        if type(facts["version"]) is not int or not isinstance(loss, (float, type(None))):
            raise ProtocolError("a stored model's version or loss is malformed")
        borrowed, own = bool(facts.get("borrowed", False)), facts.get("own", 0)
        if type(own) is not int:
            raise ProtocolError("a stored model's history is malformed")
        return Held(weights, tensors[f"{_HELD}velocity"], facts["version"], loss, transcript, borrowed, own)


@dataclass(frozen=True, eq=False)
class Pending:
    """A round in work: the client's contribution without its weight (n_k × everything) and, once known, the winners.

    `winners` are indices into the contribution, ascending; None before the vote has been counted. `told` is a digest of
    what local work was told besides the model, where it was told anything, and `transcript` one of all that it was told
    before it has uploaded. `beacon` is the round's, by which its sums are read when the next epoch has begun.
    """

    round: int
    attempt: int
    contribution: Tensor = field(repr=False)
    winners: Tensor | None = field(default=None, repr=False)
    told: str = ""
    transcript: str = ""
    beacon: str = ""

    def facts(self) -> dict[str, Any]:
        """Everything but tensors."""
        digests = {"told": self.told, "transcript": self.transcript, "beacon": self.beacon}
        return {"round": self.round, "attempt": self.attempt, **{name: one for name, one in digests.items() if one}}

    def tensors(self) -> dict[str, Tensor]:
        """Everything else."""
        decided = {} if self.winners is None else {"pending.winners": self.winners}
        return {"pending.contribution": self.contribution, **decided}

    @staticmethod
    def restored(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Pending:
        """The work that `facts` and `tensors` described."""
        return Pending(
            facts["round"],
            facts["attempt"],
            tensors["pending.contribution"],
            tensors.get("pending.winners"),
            facts.get("told", ""),
            facts.get("transcript", ""),
            facts.get("beacon", ""),
        )


def tensors_of(held: Held | None, pending: Pending | None) -> dict[str, Tensor]:
    """The tensors of both, by name."""
    return {**({} if held is None else held.tensors()), **({} if pending is None else pending.tensors())}


FINGERPRINT_BYTES = 16


KEY_BYTES = 32


class Group(Guarded):
    """The secrets of a group: one key, and what opens its ciphertexts (empty where there are none)."""

    def __init__(self, run: str, key: bytes, opening: bytes = b"") -> None:
        if len(key) != KEY_BYTES:
            raise ProtocolError("a group key has another length than it should")
        self.run = run
        self._key = key
        self._opening = opening

    def seed(self, *, round: int, attempt: int, purpose: str) -> bytes:
        """32 bytes for one round, attempt and purpose that every member can make."""
        from fedveil.crypto.keys import PairSecret, extract

        shared = PairSecret(extract(self._key, salt=b"fedveil group 1"), run=self.run, pair=(0, 0))
        return shared.seed(round=round, attempt=attempt, purpose=purpose)

    @property
    def opening(self) -> bytes:
        """What opens the group's ciphertexts."""
        return self._opening

    def fingerprint(self) -> bytes:
        """Equal for members of one group; it tells nothing about the key."""
        content = self.seed(round=0, attempt=0, purpose="fingerprint") + self._opening
        return hashlib.sha256(content).digest()[:FINGERPRINT_BYTES]

    def stored(self) -> dict[str, str]:
        """Everything needed to be a member; only ever written sealed."""
        return {"run": self.run, "key": self._key.hex(), "opening": base64.b64encode(self._opening).decode()}

    @staticmethod
    def restored(fields: dict[str, str]) -> Group:
        """The group that `stored` described."""
        try:
            return Group(fields["run"], bytes.fromhex(fields["key"]), base64.b64decode(fields["opening"]))
        except (KeyError, ValueError, TypeError) as reason:
            raise ProtocolError("a group's secrets are malformed") from reason
