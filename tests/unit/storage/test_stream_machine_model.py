"""The stream machine against a plain list, over restarts, and against a twin with other blocks."""

# One module: each step changes the machine and the plain list together.

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from contrail_common import errors
from contrail_common.model import TTL_NEVER, AckKind, ConsumerConfig, Expected, StreamConfig
from contrail_common.subjects import is_wildcard
from contrail_storage.core import commands as cmd
from contrail_storage.core import consumer_machine, deleted
from contrail_storage.core.expected import ProvenExpected
from contrail_storage.core.results import ConsumerPut, Done, Refused, Removed, Result
from contrail_storage.core.stream import deadlines
from contrail_storage.core.stream.removal import interest
from contrail_storage.core.subjects import subject_names, subject_table
from tests.unit.storage.machine_rig import (
    Message,
    append_of,
    consumer_config,
    outcomes,
    picture,
    sealed,
)
from tests.unit.storage.naive_models import NaiveConsumer, NaiveStream
from tests.unit.storage.stream_agreement import IDS, StreamAgreement
from tests.unit.storage.walks import explore, rule

SUBJECTS = ["a", "b", "a.x", "a.y", "b.x.y"]
FOREIGN = "elsewhere"
PATTERNS = [*SUBJECTS, "a.*", "*", ">", "b.>", "*.x", "nothing"]
HEADERS = [None, None, {"Name": ["value", ""]}, {"ä": []}]
NAMES = ["red", "blue"]
SLICES = [0, 1, 2, 3, 100]

BOTH = [False, True]
MAYBE = [False, False, False, True]
SELDOM = [False] * 15 + [True]
LIMITS = [-1] * 5 + [1, 2, 5, 5]
Choices = dict[str, Sequence[Any]]
CONSUMERS: Choices = {
    "ack_policy": ["explicit", "explicit", "all", "none"],
    "ack_wait_ns": [5, 5, 9],
    "backoff_ns": [(), (), (2, 5)],
    "filter_subjects": [(), (), ("a",), ("a.*",), ("b", "a.>"), ("*.x",), ("c", "a.y")],
    "max_deliver": [-1, -1, 1, 2],
    "deliver_policy": ["all"] * 5 + ["new"],
}
CONFIGS: Choices = {
    "subjects": [*[("a", "b", "*.*", "b.x.y"), ("a", "b", "a.>", "b.>")] * 3, ("a.x",)],
    "retention": ["limits", "limits", "limits", "interest", "workqueue"],
    "discard": ["old", "old", "new"],
    "max_msgs": LIMITS,
    "max_bytes": [-1] * 5 + [0, 0, 12, 40],
    "max_age_ns": [0, 0, 5, 15],
    "max_msgs_per_subject": [-1, -1, -1, 1, 2],
    "discard_new_per_subject": MAYBE,
    "max_msg_size": [-1, -1, -1, 10],
    "max_consumers": [-1, -1, 1],
    "duplicate_window_ns": [1, 4, 10, 1_000],
    "sealed": SELDOM,
    "deny_delete": SELDOM,
    "deny_purge": SELDOM,
    "allow_rollup_hdrs": [True, False],
    "allow_atomic": [True, False],
    "allow_msg_ttl": [True, True, False],
    "subject_delete_marker_ttl_ns": [0, 0, 4],
}


