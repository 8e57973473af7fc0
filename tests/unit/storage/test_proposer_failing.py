"""Entries that cannot be made or logged: who waits for them is told, and the others go on."""

import asyncio
from pathlib import Path
from typing import Final

import pytest

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import Expected, PublishMessage, StreamConfig
from contrail_link.contract.publish import PubResult
from contrail_link.publishing import publish
from contrail_storage.core import commands as cmd
from contrail_storage.core.entry_codec import encode_command
from contrail_storage.core.results import Done
from contrail_storage.link import LocalLink
from contrail_storage.node import StorageNode
from contrail_storage.replica import proposer as proposing
from contrail_storage.replica.entries import COMMAND_BYTES_MAX, LOGGED_BYTES_MAX
from contrail_storage.wal.log_options import LogOptions
from tests.unit.storage.dispatcher_rig import HandLoop, run_by_hand
from tests.unit.storage.test_open_damaged_node import play
from tests.unit.storage.test_proposer import MIB, Bench, messages, refused_with, run, turn

QUEUE_BYTES: Final = 64 << 10


@pytest.mark.parametrize(
    ("fault", "spec"),
    [
        (ValueError("an entry must have 1 to 4194304 bytes"), errors.OUTCOME_UNKNOWN),
        (RuntimeError("whatever it is"), errors.OUTCOME_UNKNOWN),
        (None, errors.INTERNAL),
    ],
)
def test_entry_that_fails_on_its_way_into_the_log_leaves_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, spec: errors.ErrorSpec
) -> None:
    """Unknown where the log was asked to take it; without a ``fault`` it is not even encoded."""

    async def scene() -> None:
        bench = Bench()
        command = bench.proposer.command(1, cmd.DropStream())
        published = bench.append(1, messages(3))
        with monkeypatch.context() as patch:
            if fault is not None:
                patch.setattr(bench.group, "propose", _raising(fault))
            else:
                patch.setattr(proposing, "encode_parts", _raising(TypeError("not encoded")))
            await turn()
        with refused_with(spec) as found:
            await command
        assert found.value.applied is (None if spec is errors.OUTCOME_UNKNOWN else False)
        assert [result.code for result in await published] == [spec.code] * 3
        again = bench.append(1, messages(1))
        await bench.commit_all()
        assert [result.seq for result in await again] == [1]
        assert bench.proposer.queued_bytes == 0

    run(scene())


def _raising(fault: Exception) -> object:
    def fail(*_: object) -> None:
        raise fault

    return fail


def _with_ids(batch: list[PublishMessage]) -> list[PublishMessage]:
    for at, message in enumerate(batch):
        message.msg_id = str(at)
    return batch


def test_messages_that_make_no_command_are_refused_alone() -> None:
    async def scene() -> None:
        bench = Bench()

        def no_key(shard: int) -> bytes:
            if shard == 2:
                raise KeyError(shard)
            return b"k" * 32

        bench.hash_key = no_key
        first = bench.append(1, _with_ids(messages(2)))
        broken = bench.append(2, _with_ids(messages(2_500)))
        last = bench.proposer.command(1, cmd.DropStream())
        await bench.commit_all()
        assert len(await first) == 2
        assert {result.code for result in await broken} == {errors.INTERNAL.code}
        assert await last == Done()
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_batch_that_cannot_be_cut_is_refused_alone() -> None:
    async def scene() -> None:
        bench = Bench()
        broken = MessageBatch.of(messages(3_000))
        broken.subject_index = broken.subject_index[:-1]
        answers = bench.append(1, broken)
        other = bench.append(1, messages(1))
        await bench.commit_all()
        with refused_with(errors.INTERNAL):
            await answers
        assert len(await other) == 1
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_command_that_cannot_be_encoded_is_refused_at_once() -> None:
    async def scene() -> None:
        bench = Bench()
        with refused_with(errors.INTERNAL) as found:
            bench.proposer.command(1, cmd.Trim(1 << 70, 1))
        assert found.value.applied is False
        assert bench.proposer.queued_bytes == 0

    run(scene())


@pytest.mark.parametrize("over", [0, 1])
def test_command_as_large_as_an_entry_takes_and_one_byte_larger(over: int) -> None:
    async def scene() -> None:
        bench = Bench()
        empty = cmd.RestorePart([(1, bytes(MIB))], "none")
        head = len(encode_command(empty)) - MIB
        part = cmd.RestorePart([(1, bytes(COMMAND_BYTES_MAX - head + over))], "none")
        if over:
            with refused_with(errors.BODY_TOO_LARGE):
                bench.proposer.command(1, part)
            return
        small = bench.proposer.command(1, cmd.DropStream())
        large = bench.proposer.command(1, part)
        await bench.commit_all()
        assert [await small, await large] == [Done(), Done()]
        assert len(bench.group.entries) == 2
        assert max(map(len, bench.group.entries)) <= LOGGED_BYTES_MAX

    run(scene())


