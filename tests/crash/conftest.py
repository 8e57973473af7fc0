"""Fixtures of the crash tests: the zygote, and folders for data."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.crash.zygote import Zygote

_MEMORY: Final = Path("/dev/shm")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """A process that forks lives, which makes them cheap."""
    with Zygote() as running:
        yield running


@pytest.fixture
def area() -> Iterator[Path]:
    """A folder, in memory if possible: the tests simulate syncs, so no real disk is needed."""
    yield from _directory()


@pytest.fixture(scope="module")
def lasting_area() -> Iterator[Path]:
    """As `area`, for all tests of a module."""
    yield from _directory()


def _directory() -> Iterator[Path]:
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="contrail-", dir=base) as directory:
        yield Path(directory)
