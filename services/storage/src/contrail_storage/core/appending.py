"""Appending messages: the checks of a publish in their fixed order, then the new block.

Order (core rule): stream sealed, message size, expected stream, duplicate id, expected sequences
and last id, limits with the discard policy, store. A refused message uses no sequence and leaves
no id.
"""

from bisect import bisect_left
from typing import TYPE_CHECKING

import crc32c
import numpy as np
from numpy.typing import NDArray

from contrail_common import errors
from contrail_common.blocks import Block, MessageColumns
from contrail_common.model import Rollup
from contrail_common.subjects import is_wildcard, matches, matches_any
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.commands import Append, HashedExpected
from contrail_storage.core.dedupe import ID_BYTES, NO_ID, U64Array, words_of
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.results import Appended, Refused, Writes

if TYPE_CHECKING:
    from contrail_storage.core.stream_machine import StreamMachine

_CAPTURED_MAX = 65_536

Verdicts = dict[int, Refused | int]
"""What became of the messages, by position, that are not stored: refused, or a duplicate's seq."""


class Appender:
    """Appends to one stream machine, whose state it works on."""

    def __init__(self, machine: "StreamMachine") -> None:
        self._machine = machine
        self._captured: dict[str, bool] = {}

    def forget_captured(self) -> None:
        """The stream's subjects may have changed."""
        self._captured.clear()

    def append(
        self, index: int, now_ns: int, command: Append, writes: Writes
    ) -> tuple[Appended, Block | None]:
        """Store what passes the checks; answers the outcome and the new block, if any."""
        count = command.columns.count
        sizes = command.columns.sizes()
        subject_index = np.frombuffer(command.subject_index, np.uint32)
        first_seq = self._machine.counters.last_seq + 1
        batch = _Batch(self._machine, command, sizes, subject_index, first_seq)
        verdicts = self._refuse_by_subject(command, subject_index)
        batch.check(verdicts)
        if command.atomic and verdicts:
            return _refused_as_one(first_seq, count, verdicts), None
        columns = command.columns
        if verdicts:
            kept = np.flatnonzero(_without(count, verdicts))
            if not len(kept):
                return Appended(first_seq, count, verdicts), None
            columns = columns.select(kept)
            subject_index, sizes = subject_index[kept], sizes[kept]
        rollups = _stored_rollups(command.rollups, verdicts)
        if rollups.get(0) == "all":
            self._machine.remover.purge_all(writes)
        block = self._store(index, now_ns, command, columns, subject_index, sizes, writes)
        if rollups:
            self._replace(rollups, block, index, now_ns, writes)
        if batch.new_ids:
            self._machine.dedupe.add(batch.new_ids, batch.new_id_seqs, now_ns, index, writes)
        self._machine.counters.last_id = batch.last_id
        return Appended(first_seq, count, verdicts or None), block

    def _replace(
        self, rollups: dict[int, Rollup], block: Block, index: int, now_ns: int, writes: Writes
    ) -> None:
        """Remove what the stored messages at the positions ``rollups`` replace, of each subject."""
        newest = {int(block.subject_ids[at]): at for at in sorted(rollups)}
        sids = np.array(sorted(newest), np.uint32)
        kept = [np.count_nonzero(block.subject_ids[newest[sid] :] == sid) for sid in sids.tolist()]
        table = self._machine.subjects
        held = table.counts[sids.astype(np.int64) - table.base].astype(np.int64)
        older = held - np.array(kept, np.int64)
        below = np.array([block.base_seq + newest[sid] for sid in sids.tolist()], np.int64)
        self._machine.remover.replace_older(sids, older, below, index, now_ns, writes)

    def _refuse_by_subject(self, command: Append, subject_index: U32Array) -> Verdicts:
        foreign = [
            number
            for number, subject in enumerate(command.subjects)
            if not self._is_captured(subject)
        ]
        verdicts: Verdicts = {}
        for number in foreign:
            refused = Refused(
                errors.SUBJECT_NOT_CAPTURED.code,
                f"the stream does not capture {command.subjects[number]}",
            )
            for at in np.flatnonzero(subject_index == number):
                verdicts[int(at)] = refused
        return verdicts

    def _is_captured(self, subject: str) -> bool:
        known = self._captured.get(subject)
        if known is None:
            if len(self._captured) >= _CAPTURED_MAX:
                self._captured.clear()
            known = matches_any(self._machine.config.subjects, subject)
            self._captured[subject] = known
        return known

    def _store(
        self,
        index: int,
        now_ns: int,
        command: Append,
        columns: MessageColumns,
        subject_index: U32Array,
        sizes: I64Array,
        writes: Writes,
    ) -> Block:
        machine = self._machine
        counters = machine.counters
        first_seq = counters.last_seq + 1
        count = columns.count
        subjects = machine.subjects
        if count == 1:
            sid = subjects.number(command.subjects[int(subject_index[0])], writes)
            sids = np.array([sid], np.uint32)
            subjects.add_one(sid, first_seq, index, writes)
        else:
            used = np.zeros(len(command.subjects), np.bool_)
            used[subject_index] = True
            numbers = np.zeros(len(command.subjects), np.uint32)
            for number in np.flatnonzero(used).tolist():
                numbers[number] = subjects.number(command.subjects[number], writes)
            sids = numbers[subject_index]
            subjects.add_run(sids, first_seq, index, writes)
        block = Block(first_seq, np.full(count, now_ns, np.int64), sids, columns)
        machine.remember(MessageFacts(first_seq, sids, sizes, block.times_ns))
        counters.last_seq += count
        counters.messages += count
        counters.bytes += int(sizes.sum())
        counters.last_time_ns = now_ns
        counters.digest = crc32c.crc32c(columns.payload, counters.digest)
        return block


