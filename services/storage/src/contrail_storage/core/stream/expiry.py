"""Expiry: removes the messages that are due, and stores the markers that they leave (ADR-43).

On a stream with ``subject_delete_marker_ttl``, a marker replaces the last message of a subject that
expires. The marker has a TTL itself, and leaves no marker.
"""

from dataclasses import dataclass

import numpy as np

from contrail_common import errors, model
from contrail_common.arrays import distinct
from contrail_common.columns.blocks import columns_of
from contrail_common.columns.header_columns import header_size
from contrail_common.model import Headers
from contrail_common.texts import I64Array, U32Array
from contrail_common.timeunits import format_go_duration
from contrail_storage.core import commands as cmd
from contrail_storage.core.results import Refused, Removed, Result, Step
from contrail_storage.core.stream import append
from contrail_storage.core.stream.removal import deletion
from contrail_storage.core.stream.shard_state import ShardState


@dataclass(slots=True)
class _Due:
    """Live messages, ascending: sequences, subject numbers, sizes and times."""

    seqs: I64Array
    sids: U32Array
    sizes: I64Array
    times_ns: I64Array

    def without(self, seqs: list[int]) -> "_Due":
        """The messages except ``seqs``."""
        if not seqs:
            return self
        stay = ~np.isin(self.seqs, seqs)
        return _Due(self.seqs[stay], self.sids[stay], self.sizes[stay], self.times_ns[stay])


def expire(state: ShardState, step: Step, command: cmd.Expire) -> Result:
    """Remove the messages of the command, and store the markers that they leave.

    Does nothing if one of them is not due: the configuration changed since the leader
    found them.
    ``more``: the newest message of some subject had to stay; the leader must search again.
    """
    if not command.is_sound():
        return Refused(errors.INTERNAL.code, "the columns of what is due do not agree")
    rows = np.frombuffer(command.rows, np.int64)
    due = _Due(*deletion.live_messages(state, np.frombuffer(command.seqs, np.int64)))
    if state.config.sealed or not _are_due(state, step, due, rows):
        return Removed(0)
    last, stay = _newest(state, due, command.previous)
    due = due.without(stay)
    state.deadlines.drop(rows, step.writes)
    if stay and len(rows):
        # The row of a message that stays is gone with the others: it is due again at once.
        state.deadlines.add(step.now_ns, np.array(stay, np.int64), step.writes)
    if len(due.seqs):
        names = _marked_subjects(state, due, np.frombuffer(command.marking, np.int64))
        _remove(state, step, due, last)
        _store_markers(state, step, names)
        state.write_counters(step.writes)
    return Removed(len(due.seqs), more=bool(stay))


def _are_due(state: ShardState, step: Step, due: _Due, rows: I64Array) -> bool:
    if len(rows):
        return int(rows[::2].max()) <= step.now_ns
    max_age_ns = state.config.max_age_ns
    if max_age_ns <= 0 or not len(due.seqs):
        return False
    old = due.times_ns <= step.now_ns - max_age_ns
    # All or nothing: one message that is not due shows that the configuration changed, so all that
    # the leader found is out of date.
    return bool((old & state.exempt.are_live(due.seqs)).all())


def _newest(
    state: ShardState, due: _Due, previous: dict[int, int]
) -> tuple[dict[int, int], list[int]]:
    """New last sequences of subjects that lose theirs, and messages that must stay.

    A newest message must stay if its previous message was removed meanwhile: the new last
    message of its subject is not known here.
    """
    table = state.subjects
    sids, counts = np.unique(due.sids, return_counts=True)
    at = table.numbered.slots(sids)
    newest = table.last[at]
    outlived = (table.counts[at] > counts) & np.isin(newest, due.seqs)
    older = np.array([previous.get(sid, 0) for sid in sids[outlived].tolist()], object)
    gone = set(due.seqs.tolist()) if len(older) else set()
    last: dict[int, int] = {}
    stay: list[int] = []
    for sid, own, seq in zip(
        sids[outlived].tolist(), newest[outlived].tolist(), older, strict=True
    ):
        # If the leader's finding no longer holds, `apply` must not search: it could read the
        # whole stream. So the message stays, and the leader searches again.
        if 0 < seq < own and seq not in gone and state.is_live(seq):
            last[sid] = seq
        else:
            stay.append(own)
    return last, sorted(stay)


def _marked_subjects(state: ShardState, due: _Due, marking: I64Array) -> list[str]:
    """The subjects of the ``due`` messages that leave a marker if they are the last."""
    sids = due.sids[np.isin(due.seqs, marking)]
    return [state.subjects.name(sid) for sid in distinct(sids).tolist()]


def _remove(state: ShardState, step: Step, due: _Due, last: dict[int, int]) -> None:
    counters = state.counters
    counters.messages -= len(due.seqs)
    counters.bytes -= int(due.sizes.sum())
    state.deleted.add_many(due.seqs, step.writes)
    state.subjects.remove(due.sids, counters.first_seq, step, last)
    deletion.finish_removal(state, step, due.seqs, due.sids)


def _store_markers(state: ShardState, step: Step, names: list[str]) -> None:
    """Store markers for the subjects ``names`` that have no messages left."""
    config = state.shard_config
    ttl_ns = config.subject_delete_marker_ttl_ns
    # A message that arrived after the leader looked makes the marker unnecessary.
    names = [name for name in names if name not in state.subjects.ids]
    # A marker that does not fit is left out. The messages expire anyway.
    if ttl_ns <= 0 or not state.subjects.has_capacity(len(names)):
        return
    headers: Headers = {
        model.MARKER_REASON: [model.MARKER_MAX_AGE],
        model.TTL: [format_go_duration(ttl_ns)],
    }
    if config.discard == "new" and config.max_bytes >= 0:
        bytes_left = max(config.max_bytes - state.counters.bytes, 0)
        # With `discard: new`, a marker must not exceed the limit that refuses messages of clients.
        names = names[: bytes_left // header_size(headers)]
    if names:
        count = len(names)
        command = cmd.Append(
            names,
            np.arange(count, dtype=np.uint32).tobytes(),
            columns_of([b""] * count, [headers] * count),
            ttls=dict.fromkeys(range(count), ttl_ns),
        )
        append.append_own(state, step, command)
