"""Messages in columns: every message comes out as it went in, and no change goes unnoticed."""

import sys

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrail_common.columns.blocks import (
    Block,
    BlockCorruptError,
    BlockView,
    MessageColumns,
    columns_of,
    decode_block,
    encode_block,
    join_blocks,
    join_columns,
    message_size,
    view_block,
)
from contrail_common.columns.header_columns import HeaderColumns, UniformHeaders
from contrail_common.model import Headers
from contrail_common.texts import Texts
from tests.support.each import each

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
headers = st.none() | st.dictionaries(texts, st.lists(texts, max_size=3), max_size=3)
payloads = st.binary(max_size=20)
Content = list[tuple[bytes, Headers | None]]
names = st.lists(texts, min_size=1, max_size=3, unique=True)
mixed: st.SearchStrategy[Content] = st.lists(st.tuples(payloads, headers), min_size=1, max_size=8)
uniform: st.SearchStrategy[Content] = names.flatmap(
    lambda names: st.lists(
        st.tuples(
            payloads,
            st.tuples(*[texts] * len(names)).map(
                lambda values: {name: [one] for name, one in zip(names, values, strict=True)}
            ),
        ),
        min_size=1,
        max_size=8,
    )
)
contents = mixed | uniform
ODD: Content = [
    (b"", {"Ünï": ["wért", ""], "": ["", ""], "Empty": []}),
    (b"\x00\xff", None),
    (b"x", {}),
    (b"", {"🦊": ["🦔" * 3]}),
]
SAME: Content = [
    (b"a", {"Id": ["ä"], "Type": ["x"]}),
    (b"", {"Id": [""], "Type": ["yy"]}),
    (b"ccc", {"Id": ["3"], "Type": ["x"]}),
]


def columns_from(content: Content) -> MessageColumns:
    return columns_of([payload for payload, _ in content], [each for _, each in content])


def block_from(content: Content, base_seq: int = 5) -> Block:
    count = len(content)
    return Block(
        base_seq,
        np.arange(count, dtype=np.int64) * 1_000 + 17,
        np.arange(count, dtype=np.uint32) % 3,
        columns_from(content),
    )


def content_of_columns(columns: MessageColumns) -> Content:
    zeros = np.zeros(columns.count, np.uint32)
    return content_of(Block(1, zeros.astype(np.int64), zeros, columns))


def content_of(block: Block) -> Content:
    found = [block.message(position, "subject") for position in range(block.count)]
    assert [message.seq for message in found] == list(range(block.base_seq, block.last_seq + 1))
    assert [message.time_ns for message in found] == block.times_ns.tolist()
    return [(message.payload, message.headers) for message in found]


def plain(content: Content) -> Content:
    """Content as it is read: no headers is None."""
    return [(payload, each or None) for payload, each in content]


@given(contents)
@example(ODD)
@example(SAME)
def test_decoded_block_holds_the_messages_that_were_encoded(content: Content) -> None:
    block = block_from(content)
    stored = encode_block(block, 99)
    assert len(stored) == block.stored_bytes
    decoded = decode_block(stored)
    assert content_of(decoded) == plain(content)
    assert decoded.subject_ids.tolist() == block.subject_ids.tolist()
    assert decoded.columns == block.columns


@given(contents)
@example(ODD)
@example(SAME)
def test_view_of_a_block_shows_the_messages_that_were_encoded(content: Content) -> None:
    block = block_from(content)
    for view in (view_block(encode_block(block, 99)), BlockView.of(block)):
        assert (view.count, view.last_seq) == (block.count, block.last_seq)
        assert view.subject_ids.tolist() == block.subject_ids.tolist()
        shown = [view.message(position, "s") for position in range(view.count)]
        assert shown == [block.message(position, "s") for position in range(block.count)]


def test_decoded_block_keeps_nothing_of_the_stored_form() -> None:
    stored = encode_block(block_from(ODD), 99)
    before = sys.getrefcount(stored)
    block = decode_block(stored)
    assert (block.count, sys.getrefcount(stored)) == (len(ODD), before)


def test_block_holds_a_time_and_a_subject_that_all_messages_share_once() -> None:
    block = block_from(SAME)
    assert block.compacted().held_bytes == block.stored_bytes
    block.times_ns, block.subject_ids = np.full(3, 17), np.zeros(3, np.uint32)
    stored = encode_block(block, 99)
    for one in (block.compacted(), decode_block(stored)):
        assert one.held_bytes == block.stored_bytes - 2 * 8 - 2 * 4
        assert content_of(one) == content_of(block)
        assert encode_block(one, 99) == stored
        assert content_of(join_blocks([one, block_from(SAME, 8)])) == SAME + SAME


