"""A run on Flower, from submitting it to its end: its events as they come, however often the connection is lost."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedveil.flower.commands import FlowerError, flwr, program
from fedveil.flower.events import MARK
from fedveil.flower.network import entering

Event = dict[str, Any]

_ENDS = ("done", "failed")
_FRAME = re.compile(r"[╭╮╰╯│─]|\x1b\[[0-9;]*m")
_STARTED = re.compile(r"Successfully started run (\d+)")
_KEPT_LINES = 12
_BETWEEN_TRIES = 1.0
# Flower breaks its complaints to the width of a terminal, in the middle of words.
_WIDE = {"COLUMNS": "2000"}


class Submission:
    """One run on the SuperLink called `superlink` in the Flower configuration that `env` points to."""

    def __init__(
        self,
        superlink: str,
        *,
        env: Mapping[str, str],
        patience: float = 300.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`patience` is how many seconds a SuperLink may be gone before it is given up."""
        self.superlink, self._env, self._patience, self._say = superlink, {**env, **_WIDE}, patience, say
        self.run_id: int | None = None
        self._seen: set[str] = set()
        self._last_lines: deque[str] = deque(maxlen=_KEPT_LINES)

    def events(self, app: Path, override: str) -> Iterator[Event]:
        """Submit `app`, with its configuration changed by the TOML document `override`, and follow it to its end.

        The last event is `done` or `failed`; a run that ends without a word raises a FlowerError.
        """
        with tempfile.TemporaryDirectory() as scratch:
            changes = Path(scratch) / "override.toml"
            changes.write_text(override, encoding="utf-8")
            options = ["--run-config", str(changes)] if override else []
            for event in self._follow("run", str(app), self.superlink, "--stream", *options):
                yield event
                if event["event"] in _ENDS:
                    return
        if self.run_id is None:
            raise FlowerError(f"Flower did not take the run: {self._words()}")
        yield from self._reconnected()

    def stop(self) -> None:
        """Have the SuperLink stop the run."""
        flwr("stop", str(self.run_id), self.superlink, env=self._env)

    def _reconnected(self) -> Iterator[Event]:
        while True:
            status = self._status()
            for event in self._follow("log", str(self.run_id), self.superlink, "--stream"):
                yield event
                if event["event"] in _ENDS:
                    return
            # Asked before the log was read, so that a log which ends with the run has been read to its end.
            if status.startswith("finished"):
                raise FlowerError(
                    f"Run {self.run_id} ended ({status}) without saying why. It said last: {self._words()}"
                )

    def _status(self) -> str:
        """What the SuperLink says about the run, as soon as it says anything."""
        deadline = time.monotonic() + self._patience
        told = False
        while True:
            try:
                listed = flwr("list", self.superlink, "--run-id", str(self.run_id), env=self._env)
                return str(listed["runs"][0]["status"])
            except FlowerError as reason:
                if time.monotonic() > deadline:
                    raise FlowerError(
                        f"The SuperLink has been gone for {self._patience:g} seconds; the run may go on. {reason}"
                    ) from reason
            if not told:
                self._say("lost the SuperLink: waiting for it")
                told = True
            time.sleep(_BETWEEN_TRIES)

    def _follow(self, *arguments: str) -> Iterator[Event]:
        """Events that were not heard before: a log is always told from its beginning."""
        process = subprocess.Popen(
            [*entering(self._env), program("flwr"), *arguments],
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for whoever watches, not for this process
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if self.run_id is None and (found := _STARTED.search(line)):
                    self.run_id = int(found[1])
                event = parse_event(line)
                if event is None:
                    self._keep(line)
                elif (known := json.dumps(event, sort_keys=True)) not in self._seen:
                    self._seen.add(known)
                    yield event
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _keep(self, line: str) -> None:
        plain = _FRAME.sub("", line).strip()
        if plain and plain != "Error":
            self._last_lines.append(plain)

    def _words(self) -> str:
        return " ".join(self._last_lines) or "nothing."


def parse_event(line: str) -> Event | None:
    """The event in a line of the server app's log, if it holds one; what stands around it does not matter."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        event, _ = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
