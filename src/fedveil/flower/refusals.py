"""Why a client did not answer: a code that may leave its machine, and one fixed text for each.

What went wrong in detail, an exception's words above all, stays in the client's own log: it may hold data. The texts
are put in by the server, so that nothing but the code travels.
"""

from __future__ import annotations

PROTOCOL = "protocol"
UNREADABLE = "unreadable"
ENDED = "ended"
SETTINGS = "settings"
REQUIRED = "required"
DATA = "data"
NUMBERS = "numbers"
EXTRA = "extra"
STATE = "state"
INTERNAL = "internal"
LOST = "lost"
SILENT = "silent"
UNSTARTABLE = "unstartable"
FAILED = "failed"
HOMELESS = "homeless"

# "a sum cannot be read", "takes no further part" and "finite" are what the run goes by; a test holds them to that.
TEXTS: dict[str, str] = {
    PROTOCOL: "it was asked for something that the protocol does not allow at this point",
    UNREADABLE: "a sum cannot be read: what it was sent does not open to numbers that clients could have sent",
    ENDED: "it takes no further part: its own limits would be exceeded",
    SETTINGS: "it cannot work with the run's settings",
    REQUIRED: "the run's settings are not those that its owner requires",
    DATA: "its data cannot be read, or do not fit the run",
    NUMBERS: "its training gave numbers that are not finite or too large",
    EXTRA: "a package that the scheme needs is not installed on its machine",
    STATE: "what it remembers of the run is damaged or belongs to another run",
    INTERNAL: "something failed on its machine; its own log says what",
    LOST: "its worker died twice over one message",
    SILENT: "its worker did not answer in time",
    UNSTARTABLE: "its worker cannot be started; its own log says why",
    FAILED: "its worker failed; its own log says why",
    HOMELESS: "its SuperNode names no folder of a FedVeil client (fedveil-home)",
}


def text_of(code: str) -> str:
    """The text of a code; a code that nobody knows is not repeated."""
    return TEXTS.get(code, "it refused with a code that is not known here")
