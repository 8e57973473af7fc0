"""The state of one shard of a stream, without the rules that change it.

The rules are the modules beside this one: functions of ``(state, step)``. Nothing here calls them.
"""

import builtins
from collections.abc import Callable, Iterable
from typing import Final

import msgspec
import numpy as np

from contrail_common.model import Compression, DataLoss, StreamConfig, StreamState
from contrail_common.partition import share
from contrail_common.texts import I64Array, Mask, U32Array
from contrail_storage.core import key_layout as keys
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.dedupe import DedupeWindow
from contrail_storage.core.deleted import DeletedSet
from contrail_storage.core.facts import FactsPort, MessageFacts, SubjectFacts
from contrail_storage.core.id_index import NO_ID
from contrail_storage.core.producers import Producers
from contrail_storage.core.results import Writes
from contrail_storage.core.stream.coverage import Coverage, FilterMatches
from contrail_storage.core.stream.deadlines import Deadlines, ExemptSet
from contrail_storage.core.stream.recent_removals import RecentRemovals
from contrail_storage.core.subjects.subject_table import SubjectTable

Scan = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""All (key, value) of the store under a key prefix, in key order."""


class StreamRecord(msgspec.Struct, array_like=True):
    """The state that changes only with the configuration; ``shard`` is the shard, from 0.

    The ids of messages below ``live_seq`` had expired at the last change: a longer window does not
    bring back those that are held for producers.
    """

    config: StreamConfig
    incarnation: str
    hash_key: bytes
    created_ns: int
    version: int
    next_consumer_id: int
    shard: int = 0
    live_seq: int = 0


class Counters(msgspec.Struct, array_like=True):
    """The state that changes with every entry; ``digest`` is a CRC over all payloads ever appended.

    ``replaced`` maps a subject to a sequence: a roll-up has yet to remove its messages below that.
    From ``keep_from`` up to ``keep_to`` there may be messages that no consumer needs.
    """

    first_seq: int
    last_seq: int
    messages: int
    bytes: int
    last_time_ns: int
    last_id: builtins.bytes
    digest: int
    replaced: dict[str, int] = {}
    keep_from: int = 0
    keep_to: int = 0


_encode: Final = msgspec.msgpack.Encoder().encode


class ShardState:
    """The data of a shard, and queries over the data alone."""

    def __init__(self, shard_id: int, facts: FactsPort) -> None:
        self.shard_id = shard_id
        """The id of the shard; it is in the key of every row."""
        self._facts = facts
        # Compression of the stream that is being restored; unused once the stream exists.
        self.restored_with: Compression = "none"
        self._counters_key = keys.shard_key(keys.COUNTERS, shard_id)
        self.removals: RecentRemovals | None = None
        """The messages that were removed lately; None while nobody counts. No part of the state."""
        self.recounted = False
        """Whether the state was counted again from damaged rows, and the log after it is applied.

        Subject numbers may then be others than in the log: the blocks have the right ones.
        """
        self.dropping: set[int] = set()
        """Consumers with pending deliveries that are removed and not freed. No part of the state.

        The housekeeper frees them, as :meth:`free_dropped`.
        """
        # The same code makes the state of a new shard and that of a dropped one, so neither can
        # forget a field.
        self.clear()

    def clear(self) -> None:
        """Reset the state: there is no stream. The caller removes the rows."""
        shard_id = self.shard_id
        self.forget_removals()
        # State in rows. Loading the rows gives an equal state.
        self.record: StreamRecord | None = None
        """Configuration and identity. None: there is no stream, or it is being restored."""
        self.counters = Counters(1, 0, 0, 0, 0, NO_ID, 0)
        """Invariant: ``first_seq`` is a live message, or the sequence after the last."""
        self.subjects = SubjectTable(shard_id)
        """Subjects of live messages. Invariant: their counts add up to ``counters.messages``."""
        self.dedupe = DedupeWindow(shard_id)
        """Message ids within the duplicate window."""
        self.producers = Producers(shard_id)
        """The producers that number their batches."""
        self.deleted = DeletedSet(shard_id)
        """Sequences from ``first_seq`` to ``last_seq`` that are not live, and no others."""
        self.exempt = ExemptSet(shard_id)
        """Live messages that ``max_age`` does not remove (TTL ``never``)."""
        self.deadlines = Deadlines(shard_id)
        """When messages with a TTL are due: rows, and a lower bound of them in memory."""
        self.consumers: dict[int, ConsumerMachine] = {}
        """Consumers by number. A number is never used again within a stream."""
        self.consumer_ids: dict[str, int] = {}
        """Numbers of ``consumers`` by name."""
        self.last_key = 0
        """The last id of a shared subject key that was named."""
        self.loss: DataLoss | None = None
        """Damage that an operator accepted; None if there was none."""

        # Derived from the state above, or a cache: in no row.
        self.subjects_over = False
        """Whether some subject may have more messages than ``max_msgs_per_subject``.

        True at times when none has; never False when one has.
        """
        self.captured: Coverage | None = None
        """The subjects that the stream captures. None after its configuration changed."""
        self.wanted: Coverage | None = None
        """The subjects that some consumer's filter matches. None after a consumer changed."""
        self.filter_matches = FilterMatches()
        """Which consumer's filter matches which subject number."""
        self.head: MessageFacts | None = None
        """Facts that held the first sequence when they were last needed."""
        self._shared: tuple[StreamConfig, StreamConfig] | None = None  # see `shard_config`
        self.fresh: list[MessageFacts] = []
        """Facts of the messages of entry ``fresh_index``; the facts port has no block of it yet."""
        self.fresh_index = 0

    # Queries -------------------------------------------------------------------------------------

    @property
    def live_ids_from(self) -> int:
        """The first sequence whose message id has not expired; the next one if there is none."""
        return self.dedupe.first_live_seq or self.counters.last_seq + 1

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
    def shard(self) -> int:
        """Number of this shard in its stream, from 0."""
        return 0 if self.record is None else self.record.shard

    @property
    def shard_config(self) -> StreamConfig:
        """The configuration, with this shard's share of ``max_msgs`` and ``max_bytes``."""
        assert self.record is not None
        config = self.record.config
        if config.shards <= 1:
            return config
        # The configuration of a stream of several shards is divided once, not with each command.
        # `is`: a new configuration is a new object, and comparing fields would cost as much as
        # dividing.
        if self._shared is None or self._shared[0] is not config:
            own = msgspec.structs.replace(
                config,
                max_msgs=share(config.max_msgs, config.shards, self.shard),
                max_bytes=share(config.max_bytes, config.shards, self.shard),
            )
            self._shared = config, own
        return self._shared[1]

    @property
    def compression(self) -> Compression:
        """Compression of new blocks, also for a stream that is being restored."""
        return self.restored_with if self.record is None else self.record.config.compression

    @property
    def over_limits(self) -> bool:
        """Whether the stream, which must exist, or a subject exceeds a limit."""
        return self.subjects_over or self.is_over(self.shard_config)

    def is_over(self, config: StreamConfig) -> bool:
        """Whether there are messages to remove by the limits of ``config``, the shard's own.

        With discard ``new`` the limits refuse new messages and never remove old ones.
        """
        counters = self.counters
        return config.discard == "old" and (
            0 <= config.max_msgs < counters.messages or 0 <= config.max_bytes < counters.bytes
        )

    @property
    def pending_recheck(self) -> bool:
        """Whether messages must be checked: perhaps no consumer needs them."""
        return self.counters.keep_from < self.counters.keep_to

    def is_live(self, seq: int) -> bool:
        """Whether the stream has a message with sequence ``seq`` now."""
        counters = self.counters
        return counters.first_seq <= seq <= counters.last_seq and seq not in self.deleted

    def live_mask(self, base_seq: int, count: int) -> Mask:
        """A mask of the ``count`` sequences from ``base_seq`` on that are messages now.

        ``base_seq + count`` is at most the sequence after the last message.
        """
        live = self.deleted.live_mask(base_seq, count)
        if live is None:
            live = np.ones(count, np.bool_)
        # Sequences below the first one are dead, and are not kept as deleted.
        live[: max(self.counters.first_seq - base_seq, 0)] = False
        return live

    def are_all_live(self, first_seq: int, last_seq: int) -> bool:
        """Whether all sequences of a range are messages; False too if that takes a search."""
        counters = self.counters
        in_range = counters.first_seq <= first_seq and last_seq <= counters.last_seq
        return in_range and not self.deleted.total

    def are_live(self, seqs: I64Array) -> Mask:
        """A mask of the ``seqs`` that are messages of the stream now."""
        if len(seqs) == 1:
            return np.array([self.is_live(int(seqs[0]))])
        counters = self.counters
        live = (seqs >= counters.first_seq) & (seqs <= counters.last_seq)
        live[live] = self.deleted.are_live(seqs[live])
        return live

    def last_live(self, subject: str) -> int | None:
        """The last message of a subject, 0 for none; None if it is not known without a search."""
        last_seq = self.subjects.last_seq(subject)
        return last_seq if not last_seq or self.is_live(last_seq) else None

    def consumer(self, name: str) -> ConsumerMachine | None:
        """The consumer called ``name``, or None."""
        consumer_id = self.consumer_ids.get(name)
        return None if consumer_id is None else self.consumers[consumer_id]

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

    def note_removed(self, seqs: I64Array, sids: U32Array) -> None:
        """Note removed messages for those who count, with a subject number for each."""
        if self.removals is not None:
            self.removals.add(seqs, sids)

    @property
    def has_dropped(self) -> bool:
        """Whether memory of removed subjects or pending deliveries is not freed."""
        return bool(self.dropping) or self.subjects.has_dropped

    def free_dropped(self) -> None:
        """Free a part of the removed subjects and pending deliveries; see `has_dropped`."""
        self.subjects.free_dropped()
        for number in list(self.dropping):
            consumer = self.consumers.get(number)
            if consumer is None or not consumer.pending.free_dropped():
                self.dropping.discard(number)

    def forget_removals(self) -> None:
        """Let everybody count again: all messages were removed."""
        if self.removals is not None:
            self.removals.close()
            self.removals = None

    def facts_at(self, seq: int) -> MessageFacts:
        """Facts of a run of messages with ``seq``, also for messages of the current entry."""
        for facts in self.fresh:
            if facts.base_seq <= seq < facts.end_seq:
                return facts
        return self._facts.facts_at(seq)

    def subjects_at(self, seq: int) -> SubjectFacts:
        """As :meth:`facts_at`, for searches: the run is longer, and has no times."""
        for facts in self.fresh:
            if facts.base_seq <= seq < facts.end_seq:
                return facts
        return self._facts.subjects_at(seq)

    def read_from(self, facts: FactsPort) -> None:
        """Use ``facts`` as the facts port from now on."""
        self._facts = facts

    # Rows ----------------------------------------------------------------------------------------

    def write_counters(self, writes: Writes) -> None:
        """Write the counters row."""
        writes.put(self._counters_key, _encode(self.counters))

    def write_record(self, writes: Writes) -> None:
        """Write the stream record."""
        writes.put(keys.shard_key(keys.STREAM, self.shard_id), _encode(self.record))

    def write_loss(self, writes: Writes) -> None:
        """Write the accepted damage."""
        writes.put(keys.shard_key(keys.LOSS, self.shard_id), _encode(self.loss))

    def load_rows(self, scan: Scan) -> None:
        """Load the state from its rows in the store. The state must be empty."""

        def rows(kind: bytes) -> Iterable[tuple[bytes, bytes]]:
            return scan(keys.shard_key(kind, self.shard_id))

        for _, value in rows(keys.STREAM):
            self.record = msgspec.msgpack.decode(value, type=StreamRecord)
        for _, value in rows(keys.COUNTERS):
            self.counters = msgspec.msgpack.decode(value, type=Counters)
        self.subjects.load(
            rows(keys.SUBJECT_NAME), rows(keys.SUBJECT_PAGE), rows(keys.SUBJECT_DELTA)
        )
        self.dedupe.load(rows(keys.DEDUPE), self.record.live_seq if self.record else 0)
        self.producers.load(rows(keys.PRODUCER))
        self.deleted.load(rows(keys.DELETED), self.counters.first_seq)
        self.subjects.lost_last = self.deleted.total > 0
        self.exempt.load(rows(keys.EXEMPT), self.counters.first_seq)
        self.deadlines.load(rows(keys.DEADLINE))
        for _, value in rows(keys.LOSS):
            self.loss = msgspec.msgpack.decode(value, type=DataLoss)
        for _, value in scan(keys.large_key(keys.SUBJECT_KEY, self.shard_id, 0)):
            self.last_key = int.from_bytes(value, "big")
        for key, value in rows(keys.CONSUMER):
            self._load_consumer(keys.last_number(key, 4), value, scan)

    def _load_consumer(self, number: int, row: bytes, scan: Scan) -> None:
        def rows_of(kind: bytes) -> Iterable[tuple[bytes, bytes]]:
            return scan(keys.small_key(kind, self.shard_id, number))

        consumer = ConsumerMachine.load(self.shard_id, number, row, rows_of)
        self.consumers[number] = consumer
        for _, delta in rows_of(keys.CONSUMER_DELTA):
            consumer.replay(delta)
        # A trimmed head is no delta of a consumer that had nothing pending below it.
        consumer.given_up.trim(self.counters.first_seq)
        self.consumer_ids[consumer.config.name] = number
