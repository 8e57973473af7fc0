"""Bulk replay: planning a pinned range and streaming it, block by block, off the event loop.

A range is pinned by its sequences: reading it twice gives the same messages while they are kept.
Work on blocks (store reads, decoding, Arrow) runs in worker threads; the loop passes chunks on.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

import msgspec
import numpy as np

from contrail_common import errors
from contrail_common.blocks import Block, BlockCorruptError
from contrail_common.errors import ApiError
from contrail_common.link import Chunk, ReplayPlan, ReplayPlanRequest, ReplayRequest, ReplaySplit
from contrail_common.timeunits import format_time
from contrail_storage.node import arrow_encoding as arrow
from contrail_storage.node.filters import SubjectFilter
from contrail_storage.node.opened_selections import open_selections
from contrail_storage.node.reader import Reader
from contrail_storage.node.shard import Shard
from contrail_storage.store.block_store import BlockMissingError, BlockStore
from contrail_storage.store.rocks_store import StoreCorruptError

_BATCH_MESSAGES: Final = 8_192
_BATCH_BYTES: Final = 4 << 20
_RETRIES: Final = 8
_ARROW_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""End of an Arrow stream: a message of no bytes (Arrow columnar format, IPC)."""
SPLITS_MAX: Final = 1_024


class Replayer:
    """Plans and streams replays of shards."""

    def __init__(self, blocks: BlockStore, reader: Reader) -> None:
        self._blocks = blocks
        self._reader = reader

    async def plan(self, shard: Shard, request: ReplayPlanRequest) -> ReplayPlan:
        """Pin the range and cut it at block borders into about ``splits`` equal parts."""
        machine = shard.machine
        assert machine.record is not None
        low = max(request.from_seq, machine.counters.first_seq)
        high = min(request.to_seq or shard.written_seq, shard.written_seq)
        if request.start_time_ns:
            low = max(low, await self._reader.seq_of_time(shard, request.start_time_ns))
        if request.end_time_ns:
            high = min(high, await self._reader.seq_of_time(shard, request.end_time_ns) - 1)
        splits = self._cut(shard, low, high, request.splits) if low <= high else []
        return ReplayPlan(shard.name, machine.record.incarnation, splits)

    def _cut(self, shard: Shard, low: int, high: int, parts: int) -> list[ReplaySplit]:
        directory = self._blocks.directory(shard.machine.shard)
        first, last = directory.position(low), directory.position(high)
        last = min(last, len(directory) - 1)
        total = directory.totals(first, last + 1)[0]
        parts = max(1, min(parts, SPLITS_MAX, last - first + 1))
        splits: list[ReplaySplit] = []
        start, messages, size = low, 0, 0
        for position in range(first, last + 1):
            span = directory.span(position)
            messages += span.count
            size += span.bytes
            end = position == last
            if end or messages * parts >= total:
                stop = high if end else span.end_seq - 1
                count = stop - start + 1 - shard.machine.deleted.count(start, stop)
                splits.append(ReplaySplit(shard.machine.part, start, stop, count, size))
                start, messages, size = stop + 1, 0, 0
        return splits

    def check(self, shard: Shard, request: ReplayRequest) -> tuple[int, int]:
        """The closed range to stream; ApiError when it may not be."""
        machine = shard.machine
        assert machine.record is not None
        if request.incarnation and request.incarnation != machine.record.incarnation:
            raise ApiError(errors.INCARNATION_CHANGED)
        unknown = set(request.columns) - set(arrow.COLUMNS)
        if unknown:
            raise ApiError(
                errors.INVALID_FIELD,
                f"unknown columns: {', '.join(sorted(unknown))}; "
                f"known are {', '.join(arrow.COLUMNS)}",
            )
        first_seq = machine.counters.first_seq
        low = request.from_seq or first_seq
        if low < first_seq:
            if not request.clamp:
                raise ApiError(errors.REPLAY_GONE, f"the first kept sequence is {first_seq}")
            low = first_seq
        if request.to_seq > shard.written_seq:
            raise ApiError(
                errors.REPLAY_AHEAD, f"applied up to {shard.written_seq}", retry_after_s=1
            )
        return low, request.to_seq or shard.written_seq

    async def stream(
        self, shard: Shard, request: ReplayRequest, low: int, high: int
    ) -> AsyncIterator[Chunk]:
        """The encoded body in chunks of about a record batch."""
        encoder = _ENCODERS[request.format](request, shard.machine.part)
        subject_filter = SubjectFilter((request.subject,) if request.subject else ())
        head = encoder.head()
        if head:
            yield head
        async with aclosing(self._batches(shard, low, high, subject_filter)) as batches:
            async for begun, selections in batches:
                if begun < shard.machine.counters.first_seq and not request.clamp:
                    # Retention overtook the reader. The body ends without its end mark, so nobody
                    # takes it for whole; asking again from here answers 410.
                    raise ApiError(errors.REPLAY_GONE, "messages were removed while they were read")
                opened = await open_selections(self._reader, shard, selections)
                if opened:
                    table = shard.machine.subjects
                    yield await asyncio.to_thread(encoder.batch, opened, table.names, table.base)
        yield encoder.tail()

    async def _batches(
        self, shard: Shard, low: int, high: int, subject_filter: SubjectFilter
    ) -> AsyncGenerator[tuple[int, list[arrow.Selection]], None]:
        """What :meth:`_batch` answers from ``low`` to ``high``, each with where it begins.

        The next one is read while the last is encoded and sent.
        """
        seq = low
        reading = asyncio.ensure_future(self._batch(shard, seq, high, subject_filter))
        try:
            while seq <= high:
                begun = seq
                selections, seq = await reading
                if seq <= high:
                    reading = asyncio.ensure_future(self._batch(shard, seq, high, subject_filter))
                yield begun, selections
        finally:
            reading.cancel()
            await asyncio.wait([reading])  # so that what it failed with is nobody's surprise
            if not reading.cancelled():
                reading.exception()

    async def _batch(
        self, shard: Shard, seq: int, high: int, subject_filter: SubjectFilter
    ) -> tuple[list[arrow.Selection], int]:
        """Selections of the next blocks worth a record batch, and the sequence behind them."""
        number = shard.machine.shard
        for _ in range(_RETRIES):
            bases = self._next_blocks(number, seq, high)
            if not bases:
                return [], high + 1
            try:
                blocks = await asyncio.to_thread(self._blocks.load_many, number, bases)
            except BlockMissingError:
                continue  # merged or trimmed while we asked: look again
            except (BlockCorruptError, StoreCorruptError) as error:
                raise self._reader.damage(shard, bases[0], error) from error
            if not shard.machine.exists:
                raise ApiError(errors.STREAM_NOT_FOUND)
            selections = []
            for block in blocks:
                selection = self._select(shard, block, seq, high, subject_filter)
                if selection is not None:
                    selections.append(selection)
                # The first of blocks that were merged meanwhile holds what is in the others too.
                seq = max(seq, block.last_seq + 1)
            return selections, seq
        raise ApiError(errors.OVERLOADED, "the range keeps moving", retry_after_s=1)

    def _next_blocks(self, number: int, seq: int, high: int) -> list[int]:
        directory = self._blocks.directory(number)
        position = directory.position(seq)
        bases: list[int] = []
        messages = size = 0
        while position < len(directory):
            span = directory.span(position)
            full = messages + span.count > _BATCH_MESSAGES or size + span.bytes > _BATCH_BYTES
            if span.base_seq > high or (bases and full):
                break
            bases.append(span.base_seq)
            messages += span.count
            size += span.bytes
            position += 1
        return bases

    def _select(
        self, shard: Shard, block: Block, low: int, high: int, subject_filter: SubjectFilter
    ) -> arrow.Selection | None:
        machine = shard.machine
        start = max(low, block.base_seq, machine.counters.first_seq) - block.base_seq
        stop = min(high, block.last_seq) + 1 - block.base_seq
        if start >= stop:
            return None
        mask = machine.deleted.live_mask(block.base_seq + start, stop - start)
        if not subject_filter.matches_all:
            wanted = subject_filter.select(machine.subjects, block.subject_ids[start:stop])
            mask = wanted if mask is None else wanted & mask
        if mask is not None and not mask.any():
            return None
        return arrow.Selection(block, start, stop, mask)


