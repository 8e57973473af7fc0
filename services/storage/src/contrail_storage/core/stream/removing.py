"""Removing messages: from the head of the stream by limits and age, anywhere by subject.

Removals read facts about messages from the blocks, which every replica cuts in its own way. So no
step here may end at the end of a block: a slice ends at a message, a search at a sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from contrail_common import errors
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import Gone
from contrail_storage.core.facts import Live, MessageFacts, oldest_in
from contrail_storage.core.results import Refused, Removed, Result, Writes
from contrail_storage.core.stream.last_search import APPLY_SEQS, search_last

if TYPE_CHECKING:
    from contrail_storage.core.stream.stream_machine import StreamMachine

Reach = Callable[[MessageFacts, Live | None], int]
"""How many sequences a removal takes from the head of the stream (beyond the facts: all)."""

SEARCH_SEQS: Final = 200_000
"""Sequences that one command searches for messages of some subjects."""
_SUBJECTS_MAX: Final = 4_096
"""Subjects whose messages one command removes."""
REMOVED_MAX: Final = 20_000
"""Messages that an append removes by subject; later entries remove the rest."""
_COUNT_MAX: Final = 0xFFFF_FFFF
"""The highest count that the subject table can store."""


@dataclass(slots=True)
class _Chosen:
    """Messages to remove, ascending; the search covered everything below ``searched_to``.

    ``first`` has a lower bound of the first remaining sequence of each requested subject.
    """

    seqs: I64Array
    sids: U32Array
    sizes: I64Array
    searched_to: int
    first: I64Array


class Remover:
    """Removes messages from one stream machine; changes its state directly."""

    def __init__(self, machine: "StreamMachine") -> None:
        self._machine = machine
        self._head: MessageFacts | None = None

    # Limits --------------------------------------------------------------------------------------

    def enforce(self, sids: U32Array, index: int, now_ns: int, writes: Writes) -> None:
        """Remove messages over the limits after messages of the subjects ``sids`` were stored."""
        most = self._most_of_a_subject()
        if most is not None:
            self._keep_subject_limit(np.unique(sids), most, REMOVED_MAX, index, now_ns, writes)
        if self._over_limits():
            self._evict(self._machine.counters.messages, index, writes)

    def enforce_limits(
        self, command: cmd.EnforceLimits, index: int, now_ns: int, writes: Writes
    ) -> Result:
        """Remove a slice of the messages over the limits of the stream and of its subjects."""
        machine = self._machine
        removed = self._evict(command.messages_max, index, writes)
        most = self._most_of_a_subject()
        if most is not None:
            table = machine.subjects
            over = table.numbered.numbers(np.flatnonzero(table.counts > most)[:_SUBJECTS_MAX])
            over.sort()
            removed += self._keep_subject_limit(
                over.astype(np.uint32),
                most,
                command.messages_max - removed,
                index,
                now_ns,
                writes,
            )
        self.recheck_subjects()
        if removed:
            machine.write_counters(writes)
        return Removed(removed, self.over_limits)

    def recheck_subjects(self) -> None:
        """Set ``StreamMachine.subjects_over`` by checking the counts of all subjects."""
        most = self._most_of_a_subject()
        counts = self._machine.subjects.counts
        self._machine.subjects_over = most is not None and bool((counts > most).any())

    def _most_of_a_subject(self) -> int | None:
        most = self._machine.config.max_msgs_per_subject
        return None if most < 0 else min(most, _COUNT_MAX)

    def _keep_subject_limit(
        self,
        sids: U32Array,
        most: int,
        messages_max: int,
        index: int,
        now_ns: int,
        writes: Writes,
    ) -> int:
        """Remove the oldest of each of ``sids`` (ascending) that has more than ``most``."""
        table = self._machine.subjects
        excess = table.counts[table.numbered.slots(sids)].astype(np.int64) - most
        over = excess > 0
        if not over.any():
            return 0
        removed = self.remove_oldest(sids[over], excess[over], index, now_ns, writes, messages_max)
        self._machine.subjects_over |= removed < int(excess[over].sum())
        return removed

    @property
    def over_limits(self) -> bool:
        """Whether the stream, which must exist, or a subject exceeds a limit."""
        return self._machine.subjects_over or self._over_limits()

    def _over_limits(self) -> bool:
        # With discard new the limits refuse new messages and never remove old ones.
        config, counters = self._machine.own_config, self._machine.counters
        return config.discard == "old" and (
            0 <= config.max_msgs < counters.messages or 0 <= config.max_bytes < counters.bytes
        )

    def _evict(self, messages_max: int, index: int, writes: Writes) -> int:
        """Remove the oldest messages over the stream's limits; return how many."""
        config, counters = self._machine.own_config, self._machine.counters
        removed = 0
        if config.discard == "old" and 0 <= config.max_msgs < counters.messages:
            over = min(counters.messages - config.max_msgs, messages_max)
            removed = self._remove_head(lambda facts, _: len(facts.sizes), over, index, writes)
        if config.discard == "old" and 0 <= config.max_bytes < counters.bytes:
            removed += self._remove_head(self._over_bytes, messages_max - removed, index, writes)
        return removed

    def _over_bytes(self, facts: MessageFacts, live: Live | None) -> int:
        over = self._machine.counters.bytes - self._machine.own_config.max_bytes
        if over <= 0:
            return 0
        sizes = facts.sizes if live is None else facts.sizes * live
        return int(np.searchsorted(np.cumsum(sizes), over)) + 1

    # The head of the stream ----------------------------------------------------------------------

    def _remove_head(self, reach: Reach, messages_max: int, index: int, writes: Writes) -> int:
        """Remove messages from the head as far as ``reach`` says, at most ``messages_max``."""
        machine = self._machine
        counters = machine.counters
        gone: list[U32Array] = []
        removed = 0
        while counters.messages and removed < messages_max:
            facts, live = self._head_facts()
            take = min(reach(facts, live), len(facts.sizes))
            if take <= 0:
                break
            sids = self._take_head(facts, live, take, messages_max - removed)
            removed += len(sids)
            gone.append(sids)
        if removed:
            machine.subjects.remove(np.concatenate(gone), counters.first_seq, index, writes)
            machine.deleted.trim(counters.first_seq, writes)
            machine.exempt.trim(counters.first_seq, writes)
            writes.trimmed[machine.shard] = counters.first_seq
        return removed

    def _head_facts(self) -> tuple[MessageFacts, Live | None]:
        """Facts from the first sequence to the end of its run, and which of them are live."""
        first_seq = self._machine.counters.first_seq
        facts = self._head
        if facts is None or not facts.base_seq <= first_seq < facts.end_seq:
            facts = self._head = self._machine.facts_at(first_seq)
        at = first_seq - facts.base_seq
        rest = MessageFacts(
            first_seq, facts.subject_ids[at:], facts.sizes[at:], facts.times_ns[at:]
        )
        return rest, self._machine.deleted.live_mask(first_seq, len(rest.sizes))

    def _take_head(
        self, facts: MessageFacts, live: Live | None, take: int, messages_max: int
    ) -> U32Array:
        """Remove ``take`` sequences, at most ``messages_max`` live; return their subjects."""
        counters = self._machine.counters
        if live is None:
            take = min(take, messages_max)
            sids, sizes = facts.subject_ids[:take], facts.sizes[:take]
        else:
            positions = np.flatnonzero(live[:take])[:messages_max]
            take = int(positions[-1]) + 1
            sids, sizes = facts.subject_ids[positions], facts.sizes[positions]
        counters.messages -= len(sids)
        counters.bytes -= int(sizes.sum())
        counters.first_seq = facts.base_seq + take
        self._skip_deleted_head()
        return sids

    def _skip_deleted_head(self) -> None:
        # Invariant: `first_seq` is a live message, or the sequence after the last.
        counters = self._machine.counters
        if counters.messages == 0:
            counters.first_seq = counters.last_seq + 1
        else:
            counters.first_seq = self._machine.deleted.next_live(counters.first_seq)

    def forget_head(self) -> None:
        """Clear the cached facts of the head after the stream was removed."""
        self._head = None

    def expire_age(self, command: cmd.ExpireAge, index: int, now_ns: int, writes: Writes) -> Result:
        """Remove a slice of the messages past ``max_age``, up to the first one that is exempt.

        If removals leave markers it does nothing: ``Expire`` removes the messages then.
        """
        machine = self._machine
        if machine.config.max_age_ns <= 0 or machine.config.subject_delete_marker_ttl_ns > 0:
            return Removed(0)
        limit_ns = max(now_ns - machine.config.max_age_ns, -1)

        def expired(facts: MessageFacts, _: Live | None) -> int:
            old = int(np.searchsorted(facts.times_ns, limit_ns, side="right"))
            ages = machine.exempt.live_mask(facts.base_seq, old) if old else None
            return old if ages is None or ages.all() else int(np.argmin(ages))

        removed = self._remove_head(expired, command.messages_max, index, writes)
        if removed:
            machine.write_counters(writes)
        return Removed(removed, self._reaches(expired))

    def trim(self, command: cmd.Trim, index: int, now_ns: int, writes: Writes) -> Result:
        """Purge a slice of the messages below a sequence, or all messages at once."""
        del now_ns
        machine = self._machine
        refused = self._purge_refused()
        if refused is not None:
            return refused
        to_seq = command.to_seq
        if command.keep:
            to_seq = min(to_seq, self._keep_from(command.keep))
        if to_seq > machine.counters.last_seq:
            return Removed(self.purge_all(writes))

        def below(facts: MessageFacts, _: Live | None) -> int:
            return to_seq - facts.base_seq

        removed = self._remove_head(below, command.messages_max, index, writes)
        if removed:
            machine.write_counters(writes)
        return Removed(removed, self._reaches(below))

    def _keep_from(self, keep: int) -> int:
        """The smallest sequence from which at most ``keep`` messages are live."""
        counters, deleted = self._machine.counters, self._machine.deleted
        low, high = counters.first_seq, counters.last_seq + 1
        while low < high:
            middle = (low + high) // 2
            live = counters.last_seq - middle + 1 - deleted.count(middle, counters.last_seq)
            if live > keep:
                low = middle + 1
            else:
                high = middle
        return low

    def _purge_refused(self) -> Refused | None:
        config = self._machine.config
        if config.sealed:
            return Refused(errors.STREAM_SEALED.code)
        if config.deny_purge:
            return Refused(errors.PURGE_DENIED.code)
        return None

    def _reaches(self, reach: Reach) -> bool:
        """Whether the oldest message is still within ``reach``."""
        return self._machine.counters.messages > 0 and reach(*self._head_facts()) > 0

    def purge_all(self, writes: Writes) -> int:
        """Remove all messages in one step, however many; return their number."""
        machine = self._machine
        counters = machine.counters
        removed = counters.messages
        counters.first_seq = counters.last_seq + 1
        counters.messages = counters.bytes = 0
        counters.replaced = {}
        machine.deletions += 1
        machine.subjects.clear(writes)
        machine.deleted.clear(writes)
        machine.expirer.clear(writes)
        writes.trimmed[machine.shard] = counters.first_seq
        machine.write_counters(writes)
        return removed

    def replace_older(
        self,
        sids: U32Array,
        quota: I64Array,
        below: I64Array,
        index: int,
        now_ns: int,
        writes: Writes,
    ) -> None:
        """Remove the ``quota`` older messages of ``sids`` (ascending), those ``below`` a sequence.

        Messages that one append cannot remove are noted; ``FinishRollup`` entries remove them.
        """
        machine = self._machine
        older = quota > 0
        if not older.any():
            return
        sids, quota, below = sids[older], quota[older], below[older]
        removed = self.remove_oldest(sids, quota, index, now_ns, writes, REMOVED_MAX)
        if removed < int(quota.sum()):
            names = [machine.subjects.name(sid) for sid in sids.tolist()]
            machine.counters.replaced |= dict(zip(names, below.tolist(), strict=True))

    def finish_rollup(
        self, command: cmd.FinishRollup, index: int, now_ns: int, writes: Writes
    ) -> Result:
        """Remove a slice of the messages that a roll-up replaced."""
        machine = self._machine
        to_seq = machine.counters.replaced.get(command.subject)
        if to_seq is None:
            return Removed(0)
        removed = self._purge(
            [command.subject], to_seq, command.messages_max, index, now_ns, writes
        )
        if not removed.more:
            machine.counters.replaced.pop(command.subject, None)
            machine.write_counters(writes)
        return removed

    # Anywhere ------------------------------------------------------------------------------------

    def purge_subjects(
        self, command: cmd.PurgeSubjects, index: int, now_ns: int, writes: Writes
    ) -> Result:
        """Purge a slice of the messages of some subjects below a sequence."""
        refused = None if command.shredded else self._purge_refused()
        if refused is not None:
            return refused
        return self._purge(
            command.subjects,
            command.to_seq,
            command.messages_max,
            index,
            now_ns,
            writes,
            command.keep,
        )

    def _purge(
        self,
        subjects: list[str],
        to_seq: int,
        messages_max: int,
        index: int,
        now_ns: int,
        writes: Writes,
        keep: int = 0,
    ) -> Removed:
        machine = self._machine
        table = machine.subjects
        known = {sid for name in subjects if (sid := table.ids.get(name)) is not None}
        sids = np.array(sorted(known), np.uint32)
        at = table.numbered.slots(sids)
        sids = sids[table.first[at] < to_seq]
        if not len(sids):
            return Removed(0)
        quota = table.counts[table.numbered.slots(sids)].astype(np.int64)
        excess = int(quota.sum()) - keep
        if excess <= 0:
            return Removed(0)
        chosen = self._oldest(sids, quota, to_seq, min(messages_max, REMOVED_MAX, excess))
        self._take(chosen, sids, index, now_ns, writes)
        machine.write_counters(writes)
        end_seq = min(to_seq, machine.counters.last_seq + 1)
        left = not keep or len(chosen.seqs) < excess
        return Removed(len(chosen.seqs), left and chosen.searched_to < end_seq)

    def remove_oldest(
        self,
        sids: U32Array,
        quota: I64Array,
        index: int,
        now_ns: int,
        writes: Writes,
        messages_max: int,
    ) -> int:
        """Remove the ``quota`` oldest messages of each of ``sids`` (ascending); return how many.

        It removes fewer if there are more than ``messages_max``, or if they are too far apart. The
        next call then continues where this one ended.
        """
        chosen = self._oldest(sids, quota, self._machine.counters.last_seq + 1, messages_max)
        self._take(chosen, sids, index, now_ns, writes)
        return len(chosen.seqs)

    def sizes_of_oldest(self, quota: dict[int, int]) -> dict[int, list[int]]:
        """Sizes of the ``quota`` oldest messages of some subjects, by subject number.

        Fewer if they are too far apart for one command, as in :meth:`remove_oldest`.
        """
        sids = np.array(sorted(quota), np.uint32)
        counts = np.array([quota[sid] for sid in sids.tolist()], np.int64)
        end_seq = self._machine.counters.last_seq + 1
        chosen = self._oldest(sids, counts, end_seq, REMOVED_MAX)
        found: dict[int, list[int]] = {sid: [] for sid in quota}
        for sid, size in zip(chosen.sids.tolist(), chosen.sizes.tolist(), strict=True):
            found[sid].append(size)
        return found

    def _oldest(self, sids: U32Array, quota: I64Array, to_seq: int, messages_max: int) -> _Chosen:
        machine = self._machine
        table = machine.subjects
        first = table.first[table.numbered.slots(sids)].copy()
        seq = max(int(first.min()), machine.counters.first_seq)
        to_seq = min(to_seq, machine.counters.last_seq + 1)
        stop_seq = min(to_seq, seq + SEARCH_SEQS)
        left = quota.copy()
        parts: list[tuple[I64Array, U32Array, I64Array]] = []
        room = messages_max
        while room > 0 and left.any():
            # Only live messages are sure to be in a block, so facts are requested only for them.
            seq = min(machine.deleted.next_live(seq, stop_seq), stop_seq)
            if seq == stop_seq:
                break
            facts = machine.facts_at(seq)
            low, high = seq - facts.base_seq, min(facts.end_seq, stop_seq) - facts.base_seq
            live = machine.deleted.live_mask(seq, high - low)
            positions = oldest_in(facts.subject_ids[low:high], live, sids, left, room) + low
            if len(positions):
                parts.append(
                    (
                        positions + facts.base_seq,
                        facts.subject_ids[positions],
                        facts.sizes[positions],
                    )
                )
                room -= len(positions)
            seq = facts.base_seq + high if room > 0 else facts.base_seq + int(positions[-1]) + 1
        # A subject whose quota is met may have more messages before the end of the search.
        unsatisfied = left > 0
        first[unsatisfied] = np.maximum(first[unsatisfied], seq)
        if not unsatisfied.any():
            seq = to_seq
        if not parts:
            nothing = np.zeros(0, np.int64)
            return _Chosen(nothing, np.zeros(0, np.uint32), nothing, seq, first)
        seqs, gone, sizes = (np.concatenate(each) for each in zip(*parts, strict=True))
        np.maximum.at(first, np.searchsorted(sids, gone), seqs + 1)
        return _Chosen(seqs, gone, sizes, seq, first)

    def _take(
        self, chosen: _Chosen, sids: U32Array, index: int, now_ns: int, writes: Writes
    ) -> None:
        """Remove ``chosen``, the oldest messages of ``sids``."""
        machine = self._machine
        machine.subjects.remove_oldest(sids, chosen.first, chosen.sids, index, writes)
        if not len(chosen.seqs):
            return
        counters = machine.counters
        counters.messages -= len(chosen.seqs)
        counters.bytes -= int(chosen.sizes.sum())
        machine.deleted.add_many(chosen.seqs, writes)
        self.gone(chosen.seqs, now_ns, writes)
        self._forget_replaced()

    def delete(self, command: cmd.DeleteMessage, index: int, now_ns: int, writes: Writes) -> Result:
        """Remove one message."""
        machine = self._machine
        if machine.config.sealed:
            return Refused(errors.STREAM_SEALED.code)
        if machine.config.deny_delete:
            return Refused(errors.DELETE_DENIED.code)
        seq = command.seq
        if not machine.is_live(seq):
            return Refused(errors.SEQUENCE_NOT_FOUND.code, f"sequence {seq} not found")
        if not 0 <= command.previous_seq < seq:
            return Refused(errors.INTERNAL.code, "the previous message is not before the message")
        facts = machine.facts_at(seq)
        at = seq - facts.base_seq
        machine.counters.messages -= 1
        machine.counters.bytes -= int(facts.sizes[at])
        machine.deleted.add_many(np.array([seq]), writes)
        sid = int(facts.subject_ids[at])
        machine.subjects.remove_one(sid, seq, command.previous_seq, index, writes)
        if machine.config.retention != "limits":
            # An ack may have removed the previous message since the leader found it.
            self._check_last(sid, index, writes)
        self.gone(np.array([seq]), now_ns, writes)
        self._forget_replaced()
        machine.write_counters(writes)
        return Removed(1)

    def _forget_replaced(self) -> None:
        """Drop unfinished roll-ups of subjects that have no messages any more."""
        counters, known = self._machine.counters, self._machine.subjects.ids
        if counters.replaced:
            counters.replaced = {
                name: seq for name, seq in counters.replaced.items() if name in known
            }

    def _check_last(self, sid: int, index: int, writes: Writes) -> None:
        table = self._machine.subjects
        at = table.numbered.slot(sid)
        if at >= 0 and table.counts[at] and not self._machine.is_live(int(table.last[at])):
            table.unsettled.add(sid)
            search_last(self._machine, [sid], APPLY_SEQS, index, writes)

    def take_out(
        self,
        seqs: I64Array,
        sids: U32Array,
        sizes: I64Array,
        index: int,
        now_ns: int,
        writes: Writes,
        *,
        counted: bool,
    ) -> None:
        """Remove live messages anywhere (ascending), given with subject number and bytes of each.

        ``counted``: they may be included in the ``num_pending`` of a consumer.
        """
        machine = self._machine
        machine.counters.messages -= len(seqs)
        machine.counters.bytes -= int(sizes.sum())
        machine.deleted.add_many(seqs, writes)
        deletions = machine.deletions
        self.gone(seqs, now_ns, writes)
        if not counted:
            machine.deletions = deletions
        table, floor_seq = machine.subjects, machine.counters.first_seq
        if len(seqs) == 1:
            lost = table.take_out_one(int(sids[0]), int(seqs[0]), floor_seq, index, writes)
        else:
            lost = table.take_out(sids, seqs, floor_seq, index, writes)
        search_last(machine, lost, APPLY_SEQS, index, writes)
        self._forget_replaced()

    def gone(self, seqs: I64Array, now_ns: int, writes: Writes) -> None:
        """After messages were removed anywhere: update the consumers, and move the head."""
        machine = self._machine
        counters = machine.counters
        machine.deletions += 1
        machine.exempt.discard_many(seqs, writes)
        consumers = [one for one in machine.consumers.values() if one.pending or one.given_up]
        gone = set(seqs.tolist()) if consumers else set()
        for consumer in consumers:
            given_up = {seq for seq in gone if seq in consumer.given_up}
            forgotten = sorted(given_up.union(consumer.pending.keys() & gone))
            if forgotten:
                consumer.change(Gone(forgotten), now_ns, writes)
        if int(seqs[0]) == counters.first_seq or not counters.messages:
            self.move_head(writes)

    def leave_out(self, seqs: I64Array, writes: Writes) -> None:
        """Mark sequences as deleted that were just assigned to messages that are not stored."""
        machine = self._machine
        if machine.counters.messages:
            machine.deleted.add_many(seqs, writes)
        if not machine.counters.messages or int(seqs[0]) == machine.counters.first_seq:
            self.move_head(writes)

    def move_head(self, writes: Writes) -> None:
        """Move the first sequence to the next live message, after the first one was removed."""
        machine = self._machine
        self._skip_deleted_head()
        machine.deleted.trim(machine.counters.first_seq, writes)
        machine.exempt.trim(machine.counters.first_seq, writes)
        writes.trimmed[machine.shard] = machine.counters.first_seq
