"""`contrail pipeline archive` killed in the midst, and two of them at once."""

import random
import threading
from pathlib import Path

import pytest

from contrail_client import Contrail, Message
from contrail_spark.lake.store import Lake
from tests.pipeline.archives import check_same
from tests.pipeline.commands import run, running
from tests.support.servers import ServerProcess

SEED = 16
LATER_S = (0.0, 0.4)
"""When the job is killed after it has begun to write; `test_archive_parts.py` has all steps."""
SHARDS = 2
MESSAGES = 2_000
"""Published before each kill."""
PAYLOAD = 4_000
TIMEOUT_S = 300.0

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.usefixtures("spark")]


@pytest.fixture
def server(own_server: ServerProcess) -> ServerProcess:
    """A server with the empty stream S."""
    with Contrail(own_server.url) as client:
        client.create_stream("S", {"subjects": ["s.>"], "shards": SHARDS, "shard_by": [2]})
    return own_server


def publish(server: ServerProcess, chance: random.Random, count: int) -> None:
    with Contrail(server.url) as client:
        for _ in range(0, count, 500):
            few = [Message(f"s.{at % 8}.x", chance.randbytes(PAYLOAD)) for at in range(500)]
            client.publish_batch("S", few).raise_refused()


def written(lake: Path) -> set[Path]:
    """Files of the lake, also unfinished ones and those that no commit has added."""
    return {*lake.glob("data/date=*/*.parquet"), *(lake / "tmp").iterdir()}


def test_killed_archives_lose_and_repeat_nothing(server: ServerProcess, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    lake, log, url = tmp_path / "lake", tmp_path / "job.log", server.url
    arguments = ["archive", "S", str(lake), "--server", url, "--file-size", "1m"]
    assert run(*arguments)[0] == 0
    never = threading.Event()
    interrupted = 0
    for later_s in LATER_S:
        publish(server, chance, MESSAGES)
        number, before = Lake.open(lake).state().number, written(lake)
        with running(log, *arguments) as process:
            while process.poll() is None and not written(lake) - before:
                never.wait(0.005)
            never.wait(later_s)
            # The job, its JVM and its workers at once.
            interrupted += process.poll() is None
        assert Lake.open(lake).state().number >= number
    assert interrupted
    status, result = run(*arguments)
    assert status == 0, result
    state = check_same(lake, url)
    assert sum(each.messages for each in state.files.values()) == len(LATER_S) * MESSAGES


def test_two_archives_at_once_do_the_work_once(server: ServerProcess, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    lake, url = tmp_path / "lake", server.url
    publish(server, chance, 4 * MESSAGES)
    # Another size of files makes other pieces, so that only one of the two can be right.
    common = ["archive", "S", str(lake), "--server", url]
    log = tmp_path / "job.log"
    with running(log, *common, "--file-size", "1m") as process:
        while not any(lake.rglob("*.parquet")):
            assert process.poll() is None, log.read_text()
        status, result = run(*common)
        assert status == 0, result
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    state = check_same(lake, url)
    assert sum(each.messages for each in state.files.values()) == 4 * MESSAGES
