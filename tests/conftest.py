"""What every test may rely on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Started in the background (nohup, a job of a shell without job control) a process ignores SIGINT, and so do its
# children: tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_parts_are_forgotten() -> Iterator[None]:
    """Schemes, data and models that a test registers are gone after it."""
    from fedveil.data.sources import EMBEDDED
    from fedveil.models.catalogue import _CATALOGUE
    from fedveil.schemes.registry import _SCHEMES

    registries: tuple[dict[str, Any], ...] = (EMBEDDED, _CATALOGUE, _SCHEMES)
    before = [dict(registry) for registry in registries]
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)
