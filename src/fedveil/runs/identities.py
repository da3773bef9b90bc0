"""Clients' private signing keys in files, and the roster of their public ones."""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.crypto.keys import Identity
from fedveil.crypto.roster import Roster
from fedveil.errors import ConfigError
from fedveil.secrets import OsSecrets, StoredSecret

_KEY_BYTES = 32
ROSTER = "roster.toml"


def create_identities(folder: str | Path, *, clients: int) -> Path:
    """A signing key per client, readable by its owner only, and roster.toml; nothing is overwritten."""
    folder = Path(folder)
    if clients < 1:
        raise ConfigError(f"There must be at least one client (got {clients}).")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"The folder {folder} is not empty: keys are never overwritten. Give another one.")
    folder.mkdir(parents=True, exist_ok=True)
    public = {}
    for client in range(clients):
        secret = OsSecrets().stream("identity").bytes(_KEY_BYTES)
        public[client] = Identity(StoredSecret(secret)).public
        handle = os.open(_file(folder, client), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(secret.hex() + "\n")
    roster = folder / ROSTER
    roster.write_text(Roster(public).to_toml(), encoding="utf-8")
    return roster


def read_identities(folder: str | Path, *, clients: int) -> dict[int, bytes]:
    """The private keys of clients 0 … clients − 1."""
    return {client: read_identity(_file(Path(folder), client)) for client in range(clients)}


def read_identity(path: Path) -> bytes:
    """The private key in a file."""
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as reason:
        raise ConfigError(
            f"The signing key {path} cannot be read: {reason.strerror}. Make keys with `fedveil keys`, or name their "
            "folder with --identities."
        ) from reason
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{path} does not hold a signing key of {2 * _KEY_BYTES} hexadecimal digits.")
    return key


def _file(folder: Path, client: int) -> Path:
    return folder / f"client-{client}.key"
