"""Appending messages: the checks of a publish in their fixed order, then the new block.

Order (core rule): stream sealed, message size, expected stream, duplicate id, expected sequences
and last id, TTL and roll-up rules, limits with the discard policy, store. A refused message gets no
sequence, and its id is not remembered.
"""

from bisect import bisect_left
from typing import Final, TypeVar

import crc32c
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.columns.blocks import Block, MessageColumns
from contrail_common.model import Rollup, StreamConfig
from contrail_common.subjects import is_wildcard
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.commands import Append, NumberedAppend
from contrail_storage.core.expected import HashedExpected
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.id_index import ID_BYTES, NO_ID, IdHashes
from contrail_storage.core.results import Appended, Refused, Result, Step
from contrail_storage.core.stream import ttl
from contrail_storage.core.stream.append_plain import append_plain
from contrail_storage.core.stream.capacity import CapacityCheck
from contrail_storage.core.stream.coverage import Coverage
from contrail_storage.core.stream.last_matches import LastMatches
from contrail_storage.core.stream.removal import deletion, interest, limits, purge
from contrail_storage.core.stream.shard_state import ShardState
from contrail_storage.core.stream.strip_dead import strip_dead_columns

_T = TypeVar("_T")
_NO_SEQS: Final = np.zeros(0, np.int64)

Verdicts = dict[int, Refused | int]
"""The messages that are not stored, by position: a refusal, or the sequence of the original."""


def append(state: ShardState, step: Step, command: Append) -> Result:
    """Store the messages that pass the checks."""
    # Own limits: in a stream of several shards, each has its share.
    config = state.shard_config
    if config.sealed:
        return Refused(errors.STREAM_SEALED.code)
    block = append_plain(state, step, config, command)
    if block is not None:
        appended = Appended(block.base_seq, block.count)
    else:
        if not command.is_sound():
            return Refused(errors.INTERNAL.code, "the columns of the messages are inconsistent")
        # Before the other checks: the batch is refused as a whole, and no message has a verdict.
        if command.atomic and not config.allow_atomic:
            return Refused(errors.ATOMIC_DISABLED.code)
        appended, block = _append(state, step, config, command)
    if block is not None:
        step.writes.blocks.append((state.shard_id, block))
        if config.max_msgs_per_subject >= 0 or state.is_over(config):
            # This may remove messages of the new block itself: their facts are in `fresh`.
            limits.enforce(state, step, config, block.subject_ids)
    # Without a block, sequences may still have been given to messages that nobody wants.
    if block is not None or state.shard_id in step.writes.reached:
        state.write_counters(step.writes)
    return appended


def append_numbered(state: ShardState, step: Step, command: NumberedAppend) -> Result:
    """Store the messages of a producer's batch that are not stored yet."""
    producers, name, number = state.producers, command.producer, command.number
    known = producers.find(name)
    if state.config.sealed or not command.is_sound():
        return append(state, step, command)
    if known is None or known.number < number:
        # Also ids that are live now: what is a duplicate once stays one for the whole batch.
        producers.begin(name, number, state.live_ids_from, step.writes)
    elif known.number > number:
        if command.atomic:
            # As for a repeat of the last number: there is no range of sequences to answer with.
            detail = f"the producer has begun batch {known.number}"
            return Refused(errors.ATOMIC_DUPLICATE.code, detail)
        count = command.columns.count
        return Appended(state.counters.last_seq + 1, count, dict.fromkeys(range(count), 0))
    elif not known.first_seq:
        return Refused(errors.NUMBER_FORGOTTEN.code)
    return append(state, step, command)


def append_own(state: ShardState, step: Step, command: Append) -> None:
    """Store messages of the server itself: no check applies, but limits are enforced.

    The caller writes the counters.
    """
    first_seq = state.counters.last_seq + 1
    columns = command.columns
    subject_index = np.frombuffer(command.subject_index, np.uint32)
    block = _store(state, step, command, columns, subject_index, columns.sizes())
    ttl.note(state, step, command.ttls or {}, first_seq)
    state.counters.last_id = NO_ID
    step.writes.blocks.append((state.shard_id, block))
    limits.enforce(state, step, state.shard_config, block.subject_ids)


