"""Whatever happens between desk, log and clients: no message is skipped, or sent twice at once."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from contrail_common.errors import ApiError
from contrail_common.link import PullResult
from contrail_common.model import StreamConfig
from contrail_storage.core import commands as cmd
from tests.unit.storage.desk_rig import SECOND_NS, DeskRig, run_by_hand, turns

SUBJECTS = ["a.x", "a.y", "b"]
ACK_WAIT_NS = SECOND_NS
JOIN_NS = 6_000_000
A_DAY_S = 86_400

publishing = st.tuples(st.just("publish"), st.lists(st.sampled_from(SUBJECTS), min_size=1))
pulling = st.tuples(st.just("pull"), st.integers(1, 4))
settling = st.tuples(st.sampled_from(["ack", "ack", "nak", "term"]), st.integers(0, 9))
waiting = st.tuples(st.just("pass"), st.sampled_from([1, ACK_WAIT_NS // 2, ACK_WAIT_NS]))
removing = st.tuples(st.sampled_from(["delete", "trim"]), st.integers(0, 9))
reading = st.tuples(st.sampled_from(["hold", "step", "step"]), st.just(0))
logging = st.tuples(st.sampled_from(["late", "commit", "commit", "flush"]), st.just(0))
failing = st.tuples(
    st.sampled_from(["lose", "refuse", "accept", "cancel", "new leader"]), st.integers(0, 3)
)
Step = tuple[str, Any]

peaceful = st.lists(
    st.one_of(publishing, pulling, pulling, settling, waiting, removing, reading, logging),
    min_size=10,
    max_size=40,
)
troubled = st.lists(
    st.one_of(
        publishing,
        pulling,
        pulling,
        settling,
        waiting,
        removing,
        reading,
        logging,
        failing,
        failing,
    ),
    min_size=10,
    max_size=40,
)
consumers = st.fixed_dictionaries(
    {
        "ack_wait_ns": st.just(ACK_WAIT_NS),
        "filter_subjects": st.sampled_from([(), ("a.*",), ("b", "a.x")]),
        "max_ack_pending": st.sampled_from([-1, 2, 5]),
        "max_deliver": st.sampled_from([-1, -1, 1_000]),
    }
)
streams = st.builds(
    StreamConfig,
    name=st.just("S"),
    subjects=st.just(("a.*", "b")),
    max_msgs=st.sampled_from([-1, -1, 4]),
)


@dataclass
class Story:
    """Plays a script on a desk and remembers what clients saw."""

    desk: DeskRig
    sent: list[int] = field(default_factory=list)
    sent_at: dict[int, int] = field(default_factory=dict)
    settled: set[int] = field(default_factory=set)
    asked_again: set[int] = field(default_factory=set)
    pulls: list["asyncio.Task[PullResult]"] = field(default_factory=list)
    renumbered: bool = False
    last_consumer_seq: int = 0

    async def play(self, script: list[Step]) -> None:
        for kind, value in script:
            await getattr(self, "do_" + kind.replace(" ", "_"))(value)
            await self.desk.let_pass(0)
            self.collect()
            await self.check_count()

    def collect(self) -> None:
        """Note what finished pulls got."""
        for pull in [pull for pull in self.pulls if pull.done()]:
            self.pulls.remove(pull)
            if pull.cancelled() or isinstance(pull.exception(), ApiError):
                continue
            for delivery in pull.result().deliveries:
                self.note(delivery.message.seq, delivery.consumer_seq)

    def note(self, seq: int, consumer_seq: int) -> None:
        desk = self.desk
        before_ns = self.sent_at.get(seq)
        if before_ns is not None and seq not in self.asked_again and not self.renumbered:
            assert desk.log_ns - before_ns >= ACK_WAIT_NS, f"{seq} was sent twice at once"
        if not self.renumbered:
            assert consumer_seq == self.last_consumer_seq + 1
            self.last_consumer_seq += 1
        self.sent.append(seq)
        self.sent_at[seq] = desk.log_ns

    async def check_count(self) -> None:
        """The count kept up equals a count anew, whenever nothing is on its way."""
        desk = self.desk
        if desk.reader.held or desk.late:
            return  # a pull may be in the middle of its choice
        counted = await desk.desk.num_pending()
        assert counted == len(desk.wanted(desk.desk.position))

    # Steps ---------------------------------------------------------------------------------------

    async def do_publish(self, subjects: list[str]) -> None:
        self.desk.publish(*subjects)

    async def do_pull(self, batch: int) -> None:
        self.pulls.append(asyncio.create_task(self.desk.pull(batch, expires_s=A_DAY_S)))

    async def do_ack(self, choice: int) -> None:
        await self._settle("ack", choice)

    async def do_term(self, choice: int) -> None:
        await self._settle("term", choice)

    async def do_nak(self, choice: int) -> None:
        await self._settle("nak", choice)

    async def _settle(self, kind: Any, choice: int) -> None:
        if not self.sent or self.desk.refusing:
            return
        seq = self.sent[-1 - choice % len(self.sent)]
        if kind == "nak":
            self.asked_again.add(seq)
        else:
            self.settled.add(seq)
        late, self.desk.late = self.desk.late, False
        await self.desk.acknowledge(seq, kind=kind)
        self.desk.commit()
        self.desk.late = late

    async def do_pass(self, step_ns: int) -> None:
        await self.desk.let_pass(step_ns)

    async def do_delete(self, choice: int) -> None:
        messages = self.desk.machine.counters
        seq = messages.first_seq + choice
        if self.desk.machine.is_live(seq):
            previous_seq = (
                await self.desk.reader.previous_of_subject(self.desk.shard, seq)
                if (not self.desk.reader.held)
                else None
            )
            if previous_seq is not None:
                self.desk.apply(cmd.DeleteMessage(seq, previous_seq))

    async def do_trim(self, choice: int) -> None:
        first_seq = self.desk.machine.counters.first_seq
        self.desk.apply(cmd.Trim(first_seq + choice // 3, 100))

    async def do_hold(self, _: int) -> None:
        self.desk.reader.held = True

    async def do_step(self, _: int) -> None:
        self.desk.reader.held = False
        self.desk.reader.step()

    async def do_late(self, _: int) -> None:
        self.desk.late = True

    async def do_commit(self, _: int) -> None:
        self.desk.late = False
        self.desk.commit()

    async def do_flush(self, _: int) -> None:
        await self.desk.let_pass(JOIN_NS)

    async def do_lose(self, _: int) -> None:
        self.renumbered = True
        self.desk.lose()

    async def do_refuse(self, _: int) -> None:
        self.renumbered = True
        self.desk.refusing = True

    async def do_accept(self, _: int) -> None:
        self.desk.refusing = False

    async def do_cancel(self, choice: int) -> None:
        self.renumbered = True
        if self.pulls:
            self.pulls[choice % len(self.pulls)].cancel()

    async def do_new_leader(self, _: int) -> None:
        self.renumbered = True
        for pull in self.pulls:
            pull.cancel()
        await turns()
        self.desk.lose()
        self.desk.desk.close()
        self.desk.desk = self.desk.new_desk()

    # End -----------------------------------------------------------------------------------------

    async def drain(self) -> list[int]:
        """All that is still to come, acknowledged as it comes."""
        await self.do_step(0)
        await self.do_accept(0)
        await self.do_commit(0)
        for pull in self.pulls:
            pull.cancel()
        await turns()
        self.collect()
        await self.do_new_leader(0)
        await self.desk.let_pass(10 * ACK_WAIT_NS)
        found: list[int] = []
        while seqs := await self.desk.pull_seqs(3):
            found += seqs
            await self.desk.acknowledge(*seqs)
        return found


async def told(script: list[Step], stream: StreamConfig, consumer: dict[str, Any]) -> None:
    story = Story(DeskRig(stream, consumer))
    await story.play(script)
    unsettled = [seq for seq in story.desk.wanted() if seq not in story.settled]
    drained = await story.drain()
    assert sorted(drained) == unsettled
    assert story.desk.consumer.pending == {}


@settings(max_examples=3 * settings().max_examples)
@given(peaceful, streams, consumers)
def test_everything_is_delivered_once_and_numbered_without_a_gap_while_all_goes_well(
    script: list[Step], stream: StreamConfig, consumer: dict[str, Any]
) -> None:
    run_by_hand(told(script, stream, consumer))


@settings(max_examples=5 * settings().max_examples)
@given(troubled, streams, consumers)
def test_nothing_is_skipped_when_commands_are_lost_pulls_cancelled_and_leaders_changed(
    script: list[Step], stream: StreamConfig, consumer: dict[str, Any]
) -> None:
    run_by_hand(told(script, stream, consumer))
