"""ParaAegis's tables: made-up figures lead to the rows, claims and reasons they should."""

from __future__ import annotations

import pytest

from papers import find, paraaegis
from papers.cells import Figures
from papers.paraaegis import BY_LABEL, PARTITIONS, ROWS, SAME_NOISE, Run, benches, printed
from papers.report import Report

BENCHES, (QUICK,) = benches(False), benches(True)
PRINTED = paraaegis._T1["printed"]
BENCH = BENCHES[0]
TABLE1, TABLE2 = find("paraaegis-table1"), find("paraaegis-table2")
Made = dict[str, dict[int, Figures]]


def run(accuracy: float, *, rounds: int = 50, **figures: float) -> dict[int, Figures]:
    return {1: {"accuracy": accuracy, "rounds": rounds, "parameters": 10_000, **figures}}


def papers_own(partition: str = "iid") -> Made:
    """The paper's figures as if they were ours: protection is what a row takes longer than FedAvg."""
    place = PARTITIONS.index(partition)
    plain = PRINTED["fedavg"][1][place]
    found: Made = {BENCH.pace: {1: {"round_seconds": plain / 50}}}
    for row in ROWS:
        accuracy, time, _ = PRINTED.get(row.label, PRINTED["fedavg"])
        noisy = {"epsilon": 20_000.4, "noise": 0.02} if row.noisy else {}
        found[BENCH.cell(partition, row.label)] = run(accuracy[place], **noisy)
        found[BENCH.cost(row.label)] = {1: {"protection": (time[place] - plain) / 50}}
    return found


def report(figures: Made) -> Report:
    return TABLE1.report(figures, False)


def shown(figures: Made, row: str, partition: str = "IID") -> dict[str, str]:
    found = report(figures)
    line = next(one for one in found.rows if one[:2] == (f"{BENCH.name} {partition}", BY_LABEL[row].title))
    return dict(zip(found.columns, line, strict=True))


def held(figures: Made) -> dict[str, bool | None]:
    return {one.claim.partition(": ")[2]: one.held for one in report(figures).checks}


def seen(figures: Made, claim: str) -> str:
    return next(one.seen for one in report(figures).checks if claim in one.claim)


def test_the_papers_printed_ratios_are_those_of_its_accuracies_and_seconds() -> None:
    for accuracies, times, ratios in PRINTED.values():
        for accuracy, time, ratio in zip(accuracies, times, ratios, strict=True):
            assert 100 * accuracy / time == pytest.approx(ratio, abs=0.00501)
    assert printed("r5", "dirichlet-0.5") == 66.19
    assert printed("serial", "dirichlet-1", "seconds") == 16718
    assert printed("r10-x0.99", "iid", "efficiency") == 1.19
    assert printed("pads100", "iid") is None
    assert printed("r5", "size") is None


@pytest.mark.parametrize("partition", PARTITIONS)
def test_the_papers_own_figures_meet_every_claim(partition: str) -> None:
    figures = papers_own(partition) | papers_own("iid")
    judged = [one for one in report(figures).checks if "serial is the least accurate" not in one.claim]
    # With the other partitions, which were not run.
    assert len(judged) == (15 + 2 if partition == "iid" else 30 + 1)
    assert [one.claim for one in judged if one.held is False] == []
    assert {one.claim.partition(": ")[2] for one in judged if one.held is None} == {"the same claims"}


def test_serial_is_least_accurate_by_the_papers_figures_where_it_was_trained_by_itself() -> None:
    assert held(papers_own())[next(claim for claim in held(papers_own()) if "least accurate" in claim)] is True
    # Under Dir(0.5) the paper's serial lies half a point below DP-FedAvg: that much is chance.
    figures = papers_own() | papers_own("dirichlet-0.5")
    found = [one for one in report(figures).checks if "Dir(0.5): serial is the least" in one.claim]
    assert [(one.held, one.ours) for one in found] == [(False, True)]
    # What it says of serial is that both suffer: it lies below every r between, and takes longer.
    said = [one for one in report(figures).checks if "Dir(0.5): serial" in one.claim and "any r" in one.claim]
    assert [one.held for one in said] == [True, True]
    assert not any(one.ours for one in said)


