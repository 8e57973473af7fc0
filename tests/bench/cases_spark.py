"""Reading, following and writing with Spark."""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from pyspark.errors import PySparkException

from contrail_client import Contrail
from contrail_client.cli.connection import Session
from contrail_client.cli.context import Context
from contrail_pipeline.archive.rounds import Archiver, Wishes
from contrail_pipeline.job import Job as PipelineJob
from contrail_spark.client import ReplayClient
from contrail_spark.lake.store import Lake
from contrail_spark.options import DEFAULT_SPLIT_BYTES, parse_options
from contrail_spark.session import JavaNotFoundError, Profile, local_session
from contrail_spark.source import ContrailDataSource
from tests.bench.cases_read import STREAM, Source
from tests.bench.figures import Bench, BenchError, Beside, Case, Measured, Run
from tests.bench.http_scripts import PAYLOAD_BYTES, SUBJECTS, Batches
from tests.bench.processes import HOST, Usage
from tests.bench.server import Server, fresh_server, publish_batches

_PREFIX: Final = "bench"
_PARTITIONS: Final = 8
_BATCHES: Final = 5
_TIMES: Final = 5
"""Spark reads so many times the messages of the scale: it takes 0.3 s to begin with any number."""
_RATE: Final = 20_000
_RATE_BATCH: Final = 500
_TIMEOUT_S: Final = 60.0
_LATE_MAX: Final = 0.1
_RECEIVED_BYTES: Final = 64 << 10
_WARM_UP_S: Final = 2.0
"""The first batches of a query compile its code, and are left out."""

Job = Callable[[Any, Source], Callable[[], Run]]
"""Prepares a job in a session, and returns what runs and measures it once."""


@dataclass(frozen=True, slots=True)
class SparkCount:
    """``count()`` through Spark; with ``columns`` only those are read."""

    columns: str | None = None

    def __call__(self, bench: Bench) -> Measured | None:
        """Rows a second; None without Java."""
        rows = bench.scale.messages * _TIMES
        with fresh_server(bench) as server:
            _fill(bench, server, rows)
            runs = _runs(bench, server, self._job, rows)
        return Measured(tuple(runs), note=f"local[2], {rows:,} rows") if runs else None

    def _job(self, session: Any, source: Source) -> Callable[[], Run]:
        return lambda: _counted(session, source, self.columns)


@dataclass(frozen=True, slots=True)
class SparkRows:
    """All columns of all rows, which are then dropped: rows a second, or megabytes of payload.

    ``from_parquet`` reads the same rows from local files, which Spark has written before.
    """

    payload_bytes: int = PAYLOAD_BYTES
    times: int = _TIMES
    from_parquet: bool = False
    in_mb: bool = False

    def __call__(self, bench: Bench) -> Measured | None:
        """The runs; None without Java."""
        rows = bench.scale.messages * self.times
        with fresh_server(bench) as server:
            _fill(bench, server, rows, self.payload_bytes)
            files = bench.folder / "rows.parquet" if self.from_parquet else None
            runs = _runs(bench, server, _Scan(files, self._per_row), rows)
        return Measured(tuple(runs), note=f"local[2], {rows:,} rows") if runs else None

    @property
    def _per_row(self) -> float:
        return self.payload_bytes / 1e6 if self.in_mb else 1.0


def spark_latency(bench: Bench) -> Measured | None:
    """The age of the oldest row of a micro-batch when it is done, at a steady rate: seconds."""
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        runs = _runs(bench, server, _Latency(bench.scale.held_s), 0)
    if not runs:
        return None
    p99 = max(run.p99_s or 0.0 for run in runs)
    return Measured(tuple(runs), note=f"local[2], {_RATE:,} msg/s; p99 {p99:.2f} s, aim 1.5 s")


def spark_stream(bench: Bench) -> Measured | None:
    """A query that reads the stream in five batches and drops the rows: rows a second of them."""
    rows = bench.scale.messages * _TIMES
    with fresh_server(bench) as server:
        _fill(bench, server, rows)
        runs = _runs(bench, server, _following, rows)
    return Measured(tuple(runs), note=f"local[2], {_BATCHES} batches") if runs else None


def spark_write(bench: Bench) -> Measured | None:
    """Rows a second that ``df.write`` stores, with ids; None without Java."""
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        runs = _runs(bench, server, _writing, bench.scale.messages)
        if runs:
            server.check_stored(STREAM, (len(runs) + 1) * bench.scale.messages)
    return Measured(tuple(runs), note=f"local[2], {_PARTITIONS} partitions") if runs else None


def spark_archive(bench: Bench) -> Measured | None:
    """Rows a second that `contrail pipeline archive` adds to a lake; None without Java."""
    rows = bench.scale.messages * _TIMES
    with fresh_server(bench) as server:
        _fill(bench, server, rows)
        runs = _runs(bench, server, _Archiving(bench.folder), rows)
    return (
        Measured(tuple(runs), note="local[2], zstd, without the start of Spark") if runs else None
    )


