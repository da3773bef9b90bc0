"""Settings as editors know them: written from their one declaration, and taken by `train`."""

from __future__ import annotations

import inspect
from typing import get_overloads

from fedveil.api import train
from tools.typed_settings import MODULE, module


def test_the_typed_settings_are_those_that_are_declared() -> None:
    assert MODULE.read_text(encoding="utf-8") == module(), "write them again: python -m tools.typed_settings"


def test_what_editors_are_told_of_train_is_what_it_takes() -> None:
    named, _ = get_overloads(train)
    told, taken = (inspect.signature(function).parameters for function in (named, train))
    assert [*told] == [*taken]
    for name in told:
        if name not in ("scheme", "settings"):  # a name, with which settings are known; and what the settings are
            assert (told[name].annotation, told[name].default) == (taken[name].annotation, taken[name].default)
