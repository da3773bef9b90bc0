"""Tables II and IV of accuracy-lossless perturbation: who learns what, and the verdicts on made-up figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedveil.audit.findings import Found
from fedveil.data import Dataset, Split
from fedveil.downlink.architecture import assemble
from papers import Options, find, lossless, reproduce
from papers.attacks import REFERENCES
from papers.cells import Cell, Figures
from papers.lossless import (
    ADAPTIVE,
    ALL,
    AS_IS,
    ATTACK,
    CONTROL,
    FEDAVG,
    LOSSLESS,
    OTHERS,
    PRIORS,
    knowing,
    private_classes,
    public_pictures,
    sheet_rows,
)
from papers.report import Check
from papers.stage import Stage

ENTRY = find("lossless-table4")
PRIVATE = private_classes(10)


def short_cell(label: str) -> Cell:
    """A cell that trains for a few rounds."""
    cell = next(one for one in ENTRY.cells(True) if one.name == f"digits/{label}")
    rounds = 1 if label == CONTROL else 40
    return Cell(cell.name, {**cell.settings, "rounds": rounds, "record_rounds": str(rounds)})


def test_the_model_learns_half_of_the_classes_and_the_paper_like_prior_the_other() -> None:
    stage = Stage()
    job = knowing(stage.job(short_cell(FEDAVG), seed=1), PRIVATE)
    sizes = {len(one) for one in job.pool.clients}
    assert len(sizes) == 1
    for one in job.pool.clients:
        assert set(one.take(torch.arange(len(one)))[1].tolist()) <= set(PRIVATE)
    assert job.test is not None
    assert set(job.test.y.tolist()) == set(PRIVATE)
    split = stage.split("digits")
    public = public_pictures(split.train, split.test, PRIVATE)
    taken = {one.numpy().tobytes() for one in split.train.x[torch.isin(split.train.y, torch.tensor(PRIVATE))]}
    assert not any(one.numpy().tobytes() in taken for one in public[OTHERS])
    assert len(public[OTHERS]) == int((split.train.y >= 5).sum())
    more = len(public[ALL]) - len(public[OTHERS])
    assert more == int((split.test.y < 5).sum()) // 2


class Alike:
    """A judge that sees pixels; it recognises nothing."""

    accuracy = 1.0

    def features(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def scores(self, x: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(torch.full((len(x),), 9), 10).float()


@pytest.mark.parametrize("label", [pytest.param(FEDAVG, marks=pytest.mark.slow), LOSSLESS])
def test_a_cell_scores_what_attacks_give_back(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack is stood in for by one that returns the private pictures it was never given: a perfect one."""
    stage = Stage(quick=True)
    split = stage.split("digits")
    rows = torch.cat([(split.train.y == one).nonzero().flatten()[:3] for one in PRIVATE])
    asked: list[dict[str, Any]] = []

    def perfect(name: str, views: list[Any], settings: list[dict[str, Any]], **_: object) -> list[Found]:
        assert name == ATTACK
        assert set(views[0].known) == {"public.x"}
        asked.extend(settings)
        return [{"inputs": split.train.x[rows], "labels": split.train.y[rows]}] * len(views)

    monkeypatch.setattr(lossless, "tried", perfect)
    monkeypatch.setattr(lossless, "judge_of", lambda *_, **__: (Alike(), 1.0))
    figures = ENTRY.work(stage, short_cell(label), 1, lambda *_: None)
    ways = [one["adaptive"] for one in asked]
    assert sorted(ways) == ([False, False] if label == FEDAVG else [False, False, True, True])
    assert asked[0]["classes"] == list(PRIVATE)
    accuracy = figures["accuracy"]
    assert isinstance(accuracy, float)
    assert accuracy > 80
    for prior in PRIORS:
        assert figures[f"{prior} {AS_IS} judge asr"] == 0.0
        rate = figures[f"{prior} {AS_IS} own asr"]
        assert isinstance(rate, float)
        assert rate > 0.7
        nearest = figures[f"{prior} {AS_IS} judge knn"]
        assert isinstance(nearest, float)
        assert nearest < 1.0  # all but those that even dealing left out
        assert figures[f"{prior} {AS_IS} judge pictures made"] == len(rows)


