"""Deliveries in columns, each the first one of its message."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import msgspec
import numpy as np

from contrail_common.columns.blocks import MessageColumns, join_columns
from contrail_common.columns.message_batch import join_subjects, used_subjects
from contrail_common.model import Headers, StoredMessage
from contrail_common.texts import I64Array, as_u32

HEADERS_STEP: Final = 64 << 10
"""Bytes of headers that are decoded in one step: up to 13,000 headers, in about 10 ms."""
HEADERS_OF_MESSAGE: Final = 8
"""Bytes of headers that cost about as much as a message without any."""


class DeliveryColumns(msgspec.Struct, array_like=True, gc=False):
    """Deliveries with consecutive consumer sequences from ``first_consumer_seq`` on.

    Each is the first delivery of its message. ``num_pending`` messages follow the last. ``seqs``
    and ``times_ns`` are i64[n], little-endian. ``subject_index`` (u32[n]) points into the distinct
    ``subjects``. ``len()`` is the number of deliveries.
    """

    first_consumer_seq: int
    num_pending: int
    seqs: bytes
    times_ns: bytes
    subjects: list[str]
    subject_index: bytes
    columns: MessageColumns

    def __len__(self) -> int:
        return self.columns.count

    @property
    def first_seq(self) -> int:
        """Stream sequence of the first delivery."""
        return int.from_bytes(self.seqs[:8], "little")

    @property
    def last_seq(self) -> int:
        """Stream sequence of the last delivery."""
        return int.from_bytes(self.seqs[-8:], "little")

    @property
    def last_consumer_seq(self) -> int:
        """Consumer sequence of the last delivery."""
        return self.first_consumer_seq + len(self) - 1

    def sizes(self) -> I64Array:
        """Return each message's bytes for a subscriber's credit: subject, headers and payload."""
        subjects = np.array([len(subject.encode()) for subject in self.subjects], np.int64)
        return self.columns.sizes() + subjects[as_u32(self.subject_index)]

    def begin_within(self, limit: int, most: int) -> tuple[int, int]:
        """Count the first messages, at most ``most``, that begin within ``limit`` bytes.

        Returns their number and size. ``limit`` is above 0, so there is at least one.
        """
        ends = np.cumsum(self.sizes()[:most])
        # A message begins within the limit if those before it end below it. The first always does.
        count = 1 + int(np.searchsorted(ends[:-1], limit))
        return count, int(ends[count - 1])

    def slice(self, start: int, stop: int) -> "DeliveryColumns":
        """Return the deliveries from position ``start`` up to ``stop``."""
        if stop - start == len(self):
            return self
        subjects, index = used_subjects(self.subjects, as_u32(self.subject_index)[start:stop])
        return DeliveryColumns(
            self.first_consumer_seq + start,
            self.num_pending + len(self) - stop,
            self.seqs[8 * start : 8 * stop],
            self.times_ns[8 * start : 8 * stop],
            subjects,
            index.tobytes(),
            self.columns.slice(start, stop),
        )

    @property
    def made_at_once(self) -> bool:
        """Whether :meth:`messages` takes no longer than a step of the event loop may."""
        headers = self.columns.headers
        known = 0 if headers is None else headers.about()
        return known + HEADERS_OF_MESSAGE * len(self) <= HEADERS_STEP

    def steps(self) -> list[int]:
        """Return where to end each part whose messages are made in one step, the end included."""
        count, headers = len(self), self.columns.headers
        sizes = np.zeros(count, np.int64) if headers is None else headers.sizes()
        ends = np.cumsum(sizes + HEADERS_OF_MESSAGE) // HEADERS_STEP
        return [*(np.flatnonzero(np.diff(ends)) + 1).tolist(), count]

    def each_seq(self) -> list[int]:
        """Return the stream sequences."""
        return list(np.frombuffer(self.seqs, np.int64).tolist())

    def each_time_ns(self) -> list[int]:
        """Return the times at which the messages were stored."""
        return list(np.frombuffer(self.times_ns, np.int64).tolist())

    def each_subject(self) -> list[str]:
        """Return the subjects, one for each message."""
        return [self.subjects[at] for at in as_u32(self.subject_index).tolist()]

    def each_headers(self) -> Sequence[Headers | None]:
        """Return the headers, None for a message without any."""
        headers = self.columns.headers
        return [None] * len(self) if headers is None else headers.each()

    def each_payload(self) -> list[bytes]:
        """Return the payloads."""
        heap, ends = self.columns.payload, as_u32(self.columns.offsets).tolist()
        return [heap[start:stop] for start, stop in pairwise(ends)]

    def messages(self) -> list[StoredMessage]:
        """Return the messages, one by one."""
        rows = zip(
            self.each_seq(),
            self.each_subject(),
            self.each_time_ns(),
            self.each_headers(),
            self.each_payload(),
            strict=True,
        )
        return [StoredMessage(*row) for row in rows]


def join_deliveries(parts: Sequence[DeliveryColumns]) -> DeliveryColumns:
    """Join consecutive ``parts`` (at least one)."""
    if len(parts) == 1:
        return parts[0]
    subjects, index = join_subjects([(part.subjects, part.subject_index) for part in parts])
    return DeliveryColumns(
        parts[0].first_consumer_seq,
        parts[-1].num_pending,
        b"".join([part.seqs for part in parts]),
        b"".join([part.times_ns for part in parts]),
        subjects,
        index,
        join_columns([part.columns for part in parts]),
    )
