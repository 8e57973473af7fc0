"""The bytes of the log: what is damaged is never taken for sound, and torn is told from rotten."""

from itertools import accumulate
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.wal import codec
from contrail_storage.wal.codec import RecordKind
from contrail_storage.wal.log_state import Segment
from contrail_storage.wal.replay import Replayed, replay
from tests.unit.storage.wal_disk import Inode, SimDisk

SALT = b"\x07saltSA\x01"
ROOT = Path("/wal")
BASE = codec.mark_record(RecordKind.BASE, 1, 0, 0)

payloads = st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=8)


def entry(index: int, data: bytes, term: int = 1) -> bytes:
    return codec.record_header(RecordKind.ENTRY, 1, index, term, len(data)) + data


def batches_of(datas: list[bytes], salt: bytes = SALT) -> list[bytes]:
    bodies = [entry(index, data) for index, data in enumerate(datas, 1)]
    bodies[0] = BASE + bodies[0]
    return [codec.batch_header(salt, number, body) + body for number, body in enumerate(bodies, 1)]


def read_back(content: bytes) -> Replayed:
    disk = SimDisk()
    segment = Segment(1, 1, SALT)
    disk.names[ROOT / segment.name] = Inode(bytearray(content))
    return replay(disk, ROOT, [segment], {})


def datas_in(found: Replayed) -> list[bytes]:
    group = found.recovery.groups.get(1)
    return [data for data, _, _ in group.entries] if group else []


@given(payloads)
def test_whole_segment_gives_every_entry_and_no_finding(datas: list[bytes]) -> None:
    found = read_back(b"".join(batches_of(datas)))
    assert datas_in(found) == datas
    assert found.recovery.torn_tail is None
    assert found.recovery.rot is None
    assert found.next_batch == len(datas) + 1


@given(payloads, st.data())
def test_segment_cut_anywhere_gives_the_whole_batches_before_and_a_torn_tail(
    datas: list[bytes], draw: st.DataObject
) -> None:
    batches = batches_of(datas)
    content = b"".join(batches)
    cut = draw.draw(st.integers(0, len(content)))
    ends = list(accumulate(map(len, batches)))
    whole = sum(end <= cut for end in ends)
    found = read_back(content[:cut])
    assert datas_in(found) == datas[:whole]
    assert found.recovery.rot is None
    assert (found.recovery.torn_tail is None) == (cut in (0, *ends))


@given(payloads, st.data())
def test_flipped_bit_is_rot_unless_it_is_in_the_last_batch(
    datas: list[bytes], draw: st.DataObject
) -> None:
    batches = batches_of(datas)
    content = bytearray(b"".join(batches))
    position = draw.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << draw.draw(st.integers(0, 7))
    damaged = sum(end <= position for end in accumulate(map(len, batches)))
    found = read_back(bytes(content))
    assert datas_in(found) == datas[:damaged]
    if damaged == len(batches) - 1:
        assert found.recovery.rot is None
        assert found.recovery.torn_tail is not None
    else:
        assert found.recovery.rot is not None
        assert found.recovery.rot.offset == sum(map(len, batches[:damaged]))


@given(payloads, st.data())
def test_several_damaged_bytes_never_give_a_wrong_entry(
    datas: list[bytes], draw: st.DataObject
) -> None:
    content = bytearray(b"".join(batches_of(datas)))
    places = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for position, value in draw.draw(st.lists(places, max_size=6)):
        content[position] = value
    read = datas_in(read_back(bytes(content)))
    assert read == datas[: len(read)]


@given(payloads)
def test_message_that_imitates_the_log_does_not_make_a_torn_tail_look_rotten(
    datas: list[bytes],
) -> None:
    imitation = b"".join(batches_of(datas, salt=b"guessing"))
    batches = batches_of([b"first", imitation])
    torn = b"".join(batches)[:-1]
    found = read_back(torn)
    assert datas_in(found) == [b"first"]
    assert found.recovery.rot is None
    assert found.recovery.torn_tail is not None


@given(st.binary(max_size=200), st.integers(0, 220))
def test_arbitrary_bytes_are_no_batch(data: bytes, offset: int) -> None:
    assert codec.read_batch(memoryview(data), offset, SALT) is None


@given(st.binary(max_size=200))
def test_arbitrary_body_decodes_to_records_within_it_or_is_refused(body: bytes) -> None:
    size = 0
    try:
        for record in codec.records(memoryview(body)):
            size += codec.RECORD_HEADER_BYTES + len(record.data)
    except codec.MalformedRecordError:
        return
    assert size == len(body)


def test_sound_batch_of_a_newer_version_is_refused_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "PLAIN_VERSION", 5)
    newer = b"".join(batches_of([b"x"]))
    monkeypatch.undo()
    with pytest.raises(codec.UnsupportedVersionError):
        read_back(newer)


def test_sound_batch_with_a_hole_in_a_group_is_rot() -> None:
    body = BASE + entry(2, b"no first")
    found = read_back(codec.batch_header(SALT, 1, body) + body)
    assert found.recovery.rot is not None
    assert "from entry 0 to entry 2" in found.recovery.rot.reason


def test_hard_state_keeps_term_and_vote() -> None:
    record = next(codec.records(memoryview(codec.hard_state_record(3, 9, "nöde"))))
    assert (record.group, record.term, codec.voted_for(record)) == (3, 9, "nöde")
    record = next(codec.records(memoryview(codec.hard_state_record(3, 9, None))))
    assert codec.voted_for(record) is None


def test_header_of_a_batch_in_parts_is_that_of_the_parts_together() -> None:
    parts = [b"one", b"", b"three" * 1_000]
    assert codec.batch_header(SALT, 7, *parts) == codec.batch_header(SALT, 7, b"".join(parts))
    assert codec.batch_header(SALT, 7) == codec.batch_header(SALT, 7, b"")


@pytest.mark.parametrize(("version", "is_sealed"), [(1, False), (2, True), (3, False), (4, True)])
def test_batches_of_this_release_and_of_0_2_are_read(version: int, is_sealed: bool) -> None:
    head = codec.batch_header(SALT, 1, b"")
    whole = head[:20] + bytes((version,)) + head[21:24]
    whole += crc32c(whole).to_bytes(4, "little")
    batch = codec.read_batch(memoryview(whole), 0, SALT)
    assert batch is not None
    assert batch.sealed is is_sealed
