"""Replay in Spark's Python workers: plans, and splits that are streamed, resumed and checked.

``http.client`` feeds Arrow directly, so memory stays at one record batch. One connection per split.
"""

import http.client
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import pyarrow as pa

from contrail_spark.errors import (
    DataLossError,
    ProtocolError,
    ServerRefusedError,
    StreamChangedError,
)
from contrail_spark.options import ReplayOptions
from contrail_spark.plan import (
    SEQ,
    Query,
    ReplayPlan,
    Split,
    kept_query,
    parse_plan,
    part_query,
    plan_path,
    plan_query,
    replay_path,
    replay_query,
    several_shards,
    wire_columns,
)
from contrail_spark.schema import check_wire
from contrail_spark.transport import InterruptionError, Retries, opened

ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
JSON: Final = "application/json"
PLAN_BYTES_MAX: Final = 16 << 20
ARROW_PART_BYTES_MAX: Final = 256 << 20
GONE: Final = "range_gone"
"""The range begins before the first message that the stream has."""
REPLICA: Final = "Contrail-Replica"
NOT_APPLIED: Final = "range_not_applied"
"""The range ends after the last message that the replica has."""

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)


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


class LowerTier(Protocol):
    """What else has messages that the stream no longer has, such as a lake."""

    def removed(
        self, shard: int, bounds: tuple[int, int], columns: tuple[str, ...]
    ) -> tuple[list[tuple[int, int]], Iterator[pa.RecordBatch]]:
        """The ranges within ``bounds`` that it lacks too, and its messages of the others."""
        ...


