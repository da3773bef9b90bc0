"""One folder a site."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedveil.data import client_names, load, owners_of, partition
from fedveil.errors import ConfigError, DataError

WARDS = {"north": 30, "south": 20, "east": 10}


def tables(folder: Path, *, header: str = "patient,a,y") -> Path:
    for name, count in WARDS.items():
        (folder / name).mkdir(parents=True)
        rows = "".join(f"p{row // 2},{row}.5,{row % 2}\n" for row in range(count))
        (folder / name / "visits.csv").write_text(f"{header}\n{rows}")
    return folder


def archives(folder: Path, *, side: int = 4) -> Path:
    for name, count in WARDS.items():
        (folder / name).mkdir(parents=True)
        classes = ("mel", "nv") if name == "north" else ("bcc", "nv")
        x = np.arange(count * side * side, dtype=np.uint8).reshape(count, side, side)
        labels = {"y": np.arange(count) % 2, "classes": np.array(classes)}
        np.savez(folder / name / "scans.npz", x=x, groups=np.arange(count) // 2, **labels)
    return folder


def pictures(folder: Path) -> Path:
    image = pytest.importorskip("PIL.Image")
    for name, count in WARDS.items():
        for number in range(count):
            place = folder / name / ("mel", "nv")[number % 2] / f"{number}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            image.new("L", (4, 4), number).save(place)
    return folder


@pytest.mark.parametrize("make", [tables, archives, pictures])
def test_each_site_is_a_client_and_holds_out_its_own(tmp_path: Path, make: object) -> None:
    folder = make(tmp_path / "sites")  # type: ignore[operator]
    split = load(folder, target="y" if make is tables else None, validation_fraction=0.2)
    train = split.train
    assert train.site_names == ("east", "north", "south")
    assert owners_of(train, "site") == 3
    parts = partition(train, clients=3, how="site")
    assert client_names(train, parts, "site") == train.site_names
    for name, count in WARDS.items():
        site = train.site_names.index(name)
        held = [int((part.sites == site).sum()) for part in split.parts.values()]
        assert sum(held) == count
        assert min(held) >= 0.1 * count


def test_patient_numbers_are_each_sites_own(tmp_path: Path) -> None:
    split = load(tables(tmp_path / "sites"), target="y", group="patient")
    assert {"east/p0", "north/p0", "south/p0"} <= {*split.train.group_names}
    assert split.train.groups is not None
    assert split.test.groups is not None
    assert not {*split.train.groups.tolist()} & {*split.test.groups.tolist()}


def test_classes_are_those_of_all_sites_together(tmp_path: Path) -> None:
    split = load(archives(tmp_path / "sites"), split="stratified")
    assert split.train.labels == ("bcc", "mel", "nv")
    north = split.train.sites == split.train.site_names.index("north")
    assert {*split.train.y[north].tolist()} == {1, 2}
    assert {*split.train.y[~north].tolist()} == {0, 2}


def test_sites_with_parts_of_their_own_keep_them(tmp_path: Path) -> None:
    for name in WARDS:
        for part, count in (("train", 6), ("test", 3)):
            place = tmp_path / name / f"{part}.csv"
            place.parent.mkdir(exist_ok=True)
            place.write_text("a,y\n" + "".join(f"{row}.5,{row % 2}\n" for row in range(count)))
    split = load(tmp_path, target="y")
    assert {name: len(part) for name, part in split.parts.items()} == {"train": 18, "test": 9}
    (tmp_path / "east" / "test.csv").unlink()
    with pytest.raises(DataError, match=r"some sites have a test part .*\(east\)"):
        load(tmp_path, target="y")


def test_sites_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    folder = tables(tmp_path / "sites")
    with pytest.raises(ConfigError, match="one folder a site"):
        load(folder, target="y", site="patient")
    (folder / "east" / "visits.csv").write_text("patient,b,y\np,1,0\np,2,1\n")
    with pytest.raises(DataError, match=r"south.*column\(s\) b|column\(s\) b .*missing"):
        load(folder, target="y")
    (folder / "east" / "visits.csv").unlink()
    np.savez(folder / "east" / "scans.npz", x=np.ones((3, 2)), y=np.arange(3) % 2)
    with pytest.raises(DataError, match="stored in different ways"):
        load(folder, target="y")


def test_pictures_of_another_size_name_the_site(tmp_path: Path) -> None:
    folder = archives(tmp_path / "sites")
    np.savez(folder / "south" / "scans.npz", x=np.ones((3, 5, 5), np.uint8), y=np.arange(3) % 2, classes=["bcc", "nv"])
    with pytest.raises(DataError, match=r"south.*\(5, 5\)"):
        load(folder)


def test_a_way_of_dealing_without_owners_needs_a_number_of_clients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Say how many clients"):
        owners_of(load(tables(tmp_path / "sites"), target="y").train, "iid")
