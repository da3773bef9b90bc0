from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from audit import misbehaving
from audit.recorded import recorded_once
from fedveil.audit.attack import Attack, attack_at
from fedveil.audit.record import server_view
from fedveil.audit.running import AttackProcess
from fedveil.audit.views import to_bytes
from fedveil.errors import AttackError, ConfigError, NotApplicableError

ATTACKS = {name: one for name, one in vars(misbehaving).items() if isinstance(one, Attack)}


def view() -> bytes:
    return to_bytes(server_view(recorded_once(scheme="lossless")[1], 0, round=1))


def run(name: str, **more: Any) -> dict[str, torch.Tensor]:
    return run_on(name, view(), **more)


def run_on(name: str, seen: bytes, **more: Any) -> dict[str, torch.Tensor]:
    with AttackProcess(name, attacks=ATTACKS) as process:
        return process.run(seen, **more)


def test_an_attack_gets_its_view_and_settings_and_sends_progress_and_tensors() -> None:
    heard: list[float] = []
    refused: list[str] = []

    def meddle(fraction: float) -> None:
        heard.append(fraction)
        with pytest.raises(ConfigError) as reason:
            process.run(view())
        refused.append(str(reason.value))

    with AttackProcess("counts", attacks=ATTACKS) as process:
        found = process.run(view(), settings={"number": 7}, on_progress=meddle)
    record = recorded_once(scheme="lossless")[1]
    weights = server_view(record, 0, round=1).weights
    assert weights is not None
    assert (found["messages"].tolist(), found["given"].tolist()) == ([2], [7])
    assert torch.equal(found["parameters"], weights.parameters)
    assert heard == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert len(refused) == 5, "a view that comes while another is worked on"
    assert "is at work" in refused[0]


def test_what_is_not_in_the_view_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen_by_server = view()
    run_folder = tmp_path / "the-run-of-the-day"
    run_folder.mkdir()
    (run_folder / "config.toml").write_text("seed = 1")
    monkeypatch.chdir(run_folder)
    monkeypatch.syspath_prepend(str(run_folder))
    monkeypatch.setenv("FEDVEIL_DATA", str(run_folder))
    monkeypatch.setenv("PYTHONPATH", str(run_folder))
    with (run_folder / "config.toml").open() as held_open:
        os.set_inheritable(held_open.fileno(), True)
        seen = json.loads(run_on("surroundings", seen_by_server)["seen"].numpy().tobytes())
    assert seen["lies here"] == []
    assert not Path(seen["folder"]).exists()
    assert set(seen["environment"]) <= {
        *("LC_ALL", "LC_CTYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"),
        *("CUBLAS_WORKSPACE_CONFIG", "SYSTEMROOT"),
    } | {name for name in seen["environment"] if name.startswith(("KMP_", "TORCH", "PYTORCH"))}
    for what in (run_folder.name, "config.toml"):
        assert what not in json.dumps(seen)


def test_unknown_attacks_and_settings_that_are_no_plain_data_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Unknown attack 'count'\. Did you mean 'counts'"):
        run("count")
    with pytest.raises(ConfigError, match="plain data"):
        run("counts", settings={"number": torch.ones(1)})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        attack_at("audit.misbehaving:missing")


def test_a_process_takes_one_view_after_the_other_and_after_a_death_there_is_a_new_one() -> None:
    """The same process, views of different length, and between them errors and an attack that does not apply.

    It may leave, or be stopped because it takes too long.
    """
    record = recorded_once(scheme="lossless")[1]
    processes = []
    with AttackProcess("moody", attacks=ATTACKS) as process:
        for victim, mood in ((0, "well"), (1, "raise"), (1, "well"), (2, "decline"), (2, "well")):
            seen = server_view(record, victim, round=1)
            raw = to_bytes(dataclasses.replace(seen, known={"more": torch.zeros(50_000 * victim)}))
            if mood == "raise":
                with pytest.raises(AttackError, match="'moody' failed: ValueError: not today"):
                    process.run(raw, settings={"mood": mood})
            elif mood == "decline":
                with pytest.raises(NotApplicableError, match=r"^no head noise$"):
                    process.run(raw, settings={"mood": mood})
            else:
                found = process.run(raw, settings={"mood": mood})
                assert (int(found["victim"]), int(found["length"])) == (victim, 50_000 * victim)
                processes.append(int(found["process"]))
        assert len(set(processes)) == 1
        before = processes[0]
        with pytest.raises(
            AttackError, match=r"'moody' ended without a result \(exit code 3\)\. It said: no more of this$"
        ):
            process.run(view(), settings={"mood": "leave"})
        after = int(process.run(view(), settings={"mood": "well"})["process"])
        with pytest.raises(AttackError, match=r"'moody' was not done after 0\.3 seconds and was stopped"):
            process.run(view(), settings={"mood": "hang"}, time_limit=0.3)
        assert not alive(after)
    assert before != after
    assert not alive(before)
    assert not alive(after)


@pytest.mark.slow
def test_a_process_that_is_killed_is_said_to_have_been() -> None:
    """As of every child of ours: cells of a comparison are killed in the default suite, too."""
    with pytest.raises(AttackError, match="'moody' was killed by signal 9"):
        run("moody", settings={"mood": "die"})


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_no_answer_is_not_taken_for_one() -> None:
    with pytest.raises(AttackError, match=r"'babbles' (sent what is no result|ended without a result)"):
        run("babbles")


@pytest.mark.slow
def test_whoever_listens_may_break_off_and_no_process_is_left() -> None:
    processes: list[int] = []

    def enough(fraction: float) -> None:
        assert process._child is not None
        processes.append(process._child.pid)
        raise KeyboardInterrupt

    process = AttackProcess("hangs", attacks=ATTACKS)
    with pytest.raises(KeyboardInterrupt):
        process.run(view(), on_progress=enough)
    assert not alive(processes[0])
    process.close()
