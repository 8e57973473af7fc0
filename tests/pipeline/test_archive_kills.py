"""`contrail pipeline archive` killed in the midst, and two of them at once."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_client import Contrail, Message
from contrail_spark import session
from contrail_spark.lake.store import Lake
from tests.pipeline.archives import check_same
from tests.pipeline.commands import run, running
from tests.support.servers import ServerProcess

SEED = 16
KILLS = 5
KILLS_MIN = 4
BUDGET_S = 60.0
"""After this time there are no more kills: on a busy machine each takes half a minute."""
SHARDS = 2
MESSAGES = 2_000
"""Published before each kill."""
PAYLOAD = 4_000
LATER_MAX_S = 1.5
TIMEOUT_S = 300.0

pytestmark = [pytest.mark.spark, pytest.mark.long]


@pytest.fixture(scope="module", autouse=True)
def java() -> None:
    try:
        session.find_java()
    except session.JavaNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with the empty stream S."""
    with ServerProcess(tmp_path / "data") as server:
        with Contrail(server.url) as client:
            client.create_stream("S", {"subjects": ["s.>"], "shards": SHARDS, "shard_by": [2]})
        yield server


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
    interrupted = rounds = 0
    begun = time.monotonic()
    while rounds < KILLS_MIN or (rounds < KILLS and time.monotonic() - begun < BUDGET_S):
        rounds += 1
        publish(server, chance, MESSAGES)
        number, before = Lake.open(lake).state().number, written(lake)
        with running(log, *arguments) as process:
            # The JVM takes most of the time; what may break comes after it.
            later_s = chance.random() * LATER_MAX_S
            while process.poll() is None and not written(lake) - before:
                never.wait(0.005)
            while process.poll() is None and later_s > 0:
                never.wait(0.01)
                later_s -= 0.01
            # The job, its JVM and its workers at once.
            interrupted += process.poll() is None
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert Lake.open(lake).state().number >= number
    assert interrupted > rounds // 3
    status, result = run(*arguments)
    assert status == 0, result
    state = check_same(lake, url)
    assert sum(each.messages for each in state.files.values()) == rounds * MESSAGES


def test_two_archives_at_once_do_the_work_once(server: ServerProcess, tmp_path: Path) -> None:
    chance = random.Random(SEED)
    lake, url = tmp_path / "lake", server.url
    publish(server, chance, 4 * MESSAGES)
    # Another size of files makes other pieces, so that only one of the two can be right.
    common = ["archive", "S", str(lake), "--server", url]
    log = tmp_path / "job.log"
    with running(log, *common, "--file-size", "1m") as process:
        status, result = run(*common)
        assert status == 0, result
        assert process.wait(TIMEOUT_S) == 0, log.read_text()
    state = check_same(lake, url)
    assert sum(each.messages for each in state.files.values()) == 4 * MESSAGES
