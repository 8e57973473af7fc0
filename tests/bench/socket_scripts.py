"""Scripts for sockets: messages published one by one, and messages pushed under credit."""

import base64
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from tests.bench.figures import BenchError
from tests.bench.http_scripts import MARKER, SUBJECTS, payloads
from tests.bench.load import SHOWN_BYTES, Script

JSON: Final = "contrail.v1.json"
MSGPACK: Final = "contrail.v1.msgpack"
_TEXT: Final = 0x81
_ACK: Final = b'"op":"ack"'
_BINARY: Final = 0x82
_MASKED: Final = 0x80
_SHORT: Final = 126
_MEDIUM: Final = 1 << 16
_NO_MASK: Final = bytes(4)
"""A mask that changes nothing. The server has to unmask anyway."""


def handshake(form: str) -> bytes:
    """The request that opens a socket."""
    key = base64.b64encode(os.urandom(16)).decode()
    return (
        "GET /v1/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n"
        f"Sec-WebSocket-Protocol: {form}\r\n\r\n"
    ).encode()


def opened(received: bytes) -> bool:
    """Whether the answer to the handshake and the first frame are there."""
    if received and not received.startswith(b"HTTP/1.1 101"):
        raise BenchError(f"no socket: {received[:SHOWN_BYTES]!r}")
    return b"heartbeat" in received


def client_frame(form: str, value: dict[str, Any]) -> bytes:
    """The bytes of a WebSocket message with one object."""
    text = form == JSON
    payload = msgspec.json.encode(value) if text else msgspec.msgpack.encode(value)
    first = _TEXT if text else _BINARY
    length = len(payload)
    if length < _SHORT:
        head = bytes((first, _MASKED | length))
    elif length < _MEDIUM:
        head = struct.pack("!BBH", first, _MASKED | 126, length)
    else:
        head = struct.pack("!BBQ", first, _MASKED | 127, length)
    return head + _NO_MASK + payload


class SocketPublishing:
    """Keeps messages in flight: sends one new message for each acknowledgement."""

    def __init__(self, frames: Sequence[bytes], outstanding: int) -> None:
        self.messages = 0
        self._frames = itertools.cycle(frames)
        self._outstanding = outstanding
        self._sent = 0
        self._open = False

    def request(self, answer: bytes) -> bytes | None:
        """The handshake, then the first messages, then one for each acknowledgement."""
        if not answer:
            return handshake(JSON)
        if not self._open:
            self._open = True
            count = self._outstanding
        else:
            count = answer.count(_ACK)
            self.messages += count
        self._sent += count
        return b"".join(itertools.islice(self._frames, count))

    def end(self, answer: bytes) -> bool:
        """Count the acknowledgements in ``answer``; whether all messages have theirs."""
        if self._open:
            self.messages += answer.count(_ACK)
        return self.messages == self._sent

    def complete(self, received: bytes) -> bool:
        """Whether ``received`` ends with a whole frame; BenchError for what is no ack."""
        if not self._open:
            return opened(received)
        # Acks are flat objects in ASCII: no byte of them looks like the head of a frame.
        if received[-1:] != b"}":
            return False
        if received.count(_TEXT) != received.count(_ACK):
            raise BenchError(f"not only acks: {received[:SHOWN_BYTES]!r}")
        return True


@dataclass(frozen=True, slots=True)
class SocketPublishes:
    """Single messages over some sockets, ``outstanding`` on each."""

    prefix: str
    outstanding: int
    sockets: int

    def __call__(self) -> Sequence[Script]:
        """The scripts of the sockets."""
        frames = [
            client_frame(
                JSON,
                {
                    "op": "pub",
                    "id": number,
                    "subject": f"{self.prefix}.{number % SUBJECTS}",
                    "data": payload.decode(),
                },
            )
            for number, payload in enumerate(payloads())
        ]
        return [SocketPublishing(frames, self.outstanding) for _ in range(self.sockets)]


