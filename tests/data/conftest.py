from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def shared_data() -> Callable[[str], Path]:
    """The folder of a real data set, or a skip where this machine does not have it."""
    default = Path(__file__).resolve().parents[2] / ".." / "shared" / "data"
    root = Path(os.environ.get("FEDVEIL_DATA", default))

    def folder(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no data set {name!r} under {root}; set FEDVEIL_DATA to the folder that holds it")
        return root / name

    return folder
