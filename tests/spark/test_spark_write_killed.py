"""A driver that is killed in the midst of writing a stream, and started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from contrail_client import Contrail
from contrail_spark import session
from tests.spark.stored import texts
from tests.support.servers import ServerProcess

FILES = 20
LINES = 2_000
KILLS_AT = (0.25, 0.65)
"""Parts of all messages that are stored when the driver is killed."""

pytestmark = [pytest.mark.spark, pytest.mark.long]


@contextmanager
def driver(server: ServerProcess, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver with its JVM and its workers: a group of processes that end with the context."""
    arguments = [server.url, str(folder / "lines"), str(folder / "checkpoint")]
    command = [sys.executable, "-m", "tests.spark.query_to_stream", *arguments]
    with (folder / "driver.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield process
    finally:
        # At the end of the query the group may be gone.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def count(client: Contrail) -> int:
    return client.get_stream("S").state.messages


def is_stored(client: Contrail, seq: int) -> bool:
    """Wait a few seconds until there is a message with this sequence."""
    return bool(client.read_range("S", from_seq=seq, limit=1, wait="5s").messages)


def test_killed_driver_loses_and_repeats_nothing(tmp_path: Path) -> None:
    try:
        session.find_java()
    except session.JavaNotFoundError as error:
        pytest.skip(str(error))
    lines = tmp_path / "lines"
    lines.mkdir()
    for file in range(FILES):
        numbers = range(file * LINES, (file + 1) * LINES)
        (lines / f"{file:03}.txt").write_text("\n".join(map(str, numbers)))
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"], "duplicate_window": "100ms"})
        before = 0
        for part in KILLS_AT:
            with driver(server, tmp_path) as process:
                while not is_stored(client, int(part * FILES * LINES)):
                    assert process.poll() is None, (tmp_path / "driver.log").read_text()
            assert before < count(client) < FILES * LINES
            before = count(client)
        with driver(server, tmp_path) as process:
            assert process.wait() == 0, (tmp_path / "driver.log").read_text()
        assert sorted(map(int, texts(server.url, "S"))) == list(range(FILES * LINES))
