"""Bulk replay: plan a pinned range, and stream it block by block, off the event loop.

A range is pinned by its sequences: reading it twice gives the same messages while they are kept.
Work on blocks (store reads, decoding, Arrow) runs in worker threads; the loop only sends chunks.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar, TypeVarTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import BlockCorruptError, BlockView
from contrail_common.errors import ApiError
from contrail_common.texts import I64Array
from contrail_common.timeunits import format_time
from contrail_link.contract.read import (
    Chunk,
    Pieces,
    PinnedReplay,
    ReplayPlanRequest,
    ReplayRequest,
    ReplaySplit,
    ShardBounds,
)
from contrail_storage.core.subjects.filters import SubjectFilter, SubjectLookup
from contrail_storage.reading import arrow_encoding as arrow
from contrail_storage.reading.answering import read_failed, removed_too_quickly
from contrail_storage.reading.reader import Reader
from contrail_storage.reading.selection import Run, Selection, select, unseal
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.content import ContentBrokenError
from contrail_storage.store.block_store import (
    UNREADABLE,
    BlockMissingError,
    BlockStore,
    Directory,
)
from contrail_storage.store.rocks_store import StoreCorruptError, StoreFailedError

_RETRIES: Final = 8
_ARROW_END: Final = b"\xff\xff\xff\xff\0\0\0\0"
"""End of an Arrow stream: a message of zero bytes (Arrow columnar format, IPC)."""
SPLITS_MAX: Final = 1_024
_AHEAD: Final = 2
"""Units that are made in advance for a reader, while another one is being sent."""

_Given = TypeVarTuple("_Given")
_Answer = TypeVar("_Answer")


class Replayer:
    """Plans and streams replays of shards."""

    def __init__(self, blocks: BlockStore, reader: Reader) -> None:
        self._blocks = blocks
        self._reader = reader

    async def plan(
        self, shard: Shard, request: ReplayPlanRequest, splits_max: int = SPLITS_MAX
    ) -> PinnedReplay:
        """Pin the range, and split it at block borders into parts of about equal size."""
        machine = shard.machine
        assert machine.record is not None
        bounds = bounds_of(shard)
        low = max(request.from_seq, bounds.first_seq)
        high = min(request.to_seq or shard.applied_seq, shard.applied_seq)
        if request.start_time_ns:
            low = max(low, await self._reader.seq_of_time(shard, request.start_time_ns))
        if request.end_time_ns:
            high = min(high, await self._reader.seq_of_time(shard, request.end_time_ns) - 1)
        splits = self._cut(shard, low, high, request, splits_max) if low <= high else []
        return PinnedReplay(shard.name, machine.record.incarnation, splits, [bounds])

    def _cut(
        self, shard: Shard, low: int, high: int, request: ReplayPlanRequest, splits_max: int
    ) -> list[ReplaySplit]:
        directory = self._blocks.directory(shard.machine.shard_id)
        first, last = directory.position(low), directory.position(high)
        last = min(last, len(directory) - 1)
        total = directory.totals(first, last + 1)[1]
        parts = request.splits
        if request.split_bytes:
            parts = max(parts, -(-total // request.split_bytes))
        parts = max(1, min(parts, splits_max, last - first + 1))
        splits: list[ReplaySplit] = []
        start, size = low, 0
        # Readers that follow a stream ask for one split again and again, only to see its end.
        if parts == 1:
            first, size = last, directory.totals(first, last)[1]
        for position in range(first, last + 1):
            span = directory.span(position)
            size += span.bytes
            end = position == last
            if end or size * parts >= total:
                stop = high if end else span.end_seq - 1
                count = stop - start + 1 - shard.machine.deleted.count(start, stop)
                splits.append(ReplaySplit(shard.machine.shard, start, stop, count, size))
                start, size = stop + 1, 0
        return splits

    def check(self, shard: Shard, request: ReplayRequest) -> tuple[int, int]:
        """Return the closed range to stream; ApiError when it may not be streamed."""
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
        # A range that was pinned must not silently shrink; with `clamp`, the caller allows it.
        if low < first_seq:
            if not request.clamp:
                raise ApiError(
                    errors.REPLAY_GONE,
                    f"the first sequence that the stream still has is {first_seq}",
                )
            low = first_seq
        if request.to_seq > shard.applied_seq:
            raise ApiError(
                errors.REPLAY_AHEAD,
                f"this replica has applied changes up to sequence {shard.applied_seq}",
                retry_after_s=1,
            )
        return low, request.to_seq or shard.applied_seq

    async def stream(
        self, shard: Shard, request: ReplayRequest, low: int, high: int
    ) -> AsyncIterator[Chunk | Pieces]:
        """Yield the encoded body, about a record batch at a time.

        The next units are read and encoded while one is sent.
        """
        encoder = _ENCODERS[request.format](request, shard.machine.shard)
        head = encoder.head()
        if head:
            yield head
        wanted = self._reader.share_filter(shard, tuple(request.subject.split()))
        directory = self._blocks.directory(shard.machine.shard_id)
        scan = _Scan(shard, request, directory, high, wanted)
        begun: deque[tuple[_Unit, asyncio.Future[_Made]]] = deque()
        seq, messages = low, 0
        try:
            while begun or seq <= high:
                while seq <= high and len(begun) < _AHEAD:
                    unit = await self._next_unit(shard, scan, seq)
                    if unit is None:
                        seq = high + 1
                        break
                    begun.append((unit, self._in_thread(self._make, scan.shard_id, unit, encoder)))
                    seq = unit.high + 1
                if not begun:
                    break
                unit, making = begun.popleft()
                made = await self._made(shard, making)
                if made is None or not scan.stands(unit):
                    # Blocks or messages have changed: make this unit again, alone.
                    # The units after it began at sequences that followed from this one.
                    await _settled(one for _, one in begun)
                    begun.clear()
                    made, seq = await self._in_turn(shard, scan, unit.low, encoder)
                messages += made.messages
                if made.chunk is not None:
                    yield made.chunk
        finally:
            await _settled(one for _, one in begun)
        yield encoder.tail(messages)

    async def _next_unit(self, shard: Shard, scan: "_Scan", seq: int) -> "_Unit | None":
        """The unit at ``seq`` or, with a subject, of the next blocks with matches; None: no more.

        Raises as :meth:`_Scan.choose`.
        """
        wanted, reader, high = scan.wanted, self._reader, scan.high
        if wanted.matches_all:
            return scan.unit(seq)
        try:
            while seq <= high:
                scan.check(seq)
                facts = await reader.facts(shard, seq, scan.last_of_unit(seq))
                await reader.prepare(shard, wanted)
                scan.check(seq)
                pick = partial(wanted.select, shard.machine.subjects)
                matches = reader.live(shard, facts, seq, high + 1, pick)
                if len(matches):
                    return scan.unit(int(matches[0]), matches)
                match = await reader.next_match(
                    shard, facts.end_seq, wanted, missed=True, to_seq=high
                )
                scan.check(seq)  # what was passed over was there all the time
                seq = match
        except StoreFailedError as error:
            raise read_failed(error) from error
        except ApiError as error:
            if error.spec is not errors.DATA_LOST:
                raise
            # A damaged block lies ahead: send what comes before it.
            await reader.prepare(shard, wanted)
            return scan.unit(seq)
        return None

    async def _made(self, shard: Shard, making: "asyncio.Future[_Made]") -> "_Made | None":
        """Return the made unit, or None when its blocks have been replaced."""
        try:
            return await making
        except BlockMissingError:
            return None
        except _DamagedError as error:
            raise self._reader.damage(shard, error.base_seq, error.reason) from error.reason
        except StoreFailedError as error:
            raise read_failed(error) from error

    def _make(self, shard_id: int, unit: "_Unit", encoder: "Encoder") -> "_Made":
        """Read and encode a unit. Runs in a thread."""
        try:
            views = self._blocks.view_many(shard_id, unit.bases)
        # Perhaps only RocksDB's own index is damaged: without its checksums it may lead to a wrong
        # place. `_in_turn` reads again with all checks, and reports what is left.
        except (BlockCorruptError, StoreCorruptError) as error:
            raise BlockMissingError("to be read again, with all checks") from error
        for view, last_time_ns in zip(views, unit.last_times_ns, strict=True):
            if int(view.times_ns[-1]) != last_time_ns:
                raise BlockMissingError(f"block {view.base_seq} was replaced")
        for view_at, first_seq, count in unit.wanted:
            view = views[view_at]
            if first_seq < view.base_seq or first_seq + count > view.last_seq + 1:
                raise BlockMissingError(f"block {view.base_seq} was replaced")
        return self._encoded(shard_id, unit, views, encoder)

    def _view(self, shard_id: int, bases: list[int]) -> list[BlockView]:
        try:
            return self._blocks.view_surely(shard_id, bases)
        except (BlockCorruptError, StoreCorruptError) as error:
            raise _DamagedError(self._unreadable(shard_id, bases), error) from error

    def _unreadable(self, shard_id: int, bases: list[int]) -> int:
        """Return which of several blocks is unreadable."""
        for base in bases:
            try:
                self._blocks.view_surely(shard_id, [base])
            except (BlockCorruptError, StoreCorruptError):
                return base
        return bases[0]

    def _encoded(
        self, shard_id: int, unit: "_Unit", views: list[BlockView], encoder: "Encoder"
    ) -> "_Made":
        """Encode a unit. Runs in a thread."""
        runs = []
        for view_at, first_seq, count in unit.wanted:
            low = first_seq - views[view_at].base_seq
            runs.append(Run(views[view_at], low, low + count))
        try:
            chosen = select(runs, unit.live, unit.lookup)
            selection = unseal(self._reader.opener, shard_id, chosen)
        except ContentBrokenError as error:
            raise _DamagedError(error.base_seq or unit.bases[0], error) from error
        if not selection.count:
            return _Made(None, 0)
        return _Made(encoder.batch(selection, unit.names, unit.base), selection.count)

    async def _in_turn(
        self, shard: Shard, scan: "_Scan", seq: int, encoder: "Encoder"
    ) -> tuple["_Made", int]:
        """Make the unit at ``seq`` as of its reading; return it and the next sequence."""
        for _ in range(_RETRIES):
            await self._reader.prepare(shard, scan.wanted)
            unit = scan.unit(seq)
            try:
                views = await self._in_thread(self._view, scan.shard_id, unit.bases)
                extents = [(one.base_seq, one.count) for one in views]
                await self._reader.prepare(shard, scan.wanted)
                unit = scan.choose(unit.bases, extents, seq)
                shard_id, high = scan.shard_id, unit.high
                made = await self._in_thread(self._encoded, shard_id, unit, views, encoder)
                return made, high + 1
            except BlockMissingError:
                continue  # merged or trimmed while it was read: look again
            except _DamagedError as error:
                # Content that cannot be decrypted is no better elsewhere.
                unreadable = isinstance(error.reason, UNREADABLE)
                if not (unreadable and await self._reader.mend(shard, error.base_seq)):
                    raise self._reader.damage(shard, error.base_seq, error.reason) from error
        raise removed_too_quickly()

    @staticmethod
    def _in_thread(
        work: Callable[[*_Given], _Answer], *given: *_Given
    ) -> "asyncio.Future[_Answer]":
        return asyncio.get_running_loop().run_in_executor(None, work, *given)


def bounds_of(shard: Shard) -> ShardBounds:
    """The oldest and newest sequence that can be read from ``shard`` now."""
    machine = shard.machine
    return ShardBounds(machine.shard, machine.counters.first_seq, shard.applied_seq)


async def _settled(futures: "Iterable[asyncio.Future[Any]]") -> None:
    """Wait for futures that are no longer needed, and ignore their errors."""
    waiting = list(futures)
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


class _DamagedError(Exception):
    """Blocks are unreadable."""

    def __init__(self, base_seq: int, reason: Exception) -> None:
        super().__init__(str(reason))
        self.base_seq = base_seq
        self.reason = reason


class _Bounds(NamedTuple):
    """The size of a unit: at most so many messages and bytes are read together."""

    messages: int
    bytes: int


_ALL: Final = _Bounds(16_384, 2 << 20)
_SPARK: Final = _Bounds(8_192, 4 << 20)
"""For Spark, which converts a batch into rows and is slower with larger ones."""
_SOME: Final = _Bounds(65_536, 4 << 20)
"""For reads with a subject: much is searched, and less is sent."""


def _bounds_of(request: ReplayRequest) -> _Bounds:
    if request.subject:
        return _SOME
    return _SPARK if request.schema == "spark" else _ALL


class _Unit(NamedTuple):
    """Blocks to read together, and the messages of them to send, as of one moment."""

    low: int
    high: int
    bases: list[int]
    wanted: list[tuple[int, int, int]]
    """(index of the block, first sequence, count)."""
    live: list[NDArray[np.bool_] | None]
    lookup: SubjectLookup | None
    names: Sequence[str | None]
    base: int
    last_times_ns: list[int]
    """By block, as the directory has it; empty if the blocks were read first."""
    moment: tuple[int, int]
    """First sequence and number of deleted messages. If equal later, nothing has changed."""


class _Made(NamedTuple):
    """An encoded chunk (None: no message), and its number of messages."""

    chunk: Chunk | Pieces | None
    messages: int


class _Scan:
    """The progress of one replay over a shard. Used on the event loop."""

    def __init__(
        self,
        shard: Shard,
        request: ReplayRequest,
        directory: Directory,
        high: int,
        wanted: SubjectFilter,
    ) -> None:
        self.shard_id = shard.machine.shard_id
        self.wanted = wanted
        """To be prepared before units are made."""
        self.high = high
        """The last sequence of the replay."""
        self._shard = shard
        self._machine = shard.machine
        self._directory = directory
        self._bounds = _bounds_of(request)
        self._clamp = request.clamp

    def last_of_unit(self, seq: int) -> int:
        """The last sequence that the unit at ``seq`` may have."""
        extents = self._directory.extents_from(seq, self.high, *self._bounds)
        return min(sum(extents[-1]) - 1, self.high) if extents else self.high

    def unit(self, seq: int, matches: I64Array | None = None) -> _Unit:
        """Return the unit at ``seq``; raises as :meth:`choose`. ``wanted`` must be prepared.

        With ``matches``, sequences from ``seq`` on, blocks with none of them are left out.
        """
        extents = self._directory.extents_from(seq, self.high, *self._bounds)
        if matches is not None and extents:
            low, end = np.searchsorted(
                matches, np.array([[base, base + count] for base, count in extents]).T
            )
            # If the first match is gone, the next unit begins after its block.
            extents = list(compress(extents, low < end)) or extents[:1]
        unit = self.choose([base for base, _ in extents], extents, seq)
        return unit._replace(last_times_ns=self._directory.last_times_ns(unit.bases))

    def choose(self, bases: list[int], extents: list[tuple[int, int]], seq: int) -> _Unit:
        """Choose the messages of blocks with these ``extents`` (first sequence, count).

        Raises ApiError when messages from ``seq`` on that belong to the replay are gone.
        """
        machine = self._shard.machine
        self.check(seq)
        first_seq, deleted = machine.counters.first_seq, machine.deleted
        wanted: list[tuple[int, int, int]] = []
        live: list[NDArray[np.bool_] | None] = []
        low, stop_seq, whole = seq, self.high + 1, not deleted.total
        for view_at, (base_seq, count) in enumerate(extents):
            end = base_seq + count
            start = max(low, base_seq, first_seq)
            within = min(end, stop_seq) - start
            if within > 0:
                wanted.append((view_at, start, within))
                live.append(None if whole else deleted.live_mask(start, within))
            # If blocks were merged meanwhile, the first one has the messages of the others too.
            low = max(low, end)
        return _Unit(
            seq,
            min(low - 1, self.high) if extents else self.high,
            bases,
            wanted,
            live,
            None if self.wanted.matches_all else self.wanted.lookup(machine.subjects),
            machine.subjects.names,
            machine.subjects.base,
            [],
            (first_seq, deleted.total),
        )

    def check(self, seq: int) -> None:
        """Raise ApiError unless messages from ``seq`` on may be sent."""
        machine = self._shard.machine
        if not machine.exists:
            raise ApiError(errors.STREAM_NOT_FOUND)
        if machine is not self._machine:
            # The same messages may be in other blocks now. The body ends without its end mark.
            raise ApiError(errors.STORAGE_FAILED, "the store was reopened", retry_after_s=1)
        if seq < machine.counters.first_seq and not self._clamp:
            # Retention overtook the reader. The body ends without its end mark, so the client
            # knows that it is incomplete. A new request from here on gets 410.
            raise ApiError(errors.REPLAY_GONE, "messages were removed while they were being read")

    def stands(self, unit: _Unit) -> bool:
        """Whether all messages of ``unit`` still exist; raises as :meth:`choose`."""
        self.check(unit.low)
        machine = self._shard.machine
        first_seq, deleted = machine.counters.first_seq, machine.deleted
        if unit.moment == (first_seq, deleted.total):
            return True
        return all(
            start >= first_seq and _same(alive, deleted.live_mask(start, count))
            for (_, start, count), alive in zip(unit.wanted, unit.live, strict=True)
        )


def _same(before: NDArray[np.bool_] | None, now: NDArray[np.bool_] | None) -> bool:
    if before is None or now is None:
        return all(one is None or bool(one.all()) for one in (before, now))
    return np.array_equal(before, now)


class _ArrowEncoder:
    """Encodes an Arrow IPC stream, a record batch for each unit."""

    def __init__(self, request: ReplayRequest, shard: int) -> None:
        self._schema = arrow.schema_of(request.schema, request.columns)
        self._batches = arrow.BatchEncoder(self._schema, shard)

    def head(self) -> bytes:
        schema: bytes = self._schema.serialize().to_pybytes()
        return schema

    def batch(self, selection: Selection, names: Sequence[str | None], base: int) -> Chunk | Pieces:
        return self._batches.message(selection, names, base)

    def tail(self, messages: int) -> bytes:
        return _ARROW_END


class _RecordEncoder:
    """One record per message; the last record is ``{"end": true, "messages": n}``."""

    def __init__(self, request: ReplayRequest, shard: int) -> None:
        self._shard = shard
        self._columns = request.columns
        self._stream = request.stream

    def head(self) -> bytes:
        return b""

    def batch(self, selection: Selection, names: Sequence[str | None], base: int) -> bytes:
        parts: list[bytes] = []
        for block, positions in selection.by_run():
            for position in positions.tolist():
                # Subject numbers wrap around, see core.subjects.subject_table.
                name = names[(int(block.subject_ids[position]) - base) & 0xFFFF_FFFF]
                assert name is not None
                parts.append(self._encode(self._record(block, position, name)))
        return b"".join(parts)

    def _record(self, block: BlockView, position: int, subject: str) -> dict[str, object]:
        message = block.message(position, subject)
        record: dict[str, object] = {
            "stream": self._stream,
            "shard": self._shard,
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

    def tail(self, messages: int) -> bytes:
        return self._encode({"end": True, "messages": messages})


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
    """Consecutive msgpack maps, with payloads as bytes."""

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
