"""Blocks as Arrow: columns are wrapped, not rebuilt; only subject ids become text.

Two schemas: ``contrail`` (times in nanoseconds) and ``spark`` (microseconds, what Spark takes
without a cast). Header names and values are the block's own nested offsets.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from contrail_common.columns.header_columns import AnyHeaders, HeaderColumns
from contrail_link.contract.read import Chunk, Pieces
from contrail_storage.reading.arrow_wire import batch_with_payloads
from contrail_storage.reading.selection import Selection

COLUMNS: Final = ("shard", "seq", "time", "subject", "headers", "data")
_TEXTS_MAX: Final = 65_536
_HEADERS_TYPE: Final = pa.map_(pa.string(), pa.list_(pa.string()))


def schema_of(kind: Literal["contrail", "spark"], columns: Sequence[str]) -> pa.Schema:
    """Return the schema of a replay with ``columns`` (empty: all), in their fixed order."""
    unit = "ns" if kind == "contrail" else "us"
    types = {
        "shard": pa.int32(),
        "seq": pa.int64(),
        "time": pa.timestamp(unit, tz="UTC"),
        "subject": pa.string(),
        "headers": _HEADERS_TYPE,
        "data": pa.binary(),
    }
    wanted = columns or COLUMNS
    return pa.schema([(name, types[name]) for name in COLUMNS if name in wanted])


class SubjectTexts:
    """Converts subject ids to text by a table's list of names, which only grows at its end."""

    def __init__(self) -> None:
        self._texts: tuple[Sequence[str | None], pa.Array] = ((), _strings([]))

    def column(self, sids: NDArray[np.uint32], names: Sequence[str | None], base: int) -> pa.Array:
        """A string column of the subjects numbered ``sids``; ``base`` is the number of names[0]."""
        if len(names) > _TEXTS_MAX:
            distinct, inverse = np.unique(sids, return_inverse=True)
            texts = _strings([names[at] for at in _behind(distinct, base).tolist()])
            return texts.take(_array(pa.int32(), inverse.astype(np.int32)))
        # One pair, taken once: batches are made in several threads.
        known, texts = self._texts
        if names is not known or len(names) != len(texts):
            texts = _strings(names)
            self._texts = names, texts
        return texts.take(_array(pa.int64(), _behind(sids, base)))


def _behind(sids: NDArray[np.uint32], base: int) -> NDArray[np.int64]:
    """The distance of subject numbers from ``base``; numbers wrap around."""
    return (sids.astype(np.int64) - base) & 0xFFFF_FFFF


class BatchEncoder:
    """Encodes record batches of a schema as messages of a stream; for use by several threads."""

    def __init__(self, schema: pa.Schema, shard: int) -> None:
        self._shard = shard
        self._subjects = SubjectTexts()
        self._with_data = "data" in schema.names
        fields = [field for field in schema if field.name != "data"]  # it is the last one
        self._others = pa.schema(fields)

    def message(
        self, selection: Selection, names: Sequence[str | None], base: int
    ) -> Chunk | Pieces:
        """Encode one record batch of the messages, in order; payloads are not copied."""
        arrays = [self._column(field, selection, names, base) for field in self._others]
        others = pa.RecordBatch.from_arrays(arrays, schema=self._others)
        if not self._with_data:
            # The same bytes as from a stream's writer, without its copies.
            return memoryview(others.serialize())
        offsets, payloads = selection.payloads()
        return batch_with_payloads(others, selection.count, offsets.data, payloads)

    def _column(
        self, field: pa.Field, selection: Selection, names: Sequence[str | None], base: int
    ) -> pa.Array:
        match field.name:
            case "shard":
                return _array(field.type, np.full(selection.count, self._shard, np.int32))
            case "seq":
                return _array(field.type, selection.sequences())
            case "time":
                return _times(field.type, selection.times_ns())
            case "subject":
                return self._subjects.column(selection.subject_ids(), names, base)
            case _:
                return _headers_column(selection)


def _strings(texts: Sequence[str | None]) -> pa.Array:
    encoded = [(text or "").encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return _text_array(pa.string(), offsets.tobytes(), b"".join(encoded))


def _array(kind: pa.DataType, values: NDArray[Any]) -> pa.Array:
    # Not pa.array: it imports pandas first, which takes a second if pandas is installed.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _times(kind: pa.DataType, times_ns: NDArray[np.int64]) -> pa.Array:
    values = times_ns // 1_000 if kind.unit == "us" else times_ns
    return _array(kind, values)


def _concatenated(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _headers_column(selection: Selection) -> pa.Array:
    if all(run.block.headers is None for run in selection.runs):
        return _headers(None, selection.count)
    return _concatenated(selection.take(lambda block: _headers(block.headers, block.count)))


def _text_array(kind: pa.DataType, offsets: bytes, heap: bytes) -> pa.Array:
    return pa.Array.from_buffers(
        kind, len(offsets) // 4 - 1, [None, pa.py_buffer(offsets), pa.py_buffer(heap)]
    )


def _headers(given: AnyHeaders | None, count: int) -> pa.Array:
    if given is None:
        zeros = bytes(4 * (count + 1))
        headers = HeaderColumns(zeros, zeros[:4], zeros[:4], zeros[:4], b"", b"")
    else:
        headers = given.nested()
    values = pa.ListArray.from_arrays(
        _array(pa.int32(), np.frombuffer(headers.value_offsets, np.int32)),
        _text_array(pa.string(), headers.text_offsets, headers.texts),
    )
    return pa.MapArray.from_arrays(
        _array(pa.int32(), np.frombuffer(headers.entry_offsets, np.int32)),
        _text_array(pa.string(), headers.name_offsets, headers.names),
        values,
    )
