"""Interest and workqueue: messages that go once the consumers have settled them.

A consumer still needs a message that its filter matches and that is pending with it, or is yet to
be delivered and was not acknowledged ahead of that, or that ``max_deliver`` made it give up on
(``core.given_up``). This is JetStream's ``needAck``, with one rule for all ack policies: above the
floor of a consumer that acknowledges all lie only such messages.

What is delivered and settled is looked at in the command that settles it. What a removed consumer,
another filter or another retention leaves over is looked at by commands of its own, a slice each.
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
"""Messages times consumers that one command looks at."""
_VERDICTS_MAX: Final = 4_096
"""Subjects that a consumer's verdicts are kept of."""
_WANTED_MAX: Final = 65_536
"""Subjects that are known to be wanted by some consumer, or by none."""


@dataclass(slots=True, frozen=True)
class _Demand:
    """The filters of all consumers, each once."""

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
        """Some of them."""
        return _Messages(self.seqs[chosen], self.sids[chosen], self.sizes[chosen])


class Interest:
    """What the consumers of one stream machine still need of its messages."""

    def __init__(self, machine: "StreamMachine") -> None:
        self._machine = machine
        self._demand: _Demand | None = None
        self._covered: dict[str, bool] = {}
        self._verdicts: dict[int, dict[int, bool]] = {}
        self._rounds = 0

    def forget(self, consumer_id: int) -> None:
        """A consumer was made, went, or has other filters."""
        self._demand = None
        self._covered.clear()
        self._verdicts.pop(consumer_id, None)

    def forget_all(self) -> None:
        """The stream is gone, and its consumers with it."""
        self._demand = None
        self._covered.clear()
        self._verdicts.clear()

    # Appending -----------------------------------------------------------------------------------

    def unwanted(self, subjects: list[str], subject_index: U32Array) -> NDArray[np.bool_] | None:
        """Which messages no consumer's filter matches, so that they are not stored; None: none."""
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
        """Remove what ``consumer`` has settled, unless others still need it."""
        machine = self._machine
        live = sorted({seq for seq in seqs if machine.is_live(seq)})
        if not live:
            return
        others = [one for one in machine.consumers.values() if one is not consumer]
        if machine.config.retention == "interest":
            if len(live) * len(machine.consumers) > CHECKS_MAX:
                self.look_again(live[0], live[-1] + 1, writes)
                return
            found = self._unneeded(self._known(np.array(live, np.int64)), others)
        else:
            found = self._known(np.array(live, np.int64))
        self._take_out(found, index, now_ns, writes)

    def passed(self, from_seq: int, consumer: ConsumerMachine, writes: Writes) -> None:
        """A consumer without acks has come from ``from_seq`` to its position without telling how.

        It was given messages while the stream had limits alone.
        """
        self.look_again(from_seq, consumer.next_seq, writes)

    def _known(self, seqs: I64Array) -> _Messages:
        """The live messages ``seqs`` (ascending), one lookup for each run of the blocks."""
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

    # Looking again -------------------------------------------------------------------------------

    def look_again(self, from_seq: int, end_seq: int, writes: Writes) -> None:
        """Have messages from ``from_seq`` up to ``end_seq`` looked at, whether they are needed."""
        counters = self._machine.counters
        from_seq = max(from_seq, counters.first_seq)
        end_seq = min(end_seq, counters.last_seq + 1)
        if from_seq >= end_seq:
            return
        if counters.keep_from < counters.keep_to:
            from_seq, end_seq = min(from_seq, counters.keep_from), max(end_seq, counters.keep_to)
        counters.keep_from, counters.keep_to = from_seq, end_seq
        self._machine.write_counters(writes)

    def look_again_without(self, consumer: ConsumerMachine, writes: Writes) -> None:
        """The needs of a consumer shrank: its filter changed, or it is gone."""
        machine = self._machine
        if machine.config.retention == "interest":
            # What it has given up lies below its floor, too, and may be nobody's by now.
            from_seq = 0 if consumer.config.max_deliver > 0 else consumer.floor.stream_seq + 1
            self.look_again(from_seq, machine.counters.last_seq + 1, writes)

    def look_at_given_up(self, consumer: ConsumerMachine, writes: Writes) -> None:
        """A consumer is about to let go of what it gave up on."""
        if self._machine.config.retention == "interest" and consumer.given_up:
            given_up = list(consumer.given_up)
            self.look_again(given_up[0], given_up[-1] + 1, writes)

    @property
    def unlooked(self) -> bool:
        """Whether some messages are to be looked at, or some subjects' last messages looked for."""
        counters = self._machine.counters
        return counters.keep_from < counters.keep_to or bool(self._machine.subjects.unsettled)

    def keep(self, command: cmd.KeepInterest, index: int, now_ns: int, writes: Writes) -> Removed:
        """Look for last messages, for which somebody may wait, or remove what nobody needs."""
        machine, counters = self._machine, self._machine.counters
        removed = counters.messages
        if machine.subjects.unsettled:
            search_last(machine, list(machine.subjects.unsettled), ALONE_SEQS, index, writes)
        elif counters.keep_from < counters.keep_to:
            self._keep_slice(command.messages_max, index, now_ns, writes)
        return Removed(removed - counters.messages, self.unlooked)

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
        """The first live messages from ``seq`` on, ``room`` at most, and where to go on."""
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
