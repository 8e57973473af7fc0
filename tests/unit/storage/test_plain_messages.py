"""Messages that nothing is asked of are logged and applied as the general way does it.

Proposing and applying have a short way for them. Both must leave exactly what the
general way leaves, whatever the messages, the stream and its state.
"""

from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from contrail_common.columns.blocks import MessageColumns, encode_block
from contrail_common.columns.header_columns import UniformHeaders
from contrail_common.model import PublishMessage, StreamConfig
from contrail_common.texts import Texts
from contrail_link.contract.publish import PubResult
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import decode_entry, encode_parts
from contrail_storage.core.results import Appended, Result, Step, Writes
from contrail_storage.core.stream.append_plain import append_plain
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.replica.entries import AppendRequest, EntryBuilder, Outcome
from contrail_storage.replica.plain_messages import entry_of_plain
from tests.support.each import each
from tests.unit.storage.machine_rig import (
    SHARD,
    Message,
    RowStore,
    Shelf,
    append_of,
    configure,
    consumer_config,
    picture,
)
from tests.unit.storage.test_entry_sizes import KEY, NOW_NS, published

HOUR_NS = 3_600 * 10**9

subjects = st.sampled_from(["a.b", "a.c", "a.ä", "other"])
headers = st.none() | st.dictionaries(
    st.sampled_from(["H", "Content-Type", "ä"]),
    st.lists(st.sampled_from(["", "v", "text/plain", "ö"]), max_size=2),
    max_size=2,
)
messages = st.builds(Message, subjects, st.binary(max_size=8), headers)
usual = st.builds(lambda message: append_of([message]), messages)
others = st.builds(
    append_of,
    st.lists(st.builds(Message, subjects, st.binary(max_size=8), headers), min_size=2, max_size=3)
    | st.lists(st.builds(Message, subjects, st.binary(max_size=8)), min_size=2, max_size=20),
)
with_ids = st.builds(
    lambda subject, msg_id: append_of([Message(subject, b"x", msg_id=msg_id)]),
    subjects,
    st.sampled_from(["one", "two"]),
)
offsets = st.sampled_from([b"", bytes(4), bytes(8), b"\0\0\0\0\2\0\0\0", b"\1\0\0\0\2\0\0\0"])
texts = st.builds(Texts, offsets, st.sampled_from([b"", b"ab", b"\xff\xff", "ä".encode()]))
columns = st.builds(
    MessageColumns,
    st.integers(-1, 2),
    offsets,
    st.sampled_from([b"", b"xy"]),
    st.none() | st.builds(UniformHeaders, texts, texts),
)
broken = st.builds(
    cmd.Append,
    st.lists(subjects, max_size=2),
    st.sampled_from([b"", bytes(4), bytes(8), b"\1\0\0\0"]),
    columns,
    atomic=st.booleans(),
)
configs = st.builds(
    StreamConfig,
    name=st.just("S"),
    subjects=st.sampled_from([("a.>",), (), ("a.b",)]),
    retention=st.sampled_from(["limits", "limits", "limits", "interest"]),
    max_msgs=st.sampled_from([-1, 2]),
    max_bytes=st.sampled_from([-1, 20]),
    max_msg_size=st.sampled_from([-1, 5]),
    max_msgs_per_subject=st.sampled_from([-1, 1]),
    discard=st.sampled_from(["old", "old", "new"]),
    sealed=st.sampled_from([False] * 5 + [True]),
    shards=st.sampled_from([1, 2]),
)


class Applied:
    """A machine and everything that its entries have written."""

    def __init__(self) -> None:
        self.shelf, self.store = Shelf(), RowStore()
        self.machine = StreamMachine(SHARD, self.shelf)
        self.index = 0

    def apply(self, *commands: cmd.Command) -> tuple[list[Result], list[object]]:
        """Apply one entry: its results, and what it writes."""
        self.index += 1
        writes, now_ns = Writes(), NOW_NS + self.index * HOUR_NS
        results = [self.machine.apply(self.index, now_ns, one, writes) for one in commands]
        self.store.write(writes.rows)
        stored: list[object] = []
        for _, block in writes.blocks:
            self.shelf.add(block)
            stored += [encode_block(block, self.index), block.columns.sizes().tolist()]
        return results, [*writes.rows, *stored, writes.trimmed, writes.reached]


