"""What a client remembers on disk: what is noticed when files go back, or go missing, and what cannot be."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedveil.errors import Code, FedVeilError
from fedveil.flower import messages
from fedveil.flower.client_memory import DamagedError, Memory, Promise, Remembered
from fedveil.flower.server_app import serve
from fedveil.protocol.client_state import ClientState
from flower.in_process import InProcessGrid, context_of, make_homes

CPU = torch.device("cpu")
LINEAGE = "0123456789abcdef" * 2
NOISY = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "rounds": 3,
    "seed": 1,
    "batch_size": 16,
    "scheme": "ldp",
    "epsilon": 3.0,
    "deadline": 2.0,
}


def remembered(**changes: object) -> Remembered:
    return Remembered(ClientState(0, **changes), attempt=0, setup="s")  # type: ignore[arg-type]


def copied(folder: Path, to: Path) -> Path:
    return shutil.copytree(folder, to)


def test_what_was_spent_is_missed_when_its_file_is_deleted(tmp_path: Path) -> None:
    Memory(tmp_path / "state").spend(1.5)
    (tmp_path / "state" / "spent.sealed").unlink()
    with pytest.raises(DamagedError, match=r"spent\.sealed is missing.*delete spent\.sealed and epochs/spent"):
        Memory(tmp_path / "state").spent()
    with pytest.raises(DamagedError, match="is missing"):
        Memory(tmp_path / "state").spend(0.1)


def test_an_older_copy_of_what_was_spent_is_refused(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "state")
    memory.spend(1.0)
    older = (tmp_path / "state" / "spent.sealed").read_bytes()
    memory.spend(1.0)
    (tmp_path / "state" / "spent.sealed").write_bytes(older)
    with pytest.raises(DamagedError, match="older than what was written last"):
        memory.spent()


def test_a_state_folder_that_is_deleted_is_missed(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "state")
    memory.spend(1.0)
    memory.keep(LINEAGE, remembered())
    shutil.rmtree(tmp_path / "state")
    again = Memory(tmp_path / "state")
    with pytest.raises(DamagedError, match="is missing"):
        again.spent()
    with pytest.raises(DamagedError, match="stays out of that run"):
        again.recall(LINEAGE, device=CPU)


def test_known_limit_both_folders_deleted_or_restored_together_are_not_noticed(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "a" / "state")
    memory.spend(1.0)
    copied(tmp_path / "a", tmp_path / "b")
    memory.spend(1.0)
    assert Memory(tmp_path / "b" / "state").spent() == 1.0
    shutil.rmtree(tmp_path / "a")
    assert Memory(tmp_path / "a" / "state").spent() == 0.0


def test_a_promise_stands_until_it_is_answered_however_often_it_is_begun(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "state")
    memory.keep(LINEAGE, remembered())
    for tries in (1, 2, 3):
        memory.promise(LINEAGE, Promise(ClientState(0, answered=(4, 0), spent=float(tries)), "m", tries))
        found = Memory(tmp_path / "state").recall(LINEAGE, device=CPU)
        assert found is not None
        assert found.promise is not None
        assert (found.promise.tries, found.promised.answered, found.state.answered) == (tries, (4, 0), (-1, 0))
    memory.keep(LINEAGE, found.replied(found.promised, "m", b"reply"))
    after = Memory(tmp_path / "state").recall(LINEAGE, device=CPU)
    assert after is not None
    assert (after.promise, after.state.answered) == (None, (4, 0))


def test_a_promise_of_before_is_no_excuse_for_an_older_run(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "state")
    memory.keep(LINEAGE, remembered())
    memory.promise(LINEAGE, Promise(ClientState(0, answered=(4, 0)), "m", 1))
    copied(tmp_path / "state", tmp_path / "backup")
    memory.keep(LINEAGE, remembered(answered=(4, 0)))
    for name in ("run", "promise"):
        shutil.copy(tmp_path / "backup" / f"{LINEAGE}.{name}.sealed", tmp_path / "state")
    with pytest.raises(DamagedError, match="restored"):
        Memory(tmp_path / "state").recall(LINEAGE, device=CPU)


@pytest.mark.parametrize("how", ["deleted", "older", "folder"])
def test_a_client_whose_account_is_gone_takes_part_in_no_run(how: str, tmp_path: Path) -> None:
    homes = make_homes(tmp_path / "homes", 3)
    for number, home in enumerate(homes):
        (home / "policy.toml").write_text("max_epsilon = 4.0\n")
        (home / "client.toml").write_text(f'client = {number}\nsimulation = true\npolicy = "policy.toml"\n')
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "first"), **{**NOISY, "rounds": 1}))
    older = [(home / "state" / "spent.sealed").read_bytes() for home in homes]
    serve(InProcessGrid(homes), context_of(out=str(tmp_path / "second"), **{**NOISY, "rounds": 1, "epsilon": 1.0}))
    for home, content in zip(homes, older, strict=True):
        if how == "folder":
            shutil.rmtree(home / "state")
        elif how == "deleted":
            (home / "state" / "spent.sealed").unlink()
        else:
            (home / "state" / "spent.sealed").write_bytes(content)
    with pytest.raises(FedVeilError) as refused:
        serve(InProcessGrid(homes), context_of(out=str(tmp_path / "third"), **NOISY))
    assert messages.TEXTS[Code.STATE] in str(refused.value)
    assert not (tmp_path / "third" / "metrics.jsonl").exists() or not (tmp_path / "third" / "metrics.jsonl").read_text()
