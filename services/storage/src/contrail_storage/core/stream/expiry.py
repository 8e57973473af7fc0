"""Expiry: removes the messages that are due, and stores the markers that they leave (ADR-43).

On a stream with ``subject_delete_marker_ttl``, a marker replaces the last message of a subject that
expires. The marker has a TTL itself, and leaves no marker.
"""

from dataclasses import dataclass

import numpy as np

from contrail_common import errors, model
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


def expire(state: ShardState, step: Step, command: cmd.Expire) -> Result:
    """Remove the messages of the command, and store the markers that they leave.

    Does nothing if one of them is not due: the configuration changed since the leader
    found them.
    """
    if not command.is_sound():
        return Refused(errors.INTERNAL.code, "the columns of what is due do not agree")
    rows = np.frombuffer(command.rows, np.int64)
    due = _Due(*deletion.live_messages(state, np.frombuffer(command.seqs, np.int64)))
    if state.config.sealed or not _are_due(state, step, due, rows):
        return Removed(0)
    state.deadlines.drop(rows, step.writes)
    if len(due.seqs):
        names = _marked_subjects(state, due, np.frombuffer(command.markers, np.int64))
        deletion.take_out(state, step, due.seqs, due.sids, due.sizes)
        _store_markers(state, step, names)
        state.write_counters(step.writes)
    return Removed(len(due.seqs))


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


def _marked_subjects(state: ShardState, due: _Due, markers: I64Array) -> list[str]:
    """The subjects that get a marker if no message of theirs is left.

    Not those whose last due message is a marker itself.
    """
    if state.config.subject_delete_marker_ttl_ns <= 0:
        return []
    sids, backwards = np.unique(due.sids[::-1], return_index=True)
    sids = sids[~np.isin(due.seqs[::-1][backwards], markers)]
    return [state.subjects.name(sid) for sid in sids.tolist()]


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
