"""Whatever dispatcher, log and clients do: no message is skipped, or sent twice at once."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contrail_common.errors import ApiError
from contrail_common.model import AckKind, StreamConfig
from contrail_link.contract.consume import Delivery, PullResult, in_deliveries
from contrail_storage.core import commands as cmd
from tests.unit.storage.dispatcher_rig import SECOND_NS, DispatcherRig, run_by_hand, turns

SUBJECTS = ["a.x", "a.y", "b"]
ACK_WAIT_NS = SECOND_NS
JOIN_NS = 6_000_000
JOIN_AGAIN_NS = SECOND_NS // 5
A_DAY_S = 86_400
PULLS = [
    {"expires_s": A_DAY_S},
    {"expires_s": A_DAY_S},
    {"expires_s": 0.3},
    {"no_wait": True},
    {"expires_s": A_DAY_S, "max_bytes": 2},
    {"expires_s": A_DAY_S, "columns": True},
    {"no_wait": True, "max_bytes": 2, "columns": True},
]
PENDING_MAX = [-1, 1, 2, 5]
FILTERS: list[tuple[str, ...]] = [(), ("a.*",), ("b", "a.x")]
MANY_ATTEMPTS = 1_000


def a_stream(max_msgs: int = -1) -> StreamConfig:
    return StreamConfig(name="S", subjects=("a.*", "b"), max_msgs=max_msgs)


def a_consumer(**changes: Any) -> dict[str, Any]:
    return {
        "ack_wait_ns": ACK_WAIT_NS,
        "filter_subjects": (),
        "max_ack_pending": -1,
        "max_deliver": -1,
        **changes,
    }


publishing = st.tuples(st.just("publish"), st.lists(st.sampled_from(SUBJECTS), min_size=1))
pulling = st.tuples(st.just("pull"), st.tuples(st.integers(1, 4), st.integers(0, len(PULLS) - 1)))
settling = st.tuples(
    st.sampled_from(["ack", "ack", "nak", "nak later", "in progress", "term"]), st.integers(0, 9)
)
waiting = st.tuples(st.just("pass"), st.sampled_from([1, ACK_WAIT_NS // 2, ACK_WAIT_NS]))
removing = st.tuples(st.sampled_from(["delete", "trim"]), st.integers(0, 9))
reading = st.tuples(st.sampled_from(["hold", "hold", "step one", "step"]), st.just(0))
logging = st.tuples(
    st.sampled_from(["late", "commit", "commit", "commit some", "flush"]), st.integers(0, 2)
)
configuring = st.one_of(
    st.tuples(st.just("reconfigure"), st.integers(0, len(PENDING_MAX) - 1)),
    st.tuples(st.just("filter"), st.sampled_from(FILTERS)),
)
failing = st.tuples(
    st.sampled_from(
        ["lose", "refuse one", "lead again", "refuse", "accept", "cancel", "new leader"]
    ),
    st.integers(0, 3),
)
Step = tuple[str, Any]

usual = [publishing, pulling, pulling, settling, waiting, removing, reading, logging, configuring]
peaceful = st.lists(st.one_of(*usual), min_size=10, max_size=40)
troubled = st.lists(st.one_of(*usual, failing, failing), min_size=10, max_size=40)
streams = st.sampled_from([-1, -1, 4]).map(a_stream)
consumers = st.fixed_dictionaries(
    {
        "ack_wait_ns": st.just(ACK_WAIT_NS),
        "filter_subjects": st.sampled_from(FILTERS),
        "max_ack_pending": st.sampled_from([-1, 2, 5]),
        "max_deliver": st.sampled_from([-1, -1, MANY_ATTEMPTS, 2]),
    }
)


def delivered(result: PullResult) -> list[Delivery]:
    """What a pull got, in columns or not."""
    return result.deliveries if result.columns is None else in_deliveries(result.columns)


@dataclass
class Story:
    """Plays a script on a dispatcher and remembers what clients saw.

    ``settled`` are the messages whose ack or term was applied; of those ``doubtful`` nobody knows.
    ``passed`` are those that no filter matched until messages behind them were delivered,
    ``once_wanted`` those that an earlier filter matched: they may come again. ``deferred``
    are those whose deadline a client may have moved. ``last_attempt`` is the number of the delivery
    of each message that a client got last.
    """

    rig: DispatcherRig
    sent: list[int] = field(default_factory=list)
    sent_at: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    doubtful: set[int] = field(default_factory=set)
    asked_again: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    once_wanted: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    last_attempt: dict[int, int] = field(default_factory=dict)
    commands_lost: bool = False
    pulls: list["asyncio.Task[PullResult]"] = field(default_factory=list)
    renumbered: bool = False
    last_consumer_seq: int = 0

    async def play(self, script: list[Step]) -> None:
        for kind, value in script:
            await getattr(self, "do_" + kind.replace(" ", "_"))(value)
            await self.rig.let_pass(0)
            self.collect()
            await self.check()

    def collect(self) -> None:
        """Note what finished pulls got."""
        deliveries = []
        for pull in [pull for pull in self.pulls if pull.done()]:
            self.pulls.remove(pull)
            if not pull.cancelled() and not isinstance(pull.exception(), ApiError):
                deliveries += delivered(pull.result())
        limit = self.rig.consumer.config.max_deliver
        for each in deliveries:
            assert limit < 1 or each.num_delivered <= limit, "sent once too often"
            self.last_attempt[each.message.seq] = each.num_delivered
        for delivery in sorted(deliveries, key=lambda each: each.consumer_seq):
            self.note(delivery.message.seq, delivery.consumer_seq)

    def note(self, seq: int, consumer_seq: int) -> None:
        rig = self.rig
        before_ns = self.sent_at.get(seq)
        if before_ns is not None and seq not in self.asked_again and not self.renumbered:
            assert rig.log_ns - before_ns >= ACK_WAIT_NS, f"{seq} was sent twice at once"
        if not self.renumbered:
            assert consumer_seq == self.last_consumer_seq + 1
            self.last_consumer_seq += 1
        self.sent.append(seq)
        self.sent_at[seq] = rig.log_ns

    # Checks --------------------------------------------------------------------------------------

    async def check(self) -> None:
        """The dispatcher agrees with the machine whenever nothing is on its way."""
        rig = self.rig
        if rig.reader.held or rig.late or rig.refusing:
            return
        dispatcher, pending = rig.dispatcher, rig.consumer.pending
        assert await dispatcher.num_pending() == len(self.fresh())
        earliest_ns = pending.earliest_ns
        for seq, item in pending.items():
            assert rig.machine.is_live(seq), "a message that is gone is pending"
            watched = earliest_ns is not None and earliest_ns <= item.deadline_ns
            assert seq in dispatcher.in_flight or watched
            if not self.commands_lost and seq not in self.deferred | dispatcher.in_flight:
                reached_a_client = self.last_attempt.get(seq) == item.attempts
                assert reached_a_client or item.deadline_ns <= rig.log_ns, "a cancelled pull has it"
        if not dispatcher.in_flight:
            assert dispatcher.consumer_seq == rig.consumer.delivered.consumer_seq
        if self.pulls:
            assert not self.has_something(), "a pull waits although there is something for it"

    def has_something(self) -> bool:
        """Whether a pull that asked now would get a message."""
        rig, consumer = self.rig, self.rig.consumer
        on_its_way = rig.dispatcher.in_flight
        due = [
            seq
            for seq, item in consumer.pending.items()
            if item.deadline_ns <= rig.log_ns and seq not in on_its_way
        ]
        limit = consumer.config.max_ack_pending
        full = 0 <= limit <= len(on_its_way | consumer.pending.keys())
        return bool(due or (self.fresh() and not full))

    def fresh(self) -> set[int]:
        """Messages that were not delivered yet, found one by one."""
        rig, consumer = self.rig, self.rig.consumer
        out = rig.dispatcher.in_flight | consumer.pending.keys() | consumer.acked_ahead
        return set(rig.wanted(rig.dispatcher.position)) - out

    # Steps ---------------------------------------------------------------------------------------

    async def do_publish(self, subjects: list[str]) -> None:
        self.rig.publish(*subjects)

    async def do_pull(self, choice: tuple[int, int]) -> None:
        batch, kind = choice
        pull = self.rig.pull(batch, **PULLS[kind])
        self.pulls.append(asyncio.create_task(pull))

    async def do_ack(self, choice: int) -> None:
        await self._settle("ack", choice)

    async def do_term(self, choice: int) -> None:
        await self._settle("term", choice)

    async def do_nak(self, choice: int) -> None:
        await self._settle("nak", choice)

    async def do_nak_later(self, choice: int) -> None:
        await self._settle("nak", choice, delay_s=0.3)

    async def do_in_progress(self, choice: int) -> None:
        await self._settle("in_progress", choice)

    async def _settle(self, kind: AckKind, choice: int, delay_s: float = 0) -> None:
        if not self.sent or self.rig.refusing:
            return
        seq = self.sent[-1 - choice % len(self.sent)]
        self.deferred.add(seq)
        if kind == "nak":
            self.asked_again.add(seq)
        elif kind != "in_progress":
            self.doubtful.add(seq)
        future = await self.rig.acknowledge(seq, kind=kind, delay_s=delay_s)
        if kind in ("ack", "term"):
            future.add_done_callback(
                lambda done: None if done.exception() else self.settled.add(seq)
            )

    async def do_pass(self, step_ns: int) -> None:
        await self.rig.let_pass(step_ns)

    async def do_delete(self, choice: int) -> None:
        rig = self.rig
        seq = rig.machine.counters.first_seq + choice
        if rig.machine.is_live(seq) and not rig.reader.held:
            rig.apply(cmd.DeleteMessage(seq))
            rig.shard.notify()

    async def do_trim(self, choice: int) -> None:
        first_seq = self.rig.machine.counters.first_seq
        self.rig.apply(cmd.Trim(first_seq + choice // 3, 100))

    async def do_reconfigure(self, choice: int) -> None:
        config = msgspec.structs.replace(
            self.rig.consumer.config, max_ack_pending=PENDING_MAX[choice]
        )
        self.rig.apply(cmd.PutConsumer(config, 0))
        self.rig.dispatcher.reconfigured()

    async def do_filter(self, filters: tuple[str, ...]) -> None:
        rig = self.rig
        out = rig.dispatcher.in_flight | rig.consumer.pending.keys() | set(self.sent)
        below = range(1, max(out, default=rig.consumer.delivered.stream_seq) + 1)
        self.passed |= set(below).difference(rig.wanted())
        self.once_wanted |= set(rig.wanted())
        config = msgspec.structs.replace(rig.consumer.config, filter_subjects=filters)
        rig.apply(cmd.PutConsumer(config, 0))
        rig.dispatcher.reconfigured()

    async def do_hold(self, _: int) -> None:
        self.rig.reader.held = True

    async def do_step(self, _: int) -> None:
        self.rig.reader.held = False
        self.rig.reader.step()

    async def do_step_one(self, _: int) -> None:
        self.rig.reader.step()  # the next read of the same pull waits again

    async def do_late(self, _: int) -> None:
        self.rig.late = True

    async def do_commit(self, _: int) -> None:
        self.rig.late = False
        self.rig.commit()

    async def do_commit_some(self, count: int) -> None:
        self.rig.commit(count + 1)

    async def do_flush(self, _: int) -> None:
        await self.rig.let_pass(JOIN_NS)

    async def do_lose(self, kept: int) -> None:
        self.renumbered = self.commands_lost = True
        self.rig.lose(kept)

    async def do_refuse_one(self, choice: int) -> None:
        self.renumbered = self.commands_lost = True
        if self.rig.proposals:
            self.rig.refuse_one(choice % len(self.rig.proposals))

    async def do_lead_again(self, choice: int) -> None:
        self.renumbered = self.commands_lost = True
        await self.rig.lead_again(applied=choice, pause=0 if choice == 1 else 20)

    async def do_refuse(self, _: int) -> None:
        self.renumbered = self.commands_lost = True
        self.rig.refusing = True

    async def do_accept(self, _: int) -> None:
        self.rig.refusing = False

    async def do_cancel(self, choice: int) -> None:
        self.renumbered = True
        if self.pulls:
            self.pulls[choice % len(self.pulls)].cancel()

    async def do_new_leader(self, _: int) -> None:
        self.renumbered = self.commands_lost = True
        await self.leave()
        self.rig.lose()
        self.rig.dispatcher.close()
        self.rig.dispatcher = self.rig.new_dispatcher()

    async def leave(self) -> None:
        """All who wait go away."""
        for pull in self.pulls:
            pull.cancel()
        await turns()

    # End -----------------------------------------------------------------------------------------

    async def drain(self) -> list[int]:
        """All that is still to come from the same dispatcher, acknowledged as it comes."""
        await self.do_step(0)
        await self.do_accept(0)
        await self.do_commit(0)
        await self.rig.let_pass(0)
        await self.leave()
        self.collect()
        found: list[int] = []
        for _ in range(3):
            await self.rig.let_pass(JOIN_AGAIN_NS)
            await self.rig.let_pass(ACK_WAIT_NS)
            while seqs := await self.rig.pull_seqs(3):
                found += seqs
                await self.rig.acknowledge(*seqs)
        await self.rig.let_pass(JOIN_AGAIN_NS)
        return found


def play(script: list[Step], stream: StreamConfig, consumer: dict[str, Any]) -> None:
    for searching in {False, bool(consumer["filter_subjects"])}:
        run_by_hand(played(script, stream, consumer, searching=searching))


async def played(
    script: list[Step], stream: StreamConfig, consumer: dict[str, Any], *, searching: bool
) -> None:
    story = Story(DispatcherRig(stream, consumer, searching=searching))
    await story.play(script)
    drained = await story.drain()
    assert len(set(drained)) == len(drained)
    wanted = set(story.rig.wanted())
    assert (wanted | story.once_wanted).issuperset(drained)
    assert story.settled.isdisjoint(drained)
    if consumer["max_deliver"] in (-1, MANY_ATTEMPTS):
        assert wanted - story.doubtful - story.passed <= set(drained)
    assert story.rig.consumer.pending == {}
    assert await story.rig.new_dispatcher().num_pending() == 0


@pytest.mark.long
@settings(max_examples=2 * settings().max_examples)
@given(peaceful, streams, consumers)
@example(  # trimmed under a pull that reads
    [("publish", SUBJECTS), ("hold", 0), ("pull", (3, 1)), ("trim", 8), ("step", 0)],
    a_stream(),
    a_consumer(filter_subjects=("a.*",)),
)
@example(  # gone before they were recorded: there is room for the others
    [
        ("reconfigure", 2),
        ("publish", ["b", "b"]),
        ("pull", (2, 0)),
        ("publish", ["b", "b", "b"]),
        ("pull", (1, 0)),
        ("flush", 0),
    ],
    a_stream(max_msgs=4),
    a_consumer(),
)
@example(  # another filter, behind a delivery with nothing else to come
    [("publish", ["a.x", "b", "b"]), ("pull", (2, 0)), ("flush", 0), ("filter", ("b", "a.x"))],
    a_stream(),
    a_consumer(filter_subjects=("a.*",)),
)
@example(  # another filter, under a pull that reads: it holds for what the pull selects then
    [("publish", ["a.y", "b"]), ("hold", 0), ("pull", (1, 0)), ("filter", ()), ("step", 0)],
    a_stream(),
    a_consumer(filter_subjects=("b", "a.x")),
)
@example(  # removed from the middle of the stream before their delivery was recorded
    [("publish", ["b"] * 4), ("pull", (3, 0)), ("delete", 1), ("delete", 2), ("flush", 0)],
    a_stream(),
    a_consumer(max_ack_pending=2),
)
def test_everything_is_delivered_once_and_numbered_without_a_gap_while_nothing_fails(
    script: list[Step], stream: StreamConfig, consumer: dict[str, Any]
) -> None:
    play(script, stream, consumer)


@pytest.mark.long
@settings(max_examples=2 * settings().max_examples)
@given(troubled, streams, consumers)
@example(  # the last allowed delivery runs out while a pull waits
    [("publish", ["b"]), ("pull", (1, 0)), *[("pull", (1, 0)), ("pass", ACK_WAIT_NS)] * 2],
    a_stream(),
    a_consumer(max_deliver=2),
)
@example(  # cancelled with one message selected, while it reads the block of another
    [
        *[("publish", ["b"]), ("publish", ["b"]), ("hold", 0), ("pull", (2, 0))],
        *[("step one", 0), ("cancel", 0), ("step", 0)],
    ],
    a_stream(),
    a_consumer(),
)
@example(  # cancelled while its delivery is recorded
    [("late", 0), ("publish", ["b"]), ("pull", (1, 0)), ("cancel", 0), ("commit", 0)],
    a_stream(),
    a_consumer(max_deliver=2),
)
@example(  # a delivery is refused, the one behind it is not
    [
        ("publish", ["b", "b"]),
        ("late", 0),
        ("pull", (1, 0)),
        ("pull", (1, 0)),
        ("refuse one", 0),
    ],
    a_stream(),
    a_consumer(max_deliver=MANY_ATTEMPTS),
)
@example(  # given up for lost, and applied all the same
    [("late", 0), ("pull", (1, 0)), ("publish", ["b"]), ("flush", 0), ("lead again", 2)],
    a_stream(),
    a_consumer(),
)
@example(  # the same, and the message is settled before the dispatcher looks at it again
    [
        ("late", 0),
        ("pull", (3, 0)),
        ("publish", ["b"]),
        ("reconfigure", 1),
        ("lead again", 2),
    ],
    a_stream(),
    a_consumer(max_deliver=2),
)
@example(  # the same, and the next pull begins between them
    [
        ("publish", ["b", "b", "a.y", "a.x", "b", "b", "a.y"]),
        ("late", 2),
        *[("pull", (4, 4)), ("pull", (3, 6))],
        ("lead again", 3),
        ("commit", 1),
    ],
    a_stream(),
    a_consumer(filter_subjects=("a.*",), max_deliver=MANY_ATTEMPTS),
)
@example(  # settled although no delivery of it was recorded
    [("publish", ["b"]), ("pull", (1, 3)), ("new leader", 0), ("term", 0)],
    a_stream(),
    a_consumer(),
)
def test_nothing_is_skipped_when_commands_are_lost_pulls_cancelled_and_leaders_changed(
    script: list[Step], stream: StreamConfig, consumer: dict[str, Any]
) -> None:
    play(script, stream, consumer)
