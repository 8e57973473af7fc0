"""The blocks of a shard: the directory in memory, the cache, and reads by sequence.

The directory takes about 32 bytes per block. A start rebuilds it from its pages and reads no block.
A block is in the directory as soon as its entry is applied. Until the writer has stored it, its
body stays in memory here, so that ``apply`` and the writer's merges always find it.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Final, Protocol

import msgspec

from contrail_common.columns.blocks import (
    Block,
    BlockCorruptError,
    BlockView,
    decode_block,
    view_block,
)
from contrail_storage.core import key_layout as keys
from contrail_storage.store.block_cache import CACHE_BYTES, BlockCache
from contrail_storage.store.block_codecs import BLOCK_CODECS
from contrail_storage.store.directory_pages import (
    INDEX_ROW,
    PAGE_BLOCKS,
    PageRange,
    PageRanges,
    Rows,
    StoredDirectory,
)
from contrail_storage.store.rocks_store import StoreCorruptError

# Below this number of dropped blocks, the columns are not cut: each cut copies what is left.
_COMPACT_FROM: Final = 1_024


class BlockSource(Protocol):
    """The part of the store that reads blocks, and the rows of windows."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values under ``keys``, None where there is none."""
        ...

    def get_once(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As :meth:`get_many`, but the store's own cache does not keep them (the one here does)."""
        ...

    def get_unverified(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As :meth:`get_once`, without checking the store's own checksums."""


class BlockMissingError(Exception):
    """A block that the directory lists is not in the store."""


UNREADABLE: Final = (BlockCorruptError, BlockMissingError, StoreCorruptError)
"""The errors that mean that stored messages cannot be read back."""

_Stored = bytes | StoreCorruptError | None
"""A value of the store, None where there is none, or why it cannot be read."""


class BlockSpan(msgspec.Struct, frozen=True, gc=False):
    """An entry of the directory: the sequences of a block, its bytes, and its last time.

    ``bytes`` is the size in memory, before compression.
    """

    base_seq: int
    count: int
    bytes: int
    last_time_ns: int

    @property
    def end_seq(self) -> int:
        """The sequence after the last message."""
        return self.base_seq + self.count


class Directory:
    """The blocks of one shard, ascending by sequence.

    There may be gaps between blocks. No message in a gap is live.
    """

    def __init__(self, page_blocks: int = PAGE_BLOCKS) -> None:
        # One element per block in each column, in the order of the first sequences.
        self._bases = array("Q")
        self._counts = array("I")
        self._sizes = array("I")
        self._times = array("q")
        self._emptied = array("I")
        # The elements before this one are dropped; the columns are cut from time to time.
        self._start = 0
        self.pages = PageRanges(page_blocks)
        """The ranges that are stored in pages; notes which pages a change makes stale."""

    def __len__(self) -> int:
        return len(self._bases) - self._start

    @property
    def end_seq(self) -> int:
        """The sequence after the last message of all blocks; 0 without any."""
        return self.span(len(self) - 1).end_seq if len(self) else 0

    def span(self, position: int) -> BlockSpan:
        """The block at ``position`` (0 is the oldest)."""
        at = self._start + position
        return BlockSpan(self._bases[at], self._counts[at], self._sizes[at], self._times[at])

    def base_seq(self, position: int) -> int:
        """The first sequence of the block at ``position``."""
        return self._bases[self._start + position]

    def last_times_ns(self, base_seqs: Iterable[int]) -> list[int]:
        """The last time of each block that begins at one of ``base_seqs``; -1 without a block."""
        positions = [(base, bisect_left(self._bases, base, self._start)) for base in base_seqs]
        return [
            self._times[at] if at < len(self._bases) and self._bases[at] == base else -1
            for base, at in positions
        ]

    def position(self, seq: int) -> int:
        """Position of the first block that ends after ``seq``; ``len`` when there is none."""
        # The block that begins last at or below `seq`. It may end before: `seq` is then in a gap.
        at = bisect_right(self._bases, seq, self._start) - 1
        if at < self._start or seq >= self._bases[at] + self._counts[at]:
            at += 1
        return at - self._start

    def run_from(self, position: int, blocks_max: int, bytes_max: int) -> list[int]:
        """Base sequences of the block at ``position`` and those after it, within the bounds.

        The first block is always included.
        """
        bases: list[int] = []
        size = 0
        for at in range(self._start + position, len(self._bases)):
            size += self._sizes[at]
            # The first block always fits: otherwise a reader with small bounds would never move on.
            if bases and (len(bases) == blocks_max or size > bytes_max):
                break
            bases.append(self._bases[at])
        return bases

    def extents_from(
        self, seq: int, high_seq: int, messages_max: int, bytes_max: int
    ) -> list[tuple[int, int]]:
        """First sequence and count of the blocks from ``seq`` to ``high_seq``, within the bounds.

        A first block that is larger than the bounds is returned alone.
        """
        extents: list[tuple[int, int]] = []
        messages = size = 0
        for at in range(self._start + self.position(seq), len(self._bases)):
            base_seq, count = self._bases[at], self._counts[at]
            messages += count
            size += self._sizes[at]
            if base_seq > high_seq or (extents and (messages > messages_max or size > bytes_max)):
                break
            extents.append((base_seq, count))
        return extents

    def position_below(self, seq: int) -> int:
        """Position of the last block that begins at or below ``seq``; -1 when there is none."""
        return bisect_right(self._bases, seq, self._start) - 1 - self._start

    def emptied(self, position: int) -> int:
        """Number of messages of the block that are known to be empty."""
        return self._emptied[self._start + position]

    def note_emptied(self, span: BlockSpan, messages: int) -> None:
        """Note how many messages of the block have no content, if the block is still here."""
        if self.holds(span):
            self._emptied[self._start + self.position(span.base_seq)] = messages

    def holds(self, span: BlockSpan) -> bool:
        """Whether exactly this block is in the directory."""
        position = self.position(span.base_seq)
        return position < len(self) and self.span(position) == span

    def position_of_time(self, time_ns: int) -> int:
        """Position of the first block whose last message is at or after ``time_ns``."""
        return bisect_left(self._times, time_ns, self._start) - self._start

    def append(self, span: BlockSpan) -> None:
        """Add the newest block."""
        self._bases.append(span.base_seq)
        self._counts.append(span.count)
        self._sizes.append(span.bytes)
        self._times.append(span.last_time_ns)
        self._emptied.append(0)

    def is_paged(self, base_seq: int) -> bool:
        """Whether a page may list the block at ``base_seq``, present or past."""
        return base_seq < self.pages.stop

    def take_up(self, stored: StoredDirectory) -> None:
        """Load the stored directory; this one must be empty."""
        spans = stored.spans
        self.pages = stored.ranges
        for column, name in (
            (self._bases, "base"),
            (self._counts, "count"),
            (self._sizes, "bytes"),
            (self._times, "time"),
        ):
            column.frombytes(spans[name].astype(column.typecode).tobytes())
        self._emptied.frombytes(bytes(self._emptied.itemsize * len(spans)))

    def take_due_pages(self) -> list[PageRange]:
        """Return the pages to store, for the first time or again; they count as stored then.

        A new page begins only when two pages of blocks wait, since recent blocks still change.
        """
        if not self.pages.starts and len(self) < 2 * self.pages.page_blocks:
            return []  # as in most streams, when a node has many
        first_seq = self._bases[self._start] if len(self) else self.pages.stop
        due = self.pages.take_stale(first_seq)
        at = self._start + self.position(self.pages.stop)
        while len(self._bases) - at >= 2 * self.pages.page_blocks:
            at += self.pages.page_blocks
            due.append(self.pages.extend(self._bases[at]))
        return due

    def drop_below(self, seq: int) -> list[int]:
        """Forget the blocks that end at or below ``seq``; return their base sequences."""
        dropped: list[int] = []
        while self._start < len(self._bases):
            at = self._start
            if self._bases[at] + self._counts[at] > seq:
                break
            dropped.append(self._bases[at])
            self.pages.note(self._bases[at])
            # Moved, not deleted: deleting at the front of a column copies all of it.
            self._start += 1
        if self._start > _COMPACT_FROM and self._start * 2 > len(self._bases):
            for column in self._columns():
                del column[: self._start]
            self._start = 0
        return dropped

    def _columns(self) -> "tuple[array[int], ...]":
        return self._bases, self._counts, self._sizes, self._times, self._emptied

    def cut(self, base_seq: int, spans: Sequence[BlockSpan]) -> None:
        """Replace the block with ``base_seq``, which must be here, by ``spans`` (maybe none)."""
        at = self._start + self.position(base_seq)
        self.pages.note(base_seq, 1 + len(spans))
        # In place, so that the other blocks keep their order; nothing is known to be empty in the
        # new ones yet.
        for column, values in zip(
            self._columns(),
            (
                [span.base_seq for span in spans],
                [span.count for span in spans],
                [span.bytes for span in spans],
                [span.last_time_ns for span in spans],
                [0] * len(spans),
            ),
            strict=True,
        ):
            column[at : at + 1] = array(column.typecode, values)

    def replace(self, base_seqs: Sequence[int], merged: BlockSpan) -> bool:
        """Replace the adjacent blocks ``base_seqs`` by ``merged``; False if one is not here."""
        at = bisect_left(self._bases, base_seqs[0], self._start)
        # One of them was dropped, emptied or merged since the merge was planned. The writer then
        # leaves the merge out.
        if self._bases[at : at + len(base_seqs)] != array("Q", base_seqs):
            return False
        self.pages.note(merged.base_seq, len(base_seqs))
        for column, value in (
            (self._bases, merged.base_seq),
            (self._counts, merged.count),
            (self._sizes, merged.bytes),
            (self._times, merged.last_time_ns),
            (self._emptied, 0),
        ):
            column[at : at + len(base_seqs)] = array(column.typecode, [value])
        return True

    def totals(self, first: int, last: int) -> tuple[int, int]:
        """Messages and bytes of the blocks from position ``first`` to before ``last``."""
        low, high = self._start + first, self._start + last
        return sum(self._counts[low:high]), sum(self._sizes[low:high])


def span_of(block: Block) -> BlockSpan:
    """The directory entry of ``block``."""
    count = block.columns.count
    return BlockSpan(block.base_seq, count, block.stored_bytes, int(block.times_ns[-1]))


def index_row(span: BlockSpan) -> bytes:
    """The stored form of a directory entry."""
    return INDEX_ROW.pack(span.count, span.bytes, span.last_time_ns)


class BlockStore:
    """Directories of all shards, the bodies not yet written, and a cache of decoded blocks.

    Only the event loop changes directories; :meth:`load` may be called from any thread.
    """

    def __init__(
        self,
        source: BlockSource,
        cache_bytes: int = CACHE_BYTES,
        page_blocks: int = PAGE_BLOCKS,
    ) -> None:
        self.directories: dict[int, Directory] = {}
        self.source = source
        self._page_blocks = page_blocks
        # Stands for the directory of every shard without one. It stays empty.
        self._no_directory = Directory(page_blocks)
        # Keys are (shard, base sequence). The event loop writes this dict, any thread reads it.
        self._unwritten: dict[tuple[int, int], Block] = {}
        self.cache = BlockCache(cache_bytes)
        self.misses = 0
        """Blocks that were requested and not in memory; any thread counts, so a few may be lost."""

    def directory(self, shard_id: int) -> Directory:
        """The shard's directory to read from; an empty one if the shard has no blocks, or is gone.

        Asking for it does not make one: somebody may still read a shard that was dropped.
        """
        return self.directories.get(shard_id, self._no_directory)

    def _make_directory(self, shard_id: int) -> Directory:
        """The shard's directory to add blocks to."""
        found = self.directories.get(shard_id)
        if found is None:  # no `setdefault`: making a directory costs as much as a small read
            found = self.directories[shard_id] = Directory(self._page_blocks)
        return found

    def load_directory(self, shard_id: int, pages: Rows, rows: Rows) -> None:
        """Load a directory from its pages and its index rows."""
        self._make_directory(shard_id).take_up(StoredDirectory(pages, rows, self._page_blocks))

    def add(self, shard_id: int, block: Block) -> BlockSpan:
        """Add a block that was just appended; memory serves it until :meth:`written`."""
        span = span_of(block)
        self._make_directory(shard_id).append(span)
        self._unwritten[shard_id, block.base_seq] = block
        return span

    def written(self, shard_id: int, block: Block) -> None:
        """Note that the block is in the store; move it to the cache."""
        key = (shard_id, block.base_seq)
        # A rewritten or merged block may have taken this place since. That one is still unwritten.
        if self._unwritten.get(key) is not block:
            return
        # Blocks of a shard that was dropped meanwhile are still written, in order with its removal.
        if shard_id in self.directories:
            self.cache.put(key, block.compacted())
        # Only now: until then, the cache may have an older form of the block.
        del self._unwritten[key]

    def overlay(self, shard_id: int, block: Block) -> None:
        """Serve ``block`` from memory for its base sequence until it is written."""
        self._unwritten[shard_id, block.base_seq] = block
        # A read that began before may return the old content. It must not be cached after this.
        self.cache.renew()

    def overlay_joined(self, shard_id: int, parts: Iterable[Block], joined: Block) -> None:
        """Serve ``joined`` instead of its ``parts``, none of which will be written."""
        # The parts were joined before the writer took them, so only the joined block is ever in the
        # store.
        self._unwritten[shard_id, joined.base_seq] = joined
        for part in parts:
            if part.base_seq != joined.base_seq:
                del self._unwritten[shard_id, part.base_seq]

    def beside(self) -> "BlockStore":
        """An empty one over the same store, to load shards in a thread: see :meth:`adopt`."""
        return BlockStore(self.source, page_blocks=self._page_blocks)

    def adopt(self, fresh: "BlockStore", shard_id: int) -> None:
        """Take a shard from ``fresh``; this one must have forgotten it."""
        # Before there is a directory: until then, no block of the shard is cached.
        self.cache.renew()
        directory = fresh.directories.pop(shard_id, None)
        if directory is not None:
            self.directories[shard_id] = directory

    def take_over(self, fresh: "BlockStore", keeps: Callable[[int], bool]) -> None:
        """Take all shards from ``fresh``, except those for which ``keeps`` is true.

        In ``fresh`` the same messages may be in other blocks.
        """
        self.cache.discard_shards(lambda shard_id: not keeps(shard_id))
        kept = {key: block for key, block in self._unwritten.items() if keeps(key[0])}
        self._unwritten = kept | fresh._unwritten
        directories = {number: one for number, one in self.directories.items() if keeps(number)}
        self.directories = directories | fresh.directories

    def discard(self, shard_id: int, base_seq: int) -> None:
        """Remove the block from the cache: it was removed or replaced."""
        self.cache.discard((shard_id, base_seq))

    def forget(self, shard_id: int) -> None:
        """Forget a shard that was dropped: its directory and its cached blocks.

        Unwritten blocks stay until :meth:`written`: jobs on their way to the store refer to them.
        """
        self.forget_all({shard_id})

    def forget_all(self, shard_ids: Set[int]) -> None:
        """As :meth:`forget`, for several shards in one look at the cache."""
        for shard_id in shard_ids:
            self.directories.pop(shard_id, None)
        self.cache.discard_shards(shard_ids.__contains__)

    def load(self, shard_id: int, base_seq: int) -> Block:
        """Return the block with ``base_seq`` from memory, else from the store (blocking).

        Raises one of UNREADABLE, or the store's error.
        """
        generation = self.cache.generation
        # Memory first: a block that waits for the writer is not in the store, or there in an older
        # form.
        block = self.recall(shard_id, base_seq)
        if block is None:
            self.misses += 1
            (data,) = self.source.get_once([keys.large_key(keys.BLOCK, shard_id, base_seq)])
            block = _decoded(shard_id, base_seq, data)
            self._remember(shard_id, base_seq, block, generation)
        return block

    def load_run(
        self, shard_id: int, base_seqs: Sequence[int], last_times_ns: Sequence[int]
    ) -> Block:
        """Return the first of the blocks; read the others into the cache for the next calls.

        As :meth:`load_each`, but raises the error of the first block.
        """
        # Only the first block must be readable. The others are read in advance, and report their
        # own damage when somebody asks for them.
        first = self.load_each(shard_id, base_seqs, last_times_ns)[0]
        if isinstance(first, Exception):
            raise first
        return first

    def load_each(
        self, shard_id: int, base_seqs: Sequence[int], last_times_ns: Sequence[int]
    ) -> list[Block | Exception]:
        """Return each block, or one of UNREADABLE in the place of a block that cannot be read.

        Those in memory come from there, as in :meth:`load`. The first read of the others checks
        only the blocks' own checksums. A block that fails, or whose last time differs from the
        directory's, is read again with the store's checksums. Blocks; raises the store's other
        errors.
        """
        generation = self.cache.generation
        held = [self.recall(shard_id, base_seq) for base_seq in base_seqs]
        missing = [at for at, block in enumerate(held) if block is None]
        self.misses += len(missing)
        bases, times = [base_seqs[at] for at in missing], [last_times_ns[at] for at in missing]
        read = self._read_each(shard_id, bases, times)
        # Backwards, so that the first block is the one used last and is not evicted by the others.
        for base_seq, block in reversed(list(zip(bases, read, strict=True))):
            if isinstance(block, Block):
                self._remember(shard_id, base_seq, block, generation)
        fresh = iter(read)
        return [next(fresh) if block is None else block for block in held]

    def _read_each(
        self, shard_id: int, base_seqs: Sequence[int], last_times_ns: Sequence[int]
    ) -> list[Block | Exception]:
        found: list[Block | Exception] = list(self._unverified(shard_id, base_seqs))
        doubtful = [
            at
            for at, (block, time_ns) in enumerate(zip(found, last_times_ns, strict=True))
            if not (isinstance(block, Block) and int(block.times_ns[-1]) == time_ns)
        ]
        again = [base_seqs[at] for at in doubtful]
        for at, data in zip(doubtful, self._stored(shard_id, again), strict=True):
            try:
                found[at] = _decoded(shard_id, base_seqs[at], data)
            except UNREADABLE as error:
                found[at] = error
        return found

    def _unverified(self, shard_id: int, base_seqs: Sequence[int]) -> Iterator[Block | Exception]:
        wanted = [keys.large_key(keys.BLOCK, shard_id, base_seq) for base_seq in base_seqs]
        try:
            values = self.source.get_unverified(wanted)
        except StoreCorruptError as error:
            yield from [error] * len(base_seqs)
            return
        for base_seq, data in zip(base_seqs, values, strict=True):
            try:
                yield _decoded(shard_id, base_seq, data)
            except UNREADABLE as error:
                yield error

    def _stored(self, shard_id: int, base_seqs: Sequence[int]) -> list[_Stored]:
        wanted = [keys.large_key(keys.BLOCK, shard_id, base_seq) for base_seq in base_seqs]
        try:
            return [*self.source.get_once(wanted)]
        except StoreCorruptError:
            return [self._stored_alone(key) for key in wanted]  # one bad value failed all of them

    def _stored_alone(self, key: bytes) -> _Stored:
        try:
            return self.source.get_once([key])[0]
        except StoreCorruptError as error:
            return error

    def recall(self, shard_id: int, base_seq: int) -> Block | None:
        """The block if it is in memory."""
        key = (shard_id, base_seq)
        block = self._unwritten.get(key)
        return self.cache.get(key) if block is None else block

    def load_many(self, shard_id: int, base_seqs: Sequence[int]) -> list[Block]:
        """Return blocks for a scan, which bypasses the cache (blocking; errors as :meth:`load`)."""
        # Not the cache: a scan reads everything once, and would evict the blocks that requests
        # need.
        found = {base: self._unwritten.get((shard_id, base)) for base in base_seqs}
        missing = [base for base, block in found.items() if block is None]
        values = self.source.get_once(
            [keys.large_key(keys.BLOCK, shard_id, base) for base in missing]
        )
        for base, data in zip(missing, values, strict=True):
            if data is None:
                raise BlockMissingError(f"block {base} of shard {shard_id} is not in the store")
            found[base] = decode_block(data, BLOCK_CODECS)
        return [block for block in found.values() if block is not None]

    def view_surely(self, shard_id: int, base_seqs: Sequence[int]) -> list[BlockView]:
        """As :meth:`load_many`, but as views, for scans that copy most bytes unchanged."""
        return self._views(shard_id, base_seqs, self.source.get_once)

    def view_many(self, shard_id: int, base_seqs: Sequence[int]) -> list[BlockView]:
        """As :meth:`view_surely`, but only the blocks' own checksums are checked.

        A damaged table may lead to no block or to the wrong one: the caller compares the content.
        """
        return self._views(shard_id, base_seqs, self.source.get_unverified)

    def _views(
        self,
        shard_id: int,
        base_seqs: Sequence[int],
        get: Callable[[Sequence[bytes]], list[bytes | None]],
    ) -> list[BlockView]:
        held = [self._unwritten.get((shard_id, base)) for base in base_seqs]
        missing = [base for base, block in zip(base_seqs, held, strict=True) if block is None]
        values = iter(get([keys.large_key(keys.BLOCK, shard_id, base) for base in missing]))
        views: list[BlockView] = []
        for base, block in zip(base_seqs, held, strict=True):
            if block is not None:
                views.append(BlockView.of(block))
                continue
            data = next(values)
            if data is None:
                raise BlockMissingError(f"block {base} of shard {shard_id} is not in the store")
            views.append(view_block(data, BLOCK_CODECS))
        return views

    def _remember(self, shard_id: int, base_seq: int, block: Block, generation: int) -> None:
        key = (shard_id, base_seq)
        # Neither one that was replaced meanwhile, nor one of a shard that was dropped.
        if key not in self._unwritten and shard_id in self.directories:
            self.cache.put_read(key, block, generation)


def _decoded(shard_id: int, base_seq: int, data: _Stored) -> Block:
    if isinstance(data, StoreCorruptError):
        raise data
    if data is None:
        raise BlockMissingError(f"block {base_seq} of shard {shard_id} is not in the store")
    return decode_block(data, BLOCK_CODECS)
