"""The run folder: config.toml, metrics.jsonl, privacy.jsonl, checkpoints/, model, summary.json, ledger.json.

A run that is recorded for an audit has record/ besides; one on Flower has events.jsonl (who was missing, late, refused)
and, where the model lives with clients, relay.state in place of checkpoints.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedveil.config import RunConfig
from fedveil.errors import CheckpointError
from fedveil.models.custom import vouched
from fedveil.runs.files import write_atomically


class RunFolder:
    """One run's files. Metrics are appended as they happen; everything else is replaced atomically."""

    def __init__(self, path: str | Path, *, engine: str = "local") -> None:
        self.path = Path(path)
        self._engine = engine
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.model_file = self.path / "model.safetensors"
        self.summary_file = self.path / "summary.json"
        self.ledger_file = self.path / "ledger.json"
        self.privacy_journal = self.path / "privacy.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.record = self.path / "record"
        self.events_file = self.path / "events.jsonl"
        self.relay_file = self.path / "relay.state"
        self._attempts = self.path / "attempts.json"

    def require_free(self) -> None:
        """Refuse a folder that holds anything."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: give a folder with --out.")
        if self.path.exists() and any(self.path.iterdir()):
            if self.config_file.exists():
                raise CheckpointError(
                    f"The folder {self.path} holds another run. Continue it with --resume, or give another --out."
                )
            raise CheckpointError(f"The folder {self.path} holds other files: give another --out.")

    def start(self, config: RunConfig) -> None:
        """Take an empty or new folder for a run."""
        self.require_free()
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.config_file, config.to_toml())
        self._remember({"attempts": 1})

    def stored_settings(self) -> dict[str, Any]:
        """The settings the run was started with."""
        if not self.config_file.exists():
            raise CheckpointError(f"{self.path} holds no run to resume (there is no config.toml).")
        engine = self._remembered().get("engine", "local")
        if engine != self._engine:
            how = "fedveil flower run" if engine == "flower" else "fedveil run"
            raise CheckpointError(
                f"The run in {self.path} was started with the {engine} engine, and its clients keep their part of it "
                f"there: resume it with `{how} --resume`."
            )
        return RunConfig.read(self.config_file)

    def config(
        self, changes: Mapping[str, Any] | None = None, *, say: Callable[[str], None] = lambda text: None
    ) -> RunConfig:
        """The run's settings with `changes`, which alone may name code as its model."""
        settings, given = self.stored_settings(), dict(changes or {})
        found = RunConfig.from_mapping({**settings, **given}, where=str(self.config_file))
        stored = RunConfig.from_mapping(settings, where=str(self.config_file)).model
        model = vouched(stored, given.get("model"), where=str(self.config_file), say=say)
        return found if model is None else found.with_changes(model=model)

    def resume(self, config: RunConfig) -> int:
        """Take the folder again; returns how many attempts came before, and remembers this one."""
        write_atomically(self.config_file, config.to_toml())
        facts = self._remembered()
        before = int(facts.get("attempts", 1))
        self._remember({**facts, "attempts": before + 1})
        return before

    @property
    def lineage(self) -> str:
        """The run's name through all its attempts, for clients that keep state of their own."""
        facts = self._remembered()
        if "lineage" not in facts:
            facts["lineage"] = secrets.token_hex(16)
            self._remember(facts)
        return str(facts["lineage"])

    def _remembered(self) -> dict[str, Any]:
        try:
            facts = json.loads(self._attempts.read_text())
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _remember(self, facts: dict[str, Any]) -> None:
        write_atomically(self._attempts, json.dumps({**facts, "engine": self._engine}))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one round's line."""
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line (a torn last one, from a kill, is left out)."""
        rows = []
        if self.metrics_file.exists():
            for line in self.metrics_file.read_text(encoding="utf-8").splitlines():
                try:
                    rows.append(json.loads(line))
                except ValueError:
                    break
        return rows

    def rewind_metrics(self, rounds: int) -> list[dict[str, Any]]:
        """Keep the lines of the first `rounds` rounds: later ones are repeated after a resume."""
        kept = [row for row in self.metrics() if row["round"] <= rounds]
        write_atomically(self.metrics_file, "".join(json.dumps(row) + "\n" for row in kept))
        return kept

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        """Write ledger.json."""
        write_atomically(self.ledger_file, json.dumps(ledger, indent=2, ensure_ascii=False) + "\n")

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")
