"""Bytes that a request takes in an entry, counted so that the encoded command is never larger.

Commands other than appends are encoded when they are proposed, so their exact size is known. The
size of an append is not: messages of many requests are joined into one command, and one request
may be cut into several. So an upper bound is counted for each message.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import numpy as np

from contrail_common.columns.header_columns import UniformHeaders
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import Expected, PublishMessage
from contrail_common.texts import I64Array, as_u32
from contrail_storage.core.commands import Acknowledge, Command, Exhaust

Content = PublishMessage | MessageBatch
"""The messages of one request."""

MESSAGE_OVERHEAD: Final = 32
"""Per message: its entry among the subjects, two offsets, the id's hash, a subject's length."""
APPEND_OVERHEAD: Final = 256
"""Per command: the heads of its fields and columns, the shard, and the final offsets of columns."""
_ENTRY_BYTES: Final = 8
"""Per header, besides name and value (which count 4 more): the offsets that every name has."""
_SEAL_BYTES: Final = 12
"""Per sealed message: key and plain size."""
_ASKED_BYTES: Final = 16
"""Per roll-up or time to live: a position, and a number or word."""
_EXPECTED_BYTES: Final = 64
SEQS_MAX: Final = 2_000
"""Sequences of one command at most. Each is a changed row, and all are applied in one step."""


def batch_size(batch: MessageBatch) -> int:
    """Bytes of all messages of a batch."""
    size = batch.size() + batch.count * MESSAGE_OVERHEAD
    columns = batch.columns
    if columns.headers is not None or columns.seals is not None:
        size += int(_column_sizes(batch).sum())
    return size + sum(_asked_sizes(batch).values())


def content_ends(content: Content) -> list[int]:
    """The running sums of the messages' bytes; the last one is the total."""
    if isinstance(content, PublishMessage):
        return [message_size(content)]
    sizes = content.sizes() + MESSAGE_OVERHEAD
    columns = content.columns
    if columns.headers is not None or columns.seals is not None:
        sizes += _column_sizes(content)
    for at, size in _asked_sizes(content).items():
        sizes[at] += size
    return list(accumulate(sizes.tolist()))


def message_size(message: PublishMessage) -> int:
    """Bytes of a message that is not in columns yet."""
    subject = message.subject
    size = len(message.payload) + MESSAGE_OVERHEAD
    size += len(subject) if subject.isascii() else len(subject.encode())
    for name, values in (message.headers or {}).items():
        name_bytes = len(name.encode())
        size += _ENTRY_BYTES
        if not values:
            size += name_bytes  # limits do not count a name without a value, but it is stored
        for value in values:
            size += name_bytes + len(value.encode()) + 4
    if message.expected is not None:
        size += _expected_size(message.expected)
    if message.rollup is not None:
        size += _ASKED_BYTES
    return size + (0 if message.ttl_ns is None else _ASKED_BYTES)


def _column_sizes(batch: MessageBatch) -> I64Array:
    """Bytes of headers and seals of each message, beyond the size that limits count."""
    columns = batch.columns
    sizes = np.zeros(columns.count, np.int64)
    if columns.seals is not None:
        cells = np.diff(as_u32(columns.offsets).astype(np.int64))
        sizes += np.maximum(cells - columns.seals.plain_sizes(), 0) + _SEAL_BYTES
    elif isinstance(columns.headers, UniformHeaders):
        sizes += _ENTRY_BYTES * columns.headers.names.count
    elif columns.headers is not None:
        entries = as_u32(columns.headers.entry_offsets).astype(np.int64)
        names = as_u32(columns.headers.name_offsets).astype(np.int64)
        values = np.diff(as_u32(columns.headers.value_offsets).astype(np.int64))
        valueless = np.where(values == 0, np.diff(names), 0)
        by_entry = np.concatenate(([0], np.cumsum(valueless + _ENTRY_BYTES)))
        sizes += by_entry[entries[1:]] - by_entry[entries[:-1]]
    return sizes


def _asked_sizes(batch: MessageBatch) -> dict[int, int]:
    """Bytes of roll-ups, times to live and expectations, by position."""
    sizes: dict[int, int] = {}
    for asked in (batch.rollups, batch.ttls):
        for at in asked or ():
            sizes[at] = sizes.get(at, 0) + _ASKED_BYTES
    for at, expected in (batch.expected or {}).items():
        sizes[at] = sizes.get(at, 0) + _expected_size(expected)
    return sizes


def _expected_size(expected: Expected) -> int:
    texts = expected.stream, expected.last_subject_seq_subject
    return _EXPECTED_BYTES + sum(len(text.encode()) for text in texts if text)


def in_slices(command: Command) -> list[Command]:
    """Split a long command into short commands that have the same effect in order."""
    if isinstance(command, Exhaust) and len(command.seqs) > SEQS_MAX:
        return [
            Exhaust(command.consumer_id, command.epoch, command.seqs[start : start + SEQS_MAX])
            for start in range(0, len(command.seqs), SEQS_MAX)
        ]
    if isinstance(command, Acknowledge) and len(command.acked) + len(command.others) > SEQS_MAX:
        return list(_acknowledgements(command))  # plain ones first: the order of applying them
    return [command]


def _acknowledgements(command: Acknowledge) -> Iterator[Acknowledge]:
    whole = command.consumer_id, command.epoch
    for start in range(0, len(command.acked), SEQS_MAX):
        yield Acknowledge(*whole, command.acked[start : start + SEQS_MAX])
    for start in range(0, len(command.others), SEQS_MAX):
        others = command.others[start : start + SEQS_MAX]
        reasons = {seq: command.reasons[seq] for _, seq, _ in others if seq in command.reasons}
        yield Acknowledge(*whole, [], others, reasons)
