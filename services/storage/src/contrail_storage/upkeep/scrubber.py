"""Background scrub: everything stored is read regularly, so that damage is found early.

Without it, damage would only be found when the data is needed, perhaps after the last good copy
elsewhere is gone. A damaged shard stops and reports the damage, as if a reader had found it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np
import structlog

from contrail_common.columns.blocks import Block
from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.replica.shard import Mend, Shard, not_mended
from contrail_storage.seal.content import ContentBrokenError, ContentOpener
from contrail_storage.store.block_store import UNREADABLE, BlockSpan, BlockStore
from contrail_storage.store.rocks_store import (
    StoreClosedError,
    StoreCorruptError,
    StoreFailedError,
    StoreScanCutError,
)
from contrail_storage.streams.stream import Stream

CHUNK_BYTES: Final = 1 << 20
CHUNK_ROWS: Final = 2_000
_RETRY_S: Final = 60.0
_log = structlog.get_logger("contrail.scrub")


class RowSource(Protocol):
    """The part of the store that the scrubber uses."""

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) from ``start`` up to, not including, ``stop``."""
        ...


@dataclass(slots=True)
class ScrubCounts:
    """Counters since the start of the node."""

    rounds: int = 0
    blocks: int = 0
    bytes: int = 0
    damaged: int = 0
    """Damaged blocks, and kinds of rows in which a row is damaged."""


