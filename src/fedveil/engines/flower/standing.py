"""How far a run has come whose model lives with its clients: what the server keeps so that no round is lost.

The sums of the last round are on their way to the clients only with the next one. They are kept here, and given to the
clients first when the run is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.engines.flower.engine import FlowerEngine
from fedveil.engines.flower.parcel import pack, unpack
from fedveil.engines.flower.setup import Setup
from fedveil.errors import CheckpointError, ProtocolError
from fedveil.protocol import RelayRole
from fedveil.protocol.asking import Ask
from fedveil.protocol.dividing import Finish
from fedveil.protocol.relayed import Farewells
from fedveil.protocol.wire import decode, encode
from fedveil.runs.files import write_atomically


@dataclass(frozen=True, eq=False)
class Standing:
    """After `round` rounds clients hold, or will with `farewell`, what `setup`'s attempt has brought them to.

    `row` are the last round's metrics, which may not have been written yet.
    """

    round: int
    setup: Setup
    farewell: Finish
    row: dict[str, Any]

    @property
    def reached(self) -> int:
        """The model's version, counted through all attempts."""
        return self.setup.start + self.farewell.version

    @staticmethod
    def of(role: RelayRole, setup: Setup, *, round: int, row: dict[str, Any]) -> Standing:
        """How far a relay has come."""
        return Standing(round, setup, Finish(*role.standing), row)

    def write(self, path: Path) -> None:
        """Replace what was kept."""
        facts = {"round": self.round, "setup": self.setup.to_text(), "row": self.row}
        write_atomically(path, pack(facts, {"farewell": encode(self.farewell)}))

    @staticmethod
    def read(path: Path) -> Standing | None:
        """What was kept; None where no round has ended yet."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            facts, parts = unpack(content)
            farewell = decode(parts["farewell"])
            assert isinstance(farewell, Finish)
            return Standing(int(facts["round"]), Setup.parse(facts["setup"]), farewell, dict(facts["row"]))
        except (ProtocolError, KeyError, ValueError, AssertionError) as reason:
            raise CheckpointError(
                f"{path} is damaged: the run cannot be resumed. Its clients have their models (in their own folders)."
            ) from reason


def bring_up_to_date(engine: FlowerEngine, standing: Standing, *, clients: int) -> tuple[int, ...]:
    """Give everybody the last sums of the earlier attempt, under its own keys; returns who is not known to have them,
    and has to be lent the model."""
    farewell = standing.farewell
    everybody = tuple(range(clients))
    ask = Ask(everybody, farewell, Farewells(farewell.version, everybody))
    done = engine.gather(ask, standing.setup)
    return tuple(one for one in ask.to if one not in done.arrived)
