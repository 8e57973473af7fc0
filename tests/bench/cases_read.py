"""Reading: replay over HTTP and by the client of the Spark source; and pulls."""

import contextlib
import http.client
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

import pyarrow as pa

from contrail_spark.client import ReplayClient
from contrail_spark.options import parse_options
from tests.bench.figures import PULLED_MAX, Bench, BenchError, Measured, Run
from tests.bench.http_scripts import Pulls
from tests.bench.load import Load
from tests.bench.patience import repeat
from tests.bench.processes import HOST, Pids, Usage
from tests.bench.server import Server, drive, fill, fresh_server

STREAM: Final = "BENCH"
_PREFIX: Final = "bench"
_ARROW: Final = "application/vnd.apache.arrow.stream"
_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Source:
    """The address and number of the messages to read."""

    port: int
    server_pid: Pids
    messages: int

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{HOST}:{self.port}"


def replay_arrow(bench: Bench) -> Measured:
    """One request for the whole stream as Arrow, decoded and counted: messages a second."""
    return _read(bench, drain_http)


def replay_client(bench: Bench) -> Measured:
    """The same with the client of the Spark source, split by split, without Spark."""
    return _read(bench, _drain_client)


def _read(bench: Bench, drain: Callable[[Source], Run]) -> Measured:
    with fresh_server(bench) as server:
        fill(bench, server, STREAM, _PREFIX)
        source = Source(server.port, server.pid, bench.scale.messages)
        # The first read allocates buffers that later ones reuse.
        first = bench.worker.submit(drain, source).result()
        runs = repeat(bench, lambda _: bench.worker.submit(drain, source).result())
    return Measured(runs, note=f"first read {first.value:,.0f}/s")


def drain_http(source: Source) -> Run:
    """Read all messages as Arrow and check that none is missing: messages a second."""
    before = Usage.now(source.server_pid)
    tally = _Tally()
    for batch in arrow_batches(source):
        tally.add(batch)
    after = Usage.now(source.server_pid)
    tally.check(source.messages)
    return before.run(after, source.messages)


def arrow_batches(source: Source, **parameters: str) -> Iterator[pa.RecordBatch]:
    """The batches of a replay of all messages; ``parameters`` are added to its query."""
    connection = http.client.HTTPConnection(HOST, source.port, timeout=_TIMEOUT_S)
    query = urlencode({"from_seq": 1, "to_seq": source.messages, **parameters})
    with contextlib.closing(connection):
        connection.request(
            "GET", f"/v1/streams/{STREAM}/replay?{query}", headers={"Accept": _ARROW}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise BenchError(f"replay: {response.status} {response.read(400)!r}")
        yield from pa.ipc.open_stream(pa.PythonFile(response, mode="r"))


def _drain_client(source: Source) -> Run:
    before = Usage.now(source.server_pid)
    client = ReplayClient(parse_options({"url": source.url, "stream": STREAM}))
    plan = client.plan()
    tally = _Tally()
    for split in plan.splits:
        for batch in client.read(plan, split, _columns()):
            tally.add(batch)
    after = Usage.now(source.server_pid)
    tally.check(source.messages)
    return before.run(after, source.messages)


def _columns() -> tuple[str, ...]:
    return ("shard", "seq", "time", "subject", "headers", "data")


class _Tally:
    """Counts rows and checks that no sequence is missing or comes twice."""

    def __init__(self) -> None:
        self._next = 1

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        sequences = batch.column("seq")
        first, last = sequences[0].as_py(), sequences[-1].as_py()
        if first != self._next or last != first + batch.num_rows - 1:
            raise BenchError(f"sequences {first}..{last} came where {self._next} was due")
        self._next = last + 1

    def check(self, messages: int) -> None:
        if self._next != messages + 1:
            raise BenchError(f"{self._next - 1} of {messages} messages were replayed")


@dataclass(frozen=True, slots=True)
class Pull:
    """Pulls of 100 messages, each with the acknowledgements of the previous pull."""

    connections: int
    batch: int = 100
    columns: bool = False

    def __call__(self, bench: Bench) -> Measured:
        """Messages acknowledged a second."""
        with fresh_server(bench) as server:
            fill(bench, server, STREAM, _PREFIX)
            runs = repeat(bench, lambda number: self._pulled(bench, server, f"C{number}"))
        return Measured(runs)

    def _pulled(self, bench: Bench, server: Server, consumer: str) -> Run:
        path = f"/v1/streams/{STREAM}/consumers/{consumer}"
        messages = min(bench.scale.messages, PULLED_MAX)
        start = bench.scale.messages - messages + 1
        config = {"deliver_policy": "by_start_sequence", "opt_start_seq": start}
        server.call("PUT", path, config)
        scripts = Pulls(STREAM, consumer, messages, self.batch, self.connections, self.columns)
        driven = drive(bench, Load(server.port, server.pid, scripts))
        info = server.call("GET", path)
        floor = info["ack_floor"]["stream_seq"]
        if driven.messages != messages or floor != bench.scale.messages or info["num_ack_pending"]:
            raise BenchError(f"{driven.messages} of {messages} were acknowledged: {info}")
        return driven.run
