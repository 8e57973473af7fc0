"""Records over a pipe: each is a length and msgpack. A reader drops a partial record."""

import os
import select
import struct
import threading
import time
from typing import Final

import msgspec

_LENGTH: Final = struct.Struct("<I")
_CHUNK: Final = 1 << 20


class Reporter:
    """The writing end, for any thread. A record is in the pipe when `send` returns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Condition()
        self._sent = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, record: object) -> None:
        """Write one record. A process that dies meanwhile leaves a partial record."""
        body = self._encode(record)
        pending = memoryview(_LENGTH.pack(len(body)) + body)
        with self._lock:
            while pending:
                pending = pending[os.write(self._descriptor, pending) :]
            self._sent += 1
            self._lock.notify_all()

    def wait_for_more(self, timeout_s: float) -> None:
        """Wait until another record has been sent, at most for the timeout."""
        with self._lock:
            before = self._sent
            self._lock.wait_for(lambda: self._sent > before, timeout_s)


def read_to_end(descriptor: int, timeout_s: float) -> bytes:
    """All bytes until the last writer has closed the pipe. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    chunks: list[bytes] = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError(f"no end within {timeout_s} s")
        chunk = os.read(descriptor, _CHUNK)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def bodies(data: bytes) -> list[bytes]:
    """The complete records in `data`, still encoded; a partial last one is dropped."""
    found, offset = [], 0
    while offset + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, offset)
        start = offset + _LENGTH.size
        offset = start + length
        if offset > len(data):
            break
        found.append(data[start:offset])
    return found
