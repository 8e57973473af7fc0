"""A small replay server on loopback, with the faults a real one shows once in a while.

It serves messages that it makes up, cut into record batches of ``batch_rows``, so that a reader's
every path can be driven without a storage node.  Faults are taken off a queue, one per replay
request; without one the answer is right.
"""

import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa

from contrail_common.subjects import matches_any

ROUTES: Final = ("flights.EWR.IAH.UA", "flights.JFK.LAX.AA", "flights.JFK.LAX.DL")
EPOCH_US: Final = 1_357_034_400_000_000
SCHEMA: Final = pa.schema(
    [
        pa.field("shard", pa.int32()),
        pa.field("seq", pa.int64()),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("subject", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.list_(pa.string()))),
        pa.field("data", pa.binary()),
    ]
)


@dataclass(frozen=True)
class Refuse:
    """Answer with a problem instead of a body."""

    status: int
    name: str
    headers: dict[str, str] = field(default_factory=dict)
    retryable: bool | None = None


@dataclass(frozen=True)
class Cut:
    """End the body early: after ``batches`` whole ones and ``extra`` bytes of the next.

    ``clean`` closes the chunked body properly, as a proxy would that lost its own upstream.
    """

    batches: int
    extra: int = 0
    clean: bool = False
    first_seq: int = 1
    """From then on, the first sequence that the stream still has."""


@dataclass(frozen=True)
class Garble:
    """Send the right status and content type, and ``body`` instead of an Arrow stream."""

    body: bytes
    content_type: str = "application/vnd.apache.arrow.stream"


@dataclass(frozen=True)
class Retype:
    """Send one column in another type than the contract's."""

    column: str
    kind: pa.DataType


Fault = Refuse | Cut | Garble | Retype


def row(shard: int, seq: int) -> dict[str, Any]:
    """The made-up message ``seq`` of ``shard``; every fourth has headers, every fifth no bytes."""
    return {
        "shard": shard,
        "seq": seq,
        "time": EPOCH_US + seq,
        "subject": ROUTES[seq % len(ROUTES)],
        "headers": [("Leg", [str(seq), "x"])] if seq % 4 == 0 else [],
        "data": b"" if seq % 5 == 0 else f"{shard}:{seq}".encode(),
    }