def made_up(changes: dict[tuple[str, str], float] | None = None) -> dict[str, dict[int, Figures]]:
    """Figures as they should come out; `changes` gives other success rates by cell and way."""
    rates = {(FEDAVG, AS_IS): 0.6, (LOSSLESS, AS_IS): 0.08, (LOSSLESS, ADAPTIVE): 0.58, (CONTROL, AS_IS): 0.05}
    rates |= changes or {}
    results: dict[str, dict[int, Figures]] = {
        REFERENCES: {1: {f"{ATTACK} reference": 0.9, f"{ATTACK} asked": 0.5}},
    }
    for (label, way), rate in rates.items():
        figures = results.setdefault(
            f"digits/{label}", {1: {"outputs": 10, "accuracy": 90.0, "shape": [1.0, 2.0, 2.0]}}
        )[1]
        far = 3.0 if (label, way) == (LOSSLESS, AS_IS) else 1.0
        for prior in PRIORS:
            for by in ("judge", "own"):
                start = f"{prior} {way} {by}"
                figures |= {f"{start} asr": rate, f"{start} low": rate - 0.04, f"{start} high": rate + 0.04}
                figures |= {f"{start} knn": far, f"{start} centroid": far}
            figures[f"{prior} {way} pictures"] = "00ff00ff"
    return results


def found(results: dict[str, dict[int, Figures]], words: str) -> Check:
    return next(one for one in ENTRY.report(results, True).checks if words in one.claim)


def test_the_verdict_on_figures_as_expected() -> None:
    results = made_up()
    assert found(results, "class inversion of FedAvg").held is True
    assert found(results, "lossless leaves guessing").held is True
    assert "as the paper counts: 8 % [4, 12], untrained" in found(results, "lossless leaves guessing").seen
    assert found(results, "takes the head noise off").held is False
    farther = found(results, "farther")
    assert farther.held is True
    assert "× 3.00" in farther.seen
    rows = ENTRY.report(results, True).rows
    assert len(rows) == 2 * (4 + 3) + 1
    assert rows[2][-1] == "as if unprotected"
    assert rows[1][-1] == "nothing"


def test_other_figures_turn_the_verdict() -> None:
    assert found(made_up({(LOSSLESS, AS_IS): 0.5}), "lossless leaves guessing").held is False
    assert found(made_up({(LOSSLESS, ADAPTIVE): 0.1}), "takes the head noise off").held is True
    assert found(made_up({(CONTROL, AS_IS): 0.58}), "class inversion of FedAvg").held is False


def test_nothing_follows_where_the_attack_gets_nothing_from_an_open_model() -> None:
    results = made_up({(FEDAVG, AS_IS): 0.1})
    assert found(results, "class inversion of FedAvg").held is False
    for words in ("lossless leaves guessing", "farther"):
        assert found(results, words).held is None
    assert found(results, "takes the head noise off").held is False  # what surely leaks, leaks
    unproven = made_up()
    unproven[REFERENCES][1][f"{ATTACK} reference"] = 0.2
    assert found(unproven, "lossless leaves guessing").held is None
    assert ENTRY.report(unproven, True).rows[0][-1] == "attack not effective here"
    assert all(check.held is None for check in ENTRY.report({}, False).checks)


def test_other_defences_show_classes_unless_they_have_not_trained() -> None:
    def signs(accuracy: float, rate: float) -> list[str]:
        results = made_up({("ppdl", AS_IS): rate})
        results["digits/ppdl"][1] |= {"accuracy": accuracy, "classes": 5}
        return [found(results, words).sign for words in ("fewer classes than ppdl", "ppdl shows classes")]

    assert signs(90.0, 0.5) == ["yes", "yes"]
    assert signs(90.0, 0.08) == ["open", "no"]
    assert signs(21.0, 0.5) == ["open", "open"]  # a guess of five classes is right 20 times of 100
    assert [one.adaptive for one in ENTRY.report(made_up(), True).checks if "head noise off" in one.claim] == [True] * 2


def test_the_sheet_has_a_row_for_every_attack() -> None:
    results = made_up()
    assert len(sheet_rows(results, True)) == 8
    assert len(sheet_rows({}, True)) < 2


