"""What a client accepts of a run's settings, although its owner has pinned no more than the scheme."""

from __future__ import annotations

from typing import Any

import pytest

from fedveil import schemes
from fedveil.config import RunConfig
from fedveil.errors import ConfigError
from fedveil.runs.terms import DEFAULTS, Between, OneOf, RequiredError, check_terms, read_required, terms_of

HOLLOW: list[dict[str, Any]] = [
    {"scheme": "veil-secagg", "threshold": 0.5},
    {"scheme": "veil-secagg", "neighbours": 2},
    {"scheme": "veil-secagg", "clients": 1000, "neighbours": 12},
    {"scheme": "veil-secagg", "clients": 100, "rounds": 100, "neighbours": 28},
    {"scheme": "veil-secagg", "collusion": 0.0},
    {"scheme": "veil-secagg", "value_range": 1e-3},
    {"scheme": "veil-secagg", "value_range": 2.0**50},
    {"scheme": "veil-secagg", "unmask": "on-dropout"},
    {"scheme": "veil-secagg", "cohort": 2},
    {"scheme": "ldp", "clip": 1e-9},
    {"scheme": "ldp", "clip": 1e9},
    {"scheme": "ldp", "epsilon": 1e6},
    {"scheme": "ldp", "epsilon_per_client": "1,1e6,1"},
    {"scheme": "ldp", "delta": 0.5},
    {"scheme": "nadp", "neighbours": 1},
    {"scheme": "nadp", "accounting": "paper"},
    {"scheme": "nadp", "honest_arrivals": True},
    {"scheme": "nadp", "skip_cancelling": True},
    {"scheme": "paraaegis", "threshold": 0.51},
    {"scheme": "dp-fedavg", "clip": 1e-6},
]


def config(**settings: Any) -> RunConfig:
    return RunConfig(**{"clients": 10, "seed": 1, "secrets": "os", **settings})


@pytest.mark.parametrize("settings", HOLLOW, ids=str)
def test_a_server_does_not_hollow_out_the_scheme_that_was_pinned(settings: dict[str, Any]) -> None:
    pinned = read_required({"scheme": settings["scheme"]}, where="client.toml")
    with pytest.raises(RequiredError, match="this client accepts"):
        check_terms(config(**settings), pinned, where="client.toml")


@pytest.mark.parametrize("settings", HOLLOW, ids=str)
def test_the_owner_may_widen_what_is_accepted(settings: dict[str, Any]) -> None:
    own = {name: value for name, value in settings.items() if name not in ("scheme", "clients")}
    check_terms(config(**settings), read_required(own, where="client.toml"), where="client.toml")


@pytest.mark.parametrize("settings", HOLLOW, ids=str)
def test_a_simulation_protects_nothing_and_is_not_held_to_it(settings: dict[str, Any]) -> None:
    simulated = config(**{**settings, "secrets": "seeded"})
    assert simulated.simulated_secrets
    check_terms(simulated, {}, where="client.toml")


@pytest.mark.parametrize("scheme", [one.name for one in schemes.schemes()])
@pytest.mark.parametrize("clients", [3, 10, 1000])
def test_every_scheme_is_accepted_as_it_is(scheme: str, clients: int) -> None:
    check_terms(config(scheme=scheme, clients=clients), {}, where="client.toml")


def test_a_range_of_the_owners_replaces_the_default_one() -> None:
    own = read_required({"clip": {"min": 0.5, "max": 2}, "threshold": {"min": 0.8}}, where="client.toml")
    assert own == {"clip": Between(0.5, 2.0), "threshold": Between(0.8)}
    check_terms(config(scheme="ldp", clip=2.0), {"clip": own["clip"]}, where="client.toml")
    for clip in (0.4, 2.1):
        with pytest.raises(RequiredError, match=r"requires 0\.5 to 2"):
            check_terms(config(scheme="ldp", clip=clip), {"clip": own["clip"]}, where="client.toml")
    with pytest.raises(RequiredError, match=r"requires at least 0\.8"):
        check_terms(config(scheme="veil-secagg"), {"threshold": own["threshold"]}, where="client.toml")


def test_a_range_bounds_a_setting_where_a_scheme_has_it_and_a_value_asks_for_it() -> None:
    own = read_required({"clip": {"max": 2}, "neighbours": {"min": 4}}, where="client.toml")
    check_terms(config(scheme="veil-secagg"), own, where="client.toml")
    with pytest.raises(RequiredError, match="clip = None"):
        check_terms(config(scheme="veil-secagg"), read_required({"clip": 1.0}, where="x"), where="client.toml")


@pytest.mark.parametrize("value", [{}, {"least": 1}, {"min": "a"}, {"min": True}], ids=str)
def test_a_range_that_is_none_is_named(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"clip must be a value, a list, or"):
        read_required({"clip": value}, where="client.toml")


def test_every_bound_is_shown_once_with_where_it_comes_from() -> None:
    lines = terms_of({"clip": OneOf((1.0,)), "lr": OneOf((0.1,))}, where="client.toml")
    assert len({one.setting for one in lines}) == len(lines)
    sources = {one.setting: one.source for one in lines}
    assert sources["clip"] == sources["lr"] == "require in client.toml"
    assert all(sources[name].startswith("default") for name in {*DEFAULTS, "scheme", "neighbours", "cohort"} - {"clip"})


@pytest.mark.parametrize(
    ("cohort", "required", "accepted"),
    [
        (None, {"min": 11}, False),
        (None, {"min": 10}, True),
        (0.3, {"min": 4}, False),
        (0.5, {"min": 4}, True),
        (3, {"min": 0.5}, False),
        (None, {"min": 0.5}, True),
        (None, 10, True),
        (0.5, [0.5, 0.6], True),
        (0.4, [0.5, 0.6], False),
    ],
)
def test_a_cohort_is_what_a_round_asks_however_the_run_says_it(cohort: Any, required: Any, accepted: bool) -> None:
    own = read_required({"cohort": required}, where="client.toml")
    settings = config(scheme="fedavg", cohort=cohort)
    if accepted:
        check_terms(settings, own, where="client.toml")
        return
    with pytest.raises(RequiredError, match="cohort"):
        check_terms(settings, own, where="client.toml")


@pytest.mark.parametrize(
    ("scheme", "required", "accepted"),
    [
        ("fedavg", {"cohort": {"min": 2}}, False),
        ("fedavg", {"cohort": {"min": 1}}, True),
        ("secagg", {}, True),
        ("secagg", {"cohort": {"min": 3}}, True),
        ("secagg", {"cohort": {"min": 4}}, False),
        ("secagg", {"cohort": {"max": 9}}, False),
        ("secagg", {"sampling_rate": 0.5}, True),
        ("secagg", {"sampling_rate": {"min": 0.6}}, False),
    ],
)
def test_of_sampled_rounds_the_smallest_and_the_largest_must_be_accepted(
    scheme: str, required: dict[str, Any], accepted: bool
) -> None:
    own = read_required(required, where="client.toml")
    settings = config(scheme=scheme, sampling_rate=0.5)
    if accepted:
        check_terms(settings, own, where="client.toml")
        return
    with pytest.raises(RequiredError, match=next(iter(required))):
        check_terms(settings, own, where="client.toml")
