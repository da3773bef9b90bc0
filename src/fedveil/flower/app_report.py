"""A protected app's run on disk: what is proven of it, in a ledger and in plain text, and how far it has come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedveil.flower import messages
from fedveil.flower.app_engine import Course
from fedveil.flower.app_setup import AppSetup
from fedveil.flower.engine import Standing, read_progress
from fedveil.framing import pack
from fedveil.ledger.releases import Release
from fedveil.ledger.statement import Ledger
from fedveil.runs.folder import RunFolder, write_atomically
from fedveil.runs.privacy_journal import ledger_of
from fedveil.schemes.on_updates import SLOTS

TRUST = (
    "trust level mod: whoever submits the run ships the app and the mod in it, and SuperNodes execute both. This holds "
    "against the server and other clients while the app that was submitted is the one that was agreed on; trust level "
    "worker (`fedveil flower`) takes no code from the submitter"
)
_AVERAGED = (
    f"metrics: up to {SLOTS} single numbers of a client, times its weight, are in the masked vector of its update, "
    "or in one of their own for evaluations; the server reads weighted means and the metrics' names"
)
_RANGE = (
    "numbers of an update, times its weight, beyond ± {range:g} (value_range) are cut off; the server reads which "
    "share of a round's weight that happened to, for the model and for metrics, and not to whom"
)
_WEIGHED = "every client weighs the same: the number of examples is not asked under noise"
_CLIENTS_HOLD = (
    "the model: the server holds its names, shapes and types, and of every version after the first nothing but {seen}. "
    "Every client of the run reads every sum, and holds the model"
)
_PARTLY = "sums of the share that is hidden, which it cannot read, and of the rest under noise, which it can"
_FIRST = {
    True: "the first version is public: the arrays that the server was given, which every client begins with",
    False: "the first version was made by a client, and sealed for the others: the server has never seen it",
}
_FORM = Release("app.form", "server", ("clients",), "names, shapes and types of the model's arrays")
_BEHIND = Release(
    "upload.behind",
    "client",
    ("server",),
    "what stands behind an update: its weight, figures times it, and whether numbers were cut off",
    hiding="masks modulo 2^64",
    about="data",
    protection="masked",
)
_EVALUATED = replace(
    _BEHIND, field="evaluation.behind", what="what stands in an evaluation: figures, times the number of examples"
)
_PUBLIC = Release("app.arrays", "server", ("clients",), "the public arrays that the model begins with")
ANY = "*"
"""Any of an app's figures, in the name of a release: which they are is known once they are there."""
_ENVELOPE = ("setup.settings", "setup.run", "flower.envelope", "flower.group")
_OWN = (
    Release("app.config", "server", ("clients",), "the strategy's own configuration"),
    Release("refusal.code", "client", ("server",), "why a client does not answer, as one of a few fixed codes"),
)


def app_ledger(course: Course, uncovered: Iterable[str], *, weighted_by: str, averaged: bool, judged: bool) -> Ledger:
    """The ledger of a run; `uncovered` are the app's figures that left as they were, by the name of their release, and
    `judged` says whether evaluations were averaged."""
    job, journal, rounds = course.job, course.journal, course.state.round
    shown = tuple(
        Release(field, "client", ("server",), _shown(name), about=_about(name, weighted_by))
        for field, name in ((field, field.partition(".")[2]) for field in sorted(uncovered))
    )
    names = (Release("header.names", "client", ("server",), "what its metrics are called"),) if averaged else ()
    carried = tuple(release for release in messages.RELEASES if release.field in _ENVELOPE)
    work = course.agreed.work
    bounded = (_RANGE.format(range=work.range),) if work.flags else ()
    seen = "words under pads" if work.behind else _PARTLY
    notes = (
        TRUST,
        *((_AVERAGED,) if averaged else ()),
        *bounded,
        *((_WEIGHED,) if job.scheme.plan is not None else ()),
        *((_CLIENTS_HOLD.format(seen=seen), _FIRST[course.public_start]) if work.held else ()),
    )
    again = 0 if journal.accountant is None else journal.accountant.rounds - rounds
    if again > 0:
        notes += (f"rounds asked for that are not in the model, since a run was interrupted: {again}; they count",)
    held: tuple[Release, ...] = ()
    if work.held:
        given = ((work.behind, _BEHIND), (judged, _EVALUATED), (course.public_start, _PUBLIC))
        held = (_FORM, *(release for there, release in given if there))
    releases = (*job.scheme.releases(job.architecture), *carried, *_OWN, *held, *names, *shown)
    return ledger_of(
        job.scheme, releases, journal.accountant, journal.first, simulation=False, rounds=rounds, notes=notes
    )


def _shown(name: str) -> str:
    return (
        "every single number that the app reports, as it is"
        if name == ANY
        else f"what the app calls {name!r}, as it is"
    )


def _about(name: str, weighted_by: str) -> Any:
    return "public" if name == weighted_by else "data"