def test_view_of_a_block_copies_no_payload() -> None:
    stored = encode_block(block_from(ODD), 99)
    assert view_block(stored).payload.obj is stored


@given(contents)
@example(ODD)
@example(SAME)
def test_sizes_are_those_of_each_message_on_its_own(content: Content) -> None:
    expected = [message_size(each, len(payload)) for payload, each in content]
    assert columns_from(content).sizes().tolist() == expected


@given(contents, st.booleans(), st.data())
def test_sizes_at_positions_are_those_of_all_messages(
    content: Content, cells: bool, data: st.DataObject
) -> None:
    columns = columns_from(content)
    if cells:
        columns = columns.in_cells()
    chosen = data.draw(st.lists(st.integers(0, columns.count - 1)))
    positions = np.array(chosen, np.intp)
    assert columns.sizes_at(positions).tolist() == columns.sizes()[positions].tolist()


@given(contents, st.data())
@example(ODD, None)
@example(SAME, None)
def test_selected_columns_are_those_of_the_chosen_messages(
    content: Content, data: st.DataObject | None
) -> None:
    positions = list(range(len(content)))
    if data is not None:
        positions = data.draw(st.lists(st.sampled_from(positions), min_size=1, unique=True))
    selected = columns_from(content).select(np.array(positions))
    assert selected.is_sound()
    assert content_of_columns(selected) == plain([content[position] for position in positions])


@given(contents, st.integers(0, 7), st.integers(1, 8))
@example(ODD, 1, 2)
@example(SAME, 1, 2)
def test_slice_of_columns_is_that_run_of_messages(content: Content, start: int, count: int) -> None:
    part = content[start : start + count] or content[:1]
    start = start if start < len(content) else 0
    sliced = columns_from(content).slice(start, start + len(part))
    assert sliced.is_sound()
    assert content_of_columns(sliced) == plain(part)
    if all(each in (None, {}) for _, each in part):
        assert sliced.headers is None


@given(st.lists(contents, min_size=1, max_size=4))
@example([ODD, [(b"plain", None)], ODD])
@example([SAME, SAME])
@example([SAME, ODD, SAME])
@example([SAME, [(b"", {"Type": ["x"], "Id": ["1"]})]])
def test_joined_block_is_the_block_of_all_messages_at_once(parts: list[Content]) -> None:
    blocks, base_seq = [], 5
    for part in parts:
        blocks.append(block_from(part, base_seq))
        base_seq = blocks[-1].last_seq + 1
    joined = join_blocks(blocks)
    everything = [message for part in parts for message in part]
    assert joined.columns.is_sound()
    assert joined.base_seq == 5
    assert joined.last_seq == base_seq - 1
    assert joined.times_ns.tolist() == [time for each in blocks for time in each.times_ns]
    assert joined.subject_ids.tolist() == [sid for each in blocks for sid in each.subject_ids]
    assert content_of(decode_block(encode_block(joined, 0))) == plain(everything)


@given(contents, st.data())
def test_any_flipped_bit_is_detected(content: Content, data: st.DataObject) -> None:
    stored = bytearray(encode_block(block_from(content), 99))
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    for decode in (decode_block, view_block):
        with pytest.raises(BlockCorruptError):
            decode(bytes(stored))


@pytest.mark.parametrize("content", [ODD, SAME])
def test_every_single_flipped_bit_and_every_cut_of_one_block_is_detected(content: Content) -> None:
    stored = encode_block(block_from(content), 99)
    for length in range(len(stored)):
        with pytest.raises(BlockCorruptError):
            decode_block(stored[:length])
    for bit in range(8 * len(stored)):
        changed = bytearray(stored)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockCorruptError):
            decode_block(bytes(changed))


@given(contents, st.binary(min_size=1, max_size=70))
def test_bytes_after_a_block_are_detected(content: Content, more: bytes) -> None:
    with pytest.raises(BlockCorruptError):
        decode_block(encode_block(block_from(content), 99) + more)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_block(data: bytes) -> None:
    for decode in (decode_block, view_block):
        with pytest.raises(BlockCorruptError):
            decode(data)


def test_headers_with_the_same_names_take_their_names_once() -> None:
    found = columns_from(SAME).headers
    assert isinstance(found, UniformHeaders)
    assert found.names.each() == ["Id", "Type"]
    assert isinstance(join_columns([columns_from(SAME)] * 3).headers, UniformHeaders)


