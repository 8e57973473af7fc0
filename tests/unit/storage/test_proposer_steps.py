"""Making and applying entries does not hold the event loop for long."""

import itertools

from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import Numbered, PublishMessage
from contrail_storage.core import commands as cmd
from contrail_storage.replica import proposer as proposing
from tests.unit.storage.test_proposer import MIB, Bench, messages, run, turn


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
