"""Appending messages that nothing is asked of: most commands, and the shortest way for them.

They may have ids, all of which are new. The result is that of the general way, which decides
everything else (`append`). For one message the arrays of a block are made from packed bytes, since
numpy's calls cost more than everything else.
"""

import struct
from typing import Final

import crc32c
import numpy as np

from contrail_common.columns.blocks import Block
from contrail_common.columns.header_columns import AnyHeaders, UniformHeaders
from contrail_common.model import StreamConfig
from contrail_common.texts import I64Array, U32Array
from contrail_storage.core.commands import Append
from contrail_storage.core.facts import MessageFacts
from contrail_storage.core.id_index import ID_BYTES, NO_ID, IdHashes
from contrail_storage.core.results import Step
from contrail_storage.core.stream.shard_state import ShardState

_FIRST: Final = bytes(4)
_OFFSETS: Final = struct.Struct("<2I")
_U32: Final = struct.Struct("<I")
_I64: Final = struct.Struct("<q")
_VALUE_OVERHEAD: Final = 4


def append_plain(
    state: ShardState, step: Step, config: StreamConfig, command: Append
) -> Block | None:
    """Store the messages and return their block; None, and nothing has changed, if this is no case.

    Then the columns may be unsound, or a check may refuse a message.
    """
    subjects, captured, columns = command.subjects, state.captured, command.columns
    if (
        type(command) is not Append
        or command.expected is not None
        or command.rollups is not None
        or command.ttls is not None
        or command.atomic
        or captured is None
        or config.retention == "interest"
        or config.discard != "old"
        or state.subjects.numbered.left < len(subjects)
    ):
        return None
    count = columns.count
    if count == 1:
        counts, size = None, _size_of_one(command)
        if size is None:
            return None
    else:
        counts = _counts_of_several(command)
        if counts is None:
            return None
        size = columns.size()
    sizes = np.frombuffer(_I64.pack(size), np.int64) if count == 1 else columns.sizes()
    if config.max_msg_size >= 0 or config.max_bytes >= 0:
        largest = size if count == 1 else int(sizes.max())
        if 0 <= config.max_msg_size < largest or 0 <= config.max_bytes < largest:
            return None
    for subject in subjects:
        if not captured[subject]:
            return None
    hashes = None
    if command.ids is not None:
        hashes = IdHashes.of(command.ids)
        if hashes.repeat() or state.dedupe.find(hashes).any():
            return None
    counters, now_ns = state.counters, step.now_ns
    seq = counters.last_seq + 1
    sids = _number(state, step, command, counts)
    times_ns = np.frombuffer(_I64.pack(now_ns) * count, np.int64)
    state.fresh.append(MessageFacts(seq, sids, sizes, times_ns))
    counters.last_seq += count
    counters.messages += count
    counters.bytes += size
    counters.last_time_ns = now_ns
    counters.digest = crc32c.crc32c(columns.payload, counters.digest, gil_release_mode=0)
    counters.last_id = NO_ID
    if hashes is not None:
        counters.last_id = hashes.ids[-ID_BYTES:]
        _remember(state, step, hashes, seq)
    return Block(seq, times_ns, sids, columns)


def _remember(state: ShardState, step: Step, hashes: IdHashes, first_seq: int) -> None:
    """Add the ids of the messages from ``first_seq`` on; some may have none."""
    present = hashes.present()
    if present.all():
        state.dedupe.add(hashes, np.arange(first_seq, first_seq + hashes.count), step)
        return
    positions = np.flatnonzero(present)
    if len(positions):
        state.dedupe.add(hashes.at(positions), first_seq + positions, step)


def _number(state: ShardState, step: Step, command: Append, counts: I64Array | None) -> U32Array:
    """Count the messages by subject (``counts``); return the subject number of each."""
    table, first_seq, count = state.subjects, state.counters.last_seq + 1, command.columns.count
    if counts is None or len(counts) == 1:
        sid = table.add_one(command.subjects[0], first_seq, step, count)
        return np.frombuffer(_U32.pack(sid) * count, np.uint32)
    index = np.frombuffer(command.subject_index, np.uint32)
    return table.add_indexed(command.subjects, index, counts, first_seq, step)[index]


def _counts_of_several(command: Append) -> I64Array | None:
    """Messages by subject; None if their columns are unsound, or a subject is unused or repeated.

    A subject without messages must not get a number.
    """
    if not command.is_sound():
        return None
    subjects = command.subjects
    index = np.frombuffer(command.subject_index, np.uint32)
    counts = np.bincount(index, minlength=len(subjects))
    if np.count_nonzero(counts) < len(subjects) or len(set(subjects)) < len(subjects):
        return None
    return counts


def _size_of_one(command: Append) -> int | None:
    """What the message counts for limits; None for headers other than one of ASCII with one value.

    None also if the columns are unsound.
    """
    columns = command.columns
    if (
        columns.seals is not None
        or columns.offsets != _OFFSETS.pack(0, len(columns.payload))
        or command.subject_index != _FIRST
        or len(command.subjects) != 1
        or (command.ids is not None and len(command.ids) != ID_BYTES)
    ):
        return None
    if columns.headers is None:
        return len(columns.payload)
    size = _size_of_header(columns.headers)
    return None if size is None else len(columns.payload) + size


def _size_of_header(headers: AnyHeaders) -> int | None:
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
