"""Reading, following and writing with Spark."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from contrail_spark.session import JavaNotFoundError, Profile, local_session
from contrail_spark.source import ContrailDataSource
from tests.bench.cases_read import STREAM, Source
from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import SUBJECTS
from tests.bench.processes import Usage
from tests.bench.server import Server, fill, fresh_server

_PREFIX: Final = "bench"
_PARTITIONS: Final = 8
_BATCHES: Final = 4

Job = Callable[[Any, Source], Callable[[], Run]]
"""Prepares a job in a session, and returns what runs and measures it once."""


@dataclass(frozen=True, slots=True)
class SparkCount:
    """``count()`` through Spark; with ``columns`` only those are read."""

    columns: str | None = None

    def __call__(self, bench: Bench) -> Measured | None:
        """Rows a second; None without Java."""
        with fresh_server(bench) as server:
            fill(bench, server, STREAM, _PREFIX)
            runs = _runs(bench, server, self._job)
        return Measured(tuple(runs), note="local[2], 8 splits") if runs else None

    def _job(self, session: Any, source: Source) -> Callable[[], Run]:
        return lambda: _counted(session, source, self.columns)


def spark_stream(bench: Bench) -> Measured | None:
    """A query that reads the stream in four batches and drops the rows: rows a second of them."""
    with fresh_server(bench) as server:
        fill(bench, server, STREAM, _PREFIX)
        runs = _runs(bench, server, _following)
    return Measured(tuple(runs), note=f"local[2], {_BATCHES} batches") if runs else None


def spark_write(bench: Bench) -> Measured | None:
    """Rows a second that ``df.write`` stores, with ids; None without Java."""
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        runs = _runs(bench, server, _writing)
        if runs:
            server.check_stored(STREAM, (len(runs) + 1) * bench.scale.messages)
    return Measured(tuple(runs), note=f"local[2], {_PARTITIONS} partitions") if runs else None


def _runs(bench: Bench, server: Server, job: Job) -> list[Run]:
    source = Source(server.port, server.pid, bench.scale.messages)
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
