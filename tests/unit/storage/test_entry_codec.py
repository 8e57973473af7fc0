"""The header of an entry: what is decoded is what was proposed, by this release."""

from typing import Any

import msgspec
import pytest
from crc32c import crc32c
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect

from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import (
    EntryDamagedError,
    EntryVersionError,
    check_entry,
    decode_entry,
    encode_entry,
    entry_crc,
    is_sound,
)

ENTRY = cmd.Entry(1_700_000_000_000_000_000, [(7, cmd.DropStream()), (0, cmd.SkipNumbers(3))])
BYTES = encode_entry(ENTRY)


def values_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a declared type, of all forms that the code may propose."""
    plain: dict[type[inspect.Type], st.SearchStrategy[Any]] = {
        inspect.IntType: st.integers(-INT64_MAX, INT64_MAX),
        inspect.StrType: st.text(max_size=4),
        inspect.BytesType: st.binary(max_size=9),
        inspect.BoolType: st.booleans(),
        inspect.FloatType: st.floats(allow_nan=False),
        inspect.NoneType: st.none(),
    }
    if type(kind) in plain:
        return plain[type(kind)]
    if isinstance(kind, inspect.LiteralType):
        return st.sampled_from(kind.values)
    if isinstance(kind, inspect.EnumType):
        return st.sampled_from(list(kind.cls))
    if isinstance(kind, inspect.ListType):
        return st.lists(values_of(kind.item_type), max_size=3)
    if isinstance(kind, inspect.VarTupleType):
        return st.lists(values_of(kind.item_type), max_size=3).map(tuple)
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*map(values_of, kind.item_types))
    if isinstance(kind, inspect.DictType):
        return st.dictionaries(values_of(kind.key_type), values_of(kind.value_type), max_size=3)
    if isinstance(kind, inspect.UnionType):
        return st.one_of(*map(values_of, kind.types))
    assert isinstance(kind, inspect.StructType), kind
    fields = {field.name: values_of(field.type) for field in kind.fields}
    return st.builds(kind.cls, **fields)


def commands() -> st.SearchStrategy[cmd.Command]:
    """Commands of every kind that a log may have."""
    union = inspect.type_info(cmd.Command)
    assert isinstance(union, inspect.UnionType)
    return values_of(union)


@given(st.lists(st.tuples(st.integers(0, (1 << 32) - 1), commands()), max_size=3))
def test_members_apply_what_was_proposed(proposed: list[tuple[int, cmd.Command]]) -> None:
    """Whatever kind of command it is, nothing is lost or changed on the way through the log."""
    decoded = decode_entry(encode_entry(cmd.Entry(1, proposed))).commands
    assert decoded == proposed
    assert repr(decoded) == repr(proposed)  # the types too: no view in the place of bytes


@given(st.integers(-INT64_MAX - 1, INT64_MAX), st.just(0) | st.integers(-INT64_MAX - 1, INT64_MAX))
def test_entry_is_decoded_as_it_was_proposed(time_ns: int, skipped_ns: int) -> None:
    entry = cmd.Entry(time_ns, ENTRY.commands, skipped_ns)
    assert decode_entry(encode_entry(entry)) == entry


def test_bytes_of_an_entry_stay() -> None:
    """These bytes are in logs: another form needs another version."""
    assert BYTES.hex() == "020000007ccd34af00002a36fe9c97179292079303a0c09200924103"
    skipped = encode_entry(cmd.Entry(ENTRY.time_ns, ENTRY.commands, 1 << 40))
    assert skipped.hex() == (
        "02010000cb6c903900002a36fe9c971700000000000100009292079303a0c09200924103"
    )


@given(st.integers(0, len(BYTES) * 8 - 1))
@example(0)
def test_changed_bit_is_noticed_before_anything_is_decoded(bit: int) -> None:
    changed = bytearray(BYTES)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(EntryDamagedError):
        decode_entry(bytes(changed))
    assert is_sound(BYTES)
    assert not is_sound(bytes(changed))


@given(st.integers(1, len(BYTES) - 1))
def test_entry_cut_short_is_noticed(size: int) -> None:
    with pytest.raises(EntryDamagedError):
        check_entry(BYTES[:size])


@given(st.binary(min_size=1, max_size=64))
def test_bytes_of_anybody_are_no_entry(data: bytes) -> None:
    assert not is_sound(data)


def test_entry_of_raft_itself_has_no_header() -> None:
    assert is_sound(b"")


def test_commands_that_do_not_decode_are_damage() -> None:
    head, rest = BYTES[:4], BYTES[8:16] + msgspec.msgpack.encode([[7, [999]]])
    data = head + crc32c(head + rest).to_bytes(4, "little") + rest
    with pytest.raises(EntryDamagedError):
        decode_entry(data)


def test_entries_of_other_releases_are_refused_in_a_sentence() -> None:
    with pytest.raises(EntryVersionError, match="start it once with that release and stop it cl"):
        check_entry(msgspec.msgpack.encode((5, [(7, [3])])))
    for head in (b"\x03\0\0\0", b"\x02\x02\0\0"):
        newer = head + crc32c(head + BYTES[8:]).to_bytes(4, "little") + BYTES[8:]
        with pytest.raises(EntryVersionError, match="newer release"):
            check_entry(newer)
        assert not is_sound(newer)


def test_checksum_is_found_in_the_header() -> None:
    assert entry_crc(BYTES) == crc32c(BYTES[:4] + BYTES[8:])
