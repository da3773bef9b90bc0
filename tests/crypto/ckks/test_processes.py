"""Worker processes: the same results, nothing lost when one dies, none left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from fedveil.crypto import ciphertexts, ckks
from fedveil.errors import ConfigError, ProtocolError

LENGTH = 40 * 2048 + 5


def drawn(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-2.0, 2.0, LENGTH)


def started(key: ckks.SecretKey) -> int:
    """Work until a worker has started and taken part; its process id."""
    for _ in range(200):
        ckks.encrypt(drawn(), key.public)
        if ciphertexts._idle and ciphertexts._idle[-1].ready:
            return ciphertexts._idle[-1].pid
    pytest.fail("no worker became ready")


def gone(pid: int) -> bool:
    for _ in range(6000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # an orphan that nobody has collected yet
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("two")
def test_workers_read_what_this_process_wrote_and_the_other_way_round(
    key: ckks.SecretKey, capfd: pytest.CaptureFixture[str]
) -> None:
    started(key)
    values = drawn()
    shared = ckks.encrypt(values, key.public)
    read_by_both = ckks.decrypt(shared, key)
    ciphertexts.set_workers(1)
    assert ckks.decrypt(shared, key).tobytes() == read_by_both.tobytes()
    assert ckks.decrypt(ckks.encrypt(values, key.public), key).tobytes() == read_by_both.tobytes()
    assert np.abs(read_by_both - values).max() <= 1e-6
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("two")
def test_the_worker_does_part_of_the_work(key: ckks.SecretKey, monkeypatch: pytest.MonkeyPatch) -> None:
    started(key)
    given = []
    give = ciphertexts._Worker.give

    def counted(self, job, *rest):
        given.extend(job)
        give(self, job, *rest)

    monkeypatch.setattr(ciphertexts._Worker, "give", counted)
    sealed = ckks.encrypt(drawn(), key.public)
    encrypted = len(given)
    ckks.decrypt(sealed, key)
    assert 8 <= encrypted <= 38
    assert 8 <= len(given) - encrypted <= 38


@pytest.mark.usefixtures("two")
def test_more_keys_than_a_worker_keeps_all_work(key: ckks.SecretKey) -> None:
    started(key)
    values = drawn()
    for _ in range(ciphertexts._KEYS_KEPT // 2 + 1):
        other = ckks.generate(key.parameters)
        assert np.abs(ckks.decrypt(ckks.encrypt(values, other.public), other) - values).max() <= 1e-6
    assert np.abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6


@pytest.mark.usefixtures("two")
def test_a_worker_killed_between_tasks_is_replaced(key: ckks.SecretKey) -> None:
    pid = started(key)
    os.kill(pid, signal.SIGKILL)
    values = drawn()
    assert np.abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6
    assert started(key) != pid


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("always", [False, True])
def test_a_worker_killed_at_work_loses_nothing(
    key: ckks.SecretKey, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    started(key)
    killed = []
    give = ciphertexts._Worker.give

    def deadly(self, *rest):
        give(self, *rest)
        if always or not killed:
            os.kill(self.pid, signal.SIGKILL)
            killed.append(self.pid)

    monkeypatch.setattr(ciphertexts._Worker, "give", deadly)
    values = drawn()
    sealed = ckks.encrypt(values, key.public)
    assert np.abs(ckks.decrypt(sealed, key) - values).max() <= 1e-6
    assert killed


@pytest.mark.usefixtures("two")
def test_a_ciphertext_that_a_worker_refuses_is_refused_and_the_worker_goes_on(key: ckks.SecretKey) -> None:
    pid = started(key)
    sealed = ckks.encrypt(drawn(), key.public)
    summary, parts = ckks.unpack(sealed, key_id=key.key_id, length=None, slots=2048)
    # The first ten go to the worker, which waits; this process begins behind them.
    damaged = [*parts[:5], bytes(parts[5][:9000]) + bytes(90) + bytes(parts[5][9090:]), *parts[6:]]
    with pytest.raises(ProtocolError, match="was refused"):
        ckks.decrypt(ckks.pack(summary, damaged), key)
    assert ciphertexts._idle[-1].pid == pid
    assert np.abs(ckks.decrypt(sealed, key) - drawn()).max() <= 1e-6


@pytest.mark.usefixtures("two")
def test_an_interrupt_leaves_no_answer_for_the_next_task(key: ckks.SecretKey, monkeypatch: pytest.MonkeyPatch) -> None:
    started(key)
    monkeypatch.setattr(ciphertexts._Team, "_hear", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        ckks.encrypt(drawn(), key.public)
    monkeypatch.undo()
    values = drawn(1)
    assert np.abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("two")
def test_without_processes_to_be_had_the_work_is_done_all_the_same(
    key: ckks.SecretKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    ciphertexts._dismiss()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    values = drawn()
    assert np.abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6
    monkeypatch.setattr(sys, "executable", "/bin/false")  # starts, and ends at once
    assert np.abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6


@pytest.mark.usefixtures("two")
def test_threads_may_encrypt_at_once(key: ckks.SecretKey) -> None:
    results: dict[int, np.ndarray] = {}

    def work(seed: int) -> None:
        results[seed] = ckks.decrypt(ckks.encrypt(drawn(seed), key.public), key)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.abs(results[seed] - drawn(seed)).max() <= 1e-6 for seed in range(3))
    assert len(ciphertexts._idle) <= 1


def test_fewer_workers_means_that_the_others_end(key: ckks.SecretKey) -> None:
    ciphertexts.set_workers(2)
    pid = started(key)
    ciphertexts.set_workers(1)
    assert not ciphertexts._idle
    assert gone(pid)
    ciphertexts.set_workers(None)


@pytest.mark.usefixtures("two")
def test_short_vectors_stay_in_this_process(key: ckks.SecretKey) -> None:
    ciphertexts._dismiss()
    ckks.encrypt(np.ones(2048 * (ciphertexts.FEWEST_CHUNKS - 1)), key.public)
    assert not ciphertexts._idle


def test_the_number_of_workers_is_set_by_call_by_variable_or_by_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ciphertexts.VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert ciphertexts.workers() == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert ciphertexts.workers() == 8
    monkeypatch.setenv(ciphertexts.VARIABLE, "12")
    assert ciphertexts.workers() == 12
    ciphertexts.set_workers(5)
    assert ciphertexts.workers() == 5
    ciphertexts.set_workers(None)
    assert ciphertexts.workers() == 12
    for wrong in ("0", "two", "-1", "1.5"):
        monkeypatch.setenv(ciphertexts.VARIABLE, wrong)
        with pytest.raises(ConfigError, match=f"FEDVEIL_WORKERS must be a whole number .* not '{wrong}'"):
            ciphertexts.workers()
    monkeypatch.delenv(ciphertexts.VARIABLE)
    with pytest.raises(ConfigError, match="At least one process"):
        ciphertexts.set_workers(0)


SCRIPT = """
import os, sys
import numpy as np, torch
from fedveil.crypto import ciphertexts, ckks

