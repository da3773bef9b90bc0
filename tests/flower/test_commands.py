"""Flower's commands, found beside this interpreter and in an environment of their own."""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from pathlib import Path

import pytest

from fedveil.errors import MissingExtraError
from fedveil.flower.certificates import Certificates
from fedveil.flower.commands import connection, environment, require_flower, superlink_command, supernode_command


def test_without_flower_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedveil\[flower\]'"):
        require_flower()


def test_flowers_processes_find_this_interpreters_commands_and_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "src")
    env = environment(tmp_path / "flwr")
    assert (Path(env["PATH"].split(os.pathsep)[0]) / Path(sys.executable).name).exists()
    assert env["PYTHONPATH"] == str(tmp_path / "src"), "a worker runs elsewhere"
    assert env["FLWR_HOME"] == str(tmp_path / "flwr")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"


@pytest.mark.parametrize("tls", [False, True], ids=["insecure", "tls"])
def test_nothing_is_insecure_unless_asked_to_be(tls: bool) -> None:
    files = Certificates(Path("c")) if tls else None
    link = superlink_command(host="h", port=1, database="d", secret="s", certificates=files)
    node = supernode_command(address="h:1", home="/x", port=2, key="k" if tls else None, certificates=files)
    assert ("--insecure" in link, "--insecure" in node) == (not tls, not tls)
    assert ("--enable-supernode-auth" in link, "--auth-supernode-private-key" in node) == (tls, tls)


@pytest.mark.parametrize("ca", [None, Path('/a "b"/ca.pem')], ids=["insecure", "tls"])
def test_a_connection_is_valid_toml(ca: Path | None) -> None:
    known = tomllib.loads(connection("fedveil", address="127.0.0.1:1", ca=ca))["superlink"]
    assert known["default"] == "fedveil"
    assert known["fedveil"]["address"] == "127.0.0.1:1"
    assert known["fedveil"].get("root-certificates") == (None if ca is None else str(ca))
