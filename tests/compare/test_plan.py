"""The same settings for every scheme, as far as it has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedveil.compare.plan import changed, check_unchanged, parse_own, planned
from fedveil.errors import ConfigError, FedVeilError
from fedveil.schemes import schemes


def plan(
    *names: str, seeds: tuple[int, ...] = (1,), only: dict[str, dict[str, Any]] | None = None, **settings: Any
) -> Any:
    return planned(names, seeds=seeds, settings=settings, only=only or {})


def test_one_cell_per_scheme_and_seed() -> None:
    made = plan("fedavg", "nadp", seeds=(3, 1), rounds=7)
    assert [one.folder for one in made.cells] == ["fedavg/seed-3", "fedavg/seed-1", "nadp/seed-3", "nadp/seed-1"]
    assert {one.config.rounds for one in made.cells} == {7}
    assert [one.config.seed for one in made.cells] == [3, 1, 3, 1]
    assert [one.config.scheme for one in made.cells] == ["fedavg", "fedavg", "nadp", "nadp"]


def test_what_a_scheme_does_not_have_is_left_out_for_it_and_said() -> None:
    made = plan("fedavg", "lossless", "nadp", epsilon=2.0, clip=0.5, spread=3.0)
    by_scheme = {one.scheme: one.config for one in made.cells}
    assert (by_scheme["fedavg"].epsilon, by_scheme["fedavg"].spread) == (None, None)
    assert (by_scheme["lossless"].epsilon, by_scheme["lossless"].spread) == (None, 3.0)
    assert (by_scheme["nadp"].epsilon, by_scheme["nadp"].clip, by_scheme["nadp"].spread) == (2.0, 0.5, None)
    assert made.left_out["nadp"] == ("spread",)
    assert "nadp: left out spread, which it does not have" in made.said()


def test_a_family_is_for_the_schemes_that_have_it() -> None:
    made = plan("fedavg", "lossless", "mpdp", "veil-dp", family="full", only={"veil-dp": {"family": "signed"}})
    assert {one.scheme: one.config.family for one in made.cells} == {
        "fedavg": "auto",
        "lossless": "full",
        "mpdp": "auto",
        "veil-dp": "signed",
    }
    assert made.left_out == {"fedavg": ("family",), "mpdp": ("family",)}


@pytest.mark.parametrize(
    ("names", "settings", "bn_eps"),
    [
        (("fedavg", "lossless"), {}, "secret"),
        (("fedavg", "lossless"), {"bn_eps": "public"}, "public"),
        (("fedavg", "lossless"), {"head_noise": False}, "auto"),
        (("nadp", "veil-dp"), {}, "auto"),
        (("nadp", "veil-dp"), {"only": {"veil-dp": {"family": "scale"}}}, "secret"),
    ],
)
def test_what_is_compared_with_a_veil_of_scales_has_its_epsilon(
    names: tuple[str, ...], settings: dict[str, Any], bn_eps: str
) -> None:
    assert {one.config.bn_eps for one in plan(*names, **settings).cells} == {bn_eps}


def test_schemes_that_lack_the_same_are_said_in_one_line() -> None:
    assert plan("fedavg", "lossless", epsilon=2.0, loss="square").said() == [
        "fedavg, lossless: left out epsilon, which they do not have"
    ]
    assert plan("fedavg", "lossless", lr=2.0, loss="square").said() == []


@pytest.mark.parametrize("scheme", [one.name for one in schemes()])
def test_every_scheme_takes_what_is_left_of_all_settings(scheme: str) -> None:
    everything = {"epsilon": 1.0, "clip": 1.0, "spread": 2.0, "share": 0.2, "cover": "noise", "threshold": 0.7}
    (cell,) = plan(scheme, **everything).cells
    options = next(one.options for one in schemes() if one.name == scheme)
    assert {k for k, v in cell.config.scheme_options.items() if v is not None} == everything.keys() & options.keys()


def test_a_scheme_may_have_settings_of_its_own() -> None:
    made = plan("fedavg", "nadp", lr=0.1, only={"nadp": {"lr": 3, "epsilon": 1}})
    assert [(one.config.lr, one.config.epsilon) for one in made.cells] == [(0.1, None), (3.0, 1.0)]


@pytest.mark.parametrize(
    ("names", "only", "settings", "said"),
    [
        ([], {}, {}, "Name the schemes"),
        (["fedavg", "fedavg"], {}, {}, "named twice"),
        (["fedavgg"], {}, {}, "Did you mean 'fedavg'"),
        (["fedavg"], {"nadp": {"lr": 1}}, {}, "Only schemes of the comparison"),
        (["fedavg"], {"fedavg": {"epsilon": 1}}, {}, "'fedavg' has no option 'epsilon'"),
        (["fedavg"], {"fedavg": {"clients": 3}}, {}, "cannot differ"),
        (["fedavg"], {"fedavg": {"lrr": 3}}, {}, "Did you mean 'lr'"),
        (["fedavg"], {"fedavg": {"lr": "fast"}}, {}, "lr must be a positive number, or auto"),
        (["fedavg"], {}, {"rounds": 0}, "rounds must be positive"),
        (["fedavg"], {}, {"roundss": 3}, "Did you mean 'rounds'"),
    ],
    ids="none twice unknown-scheme foreign-scheme foreign-option shared unknown-own type value unknown".split(),
)
def test_what_makes_no_sense_is_refused(
    names: list[str], only: dict[str, dict[str, Any]], settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        plan(*names, only=only, **settings)


def test_settings_of_one_scheme_are_read_as_they_are_typed() -> None:
    typed = ["nadp.lr=3", "nadp.honest-arrivals=true", "paraaegis.cipher=pads", "veil-dp.clip=0.5"]
    assert parse_own(typed) == {
        "nadp": {"lr": 3, "honest_arrivals": True},
        "paraaegis": {"cipher": "pads"},
        "veil-dp": {"clip": 0.5},
    }


@pytest.mark.parametrize("typed", ["lr=3", "nadp", "nadp.lr", ".lr=3", "nadp.=3"])
def test_other_spellings_are_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match=r"scheme\.option=value"):
        parse_own([typed])


def test_changes_are_named_with_both_values() -> None:
    assert changed({"lr": 0.1, "clip": 1}, {"lr": 0.2, "clip": 1, "epsilon": 3}) == [
        "epsilon (not set, now 3)",
        "lr (0.1, now 0.2)",
    ]


def test_a_run_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    (before,) = plan("fedavg", lr=0.1).cells
    (after,) = plan("fedavg", lr=0.2).cells
    folder = tmp_path / before.folder
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(before.config.to_toml())
    check_unchanged(before, tmp_path)
    with pytest.raises(FedVeilError, match=r"lr \(0\.1, now 0\.2\)"):
        check_unchanged(after, tmp_path)


def test_all_schemes_train_on_the_square_loss_if_one_needs_it_unless_told_otherwise() -> None:
    made = plan("fedavg", "lossless", "nadp")
    assert {cell.config.loss for cell in made.cells} == {"square"}
    assert made.said()[0].startswith("all schemes train on the square loss, which lossless needs")
    assert {cell.config.loss for cell in plan("fedavg", "nadp").cells} == {None}
    own = plan("fedavg", "lossless", only={"lossless": {"loss": "square"}})
    assert [cell.config.loss for cell in own.cells] == [None, "square"]
    given = plan("fedavg", "lossless", loss="cross-entropy")
    assert {cell.config.loss for cell in given.cells} == {"cross-entropy"}
