"""What a request counts in the queue and in an entry is never less than the bytes it is logged as.

Counted too low, entries of many requests outgrow what the log takes.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrail_common.columns.blocks import MessageColumns, columns_of
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.columns.sealed_columns import Seals
from contrail_common.model import TTL_NEVER, ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.entry_codec import (
    HEADER_BYTES,
    encode_command,
    encode_entry,
    encode_parts,
)
from contrail_storage.replica.entries import AppendRequest, CommandRequest, EntryBuilder
from contrail_storage.replica.proposer import SEQS_MAX, in_slices
from tests.unit.storage.test_proposer import KEY, Bench

HIGH = 1 << 62
NOW_NS = 1 << 60

texts = st.text(max_size=20)
headers = st.none() | st.dictionaries(texts, st.lists(texts, max_size=3), max_size=5)
expectations = st.none() | st.builds(
    Expected,
    stream=st.none() | texts,
    last_seq=st.none() | st.integers(0, HIGH),
    last_subject_seq=st.none() | st.integers(0, HIGH),
    last_subject_seq_subject=st.none() | texts,
    last_msg_id=st.none() | texts,
)
published = st.builds(
    PublishMessage,
    subject=texts,
    headers=headers,
    payload=st.binary(max_size=50),
    msg_id=st.none() | texts,
    expected=expectations,
    rollup=st.sampled_from([None, None, "sub", "all"]),
    ttl_ns=st.sampled_from([None, 1, HIGH, TTL_NEVER]),
)


def sealed(batch: MessageBatch) -> MessageBatch:
    """The same messages with cells in the place of their content, as a sealed stream has them."""
    plain = batch.columns.sizes()
    cells = columns_of([b"c" * (int(size) + 60) for size in plain], None)
    cells.seals = Seals.of([HIGH] * batch.count, plain)
    return msgspec.structs.replace(batch, columns=cells)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


many_headers = PublishMessage("a", {f"{at}": ["", ""] for at in range(200)}, b"")
no_values = PublishMessage("a", {"n" * 5_000: []}, b"")
long_expected = PublishMessage("a", None, b"", expected=Expected(stream="s" * 9_000))
wide_subject = PublishMessage("€" * 300, None, b"")


@pytest.mark.long
@given(
    st.lists(st.tuples(st.integers(1, 2), st.lists(published, min_size=1, max_size=6)), max_size=5)
)
@example([(1, [many_headers] * 3)])
@example([(1, [no_values, wide_subject]), (1, [many_headers])])
@example([(1, [long_expected] * 4), (1, [long_expected])])
def test_messages_count_at_least_what_they_take_in_an_entry(
    requests: list[tuple[int, list[PublishMessage]]],
) -> None:
    async def scene() -> None:
        for form in (MessageBatch.of, lambda some: sealed(MessageBatch.of(some))):
            builder = EntryBuilder(NOW_NS, lambda _: KEY)
            for shard, messages in requests:
                content = messages[0] if len(messages) == 1 else form(messages)
                request = AppendRequest.of(shard, content, lambda _: None)
                assert request.ends[-1] == request.size
                while not builder.take(request):
                    pass
            _, parts = builder.finish()
            assert len(encode_parts(NOW_NS, parts)) <= builder.size + HEADER_BYTES + 5

    run(scene)


def of_every_kind() -> list[cmd.Command]:
    """A command of each kind that is about as long as it comes."""
    stream = StreamConfig(name="S" * 255, subjects=tuple(f"{at}" * 100 for at in range(256)))
    seqs = np.arange(HIGH, HIGH + 4_096).tobytes()
    numbers = np.arange(4_096)
    far = numbers << 40, (numbers << 19).astype(np.uint32), numbers << 19
    columns = MessageColumns(1, bytes(4) + (1_000).to_bytes(4, "little"), bytes(1_000))
    ids = [f"{at:032x}" for at in range(1_000)]
    many = list(range(HIGH, HIGH + 5_000))
    header = ArchiveHeader(
        config=stream,
        incarnation="i" * 16,
        hash_key=bytes(32),
        created_ns=NOW_NS,
        first_seq=1,
        last_seq=HIGH,
        messages=HIGH,
        bytes=HIGH,
        last_time_ns=NOW_NS,
        last_id=bytes(16),
        digest=1,
        replaced=dict.fromkeys(map(str, range(2_000)), HIGH),
        next_subject=1,
        next_consumer=1,
    )
    return [
        cmd.Append(["a"], bytes(4), columns),
        cmd.NumberedAppend(["a"], bytes(4), columns, bytes(16), producer="p" * 255, number=HIGH),
        cmd.ConfigureStream(stream, "i" * 16, bytes(32)),
        cmd.DropStream(),
        cmd.Trim(HIGH, HIGH),
        cmd.ExpireAge(HIGH),
        cmd.Expire(seqs, seqs * 2, seqs),
        cmd.DeleteMessage(HIGH),
        cmd.Remove.of("purge", far[0], far[1], far[2]),
        cmd.PutConsumer(ConsumerConfig(name="red", durable=True), HIGH, bytes(1_200_000), HIGH),
        cmd.DropConsumer(HIGH),
        cmd.Deliver(HIGH, 1, many, HIGH),
        cmd.Advance(HIGH, 1, HIGH, HIGH, HIGH),
        cmd.Acknowledge(HIGH, 1, many, [("nak", seq, HIGH) for seq in many], {HIGH: "r" * 256}),
        cmd.DeliverAcked(HIGH, 1, many, HIGH, many),
        cmd.Exhaust(HIGH, 1, many),
        cmd.EnforceLimits(HIGH),
        cmd.EnforceInterest(HIGH),
        cmd.RestorePart([(1, bytes(300_000))], "none"),
        cmd.FinishRestore(header),
        cmd.NameKeys(seqs, seqs * 2),
        cmd.RetireKeys(seqs, HIGH),
        cmd.ShredKeys(seqs, HIGH),
        cmd.AcceptLoss("i" * 16, "r" * 1_000, True, HIGH, [(HIGH, HIGH)] * 100),
        cmd.ReserveStream("S", stream.subjects, "i" * 16),
        cmd.ListStream("S", stream.subjects, stream),
        cmd.RenewStream("S", "i" * 16),
        cmd.UnlistStream("S"),
        cmd.ReleaseStream("S"),
        cmd.CreateGroup(HIGH, ("n" * 64,) * 5),
        cmd.RecordErasure(
            "e" * 32, "S", tuple(range(64)), HIGH, ["n" * 64] * 5, HIGH, indexes={HIGH: HIGH}
        ),
        cmd.FinishErasures(ids, "n" * 16, HIGH),
        cmd.ReopenErasures("n" * 64),
        cmd.AssignShards("S", stream.subjects, "i" * 16, HIGH, 64),
        cmd.SkipNumbers(HIGH),
        cmd.NoteStart("n" * 64, HIGH, HIGH, HIGH, HIGH),
        cmd.RegisterNode("n" * 64, HIGH, bytes(16), HIGH),
    ]


def test_commands_of_every_kind_count_at_least_what_they_take_in_an_entry() -> None:
    async def scene() -> None:
        commands = of_every_kind()
        assert {type(each) for each in commands} == set(get_args(cmd.Command))
        bench = Bench()
        answers = []
        for command in commands:
            before = bench.proposer.queued_bytes
            answers.append(bench.proposer.command(1, command))
            whole = len(encode_entry(cmd.Entry(NOW_NS, [(HIGH, command)])))
            if len(in_slices(command)) == 1:
                assert bench.proposer.queued_bytes - before >= whole - 16
        await bench.commit_all()
        await asyncio.gather(*answers)
        assert bench.proposer.queued_bytes == 0
        logged = [command for entry in bench.decoded for _, command in entry.commands]
        assert logged == [part for command in commands for part in in_slices(command)]

    run(scene)


def test_long_commands_are_cut_into_slices_that_do_the_same() -> None:
    count = 2 * SEQS_MAX + 1
    seqs = list(range(1, count + 1))
    exhausted = in_slices(cmd.Exhaust(7, 1, seqs))
    assert [len(each.seqs) for each in exhausted if isinstance(each, cmd.Exhaust)] == [
        SEQS_MAX, SEQS_MAX, 1,
    ]  # fmt: skip
    others = [("term" if seq % 2 else "nak", seq, seq) for seq in seqs]
    reasons = {1: "first", count: "last"}
    cut = in_slices(cmd.Acknowledge(7, 1, seqs, others, reasons))  # type: ignore[arg-type]
    slices = [each for each in cut if isinstance(each, cmd.Acknowledge)]
    assert max(len(each.acked) + len(each.others) for each in slices) == SEQS_MAX
    assert [seq for each in slices for seq in each.acked] == seqs
    assert [other for each in slices for other in each.others] == others
    assert [each.reasons for each in slices[-3:]] == [{1: "first"}, {}, {count: "last"}]


def test_entry_request_holds_its_command_as_it_is_logged() -> None:
    async def scene() -> None:
        command = cmd.Trim(HIGH, HIGH)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        request = CommandRequest(5, command, encode_command(command), future)
        builder = EntryBuilder(NOW_NS, lambda _: KEY)
        builder.add(request)
        _, parts = builder.finish()
        assert encode_parts(NOW_NS, parts) == encode_entry(cmd.Entry(NOW_NS, [(5, command)]))

    run(scene)
