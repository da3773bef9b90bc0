"""Fetching replies from Flower, so that no reply can hold up another."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable

import httpx
from flwr.app import Message
from flwr.serverapp import Grid

_LOOK = 0.05
_STUCK = 2.0


class Fetcher:
    """Fetches the replies to messages one by one, in threads.

    Flower waits for a reply that was announced and not uploaded, three minutes after its last sign of life and hours if
    a node goes on giving them; whatever is asked for together with that one waits as well. Here one thread waits, and
    another asks for the rest.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._lock = threading.Lock()
        self._asking: set[str] = set()
        self._fetched: queue.SimpleQueue[tuple[str, list[Message] | Exception]] = queue.SimpleQueue()
        self._sweep: threading.Thread | None = None
        self._moved = 0.0

    def fetch(self, wanted: Iterable[str], *, until: float) -> list[Message]:
        """What has come, also of what was asked for earlier; nothing is waited for beyond `until`."""
        sweep = threading.Thread(target=self._ask, args=(list(wanted),), daemon=True)
        self._sweep, self._moved = sweep, time.monotonic()
        sweep.start()
        while sweep.is_alive() and (now := time.monotonic()) < until and now - self._moved < _STUCK:
            sweep.join(_LOOK)
        replies: list[Message] = []
        while not self._fetched.empty():
            identifier, found = self._fetched.get()
            self._asking.discard(identifier)
            if isinstance(found, Exception):
                raise found
            replies += found
        return replies

    def _ask(self, wanted: list[str]) -> None:
        for identifier in wanted:
            with self._lock:
                if self._sweep is not threading.current_thread():
                    return  # it was stuck, and another has taken over
                # Flower gives a reply out once: to ask a second time, meanwhile, would be told that there is none.
                if identifier in self._asking:
                    continue
                self._asking.add(identifier)
                self._moved = time.monotonic()
            found: list[Message] | Exception
            try:
                found = list(self._grid.pull_messages([identifier]))
            except httpx.TransportError:  # the SuperLink restarts: it is asked again
                found = []
            except Exception as reason:
                found = reason
            self._fetched.put((identifier, found))
