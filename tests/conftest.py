"""What every test may rely on."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

# Started in the background (nohup, a job of a shell without job control) a process ignores SIGINT, and so do its
# children: tests that press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Temporary files are kept in memory where there is room and programs may run from: tests replace tens of thousands of
# small files, and where a file is replaced a disk's file system has its content written out at once.
MEMORY = "/dev/shm"
if (
    "TMPDIR" not in os.environ
    and os.access(MEMORY, os.W_OK | os.X_OK)
    and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    and shutil.disk_usage(MEMORY).free > 4 << 30
):
    os.environ["TMPDIR"] = MEMORY
    tempfile.tempdir = None  # asked for before

# Until everything is collected (`pytest_collection_finish`): nothing of it is garbage.
gc.disable()

LONG = ("test_real_runs.py", "test_readme.py", "test_how_to.py", "test_distinguishing.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that no process is left with one when the others are done."""
    items.sort(key=lambda item: item.path.name not in LONG)


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end: the garbage collector need not look at it, nor often."""
    gc.freeze()
    gc.set_threshold(5_000, 20, 50)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def power_stays_on() -> Iterator[None]:
    """Nothing waits for the disk: what a killed process has written is with the kernel, and no test cuts the power.

    Processes that tests start wait for it as ever.
    """
    with mock.patch.object(os, "fsync", lambda handle: os.fstat(handle) and None):
        yield


@pytest.fixture(autouse=True)
def draws_are_the_same_every_time() -> None:
    """What is drawn without a seed of its own does not hang on the tests before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


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
