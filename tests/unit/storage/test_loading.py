"""Loading the shards of a node: one scan of the store for each kind of row."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrail_common.model import ConsumerConfig, PublishMessage, StreamConfig
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import key_layout as keys
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica.loading import _PASSED_MAX, RowsInOrder
from contrail_storage.store.split_store import SplitStore
from tests.unit.storage.test_memory_streams import running

KINDS = b"A", b"B", b"C"
SHARDS = 40


class Rows:
    """Sorted rows, and how often they were scanned."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self.rows = sorted(rows.items())
        self.scans = 0

    def scan(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        self.scans += 1
        yield from (row for row in self.rows if start <= row[0] < stop)


def drawn_rows(random_: random.Random) -> Rows:
    rows: dict[bytes, bytes] = {}
    for kind in KINDS:
        for shard_id in range(SHARDS):
            for number in range(random_.choice((0, 0, 1, 2, 3 * _PASSED_MAX))):
                rows[keys.small_key(kind, shard_id, number)] = random_.randbytes(2)
    return Rows(rows)


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_in_order_have_the_rows_of_a_scan_of_each(seed: int) -> None:
    random_ = random.Random(seed)
    store = drawn_rows(random_)
    rows = RowsInOrder(store.scan)
    asked = sorted(random_.sample(range(SHARDS), 20))
    for shard_id in asked:
        prefixes = [keys.shard_key(kind, shard_id) for kind in KINDS]
        expected = [list(store.scan(prefix, keys.prefix_end(prefix))) for prefix in prefixes]
        taken = [random_.choice((0, 1, 1_000)) for _ in KINDS]
        # All of them are begun before any is read, as by a caller that is given several.
        begun = [rows(prefix) for prefix in prefixes]
        for scan, most, all_rows in zip(begun, taken, expected, strict=True):
            found = [row for row, _ in zip(scan, range(most), strict=False)]
            assert found == all_rows[:most]


def test_rows_that_nobody_asks_for_are_passed_by_a_new_scan() -> None:
    many = {keys.small_key(b"A", 1, number): b"" for number in range(10_000)}
    store = Rows(many | {keys.small_key(b"A", shard_id, 0): b"" for shard_id in (0, 2, 3)})
    rows = RowsInOrder(store.scan)
    for shard_id in (0, 2, 3):
        assert len(list(rows(keys.shard_key(b"A", shard_id)))) == 1
    assert store.scans == 2


def test_start_scans_each_kind_once_however_many_streams_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = SplitStore.scan
    scans: Counter[bytes] = Counter()

    def counted(self: SplitStore, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        scans[start[:1]] += 1
        return scan(self, start, stop)

    async def fill() -> None:
        async with running(tmp_path) as (_, link):
            for name in ("S", "T", "U", "V"):
                await link.put_stream(StreamConfig(name=name, subjects=(name,)), "put", None, False)
                for consumer in ("a", "b"):
                    config = ConsumerConfig(name=consumer, durable=True)
                    await link.put_consumer(name, config, "put", None, False)
                await publish(link, name, [PublishMessage(name, None, b"x")])

    asyncio.run(fill())
    monkeypatch.setattr(SplitStore, "scan", counted)
    node = StorageNode.open(NodeOptions(tmp_path), SingleMemberGroups())
    try:
        assert len(node.applier.shards) == 4
        assert {keys.COUNTERS, keys.SUBJECT_NAME, keys.CONSUMER, keys.BLOCK_INDEX} <= set(scans)
        assert max(scans.values()) == 1
    finally:
        node.close()
