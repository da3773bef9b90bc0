"""A client's state: explicit, small, and sealed whenever it leaves the process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from fedveil.errors import ProtocolError

_PURPOSE = "client state"


@dataclass(frozen=True)
class ClientState:
    """What a client remembers between messages."""

    client: int
    answered: tuple[int, int] = (-1, 0)

    def answering(self, round: int, attempt: int) -> ClientState:
        """The state after answering (round, attempt); each is answered at most once.

        A new attempt may go back to an earlier round: the server resumes from a checkpoint.
        """
        last_round, last_attempt = self.answered
        if (attempt, round) <= (last_attempt, last_round):
            raise ProtocolError(
                f"client {self.client} was asked for round {round + 1}, attempt {attempt}, which it has answered "
                "or left behind; a repeated round needs a new attempt"
            )
        return replace(self, answered=(round, attempt))

    def seal(self, key: bytes) -> bytes:
        """Encrypted and authenticated bytes, for storage outside the process."""
        from fedveil.crypto.sealing import seal

        return seal(json.dumps(asdict(self)).encode(), key=key, purpose=_PURPOSE)

    @staticmethod
    def unseal(sealed: bytes, key: bytes) -> ClientState:
        """The state back; damaged or foreign bytes are refused."""
        from fedveil.crypto.sealing import unseal

        fields = json.loads(unseal(sealed, key=key, purpose=_PURPOSE))
        return ClientState(fields["client"], tuple(fields["answered"]))
