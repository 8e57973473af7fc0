"""Kills of drivers, executors and storage nodes in the middle of Spark jobs and of archiving.

``python -m tests.spark.kills [--kills N] [--seed N]`` kills at random moments, in turn on one node
and on a cluster of three, and compares each result with its source, row by row. It fails if a row
was lost, doubled or changed. A seed repeats the same kills, at about the same times.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from contrail_client import Contrail, ContrailError, Message
from tests.pipeline.archives import lake_rows
from tests.spark.killed_job import KINDS, LIMIT
from tests.spark.spark_cluster import (
    ENTRYPOINT,
    SparkCluster,
    container_environment,
    spark_cluster,
)
from tests.spark.stored import stored
from tests.support.servers import ServerProcess, SplitServers

VICTIMS: Final = ("driver", "executor", "node")
MESSAGES: Final = 100_000
ARCHIVE: Final = "archive"
"""The job `contrail pipeline archive`, beside the kinds of `tests.spark.killed_job`."""
ARCHIVED_BYTES: Final = 1_000
"""Of a payload, so that there are many files. Its bytes are random: progress is that of files."""
NODES: Final = 3
PROGRESS_S: Final = 300.0
POLL_S: Final = 0.005
LATER_S: Final = 0.4
COLUMNS: Final = ("shard", "seq", "time", "subject", "headers", "data")
ID: Final = "Nats-Msg-Id"


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill ``victim`` when this part of all messages has passed, and ``later_s`` later."""

    victim: str
    at: float
    later_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.victim} at {self.at:.2f}"


@dataclass(frozen=True, slots=True)
class Nodes:
    """One server, or three storage nodes behind an api: whatever may be killed while it serves."""

    servers: ServerProcess | SplitServers

    @property
    def replicas(self) -> int:
        """Copies of each stream."""
        return 1 if isinstance(self.servers, ServerProcess) else NODES

    @property
    def url(self) -> str:
        """The address that jobs use. With several nodes, it serves on when a node is killed."""
        if isinstance(self.servers, ServerProcess):
            return self.servers.url
        return self.servers.apis[0].url

    def kill(self, stream: str, has_gone_on: Callable[[], bool]) -> None:
        """Kill the server, or a stream's leader until the job has gone on, and start it again."""
        if isinstance(self.servers, ServerProcess):
            self.servers.kill()
        else:
            with Contrail(self.url) as client:
                leader = client.get_stream(stream).cluster["leader"]
            [node] = (one for one in self.servers.storages if one.settings["node"] == leader)
            node.kill()
            wait_until(has_gone_on)
        self.servers.start()


class Job:
    """A job with its driver, which is a process group that has the driver's JVM too."""

    def __init__(
        self, kind: str, nodes: Nodes, spark: SparkCluster, folder: Path, messages: int
    ) -> None:
        self._kind = kind
        self._nodes = nodes
        self._spark = spark
        self._folder = folder
        self._messages = messages
        self._client = Contrail(nodes.url)
        self._passed = 0.0
        self._driver = self._start()

    def kill(self, kill: Kill, chance: random.Random) -> None:
        """Wait for the moment of a kill, and do it while the driver is at work."""
        wait_until(lambda: self._progress() > kill.at or not self._runs())
        wait_some(kill.later_s)
        assert self._runs(), f"the job ended before {kill}:\n{self.log.read_text()}"
        if kill.victim == "driver":
            self._end_driver()
            self._driver = self._start()
        elif kill.victim == "executor":
            wait_until(lambda: bool(self._spark.newest_executors()))
            os.kill(chance.choice(self._spark.newest_executors()), signal.SIGKILL)
        else:
            before = self._progress()
            stream = "SOURCE" if self._kind == ARCHIVE else "OUT"
            self._nodes.kill(stream, lambda: self._progress() > before or not self._runs())

    def finish(self) -> None:
        """Wait until the job has ended by itself."""
        status = self._driver.wait(PROGRESS_S)
        assert status == 0, self.log.read_text()

    def close(self) -> None:
        """Kill what is left."""
        self._end_driver()
        self._client.close()

    @property
    def log(self) -> Path:
        """What all drivers of the job have printed."""
        return self._folder / "driver.log"

    def _start(self) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*ENTRYPOINT, "-m", *self._command()],
                env=container_environment("job"),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _command(self) -> list[str]:
        url, master = self._nodes.url, self._spark.address
        if self._kind != ARCHIVE:
            return ["tests.spark.killed_job", self._kind, url, master, str(self._folder)]
        what = [ARCHIVE, "SOURCE", str(self._folder / "lake"), "--file-size", "1m"]
        return ["contrail_pipeline", *what, "--server", url, "--master", master]

    def _progress(self) -> float:
        """The part of all messages that has passed."""
        if self._kind == "files":
            begun = (self._folder / "checkpoint" / "offsets").glob("*")
            passed = (sum(path.name.isdigit() for path in begun) - 1) * LIMIT
            return passed / self._messages
        if self._kind == ARCHIVE:
            lake = self._folder / "lake"
            passed = sum(map(size_of, [*lake.glob("data/**/*.parquet"), *lake.glob("tmp/*")]))
            return passed / (self._messages * ARCHIVED_BYTES)
        with suppress(ContrailError):
            self._passed = self._client.get_stream("OUT").state.messages / self._messages
        return self._passed

    def _runs(self) -> bool:
        return self._driver.poll() is None

    def _end_driver(self) -> None:
        # At the end of the job the group may be gone.
        with suppress(ProcessLookupError):
            os.killpg(self._driver.pid, signal.SIGKILL)
        self._driver.wait()