@pytest.mark.slow
def test_on_digits_the_noise_hides_classes_only_until_it_is_taken_off(tmp_path: Path) -> None:
    found = reproduce("lossless-table4", Options(out=tmp_path, quick=True))
    held = {one.claim.split(": ", 1)[1]: one.held for one in found.checks if "all classes" in one.claim}
    assert held["class inversion of FedAvg's model shows its classes"] is True
    assert held["lossless leaves guessing"] is True
    assert held["lossless leaves guessing to who takes the head noise off"] is False


def test_curves_are_one_after_their_early_part() -> None:
    def held(*gaps: float) -> tuple[bool | None, str]:
        results: dict[str, dict[int, Figures]] = {}
        for seed in (1, 2, 3):
            plain = [50.0 + place + seed for place in range(len(gaps))]
            results.setdefault("cnn/k5/square/fedavg", {})[seed] = {"curve": plain}
            ours = [one + gap for one, gap in zip(plain, gaps, strict=True)]
            results.setdefault("cnn/k5/square/lossless", {})[seed] = {"curve": ours}
        checks = find("pbpfl-table2").report(results, True).checks
        (one,) = (one for one in checks if "5 clients" in one.claim and "the curves are within" in one.claim)
        return one.held, one.seen

    assert held(9.0, 0.5, -1.0, 0.0) == (True, "-1.00 ± 0.00 at most, at test 3 of 4")
    assert held(0.0, 0.5, 3.0, 0.0)[0] is False
    assert find("pbpfl-table2").report({}, True).checks[-1].held is None
    assert any("the curves are within" in one.claim for one in find("curves").report({}, False).checks)


TABLE2 = find("lossless-table2")
SETTING = "resnet20/k5/square"


def ends(**accuracies: list[float]) -> dict[str, dict[int, Figures]]:
    """Cells of one setting that ended at these accuracies, seed by seed."""
    return {
        f"{SETTING}/{scheme}": {seed: {"curve": [10.0, end]} for seed, end in enumerate(values, start=1)}
        for scheme, values in accuracies.items()
    }


@pytest.mark.parametrize(
    ("fedavg", "ours", "held"),
    [
        ([92.0, 92.2, 92.4], [92.1, 92.3, 92.2], True),
        ([92.0, 92.2, 92.4], [91.1, 91.3, 91.2], False),  # clearly elsewhere
        ([92.0, 92.2], [92.1, 92.3], None),  # too few
        ([90.0, 92.2, 94.4], [92.1, 92.3, 92.2], None),  # too far apart to tell
    ],
)
def test_where_lossless_ends_is_judged_by_seeds_that_can_tell(
    fedavg: list[float], ours: list[float], held: bool | None
) -> None:
    report = TABLE2.report(ends(fedavg=fedavg, lossless=ours), False)
    alike = next(one for one in report.checks if "ends where" in one.claim and "5 clients, square" in one.claim)
    assert alike.held is held
    assert report.rows[0][4].startswith(f"{sum(fedavg) / len(fedavg):.2f} ± ")


