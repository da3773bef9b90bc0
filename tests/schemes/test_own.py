"""A scheme of one's own has options like ours: known by its signature, checked by its types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from fedveil.downlink import Plain
from fedveil.errors import ConfigError
from fedveil.own_code import OwnCode
from fedveil.protocol.parts import Scheme
from fedveil.schemes import Setting, find, info_of, scheme
from fedveil.uplink.plain import Bare
from fedveil.work import Batches, CrossEntropy, Gradients, Schedule

SETTING = Setting(CrossEntropy(), Batches(0, 1), Schedule(0.1))


@dataclass(frozen=True)
class Group:
    """Options that several schemes share.

    Args:
        keep: How much stays.
    """

    keep: float = 0.5
    seats: int | None = None


def own(
    setting: Setting,
    *,
    group: Group,
    other: Group = Group(keep=0.25),  # noqa: B008
    way: Literal["near", "far"] = "near",
    loud: bool = False,
    title: str = "own",
) -> Scheme:
    """A scheme that says what it was given.

    Args:
        way: Which of two ways it goes, told
            on two lines.
        loud: Whether it is heard.
    """
    name = f"{group.keep}/{other.keep}/{group.seats}/{way}/{loud}/{title}"
    return Scheme(name=name, downlink=Plain(), work=Gradients(setting.loss, setting.batches), uplink=Bare())


INFO = info_of(own, where="here")


def test_options_are_the_signature_with_groups_opened() -> None:
    assert INFO.options == {"keep": 0.25, "seats": None, "way": "near", "loud": False, "title": "own"}
    texts = {name: one.type_text for name, one in INFO.declared.items()}
    assert texts == {"keep": "float", "seats": "int", "way": "near | far", "loud": "bool", "title": "str"}
    words = {name: one.words for name, one in INFO.declared.items() if one.words}
    assert words == {
        "keep": "How much stays.",
        "way": "Which of two ways it goes, told on two lines.",
        "loud": "Whether it is heard.",
    }
    assert (INFO.name, INFO.summary) == ("own", "A scheme that says what it was given.")


def test_values_reach_the_function_and_every_group_that_has_them() -> None:
    assert INFO.assemble(SETTING, {}).name == "0.5/0.25/None/near/False/own"
    given = {"keep": 1, "seats": 3, "way": "far", "loud": True, "title": "x"}
    assert INFO.assemble(SETTING, given).name == "1.0/1.0/3/far/True/x"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"kep": 1.0}, r"Scheme 'own' has no option 'kep'\. Did you mean 'keep'\? It takes: keep, seats, way"),
        ({"keep": "much"}, r"Option 'keep' of scheme 'own' must be float \(default 0.25\), not 'much'"),
        ({"keep": True}, "'keep' of scheme 'own' must be float"),
        ({"seats": 1.5}, "'seats' of scheme 'own' must be int"),
        ({"loud": 1}, "'loud' of scheme 'own' must be bool"),
        ({"title": 3}, "'title' of scheme 'own' must be str.*in quotes"),
        ({"way": "fat"}, r"Unknown way 'fat'\. Did you mean 'far'"),
        ({"way": 2}, r"'way' of scheme 'own' must be near \| far"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        INFO.assemble(SETTING, options)


def listed(setting: Setting, *, sizes: list[int] = []) -> Scheme:  # noqa: B006
    raise AssertionError


def bare(setting: Setting, *, keep: float) -> Scheme:
    raise AssertionError


def anything(setting: Setting, **given: float) -> Scheme:
    raise AssertionError


@pytest.mark.parametrize(
    ("function", "complaint"),
    [(listed, "options are int, float, bool, str"), (bare, "needs a default"), (anything, "name its options")],
)
def test_a_signature_from_which_options_cannot_be_known_is_refused(function: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        info_of(function, where="here").assemble(SETTING, {})


def broken(setting: Setting) -> Scheme:
    raise KeyError("lost")


def odd(setting: Setting) -> Scheme:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("function", "complaint"), [(broken, "Scheme 'broken' raised KeyError: 'lost'"), (odd, "gave NoneType, not a")]
)
def test_what_goes_wrong_inside_is_told_as_the_schemes(function: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        info_of(function, where="here").assemble(SETTING, {})


def test_the_name_of_a_scheme_that_comes_along_cannot_be_taken() -> None:
    with pytest.raises(ConfigError, match="'lossless' is a scheme that comes with FedVeil"):
        scheme("lossless")(own)


def test_only_a_name_of_its_own_type_is_imported() -> None:
    with pytest.raises(ConfigError, match=r"names code as its scheme.*nothing was run"):
        find("json:loads")
    with pytest.raises(ConfigError, match="is a function"):
        find(OwnCode("math:pi"))
