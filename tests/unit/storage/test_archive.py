"""Archives of streams: what goes in comes out, and nothing else is taken for one."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contrail_common.errors import ApiError
from contrail_common.model import TTL_NEVER, DataLoss, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.archive import format as archive
from contrail_storage.core.archive.format import ArchiveError, ArchiveReader, Record
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.results import Appended, ConsumerPut, Refused
from tests.support.each import each
from tests.unit.storage.archive_rig import (
    checked,
    comparable,
    messages_of,
    packed,
    records_of,
    restored,
)
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    picture,
    removal_of,
)

S = 1_000_000_000
IDS = [f"id-{number}" for number in range(30)]
CONFIG = StreamConfig(name="S", subjects=("a.>",), duplicate_window_ns=20 * S, allow_msg_ttl=True)


@dataclass
class Step:
    """One entry: what it does, and how much later than the one before."""

    kind: str
    messages: list[Message]
    choice: float
    later_s: int


messages = st.builds(
    Message,
    st.sampled_from([f"a.{number}" for number in range(9)]),
    st.binary(max_size=12),
    st.none() | st.just({"K": ["v"]}) | st.just({"K": ["w"], "L": ["x", "ä"]}),
    st.none() | st.sampled_from(IDS),
    ttl_ns=st.none() | st.sampled_from([5 * S, 9 * S, TTL_NEVER]),
)
steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(["append"] * 4 + ["delete", "delete", "trim", "purge", "deliver", "ack"]),
        st.lists(messages, min_size=1, max_size=6),
        st.floats(0, 0.999),
        st.integers(0, 8),
    ),
    max_size=25,
)


def live_seqs(rig: Rig) -> list[int]:
    counters = rig.machine.counters
    return [
        seq for seq in range(counters.first_seq, counters.last_seq + 1) if rig.machine.is_live(seq)
    ]


def live_deadlines(rig: Rig) -> dict[int, int]:
    """The deadline of each live message that has one."""
    rows = rig.deadline_rows().items()
    return {seq: due_ns for (due_ns, _), seqs in rows for seq in seqs if rig.machine.is_live(seq)}


def take(rig: Rig, step: Step, now_ns: int) -> None:
    seqs = live_seqs(rig)
    chosen = seqs[int(step.choice * len(seqs))] if seqs else 0
    if step.kind == "append":
        rig.apply(now_ns, append_of(step.messages))
    elif step.kind == "delete" and chosen:
        rig.apply(now_ns, cmd.DeleteMessage(chosen))
    elif step.kind == "trim" and chosen:
        rig.apply(now_ns, cmd.Trim(chosen, 100))
    elif step.kind == "purge":
        rig.apply(now_ns, removal_of(rig.machine, [step.messages[0].subject]))
    elif step.kind == "deliver":
        for consumer in rig.machine.consumers.values():
            new = [seq for seq in seqs if seq >= consumer.next_seq][: len(step.messages)]
            if new:
                rig.apply(now_ns, cmd.Deliver(consumer.consumer_id, 1, new, new[-1] + 1))
    elif step.kind == "ack":
        for consumer in rig.machine.consumers.values():
            some = list(consumer.pending)[: len(step.messages)]
            rig.apply(now_ns, cmd.Acknowledge(consumer.consumer_id, 1, some[::2]))


def lived(history: list[Step]) -> tuple[Rig, int]:
    """A stream with two consumers behind a history, and the time then."""
    rig, now_ns = Rig(), 1_000 * S
    rig.apply(now_ns, configure(CONFIG))
    for name in ("c", "d"):
        rig.apply(now_ns, cmd.PutConsumer(consumer_config(name), 1))
    for step in history:
        now_ns += step.later_s * S
        take(rig, step, now_ns)
    return rig, now_ns


def some_stream() -> Rig:
    """Messages with and without headers and ids, deletions, deliveries."""
    history = [
        Step(
            kind,
            [
                Message(
                    f"a.{number}",
                    b"payload-%d" % number,
                    {"K": [f"secret-{number}"]} if number % 3 else None,
                    f"id-{turn * 5 + number}",
                    ttl_ns=(None, 5 * S, 9 * S, 5 * S, TTL_NEVER)[number],
                )
                for number in range(5)
            ],
            0.5,
            1,
        )
        for turn, kind in enumerate(["append", "append", "deliver", "delete", "append", "ack"])
    ]
    return lived(history)[0]


@pytest.mark.long
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps, st.integers(1, 9), st.booleans())
def test_restored_machine_knows_and_does_what_the_first_one_did(
    history: list[Step], in_a_part: int, restarts: bool
) -> None:
    rig, now_ns = lived(history)
    other = restored(packed(records_of(rig)), in_a_part=in_a_part, restarts=restarts)
    assert comparable(other, IDS) == comparable(rig, IDS)
    assert list(messages_of(other)) == list(messages_of(rig))
    assert live_deadlines(other) == live_deadlines(rig)
    assert other.machine.deadlines.earliest_ns >= rig.machine.deadlines.earliest_ns
    # Both go on alike, also when the first of the ids have expired.
    for later_s in (0, 7, 13):
        for machine in (rig, other):
            machine.index = max(rig.index, other.index)
            take(machine, Step("append", [Message("a.1", b"x", None, one) for one in IDS], 0, 0),
                 now_ns + later_s * S)  # fmt: skip
            machine.restart()
        assert comparable(other, IDS) == comparable(rig, IDS)


def test_archive_without_consumers_restores_none_and_gives_no_number_twice() -> None:
    other = restored(packed(records_of(some_stream(), consumers=False)))
    assert not other.machine.consumers
    other.apply(2_000 * S, cmd.PutConsumer(consumer_config("new"), 1))
    assert list(other.machine.consumers) == [3]


def test_archive_of_before_there_were_deadlines_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    rig.apply(S, append_of([Message("a.1", b"one"), Message("a.2", b"two")]))
    monkeypatch.setattr(archive, "VERSION", 1)
    data = packed(records_of(rig))
    monkeypatch.undo()
    assert data[8] == 1
    assert comparable(restored(data)) == comparable(rig)


def test_deadlines_of_what_is_gone_are_not_in_the_archive() -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    rig.apply(S, append_of([Message("a.1", b"x", ttl_ns=5 * S)] * 3))
    rig.apply(S, append_of([Message("a.2", b"x", ttl_ns=5 * S)]))
    for seq in (1, 2, 4):
        rig.apply(2 * S, cmd.DeleteMessage(seq))
    other = restored(packed(records_of(rig)))
    assert other.deadline_rows() == {(6 * S, 3): [3]}
    rig.apply(2 * S, cmd.DeleteMessage(3))
    assert not [one for one in records_of(rig) if one.kind == archive.DEADLINES]


def test_many_deadlines_come_in_several_records() -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    for turn in range(20):
        rig.apply(turn * S, append_of([Message("a.1", ttl_ns=5 * S)] * 1_000))
    records = records_of(rig)
    assert sum(one.kind == archive.DEADLINES for one in records) == 2
    assert restored(packed(records), restarts=True).deadline_rows() == rig.deadline_rows()


def seqs_of(*numbers: int) -> bytes:
    return np.array(numbers, np.int64).tobytes()


@each(
    "record",
    [
        (archive.EXEMPT, archive.ExemptPages([(0, b"\xff" * 512)])),
        (archive.EXEMPT, archive.ExemptPages([(0, b"\x10")])),
        (archive.EXEMPT, archive.ExemptPages([(0, bytes(512)), (0, bytes(512))])),
        (archive.EXEMPT, archive.ExemptPages([(9, bytes(512))])),
        (archive.DEADLINES, archive.DeadlineRows([(5, b"")])),
        (archive.DEADLINES, archive.DeadlineRows([(5, b"1234567")])),
        (archive.DEADLINES, archive.DeadlineRows([(5, seqs_of(3, 2))])),
        (archive.DEADLINES, archive.DeadlineRows([(5, seqs_of(2, 99))])),
        (archive.DEADLINES, archive.DeadlineRows([(5, seqs_of(1))])),
        (archive.DEADLINES, archive.DeadlineRows([(6, seqs_of(2)), (5, seqs_of(3))])),
        (archive.DEADLINES, archive.DeadlineRows([(1 << 63, seqs_of(2))])),
        (archive.DEADLINES, archive.DeadlineRows([(-1, seqs_of(2))])),
    ],
)
def test_made_up_deadlines_are_refused(record: tuple[int, Any]) -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    rig.apply(S, append_of([Message("a.1", b"x")] * 4))
    rig.apply(S, cmd.DeleteMessage(1))
    head, *rest = records_of(rig)
    kind, payload = record
    made_up = Record(kind, msgspec.msgpack.encode(payload))
    at = sum(one.kind in (archive.SUBJECTS, archive.DELETED) for one in rest)
    with pytest.raises(ArchiveError, match="is inconsistent"):
        checked(packed([head, *rest[:at], made_up, *rest[at:]]))


def test_what_was_deleted_is_not_in_the_archive() -> None:
    rig = some_stream()
    rig.apply(2_000 * S, append_of([Message("a.gone", b"to-be-erased", {"K": ["hidden-text"]})]))
    seq = rig.machine.counters.last_seq
    rig.apply(2_000 * S, append_of([Message("a.1", b"last")]))
    assert b"to-be-erased" in packed(records_of(rig))
    rig.apply(2_000 * S, cmd.DeleteMessage(seq))
    data = packed(records_of(rig))
    for text in (b"to-be-erased", b"hidden-text", b"a.gone"):
        assert text not in data
    checked(data)


def test_what_lies_below_the_first_sequence_is_not_in_the_archive() -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    rig.apply(S, append_of([Message("a.1", b"trimmed"), Message("a.1", b"kept")]))
    rig.apply(S, cmd.Trim(2, 10))
    data = packed(records_of(rig))
    assert b"kept" in data
    assert b"trimmed" not in data
    assert comparable(restored(data)) == comparable(rig)


def test_ids_of_several_records_are_kept_where_one_part_has_them_all() -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    for turn, count in enumerate((5_000, 4_000, 1)):
        messages = [Message("a.1", msg_id=f"{turn}-{at}") for at in range(count)]
        rig.apply(S, append_of(messages))
    records = records_of(rig)
    assert sum(one.kind == archive.IDS for one in records) == 2
    other = restored(packed(records), in_a_part=len(records))
    other.restart()
    ids = ["0-0", "1-3999", "2-0"]
    assert picture(other.machine, ids)["ids"] == picture(rig.machine, ids)["ids"]


def test_many_pending_deliveries_come_in_several_records() -> None:
    rig = Rig()
    rig.apply(S, configure(CONFIG))
    count = 2_000
    for _ in range(5):
        rig.apply(S, append_of([Message("a.1", b"x")] * count))
    rig.apply(S, cmd.PutConsumer(consumer_config("c", max_ack_pending=20_000), 1))
    rig.apply(S, cmd.Deliver(1, 1, list(range(1, 5 * count + 1)), 5 * count + 1))
    records = records_of(rig)
    assert sum(one.kind == archive.PENDING for one in records) == 2
    assert comparable(restored(packed(records), restarts=True)) == comparable(rig)


def test_every_damaged_byte_is_found() -> None:
    data = packed(records_of(some_stream()))
    checked(data)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(ArchiveError):
            checked(bytes(damaged))


@pytest.mark.long
def test_every_cut_is_found() -> None:
    data = packed(records_of(some_stream()))
    for size in range(len(data)):
        with pytest.raises(ArchiveError, match="cut short"):
            checked(data[:size])


def test_bytes_after_the_end_are_found() -> None:
    with pytest.raises(ArchiveError, match="after its end"):
        checked(packed(records_of(some_stream())) + b"\0")


def test_another_version_is_named() -> None:
    data = bytearray(packed(records_of(some_stream())))
    data[8] = 3
    with pytest.raises(ArchiveError, match="version 3; this server reads 1 to 2"):
        checked(bytes(data))


@each("data", [b"PK\x03\x04" + bytes(99), b"{}", b"CTRLSNAQ" + bytes(30)])
def test_other_bytes_are_no_archive(data: bytes) -> None:
    with pytest.raises(ArchiveError, match="not a stream archive"):
        checked(data)


def raw_records(data: bytes) -> list[bytes]:
    """The bytes of each record."""
    found, at = [], 12
    while at < len(data):
        size = int.from_bytes(data[at + 1 : at + 5], "little") + 9
        found.append(data[at : at + size])
        at += size
    return found


def test_records_that_are_moved_doubled_or_left_out_are_found() -> None:
    data = packed(records_of(some_stream()))
    pieces = raw_records(data)
    assert data[:12] + b"".join(pieces) == data
    for at in range(len(pieces)):
        left_out = pieces[:at] + pieces[at + 1 :]
        doubled = pieces[: at + 1] + pieces[at:]
        for changed in (left_out, doubled, pieces[:at] + pieces[at:][::-1]):
            if changed != pieces:
                with pytest.raises(ArchiveError):
                    checked(data[:12] + b"".join(changed))


def test_reader_holds_no_more_than_a_record() -> None:
    reader = ArchiveReader()
    data = packed([])[:12] + bytes([archive.HEADER]) + (1 << 31).to_bytes(4, "little")
    with pytest.raises(ArchiveError, match="head of record"):
        reader.feed(data)


LOSS = DataLoss(accepted_ns=1, reason="x" * 1_000, unknown=True, ranges=[(1, 1)] * 100)


def changed_header(records: list[Record], **fields: Any) -> list[Record]:
    header = msgspec.msgpack.decode(records[0].payload, type=ArchiveHeader)
    payload = msgspec.msgpack.encode(msgspec.structs.replace(header, **fields))
    return [Record(archive.HEADER, payload), *records[1:]]


@each(
    "fields",
    [
        {"messages": 3},
        {"bytes": 1},
        {"first_seq": 2},
        {"last_seq": 99},
        {"last_time_ns": 5},
        {"next_subject": 1},
        {"next_consumer": 1},
        {"next_subject": 1 << 32},
        {"next_consumer": (1 << 31) + 1},
        {"loss": msgspec.structs.replace(LOSS, messages=-1)},
        {"loss": msgspec.structs.replace(LOSS, times=0)},
        {"loss": msgspec.structs.replace(LOSS, reason="x" * 1_001)},
        {"loss": msgspec.structs.replace(LOSS, ranges=[(1, 1)] * 101)},
        {"loss": msgspec.structs.replace(LOSS, ranges=[(2, 1)])},
        {"hash_key": b""},
        {"last_id": b""},
        {"digest": -1},
        {"config": msgspec.structs.replace(CONFIG, subjects=())},
    ],
)
def test_made_up_header_is_refused(fields: dict[str, Any]) -> None:
    records = changed_header(records_of(some_stream()), **fields)
    with pytest.raises(ArchiveError, match="is inconsistent"):
        checked(packed(records))


def test_stream_with_the_highest_numbers_that_are_taken_continues_numbering() -> None:
    highest = 1 << 31
    stream = some_stream()
    next_subject = stream.machine.subjects.next_id + 100
    records = changed_header(
        records_of(stream), next_subject=next_subject, next_consumer=highest, loss=LOSS
    )
    rig = restored(packed(records))
    rig.restart()
    counters = rig.machine.counters
    assert rig.machine.loss == LOSS
    (stored,) = rig.apply(counters.last_time_ns, append_of([Message("a.new", b"x")]))
    assert stored == Appended(counters.last_seq, 1)
    assert rig.machine.subjects.next_id == next_subject + 1
    put = cmd.PutConsumer(consumer_config("another"), 1)
    assert rig.apply(counters.last_time_ns, put) == [ConsumerPut(highest, created=True)]


def test_subject_numbers_far_apart_are_restored_without_memory_for_those_between() -> None:
    records = changed_header(records_of(some_stream()), next_subject=1 << 31)
    rig = restored(packed(records))
    table = rig.machine.subjects
    assert table.next_id == 1 << 31
    assert table.size == len(table)


def test_configuration_that_no_stream_may_have_is_refused_by_its_field() -> None:
    config = msgspec.structs.replace(CONFIG, max_age_ns=1)
    with pytest.raises(ApiError, match="max_age"):
        checked(packed(changed_header(records_of(some_stream()), config=config)))


@each("kind", [archive.SUBJECTS, archive.DELETED, archive.BLOCK])
def test_archive_without_some_of_its_records_is_refused(kind: int) -> None:
    records = [one for one in records_of(some_stream()) if one.kind != kind]
    with pytest.raises(ArchiveError, match="is inconsistent"):
        checked(packed(records))


@each("name", ["A\r\nB: c\r\nX", "A: b", "A B", "A*", "\u00e4", "A" * 129, ""])
@each("more", [{}, {"K": ["v", "w"]}])
def test_archive_with_a_header_name_that_cannot_be_sent_is_refused(
    name: str, more: dict[str, list[str]]
) -> None:
    with pytest.raises(ArchiveError, match="headers of a message"):
        checked(packed(records_of(stream_with_headers({name: ["v"], **more}))))


@each("value", ["a\r\nB: c", "a\n", "\r", "\0"])
def test_archive_with_a_header_value_that_cannot_be_sent_is_refused(value: str) -> None:
    with pytest.raises(ArchiveError, match="headers of a message"):
        checked(packed(records_of(stream_with_headers({"A": [value]}))))
    checked(packed(records_of(stream_with_headers({"A": ["tab\tand \u00e4"]}))))


def stream_with_headers(headers: dict[str, list[str]]) -> Rig:
    rig = Rig()
    rig.apply(1, configure(CONFIG))
    rig.apply(1, append_of([Message("a.1", b"x", headers)]))
    return rig


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_sealed_nonsense_is_refused_or_makes_a_sound_stream(data: st.DataObject) -> None:
    records = records_of(some_stream())
    at = data.draw(st.integers(0, len(records) - 1))
    payload = bytearray(records[at].payload)
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255))
    records[at] = Record(records[at].kind, bytes(payload))
    try:
        _, found = checked(packed(records))
    except (ArchiveError, ApiError):
        return
    assert found
    rig = restored(packed(records))
    rig.apply(3_000 * S, append_of([Message("a.1", b"x")]))
    rig.apply(3_000 * S, cmd.Trim(1 << 40, 100))
    rig.restart()


def test_parts_are_refused_where_a_stream_stands() -> None:
    rig = some_stream()
    [result] = rig.apply(2_000 * S, cmd.RestorePart([], "none"))
    assert result == Refused(10130)


def test_dropped_restore_leaves_no_row() -> None:
    rig = Rig()
    records = records_of(some_stream())[1:]
    rig.apply(1, cmd.RestorePart([tuple(one) for one in records], "none"))
    assert rig.store.rows
    rig.apply(1, cmd.DropStream())
    assert rig.store.rows == {}
    assert rig.machine.shard_id == SHARD
    assert not np.any(rig.machine.subjects.counts)
