"""Restores: an archive that is uploaded in pieces becomes a stream, completely or not at all.

Records are checked as they arrive and go through the log in parts, into a shard without a stream.
The last entry creates the stream. Until it is applied, the name is only reserved. A restore that
ends earlier (by a refusal, a client that left, or a crash) leaves a reservation, which is undone.
"""

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import structlog

from contrail_common import errors
from contrail_common.columns.blocks import Block, decode_block, encode_block
from contrail_common.config_rules import check_stream_name
from contrail_common.errors import ApiError
from contrail_common.model import StreamInfo
from contrail_link.contract.admin import RESTORE_PIECE_BYTES_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.format import ArchiveError, ArchiveReader, Record, Subjects
from contrail_storage.core.archive.sharded import ShardedCheck
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.stream.strip_dead import strip_dead_columns
from contrail_storage.replica.content_sealing import UNMADE, KeyMakers, refusal
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard_logs import ShardLogs
from contrail_storage.seal.content import seal_columns
from contrail_storage.streams.manager import StreamManager

RESTORES_MAX: Final = 4

IDLE_S: Final = 60.0
_PART_BYTES: Final = 256 * 1024
_PART_RECORDS: Final = 8
"""Records of a part at most: restoring 256 subjects takes a third of a millisecond."""
T = TypeVar("T")

SealerOf = Callable[[int, bytes], "ArchiveSealer"]
"""Returns what seals the blocks of a shard, which is being restored with a hash key."""
_log = structlog.get_logger("contrail.restore")


