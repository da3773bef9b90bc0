"""The roster: which signing key belongs to which client, agreed on before anything is sent.

[clients]
0 = "…64 hexadecimal digits…"
1 = "…"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedveil.crypto.keys import check_key_signature
from fedveil.errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class Roster:
    """Clients' public signing keys by number."""

    keys: Mapping[int, bytes]

    def check(self, *, client: int, run: str, public: bytes, signature: bytes) -> None:
        """Refuse an agreement key that was swapped on the way, naming whose it was said to be."""
        identity = self.keys.get(client)
        if identity is None:
            raise ProtocolError(f"client {client} is not in the roster")
        check_key_signature(identity, signature, run=run, client=client, public=public)

    def to_toml(self) -> str:
        """The roster as a file."""
        return "[clients]\n" + "".join(f'{number} = "{key.hex()}"\n' for number, key in sorted(self.keys.items()))

    @staticmethod
    def read(path: str | Path) -> Roster:
        """Read a roster file; every mistake is named."""
        path = Path(path)
        try:
            stored = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as reason:
            raise ConfigError(f"Cannot read the roster {path}: {reason.strerror}.") from reason
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise ConfigError(f"The roster {path} is not valid TOML: {reason}.") from reason
        clients = stored.get("clients")
        if not isinstance(clients, dict) or not clients:
            raise ConfigError(f"The roster {path} has no [clients] table with keys in it.")
        keys: dict[int, bytes] = {}
        for number, text in clients.items():
            try:
                key = bytes.fromhex(text)
            except (TypeError, ValueError):
                key = b""
            if not str(number).isdecimal() or len(key) != 32:
                raise ConfigError(
                    f"The roster {path}: client {number!r} must be a number with a key of 64 hexadecimal digits."
                )
            keys[int(number)] = key
        if len(set(keys.values())) < len(keys):
            raise ConfigError(f"The roster {path} gives two clients the same key.")
        return Roster(keys)
