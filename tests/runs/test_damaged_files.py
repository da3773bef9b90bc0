"""Whatever stands in a file that was handed over, reading it ends in its content or in an error of ours."""

from __future__ import annotations

import json
import random
import shutil
import struct
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save

from fedveil.audit.findings import finding_from, read_audit
from fedveil.compare import CellProgress, compare
from fedveil.compare.plan import planned, read_results, results_of, write_results
from fedveil.config import RunConfig
from fedveil.errors import ConfigError, FedVeilError
from fedveil.report.sources import gather
from fedveil.report.view import view_of
from fedveil.report.words import audit_view
from fedveil.runs import checkpoint, model_file
from fedveil.runs.folder import RunFolder, digest_of, read_ledger
from fedveil.runs.job import job_from_config
from fedveil.runs.model_file import export_run
from fedveil.runs.predicting import predict_dataset
from fedveil.runs.privacy_journal import PrivacyJournal
from fedveil.runs.session import run as train

TIMES = 60
SEED = 20261
GARBAGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 10**9, 10**30, -(10**30), 1e308, -1e-308, float("nan"), float("inf")),
    *("", "x", "x" * 1000, "nan", "os:system", "../../etc/passwd", "\x00", "\ud800"),
    *([], [[]], [10**12, 0], ["x"], [None], [-1], [1, 2, 3], {}, {"a": 1}, {"": []}, {"round": 1}),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run with a journal, its export, an audit, and a comparison."""
    place = tmp_path_factory.mktemp("whole")
    config = {"scheme": "ldp", "clients": 3, "rounds": 2, "seed": 1, "record": True}
    train(RunConfig.from_mapping({**config, "model_options": {"depth": 2, "width": 8}}), place / "run", quiet=True)
    export_run(place / "run", place / "usable.safetensors")
    small = {"rounds": 1, "clients": 2, "model_options": {"width": 8}}
    plan = planned(["fedavg"], seeds=[1], settings=small, only={})
    (cell,) = plan.cells
    train(cell.config, place / "compared" / cell.folder, quiet=True)
    write_results(place / "compared" / "compare.json", results_of(plan, [CellProgress(cell)]))
    assert [one.state for one in compare(out=place / "compared", resume=True).standings] == ["kept"]
    (place / "run" / "audit").mkdir()
    finding = {"name": "a", "adversary": "the server", "asset": "data", "attack": "dlg", "seen": "x", "adaptive": False}
    finding |= {"figure": "dB", "verdict": "nothing", "value": 1.0, "low": 0.5, "high": 1.5, "shown": {"value": "1 dB"}}
    audit = {"format": "fedveil-audit-1", "identity": {"quick": True}, "adversaries": {"a": "b"}, "findings": [finding]}
    (place / "run" / "audit" / "audit.json").write_text(json.dumps(audit))
    return place


def mutated(value: Any, rng: random.Random) -> Any:
    """Plain data with one place changed, taken away or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        changed = dict(value)
        key = rng.choice(list(changed))
        choice = rng.random()
        if choice < 0.15:
            del changed[key]
        elif choice < 0.25:
            changed[rng.choice(["strange", "", "x" * 300])] = rng.choice(GARBAGE)
        else:
            changed[key] = mutated(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]
    return rng.choice(GARBAGE)


def torn(raw: bytes, rng: random.Random) -> bytes:
    """Bytes cut off, changed, or with something between them."""
    place = rng.randrange(len(raw) + 1)
    return rng.choice(
        [
            raw[:place],
            raw[:place] + rng.randbytes(rng.randrange(1, 9)) + raw[place:],
            raw[:place] + rng.randbytes(4) + raw[place + 4 :],
            raw[:place] + b"[" * 100_000 + raw[place:],
            raw[:place] + b"9" * 10_000 + raw[place:],
            b"",
            b"\xff\xfe" + raw,
        ]
    )


def only_our_errors(read: Callable[[], object]) -> bool:
    """Whether it was refused; whatever else is raised fails the test."""
    try:
        read()
    except FedVeilError:
        return True
    return False


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def lines_mutated(raw: bytes, rng: random.Random) -> bytes:
    rows = raw.decode().splitlines()
    index = rng.randrange(len(rows))
    rows[index] = dumped(mutated(json.loads(rows[index]), rng)).decode("utf-8", "surrogatepass")
    return ("\n".join(rows) + "\n").encode("utf-8", "surrogatepass")


