"""A client's keys for one run: who it is, whom it shares secrets with."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fedveil.errors import ProtocolError
from fedveil.protocol.directory import Announce, Directory, Nonces, beacon, from_bytes
from fedveil.protocol.epoch import Epoch, committed
from fedveil.protocol.wire import decode, encode
from fedveil.secrets import Guarded, StoredSecret

if TYPE_CHECKING:
    from fedveil.crypto.keys import PairSecret, RunKey
    from fedveil.crypto.roster import Roster


class Keyring(Guarded):
    """Identity, agreement key and the run's directory; pair secrets are agreed on when first used.

    `epoch` is the one it has announced itself for, with a nonce of its own; `beacon` belongs to the directory, and is
    empty until all nonces have been shown. A ring without an agreement key serves uplinks that tie clients together by
    their sizes alone: no graph is drawn, and the beacon is the directory's digest.
    """

    def __init__(
        self, client: int, run: str, *, identity: bytes, key: bytes, directory: Directory | None = None
    ) -> None:
        self.client = client
        self.run = run
        self.directory = directory
        self.epoch: Epoch | None = None
        self.beacon = b""
        self._nonce = b""
        self._stored = (identity, key)
        self._pairs: dict[int, PairSecret] = {}
        self._vouched: set[int] = set()
        from fedveil.crypto.keys import Identity, RunKey

        self._identity = Identity(StoredSecret(identity))
        self._key: RunKey | None = RunKey(StoredSecret(key)) if key else None

    def enter(self, epoch: Epoch, draw: Callable[[], bytes]) -> None:
        """Commit to a nonce for an epoch: once, for epochs in ascending order, on the schedule of the run."""
        epoch.check()
        mine = self.epoch
        if mine is not None:
            if epoch == mine:
                return
            if epoch.schedule != mine.schedule:
                raise ProtocolError(f"client {self.client} was told another schedule of rounds than before in this run")
            if epoch.number <= mine.number or epoch.first < mine.first:
                raise ProtocolError(
                    f"client {self.client} was asked to enter epoch {epoch.number + 1} at round {epoch.first + 1} "
                    f"after epoch {mine.number + 1} at round {mine.first + 1}: epochs follow each other, and each is "
                    "drawn once"
                )
        self.epoch, self._nonce = epoch, draw() if self._key is not None else b""

    def announce(self, samples: int) -> Announce:
        """What the others need to know, signed."""
        public = b"" if self._key is None else self._key.public
        signature = self._identity.sign_key(run=self.run, client=self.client, public=public, samples=samples)
        return Announce(
            self.client,
            samples,
            from_bytes(self._identity.public),
            from_bytes(public),
            from_bytes(signature),
            from_bytes(self._commitment()),
        )

    def _commitment(self) -> bytes:
        number = 0 if self.epoch is None else self.epoch.number
        return committed(self._nonce, run=self.run, epoch=number, client=self.client)

    def accept(self, directory: Directory, *, samples: int, roster: Roster | None) -> bytes:
        """Take the run's directory, or refuse it and say whose entry is wrong; gives the nonce it may now show."""
        directory.check()
        if directory.run != self.run:
            raise ProtocolError(f"client {self.client} was sent the directory of another run")
        if directory.epoch != self.epoch:
            raise ProtocolError(f"client {self.client} was sent the directory of an epoch it has not entered")
        own = self.announce(samples)
        identity, key, _, counted = directory.entry(self.client)
        if (from_bytes(identity).tolist(), from_bytes(key).tolist(), counted) != (
            own.identity.tolist(),
            own.key.tolist(),
            samples,
        ):
            raise ProtocolError(
                f"the directory shows client {self.client} another key or sample count than its own: "
                "somebody on the way has replaced it"
            )
        if directory.commitment(self.client) != self._commitment():
            raise ProtocolError(
                f"the directory shows client {self.client} another commitment than its own: somebody on the way has "
                "replaced it"
            )
        known = self.directory
        if known is not None and not directory.agrees_with(known):
            raise ProtocolError(
                f"the directory sent to client {self.client} contradicts the one of this run it already has"
            )
        if known is not None and known.epoch == directory.epoch:
            if known.digest != directory.digest:
                raise ProtocolError(
                    f"client {self.client} was sent a second directory of one epoch, after it has shown its nonce: a "
                    "server could pick the graph that suits it"
                )
            return self._nonce
        if roster is not None:
            for peer in directory.clients.tolist():
                identity, key, signature, counted = directory.entry(peer)
                roster.check(client=peer, run=self.run, public=key, signature=signature, samples=counted)
                if roster.keys.get(peer, identity) != identity:
                    raise ProtocolError(f"the directory shows client {peer} with another signing key than the roster")
        self.directory = directory
        self.beacon = b"" if self._key is not None else directory.digest
        return self._nonce

    def draw(self, told: Nonces) -> bytes:
        """The beacon of the epoch, once everybody's nonce has been shown; any that was not committed to is refused."""
        self.beacon = beacon(self.known(), told)
        return self.beacon

    def known(self) -> Directory:
        """The run's directory."""
        if self.directory is None:
            raise ProtocolError(f"client {self.client} was asked to work before it knew who takes part")
        return self.directory

    def vouched(self, peer: int) -> tuple[bytes, bytes, int]:
        """(identity, key, samples) of a peer, whose signature has been checked."""
        identity, key, signature, samples = self.known().entry(peer)
        from fedveil.crypto.keys import check_key_signature

        check_key_signature(identity, signature, run=self.run, client=peer, public=key, samples=samples)
        return identity, key, samples

    def vouch_for(self, peers: Iterable[int]) -> None:
        """Check the signatures of all `peers`, once each: an accepted entry never changes within a run."""
        for peer in set(peers) - self._vouched:
            self.vouched(peer)
            self._vouched.add(peer)

    def pair(self, peer: int) -> PairSecret:
        """The secret shared with a peer."""
        if self._key is None:
            raise ProtocolError(f"client {self.client} has no keys in this run")
        if peer not in self._pairs:
            _, key, _ = self.vouched(peer)
            self._pairs[peer] = self._key.agree(key, run=self.run, own=self.client, peer=peer)
        return self._pairs[peer]

    def own(self, *, round: int, attempt: int, purpose: str) -> bytes:
        """32 bytes that only this client can make again, for one round, attempt and purpose."""
        from fedveil.crypto.keys import PairSecret, extract

        _, key = self._stored
        if not key:
            raise ProtocolError(f"client {self.client} has no keys in this run")
        alone = PairSecret(extract(key, salt=b"fedveil own secrets 1"), run=self.run, pair=(self.client, self.client))
        return alone.seed(round=round, attempt=attempt, purpose=purpose)

    def sign(self, content: bytes, *, purpose: str) -> bytes:
        """Vouch for something in this run."""
        return self._identity.sign(content, purpose=f"{purpose} of {self.run}")

    def stored(self) -> dict[str, str]:
        """Everything needed to open this ring again; only ever written sealed."""
        identity, key = self._stored
        known = "" if self.directory is None else base64.b64encode(encode(self.directory)).decode()
        return {
            "run": self.run,
            "identity": identity.hex(),
            "key": key.hex(),
            "directory": known,
            "epoch": "" if self.epoch is None else base64.b64encode(encode(self.epoch)).decode(),
            "nonce": self._nonce.hex(),
            "beacon": self.beacon.hex(),
        }

    @staticmethod
    def restored(client: int, fields: dict[str, str]) -> Keyring:
        """The ring that `stored` described."""
        directory, epoch = (
            decode(base64.b64decode(fields[name])) if fields[name] else None for name in ("directory", "epoch")
        )
        ring = Keyring(
            client,
            fields["run"],
            identity=bytes.fromhex(fields["identity"]),
            key=bytes.fromhex(fields["key"]),
            directory=directory,
        )
        ring.epoch, ring._nonce, ring.beacon = epoch, bytes.fromhex(fields["nonce"]), bytes.fromhex(fields["beacon"])
        return ring
