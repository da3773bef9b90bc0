"""The doctor finds what is wrong with an installation, says what to do, and calls a working one working."""

from __future__ import annotations

import json
import math
import os
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fedveil import doctor as checkup
from fedveil.crypto.ciphertexts import VARIABLE
from fedveil.doctor import ADVICE, OK, PROBLEM, Check, examine
from papers import stage
from shell import fedveil

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def state(findings: list[Check], what: str) -> str:
    return next(one.state for one in findings if one.what == what)


def test_this_installation_works_and_its_self_test_agrees_with_plain_averaging() -> None:
    found = {one.what: one for one in examine()}
    assert {"Python", "torch", "device", "threads", "working folder", "disk", "self-test"} <= set(found)
    assert found["self-test"].state == OK
    assert all(one.todo for one in found.values() if one.state != OK)
    assert all(one.state in (OK, ADVICE, PROBLEM) for one in found.values())


def test_two_rounds_under_veil_and_masks_end_in_the_plain_model_and_noise_does_not() -> None:
    assert 0 < checkup.difference("veil-secagg") < checkup.CLOSE
    assert checkup.judged(2 * checkup.CLOSE, 1.0).state == PROBLEM
    assert checkup.judged(math.nan, 1.0).state == PROBLEM


def test_every_extra_is_explained() -> None:
    assert set(checkup.PURPOSES) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize(
    ("text", "name", "bounds", "extra"),
    [
        ("torch>=2.6", "torch", ((">=", "2.6"),), ""),
        ("flwr<1.43,>=1.41; extra == 'flower'", "flwr", ((">=", "1.41"), ("<", "1.43")), "flower"),
        ('mkdocstrings[python]>=0.26; extra == "docs"', "mkdocstrings", ((">=", "0.26"),), "docs"),
        ("scikit-learn", "scikit-learn", (), ""),
    ],
)
def test_requirements_are_read_as_metadata_has_them(
    text: str, name: str, bounds: tuple[tuple[str, str], ...], extra: str
) -> None:
    assert checkup.parse(text) == checkup.Requirement(name, bounds, extra)


@pytest.mark.parametrize(
    ("found", "fits"),
    [("1.41.0", True), ("1.42.9", True), ("1.43", False), ("1.43.0.dev1", False), ("1.5", False), ("2.0", False)],
)
def test_a_range_of_versions_is_kept_to(found: str, fits: bool) -> None:
    assert checkup.parse("flwr<1.43,>=1.41; extra == 'flower'").allows(found) is fits


def with_versions(monkeypatch: pytest.MonkeyPatch, asked: list[str], there: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(checkup, "requires", lambda name: asked)
    monkeypatch.setattr(checkup, "version", version)


def test_packages_that_are_missing_or_too_old_are_problems_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, ["torch>=2.6", "rich>=13.7", "typer>=0.15"], {"torch": "2.5.1", "typer": "0.15.0"})
    found = list(checkup.core_packages())
    assert [(one.what, one.state) for one in found] == [("package torch", PROBLEM), ("package rich", PROBLEM)]
    assert found[0].todo == "pip install -U 'torch>=2.6'"
    assert "2.5.1" in found[0].found


def test_a_missing_extra_is_an_advice_and_an_unfit_one_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["flwr<1.43,>=1.41; extra == 'flower'", "pillow>=10; extra == 'images'", "tenseal>=0.3; extra == 'he'"]
    with_versions(monkeypatch, asked, {"flwr": "1.50", "pillow": "11.0"})
    found = list(checkup.extras())
    states = [(one.what, one.state) for one in found]
    assert states == [("extra flower", PROBLEM), ("extra images", OK), ("extra he", ADVICE)]
    assert "flwr must be >= 1.41, < 1.43" in found[0].found
    assert found[2].todo == "if you want that: pip install -U 'fedveil[he]'"


def test_running_from_source_files_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(checkup, "requires", missing)
    assert [one.state for one in checkup.core_packages()] == [ADVICE]
    assert list(checkup.extras()) == []