def whole_mutated(raw: bytes, rng: random.Random) -> bytes:
    return dumped(mutated(json.loads(raw), rng))


def toml_mutated(raw: bytes, rng: random.Random) -> bytes:
    settings = mutated(tomllib.loads(raw.decode()), rng)
    if not isinstance(settings, dict):
        return dumped(settings)
    return "\n".join(f"{json.dumps(key)} = {_toml(value)}" for key, value in settings.items()).encode(
        "utf-8", "surrogatepass"
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "nan" if value is None else json.dumps(value)


def reported(place: Path) -> None:
    view_of(gather([place / "run"]))


def ledger_shown(place: Path) -> None:
    for line in read_ledger(place / "run").lines:
        assert line.result
    reported(place)


def audit_shown(place: Path) -> None:
    content = read_audit(place / "run" / "audit" / "audit.json")
    for one in content["findings"]:
        finding_from(one)
    for audited in gather([place / "run" / "audit"]).runs:
        if audited.audit is not None:
            audit_view(audited.audit, with_records=False)
    reported(place)


def configured(place: Path) -> None:
    RunFolder(place / "run").config()


def record_read(place: Path) -> None:
    from fedveil.audit.record import Record

    record = Record(place / "run" / "record")
    for entry in record.entries:
        record.read(entry)
    record.facts.architecture()


def summary_read(place: Path) -> None:
    RunFolder(place / "run").summary()
    reported(place)


FILES: dict[str, tuple[Callable[[bytes, random.Random], bytes], Callable[[Path], None]]] = {
    "run/metrics.jsonl": (lines_mutated, reported),
    "run/ledger.json": (whole_mutated, ledger_shown),
    "run/summary.json": (whole_mutated, summary_read),
    "run/audit/audit.json": (whole_mutated, audit_shown),
    "run/config.toml": (toml_mutated, configured),
    "run/record/facts.json": (whole_mutated, record_read),
    "run/record/index.jsonl": (lines_mutated, record_read),
    "compared/compare.json": (whole_mutated, lambda place: read_results(place / "compared" / "compare.json") and None),
    "run/attempts.json": (whole_mutated, lambda place: RunFolder(place / "run").config() and None),
}


@pytest.mark.parametrize("name", FILES)
def test_damaged_data_is_read_or_refused_by_us(name: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    change, read = FILES[name]
    file, rng = tmp_path / name, random.Random(SEED)
    raw = file.read_bytes()
    refused = 0
    for time in range(TIMES):
        file.write_bytes(change(raw, rng) if time % 3 else torn(raw, rng))
        refused += only_our_errors(lambda: read(tmp_path))
    assert refused > TIMES // 10
    file.write_bytes(raw)
    read(tmp_path)


def test_a_damaged_journal_is_read_or_refused_by_us(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    job = job_from_config(RunFolder(tmp_path / "run").config())
    file, rng = tmp_path / "run" / "privacy.jsonl", random.Random(SEED)
    raw = file.read_bytes()
    for time in range(TIMES):
        file.write_bytes(lines_mutated(raw, rng) if time % 3 else torn(raw, rng))
        only_our_errors(lambda: PrivacyJournal(job, file))


@pytest.mark.parametrize("name", ["run/model.safetensors", "usable.safetensors"])
def test_damaged_model_files_are_read_or_refused_by_us(name: str, whole: Path, tmp_path: Path) -> None:
    """The checksum is no secret: an attacker makes it fit."""
    metadata, tensors = model_file._read(whole / name)
    file, rng = tmp_path / "model.safetensors", random.Random(SEED)
    refused = 0
    for time in range(TIMES):
        changed, kept = dict(metadata), dict(tensors)
        part = rng.choice([one for one in ("facts", "config", "shape") if metadata[one]])
        if time % 5 == 0:
            kept.pop(rng.choice(list(kept)))
        elif time % 5 == 1:
            del changed[rng.choice(["facts", "config", "shape", "kind"])]
        elif time % 5 == 2:
            changed[part] = torn(metadata[part].encode(), rng).decode("latin1")
        else:
            changed[part] = json.dumps(mutated(json.loads(metadata[part]), rng))
        changed["digest"] = model_file._digest(kept, changed)
        file.write_bytes(save(kept, changed))
        refused += only_our_errors(lambda: predict_dataset(file, dataset=None, part="test"))
    assert refused > TIMES // 3
    for _ in range(TIMES):
        file.write_bytes(torn((whole / name).read_bytes(), rng))
        assert only_our_errors(lambda: predict_dataset(file, dataset=None, part="test"))


def test_damaged_checkpoints_are_read_or_refused_by_us(whole: Path, tmp_path: Path) -> None:
    job = job_from_config(RunFolder(whole / "run").config())
    fingerprint, rng = job.config.fingerprint(), random.Random(SEED)
    good = max((whole / "run" / "checkpoints").iterdir())
    state = checkpoint.load_checkpoint(good, job.weights, fingerprint=fingerprint)
    tensors = checkpoint._tensors(state)
    facts = {"fingerprint": fingerprint, "round": state.round, "head_level": state.head_level}
    file, refused = tmp_path / "round-00000001.safetensors", 0
    for time in range(TIMES):
        kept = {one: value.clone() for one, value in tensors.items()}
        said = json.dumps(facts if time % 3 == 0 else mutated(facts, rng))
        if time % 3 == 0:
            name = rng.choice(list(kept))
            kept[rng.choice(["strange", name])] = (
                (kept[name][:1] if rng.random() < 0.5 else kept[name]).double().clone()
            )
        metadata = {"format": checkpoint._FORMAT, "facts": said, "digest": digest_of(kept, said)}
        file.write_bytes(save(kept, metadata))
        refused += only_our_errors(lambda: checkpoint.load_checkpoint(file, job.weights, fingerprint=fingerprint))
    assert refused > TIMES // 2
    for _ in range(TIMES):
        file.write_bytes(torn(good.read_bytes(), rng))
        assert only_our_errors(lambda: checkpoint.load_checkpoint(file, job.weights, fingerprint=fingerprint))


ABSURD: dict[str, dict[str, Any]] = {
    "width": {"options": {"width": 10**9}},
    "depth": {"options": {"depth": 10**9}},
    "many parameters": {"options": {"width": 10**6, "depth": 900}},
    "inputs": {"input_shape": [10**6, 10**6, 10**6]},
    "many dimensions": {"input_shape": [1] * 10_000},
    "outputs": {"outputs": 10**12},
    "negative": {"input_shape": [-1, 8, 8]},
    "no inputs": {"input_shape": []},
    "another network": {"name": "resnet18", "options": {"width": 1024}, "input_shape": [3, 32, 32]},
}


@pytest.mark.parametrize("change", ABSURD.values(), ids=ABSURD)
def test_absurd_sizes_are_refused_before_anything_is_allocated(
    change: dict[str, Any], whole: Path, tmp_path: Path
) -> None:
    import resource

    metadata, tensors = model_file._read(whole / "run")
    changed = {**metadata, "facts": json.dumps({**json.loads(metadata["facts"]), **change})}
    changed["digest"] = model_file._digest(tensors, changed)
    (tmp_path / "model.safetensors").write_bytes(save(tensors, changed))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(FedVeilError):
        predict_dataset(tmp_path, dataset=None, part="test")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


def test_an_index_that_points_far_away_reads_nothing(whole: Path, tmp_path: Path) -> None:
    from fedveil.audit.record import Record

    shutil.copytree(whole / "run" / "record", tmp_path / "record")
    index = tmp_path / "record" / "index.jsonl"
    rows = [json.loads(line) for line in index.read_text().splitlines()]
    index.write_text(json.dumps({**rows[0], "offset": 1, "length": 1 << 50}) + "\n")
    record = Record(tmp_path / "record")
    with pytest.raises(FedVeilError, match="cut short"):
        record.read(record.entries[0])


def test_a_list_of_rounds_is_not_made_before_it_is_bounded() -> None:
    with pytest.raises(ConfigError, match="record_rounds"):
        RunConfig.from_mapping({"record": True, "record_rounds": "1-99999999999"})


def test_a_safetensors_header_that_claims_more_than_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert only_our_errors(lambda: model_file.load_model(tmp_path))
