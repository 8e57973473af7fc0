"""What a scan picks out of blocks is what a loop over their messages would."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import Block, BlockView, columns_of, encode_block, view_block
from contrail_link.contract.read import pieces_of
from contrail_storage.core.subjects.filters import _BySlot
from contrail_storage.core.subjects.subject_names import SubjectNames
from contrail_storage.reading.arrow_encoding import COLUMNS, BatchEncoder, schema_of
from contrail_storage.reading.selection import Run, Selection, select

NAMES = ["a", "b.c", "ü"]
BASE = 40
END = b"\xff\xff\xff\xff\0\0\0\0"
headers = st.none() | st.dictionaries(st.sampled_from(["x", "y"]), st.just(["1", "2"]), max_size=2)
messages = st.tuples(st.integers(0, 2), st.binary(max_size=9), headers)
sizes = st.sampled_from([0, 5_000])


@st.composite
def views(draw: st.DrawFn) -> list[BlockView]:
    """Blocks one behind the other, with a gap now and then; some with large payloads."""
    found, base_seq = [], draw(st.integers(1, 9))
    for content in draw(st.lists(st.lists(messages, min_size=1, max_size=6), max_size=4)):
        extra = bytes(draw(sizes))
        block = Block(
            base_seq,
            np.arange(len(content), dtype=np.int64) + base_seq * 1_000,
            np.array([BASE + number for number, _, _ in content], np.uint32),
            columns_of([extra + one for _, one, _ in content], [each for _, _, each in content]),
        )
        stored = draw(st.booleans())
        found.append(view_block(encode_block(block, 1)) if stored else BlockView.of(block))
        base_seq = block.last_seq + draw(st.integers(1, 3))
    return found


def drawn(data: st.DataObject, blocks: list[BlockView]) -> tuple[Selection, list[tuple[int, int]]]:
    """Some of the messages of ``blocks``, and the same as (block, position)."""
    runs, live, expected = [], [], []
    wanted = data.draw(st.none() | st.sets(st.integers(0, 2)))
    lookup = None
    if wanted is not None:
        lookup = _BySlot(SubjectNames(BASE), np.array([each in wanted for each in range(3)]))
    for number, block in enumerate(blocks):
        low = data.draw(st.integers(0, block.count - 1))
        stop = data.draw(st.integers(low + 1, block.count))
        mask = data.draw(
            st.none() | st.lists(st.booleans(), min_size=stop - low, max_size=stop - low)
        )
        runs.append(Run(block, low, stop))
        live.append(None if mask is None else np.array(mask, np.bool_))
        expected += [
            (number, at)
            for at in range(low, stop)
            if (mask is None or mask[at - low])
            and (wanted is None or int(block.subject_ids[at]) - BASE in wanted)
        ]
    return select(runs, live, lookup), expected


@given(views(), st.data())
def test_picked_are_the_live_and_matching_messages_in_order(
    blocks: list[BlockView], data: st.DataObject
) -> None:
    selection, expected = drawn(data, blocks)
    assert selection.count == len(expected)
    numbers = {id(block): number for number, block in enumerate(blocks)}
    found = [
        (numbers[id(block)], at) for block, places in selection.by_run() for at in places.tolist()
    ]
    assert found == expected


@given(views(), st.data(), st.sets(st.sampled_from(COLUMNS), min_size=1))
def test_batch_has_every_column_of_the_picked_messages(
    blocks: list[BlockView], data: st.DataObject, chosen: set[str]
) -> None:
    selection, expected = drawn(data, blocks)
    if not expected:
        return
    schema = schema_of("contrail", tuple(chosen))
    message = BatchEncoder(schema, 3).message(selection, NAMES, BASE)
    stream = b"".join([schema.serialize().to_pybytes(), *pieces_of(message), END])
    table = pa.ipc.open_stream(stream).read_all()
    table.validate(full=True)
    records = [blocks[number].message(at, "") for number, at in expected]
    rows = {
        "shard": [3] * len(expected),
        "seq": [record.seq for record in records],
        "time": [record.time_ns for record in records],
        "subject": [NAMES[int(blocks[each].subject_ids[at]) - BASE] for each, at in expected],
        "headers": [list((record.headers or {}).items()) for record in records],
        "data": [record.payload for record in records],
    }
    for name in schema.names:
        column = table.column(name)
        if name == "time":
            column = column.cast(pa.int64())
        assert column.to_pylist() == rows[name], name


@given(st.lists(st.integers(0, 200), max_size=20), st.lists(st.booleans(), max_size=8))
def test_lookup_finds_only_numbers_that_it_knows(sids: list[int], matches: list[bool]) -> None:
    lookup = _BySlot(SubjectNames(100), np.array(matches, np.bool_))
    expected = [100 <= sid < 100 + len(matches) and matches[sid - 100] for sid in sids]
    assert lookup.select(np.array(sids, np.uint32)).tolist() == expected


def test_large_payloads_are_passed_on_where_they_lie() -> None:
    block = Block(
        1, np.zeros(2, np.int64), np.zeros(2, np.uint32), columns_of([bytes(9_000)] * 2, None)
    )
    view = view_block(encode_block(block, 1))
    _, pieces = Selection([Run(view, 0, 2)]).payloads()
    assert [piece.obj for piece in pieces if isinstance(piece, memoryview)] == [view.payload.obj]


def test_small_payloads_far_apart_are_joined() -> None:
    block = Block(1, np.zeros(9, np.int64), np.zeros(9, np.uint32), columns_of([b"ab"] * 9, None))
    offsets, pieces = Selection([Run(BlockView.of(block), 0, 9)], np.array([0, 4, 8])).payloads()
    assert (offsets.tolist(), pieces) == ([0, 2, 4, 6], [b"ababab"])
