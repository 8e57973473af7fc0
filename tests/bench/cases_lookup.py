"""Partial reads: filtered replay, the last message of a subject, a message by its sequence.

Also the replay of larger messages, where bytes count rather than messages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from tests.bench.cases_publish import KIB_PAYLOAD_BYTES
from tests.bench.cases_read import STREAM, Source, arrow_batches, drain_http
from tests.bench.figures import Bench, BenchError, Measured, Run
from tests.bench.http_scripts import DistinctSubjects
from tests.bench.load import Load, Script
from tests.bench.lookup_scripts import (
    GROUP_SUBJECTS,
    MANY_SUBJECTS,
    LastLookups,
    ManyLookups,
    SequenceLookups,
    ShuffledSubjects,
)
from tests.bench.patience import repeat
from tests.bench.processes import Usage, rss_bytes
from tests.bench.server import (
    FILL_BATCH,
    FILL_CONNECTIONS,
    Server,
    drive,
    fill,
    fresh_server,
    publish_all,
    publish_batches,
)

_PREFIX: Final = "bench"
_GROUP: Final = f"{_PREFIX}.7."
_FILTERED_TIMES: Final = 5
_WARM_S: Final = 0.5
_MIB: Final = 1 << 20


def replay_kib(bench: Bench) -> Measured:
    """Arrow replay of messages of 1 KiB, half as many as the scale: GB of payload a second."""
    messages = bench.scale.messages // 2
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        publish_batches(bench, server, STREAM, _PREFIX, messages, KIB_PAYLOAD_BYTES)
        server.check_stored(STREAM, messages)

        def drain(source: Source) -> Run:
            run = bench.worker.submit(drain_http, source).result()
            return replace(run, value=run.value * KIB_PAYLOAD_BYTES / 1e9)

        return _warmed(bench, Source(server.port, server.pid, messages), drain, "GB/s")


def replay_filtered(bench: Bench) -> Measured:
    """Replay of one message in a hundred, by a wildcard: messages searched a second."""
    messages = _FILTERED_TIMES * bench.scale.messages
    with fresh_server(bench) as server:
        server.create_stream(STREAM, _PREFIX)
        scripts = ShuffledSubjects(STREAM, _PREFIX, messages // FILL_BATCH, FILL_CONNECTIONS)
        publish_all(bench, server, scripts, messages)
        server.check_stored(STREAM, messages)

        def drain(source: Source) -> Run:
            return bench.worker.submit(_drain_filtered, source).result()

        return _warmed(bench, Source(server.port, server.pid, messages), drain, "/s")


def _warmed(bench: Bench, source: Source, drain: Callable[[Source], Run], unit: str) -> Measured:
    first = drain(source)
    runs = repeat(bench, lambda _: drain(source))
    return Measured(runs, note=f"{source.messages:,} messages; first read {first.value:.3g} {unit}")


def _drain_filtered(source: Source) -> Run:
    before = Usage.now(source.server_pid)
    found = last = 0
    for batch in arrow_batches(source, subject=f"{_GROUP}*"):
        last = _checked(batch, last)
        found += batch.num_rows
    after = Usage.now(source.server_pid)
    expected = source.messages * GROUP_SUBJECTS // MANY_SUBJECTS
    if found != expected:
        raise BenchError(f"{found} of {expected} matching messages were replayed")
    return before.run(after, source.messages)


def _checked(batch: pa.RecordBatch, last: int) -> int:
    """The last sequence of a batch; checks that it follows ``last`` and has only matches."""
    if not batch.num_rows:
        return last
    sequences = batch.column("seq").to_numpy()
    rising = sequences[0] > last and (sequences[1:] > sequences[:-1]).all()
    if not rising or not pc.all(pc.starts_with(batch.column("subject"), _GROUP)).as_py():
        raise BenchError(f"a batch of a filtered replay after sequence {last} is wrong")
    return int(sequences[-1])


@dataclass(frozen=True, slots=True)
class LastGet:
    """The last message of a random subject out of as many subjects as messages."""

    connections: int

    def __call__(self, bench: Bench) -> Measured:
        """Gets a second."""
        batches = bench.scale.messages // FILL_BATCH
        with fresh_server(bench) as server:
            server.create_stream(STREAM, _PREFIX)
            scripts = DistinctSubjects(STREAM, _PREFIX, batches, FILL_CONNECTIONS)
            publish_all(bench, server, scripts, bench.scale.messages)
            server.check_stored(STREAM, bench.scale.messages)
            return _looked_up(
                bench, server, LastLookups(STREAM, _PREFIX, batches, self.connections)
            )


@dataclass(frozen=True, slots=True)
class SequenceGet:
    """A message by a random sequence."""

    connections: int

    def __call__(self, bench: Bench) -> Measured:
        """Gets a second."""
        messages = bench.scale.messages
        with fresh_server(bench) as server:
            fill(bench, server, STREAM, _PREFIX)
            return _looked_up(bench, server, SequenceLookups(STREAM, messages, self.connections))


@dataclass(frozen=True, slots=True)
class ManyGet:
    """Messages by their sequences, many in one request."""

    connections: int
    together: int

    def __call__(self, bench: Bench) -> Measured:
        """Messages a second."""
        messages = bench.scale.messages
        with fresh_server(bench) as server:
            fill(bench, server, STREAM, _PREFIX)
            scripts = ManyLookups(STREAM, messages, self.connections, self.together)
            return _looked_up(bench, server, scripts)


def _looked_up(bench: Bench, server: Server, scripts: Callable[[], Sequence[Script]]) -> Measured:
    load = Load(server.port, server.pid, scripts, bench.scale.seconds, _WARM_S)
    runs = repeat(bench, lambda _: drive(bench, load).run)
    rss = rss_bytes(server.pid) / _MIB
    return Measured(runs, note=f"{bench.scale.messages:,} messages; server RSS {rss:,.0f} MiB")