def test_one_dynamic_share_that_is_better_and_sooner_is_enough() -> None:
    claim = "some dynamic share is more accurate than some static one, in less time"
    figures = papers_own()
    assert held(figures)[claim] is True
    assert "ParaAegis 5 % × 0.99 beside ParaAegis 1 %: +4.2, 5561 and 6149 s" in seen(figures, claim)
    for row in paraaegis.DYNAMIC:
        figures[BENCH.cell("iid", row.label)] = run(60.0)
    assert held(figures)[claim] is False
    del figures[BENCH.cell("iid", "r10-x0.9")]
    assert held(figures)[claim] is None
    assert "not run: ParaAegis 10 % × 0.9" in seen(figures, claim)


def test_rows_show_the_papers_figures_beside_ours_and_the_ratio_of_ours() -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", "r10")] = run(70.0, epsilon=19_876.6)
    line = shown(figures, "r10")
    assert line["accuracy, %"] == "75.63 / 70.0"
    assert line["seconds"] == "7776 / 7,776.0"
    assert line["efficiency"] == "0.97 / 0.90"
    assert line["ε proven"] == "19,877"
    assert shown(figures, "fedavg")["ε proven"] == "no noise"
    assert shown(figures, "r10", "Dir(1)")["accuracy, %"] == "73.63 / –"
    assert shown(figures, "pads100")["accuracy, %"].startswith("– / ")


def test_a_row_that_was_not_trained_shows_its_twins_training_and_says_so() -> None:
    figures = papers_own()
    for label in ("serial", "ckks-fedavg", "pads100"):
        del figures[BENCH.cell("iid", label)]
    assert shown(figures, "serial")["accuracy, %"] == "10.54 / 20.3 (= DP-FedAvg)"
    assert shown(figures, "ckks-fedavg")["accuracy, %"] == "81.14 / 80.9 (= FedAvg)"
    claim = "serial is the least accurate"
    assert next(one.held for one in report(figures).checks if claim in one.claim) is False
    assert SAME_NOISE in seen(figures, claim)
    assert "the training was shared" in seen(figures, claim)
    # Its time is its own all the same.
    assert shown(figures, "serial")["seconds"] == "19956 / 19,956.0"
    assert next(one.held for one in report(figures).checks if "serial takes longest" in one.claim) is True


@pytest.mark.parametrize(
    ("row", "accuracy", "claim", "words"),
    [
        ("r5", 60.0, "accuracy grows with r", "not from 1 % → 5 % (-7.8 %)"),
        ("ckks-fedavg", 70.0, "CKKS-FedAvg (r = 100 %) is more accurate than any r between", "20 %: -7.5"),
        ("dp-fedavg", 72.0, "DP-FedAvg (r = 0) is less accurate than any r between", "1 %: +4.2"),
        ("serial", 72.0, "serial is less accurate than any r between", "1 %: +4.2"),
        ("stevens", 70.0, "more accurate than Stevens", "-2.2"),
    ],
)
def test_a_claim_that_fails_says_where_and_why(row: str, accuracy: float, claim: str, words: str) -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", row)] = run(accuracy)
    failed = [one for one in report(figures).checks if one.held is False]
    assert any(claim in one.claim and words in one.seen for one in failed)
    assert report(figures).word == "refuted in part"


def test_a_claim_of_ours_that_fails_refutes_nothing_of_the_papers() -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", "pads100")] = run(70.0)
    found = report(figures)
    (ours,) = (one for one in found.checks if one.ours and "pads" in one.claim)
    assert (str(ours).partition("ours: ")[2][:14], ours.held, ours.seen[:15]) == (
        "imagenette IID",
        False,
        "70.0 and 80.9 %",
    )
    assert found.verdict == report(papers_own()).verdict


def test_less_than_one_seed_can_tell_decides_nothing() -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", "r5")] = run(67.0)
    assert next(one.held for one in report(figures).checks if "accuracy grows" in one.claim) is True
    figures[BENCH.cell("iid", "stevens")] = run(66.0)
    found = next(one for one in report(figures).checks if "more accurate than Stevens" in one.claim)
    assert found.held is None
    assert "too near" in found.seen


def test_chance_is_granted_where_something_is_to_lie_between() -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", "r10-x0.99")] = run(77.6)
    assert next(one.held for one in report(figures).checks if "between static" in one.claim) is True
    figures[BENCH.cell("iid", "r10-x0.99")] = run(77.7)
    assert next(one.held for one in report(figures).checks if "between static" in one.claim) is False


