"""`fedveil audit`: tables, data, pictures, going on where it stopped, and one clear line where it cannot begin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from audit.in_process import without_processes
from fedveil.audit.attack import attacks
from fedveil.audit.findings import TAKEN_OUT, Finding
from fedveil.audit.running import Audit
from fedveil.cli.audit import _refuse_nothing_but_failures as refuse_nothing_but_failures
from fedveil.cli.audit import _show as show
from fedveil.errors import AttackError, CheckpointError, ConfigError, FedVeilError
from shell import Done, fedveil

SMALL = ("--rounds", 3, "--clients", 3, "--seed", 1, "-o", "depth=2", "-o", "width=8")
ASKED = ("--quick", "--workers", 1, "--attacks", "closed-form,received")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run."""
    folder = tmp_path_factory.mktemp("audit") / "run"
    done = fedveil("run", "--scheme", "nadp", *SMALL, "--record", "--out", folder)
    assert done.code == 0, done.error
    return folder


@pytest.fixture(scope="module")
def first(ran: Path) -> Done:
    """Its first audit, with real processes."""
    return fedveil("audit", ran, *ASKED)


@pytest.fixture
def copied(ran: Path, tmp_path: Path) -> Path:
    """The run to be damaged."""
    shutil.copytree(ran, tmp_path / "run", ignore=shutil.ignore_patterns("audit"))
    return tmp_path / "run"


def refused(done: Done, error: type[FedVeilError], *parts: str) -> None:
    assert done.code == error.exit_code, done
    assert done.error.startswith("error: ")
    assert "Traceback" not in done.error
    assert "\n" not in done.error
    for part in parts:
        assert part in done.error
    assert done.output == ""


def test_every_adversary_has_a_table_with_chance_and_no_protection_beside_each_figure(first: Done) -> None:
    assert first.code == 0, first.error
    assert first.error.startswith("Batches of 4")
    assert "replayed with one sample a client" in first.error
    shown = " ".join(first.output.split())
    for title in ("The server, after data", "The server with 2 of 3 clients, after data", "Somebody on the wire"):
        assert title in shown
    for column in ("attack", "gets", "by chance", "unprotected", "verdict"):
        assert column in shown
    assert "100.0 dB │ as chance" in shown
    assert "The server cannot rebuild what a client trained on by these attacks" in shown
    assert "An audit shows what these attacks got, not what no attack can get" in shown
    assert "audit.json" in shown
    assert "\x1b" not in first.output


def test_what_was_taken_out_has_a_column_of_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("a client", "members", "membership", "the model it receives", False, "members told")
    for count in (0, 37):
        finding = Finding("client/membership", *words, verdict="not effective", taken_out=count)
        show(Audit("fedavg", (finding,), {}, tmp_path, 1.0))
        shown = " ".join(capsys.readouterr().out.split())
        assert ("taken out ┃" in shown) is ("│ 37 │" in shown) is (TAKEN_OUT in shown) is bool(count)


def test_a_star_is_explained_where_there_is_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for adaptive in (False, True):
        words = ("a client", "members", "membership", "the model it receives", adaptive, "members told")
        show(Audit("fedavg", (Finding("client/membership", *words, verdict="not effective"),), {}, tmp_path, 1.0))
        shown = capsys.readouterr().out
        assert ("membership *" in shown) is ("* made for this kind of protection" in shown) is adaptive


def test_the_folder_holds_findings_and_pictures(ran: Path, first: Done) -> None:
    content = json.loads((ran / "audit" / "audit.json").read_text())
    assert (content["scheme"], content["dataset"], content["model"]) == ("nadp", "digits", "mlp")
    assert set(content["versions"]) == {"fedveil", "torch"}
    assert set(content["adversaries"]) == {one["adversary"] for one in content["findings"]}
    found = {one["name"]: one for one in content["findings"]}
    assert {"server/closed-form", "server+1/closed-form", "wire/closed-form", "client/received"} <= set(found)
    one = found["server/closed-form"]
    assert one["verdict"] == "nothing"
    assert one["reference"] > one["threshold"] == 20.0
    assert one["unprotected"] == 100.0
    assert {"mse", "ssim", "feature mse", "success rate", "knn distance"} <= set(one["more"])
    assert one["shown"] == {
        "value": f"{one['value']:.1f} dB",
        "chance": f"{one['chance']:.1f} dB",
        "unprotected": "100.0 dB",
    }
    pictures = {path.name for path in (ran / "audit" / "pictures").iterdir()}
    assert pictures == {one["pictures"] for one in content["findings"] if one["pictures"]} != set()
    assert found["client/received"]["low"] < found["client/received"]["value"] < found["client/received"]["high"]