def _append(
    state: ShardState, step: Step, config: StreamConfig, command: Append
) -> tuple[Appended, Block | None]:
    if command.ttls:
        command = ttl.raised(config, command)
    columns = command.columns
    count, sizes = columns.count, columns.sizes()
    subject_index = np.frombuffer(command.subject_index, np.uint32)
    first_seq = state.counters.last_seq + 1
    unwanted: NDArray[np.bool_] | None = None
    # Messages that no consumer wants get a sequence, so that clients see no difference, and are not
    # stored (JetStream).
    if config.retention == "interest":
        unwanted = interest.unwanted(state, command.subjects, subject_index)
    # First by subject, once for each: the checks of single messages skip those that are refused.
    verdicts = _refuse_by_subject(state, config, command, subject_index)
    checks = _Checks(state, config, command, sizes, subject_index, unwanted)
    checks.run(verdicts)
    rollups, ttls = command.rollups or {}, command.ttls or {}
    if verdicts:
        # One refused message refuses all of them, duplicates included.
        if command.atomic:
            return _refused_as_one(first_seq, count, verdicts), None
        kept = np.flatnonzero(_without(count, verdicts))
        if not len(kept):
            return Appended(first_seq, count, verdicts), None
        columns = columns.select(kept)
        subject_index, sizes = subject_index[kept], sizes[kept]
        # From here on, positions count the stored messages only.
        unwanted = None if unwanted is None else unwanted[kept]
        rollups, ttls = _stored(rollups, verdicts), _stored(ttls, verdicts)
    # Such a message is always the first of its command, so it replaces nothing of this append.
    if rollups.get(0) == "all":
        purge.purge_all(state, step.writes)
    block: Block | None
    if unwanted is None or not unwanted.any():
        block = _store(state, step, command, columns, subject_index, sizes)
    else:
        block = _store_wanted(state, step, command, columns, subject_index, sizes, ~unwanted)
        ttls = {at: ttl_ns for at, ttl_ns in ttls.items() if not unwanted[at]}
    if ttls:
        ttl.note(state, step, ttls, first_seq)
    if rollups:
        # After storing: a roll-up also replaces messages of its subject earlier in this append.
        _replace(state, step, rollups, first_seq, _numbers(state, command, subject_index), unwanted)
    if checks.new_ids is not None:
        # Ids of unwanted messages too: their sequences are used, and a repeat must return them.
        state.dedupe.add(checks.new_ids, checks.new_id_seqs, step)
    state.counters.last_id = checks.last_id
    return Appended(first_seq, count, verdicts or None), block


def _refuse_by_subject(
    state: ShardState, config: StreamConfig, command: Append, subject_index: U32Array
) -> Verdicts:
    captured = state.captured
    if captured is None:
        captured = state.captured = Coverage(config.subjects, everything=not config.subjects)
    subjects, table = command.subjects, state.subjects
    refused = {
        number: Refused(errors.SUBJECT_NOT_CAPTURED.code, f"the stream does not capture {subject}")
        for number, subject in enumerate(subjects)
        if not captured[subject]
    }
    # The numbers left are one subtraction; `has_capacity` may search all numbers for a gap.
    if table.numbered.left < len(subjects) and not table.has_capacity(len(subjects)):
        detail = "the stream has reached its maximum number of subjects"
        no_capacity = Refused(errors.STORE_FAILED.code, detail)
        for number, subject in enumerate(subjects):
            if subject not in table.ids:
                refused.setdefault(number, no_capacity)
    verdicts: Verdicts = {}
    for number, verdict in refused.items():
        for at in np.flatnonzero(subject_index == number):
            verdicts[int(at)] = verdict
    return verdicts


# Storing -----------------------------------------------------------------------------------------


