"""A round stays readable: it crosses few files, and the page that shows its walk shows the walk there is."""

from __future__ import annotations

import re

import pytest

from tools.round_walk import MOST, PAGE, page, walk


@pytest.mark.parametrize("scheme", MOST)
def test_a_round_crosses_no_more_files_than_it_may(scheme: str) -> None:
    crossed = walk(scheme)
    assert {"roles/server.py", "protocol/phases.py", "runs/loop.py"} <= set(crossed)
    assert len(crossed) <= MOST[scheme], crossed
    if scheme == "fedavg":
        assert page(crossed) == PAGE.read_text(encoding="utf-8"), "write it again: python -m tools.round_walk --write"
    if scheme == "veil-secagg":
        _, _, after = PAGE.read_text(encoding="utf-8").partition("For `veil-secagg`, go on with these")
        to_read = re.findall(r"`([\w/]+\.py)`", after.partition("\n\n")[0])
        assert len(to_read) == 9
        assert set(to_read) - set(crossed) == {"schemes/server_held.py"}, "which puts the parts together before the run"
