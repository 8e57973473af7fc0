"""Writing with Spark."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Final

from contrail_spark.session import JavaNotFoundError, Profile, local_session
from contrail_spark.source import ContrailDataSource
from tests.bench.cases_read import Source
from tests.bench.figures import Bench, Measured, Run
from tests.bench.http_scripts import SUBJECTS
from tests.bench.processes import Usage
from tests.bench.server import fresh_server

STREAM: Final = "BENCH"
_PREFIX: Final = "bench"
_PARTITIONS: Final = 8


def spark_write(bench: Bench) -> Measured | None:
    """Rows a second that ``df.write`` stores, with ids; None without Java."""
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        source = Source(server.port, server.pid, bench.scale.messages)
        # In another process, because the JVM runs until the process that started it ends.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            runs = process.submit(_write, source, bench.scale.runs).result()
        if runs:
            server.check_stored(STREAM, (len(runs) + 1) * bench.scale.messages)
    return Measured(tuple(runs), note=f"local[2], {_PARTITIONS} partitions") if runs else None


def _write(source: Source, runs: int) -> list[Run]:
    try:
        session = local_session("bench", Profile.BENCH)
    except JavaNotFoundError:
        return []
    try:
        session.dataSource.register(ContrailDataSource)
        # Four hashes are a payload of 128 bytes that does not compress.
        hashes = ", ".join(f"sha2(concat({part}, '.', id), 256)" for part in range(4))
        frame = session.range(0, source.messages, 1, _PARTITIONS).selectExpr(
            f"concat('{_PREFIX}.', id % {SUBJECTS}) as subject", f"unhex(concat({hashes})) as data"
        )
        frame.cache().count()
        _written(frame, source)
        return [_written(frame, source) for _ in range(runs)]
    finally:
        session.stop()


def _written(frame: Any, source: Source) -> Run:
    before = Usage.now(source.server_pid)
    options = {"url": source.url, "stream": STREAM}
    frame.write.format("contrail").options(**options).mode("append").save()
    after = Usage.now(source.server_pid)
    return Run(
        value=source.messages / (after.at_s - before.at_s),
        server_us=(after.server_s - before.server_s) / source.messages * 1e6,
    )
