"""Which samples train, validate and test. Every draw is seeded, so that a passing test does not fail by chance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedveil.data import load
from fedveil.data.dataset import Options, Split
from fedveil.data.partition import PartRows, Samples, split_rows
from fedveil.errors import ConfigError, DataError


def drawn(y: Tensor, *, groups: Tensor | None = None, sites: Tensor | None = None, **options: object) -> PartRows:
    task = "regression" if y.is_floating_point() else "classification"
    return split_rows(Samples("toy", task, y, groups, sites), Options(**options))  # type: ignore[arg-type]


def shares(codes: Tensor, rows: Tensor) -> Tensor:
    """Of every class, site or group: how much of it is among these rows."""
    size = int(codes.max()) + 1
    return torch.bincount(codes[rows], minlength=size) / torch.bincount(codes, minlength=size)


@settings(max_examples=60, deadline=None)
@given(
    owners=st.lists(st.integers(0, 12), min_size=10, max_size=60).filter(lambda owners: len({*owners}) > 8),
    sited=st.booleans(),
    how=st.sampled_from(["auto", "random", "stratified"]),
    fraction=st.sampled_from([0.1, 0.3]),
    seed=st.integers(0, 5),
)
def test_no_two_parts_share_a_group_and_no_row_is_lost(
    owners: list[int], sited: bool, how: str, fraction: float, seed: int
) -> None:
    groups = torch.tensor(owners)
    sites = groups % 2 if sited else None
    y = torch.arange(len(owners)) % 3
    parts = drawn(y, groups=groups, sites=sites, split=how, test_fraction=fraction, validation_fraction=0.2, seed=seed)
    assert parts.validation is not None
    assert sorted([*parts.train.tolist(), *parts.validation.tolist(), *parts.test.tolist()]) == list(range(len(owners)))
    for one, other in itertools.combinations(parts, 2):
        assert one is not None
        assert other is not None
        assert len(one)
        assert len(other)
        assert not {*groups[one].tolist()} & {*groups[other].tolist()}


def test_rows_without_groups_are_drawn_as_they_always_were() -> None:
    """The split of every run before there were others, from numpy's generator itself."""
    parts = drawn(torch.arange(50) % 2, seed=7)
    order = np.random.default_rng([7, 1]).permutation(50)
    assert parts.test.tolist() == sorted(order[:10].tolist())
    assert parts.validation is None


