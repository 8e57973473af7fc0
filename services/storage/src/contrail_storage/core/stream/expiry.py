"""Expiry of messages: noting times to live, and removing the messages that are due.

The rules are JetStream's (ADR-43). A message with a TTL expires after it or after ``max_age``,
whichever is first. A message with TTL ``never`` stays whatever its age. On a stream with
``subject_delete_marker_ttl``, a marker replaces the last message of a subject that expires; the
marker has a TTL itself, and leaves no marker.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from contrail_common import errors, model
from contrail_common.columns.blocks import MessageColumns, columns_of
from contrail_common.columns.header_columns import headers_in_columns
from contrail_common.model import TTL_NEVER, Headers, StreamConfig, header_size
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import INT64_MAX, format_go_duration
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Refused, Removed, Result, Writes
from contrail_storage.core.stream.append import Appender

if TYPE_CHECKING:
    from contrail_storage.core.stream.stream_machine import StreamMachine


@dataclass(slots=True)
class _Due:
    """Live messages, ascending: sequences, subject numbers, sizes and times."""

    seqs: I64Array
    sids: U32Array
    sizes: I64Array
    times_ns: I64Array

    def without(self, seqs: list[int]) -> "_Due":
        """The messages but for ``seqs``."""
        if not seqs:
            return self
        stay = ~np.isin(self.seqs, seqs)
        return _Due(self.seqs[stay], self.sids[stay], self.sizes[stay], self.times_ns[stay])


def raised_ttls(
    config: StreamConfig, columns: MessageColumns, ttls: dict[int, int] | None
) -> tuple[MessageColumns, dict[int, int] | None]:
    """Raise TTLs below the stream's marker TTL to that, in ``ttls`` and in the headers.

    Otherwise a marker could outlive later messages. This is not needed with at most one message
    per subject. Sealed content keeps its header: the TTL was raised before sealing, unless the
    configuration changed since.
    """
    floor_ns = config.subject_delete_marker_ttl_ns
    if not ttls or floor_ns <= 0 or config.max_msgs_per_subject == 1:
        return columns, ttls
    low = [at for at, ttl_ns in ttls.items() if 0 < ttl_ns < floor_ns]
    if not low:
        return columns, ttls
    if columns.seals is None:
        headers: list[Headers | None] = [None] * columns.count
        if columns.headers is not None:
            headers = columns.headers.each()
        for at in low:
            headers[at] = _with_ttl(headers[at], format_go_duration(floor_ns))
        columns = MessageColumns(
            columns.count, columns.offsets, columns.payload, headers_in_columns(headers)
        )
    return columns, ttls | dict.fromkeys(low, floor_ns)


class Expirer:
    """Notes deadlines of one stream machine's messages and removes what is due."""

    def __init__(self, machine: "StreamMachine", appender: Appender) -> None:
        self._machine = machine
        self._appender = appender

    # What an append asks for ---------------------------------------------------------------------

    def raised(self, command: cmd.Append) -> cmd.Append:
        """``command`` as :func:`raised_ttls` has it."""
        columns, ttls = raised_ttls(self._machine.config, command.columns, command.ttls)
        if ttls is command.ttls:
            return command
        return msgspec.structs.replace(command, columns=columns, ttls=ttls)

    def note(self, ttls: dict[int, int], first_seq: int, now_ns: int, writes: Writes) -> None:
        """Messages were stored from ``first_seq`` on; ``ttls`` by their position among them."""
        groups: dict[int, list[int]] = {}
        for at in sorted(ttls):
            groups.setdefault(ttls[at], []).append(at)
        for ttl_ns, positions in groups.items():
            seqs = np.array(positions, np.int64) + first_seq
            if ttl_ns == TTL_NEVER:
                self._machine.exempt.add_many(seqs, writes)
            else:
                self._machine.deadlines.add(min(now_ns + ttl_ns, INT64_MAX), seqs, writes)

    def clear(self, writes: Writes) -> None:
        """Every message is gone."""
        self._machine.deadlines.clear(writes)
        if self._machine.exempt.total:
            self._machine.exempt.clear(writes)

    # Removing ------------------------------------------------------------------------------------

    def expire(self, command: cmd.Expire, index: int, now_ns: int, writes: Writes) -> Result:
        """Remove the messages of the command, and store the markers that they leave.

        Does nothing if one of them is not due: the configuration changed since the leader looked.
        ``more``: the newest message of some subject had to stay; the leader must look again.
        """
        machine = self._machine
        if not command.is_sound():
            return Refused(errors.INTERNAL.code, "the columns of what is due do not agree")
        rows = np.frombuffer(command.rows, np.int64)
        due = self._live(np.frombuffer(command.seqs, np.int64))
        if machine.config.sealed or not self._are_due(due, rows, now_ns):
            return Removed(0)
        last, stay = self._newest(due, command.previous)
        due = due.without(stay)
        machine.deadlines.drop(rows, writes)
        if stay and len(rows):
            machine.deadlines.add(now_ns, np.array(stay, np.int64), writes)
        if len(due.seqs):
            names = self._names(due, np.frombuffer(command.marking, np.int64))
            self._take(due, last, index, now_ns, writes)
            self._mark(names, index, now_ns, writes)
            machine.write_counters(writes)
        return Removed(len(due.seqs), more=bool(stay))

    def _live(self, seqs: I64Array) -> _Due:
        machine = self._machine
        counters = machine.counters
        seqs = seqs[(seqs >= counters.first_seq) & (seqs <= counters.last_seq)]
        seqs = seqs[machine.deleted.are_live(seqs)]
        parts: list[tuple[I64Array, U32Array, I64Array, I64Array]] = []
        at = 0
        while at < len(seqs):
            facts = machine.facts_at(int(seqs[at]))
            stop = int(np.searchsorted(seqs, facts.end_seq))
            within = seqs[at:stop]
            place = within - facts.base_seq
            parts.append(
                (within, facts.subject_ids[place], facts.sizes[place], facts.times_ns[place])
            )
            at = stop
        if not parts:
            nothing = np.zeros(0, np.int64)
            return _Due(nothing, np.zeros(0, np.uint32), nothing, nothing)
        return _Due(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _are_due(self, due: _Due, rows: I64Array, now_ns: int) -> bool:
        if len(rows):
            return int(rows[::2].max()) <= now_ns
        max_age_ns = self._machine.config.max_age_ns
        if max_age_ns <= 0 or not len(due.seqs):
            return False
        old = due.times_ns <= now_ns - max_age_ns
        return bool((old & self._machine.exempt.are_live(due.seqs)).all())

    def _newest(self, due: _Due, previous: dict[int, int]) -> tuple[dict[int, int], list[int]]:
        """New last sequences of subjects that lose theirs, and messages that must stay.

        A newest message must stay if its previous message was removed meanwhile: the new last
        message of its subject is not known here.
        """
        machine = self._machine
        table = machine.subjects
        sids, counts = np.unique(due.sids, return_counts=True)
        at = table.numbered.slots(sids)
        newest = table.last[at]
        asks = (table.counts[at] > counts) & np.isin(newest, due.seqs)
        older = np.array([previous.get(sid, 0) for sid in sids[asks].tolist()], object)
        goes = set(due.seqs.tolist()) if len(older) else set()
        last: dict[int, int] = {}
        stay: list[int] = []
        for sid, own, seq in zip(sids[asks].tolist(), newest[asks].tolist(), older, strict=True):
            if 0 < seq < own and seq not in goes and machine.is_live(seq):
                last[sid] = seq
            else:
                stay.append(own)
        return last, sorted(stay)

    def _names(self, due: _Due, marking: I64Array) -> list[str]:
        """The subjects of those of ``due`` that leave a marker if they are the last."""
        sids = due.sids[np.isin(due.seqs, marking)]
        return [self._machine.subjects.name(sid) for sid in np.unique(sids).tolist()]

    def _take(
        self, due: _Due, last: dict[int, int], index: int, now_ns: int, writes: Writes
    ) -> None:
        machine = self._machine
        counters = machine.counters
        counters.messages -= len(due.seqs)
        counters.bytes -= int(due.sizes.sum())
        machine.deleted.add_many(due.seqs, writes)
        machine.subjects.remove(due.sids, counters.first_seq, index, writes, last)
        machine.remover.gone(due.seqs, now_ns, writes)

    def _mark(self, names: list[str], index: int, now_ns: int, writes: Writes) -> None:
        """Store markers for those of the subjects ``names`` that have no message any more."""
        machine = self._machine
        config, counters = machine.own_config, machine.counters
        ttl_ns = config.subject_delete_marker_ttl_ns
        names = [name for name in names if name not in machine.subjects.ids]
        if ttl_ns <= 0 or not machine.subjects.has_capacity(len(names)):
            return
        headers: Headers = {
            model.MARKER_REASON: [model.MARKER_MAX_AGE],
            model.TTL: [format_go_duration(ttl_ns)],
        }
        if config.discard == "new" and config.max_bytes >= 0:
            room = max(config.max_bytes - counters.bytes, 0)
            names = names[: room // header_size(headers)]
        if names:
            count = len(names)
            command = cmd.Append(
                names,
                np.arange(count, dtype=np.uint32).tobytes(),
                columns_of([b""] * count, [headers] * count),
                ttls=dict.fromkeys(range(count), ttl_ns),
            )
            self._appender.append_own(index, now_ns, command, writes)


def _with_ttl(headers: Headers | None, text: str) -> Headers:
    """``headers`` with another value of their TTL, under the name that it has."""
    headers = dict(headers or {})
    name = next((name for name in headers if name.lower() == model.TTL.lower()), model.TTL)
    headers[name] = [text]
    return headers
