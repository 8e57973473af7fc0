"""How entries follow each other, and that making and applying them takes short steps."""

import itertools

import pytest

from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import Numbered, PublishMessage
from contrail_storage.core import commands as cmd
from contrail_storage.replica import proposer as proposing
from tests.unit.storage.test_proposer import MIB, Bench, messages, payloads_of, run, turn


def test_entry_has_few_commands_that_take_long_to_apply() -> None:
    """All of them are applied in one step: 400 batches of one message with an id took 50 ms."""

    async def scene() -> None:
        for kind in ("ids", "atomic", "numbered", "deletes"):
            bench, sent = Bench(), []
            for number in range(500):
                batch = MessageBatch.of([PublishMessage("a", None, b"x", msg_id=f"{number}")])
                batch.atomic = kind == "atomic"
                batch.numbered = Numbered(f"p{number}", 1) if kind == "numbered" else None
                shard = number if kind == "ids" else 1
                if kind == "deletes":
                    bench.proposer.command(1, cmd.DeleteMessage(number))
                else:
                    sent.append(bench.append(shard, batch))
            await bench.commit_all()
            counts = [len(entry.commands) for entry in bench.decoded]
            assert (sum(counts), max(counts) <= (400 if kind == "deletes" else 64)) == (500, True)
            assert all(one.done() for one in sent)

    run(scene())


def test_full_entries_follow_each_other_without_waiting_up_to_a_bound() -> None:
    async def scene() -> None:
        bench = Bench()
        for _ in range(30):
            bench.append(1, messages(2_000, size=500))
        await turn()
        assert len(bench.group.in_flight) > 2
        assert bench.group.outstanding_bytes < proposing.OUTSTANDING_BYTES_MAX + MIB
        await bench.commit_all()
        assert bench.last_seqs == {1: 60_000}

    run(scene())


def test_many_full_entries_are_made_in_several_turns() -> None:
    async def scene() -> None:
        bench = Bench()
        appended = bench.append(1, messages(40, size=64 * 1024))
        made = [0]
        for _ in range(8):
            await turn()
            made.append(len(bench.group.entries))
        assert max(after - before for before, after in itertools.pairwise(made)) <= 4
        # None of them waits for another to be committed.
        assert sum(map(len, bench.group.entries)) > 40 * 64 * 1024
        await bench.commit_all()
        assert [result.seq for result in await appended] == list(range(1, 41))

    run(scene())


# Entries that wait for others --------------------------------------------------------------------


@pytest.mark.parametrize(("first", "made"), [(2, [2, 5]), (1, [1, 1, 4])])
def test_while_entries_are_on_their_way_new_requests_wait_and_join(
    first: int, made: list[int]
) -> None:
    async def scene() -> None:
        bench = Bench()
        for count in [first, 1, 1, 1, 1, 1]:
            bench.append(1, messages(count))
            await turn()
        assert len(bench.group.entries) == len(made) - 1
        bench.commit_one()
        await turn()
        assert [len(payloads_of(each.commands[0][1])) for each in bench.decoded] == made

    run(scene())


def test_second_entry_follows_at_once_if_it_is_large_and_a_third_if_it_is_full() -> None:
    async def scene() -> None:
        bench = Bench()
        large, full = proposing.SECOND_BYTES_MIN, proposing.ENTRY_BYTES_MAX
        for size, count in [(1, 1), (large - 1_000, 1), (1_000, 2), (large, 2)]:
            bench.append(1, [*messages(1, size=size), *messages(1)])
            await turn()
            assert len(bench.group.in_flight) == count
        bench.append(1, [*messages(1, size=full), *messages(1)])
        await turn()
        assert len(bench.group.in_flight) > 2
        await bench.commit_all()
        assert bench.last_seqs == {1: 10}

    run(scene())


@pytest.mark.parametrize("first", ["messages", "records"])
def test_messages_and_records_of_deliveries_do_not_wait_for_each_other(first: str) -> None:
    async def scene() -> None:
        bench = Bench()
        record = cmd.Deliver(1, 1, [1], 2)
        for at in range(6):
            if (at % 2 == 0) == (first == "messages"):
                bench.append(1, messages(2))
            else:
                bench.proposer.command(1, record)
            await turn()
        kinds = [cmd.Append, cmd.Deliver] if first == "messages" else [cmd.Deliver, cmd.Append]
        assert [[type(each) for _, each in one.commands] for one in bench.decoded] == [
            [kinds[0]], [kinds[1]],
        ]  # fmt: skip
        bench.commit_one()
        await turn()
        assert len(bench.group.entries) == 3
        # While messages are under way, a record goes without those behind it.
        assert len(bench.decoded[2].commands) == (4 if first == "messages" else 1)
        await bench.commit_all()

    run(scene())


def test_messages_behind_a_command_wait_for_those_under_way_and_the_command_does_not() -> None:
    async def scene() -> None:
        bench = Bench()
        for number in range(20):
            bench.proposer.command(1, cmd.Trim(number, 1))
            bench.append(1, messages(2))
            await turn()
        # Both kinds are in one entry only while no messages are under way.
        made = [[type(each) for _, each in one.commands] for one in bench.decoded]
        assert made == [[cmd.Trim, cmd.Append], [cmd.Trim]]
        bench.commit_one()
        await turn()
        assert [type(each) for _, each in bench.decoded[2].commands[:2]] == [cmd.Append, cmd.Trim]
        await bench.commit_all()
        kinds = [type(each) for one in bench.decoded for _, each in one.commands]
        assert kinds == [cmd.Trim, cmd.Append] * 20
        assert bench.last_seqs == {1: 40}
        assert bench.proposer._in_flight == [0, 0]

    run(scene())