def test_time_that_does_not_grow_is_explained_by_the_vote() -> None:
    figures = papers_own()
    figures[BENCH.cost("r1")] = {1: {"protection": 100.0, "counting_seconds": 80.0}}
    text = seen(figures, "time grows with r")
    assert "not from 1 % → 5 %" in text
    assert "counting votes alone takes, of a round: ParaAegis 1 % 80.0 s" in text
    assert "counting" not in seen(papers_own(), "time grows with r")


@pytest.mark.parametrize(
    ("row", "cost", "claim"),
    [
        ("r5", 1000.0, "time grows with r"),
        ("r10-x0.99", 300.0, "takes less time than static 10 %"),
        ("ckks-fedavg", 1000.0, "serial takes longest"),
        ("pads100", 60.0, "pads encrypt 100 %"),
    ],
)
def test_times_are_judged_by_training_and_protection(row: str, cost: float, claim: str) -> None:
    figures = papers_own()
    figures[BENCH.cost(row)] = {1: {"protection": cost}}
    assert next(one.held for one in report(figures).checks if claim in one.claim) is False


def test_seconds_are_training_plus_rounds_times_protection() -> None:
    row = BY_LABEL["r10"]
    figures: Made = {
        BENCH.pace: {1: {"round_seconds": 4.0}},
        BENCH.cost("r10"): {1: {"protection": 1.5}},
        BENCH.cell("iid", "r10"): run(70.0, seconds=900.0),
    }
    assert Run(figures, BENCH).seconds(row) == 50 * (4.0 + 1.5)
    del figures[BENCH.pace]
    assert Run(figures, BENCH).seconds(row) == 900.0 + 50 * 1.5
    del figures[BENCH.cost("r10")]
    assert Run(figures, BENCH).seconds(row) is None
    assert Run({}, BENCH).cost(BY_LABEL["fedavg"]) == 0.0
    assert Run({}, BENCH).cost(BY_LABEL["dp-fedavg"]) is None


def test_a_run_that_stopped_early_is_shown_with_its_round_and_judges_nothing() -> None:
    figures = papers_own()
    figures[BENCH.cell("iid", "r10")] = run(55.0, rounds=30)
    assert shown(figures, "r10")["accuracy, %"] == "75.63 / 55.0 at round 30"
    found = Run(figures, BENCH).training(BY_LABEL["r10"])
    assert (found.accuracy, found.unfinished) == (None, {1: (55.0, 30)})
    assert next(one.held for one in report(figures).checks if "between static" in one.claim) is None
    assert "10 %:" not in seen(figures, "accuracy grows with r")


def test_a_shrinking_share_is_timed_by_its_mean() -> None:
    row = BY_LABEL["r10-x0.99"]
    assert row.mean_share(1) == pytest.approx(0.1)
    assert row.mean_share(50) == pytest.approx(sum(0.1 * 0.99**t for t in range(50)) / 50)
    assert BY_LABEL["r20"].mean_share(50) == 0.2


def test_the_noise_is_told_beside_what_it_is_added_to() -> None:
    notes = " ".join(report(papers_own()).notes)
    assert "standard deviation 0.02" in notes
    assert "an L2 norm of 2," in notes


def test_only_what_was_trained_on_is_shown_and_judged() -> None:
    other = next(bench for bench in BENCHES if bench.name == "cifar10")
    assert {row[0].split()[0] for row in report({}).rows} == {"imagenette"}
    figures = {other.cell("iid", "r10"): run(50.0), BENCH.cost("r10"): {1: {"protection": 1.0}}}
    assert {row[0].split()[0] for row in report(figures).rows} == {"cifar10"}
    assert {one.claim.split(":")[0] for one in report(figures).checks} == {"cifar10 IID"}
    both = report(papers_own() | {other.cell("dirichlet-1", "r10"): run(50.0)})
    judged = [one for one in both.checks if not one.claim.endswith("the same claims")]
    assert {one.claim.split(":")[0] for one in judged} == {"imagenette IID", "cifar10 Dir(1)"}
    strategies = TABLE2.report({"cifar10/max": run(50.0, rounds=20)}, False)
    assert [row[0] for row in strategies.rows] == ["cifar10"] * 3


