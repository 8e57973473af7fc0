"""Replay over HTTP/1.1 with the standard library: streamed, resumable, with bounded memory.

It runs inside Spark's Python workers, one connection per split. ``http.client`` feeding Arrow
directly costs a fraction of the CPU time of a general HTTP client, and leaves nothing to install
on executors; memory stays at one record batch.
"""

import email.utils
import http.client
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NoReturn
from urllib.parse import urlencode, urlsplit

import pyarrow as pa

from contrail_spark.errors import (
    DataLossError,
    ProtocolError,
    ServerRefusedError,
    StreamChangedError,
    UnavailableError,
)
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import (
    SEQ,
    Query,
    ReplayPlan,
    Split,
    parse_plan,
    plan_path,
    plan_query,
    replay_path,
    replay_query,
    wire_columns,
)
from contrail_spark.schema import check_wire

ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"
PLAN_BYTES_MAX: Final = 16 << 20
PROBLEM_BYTES_MAX: Final = 64 << 10
ARROW_PART_BYTES_MAX: Final = 256 << 20
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
RETRY_AFTER_MAX_S: Final = 60.0

OK: Final = 200
CONFLICT: Final = 409
GONE: Final = 410
RETRYABLE: Final = frozenset({429, 502, 503, 504})


class _InterruptedError(Exception):
    """A failed attempt that may be repeated; ``after_s`` is the pause that the server asks for."""

    def __init__(self, reason: str, after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.after_s = after_s


@dataclass(slots=True)
class _Retries:
    """Counts attempts without a message, with exponential, jittered pauses between them."""

    allowed: int
    sleep: Callable[[float], None]
    failed: int = 0

    def progress(self) -> None:
        self.failed = 0

    def pause_after(self, interruption: _InterruptedError) -> None:
        if self.failed >= self.allowed:
            tries = "1 attempt" if not self.failed else f"{self.failed + 1} attempts"
            raise UnavailableError(f"{interruption} ({tries})") from interruption
        backoff = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2**self.failed)
        jittered = backoff * random.uniform(0.5, 1.0)
        self.failed += 1
        self.sleep(max(jittered, min(interruption.after_s, RETRY_AFTER_MAX_S)))


class _Chunks:
    """A response as a file, which Arrow reads directly into its own buffers.

    Arrow knows the length of every part and reads its end mark without touching the end of the
    body. A read that comes short therefore shows that the body was cut, whatever ended it.
    """

    closed = False

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.cut = False

    def read(self, size: int) -> pa.Buffer:
        if size > ARROW_PART_BYTES_MAX:
            raise ProtocolError(f"the server announced {size} bytes in one part of a record batch")
        buffer = pa.allocate_buffer(size)
        view = memoryview(buffer)
        filled = 0
        while filled < size:
            count = self._response.readinto(view[filled:])
            if count == 0:
                # Arrow asks for exactly what its heads announce, so the body ended too early.
                self.cut = True
                return buffer.slice(0, filled)
            filled += count
        return buffer

    def close(self) -> None:
        self.closed = True


