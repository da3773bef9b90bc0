"""Declarations: what is not declared does not leave."""

from __future__ import annotations

import dataclasses

import pytest

from fedveil.errors import ProtocolError
from fedveil.ledger import Release, check_declared

GRADIENT = Release("upload.gradients", "client", ("server",), "a gradient")


def test_declared_fields_pass() -> None:
    check_declared(["upload.gradients"], [GRADIENT])
    check_declared([], [])


def test_every_undeclared_field_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"upload\.name, upload\.address") as caught:
        check_declared(["upload.gradients", "upload.name", "upload.address"], [GRADIENT])
    assert "upload.gradients" not in str(caught.value)


def test_a_release_without_figures_claims_no_protection() -> None:
    assert (GRADIENT.sensitivity, GRADIENT.noise, GRADIENT.hiding) == (None, "none", "none")


def test_a_declaration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        GRADIENT.noise = "gaussian"  # type: ignore[misc]
