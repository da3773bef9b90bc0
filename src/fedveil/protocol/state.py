"""A client's state: explicit, small, and sealed whenever it leaves the process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedveil.errors import ProtocolError

if TYPE_CHECKING:
    from fedveil.protocol.group import Group
    from fedveil.protocol.held import Held, Pending
    from fedveil.protocol.keyring import Keyring

_PURPOSE = "client state"
_NEVER = (-1, 0)


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between messages.

    `answered` and `revealed` are the last (round, attempt) it uploaded and opened masks for; `seat`
    names the cohort of the round it answered and `graph` the seed of its graph (the directory may have
    grown since); `listed` is the digest of the survivor list it signed last; `spent` is the μ² its
    uploads have cost so far by its own account. `ran` and `epoch` are the run and the epoch in which it answered
    last, and `unexplained` counts rounds of that run in which it has revealed shares and was never shown what its
    neighbours signed. Where the model lives with clients, `group` is what they share, `held` the model, `pending`
    what the round it works on has brought so far, `story` what its last masks were bound to besides their graph,
    and `misread` how many sums of that run it has refused.
    """

    client: int
    answered: tuple[int, int] = _NEVER
    revealed: tuple[int, int] = _NEVER
    seat: tuple[int, ...] = ()
    listed: str = ""
    spent: float = 0.0
    keys: Keyring | None = None
    graph: str = ""
    group: Group | None = None
    held: Held | None = None
    pending: Pending | None = None
    story: str = ""
    ran: str = ""
    misread: int = 0
    epoch: int = -1
    unexplained: int = 0

    def answering(self, round: int, attempt: int, *, run: str = "", epoch: int = -1) -> ClientState:
        """The state after answering (round, attempt) in an epoch of a run; each is answered at most once.

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
        if run != self.ran:
            return replace(self, answered=(round, attempt), ran=run, epoch=epoch, misread=0, unexplained=0)
        return replace(self, answered=(round, attempt), epoch=epoch)

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
        from fedveil.crypto.sealing import seal
        from fedveil.protocol.held import tensors_of
        from fedveil.protocol.stored import as_bytes

        fields = {
            "client": self.client,
            "answered": self.answered,
            "revealed": self.revealed,
            "seat": self.seat,
            "listed": self.listed,
            "spent": self.spent,
            "keys": None if self.keys is None else self.keys.stored(),
            "graph": self.graph,
            "group": None if self.group is None else self.group.stored(),
            "held": None if self.held is None else self.held.facts(),
            "pending": None if self.pending is None else self.pending.facts(),
            "story": self.story,
            "ran": self.ran,
            "misread": self.misread,
            "epoch": self.epoch,
            "unexplained": self.unexplained,
        }
        return seal(as_bytes(fields, tensors_of(self.held, self.pending)), key=key, purpose=_PURPOSE)

    @staticmethod
    def unseal(sealed: bytes, key: bytes) -> ClientState:
        """The state back; damaged or foreign bytes are refused."""
        from fedveil.crypto.sealing import unseal
        from fedveil.protocol.group import Group
        from fedveil.protocol.held import Held, Pending
        from fedveil.protocol.keyring import Keyring
        from fedveil.protocol.stored import from_stored

        fields, tensors = from_stored(unseal(sealed, key=key, purpose=_PURPOSE))
        try:
            client, keys, group = fields["client"], fields["keys"], fields["group"]
            held, pending = fields["held"], fields["pending"]
            return ClientState(
                client,
                tuple(fields["answered"]),
                tuple(fields["revealed"]),
                tuple(fields["seat"]),
                fields["listed"],
                fields["spent"],
                None if keys is None else Keyring.restored(client, keys),
                fields["graph"],
                None if group is None else Group.restored(group),
                None if held is None else Held.restored(held, tensors),
                None if pending is None else Pending.restored(pending, tensors),
                fields["story"],
                fields["ran"],
                fields["misread"],
                fields["epoch"],
                fields["unexplained"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as reason:
            raise ProtocolError("a client's stored state is damaged") from reason
