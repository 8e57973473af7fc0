"""Record batches whose last column stays in pieces: what a reader of Arrow gets from them."""

from itertools import accumulate

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from contrail_storage.reading.arrow_wire import batch_with_payloads

END = b"\xff\xff\xff\xff\0\0\0\0"
DATA = pa.field("data", pa.binary())
columns = st.sampled_from(["seq", "subject", "headers", "gaps"])
TYPES = {
    "seq": pa.int64(),
    "subject": pa.string(),
    "headers": pa.map_(pa.string(), pa.list_(pa.string())),
    "gaps": pa.int32(),
}


def value_of(name: str, row: int) -> object:
    match name:
        case "seq":
            return row + 7
        case "subject":
            return "s" * (row % 4)
        case "headers":
            return [(f"name{row}", ["one", "two"][: row % 3])] if row % 2 else []
        case _:
            return None if row % 3 else row


def others_of(names: list[str], rows: int) -> pa.RecordBatch:
    schema = pa.schema([(name, TYPES[name]) for name in names])
    arrays = [pa.array([value_of(name, row) for row in range(rows)], TYPES[name]) for name in names]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


@given(
    st.lists(columns, unique=True),
    st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=6), min_size=1, max_size=3),
    st.data(),
)
def test_reader_gets_all_columns_and_then_the_payloads(
    names: list[str], batches: list[list[bytes]], data: st.DataObject
) -> None:
    stream = [others_of(names, 0).schema.append(DATA).serialize().to_pybytes()]
    for payloads in batches:
        offsets = np.array([0, *accumulate(map(len, payloads))], np.int32)
        heap = b"".join(payloads)
        cut = data.draw(st.integers(0, len(heap)))
        pieces = [memoryview(heap)[:cut], heap[cut:]]
        others = others_of(names, len(payloads))
        message = batch_with_payloads(others, len(payloads), offsets.data, pieces)
        assert sum(map(len, message)) % 8 == 0
        stream += [bytes(piece) for piece in message]
    found = pa.ipc.open_stream(b"".join([*stream, END]))
    for payloads in batches:
        batch = found.read_next_batch()
        batch.validate(full=True)
        assert batch.column("data").to_pylist() == payloads
        assert (
            batch.drop_columns(["data"]).to_pydict() == others_of(names, len(payloads)).to_pydict()
        )


def test_payloads_are_the_very_pieces_that_were_given() -> None:
    pieces = [memoryview(b"abc"), memoryview(b"defgh")]
    offsets = np.array([0, 3, 8], np.int32)
    message = batch_with_payloads(others_of(["seq"], 2), 2, offsets.data, pieces)
    assert all(any(piece is one for one in message) for piece in pieces)