def test_a_second_call_says_that_everything_is_there_and_shows_the_same(ran: Path, first: Done) -> None:
    before = (ran / "audit" / "audit.json").read_text()
    again = fedveil("audit", ran, *ASKED)
    assert again.code == 0
    count = len(json.loads(before)["findings"])
    assert f"{count} of {count} trials are in" in again.error
    assert (ran / "audit" / "audit.json").read_text() == before

    def tables(text: str) -> list[str]:
        return [line for line in text.splitlines() if "in full:" not in line]

    assert tables(again.output) == tables(first.output)


def test_json_is_the_file_and_nothing_else(ran: Path, first: Done) -> None:
    done = fedveil("audit", ran, *ASKED, "--json")
    assert done.code == 0
    assert json.loads(done.output) == json.loads((ran / "audit" / "audit.json").read_text())


@pytest.mark.slow
def test_an_audit_of_another_effort_is_said_to_be_replaced(ran: Path, first: Done, tmp_path: Path) -> None:
    shutil.copytree(ran / "audit", tmp_path / "other")
    before = (tmp_path / "other" / "audit.json").read_text()
    done = fedveil(
        "audit", ran, "--quick", "--seed", 5, "--workers", 1, "--attacks", "parameters", "--out", tmp_path / "other"
    )
    assert done.code == 0
    assert "another record or effort: it is replaced" in done.error
    after = json.loads((tmp_path / "other" / "audit.json").read_text())
    assert [one["name"] for one in after["findings"]] == ["client/parameters"]
    assert after["identity"]["seed"] == 5
    assert json.loads(before)["identity"]["seed"] == 0
    assert (ran / "audit" / "audit.json").read_text() == before


def test_attacks_are_listed() -> None:
    done = fedveil("audit", "--list")
    assert (done.code, done.error) == (0, "")
    assert all(name in done.output for name in attacks())


OWN = """
from fedveil.audit.attack import attack

@attack("constant", sees="model", asset="the model's function", reference=None, how="says the same to everything")
def constant(view, context):
    import torch
    return {"said": torch.eye(10)[DIGIT].expand(len(view.known["queries"]), -1)}
"""


@pytest.fixture(scope="module")
def own(ran: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Done]:
    """An attack of one's own, which leaves a file wherever it is imported; where it was tried; what was said."""
    place = tmp_path_factory.mktemp("own")
    file = place / "mine.py"
    file.write_text(OWN.replace("DIGIT", "3") + f"\nopen({str(place / 'imported')!r}, 'w').close()\n")
    quick = ("--quick", "--workers", 1, "--out", place / "out", "--attacks", "constant")
    with pytest.MonkeyPatch.context() as patched:
        without_processes(patched)
        return file, place / "out", fedveil("audit", ran, *quick, "--attack", f"{file}:constant", "--json")


def test_an_attack_of_ones_own_is_listed_tried_and_reported_like_ours(
    ran: Path, own: tuple[Path, Path, Done], tmp_path: Path
) -> None:
    file, out, done = own
    named = f"{file}:constant"
    listed = " ".join(fedveil("audit", "--list", "--attack", named).output.split())
    assert "constant │ client │ the model │ says the same to" in listed
    command = ("audit", ran, "--quick", "--workers", 1, "--attacks", "constant", "--out")
    refused(fedveil(*command, tmp_path / "out"), ConfigError, "Unknown attack 'constant'")
    assert done.code == 0, done.error
    (first,) = json.loads(done.output)["findings"]
    # Three rounds under noise train no model worth stealing.
    assert (first["name"], first["verdict"]) == ("client/constant", "not effective")
    assert isinstance(first["value"], float)
    assert first["value"] < 0.2
    shutil.copytree(out, tmp_path / "out")
    again = fedveil(*command, tmp_path / "out", "--attack", named, "--json")
    assert again.code == 0, again.error
    assert "1 of 1 trials are in" in again.error
    (second,) = json.loads(again.output)["findings"]
    assert second["seconds"] == first["seconds"]


