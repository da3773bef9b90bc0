"""The courier: a worker is there when it is needed, whatever becomes of it, and four words are all that leaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import desks
from desks import DESK, new_home, notes, until
from fedveil.errors import ConfigError
from fedveil.flower import worker_client as courier
from fedveil.flower.worker_client import WorkerError, accepts, hand_over, ping, socket_address, stop

SECONDS = 300.0


@pytest.fixture(autouse=True)
def _desk_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(desks.__file__).parent))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield from desks.a_home(tmp_path)


def handed(home: Path, parcel: bytes, timeout: float = SECONDS) -> bytes:
    return hand_over(home, parcel, timeout=timeout, options=DESK)


def code_of(home: Path, parcel: bytes, timeout: float = SECONDS) -> str:
    with pytest.raises(WorkerError) as caught:
        handed(home, parcel, timeout)
    assert str(caught.value) == caught.value.code
    return caught.value.code


def worker_pid(home: Path) -> int:
    found = ping(home)
    assert found is not None
    return int(found["pid"])


def test_the_thin_side_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "scipy", "flwr", "sklearn", "cryptography"]
    script = (
        f"import sys, fedveil.flower.worker_client; print([one for one in {heavy!r} if one in sys.modules], end='')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]"


def test_a_worker_is_started_on_demand_and_kept(home: Path) -> None:
    assert ping(home) is None
    first, second = handed(home, b"pid"), handed(home, b"pid")
    assert first == second != str(os.getpid()).encode()
    assert ping(home) == {"pid": int(first), "since": pytest.approx(os.stat(home / "worker.lock").st_mtime, abs=5)} | {
        "handled": 2,
        "busy": False,
    }


def test_a_worker_starts_apart_from_who_called_for_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLWR_HOME", "FLWR_RUNTIME_API_KEY", "flwr_odd", "SOME_TOKEN", "TOKENS"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("INNOCENT", "a1" * 128)
    monkeypatch.setenv("KEPT", "yes")
    found = json.loads(handed(home, b"surroundings"))
    inside = found["environment"]
    assert inside["KEPT"] == "yes"
    assert {name for name in inside if "flwr" in name.lower() or "token" in name.lower()} == set()
    assert "INNOCENT" not in inside
    assert (found["folder"], found["session"], found["umask"]) == (str(home.resolve()), True, 0o077)
    assert (found["input"], found["output"]) == ("/dev/null", str((home / "worker.log").resolve()))


def test_a_file_of_the_home_takes_no_modules_place(home: Path) -> None:
    (home / "hashlib.py").write_text("raise RuntimeError('the wrong module')")
    assert handed(home, b"echo:fine") == b"fine"


def test_two_couriers_at_once_start_one_worker(home: Path) -> None:
    ready = threading.Barrier(4)

    def one(_: int) -> bytes:
        ready.wait()
        return handed(home, b"pid")

    with ThreadPoolExecutor(4) as couriers:
        assert len(set(couriers.map(one, range(4)))) == 1
    assert (home / "worker.log").read_text().count("listens") == 1


def test_a_worker_killed_at_work_is_started_again_with_the_same_parcel(home: Path) -> None:
    with ThreadPoolExecutor(1) as couriers:
        reply = couriers.submit(handed, home, b"wait:a")
        until(lambda: notes(home) == ["begin wait a"])
        killed = worker_pid(home)
        os.kill(killed, signal.SIGKILL)
        until(lambda: notes(home) == ["begin wait a"] * 2)
        (home / "go-a").touch()
        assert reply.result() == b"waited for a"
    assert worker_pid(home) != killed


def test_a_parcel_over_which_two_workers_die_is_lost(home: Path) -> None:
    assert code_of(home, b"die") == "lost"
    assert notes(home) == ["begin die "] * 2
    assert handed(home, b"echo:well again") == b"well again"


def test_a_frozen_worker_is_silent_and_goes_on_when_it_thaws(home: Path) -> None:
    handed(home, b"echo:up")
    pid = worker_pid(home)
    os.kill(pid, signal.SIGSTOP)
    assert code_of(home, b"echo:anybody there?", timeout=0.5) == "silent"
    with pytest.raises(WorkerError, match=r"\Asilent\Z"):
        ping(home, timeout=0.2)
    os.kill(pid, signal.SIGCONT)
    assert handed(home, b"echo:back") == b"back"
    assert worker_pid(home) == pid


def test_what_the_desk_says_when_it_fails_stays_on_the_machine(home: Path) -> None:
    assert code_of(home, b"fail") == "failed"
    assert code_of(home, b"quit") == "failed"
    assert "RuntimeError: the desk fell over" in (home / "worker.log").read_text()
    assert handed(home, b"echo:on it goes") == b"on it goes"


def test_a_home_that_cannot_be_served_is_unstartable(tmp_path: Path) -> None:
    assert code_of(tmp_path / "nowhere", b"pid") == "unstartable"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert code_of(empty, b"pid") == "unstartable"
    assert code_of(new_home(tmp_path / "bad", "client = ="), b"pid") == "unstartable"
    assert code_of(new_home(tmp_path / "nobody", "worker_user = 'no such user'"), b"pid") == "unstartable"


def test_a_worker_that_cannot_start_says_why_in_its_log(tmp_path: Path) -> None:
    home = new_home(tmp_path, "idle_hours = 'long'")
    assert code_of(home, b"pid") == "unstartable"
    assert "The worker cannot start: could not convert" in (home / "worker.log").read_text()


def test_another_users_worker_is_waited_for_but_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(courier, "_OTHERS_START", 0.3)
    home = new_home(tmp_path, f"worker_user = {os.geteuid() + 1}")
    assert code_of(home, b"pid") == "unstartable"
    assert not (home / "worker.log").exists()


def test_only_this_user_root_and_the_named_one_are_spoken_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert [accepts(uid) for uid in (1000, 0, 1001)] == [True, True, False]
    assert [accepts(uid, 1001) for uid in (1000, 0, 1001, 1002)] == [True, True, True, False]
    assert accepts(0, "root")
    with pytest.raises(ConfigError, match="no such user"):
        accepts(1001, "no such user")


def test_nothing_is_handed_to_a_listener_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = new_home(tmp_path)
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(socket_address(home)))
        theirs.listen()
        monkeypatch.setattr(courier, "accepts", lambda uid, named=None: False)
        assert code_of(home, b"secret", timeout=10) == "unstartable"
        heard, _ = theirs.accept()
        with heard:
            assert heard.recv(100) == b""


def test_the_socket_lies_in_the_home_unless_named_elsewhere(tmp_path: Path) -> None:
    assert socket_address(new_home(tmp_path / "a")) == tmp_path.resolve() / "a" / "worker.sock"
    assert socket_address(new_home(tmp_path / "b", "socket = '/run/x.sock'")) == Path("/run/x.sock")
    assert socket_address(new_home(tmp_path / "c", "socket = 'own.sock'")) == tmp_path.resolve() / "c" / "own.sock"
    with pytest.raises(ConfigError, match="longer path"):
        socket_address(new_home(tmp_path / "d", f"socket = '/run/{'x' * 110}'"))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for sockets; pytest's own may be too long."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


def test_a_home_with_a_long_path_is_served_from_a_folder_of_this_users_own(tmp_path: Path, runtime: Path) -> None:
    for home in desks.a_home(tmp_path / ("long" * 30)):
        address = socket_address(home)
        assert handed(home, b"echo:from afar") == b"from afar"
        assert address.parent == runtime / f"fedveil-{os.geteuid()}"
        assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(address.stat().st_mode) == 0o600
        assert address != socket_address(new_home(tmp_path / ("else" * 30)))


def test_a_folder_for_sockets_that_others_can_enter_is_refused(tmp_path: Path, runtime: Path) -> None:
    home = new_home(tmp_path / ("long" * 30))
    folder = runtime / f"fedveil-{os.geteuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    assert code_of(home, b"pid") == "unstartable"
    folder.rmdir()
    (runtime / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(runtime / "elsewhere")
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        socket_address(home)


def test_a_folder_for_sockets_of_another_user_is_refused(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    courier.private_folder(runtime / "sockets")
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(ConfigError, match="not a folder of this user's alone"):
        courier.private_folder(runtime / "sockets")


def test_two_users_cannot_share_a_socket_hidden_from_one_of_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give another `socket`"):
        socket_address(new_home(tmp_path / ("long" * 30), "courier_user = 'root'"))


def test_stop_ends_the_worker_after_the_parcel_in_work(home: Path) -> None:
    assert stop(home) is False
    with ThreadPoolExecutor(2) as threads:
        reply = threads.submit(handed, home, b"wait:a")
        until(lambda: notes(home) == ["begin wait a"])
        stopped = threads.submit(stop, home)
        until(lambda: "asked to stop" in (home / "worker.log").read_text())
        (home / "go-a").touch()
        assert (reply.result(), stopped.result()) == (b"waited for a", True)
    assert not socket_address(home).exists()
    assert ping(home) is None
    assert stop(home) is False
    assert handed(home, b"echo:anew") == b"anew"


def test_stop_kills_a_worker_that_does_not_listen(home: Path) -> None:
    pid = int(handed(home, b"pid"))
    os.kill(pid, signal.SIGSTOP)
    assert stop(home, patience=0.2) is True
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_stop_reaches_a_worker_whose_settings_were_spoilt_meanwhile(home: Path) -> None:
    handed(home, b"pid")
    (home / "client.toml").write_text("client = =")
    assert stop(home) is True
    assert "asked to stop" in (home / "worker.log").read_text()


def test_stop_spares_a_process_that_only_has_the_workers_number(home: Path) -> None:
    handed(home, b"pid")
    pid = worker_pid(home)
    os.kill(pid, signal.SIGSTOP)
    lock = home / "worker.lock"
    right = lock.read_text()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        try:
            lock.write_text(f"{bystander.pid}\n")
            with pytest.raises(ConfigError, match="not this folder's worker"):
                stop(home, patience=0.2)
            assert bystander.poll() is None
        finally:
            lock.write_text(right)
            os.kill(pid, signal.SIGCONT)
            bystander.kill()
