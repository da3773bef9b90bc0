"""Run folders: files that a killed process leaves old or new, never half; what is in one, and what was recorded."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from fedveil.audit.record import Choice, Recorder
from fedveil.audit.views import Facts
from fedveil.config import RunConfig, as_before
from fedveil.data.description import Description
from fedveil.downlink import Architecture
from fedveil.errors import CheckpointError, ConfigError, naming, spelled
from fedveil.ledger.statement import Ledger, MeasuredEpsilon
from fedveil.own_code import vouched_settings
from fedveil.plain import IN_PYTHON, figure, made, parsed, read_named, read_text, whole
from fedveil.protocol.parts import Scheme
from fedveil.runs.job import Agreed, Job, ModelFacts, job_from_config
from fedveil.runs.judgement import judgement_from
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.runs.recipe import rate_of
from fedveil.tensors import raw
from fedveil.work.losses import Loss

MEASURED = ("audit", "one-run.json")
"""Where in a run's folder lies what a game with canaries has measured."""


def refuse_links(folder: Path) -> None:
    """Refuse a folder from which a link leads out: what is written there lands elsewhere, or is read from there."""
    own = folder.resolve()
    for path in folder.rglob("*"):
        if path.is_symlink() and not path.resolve().is_relative_to(own):
            raise CheckpointError(f"{path} is a link out of its folder: put the file itself there, or remove it.")


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Write beside the target, flush to disk, then rename over it; `mode` is who may read it, less the umask."""
    raw = content.encode() if isinstance(content, str) else content
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    scratch.unlink(missing_ok=True)
    try:
        # A new file, never one that somebody's link leads to.
        with naming(path), open(scratch, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)  # a full disk is not filled further
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def append_line(path: Path, data: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file and flush it to disk."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(data, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def digest_of(tensors: Mapping[str, Tensor], *texts: str) -> str:
    """SHA-256 over names, types, shapes and numbers (on the CPU), and what else belongs to them."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.encode()).to_bytes(8, "little") + text.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name}:{value.dtype}:{tuple(value.shape)};".encode())
        digest.update(raw(value).data)
    return digest.hexdigest()