class _ArrowEncoder:
    """An Arrow IPC stream."""

    def __init__(self, request: ReplayRequest, part: int) -> None:
        self._part = part
        self._schema = arrow.schema_of(request.schema, request.columns)
        self._subjects = arrow.SubjectTexts()

    def head(self) -> bytes:
        schema: bytes = self._schema.serialize().to_pybytes()
        return schema

    def batch(
        self, selections: list[arrow.Selection], names: list[str | None], base: int
    ) -> memoryview:
        found = arrow.record_batch(
            self._schema, self._part, selections, self._subjects, names, base
        )
        # As a stream's writer would write it, less its copies: a buffer is passed on as it is.
        return memoryview(found.serialize())

    def tail(self) -> bytes:
        return _ARROW_END


class _RecordEncoder:
    """One record a message; the last record is ``{"end": true, "messages": n}``."""

    def __init__(self, request: ReplayRequest, part: int) -> None:
        self._part = part
        self._columns = request.columns
        self._stream = request.stream
        self._messages = 0

    def head(self) -> bytes:
        return b""

    def batch(self, selections: list[arrow.Selection], names: list[str | None], base: int) -> bytes:
        parts: list[bytes] = []
        for selection in selections:
            block = selection.block
            positions = np.arange(selection.low, selection.stop)
            if selection.mask is not None:
                positions = positions[selection.mask]
            for position in positions.tolist():
                name = names[int(block.subject_ids[position]) - base]
                assert name is not None
                parts.append(self._encode(self._record(block, position, name)))
            self._messages += len(positions)
        return b"".join(parts)

    def _record(self, block: Block, position: int, subject: str) -> dict[str, object]:
        message = block.message(position, subject)
        record: dict[str, object] = {
            "stream": self._stream,
            "shard": self._part,
            "seq": message.seq,
            "subject": subject,
            "time": format_time(message.time_ns),
            "headers": message.headers or {},
        }
        if self._columns:
            record = {key: record[key] for key in record if key in self._columns}
        if not self._columns or "data" in self._columns:
            self._put_payload(record, message.payload)
        return record

    def _put_payload(self, record: dict[str, object], payload: bytes) -> None:
        raise NotImplementedError

    def _encode(self, record: dict[str, object]) -> bytes:
        raise NotImplementedError

    def tail(self) -> bytes:
        return self._encode({"end": True, "messages": self._messages})


class _NdjsonEncoder(_RecordEncoder):
    """JSON lines: ``data`` as text when it is UTF-8, else ``data_base64``."""

    def _put_payload(self, record: dict[str, object], payload: bytes) -> None:
        try:
            record["data"] = payload.decode()
        except UnicodeDecodeError:
            record["data_base64"] = payload

    def _encode(self, record: dict[str, object]) -> bytes:
        return msgspec.json.encode(record) + b"\n"


class _MsgpackEncoder(_RecordEncoder):
    """msgpack maps one after the other, payloads as bytes."""

    def _put_payload(self, record: dict[str, object], payload: bytes) -> None:
        record["data"] = payload

    def _encode(self, record: dict[str, object]) -> bytes:
        return msgspec.msgpack.encode(record)


Encoder = _ArrowEncoder | _NdjsonEncoder | _MsgpackEncoder
_ENCODERS: Final[dict[str, type[Encoder]]] = {
    "arrow": _ArrowEncoder,
    "ndjson": _NdjsonEncoder,
    "msgpack": _MsgpackEncoder,
}
