"""The store in memory against a dict, and the routing between it and the store on disk."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.core import key_layout as keys
from contrail_storage.store.memory_store import ROW_OVERHEAD, MemoryStore, MemoryView
from contrail_storage.store.rocks_store import Operation, RocksStore
from contrail_storage.store.split_store import SplitStore

SHARDS = (keys.IN_MEMORY | 1, keys.IN_MEMORY | 2)
Rows = dict[bytes, bytes]


def key(shard: int, number: int) -> bytes:
    return keys.large_key(keys.BLOCK, shard, number)


KEYS = st.builds(key, st.sampled_from(SHARDS), st.integers(0, 20))
RANGES = st.tuples(st.sampled_from(SHARDS), st.integers(0, 21), st.integers(0, 21)).map(
    lambda drawn: (key(drawn[0], min(drawn[1:])), key(drawn[0], max(drawn[1:])))
)
OPERATIONS = st.one_of(
    st.tuples(st.just("put"), KEYS, st.binary(max_size=8)),
    st.tuples(st.just("delete"), KEYS),
    RANGES.map(lambda bounds: ("delete_range", *bounds)),
)
STEPS = st.one_of(
    st.lists(OPERATIONS, min_size=1, max_size=6).map(lambda batch: ("write", batch)),
    st.just(("open", None)),
    st.integers(0, 3).map(lambda which: ("close", which)),
)


def play(rows: Rows, operation: Operation) -> None:
    if operation[0] == "put":
        rows[operation[1]] = operation[2]
    elif operation[0] == "delete":
        rows.pop(operation[1], None)
    else:
        for one in [one for one in rows if operation[1] <= one < operation[2]]:
            del rows[one]


def between(rows: Rows, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
    return sorted(row for row in rows.items() if start <= row[0] < stop)


def whole_table(shard: int) -> tuple[bytes, bytes]:
    prefix = keys.shard_key(keys.BLOCK, shard)
    return prefix, keys.prefix_end(prefix)


@given(steps=st.lists(STEPS, max_size=12), bounds=RANGES)
def test_store_and_its_views_show_what_a_dict_would(
    steps: list[tuple[str, object]], bounds: tuple[bytes, bytes]
) -> None:
    store, rows = MemoryStore(), Rows()
    views: list[tuple[MemoryView, Rows, ExitStack]] = []
    for kind, given_ in steps:
        if kind == "write":
            batch: list[Operation] = list(given_)  # type: ignore[call-overload]
            store.write(batch)
            for operation in batch:
                play(rows, operation)
        elif kind == "open":
            stack = ExitStack()
            views.append((stack.enter_context(store.view()), dict(rows), stack))
        elif isinstance(given_, int) and given_ < len(views):
            views.pop(given_)[2].close()
        for start, stop in (*map(whole_table, SHARDS), bounds):
            assert list(store.scan(start, stop)) == between(rows, start, stop)
            for view, seen, _ in views:
                assert list(view.scan(start, stop)) == between(seen, start, stop)
        every = [key(shard, number) for shard in SHARDS for number in range(21)]
        assert store.get_many(every) == [rows.get(one) for one in every]
    for _, _, stack in views:
        stack.close()
    assert store.size_bytes == sum(len(value) + ROW_OVERHEAD for value in rows.values())


def test_scan_of_many_rows_shows_them_as_they_were_when_it_began() -> None:
    store = MemoryStore()
    shard = SHARDS[0]
    store.write([("put", key(shard, number), b"%d" % number) for number in range(1_000)])
    rows = store.scan(*whole_table(shard))
    assert next(rows) == (key(shard, 0), b"0")
    store.write([("delete_range", *whole_table(shard)), ("put", key(shard, 999), b"new")])
    assert [int(value) for _, value in rows] == list(range(1, 1_000))
    assert list(store.scan(*whole_table(shard))) == [(key(shard, 999), b"new")]


def test_room_that_an_open_view_keeps_is_counted_until_it_ends() -> None:
    store = MemoryStore()
    store.write([("put", key(SHARDS[0], 1), b"x" * 1_000)])
    with store.view():
        store.write([("delete", key(SHARDS[0], 1))])
        assert store.size_bytes == 1_000 + ROW_OVERHEAD
        for number in range(2, 50):  # what comes and goes meanwhile is nothing to keep
            store.write([("put", key(SHARDS[0], number), b"y")])
            store.write([("delete", key(SHARDS[0], number))])
        assert store.size_bytes == 1_000 + ROW_OVERHEAD
    assert store.size_bytes == 0


@pytest.fixture
def durable(tmp_path: Path) -> Iterator[RocksStore]:
    store = RocksStore.open(tmp_path)
    yield store
    store.close()


def test_rows_of_both_sides_go_where_their_shard_lives(durable: RocksStore) -> None:
    memory = MemoryStore()
    store = SplitStore(durable, memory)
    here, there = key(SHARDS[0], 1), key(1, 1)
    store.write([("put", here, b"volatile"), ("put", there, b"durable")])
    assert (durable.get(here), durable.get(there)) == (None, b"durable")
    assert (memory.get(here), memory.get(there)) == (b"volatile", None)
    assert (store.get(here), store.get(there)) == (b"volatile", b"durable")
    assert (store.get_many([here]), store.get_many([])) == ([b"volatile"], [])
    with store.view() as view:
        store.write([("delete_range", *whole_table(1)), ("delete", here)])
        assert list(view.scan(*whole_table(1))) == [(there, b"durable")]
        assert list(view.scan(*whole_table(SHARDS[0]))) == [(here, b"volatile")]
    assert list(store.scan(*whole_table(1))) == list(store.scan(*whole_table(SHARDS[0]))) == []
