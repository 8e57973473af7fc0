"""Retention ``interest`` and ``workqueue``: remove messages that the consumers have settled.

A consumer needs a message if its filter matches and one of these holds: the message is pending; it
is not delivered yet and was not acknowledged early; or the consumer gave up on it because of
``max_deliver`` (``core.given_up``). This is JetStream's ``needAck``, with one rule for all ack
policies: all messages above the ack floor of a consumer with ack policy ``all`` are such messages.

The command that settles a message also checks whether the message can be removed. After a consumer
was removed, or its filter or the retention changed, ``KeepInterest`` commands check the messages
that may be left over, a slice in each command.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from contrail_common.subjects import is_wildcard, matches, matches_any
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core import commands as cmd
from contrail_storage.core.consumer_machine import ConsumerMachine
from contrail_storage.core.results import Removed, Writes
from contrail_storage.core.stream.last_search import ALONE_SEQS, search_last
from contrail_storage.core.stream.removing import SEARCH_SEQS

if TYPE_CHECKING:
    from contrail_storage.core.stream.stream_machine import StreamMachine

CHECKS_MAX: Final = 50_000
"""Messages times consumers that one command checks; the limit keeps ``apply`` short."""
_VERDICTS_MAX: Final = 4_096
"""Subjects for which a consumer's matches are cached."""
_WANTED_MAX: Final = 65_536
"""Subjects for which it is cached whether some consumer's filter matches."""


@dataclass(slots=True, frozen=True)
class _Demand:
    """The distinct filters of all consumers; ``everything``: one of them matches all subjects."""

    everything: bool
    literals: frozenset[str]
    wildcards: tuple[str, ...]

    def covers(self, subject: str) -> bool:
        """Whether some consumer's filter matches."""
        return (
            self.everything
            or subject in self.literals
            or any(matches(pattern, subject) for pattern in self.wildcards)
        )


@dataclass(slots=True, eq=False)
class _Messages:
    """Live messages, ascending: sequence, subject number and bytes of each."""

    seqs: I64Array
    sids: U32Array
    sizes: I64Array

    def select(self, chosen: NDArray[np.bool_]) -> "_Messages":
        """The messages where ``chosen`` is true."""
        return _Messages(self.seqs[chosen], self.sids[chosen], self.sizes[chosen])