def survive(
    kind: str,
    kills: Sequence[Kill],
    nodes: Nodes,
    spark: SparkCluster,
    folder: Path,
    *,
    messages: int = MESSAGES,
    chance: random.Random,
) -> None:
    """Run a job of ``kind`` through ``kills``, and compare its result with its source."""
    folder.mkdir()
    payloads = map(str.encode, map(str, range(messages)))
    if kind == ARCHIVE:
        payloads = (chance.randbytes(ARCHIVED_BYTES) for _ in range(messages))
    fill(nodes, payloads, window="1h" if kind == "write" else "100ms")
    job = Job(kind, nodes, spark, folder, messages)
    try:
        for kill in sorted(kills, key=lambda one: one.at):
            job.kill(kill, chance)
        job.finish()
    finally:
        job.close()
    assert differences(kind, nodes.url, folder) == []


def fill(nodes: Nodes, payloads: Iterable[bytes], window: str) -> None:
    """Create both streams, and publish to SOURCE; every tenth message has headers."""
    with Contrail(nodes.url) as client:
        common = {"shards": 3, "shard_by": [2], "num_replicas": nodes.replicas}
        client.ensure_stream("SOURCE", {"subjects": ["in.>"], **common})
        client.ensure_stream("OUT", {"subjects": ["out.>"], "duplicate_window": window, **common})
        numbered = (
            Message(f"in.{at % 40}.x", payload, headers={} if at % 10 else {"A": ["1", str(at)]})
            for at, payload in enumerate(payloads)
        )
        for result in client.publish_all("SOURCE", numbered, batch_size=2_000):
            result.raise_refused()


def differences(kind: str, url: str, folder: Path) -> list[str]:
    """Rows of SOURCE that the result has not exactly once, and rows that only the result has."""
    source = stored(url, "SOURCE", *COLUMNS)
    if kind == ARCHIVE:
        expected = Counter(map(_whole, source))
        found = Counter(map(_whole, lake_rows(folder / "lake")))
    elif kind == "files":
        expected = Counter(map(_whole, source))
        files = pq.read_table(folder / "files", coerce_int96_timestamp_unit="us")
        found = Counter(map(_whole, files.to_pylist()))
    else:
        expected = Counter(map(_copied, source))
        found = Counter(map(_published, stored(url, "OUT", *COLUMNS)))
    rows = sorted(((expected - found) | (found - expected)).keys())
    return [f"{row}: {found[row]} instead of {expected[row]}" for row in rows]


def _whole(row: dict[str, Any]) -> tuple[object, ...]:
    # Spark's files have times without a zone.
    time_utc = row["time"].replace(tzinfo=None)
    return (row["shard"], row["seq"], time_utc, row["subject"], _headers(row), row["data"])


def _copied(row: dict[str, Any]) -> tuple[object, ...]:
    """What OUT has to have of a row of SOURCE."""
    place = f"SOURCE:{row['shard']}:{row['seq']}"
    return (place, row["subject"].replace("in.", "out."), _headers(row), row["data"])


def _published(row: dict[str, Any]) -> tuple[object, ...]:
    """A row of OUT, with its id instead of its place."""
    [place] = dict(row["headers"])[ID]
    return (place, row["subject"], _headers(row), row["data"])


def _headers(row: dict[str, Any]) -> tuple[object, ...]:
    return tuple((name, *values) for name, values in row["headers"] or () if name != ID)


def size_of(path: Path) -> int:
    """The size of a file; 0 if it is gone."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait for a condition."""
    deadline_s = time.monotonic() + PROGRESS_S
    while not happened():
        assert time.monotonic() < deadline_s, "no progress"
        time.sleep(POLL_S)


def wait_some(seconds: float) -> None:
    """Let a job go on, so that a kill comes at any moment of a batch."""
    time.sleep(seconds)


def main() -> int:
    """Kill until it is enough, and print; returns the exit status."""
    arguments = _arguments()
    done = 0
    print(f"seed {arguments.seed}", flush=True)
    with ExitStack() as stack:
        folder = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        spark = stack.enter_context(spark_cluster(folder))
        for number in itertools.count(arguments.first):
            if done >= arguments.kills:
                break
            chance = random.Random(f"{arguments.seed} {number}")
            kinds = [*KINDS, ARCHIVE]
            kind = kinds[number % len(kinds)]
            kills = [
                Kill(victim, chance.uniform(0.02, 0.9), chance.uniform(0.0, LATER_S))
                for victim in VICTIMS
            ]
            place = folder / f"round{number}"
            place.mkdir()
            # Each kind meets both, in turns.
            whole = (number + number // len(kinds)) % 2 == 0
            nodes = Nodes(
                ServerProcess(place / "data") if whole else SplitServers(place / "nodes", NODES)
            )
            texts = ", ".join(map(str, kills))
            print(f"{number}: {kind}, nodes: {nodes.replicas}, {texts} ... ", end="", flush=True)
            begun_s = time.monotonic()
            with nodes.servers:
                survive(kind, kills, nodes, spark, place / "job", chance=chance)
            print(f"as its source, {time.monotonic() - begun_s:.0f} s", flush=True)
            done += len(kills)
    print(f"{done} kills, nothing lost or doubled")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.spark.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--first", type=int, default=0, help="round to start with, to repeat it")
    parser.add_argument("--keep", type=Path, help="keep data and logs in this folder")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