class StreamComparison(StreamAgreement):
    """Drives a machine, a twin whose blocks are merged otherwise, and the naive stream."""

    first_number = 0
    """Of a subject."""
    configs: ClassVar[Choices] = CONFIGS
    """Choices for each field of the stream's configuration."""
    first_seqs: ClassVar[Sequence[int]] = [1, 1, 1_000]
    shard_counts: ClassVar[Sequence[int]] = [1, 1, 3]
    ttls: ClassVar[Sequence[int | None]] = [None] * 12 + [1, 3, 8, TTL_NEVER]

    @rule(4, step_ns=[0, 1, 1, 3, 4, 10, -2])
    def let_time_pass(self, step_ns: int) -> None:
        self.close_entry()
        self.now_ns += step_ns

    @rule(2)
    def restart(self) -> None:
        self.close_entry()
        before = picture(self.rig.machine, IDS)
        self.rig.restart()
        self.restarted = True
        assert picture(self.rig.machine, IDS) == before

    @rule(1)
    def reclaim(self) -> None:
        """One of the two replicas gets rid of what was deleted; the other may never do it."""
        self.close_entry()
        self.rig.shelf.reclaim(self.rig.machine.is_live)

    @rule(1)
    def recount(self) -> None:
        """What is counted from the blocks is what was counted as they came."""
        self.close_entry()
        assert self.rig.recount() == self.twin.recount() == (0, [])

    # Stream --------------------------------------------------------------------------------------

    def begin(self) -> None:
        config, first_seq = self.any_config(), self.one_of(self.first_seqs)
        self.make(config, first_seq, self.one_of(self.shard_counts), self.one_of(range(3)))
        for name in self.rng.sample(NAMES, self.one_of(range(3))):
            self.put_consumer(name, 0)

    def any_config(self) -> StreamConfig:
        """Half of the fields have their first choice: few limits hold at once."""
        fields = {each: self.one_of(values) for each, values in self.configs.items()}
        for each in fields:
            if self.one_of(BOTH):
                fields[each] = self.configs[each][0]
        return StreamConfig(name="S", **fields)

    def make(self, config: StreamConfig, first_seq: int, shards: int = 1, shard: int = 0) -> None:
        self.subjects = self.rng.sample(SUBJECTS, self.one_of([1, 2, 3, len(SUBJECTS)]))
        self.shard = shard % shards
        self.config = replaced(config, first_seq=first_seq, shards=shards)
        self.naive = NaiveStream(self.own(self.config))
        self.do(self.configure(self.config), self.expect(Done()))
        if self.first_number:
            for rig in (self.rig, self.twin):
                rig.begin_numbers_at(self.first_number)

    def configure(self, config: StreamConfig) -> cmd.ConfigureStream:
        return cmd.ConfigureStream(config, "made-once", b"k" * 32, self.shard)

    def own(self, config: StreamConfig) -> StreamConfig:
        """The configuration of a stream that is this shard alone."""
        shares = {
            name: len(range(self.shard, total, config.shards)) if total >= 0 else total
            for name, total in (("max_msgs", config.max_msgs), ("max_bytes", config.max_bytes))
        }
        return replaced(config, **shares)

    @rule(2, fields=range(4), keep=[True, True, False])
    def change_configuration(self, fields: int, keep: bool) -> None:
        """Some fields get another value; all of them where ``fields`` is 0."""
        config = self.any_config()
        if fields:
            some = self.rng.sample(sorted(self.configs), fields)
            config = replaced(self.config, **{each: getattr(config, each) for each in some})
        config = replaced(config, first_seq=self.config.first_seq, shards=self.config.shards)
        if keep:
            config = replaced(config, retention=self.config.retention)
        self.change_to(config)

    @rule(3, field=["max_msgs", "max_bytes", "max_bytes", "max_msgs_per_subject"], less=range(3))
    def tighten_a_limit(self, field: str, less: int) -> None:
        """To what is stored, a little less, or nothing; then it is kept at once, or later."""
        naive, shards = self.naive, self.config.shards
        counted = {
            "max_msgs": len(naive.messages) * shards,
            "max_bytes": self.one_of([0, naive.bytes * shards]),
            "max_msgs_per_subject": 2,
        }
        self.change_to(replaced(self.config, **{field: max(counted[field] - less, 0)}))
        if self.one_of(BOTH):
            self.enforce_limits(self.one_of(SLICES))

    def change_to(self, config: StreamConfig) -> None:
        self.naive.tick(self.now_ns)
        retentions = {config.retention, self.config.retention}
        if len(retentions) > 1 and "workqueue" in retentions:
            refused = Refused(errors.STREAM_UPDATE_REFUSED.code)
            self.do(self.configure(config), self.expect(refused))
            return
        changed = config != self.config
        self.config, self.naive.config = config, self.own(config)
        if len(retentions) > 1:
            self.naive.recheck(0, self.naive.last_seq + 1)
        self.do(self.configure(config), self.expect(Done(changed=changed)))

    @rule(8, count=range(1, 6), leave_open=BOTH)
    def append(self, count: int, leave_open: bool) -> None:
        self._append(count, leave_open, with_expectations=False)

    @rule(2, count=range(1, 6), leave_open=BOTH, plain=BOTH)
    def append_as_one(self, count: int, leave_open: bool, plain: bool) -> None:
        self._append(count, leave_open, with_expectations=not plain, atomic=True)

    @rule(3, count=range(1, 6), leave_open=BOTH)
    def append_with_expectations(self, count: int, leave_open: bool) -> None:
        self._append(count, leave_open, with_expectations=True)

    def _append(
        self,
        count: int,
        leave_open: bool,
        with_expectations: bool,
        atomic: bool = False,
    ) -> None:
        if with_expectations:
            self.close_entry()  # proofs are of what is applied
        batch = []
        for at in range(count):
            subject = self.one_of([*self.subjects * 3, FOREIGN])
            expected = self._draw_expected(at, subject) if with_expectations else None
            ttl_ns = self.one_of(self.ttls)
            headers = self.one_of(HEADERS)
            batch.append(
                Message(
                    subject,
                    b"x" * self.one_of([0, 1, 3, 7, 14]),
                    headers if ttl_ns is None else {**(headers or {}), "nats-ttl": [str(ttl_ns)]},
                    self.one_of([None] * 8 + IDS),
                    expected,
                    self.one_of([None] * 30 + ["sub", "sub", "sub" if at else "all"]),
                    ttl_ns,
                )
            )
        take = self.naive.append_atomic if atomic else self.naive.append
        expected_outcomes = take(self.now_ns, batch)

        def check(result: Result) -> None:
            assert outcomes(result, len(batch)) == expected_outcomes

        command = append_of(batch, atomic=atomic)
        if self.one_of(BOTH):  # which changes nothing for the machine
            command = sealed(self.config, command)
        self.do(command, check, leave_open)

    def _draw_expected(self, at: int, subject: str) -> Expected | None:
        off_by = self.one_of([0, 0, 1])
        kind = self.one_of(["none", "stream", "seq", "subject", "pattern", "id"])
        match kind:
            case "stream":
                return Expected(stream="T" if off_by else "S")
            case "seq":
                return Expected(last_seq=self.naive.last_seq + at + off_by)
            case "subject":
                return self._with_proof(None, subject, off_by)
            case "pattern":
                pattern = self.one_of(PATTERNS)
                return self._with_proof(pattern, pattern, off_by)
            case "id":
                return Expected(last_msg_id="id-0" if off_by else self.naive.last_id)
        return None

    def _with_proof(self, asked: str | None, pattern: str, off_by: int) -> Expected:
        newest, machine = self.naive.last_of(pattern), self.rig.machine
        if is_wildcard(pattern):
            as_of = machine.counters.last_seq
        elif machine.last_live(pattern) is None:
            as_of = machine.subjects.last_seq(pattern)
        else:
            return Expected(last_subject_seq=newest + off_by, last_subject_seq_subject=asked)
        return ProvenExpected(
            last_subject_seq=newest + off_by,
            last_subject_seq_subject=asked,
            as_of=as_of,
            newest=newest,
        )

    @rule(2, offset=range(-2, 9), at_most=SLICES)
    def purge_below(self, offset: int, at_most: int) -> None:
        to_seq = self.naive.first_seq + offset
        found = self.naive.trim(self.now_ns, to_seq, at_most)
        expected = Removed(*found) if isinstance(found, tuple) else Refused(found)
        self.do(cmd.Trim(to_seq, at_most), self.expect(expected))

    @rule(1)
    def purge_everything(self) -> None:
        found = self.naive.trim(self.now_ns, 1 << 62, 0)
        expected = Removed(*found) if isinstance(found, tuple) else Refused(found)
        self.do(cmd.Trim(1 << 62, 1), self.expect(expected))

    @rule(
        6,
        reason=["purge", "shredded", "limit", "rollup"],
        count=range(4),
        meanwhile=["", "append", "delete", "limits"],
    )
    def remove(self, reason: cmd.RemovalReason, count: int, meanwhile: str) -> None:
        """What a leader found; other changes may come before its command does."""
        self.close_entry()
        found = []
        for subject in self.rng.sample(SUBJECTS, count):
            own = [each for each in self.naive.messages if each.subject == subject]
            found += own[: self.one_of(range(len(own) + 1))]
        found.sort(key=lambda each: each.seq)
        ids = self.rig.machine.subjects.ids
        command = cmd.Remove.of(
            reason,
            np.array([each.seq for each in found], np.int64),
            np.array([ids[each.subject] for each in found], np.uint32),
            np.array([each.size for each in found], np.int64),
        )
        if meanwhile == "append":
            self._append(2, leave_open=False, with_expectations=False)
        if meanwhile == "delete" and found and not self.config.deny_delete:
            self.delete_message(self.one_of(found).seq)
        if meanwhile == "limits":
            self.enforce_limits(self.one_of(SLICES))
        refusal = self.naive.purge_refusal(self.now_ns)
        refusal = refusal if reason == "purge" else 0
        gone = self.naive.remove(found, by_limit=reason == "limit") if not refusal else 0
        self.do(command, self.expect(Refused(refusal) if refusal else Removed(gone)))

    @rule(3, missing=MAYBE)
    def delete(self, missing: bool) -> None:
        seqs = [message.seq for message in self.naive.messages] or [1]
        seq = self.naive.last_seq + 1 if missing else self.one_of(seqs)
        self.delete_message(seq)

    def delete_message(self, seq: int) -> None:
        code = self.naive.delete(self.now_ns, seq)
        self.do(cmd.DeleteMessage(seq), self.expect(Refused(code) if code else Removed(1)))

    @rule(2, at_most=SLICES)
    def expire_by_age(self, at_most: int) -> None:
        found = self.naive.expire_age(self.now_ns, at_most)
        self.do(cmd.ExpireAge(at_most), self.expect(Removed(*found)))

    @rule(
        9,
        later_ns=[0, 1, 8],
        at_most=range(1, 5),
        by_age=BOTH,
        meanwhile=["", "", "", "append", "delete", "hasty"],
    )
    def expire(self, later_ns: int, at_most: int, by_age: bool, meanwhile: str) -> None:
        """What a leader finds due; other changes may come before its command does.

        ``hasty``: the leader took a message that is not due, as by an earlier configuration.
        """
        self.close_entry()
        self.now_ns += later_ns
        naive, table = self.naive, self.rig.machine.subjects
        now_ns = naive.tick(self.now_ns)
        rows = sorted(key for key in naive.deadlines if key[0] <= now_ns)[:at_most]
        seqs = sorted({seq for row in rows for seq in naive.deadlines[row] if naive.find(seq)})
        if by_age:
            rows, seqs = [], [each.seq for each in naive.aged(now_ns)][:at_most]
        markers = [seq for seq in seqs if self.one_of(BOTH)]
        if meanwhile == "hasty" and not rows and naive.messages:
            seqs = sorted({*seqs, self.one_of(naive.messages).seq})
        command = cmd.Expire(
            np.array(seqs, np.int64).tobytes(),
            np.array(rows, np.int64).tobytes(),
            np.array(markers, np.int64).tobytes(),
        )
        if meanwhile == "append":
            self._append(2, leave_open=False, with_expectations=False)
        if meanwhile == "delete" and naive.messages and not self.config.deny_delete:
            self.delete_message(self.one_of(naive.messages).seq)
        self.close_entry()
        order = [name for _, name in sorted(table.live())]
        aged = {each.seq for each in naive.aged(now_ns)}
        live = [seq for seq in seqs if naive.find(seq)]
        if not rows and not aged.issuperset(live):
            self.do(command, self.expect(Removed(0)))  # not all of them are due
            return
        count = naive.expire(self.now_ns, seqs, rows, markers, order)
        self.do(command, self.expect(Removed(count)))

    @rule(3, at_most=SLICES)
    def enforce_limits(self, at_most: int) -> None:
        self.naive.tick(self.now_ns)
        found = self.naive.enforce_limits(at_most)
        self.do(cmd.EnforceLimits(at_most), self.expect(Removed(*found)))

    # Interest ------------------------------------------------------------------------------------

    @rule(4, at_most=[1, 2, 100])
    def enforce_interest(self, at_most: int) -> None:
        self.close_entry()
        self.naive.tick(self.now_ns)
        removed = self.naive.enforce_interest(at_most, interest.CHECKS_MAX)
        more = self.naive.pending_recheck != (0, 0)
        self.do(cmd.EnforceInterest(at_most), self.expect(Removed(removed, more)))

    # Consumers -----------------------------------------------------------------------------------

    def consumer_id(self, name: str) -> int:
        """The number that the machine gives or gave to the consumer ``name``."""
        return self.numbers.get(name, 99)

    def any_consumer(self, name: str) -> ConsumerConfig:
        return consumer_config(
            name, **{each: self.one_of(values) for each, values in CONSUMERS.items()}
        )

    @rule(6, name=NAMES, offset=[-1, 0, 0, 1, None])
    def put_consumer(self, name: str, offset: int | None) -> None:
        """One that is there gets another value in a field or two."""
        config, known = self.any_consumer(name), self.naive.consumers.get(name)
        if known is not None:
            some = self.rng.sample(sorted(CONSUMERS), self.one_of([1, 1, 2]))
            config = msgspec.structs.replace(
                known.config, **{each: getattr(config, each) for each in some}
            )
        self.put_consumer_of(config, 0 if offset is None else max(self.naive.first_seq + offset, 1))

    def put_consumer_of(self, config: ConsumerConfig, start_seq: int) -> None:
        name = config.name
        naive, known = self.naive, self.naive.consumers.get(name)
        now_ns = naive.tick(self.now_ns)
        expected: Result
        code = self.naive.misfit(config)
        if code:
            expected = Refused(code)
        elif known is not None:
            if known.config != config:
                if known.config.filter_subjects != config.filter_subjects:
                    naive.shrink(known)
                elif config.max_deliver < 0 or config.max_deliver > known.config.max_deliver:
                    given_up = sorted(known.given_up & self.live())
                    if given_up:
                        naive.recheck(given_up[0], given_up[-1] + 1)
                known.reconfigure(config)
                known.version += 1
                known.move_floor(now_ns)
            expected = ConsumerPut(self.numbers[name], created=False)
        elif 0 <= self.config.max_consumers <= len(naive.consumers):
            expected = Refused(errors.CONSUMER_LIMIT.code)
        else:
            naive.consumers_made += 1
            self.numbers[name] = naive.consumers_made
            naive.consumers[name] = NaiveConsumer(config, start_seq or naive.last_seq + 1)
            expected = ConsumerPut(naive.consumers_made, created=True)
        self.do(cmd.PutConsumer(config, start_seq), self.expect(expected))

    @rule(2, name=NAMES)
    def drop_consumer(self, name: str) -> None:
        self.naive.tick(self.now_ns)
        known = self.naive.consumers.pop(name, None)
        if known is not None:
            self.naive.shrink(known)
        expected = Done() if known else Refused(errors.CONSUMER_NOT_FOUND.code)
        self.do(cmd.DropConsumer(self.consumer_id(name)), self.expect(expected))

    def change(
        self,
        name: str,
        command: cmd.Command,
        take: Callable[[NaiveConsumer, int], set[int] | None],
    ) -> None:
        """Send a change of a consumer and let ``take`` do the same to the naive one."""
        now_ns = self.naive.tick(self.now_ns)
        consumer = self.naive.consumers.get(name)
        if consumer is None:
            self.do(command, self.expect(Refused(errors.CONSUMER_NOT_FOUND.code)))
            return
        consumer.forget_below(self.naive.first_seq)
        consumer.move_floor(now_ns)
        from_seq = consumer.next_seq
        settled = take(consumer, now_ns)
        consumer.move_floor(now_ns)
        consumer.forget_all_but(self.live())
        consumer.move_floor(now_ns)
        consumer.forget_below(self.naive.first_seq)
        self.naive.settle(consumer, settled or set(), interest.CHECKS_MAX)
        if isinstance(command, cmd.Advance):
            self.naive.recheck(from_seq, consumer.next_seq)
        self.do(command, self.expect(Done()))

    @rule(
        8,
        name=NAMES,
        count=range(5),
        again=range(3),
        removed=BOTH,
        acked=MAYBE,
    )
    def deliver(
        self, name: str, count: int, again: int, removed: bool, acked: bool = False
    ) -> None:
        """``removed``: also messages that went away between their delivery and its record.

        ``acked``: all or some of them were acknowledged before that.
        """
        consumer = self.naive.consumers.get(name)
        seqs: list[int] = []
        position = 1
        if consumer is not None:
            seqs = sorted(consumer.pending)[:again]
            position = max(consumer.next_seq, self.naive.first_seq)
            to_come = [m for m in self.naive.messages if m.seq >= position]
            fresh = [m.seq for m in to_come if consumer.matches(m.subject)][:count]
            if removed and fresh:
                fresh = list(range(position, fresh[-1] + 1))
            seqs += fresh
            position = fresh[-1] + 1 if fresh else position
        acks: list[int] = []
        command: cmd.Command = cmd.Deliver(self.consumer_id(name), 1, seqs, position)
        if acked:
            acks = seqs if self.one_of(BOTH) else [self.one_of([*seqs, 1]) for _ in range(2)]
            given = None if acks is seqs else acks
            command = cmd.DeliverAcked(self.consumer_id(name), 1, seqs, position, given)

        def take(consumer: NaiveConsumer, now_ns: int) -> set[int]:
            settled = consumer.deliver(now_ns, seqs, position)
            for seq in acks:
                settled |= consumer.acknowledge(now_ns, "ack", seq, 0)
            return settled & self.live()

        self.change(name, command, take)

    def live(self) -> set[int]:
        """The sequences of the naive stream's messages."""
        return {message.seq for message in self.naive.messages}

    @rule(3, name=NAMES, count=range(5), again=MAYBE)
    def advance(self, name: str, count: int, again: bool) -> None:
        consumer = self.naive.consumers.get(name)
        reached = (0, 0, 1)
        if consumer is not None and not again:  # otherwise one of long ago
            position = max(consumer.next_seq, self.naive.first_seq)
            given = [m.seq for m in self.naive.messages if m.seq >= position][:count]
            last = given[-1] if given else consumer.stream_seq
            reached = (consumer.consumer_seq + len(given), last, max(last + 1, position))
        self.change(
            name,
            cmd.Advance(self.consumer_id(name), 1, *reached),
            lambda consumer, _: consumer.advance(*reached),
        )

    @rule(8, name=NAMES, ahead=MAYBE)
    def acknowledge(self, name: str, ahead: bool) -> None:
        consumer = self.naive.consumers.get(name)
        pending = sorted(consumer.pending) if consumer else []
        choices = [*pending, *([consumer.next_seq] if consumer and ahead else []), 1]
        acked = [self.one_of(choices) for _ in range(self.one_of(range(4)))]
        kinds: list[AckKind] = ["ack", "nak", "term", "in_progress"]
        others = [
            (self.one_of(kinds), self.one_of(choices), self.one_of([0, 3, 7]))
            for _ in range(self.one_of(range(3)))
        ]
        self.acknowledge_these(name, acked, others)

    def acknowledge_these(
        self, name: str, acked: list[int], others: list[tuple[AckKind, int, int]]
    ) -> None:
        def take(consumer: NaiveConsumer, now_ns: int) -> set[int]:
            settled = set()
            for seq in acked:
                settled |= consumer.acknowledge(now_ns, "ack", seq, 0)
            for kind, seq, delay_ns in others:
                settled |= consumer.acknowledge(now_ns, kind, seq, delay_ns)
            return settled

        self.change(name, cmd.Acknowledge(self.consumer_id(name), 1, acked, others), take)

    @rule(4, name=NAMES, count=range(3))
    def exhaust(self, name: str, count: int) -> None:
        consumer = self.naive.consumers.get(name)
        seqs = sorted(consumer.pending)[:count] if consumer else []

        def take(consumer: NaiveConsumer, _now_ns: int) -> None:
            consumer.give_up(seqs)

        self.change(name, cmd.Exhaust(self.consumer_id(name), 1, seqs), take)

    @rule(1, name=NAMES)
    def acknowledge_in_an_earlier_epoch(self, name: str) -> None:
        self.naive.tick(self.now_ns)
        known = name in self.naive.consumers
        code = (errors.TOKEN_STALE if known else errors.CONSUMER_NOT_FOUND).code
        self.do(
            cmd.Acknowledge(self.consumer_id(name), 0, [self.naive.last_seq]),
            self.expect(Refused(code)),
        )


