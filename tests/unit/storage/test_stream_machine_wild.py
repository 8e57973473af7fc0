"""Whatever a command says, ``apply`` answers it, and what it wrote can be loaded again."""

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_common.columns.blocks import MessageColumns, decode_block, encode_block
from contrail_common.columns.header_columns import HeaderColumns
from contrail_common.model import ConsumerConfig, Numbered, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import decode_entry, encode_entry
from contrail_storage.core.expected import HashedExpected
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Done, Refused, Result, Writes
from tests.unit.storage.machine_rig import (
    Message,
    Rig,
    append_of,
    configure,
    consumer_config,
    picture,
)

NEAR = st.integers(-2, 12)
FAR = st.sampled_from([-(2**63), -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
numbers = NEAR | NEAR | FAR
numbers_list = st.lists(numbers, max_size=4) | st.lists(numbers, max_size=12)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
subjects = st.sampled_from(["a", "b", "a.b", "", ">", "*"]) | texts
consumer_ids = st.sampled_from([1, 1, 1, 2]) | numbers
epochs = st.sampled_from([1, 1, 1]) | numbers
streams = st.builds(
    StreamConfig,
    name=texts,
    subjects=st.lists(subjects, max_size=3).map(tuple),
    retention=st.sampled_from(["limits", "interest", "workqueue"]),
    discard=st.sampled_from(["old", "new"]),
    max_msgs=numbers,
    max_bytes=numbers,
    max_age_ns=numbers,
    max_msgs_per_subject=numbers,
    discard_new_per_subject=st.booleans(),
    allow_rollup_hdrs=st.booleans(),
    allow_atomic=st.booleans(),
    allow_msg_ttl=st.booleans(),
    subject_delete_marker_ttl_ns=numbers,
    max_msg_size=numbers,
    max_consumers=numbers,
    duplicate_window_ns=numbers,
    first_seq=st.just(1) | numbers,
)
consumers = st.builds(
    ConsumerConfig,
    name=st.sampled_from(["red", "blue", ""]),
    durable=st.booleans(),
    ack_policy=st.sampled_from(["none", "all", "explicit"]),
    ack_wait_ns=numbers,
    max_deliver=numbers,
    backoff_ns=st.lists(numbers, max_size=2).map(tuple),
    filter_subjects=st.lists(subjects, max_size=2).map(tuple),
)
offsets = st.lists(st.integers(0, 6), max_size=5).map(
    lambda values: b"".join(value.to_bytes(4, "little") for value in values)
)
columns = st.builds(
    MessageColumns,
    count=numbers,
    offsets=offsets | st.binary(max_size=9),
    payload=st.binary(max_size=6),
    headers=st.none()
    | st.builds(
        HeaderColumns,
        offsets,
        offsets,
        offsets,
        offsets,
        st.binary(max_size=6),
        st.sampled_from([b"", "ä".encode(), b"text"]),
    ),
)
expectations = st.builds(
    HashedExpected,
    st.none() | texts,
    st.none() | numbers,
    st.none() | numbers,
    st.none() | subjects,
    st.none() | st.binary(max_size=17),
    st.none() | numbers,
    numbers,
)
ill_formed_appends = st.builds(
    cmd.Append,
    st.lists(subjects, max_size=3),
    offsets | st.binary(max_size=9),
    columns,
    st.none() | st.binary(max_size=33),
    st.none() | st.dictionaries(numbers, expectations, max_size=2),
    st.none() | st.dictionaries(numbers, st.sampled_from(["sub", "all"]), max_size=2),
    st.booleans(),
    st.none() | st.dictionaries(numbers, numbers, max_size=2),
)
messages = st.builds(
    Message,
    subjects,
    st.binary(max_size=4),
    st.none() | st.dictionaries(texts, st.lists(texts, max_size=2), max_size=2),
    st.none() | texts,
)
appends = st.builds(
    lambda batch, expected, rollups, atomic, ttls: cmd.Append(
        batch.subjects,
        batch.subject_index,
        batch.columns,
        batch.ids,
        expected,
        rollups,
        atomic,
        ttls,
    ),
    st.lists(messages, min_size=1, max_size=4).map(append_of),
    st.none() | st.dictionaries(st.integers(-1, 5), expectations, max_size=2),
    st.none() | st.dictionaries(st.integers(-1, 5), st.sampled_from(["sub", "all"]), max_size=2),
    st.booleans(),
    st.none() | st.dictionaries(st.integers(-1, 5), numbers, max_size=3),
)
i64s = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 12), max_size=4).map(
    lambda values: b"".join(value.to_bytes(8, "little", signed=True) for value in sorted(values))
)
expirations = st.builds(
    cmd.Expire,
    i64s | st.binary(max_size=17),
    i64s | st.binary(max_size=17),
    i64s | st.binary(max_size=9),
)
reasons = st.sampled_from(get_args(cmd.RemovalReason))
found = st.dictionaries(st.integers(1, 12), st.tuples(st.integers(0, 3), st.integers(0, 9)))
removals = st.builds(
    lambda reason, messages, finished: msgspec.structs.replace(
        cmd.Remove.of(
            reason,
            np.array(sorted(messages), np.int64),
            np.array([messages[seq][0] for seq in sorted(messages)], np.uint32),
            np.array([messages[seq][1] for seq in sorted(messages)], np.int64),
        ),
        finished=finished,
    ),
    reasons,
    found,
    st.dictionaries(subjects, numbers, max_size=2),
)
narrow = st.binary(max_size=9) | st.binary(max_size=3).map(lambda values: b"\1" + values)
ill_formed_removals = st.builds(cmd.Remove, reasons, numbers, narrow, narrow, narrow)
commands: st.SearchStrategy[cmd.Command] = st.one_of(
    appends,
    appends,
    ill_formed_appends,
    st.builds(
        cmd.NumberedAppend.of,
        appends | ill_formed_appends,
        st.builds(Numbered, st.sampled_from(["p", ""]), numbers),
    ),
    streams.map(configure),
    st.builds(cmd.DropStream),
    st.builds(cmd.Trim, numbers, numbers),
    st.builds(cmd.ExpireAge, numbers),
    expirations,
    expirations,
    st.builds(cmd.EnforceLimits, numbers),
    st.builds(cmd.EnforceInterest, numbers),
    removals,
    removals,
    ill_formed_removals,
    st.builds(cmd.DeleteMessage, numbers),
    st.builds(cmd.PutConsumer, consumers, numbers),
    st.builds(cmd.PutConsumer, consumers, numbers),
    st.builds(cmd.PutConsumer, consumers, numbers, st.binary(max_size=24), numbers),
    st.builds(cmd.DropConsumer, consumer_ids),
    st.builds(cmd.Deliver, consumer_ids, epochs, numbers_list, numbers),
    st.builds(
        cmd.DeliverAcked,
        consumer_ids,
        epochs,
        numbers_list,
        numbers,
        st.none() | numbers_list,
    ),
    st.builds(cmd.Advance, consumer_ids, epochs, numbers, numbers, numbers),
    st.builds(
        cmd.Acknowledge,
        consumer_ids,
        epochs,
        numbers_list,
        st.lists(
            st.tuples(st.sampled_from(["ack", "nak", "term", "in_progress"]), numbers, numbers),
            max_size=3,
        ),
    ),
    st.builds(cmd.Exhaust, consumer_ids, epochs, numbers_list),
    st.builds(cmd.ReserveStream, texts, st.lists(subjects, max_size=2).map(tuple), texts),
    st.builds(cmd.ListStream, texts, st.lists(subjects, max_size=2).map(tuple)),
    st.builds(cmd.UnlistStream, texts),
    st.builds(cmd.ReleaseStream, texts),
)
# The head of an entry has its time in 64 bits.
times = numbers.filter(lambda number: -(2**63) <= number < 2**63)
entries = st.builds(cmd.Entry, times, st.lists(st.tuples(st.just(7), commands), max_size=4))
PLAIN = StreamConfig(name="S", subjects=("a", "b", "a.*"))
INTEREST = StreamConfig(name="S", subjects=("a", "b", "a.*"), retention="interest")
WORKQUEUE = StreamConfig(name="S", subjects=("a", "b", "a.*"), retention="workqueue")


