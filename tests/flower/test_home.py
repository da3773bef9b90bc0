"""Homes that the worker reads as they were meant."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from fedveil.errors import ConfigError
from fedveil.flower.home import Home, create_home, parse_required
from fedveil.runs.terms import OneOf, create_identities


def test_a_bare_home_says_who_the_client_is(tmp_path: Path) -> None:
    written = create_home(tmp_path / "home", client=2)
    home = Home.read(written.parent)
    assert (home.client, home.data, home.roster, home.policy, home.require) == (2, None, None, None, {})
    assert stat.S_IMODE(home.state.stat().st_mode) == 0o700


def test_a_full_home_names_its_files_relative_inside_and_absolute_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_identities(tmp_path / "keys", clients=2)
    folder = tmp_path / 'a "home"'
    folder.mkdir()
    (folder / "data.py").write_text("")
    (tmp_path / "policy.toml").write_text("min_cohort = 2\n")
    monkeypatch.chdir(tmp_path)
    written = create_home(
        folder,
        client=1,
        data="data.py",
        roster=Path("keys/roster.toml"),
        identity=Path("keys/client-1.key"),
        policy=Path("policy.toml"),
        models=["net.py:make"],
        require=parse_required(["scheme=veil-secagg", "scheme=veil-dp", "unmask=always", "lr=0.5", "record=false"]),
    )
    assert 'data = "data.py"\n' in written.read_text()
    monkeypatch.chdir("/")
    home = Home.read(folder)
    assert home.data == folder / "data.py"
    assert home.roster is not None
    assert sorted(home.roster.keys) == [0, 1]
    assert home.identity is not None
    assert home.policy is not None
    assert home.policy.min_cohort == 2
    assert home.models == ("net.py:make",)
    assert home.require == {
        "scheme": OneOf(("veil-secagg", "veil-dp")),
        "unmask": OneOf(("always",)),
        "lr": OneOf((0.5,)),
        "record": OneOf((False,)),
    }


def test_a_home_is_not_overwritten(tmp_path: Path) -> None:
    create_home(tmp_path, client=0)
    with pytest.raises(ConfigError, match="exists already"):
        create_home(tmp_path, client=1)
    assert Home.read(tmp_path).client == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param({"client": -1}, "numbered from 0", id="number"),
        pytest.param({"client": 0, "data": "gone.py"}, "there is no file gone.py", id="file"),
        pytest.param({"client": 0, "roster": "x"}, "belong together", id="half"),
        pytest.param({"client": 0, "require": {"shceme": "ldp"}}, "Did you mean 'scheme'", id="setting"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_nothing(tmp_path: Path, given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_home(tmp_path / "home", **given)  # type: ignore[arg-type]
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("pair", ["scheme", "=x"])
def test_a_requirement_is_a_pair(pair: str) -> None:
    with pytest.raises(ConfigError, match="setting=value"):
        parse_required([pair])