def _store(
    state: ShardState,
    step: Step,
    command: Append,
    columns: MessageColumns,
    subject_index: U32Array,
    sizes: I64Array,
) -> Block:
    first_seq, count = state.counters.last_seq + 1, columns.count
    table = state.subjects
    # `_refuse_by_subject` refused the new subjects if there is no capacity for them.
    if table.numbered.left < len(command.subjects):
        table.reserve(len(command.subjects), step.writes)
    # Their time is the log time of the entry, the same on every replica.
    if count == 1:
        # Numbers, not arrays of one: most commands of a stream append one message.
        sid = table.add_one(command.subjects[int(subject_index[0])], first_seq, step)
        sids = np.array([sid], np.uint32)
        size = int(sizes[0])
        times_ns = np.array([step.now_ns], np.int64)
    else:
        sids = _number_all(state, step, command, subject_index)
        table.add_run(sids, first_seq, step)
        size = int(sizes.sum())
        times_ns = np.full(count, step.now_ns, np.int64)
    state.fresh.append(MessageFacts(first_seq, sids, sizes, times_ns))
    _count(state, step, count, count, size, columns.payload)
    return Block(first_seq, times_ns, sids, columns)


def _store_wanted(
    state: ShardState,
    step: Step,
    command: Append,
    columns: MessageColumns,
    subject_index: U32Array,
    sizes: I64Array,
    wanted: NDArray[np.bool_],
) -> Block | None:
    """Store the messages that are ``wanted``; the others get a sequence and are not stored.

    The block spans the first to the last wanted message, with blanks in between.
    """
    first_seq, count = state.counters.last_seq + 1, columns.count
    positions = np.flatnonzero(wanted)
    block: Block | None = None
    payload = b""
    if state.subjects.numbered.left < len(command.subjects):
        state.subjects.reserve(len(command.subjects), step.writes)
    if len(positions):
        start, stop = int(positions[0]), int(positions[-1]) + 1
        within = wanted[start:stop]
        sids = np.zeros(stop - start, np.uint32)
        sids[within] = _number_all(state, step, command, subject_index[positions])
        # Blanks need some number: one that is in the block anyway, so that it compresses. Nobody
        # reads it, because blanks are marked as deleted.
        sids[~within] = sids[0]
        state.subjects.add_all(sids[within], positions + first_seq, step)
        stored = strip_dead_columns(columns.slice(start, stop), within)
        times_ns = np.full(stop - start, step.now_ns, np.int64)
        block = Block(first_seq + start, times_ns, sids, stored)
        state.fresh.append(MessageFacts(block.base_seq, sids, stored.sizes(), times_ns))
        payload = stored.payload
    size = int(sizes[positions].sum())
    _count(state, step, count, len(positions), size, payload)
    # After counting: the head moves past the unwanted messages only if their sequences are used.
    deletion.leave_out(state, np.flatnonzero(~wanted) + first_seq, step.writes)
    step.writes.reached[state.shard_id] = state.counters.last_seq
    return block


def _number_all(
    state: ShardState, step: Step, command: Append, subject_index: U32Array
) -> U32Array:
    """The subject number of each message; new subjects get their number now."""
    # Only subjects of stored messages: a refused one would keep a number without messages.
    used = np.zeros(len(command.subjects), np.bool_)
    used[subject_index] = True
    numbers = np.zeros(len(command.subjects), np.uint32)
    for number in np.flatnonzero(used).tolist():
        numbers[number] = state.subjects.number(command.subjects[number])
    return numbers[subject_index]


def _count(
    state: ShardState, step: Step, seqs: int, messages: int, size: int, payload: bytes
) -> None:
    counters = state.counters
    counters.last_seq += seqs
    counters.messages += messages
    counters.bytes += size
    counters.last_time_ns = step.now_ns
    # Over all payloads ever stored. A checkpoint compares it, so a store that lost or changed
    # messages does not start.
    counters.digest = crc32c.crc32c(payload, counters.digest)


# Roll-ups ----------------------------------------------------------------------------------------


