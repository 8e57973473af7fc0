"""A driver that is killed in the middle of a batch loses no message and doubles none."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from contrail_client import Contrail, Message
from tests.support.servers import ServerProcess

MESSAGES = 12_000
LIMIT = 1_000
KILLED_AT = (2, 5, 8)
"""Number of batches in the log of the query when it is killed; the last is not finished."""
START_TIMEOUT_S = 180

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def start(server: ServerProcess, folder: Path) -> subprocess.Popen[bytes]:
    """Start the job in a process group of its own, which has its JVM too."""
    command = [sys.executable, "-m", "tests.spark.follow_job", server.url, str(folder), str(LIMIT)]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def batches_begun(folder: Path) -> int:
    found = (folder / "checkpoint" / "offsets").glob("*")
    return sum(path.name.isdigit() for path in found)


def wait_for_batch(job: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Wait until ``count`` batches have begun; the job must not end before."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while batches_begun(folder) < count:
        assert time.monotonic() < deadline
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(0.01)


def test_a_driver_killed_in_the_middle_reads_every_message_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ServerProcess(tmp_path / "data") as server, Contrail(server.url) as client:
        client.ensure_stream("S", {"subjects": ["s.>"], "shards": 3, "shard_by": [2]})
        for first in range(0, MESSAGES, 1_000):
            messages = [Message(f"s.{at % 40}.x", str(at)) for at in range(first, first + 1_000)]
            client.publish_batch("S", messages).raise_refused()
        for count in KILLED_AT:
            job = start(server, tmp_path)
            try:
                wait_for_batch(job, tmp_path, count)
            finally:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        last = start(server, tmp_path)
        assert last.wait(START_TIMEOUT_S) == 0
    rows = spark.read.parquet(str(tmp_path / "out")).select("shard", "seq", "data").collect()
    assert sorted(int(bytes(row.data)) for row in rows) == list(range(MESSAGES))
    assert len({(row.shard, row.seq) for row in rows}) == MESSAGES
