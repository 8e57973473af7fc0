"""Upper bounds of the bytes that messages take in an entry of the log.

The exact size is not known before messages of several requests are joined into a command, and one
request may be cut into several.
"""

from typing import Final

import numpy as np

from contrail_common.columns.header_columns import UniformHeaders
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.model import Expected, PublishMessage
from contrail_common.texts import I64Array, as_u32

_MESSAGE_BYTES: Final = 32
"""Bytes per message: its subject index, two offsets, the hash of its id, a subject length."""
_ENTRY_BYTES: Final = 8
"""Bytes per header in addition to name and value (with 4 more): the offsets of the name."""
_SEAL_BYTES: Final = 12
"""Bytes per sealed message: key and plain size."""
_ASKED_BYTES: Final = 16
"""Bytes per roll-up or time to live: a position, and a number or word."""
_EXPECTED_BYTES: Final = 96


def content_size(content: PublishMessage | MessageBatch) -> int:
    """Bytes of all messages of a request."""
    return batch_size(content) if isinstance(content, MessageBatch) else entry_bytes(content)


def batch_size(batch: MessageBatch) -> int:
    """Bytes of all messages of a batch."""
    size = batch.size() + batch.count * _MESSAGE_BYTES
    columns = batch.columns
    if columns.seals is None and isinstance(columns.headers, UniformHeaders):
        size += _ENTRY_BYTES * columns.headers.names.count * batch.count
    elif columns.headers is not None or columns.seals is not None:
        size += int(_column_sizes(batch).sum())
    return size + sum(_asked_sizes(batch).values())


def content_ends(content: PublishMessage | MessageBatch) -> list[int]:
    """The running sums of the messages' bytes; the last one is the total."""
    if isinstance(content, PublishMessage):
        return [entry_bytes(content)]
    sizes = content.sizes() + _MESSAGE_BYTES
    columns = content.columns
    if columns.headers is not None or columns.seals is not None:
        sizes += _column_sizes(content)
    for at, size in _asked_sizes(content).items():
        sizes[at] += size
    ends: list[int] = np.cumsum(sizes).tolist()
    return ends


def entry_bytes(message: PublishMessage) -> int:
    """Bytes of a message that is not in columns yet."""
    subject = message.subject
    size = len(message.payload) + _MESSAGE_BYTES
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
