"""Times to live of messages that are appended (JetStream's ADR-43).

A message with a TTL expires after it or after ``max_age``, whichever is first. A message with TTL
``never`` stays whatever its age.
"""

import msgspec
import numpy as np

from contrail_common import model
from contrail_common.columns.blocks import MessageColumns
from contrail_common.columns.header_columns import headers_in_columns
from contrail_common.model import TTL_NEVER, Headers, StreamConfig
from contrail_common.timeunits import INT64_MAX, format_go_duration
from contrail_storage.core.commands import Append
from contrail_storage.core.results import Step
from contrail_storage.core.stream.shard_state import ShardState


def raised(config: StreamConfig, command: Append) -> Append:
    """Return ``command`` with its TTLs raised as by :func:`raised_ttls`."""
    columns, ttls = raised_ttls(config, command.columns, command.ttls)
    if ttls is command.ttls:
        return command
    return msgspec.structs.replace(command, columns=columns, ttls=ttls)


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
    # Sealed headers cannot be changed here: `apply` has no keys.
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


def _with_ttl(headers: Headers | None, text: str) -> Headers:
    """Return ``headers`` with ``text`` as their TTL, under the name that they use for it."""
    headers = dict(headers or {})
    name = next((name for name in headers if name.lower() == model.TTL.lower()), model.TTL)
    headers[name] = [text]
    return headers


def note(state: ShardState, step: Step, ttls: dict[int, int], first_seq: int) -> None:
    """Record the TTLs of messages that were stored from ``first_seq`` on, given by position."""
    groups: dict[int, list[int]] = {}
    for at in sorted(ttls):
        groups.setdefault(ttls[at], []).append(at)
    for ttl_ns, positions in groups.items():
        seqs = np.array(positions, np.int64) + first_seq
        if ttl_ns == TTL_NEVER:
            state.exempt.add_many(seqs, step.writes)
        else:
            # From log time, so that all replicas expire the message alike, whatever their clocks
            # say.
            deadline_ns = min(step.now_ns + ttl_ns, INT64_MAX)
            state.deadlines.add(deadline_ns, seqs, step.writes)
