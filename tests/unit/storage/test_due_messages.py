"""What is due on a whole node: found in the store and the blocks, removed in slices."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import TTL_NEVER, Headers, PublishMessage, StreamConfig, StreamState
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract.read import LastRequest
from contrail_link.publishing import publish
from contrail_serve.groups import SingleMemberGroups
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.results import Result
from contrail_storage.core.stream.deadlines import NO_DEADLINE
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.link import LocalLink
from contrail_storage.node import NodeOptions, StorageNode
from contrail_storage.replica.shard import Shard
from contrail_storage.store.rocks_store import StoreCorruptError
from contrail_storage.upkeep import due_messages
from contrail_storage.upkeep.due_messages import DueMessages
from contrail_storage.upkeep.housekeeper import Housekeeper

PATIENCE_S = 60.0
TTL_NS = 100 * NS_PER_S
MARKER: Headers = {"Nats-Marker-Reason": ["MaxAge"], "Nats-TTL": ["1s"]}
Scene = Callable[["Stage"], Coroutine[Any, Any, None]]


class Stage:
    """A node whose time goes on as a test says: nothing is due but what it asks for."""

    def __init__(self, node: StorageNode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.link = LocalLink(node)
        self.commands: list[cmd.Expire] = []
        self._begun_ns, self._later_ns = node.clock.now(), 0
        node.shard_log.log_time_ns = self.now_ns
        self.due = DueMessages(
            node.reader, node.shard_log, node.blocks, node._store.scan, node.until_written
        )
        apply = StreamMachine.apply

        def noting(machine: StreamMachine, *asked: Any) -> Result:
            if isinstance(asked[2], cmd.Expire):
                self.commands.append(asked[2])
            return apply(machine, *asked)

        monkeypatch.setattr(StreamMachine, "apply", noting)

    def now_ns(self) -> int:
        return self._begun_ns + self._later_ns

    @property
    def shard(self) -> Shard:
        return self.node.streams.shard("S")

    async def state(self) -> StreamState:
        return (await self.link.stream_info("S")).state

    async def make(self, **fields: Any) -> None:
        config = StreamConfig(name="S", subjects=("s.>",), **{"allow_msg_ttl": True, **fields})
        await self.link.put_stream(config, "put", None, False)

    async def publish(self, *messages: PublishMessage) -> None:
        ack = await publish(self.link, "S", list(messages))
        assert [result.code for result in ack.results] == [0] * len(messages)

    async def after(self, later_s: float) -> None:
        """Remove what is due so much later."""
        self._later_ns = round(later_s * NS_PER_S)
        await self.due.remove(self.shard, self.now_ns())

    def live(self) -> list[int]:
        machine = self.shard.machine
        first_seq, last_seq = machine.counters.first_seq, machine.counters.last_seq
        return [seq for seq in range(first_seq, last_seq + 1) if machine.is_live(seq)]

    async def rows(self) -> int:
        await self.node.until_written()
        prefix = keys.shard_key(keys.DEADLINE, self.shard.machine.shard_id)
        return len(list(self.node._store.scan(prefix, keys.prefix_end(prefix))))

    async def headers(self, seq: int) -> Headers | None:
        return (await self.link.get_message("S", seq)).headers


def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    async def nothing(*_: object) -> None:
        pass

    @contextlib.asynccontextmanager
    async def running() -> AsyncIterator[StorageNode]:
        node = StorageNode.open(NodeOptions(tmp_path, merge_blocks=4), SingleMemberGroups())
        await node.start()
        try:
            yield node
        finally:
            await node.stop()

    async def whole() -> None:
        async with asyncio.timeout(PATIENCE_S), running() as node:
            await scene(Stage(node, monkeypatch))

    monkeypatch.setattr(Housekeeper, "tick", nothing)
    asyncio.run(whole())


def message(subject: str, ttl_ns: int | None = None, **headers: str) -> PublishMessage:
    given: Headers = {name.replace("_", "-"): [value] for name, value in headers.items()}
    return PublishMessage(subject, given or None, b"x", ttl_ns=ttl_ns)


# By TTL ------------------------------------------------------------------------------------------


def test_many_messages_go_in_slices_and_their_rows_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make()
        for turn in range(10):
            ttls = [TTL_NS if at % 4 else None for at in range(1_500)]
            await stage.publish(*[message(f"s.{turn}", ttl_ns) for ttl_ns in ttls])
        await stage.publish(message("s.late", 2 * TTL_NS))
        await stage.after(99)
        assert stage.commands == []
        await stage.after(101)
        counts = [len(each.seqs) // 8 for each in stage.commands]
        assert sum(counts) == 15_000 * 3 // 4
        assert len(counts) > 1
        assert max(counts) <= 4_096
        assert (await stage.state()).messages == 15_000 // 4 + 1
        assert await stage.rows() == 1
        assert 98 < (stage.shard.machine.deadlines.earliest_ns - stage.now_ns()) / NS_PER_S < 100
        await stage.after(201)
        assert await stage.rows() == 0
        assert stage.shard.machine.deadlines.earliest_ns == NO_DEADLINE

    play(tmp_path, monkeypatch, scene)


def test_command_makes_apply_look_into_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_messages, "_BLOCKS_MAX", 3)
    monkeypatch.setattr(due_messages, "_ROWS_MAX", 5)

    async def scene(stage: Stage) -> None:
        await stage.make()
        for _ in range(20):
            ttls = [TTL_NS, *[None] * 1_199]
            await stage.publish(*[message("s.a", ttl_ns) for ttl_ns in ttls])
        await stage.after(101)
        assert max(len(each.seqs) // 8 for each in stage.commands) == 3
        assert (await stage.state()).messages == 20 * 1_199
        assert await stage.rows() == 0

    play(tmp_path, monkeypatch, scene)


def test_newest_messages_are_removed_far_above_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make()
        await stage.publish(*[message(f"s.{at % 3}") for at in range(6)])  # 1 to 6
        await stage.publish(*[message("s.0", TTL_NS)], message("s.1"), message("s.2"))  # 7 to 9
        for _ in range(5):
            await stage.publish(*[message("s.filling") for _ in range(1_500)])
        last = stage.shard.machine.counters.last_seq
        await stage.publish(*[message(f"s.{at % 3}", TTL_NS) for at in range(6)])
        await stage.link.delete_message("S", 9)
        await stage.link.delete_message("S", 6)
        await stage.after(101)
        table = stage.shard.machine.subjects
        requests = [LastRequest(stream="S", subject=f"s.{at}") for at in range(3)]
        pages = [(await stage.link.last_messages(each))[0] for each in requests]
        assert [one.seq for page in pages for one in page] == [4, 8, 3]
        assert [table.count(f"s.{at}") for at in range(3)] == [2, 3, 1]
        assert stage.live()[-1] == last
        assert len(stage.commands) == 1

    play(tmp_path, monkeypatch, scene)


def test_message_that_comes_between_look_and_removal_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S, max_msgs_per_subject=3)
        await stage.publish(message("s.a"), message("s.b", TTL_NS), message("s.a", TTL_NS))
        look = DueMessages._parts

        async def slow_look(due: DueMessages, shard: Shard, seqs: Any) -> Any:
            found = await look(due, shard, seqs)
            await stage.publish(message("s.b"), *[message("s.a")] * 3)
            return found

        monkeypatch.setattr(DueMessages, "_parts", slow_look)
        await stage.after(101)
        assert stage.live() == [4, 5, 6, 7]
        table = stage.shard.machine.subjects
        assert (table.last_seq("s.a"), table.last_seq("s.b")) == (7, 4)

    play(tmp_path, monkeypatch, scene)


def test_removal_that_was_not_taken_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make()
        await stage.publish(message("s.a", TTL_NS))
        stage.node.groups[1].resign()
        with pytest.raises(ApiError):
            await stage.after(101)
        stage.node.groups[1].start()
        while not stage.node.groups[1].is_leader:
            await asyncio.sleep(0)
        await stage.after(101)
        assert (stage.live(), await stage.rows()) == ([], 0)

    play(tmp_path, monkeypatch, scene)


def test_stream_that_is_dropped_or_sealed_meanwhile_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S)
        await stage.publish(message("s.a", TTL_NS))
        await stage.make(sealed=True, allow_rollup_hdrs=False)
        await stage.after(101)
        assert (stage.live(), await stage.rows(), stage.commands) == ([1], 1, [])
        await stage.link.delete_stream("S")

        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S)
        await stage.publish(message("s.a", TTL_NS))
        read = stage.node.reader.block_at

        async def dropping(shard: Shard, seq: int) -> Any:
            block = await read(shard, seq)
            await stage.link.delete_stream("S")
            return block

        monkeypatch.setattr(stage.node.reader, "block_at", dropping)
        await stage.after(301)
        assert stage.commands == []

    play(tmp_path, monkeypatch, scene)


def test_restored_stream_keeps_its_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(max_age_ns=3 * TTL_NS)
        await stage.publish(message("s.a", TTL_NS), message("s.b", TTL_NEVER), message("s.c"))
        data = b"".join([chunk async for chunk in await stage.link.snapshot("S", True)])
        await stage.link.delete_stream("S")
        token = await stage.link.begin_restore("S")
        await stage.link.append_restore(token, 0, data)
        await stage.link.commit_restore(token)
        await stage.after(99)
        assert stage.live() == [1, 2, 3]
        await stage.after(101)
        assert stage.live() == [2, 3]
        await stage.after(301)
        assert stage.live() == [2]

    play(tmp_path, monkeypatch, scene)


def test_long_backlog_leaves_other_streams_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(due_messages, "_SLICES_MAX", 2)
    monkeypatch.setattr(due_messages, "_MESSAGES_MAX", 10)

    async def scene(stage: Stage) -> None:
        await stage.make()
        for _ in range(3):
            await stage.publish(*[message("s.a", TTL_NS)] * 10)
        await stage.after(101)
        assert len(stage.live()) == 10
        await stage.after(101)
        assert (stage.live(), await stage.rows()) == ([], 0)

    play(tmp_path, monkeypatch, scene)


def test_deadlines_that_cannot_be_read_back_stop_their_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make()
        await stage.publish(message("s.a", TTL_NS))

        def rotten(start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
            raise StoreCorruptError("a row")
            yield start, stop

        node = stage.node
        stage.due = DueMessages(
            node.reader, node.shard_log, node.blocks, rotten, node.until_written
        )
        with pytest.raises(ApiError) as lost:
            await stage.after(101)
        assert lost.value.spec is errors.DATA_LOST
        assert stage.shard.damaged == "its deadlines: a row"
        await stage.after(101)  # and is let be from then on

    play(tmp_path, monkeypatch, scene)


# By age ------------------------------------------------------------------------------------------


def test_age_passes_over_what_stays_and_does_not_look_at_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(max_age_ns=TTL_NS)
        stays = list(range(1, 12_001, 1_000))
        for turn in range(8):
            seqs = range(1_500 * turn + 1, 1_500 * turn + 1_501)
            await stage.publish(
                *[message("s.a", TTL_NEVER if seq in stays else None) for seq in seqs]
            )
        await stage.after(50)
        await stage.publish(message("s.b"))
        await stage.after(101)
        assert stage.live() == [*stays, 12_001]
        assert stage.shard.stay_below == 12_001
        assert max(len(each.seqs) // 8 for each in stage.commands) <= 4_096
        await stage.after(151)
        assert stage.live() == stays
        await stage.link.delete_message("S", stays[0])
        assert (await stage.state()).first_seq == stays[1]

    play(tmp_path, monkeypatch, scene)


# Markers -----------------------------------------------------------------------------------------


def test_thousands_of_markers_come_in_blocks_of_the_usual_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S)
        for start in range(0, 5_000, 1_000):
            await stage.publish(*[message(f"s.{at}", TTL_NS) for at in range(start, start + 1_000)])
        await stage.after(101)
        assert stage.live() == list(range(5_001, 10_001))
        assert await stage.headers(7_777) == MARKER
        assert [len(each.seqs) // 8 for each in stage.commands] == [2_000, 2_000, 1_000]
        assert not any(each.markers for each in stage.commands)
        state = await stage.state()
        assert (state.messages, state.num_subjects) == (5_000, 5_000)
        await stage.after(103)
        assert (stage.live(), await stage.rows()) == ([], 0)

    play(tmp_path, monkeypatch, scene)


@pytest.mark.parametrize("alike", [False, True])
def test_message_that_marks_an_end_leaves_no_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alike: bool
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S, max_age_ns=TTL_NS)
        others: dict[str, str] = {"KV_Operation": "PUT"} if alike else {}
        await stage.publish(
            message("s.a", KV_Operation="DEL"),
            message("s.b", Kv_Operation="PURGE"),
            message("s.c", Nats_Marker_Reason="Remove"),
            message("s.d", **others),
            message("s.e", KV_Operation="PUT"),
        )
        await stage.after(101)
        table = stage.shard.machine.subjects
        assert [table.last_seq(f"s.{each}") for each in "abcde"] == [0, 0, 0, 6, 7]

    play(tmp_path, monkeypatch, scene)


def test_only_the_newest_message_of_a_subject_leaves_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stage: Stage) -> None:
        await stage.make(subject_delete_marker_ttl_ns=NS_PER_S, max_age_ns=TTL_NS)
        await stage.publish(*[message("s.a")] * 3, message("s.b", TTL_NEVER), message("s.b"))
        await stage.after(101)
        assert stage.live() == [4, 6]

    play(tmp_path, monkeypatch, scene)