def test_flowers_commands_are_looked_for_where_the_shell_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "version_of", lambda name: "1.41.0")
    monkeypatch.setenv("PATH", str(tmp_path))
    (missing,) = checkup.flower_commands()
    assert (missing.state, "flower-superlink" in missing.found) == (ADVICE, True)
    for name in checkup.FLOWER_COMMANDS:
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert [one.state for one in checkup.flower_commands()] == [OK]


def test_a_compiled_module_that_does_not_load_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "version_of", lambda name: "0.3.16")
    monkeypatch.setitem(sys.modules, "tenseal", None)  # how Python marks a module that must not be imported
    (found,) = checkup.homomorphic()
    assert (found.state, "--cipher pads" in found.todo) == (PROBLEM, True)


def test_variables_are_those_the_code_reads() -> None:
    assert set(checkup.VARIABLES) == {stage.DATA_VARIABLE, VARIABLE}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("FEDVEIL_WORKERS", "2", OK),
        ("FEDVEIL_WORKERS", "0", PROBLEM),
        ("FEDVEIL_WORKERS", "many", PROBLEM),
        ("FEDVEIL_DATA", "/no/such/folder", PROBLEM),
        ("FEDVEIL_DATE", "data", ADVICE),
    ],
)
def test_a_variable_is_judged_by_its_value(name: str, value: str, expected: str) -> None:
    assert state(list(checkup.variables({name: value})), name) == expected


def test_a_misspelt_variable_suggests_the_nearest() -> None:
    found = next(iter(checkup.variables({"FEDVEIL_DATE": "data"})))
    assert found.todo == "did you mean FEDVEIL_DATA?"


def test_data_sets_are_found_by_their_folders(tmp_path: Path) -> None:
    (empty,) = checkup.variables({"FEDVEIL_DATA": str(tmp_path)})
    assert empty.state == ADVICE
    (tmp_path / "mnist").mkdir()
    (found,) = checkup.variables({"FEDVEIL_DATA": str(tmp_path)})
    assert (found.state, found.found) == (OK, f"{tmp_path}: mnist")


def test_a_folder_that_cannot_be_written_to_is_a_problem(tmp_path: Path) -> None:
    assert checkup.folder("working folder", tmp_path).state == OK
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert checkup.folder("temporary folder", tmp_path / "file").todo == "set TMPDIR to a folder of yours"


@pytest.mark.parametrize(("free", "expected"), [(0.05, PROBLEM), (1.0, ADVICE), (5.0, OK)])
def test_little_disk_is_an_advice_and_none_a_problem(free: float, expected: str) -> None:
    assert checkup.disk_finding(free).state == expected


def test_more_threads_than_cores_are_advised_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "usable_cores", lambda: 0)
    assert [one.state for one in checkup.processors()] == [ADVICE]


def broken() -> list[Check]:
    raise OSError("no such device")


def fine() -> list[Check]:
    return [Check("fine", OK, "there [really]")]


def test_a_check_that_breaks_is_a_problem_and_the_others_are_made() -> None:
    found = list(examine((broken, fine)))
    assert [(one.what, one.state) for one in found] == [("broken", PROBLEM), ("fine", OK)]
    assert "OSError: no such device" in found[0].found


@pytest.mark.parametrize(("checks", "code"), [((fine,), 0), ((broken, fine), 1)], ids=["fine", "broken"])
def test_the_command_fails_only_if_there_is_a_problem(
    checks: checkup.Checks, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.doctor.examine", lambda: examine(checks))
    told = fedveil("doctor")
    assert (told.code, "there [really]" in told.output) == (code, True)
    data = fedveil("doctor", "--json")
    assert data.code == code
    assert json.loads(data.output)["problems"] == code
    assert json.loads(data.output)["findings"][-1]["what"] == "fine"


def test_the_working_folder_is_the_shells() -> None:
    assert next(iter(checkup.folders())).found.startswith(os.getcwd())