@pytest.mark.slow
def test_an_attack_of_ones_own_that_was_changed_is_tried_again(ran: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    command = ("audit", ran, "--quick", "--workers", 1, "--out", tmp_path / "out", "--attacks", "constant")
    values = set()
    for digit in ("3", "4"):
        file.write_text(OWN.replace("DIGIT", digit))
        done = fedveil(*command, "--attack", f"{file}:constant", "--json")
        assert done.code == 0, done.error
        values |= {one["value"] for one in json.loads(done.output)["findings"]}
    assert len(values) == 2, "another code finds another thing"


def test_where_every_attack_tried_failed_the_exit_code_says_so_and_the_reason_names_the_line(
    ran: Path, tmp_path: Path
) -> None:
    file = tmp_path / "majority.py"
    file.write_text(OWN.replace("torch.eye(10)[DIGIT]", "torch.no_such_thing"))
    (line,) = (number for number, text in enumerate(file.read_text().splitlines(), 1) if "no_such_thing" in text)
    own = ("audit", ran, "--quick", "--workers", 1, "--out", tmp_path / "out", "--attack", f"{file}:constant")
    done = fedveil(*own, "--attacks", "constant")
    assert done.code == AttackError.exit_code == 9
    assert done.error.splitlines()[-1].startswith("error: Every attack that was tried failed. client/constant: ")
    (found,) = json.loads((tmp_path / "out" / "audit.json").read_text())["findings"]
    assert found["verdict"] == "failed"
    assert "failed: AttributeError: " in found["reason"]
    assert found["reason"].endswith(f"(majority.py, line {line})")


def test_where_another_attack_came_to_an_end_a_failed_one_is_no_error(tmp_path: Path) -> None:
    words = ("a client", "members", "membership", "the model it receives", False, "members told")
    failed = Finding("client/own", *words, verdict="failed")
    ended = Finding("client/membership", *words, verdict="not effective")
    with pytest.raises(AttackError, match="Every attack that was tried failed"):
        refuse_nothing_but_failures(Audit("fedavg", (failed,), {}, tmp_path, 1.0))
    refuse_nothing_but_failures(Audit("fedavg", (failed, ended), {}, tmp_path, 1.0))


@pytest.mark.slow
def test_where_another_attack_came_to_an_end_the_exit_code_is_none(ran: Path, tmp_path: Path) -> None:
    file = tmp_path / "majority.py"
    file.write_text(OWN.replace("torch.eye(10)[DIGIT]", "torch.no_such_thing"))
    own = ("audit", ran, "--quick", "--workers", 1, "--out", tmp_path / "out", "--attack", f"{file}:constant")
    assert fedveil(*own, "--attacks", "constant,received").code == 0


def test_what_a_stored_audit_says_of_own_code_is_never_run(
    ran: Path, own: tuple[Path, Path, Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_processes(monkeypatch)
    file, out, _ = own
    imported = file.with_name("imported")
    assert imported.exists()
    imported.unlink()
    stored = shutil.copytree(out, tmp_path / "out") / "audit.json"
    told = stored.read_text()
    assert '"client/constant": "' in told
    stored.write_text(told.replace('"client/constant": "', f'"client/constant": "{file}:constant'))
    done = fedveil("audit", ran, "--quick", "--workers", 1, "--out", tmp_path / "out", "--attacks", "received")
    assert done.code == 0, done.error
    assert not imported.exists()


def test_help_shows_examples() -> None:
    output = fedveil("audit", "--help").output
    assert "Examples" in output
    assert "fedveil audit runs/a --quick" in output


def test_a_near_miss_is_suggested(ran: Path) -> None:
    refused(
        fedveil("audit", ran, "--attacks", "closed-from"), ConfigError, "'closed-from'", "Did you mean 'closed-form'?"
    )
    refused(fedveil("audit", ran, "--attacks", "received,nosuch"), ConfigError, "Unknown attack 'nosuch'", "Known: ")
    done = fedveil("audit", ran, "--attacks", "phi,calibration")
    assert (done.code, done.output) == (ConfigError.exit_code, "")
    assert done.error.endswith("error: None of these attacks fits a run of nadp: phi, calibration.")


def test_machines_that_are_not_there_are_refused(ran: Path) -> None:
    refused(fedveil("audit", ran, "--workers", -1), ConfigError, "workers must be at least 1")
    refused(fedveil("audit", ran, "--device", "abacus"), ConfigError, "'abacus'", "cpu, cuda or auto")


def test_without_a_run_it_says_what_to_name() -> None:
    refused(fedveil("audit"), ConfigError, "fedveil audit RUN", "--list")


def test_what_is_no_run_or_was_not_recorded_is_refused(tmp_path: Path, copied: Path) -> None:
    refused(fedveil("audit", tmp_path / "nowhere"), CheckpointError, "holds no run", "config.toml")
    (tmp_path / "file").write_text("x")
    refused(fedveil("audit", tmp_path / "file"), CheckpointError, "holds no run")
    shutil.rmtree(copied / "record")
    refused(fedveil("audit", copied), CheckpointError, "was not recorded", "--record")


def test_an_unfinished_run_is_to_be_finished_first(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    refused(fedveil("audit", copied), CheckpointError, "stopped", "fedveil run --resume")
    assert not (copied / "audit").exists()


@pytest.mark.parametrize(
    ("file", "part"),
    [("index.jsonl", "index.jsonl, line 1 is damaged"), ("facts.json", "facts.json"), ("messages.bin", "messages.bin")],
)
def test_a_damaged_record_is_refused(copied: Path, file: str, part: str) -> None:
    place = copied / "record" / file
    content = place.read_bytes()
    place.write_bytes(b"?" * 40 + content[40:])
    done = fedveil("audit", copied, "--quick", "--attacks", "received")
    assert done.code == CheckpointError.exit_code, done
    assert part in done.error.splitlines()[-1]
    assert "Traceback" not in done.error


def test_a_damaged_audit_is_refused(copied: Path) -> None:
    (copied / "audit").mkdir()
    (copied / "audit" / "audit.json").write_text("{")
    refused(fedveil("audit", copied), CheckpointError, "audit.json", "Remove it")