def logged(entry: cmd.Entry) -> cmd.Entry:
    """The entry as it comes out of the log."""
    return decode_entry(encode_entry(entry))


@pytest.mark.long
@settings(max_examples=2 * settings().max_examples)
@given(st.lists(entries, max_size=8), st.sampled_from([PLAIN, INTEREST, WORKQUEUE]))
def test_any_command_is_answered_and_what_it_wrote_loads_again(
    history: list[cmd.Entry], config: StreamConfig
) -> None:
    rig = Rig()
    rig.machine.recounted = True  # `Remove` may name subjects that the messages do not have
    rig.apply(0, configure(config))
    for entry in map(logged, history):
        results = rig.apply(entry.time_ns, *[command for _, command in entry.commands])
        assert all(isinstance(result, Result) for result in results)
        rig.machine.state()
    for consumer in rig.machine.consumers.values():
        writes = Writes()
        consumer.write_snapshot(writes)
    for block in rig.shelf.blocks:
        assert decode_block(encode_block(block, 1)).count == block.count
    before = picture(rig.machine)
    rig.restart()
    assert picture(rig.machine) == before


def test_message_with_an_empty_subject_is_refused_also_where_everything_is_captured() -> None:
    rig = Rig()
    rig.apply(0, configure(StreamConfig(name="S", subjects=())))
    for messages in ([Message("")], [Message("a"), Message("")]):
        [result] = rig.apply(1, append_of(messages))
        assert isinstance(result, Refused)
    assert list(rig.machine.subjects.live()) == []


@pytest.mark.parametrize("ack_policy", ["explicit", "all"])
def test_sequences_beyond_64_bits_are_applied_and_stored(ack_policy: str) -> None:
    rig = Rig()
    rig.apply(0, configure(PLAIN))
    rig.apply(1, cmd.PutConsumer(consumer_config("red", ack_policy=ack_policy), 1))
    many = [*range(1, 12), 2**63, 2**64 - 1]
    for command in (
        cmd.Deliver(1, 1, many, 1),
        cmd.DeliverAcked(1, 1, many, 1, [1]),
        cmd.Acknowledge(1, 1, [2**64 - 1]),
    ):
        assert rig.apply(2, command) == [Done()]
        rig.machine.consumers[1].write_snapshot(Writes())


@given(st.lists(entries, max_size=6))
def test_meta_answers_any_command_and_loads_what_it_wrote(history: list[cmd.Entry]) -> None:
    rig = Rig()
    meta = MetaMachine()
    for entry in map(logged, history):
        writes = Writes()
        for _, command in entry.commands:
            assert isinstance(meta.apply(command, writes), Result)
        rig.store.write(writes.rows)
    loaded = MetaMachine()
    loaded.load(rig.store.scan(b"M"))
    assert loaded.streams == meta.streams


@given(commands)
def test_command_to_a_shard_without_a_stream_is_refused_and_writes_nothing(
    command: cmd.Command,
) -> None:
    if isinstance(command, cmd.ConfigureStream):
        return
    rig = Rig()
    [result] = rig.apply(1, command)
    assert isinstance(result, Refused)
    assert rig.store.rows == {}
