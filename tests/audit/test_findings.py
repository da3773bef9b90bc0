"""One sentence per adversary: by its best attack, with chance and no protection beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from fedveil.audit.findings import SHORT, Finding, Verdict, sentences

ASSETS = (
    *("data", "labels", "the model's function", "the model's parameters"),
    *("the server's updates", "members", "what classes look like"),
)


def finding(
    attack: str = "dlg",
    verdict: Verdict = "nothing",
    value: float | None = 12.0,
    *,
    who: str = "the server",
    asset: str = "data",
) -> Finding:
    shown = {} if value is None else {"value": f"{value} dB", "chance": "10.0 dB", "unprotected": "40.0 dB"}
    return Finding(
        *(f"server/{attack}", who, asset, attack, "one upload", False, "PSNR (dB)", verdict),
        value=value,
        chance=10.0,
        unprotected=None if value is None else 40.0,
        shown=shown,
    )


def test_there_is_one_sentence_for_each_adversary_in_order() -> None:
    found = sentences(
        [
            finding(),
            finding("closed-form", who="the server with 3 of 4 clients"),
            finding("probe", who="a client", asset="the model's function"),
            finding("idlg"),
        ]
    )
    assert list(found) == ["the server", "the server with 3 of 4 clients", "a client"]
    for who, text in found.items():
        assert text.startswith(who[0].upper() + who[1:])
        assert text.endswith(".")
        assert text.count(". ") == 0


@pytest.mark.parametrize("order", [1, -1])
def test_the_attack_that_got_most_speaks(order: int) -> None:
    several = [
        finding("dlg", "nothing", 11.0),
        finding("inverting", "in part", 25.0),
        finding("idlg", "in part", 31.0),
        finding("generative", "not effective", None),
    ][::order]
    text = sentences(several)["the server"]
    assert "idlg" in text
    assert "31.0 dB" in text
    assert "chance 10.0 dB" in text
    assert "without protection 40.0 dB" in text
    assert "traces" in text
    assert not any(one in text for one in ("inverting", "generative"))
    worse = [*several, finding("phi", "as if unprotected", 38.0)]
    assert "rebuilds what a client trained on (phi" in sentences(worse)["the server"]


def test_nothing_is_concluded_where_no_attack_is_effective() -> None:
    found = [finding("dlg", "not effective", None), replace(finding("idlg", "failed", None), reason="it died.")]
    text = sentences(found)["the server"]
    assert "cannot" not in text
    assert "no attack is effective here even without protection" in text
    one = sentences([replace(finding("idlg", "not applicable", None), reason="text as input.")])["the server"]
    assert one == "The server was not measured on data: text as input."
    assert "None" not in text + one


def test_what_an_attack_could_not_do_is_said_of_these_attacks_only() -> None:
    text = sentences([finding()])["the server"]
    assert "cannot rebuild what a client trained on by these attacks" in text


@pytest.mark.parametrize("asset", ASSETS)
@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_asset_and_verdict_has_words(asset: str, verdict: Verdict) -> None:
    value = 20.0 if verdict in ("as if unprotected", "in part", "nothing", "not decided") else None
    text = sentences([finding("x", verdict, value, asset=asset)])["the server"]
    assert len(text.split()) > 4
    assert "None" not in text
    assert SHORT[verdict]


def test_assets_are_told_one_after_the_other() -> None:
    text = sentences([finding(), finding("labels", "as if unprotected", 39.0, asset="labels")])["the server"]
    first, second = text.split("; ", 1)[0], text[text.index("reads the labels") :]
    assert "cannot rebuild" in first
    assert second
