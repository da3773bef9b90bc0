"""Signing keys from the command line: made, used, and a swapped one refused by name."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedveil.crypto.keys import Roster
from fedveil.errors import ProtocolError
from shell import Done, fedveil

SMALL = ("--rounds", 2, "--clients", 5, "-o", "depth=2", "-o", "width=8", "-q")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    done = fedveil("keys", tmp_path / "keys", "--clients", 5)
    assert (done.code, done.error) == (0, "")
    assert "client K alone" in done.output
    assert "the server: nothing" in done.output
    return tmp_path / "keys"


def test_every_client_has_a_private_key_and_the_roster_its_public_half(keys: Path) -> None:
    from fedveil.crypto.keys import Identity
    from fedveil.secrets import SecretStream

    class Stored(SecretStream):
        def bytes(self, count: int) -> bytes:
            return bytes.fromhex(path.read_text())

    roster = Roster.parse((keys / "roster.toml").read_text())
    assert sorted(roster.keys) == [0, 1, 2, 3, 4]
    for client, public in roster.keys.items():
        path = keys / f"client-{client}.key"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert Identity(Stored(None)).public == public


def run(scheme: str, out: Path, *more: object) -> Done:
    return fedveil("run", "--scheme", scheme, *SMALL, "--out", out, *more)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["nadp", "veil-secagg"])
def test_a_run_with_its_roster_goes_through_and_one_with_a_swapped_key_names_whose(
    keys: Path, tmp_path: Path, scheme: str
) -> None:
    done = run(scheme, tmp_path / "good", "--roster", keys / "roster.toml")
    assert (done.code, done.error) == (0, "")

    other = tmp_path / "other"
    assert fedveil("keys", other, "--clients", 5).code == 0
    ours, theirs = (Roster.parse((one / "roster.toml").read_text()).keys for one in (keys, other))
    swapped = tmp_path / "swapped.toml"
    swapped.write_text(Roster({**ours, 2: theirs[2]}).to_toml())
    done = run(scheme, tmp_path / "bad", "--roster", swapped, "--identities", keys)
    assert done.code == ProtocolError.exit_code
    assert "the announcement of client 2 is not signed" in done.error
    assert "\n" not in done.error
