"""The protocol: messages, roles, rounds. No I/O, no threads, no clock."""

from fedveil.protocol.asking import Ask, Gathered, RoundBegins, RoundDone, RunStopped, Steps
from fedveil.protocol.bare import Bare
from fedveil.protocol.client import ClientRole
from fedveil.protocol.cohort import Cohort
from fedveil.protocol.held import Held
from fedveil.protocol.holder import HolderRole
from fedveil.protocol.messages import Train, Upload
from fedveil.protocol.optimiser import Optimiser
from fedveil.protocol.parts import Scheme, Uplink
from fedveil.protocol.relay import RelayRole, RelayState
from fedveil.protocol.server import ServerRole, ServerState
from fedveil.protocol.state import ClientState

__all__ = [
    "Ask",
    "Bare",
    "ClientRole",
    "ClientState",
    "Cohort",
    "Gathered",
    "Held",
    "HolderRole",
    "Optimiser",
    "RelayRole",
    "RelayState",
    "RoundBegins",
    "RoundDone",
    "RunStopped",
    "Scheme",
    "ServerRole",
    "ServerState",
    "Steps",
    "Train",
    "Uplink",
    "Upload",
]