class Interest:
    """The messages that the consumers of one stream machine still need."""

    def __init__(self, machine: "StreamMachine") -> None:
        self._machine = machine
        # The fields below are caches; `forget` clears what a change of a consumer makes wrong.
        self._demand: _Demand | None = None
        self._covered: dict[str, bool] = {}  # by subject: whether some filter matches
        self._verdicts: dict[int, dict[int, bool]] = {}  # by consumer and subject number
        self._rounds = 0  # `SubjectTable.rounds` of the numbers in `_verdicts`

    def forget(self, consumer_id: int) -> None:
        """Clear the caches after a consumer was created or removed, or its filters changed."""
        self._demand = None
        self._covered.clear()
        self._verdicts.pop(consumer_id, None)

    def forget_all(self) -> None:
        """Clear all caches after the stream was removed."""
        self._demand = None
        self._covered.clear()
        self._verdicts.clear()

    # Appending -----------------------------------------------------------------------------------

    def unwanted(self, subjects: list[str], subject_index: U32Array) -> NDArray[np.bool_] | None:
        """A mask of the messages that no consumer's filter matches; None if there are none.

        Such messages are not stored.
        """
        if self._machine.config.retention != "interest":
            return None
        demand = self._demand or self._gather()
        if demand.everything:
            return None
        if len(self._covered) >= _WANTED_MAX:
            self._covered.clear()
        for subject in subjects:
            if subject not in self._covered:
                self._covered[subject] = demand.covers(subject)
        unwanted = ~np.array([self._covered[subject] for subject in subjects], np.bool_)
        found: NDArray[np.bool_] = unwanted[subject_index]
        return found if found.any() else None

    def _gather(self) -> _Demand:
        filters: set[str] = set()
        everything = False
        for consumer in self._machine.consumers.values():
            own = consumer.config.filter_subjects
            filters.update(own)
            everything |= not own or ">" in own
        wildcards = tuple(sorted(filter(is_wildcard, filters)))
        literals = frozenset(filters.difference(wildcards))
        self._demand = _Demand(everything, literals, wildcards)
        return self._demand

    # Settling ------------------------------------------------------------------------------------

    def settled(
        self,
        consumer: ConsumerMachine,
        seqs: list[int],
        index: int,
        now_ns: int,
        writes: Writes,
    ) -> None:
        """Remove the messages ``seqs`` that ``consumer`` settled, unless others need them."""
        machine = self._machine
        live = sorted({seq for seq in seqs if machine.is_live(seq)})
        if not live:
            return
        others = [one for one in machine.consumers.values() if one is not consumer]
        if machine.config.retention == "interest":
            if len(live) * len(machine.consumers) > CHECKS_MAX:
                self.recheck(live[0], live[-1] + 1, writes)
                return
            found = self._unneeded(self._known(np.array(live, np.int64)), others)
        else:
            found = self._known(np.array(live, np.int64))
        self._take_out(found, index, now_ns, writes)

    def passed(self, from_seq: int, consumer: ConsumerMachine, writes: Writes) -> None:
        """Note messages to check after a consumer without acks moved on from ``from_seq``.

        It got messages while the retention was ``limits``, so no command named them.
        """
        self.recheck(from_seq, consumer.next_seq, writes)

    def _known(self, seqs: I64Array) -> _Messages:
        """The live messages ``seqs`` (ascending), with one facts lookup for each run of blocks."""
        if len(seqs) == 1:
            facts = self._machine.facts_at(int(seqs[0]))
            at = seqs - facts.base_seq
            return _Messages(seqs, facts.subject_ids[at], facts.sizes[at])
        sids, sizes = np.zeros(len(seqs), np.uint32), np.zeros(len(seqs), np.int64)
        start = 0
        while start < len(seqs):
            facts = self._machine.facts_at(int(seqs[start]))
            stop = int(np.searchsorted(seqs, facts.end_seq))
            at = seqs[start:stop] - facts.base_seq
            sids[start:stop], sizes[start:stop] = facts.subject_ids[at], facts.sizes[at]
            start = stop
        return _Messages(seqs, sids, sizes)

    def _unneeded(self, found: _Messages, consumers: Iterable[ConsumerMachine]) -> _Messages:
        """Those of ``found`` that none of ``consumers`` needs."""
        if not len(found.seqs):
            return found
        left = dict(zip(found.seqs.tolist(), found.sids.tolist(), strict=True))
        top_seq = int(found.seqs[-1])
        for consumer in consumers:
            for seq in consumer.awaited(left, top_seq):
                if self._matches(consumer, left[seq]):
                    del left[seq]
            if not left:
                break
        if len(left) == len(found.seqs):
            return found
        return found.select(np.isin(found.seqs, np.fromiter(left, np.int64, len(left))))

    def _matches(self, consumer: ConsumerMachine, sid: int) -> bool:
        """Whether the consumer's filter matches a live subject."""
        filters = consumer.config.filter_subjects
        if not filters:
            return True
        table = self._machine.subjects
        if self._rounds != table.rounds:  # numbers may be those of other subjects
            self._verdicts.clear()
            self._rounds = table.rounds
        verdicts = self._verdicts.setdefault(consumer.consumer_id, {})
        verdict = verdicts.get(sid)
        if verdict is None:
            if len(verdicts) >= _VERDICTS_MAX:
                verdicts.clear()
            name = table.name(sid)
            verdict = verdicts[sid] = matches_any(filters, name)
        return verdict

    def _take_out(self, gone: _Messages, index: int, now_ns: int, writes: Writes) -> None:
        machine = self._machine
        if not len(gone.seqs):
            return
        counted = self._counted(gone)
        machine.remover.take_out(
            gone.seqs, gone.sids, gone.sizes, index, now_ns, writes, counted=counted
        )
        machine.write_counters(writes)

    def _counted(self, gone: _Messages) -> bool:
        """Whether some consumer may have counted one of them as pending."""
        top_seq = int(gone.seqs[-1])
        return any(
            consumer.next_seq <= top_seq
            and any(
                self._matches(consumer, sid)
                for sid in set(gone.sids[gone.seqs >= consumer.next_seq].tolist())
            )
            for consumer in self._machine.consumers.values()
        )

    # Checking again ------------------------------------------------------------------------------

    def recheck(self, from_seq: int, end_seq: int, writes: Writes) -> None:
        """Note the messages from ``from_seq`` to before ``end_seq`` to be checked later.

        Only one range is noted: it grows to cover both, which may check more than necessary.
        """
        counters = self._machine.counters
        from_seq = max(from_seq, counters.first_seq)
        end_seq = min(end_seq, counters.last_seq + 1)
        if from_seq >= end_seq:
            return
        if counters.keep_from < counters.keep_to:
            from_seq, end_seq = min(from_seq, counters.keep_from), max(end_seq, counters.keep_to)
        counters.keep_from, counters.keep_to = from_seq, end_seq
        self._machine.write_counters(writes)

    def recheck_without(self, consumer: ConsumerMachine, writes: Writes) -> None:
        """Note messages to check after a consumer's filter changed, or it was removed."""
        machine = self._machine
        if machine.config.retention == "interest":
            # Messages that it gave up on are below its floor, and perhaps nobody needs them now.
            from_seq = 0 if consumer.config.max_deliver > 0 else consumer.floor.stream_seq + 1
            self.recheck(from_seq, machine.counters.last_seq + 1, writes)

    def recheck_given_up(self, consumer: ConsumerMachine, writes: Writes) -> None:
        """Note messages that a consumer gave up on, and is about to forget, to be checked."""
        if self._machine.config.retention == "interest" and consumer.given_up:
            given_up = list(consumer.given_up)
            self.recheck(given_up[0], given_up[-1] + 1, writes)

    @property
    def pending_recheck(self) -> bool:
        """Whether messages must be checked, or the last messages of subjects must be found."""
        counters = self._machine.counters
        return counters.keep_from < counters.keep_to or bool(self._machine.subjects.unsettled)

    def keep(self, command: cmd.KeepInterest, index: int, now_ns: int, writes: Writes) -> Removed:
        """Find last messages of subjects first, as a publish may wait; else check a slice."""
        machine, counters = self._machine, self._machine.counters
        removed = counters.messages
        if machine.subjects.unsettled:
            search_last(machine, list(machine.subjects.unsettled), ALONE_SEQS, index, writes)
        elif counters.keep_from < counters.keep_to:
            self._keep_slice(command.messages_max, index, now_ns, writes)
        return Removed(removed - counters.messages, self.pending_recheck)

    def _keep_slice(self, messages_max: int, index: int, now_ns: int, writes: Writes) -> None:
        machine, counters = self._machine, self._machine.counters
        seq = max(counters.keep_from, counters.first_seq)
        end_seq = min(counters.keep_to, counters.last_seq + 1)
        consumers = machine.consumers.values()
        if machine.config.retention != "interest":
            seq = end_seq
        elif not consumers and seq == counters.first_seq and end_seq > counters.last_seq:
            machine.remover.purge_all(writes)
            seq = end_seq
        else:
            room = max(min(messages_max, CHECKS_MAX // max(len(consumers), 1)), 1)
            found, seq = self._slice(seq, end_seq, room)
            self._take_out(self._unneeded(found, consumers), index, now_ns, writes)
        if seq >= end_seq:
            seq = end_seq = 0
        counters.keep_from, counters.keep_to = seq, end_seq
        machine.write_counters(writes)

    def _slice(self, seq: int, end_seq: int, room: int) -> tuple[_Messages, int]:
        """The first live messages from ``seq`` on, at most ``room``, and the next sequence."""
        machine = self._machine
        stop_seq = min(end_seq, seq + SEARCH_SEQS)
        parts: list[I64Array] = [np.zeros(0, np.int64)]
        while seq < stop_seq and room > 0:
            seq = machine.deleted.next_live(seq)
            count = min(stop_seq - seq, room)
            if count <= 0:
                break
            live = machine.deleted.live_mask(seq, count)
            seqs = np.arange(seq, seq + count)
            parts.append(seqs if live is None else seqs[live])
            room -= len(parts[-1])
            seq += count
        return self._known(np.concatenate(parts)), machine.deleted.next_live(seq)
