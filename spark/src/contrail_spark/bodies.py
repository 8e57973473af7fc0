"""Rows in Arrow become the bodies of batch publishes.

Messages without headers are sent as columns, without work for each row. Messages with headers are
sent as rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from contrail_common.model import MSG_ID
from contrail_spark.errors import RowError
from contrail_spark.layout import IdSource, Layout

BODY_ROWS_MAX: Final = 5_000
BODY_BYTES_MAX: Final = 4 << 20
MESSAGE_BYTES_MAX: Final = 15 << 20
"""The server reads bodies of up to 16 MiB, and names the limit of smaller messages itself."""
_ID: Final = MSG_ID.lower()
_CONDITIONS: Final = "nats-expected-"
"""The server takes these names in upper and lower case."""
_ROWS: Final = 1
_COLUMNS: Final = 2
_encoder: Final = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Body:
    """The body of one request. Its ``rows`` are those of the batch from ``start`` on."""

    start: int
    rows: int
    packed: bytes


class Rows:
    """The rows of one record batch as messages.

    ``first_row`` is the number of the first one in its partition, which counts from 1. ``origin``
    begins the ids that are made from row numbers. Raises RowError for a row without a subject or
    id.
    """

    def __init__(self, batch: pa.RecordBatch, layout: Layout, origin: str, first_row: int) -> None:
        self._batch = batch
        self._count = batch.num_rows
        self._first_row = first_row
        self._subjects = self._subjects_of(layout)
        self._data = pc.fill_null(batch.column("data").cast(pa.binary()), b"")
        self._headers = self._headers_of(layout)
        self._ids = self._ids_of(layout, origin)

    def name(self, at: int) -> str:
        """The row at a position, for an error."""
        subject = self._subjects[at].as_py().decode(errors="replace")
        return f"row {self._first_row + at} with subject {subject!r}"

    def bodies(self) -> Iterator[Body]:
        """The bodies in the order of the rows, each of few enough rows and bytes."""
        ends = self._sizes().cumsum()
        start = 0
        while start < self._count:
            base = int(ends[start - 1]) if start else 0
            fits = int(np.searchsorted(ends, base + BODY_BYTES_MAX, side="right"))
            stop = min(start + BODY_ROWS_MAX, max(fits, start + 1), self._count)
            if int(ends[start]) - base > MESSAGE_BYTES_MAX:
                size = int(ends[start]) - base
                raise RowError(f"{self.name(start)} has {size} bytes, which are too many to send")
            yield Body(start, stop - start, self._packed(start, stop))
            start = stop

    def _subjects_of(self, layout: Layout) -> pa.Array:
        """The subject of each row, in UTF-8."""
        if layout.subject is not None:
            return pa.repeat(layout.subject.encode(), self._count)
        subjects = self._batch.column("subject").cast(pa.binary())
        if subjects.null_count:
            at = _first(pc.is_null(subjects))
            raise RowError(f"row {self._first_row + at} has no subject: the column subject is null")
        return subjects

    def _headers_of(self, layout: Layout) -> list[dict[str, list[str]]] | None:
        """The headers of each row; None if no row has any."""
        if "headers" not in self._batch.schema.names:
            return None
        column = self._batch.column("headers")
        bounds = _bounds(column).tolist()
        if bounds[0] == bounds[-1]:
            return None
        entries = slice(bounds[0], bounds[-1])
        try:
            names, values = _values(column.keys[entries]), _header_values(column.items[entries])
        except pa.ArrowException as error:
            raise RowError("a text in the column headers is not UTF-8") from error
        dropped = {name for name in set(names) if _is_dropped(name.lower(), layout)}
        values = [None if name in dropped else one for name, one in zip(names, values, strict=True)]
        pairs = list(zip(names, values, strict=True))
        first = bounds[0]
        return [
            {name: value for name, value in pairs[start - first : end - first] if value is not None}
            for start, end in pairwise(bounds)
        ]

    def _ids_of(self, layout: Layout, origin: str) -> pa.Array:
        """The id of each row, in UTF-8."""
        column = self._batch.column
        if layout.ids is IdSource.ROW:
            rows = pa.array(np.arange(self._first_row, self._first_row + self._count))
            ids = pc.binary_join_element_wise(origin, rows.cast(pa.string()), ":")
        elif layout.ids is IdSource.COLUMN:
            ids = column("msg_id")
        else:
            stream = layout.source_stream or column("stream").cast(pa.string())
            shard, seq = (column(name).cast(pa.string()) for name in ("shard", "seq"))
            ids = pc.binary_join_element_wise(stream, shard, seq, ":")
        lacking = pc.fill_null(pc.equal(pc.binary_length(ids), 0), True)
        if pc.any(lacking).as_py():
            known = {IdSource.COLUMN: "msg_id is", IdSource.SOURCE: "stream, shard or seq are"}
            where = self.name(_first(lacking))
            raise RowError(f"{where} has no id: {known[layout.ids]} null or empty")
        if layout.ids is IdSource.SOURCE and pc.count_distinct(ids).as_py() < self._count:
            # The server would take the second one for a repetition of the first.
            counts = pc.value_counts(ids)
            twice = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"]
            raise RowError(
                f"several rows come from the message {twice}: give each an id of its own in a "
                "column msg_id, or drop the columns of the source"
            )
        return ids.cast(pa.binary())

    def _sizes(self) -> NDArray[np.int64]:
        """About how many bytes each row takes in a body."""
        sizes = np.full(self._count, 16, np.int64)
        for texts in (self._subjects, self._data, self._ids):
            sizes += np.diff(_bounds(texts))
        if self._headers is not None:
            sizes += [
                sum(len(name) + sum(len(value) + 4 for value in values) for name, values in row)
                for row in map(dict.items, self._headers)
            ]
        return sizes

    def _packed(self, start: int, stop: int) -> bytes:
        subjects, data, ids = (
            texts.slice(start, stop - start) for texts in (self._subjects, self._data, self._ids)
        )
        headers = None if self._headers is None else self._headers[start:stop]
        if headers is None or not any(headers):
            distinct = subjects.dictionary_encode()
            columns = (
                self._texts(distinct.dictionary.to_pylist(), "subject"),
                distinct.indices.to_numpy().astype("<u4").tobytes(),
                *_joined(data),
                _joined(ids),
            )
            return _encoder.encode((_COLUMNS, columns))
        rows = [
            (subject, {**own, MSG_ID: [msg_id]}, payload)
            for subject, own, payload, msg_id in zip(
                self._texts(_values(subjects), "subject"),
                headers,
                _values(data),
                self._texts(_values(ids), "id"),
                strict=True,
            )
        ]
        return _encoder.encode((_ROWS, rows))

    def _texts(self, encoded: list[bytes], what: str) -> list[str]:
        try:
            return [one.decode() for one in encoded]
        except UnicodeDecodeError as error:
            raise RowError(f"the {what} {error.object!r} is not UTF-8") from None


def _is_dropped(name: str, layout: Layout) -> bool:
    """Whether a header, in lower case, is not for the message: an id or a met condition."""
    # The source has checked its conditions. They mean nothing for the copy of a message.
    return name == _ID or (layout.ids is IdSource.SOURCE and name.startswith(_CONDITIONS))


def _header_values(items: pa.Array) -> list[list[str] | None]:
    """The values of each header, which is a text or a list of texts; None if there are none."""
    if not pa.types.is_list(items.type):
        return [None if one is None else [one] for one in _values(items)]
    bounds = _bounds(items).tolist()
    first = bounds[0]
    values = _values(items.values[first : bounds[-1]])
    return [
        [one for one in values[start - first : end - first] if one is not None] or None
        for start, end in pairwise(bounds)
    ]


def _values(texts: pa.Array) -> list[Any]:
    # Several times as fast as `to_pylist`.
    values: list[Any] = texts.to_numpy(zero_copy_only=False).tolist()
    return values


def _first(mask: pa.BooleanArray) -> int:
    return int(pc.index(mask, True).as_py())


def _bounds(array: pa.Array) -> NDArray[np.int32]:
    """Where each value begins, and where the last one ends."""
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, 4 * array.offset)


def _joined(texts: pa.Array) -> tuple[bytes, memoryview | bytes]:
    """Offsets (u32) and all values, one after another, of an array without nulls."""
    bounds = _bounds(texts)
    heap = texts.buffers()[2]
    joined = b"" if heap is None else memoryview(heap)[bounds[0] : bounds[-1]]
    return (bounds - bounds[0]).astype("<u4").tobytes(), joined
