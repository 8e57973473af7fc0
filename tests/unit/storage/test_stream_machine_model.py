"""The stream machine against a plain list, over restarts, and against a twin with other blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    rule,
    run_state_machine_as_test,
)

from contrail_common import errors
from contrail_common.model import TTL_NEVER, AckKind, ConsumerConfig, Expected, StreamConfig
from contrail_storage.core import commands as cmd
from contrail_storage.core import consumer_machine, deleted
from contrail_storage.core.results import ConsumerPut, Done, Refused, Removed, Result
from contrail_storage.core.stream import deadlines
from contrail_storage.core.stream.removal import deletion, interest
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

SUBJECTS = ["a", "b", "a.x", "a.y", "b.x.y"]
FOREIGN = "elsewhere"
PATTERNS = [*SUBJECTS, "a.*", "*", ">", "b.>", "*.x", "nothing"]
HEADERS = [None, None, {"Name": ["value", ""]}, {"ä": []}]
NAMES = ["red", "blue"]
SLICES = [0, 1, 2, 3, 100]

maybe = st.sampled_from([False, False, False, True])
seldom = st.sampled_from([False] * 11 + [True])
limits = st.sampled_from([-1, -1, 1, 2, 5])
configs = st.builds(
    StreamConfig,
    name=st.just("S"),
    subjects=st.sampled_from([("a", "b", "*.*", "b.x.y"), ("a", "b", "a.>", "b.>"), ("a.x",)]),
    retention=st.sampled_from(["limits", "limits", "interest", "workqueue"]),
    discard=st.sampled_from(["old", "old", "new"]),
    max_msgs=limits,
    max_bytes=st.sampled_from([-1, -1, 0, 12, 40]),
    max_age_ns=st.sampled_from([0, 5, 15]),
    max_msgs_per_subject=st.sampled_from([-1, -1, 1, 2]),
    discard_new_per_subject=maybe,
    max_msg_size=st.sampled_from([-1, -1, 10]),
    max_consumers=st.sampled_from([-1, 1]),
    duplicate_window_ns=st.sampled_from([1, 4, 10, 1_000]),
    sealed=seldom,
    deny_delete=seldom,
    deny_purge=seldom,
    allow_rollup_hdrs=st.booleans(),
    allow_atomic=st.booleans(),
    allow_msg_ttl=st.sampled_from([True, True, False]),
    subject_delete_marker_ttl_ns=st.sampled_from([0, 0, 4]),
)


class StreamComparison(StreamAgreement):
    """Drives a machine, a twin whose blocks are merged otherwise, and the naive stream."""

    first_number = 0
    """Of a subject."""

    @rule(step_ns=st.sampled_from([0, 1, 1, 3, 4, 10, -2]))
    def let_time_pass(self, step_ns: int) -> None:
        self.close_entry()
        self.now_ns += step_ns

    @rule()
    def restart(self) -> None:
        self.close_entry()
        before = picture(self.rig.machine, IDS)
        self.rig.restart()
        self.restarted = True
        assert picture(self.rig.machine, IDS) == before

    @rule()
    def reclaim(self) -> None:
        """One of the two replicas gets rid of what was deleted; the other may never do it."""
        self.close_entry()
        self.rig.shelf.reclaim(self.rig.machine.is_live)

    @rule()
    def recount(self) -> None:
        """What is counted from the blocks is what was counted as they came."""
        self.close_entry()
        assert self.rig.recount() == self.twin.recount() == (0, [])

    # Stream --------------------------------------------------------------------------------------

    @initialize(
        config=configs,
        first_seq=st.sampled_from([1, 1, 1_000]),
        shards=st.sampled_from([1, 1, 3]),
        shard=st.integers(0, 2),
    )
    def make(self, config: StreamConfig, first_seq: int, shards: int = 1, shard: int = 0) -> None:
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

    @rule(config=configs, keep=st.booleans())
    def change_configuration(self, config: StreamConfig, keep: bool) -> None:
        config = replaced(config, first_seq=self.config.first_seq, shards=self.config.shards)
        if keep:
            config = replaced(config, retention=self.config.retention)
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

    @rule(data=st.data(), count=st.integers(1, 5), leave_open=st.booleans())
    def append(self, data: st.DataObject, count: int, leave_open: bool) -> None:
        self._append(data, count, leave_open, with_expectations=False)

    @rule(data=st.data(), count=st.integers(1, 5), leave_open=st.booleans(), plain=st.booleans())
    def append_as_one(self, data: st.DataObject, count: int, leave_open: bool, plain: bool) -> None:
        self._append(data, count, leave_open, with_expectations=not plain, atomic=True)

    @rule(data=st.data(), count=st.integers(1, 5), leave_open=st.booleans())
    def append_with_expectations(self, data: st.DataObject, count: int, leave_open: bool) -> None:
        self._append(data, count, leave_open, with_expectations=True)

    def _append(
        self,
        data: st.DataObject,
        count: int,
        leave_open: bool,
        with_expectations: bool,
        atomic: bool = False,
    ) -> None:
        if with_expectations:
            self.settle_last_messages()
        batch = []
        for at in range(count):
            subject = data.draw(st.sampled_from([*SUBJECTS, *SUBJECTS, FOREIGN]))
            expected = self._draw_expected(data, at, subject) if with_expectations else None
            ttl_ns = self.draw_ttl(data)
            headers = data.draw(st.sampled_from(HEADERS))
            batch.append(
                Message(
                    subject,
                    b"x" * data.draw(st.sampled_from([0, 1, 3, 7, 14])),
                    headers if ttl_ns is None else {**(headers or {}), "nats-ttl": [str(ttl_ns)]},
                    data.draw(st.sampled_from([None, *IDS])),
                    expected,
                    data.draw(st.sampled_from([None] * 6 + ["sub", "sub", "sub" if at else "all"])),
                    ttl_ns,
                )
            )
        take = self.naive.append_atomic if atomic else self.naive.append
        expected_outcomes = take(self.now_ns, batch)

        def check(result: Result) -> None:
            assert outcomes(result, len(batch)) == expected_outcomes

        command = append_of(batch, atomic=atomic)
        if data.draw(st.booleans(), label="sealed"):  # which changes nothing for the machine
            command = sealed(self.config, command)
        self.do(command, check, leave_open)

    def draw_ttl(self, data: st.DataObject) -> int | None:
        return data.draw(st.sampled_from([None] * 6 + [1, 3, 8, TTL_NEVER]))

    def _draw_expected(self, data: st.DataObject, at: int, subject: str) -> Expected | None:
        off_by = data.draw(st.sampled_from([0, 0, 1]))
        kind = data.draw(st.sampled_from(["none", "stream", "seq", "subject", "pattern", "id"]))
        match kind:
            case "stream":
                return Expected(stream="T" if off_by else "S")
            case "seq":
                return Expected(last_seq=self.naive.last_seq + at + off_by)
            case "subject":
                return Expected(last_subject_seq=self.naive.last_of(subject) + off_by)
            case "pattern":
                pattern = data.draw(st.sampled_from(PATTERNS))
                return Expected(
                    last_subject_seq=self.naive.last_of(pattern) + off_by,
                    last_subject_seq_subject=pattern,
                )
            case "id":
                return Expected(last_msg_id="id-0" if off_by else self.naive.last_id)
        return None

    @rule(offset=st.integers(-2, 8), at_most=st.sampled_from(SLICES))
    def purge_below(self, offset: int, at_most: int) -> None:
        to_seq = self.naive.first_seq + offset
        found = self.naive.trim(self.now_ns, to_seq, at_most)
        expected = Removed(*found) if isinstance(found, tuple) else Refused(found)
        self.do(cmd.Trim(to_seq, at_most), self.expect(expected))

    @rule()
    def purge_everything(self) -> None:
        found = self.naive.trim(self.now_ns, 1 << 62, 0)
        expected = Removed(*found) if isinstance(found, tuple) else Refused(found)
        self.do(cmd.Trim(1 << 62, 1), self.expect(expected))

    @rule(
        subjects=st.lists(st.sampled_from([*SUBJECTS, FOREIGN]), max_size=3),
        offset=st.integers(-2, 8),
        at_most=st.sampled_from(SLICES[1:]),
    )
    def purge_subjects(self, subjects: list[str], offset: int, at_most: int) -> None:
        to_seq = self.naive.first_seq + offset
        found = self.naive.purge_subjects(self.now_ns, subjects, to_seq, at_most)

        def check(result: Result) -> None:
            if isinstance(found, int):
                self.expect(Refused(found))(result)
                return
            assert isinstance(result, Removed)
            count, more = found
            assert result.count == count
            assert result.more or not more  # it may have to look where nothing is

        self.do(cmd.PurgeSubjects(subjects, to_seq, at_most), check)

    @rule(data=st.data(), missing=maybe)
    def delete(self, data: st.DataObject, missing: bool) -> None:
        seqs = [message.seq for message in self.naive.messages] or [1]
        seq = self.naive.last_seq + 1 if missing else data.draw(st.sampled_from(seqs))
        previous_seq = self.naive.previous_of(seq)
        code = self.naive.delete(self.now_ns, seq)
        self.do(
            cmd.DeleteMessage(seq, previous_seq), self.expect(Refused(code) if code else Removed(1))
        )

    @rule(at_most=st.sampled_from(SLICES))
    def expire_by_age(self, at_most: int) -> None:
        found = self.naive.expire_age(self.now_ns, at_most)
        self.do(cmd.ExpireAge(at_most), self.expect(Removed(*found)))

    @rule(
        data=st.data(),
        later_ns=st.sampled_from([0, 1, 8]),
        at_most=st.integers(1, 4),
        by_age=st.booleans(),
        meanwhile=maybe,
    )
    def expire(
        self, data: st.DataObject, later_ns: int, at_most: int, by_age: bool, meanwhile: bool
    ) -> None:
        """What a leader finds due; messages may come before its command does."""
        self.close_entry()
        self.now_ns += later_ns
        naive, table = self.naive, self.rig.machine.subjects
        now_ns = naive.tick(self.now_ns)
        rows = sorted(key for key in naive.deadlines if key[0] <= now_ns)[:at_most]
        seqs = sorted({seq for row in rows for seq in naive.deadlines[row] if naive.find(seq)})
        if by_age:
            rows, seqs = [], [each.seq for each in naive.aged(now_ns)][:at_most]
        own = {each.subject for each in naive.messages if each.seq in seqs}
        newest = [
            name for name in sorted(own, key=table.ids.__getitem__) if self._is_due(name, seqs)
        ]
        older = [each for each in naive.messages if each.seq not in seqs and each.subject in newest]
        previous = {table.ids[each.subject]: each.seq for each in older}
        marking = [name for name in newest if data.draw(st.booleans())]
        command = cmd.Expire(
            np.array(seqs, np.int64).tobytes(),
            np.array(rows, np.int64).tobytes(),
            previous,
            np.array(sorted(map(naive.last_of, marking)), np.int64).tobytes(),
        )
        if meanwhile:
            self._append(data, 2, leave_open=False, with_expectations=False)
        marking.sort(key=lambda name: table.ids.get(name, 0))
        count = naive.expire(self.now_ns, seqs, rows, marking)
        self.do(command, self.expect(Removed(count)))

    def _is_due(self, subject: str, seqs: list[int]) -> bool:
        """Whether the newest message of a subject is among ``seqs``."""
        return self.naive.last_of(subject) in seqs

    @rule(at_most=st.sampled_from(SLICES))
    def enforce_limits(self, at_most: int) -> None:
        self.naive.tick(self.now_ns)
        found = self.naive.enforce_limits(at_most)
        self.do(cmd.EnforceLimits(at_most), self.expect(Removed(*found)))

    # Interest ------------------------------------------------------------------------------------

    @rule(at_most=st.sampled_from([1, 2, 100]))
    def enforce_interest(self, at_most: int) -> None:
        self.close_entry()
        self.naive.tick(self.now_ns)
        searches = bool(self.rig.machine.subjects.unsettled)
        removed = 0 if searches else self.naive.enforce_interest(at_most, interest.CHECKS_MAX)
        more = self.naive.pending_recheck != (0, 0)

        def check(result: Result) -> None:
            assert isinstance(result, Removed)
            assert result.count == removed
            assert result.more or not more  # last messages may be left to find

        self.do(cmd.EnforceInterest(at_most), check)

    def settle_last_messages(self) -> None:
        """Until then an expectation may be refused that the naive stream can answer."""
        self.close_entry()
        while self.rig.machine.subjects.unsettled:
            self.enforce_interest(100)

    # Consumers -----------------------------------------------------------------------------------

    def consumer_id(self, name: str) -> int:
        """The number that the machine gives or gave to the consumer ``name``."""
        return self.numbers.get(name, 99)

    @property
    def numbers(self) -> dict[str, int]:
        return self.__dict__.setdefault("_numbers", {})

    @rule(
        name=st.sampled_from(NAMES),
        ack_policy=st.sampled_from(["explicit", "explicit", "all", "none"]),
        backoff_ns=st.sampled_from([(), (), (2, 5)]),
        offset=st.sampled_from([-1, 0, 1, None]),
        filters=st.sampled_from([(), (), ("a",), ("a.*",), ("b", "a.>"), ("*.x",), ("c", "a.y")]),
        max_deliver=st.sampled_from([-1, -1, 1, 2]),
        policy=st.sampled_from(["all"] * 5 + ["new"]),
    )
    def put_consumer(
        self,
        name: str,
        ack_policy: str,
        backoff_ns: tuple[int, ...],
        offset: int | None,
        filters: tuple[str, ...],
        max_deliver: int,
        policy: str,
    ) -> None:
        config = consumer_config(
            name,
            ack_policy=ack_policy,
            ack_wait_ns=5,
            backoff_ns=backoff_ns,
            filter_subjects=filters,
            max_deliver=max_deliver,
            deliver_policy=policy,
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

    @rule(name=st.sampled_from(NAMES))
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
        name=st.sampled_from(NAMES),
        count=st.integers(0, 4),
        again=st.integers(0, 2),
        removed=st.booleans(),
    )
    def deliver(self, name: str, count: int, again: int, removed: bool) -> None:
        """``removed``: also messages that went away between their delivery and its record."""
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
        self.change(
            name,
            cmd.Deliver(self.consumer_id(name), 1, seqs, position),
            lambda consumer, now_ns: consumer.deliver(now_ns, seqs, position) & self.live(),
        )

    def live(self) -> set[int]:
        """The sequences of the naive stream's messages."""
        return {message.seq for message in self.naive.messages}

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 4), again=maybe)
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

    @rule(name=st.sampled_from(NAMES), data=st.data(), ahead=maybe)
    def acknowledge(self, name: str, data: st.DataObject, ahead: bool) -> None:
        consumer = self.naive.consumers.get(name)
        pending = sorted(consumer.pending) if consumer else []
        choices = [*pending, *([consumer.next_seq] if consumer and ahead else []), 1]
        acked = data.draw(st.lists(st.sampled_from(choices), max_size=3))
        kinds = st.sampled_from(["ack", "nak", "term", "in_progress"])
        others = data.draw(
            st.lists(
                st.tuples(kinds, st.sampled_from(choices), st.sampled_from([0, 3, 7])), max_size=2
            )
        )

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

    @rule(name=st.sampled_from(NAMES), count=st.integers(0, 2))
    def exhaust(self, name: str, count: int) -> None:
        consumer = self.naive.consumers.get(name)
        seqs = sorted(consumer.pending)[:count] if consumer else []

        def take(consumer: NaiveConsumer, _now_ns: int) -> None:
            consumer.give_up(seqs)

        self.change(name, cmd.Exhaust(self.consumer_id(name), 1, seqs), take)

    @rule(name=st.sampled_from(NAMES))
    def acknowledge_in_an_earlier_epoch(self, name: str) -> None:
        self.naive.tick(self.now_ns)
        known = name in self.naive.consumers
        code = (errors.TOKEN_STALE if known else errors.CONSUMER_NOT_FOUND).code
        self.do(
            cmd.Acknowledge(self.consumer_id(name), 0, [self.naive.last_seq]),
            self.expect(Refused(code)),
        )

    def teardown(self) -> None:
        self.close_entry()


