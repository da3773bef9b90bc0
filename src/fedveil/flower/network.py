"""A network of a cluster's own, out of reach of the machine's other users: a network namespace (Linux).

Flower asks nobody who they are: whoever reaches a SuperLink's port may submit runs, and with them runs code as whoever
started it. So its ports, and those of its nodes, are opened where nobody else can connect to: only their owner, and
root, may enter the namespace.

`python -m fedveil.flower.network` makes one and holds it until standard input closes;
`python -m fedveil.flower.network PID COMMAND …` runs a command in the one that process PID holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.processes import ChildProcess

VARIABLE = "FEDVEIL_NETWORK"
"""Names the process that holds the namespace, in the environment of Flower's commands."""

_MODULE = "fedveil.flower.network"
_NEW_USER, _NEW_NET = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1
_READY = "ready"
_PATIENCE = 10.0


class Network:
    """A namespace that exists as long as this process, or one of the cluster's, does."""

    def __init__(self) -> None:
        self._keeper = ChildProcess([sys.executable, "-P", "-m", _MODULE], name="network")
        said = self._keeper.output.readline().decode().strip()
        if said != _READY:
            self.close()
            why = self._keeper.tail()
            raise ConfigError(
                f"The cluster cannot have a network of its own here ({why or 'no reason given'}). Without one, every "
                "user of this machine could submit runs to it, and with them run code as you: Flower asks nobody who "
                "they are. If no other user can log in here, or all of them may do that, say --share-with-local-users."
            )

    @property
    def pid(self) -> int:
        """The process that holds it."""
        return self._keeper.pid

    def close(self) -> None:
        """Let go of it."""
        self._keeper.end(patience=_PATIENCE)


def entering(env: Mapping[str, str]) -> list[str]:
    """What to put before a command so that it runs in the network that its environment names, if that names one."""
    return [sys.executable, "-P", "-m", _MODULE, env[VARIABLE]] if VARIABLE in env else []


def _keep() -> None:
    try:
        _make()
    except OSError as reason:
        sys.exit(f"the kernel refuses it: {reason.strerror}")
    sys.stdout.write(f"{_READY}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _make() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        # Root may, and then keeps its rights over files; anybody may in a user namespace, where they own nothing else.
        _call("unshare", _NEW_NET)
    except OSError:
        _call("unshare", _NEW_USER | _NEW_NET)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(probe, _GET_FLAGS, struct.pack("16sh14x", b"lo", 0)))
        fcntl.ioctl(probe, _SET_FLAGS, struct.pack("16sh14x", b"lo", flags | _UP))


def _enter(pid: str, command: list[str]) -> None:
    holder = Path("/proc") / str(int(pid))
    try:
        if _MODULE.encode() not in (holder / "cmdline").read_bytes().split(b"\0"):
            raise ProcessLookupError
        if not os.path.samefile(holder / "ns" / "user", "/proc/self/ns/user"):
            _join(holder / "ns" / "user", _NEW_USER)
        _join(holder / "ns" / "net", _NEW_NET)
    except OSError as reason:
        sys.exit(f"The cluster's network cannot be entered ({reason.strerror or 'it is gone'}): is the cluster up?")
    os.environ.pop(VARIABLE, None)
    os.execvp(command[0], command)


def _join(file: Path, kind: int) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        _call("setns", handle, kind)
    finally:
        os.close(handle)


def _call(name: str, *arguments: int) -> None:
    # Python has had these since 3.12 only.
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        raise OSError(0, "this system has no namespaces")
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    if sys.argv[1:]:
        _enter(sys.argv[1], sys.argv[2:])
    else:
        _keep()