class SocketPushed:
    """A subscription that gives credit for received messages until it has all of them."""

    def __init__(self, form: str, sub: dict[str, Any], messages: int, window: int) -> None:
        self.messages = 0
        self._form = form
        self._wanted = messages
        self._sub = {**sub, "op": "sub", "sid": "s", "credit": {"msgs": min(window, messages)}}
        self._given = min(window, messages)
        self._window = window
        self._open = False
        self._before = b""

    def request(self, answer: bytes) -> bytes | None:
        """The handshake, the subscription, then credit; None when all messages have come."""
        if not answer:
            return handshake(self._form)
        if not self._open:
            self._open = True
            return client_frame(self._form, self._sub)
        if self.messages >= self._wanted:
            return None
        more = min(self.messages + self._window, self._wanted) - self._given
        if not more or (more * 2 < self._window and self._given + more < self._wanted):
            return b""
        self._given += more
        return client_frame(self._form, {"op": "credit", "sid": "s", "msgs": more})

    def complete(self, received: bytes) -> bool:
        """Count the messages in ``received``, complete or not."""
        if not self._open:
            return opened(received)
        data = self._before + received
        self.messages += data.count(MARKER)
        self._before = data[-(len(MARKER) - 1) :]
        if self.messages > self._wanted:
            raise BenchError(f"{self.messages} messages for a credit of {self._wanted}")
        return True


class _Columns(msgspec.Struct):
    count: int
    seqs: bytes
    offsets: bytes
    data: bytes


class _Frame(msgspec.Struct):
    op: str
    cols: _Columns | None = None


_frames: Final = msgspec.msgpack.Decoder(_Frame)


class SocketPushedColumns(SocketPushed):
    """The same in columns: decodes every frame, and checks every sequence."""

    def complete(self, received: bytes) -> bool:
        """Handle the complete frames in ``received``; keep the rest until more comes."""
        if not self._open:
            return opened(received)
        data = memoryview(self._before + received)
        at = 0
        while (frame := _server_frame(data, at)) is not None:
            start, at = frame
            self._take(_frames.decode(data[start:at]))
        self._before = bytes(data[at:])
        return True

    def _take(self, frame: _Frame) -> None:
        if frame.cols is None:
            if frame.op not in ("ok", "hb"):
                raise BenchError(f"unexpected frame: {frame.op}")
            return
        cols, before = frame.cols, self.messages
        self.messages += cols.count
        if self.messages > self._wanted:
            raise BenchError(f"{self.messages} messages for a credit of {self._wanted}")
        seqs = np.frombuffer(cols.seqs, "<i8")
        if not np.array_equal(seqs, np.arange(before + 1, self.messages + 1)):
            raise BenchError(f"not the sequences behind {before}")
        if cols.data.count(MARKER) != cols.count or len(cols.offsets) != 4 * (cols.count + 1):
            raise BenchError(f"not the payloads of {cols.count} messages")


def _server_frame(data: memoryview, at: int) -> tuple[int, int] | None:
    """Start and end of the payload of the frame at ``at``; None while it is incomplete."""
    if len(data) - at < 2:
        return None
    length, start = data[at + 1], at + 2
    if length >= _SHORT:
        start += 2 if length == _SHORT else 8
        if len(data) < start:
            return None
        length = int.from_bytes(data[at + 2 : start], "big")
    return (start, start + length) if len(data) >= start + length else None


@dataclass(frozen=True, slots=True)
class SocketPushes:
    """One socket that is pushed ``messages`` of a stream, in columns with ``cols``."""

    stream: str
    messages: int
    form: str
    cols: bool = False
    window: int = 20_000

    def __call__(self) -> Sequence[Script]:
        """The script of the socket."""
        kind = SocketPushedColumns if self.cols else SocketPushed
        sub = {"stream": self.stream, "ordered": True, "cols": self.cols}
        return [kind(self.form, sub, self.messages, self.window)]
