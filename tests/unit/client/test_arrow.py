"""Record batches from the body of an Arrow replay."""

import io
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrail_client.arrow import record_batches
from contrail_client.errors import ReplayCut, Unreachable

SCHEMA = pa.schema([("seq", pa.int64()), ("data", pa.binary())])
BATCHES = [
    pa.record_batch([[1, 2, 3], [b"a", b"b" * 3000, b"c"]], schema=SCHEMA),
    pa.record_batch([[4], [b"d"]], schema=SCHEMA),
]


def encoded() -> tuple[bytes, list[int]]:
    """The stream, and where each batch ends."""
    sink = io.BytesIO()
    ends = []
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        for batch in BATCHES:
            writer.write_batch(batch)
            ends.append(sink.tell())
    return sink.getvalue(), ends


BODY, BOUNDARIES = encoded()


def chunked(body: bytes, size: int) -> Iterator[bytes]:
    return (body[at : at + size] for at in range(0, len(body), size))


@given(size=st.integers(1, len(BODY)))
def test_batches_are_the_same_however_the_body_is_chunked(size: int) -> None:
    assert list(record_batches(chunked(BODY, size))) == BATCHES


@given(cut=st.integers(0, len(BODY) - 1))
def test_body_cut_anywhere_is_a_cut_replay(cut: int) -> None:
    with pytest.raises(ReplayCut):
        list(record_batches(chunked(BODY[:cut], 100)))


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_body_cut_between_batches_is_a_cut_replay(boundary: int) -> None:
    with pytest.raises(ReplayCut, match="end mark"):
        list(record_batches(chunked(BODY[:boundary], 100)))


def test_broken_connection_keeps_its_own_error() -> None:
    def chunks() -> Iterator[bytes]:
        yield BODY[: BOUNDARIES[0]]
        raise Unreachable("reset")

    with pytest.raises(Unreachable, match="reset"):
        list(record_batches(chunks()))
