"""Pages of a shard's directory: loaded is what stood, whatever was dropped, cut or joined."""

from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from contrail_common.columns.blocks import Block, columns_of
from contrail_storage.core import key_layout as keys
from contrail_storage.replica.store_writer import (
    GoneBlock,
    Job,
    PageJob,
    RewriteJob,
    StoreWriter,
    WriteJob,
    merge_job,
)
from contrail_storage.store.block_store import Directory, span_of
from contrail_storage.store.directory_pages import StoredDirectory
from contrail_storage.store.memory_store import MemoryStore

SHARD, GROUP, PAGE = 3, 1, 4


def block_of(base_seq: int, count: int) -> Block:
    sids = np.zeros(count, np.uint32)
    payloads = [b"m"] * count
    return Block(base_seq, np.arange(count) + base_seq, sids, columns_of(payloads, None))


class PagedDirectory(RuleBasedStateMachine):
    """A directory and what the writer stores of it; ``blocks`` are what must stand in both."""

    @initialize()
    def open(self) -> None:
        self.store = MemoryStore()
        self.writer = StoreWriter(self.store, KeyError, lambda _: None, self.fail)
        self.directory = Directory(PAGE)
        self.blocks: list[Block] = []
        self.next_seq = 1
        self.index = 0

    def fail(self, error: Exception) -> None:
        raise error

    def write(self, job: Job) -> None:
        assert self.writer.write_now([job])

    @rule(counts=st.lists(st.integers(1, 3), min_size=1, max_size=12), gap=st.integers(0, 2))
    def append(self, counts: list[int], gap: int) -> None:
        self.next_seq += gap
        for count in counts:
            self.index += 1
            block = block_of(self.next_seq, count)
            self.next_seq += count
            self.directory.append(span_of(block))
            self.blocks.append(block)
            put = [(SHARD, block, span_of(block))]
            self.write(WriteJob(GROUP, self.index, 1, [], blocks=put))

    @rule(part=st.floats(0, 1))
    def drop(self, part: float) -> None:
        seq = int(self.next_seq * part)
        self.index += 1
        gone = [
            GoneBlock(SHARD, base_seq, self.directory.is_paged(base_seq))
            for base_seq in self.directory.drop_below(seq)
        ]
        self.blocks = [block for block in self.blocks if block.base_seq + block.count > seq]
        self.write(WriteJob(GROUP, self.index, 1, [], dropped=gone))

    @precondition(lambda self: self.blocks)
    @rule(at=st.integers(0), left=st.sampled_from(["nothing", "all", "the last", "its ends"]))
    def rewrite(self, at: int, left: str) -> None:
        at %= len(self.blocks)
        old = self.blocks[at]
        last = block_of(old.base_seq + old.count - 1, 1)
        ends = [block_of(old.base_seq, 1), last] if old.count > 1 else [last]
        parts = {"nothing": [], "all": [old], "the last": [last], "its ends": ends}[left]
        gone = GoneBlock(SHARD, old.base_seq, self.directory.is_paged(old.base_seq))
        self.directory.cut(old.base_seq, [span_of(part) for part in parts])
        self.blocks[at : at + 1] = parts
        self.write(RewriteJob(SHARD, gone, [(part, span_of(part)) for part in parts]))

    @precondition(lambda self: len(self.blocks) > 1)
    @rule(at=st.integers(0), count=st.integers(2, 3))
    def merge(self, at: int, count: int) -> None:
        at %= len(self.blocks) - 1
        parts = self.blocks[at : at + count]
        job = merge_job(SHARD, parts, self.directory.pages.stop)
        assert self.directory.replace([part.base_seq for part in parts], job.span)
        self.blocks[at : at + count] = [job.merged]
        self.write(job)

    @rule()
    def page(self) -> None:
        for due in self.directory.take_due_pages():
            self.write(PageJob(SHARD, due))
        assert len(list(self.rows(keys.BLOCK_INDEX))) <= self.rows_max()

    def rows_max(self) -> int:
        """Two pages of the newest, and over each page less than a quarter of one."""
        return 2 * PAGE + len(self.directory.pages.starts) * PAGE // 4

    @rule()
    def reopen(self) -> None:
        self.directory = self.loaded()

    def rows(self, kind: bytes) -> Iterator[tuple[bytes, bytes]]:
        prefix = keys.shard_key(kind, SHARD)
        return self.store.scan(prefix, keys.prefix_end(prefix))

    def loaded(self) -> Directory:
        stored = StoredDirectory(self.rows(keys.BLOCK_PAGE), self.rows(keys.BLOCK_INDEX), PAGE)
        directory = Directory(PAGE)
        directory.take_up(stored)
        return directory

    @invariant()
    def stands(self) -> None:
        for directory in (self.directory, self.loaded()):
            spans = [directory.span(at) for at in range(len(directory))]
            assert spans == [span_of(block) for block in self.blocks]


TestPagedDirectory = PagedDirectory.TestCase


def test_pages_of_a_stream_that_is_emptied_leave_nothing() -> None:
    machine = PagedDirectory()
    machine.open()
    machine.append(counts=[1] * 10 * PAGE, gap=0)
    machine.page()
    assert len(list(machine.rows(keys.BLOCK_PAGE))) == 9
    machine.drop(part=1.0)
    machine.page()
    assert not list(machine.rows(keys.BLOCK_PAGE))
    assert not list(machine.rows(keys.BLOCK_INDEX))


def test_page_is_stored_again_when_a_quarter_of_it_has_changed() -> None:
    directory = Directory(16)
    for base_seq in range(1, 41):
        directory.append(span_of(block_of(base_seq, 1)))
    assert directory.take_due_pages() == [(0, 17)]
    directory.drop_below(4)
    assert directory.take_due_pages() == []
    directory.drop_below(5)
    assert directory.take_due_pages() == [(0, 17)]
    assert directory.take_due_pages() == []
