"""A cluster to which harm is done: processes of it end as a power cut would end them, and are started again."""

from __future__ import annotations

import time

from fedveil.flower import cluster
from fedveil.flower.commands import FlowerError

_BEFORE_ANOTHER_TRY = 3.0


class Cluster(cluster.Cluster):
    """The real one."""

    def restart_superlink(self) -> None:
        """Kill the SuperLink, start it again, and wait until it answers."""
        self._processes["superlink"].kill()
        self._start("superlink")
        self._await_superlink()

    def kill_node(self, node: int) -> None:
        """Kill a SuperNode; its client's worker lives on."""
        self._processes[f"supernode-{node}"].kill()

    def start_node(self, node: int) -> None:
        """Start a SuperNode again and wait until it is online.

        One that was killed under TLS is refused until the SuperLink has missed two of its heartbeats, about a minute:
        it is started again until it is let in.
        """
        end = time.monotonic() + 120.0
        while True:
            if not self._processes[f"supernode-{node}"].alive:
                self._start(f"supernode-{node}")
            try:
                self._await_nodes([node])
            except FlowerError:
                if time.monotonic() > end:
                    raise
                time.sleep(_BEFORE_ANOTHER_TRY)
            else:
                return
