"""From requests to entries: joined, bounded, in order, and every message gets its own answer."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError, ErrorSpec
from contrail_common.model import Expected, PublishMessage
from contrail_link.contract.publish import PublishContent, PubResult
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import decode_entry, encode_entry
from contrail_storage.core.expected import HashedExpected
from contrail_storage.core.id_index import NO_ID
from contrail_storage.core.results import Appended, Done, Refused, Result
from contrail_storage.replica import entries
from contrail_storage.replica import proposer as proposing
from contrail_storage.replica.entries import EntryContext, Outcome, contents_of
from contrail_storage.replica.message_ids import hash_id

KEY = b"k" * 32
BLOCK_MESSAGES = 2_000
MIB = 1 << 20


class LogRefusedError(Exception):
    """The log does not take the entry."""


class HandGroup:
    """A group whose entries are committed, or lost, when a test says so."""

    is_alone, is_handing_over, leader = True, False, ""

    def __init__(self) -> None:
        self.is_leader, self.refusing, self.outstanding_bytes = True, False, 0
        self.entries: list[bytes] = []
        self.in_flight: list[tuple[bytes, EntryContext]] = []

    def propose(self, data: bytes, context: object) -> int:
        if self.refusing:
            raise LogRefusedError
        assert isinstance(context, EntryContext)
        assert encode_entry(decode_entry(data)) == data
        self.entries.append(data)
        self.in_flight.append((data, context))
        self.outstanding_bytes += len(data)
        return len(self.entries)


class Bench:
    """A proposer over a hand-driven group, and shards that give sequences."""

    def __init__(self) -> None:
        self.group = HandGroup()
        self.unwritten_bytes = 0
        self.hash_key: Callable[[int], bytes] = lambda _: KEY
        self.last_seqs: dict[int, int] = {}
        self.proposer = proposing.Proposer(self.group, lambda: 123, self, (LogRefusedError,))

    def append(self, shard: int, content: PublishContent) -> asyncio.Future[list[PubResult]]:
        """Propose messages; the future gives what their publisher would get."""
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()

        def settle(outcome: Outcome) -> None:
            if future.cancelled():
                return
            if isinstance(outcome, ApiError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if isinstance(content, list) and len(content) == 1:
            self.proposer.append(shard, content[0], settle)
        else:
            self.proposer.append(shard, *contents_of(content, settle))
        return future

    def answer(self, shard: int, command: cmd.Command) -> Result:
        if not isinstance(command, cmd.Append):
            return Done()
        first_seq = self.last_seqs.get(shard, 0) + 1
        self.last_seqs[shard] = first_seq + command.columns.count - 1
        return Appended(first_seq, command.columns.count)

    def commit_one(self, answer: Callable[[int, cmd.Command], Result] | None = None) -> None:
        data, context = self.group.in_flight.pop(0)
        self.group.outstanding_bytes -= len(data)
        entry = decode_entry(data)
        context.resolve([(answer or self.answer)(*each) for each in entry.commands])
        self.proposer.settled(context)

    def lose_one(self) -> None:
        data, context = self.group.in_flight.pop(0)
        self.group.outstanding_bytes -= len(data)
        context.unknown()
        self.proposer.settled(context)

    async def commit_all(self) -> None:
        await turn()
        while self.group.in_flight:
            self.commit_one()
            await turn()

    @property
    def decoded(self) -> list[cmd.Entry]:
        return [decode_entry(data) for data in self.group.entries]


async def turn() -> None:
    """Let what is scheduled run."""
    await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def messages(count: int, size: int = 10, subject: str = "a") -> list[PublishMessage]:
    return [PublishMessage(subject, None, b"%06d" % at + b"x" * (size - 6)) for at in range(count)]


def payloads_of(command: cmd.Command) -> list[bytes]:
    assert isinstance(command, cmd.Append)
    columns = command.columns
    ends = np.frombuffer(columns.offsets, np.uint32).tolist()
    return [columns.payload[low:high] for low, high in itertools.pairwise(ends)]


def refused_with(spec: ErrorSpec) -> Any:
    return pytest.raises(ApiError, match=spec.name)


def test_requests_that_wait_together_become_one_command_of_one_entry() -> None:
    async def scene() -> None:
        bench = Bench()
        first = bench.append(1, messages(3))
        second = bench.append(1, messages(2, subject="b"))
        await bench.commit_all()
        [entry] = bench.decoded
        [(shard, command)] = entry.commands
        assert (shard, entry.time_ns) == (1, 123)
        assert isinstance(command, cmd.Append)
        assert command.subjects == ["a", "b"]
        assert np.frombuffer(command.subject_index, np.uint32).tolist() == [0, 0, 0, 1, 1]
        assert [result.seq for result in await first] == [1, 2, 3]
        assert [result.seq for result in await second] == [4, 5]
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_messages_of_several_shards_share_an_entry_in_a_command_each() -> None:
    async def scene() -> None:
        bench = Bench()
        for shard in (1, 2, 1):
            bench.append(shard, messages(2))
        await bench.commit_all()
        [entry] = bench.decoded
        assert {shard: len(payloads_of(command)) for shard, command in entry.commands} == {
            1: 4,
            2: 2,
        }

    run(scene())


def test_ids_and_expectations_stand_hashed_beside_their_messages() -> None:
    async def scene() -> None:
        bench = Bench()
        plain, with_id, with_expected = messages(3)
        with_id.msg_id = "one"
        with_expected.expected = Expected(stream="S", last_seq=4, last_msg_id="one")
        bench.append(1, [plain, with_id, with_expected])
        await bench.commit_all()
        [(_, command)] = bench.decoded[0].commands
        assert isinstance(command, cmd.Append)
        assert command.ids == NO_ID + hash_id("one", KEY) + NO_ID
        assert command.expected == {2: HashedExpected("S", 4, None, None, hash_id("one", KEY))}
        assert command.is_sound()

    run(scene())


def test_expected_empty_id_stands_for_a_last_message_without_one() -> None:
    async def scene() -> None:
        bench = Bench()
        [message] = messages(1)
        message.expected = Expected(last_msg_id="")
        bench.append(1, [message])
        await bench.commit_all()
        [(_, command)] = bench.decoded[0].commands
        assert isinstance(command, cmd.Append)
        assert command.expected == {0: HashedExpected(last_id=NO_ID)}

    run(scene())


def test_large_request_is_split_over_entries_and_answered_as_one_in_order() -> None:
    async def scene() -> None:
        bench = Bench()
        before = bench.append(1, messages(10))
        large = bench.append(1, messages(10_000))
        after = bench.append(1, messages(10))
        await bench.commit_all()
        assert [result.seq for result in await before] == list(range(1, 11))
        assert [result.seq for result in await large] == list(range(11, 10_011))
        assert [result.seq for result in await after] == list(range(10_011, 10_021))
        stored = [payload for entry in bench.decoded for payload in payloads_of_entry(entry)]
        given = [message.payload for message in messages(10_000)]
        assert stored == [*given[:10], *given, *given[:10]]
        assert max(len(payloads_of_entry(entry)) for entry in bench.decoded) == BLOCK_MESSAGES

    run(scene())


def test_batch_is_answered_in_runs_over_the_entries_it_is_split_into() -> None:
    async def scene() -> None:
        bench = Bench()
        before = bench.append(1, messages(10))
        large = bench.append(1, MessageBatch.of(messages(10_000)))
        await bench.commit_all()
        assert len(await before) == 10
        runs = await large
        assert len(runs) <= len(bench.decoded) + 1
        assert [result.seq for run in runs for result in run.each()] == list(range(11, 10_011))
        stored = [payload for entry in bench.decoded for payload in payloads_of_entry(entry)]
        assert stored[10:] == [message.payload for message in messages(10_000)]

    run(scene())


def test_single_messages_and_batches_that_wait_together_keep_their_order() -> None:
    async def scene() -> None:
        bench = Bench()
        parts = [messages(1, subject="a"), messages(3, subject="b"), messages(1), messages(1)]
        parts[1][1].msg_id = "one"
        parts[2][0].expected = Expected(last_seq=4)
        futures = [
            bench.append(1, part) if len(part) == 1 else bench.append(1, MessageBatch.of(part))
            for part in parts
        ]
        await bench.commit_all()
        [(_, command)] = bench.decoded[0].commands
        assert isinstance(command, cmd.Append)
        assert command.subjects == ["a", "b"]
        assert np.frombuffer(command.subject_index, np.uint32).tolist() == [0, 1, 1, 1, 0, 0]
        assert command.ids == NO_ID * 2 + hash_id("one", KEY) + NO_ID * 3
        assert command.expected == {4: HashedExpected(last_seq=4)}
        assert [await each for each in futures] == [
            [PubResult(1)], [PubResult(2, count=3)], [PubResult(5)], [PubResult(6)],
        ]  # fmt: skip

    run(scene())


def test_runs_of_a_batch_end_where_a_message_was_not_stored() -> None:
    async def scene() -> None:
        bench = Bench()
        future = bench.append(1, MessageBatch.of(messages(6)))
        await turn()
        refused = Refused(errors.WRONG_LAST_SEQUENCE.code)
        bench.commit_one(lambda *_: Appended(50, 6, {2: 17, 3: 18, 5: refused}))
        assert await future == [
            PubResult(50, count=2),
            PubResult(17, duplicate=True),
            PubResult(18, duplicate=True),
            PubResult(52),
            PubResult(0, code=refused.code),
        ]

    run(scene())


def test_part_of_a_batch_that_is_lost_is_one_run() -> None:
    async def scene() -> None:
        bench = Bench()
        future = bench.append(1, MessageBatch.of(messages(6_000)))
        await turn()
        bench.commit_one()
        bench.lose_one()
        await bench.commit_all()
        runs = await future
        assert [(run.code, run.count) for run in runs] == [
            (0, 2_000), (errors.OUTCOME_UNKNOWN.code, 2_000), (0, 2_000),
        ]  # fmt: skip

    run(scene())


def payloads_of_entry(entry: cmd.Entry) -> list[bytes]:
    return [payload for _, command in entry.commands for payload in payloads_of(command)]


sizes = st.sampled_from([6, 100, 5_000, 60_000, 130_000, 200_000])


@given(st.lists(st.tuples(st.integers(1, 3), st.lists(sizes, min_size=1, max_size=8)), max_size=12))
def test_entry_holds_no_more_than_its_bound_or_one_large_message(
    requests: list[tuple[int, list[int]]],
) -> None:
    async def scene() -> None:
        bench = Bench()
        for shard, payload_sizes in requests:
            bench.append(shard, [PublishMessage("a", None, b"x" * size) for size in payload_sizes])
        await bench.commit_all()
        for data, entry in zip(bench.group.entries, bench.decoded, strict=True):
            blocks = [sum(map(len, payloads_of(command))) for _, command in entry.commands]
            assert all(
                total <= entries.ENTRY_BYTES_MAX or len(payloads_of(command)) == 1
                for total, (_, command) in zip(blocks, entry.commands, strict=True)
            )
            # It closes with the block that reaches the bound.
            assert len(data) - max(blocks) < entries.ENTRY_BYTES_MAX + 4_096

    run(scene())


def test_message_above_the_bound_of_an_entry_has_one_to_itself() -> None:
    async def scene() -> None:
        bench = Bench()
        small = bench.append(1, messages(3))
        large = bench.append(1, messages(1, size=3 * MIB))
        other = bench.append(2, messages(1))
        await bench.commit_all()
        found = [[len(payloads_of(each)) for _, each in entry.commands] for entry in bench.decoded]
        assert found == [[3], [1], [1]]
        assert max(map(len, bench.group.entries)) < 4 * MIB
        assert [result.seq for future in (small, large, other) for result in await future] == [
            1, 2, 3, 4, 1,
        ]  # fmt: skip

    run(scene())


def test_headers_and_subjects_count_toward_the_bound_of_an_entry() -> None:
    async def scene() -> None:
        bench = Bench()
        heavy = [PublishMessage("s" * 1_000, {"Name": ["v" * 60_000]}, b"") for _ in range(100)]
        bench.append(1, heavy)
        await bench.commit_all()
        assert max(map(len, bench.group.entries)) < 2 * entries.ENTRY_BYTES_MAX

    run(scene())


steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "command", "commit", "turn"]),
        st.integers(1, 3),
        st.sampled_from([1, 2, 700, 1_900]),
    ),
    max_size=25,
)


@given(steps)
def test_order_of_commands_and_messages_of_a_shard_is_kept(
    script: list[tuple[str, int, int]],
) -> None:
    async def scene() -> None:
        bench = Bench()
        sent: dict[int, list[object]] = {1: [], 2: [], 3: []}
        for number, (kind, shard, count) in enumerate(script):
            if kind == "append":
                batch = [PublishMessage("a", None, b"%d-%d" % (number, at)) for at in range(count)]
                sent[shard] += [message.payload for message in batch]
                bench.append(shard, batch)
            elif kind == "command":
                sent[shard].append(number)
                bench.proposer.command(shard, cmd.Trim(number, 1))
            elif kind == "commit" and bench.group.in_flight:
                bench.commit_one()
            else:
                await turn()
        await bench.commit_all()
        found: dict[int, list[object]] = {1: [], 2: [], 3: []}
        for entry in bench.decoded:
            for shard, command in entry.commands:
                if isinstance(command, cmd.Trim):
                    found[shard].append(command.to_seq)
                else:
                    found[shard] += payloads_of(command)
        assert found == sent
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_each_message_gets_its_own_outcome_across_joined_requests() -> None:
    async def scene() -> None:
        bench = Bench()
        first = bench.append(1, messages(2))
        second = bench.append(1, messages(3))
        await turn()
        refused = Refused(errors.WRONG_LAST_SEQUENCE.code, "wrong last sequence: 7")
        bench.commit_one(lambda *_: Appended(50, 5, {0: refused, 3: 17}))
        assert await first == [
            PubResult(0, code=refused.code, detail=refused.detail),
            PubResult(50),
        ]
        assert await second == [PubResult(51), PubResult(17, duplicate=True), PubResult(52)]

    run(scene())


def test_refusal_of_a_whole_command_is_the_outcome_of_each_of_its_messages() -> None:
    async def scene() -> None:
        bench = Bench()
        future = bench.append(1, messages(2))
        await turn()
        bench.commit_one(lambda *_: Refused(errors.STREAM_SEALED.code))
        assert [result.code for result in await future] == [errors.STREAM_SEALED.code] * 2

    run(scene())


def test_when_one_part_is_lost_only_its_messages_are_unknown() -> None:
    async def scene() -> None:
        bench = Bench()
        future = bench.append(1, messages(6_000))
        await turn()
        bench.commit_one()
        bench.lose_one()
        await bench.commit_all()
        results = await future
        assert [result.seq for result in results[:2_000]] == list(range(1, 2_001))
        assert {result.code for result in results[2_000:4_000]} == {errors.OUTCOME_UNKNOWN.code}
        assert [result.seq for result in results[4_000:]] == list(range(2_001, 4_001))

    run(scene())


def test_command_that_is_lost_or_refused_by_the_log_says_so() -> None:
    async def scene() -> None:
        bench = Bench()
        lost = bench.proposer.command(1, cmd.DropStream())
        await turn()
        bench.lose_one()
        with refused_with(errors.OUTCOME_UNKNOWN):
            await lost
        bench.group.refusing = True
        refused = bench.proposer.command(1, cmd.DropStream())
        published = bench.append(1, messages(1))
        with refused_with(errors.NOT_READY) as found:
            await refused
        assert found.value.applied is False
        assert [result.code for result in await published] == [errors.NOT_READY.code]
        bench.group.refusing = False
        again = bench.proposer.command(1, cmd.DropStream())
        await bench.commit_all()
        assert await again == Done()

    run(scene())


def test_overload_is_refused_at_once_and_leaves_nothing_behind() -> None:
    async def scene() -> None:
        bench = Bench()
        accepted = []
        with refused_with(errors.OVERLOADED) as found:
            for _ in range(100):
                accepted.append(bench.append(1, messages(1, size=MIB)))
        assert found.value.applied is False
        assert len(accepted) == 63
        queued = bench.proposer.queued_bytes
        with refused_with(errors.OVERLOADED):
            bench.append(1, messages(2, size=MIB))
        assert bench.proposer.queued_bytes == queued <= proposing.QUEUE_BYTES_MAX
        await bench.commit_all()
        assert bench.last_seqs == {1: 63}
        assert [[result.seq for result in await each] for each in accepted] == [
            [seq] for seq in range(1, 64)
        ]

    run(scene())


def test_single_request_larger_than_the_queue_is_taken_when_nothing_waits() -> None:
    async def scene() -> None:
        bench = Bench()
        future = bench.append(1, messages(65, size=MIB))
        await bench.commit_all()
        assert len(await future) == 65

    run(scene())


def test_nothing_is_taken_without_leadership() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.group.is_leader = False
        with refused_with(errors.NOT_READY):
            bench.append(1, messages(1))
        with refused_with(errors.NOT_READY):
            bench.proposer.command(1, cmd.DropStream())
        await turn()
        assert bench.group.entries == []

    run(scene())


def test_when_leadership_is_lost_what_waits_was_not_applied() -> None:
    async def scene() -> None:
        bench = Bench()
        for _ in range(2):
            bench.append(1, messages(1))
            await turn()
        partly = bench.append(1, messages(1))
        bench.commit_one()
        waiting = bench.append(1, messages(1))
        command = bench.proposer.command(1, cmd.DropStream())
        bench.proposer.fail_all()
        for future in (partly, waiting, command):
            with refused_with(errors.NOT_READY):
                await future
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_part_of_a_request_that_was_proposed_makes_the_rest_unknown_when_it_fails() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.unwritten_bytes = 0
        future = bench.append(1, messages(5_000))
        await turn()
        assert len(bench.group.in_flight) == 2
        bench.proposer.fail_all()
        bench.commit_one()
        bench.commit_one()
        results = await future
        assert [result.seq for result in results[:4_000]] == list(range(1, 4_001))
        assert {result.code for result in results[4_000:]} == {errors.OUTCOME_UNKNOWN.code}

    run(scene())


def test_entries_wait_while_the_store_is_behind_and_continue_when_notified() -> None:
    async def scene() -> None:
        bench = Bench()
        bench.unwritten_bytes = proposing.UNWRITTEN_BYTES_MAX + 1
        future = bench.append(1, messages(1))
        await turn()
        assert bench.group.entries == []
        bench.unwritten_bytes = 0
        bench.proposer.resume()
        await bench.commit_all()
        assert [result.seq for result in await future] == [1]

    run(scene())


def test_caller_that_gave_up_does_not_disturb_the_others() -> None:
    async def scene() -> None:
        bench = Bench()
        gone = bench.append(1, messages(1))
        command = bench.proposer.command(1, cmd.DropStream())
        kept = bench.append(1, messages(1))
        gone.cancel()
        command.cancel()
        await bench.commit_all()
        assert [result.seq for result in await kept] == [2]

    run(scene())
