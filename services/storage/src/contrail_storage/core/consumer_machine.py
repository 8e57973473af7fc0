"""One consumer's replicated state: position, pending deliveries, floors (JetStream's rules).

The leader chooses what to deliver and proposes it. This machine records deliveries and
acknowledgements, the same on every replica. Deadlines are log times; only the leader checks whether
one has passed, and then proposes the redelivery.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import msgspec
import numpy as np
from msgspec.structs import replace

from contrail_common.model import AckKind, Advisory, AdvisoryType, ConsumerConfig, SequencePair
from contrail_common.timeunits import INT64_MAX
from contrail_storage.core import key_layout as keys
from contrail_storage.core.commands import Acknowledge, Advance, Deliver, DeliverAcked, Exhaust
from contrail_storage.core.given_up import GivenUp
from contrail_storage.core.pending_deliveries import Pending, PendingDeliveries
from contrail_storage.core.pinned import Pinned
from contrail_storage.core.results import Step, Writes

_FOLD_BYTES_MIN: Final = 16 * 1024
# Both must be reached: few large deltas are no problem for a start, and many tiny ones cost less
# than a snapshot of a large state.
_FOLD_ROWS: Final = 64

_CHUNKS_ENCODED: Final = 32
"""Chunks of pending deliveries that one change encodes for a snapshot that is due: about 3 ms."""

_ONE_BY_ONE: Final = 4
"""Up to so many sequences, a loop takes less time than a bulk operation."""

_NOWHERE: Final = SequencePair(0, 0)


class Trimmed(msgspec.Struct, tag=30, array_like=True):
    """Delta: pending messages below ``first_seq`` left the stream."""

    first_seq: int


class GoneOne(msgspec.Struct, tag=31, array_like=True):
    """Delta of earlier versions, no longer written: the message ``seq`` left the stream."""

    seq: int


class Gone(msgspec.Struct, tag=33, array_like=True):
    """Delta: the pending messages ``seqs`` left the stream."""

    seqs: list[int]


class Reconfigured(msgspec.Struct, tag=32, array_like=True):
    """Delta: the configuration was replaced."""

    config: ConsumerConfig


Change = (
    Deliver
    | Advance
    | Acknowledge
    | DeliverAcked
    | Exhaust
    | Trimmed
    | GoneOne
    | Gone
    | Reconfigured
)


class Snapshot(msgspec.Struct, array_like=True):
    """The whole state of a consumer, as stored.

    If ``rows`` is not 0, the ``pending`` deliveries are in so many rows of their own.
    """

    config: ConsumerConfig
    created_ns: int
    version: int
    epoch: int
    next_seq: int
    delivered: SequencePair
    floor: SequencePair
    pending: dict[int, Pending]
    acked_ahead: list[int]
    pinned_end: int = 0
    given_up: list[tuple[int, bytes]] = []
    rows: int = 0


class Delta(msgspec.Struct, array_like=True):
    """One change of a consumer at a log time, with the sum of its jumps until then."""

    time_ns: int
    change: Change
    skipped_ns: int = 0


RowsOf = Callable[[bytes], Iterable[tuple[bytes, bytes]]]
"""The rows (key, value) of a kind that belong to one consumer."""


def _no_rows(kind: bytes) -> Iterable[tuple[bytes, bytes]]:
    del kind
    return ()


_snapshots = msgspec.msgpack.Decoder(Snapshot)
_deltas = msgspec.msgpack.Decoder(Delta)
_encode = msgspec.msgpack.Encoder().encode


def ack_wait_ns(config: ConsumerConfig, attempt: int) -> int:
    """Time in which delivery number ``attempt`` must be acknowledged; backoff overrides ack wait.

    Attempts beyond the backoff list use its last element.
    """
    backoff = config.backoff_ns
    if not backoff:
        return config.ack_wait_ns
    # As in JetStream.
    return backoff[min(attempt, len(backoff)) - 1]


def allows_more(old: ConsumerConfig, new: ConsumerConfig) -> bool:
    """Whether ``new`` allows more deliveries of a message than ``old``; below 1 means no limit."""
    return old.max_deliver > 0 and not 0 < new.max_deliver <= old.max_deliver


@dataclass(slots=True, eq=False)
class ConsumerMachine:
    """State of one consumer. ``next_seq`` is the next stream sequence to consider for delivery."""

    shard_id: int
    consumer_id: int
    """Number of the consumer, with ``shard_id`` in the key of every row."""
    config: ConsumerConfig
    created_ns: int
    next_seq: int
    """Never decreases. Every sequence below is pending, settled, given up, filtered out or gone."""
    version: int
    """Counts configurations (ETag). No earlier consumer of the name had this version."""
    epoch: int = 1
    """Part of each ack token. Accepting a data loss raises it, so that older tokens are stale."""
    delivered: SequencePair = _NOWHERE
    """The last delivery: the highest consumer sequence, and the highest stream sequence."""
    floor: SequencePair = _NOWHERE
    """Ack floor. Never decreases; no pending sequence is at or below it."""
    pending: PendingDeliveries = field(default_factory=PendingDeliveries)
    """Deliveries without a final acknowledgement, by stream sequence."""
    acked_ahead: set[int] = field(default_factory=set)
    """Sequences from ``next_seq`` on that are done: acknowledged, or given up."""
    acked_top: int = field(init=False)
    """The highest of `acked_ahead`; below ``next_seq`` if there are none."""
    pinned: Pinned | None = None
    """Messages to deliver before normal delivery starts; None once ``next_seq`` is after them."""
    given_up: GivenUp = field(default_factory=GivenUp)
    """Messages still in the stream whose last allowed delivery ran out."""
    _deltas: int = 0
    """Delta rows since the snapshot row; the next one gets the number after it."""
    _delta_bytes: int = 0
    """Bytes of those rows. A new snapshot is written when they exceed the last one."""
    _snapshot_bytes: int = 0
    """Bytes of the snapshot row and of the rows of pending deliveries."""
    _rows: int = 0
    """Number of rows of pending deliveries."""

    def __post_init__(self) -> None:
        self.acked_top = max(self.acked_ahead, default=0)

    @classmethod
    def create(
        cls,
        shard_id: int,
        consumer_id: int,
        config: ConsumerConfig,
        start_seq: int,
        time_ns: int,
        version: int,
    ) -> "ConsumerMachine":
        """A new consumer that starts at ``start_seq``.

        No earlier consumer of its name had this ``version``.
        """
        before = SequencePair(0, start_seq - 1, 0)
        return cls(shard_id, consumer_id, config, time_ns, start_seq, version, 1, before, before)

    # Changes -------------------------------------------------------------------------------------

    def change(self, change: Change, step: Step) -> list[int]:
        """Apply a change and write it; return the sequences that it settled.

        Writes a delta row, or a snapshot once the deltas outgrow the last one.
        """
        writes = step.writes
        # The same function applies a change now and at a replay, so a restart gives the same state.
        settled = self._take(change, step)
        if self.pinned is not None and self.next_seq >= self.pinned.end_seq:
            self._unpin(writes)
        row = _encode(Delta(step.now_ns, change, step.skipped_ns))
        self._deltas += 1
        self._delta_bytes += len(row)
        writes.put(keys.consumer_delta_key(self.shard_id, self.consumer_id, self._deltas), row)
        if self._deltas >= _FOLD_ROWS:
            limit = max(_FOLD_BYTES_MIN, self._snapshot_bytes)
            # Very many chunks may have changed: they are encoded by this change and the next ones.
            if self._delta_bytes > limit and (
                self.pending.encode_some(_CHUNKS_ENCODED) or self._delta_bytes > 2 * limit
            ):
                self.write_snapshot(writes)
        return settled

    def _take(self, change: Change, step: Step) -> list[int]:
        settled: list[int] = _RULES[type(change)](self, change, step) or []
        self._move_floor(step.now_ns)
        return settled

    def _trim(self, trimmed: Trimmed, step: Step) -> None:
        del step
        self.pending.remove_below(trimmed.first_seq)
        self.given_up.trim(trimmed.first_seq)
        self._advance(trimmed.first_seq)

    def _forget(self, gone: Gone, step: Step) -> None:
        del step
        for seq in gone.seqs:
            self.pending.remove(seq)
            self.given_up.discard(seq)

    def _forget_one(self, gone: GoneOne, step: Step) -> None:
        # As the version that wrote this delta applied it: a replay must give the same state.
        del step
        self.pending.remove(gone.seq)

    def _deliver(self, deliver: Deliver | DeliverAcked, step: Step) -> list[int]:
        """Record deliveries; return the sequences that need no ack and are settled at once."""
        settled: list[int] = []
        seqs, elapsed_ns = deliver.seqs, step.elapsed_ns
        first = self.delivered.consumer_seq + 1
        if len(seqs) > _ONE_BY_ONE and self._are_first(seqs):
            self.pending.add_first(seqs, first, self._deadline_ns(elapsed_ns, 1))
        else:
            for consumer_seq, seq in enumerate(seqs, first):
                if self._deliver_one(seq, consumer_seq, elapsed_ns):
                    settled.append(seq)
        self._number(seqs, step)
        self._advance(deliver.position)
        return settled

    def _are_first(self, seqs: list[int]) -> bool:
        """Whether there are ``seqs``, and they are first deliveries that need acks."""
        # The position is behind while earlier deliveries are on their way to the log, and the
        # acknowledgements of those are ahead of it then.
        return (
            bool(seqs)
            and seqs[0] >= self.next_seq
            and (seqs[0] > self.acked_top or self.acked_ahead.isdisjoint(seqs))
            and self.config.ack_policy != "none"
            and self.pending.are_above(seqs)
        )

    def _number(self, seqs: list[int], step: Step) -> None:
        """Count deliveries: all that were sent, even if their messages were settled meanwhile."""
        consumer_seq, stream_seq = self.delivered.consumer_seq, self.delivered.stream_seq
        if seqs:
            stream_seq = max(stream_seq, *seqs)
        self.delivered = SequencePair(consumer_seq + len(seqs), stream_seq, step.now_ns)

    def _deliver_acked(self, both: DeliverAcked, step: Step) -> list[int]:
        seqs, acked = both.seqs, both.acked
        if acked is None and self.config.ack_policy == "explicit" and self._are_first(seqs):
            self._number(seqs, step)  # and nothing becomes pending
            self._advance(both.position)
            self._note_ahead([seq for seq in seqs if seq >= self.next_seq])
            return seqs
        settled = self._deliver(both, step)
        acks = Acknowledge(both.consumer_id, both.epoch, seqs if acked is None else acked)
        return settled + self._acknowledge(acks, step)

    def _deliver_one(self, seq: int, consumer_seq: int, elapsed_ns: int) -> bool:
        """Record a delivery; return whether it needs no ack."""
        item = self.pending.get(seq)
        # A redelivery. The consumer sequence stays that of the first delivery, by which the floor
        # counts.
        if item is not None:
            deadline_ns = self._deadline_ns(elapsed_ns, item.attempts + 1)
            self.pending.redeliver(seq, item, deadline_ns)
        # Below it, the message was settled after this delivery was sent and before it was
        # recorded. Making it pending again would deliver a settled message.
        elif seq >= self.next_seq:
            if self.config.ack_policy == "none":
                return True
            if seq not in self.acked_ahead:
                self.pending.add(seq, Pending(consumer_seq, 1, self._deadline_ns(elapsed_ns, 1)))
        return False

    def awaited(self, seqs: Mapping[int, object], top_seq: int) -> set[int]:
        """The sequences of ``seqs`` that the consumer still needs; ``top_seq`` is the highest.

        It needs a message that is pending, not delivered yet, or given up. The filter is not
        checked here: the caller does that.
        """
        found = self.pending.among(seqs.keys())
        if self.given_up:
            found.update(seq for seq in seqs if seq in self.given_up)
        # Messages that are not delivered yet. One that was acknowledged early is settled already.
        if top_seq >= self.next_seq:
            ahead = [seq for seq in seqs if seq >= self.next_seq and seq not in self.acked_ahead]
            if self.pinned is not None and ahead:
                ahead = list(compress(ahead, self.pinned.mask(np.array(ahead, np.int64))))
            found.update(ahead)
        return found

    def _move_on(self, advance: Advance, step: Step) -> None:
        # The command has totals, not increments: applying it twice does no harm.
        self.delivered = SequencePair(
            max(self.delivered.consumer_seq, advance.consumer_seq),
            max(self.delivered.stream_seq, advance.stream_seq),
            step.now_ns,
        )
        self._advance(advance.position)

    def _reconfigure(self, change: Reconfigured, step: Step) -> None:
        del step
        old, config = self.config, change.config
        self.config = config
        # The new ETag: an If-Match with an older one is refused.
        self.version += 1
        if allows_more(old, config):
            self.given_up.clear()
        # As in JetStream, a changed ack_wait also applies to pending messages, as if it had been
        # set before the delivery, or before a delayed nak of it.
        attempts = range(1, max(len(old.backoff_ns), len(config.backoff_ns), 1) + 1)
        waits = ((ack_wait_ns(config, each), ack_wait_ns(old, each)) for each in attempts)
        self.pending.shift(tuple(new_ns - old_ns for new_ns, old_ns in waits))

    def _advance(self, next_seq: int) -> None:
        # Never back, in whatever order records reach the log.
        if next_seq <= self.next_seq:
            return
        passed, self.next_seq = next_seq - self.next_seq, next_seq
        if self.acked_top < next_seq:
            self.acked_ahead.clear()
        elif passed < len(self.acked_ahead):
            self.acked_ahead.difference_update(range(next_seq - passed, next_seq))
        else:
            self.acked_ahead = {seq for seq in self.acked_ahead if seq >= next_seq}

    def _note_ahead(self, seqs: list[int]) -> None:
        """Note that ``seqs``, all from ``next_seq`` on, are done."""
        self.acked_ahead.update(seqs)
        self.acked_top = max([self.acked_top, *seqs])

    def _exhaust(self, exhaust: Exhaust, step: Step) -> None:
        for seq in exhaust.seqs:
            pending = self.pending.remove(seq)
            # The leader also exhausts messages that left the stream: these are dropped without an
            # advisory when they had deliveries left.
            if pending is not None and 0 < self.config.max_deliver <= pending.attempts:
                step.writes.advisories.append(self._advisory("max_deliver", seq, pending))
                self.given_up.add(seq)
                if seq >= self.next_seq:
                    self._note_ahead([seq])

    def _advisory(
        self, kind: AdvisoryType, seq: int, pending: Pending, reason: str = ""
    ) -> Advisory:
        return Advisory(
            type=kind,
            consumer=self.config.name,
            stream_seq=seq,
            consumer_seq=pending.consumer_seq,
            deliveries=pending.attempts,
            reason=reason,
        )

    def _acknowledge(self, acks: Acknowledge, step: Step) -> list[int]:
        settled: list[int] = []
        advisories = step.writes.advisories
        if len(acks.acked) > _ONE_BY_ONE and self.config.ack_policy != "all":
            settled = self._settle_all(acks.acked)
        else:
            for seq in acks.acked:
                self._ack(seq, settled)
        # After the plain acks. A nak of a message that is acknowledged in the same command does
        # nothing.
        for kind, seq, delay_ns in acks.others:
            pending = self.pending.get(seq)
            self._acknowledge_other(kind, seq, delay_ns, step.elapsed_ns, settled)
            # A nak or term of a message that is settled already is no event.
            if pending is None:
                continue
            if kind == "nak":
                advisories.append(self._advisory("nak", seq, pending))
            elif kind == "term":
                reason = acks.reasons.get(seq, "")
                advisories.append(self._advisory("terminated", seq, pending, reason))
        return settled

    def _ack(self, seq: int, settled: list[int]) -> None:
        if self.config.ack_policy != "all":
            self._settle(seq, settled)
            return
        # An ack settles every message that was delivered before it, and this one (JetStream's
        # AckAll).
        lower = self.pending.remove_below(seq)
        if self.given_up:
            for each in lower:
                self.given_up.discard(each)
        settled += lower
        self._settle(seq, settled)
        if seq >= self.next_seq:
            # The position is before messages that were delivered: the command that recorded them
            # was lost with its leader, or is yet to come. The ack covers them all the same.
            stream_seq = max(self.delivered.stream_seq, seq)
            self.delivered = replace(self.delivered, stream_seq=stream_seq)
            self._advance(min(seq, INT64_MAX) + 1)

    def _settle_all(self, seqs: list[int]) -> list[int]:
        """As :meth:`_settle` for each of ``seqs``, in less time; return those that it settled."""
        settled, others = self.pending.remove_all(seqs)
        next_seq = self.next_seq
        if self.delivered.stream_seq >= next_seq:
            self._note_ahead([seq for seq in settled if seq >= next_seq])
        for seq in others:
            self._settle(seq, settled)
        return settled

    def _settle(self, seq: int, settled: list[int]) -> None:
        # A late ack of a message that was given up settles it too, as in JetStream.
        delivered = self.pending.remove(seq) is not None or self.given_up.discard(seq)
        if seq >= self.next_seq:
            # The command that recorded this delivery was lost with its leader. The message must
            # not be delivered again, because the client has settled it.
            self._note_ahead([seq])
            delivered = True
        if delivered:
            settled.append(seq)

    def _acknowledge_other(
        self, kind: AckKind, seq: int, delay_ns: int, elapsed_ns: int, settled: list[int]
    ) -> None:
        pending = self.pending.get(seq)
        if kind == "ack":
            self._ack(seq, settled)
        elif kind == "term":
            self._settle(seq, settled)
        # A late nak must not make a settled message pending again.
        elif pending is None:
            return
        elif kind == "nak":
            # The delay of the nak, or at once: the leader redelivers at the deadline.
            self.pending.postpone(seq, pending, min(elapsed_ns + delay_ns, INT64_MAX))
        else:
            # `in_progress`: the ack wait begins again, with the backoff of this delivery.
            deadline_ns = self._deadline_ns(elapsed_ns, pending.attempts)
            self.pending.postpone(seq, pending, deadline_ns)

    def _move_floor(self, time_ns: int) -> None:
        lowest = self.pending.lowest()
        if lowest is None:
            consumer_seq, stream_seq = self.delivered.consumer_seq, self.delivered.stream_seq
        else:
            # Everything below the lowest pending message is settled, whatever was delivered after
            # it.
            consumer_seq, stream_seq = lowest[1].consumer_seq - 1, lowest[0] - 1
        # Never back, and stamped only when it moves: its time is that of the last progress.
        if stream_seq > self.floor.stream_seq:
            self.floor = SequencePair(consumer_seq, stream_seq, time_ns)

    def _deadline_ns(self, elapsed_ns: int, attempt: int) -> int:
        return min(elapsed_ns + ack_wait_ns(self.config, attempt), INT64_MAX)

    # Persistence ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The whole state. The deliveries in it are those of the machine."""
        return self._snapshot(self.pending.to_dict(), 0)

    def _snapshot(self, pending: Any, rows: int) -> Snapshot:
        """The whole state with ``pending``, which may be encoded already."""
        return Snapshot(
            self.config,
            self.created_ns,
            self.version,
            self.epoch,
            self.next_seq,
            self.delivered,
            self.floor,
            pending,
            sorted(self.acked_ahead),
            0 if self.pinned is None else self.pinned.end_seq,
            self.given_up.pages(),
            rows,
        )

    def write_snapshot(self, writes: Writes) -> None:
        """Write the whole state and delete the delta rows before it."""
        changed, gone = self.pending.take_rows()
        for number, row in changed.items():
            writes.put(keys.pending_key(self.shard_id, self.consumer_id, number), row)
        for number in gone:
            writes.delete(keys.pending_key(self.shard_id, self.consumer_id, number))
        self._rows = self.pending.rows
        row = _encode(self._snapshot(self.pending.without_rows(), self._rows))
        # In the same write as the snapshot: a start never applies a delta to a state that has it.
        self._drop_deltas(writes)
        writes.put(keys.small_key(keys.CONSUMER, self.shard_id, self.consumer_id), row)
        self._snapshot_bytes = len(row) + self.pending.row_bytes

    def _drop_deltas(self, writes: Writes) -> None:
        prefix = keys.small_key(keys.CONSUMER_DELTA, self.shard_id, self.consumer_id)
        writes.delete_range(prefix, keys.prefix_end(prefix))
        self._deltas = self._delta_bytes = 0

    def pin(self, pinned: Pinned, writes: Writes) -> None:
        """Deliver these messages first; the caller writes the snapshot."""
        self.pinned = pinned
        for number, row in enumerate(pinned.rows()):
            writes.put(keys.pinned_key(self.shard_id, self.consumer_id, number), row)

    def _unpin(self, writes: Writes) -> None:
        self.pinned = None
        prefix = keys.small_key(keys.PINNED, self.shard_id, self.consumer_id)
        writes.delete_range(prefix, keys.prefix_end(prefix))

    def erase(self, writes: Writes) -> None:
        """Remove every row of the consumer."""
        if self.pinned is not None:
            self._unpin(writes)
        if self._rows:
            prefix = keys.small_key(keys.PENDING, self.shard_id, self.consumer_id)
            writes.delete_range(prefix, keys.prefix_end(prefix))
        self._drop_deltas(writes)
        writes.delete(keys.small_key(keys.CONSUMER, self.shard_id, self.consumer_id))

    @classmethod
    def load(
        cls, shard_id: int, consumer_id: int, row: bytes, rows_of: RowsOf = _no_rows
    ) -> "ConsumerMachine":
        """Build the consumer from its snapshot row; apply its deltas with :meth:`replay`.

        ``rows_of`` returns the rows (key, value) of a kind that belong to the consumer.
        """
        stored = _snapshots.decode(row)
        pinned = rows_of(keys.PINNED) if stored.pinned_end else ()
        pending = PendingDeliveries(stored.pending)
        next_seq = stored.next_seq
        if stored.rows:
            found = [(keys.last_number(key, 4), one) for key, one in rows_of(keys.PENDING)]
            pending = PendingDeliveries.of_rows(found)
            # Some rows were lost with damage that an operator accepted. Their messages are not
            # known, so all that may be among them are delivered again.
            if pending.rows < stored.rows:
                next_seq = min(next_seq, stored.floor.stream_seq + 1)
        return cls(
            shard_id,
            consumer_id,
            stored.config,
            stored.created_ns,
            next_seq,
            stored.version,
            stored.epoch,
            stored.delivered,
            stored.floor,
            pending,
            set(stored.acked_ahead),
            Pinned.of_rows((one for _, one in pinned), stored.pinned_end),
            GivenUp(stored.given_up),
            _snapshot_bytes=len(row) + pending.row_bytes,
            _rows=stored.rows,
        )

    def replay(self, row: bytes) -> None:
        """Apply one stored delta row, in order."""
        delta = _deltas.decode(row)
        # Its rows are in the store and its advisories were reported: both are dropped here.
        self._take(delta.change, Step(0, delta.time_ns, Writes(), delta.skipped_ns))
        self._deltas += 1
        self._delta_bytes += len(row)


_RULES: Final[dict[type, Callable[[ConsumerMachine, Any, Step], list[int] | None]]] = {
    Deliver: ConsumerMachine._deliver,
    Advance: ConsumerMachine._move_on,
    Acknowledge: ConsumerMachine._acknowledge,
    DeliverAcked: ConsumerMachine._deliver_acked,
    Exhaust: ConsumerMachine._exhaust,
    Trimmed: ConsumerMachine._trim,
    Gone: ConsumerMachine._forget,
    GoneOne: ConsumerMachine._forget_one,
    Reconfigured: ConsumerMachine._reconfigure,
}
"""The rule for each kind of change. Some return the sequences that the change settled."""
