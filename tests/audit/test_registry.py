from __future__ import annotations

import pytest

from fedveil.audit.registry import ATTACKS, attack_at, target_of
from fedveil.errors import ConfigError


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_name_leads_to_a_function(name: str) -> None:
    assert callable(attack_at(target_of(name)))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"Unknown attack 'idgl'\. Did you mean 'idlg'"):
        target_of("idgl")
