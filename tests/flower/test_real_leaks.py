"""Nothing of a client's data, keys or error messages leaves it: looked for in every file and byte that others get."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from federation import FEW_GROUPS, HEADED
from fedveil import schemes
from fedveil.crypto.keys import Roster
from fedveil.flower import worker_client as courier
from fedveil.flower.cluster import Cluster
from fedveil.flower.home import create_home
from fedveil.flower.messages import TEXTS
from fedveil.flower.server_app import serve
from fedveil.processes import descendants
from fedveil.runs.terms import create_identities
from flower.in_process import InProcessGrid, context_of, make_homes
from flower_proxy import UP, Proxy, proxied
from flower_runs import COMMON, Run, events, made_app, ordered_worker, rows

PLANTED = "PLANTED-4711"
VALUE = float(np.float32(0.7310586))
_OPTIONS: dict[str, dict[str, Any]] = {
    "hybridalpha": {"model_options": {"depth": 2, "width": 2}},
    "paraaegis": {"cipher": "pads", "share": 0.1, "clip": 0.01},
    "ckks-fedavg": {"cipher": "pads"},
    "serial": {"cipher": "pads", "clip": 0.01},
    "dp-fedavg": {"clip": 0.01},
    **{scheme: {"head_groups": FEW_GROUPS} for scheme in HEADED},
}

_FACTS = 'FACTS = dict(input_shape=(1, 8, 8), outputs=10, task="classification")\n'
_LOADER = f"""
from pathlib import Path

import torch

{_FACTS}

def client(number):
    x = torch.frombuffer(bytearray(Path(__file__).with_name("samples").read_bytes()), dtype=torch.float32)
    x = x.reshape(-1, 1, 8, 8)
    return x, torch.arange(len(x)) % 10
"""
_SPOILT = f"""
honest = client


def client(number):
    print("{PLANTED}")
    x, y = honest(number)
"""
_TROUBLE = {
    "a file that cannot be imported": f'raise ValueError("{PLANTED}")\n',
    "a loader that fails": f'{_FACTS}\n\ndef client(number):\n    raise ValueError("{PLANTED}")\n',
    "no pair": f'{_FACTS}\n\ndef client(number):\n    print("{PLANTED}")\n    return "{PLANTED}"\n',
    "no numbers": f'{_LOADER}{_SPOILT}    return x * float("nan"), y\n',
    "classes that do not exist": f"{_LOADER}{_SPOILT}    return x, y + 4711\n",
}


def write_home(home: Path, keys: Path, client: int) -> None:
    """A client with its own samples and key; every sample of client 1 is the planted value throughout."""
    home.mkdir(parents=True)
    samples = np.random.default_rng(client).random((40, 64), dtype=np.float32)
    (home / "samples").write_bytes((np.full_like(samples, VALUE) if client == 1 else samples).tobytes())
    (home / "data.py").write_text(_LOADER)
    for name in ("roster.toml", f"client-{client}.key"):
        (home / name).write_bytes((keys / name).read_bytes())
    create_home(
        home,
        client=client,
        data=home / "data.py",
        roster=home / "roster.toml",
        identity=home / f"client-{client}.key",
        require={"threshold": {"min": 0.5}},
    )


def needles(home: Path) -> dict[str, bytes]:
    """What must not be found anywhere else, as text and as bytes."""
    key = (home / "client-1.key").read_text().strip()
    found = {"message": PLANTED.encode(), "value as text": f"{VALUE:.7f}".encode()}
    found |= {f"values as {kind}": struct.pack(kind, *[VALUE] * 4) for kind in ("<4f", ">4f", "<4d", ">4d")}
    found |= {"signing key as text": key.encode(), "signing key": bytes.fromhex(key)}
    sealing = home / "state" / "state.key"
    return found | ({"sealing key": sealing.read_bytes()} if sealing.exists() else {})


def found_in(contents: Iterable[tuple[str, bytes]], wanted: Mapping[str, bytes]) -> set[tuple[str, str]]:
    """(what, where) of everything found."""
    return {(what, where) for where, content in contents for what, needle in wanted.items() if needle in content}


def files_in(folder: Path, *, but: Path | None = None) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and (but is None or not file.is_relative_to(but)):
            yield str(file.relative_to(folder)), file.read_bytes()


def elsewhere(cluster: Cluster, proxy: Proxy, run: Run) -> dict[str, bytes]:
    """All that others have got: logs, the SuperLink's database, Flower's folders, the run's, and the bytes sent."""
    contents = dict(files_in(cluster.places.folder, but=cluster.places.folder / "homes"))
    contents |= {f"run/{name}": content for name, content in files_in(run.out)}
    return contents | {"events": str(run.heard).encode(), "sent": bytes(proxy.heard[UP])}


@pytest.fixture(scope="module")
def wire(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Proxy]]:
    folder = tmp_path_factory.mktemp("leaks")
    create_identities(folder / "keys", clients=4)
    for client in range(4):
        write_home(folder / "cluster" / "homes" / f"client-{client}", folder / "keys", client)
    with proxied(client=1) as proxy, Cluster(folder / "cluster", nodes=4, shared=True) as cluster:
        yield cluster, proxy
    assert descendants(os.getpid()) == []


