"""First models of runs on Flower: all of the group's secret decides, and none of the seed that the server knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedveil.client_held.client import HolderRole
from fedveil.config import RunConfig
from fedveil.flower.home import Home
from fedveil.flower.message_handler import build_side
from fedveil.flower.messages import Setup
from flower.in_process import make_homes

FACTS = {"input_shape": [1, 8, 8], "outputs": 10, "task": "classification", "vocabulary": None}


@pytest.mark.parametrize("scheme", ["paraaegis", "ckks-fedavg", "serial"])
def test_every_byte_of_the_groups_secret_decides_about_the_first_model(scheme: str, tmp_path: Path) -> None:
    """Of the first eight bytes PyTorch would have kept four."""
    config = RunConfig(scheme=scheme, clients=3, rounds=2, seed=1, batch_size=16, secrets="os", cipher="pads")
    setup = Setup.of(config, FACTS, lineage="0123456789abcdef" * 2, attempt=0)
    roles = []
    for folder in make_homes(tmp_path, 2):
        side = build_side(Home.read(folder), setup)
        assert side.hidden
        assert isinstance(side.role, HolderRole)
        roles.append(side.role)
    secret = bytes(range(32))

    def first(role: HolderRole, given: bytes) -> torch.Tensor:
        make = role._keeper._first
        assert make is not None
        return make(given).weights.parameters

    ours, theirs = (first(role, secret) for role in roles)
    assert torch.equal(ours, theirs)
    for place in (0, 3, 7, 8, 31):
        other = bytearray(secret)
        other[place] ^= 1
        assert not torch.equal(ours, first(roles[0], bytes(other)))
