"""The worker: one per home, one parcel after the other, unmoved by what else comes over its socket."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import desks
from desks import DESK, new_home, notes, until
from fedveil.errors import ConfigError
from fedveil.flower import worker
from fedveil.flower.worker_client import FrameKind, WorkerError, hand_over, ping, socket_address, stop
from fedveil.framing import LIMIT, receive, send

SECONDS = 300.0


@pytest.fixture(autouse=True)
def _desk_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(desks.__file__).parent))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield from desks.a_home(tmp_path)


def handed(home: Path, parcel: bytes, timeout: float = SECONDS) -> bytes:
    return hand_over(home, parcel, timeout=timeout, options=DESK)


def logged(home: Path) -> str:
    return (home / "worker.log").read_text()


def alive(home: Path) -> dict[str, object]:
    found = ping(home)
    assert found is not None
    return found


@contextlib.contextmanager
def connected(home: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SECONDS)
        sock.connect(str(socket_address(home)))
        yield sock


def started(home: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedveil.flower.worker", str(home), *DESK, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def changed(home: Path, change: str) -> subprocess.Popen[bytes]:
    """A worker in which a line of code has changed something, such as how long it waits."""
    script = f"import sys; from fedveil.flower import worker; {change}; worker.main(sys.argv[1:])"
    return subprocess.Popen([sys.executable, "-c", script, str(home), *DESK])


def test_parcels_are_answered_one_after_the_other_and_pings_at_once(home: Path) -> None:
    with ThreadPoolExecutor(4) as couriers:
        first = couriers.submit(handed, home, b"wait:first")
        until(lambda: notes(home) == ["begin wait first"])
        others = [couriers.submit(handed, home, b"echo:%d" % number) for number in range(3)]
        until(lambda: len(open_connections(home)) == 4)
        assert (alive(home)["busy"], alive(home)["handled"]) == (True, 0)
        (home / "go-first").touch()
        assert first.result() == b"waited for first"
        assert [one.result() for one in others] == [b"0", b"1", b"2"]
    assert (alive(home)["busy"], alive(home)["handled"]) == (False, 4)
    lines = [line.split(" ", 1) for line in notes(home)]
    assert [word for word, _ in lines] == ["begin", "end"] * 4
    assert [what for _, what in lines[::2]] == [what for _, what in lines[1::2]]


def open_connections(home: Path) -> list[str]:
    """The worker's ends of connections, by the kernel's list."""
    address = str(socket_address(home))
    lines = Path("/proc/net/unix").read_text().splitlines()
    # Flag 10000 is the listening one.
    return [line for line in lines if line.endswith(f" {address}") and line.split()[3] == "00000000"]


def test_a_courier_that_goes_away_does_not_end_the_work(home: Path) -> None:
    handed(home, b"echo:up")
    with connected(home) as courier:
        send(courier, FrameKind.PARCEL, b"wait:a")
        until(lambda: "begin wait a" in notes(home))
    with ThreadPoolExecutor(1) as couriers:
        again = couriers.submit(handed, home, b"wait:a")
        until(lambda: len(open_connections(home)) == 2)
        (home / "go-a").touch()
        assert again.result() == b"waited for a"
    assert notes(home)[2:] == ["begin wait a", "end wait a"] * 2
    # Another thread than the one that answered the second parcel writes it.
    until(lambda: "a courier went away" in logged(home))


def test_a_parcel_whose_courier_went_away_while_it_waited_is_left_undone(home: Path) -> None:
    with ThreadPoolExecutor(1) as couriers:
        first = couriers.submit(handed, home, b"wait:a")
        until(lambda: notes(home) == ["begin wait a"])
        with connected(home) as courier:
            send(courier, FrameKind.PARCEL, b"echo:never mind")
            # The ping is taken up after the parcel's connection was.
            alive(home)
        (home / "go-a").touch()
        first.result()
    until(lambda: "left undone" in logged(home))
    assert handed(home, b"echo:next") == b"next"
    assert notes(home) == ["begin wait a", "end wait a", "begin echo next", "end echo next"]


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "unknown-kind": struct.pack(">BI", 99, 0),
    "oversize": struct.pack(">BIQ", FrameKind.PARCEL, 1, LIMIT + 1),
    "two-parcels-in-one": struct.pack(">BIQQ", FrameKind.PARCEL, 2, 1, 1) + b"ab",
    "a-reply": struct.pack(">BIQ", FrameKind.REPLY, 1, 3) + b"abc",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_what_is_no_parcel_is_refused_and_the_worker_goes_on(home: Path, garbage: bytes) -> None:
    pid = handed(home, b"pid")
    with connected(home) as courier:
        courier.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert courier.recv(100) == struct.pack(">BI", FrameKind.FAILED, 0)
            assert courier.recv(100) == b""
    until(lambda: "refused: " in logged(home))
    assert handed(home, b"pid") == pid


def test_half_a_frame_and_an_empty_connection_do_no_harm(home: Path) -> None:
    pid = handed(home, b"pid")
    with connected(home) as courier:
        courier.sendall(struct.pack(">BIQ", FrameKind.PARCEL, 1, 100) + b"half")
    with connected(home):
        pass
    with connected(home), connected(home) as stalled:
        stalled.sendall(b"\x01\x00")
        assert handed(home, b"pid") == pid


def test_a_big_parcel_and_its_reply_pass_and_are_not_logged(home: Path) -> None:
    body = b"private-bytes-" * (64 * 2**20 // 14)
    reply = handed(home, b"digest:" + body)
    assert reply[:32] == hashlib.sha256(body).digest()
    assert reply[32:] == body
    with pytest.raises(WorkerError, match="failed"):
        handed(home, b"fail:private-bytes-")
    files = [one.read_bytes() for one in home.iterdir() if one.name.startswith("worker.") and one.is_file()]
    assert len(files) == 2
    assert not any(b"private-bytes" in one for one in files)
    assert f"a parcel of {len(body) + 7} bytes" in logged(home)


def test_all_that_the_worker_leaves_is_for_its_owner_only(home: Path) -> None:
    handed(home, b"pid")
    modes = {name: stat.S_IMODE((home / name).stat().st_mode) for name in ("worker.sock", "worker.lock", "worker.log")}
    assert modes == {"worker.sock": 0o600, "worker.lock": 0o600, "worker.log": 0o600}


def test_a_courier_of_another_user_gets_a_socket_of_its_group(tmp_path: Path) -> None:
    with worker.listen(tmp_path / "x.sock", os.geteuid()):
        assert stat.S_IMODE((tmp_path / "x.sock").stat().st_mode) == 0o660
    with pytest.raises(ConfigError, match="nobody by this name"):
        worker.listen(tmp_path / "x.sock", "nobody by this name")


def test_a_second_worker_leaves_quietly(home: Path) -> None:
    pid = handed(home, b"pid")
    with started(home) as second:
        assert second.communicate(timeout=SECONDS) == ("", "")
    assert second.returncode == 0
    assert handed(home, b"pid") == pid
    assert (home / "worker.lock").read_text().strip().encode() == pid


def test_a_dead_workers_lock_and_socket_are_taken_over(home: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander, socket.socket(socket.AF_UNIX) as dead:
        try:
            # The number in a stale lock may be anybody's by now.
            (home / "worker.lock").write_text(f"{bystander.pid}\n")
            dead.bind(str(socket_address(home)))
            dead.close()
            assert handed(home, b"echo:mine now") == b"mine now"
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path) -> None:
    home = new_home(tmp_path)
    (home / "worker.sock").write_text("precious")
    with started(home) as failing:
        _, said = failing.communicate(timeout=SECONDS)
    assert failing.returncode == 1
    assert "move it away" in said
    assert (home / "worker.sock").read_text() == "precious"


def test_a_worker_that_is_told_to_end_hands_its_waiting_parcels_to_the_next(home: Path) -> None:
    with ThreadPoolExecutor(2) as couriers:
        first = couriers.submit(handed, home, b"wait:a")
        until(lambda: notes(home) == ["begin wait a"])
        pid = alive(home)["pid"]
        waiting = couriers.submit(handed, home, b"pid")
        until(lambda: len(open_connections(home)) == 2)
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGTERM)
        until(lambda: "asked to stop" in logged(home))
        (home / "go-a").touch()
        assert first.result() == b"waited for a"
        assert waiting.result() not in (b"", str(pid).encode())


def test_a_parcel_that_takes_too_long_is_given_up_when_the_worker_must_end(home: Path) -> None:
    with changed(home, "worker.GRACE = 0.2") as ending:
        until(lambda: ping(home) is not None)
        with connected(home) as courier:
            send(courier, FrameKind.PARCEL, b"wait:for ever")
            until(lambda: notes(home) == ["begin wait for ever"])
            ending.send_signal(signal.SIGTERM)
            assert ending.wait(SECONDS) == 0
            assert courier.recv(100) == b""
    assert "is given up" in logged(home)


def test_a_worker_ends_when_nothing_comes_for_long(tmp_path: Path) -> None:
    for home in desks.a_home(tmp_path, f"idle_hours = {0.5 / 3600}"):
        with started(home) as idle:
            assert idle.wait(SECONDS) == 0
        assert "nothing came for long" in logged(home)
        assert not socket_address(home).exists()


def test_a_worker_at_work_is_not_idle(tmp_path: Path) -> None:
    for home in desks.a_home(tmp_path, f"idle_hours = {0.5 / 3600}"):
        with ThreadPoolExecutor(1) as couriers, changed(home, "worker._WATCH = 0.1") as busy:
            until(lambda: ping(home) is not None)
            reply = couriers.submit(handed, home, b"wait:a")
            with pytest.raises(subprocess.TimeoutExpired):
                busy.wait(1.5)
            (home / "go-a").touch()
            assert reply.result() == b"waited for a"
            assert busy.wait(SECONDS) == 0


def test_a_worker_whose_socket_was_removed_makes_way_for_another(home: Path) -> None:
    with changed(home, "worker._WATCH = 0.1") as first:
        until(lambda: ping(home) is not None)
        socket_address(home).unlink()
        assert int(handed(home, b"pid")) != first.pid
    assert "the socket's file is gone" in logged(home)


def test_a_child_that_outlives_the_worker_does_not_keep_its_lock(home: Path) -> None:
    handed(home, b"fork")
    os.kill(int(handed(home, b"pid")), signal.SIGKILL)
    try:
        assert handed(home, b"echo:free") == b"free"
    finally:
        (home / "go-child").touch()


def test_a_child_that_begins_after_the_worker_has_died_does_not_keep_its_lock(home: Path) -> None:
    """A starved machine may run the child for the first time when its parent is gone."""
    late = "import os, time; me = os.getpid(); orphaned = lambda: os.getppid() != me; "
    late += "os.register_at_fork(after_in_child=lambda: all(time.sleep(0.01) is None for _ in iter(orphaned, True)))"
    with changed(home, late) as first:
        until(lambda: ping(home) is not None)
        handed(home, b"fork")
        first.kill()
        first.wait()
        try:
            assert handed(home, b"echo:free", timeout=60.0) == b"free"
        finally:
            (home / "go-child").touch()


def test_only_the_workers_own_user_may_stop_it(home: Path) -> None:
    """A courier's user may hand parcels over; ending the worker is not its business."""
    handed(home, b"pid")
    assert stop(home)
    new_home(home, f"courier_user = {os.geteuid()}")
    with changed(home, "worker.accepts = lambda uid, named=None: named is not None") as serving:
        try:
            until(lambda: ping(home) is not None)
            with connected(home) as courier:
                send(courier, FrameKind.STOP)
                assert receive(courier, FrameKind, deadline=time.monotonic() + SECONDS)[0] is FrameKind.FAILED
            assert handed(home, b"echo:still here") == b"still here"
        finally:
            serving.terminate()


def test_the_log_starts_a_new_file_and_the_processes_output_goes_along(tmp_path: Path) -> None:
    script = "\n".join(
        [
            "import os, sys, logging",
            "from pathlib import Path",
            "from fedveil.flower import worker",
            "worker._log_to(Path(sys.argv[1]))",
            "for _ in range(45): worker.log.info('x' * 100_000)",
            "os.write(2, b'the last words')",
        ]
    )
    path = tmp_path / "worker.log"
    with path.open("ab") as output:
        subprocess.run([sys.executable, "-c", script, str(path)], stderr=output, check=True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["worker.log", "worker.log.1", "worker.log.2"]
    assert all(one.stat().st_size <= 1_000_100 for one in tmp_path.iterdir())
    assert path.read_bytes().endswith(b"the last words")


def test_what_a_parcel_needs_is_loaded_before_one_comes(home: Path) -> None:
    process = started(home)
    try:
        until(lambda: (home / "worker.log").exists() and "the message handler is ready" in logged(home))
        assert alive(home)["handled"] == 0
    finally:
        stop(home)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
