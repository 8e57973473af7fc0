"""The state machine of one stream shard: ``apply`` takes a command and returns its outcome.

State per shard: configuration, counters, subject table, duplicate window, deleted set, consumers.
Messages leave the machine as blocks. It asks ``FactsPort`` for facts about older messages.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec

from contrail_common import config_rules, errors, retention_rules
from contrail_common.columns.blocks import BlockCorruptError
from contrail_common.model import (
    Advisory,
    AdvisoryAction,
    Compression,
    DataLoss,
    StreamConfig,
    StreamState,
)
from contrail_common.partition import share
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import commands as cmd
from contrail_storage.core import key_layout as keys
from contrail_storage.core.archive.format import ArchiveError, Record
from contrail_storage.core.commands import ArchiveHeader
from contrail_storage.core.consumer_machine import (
    ConsumerMachine,
    Gone,
    Reconfigured,
    allows_more,
)
from contrail_storage.core.consumer_machine import Trimmed as ConsumerTrimmed
from contrail_storage.core.dedupe import NO_ID, DedupeWindow
from contrail_storage.core.deleted import DeletedSet
from contrail_storage.core.facts import FactsPort, MessageFacts
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.preconditions import refusal
from contrail_storage.core.results import (
    ConsumerPut,
    Done,
    Refused,
    Result,
    Writes,
)
from contrail_storage.core.stream.append import Appender
from contrail_storage.core.stream.archive_records import take_record
from contrail_storage.core.stream.data_loss import accept_loss
from contrail_storage.core.stream.deadlines import Deadlines, ExemptSet
from contrail_storage.core.stream.expiry import Expirer
from contrail_storage.core.stream.interest import Interest
from contrail_storage.core.stream.removing import Remover
from contrail_storage.core.stream.shard_state import Counters, StreamRecord
from contrail_storage.core.subjects.subject_table import SubjectTable

Scan = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""All (key, value) of the store under a key prefix, in key order."""

Removal = Callable[[Any, int, int, Writes], Result]
"""Applies a command that removes messages, at a log index and a log time."""

FIRST_SEQ_MAX: Final = 1 << 62
"""Highest first sequence of a stream; sequences after it never exceed 64 bits."""


_encode = msgspec.msgpack.Encoder().encode