def replaced(config: StreamConfig, **fields: Any) -> StreamConfig:
    """``config`` with other fields."""
    known = {name: getattr(config, name) for name in config.__struct_fields__}
    return StreamConfig(**{**known, **fields})


@pytest.mark.long
def test_machine_is_the_naive_stream_over_any_history() -> None:
    explore(StreamComparison)


@pytest.mark.long
def test_machine_is_the_naive_stream_when_pages_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_pages_small(monkeypatch)
    explore(StreamComparison)


class RoundComparison(StreamComparison):
    """The same where numbers of subjects come round again after a few."""

    first_number = 44


@pytest.mark.long
def test_machine_is_the_naive_stream_when_numbers_of_subjects_come_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_pages_small(monkeypatch)
    monkeypatch.setattr(subject_table, "PAGE", 4)
    monkeypatch.setattr(subject_names, "RUN", 8)
    monkeypatch.setattr(subject_names, "END", 48)
    explore(RoundComparison)


def test_messages_that_went_before_their_delivery_was_recorded_are_not_pending() -> None:
    comparison = StreamComparison()
    comparison.make(StreamConfig(name="S", subjects=("a",)), 1)
    comparison.put_consumer_of(consumer_config("red", max_ack_pending=2), 1)
    comparison.do(append_of([Message("a")] * 6), lambda _: None)
    comparison.naive.append(comparison.now_ns, [Message("a")] * 6)
    for seq in (2, 4, 5):
        comparison.naive.delete(comparison.now_ns, seq)
        comparison.do(cmd.DeleteMessage(seq), comparison.expect(Removed(1)))
    comparison.deliver("red", 2, 0, removed=True)  # 1 to 3: one of them has gone meanwhile
    comparison.restart()
    comparison.deliver("red", 2, 2, removed=True)  # both again, and 4 to 6
    comparison.restart()
    comparison.consumers_agree()
    assert sorted(comparison.rig.machine.consumers[1].pending) == [1, 3, 6]


def make_pages_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have everything that goes in parts go in parts after a few messages."""
    for module, name, value in (
        (subject_table, "PAGE", 4),
        (subject_table, "_DELTA_ROWS_MAX", 5),
        (deleted, "PAGE", 8),
        (deadlines, "PAGE", 8),
        (interest, "CHECKS_MAX", 4),
        (consumer_machine, "_FOLD_ROWS", 3),
        (consumer_machine, "_FOLD_BYTES_MIN", 0),
    ):
        monkeypatch.setattr(module, name, value)
