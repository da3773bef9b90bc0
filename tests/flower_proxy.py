"""What stands between a SuperNode and its SuperLink: hears every byte, and changes some when told to."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from fedveil.flower.commands import supernode_command

UP, DOWN = "up", "down"
_LARGE = 4096


class Proxy:
    """Passes bytes on to `target`. While `meddling` names a direction, one bit of every large piece is changed."""

    def __init__(self) -> None:
        self.target = ""
        self.meddling: str | None = None
        self.changed = 0
        self.heard = {UP: bytearray(), DOWN: bytearray()}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return "{}:{}".format(*self._listener.getsockname())

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            host, _, port = self.target.rpartition(":")
            try:
                far = socket.create_connection((host, int(port)))
            except OSError:  # the SuperLink is gone
                near.close()
                continue
            self._open |= {near, far}
            for pair, way in (((near, far), UP), ((far, near), DOWN)):
                threading.Thread(target=self._pass, args=(*pair, way), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self.heard[way] += piece
                if self.meddling == way and len(piece) >= _LARGE:
                    self.changed += 1
                    middle = len(piece) // 2
                    piece = piece[:middle] + bytes([piece[middle] ^ 1]) + piece[middle + 1 :]
                sink.sendall(piece)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open -= {source, sink}


@contextlib.contextmanager
def proxied(client: int) -> Iterator[Proxy]:
    """A proxy that the SuperNode of this client goes through, in every cluster started meanwhile."""
    proxy = Proxy()

    def command(*, address: str, home: object, **others: object) -> list[str]:
        if str(home).endswith(f"client-{client}"):
            proxy.target, address = address, proxy.address
        return supernode_command(address=address, home=home, **others)  # type: ignore[arg-type]

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fedveil.flower.cluster.supernode_command", command)
            yield proxy
    finally:
        proxy.close()
