"""Fixtures for tests that talk to a running server."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.servers import ServerProcess


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
