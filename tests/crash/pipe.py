"""Records over a pipe: each a length and its msgpack, whole or not there."""

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
    """The writing end. May be used from any thread; a record is out when `send` returns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Condition()
        self._sent = 0
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, record: object) -> None:
        """Write one record. Whoever dies within leaves a cut one, which the reader drops."""
        body = self._encode(record)
        pending = memoryview(_LENGTH.pack(len(body)) + body)
        with self._lock:
            while pending:
                pending = pending[os.write(self._descriptor, pending) :]
            self._sent += 1
            self._lock.notify_all()

    def wait_for_more(self, timeout_s: float) -> None:
        """Return when another record has been sent, at the latest after the timeout."""
        with self._lock:
            before = self._sent
            self._lock.wait_for(lambda: self._sent > before, timeout_s)


def read_to_end(descriptor: int, timeout_s: float) -> bytes:
    """All bytes until the last writer is gone. Raises TimeoutError."""
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
    """The whole records in `data`, still encoded; a last one that is cut is dropped."""
    found, offset = [], 0
    while offset + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, offset)
        start = offset + _LENGTH.size
        offset = start + length
        if offset > len(data):
            break
        found.append(data[start:offset])
    return found