def _numbers(state: ShardState, command: Append, subject_index: U32Array) -> I64Array:
    """The subject number of each message; -1 where the stream has no message of the subject."""
    ids = state.subjects.ids
    return np.array([ids.get(subject, -1) for subject in command.subjects])[subject_index]


def _replace(
    state: ShardState,
    step: Step,
    rollups: dict[int, Rollup],
    first_seq: int,
    numbers: I64Array,
    unwanted: NDArray[np.bool_] | None,
) -> None:
    """Remove the messages that roll-ups replace; ``rollups`` is keyed by position.

    An unwanted message replaces others too, although it is not stored itself.
    """
    # Of several roll-ups of a subject only the newest counts: it replaces the others as well.
    newest = {int(numbers[at]): at for at in sorted(rollups) if numbers[at] >= 0}
    if not newest:
        return
    if unwanted is not None:
        # They are in no block, so they must not count as messages that stay.
        numbers = np.where(unwanted, -1, numbers)
    sids = np.array(sorted(newest), np.uint32)
    kept = [np.count_nonzero(numbers[newest[sid] :] == sid) for sid in sids.tolist()]
    table = state.subjects
    held = table.counts[table.numbered.slots(sids)].astype(np.int64)
    older = held - np.array(kept, np.int64)
    below = np.array([first_seq + newest[sid] for sid in sids.tolist()], np.int64)
    purge.replace_older(state, step, sids, older, below)


# Checks ------------------------------------------------------------------------------------------


def _refused_as_one(first_seq: int, count: int, verdicts: Verdicts) -> Appended:
    """Refuse all messages of an atomic batch for the reason of the first that cannot be stored."""
    first = min(verdicts)
    refused = verdicts[first]
    if not isinstance(refused, Refused):
        detail = f"message {first} has the id of a message that is already stored"
        refused = Refused(errors.ATOMIC_DUPLICATE.code, detail)
    return Appended(first_seq, count, dict.fromkeys(range(count), refused))


def _stored(asked: dict[int, _T], verdicts: Verdicts) -> dict[int, _T]:
    """Move ``asked`` from positions in the request to positions among the stored messages."""
    refused = sorted(verdicts)
    return {at - bisect_left(refused, at): one for at, one in asked.items() if at not in verdicts}


def _without(count: int, verdicts: Verdicts) -> NDArray[np.bool_]:
    """A mask of ``count`` messages: true for those without a verdict."""
    kept = np.ones(count, np.bool_)
    kept[list(verdicts)] = False
    return kept


