"""How many bytes of an entry a request becomes: never fewer than its command has when encoded.

Other commands than appends are encoded when they are proposed, so that their size is known. What a
publish becomes is not: messages of many requests are joined into one command, and one request may
be cut into several. So it is counted from above, message by message.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import numpy as np

from contrail_common.columns.header_columns import UniformHeaders
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import Expected, Headers, PublishMessage, header_size
from contrail_common.texts import I64Array, as_u32
from contrail_storage.core.commands import Acknowledge, Command, Exhaust

Content = PublishMessage | MessageBatch
"""What one request publishes."""

MESSAGE_OVERHEAD: Final = 32
"""Of a message: its place among the subjects, two offsets, the id's hash, a subject's length."""
APPEND_OVERHEAD: Final = 256
"""Of a command: the heads of its fields and columns, shard, and offsets that columns end with."""
_ENTRY_BYTES: Final = 8
"""Of a header beside name and value, which count 4 more: the offsets that every name has."""
_SEAL_BYTES: Final = 12
"""Key and plain size of a sealed message."""
_ASKED_BYTES: Final = 16
"""A position and a number, or a word, that stands beside it."""
_EXPECTED_BYTES: Final = 64
SEQS_MAX: Final = 2_000
"""Sequences of one command: what a command changes is a row, and is applied in one go."""


def content_count(content: Content) -> int:
    """Number of messages."""
    return 1 if isinstance(content, PublishMessage) else content.count


def content_size(content: Content) -> int:
    """Bytes of all messages."""
    if isinstance(content, PublishMessage):
        return _message_size(content)
    size = content.size() + content.count * MESSAGE_OVERHEAD
    columns = content.columns
    if columns.headers is not None or columns.seals is not None:
        size += int(_column_sizes(content).sum())
    return size + sum(_asked_sizes(content).values())


def content_ends(content: Content) -> list[int]:
    """The sums of the messages' bytes, up to each of them; the last is that of all."""
    if isinstance(content, PublishMessage):
        return [_message_size(content)]
    sizes = content.sizes() + MESSAGE_OVERHEAD
    columns = content.columns
    if columns.headers is not None or columns.seals is not None:
        sizes += _column_sizes(content)
    for at, size in _asked_sizes(content).items():
        sizes[at] += size
    return list(accumulate(sizes.tolist()))


def _message_size(message: PublishMessage) -> int:
    subject = message.subject
    size = len(message.payload) + MESSAGE_OVERHEAD
    size += len(subject) if subject.isascii() else len(subject.encode())
    if message.headers:
        size += header_size(message.headers) + _ENTRY_BYTES * len(message.headers)
        size += _valueless(message.headers)
    if message.expected is not None:
        size += _expected_size(message.expected)
    if message.rollup is not None:
        size += _ASKED_BYTES
    return size + (0 if message.ttl_ns is None else _ASKED_BYTES)


def _valueless(headers: Headers) -> int:
    """Names without a value count nothing for limits, and are stored all the same."""
    return sum(len(name.encode()) for name, values in headers.items() if not values)


def _column_sizes(batch: MessageBatch) -> I64Array:
    """What headers and seals of each message take besides their size for limits."""
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
    """What the messages ask for, by position."""
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
    """``command`` as commands that do the same one after the other, none of which is long."""
    if isinstance(command, Exhaust) and len(command.seqs) > SEQS_MAX:
        return [
            Exhaust(command.consumer_id, command.epoch, command.seqs[start : start + SEQS_MAX])
            for start in range(0, len(command.seqs), SEQS_MAX)
        ]
    if isinstance(command, Acknowledge) and len(command.acked) + len(command.others) > SEQS_MAX:
        return list(_acknowledgements(command))  # plain ones first, as they are applied
    return [command]


def _acknowledgements(command: Acknowledge) -> Iterator[Acknowledge]:
    whole = command.consumer_id, command.epoch
    for start in range(0, len(command.acked), SEQS_MAX):
        yield Acknowledge(*whole, command.acked[start : start + SEQS_MAX])
    for start in range(0, len(command.others), SEQS_MAX):
        others = command.others[start : start + SEQS_MAX]
        reasons = {seq: command.reasons[seq] for _, seq, _ in others if seq in command.reasons}
        yield Acknowledge(*whole, [], others, reasons)
