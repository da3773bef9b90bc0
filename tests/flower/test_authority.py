"""A key authority on Flower: a node of its own, with a home, a desk and a memory, and neither data nor a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedveil.errors import Code, ConfigError
from fedveil.flower.client_app import HEADER, parts_of
from fedveil.flower.cluster import Cluster, ClusterMemory, Places
from fedveil.flower.home import Home, create_home
from fedveil.flower.message_handler import MessageHandler
from fedveil.flower.messages import RollCall
from fedveil.flower.server_app import serve
from fedveil.flower.worker_client import LOCK
from fedveil.framing import pack
from fedveil.protocol.codec import decode, encode
from fedveil.runs.terms import create_identities
from fedveil.uplink.functional import FunctionKeys, KeyFor, SetupRound
from flower.in_process import InProcessGrid, context_of, make_homes
from flower.test_in_process import COMMON
from flower.test_message_handler import a_setup, code, parcel
from flower_runs import Run, homes_of, made_app

SETTINGS: dict[str, Any] = {
    **COMMON,
    "scheme": "hybridalpha",
    "model_options": {"depth": 2, "width": 2},
    "deadline": 3.0,
}


class Restarting(InProcessGrid):
    """Every message to the authority is answered by a new desk: what it knows comes from its home's files."""

    def _deliver(self, home: Path, parcel: bytes, *, timeout: float) -> bytes:
        if home == self.homes[103]:
            self.desks.pop(home, None)
        return super()._deliver(home, parcel, timeout=timeout)


def pinned_homes(folder: Path) -> tuple[list[Path], Path]:
    """Three clients and an authority that sign, and whom a roster pins."""
    roster, homes = create_identities(folder / "keys", clients=4), make_homes(folder / "homes", 3, authority=True)
    for number, home in enumerate(homes):
        with (home / "client.toml").open("a") as file:
            file.write(f'roster = "{roster}"\nidentity = "{folder}/keys/client-{number}.key"\n')
    return homes, roster


def test_an_authority_that_is_started_anew_for_every_message_gives_one_key_a_round(tmp_path: Path) -> None:
    homes, roster = pinned_homes(tmp_path)
    grid = Restarting(homes)
    serve(grid, context_of(out=str(tmp_path / "run"), roster=str(roster), secrets="os", **SETTINGS))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["rounds"], summary.get("failed_rounds", 0)) == (2, 0)
    assumed = " ".join(summary["ledger"]["lines"][0]["assumptions"])
    assert "every key is signed by the one that the roster pins" in assumed
    # What the authority was asked, all of it: the same key may be had again, another one may not.
    asked = [(message, decode(parts_of(message.content)["common"])) for message in grid.sent]
    (message, last) = [(one, said) for one, said in asked if isinstance(said, KeyFor)][-1]
    told = {"setup": message.content.config_records[HEADER]["setup"], "message": "again"}
    others = [replace(last, weights=torch.tensor([0, 1, 1])), replace(last, weights=2 * last.weights)]
    for number, (request, expected) in enumerate([(last, ""), *((one, Code.WITHHELD) for one in others)]):
        asking = pack({**told, "message": f"again {number}"}, {"common": encode(request)})
        assert code(MessageHandler(homes[3]).handle(asking)) == expected
    to_authority = {type(said) for one, said in asked if one.metadata.dst_node_id == 103}
    assert to_authority == {RollCall, SetupRound, KeyFor}
    answered = MessageHandler(homes[3]).handle(pack(told, {"common": encode(last)}))
    assert not code(answered)
    assert FunctionKeys.__name__.encode() in answered


def test_a_run_does_not_begin_without_its_authority(tmp_path: Path) -> None:
    grid = InProcessGrid(make_homes(tmp_path / "homes", 3))
    settings = {**SETTINGS, "deadline": 0.3}
    with pytest.raises(ConfigError, match=r"needs a key authority.*--number 3 --authority"):
        serve(grid, context_of(out=str(tmp_path / "run"), **settings))


def test_an_authority_takes_part_in_runs_that_have_one_and_with_as_many_clients_as_it_is_for(tmp_path: Path) -> None:
    create_home(tmp_path / "home", client=3, authority=True, simulation=True)
    home = Home.read(tmp_path / "home")
    assert home.authority
    assert any("key authority" in term.accepted for term in home.terms())
    for scheme, clients, expected in (
        ("hybridalpha", 3, ""),
        ("hybridalpha", 4, Code.REQUIRED),
        ("veil-secagg", 3, Code.REQUIRED),
    ):
        setup = replace(a_setup(scheme=scheme, clients=clients), lineage=f"{clients}{len(scheme):x}" * 16)
        assert code(MessageHandler(tmp_path / "home").handle(parcel(setup, RollCall("n")))) == expected, (
            scheme,
            clients,
        )


def test_a_client_is_no_authority_and_refuses_to_be_asked_like_one(tmp_path: Path) -> None:
    (home,) = make_homes(tmp_path, 1)
    setup = a_setup(scheme="hybridalpha")
    asked = KeyFor(0, 0, torch.ones(3, dtype=torch.int64), 10)
    assert code(MessageHandler(home).handle(parcel(setup, asked))) == Code.PROTOCOL


def test_a_clusters_last_node_may_be_the_authoritys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(tmp_path)
    monkeypatch.setattr(Places, "answers", lambda self, cluster: True)
    places.remember(ClusterMemory(port=1, nodes=4, tls=False, authority=True))
    places.require_up(clients=3)
    with pytest.raises(ConfigError, match="has 3 nodes"):
        places.require_up(clients=4)


@pytest.mark.slow
def test_on_real_nodes_the_authority_is_a_process_of_its_own(tmp_path: Path) -> None:
    settings = {"scheme": "hybridalpha", "secrets": "os", "model_options": {"depth": 2, "width": 2}}
    with Cluster(tmp_path / "cluster", nodes=3, authority=True) as cluster:
        homes = homes_of(cluster)
        assert [Home.read(home).authority for home in homes] == [False, False, False, True]
        with Run(cluster, made_app(tmp_path / "app", **settings), tmp_path / "run") as run:
            summary = run.summary()
        pids = {(home / LOCK).read_text().strip() for home in homes}
    assert len(pids) == 4
    assert (summary["rounds"], summary["clients"], summary.get("failed_rounds", 0)) == (2, 3, 0)
    assert not list((homes[3] / "state").glob("*.start.sealed"))
    assert len(list((homes[3] / "state").glob("*.run.sealed"))) == 1
