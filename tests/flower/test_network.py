"""A network of one's own: who reaches a port that is opened in it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fedveil.errors import ConfigError
from fedveil.flower.network import VARIABLE, Network, entering

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no network namespaces")

_LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.accept()
"""
_CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=5)"
# What an ordinary user may do: without these, root has to go the way through a user namespace as well.
_ORDINARY = ["setpriv", "--bounding-set", "-sys_admin,-net_admin", "--"]
_AS_ORDINARY = f"""
import subprocess, sys
from fedveil.flower.network import VARIABLE, Network, entering
network = Network()
subprocess.run([*entering({{VARIABLE: str(network.pid)}}), sys.executable, "-c", sys.argv[1]], check=True)
assert open(f"/proc/{{network.pid}}/uid_map").read().split() == ["{os.geteuid()}", "{os.geteuid()}", "1"]
network.close()
"""
_ALONE = "import socket; assert [name for _, name in socket.if_nameindex()] == ['lo']"


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except ConfigError as reason:
        pytest.skip(str(reason))
    yield made
    made.close()


def test_a_port_in_it_is_reached_from_inside_and_not_from_outside(network: Network) -> None:
    env = {**os.environ, VARIABLE: str(network.pid)}
    inside = [*entering(env), sys.executable, "-c"]
    with subprocess.Popen([*inside, _LISTEN], env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        subprocess.run([*inside, _CONNECT, str(port)], env=env, check=True)


def test_without_one_named_a_command_runs_where_it_is() -> None:
    assert entering({}) == []


def test_one_that_is_gone_is_not_entered(network: Network) -> None:
    env = {VARIABLE: str(os.getpid())}
    done = subprocess.run([*entering(env), "true"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "is the cluster up?" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="an ordinary user runs the others so")
def test_an_ordinary_user_gets_one_too(network: Network) -> None:
    done = subprocess.run(
        [*_ORDINARY, sys.executable, "-c", _AS_ORDINARY, _ALONE], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs a place without namespaces")
def test_where_there_are_none_it_is_said_and_what_to_do() -> None:
    code = "from fedveil.flower.network import Network\nNetwork()"
    forbidden = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbidden, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "--share-with-local-users" in done.stderr
    assert "No space left on device" in done.stderr, "which is how the kernel says that there may be none"