class Scrubber:
    """Reads all blocks and rows of the shards at ``bytes_s``, then pauses for ``pause_s``."""

    def __init__(
        self,
        streams: Callable[[], AsyncGenerator[Stream, None]],
        blocks: BlockStore,
        rows: RowSource,
        opener: ContentOpener,
        *,
        bytes_s: int,
        pause_s: float,
        mend: Mend = not_mended,
    ) -> None:
        self._mend = mend
        self._opener = opener
        self.counts = ScrubCounts()
        self._streams = streams
        self._blocks = blocks
        self._rows = rows
        self._bytes_s = bytes_s
        self._pause_s = pause_s

    async def run(self) -> None:
        """Scrub until cancelled, or until the store is closed."""
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                await self.round()
            except StoreClosedError:
                return
            except Exception:
                # The node still serves, so this must not end it. Readers report what is wrong.
                _log.exception("scrub_failed")
                await asyncio.sleep(_RETRY_S)

    async def round(self) -> None:
        """Read all blocks and rows of all shards once. Raises StoreClosedError."""
        async with aclosing(self._streams()) as streams:
            async for stream in streams:
                # Streams in memory have nothing on disk that could be damaged.
                for shard in () if stream.in_memory else stream.shards:
                    await self._scrub(shard)
        self.counts.rounds += 1

    async def _scrub(self, shard: Shard) -> None:
        try:
            if not shard.damaged:
                await self._scrub_blocks(shard)
            if not shard.damaged and shard.machine.exists:
                await self._scrub_rows(shard)
        except StoreFailedError as error:
            # It may be readable the next time; later streams must not wait for it.
            _log.warning("scrub_put_off", stream=shard.name, error=str(error))

    async def _scrub_blocks(self, shard: Shard) -> None:
        seq = 0
        while spans := self._next_spans(shard, seq):
            size = sum(span.bytes for span in spans)
            broken = await asyncio.to_thread(self._broken, shard.machine.shard_id, spans)
            for span, why, block in broken:
                # While the thread was reading, the block may have been merged, dropped or erased.
                # Then the read failed for that reason, and nothing is damaged.
                if not self._stands(shard, span):
                    continue
                if block is None and await self._mend(shard, span.base_seq):
                    self.counts.damaged += 1
                elif block is None or self._matters(shard, block):
                    self._report(shard, f"block {span.base_seq}: {why}")
                    return
            self.counts.blocks += len(spans)
            await self._pace(size)
            seq = spans[-1].end_seq

    def _next_spans(self, shard: Shard, seq: int) -> list[BlockSpan]:
        """Return the next blocks from ``seq`` on that make a chunk."""
        if not shard.machine.exists:
            return []
        directory = self._blocks.directory(shard.machine.shard_id)
        spans: list[BlockSpan] = []
        size = 0
        for position in range(directory.position(seq), len(directory)):
            spans.append(directory.span(position))
            size += spans[-1].bytes
            if size >= CHUNK_BYTES:
                break
        return spans

    def _broken(
        self, shard_id: int, spans: list[BlockSpan]
    ) -> list[tuple[BlockSpan, str, Block | None]]:
        """Return the broken ones of ``spans``, each with the reason. Runs in a thread.

        The block is included if it can be read and only a message in it cannot be decrypted.
        """
        broken: list[tuple[BlockSpan, str, Block | None]] = []
        for span in spans:
            try:
                (block,) = self._blocks.load_many(shard_id, [span.base_seq])
            except UNREADABLE as error:
                broken.append((span, str(error), None))
                continue
            if not _is_of(block, span):
                reason = f"it has sequences {block.base_seq} to {block.last_seq}"
                broken.append((span, reason, None))
                continue
            try:
                self._opener.columns(shard_id, block.columns)
            except ApiError:
                continue  # this node has yet to get a key
            except ContentBrokenError as error:
                broken.append((span, str(error), block))
        return broken

    def _matters(self, shard: Shard, block: Block) -> bool:
        """Whether a live message of ``block`` cannot be decrypted. Dead ones may lack their key."""
        machine = shard.machine
        live = np.flatnonzero(machine.live_mask(block.base_seq, block.count)).tolist()
        try:
            self._opener.columns(machine.shard_id, block.columns, live)
        except ContentBrokenError:
            return True
        except ApiError:
            pass  # this node has yet to get a key
        return False

    def _stands(self, shard: Shard, span: BlockSpan) -> bool:
        """Whether the directory still lists the block. It may have been merged or removed."""
        if not shard.machine.exists:
            return False
        directory = self._blocks.directory(shard.machine.shard_id)
        position = directory.position(span.base_seq)
        return position < len(directory) and directory.span(position) == span

    async def _scrub_rows(self, shard: Shard) -> None:
        shard_id = shard.machine.shard_id
        for kind in keys.SHARD_KINDS:
            # Blocks were read as such: `_scrub_blocks` also checks what is inside them.
            if kind == keys.BLOCK:
                continue
            prefix = keys.shard_key(kind, shard_id)
            rows = self._rows.scan(prefix, keys.prefix_end(prefix))
            try:
                while size := await asyncio.to_thread(_read, rows):
                    await self._pace(size)
            except StoreScanCutError:
                return  # the rest is read in the next round
            except StoreCorruptError as error:
                # A stream that was deleted meanwhile has nothing left that could be damaged.
                if shard.machine.exists:
                    self._report(shard, f"rows of kind {kind.decode()}: {error}")
                    return

    def _report(self, shard: Shard, why: str) -> None:
        self.counts.damaged += 1
        shard.damaged = why
        shard.notify()
        _log.critical("scrub_found_damage", stream=shard.name, reason=why)

    async def _pace(self, size: int) -> None:
        self.counts.bytes += size
        # The time to read at this rate, in addition to the time that the read took: the scrub is
        # always slower than its rate, and leaves the disk to requests.
        await asyncio.sleep(size / self._bytes_s)


def _is_of(block: Block, span: BlockSpan) -> bool:
    # A block that was merged meanwhile may begin at the same sequence.
    return block.base_seq == span.base_seq and block.last_seq + 1 >= span.end_seq


def _read(rows: Iterator[tuple[bytes, bytes]]) -> int:
    """Read at most CHUNK_ROWS rows, and return their bytes; 0 at the end."""
    return sum(len(key) + len(value) for key, value in islice(rows, CHUNK_ROWS))