def replaced(config: StreamConfig, **fields: Any) -> StreamConfig:
    """``config`` with other fields."""
    known = {name: getattr(config, name) for name in config.__struct_fields__}
    return StreamConfig(**{**known, **fields})


@pytest.mark.long
def test_machine_is_the_naive_stream_over_any_history() -> None:
    run_state_machine_as_test(StreamComparison, settings=settings())


@pytest.mark.long
def test_machine_is_the_naive_stream_when_pages_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_pages_small(monkeypatch)
    run_state_machine_as_test(StreamComparison, settings=settings())


class RoundComparison(StreamComparison):
    """The same where numbers of subjects come round again after a few."""

    first_number = 44


@pytest.mark.long
def test_machine_is_the_naive_stream_when_numbers_of_subjects_come_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_pages_small(monkeypatch)
    monkeypatch.setattr(subject_names, "RUN", 8)
    monkeypatch.setattr(subject_names, "END", 48)
    run_state_machine_as_test(RoundComparison, settings=settings())


def test_messages_that_went_before_their_delivery_was_recorded_are_not_pending() -> None:
    comparison = StreamComparison()
    comparison.make(StreamConfig(name="S", subjects=("a",)), 1)
    comparison.put_consumer_of(consumer_config("red", max_ack_pending=2), 1)
    comparison.do(append_of([Message("a")] * 6), lambda _: None)
    comparison.naive.append(comparison.now_ns, [Message("a")] * 6)
    for seq in (2, 4, 5):
        comparison.naive.delete(comparison.now_ns, seq)
        comparison.do(cmd.DeleteMessage(seq, seq - 1), comparison.expect(Removed(1)))
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
        (deletion, "APPLY_SEQS", 1),
        (interest, "ALONE_SEQS", 2),
        (interest, "CHECKS_MAX", 4),
        (consumer_machine, "_FOLD_ROWS", 3),
        (consumer_machine, "_FOLD_BYTES_MIN", 0),
    ):
        monkeypatch.setattr(module, name, value)