@pytest.mark.slow
def test_no_data_and_no_key_of_a_client_is_anywhere_else_after_a_run(
    wire: tuple[Cluster, Proxy], tmp_path: Path
) -> None:
    cluster, proxy = wire
    home = cluster.places.home(1)
    with Run(
        cluster, made_app(tmp_path / "app", scheme="veil-secagg", clients=4, secrets="os"), tmp_path / "run"
    ) as run:
        run.summary()
    assert [row["clients"] for row in rows(run.out)] == [4, 4]
    wanted = needles(home)
    contents = elsewhere(cluster, proxy, run)
    assert found_in(contents.items(), wanted) == set()
    # The same search finds them where they belong, and finds what did travel.
    assert {what for what, _ in found_in(files_in(home), wanted)} == {
        *("values as <4f", "signing key as text", "sealing key")
    }
    public = Roster.parse((home / "roster.toml").read_text(), where="").keys[1]
    assert ("public key", "sent") in found_in(contents.items(), {"public key": public})
    assert ("scheme", "superlink.db") in found_in(contents.items(), {"scheme": b"veil-secagg"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "scheme"),
    [
        pytest.param(trouble, scheme, id=f"{trouble}, {scheme}")
        for trouble, scheme in zip(_TROUBLE, ["veil-secagg", "lossless", "nadp", "paraaegis", "veil-dp"], strict=True)
    ],
)
def test_the_text_of_an_error_with_a_clients_data_is_in_its_own_log_alone(
    wire: tuple[Cluster, Proxy], trouble: str, scheme: str, tmp_path: Path
) -> None:
    cluster, proxy = wire
    home = cluster.places.home(1)
    courier.stop(home)
    (home / courier.LOG).unlink(missing_ok=True)
    (home / "data.py").write_text(_TROUBLE[trouble])
    settings = {"scheme": scheme, "clients": 4, "rounds": 1, "secrets": "os", **_OPTIONS.get(scheme, {})}
    try:
        with Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run", deadline=45.0) as run:
            run.summary()
    finally:
        courier.stop(home)
        (home / "data.py").write_text(_LOADER)
    assert [row["clients"] for row in rows(run.out)] == [3]
    told = {one["text"].partition(": ")[2] for one in events(run.out, "turned away")}
    assert told == {TEXTS["data"]}
    assert PLANTED in (home / courier.LOG).read_text()
    assert found_in(elsewhere(cluster, proxy, run).items(), needles(home)) == set()


@pytest.mark.slow
def test_the_text_of_an_error_in_the_middle_of_the_work_is_in_the_clients_own_log_alone(
    wire: tuple[Cluster, Proxy], tmp_path: Path
) -> None:
    cluster, proxy = wire
    home = cluster.places.home(1)
    app = made_app(tmp_path / "app", scheme="veil-secagg", clients=4, threshold=0.5, secrets="os")
    said = f"fail: {PLANTED} {VALUE:.7f}"
    with ordered_worker(home, ("Train", 1, said)), Run(cluster, app, tmp_path / "run") as run:
        run.summary()
    assert [row["clients"] for row in rows(run.out)] == [3, 4]
    (told,) = events(run.out)
    assert (told["event"], told["client"], told["round"]) == ("refused", 1, 1)
    assert TEXTS["failed"] in told["text"]
    assert f"{PLANTED} {VALUE:.7f}" in (home / courier.LOG).read_text()
    assert found_in(elsewhere(cluster, proxy, run).items(), needles(home)) == set()


@pytest.mark.parametrize("scheme", sorted(one.name for one in schemes.schemes()))
def test_the_text_of_an_error_leaves_no_client_under_any_scheme(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process, with the real desks and messages."""
    homes = make_homes(tmp_path / "homes", 4, authority=scheme == "hybridalpha")
    (homes[1] / "data.py").write_text(_TROUBLE["a loader that fails"])
    (homes[1] / "client.toml").write_text('client = 1\nsimulation = true\ndata = "data.py"\n')
    answers: list[Any] = []
    grid = InProcessGrid(homes, twist=lambda reply: answers.append(reply) or [reply])
    small = {"model_options": {"depth": 2, "width": 4}, "clients": 4, "rounds": 1}
    settings = {**COMMON, **small, "scheme": scheme, **_OPTIONS.get(scheme, {})}
    serve(grid, context_of(out=str(tmp_path / "run"), deadline=0.3, **settings))
    assert [row["clients"] for row in rows(tmp_path / "run")] == [3]
    assert len(events(tmp_path / "run", "turned away")) >= 1
    said = capsys.readouterr()
    told = [("output", said.out.encode()), ("answers", repr([one.content for one in answers]).encode())]
    assert found_in([*told, *files_in(tmp_path / "run")], {"message": PLANTED.encode()}) == set()
