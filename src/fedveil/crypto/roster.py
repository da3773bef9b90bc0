"""The roster: which signing key belongs to which client, agreed on before anything is sent.

[clients]
0 = "…64 hexadecimal digits…"
1 = "…"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from fedveil.crypto.keys import check_key_signature
from fedveil.errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class Roster:
    """Clients' public signing keys by number."""

    keys: Mapping[int, bytes]

    def check(self, *, client: int, run: str, public: bytes, signature: bytes, samples: int = 0) -> None:
        """Refuse an agreement key that was swapped on the way, naming whose it was said to be."""
        identity = self.keys.get(client)
        if identity is None:
            raise ProtocolError(f"client {client} is not in the roster")
        check_key_signature(identity, signature, run=run, client=client, public=public, samples=samples)

    def to_toml(self) -> str:
        """The roster as a file."""
        return "[clients]\n" + "".join(f'{number} = "{key.hex()}"\n' for number, key in sorted(self.keys.items()))

    @staticmethod
    def parse(text: str, *, where: str = "the roster") -> Roster:
        """A roster from its file's text; every mistake is named, with `where` it stands."""
        try:
            clients = tomllib.loads(text).get("clients")
        except tomllib.TOMLDecodeError as reason:
            raise ConfigError(f"{where} is not valid TOML: {reason}.") from reason
        if not isinstance(clients, dict) or not clients:
            raise ConfigError(f"{where} has no [clients] table with keys in it.")
        keys: dict[int, bytes] = {}
        for number, digits in clients.items():
            try:
                key = bytes.fromhex(digits)
            except (TypeError, ValueError):
                key = b""
            if not str(number).isdecimal() or len(key) != 32:
                raise ConfigError(f"{where}: client {number!r} must be a number with a key of 64 hexadecimal digits.")
            keys[int(number)] = key
        if len(set(keys.values())) < len(keys):
            raise ConfigError(f"{where} gives two clients the same key.")
        return Roster(keys)
