"""The window of Flower's versions is what pyproject.toml says, and each is tested with what is pinned here."""

from __future__ import annotations

from tools.flower_versions import pins, window


def test_every_minor_version_of_the_window_is_named() -> None:
    assert window() == ["1.41", "1.42"]


def test_an_environment_has_its_version_of_flower_and_what_is_tested_here() -> None:
    lines = pins("1.42").split()
    assert lines[0] == "flwr==1.42.*"
    assert [line for line in lines if line.startswith("torch==")]
    assert not [line for line in lines if line.startswith(("uv", "certifi"))]