@pytest.mark.parametrize(
    ("worst", "expected"), [(15.8, (True, True)), (29.0, (True, None)), (53.0, (True, False)), (55.0, (False, False))]
)
def test_the_strategies_are_judged_by_the_better_of_the_other_two(
    worst: float, expected: tuple[bool | None, ...]
) -> None:
    figures = {
        f"{BENCH.name}/{name}": run(one, rounds=20)
        for name, one in {"max": 63.64, "min": 12.4, "random": worst}.items()
    }
    found = TABLE2.report(figures, False)
    assert tuple(one.held for one in found.checks) == expected
    assert found.rows[0] == ("imagenette", "max (the scheme)", "63.64 / 63.6")
    figures[f"{BENCH.name}/min"] = run(12.4, rounds=13)
    unfinished = TABLE2.report(figures, False)
    assert unfinished.checks[0].held is None
    assert unfinished.rows[1][2] == "12.4 / 12.4 at round 13"


def test_cells_train_the_papers_setting() -> None:
    cells = {cell.name: cell for cell in TABLE1.cells(False)}
    settings = cells["imagenette/dirichlet-0.5/r10-x0.99"].settings
    assert (settings["clients"], settings["rounds"], settings["local_epochs"]) == (10, 50, 3)
    assert (settings["batch_size"], settings["lr"], settings["clip"], settings["epsilon"]) == (32, 0.01, 1.0, 1.0)
    assert (settings["partition"], settings["alpha"], settings["accounting"]) == ("dirichlet", 0.5, "paper")
    assert (settings["cipher"], cells["imagenette/cost/r10"].settings["cipher"]) == ("pads", "ckks")
    assert all(one.settings["model_options"] for one in cells.values())
    usual = {name for name, cell in cells.items() if cell.usual}
    assert "imagenette/iid/r10" in usual
    assert not {"imagenette/iid/serial", "imagenette/dirichlet-1/r10", "cifar10/iid/r10"} & usual
    assert {"imagenette/cost/serial", "imagenette/cost/pads100", "imagenette/pace"} <= usual
    assert {cell.settings["cipher"] for cell in TABLE1.cells(True) if "cipher" in cell.settings} == {"ckks", "pads"}


def test_the_quick_form_is_small_and_names_what_it_is() -> None:
    found = TABLE1.report({}, True)
    assert found.title.startswith("ParaAegis, Table 1 (quick form)")
    assert {row[0] for row in found.rows} == {f"{QUICK.name} IID"}
    assert {row[2] for row in found.rows} == {"– / –"}


def sensitivities(**changes: float) -> Made:
    """The paper's Table 3 as if it were ours, with other figures by cell where given."""
    printed = paraaegis._T3["printed"]
    found = {f"{what}{value}": one for what, values in printed.items() for value, one in values.items()}
    return {f"{BENCH.name}/{name}": run(one, rounds=20) for name, one in (found | changes).items()}


def test_the_papers_own_sensitivities_meet_its_claims_and_others_do_not() -> None:
    entry = find("paraaegis-table3")
    report = entry.report(sensitivities(), False)
    assert report.verdict == "reproduced"
    assert (BENCH.name, "θ", "0.01", "68.99 / 69.0") in report.rows
    assert {one.name for one in entry.cells(False) if one.usual} == set(sensitivities())
    held = [one.held for one in entry.report(sensitivities(**{"clip0.1": 74.0}), False).checks]
    assert held == [False, True]
    held = [one.held for one in entry.report(sensitivities(clients25=70.0), False).checks]
    assert held == [True, False]
    assert [one.held for one in entry.report({}, False).checks] == [None, None]


def test_the_papers_two_other_rows_are_there_with_their_settings() -> None:
    cells = {one.name: one for one in TABLE1.cells(False)}
    deviation, variance = (cells[BENCH.cell("iid", one)] for one in ("varying-dp", "varying-dp-variance"))
    assert deviation.settings["noise_decay"] == pytest.approx(variance.settings["noise_decay"] ** 2)
    assert cells[BENCH.cell("dirichlet-1", "stevens")].more == {"masked": True}
    assert cells[BENCH.cost("stevens")].more == {}
    assert shown(papers_own(), "varying-dp-variance")["accuracy, %"].startswith("24.21 / ")