class _Checks:
    """The per-message checks of one append, in order; earlier messages affect later checks."""

    def __init__(
        self,
        state: ShardState,
        config: StreamConfig,
        command: Append,
        sizes: I64Array,
        subject_index: U32Array,
        unwanted: NDArray[np.bool_] | None,
    ) -> None:
        # The state before the append.
        self._state = state
        # The configuration, with this shard's share of the limits.
        self._config = config
        # The append; its messages are named by position.
        self._command = command
        # Bytes of each message, as limits count them.
        self._sizes = sizes
        # For each message the position of its subject in the command.
        self._subject_index = subject_index
        # The sequence of the first message that is accepted.
        self._first_seq = state.counters.last_seq + 1
        # The messages that no consumer wants; None if there are none.
        self._unwanted = unwanted
        # How many messages were accepted so far: the next one gets `_first_seq + _accepted`.
        self._accepted = 0
        # The last sequence that this batch gives to a message of the subject.
        self._stored: dict[str, int] = {}
        # Last sequences by pattern, from the leader's proofs. Built for the first one.
        self._matches: LastMatches | None = None
        # Built for the first message that a limit with discard new may refuse.
        self._capacity: CapacityCheck | None = None
        self.new_ids: IdHashes | None = None
        """Ids of messages to store, without repeats; ``new_id_seqs`` are their sequences."""
        self.new_id_seqs: I64Array = _NO_SEQS
        self.last_id = state.counters.last_id
        """The id of the last message that was accepted so far, or of the last stored one."""

    def run(self, verdicts: Verdicts) -> None:
        """Add to ``verdicts`` the messages that must not be stored; collect the new ids.

        Messages are checked one by one only where one may depend on another.
        """
        command, config = self._command, self._config
        hashes = None if command.ids is None else IdHashes.of(command.ids)
        # All sizes in one comparison: most appends have no message that is too large.
        sizes = self._sizes
        largest = int(sizes[0] if len(sizes) == 1 else sizes.max())
        if 0 <= config.max_msg_size < largest or 0 <= config.max_bytes < largest:
            self._check_sizes(verdicts)
        if (
            command.expected is not None
            or command.rollups is not None
            or (command.ttls is not None and not config.allow_msg_ttl)
            or (config.discard == "new" and (config.max_msgs >= 0 or config.max_bytes >= 0))
            or config.discard_new_per_subject
            or (hashes is not None and hashes.repeat())
        ):
            self._check_each(hashes, verdicts)
        elif hashes is not None:
            self._check_ids(hashes, verdicts)
        elif len(verdicts) < command.columns.count:
            self.last_id = NO_ID

    def _check_sizes(self, verdicts: Verdicts) -> None:
        config = self._config
        for limit, spec, what in (
            (config.max_msg_size, errors.MESSAGE_TOO_LARGE, "max_msg_size"),
            (config.max_bytes, errors.STORE_FAILED, "max_bytes"),
        ):
            if limit < 0:
                continue
            for at in np.flatnonzero(self._sizes > limit).tolist():
                verdicts.setdefault(
                    at,
                    Refused(
                        spec.code,
                        f"the message has {self._sizes[at]} bytes, more than {what} of {limit}",
                    ),
                )

    def _check_ids(self, hashes: IdHashes, verdicts: Verdicts) -> None:
        """Check only the ids, which are all different: all messages at once."""
        known = self._known(hashes)
        if verdicts or known.any():
            stored = _without(hashes.count, verdicts)
            twins = np.flatnonzero(stored & (known > 0))
            verdicts.update(zip(twins.tolist(), known[twins].tolist(), strict=True))
            # A duplicate neither becomes the last id nor is remembered again.
            stored[twins] = False
            hashes = hashes.at(np.flatnonzero(stored))
        if not hashes.count:
            return
        self.last_id = hashes.ids[-ID_BYTES:]
        new = np.flatnonzero(hashes.present())
        if len(new):
            self.new_ids = hashes if len(new) == hashes.count else hashes.at(new)
            self.new_id_seqs = self._first_seq + new

    def _known(self, hashes: IdHashes) -> I64Array:
        """The sequences of the messages that are stored already; 0 for all others."""
        state, command = self._state, self._command
        if not isinstance(command, NumberedAppend):
            return state.dedupe.find(hashes)
        producer = state.producers.find(command.producer)
        assert producer is not None  # the batch has begun
        return state.dedupe.find(hashes, producer.first_seq)

    def _check_each(self, hashes: IdHashes | None, verdicts: Verdicts) -> None:
        command = self._command
        expected = command.expected or {}
        ids = command.ids
        known = [] if hashes is None else self._known(hashes).tolist()
        new: dict[bytes, int] = {}
        for at in range(command.columns.count):
            if at in verdicts:
                continue
            subject = command.subjects[int(self._subject_index[at])]
            message_id, twin = NO_ID, 0
            if ids is not None:
                message_id = ids[ID_BYTES * at : ID_BYTES * (at + 1)]
                twin = known[at] or new.get(message_id, 0)
            verdict = self._verdict(at, expected.get(at), subject, twin)
            if verdict is not None:
                verdicts[at] = verdict
                continue
            seq = self._first_seq + self._accepted
            self._accepted += 1
            # An unwanted message is not the last one of its subject: it is not there.
            if self._is_wanted(at):
                self._stored[subject] = seq
                if self._matches is not None:
                    self._matches.add(subject, seq)
            self.last_id = message_id
            if message_id != NO_ID:
                new[message_id] = seq
        if new:
            self.new_ids = IdHashes.of(b"".join(new))
            self.new_id_seqs = np.fromiter(new.values(), np.int64, len(new))

    def _is_wanted(self, at: int) -> bool:
        """Whether an accepted message is stored: some consumer's filter matches it."""
        return self._unwanted is None or not self._unwanted[at]

    def _verdict(
        self, at: int, expected: HashedExpected | None, subject: str, twin: int
    ) -> Refused | int | None:
        config = self._config
        rollup = (self._command.rollups or {}).get(at)
        if expected is not None and expected.stream not in (None, config.name):
            return Refused(errors.EXPECTED_STREAM.code, f"the stream is {config.name}")
        # Before the expectations, as in JetStream: a publisher that repeats a message whose ack was
        # lost gets the ack again, although its expectations no longer hold.
        if twin:
            return twin
        if expected is not None:
            refused = self._check_expected(expected, subject)
            if refused is not None:
                return refused
        if at in (self._command.ttls or ()) and not config.allow_msg_ttl:
            return Refused(errors.TTL_DISABLED.code, "the stream does not allow per-message TTL")
        if rollup is not None and not config.allow_rollup_hdrs:
            return Refused(errors.ROLLUP_REFUSED.code, "the stream does not allow roll-ups")
        if config.discard != "new":
            return None
        if self._capacity is None:
            self._capacity = CapacityCheck(
                self._state, self._command, self._sizes, self._subject_index
            )
        size, stored = int(self._sizes[at]), self._is_wanted(at)
        why = self._capacity.take(subject, size, rollup, stored=stored)
        return None if why is None else Refused(errors.STORE_FAILED.code, why)

    def _check_expected(self, expected: HashedExpected, subject: str) -> Refused | None:
        last_seq = self._first_seq + self._accepted - 1
        if expected.last_subject_seq is not None:
            actual = self._last_of(expected, subject)
            # An exact answer would need a search without a bound. The leader searches, and proposes
            # the publish again with a proof.
            if actual is None:
                return Refused(
                    errors.LAST_UNSETTLED.code, "the last message of the subject has been removed"
                )
            if actual != expected.last_subject_seq:
                return Refused(errors.WRONG_LAST_SEQUENCE.code, f"wrong last sequence: {actual}")
        if expected.last_seq is not None and expected.last_seq != last_seq:
            return Refused(errors.WRONG_LAST_SEQUENCE.code, f"wrong last sequence: {last_seq}")
        if expected.last_id is not None and expected.last_id != self.last_id:
            return self._wrong_last_id(last_seq)
        return None

    def _wrong_last_id(self, last_seq: int) -> Refused:
        code, detail = errors.WRONG_LAST_MSG_ID.code, "wrong last msg ID"
        if self.last_id == NO_ID:
            return Refused(code, f"{detail}: the last message has no id")
        return Refused(code, detail, seq=last_seq)  # the state has hashes, not the id itself

    def _last_of(self, expected: HashedExpected, subject: str) -> int | None:
        """Last sequence of the subject or filter, including earlier messages of this batch.

        None if it is not known.
        """
        pattern = expected.last_subject_seq_subject or subject
        if is_wildcard(pattern):
            return self._last_of_wildcard(pattern, expected)
        stored = self._stored.get(pattern)
        if stored is not None:
            return stored
        last_seq = self._state.last_live(pattern)
        # The newest message is removed. The proof names the one before, unless others were stored
        # since, or that one is removed as well.
        if last_seq is None and self._state.subjects.last_seq(pattern) == expected.as_of:
            return expected.newest if self._state.is_live(expected.newest) else None
        return last_seq

    def _last_of_wildcard(self, pattern: str, expected: HashedExpected) -> int | None:
        if expected.as_of is None:
            return None
        if self._matches is None:
            self._matches = LastMatches.of(self._state, self._command.expected or {})
            for name, seq in self._stored.items():
                self._matches.add(name, seq)
        return self._matches.last(pattern, expected.as_of, expected.newest)
