"""What trackers are told: names, numbers, words."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil.config import RunConfig
from fedveil.runs import session
from fedveil.tracking import closing_figures, epsilons_of, figures_of, ledger_in_words, settings_of, slug

SMALL = RunConfig(scheme="nadp", rounds=2, clients=3, seed=1, epsilon=3.0, model_options={"depth": 2, "width": 8})


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return session.run(SMALL, tmp_path_factory.mktemp("figures") / "run", quiet=True)


def test_a_rounds_numbers_keep_their_names_and_texts_become_counts() -> None:
    row = {"round": 3, "loss": None, "clients": 2, "seconds": 0.5, "failed": "gone", "refused": {"1": "a", "2": "b"}}
    assert figures_of(row) == {"clients": 2.0, "seconds": 0.5, "failed": 1.0, "refused": 2.0}


def test_settings_are_those_that_are_set() -> None:
    told = settings_of(SMALL)
    assert told["epsilon"] == "3.0"
    assert told["model.width"] == "8"
    assert not {"clip", "model_options"} & told.keys()


def test_epsilon_is_told_by_adversary(summary: dict[str, Any]) -> None:
    lines = {line["adversary"]: line["epsilon"] for line in summary["ledger"]["lines"]}
    assert epsilons_of(summary) == {
        "epsilon_server": lines["server"],
        "epsilon_server_and_colluding_clients": lines["server and colluding clients"],
        "epsilon_clients": lines["clients"],
        "epsilon_outsider": lines["outsider"],
    }
    closing = closing_figures(summary)
    assert closing["final_test_accuracy"] == summary["test_accuracy"]
    auroc = summary["judged"]["figures"]["auroc"]
    assert [closing[f"final_auroc{end}"] for end in ("", "_low", "_high", "_baseline")] == [
        auroc["value"],
        auroc["low"],
        auroc["high"],
        0.5,
    ]


def test_the_ledger_in_words_says_everything_the_ledger_holds(summary: dict[str, Any]) -> None:
    text = ledger_in_words(summary)
    ledger = summary["ledger"]
    assert "| server | (ε = " in text
    for said in (*ledger["unprotected"], *ledger["notes"], *ledger["lines"][0]["assumptions"]):
        assert f"- {said}" in text
    assert "SIMULATION" in text
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 2 + len(ledger["lines"])


@pytest.mark.parametrize(
    ("name", "slugged"), [("server", "server"), ("server and colluding clients", "server_and_colluding_clients")]
)
def test_names_of_adversaries_fit_every_tracker(name: str, slugged: str) -> None:
    assert slug(name) == slugged
