"""Why a client did not answer: a code that may leave its machine, and one fixed text for each.

What went wrong in detail, an exception's words above all, stays in the client's own log: it may hold data. The texts
are put in by the server, so that nothing but the code travels.
"""

from __future__ import annotations

from fedveil.errors import Code, Refusal

TEXTS: dict[Code, str] = {
    Code.PROTOCOL: "it was asked for something that the protocol does not allow at this point",
    Code.UNREADABLE: "a sum cannot be read: what it was sent does not open to numbers that clients could have sent",
    Code.ENDED: "it takes no further part: its own limits would be exceeded",
    Code.SETTINGS: "it cannot work with the run's settings",
    Code.REQUIRED: "the run's settings are not those that its owner requires",
    Code.DATA: "its data cannot be read, or do not fit the run",
    Code.NUMBERS: "its training gave numbers that are not finite or too large",
    Code.EXTRA: "a package that the scheme needs is not installed on its machine",
    Code.STATE: "what it remembers of the run is damaged or belongs to another run",
    Code.INTERNAL: "something failed on its machine; its own log says what",
    Code.LOST: "its worker died twice over one message",
    Code.SILENT: "its worker did not answer in time",
    Code.UNSTARTABLE: "its worker cannot be started; its own log says why",
    Code.FAILED: "its worker failed; its own log says why",
    Code.HOMELESS: "its SuperNode names no folder of a FedVeil client (fedveil-home)",
    Code.UNKNOWN: "it refused with a code that is not known here",
}


def refusal_of(code: str) -> Refusal:
    """The refusal behind a code that arrived; one that nobody knows is not repeated."""
    try:
        known = Code(code)
    except ValueError:
        known = Code.UNKNOWN
    return Refusal(known, TEXTS[known])