class RunFolder:
    """One run's files. Metrics are appended as they happen; everything else is replaced atomically."""

    def __init__(self, path: str | Path, *, engine: str = "local") -> None:
        self.path = Path(path)
        self._engine = engine
        self.config_file = self.path / "config.toml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.model_file = self.path / "model.safetensors"
        self.best_file = self.path / "best.safetensors"
        self.summary_file = self.path / "summary.json"
        self.ledger_file = self.path / "ledger.json"
        self.data_file = self.path / "data.json"
        self.privacy_journal = self.path / "privacy.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.record = self.path / "record"
        self.events_file = self.path / "events.jsonl"
        self.relay_file = self.path / "relay.state"
        self._attempts = self.path / "attempts.json"
        self._beside_file = self.path / "metrics.resumed.jsonl"
        self._rows_file = self.metrics_file
        self._held: list[int] = []
        self._groups: tuple[tuple[int, ...], ...] = ()

    def take(self) -> None:
        """Hold the folder against other processes until it is released; one that leads elsewhere is refused."""
        if self._held:
            return
        refuse_links(self.path)
        hold = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            os.close(hold)
            raise CheckpointError(
                f"Another process is training in {self.path}: wait for it, or end it. Two would mix up its files."
            ) from reason
        self._held.append(hold)
        weakref.finalize(self, _release, self._held)

    def release(self) -> None:
        """Let go of it."""
        _release(self._held)

    def require_free(self) -> None:
        """Refuse a folder that holds anything."""
        if self.path.exists() and not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file: give a folder with {spelled('out')}.")
        if self.path.exists() and any(not _scratch(file) for file in self.path.iterdir()):
            if self.config_file.exists():
                raise CheckpointError(
                    f"The folder {self.path} holds another run. Continue it with {spelled('resume', True)}, or give "
                    f"another {spelled('out')}."
                )
            raise CheckpointError(f"The folder {self.path} holds other files: give another {spelled('out')}.")

    def start(self, config: RunConfig) -> None:
        """Take an empty or new folder for a run."""
        self.require_free()
        self.path.mkdir(parents=True, exist_ok=True)
        self.take()
        self.require_free()
        for file in self.path.iterdir():  # what a kill left of the first file
            file.unlink()
        write_atomically(self.config_file, config.to_toml())
        self._remember({"attempts": 1})

    def settled(self, config: RunConfig) -> None:
        """Write down the settings once what they left open is known."""
        write_atomically(self.config_file, config.to_toml())

    @contextmanager
    def starting(self, config: RunConfig) -> Iterator[None]:
        """Take an empty or new folder for a run that is still put together.

        Whoever is killed or stopped meanwhile can resume it; where its settings are refused, the folder is as it was.
        """
        created = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.start(config)
            yield
        except Exception:
            if self._held:  # else it is somebody else's
                for file in (self.config_file, self._attempts, self.data_file, self.events_file):
                    file.unlink(missing_ok=True)
                self.release()
            with contextlib.suppress(OSError):
                for path in created:
                    path.rmdir()
            raise

    def stored_settings(self) -> dict[str, Any]:
        """The settings the run was started with."""
        if not self.config_file.exists():
            raise CheckpointError(
                f"{self.path} holds no run to resume (there is no config.toml): start it without "
                f"{spelled('resume', True)}."
            )
        engine = self._remembered().get("engine", "local")
        if engine != self._engine:
            how = "fedveil flower run" if engine == "flower" else "fedveil run"
            way = "`Protected(…, resume=True)`" if engine == "flower-app" else f"`{how} --resume`"
            raise CheckpointError(
                f"The run in {self.path} was started with the {engine} engine, and its clients keep their part of it "
                f"there: resume it with {way}."
            )
        return as_before(RunConfig.read(self.config_file))

    def config(
        self, changes: Mapping[str, Any] | None = None, *, say: Callable[[str], None] = lambda text: None
    ) -> RunConfig:
        """The run's settings with `changes`, which alone may name code as its scheme, model or data."""
        settings, given, where = self.stored_settings(), dict(changes or {}), str(self.config_file)
        config = RunConfig.from_mapping({**settings, **given}, where=where)
        stored = vars(RunConfig.from_mapping(settings, where=where))
        return config.with_changes(**vouched_settings(stored, given, where=where, say=say))

    def resume(self, config: RunConfig) -> int:
        """Take the folder again; returns how many attempts came before, and remembers this one."""
        self.take()
        write_atomically(self.config_file, config.to_toml())
        facts = self._remembered()
        known = facts.get("attempts")
        before = known if type(known) is int and known > 0 else 1
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

    @staticmethod
    def of_any_engine(path: str | Path) -> RunFolder:
        """The folder of a run that is over, whichever engine it ran on."""
        engine = RunFolder(path)._remembered().get("engine", "local")
        return RunFolder(path, engine=engine if isinstance(engine, str) else "local")

    @property
    def own_data(self) -> str:
        """The module that described data which stayed with the clients; empty where the settings name the data set."""
        return str(self._remembered().get("data", ""))

    def remember_own_data(self, module: str) -> None:
        """Remember that the settings do not say which data were trained on."""
        if module:
            self._remember({**self._remembered(), "data": module})

    @property
    def journal_mark(self) -> object:
        """Up to where the privacy journal had come when the newest attempt began; None in folders from before."""
        return self._remembered().get("journal")

    def mark_journal(self, mark: tuple[int, str]) -> None:
        """Remember up to where the privacy journal has come; a ledger from before it grew no longer says enough."""
        self.ledger_file.unlink(missing_ok=True)
        if facts := self._remembered():
            write_atomically(self._attempts, json.dumps({**facts, "journal": mark}))

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Who is summed with whom through the run, all attempts at it included; none where nobody has written that."""
        groups = self._remembered().get("groups", [])
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise CheckpointError(f"{self._attempts} is damaged: its groups are no lists of clients.")
        clients = [client for group in groups for client in group]
        if not all(type(client) is int for client in clients) or len(set(clients)) < len(clients):
            raise CheckpointError(f"{self._attempts} is damaged: its groups are no lists of clients.")
        return tuple(tuple(group) for group in groups)

    def keep_groups(self, groups: tuple[tuple[int, ...], ...]) -> None:
        """Write down, before any of them is asked, who is summed with whom."""
        if groups and groups != self._groups:
            write_atomically(self._attempts, json.dumps({**self._remembered(), "groups": groups}))
            self._groups = groups

    def _remembered(self) -> dict[str, Any]:
        try:
            return read_named(self._attempts)
        except CheckpointError:
            return {}

    def _remember(self, facts: dict[str, Any]) -> None:
        write_atomically(self._attempts, json.dumps({**facts, "engine": self._engine}))

    def note(self, event: str, text: str, **facts: Any) -> None:
        """Add to events.jsonl what happened, with the facts that programs may want."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        append_line(self.events_file, {"time": now, "event": event, **facts, "text": text})

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add one round's line."""
        append_line(self._rows_file, row)
        self._take_place(row["round"])

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole line (a torn last one, from a kill, is left out)."""
        return _rows(self.metrics_file)

    def go_on(self, rounds: int) -> list[dict[str, Any]]:
        """The rows of the first `rounds` rounds, after which a resumed run goes on.

        What it adds is written beside the rows that stand, and takes their place once it has come as far.
        """
        beside = _rows(self._beside_file)
        lineage = beside if beside and beside[-1]["round"] >= rounds else self.metrics()
        kept = [row for row in lineage if row["round"] <= rounds]
        write_atomically(self._beside_file, "".join(json.dumps(row) + "\n" for row in kept))
        self._rows_file = self._beside_file
        self._take_place(rounds)
        return kept

    def _take_place(self, rounds: int) -> None:
        if self._rows_file is self._beside_file and rounds >= self._rows_reached():
            self._beside_file.replace(self.metrics_file)
            self._rows_file = self.metrics_file

    def settle(self) -> None:
        """Let the rows of the attempt that has ended stand, where no model had come further; others are kept aside."""
        if self._rows_file is self._beside_file:
            self.metrics_file.replace(self.path / "metrics.unfinished.jsonl")
            self._beside_file.replace(self.metrics_file)
            self._rows_file = self.metrics_file

    def _rows_reached(self) -> int:
        return max((int(row["round"]) for row in self.metrics()), default=0)

    def reached(self) -> int:
        """How many rounds what lies here has come: the rows, or the summary."""
        summary = self.summary()
        return max(self._rows_reached(), 0 if summary is None else int(summary["rounds"]))

    def summary(self) -> dict[str, Any] | None:
        """The summary of the run, if it has ended."""
        if not self.summary_file.exists():
            return None
        summary = read_named(self.summary_file)
        rounds = summary.get("rounds")
        figures = all(
            figure(value) or (value is None and name not in _ALWAYS)
            for name, value in {**dict.fromkeys(_ALWAYS), **summary}.items()
            if name in _CLOSING or name.startswith(("client_view_", "client_test_", "test_", "validation_"))
        )
        texts = all(isinstance(summary.get(name, ""), str) for name in _TEXTS)
        texts = texts and all(name in summary for name in ("scheme", "holder", "loss"))
        if type(rounds) is not int or not 0 <= rounds < 1 << 53 or not figures or not texts:
            raise CheckpointError(f"{self.summary_file} is damaged: remove it, and the run goes on from a checkpoint.")
        if "judged" in summary:
            judgement_from(summary["judged"], where=str(self.summary_file))
        return summary

    def finished(self, config: RunConfig) -> dict[str, Any] | None:
        """The summary, if nothing is left to do for these settings; what would shorten the run is refused."""
        reached, summary = self.reached(), self.summary()
        if reached > config.rounds:
            raise ConfigError(
                f"The run in {self.path} has done {reached} rounds already: resume it with "
                f"{spelled('rounds', reached)} or more."
            )
        if summary is None or summary["rounds"] < config.rounds:
            return None
        changed = self.changed(config)
        if changed is not None:
            raise CheckpointError(
                f"The run in {self.path} is finished, and belongs to a run with other settings.{changed}"
            )
        return summary

    def changed(self, config: RunConfig) -> str | None:
        """A sentence that names what shapes the run and is not what it was started with; None where nothing is."""
        started = RunConfig.from_mapping(self.stored_settings(), where=str(self.config_file))
        if started.fingerprint() == config.fingerprint():
            return None
        shaping = {one.name for one in fields(config) if one.metadata.get("shapes_run", True) or one.name == "rounds"}
        names = [name for name in vars(started) if name in shaping and getattr(started, name) != getattr(config, name)]
        told = [f"{name} = {getattr(started, name)!r} and is now {getattr(config, name)!r}" for name in names]
        why = (
            " Its learning rate is scheduled over all rounds, so that it cannot get more."
            if names == ["rounds"]
            else ""
        )
        return f" It was started with {', '.join(told)}.{why}" if told else ""

    def write_ledger(self, ledger: dict[str, Any]) -> None:
        """Write ledger.json."""
        write_atomically(self.ledger_file, json.dumps(ledger, indent=2, ensure_ascii=False) + "\n")

    def write_data(self, description: Description | None) -> None:
        """Write data.json: what was understood of the data."""
        if description is not None:
            write_atomically(self.data_file, json.dumps(description.as_data(), indent=2, ensure_ascii=False) + "\n")

    def check_data(self, description: Description | None) -> str | None:
        """Refuse to go on with other data than the run began with, whose classes or columns mean something else.

        Of other values it says what to warn of: those that were standardised elsewhere may differ in their last digits.
        """
        if description is None or not self.data_file.exists():
            return None
        stored, now = read_named(self.data_file), parsed(json.dumps(description.as_data()), where="the data")
        for what, seen in _DATA.items():
            if seen(stored) != seen(now):
                raise CheckpointError(
                    f"The data are not those that the run in {self.path} began with: {what} were {seen(stored)} "
                    f"and are {seen(now)}. Put them back, or start anew with another {spelled('out')}."
                )
        if stored.get("digest", now["digest"]) == now["digest"]:
            return None
        return (
            "the samples are not those that the run began with, or were prepared on another machine, to other last "
            "digits. If the data have changed, what the model has learned of them stays in it."
        )

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write summary.json."""
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")


