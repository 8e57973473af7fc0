"""Record batches from the body of an Arrow replay. Needs pyarrow (the extra `arrow`)."""

import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from contrail_client.errors import ReplayCut
from contrail_client.models import ReplaySplit
from contrail_client.operations.replaying import arrow_request
from contrail_client.transport.blocking import Transport

END: Final = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""The end-of-stream mark of Arrow IPC."""

READ_BYTES: Final = 1 << 20


class ArrowReplays:
    """Arrow replays. Only the blocking client has them: the reader of Arrow reads from a file."""

    _transport: Transport

    def read_split_arrow(self, split: ReplaySplit, columns: Sequence[str] = ()) -> Iterator[Any]:
        """A split as `pyarrow.RecordBatch`es; without `columns` they have all columns.

        Raises `ReplayCut` if the connection breaks. Then read the split again from its beginning.
        """
        return record_batches(self._transport.stream(arrow_request(split, columns)))


class _Body(io.RawIOBase):
    """The chunks of a body as a file; `tail` has the last bytes that were read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = memoryview(b"")
        self.tail = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest:
            chunk = next(self._chunks, b"")
            self.tail = (self.tail + chunk)[-len(END) :]
            self._rest = memoryview(chunk)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size


def record_batches(chunks: Iterator[bytes]) -> Iterator[Any]:
    """The record batches of an Arrow stream; raises ReplayCut if it is incomplete.

    This checks the end mark: the reader of Arrow accepts a stream that ends between two batches.
    """
    try:
        import pyarrow  # noqa: PLC0415 - the SDK is useful without it
    except ImportError as error:
        raise ImportError(
            "an Arrow replay requires pyarrow: pip install 'contrail-client[arrow]'"
        ) from error

    body = _Body(chunks)
    try:
        with pyarrow.ipc.open_stream(io.BufferedReader(body, READ_BYTES)) as reader:
            yield from reader
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ReplayCut(f"the Arrow stream is incomplete: {error}") from error
    if body.tail != END:
        raise ReplayCut("the Arrow stream has no end mark")
