"""Appending one message that nothing is asked of: most commands, and the shortest way for them.

The result is that of the general way, which decides everything else (`append`). The arrays of a
block are made from packed bytes here, since numpy's calls cost more than everything else.
"""

import struct
from typing import Final

import crc32c
import numpy as np

from contrail_common.columns.blocks import Block
from contrail_common.columns.header_columns import AnyHeaders, UniformHeaders
from contrail_common.model import StreamConfig
from contrail_storage.core.commands import Append
from contrail_storage.core.dedupe import NO_ID
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.results import Step
from contrail_storage.core.stream.shard_state import ShardState

_FIRST: Final = bytes(4)
_OFFSETS: Final = struct.Struct("<2I")
_U32: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")
_VALUE_OVERHEAD: Final = 4


def append_one(
    state: ShardState, step: Step, config: StreamConfig, command: Append
) -> Block | None:
    """Store one message and return its block; None, and nothing has changed, if this is no case.

    Then the columns may be unsound, or a check may refuse the message.
    """
    columns = command.columns
    headers, payload = columns.headers, columns.payload
    size = len(payload)
    if headers is not None:
        header_size = _size_of_one(headers)
        if header_size is None:
            return None
        size += header_size
    if (
        columns.count != 1
        or columns.seals is not None
        or columns.offsets != _OFFSETS.pack(0, len(payload))
        or command.subject_index != _FIRST
        or len(command.subjects) != 1
        or command.ids is not None
        or command.expected is not None
        or command.rollups is not None
        or command.ttls is not None
        or command.atomic
    ):
        return None
    subject, captured, table = command.subjects[0], state.captured, state.subjects
    if (
        captured is None
        or not captured[subject]
        or table.numbered.left < 1
        or 0 <= config.max_msg_size < size
        or 0 <= config.max_bytes < size
        or config.retention == "interest"
        or config.discard != "old"
    ):
        return None
    counters, now_ns = state.counters, step.now_ns
    seq = counters.last_seq + 1
    subject_ids = np.frombuffer(_U32.pack(table.add_one(subject, seq, step)), np.uint32)
    sizes = np.frombuffer(_I64.pack(size), np.int64)
    times_ns = np.frombuffer(_I64.pack(now_ns), np.int64)
    state.fresh.append(MessageFacts(seq, subject_ids, sizes, times_ns))
    counters.last_seq = seq
    counters.messages += 1
    counters.bytes += size
    counters.last_time_ns = now_ns
    counters.digest = crc32c.crc32c(payload, counters.digest)
    counters.last_id = NO_ID
    return Block(seq, times_ns, subject_ids, columns, sizes)


def _size_of_one(headers: AnyHeaders) -> int | None:
    """What a single header of ASCII with one value counts for limits; None for other headers."""
    if not isinstance(headers, UniformHeaders):
        return None
    names, values = headers.names, headers.values
    name, value = names.heap, values.heap
    if (
        names.offsets != _OFFSETS.pack(0, len(name))
        or values.offsets != _OFFSETS.pack(0, len(value))
        or not name.isascii()
        or not value.isascii()
    ):
        return None
    return len(name) + len(value) + _VALUE_OVERHEAD
