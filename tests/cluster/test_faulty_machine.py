"""A server on a faulty machine stores nothing on top of a doubtful state, and ends."""

import sys
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from tests.support.servers import TIMEOUT_S, ServerProcess

FAULTY = """
import runpy
from contrail_storage.core.commands import Append
from contrail_storage.core.stream.stream_machine import HANDLERS

def fault(*_):
    raise ZeroDivisionError("a fault of the machine")

HANDLERS[Append] = fault
runpy.run_module("contrail_serve", run_name="__main__")
"""


class FaultyServer(ServerProcess):
    """A server that cannot append messages."""

    program: ClassVar = (sys.executable, "-c", FAULTY)


@pytest.mark.cluster
def test_entry_that_cannot_be_applied_ends_the_process_with_status_1(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    with FaultyServer(data_dir) as faulty, faulty.client() as client:
        client.put("/v1/streams/S", json={"subjects": ["a"]}).raise_for_status()
        answer = client.post("/v1/subjects/a/messages", content=b"x")
        assert answer.status_code == 504
        assert answer.json()["name"] == "outcome_unknown"
        assert faulty.wait() == 1
        log = faulty.log.read_text()
        assert "a fault of the machine" in log
    with ServerProcess(data_dir) as sound:
        found = httpx.get(f"{sound.url}/v1/streams/S/messages/1", timeout=TIMEOUT_S)
        assert found.content == b"x"