class ReplayServer:
    """Serves stream ``FLIGHTS``: ``shards`` of ``rows_per_shard`` messages, ``holes`` deleted."""

    def __init__(self, rows_per_shard: int, shards: int = 1, batch_rows: int = 10) -> None:
        self.rows_per_shard = rows_per_shard
        self.shards = shards
        self.batch_rows = batch_rows
        self.first_seq = 1
        self.incarnation = "first"
        self.holes: set[int] = set()
        self.token: str | None = None
        self.faults: deque[Fault] = deque()
        self.plan_faults: deque[Fault] = deque()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self._http = _Listener(("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The origin that the server listens on."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def asked(self, end: str) -> list[dict[str, str]]:
        """The queries of all requests whose path ends so."""
        return [query for path, query in self.requests if path.endswith(end)]

    def close(self) -> None:
        """Stop serving; later requests are refused by the system."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def rows(self, shard: int, first: int, last: int, subject: str = ">") -> list[dict[str, Any]]:
        """What a replay of the closed range has to return."""
        return [
            row(shard, seq)
            for seq in range(first, min(last, self.rows_per_shard) + 1)
            if seq not in self.holes
            and matches_any(tuple(subject.split()), row(shard, seq)["subject"])
        ]

    def plan(self, query: dict[str, str]) -> dict[str, object]:
        """The plan of the range that the query asks for, in about ``splits`` parts."""
        first = max(int(query.get("from_seq", 1)), self.first_seq)
        last = min(int(query.get("to_seq", self.rows_per_shard)), self.rows_per_shard)
        step = max(1, -(-(last - first + 1) * self.shards // int(query.get("splits", 1))))
        splits = [
            {
                "shard": shard,
                "from_seq": start,
                "to_seq": min(start + step - 1, last),
                "messages": step,
                "bytes": step * 100,
            }
            for shard in range(self.shards)
            if query.get("shard", str(shard)) == str(shard)
            for start in range(first, last + 1, step)
        ]
        bounds = [
            {"shard": shard, "first_seq": self.first_seq, "last_seq": self.rows_per_shard}
            for shard in range(self.shards)
        ]
        return {
            "stream": "FLIGHTS",
            "incarnation": self.incarnation,
            "splits": splits,
            "shards": bounds,
        }

    def headers(self, query: dict[str, str]) -> dict[str, str]:
        """More headers of a good answer."""
        return {}

    def batches(self, query: dict[str, str]) -> Iterator[pa.RecordBatch]:
        """The record batches of a replay request, only the columns asked for."""
        rows = self.rows(
            int(query["shard"]),
            int(query["from_seq"]),
            int(query["to_seq"]),
            query.get("subject", ">"),
        )
        for start in range(0, len(rows), self.batch_rows):
            batch = pa.RecordBatch.from_pylist(rows[start : start + self.batch_rows], SCHEMA)
            yield batch.select(query["columns"].split(","))


class _Listener(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: readers that hang up in the middle are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    owner: ReplayServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.owner.requests.append((parts.path, query))
        if self.headers.get("Authorization") != (self.owner.token and f"Bearer {self.owner.token}"):
            self._refuse(Refuse(401, "unauthenticated"))
        elif parts.path == "/v1/streams/FLIGHTS/replay/plan":
            self._plan(query)
        elif parts.path == "/v1/streams/FLIGHTS/replay":
            self._replay(query)
        else:
            self._refuse(Refuse(404, "stream_not_found"))

    def _plan(self, query: dict[str, str]) -> None:
        fault = self.owner.plan_faults.popleft() if self.owner.plan_faults else None
        if isinstance(fault, Refuse):
            self._refuse(fault)
        elif isinstance(fault, Garble):
            self._whole(200, fault.content_type, fault.body)
        else:
            body = json.dumps(self.owner.plan(query)).encode()
            self._whole(200, "application/json", body, self.owner.headers(query))

    def _replay(self, query: dict[str, str]) -> None:
        fault = self.owner.faults.popleft() if self.owner.faults else None
        if isinstance(fault, Refuse):
            self._refuse(fault)
        elif query["incarnation"] != self.owner.incarnation:
            self._refuse(Refuse(409, "incarnation_changed"))
        elif isinstance(fault, Garble):
            self._whole(200, fault.content_type, fault.body)
        elif int(query["from_seq"]) < self.owner.first_seq:
            self._refuse(Refuse(410, "range_gone"))
        elif int(query["to_seq"]) > self.owner.rows_per_shard:
            self._refuse(Refuse(503, "range_not_applied"))
        else:
            self._stream(query, fault)

    def _stream(self, query: dict[str, str], fault: Cut | Retype | None) -> None:
        schema = SCHEMA.empty_table().select(query["columns"].split(",")).schema
        if isinstance(fault, Retype):
            position = schema.get_field_index(fault.column)
            schema = schema.set(position, pa.field(fault.column, fault.kind))
        parts = list(_encoded(schema, self.owner.batches(query)))
        if isinstance(fault, Cut):
            self.owner.first_seq = max(self.owner.first_seq, fault.first_seq)
            whole = parts[: 1 + fault.batches]
            parts = [*whole, parts[1 + fault.batches][: fault.extra]]
        self.send_response(200)
        for name, value in self.owner.headers(query).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/vnd.apache.arrow.stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in filter(None, parts):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        if isinstance(fault, Cut) and not fault.clean:
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def _refuse(self, refusal: Refuse) -> None:
        problem: dict[str, object] = {"name": refusal.name, "detail": f"told {refusal.name}"}
        if refusal.retryable is not None:
            problem["retryable"] = refusal.retryable
        body = json.dumps(problem).encode()
        self._whole(refusal.status, "application/problem+json", body, refusal.headers)

    def _whole(
        self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _encoded(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[bytes]:
    """The schema message, each batch, and the end mark, as the bytes of one part each."""
    sink = BytesIO()
    writer = pa.ipc.new_stream(sink, schema)
    yield _drain(sink)
    for batch in batches:
        arrays = [
            column if column.type == field.type else pa.nulls(len(column), field.type)
            for column, field in zip(batch.columns, schema, strict=True)
        ]
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
        yield _drain(sink)
    writer.close()
    yield _drain(sink)


def _drain(sink: BytesIO) -> bytes:
    part = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return part