def written(path: Path, ledger: Ledger, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the ledger as text that people read."""
    failed = sum("failed" in row for row in rows)
    lines = [
        f"# What is proven: {ledger.scheme}, {ledger.rounds} rounds",
        "",
        f"{len(rows)} rounds in this attempt, {failed} of which failed." if rows else "No round in this attempt.",
        "",
        "| against | proven | why |",
        "| --- | --- | --- |",
        *(f"| {line.adversary} | {' '.join(line.result.split())} | {line.why} |" for line in ledger.lines),
    ]
    assumed = dict.fromkeys(text for line in ledger.lines for text in line.assumptions)
    for title, texts in (("Assumed", assumed), ("Not protected", ledger.unprotected), ("Notes", ledger.notes)):
        lines += ["", f"## {title}", "", *(f"- {text}" for text in texts)] if texts else []
    lines += ["", "## What leaves a client", "", "| field | what | covered by |", "| --- | --- | --- |"]
    for release in ledger.releases:
        if release.sender == "client":
            cover = "; ".join(text for text in (release.noise, release.hiding) if text != "none") or "nothing"
            lines.append(f"| {release.field} | {release.what} | {cover} |")
    write_atomically(path, "\n".join(lines) + "\n")


# --- how far a protected app's run has come, on disk: the last round's arrays, and what its strategy remembers

PROGRESS = "app.state"
"""The file of a run's folder that says how far it has come."""
_REMEMBERED = ("m_t", "v_t", "momentum_vector")
"""What Flower's own strategies keep from round to round, besides the arrays themselves."""
_TYPE = "numpy.ndarray"
Memory = dict[str, Any]


@dataclass(frozen=True, eq=False)
class AppProgress:
    """After `round` rounds: the model, and the strategy's memory by attribute (a dictionary or a list of arrays).

    `nodes` are the clients by number. Of all attempts together: `uncovered` are the figures that have left as they
    were, or may have, `averaged` says whether any left under masks, and `judged` whether those of evaluations did;
    `kept` are settings that no attempt may change. Where clients hold the model there are no arrays, and `standing`
    says how they come to its last version.
    """

    round: int
    arrays: ArrayRecord
    memory: Memory = field(default_factory=dict)
    nodes: tuple[int, ...] = ()
    uncovered: tuple[str, ...] = ()
    standing: Standing[AppSetup] | None = None
    averaged: bool = False
    judged: bool = False
    kept: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(
        strategy: Strategy,
        arrays: ArrayRecord,
        *,
        round: int,
        nodes: Sequence[int],
        standing: Standing[AppSetup] | None = None,
    ) -> AppProgress:
        """How far a run has come."""
        kept = {name: getattr(strategy, name) for name in _REMEMBERED if getattr(strategy, name, None) is not None}
        return AppProgress(round, arrays, kept, tuple(nodes), standing=standing)

    def give_back(self, strategy: Strategy) -> None:
        """Let a strategy go on where it was."""
        for name, value in self.memory.items():
            setattr(strategy, name, value)

    def write(self, path: Path) -> None:
        """Replace what was kept."""
        parts: dict[str, bytes] = {}
        facts: dict[str, Any] = {
            "round": self.round,
            "arrays": _described(self.arrays, "arrays", parts),
            "memory": {},
            "nodes": [str(node) for node in self.nodes],
            "uncovered": list(self.uncovered),
            "averaged": self.averaged,
            "judged": self.judged,
            "kept": dict(self.kept),
        }
        for name, value in self.memory.items():
            listed = not isinstance(value, Mapping)
            named = {str(place): array for place, array in enumerate(value)} if listed else value
            record = ArrayRecord({key: Array(np.asarray(array)) for key, array in named.items()})
            facts["memory"][name] = {"list": listed, "arrays": _described(record, name, parts)}
        if self.standing is not None:
            self.standing.put_into(facts, parts)
        write_atomically(path, pack(facts, parts))

    @staticmethod
    def read(path: Path) -> AppProgress | None:
        """What was kept; None where nobody was asked yet."""

        def kept(facts: dict[str, Any], parts: dict[str, bytes]) -> AppProgress:
            memory: Memory = {}
            for name, said in dict(facts["memory"]).items():
                if name not in _REMEMBERED:
                    raise ValueError(name)
                own = {key: array.numpy() for key, array in _restored(said["arrays"], name, parts).items()}
                memory[name] = list(own.values()) if said["list"] else own
            nodes, uncovered = tuple(map(int, facts["nodes"])), tuple(map(str, facts["uncovered"]))
            arrays = _restored(facts["arrays"], "arrays", parts)
            standing = Standing.found_in(facts, parts, AppSetup.parse) if "setup" in facts else None
            said = (bool(facts.get("averaged", False)), bool(facts.get("judged", False)), dict(facts.get("kept", {})))
            return AppProgress(int(facts["round"]), arrays, memory, nodes, uncovered, standing, *said)

        return read_progress(path, kept, damaged="the run cannot be resumed from it.")


def going_on(folder: RunFolder) -> list[Path]:
    """What only going on with a finished run needs; where the server holds the model, it is the model itself, and
    stays."""
    path = folder.path / PROGRESS
    progress = AppProgress.read(path)
    return [] if progress is None or progress.standing is None else [path]


def _described(record: ArrayRecord, where: str, parts: dict[str, bytes]) -> list[list[Any]]:
    described = []
    for place, (name, array) in enumerate(record.items()):
        parts[f"{where}.{place}"] = bytes(array.data)
        described.append([name, array.dtype, list(array.shape)])
    return described


def _restored(described: list[list[Any]], where: str, parts: Mapping[str, bytes]) -> ArrayRecord:
    arrays: dict[str, Array] = {}
    for place, (name, dtype, shape) in enumerate(described):
        array = Array(dtype=str(dtype), shape=tuple(shape), stype=_TYPE, data=bytes(parts[f"{where}.{place}"]))
        numbers: NDArray[Any] = array.numpy()
        if numbers.shape != tuple(shape) or str(numbers.dtype) != dtype:
            raise ValueError(name)
        arrays[str(name)] = array
    return ArrayRecord(arrays)