@given(uniform)
def test_uniform_headers_are_the_same_in_the_form_that_holds_any(content: Content) -> None:
    columns = columns_from(content)
    found = columns.headers
    assert isinstance(found, UniformHeaders)
    nested = msgspec.structs.replace(columns, headers=found.nested())
    assert nested.is_sound()
    assert content_of_columns(nested) == content
    assert nested.sizes().tolist() == columns.sizes().tolist()


@pytest.mark.parametrize("content", [ODD, SAME])
def test_columns_of_a_log_entry_come_back_equal(content: Content) -> None:
    columns = columns_from(content)
    encoded = msgspec.msgpack.encode(columns)
    assert msgspec.msgpack.decode(encoded, type=MessageColumns) == columns


def test_headers_of_no_message_take_no_columns() -> None:
    assert columns_from([(b"a", None), (b"b", {})]).headers is None


@given(contents)
@example(ODD)
@example(SAME)
def test_columns_made_of_messages_are_sound(content: Content) -> None:
    assert columns_from(content).is_sound()


SOUND = columns_from([(b"ab", {"n": ["ä"]}), (b"c", None)])
HEADERS = SOUND.headers
assert isinstance(HEADERS, HeaderColumns)


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


@each(
    "changed",
    [
        pytest.param({"count": 0}, id="no messages"),
        pytest.param({"count": -1, "offsets": b""}, id="a negative count"),
        pytest.param({"count": 3}, id="more messages than offsets"),
        pytest.param({"offsets": u32(0, 3, 2)}, id="descending offsets"),
        pytest.param({"offsets": u32(1, 2, 3)}, id="offsets that do not begin at 0"),
        pytest.param({"offsets": u32(0, 1, 4)}, id="offsets behind the payload"),
        pytest.param({"offsets": u32(0, 1, 3) + b"\0"}, id="offsets with a torn one"),
        pytest.param({"payload": b"abcd"}, id="payload behind the offsets"),
    ],
)
def test_columns_that_do_not_agree_are_not_sound(changed: dict[str, object]) -> None:
    assert not msgspec.structs.replace(SOUND, **changed).is_sound()


@each(
    "changed",
    [
        pytest.param({"entry_offsets": u32(0, 1, 2)}, id="an entry without a name"),
        pytest.param({"entry_offsets": u32(0, 1)}, id="entries of too few messages"),
        pytest.param({"name_offsets": u32(0, 2)}, id="a name behind the names"),
        pytest.param({"value_offsets": u32(0, 2)}, id="a value without text"),
        pytest.param({"text_offsets": u32(0, 1)}, id="text that no value has"),
        pytest.param({"text_offsets": b""}, id="no text offsets"),
        pytest.param({"texts": b"\xff\xff"}, id="text that is not UTF-8"),
    ],
)
def test_headers_that_do_not_agree_are_not_sound(changed: dict[str, object]) -> None:
    headers = msgspec.structs.replace(HEADERS, **changed)
    assert not msgspec.structs.replace(SOUND, headers=headers).is_sound()


def test_text_that_begins_inside_a_character_is_not_sound() -> None:
    headers = HeaderColumns(u32(0, 1), u32(0, 1), u32(0, 2), u32(0, 1, 2), b"n", "ä".encode())
    assert not headers.is_sound(1)


@each(
    "headers",
    [
        pytest.param(UniformHeaders(Texts(u32(0), b""), Texts(u32(0), b"")), id="no names"),
        pytest.param(UniformHeaders(Texts(b"", b""), Texts(u32(0, 1), b"a")), id="no offsets"),
        pytest.param(
            UniformHeaders(Texts(u32(0, 1), b"n"), Texts(u32(0, 1, 2, 3), b"abc")),
            id="more values than messages",
        ),
        pytest.param(
            UniformHeaders(Texts(u32(0, 1), b"\xff"), Texts(u32(0, 1, 2), b"ab")),
            id="a name that is not UTF-8",
        ),
        pytest.param(
            UniformHeaders(Texts(u32(0, 1), b"n"), Texts(u32(0, 1, 2), "ä".encode())),
            id="a value that begins inside a character",
        ),
    ],
)
def test_uniform_headers_that_do_not_agree_are_not_sound(headers: UniformHeaders) -> None:
    assert not msgspec.structs.replace(SOUND, headers=headers).is_sound()
