"""Fixtures for tests that talk to a running server, and profiles of the property tests.

The profiles quick and full try the same examples every time, so that a failure is of the change and
not of chance. The models of the machines have few of them in the quick profile; ``make test-all``
takes the full one. HYPOTHESIS_PROFILE=thorough looks for new examples.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.support.servers import ServerProcess

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}

SAME = {"derandomize": True, "database": None, "stateful_step_count": 30, **COMMON}

settings.register_profile("quick", max_examples=60, **SAME)
settings.register_profile("full", max_examples=240, **SAME)
settings.register_profile("thorough", max_examples=500, stateful_step_count=80, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

if settings().derandomize:
    # Hypothesis also tries constants that it finds in the modules imported so far: those depend on
    # which tests the same worker has run before.
    providers._get_local_constants = lambda: providers._local_constants


WORKERS_MAX = 8


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two workers for each core: tests wait for the disk or a process half of the time.

    Each starts servers of its own, so there are not many where there are many cores.
    """
    linux = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if linux else os.cpu_count() or 1
    return min(2 * cores, WORKERS_MAX)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers share the tests, those that need a JVM go first.

    A worker without work takes from the end of another's list, so that one worker keeps them, and
    one JVM is enough. The longest of them start processes, and are the first of all.
    """
    if not hasattr(config, "workerinput"):
        return

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("spark") is None:
            return 2
        return int(item.path not in long)

    # Whole modules, because their tests share servers.
    marked = (item for item in items if item.get_closest_marker("spark"))
    long = {item.path for item in marked if item.get_closest_marker("long")}
    items.sort(key=rank)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this test alone, which it may kill and restart."""
    with ServerProcess(tmp_path / "data") as running:
        yield running