def _refused_as_one(first_seq: int, count: int, verdicts: Verdicts) -> Appended:
    """Nothing of an atomic batch is stored, for the reason of the first that could not be."""
    first = min(verdicts)
    refused = verdicts[first]
    if not isinstance(refused, Refused):
        detail = f"message {first} has the id of a message that is stored"
        refused = Refused(errors.ATOMIC_DUPLICATE.code, detail)
    return Appended(first_seq, count, dict.fromkeys(range(count), refused))


def _stored_rollups(rollups: dict[int, Rollup] | None, verdicts: Verdicts) -> dict[int, Rollup]:
    """``rollups`` by the position among the messages that are stored."""
    if not rollups or not verdicts:
        return rollups or {}
    refused = sorted(verdicts)
    return {
        at - bisect_left(refused, at): kind for at, kind in rollups.items() if at not in verdicts
    }


def _without(count: int, verdicts: Verdicts) -> NDArray[np.bool_]:
    """Which of ``count`` messages have no verdict."""
    kept = np.ones(count, np.bool_)
    kept[list(verdicts)] = False
    return kept


class _Batch:
    """The per-message checks of one append, in order; knows what its earlier messages changed."""

    def __init__(
        self,
        machine: "StreamMachine",
        command: Append,
        sizes: I64Array,
        subject_index: U32Array,
        first_seq: int,
    ) -> None:
        self._machine = machine
        self._command = command
        self._sizes = sizes
        self._subject_index = subject_index
        self._first_seq = first_seq
        self._stored: dict[str, int] = {}
        self._subject_counts: dict[str, int] = {}
        self._stored_messages = 0
        self._stored_bytes = 0
        self.new_ids = b""
        self.new_id_seqs = np.zeros(0, np.int64)
        self.last_id = machine.counters.last_id

    def check(self, verdicts: Verdicts) -> None:
        """Add to ``verdicts`` what must not be stored; finds the ids that are new."""
        command, config = self._command, self._machine.config
        self._check_sizes(verdicts)
        if (
            command.expected is not None
            or command.rollups is not None
            or (config.discard == "new" and (config.max_msgs >= 0 or config.max_bytes >= 0))
            or config.discard_new_per_subject
            or (command.ids is not None and _repeats(command.ids))
        ):
            self._check_each(verdicts)
        elif command.ids is not None:
            self._check_ids(command.ids, verdicts)
        elif len(verdicts) < command.columns.count:
            self.last_id = NO_ID

    def _check_sizes(self, verdicts: Verdicts) -> None:
        config = self._machine.own_config
        for limit, spec, what in (
            (config.max_msg_size, errors.MESSAGE_TOO_LARGE, "max_msg_size"),
            (config.max_bytes, errors.STORE_FAILED, "max_bytes"),
        ):
            if limit < 0 or int(self._sizes.max()) <= limit:
                continue
            for at in np.flatnonzero(self._sizes > limit).tolist():
                verdicts.setdefault(
                    at, Refused(spec.code, f"{self._sizes[at]} bytes exceed {what} of {limit}")
                )

    def _check_ids(self, ids: bytes, verdicts: Verdicts) -> None:
        """Look at the ids, all different, and at nothing else: all messages at once."""
        known = self._machine.dedupe.find(ids)
        stored = _without(self._command.columns.count, verdicts)
        if known.any():
            twins = np.flatnonzero(stored & (known > 0))
            verdicts.update(zip(twins.tolist(), known[twins].tolist(), strict=True))
            stored[twins] = False
        words = words_of(ids)
        if not stored.all():
            words = words[stored]
        if not len(words):
            return
        new = _are_ids(words)
        self.new_ids = (words if new.all() else words[new]).tobytes()
        self.new_id_seqs = self._first_seq + np.flatnonzero(new)
        self.last_id = words[-1].tobytes()

    def _check_each(self, verdicts: Verdicts) -> None:
        command = self._command
        expected = command.expected or {}
        ids = command.ids
        known = [] if ids is None else self._machine.dedupe.find(ids).tolist()
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
            seq = self._first_seq + self._stored_messages
            self._stored[subject] = seq
            self._subject_counts[subject] = self._count_of(subject) + 1
            self._stored_messages += 1
            self._stored_bytes += int(self._sizes[at])
            self.last_id = message_id
            if message_id != NO_ID:
                new[message_id] = seq
        self.new_ids = b"".join(new)
        self.new_id_seqs = np.fromiter(new.values(), np.int64, len(new))

    def _count_of(self, subject: str) -> int:
        """Messages of the subject, with those of this batch."""
        return self._subject_counts.get(subject) or self._machine.subjects.count(subject)

    def _verdict(
        self, at: int, expected: HashedExpected | None, subject: str, twin: int
    ) -> Refused | int | None:
        config = self._machine.config
        rollup = (self._command.rollups or {}).get(at)
        if expected is not None and expected.stream not in (None, config.name):
            return Refused(errors.EXPECTED_STREAM.code, f"the stream is {config.name}")
        if twin:
            return twin
        if expected is not None:
            refused = self._check_expected(expected, subject)
            if refused is not None:
                return refused
        if rollup is not None and not config.allow_rollup_hdrs:
            return Refused(errors.ROLLUP_REFUSED.code, "the stream does not allow roll-ups")
        return self._check_full(subject, int(self._sizes[at]), rollup)

    def _check_expected(self, expected: HashedExpected, subject: str) -> Refused | None:
        last_seq = self._first_seq + self._stored_messages - 1
        if expected.last_subject_seq is not None:
            pattern = expected.last_subject_seq_subject or subject
            actual = self._last_of(pattern)
            if actual != expected.last_subject_seq:
                return Refused(errors.WRONG_LAST_SEQUENCE.code, f"wrong last sequence: {actual}")
        if expected.last_seq is not None and expected.last_seq != last_seq:
            return Refused(errors.WRONG_LAST_SEQUENCE.code, f"wrong last sequence: {last_seq}")
        if expected.last_id is not None and expected.last_id != self.last_id:
            return Refused(errors.WRONG_LAST_MSG_ID.code, "wrong last msg ID")
        return None

    def _last_of(self, pattern: str) -> int:
        """Last sequence of the subject or filter, counting this batch's earlier messages."""
        subjects = self._machine.subjects
        if not is_wildcard(pattern):
            return self._stored.get(pattern) or subjects.last_seq(pattern)
        within = [seq for subject, seq in self._stored.items() if matches(pattern, subject)]
        if within:
            return max(within)
        return max(
            (
                int(subjects.last[sid - subjects.base])
                for sid, name in subjects.live()
                if matches(pattern, name)
            ),
            default=0,
        )

    def _check_full(self, subject: str, size: int, rollup: Rollup | None) -> Refused | None:
        config, counters = self._machine.own_config, self._machine.counters
        if config.discard != "new":
            return None
        # A message that replaces others makes the stream no fuller.
        replaces = rollup is not None or 0 < config.max_msgs_per_subject <= self._count_of(subject)
        if rollup is None and replaces and config.discard_new_per_subject:
            return Refused(errors.STORE_FAILED.code, "maximum messages per subject exceeded")
        if not replaces and 0 <= config.max_msgs <= counters.messages + self._stored_messages:
            return Refused(errors.STORE_FAILED.code, "maximum messages exceeded")
        if 0 <= config.max_bytes < counters.bytes + self._stored_bytes + size:
            return Refused(errors.STORE_FAILED.code, "maximum bytes exceeded")
        return None


def _are_ids(words: U64Array) -> NDArray[np.bool_]:
    """Which of the hashes stand for an id, that is, differ from NO_ID."""
    found: NDArray[np.bool_] = (words[:, 0] | words[:, 1]) != 0
    return found


def _repeats(ids: bytes) -> bool:
    """Whether some id seems to come twice: half of each is compared."""
    words = words_of(ids)
    halves = np.sort(words[:, 0][_are_ids(words)])
    return bool((halves[1:] == halves[:-1]).any())