key = ckks.generate(ckks.choose(addends=10, largest=2.0))
values = np.linspace(-2.0, 2.0, 40 * 2048)
while not (ciphertexts._idle and ciphertexts._idle[-1].ready):
    sealed = ckks.encrypt(values, key.public)
assert abs(ckks.decrypt(sealed, key) - values).max() <= 1e-6
if os.fork() == 0:
    assert abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6
    os.write(1, b"child ")
    os._exit(0)  # as multiprocessing's children end; TenSEAL's contexts do not survive being freed in a copy
assert os.wait()[1] == 0
assert abs(ckks.decrypt(ckks.encrypt(values, key.public), key) - values).max() <= 1e-6
print("worker", ciphertexts._idle[-1].pid, flush=True)
{last}
"""


def script(tmp_path: Path, last: str) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(last=last))
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, ciphertexts.VARIABLE: "2"},
        cwd=tmp_path,
    )


def test_a_script_without_a_main_guard_runs_once_and_leaves_no_process(tmp_path: Path) -> None:
    with script(tmp_path, "pass") as running:
        out, err = running.communicate(timeout=600)
    words = out.split()
    assert (running.returncode, err, words[:-1]) == (0, "", ["child", "worker"])
    assert gone(int(words[-1]))


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with script(tmp_path, "import time; time.sleep(60)") as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline().split()[-1])
        assert Path(f"/proc/{pid}").exists()
        assert b"FVC" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        running.kill()
    assert gone(pid)