def _fill(bench: Bench, server: Server, rows: int, payload_bytes: int = PAYLOAD_BYTES) -> None:
    server.create_stream(STREAM, _PREFIX)
    publish_batches(bench, server, STREAM, _PREFIX, rows, payload_bytes)
    server.check_stored(STREAM, rows)


def _runs(bench: Bench, server: Server, job: Job, rows: int) -> list[Run]:
    source = Source(server.port, server.pid, rows)
    # In another process, because the JVM runs until the process that started it ends.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_in_session, source, job, bench.scale.runs).result()


def _in_session(source: Source, job: Job, runs: int) -> list[Run]:
    """The runs of a job after a first one, which warms the JVM up; none without Java."""
    try:
        session = local_session("bench", Profile.BENCH)
    except JavaNotFoundError:
        return []
    try:
        session.dataSource.register(ContrailDataSource)
        measure = job(session, source)
        measure()
        return [measure() for _ in range(runs)]
    except PySparkException as error:
        # It refers to its JVM, so it could not be sent to the other process.
        raise BenchError(f"Spark failed: {error}") from None
    finally:
        session.stop()


def _counted(session: Any, source: Source, columns: str | None) -> Run:
    options = {"url": source.url, "stream": STREAM}
    if columns is not None:
        options["columns"] = columns
    before = Usage.now(source.server_pid)
    rows = session.read.format("contrail").options(**options).load().count()
    after = Usage.now(source.server_pid)
    if rows != source.messages:
        raise BenchError(f"Spark counted {rows} of {source.messages} messages")
    # The JVM is the client, and no part of this process.
    return replace(before.run(after, rows), client_us=None, other_cores=0.0)


def _following(session: Any, source: Source) -> Callable[[], Run]:
    return lambda: _followed(session, source)


