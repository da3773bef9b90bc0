"""The contest with peers: turns are given and told, disturbed cells and other models are marked, figures are kept."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.peers import contest as contests
from benchmarks.peers import environments
from benchmarks.peers.contest import CLIPPING, FEDVEIL_2, TRAINING, Candidate, Cell, Player, cell, prepared
from benchmarks.peers.page import page
from benchmarks.peers.table import BOUNDS, keep, kept, marks, peers, rows
from benchmarks.peers.workloads import WARM_ROUNDS, WORKLOADS, Plan, Workload

TINY = Workload("tiny", "a tiny one", "logistic", (1, 28, 28), 5, 2, 8, 4, 0.1, local=True)
PLAYER = """
import sys
from pathlib import Path
import numpy
from benchmarks.peers.turns import Turns
turns = Turns()
print("a library says hello")
turns.begin()
for _ in range(ROUNDS):
    turns.lap()
class Parameters:
    numpy = staticmethod(lambda: numpy.arange(7850.0) + SHIFT)
turns.finish(Path(sys.argv[1]), Parameters)
"""


def made(name: str = "FedVeil", *, seconds: float = 0.02, load: float = 1.0, apart: float | None = 0.0) -> Cell:
    return cell(WORKLOADS[0], name, [seconds, 1.1 * seconds, 0.9 * seconds], [0.1, load], most=2, apart=apart)


def playing(name: str, *, rounds: int, shift: float = 0.0) -> Candidate:
    return Candidate(name, ("-c", PLAYER.replace("ROUNDS", str(rounds)).replace("SHIFT", str(shift))))


def test_everybody_takes_turns_and_a_peer_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contests, "interpreter", lambda peer: sys.executable)
    rounds = WARM_ROUNDS + 2 * TINY.block
    broken = Candidate("a peer", ("-c", "raise SystemExit('out of order')"), peer="pfl", processes=2)
    candidates = [playing("first", rounds=rounds), broken, playing("other", rounds=rounds, shift=1.0)]
    first, other = contests.contest(TINY, candidates, turns=2)
    assert (first.candidate, other.candidate) == ("first", "other")
    assert (len(first.seconds), len(other.seconds)) == (2, 2)
    assert first.apart == 0
    assert other.apart == pytest.approx(7850**0.5 / np.linalg.norm(np.arange(7850.0)), rel=1e-3)
    assert "out of order" in capsys.readouterr().err


def test_a_process_is_given_turns_and_tells_each_round(tmp_path: Path) -> None:
    player = Player(playing("a player", rounds=3), tmp_path)
    try:
        taken = [player.turn(1), player.turn(2)]
        assert [len(seconds) for seconds in taken] == [1, 2]
        assert all(0 <= value < 60 for seconds in taken for value in seconds)
        assert player.model(tmp_path).tolist() == list(range(7850))
    finally:
        player.close()


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of order"):
        Player(Candidate("a player", ("-c", "raise SystemExit('out of order')")), tmp_path)


def test_a_plan_reads_back_as_it_was_written(tmp_path: Path) -> None:
    plan = prepared(TINY, 3, data=None, seed=1)
    plan.write(tmp_path)
    read = Plan.read(tmp_path)
    assert read.workload == TINY
    assert plan.rows.shape == (3, 2, 8)
    for seat in itertools.product(range(3), range(2)):
        for ours, theirs in zip(plan.taken(*seat), read.taken(*seat), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert sorted(plan.rows[seat]) == list(range(8))  # a whole epoch
    np.testing.assert_array_equal(torch.nn.utils.parameters_to_vector(read.model().parameters()).detach(), plan.first)


@pytest.mark.parametrize(("load", "disturbed"), [(0.3, False), (2.0, False), (2.5, False), (2.6, True), (9.3, True)])
def test_more_load_than_the_benchmark_makes_is_marked(load: float, disturbed: bool) -> None:
    taken = made(load=load)
    assert taken.load == load
    assert taken.disturbed is disturbed
    assert ("DISTURBED" in marks(taken)) is disturbed


@pytest.mark.parametrize(("apart", "agrees"), [(None, True), (2e-3, True), (2e-2, False)])
def test_another_model_is_marked(apart: float | None, agrees: bool) -> None:
    taken = made(apart=apart)
    assert taken.agrees is agrees
    assert ("ANOTHER MODEL" in marks(taken)) is not agrees


def test_a_peer_is_held_against_the_faster_of_fedveils_cells() -> None:
    cells = [made(), made(FEDVEIL_2, seconds=0.01), made("Flower, Ray", seconds=0.2), made("pfl 0.6", seconds=0.02)]
    ray, pfl = rows(cells)
    assert (ray.against, pfl.against) == (FEDVEIL_2, FEDVEIL_2)
    assert ray.measured.middle == pytest.approx(20)
    assert ray.holds is True
    assert pfl.holds is None
    (slow,) = rows([made(), made("Flower, Ray", seconds=0.2)])
    assert slow.holds is False


def test_bounds_are_of_workloads_and_candidates_that_there_are() -> None:
    held = {(workload.name, one.name) for workload in WORKLOADS for one in (CLIPPING if workload.clipped else TRAINING)}
    assert BOUNDS.keys() <= held


def test_figures_are_kept_and_written_up(tmp_path: Path) -> None:
    cells = [made(), made("Flower, Ray", seconds=0.2, load=7.0), made("plain step, no clipping", apart=None)]
    keep(tmp_path / "peers.json", cells, load_before=0.04, missing=["pfl has no environment"])
    facts, read = kept(tmp_path / "peers.json")
    assert read == cells
    text = page(facts, read)
    assert "| Flower, Ray | 0.2000 | 0.1800–0.2200 | 7.00 | 0e+00 | load 7.0: DISTURBED |" in text
    assert "load before: 0.04" in text
    assert "pfl has no environment" in text


def test_without_environments_the_table_says_how_to_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    assert peers(turns=1) == []
    assert environments.HOW_TO_MAKE in capsys.readouterr().out


def test_an_environment_counts_once_it_was_made_from_these_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    (python := environments.interpreter("pfl")).parent.mkdir(parents=True)
    os.symlink(sys.executable, python)
    assert not environments.made("pfl")
    (tmp_path / "pfl" / "requirements.txt").write_text("pfl==0.5\n")
    assert not environments.made("pfl")
    (tmp_path / "pfl" / "requirements.txt").write_text((environments.REQUIREMENTS / "pfl.txt").read_text())
    assert environments.made("pfl")
