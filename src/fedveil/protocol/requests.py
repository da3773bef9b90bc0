"""Where a client's requests are checked: every field of each, before a role looks at one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedveil.downlink.blueprint import Blueprint
from fedveil.downlink.decomposed import transitional
from fedveil.downlink.rescaling import head_site
from fedveil.errors import FedVeilError, ProtocolError
from fedveil.protocol.handshake import KEY_SIZES
from fedveil.protocol.messages import Request, Train
from fedveil.protocol.parts import Scheme
from fedveil.protocol.state import ClientState
from fedveil.shapes import Sizes, check

MOST_CLIENTS = 1 << 20
"""Of how many clients a directory may be."""

_LISTS = ("cohort", "missing", "survivors", "senders", "signers", "asked", "contributors", "voters", "newcomers")


class Gate:
    """What a client expects of every request: sizes that follow from the scheme, the architecture and who is known."""

    def __init__(self, scheme: Scheme, blueprint: Blueprint) -> None:
        self._heads = scheme.downlink.head_tensors(blueprint)
        layers = () if blueprint.table is None else transitional(blueprint.table).sizes
        outputs = 0 if self._heads == 1 else head_site(blueprint).outputs
        self._fixed: Sizes = {
            **KEY_SIZES[scheme.uplink.introduction],
            "clients": range(1, MOST_CLIENTS + 1),
            "present": range(1, MOST_CLIENTS + 1),
            "parameters": blueprint.size,
            "epsilon": sum(len(one.epsilon) for one in blueprint.epsilon_norms(blueprint.skeleton)),
            "statistics": (0, blueprint.statistics_size),
            "multipliers": (0, sum(layers)),
            "outputs": outputs,
            "head groups": range(1, outputs + 1),
            "rest": range(blueprint.size + 1),
            "tags": range(blueprint.size + 1),
            "ballot": blueprint.size,
        }
        self._passed: tuple[Request, int] | None = None

    def check(self, state: ClientState, request: Request, private: Request | None) -> None:
        """Refuse what cannot be meant for this client as it stands."""
        directory = None if state.keys is None else state.keys.directory
        known = MOST_CLIENTS if directory is None else len(directory.clients)
        # Simulated clients are sent the same request: once is enough.
        if private is None and self._passed is not None and self._passed[0] is request and self._passed[1] == known:
            return
        sizes = {**self._fixed, **dict.fromkeys(_LISTS, range(known + 1))}
        check(request, sizes)
        if isinstance(request, Train):
            head = request.broadcast.head
            if (1 if head is None else head.tensors) != self._heads:
                raise ProtocolError("a model comes with another head noise than the scheme has")
        if private is not None:
            check(private, sizes)
        self._passed = (request, known)


@contextmanager
def own_errors(state: ClientState, request: Request) -> Iterator[None]:
    """Whatever goes wrong over a request is a refusal of it: no message ends a client."""
    try:
        yield
    except (FedVeilError, ImportError):
        raise
    except Exception as reason:
        what, why = type(request).__name__, type(reason).__name__
        raise ProtocolError(f"client {state.client} cannot deal with the {what} it was sent ({why})") from reason