class ReplayClient:
    """Reads replay plans and splits of one stream.

    Every method raises OptionError if the token file cannot be read, ServerRefusedError (or its
    subclasses) for a refusal, UnavailableError after the last retry, and ProtocolError for an
    invalid answer.
    """

    def __init__(self, options: ReplayOptions, sleep: Callable[[float], None] = time.sleep) -> None:
        self._options = options
        self._sleep = sleep

    def plan(self) -> ReplayPlan:
        """Fix the range that the options ask for."""
        retries = _Retries(self._options.retries, self._sleep)
        while True:
            try:
                return self._fetch_plan()
            except _InterruptedError as interruption:
                retries.pause_after(interruption)

    def read(
        self, plan: ReplayPlan, split: Split, columns: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        """Yield all messages of ``split`` in ascending sequence, with ``columns`` and ``seq``.

        After a broken body it continues after the last complete batch, so no message comes twice.
        ``options.retries`` limits consecutive attempts without a message.
        """
        position = split.from_seq
        retries = _Retries(self._options.retries, self._sleep)
        while position <= split.to_seq:
            try:
                for batch in self._attempt(plan, split, position, wire_columns(columns)):
                    position = _end_of(batch, position, split) + 1
                    retries.progress()
                    yield batch
            except _InterruptedError as interruption:
                retries.pause_after(interruption)
            else:
                return

    def _fetch_plan(self) -> ReplayPlan:
        what = f"plan a replay of stream {self._options.stream}"
        connection = self._connection()
        try:
            response = self._request(
                connection, plan_path(self._options), plan_query(self._options), JSON, what
            )
            return parse_plan(json.loads(response.read(PLAN_BYTES_MAX)))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _InterruptedError(f"{what}: the answer is not JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise _InterruptedError(f"{what} at {self._options.url}: {_reason(error)}") from error
        finally:
            connection.close()

    def _attempt(
        self, plan: ReplayPlan, split: Split, from_seq: int, columns: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        what = f"read stream {plan.stream} shard {split.shard} sequences {from_seq}..{split.to_seq}"
        query = replay_query(self._options, plan, split, from_seq, columns)
        connection = self._connection()
        try:
            response = self._request(connection, replay_path(plan), query, ARROW_STREAM, what)
            body = _Chunks(response)
            reader = pa.ipc.open_stream(pa.PythonFile(body, mode="r"))
            check_wire(reader.schema, columns)
            yield from (batch for batch in reader if batch.num_rows)
            if body.cut:
                raise _InterruptedError(f"{what}: the answer ended without its end mark")
            # Read the end of the HTTP body: otherwise the server sees a broken connection.
            response.read(1)
        except (OSError, http.client.HTTPException, pa.ArrowException) as error:
            raise _InterruptedError(f"{what} at {self._options.url}: {_reason(error)}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self._options.url)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        return kind(str(parts.hostname), parts.port, timeout=self._options.timeout_s)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        path: str,
        query: Query,
        accept: str,
        what: str,
    ) -> http.client.HTTPResponse:
        headers = {"Accept": accept, "User-Agent": "contrail-spark"}
        if token := self._options.bearer():
            headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
        response = connection.getresponse()
        if response.status != OK:
            _raise_refusal(response, what)
        kind = response.headers.get_content_type()
        if kind != accept:
            raise ProtocolError(f"{what}: expected {accept}, but received {kind}")
        return response


def _reason(error: Exception) -> str:
    """The text of an error; its type if it has no text."""
    said = error.strerror if isinstance(error, OSError) else None
    return (said or str(error) or type(error).__name__).lower()


def _end_of(batch: pa.RecordBatch, position: int, split: Split) -> int:
    """The last sequence of ``batch``; ProtocolError if it is outside the requested range."""
    sequences = batch.column(SEQ)
    first, last = sequences[0].as_py(), sequences[-1].as_py()
    if not position <= first <= last <= split.to_seq:
        raise ProtocolError(
            f"received sequences {first}..{last} instead of {position}..{split.to_seq}"
        )
    return int(last)


def _raise_refusal(response: http.client.HTTPResponse, what: str) -> NoReturn:
    problem = _problem(response.read(PROBLEM_BYTES_MAX))
    name = str(problem.get("name") or response.reason)
    detail = problem.get("detail") or problem.get("title") or response.reason
    text = f"{what}: {response.status} {name}: {detail}"
    if response.status in RETRYABLE and problem.get("retryable") is not False:
        raise _InterruptedError(text, _retry_after_s(response.headers.get("Retry-After")))
    if response.status == CONFLICT and name == "incarnation_changed":
        raise StreamChangedError(
            f"{text}. The stream was re-created after this DataFrame was loaded; load it again",
            response.status,
            name,
        )
    # Retention has removed the start of the range; with `clamp` the server would not say so.
    if response.status == GONE:
        raise DataLossError(
            f"{text}. Messages were removed before they were read. To continue with the "
            'remaining messages, use .option("failOnDataLoss", "false")',
            response.status,
            name,
        )
    raise ServerRefusedError(text, response.status, name)


def _problem(body: bytes) -> dict[str, object]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _retry_after_s(value: str | None) -> float:
    """Seconds in a Retry-After header (RFC 9110, 10.2.3: a number or an HTTP date)."""
    if value is None:
        return 0.0
    if value.isascii() and value.strip().isdigit():
        return float(value)
    try:
        until = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