class StreamMachine:
    """One stream shard. It starts empty; a ``ConfigureStream`` command creates the stream."""

    def __init__(self, shard: int, facts: FactsPort) -> None:
        self.shard = shard
        self.record: StreamRecord | None = None
        self.counters = Counters(1, 0, 0, 0, 0, NO_ID, 0)
        self.subjects = SubjectTable(shard)
        self.dedupe = DedupeWindow(shard)
        self.deleted = DeletedSet(shard)
        self.exempt = ExemptSet(shard)
        self.deadlines = Deadlines(shard)
        self.consumers: dict[int, ConsumerMachine] = {}
        self.consumer_ids: dict[str, int] = {}
        self.restored_with: Compression = "none"
        """Compression of the stream that is being restored; unused once the stream exists."""
        self.loss: DataLoss | None = None
        self.deletions = 0
        """How often messages were deleted or purged since the machine was built."""
        self.subjects_over = False
        """Whether some subject may have more messages than ``max_msgs_per_subject``."""
        self._facts = facts
        self._fresh: list[MessageFacts] = []  # of the entry being applied, not yet in the port
        self._fresh_index = 0  # log index of the entry that `_fresh` belongs to
        # A configuration and this shard's share of it: see `own_config`.
        self._shared: tuple[StreamConfig, StreamConfig] | None = None
        self._appender = Appender(self)
        self.remover = Remover(self)
        self.expirer = Expirer(self, self._appender)
        self.interest = Interest(self)
        self._removals: dict[type, Removal] = {
            cmd.ExpireAge: self.remover.expire_age,
            cmd.Expire: self.expirer.expire,
            cmd.KeepInterest: self.interest.keep,
            cmd.EnforceLimits: self.remover.enforce_limits,
            cmd.Trim: self.remover.trim,
            cmd.PurgeSubjects: self.remover.purge_subjects,
            cmd.FinishRollup: self.remover.finish_rollup,
            cmd.DeleteMessage: self.remover.delete,
        }

    # Reading the state ---------------------------------------------------------------------------

    @property
    def exists(self) -> bool:
        """Whether the stream has been created."""
        return self.record is not None

    def holds_anything(self) -> bool:
        """Whether there is a stream, or a part of one that is being restored."""
        parts = self.subjects.ids, self.dedupe, self.deleted.pages(), self.consumers
        return self.exists or any(len(part) > 0 for part in parts)

    @property
    def config(self) -> StreamConfig:
        """The stream's configuration; the stream must exist."""
        assert self.record is not None
        return self.record.config

    @property
    def part(self) -> int:
        """Number of this shard in its stream, from 0."""
        return 0 if self.record is None else self.record.part

    @property
    def own_config(self) -> StreamConfig:
        """The configuration, with this shard's share of ``max_msgs`` and ``max_bytes``."""
        config = self.config
        if config.shards <= 1:
            return config
        if self._shared is None or self._shared[0] is not config:
            own = msgspec.structs.replace(
                config,
                max_msgs=share(config.max_msgs, config.shards, self.part),
                max_bytes=share(config.max_bytes, config.shards, self.part),
            )
            self._shared = config, own
        return self._shared[1]

    @property
    def compression(self) -> Compression:
        """Compression of new blocks, also for a stream that is being restored."""
        return self.restored_with if self.record is None else self.record.config.compression

    def state(self, *, timed: bool = True) -> StreamState:
        """The counters as a public state; reads the time of the first message only if ``timed``."""
        counters = self.counters
        first_ts = 0
        if counters.messages and timed:
            facts = self.facts_at(counters.first_seq)
            first_ts = int(facts.times_ns[counters.first_seq - facts.base_seq])
        return StreamState(
            messages=counters.messages,
            bytes=counters.bytes,
            first_seq=counters.first_seq,
            first_ts_ns=first_ts,
            last_seq=counters.last_seq,
            last_ts_ns=counters.last_time_ns,
            num_subjects=len(self.subjects),
            num_deleted=self.deleted.count(counters.first_seq, counters.last_seq),
            consumer_count=len(self.consumers),
        )

    def is_live(self, seq: int) -> bool:
        """Whether the stream has a message with sequence ``seq`` now."""
        counters = self.counters
        return counters.first_seq <= seq <= counters.last_seq and seq not in self.deleted

    @property
    def over_limits(self) -> bool:
        """Whether the stream, which must exist, or a subject exceeds a limit."""
        return self.remover.over_limits

    @property
    def pending_recheck(self) -> bool:
        """Whether messages must be checked, or the last messages of subjects must be found."""
        return self.interest.pending_recheck

    def consumer(self, name: str) -> ConsumerMachine | None:
        """The consumer called ``name``, or None."""
        consumer_id = self.consumer_ids.get(name)
        return None if consumer_id is None else self.consumers[consumer_id]

    def read_from(self, facts: FactsPort) -> None:
        """Use ``facts`` as the facts port from now on."""
        self._facts = facts

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of a run of messages that holds ``seq``; messages of the current entry count."""
        for facts in self._fresh:
            if facts.base_seq <= seq < facts.end_seq:
                return facts
        return self._facts.facts_at(seq)

    # Applying ------------------------------------------------------------------------------------

    def apply(self, index: int, time_ns: int, command: cmd.Command, writes: Writes) -> Result:
        """Apply one command at log ``index`` and ``time_ns``; all changes go into ``writes``."""
        if isinstance(command, cmd.ConfigureStream):
            return self._configure(command, index, time_ns, writes)
        if isinstance(command, cmd.DropStream) and self.holds_anything():
            return self._drop(command, writes)
        if isinstance(command, cmd.RestorePart | cmd.FinishRestore):
            return self._restore(command, index, writes)
        if self.record is None:
            return Refused(errors.STREAM_NOT_FOUND.code)
        if index != self._fresh_index:
            # The facts port answers for the blocks of earlier entries by now.
            self._fresh.clear()
            self._fresh_index = index
        # The time of a shard never goes backwards, whichever leader stamped the entry.
        now_ns = max(min(time_ns, INT64_MAX), self.counters.last_time_ns)
        self.dedupe.expire(now_ns, self.config.duplicate_window_ns, writes)
        result = self._dispatch(index, now_ns, command, writes)
        if self.shard in writes.trimmed:
            for consumer in self.consumers.values():
                self._forget_trimmed(consumer, now_ns, writes)
        return result

    def _dispatch(self, index: int, now_ns: int, command: cmd.Command, writes: Writes) -> Result:
        if isinstance(command, cmd.Append):
            return self._append(index, now_ns, command, writes)
        if isinstance(command, cmd.ConsumerChange):
            return self._change_consumer(command, index, now_ns, writes)
        if isinstance(command, cmd.PutConsumer):
            return self._put_consumer(command, index, now_ns, writes)
        if isinstance(command, cmd.DropConsumer):
            return self._drop_consumer(command, writes)
        if isinstance(command, cmd.AcceptLoss):
            return accept_loss(self, command, now_ns, writes)
        return self._remove(index, now_ns, command, writes)

    def _remove(self, index: int, now_ns: int, command: cmd.Command, writes: Writes) -> Result:
        remove = self._removals.get(type(command))
        if remove is None:
            return Refused(errors.INTERNAL.code, "the shard does not know this command")
        return remove(command, index, now_ns, writes)

    def _append(self, index: int, now_ns: int, command: cmd.Append, writes: Writes) -> Result:
        if self.config.sealed:
            return Refused(errors.STREAM_SEALED.code)
        if not command.is_sound():
            return Refused(errors.INTERNAL.code, "the columns of the messages are inconsistent")
        if command.atomic and not self.config.allow_atomic:
            return Refused(errors.ATOMIC_DISABLED.code)
        appended, block = self._appender.append(index, now_ns, command, writes)
        if block is not None:
            writes.blocks.append((self.shard, block))
            self.remover.enforce(block.subject_ids, index, now_ns, writes)
        if block is not None or self.shard in writes.reached:
            self.write_counters(writes)
        return appended

    def remember(self, facts: MessageFacts) -> None:
        """Keep the facts of messages of the current entry until the entry ends."""
        self._fresh.append(facts)

    def write_counters(self, writes: Writes) -> None:
        """Write the counters row."""
        writes.put(keys.shard_key(keys.COUNTERS, self.shard), _encode(self.counters))

    def write_record(self, writes: Writes) -> None:
        """Write the stream record."""
        writes.put(keys.shard_key(keys.STREAM, self.shard), _encode(self.record))

    def _configure(
        self, command: cmd.ConfigureStream, index: int, time_ns: int, writes: Writes
    ) -> Result:
        config = command.config
        refused = None if command.given is None else self._configure_refused(command, command.given)
        if refused is not None:
            return refused
        if not 1 <= config.first_seq <= FIRST_SEQ_MAX:
            return Refused(errors.STREAM_CONFIG_INVALID.code, "first_seq is out of range")
        if any(
            config_rules.over_limits(one.config, config.consumer_limits)
            for one in self.consumers.values()
        ):
            return Refused(errors.STREAM_CONFIG_INVALID.code, "a consumer exceeds consumer_limits")
        if self.record is not None and not retention_rules.may_become(
            self.config.retention, config.retention
        ):
            return Refused(errors.STREAM_UPDATE_REFUSED.code, "retention change not permitted")
        self._appender.forget_captured()
        if self.record is None:
            # Versions start at the log index and each entry adds at most one. So a re-created
            # stream never has a version of its predecessor, and an old If-Match never matches it.
            self.record = StreamRecord(
                config,
                command.incarnation,
                command.hash_key,
                time_ns,
                command.version or index,
                1,
                command.part,
            )
            self.counters.first_seq = config.first_seq
            self.counters.last_seq = config.first_seq - 1
            self.write_counters(writes)
        elif self.record.config == config and command.version in (0, self.record.version):
            return Done(changed=False)
        else:
            if config.retention == "interest" != self.config.retention:
                self.interest.recheck(0, self.counters.last_seq + 1, writes)
            self.record.config = config
            self.record.version = command.version or self.record.version + 1
            self.remover.recheck_subjects()
            if not self.part:  # all shards apply this; only the first reports it
                writes.advisories.append(Advisory(type="stream_action", action="modify"))
        self.write_record(writes)
        return Done()

    def _configure_refused(
        self, command: cmd.ConfigureStream, given: cmd.Precondition
    ) -> Refused | None:
        record = self.record
        if record is not None and record.incarnation != command.incarnation:
            # The caller meant an earlier stream of this name.
            return Refused(errors.STREAM_NOT_FOUND.code)
        version = None if record is None else record.version
        same = record is not None and record.config == command.config
        refused = refusal(given, version, errors.STREAM_EXISTS, errors.STREAM_NOT_FOUND, same=same)
        if refused is not None or record is None or same:
            return refused
        consumers = [one.config for one in self.consumers.values()]
        problem = config_rules.stream_update_problem(
            record.config, command.config
        ) or config_rules.consumers_problem(command.config, consumers)
        return None if problem is None else Refused.of(problem)

    def _drop(self, command: cmd.DropStream, writes: Writes) -> Result:
        record = self.record
        if record is not None and command.incarnation not in ("", record.incarnation):
            return Refused(errors.STREAM_NOT_FOUND.code)
        if record is not None and command.version not in (None, 0, record.version):
            return Refused(errors.PRECONDITION_FAILED.code, f"the version is {record.version}")
        self.record = None
        self.counters = Counters(1, 0, 0, 0, 0, NO_ID, 0)
        self.subjects = SubjectTable(self.shard)
        self.dedupe = DedupeWindow(self.shard)
        self.deleted = DeletedSet(self.shard)
        self.exempt = ExemptSet(self.shard)
        self.deadlines = Deadlines(self.shard)
        self.consumers, self.consumer_ids = {}, {}
        self.loss = None
        self.remover.forget_head()
        self.interest.forget_all()
        self._fresh.clear()
        for kind in keys.SHARD_KINDS:
            prefix = keys.shard_key(kind, self.shard)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        writes.dropped.append(self.shard)
        return Done()

    # Restoring -----------------------------------------------------------------------------------

    def _restore(
        self, command: cmd.RestorePart | cmd.FinishRestore, index: int, writes: Writes
    ) -> Result:
        if self.record is not None:
            return Refused(errors.STREAM_RESTORE_EXISTS.code)
        if isinstance(command, cmd.FinishRestore):
            return self._finish_restore(command.header, index, writes)
        self.restored_with = command.compression
        mark = writes.mark(self.shard)
        try:
            for record in command.records:
                take_record(self, Record(*record), index, writes)
        except (ArchiveError, BlockCorruptError) as error:
            writes.roll_back(mark)
            return Refused(errors.ARCHIVE_INVALID.code, str(error))
        return Done()

    def _finish_restore(self, header: ArchiveHeader, index: int, writes: Writes) -> Result:
        self.subjects.restore_next_id(header.next_subject, writes)
        # The version starts at the index, as for a new stream: see _configure.
        self.record = StreamRecord(
            header.config,
            header.incarnation,
            header.hash_key,
            header.created_ns,
            index,
            header.next_consumer,
            header.part,
        )
        self.counters = Counters(
            header.first_seq,
            header.last_seq,
            header.messages,
            header.bytes,
            header.last_time_ns,
            header.last_id,
            header.digest,
            dict(header.replaced),
            header.keep_from,
            header.keep_to,
        )
        self.loss = header.loss
        if self.loss is not None:
            writes.put(keys.shard_key(keys.LOSS, self.shard), _encode(self.loss))
        writes.reached[self.shard] = header.last_seq
        self.write_counters(writes)
        self.write_record(writes)
        self.remover.recheck_subjects()
        return Done()

    # Consumers -----------------------------------------------------------------------------------

    def _put_consumer(
        self, command: cmd.PutConsumer, index: int, now_ns: int, writes: Writes
    ) -> Result:
        assert self.record is not None
        existing = self.consumer(command.config.name)
        refused = self._put_refused(command, existing)
        if refused is not None:
            return refused
        if existing is not None:
            if existing.config != command.config:
                if existing.config.filter_subjects != command.config.filter_subjects:
                    self.interest.forget(existing.consumer_id)
                    self.interest.recheck_without(existing, writes)
                elif allows_more(existing.config, command.config):
                    self.interest.recheck_given_up(existing, writes)
                existing.change(Reconfigured(command.config), now_ns, writes)
                self._tell_of(existing, "modify", writes)
            return ConsumerPut(existing.consumer_id, created=False)
        limit = self.config.max_consumers
        if 0 <= limit <= len(self.consumers):
            return Refused(errors.CONSUMER_LIMIT.code)
        pinned = Pinned.decode(command.pinned, command.pinned_end) if command.pinned else None
        if command.pinned and (pinned is None or pinned.end_seq > self.counters.last_seq + 1):
            return Refused(errors.INTERNAL.code, "the messages to deliver first are inconsistent")
        consumer_id = self.record.next_consumer_id
        self.record.next_consumer_id += 1
        self.write_record(writes)
        start_seq = max(command.start_seq, 1) if command.start_seq else self.counters.last_seq + 1
        consumer = ConsumerMachine.create(
            self.shard, consumer_id, command.config, start_seq, now_ns, index
        )
        if pinned is not None:
            consumer.pin(pinned, writes)
        consumer.write_snapshot(writes)
        self.consumers[consumer_id] = consumer
        self.consumer_ids[command.config.name] = consumer_id
        self.interest.forget(consumer_id)
        self._tell_of(consumer, "create", writes)
        return ConsumerPut(consumer_id, created=True)

    def _put_refused(
        self, command: cmd.PutConsumer, existing: ConsumerMachine | None
    ) -> Refused | None:
        config, given = command.config, command.given
        if given is not None:
            refused = refusal(
                given,
                None if existing is None else existing.version,
                errors.CONSUMER_EXISTS,
                errors.CONSUMER_NOT_FOUND,
                same=existing is not None and existing.config == config,
            )
            if refused is not None:
                return refused
        over = config_rules.over_limits(config, self.config.consumer_limits)
        if over is not None:
            return Refused(over.code)
        retention = self.config.retention
        others = [one.config for one in self.consumers.values() if one is not existing]
        problem = (
            retention_rules.replicas_problem(config, self.config.num_replicas)
            or retention_rules.kind_problem(config, retention)
            or retention_rules.collision(config, retention, others)
        )
        if problem is None and given is not None and existing is not None and not self.part:
            # The first shard decides; the others take over its decision.
            problem = config_rules.consumer_update_problem(existing.config, config)
        return None if problem is None else Refused.of(problem)

    def _drop_consumer(self, command: cmd.DropConsumer, writes: Writes) -> Result:
        consumer = self.consumers.get(command.consumer_id)
        if consumer is None:
            return Refused(errors.CONSUMER_NOT_FOUND.code)
        if command.version not in (None, 0, consumer.version):
            return Refused(errors.PRECONDITION_FAILED.code, f"the version is {consumer.version}")
        del self.consumers[command.consumer_id]
        del self.consumer_ids[consumer.config.name]
        consumer.erase(writes)
        self.interest.forget(consumer.consumer_id)
        self.interest.recheck_without(consumer, writes)
        self._tell_of(consumer, "delete", writes)
        return Done()

    def _tell_of(self, consumer: ConsumerMachine, action: AdvisoryAction, writes: Writes) -> None:
        if not self.part:  # a consumer is on all shards; only the first reports it
            writes.advisories.append(_consumer_action(consumer, action))

    def _change_consumer(
        self, change: cmd.ConsumerChange, index: int, now_ns: int, writes: Writes
    ) -> Result:
        consumer = self.consumers.get(change.consumer_id)
        if consumer is None:
            return Refused(errors.CONSUMER_NOT_FOUND.code)
        if consumer.epoch != change.epoch:
            return Refused(errors.TOKEN_STALE.code)
        from_seq = consumer.next_seq
        settled = consumer.change(change, now_ns, writes)
        if isinstance(change, cmd.Deliver):
            self.forget_gone(consumer, change.seqs, now_ns, writes)
        if self.config.retention != "limits":
            self.interest.settled(consumer, settled, index, now_ns, writes)
            if isinstance(change, cmd.Advance):
                self.interest.passed(from_seq, consumer, writes)
        return Done()

    def forget_gone(
        self, consumer: ConsumerMachine, seqs: Iterable[int], now_ns: int, writes: Writes
    ) -> None:
        """Remove those of ``seqs`` from pending that are not in the stream any more.

        A delivery is recorded after it was sent. A message that was removed in between must leave
        pending here: its removal is over, so no later command would do it.
        """
        gone = [seq for seq in seqs if seq in consumer.pending and not self.is_live(seq)]
        if gone:
            consumer.change(Gone(gone), now_ns, writes)

    def _forget_trimmed(self, consumer: ConsumerMachine, now_ns: int, writes: Writes) -> None:
        first_seq = self.counters.first_seq
        consumer.given_up.trim(first_seq)
        if consumer.pending and consumer.floor.stream_seq + 1 < first_seq:
            consumer.change(ConsumerTrimmed(first_seq), now_ns, writes)

    # Recovery ------------------------------------------------------------------------------------

    @classmethod
    def load(cls, shard: int, facts: FactsPort, scan: Scan) -> "StreamMachine":
        """Build the machine from its rows in the store."""
        machine = cls(shard, facts)

        def rows(kind: bytes) -> Iterable[tuple[bytes, bytes]]:
            return scan(keys.shard_key(kind, shard))

        for _, value in rows(keys.STREAM):
            machine.record = msgspec.msgpack.decode(value, type=StreamRecord)
        for _, value in rows(keys.COUNTERS):
            machine.counters = msgspec.msgpack.decode(value, type=Counters)
        machine.subjects.load(
            rows(keys.SUBJECT_NAME), rows(keys.SUBJECT_PAGE), rows(keys.SUBJECT_DELTA)
        )
        machine.dedupe.load(rows(keys.DEDUPE))
        machine.deleted.load(rows(keys.DELETED), machine.counters.first_seq)
        machine.exempt.load(rows(keys.EXEMPT), machine.counters.first_seq)
        machine.deadlines.load(rows(keys.DEADLINE))
        for _, value in rows(keys.LOSS):
            machine.loss = msgspec.msgpack.decode(value, type=DataLoss)
        for key, value in rows(keys.CONSUMER):
            number = keys.last_number(key, 4)
            pinned = [row for _, row in scan(keys.small_key(keys.PINNED, shard, number))]
            consumer = ConsumerMachine.load(shard, number, value, pinned)
            machine.consumers[consumer.consumer_id] = consumer
            prefix = keys.small_key(keys.CONSUMER_DELTA, shard, consumer.consumer_id)
            for _, delta in scan(prefix):
                consumer.replay(delta)
            consumer.given_up.trim(machine.counters.first_seq)
            machine.consumer_ids[consumer.config.name] = consumer.consumer_id
        if machine.record is not None:
            machine.remover.recheck_subjects()
        return machine


def _consumer_action(consumer: ConsumerMachine, action: AdvisoryAction) -> Advisory:
    return Advisory(type="consumer_action", consumer=consumer.config.name, action=action)
