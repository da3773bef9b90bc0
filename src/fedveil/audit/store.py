"""audit.json: findings as they come, so that an audit that was stopped goes on where it ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from fedveil.audit.findings import Finding
from fedveil.audit.record import Record
from fedveil.audit.scene import Effort
from fedveil.errors import CheckpointError, ConfigError
from fedveil.plain import made, read_named
from fedveil.runs.folder import write_atomically
from fedveil.version import __version__

FORMAT = "fedveil-audit-1"


class AuditStore:
    """Findings by trial in FOLDER/audit.json, pictures in FOLDER/pictures."""

    def __init__(self, folder: Path, *, identity: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "audit.json"
        self.pictures = folder / "pictures"
        self.findings: dict[str, Finding] = {}
        self.replaced = False
        self._identity = json.loads(json.dumps(identity))
        self._about = dict(about)
        self._sentences: dict[str, str] = {}
        if self.path.exists():
            stored = read_audit(self.path)
            if stored["identity"] == self._identity:
                self.findings = {one.name: one for one in map(finding_from, stored["findings"])}
            elif {**stored["identity"], "quick": True} == self._identity and stored["findings"]:
                raise ConfigError(
                    f"{self.path} holds a full audit of this run, which a quick one would replace: give another --out, "
                    "or leave --quick out."
                )
            else:
                self.replaced = True

    def has(self, name: str) -> bool:
        """Whether a trial was made; one that failed to run is made again."""
        return name in self.findings and self.findings[name].verdict != "failed"

    def keep(self, finding: Finding) -> None:
        """Write a finding down."""
        self.findings[finding.name] = finding
        self._write()

    def conclude(self, sentences: Mapping[str, str]) -> None:
        """Write the verdict on each adversary down."""
        self._sentences = dict(sentences)
        self._write()

    def _write(self) -> None:
        content = {
            "format": FORMAT,
            "identity": self._identity,
            **self._about,
            "versions": {"fedveil": __version__, "torch": torch.__version__},
            "adversaries": self._sentences,
            "findings": [asdict(one) for one in self.findings.values()],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def identity_of(record: Record, effort: Effort) -> dict[str, Any]:
    """What decides the findings: the record and the effort."""
    digest = hashlib.sha256()
    for name in ("index.jsonl", "facts.json"):
        digest.update((record.folder / name).read_bytes())
    return {"record": digest.hexdigest(), "fedveil": __version__, "quick": effort.quick, "seed": effort.seed}


def read_audit(path: Path) -> dict[str, Any]:
    """What an audit.json holds; anything else is refused."""
    try:
        content = read_named(path)
    except CheckpointError as reason:
        raise CheckpointError(f"{reason} Remove it to audit anew.") from reason
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no audit of this version. Remove it to audit anew.")
    findings = content.get("findings")
    if not isinstance(content.get("identity"), dict) or not isinstance(findings, list):
        raise CheckpointError(f"{path} is damaged: it holds no findings. Remove it to audit anew.")
    return content


def finding_from(data: object) -> Finding:
    """A finding back from plain data."""
    own = {one.name for one in fields(Finding)}
    given = {name: value for name, value in data.items() if name in own} if isinstance(data, Mapping) else data
    try:
        return made(Finding, given, where="A finding of an audit")
    except CheckpointError as reason:
        raise CheckpointError(f"{reason} Remove audit.json to audit anew.") from reason
