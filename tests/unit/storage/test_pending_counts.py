"""The count of messages that a consumer has not delivered is exact, whatever changed since.

It is compared with all messages, taken one by one, at the moment at which it is answered.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from contrail_common.model import ConsumerConfig, StreamConfig
from contrail_storage.consumers import pending_count
from contrail_storage.core import commands as cmd
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.stream import recent_removals
from contrail_storage.core.stream.recent_removals import RemovalMemory
from contrail_storage.core.stream.stream_machine import StreamMachine
from contrail_storage.core.subjects import subject_table
from contrail_storage.core.subjects.filters import SubjectFilter
from contrail_storage.reading import reader
from tests.unit.storage.dispatcher_rig import (
    PATIENCE_S,
    SECOND_NS,
    DispatcherRig,
    from_the_first,
    run_by_hand,
    turns,
)
from tests.unit.storage.machine_rig import Message, append_of, removal_of
from tests.unit.storage.naive_subjects import naive_matches

SUBJECTS = [f"{kind}.{number}" for kind in "ab" for number in range(6)]
FILTERS: list[tuple[str, ...]] = [("a.*",), ("a.*", "b.1"), ("a.1",), ("a.1", "b.2"), ("*.*", "c")]
MANY = 1_000
A_FEW = 3
JOIN_NS = 6_000_000

subjects = st.sampled_from(SUBJECTS)
numbers = st.integers(0, 20)
steps = st.one_of(
    st.tuples(st.just("publish"), st.lists(subjects, min_size=1, max_size=8)),
    st.tuples(st.just("publish"), st.lists(subjects, min_size=1, max_size=8)),
    st.tuples(st.just("pull"), st.integers(1, 6)),
    st.tuples(st.just("pull"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["ack", "nak", "ack early"]), numbers),
    st.tuples(st.sampled_from(["delete", "trim"]), numbers),
    st.tuples(st.just("purge"), st.lists(subjects, min_size=1, max_size=6, unique=True)),
    st.tuples(st.just("keep"), numbers),
    st.tuples(st.just("roll up"), subjects),
    st.tuples(st.just("limit"), st.integers(1, 3)),
    st.tuples(st.just("purge all"), st.just(0)),
    st.tuples(st.just("filter"), st.sampled_from(FILTERS)),
    st.tuples(st.sampled_from(["lose", "flush", "reclaim", "new leader", "pass"]), numbers),
    st.tuples(st.sampled_from(["hold", "hold", "step", "let go", "count"]), st.just(0)),
    st.tuples(st.sampled_from(["many", "forget"]), numbers),
)
streams = st.fixed_dictionaries(
    {
        "retention": st.sampled_from(["limits", "limits", "workqueue", "interest"]),
        "max_msgs": st.sampled_from([-1, -1, 12]),
        "max_msgs_per_subject": st.sampled_from([-1, -1, 1, 2]),
    }
)
consumers = st.fixed_dictionaries(
    {
        "filter_subjects": st.sampled_from(FILTERS),
        "ack_policy": st.sampled_from(["explicit", "explicit", "all", "none"]),
    }
)
Step = tuple[str, Any]


@pytest.fixture(autouse=True, scope="module")
def small_bounds() -> Iterator[None]:
    with (
        patch.object(recent_removals, "SHARD_MESSAGES_MAX", 16),
        patch.object(pending_count, "FAR", 24),
        patch.object(reader, "_NEAR", A_FEW),
        patch.object(reader, "_TABLE_MAX", A_FEW),
        patch.object(subject_table, "PAGE", 8),
        patch.object(subject_table, "_PAGE_BYTES", 8 * 20),
    ):
        yield


class Unread:
    """The facts of no message."""

    def facts_at(self, seq: int) -> MessageFacts:
        raise AssertionError(f"facts of {seq}")

    subjects_at = facts_at


@dataclass
class Story:
    """A dispatcher, the messages that it delivered, and counts that wait for reads."""

    rig: DispatcherRig
    delivered: list[int] = field(default_factory=list)
    counts: list["asyncio.Task[None]"] = field(default_factory=list)
    unmatched: set[int] = field(default_factory=set)
    """Acknowledged ahead of the position, before the filters changed."""

    async def play(self, script: list[Step]) -> None:
        for kind, value in script:
            await getattr(self, "do_" + kind.replace(" ", "_"))(value)
            await self.rig.let_pass(0)
            if not self.rig.reader.held:
                await self.count()
        await self.do_let_go(0)
        await self.count()
        await asyncio.gather(*self.counts)
        filters = self.rig.consumer.config.filter_subjects
        wanted = await self.rig.reader.filter_of(self.rig.shard, filters)
        last_seq = self.rig.shard.applied_seq
        for low in range(1, last_seq + 2, A_FEW):
            for high in (low + 1, last_seq):
                found = await self.rig.reader.count(self.rig.shard, low, high, wanted)
                assert found == sum(low <= seq <= high for seq in self.rig.wanted())

    async def count(self) -> None:
        found = await self.rig.dispatcher.num_pending()
        # The new filters may not match what counts as delivered.
        unmatched = self.unmatched & self.rig.consumer.acked_ahead
        assert max(len(self.left()) - len(unmatched), 0) <= found <= len(self.left())

    def left(self) -> set[int]:
        """What is not delivered, found one by one."""
        rig, consumer = self.rig, self.rig.consumer
        out = rig.dispatcher.in_flight | consumer.pending.keys() | consumer.acked_ahead
        found = set(rig.wanted(rig.dispatcher.position)) - out
        if consumer.pinned is None:
            return found
        return {seq for seq in found if consumer.pinned.mask(np.array([seq]))[0]}

    # Steps ---------------------------------------------------------------------------------------

    async def do_publish(self, chosen: list[str]) -> None:
        self.rig.publish(*chosen)

    async def do_many(self, number: int) -> None:
        self.rig.publish(*[SUBJECTS[(number + at) % len(SUBJECTS)] for at in range(2 * number)])

    async def do_roll_up(self, subject: str) -> None:
        self.rig.apply(append_of([Message(subject, rollup="sub")]))

    async def do_pull(self, batch: int) -> None:
        if not self.rig.reader.held:
            self.delivered += await self.rig.pull_seqs(batch, no_wait=True)

    async def do_ack(self, choice: int) -> None:
        if self.delivered:
            await self.rig.acknowledge(self.delivered[-1 - choice % len(self.delivered)])

    async def do_nak(self, choice: int) -> None:
        if self.delivered:
            seq = self.delivered[-1 - choice % len(self.delivered)]
            await self.rig.acknowledge(seq, kind="nak")

    async def do_ack_early(self, choice: int) -> None:
        """As after a change of leader: the delivery was never recorded."""
        left = sorted(self.left())
        if left and self.rig.consumer.config.ack_policy != "all":
            await self.rig.acknowledge(left[choice % len(left)])

    async def do_delete(self, choice: int) -> None:
        rig = self.rig
        seq = rig.machine.counters.first_seq + choice
        if rig.machine.is_live(seq) and not rig.reader.held:
            rig.apply(cmd.DeleteMessage(seq))

    async def do_trim(self, choice: int) -> None:
        self.rig.apply(cmd.Trim(self.rig.machine.counters.first_seq + choice // 3, A_FEW))

    async def do_keep(self, choice: int) -> None:
        self.rig.apply(cmd.Trim(self.rig.machine.counters.last_seq, MANY, keep=choice))

    async def do_purge_all(self, _: int) -> None:
        self.rig.apply(cmd.Trim(self.rig.machine.counters.last_seq + 1, 1))

    async def do_purge(self, chosen: list[str]) -> None:
        self.rig.apply(removal_of(self.rig.machine, chosen))

    async def do_limit(self, most: int) -> None:
        config = msgspec.structs.replace(self.rig.machine.config, max_msgs_per_subject=most)
        self.rig.apply(cmd.ConfigureStream(config, "made-once", b"k" * 32))
        self.rig.apply(cmd.EnforceLimits(A_FEW))

    async def do_filter(self, filters: tuple[str, ...]) -> None:
        self.unmatched |= self.rig.consumer.acked_ahead
        config = msgspec.structs.replace(self.rig.consumer.config, filter_subjects=filters)
        self.rig.apply(cmd.PutConsumer(config, 0))
        self.rig.dispatcher.reconfigured()
        self.rig.apply(cmd.EnforceInterest(MANY))

    async def do_lose(self, kept: int) -> None:
        """Deliveries are on their way, and all or some of their commands are lost."""
        rig = self.rig
        if not rig.reader.held:
            rig.late = True
            self.delivered += await rig.pull_seqs(A_FEW, no_wait=True)
            rig.dispatcher.flush()
            rig.lose(kept % 2)
            rig.late = False
            rig.commit()
            await turns()

    async def do_new_leader(self, _: int) -> None:
        await self.do_let_go(0)
        self.rig.lose()
        self.rig.dispatcher.close()
        self.rig.dispatcher = self.rig.new_dispatcher()

    async def do_flush(self, _: int) -> None:
        await self.rig.let_pass(JOIN_NS)

    async def do_pass(self, _: int) -> None:
        await self.rig.let_pass(SECOND_NS)

    async def do_reclaim(self, _: int) -> None:
        if len(self.rig.blocks.directory(self.rig.machine.shard_id)):
            self.rig.reclaim()

    async def do_forget(self, _: int) -> None:
        if self.rig.machine.removals is not None:
            self.rig.machine.removals.close()

    async def do_hold(self, _: int) -> None:
        self.rig.reader.held = True
        await self.do_count(0)

    async def do_count(self, _: int) -> None:
        self.counts.append(asyncio.create_task(self.count()))
        await turns()

    async def do_step(self, _: int) -> None:
        self.rig.reader.step()
        await turns()

    async def do_let_go(self, _: int) -> None:
        self.rig.reader.held = False
        self.rig.reader.step()
        await turns()


def from_the_newest(rig: DispatcherRig, config: ConsumerConfig) -> cmd.PutConsumer:
    """The command for a consumer that begins with the newest message of each subject."""
    rig.publish(*[SUBJECTS[at * at % len(SUBJECTS)] for at in range(2 * len(SUBJECTS))])
    table = rig.machine.subjects
    newest = sorted(
        (table.last_of(sid), sid)
        for sid, name in table.live()
        if any(naive_matches(pattern, name) for pattern in config.filter_subjects)
    )
    end_seq = rig.machine.counters.last_seq + 1
    seqs, sids = zip(*newest, strict=True)
    pinned = Pinned(np.array(seqs, np.int64), np.array(sids, np.uint32), end_seq)
    return cmd.PutConsumer(config, seqs[0], pinned.encode(), end_seq)


def play(
    script: list[Step], stream: dict[str, Any], consumer: dict[str, Any], *, newest: bool
) -> None:
    async def scene() -> None:
        config = StreamConfig(name="S", subjects=("*.*",), allow_rollup_hdrs=True, **stream)
        rig = DispatcherRig(
            config,
            {"ack_wait_ns": SECOND_NS, "max_ack_pending": -1, **consumer},
            start=from_the_newest if newest else from_the_first,
        )
        async with asyncio.timeout(PATIENCE_S):
            await Story(rig).play(script)

    run_by_hand(scene())


scripts = st.lists(steps, min_size=5, max_size=40)


@given(scripts, streams, consumers)
@example(
    [("publish", ["a.1", "a.2"]), ("ack early", 1), ("filter", ("b.*",))],
    {"retention": "limits"},
    {"ack_policy": "explicit", "filter_subjects": ()},
)
def test_count_is_exact_after_any_change(
    script: list[Step], stream: dict[str, Any], consumer: dict[str, Any]
) -> None:
    if stream["retention"] == "workqueue":
        consumer = {**consumer, "ack_policy": "explicit"}
    play(script, stream, consumer, newest=False)


@given(scripts, st.sampled_from([-1, 12]), consumers)
def test_count_of_pinned_messages_is_exact_after_any_change(
    script: list[Step], max_msgs: int, consumer: dict[str, Any]
) -> None:
    play(script, {"max_msgs": max_msgs}, consumer, newest=True)


def test_updates_are_counted_without_a_look_at_all_subjects() -> None:
    async def scene() -> None:
        config = StreamConfig(name="S", subjects=("*.*",), max_msgs_per_subject=1)
        rig = DispatcherRig(config, {"filter_subjects": ("a.*",), "max_ack_pending": -1})
        rig.publish(*SUBJECTS)
        await rig.pull(batch=MANY)
        with patch.object(SubjectFilter, "live_slots", side_effect=AssertionError):
            for subject in SUBJECTS * 2:
                rig.publish(subject, "a.5")
                assert await rig.dispatcher.num_pending() == 1 + (subject in SUBJECTS[:5])
                await rig.pull(batch=MANY)

    run_by_hand(scene())


def test_removals_take_limited_memory_in_all_shards_together() -> None:
    memory, states = RemovalMemory(), [StreamMachine(number, Unread()) for number in range(9)]
    with patch.object(recent_removals, "MESSAGES_MAX", 300):
        for _ in range(10):
            for state in states:
                kept = memory.of(state)
                for seq in range(12):
                    state.note_removed(np.array([seq]), np.array([1], np.uint32))
                found = kept.since(kept.end - 3)
                assert found is not None
                assert found[0].tolist() == [9, 10, 11]
            assert memory.used <= 300
            assert 1 < sum(one.removals.is_open for one in states if one.removals) < 9
    for state in states:
        state.forget_removals()
    assert memory.used == 0
