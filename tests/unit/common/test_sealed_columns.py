"""Columns with their content in cells: the same messages and sizes, nothing read that is sealed."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common.columns.blocks import (
    Block,
    MessageColumns,
    columns_of,
    decode_block,
    encode_block,
    join_blocks,
    join_columns,
)
from contrail_common.columns.sealed_columns import (
    CellBrokenError,
    ContentSealedError,
    Seals,
    content_of,
    plain_cell,
)
from contrail_common.model import Headers
from tests.support.each import each

KEY = 7 << 32 | 3
Content = list[tuple[bytes, Headers | None]]
headers = st.none() | st.dictionaries(
    st.text(max_size=4), st.lists(st.text(max_size=4), max_size=2), max_size=2
)
contents = st.lists(st.tuples(st.binary(max_size=9), headers), min_size=1, max_size=6)


def columns_from(content: Content) -> MessageColumns:
    return columns_of([payload for payload, _ in content], [each for _, each in content])


def block_of(columns: MessageColumns, base_seq: int = 5) -> Block:
    count = columns.count
    times_ns = np.arange(count, dtype=np.int64) + 17
    return Block(base_seq, times_ns, np.zeros(count, np.uint32), columns)


def read(columns: MessageColumns) -> Content:
    found = (columns.content(at) for at in range(columns.count))
    return [(payload, each) for each, payload in found]


def plain(content: Content) -> Content:
    return [(payload, each or None) for payload, each in content]


@given(contents)
def test_cells_hold_the_messages_and_count_what_these_count(content: Content) -> None:
    columns = columns_from(content)
    cells = columns.in_cells()
    assert cells.is_sound()
    assert read(cells) == plain(content)
    assert cells.sizes().tolist() == columns.sizes().tolist()
    assert cells.size() == columns.size()


@given(contents, st.data())
def test_cells_are_cut_chosen_stored_and_logged_like_all_columns(
    content: Content, data: st.DataObject
) -> None:
    cells = columns_from(content).in_cells()
    start = data.draw(st.integers(0, len(content) - 1))
    assert read(cells.slice(start, len(content))) == plain(content[start:])
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(content))), min_size=1)))
    assert read(cells.select(np.array(chosen))) == plain([content[at] for at in chosen])
    stored = block_of(cells)
    encoded = encode_block(stored, 3)
    assert len(encoded) == stored.stored_bytes
    assert decode_block(encoded).columns == cells
    logged = msgspec.msgpack.encode(cells)
    assert msgspec.msgpack.decode(logged, type=MessageColumns) == cells


@given(st.lists(st.tuples(contents, st.booleans()), min_size=1, max_size=4))
def test_joined_with_other_columns_all_are_in_cells(parts: list[tuple[Content, bool]]) -> None:
    columns = [
        columns_from(content).in_cells() if cells else columns_from(content)
        for content, cells in parts
    ]
    joined = join_columns(columns)
    assert joined.is_sound()
    assert read(joined) == plain([message for content, _ in parts for message in content])
    assert joined.sizes().tolist() == [size for one in columns for size in one.sizes().tolist()]


def test_gap_between_blocks_of_cells_is_filled_with_blank_messages() -> None:
    cells = columns_from([(b"abc", {"A": ["b"]})]).in_cells()
    joined = join_blocks([block_of(cells, 5), block_of(cells, 8)])
    assert [joined.message(at, "s").payload for at in range(4)] == [b"abc", b"", b"", b"abc"]


def test_sealed_content_is_not_given_out_as_if_it_were_plain() -> None:
    cells = columns_from([(b"abc", None), (b"", None)]).in_cells()
    cells.seals = Seals.of([KEY, 0], np.array([3, 0]))
    with pytest.raises(ContentSealedError):
        block_of(cells).message(0, "s")
    assert block_of(cells).message(1, "s").payload == b""


def test_seals_that_are_left_of_kept_messages_say_nothing_of_the_others() -> None:
    seals = Seals.of([KEY, KEY], np.array([3, 4])).only(np.array([False, True]))
    assert seals == Seals.of([0, KEY], np.array([0, 4]))


def test_columns_with_seals_that_do_not_fit_are_not_sound() -> None:
    cells = columns_from([(b"abc", None), (b"d", None)]).in_cells()
    assert cells.seals is not None
    wrong: list[dict[str, object]] = [
        {"seals": cells.seals.slice(0, 1)},
        {"seals": Seals(cells.seals.keys, b"")},
        {"headers": columns_from([(b"", {"A": ["b"]})] * 2).headers},
    ]
    for changed in wrong:
        assert not msgspec.structs.replace(cells, **changed).is_sound()


@each("cell", [b"\0", b"\5\0\0\0ab", b"\1\0\0\0\xc1", b"\1\0\0\0\1"])
def test_cell_that_holds_no_message_is_refused(cell: bytes) -> None:
    with pytest.raises(CellBrokenError):
        content_of(cell)


def test_cell_of_a_message_without_content_is_empty() -> None:
    assert plain_cell(None, b"") == plain_cell({}, b"") == b""
    assert content_of(b"") == (None, b"")