def _followed(session: Any, source: Source) -> Run:
    options = {"url": source.url, "stream": STREAM, "startingPosition": "earliest"}
    options["maxMessagesPerTrigger"] = str(-(-source.messages // _BATCHES))
    before = Usage.now(source.server_pid)
    frame = session.readStream.format("contrail").options(**options).load()
    # Without a folder of its own, the checkpoint is in one that Spark deletes after the query.
    query = frame.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    after = Usage.now(source.server_pid)
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    rows = sum(progress["numInputRows"] for progress in batches)
    # The start of a query takes about a second, however much it reads.
    batches_s = sum(progress["durationMs"]["triggerExecution"] for progress in batches) / 1_000
    if rows != source.messages:
        raise BenchError(f"Spark read {rows} of {source.messages} messages")
    return replace(before.run(after, rows), value=rows / batches_s, client_us=None, other_cores=0.0)


def _writing(session: Any, source: Source) -> Callable[[], Run]:
    # Four hashes are a payload of 128 bytes that does not compress.
    hashes = ", ".join(f"sha2(concat({part}, '.', id), 256)" for part in range(4))
    frame = session.range(0, source.messages, 1, _PARTITIONS).selectExpr(
        f"concat('{_PREFIX}.', id % {SUBJECTS}) as subject", f"unhex(concat({hashes})) as data"
    )
    frame.cache().count()
    return lambda: _written(frame, source)


def _written(frame: Any, source: Source) -> Run:
    before = Usage.now(source.server_pid)
    options = {"url": source.url, "stream": STREAM}
    frame.write.format("contrail").options(**options).mode("append").save()
    after = Usage.now(source.server_pid)
    return replace(before.run(after, source.messages), client_us=None, other_cores=0.0)


@dataclass(frozen=True, slots=True)
class _Scan:
    """Reads all columns, from the stream or from files with the same rows."""

    files: Path | None
    per_row: float

    def __call__(self, session: Any, source: Source) -> Callable[[], Run]:
        stream = session.read.format("contrail").options(url=source.url, stream=STREAM)
        if self.files is None:
            return lambda: self._scanned(stream.load(), source)
        # The payloads come again and again: in a dictionary, each would be stored only once.
        written = stream.load().write.option("parquet.enable.dictionary#data", "false")
        written.mode("overwrite").parquet(str(self.files))
        frame = session.read.parquet(str(self.files))
        if frame.count() != source.messages:
            raise BenchError(f"the files have {frame.count()} of {source.messages} rows")
        return lambda: self._scanned(frame, source)

    def _scanned(self, frame: Any, source: Source) -> Run:
        before = Usage.now(source.server_pid)
        frame.write.format("noop").mode("overwrite").save()
        after = Usage.now(source.server_pid)
        run = before.run(after, source.messages)
        return replace(run, value=run.value * self.per_row, client_us=None, other_cores=0.0)


@dataclass(frozen=True, slots=True)
class _Archiving:
    """Archives the whole stream, each time to a new lake."""

    folder: Path

    def __call__(self, session: Any, source: Source) -> Callable[[], Run]:
        return lambda: self._archived(session, source)

    def _archived(self, session: Any, source: Source) -> Run:
        plan = ReplayClient(parse_options({"url": source.url, "stream": STREAM})).plan()
        with TemporaryDirectory(dir=self.folder) as root, Contrail(source.url) as client:
            job = PipelineJob(Session(client, Context(source.url, None), True), None, False)
            wishes = Wishes(None, DEFAULT_SPLIT_BYTES, True)
            archiver = Archiver(job, STREAM, Path(root), wishes)
            lake = Lake.ensure(root, STREAM, plan.incarnation, None)
            before = Usage.now(source.server_pid)
            archiver.catch_up(session, lake, {one.shard: one.last_seq for one in plan.shards})
            after = Usage.now(source.server_pid)
            found = sum(entry.messages for entry in lake.state().files.values())
        if found != source.messages:
            raise BenchError(f"the lake has {found} of {source.messages} messages")
        return replace(before.run(after, source.messages), client_us=None, other_cores=0.0)


@dataclass(frozen=True, slots=True)
class _Latency:
    """Follows a stream to which a thread publishes at a steady rate for some seconds."""

    seconds: float

    def __call__(self, session: Any, source: Source) -> Callable[[], Run]:
        return lambda: self._followed(session, source)

    def _followed(self, session: Any, source: Source) -> Run:
        ages: list[tuple[float, float]] = []

        def look(batch: Any, _: int) -> None:
            oldest = batch.selectExpr("unix_micros(min(time))").first()[0]
            if oldest is not None:
                ages.append((time.monotonic(), time.time() - oldest / 1e6))

        options = {"url": source.url, "stream": STREAM, "startingPosition": "latest"}
        frame = session.readStream.format("contrail").options(**options).load()
        query = frame.writeStream.foreachBatch(look).start()
        query.processAllAvailable()  # it has a position from now on
        before, begun = Usage.now(source.server_pid), time.monotonic()
        with ThreadPoolExecutor(1) as thread:
            published = thread.submit(_publish_steadily, source, _WARM_UP_S + self.seconds).result()
        after = Usage.now(source.server_pid)
        query.processAllAvailable()
        query.stop()
        found = sorted(age for at, age in ages if begun + _WARM_UP_S < at)
        if len(found) < 2:
            raise BenchError(f"the query had {len(found)} batches in {self.seconds} s")
        cuts = statistics.quantiles(found, n=100, method="inclusive")
        run = before.run(after, published, value=cuts[49])
        return replace(run, p50_s=cuts[49], p99_s=cuts[98], client_us=None, other_cores=0.0)


def _publish_steadily(source: Source, seconds: float) -> int:
    """Publish batches at the rate until the time is over; BenchError if it cannot be held."""
    [script] = Batches(STREAM, _PREFIX, _RATE_BATCH, connections=1)()
    batches = int(seconds * _RATE) // _RATE_BATCH
    begun = time.monotonic()
    with socket.create_connection((HOST, source.port), _TIMEOUT_S) as connection:
        for number in range(batches):
            wait_until(begun + number * _RATE_BATCH / _RATE)
            connection.sendall(script.request(b"") or b"")
            answer = b""
            while not script.complete(answer):
                received = connection.recv(_RECEIVED_BYTES)
                if not received:
                    raise BenchError("the server closed the connection")
                answer += received
    late_s = time.monotonic() - begun - seconds
    if late_s > _LATE_MAX * seconds:
        raise BenchError(f"publishing at {_RATE:,} msg/s took {late_s:.1f} s longer than it should")
    return batches * _RATE_BATCH


def wait_until(at_s: float) -> None:
    """Wait for a time of the monotonic clock."""
    time.sleep(max(0.0, at_s - time.monotonic()))


WHOLE_ROWS: Final = (
    Case(
        "spark-parquet",
        "Spark, all rows from local Parquet, then dropped",
        "rows/s",
        SparkRows(from_parquet=True),
    ),
    Case(
        "spark-rows",
        "Spark, all rows of the stream, then dropped",
        "rows/s",
        SparkRows(),
        beside=(Beside("spark-parquet", 1, "the same rows in local Parquet", aim=0.5),),
    ),
    Case(
        "spark-1k",
        "the same with payloads of 1 KiB",
        "MB/s",
        SparkRows(payload_bytes=1_024, times=1, in_mb=True),
        aim=400,
    ),
    Case(
        "spark-latency",
        "Spark readStream at 20,000 msg/s: age of the oldest row of a batch",
        "s",
        spark_latency,
        aim=0.7,
        smaller_is_better=True,
    ),
)
"""Cases that look at every column of a row, in a batch and in a query."""