def test_message_or_atomic_batch_that_no_entry_takes_is_refused_at_once() -> None:
    async def scene() -> None:
        bench = Bench()
        with refused_with(errors.MESSAGE_TOO_LARGE):
            bench.append(1, [*messages(2), PublishMessage("a", None, bytes(4 * MIB))])
        atomic = MessageBatch.of(messages(5, size=MIB))
        atomic.atomic = True
        with refused_with(errors.ATOMIC_TOO_LARGE):
            bench.append(1, atomic)
        assert bench.proposer.queued_bytes == 0

    run(scene())


def test_expectations_count_toward_the_bound_of_an_entry() -> None:
    async def scene() -> None:
        bench = Bench()
        heavy = [
            PublishMessage("a", None, b"x", expected=Expected(stream="s" * 8_000))
            for _ in range(2_000)
        ]
        answers = bench.append(1, heavy)
        await bench.commit_all()
        assert max(map(len, bench.group.entries)) < MIB
        assert [result.seq for result in await answers] == list(range(1, 2_001))

    run(scene())


def test_slices_of_which_some_are_lost_have_an_unknown_outcome() -> None:
    async def scene() -> None:
        bench = Bench()
        lost = bench.proposer.command(1, cmd.Exhaust(1, 1, list(range(1, 6_001))))
        await turn()
        bench.commit_one()
        await turn()
        bench.lose_one()
        await bench.commit_all()
        with refused_with(errors.OUTCOME_UNKNOWN):
            await lost
        whole = bench.proposer.command(1, cmd.Exhaust(1, 1, list(range(1, 6_001))))
        await bench.commit_all()
        assert await whole == Done()

    run(scene())


def test_slices_are_taken_all_or_none() -> None:
    async def scene() -> None:
        bench = Bench()
        filler = bench.append(1, messages(63, size=MIB))
        with refused_with(errors.OVERLOADED):
            bench.proposer.command(1, cmd.Exhaust(1, 1, list(range(1 << 40, (1 << 40) + 200_000))))
        await bench.commit_all()
        assert all(
            isinstance(command, cmd.Append)
            for entry in bench.decoded
            for _, command in entry.commands
        )
        assert len(await filler) == 63

    run(scene())


def test_proposer_that_does_not_get_on_says_so() -> None:
    async def scene() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, HandLoop)
        bench = Bench()
        loop.now_s += 100
        assert bench.proposer.problem == ""
        answers = bench.append(1, messages(1))
        assert bench.proposer.problem == ""
        await turn()
        loop.now_s += 11
        assert (
            bench.proposer.problem
            == "requests have been waiting for 11 s: the log does not confirm writes"
        )
        bench.commit_one()
        assert bench.proposer.problem == ""
        bench.unwritten_bytes = proposing.UNWRITTEN_BYTES_MAX + 1
        waiting = bench.append(1, messages(1))
        await turn()
        loop.now_s += 12
        assert (
            bench.proposer.problem
            == "requests have been waiting for 12 s: the store cannot keep up with the log"
        )
        bench.unwritten_bytes = 0
        assert (
            bench.proposer.problem
            == "requests have been waiting for 12 s: no entry reaches the log"
        )
        bench.proposer.resume()
        await bench.commit_all()
        assert bench.proposer.problem == ""
        assert [await answers, await waiting] == [[PubResult(1)], [PubResult(2)]]

    run_by_hand(scene())


def test_refusal_reaches_every_request_when_the_log_is_lost() -> None:
    async def scene() -> None:
        bench = Bench()
        large = bench.proposer.command(1, cmd.Exhaust(1, 1, list(range(1, 6_001))))
        bench.proposer.fail_all()
        with pytest.raises(ApiError) as found:
            await large
        assert found.value.spec is errors.NOT_READY
        assert found.value.applied is False

    run(scene())


def test_busy_group_says_that_too_much_waits(tmp_path: Path) -> None:
    """An entry that the queue to the disk has no room for may be sent again: nothing is stored."""

    async def scene(node: StorageNode, link: LocalLink) -> None:
        await link.put_stream(StreamConfig(name="S", subjects=("s",)), "create", None, False)
        large = PublishMessage("s", None, bytes(QUEUE_BYTES))
        single = await publish(link, "S", [large])
        assert [one.code for one in single.results] == [errors.OVERLOADED.code]
        shard = node.streams.shard("S").machine.shard_id
        command = cmd.Remove("rollup", finished={"s" * QUEUE_BYTES: 1})
        with pytest.raises(ApiError) as caught:
            await node.shard_log.command(shard, command)
        assert caught.value.spec is errors.OVERLOADED
        assert (caught.value.applied, caught.value.retry_after_s) == (False, 1)
        assert (await publish(link, "S", [PublishMessage("s", None, b"small")])).results[0].seq == 1

    play(tmp_path, scene, log=LogOptions(queue_bytes=QUEUE_BYTES))
