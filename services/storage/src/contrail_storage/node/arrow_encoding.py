"""Blocks as Arrow: columns are wrapped, not rebuilt; only subject ids become text.

Two schemas: ``contrail`` (times in nanoseconds) and ``spark`` (microseconds, what Spark takes
without a cast). Header names and values are the block's own nested offsets.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from contrail_common.blocks import Block
from contrail_common.header_columns import AnyHeaders, HeaderColumns

COLUMNS: Final = ("shard", "seq", "time", "subject", "headers", "data")
_TEXTS_MAX: Final = 65_536
_HEADERS_TYPE: Final = pa.map_(pa.string(), pa.list_(pa.string()))


def schema_of(kind: Literal["contrail", "spark"], columns: Sequence[str]) -> pa.Schema:
    """The schema of a replay with ``columns`` (empty: all), in their fixed order."""
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


class Selection:
    """Messages of one block: a run of positions, and which of them when not all."""

    __slots__ = ("block", "low", "mask", "stop")

    def __init__(self, block: Block, low: int, stop: int, mask: NDArray[np.bool_] | None) -> None:
        self.block = block
        self.low = low
        self.stop = stop
        self.mask = mask

    @property
    def count(self) -> int:
        """How many messages are selected."""
        if self.mask is None:
            return self.stop - self.low
        return int(np.count_nonzero(self.mask))

    def rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """The selected rows of values over the whole block."""
        part = values[self.low : self.stop]
        return part if self.mask is None else part[self.mask]

    def take(self, array: pa.Array) -> pa.Array:
        """The selected rows of a column over the whole block."""
        part = array.slice(self.low, self.stop - self.low)
        return part if self.mask is None else part.filter(_bits(self.mask))


class SubjectTexts:
    """Subject ids as text, from a table's list of names, which only ever grows at its end."""

    def __init__(self) -> None:
        self._names: Sequence[str | None] = ()
        self._texts = _strings([])

    def column(self, sids: NDArray[np.uint32], names: Sequence[str | None], base: int) -> pa.Array:
        """A string column of the subjects numbered ``sids``; ``base`` is the number of names[0]."""
        if len(names) > _TEXTS_MAX:
            distinct, inverse = np.unique(sids, return_inverse=True)
            texts = _strings([names[sid - base] for sid in distinct.tolist()])
            return texts.take(_array(pa.int32(), inverse.astype(np.int32)))
        if names is not self._names or len(names) != len(self._texts):
            self._names, self._texts = names, _strings(names)
        return self._texts.take(_array(pa.int64(), sids.astype(np.int64) - base))


def record_batch(
    schema: pa.Schema,
    shard: int,
    selections: Sequence[Selection],
    subjects: SubjectTexts,
    names: Sequence[str | None],
    names_base: int,
) -> pa.RecordBatch:
    """One record batch of the selected messages, in order."""
    count = sum(selection.count for selection in selections)
    arrays = []
    for field in schema:
        match field.name:
            case "shard":
                array = _array(field.type, np.full(count, shard, np.int32))
            case "seq":
                array = _array(field.type, _joined(selections, _sequences))
            case "time":
                array = _times(field.type, _joined(selections, lambda block: block.times_ns))
            case "subject":
                sids = _joined(selections, lambda block: block.subject_ids)
                array = subjects.column(sids, names, names_base)
            case "headers":
                array = _headers_column(selections, count)
            case _:
                array = _concatenated([item.take(_payloads(item.block)) for item in selections])
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _strings(texts: Sequence[str | None]) -> pa.Array:
    encoded = [(text or "").encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return _text_array(pa.string(), offsets.tobytes(), b"".join(encoded))


def _array(kind: pa.DataType, values: NDArray[Any]) -> pa.Array:
    # Not pa.array: that looks for pandas first, which costs a second where it is installed.
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def _bits(mask: NDArray[np.bool_]) -> pa.Array:
    bits = np.packbits(mask, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(mask), [None, pa.py_buffer(bits)])


def _joined(
    selections: Sequence[Selection], values: Callable[[Block], NDArray[Any]]
) -> NDArray[Any]:
    return np.concatenate([item.rows(values(item.block)) for item in selections])


def _sequences(block: Block) -> NDArray[np.int64]:
    return np.arange(block.base_seq, block.base_seq + block.count, dtype=np.int64)


def _times(kind: pa.DataType, times_ns: NDArray[np.int64]) -> pa.Array:
    values = times_ns // 1_000 if kind.unit == "us" else times_ns
    return _array(kind, values)


def _payloads(block: Block) -> pa.Array:
    return _text_array(pa.binary(), block.columns.offsets, block.columns.payload)


def _concatenated(parts: list[pa.Array]) -> pa.Array:
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


def _headers_column(selections: Sequence[Selection], count: int) -> pa.Array:
    if all(item.block.columns.headers is None for item in selections):
        return _headers(None, count)
    return _concatenated(
        [item.take(_headers(item.block.columns.headers, item.block.count)) for item in selections]
    )


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