class Restores:
    """The restores in progress on this node, by token."""

    def __init__(
        self, streams: StreamManager, logs: ShardLogs, makers: KeyMakers, idle_s: float = IDLE_S
    ) -> None:
        self._streams = streams
        self._logs = logs
        self._makers = makers
        self._idle_s = idle_s
        self._open: dict[str, _Restore] = {}
        # Tasks that undo restores; the reference keeps them alive.
        self._ending: set[asyncio.Task[None]] = set()

    def _sealer_of(self, shard_id: int, hash_key: bytes) -> "ArchiveSealer":
        group = self._logs.group_of(shard_id)
        log = self._logs.groups.proposers[group]
        if not log.group.is_alone:
            self._makers.shared.expect(shard_id, hash_key)
        return ArchiveSealer(self._makers, group, log, shard_id)

    async def begin(self, name: str) -> str:
        """Begin a restore into the stream ``name``, which must not exist; return its token."""
        check_stream_name(name)
        if len(self._open) >= RESTORES_MAX:
            raise ApiError(
                errors.OVERLOADED,
                "too many restores are in progress",
                retry_after_s=5,
                applied=False,
            )
        token = secrets.token_hex(16)
        self._open[token] = _Restore(name, self._streams, self._sealer_of)
        try:
            await self._streams.claim_restore(name)
        except BaseException:
            del self._open[token]
            raise
        self._expect_more(token)
        return token

    async def feed(self, token: str, offset: int, piece: bytes) -> None:
        """Add the next bytes of the archive, at ``offset``; ARCHIVE_INVALID ends the restore."""
        restore = self._take(token)
        await self._carry_out(token, restore.feed(offset, piece))
        self._expect_more(token)

    async def commit(self, token: str) -> StreamInfo:
        """Finish a restore after the last piece: the stream exists when this returns."""
        info = await self._carry_out(token, self._take(token).commit())
        await self._end(token)
        return info

    async def abort(self, token: str) -> None:
        """Undo a restore; nothing happens if it has ended already."""
        if token in self._open:
            self._take(token)
            await self._end(token)

    def close(self) -> None:
        """Stop the timers. The next start undoes the restores in progress."""
        for restore in self._open.values():
            restore.wait_no_more()

    async def _carry_out(self, token: str, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``; if it fails or is cancelled, the restore ends."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except BaseException:
            await self._end(token, task)
            raise

    async def _end(self, token: str, task: "asyncio.Task[Any] | None" = None) -> None:
        """Undo a restore after ``task``, even if the caller is cancelled."""
        ending = asyncio.ensure_future(self._undo(token, task))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        await asyncio.shield(ending)

    def _take(self, token: str) -> "_Restore":
        restore = self._open.get(token)
        if restore is None or restore.busy:
            raise ApiError(errors.BAD_REQUEST, "no such restore is in progress", applied=False)
        # One call at a time: pieces have an order, and the checks keep state between them.
        restore.busy = True
        restore.wait_no_more()
        return restore

    def _expect_more(self, token: str) -> None:
        restore = self._open[token]
        restore.busy = False
        loop = asyncio.get_running_loop()
        restore.idle = loop.call_later(self._idle_s, self._give_up, token)

    def _give_up(self, token: str) -> None:
        _log.warning("restore_abandoned", stream=self._open[token].name)
        self._open[token].busy = True
        ending = asyncio.ensure_future(self._undo(token, None))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _undo(self, token: str, task: "asyncio.Task[Any] | None") -> None:
        """End a restore; drop its reservation if the stream was not created."""
        restore = self._open[token]
        if task is not None:
            # The commands of the task may be in the log: undoing before they are applied would miss
            # them.
            await asyncio.wait([task])
        try:
            await self._streams.end_restore(restore.name)
        except ApiError as error:
            # The next request for the name, or the next start, finishes it.
            _log.warning("restore_not_undone", stream=restore.name, error=str(error))
        finally:
            # Always, or a restore that could not be undone would count against RESTORES_MAX until a
            # restart.
            del self._open[token]


class _Restore:
    """One restore: its checked bytes, and the part that is not logged yet."""

    def __init__(self, name: str, streams: StreamManager, sealer_of: SealerOf) -> None:
        self.name = name
        self._sealer_of = sealer_of
        # Seals the blocks of the current shard; None if its stream has no subject keys.
        self._sealer: ArchiveSealer | None = None
        # Whether a call or the undoing works on it; then no other call is accepted.
        self.busy = True
        # The timer of an abandoned restore.
        self.idle: asyncio.TimerHandle | None = None
        self._streams = streams
        # Used by one worker thread at a time: splits the bytes into records, and checks them.
        self._reader = ArchiveReader()
        self._check = ShardedCheck()
        # One per shard, in order; the last one is of the current shard.
        self._headers: list[ArchiveHeader] = []
        # The bytes of the archive that were received.
        self._offset = 0
        # Number of the first shard, once it is reserved.
        self._number: int | None = None
        # Records that are not logged yet, and the size of their payloads.
        self._part: list[tuple[int, bytes]] = []
        self._part_bytes = 0

    def wait_no_more(self) -> None:
        """Stop the idle timer, because a call works on the restore."""
        if self.idle is not None:
            self.idle.cancel()

    async def feed(self, offset: int, piece: bytes) -> None:
        """Add the next bytes. On return they are logged, except for less than one part."""
        if offset != self._offset or len(piece) > RESTORE_PIECE_BYTES_MAX:
            raise ApiError(errors.BAD_REQUEST, "the piece is out of order", applied=False)
        self._offset += len(piece)
        try:
            records = await asyncio.to_thread(self._checked, piece)
        except ArchiveError as error:
            raise ApiError(errors.ARCHIVE_INVALID, str(error), applied=False) from error
        for record in records:
            await self._take(record)

    def _checked(self, piece: bytes) -> list[Record]:
        records = self._reader.feed(piece)
        for record in records:
            self._check.take(record)
        return records

    async def _take(self, record: Record) -> None:
        if record.kind == archive.HEADER:
            await self._begin_shard(archive.decoded(record.payload, ArchiveHeader))
            return
        if self._sealer is not None:
            if self._part and record.kind == archive.BLOCK and self._sealer.is_shared:
                # Keys are named in a shard, so there must be one.
                await self._log_part()
            record = await self._sealer.sealed(record)
        full = self._part_bytes + len(record.payload) > _PART_BYTES
        if self._part and (full or len(self._part) == _PART_RECORDS):
            await self._log_part()
        self._part.append((record.kind, record.payload))
        self._part_bytes += len(record.payload)

    async def _begin_shard(self, header: ArchiveHeader) -> None:
        if self._part:
            await self._log_part()
        config = msgspec.structs.replace(header.config, name=self.name)
        # A new incarnation: cursors and tokens of the original stream must not be valid here. All
        # shards have the same one.
        own = self._headers[0].incarnation if self._headers else secrets.token_hex(8)
        self._headers.append(msgspec.structs.replace(header, config=config, incarnation=own))
        # The first header has the names and the number of shards: all of them are reserved
        # together.
        if self._number is None:
            self._number = await self._streams.begin_restore(config, own)
        if config.erasure == "subject_key":
            self._sealer = self._sealer_of(self._number + header.shard, header.hash_key)

    async def _log_part(self) -> None:
        assert self._number is not None
        header = self._headers[-1]
        part = cmd.RestorePart(self._part, header.config.compression)
        self._part, self._part_bytes = [], 0
        # One part at a time: several parts in one entry would write the same rows of its index.
        await self._streams.restore_part(self._number + header.shard, part)

    async def commit(self) -> StreamInfo:
        """Create the stream; ARCHIVE_INVALID when the archive is incomplete."""
        try:
            self._reader.finish()
            await asyncio.to_thread(self._check.finish)
        except ArchiveError as error:
            raise ApiError(errors.ARCHIVE_INVALID, str(error), applied=False) from error
        if self._part:
            await self._log_part()
        assert self._number is not None
        finishes = [cmd.FinishRestore(header) for header in self._headers]
        return await self._streams.finish_restore(self._number, finishes)


class ArchiveSealer:
    """Seals the blocks of one shard with its own keys, before they are logged."""

    def __init__(self, makers: KeyMakers, group: int, log: Proposer, shard: int) -> None:
        self.is_shared = not log.group.is_alone
        """Whether the members of a group have the keys."""
        self._makers = makers
        self._group = group
        self._log = log
        self._shard = shard
        self._names: dict[int, str] = {}

    async def sealed(self, record: Record) -> Record:
        """Return the record to log; subjects must come before the blocks that use them."""
        if record.kind == archive.SUBJECTS:
            subjects = archive.decoded(record.payload, Subjects)
            numbers = np.frombuffer(subjects.rows, np.uint32, len(subjects.names))
            self._names.update(zip(numbers.tolist(), subjects.names, strict=True))
        if record.kind != archive.BLOCK:
            return record
        try:
            block = await asyncio.to_thread(decode_block, record.payload)
            known = [at for at in dict.fromkeys(block.subject_ids.tolist()) if at in self._names]
            wanted = [(self._shard, self._names[number]) for number in known]
            if wanted:
                await self._makers.make(self._group, self._log, wanted)
            sealed = await asyncio.to_thread(self._sealed, block, known, wanted)
        except UNMADE as error:
            raise refusal(error) from error
        return Record(archive.BLOCK, encode_block(sealed, 0))

    def _sealed(self, block: Block, known: list[int], wanted: list[tuple[int, str]]) -> Block:
        """Seal a block. Blocks. Messages of subjects without live messages are emptied.

        ``known`` are the numbers of the other subjects, ``wanted`` say whose keys seal them.
        """
        numbers = block.subject_ids.tolist()
        keys_of_shard = self._makers.keys_of(self._log)
        found = [keys_of_shard.sealing(*one) for one in wanted]
        keys = [key for key in found if key is not None]
        assert len(keys) == len(known), "nothing destroys keys of a stream that is being made"
        key_of = {number: at for at, number in enumerate(known)}
        live = np.array([number in key_of for number in numbers])
        columns = strip_dead_columns(block.columns, live)
        if keys:
            columns = seal_columns(columns, [key_of.get(number, 0) for number in numbers], keys)
            columns = strip_dead_columns(columns, live)
        return Block(block.base_seq, block.times_ns, block.subject_ids, columns)