_DATA: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "tasks": lambda data: data.get("task"),
    "classes": lambda data: data.get("labels"),
    "columns": lambda data: [column.get("name") for column in data.get("columns", ())],
    "shapes of a sample": lambda data: data.get("input_shape"),
    "rows of its parts": lambda data: {name: part.get("rows") for name, part in data.get("parts", {}).items()},
    "samples of each class": lambda data: {name: part.get("classes") for name, part in data.get("parts", {}).items()},
    "rows of its clients": lambda data: [client.get("rows") for client in data.get("clients", ())],
}
"""What is compared before a run goes on, by what it is called."""


def _scratch(file: Path) -> bool:
    return file.name.startswith(".config.toml.") and file.name.endswith(".tmp")


def _release(held: list[int]) -> None:
    while held:
        os.close(held.pop())


_CLOSING = frozenset(
    "train_loss seconds bytes_down bytes_up needed_bytes_down needed_bytes_up parameters clients coverage "
    "failed_rounds diverged".split()
)
_ALWAYS = ("seconds", "bytes_down", "bytes_up")
_TEXTS = ("scheme", "holder", "loss", "loss_because", "stopped", "warning", "dataset", "model", "engine", "family")
_FIGURES = ("loss", "clients", "seconds", "bytes_down", "bytes_up")


