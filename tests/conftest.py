"""Fixtures for tests that talk to a running server, and profiles of the property tests.

The quick profile tries the same examples every time, so that a failure is of the change and not of
chance; HYPOTHESIS_PROFILE=thorough looks for new ones.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support.servers import ServerProcess

COMMON = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
    "print_blob": True,
}

settings.register_profile(
    "quick", max_examples=60, derandomize=True, stateful_step_count=30, database=None, **COMMON
)
settings.register_profile("thorough", max_examples=500, stateful_step_count=80, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(scope="session", params=["fast-lane", "reference-lane"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A running server, once through the dispatcher and once through the declared routes."""
    fast_lane = "on" if request.param == "fast-lane" else "off"
    data_dir = tmp_path_factory.mktemp(request.param) / "data"
    with ServerProcess(data_dir, fast_lane=fast_lane) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """An HTTP client of the running server."""
    with server.client() as opened:
        yield opened


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of this test alone, which it may kill and restart."""
    with ServerProcess(tmp_path / "data") as running:
        yield running
