"""What a run tells its clients beside the protocol's own messages: settings, the shape of the data, where it begins.

It travels with every message, because a client's worker may have been restarted since the last one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import ProtocolError

# Where the server keeps things, what it does with them, and the limits that clients set themselves.
_SERVERS_OWN = frozenset(
    {
        *("policy", "roster", "identities", "simulate_dropout", "min_coverage", "device", "vectorise"),
        *("checkpoint_every", "evaluate_every", "record", "record_rounds", "record_clients"),
    }
)
_FACTS = ("input_shape", "outputs", "task", "vocabulary")


@dataclass(frozen=True)
class Setup:
    """One attempt at a run. `lineage` names the run through all its attempts, `start` the version of the model that
    its clients begin with where they hold it themselves."""

    lineage: str
    attempt: int
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    start: int = 0

    @staticmethod
    def of(config: RunConfig, facts: Mapping[str, Any], *, lineage: str, attempt: int, start: int = 0) -> Setup:
        """What clients are told of a server's configuration."""
        told = {name: value for name, value in dataclasses.asdict(config).items() if name not in _SERVERS_OWN}
        kept = {name: value for name, value in told.items() if value is not None}
        return Setup(lineage, attempt, kept, {name: facts.get(name) for name in _FACTS}, start)

    def to_text(self) -> str:
        """As it travels."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Setup:
        """A setup from what arrived; anything malformed is refused."""
        try:
            given = json.loads(text)
            setup = Setup(**given)
        except (ValueError, TypeError, RecursionError) as reason:
            raise ProtocolError("a run's setup is malformed") from reason
        name = setup.lineage
        well = (
            isinstance(name, str)
            and len(name) == 32
            and set(name) <= set("0123456789abcdef")
            and all(type(one) is int and 0 <= one < 1 << 31 for one in (setup.attempt, setup.start))
            and isinstance(setup.settings, dict)
            and isinstance(setup.facts, dict)
            and set(setup.facts) == set(_FACTS)
        )
        if not well:
            raise ProtocolError("a run's setup is malformed")
        return setup

    def digest(self) -> str:
        """SHA-256 over everything."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()

    @property
    def name(self) -> str:
        """How the run's name begins. Every key, mask and signature is bound to that name, so that clients who were told
        different settings, or are in different attempts, share nothing.

        A simulation protects nothing, and is to give the numbers of the local engine: its name says nothing.
        """
        return f"{self.digest()}." if self.settings.get("secrets") == "os" else ""
