"""Snapshots: a stream with its consumers as an archive, read while the stream is used.

The archive is read from one view of the store. The changes of one entry are in the store completely
or not at all, so a view has all rows and blocks as of one applied index, however long reading
takes. Publishes, merges and removals continue meanwhile, and none of them waits.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from functools import partial
from typing import Final

from contrail_common import errors
from contrail_common.columns.blocks import BlockCorruptError, MessageColumns, decode_block
from contrail_common.errors import ApiError
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive.format import ArchiveWriter
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.stream.archive_records import block_record, state_records
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.reading.answering import read_failed
from contrail_storage.replica.loading import skipped_of
from contrail_storage.replica.shard import Shard
from contrail_storage.seal.content import ContentOpener
from contrail_storage.store.block_codecs import BLOCK_CODECS
from contrail_storage.store.rocks_store import (
    StoreCorruptError,
    StoreFailedError,
    StoreScanCutError,
)
from contrail_storage.store.split_store import SplitStore

SNAPSHOTS_MAX: Final = 8
"""Each snapshot keeps files of the store, and copies the stream's subjects and ids meanwhile."""
_CHUNK_BYTES: Final = 256 * 1024


class Snapshotter:
    """Streams archives of shards."""

    def __init__(self, store: SplitStore, opener: ContentOpener) -> None:
        self._store = store
        self._opener = opener
        self._open = 0

    @property
    def is_reading(self) -> bool:
        """Whether a snapshot is being read."""
        return self._open > 0

    def stream(self, shards: Sequence[Shard], *, consumers: bool) -> AsyncIterator[bytes]:
        """Return the archive of a stream as of the first read, in chunks; OVERLOADED.

        If something cannot be read, the archive ends without its end record.
        """
        if self._open >= SNAPSHOTS_MAX:
            raise ApiError(
                errors.OVERLOADED,
                "too many snapshots are being read",
                retry_after_s=5,
                applied=False,
            )
        shard_ids = [shard.machine.shard_id for shard in shards]
        return self._stream(shard_ids, consumers=consumers)

    async def _stream(self, shard_ids: list[int], *, consumers: bool) -> AsyncIterator[bytes]:
        self._open += 1
        chunks = self._chunks(shard_ids, consumers=consumers)
        step: asyncio.Future[bytes | None] | None = None
        try:
            while True:
                # Each chunk in a thread, and only when the client has taken the one before: a slow
                # client takes no memory.
                step = asyncio.ensure_future(asyncio.to_thread(next, chunks, None))
                chunk = await asyncio.shield(step)
                if chunk is None:
                    return
                yield chunk
        except (BlockCorruptError, StoreCorruptError) as error:
            raise ApiError(errors.DATA_LOST, f"cannot be read back: {error}") from error
        except StoreFailedError as error:
            raise read_failed(error) from error
        except StoreScanCutError as error:
            raise ApiError(errors.OVERLOADED, f"aborted by an erasure: {error}") from error
        finally:
            if step is not None:
                await asyncio.wait([step])  # a thread may still use the view
            chunks.close()
            self._open -= 1

    def _chunks(self, shard_ids: list[int], *, consumers: bool) -> Generator[bytes, None, None]:
        """Yield the pieces of the archive, joined to chunks. Blocks."""
        held: list[bytes] = []
        size = 0
        for piece in self._pieces(shard_ids, consumers=consumers):
            held.append(piece)
            size += len(piece)
            if size >= _CHUNK_BYTES:
                yield b"".join(held)
                held, size = [], 0
        yield b"".join(held)

    def _pieces(self, shard_ids: list[int], *, consumers: bool) -> Iterator[bytes]:
        writer = ArchiveWriter()
        with self._store.view() as view:

            def scan(prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
                return view.scan(prefix, keys.prefix_end(prefix))

            first: StreamMachine | None = None
            for shard_id in shard_ids:
                machine = StreamMachine.load(shard_id, _NoFacts(), scan)
                # The view is later than the request, and the stream may have been removed in
                # between.
                if machine.record is None:
                    raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
                if first is None:
                    first = machine
                    yield writer.start()
                # A change of the configuration reaches the shards one after the other, and the view
                # may be of a moment in between.
                _agree(first, machine)
                deadlines = scan(keys.shard_key(keys.DEADLINE, shard_id))
                records = state_records(
                    machine,
                    deadlines,
                    consumers=consumers,
                    skipped_ns=skipped_of(shard_id, scan),
                )
                for record in records:
                    yield writer.record(record)
                opened = partial(self._opened, shard_id)
                for _, stored in scan(keys.shard_key(keys.BLOCK, shard_id)):
                    block = block_record(machine, decode_block(stored, BLOCK_CODECS), opened)
                    if block is not None:
                        yield writer.record(block)
        yield writer.end()

    def _opened(self, shard_id: int, columns: MessageColumns) -> MessageColumns:
        plain, gone = self._opener.columns(shard_id, columns)
        if gone:
            raise StoreScanCutError("subject keys were destroyed")
        return plain


def _agree(first: StreamMachine, machine: StreamMachine) -> None:
    """Give a shard the configuration of the first one, and only consumers that the first one has.

    A consumer that began at a cursor belongs to a socket and is left out.
    """
    assert first.record is not None
    assert machine.record is not None
    machine.record.config = first.record.config
    machine.consumers = {
        number: consumer
        for number, consumer in machine.consumers.items()
        if consumer.config.name in first.consumer_ids and not consumer.config.opt_start_cursor
    }


class _NoFacts:
    """The facts port of a machine that applies nothing."""

    def facts_at(self, seq: int) -> MessageFacts:
        """Raise LookupError: it is never called."""
        raise LookupError(f"no facts of sequence {seq}")

    subjects_at = facts_at