@pytest.mark.parametrize("groups", [None, torch.arange(600) // 3])
@pytest.mark.parametrize("sites", [None, torch.arange(600) // 3 % 4])
def test_stratified_parts_have_every_class_and_site_in_its_share(groups: Tensor | None, sites: Tensor | None) -> None:
    y = (torch.arange(600) % 29 == 0).long() + (torch.arange(600) % 2)
    parts = drawn(y, groups=groups, sites=sites, split="stratified", validation_fraction=0.1, seed=3)
    assert parts.validation is not None
    for rows, share in ((parts.test, 0.2), (parts.validation, 0.1)):
        assert abs(len(rows) / 600 - share) < 0.01
        assert (shares(y, rows) - share).abs().max() < 0.08  # the smallest class has 10 samples
        if sites is not None:
            assert (shares(sites, rows) - share).abs().max() < 0.03


def test_stratified_regression_has_every_tenth_of_the_values_in_its_share() -> None:
    y = torch.randn(500, 1, generator=torch.Generator().manual_seed(1))
    parts = drawn(y, split="stratified", seed=1)
    tenth = y[:, 0].argsort().argsort() // 50
    assert (shares(tenth, parts.test) - 0.2).abs().max() <= 0.02
    assert (shares(tenth, drawn(y, split="random", seed=1).test) - 0.2).abs().max() > 0.02


def test_a_validation_part_leaves_the_test_part_as_it_is_and_the_seed_decides() -> None:
    y, groups = torch.arange(300) % 4, torch.arange(300) // 2
    tests = [drawn(y, groups=groups, seed=5, validation_fraction=share).test.tolist() for share in (0.0, 0.1, 0.4)]
    assert tests[0] == tests[1] == tests[2]
    assert drawn(y, groups=groups, seed=6).test.tolist() != tests[0]


def test_large_groups_are_held_out_as_often_as_small_ones() -> None:
    sizes = torch.tensor([20] * 20 + [1] * 400)
    groups = torch.arange(420).repeat_interleave(sizes)
    parts = drawn(torch.zeros(800, dtype=torch.int64), groups=groups, seed=1)
    held = torch.unique(groups[parts.test])
    assert (int((held < 20).sum()), int((held >= 20).sum())) == (4, 80)


def test_every_site_trains_and_tests_unless_all_it_has_is_one_group() -> None:
    groups = torch.tensor([0] * 9 + [1, 2] + list(range(3, 40)))
    sites = torch.tensor([0] * 9 + [1, 1] + [2] * 37)
    for seed in range(20):
        parts = drawn(torch.zeros(48, dtype=torch.int64), groups=groups, sites=sites, seed=seed)
        assert {*sites[parts.train].tolist()} == {0, 1, 2}
        assert {*sites[parts.test].tolist()} == {1, 2}


def test_one_group_cannot_be_split() -> None:
    with pytest.raises(DataError, match="all 9 samples belong to one group"):
        drawn(torch.arange(9) % 2, groups=torch.ones(9, dtype=torch.int64))
    with pytest.raises(DataError, match="every site has one group left"):
        drawn(torch.arange(9) % 2, groups=torch.arange(9) // 3, sites=torch.arange(9) // 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"validation_fraction": 0.9}, "validation_fraction is 0.9 and test_fraction 0.2"),
        ({"validation_fraction": -0.1}, "validation_fraction is -0.1"),
        ({"split": "stratify"}, "Did you mean 'stratified'"),
    ],
)
def test_what_cannot_be_split_so_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options(**options)  # type: ignore[arg-type]


def table(path: Path, rows: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("patient,ward,a,y\n" + "\n".join(rows) + "\n")
    return path


def visits(patients: int, *, ward: str | None = None) -> list[str]:
    """Three visits of every patient; input `a` is the patient's number, by which tests know whose row it is."""
    return [
        f"p{number:03d},{ward or 'NES'[number % 3]},{number},{(number + visit) % 2}"
        for number in range(patients)
        for visit in range(3)
    ]


def seen(split: Split) -> dict[str, set[float]]:
    return {name: set(part.x[:, 0].tolist()) for name, part in split.parts.items()}


def test_patients_of_a_table_are_in_one_part_each_and_sites_in_all(tmp_path: Path) -> None:
    path = table(tmp_path / "visits.csv", visits(60))
    split = load(path, target="y", group="patient", site="ward", normalise=False, validation_fraction=0.2, seed=1)
    patients = seen(split)
    assert sum(map(len, patients.values())) == 60
    assert split.train.group_names[:2] == ("p000", "p001")
    for part in split.parts.values():
        assert part.site_names == ("E", "N", "S")
        assert part.sites is not None
        assert {*part.sites.tolist()} == {0, 1, 2}


def test_rows_asks_for_the_split_that_looks_at_no_group(tmp_path: Path) -> None:
    path = table(tmp_path / "visits.csv", visits(40))
    one, other = (load(path, target="y", group=group, split="rows", seed=2).test for group in ("patient", "ward"))
    assert one.y.tolist() == other.y.tolist()
    assert len(torch.unique(one.groups)) > 10  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [str, bytes, np.int16])
def test_names_and_numbers_of_owners_in_an_archive(tmp_path: Path, kind: Callable[[object], object]) -> None:
    owners = [number // 3 for number in range(90)]
    named = np.array([f"p{owner}".encode() if kind is bytes else f"p{owner}" for owner in owners])
    whose = np.array(owners, np.int16) if kind is np.int16 else named
    x = np.array(owners, np.float32)[:, None]
    np.savez(tmp_path / "toy.npz", x=x, y=np.arange(90) % 2, lesion=whose, hospital=np.array(owners) % 4 * 10)
    split = load(tmp_path / "toy.npz", group="lesion", site="hospital")
    patients = seen(split)
    assert not patients["train"] & patients["test"]
    assert split.train.site_names == ("0", "10", "20", "30")
    with pytest.raises(ConfigError, match="Did you mean 'lesion'"):
        load(tmp_path / "toy.npz", group="lesions")


def test_an_owner_without_a_name_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "toy.npz", x=np.ones((4, 1)), y=np.arange(4) % 2, groups=np.array(["a", "", "b", "b"]))
    with pytest.raises(DataError, match="some groups have no name"):
        load(tmp_path / "toy.npz")


@pytest.mark.parametrize("layout", ["csv", "npz", "column"])
def test_a_validation_part_of_ones_own_is_taken(tmp_path: Path, layout: str) -> None:
    parts = {"train": 6, "val": 4, "test": 2}
    for name, count in parts.items():
        if layout == "npz":
            np.savez(tmp_path / f"{name}.npz", x=np.full((count, 1), count, np.float32), y=np.arange(count) % 2)
        else:
            table(tmp_path / f"{name}.csv", [f"p,N,{count},{row % 2}" for row in range(count)])
    source = tmp_path
    if layout == "column":
        rows = [f"{name},{count},{row % 2}" for name, count in parts.items() for row in range(count)]
        source = tmp_path / "one" / "toy.csv"
        source.parent.mkdir()
        source.write_text("split,a,y\n" + "\n".join(rows) + "\n")
    options = {} if layout == "npz" else {"target": "y"}
    split = load(source, **options, normalise=False)  # type: ignore[arg-type]
    assert {name: len(part) for name, part in split.parts.items()} == {"train": 6, "validation": 4, "test": 2}
    assert split.validation is not None
    assert split.validation.x.unique().tolist() == ([4.0] if layout != "csv" else split.validation.x.unique().tolist())


def test_a_validation_part_is_drawn_from_training_where_the_test_part_is_given(tmp_path: Path) -> None:
    for name, count in (("train", 30), ("test", 5)):
        table(tmp_path / f"{name}.csv", visits(count))
    split = load(tmp_path, target="y", group="patient", site="ward", validation_fraction=0.2, normalise=False)
    assert len(split.test) == 15
    assert not seen(split)["train"] & seen(split)["validation"]


def test_ham10000_lesions_are_in_one_part_each(shared_data: Callable[[str], Path]) -> None:
    stored = np.load(shared_data("ham10000") / "labels.npz")
    y, lesion = (torch.from_numpy(stored[name].astype(np.int64)) for name in ("y", "lesion"))
    rows, whole = (drawn(y, groups=lesion, seed=1, split=how) for how in ("rows", "auto"))
    assert len({*lesion[rows.train].tolist()} & {*lesion[rows.test].tolist()}) > 500
    assert not {*lesion[whole.train].tolist()} & {*lesion[whole.test].tolist()}
    assert (shares(y, whole.test) - 0.2).abs().max() < 0.005  # by rows it is up to 0.039


@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_one_patient_spelt_in_several_ways_is_one_patient(tmp_path: Path, ending: str) -> None:
    spellings = [["7", "7.0", "007"], ["P 1", " P\u200b  1", "\ufeffP 1 "], ["Zo\u00eb", "Zoe\u0308", "Zo\u00eb "]]
    owners = [name for turn in range(3) for names in spellings for name in (names[turn], f"{turn} other")]
    x = np.arange(len(owners), dtype=np.float32)
    file = tmp_path / f"visits.{ending}"
    if ending == "npz":
        np.savez(file, x=x[:, None], y=np.arange(len(owners)) % 2, patient=np.array(owners))
        split = load(file, group="patient", test_fraction=0.4)
    else:
        rows = [f'{number},{int(number) % 2},"{owner}"' for number, owner in zip(x, owners, strict=True)]
        file.write_text("\n".join(["x,y,patient", *rows]), encoding="utf-8")
        split = load(file, target="y", group="patient", test_fraction=0.4)
    assert len(split.train.group_names) == 6
    assert split.train.groups is not None
    assert split.test.groups is not None
    assert not {*split.train.groups.tolist()} & {*split.test.groups.tolist()}