class ReplayClient:
    """Reads replay plans and splits of one stream.

    What the stream no longer has when a split is read comes from ``lower``, if there is one.
    ``lost`` gets ranges that were removed before they were read, and the read goes on; that the
    server has lost the end of a range remains an error.
    Every method raises OptionError if the token file cannot be read, ServerRefusedError (or its
    subclasses) for a refusal, UnavailableError after the last retry, and ProtocolError for an
    invalid answer.
    """

    def __init__(
        self,
        options: ReplayOptions,
        sleep: Callable[[float], None] = time.sleep,
        lower: LowerTier | None = None,
        lost: Callable[[int, int], None] | None = None,
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._lower = lower
        self._lost = lost

    def plan(self) -> ReplayPlan:
        """Fix the range that the options ask for.

        Raises OptionError for a range of sequences if several shards may have messages of it.
        """
        query = plan_query(self._options)
        try:
            return self._retried_plan(query)
        except ServerRefusedError:
            if self._options.from_seq is None and self._options.to_seq is None:
                raise
            # The server wants to know of which shard the sequences are.
            everything = replace(self._options, from_seq=None, to_seq=None)
            shards = self._retried_plan(plan_query(everything)).shards
            if not shards:  # the server is older than 0.3
                raise
            if len(shards) > 1:
                raise several_shards(len(shards)) from None
            return self._retried_plan([*query, ("shard", str(shards[0].shard))])

    def plan_part(self, part: Split, split_bytes: int) -> ReplayPlan:
        """Fix a range of one shard, in splits of about ``split_bytes``."""
        return self._retried_plan(part_query(part, split_bytes))

    def _retried_plan(self, query: Query) -> ReplayPlan:
        what = f"plan a replay of stream {self._options.stream}"
        return self.repeat(lambda: self._fetch_plan(query, what))

    def repeat(self, request: Callable[[], T]) -> T:
        """Make a request that may be repeated when it is interrupted, and return its answer."""
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                return request()
            except InterruptionError as interruption:
                retries.pause_after(interruption)

    def read(
        self, plan: ReplayPlan, split: Split, columns: tuple[str, ...]
    ) -> Iterator[pa.RecordBatch]:
        """Yield all messages of ``split`` in ascending sequence, with ``columns`` and ``seq``.

        After a broken body it continues after the last complete batch, so no message comes twice.
        ``options.retries`` limits consecutive attempts without a message. If messages that are
        still to be read are gone, it raises DataLossError, or logs which, and goes on.
        """
        left = split
        retries = Retries(self._options.retries, self._sleep)
        consistency = self._options.consistency
        while left.from_seq <= left.to_seq:
            try:
                try:
                    for batch in self._attempt(plan, left, columns, consistency):
                        left = replace(left, from_seq=_end_of(batch, left) + 1)
                        retries.progress()
                        yield batch
                    return
                except (ServerRefusedError, InterruptionError) as failure:
                    behind = failure.name == NOT_APPLIED and consistency == "any"
                    if behind and self._options.replica is None:
                        # The leader has everything that any replica had when the range was fixed.
                        consistency = "leader"
                        continue
                    if failure.name not in (GONE, NOT_APPLIED):
                        raise
                    kept = self._kept_of(plan, left, failure)
                    yield from self._gone(left, kept, columns, failure)
                    left = kept
                    retries.progress()
            except InterruptionError as interruption:
                consistency = self._options.consistency
                retries.pause_after(interruption)

    def _fetch_plan(self, query: Query, what: str) -> ReplayPlan:
        with opened(self._options, plan_path(self._options), query, JSON, what) as response:
            try:
                return parse_plan(json.loads(response.read(PLAN_BYTES_MAX)))
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise InterruptionError(f"{what}: the answer is not JSON: {error}") from error

    def _attempt(
        self,
        plan: ReplayPlan,
        left: Split,
        columns: tuple[str, ...],
        consistency: str | None,
    ) -> Iterator[pa.RecordBatch]:
        sequences = f"{left.from_seq}..{left.to_seq}"
        what = f"read stream {plan.stream} shard {left.shard} sequences {sequences}"
        wire = wire_columns(columns)
        query = replay_query(self._options, plan, left, wire, consistency)
        with opened(self._options, replay_path(plan), query, ARROW_STREAM, what) as response:
            _check_replica(response, query, what)
            body = _Chunks(response)
            try:
                reader = pa.ipc.open_stream(pa.PythonFile(body, mode="r"))
                check_wire(reader.schema, wire)
                for batch in reader:
                    batch.validate()  # values outside of the buffers would crash the worker
                    if batch.num_rows:
                        yield batch
            except pa.ArrowException as error:
                raise InterruptionError(f"{what} at {self._options.url}: {error}") from error
            if body.cut:
                raise InterruptionError(f"{what}: the answer ended without its end mark")
            # Read the end of the HTTP body: otherwise the server sees a broken connection. If it
            # is not there, nothing is missing.
            with suppress(OSError, http.client.HTTPException):
                response.read(1)

    def _kept_of(
        self, plan: ReplayPlan, left: Split, failure: ServerRefusedError | InterruptionError
    ) -> Split:
        """What the stream still has of ``left`` after the server refused a part of it.

        A plan of the same range shows it: it starts with the first sequence that the stream has,
        and ends with the last.
        """
        what = f"find what is left of stream {plan.stream} shard {left.shard}"
        found = self._fetch_plan(kept_query(left), what)
        if found.incarnation != plan.incarnation:
            raise StreamChangedError(
                f"stream {plan.stream} was re-created after this DataFrame was loaded; load it "
                "again",
                409,
                "incarnation_changed",
            ) from failure
        kept = [(one.from_seq, one.to_seq) for one in found.splits]
        first, last = (kept[0][0], kept[-1][1]) if kept else (left.to_seq + 1, left.to_seq)
        if (first, last) == (left.from_seq, left.to_seq):
            # It was a replica that refused, and the leader still has everything.
            raise (
                failure
                if isinstance(failure, InterruptionError)
                else InterruptionError(str(failure))
            )
        return replace(left, from_seq=first, to_seq=last)

    def _gone(
        self,
        left: Split,
        kept: Split,
        columns: tuple[str, ...],
        failure: ServerRefusedError | InterruptionError,
    ) -> Iterator[pa.RecordBatch]:
        """What the lower tier has of the part of ``left`` before ``kept``.

        Raises DataLossError for what it lacks, and for the part after ``kept``, or logs that. The
        lower tier is not asked for the latter: the stream may store other messages there.
        """
        removed = (left.from_seq, kept.from_seq - 1)
        lacking, batches = [removed], iter(())
        if self._lower is not None and removed[0] <= removed[1]:
            lacking, batches = self._lower.removed(left.shard, removed, columns)
        edges = (*lacking, (kept.to_seq + 1, left.to_seq))
        runs = [(first, last) for first, last in edges if first <= last]
        if self._lost is not None and kept.to_seq == left.to_seq:
            for first, last in runs:
                self._lost(first, last)
        elif runs:
            gone = " and ".join(f"{first}..{last}" for first, last in runs)
            how = "lost by the server" if failure.name == NOT_APPLIED else "removed"
            where = f"stream {self._options.stream} shard {left.shard}"
            lost = f"{where}: sequences {gone} were {how} before they were read"
            report_loss(self._options, lost, failure)
        yield from batches


def report_loss(options: ReplayOptions, lost: str, cause: Exception | None = None) -> None:
    """Raise DataLossError for messages that are ``lost``, or log it if the user allows it."""
    if options.fail_on_data_loss:
        raise DataLossError(
            f'{lost}. To read what is left, use .option("failOnDataLoss", "false")',
            410,
            GONE,
        ) from cause
    _log.warning("%s; continuing without them", lost)


def _end_of(batch: pa.RecordBatch, left: Split) -> int:
    """The last sequence of ``batch``; ProtocolError if it is outside the requested range."""
    sequences = batch.column(SEQ)
    first, last = sequences[0].as_py(), sequences[-1].as_py()
    if not left.from_seq <= first <= last <= left.to_seq:
        raise ProtocolError(
            f"received sequences {first}..{last} instead of {left.from_seq}..{left.to_seq}"
        )
    return int(last)


def _check_replica(response: http.client.HTTPResponse, query: Query, what: str) -> None:
    wanted, found = dict(query).get("replica"), response.headers.get(REPLICA)
    if wanted is not None and found != wanted:
        raise ProtocolError(f"{what}: {found or 'some node'} answered instead of {wanted}")