def generally(command: cmd.Command) -> cmd.Command:
    """The same command, for which there is no short way: roll-ups are asked for, though none is."""
    if isinstance(command, cmd.Append) and command.rollups is None:
        return replace(command, rollups={})
    return command


PLAIN = StreamConfig(name="S", subjects=("a.>",))
B, C = Message("a.b", b"x"), Message("a.c", b"longer")
TWO = append_of([B, C])


@given(configs, st.lists(st.lists(usual | others | with_ids | broken, min_size=1, max_size=3)))
@example(PLAIN, [[append_of([B])]] * 3)
@example(PLAIN, [[TWO], [append_of([B] * 3), append_of([C, B, C])], [append_of([C] * 20)]])
@example(PLAIN, [[TWO], [replace(TWO, subjects=["a.b", "a.c", "a.d"])], [TWO]])
@example(PLAIN, [[TWO], [replace(TWO, subjects=["a.b"])], [replace(TWO, subject_index=b"")]])
@example(replace(PLAIN, max_msg_size=3), [[TWO], [TWO]])
@example(replace(PLAIN, subjects=("a.b",)), [[TWO], [TWO]])
def test_messages_are_applied_as_the_general_way_applies_them(
    config: StreamConfig, entries: list[list[cmd.Append]]
) -> None:
    short, general = Applied(), Applied()
    first = [configure(config), cmd.PutConsumer(consumer_config("C", filter_subjects=("a.b",)), 0)]
    assert short.apply(*first) == general.apply(*first)
    for entry in entries:
        assert short.apply(*entry) == general.apply(*map(generally, entry))
        assert picture(short.machine, ["one"]) == picture(general.machine, ["one"])
        assert short.store.rows == general.store.rows


@each(
    "messages",
    [
        [Message("a.b", b"x", {"Content-Type": ["text/plain"]})],
        [Message("a.b", b"x"), Message("a.b")],
        [Message("a.c", b"x"), Message("a.b"), Message("a.d")] * 20,
        [Message("a.b", b"x", {"A": ["1"]}), Message("a.c", b"x", {"B": ["2", "3"]})],
    ],
)
def test_usual_messages_take_the_short_way(messages: list[Message]) -> None:
    applied = Applied()
    applied.apply(configure(PLAIN))
    applied.apply(append_of([Message("a.b")]))  # finds out what the stream captures
    machine = applied.machine
    step = Step(applied.index + 1, NOW_NS, Writes())
    command = append_of(messages)
    assert append_plain(machine, step, machine.shard_config, generally(command)) is None
    block = append_plain(machine, step, machine.shard_config, command)
    assert block is not None
    assert block.base_seq == 2
    assert machine.counters.last_seq == 1 + len(messages)


@given(st.lists(published, min_size=1, max_size=4), st.booleans())
@example([PublishMessage("a.b", None, b"x")], False)
@example([PublishMessage("a.b", {"Content-Type": ["text/plain"]}, b"x")], False)
@example([PublishMessage("a.b", None, b"x"), PublishMessage("a.c", {"A": ["1"]}, b"y")], False)
@example([PublishMessage("a.b", None, b"x"), PublishMessage("a.b", None, b"")], True)
def test_messages_are_logged_as_an_entry_builder_logs_them(
    messages: list[PublishMessage], several: bool
) -> None:
    shards = [SHARD + several * at for at in range(len(messages))]
    outcomes: list[Outcome] = []
    requests = [
        AppendRequest.of(shard, message, outcomes.append)
        for shard, message in zip(shards, messages, strict=True)
    ]
    made = entry_of_plain(requests, NOW_NS, 5)
    if made is None:
        assert len({*shards}) > 1 or not all(message.is_plain for message in messages)
        return
    builder = EntryBuilder(NOW_NS, lambda _: KEY, 5)
    for request in requests:
        builder.take(request)
    context, parts = builder.finish()
    assert made[0].entry == context.entry
    data = encode_parts(NOW_NS, made[1], 5)
    assert data == encode_parts(NOW_NS, parts, 5)
    assert decode_entry(data) == made[0].entry
    made[0].resolve([Appended(7, len(messages))])
    assert outcomes == [[PubResult(7 + at)] for at in range(len(messages))]