def test_another_order_of_sums_is_the_same_run_in_other_bits() -> None:
    stage = Stage()
    split = stage._splits["cifar10", None] = _colours()
    cell = next(one for one in TABLE2.cells(False) if one.name == f"{SETTING}/reordered")
    settings = {name: value for name, value in cell.settings.items() if name != "augment"}
    job = stage.job(Cell(cell.name, {**settings, "rounds": 1}), seed=1)
    turned = lossless._reordered(job)
    x = split.test.x
    outputs = [
        assemble(one.architecture, one.weights).eval()(colours) for one, colours in ((job, x), (turned, x.flip(1)))
    ]
    assert torch.allclose(outputs[0], outputs[1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(outputs[0], assemble(turned.architecture, turned.weights).eval()(x), atol=1e-3)
    assert torch.equal(turned.pool.clients[0].x, job.pool.clients[0].x.flip(1))


def _colours() -> Split:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 3, 8, 8, generator=generator), torch.randint(0, 10, (40,), generator=generator)
    whole = Dataset("colours", "classification", x, y, 10)
    return Split(whole.subset(torch.arange(30)), whole.subset(torch.arange(30, 40)))


def accuracies(**changes: float) -> dict[str, dict[int, Figures]]:
    """Three seeds of ResNet-20 with five clients under cross-entropy, as the paper prints them."""
    names = (FEDAVG, LOSSLESS, "ppdl", "dbcl", "spn")
    found = dict(zip(names, lossless._T2["printed"]["resnet20"]["5"], strict=True)) | changes
    return {
        f"resnet20/k5/cross-entropy/{name}": {seed: {"curve": [one + 0.1 * seed - 0.2]} for seed in (1, 2, 3)}
        for name, one in found.items()
    }


def test_the_papers_other_defences_stand_beside_the_method_and_are_less_accurate() -> None:
    entry = find("lossless-table2")

    def claims(results: dict[str, dict[int, Figures]]) -> dict[str, bool | None]:
        return {one.claim: one.held for one in entry.report(results, False).checks if "more accurate" in one.claim}

    start = "resnet20, 5 clients, cross-entropy: lossless is more accurate than"
    assert claims(accuracies()) == {f"{start} {one}": True for one in ("ppdl", "dbcl", "spn")}
    assert claims(accuracies(dbcl=93.0))[f"{start} dbcl"] is False
    assert claims(accuracies(dbcl=11.0))[f"{start} dbcl"] is None  # it has not trained
    assert set(claims({}).values()) == {None}
    rows = entry.report(accuracies(), False).rows
    row = next(one for one in rows if one[:3] == ("resnet20", "5", "cross-entropy"))
    assert row[-3:] == ("88.67 / 88.67", "91.53 / 91.53", "88.45 / 88.45")
    assert len(rows) == 2 * 3 * 3 * 2, "two data sets, three networks, three numbers of clients, two losses"


def test_a_defence_that_diverges_at_the_common_rate_has_a_part_of_it() -> None:
    cells = {one.name: one for one in find("lossless-table2").cells(False)}
    plain, sketched = (cells[f"resnet20/k5/cross-entropy/{one}"] for one in (FEDAVG, "dbcl"))
    assert sketched.settings["lr"] == pytest.approx(plain.settings["lr"] / 10)
    assert cells["resnet20/k5/cross-entropy/spn"].settings["lr"] == plain.settings["lr"]
    assert "head_groups" not in {one.name: one for one in find("lossless-table3").cells(False)}["cifar10/spn"].settings


def test_members_told_under_the_other_defences_stand_under_the_papers_figures() -> None:
    told: Figures = {"accuracy": 80.0, "last received": 61.0, "last received low": 55.0, "last received high": 67.0}
    rows = find("lossless-table3").report({"cifar10/ppdl": {1: told}}, False).rows
    (row,) = (one for one in rows if one[:2] == ("cifar10", "ppdl: last layer"))
    assert row[5:7] == ("61.33", "61.0 [55.0, 67.0]")


def test_pictures_of_figure_5_are_judged_beside_fedavg() -> None:
    entry = find("lossless-fig5")
    (place,) = lossless._PICTURES.places(True)

    def figures(psnr: float) -> Figures:
        made: Figures = {f"{attack} psnr": [psnr, psnr + 1] for attack in place.attacks}
        return {**made, "mean picture psnr": [11.0, 12.0], "noise": [0.0, 0.0]}

    results = {place.cell(one): {1: figures(4.0)} for one in lossless._F5["schemes"]}
    results |= {place.cell(one): {1: figures(60.0)} for one in (FEDAVG, LOSSLESS)}
    results[REFERENCES] = {
        1: {
            f"{attack} {what}": value
            for attack in place.attacks
            for what, value in (("reference", 60.0), ("asked", 20.0))
        }
    }
    # What the server gets of lossless is a finding of ours: the paper's attackers are clients.
    premise, server, noise, *clients = entry.report(results, True).checks
    assert [one.held for one in (premise, server, noise)] == [True, False, True]
    assert [one.ours for one in (server, noise)] == [True, False]
    assert {one.held for one in clients} == {None}
    results[place.cell(FEDAVG)] = {1: figures(11.5)}
    assert [one.held for one in entry.report(results, True).checks[:3]] == [False, False, None]
    assert len(entry.report({}, True).rows) == len(lossless._F5["schemes"]) + len(lossless._F5["curious"]["schemes"])