def _rows(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    text = read_text(file)
    lines = text.split("\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        last = number == len(lines)
        if last and not line:
            break
        try:
            rows.append(_row(parsed(line, where=f"{file}, line {number}")))
        except CheckpointError as reason:
            if last:  # torn by a kill
                break
            raise CheckpointError(f"{file}, line {number} is damaged: mend it, or take it out.") from reason
    return rows


def _row(row: object) -> dict[str, Any]:
    if not isinstance(row, dict) or not whole(row.get("round")) or row["round"] < 1:
        raise CheckpointError("it is no round's figures")
    if not all(row.get(name) is None or figure(row[name]) for name in _FIGURES):
        raise CheckpointError("a figure is no number")
    return row


def read_ledger(
    run: str | Path, *, own: Mapping[str, str] | None = None, say: Callable[[str], None] = lambda text: None
) -> Ledger:
    """The ledger of a run folder or a ledger.json; `own` is the caller's code by setting, for a run that goes on."""
    path = Path(run)
    file = RunFolder(path).ledger_file if path.is_dir() else path
    if not file.exists():
        if (path / "config.toml").exists():
            return _with_measured(_so_far(RunFolder(path), own or {}, say), path)
        raise CheckpointError(f"There is no run at {path}: give a run folder or its ledger.json.")
    return _with_measured(ledger_from(read_named(file), where=str(file)), file.parent)


def _with_measured(ledger: Ledger, folder: Path) -> Ledger:
    """The same with what a game has measured, if one was played."""
    file, measured = folder.joinpath(*MEASURED), ledger.measured
    if file.exists():
        measured = made(MeasuredEpsilon, read_named(file), where=f"{file} is no measurement, or")
    if measured is None:
        return ledger
    try:
        measured.check()
        return replace(ledger, measured=measured.beside(ledger))
    except ConfigError as reason:
        raise CheckpointError(
            f"What was measured in {folder} is not what a game gives: {reason} Remove {file}, and audit the run again "
            "with --one-run."
        ) from reason


def _so_far(folder: RunFolder, changes: Mapping[str, Any], say: Callable[[str], None]) -> Ledger:
    """The ledger of a run that has not ended, from its journal."""
    config = folder.config(changes, say=say)
    if config.dataset == IN_PYTHON:
        raise CheckpointError(
            f"The run in {folder.path} was started from Python and has not ended: continue it there with resume=True."
        )
    job = job_from_config(config)
    rows, mark = folder.metrics(), folder.journal_mark  # before the journal, which may be growing
    privacy_journal = PrivacyJournal(job, folder.privacy_journal)
    privacy_journal.check_mark(mark)
    privacy_journal.check_rounds(row["round"] for row in rows)
    ledger = privacy_journal.ledger(rounds=len(rows))
    return replace(ledger, notes=("the run has not ended: this is what it has spent so far", *ledger.notes))


def ledger_from(data: object, *, where: str = "the ledger") -> Ledger:
    """A ledger from plain data, as `Ledger.as_data` makes it."""
    paper = data.get("paper") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(paper, dict):  # what follows from other figures is not read back
        data = {**data, "paper": {name: value for name, value in paper.items() if name != "saving"}}
    return made(Ledger, data, where=f"{where} is not a ledger, or")


# --- a run that is recorded: which rounds and clients, and what everybody knew


@dataclass(frozen=True)
class Recording:
    """Where a run is recorded, and about whom: what clients share is kept for pairs with a victim (None: for all)."""

    folder: Path
    victims: Collection[int] | None = None


def chosen(job: Job) -> Choice:
    """The rounds and clients that a job's settings name."""
    config = job.config
    return Choice.of(
        rounds=config.record_rounds, clients=config.record_clients, last=config.rounds, count=len(job.pool)
    )


def recorder_for(job: Job, place: Path | Recording, *, attempt: int) -> Recorder:
    """A recorder of this job that writes into a folder."""
    asked = place if isinstance(place, Recording) else Recording(place)
    choice = chosen(job)
    if asked.victims is not None:
        choice = replace(choice, victims=frozenset(asked.victims))
    return Recorder(
        asked.folder, choice, facts=facts_of(job), scheme=job.scheme, architecture=job.architecture, attempt=attempt
    )


def own_recorder(
    folder: Path, config: RunConfig, common: Agreed, facts: ModelFacts, at: Architecture, *, client: int, attempt: int
) -> Recorder:
    """A recorder of what one client, on its own machine, is sent and sends, in the rounds recorded by default."""
    choice = Choice.of(rounds=None, clients=str(client), last=config.rounds, count=config.clients)
    known = _facts(config, common.scheme, common.loss, facts, at)
    return Recorder(folder, choice, facts=known, scheme=common.scheme, architecture=at, attempt=attempt)


def facts_of(job: Job) -> Facts:
    """What everybody in the job knows."""
    return _facts(job.config, job.scheme, job.loss, job.facts, job.architecture)


def _facts(config: RunConfig, scheme: Scheme, loss: Loss, facts: ModelFacts, architecture: Architecture) -> Facts:
    return Facts(
        scheme=scheme.name,
        uplink=type(scheme.uplink).__name__.lower(),
        readable=scheme.readable,
        model=facts.name,
        options=dict(facts.options),
        input_shape=tuple(facts.input_shape),
        input_dtype=str(architecture.input_dtype).removeprefix("torch."),
        outputs=facts.outputs,
        task=facts.task,
        vocabulary=facts.vocabulary,
        parameters=architecture.parameters.sections,
        contribution=scheme.layout(architecture).sections,
        traced=scheme.downlink.traced,
        returns=scheme.work.returns,
        loss=loss.name,
        target_scale=config.target_scale,
        true_weight=config.true_weight,
        batch_size=config.batch_size,
        local_steps=config.local_steps,
        local_epochs=config.local_epochs,
        lr=config.client_lr or rate_of(config, loss),
        dtype=config.dtype,
        class_weights=getattr(loss, "class_weights", ()),
        label_smoothing=config.label_smoothing,
    )
