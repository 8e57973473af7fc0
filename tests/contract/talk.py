"""A socket as a client has it: frames as dictionaries, one after the other."""

import base64
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Subprotocol

TIMEOUT_S = 60.0
JSON = "contrail.v1.json"
MSGPACK = "contrail.v1.msgpack"
PATH = "/v1/ws"

Frame = dict[str, Any]


def socket_url(url: str) -> str:
    """Where the server's sockets are."""
    return url.replace("http", "ws", 1) + PATH


class Talk:
    """One connection in one of the sub-protocols; ``info`` is read when it opens."""

    def __init__(self, url: str, form: str = JSON, **options: Any) -> None:
        self.packed = form == MSGPACK
        options.setdefault("compression", None)
        subprotocols = [Subprotocol(form)]
        self._opening = connect(
            socket_url(url), subprotocols=subprotocols, max_size=None, **options
        )
        self._last_id = 0
        self.socket: ClientConnection
        self.info: Frame = {}

    def __enter__(self) -> Self:
        self.socket = self._opening.__enter__()
        self.info = self.next("info")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opening.__exit__(kind, error, trace)

    def send(self, *frames: Frame) -> None:
        """Send one frame, or several as an array."""
        value = frames[0] if len(frames) == 1 else list(frames)
        self.socket.send(msgspec.msgpack.encode(value) if self.packed else json.dumps(value))

    def ask(self, op: str, **fields: Any) -> Frame:
        """Send a frame with an id of its own; answers the next frame, which must have that id."""
        self._last_id += 1
        self.send({"op": op, "id": self._last_id, **fields})
        answer = self.next()
        assert answer.get("id") == self._last_id, answer
        return answer

    def done(self, op: str, **fields: Any) -> Frame:
        """As :meth:`ask`, for what must be answered with ``ok``."""
        answer = self.ask(op, **fields)
        assert answer["op"] == "ok", answer
        return answer

    def refused(self, op: str, **fields: Any) -> Frame:
        """As :meth:`ask`, for what must be refused; answers the problem."""
        answer = self.ask(op, **fields)
        assert answer["op"] == "error", answer
        problem: Frame = answer["problem"]
        assert problem["type"] == f"urn:contrail:error:{problem['name']}"
        return problem

    def next(self, op: str | None = None, timeout_s: float = TIMEOUT_S) -> Frame:
        """The next frame, of the kind ``op`` if it is given."""
        message = self.socket.recv(timeout=timeout_s)
        frame: Frame
        if isinstance(message, bytes):
            assert self.packed
            frame = msgspec.msgpack.decode(message)
        else:
            assert not self.packed
            frame = json.loads(message)
        assert op is None or frame["op"] == op, frame
        return frame

    def messages(self, count: int) -> list[Frame]:
        """The next ``count`` messages, and exactly as many; heartbeats are passed over."""
        found: list[Frame] = []
        while len(found) < count:
            frame = self.next()
            if frame["op"] != "hb":
                assert frame["op"] == "msgs", frame
                found += frame["messages"]
        assert len(found) == count
        return found

    def nothing_more(self) -> None:
        """What was sent so far is all there is: a ping is answered next."""
        answer = self.ask("ping")
        assert answer["op"] == "pong", answer

    def closed(self) -> int:
        """The close code; frames before it are dropped."""
        with pytest.raises(ConnectionClosed) as ended:
            self._drop_all()
        assert ended.value.rcvd is not None, "the connection ended without a close frame"
        return ended.value.rcvd.code

    def _drop_all(self) -> None:
        while True:
            self.socket.recv(timeout=TIMEOUT_S)


OP_CONT, OP_TEXT, OP_BINARY, OP_CLOSE, OP_PING, OP_PONG = 0, 1, 2, 8, 9, 10


def frame_bytes(
    opcode: int,
    payload: bytes,
    *,
    final: bool = True,
    masked: bool = True,
    reserved: int = 0,
    length: int | None = None,
) -> bytes:
    """A client's frame by hand; ``length`` is what its head claims."""
    claimed = len(payload) if length is None else length
    head = bytes([(0x80 if final else 0) | reserved << 4 | opcode])
    mask_bit = 0x80 if masked else 0
    if claimed < 126:
        head += bytes([mask_bit | claimed])
    elif claimed < 1 << 16:
        head += struct.pack("!BH", mask_bit | 126, claimed)
    else:
        head += struct.pack("!BQ", mask_bit | 127, claimed)
    if not masked:
        return head + payload
    key = os.urandom(4)
    repeated = (key * (len(payload) // 4 + 1))[: len(payload)]
    xored = int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")
    return head + key + xored.to_bytes(len(payload), "big")


class RawSocket:
    """A socket by hand: bytes out, frames in. With ``held`` the head lacks its last byte."""

    def __init__(
        self,
        url: str,
        *lines: str,
        form: str | None = JSON,
        path: str = PATH,
        held: bool = False,
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.tcp = socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)
        self._read = b""
        usual = {
            "Host": f"{parts.hostname}:{parts.port}",
            "Connection": "keep-alive, Upgrade",  # as Firefox sends it
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        }
        if form is not None:
            usual["Sec-WebSocket-Protocol"] = form
        for line in lines:
            name, _, value = line.partition(": ")
            usual.pop(name, None)
            if value:
                usual[name] = value
        head = [f"GET {path} HTTP/1.1", *(f"{name}: {value}" for name, value in usual.items())]
        request = "\r\n".join([*head, "", ""]).encode()
        self.send(request[:-1] if held else request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tcp.close()

    def send(self, *parts: bytes) -> None:
        """Send bytes."""
        self.tcp.sendall(b"".join(parts))

    def opened(self) -> Self:
        """The handshake was accepted and ``info`` came."""
        status, headers = self.head()
        assert status == 101, headers
        assert b'"info"' in self.frame()[1]
        return self

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer to the handshake."""
        while b"\r\n\r\n" not in self._read:
            self._receive()
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(first.split()[1]), headers

    def problem(self) -> tuple[int, dict[str, Any], dict[str, str]]:
        """Status, problem and headers of a refused handshake."""
        status, headers = self.head()
        while len(self._read) < int(headers["content-length"]):
            self._receive()
        return status, json.loads(self._read), headers

    def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and payload."""
        opcode = self._take(1)[0]
        length = self._take(1)[0]
        if length == 126:
            length = int.from_bytes(self._take(2), "big")
        elif length == 127:
            length = int.from_bytes(self._take(8), "big")
        return opcode & 0x0F, self._take(length)

    def close_code(self) -> int:
        """The code of the close frame that comes; other frames are dropped."""
        while True:
            opcode, payload = self.frame()
            if opcode == OP_CLOSE:
                return int.from_bytes(payload[:2], "big")

    def ended(self) -> bool:
        """Whether the server has ended the connection (waits for it)."""
        try:
            while self.tcp.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def _take(self, count: int) -> bytes:
        while len(self._read) < count:
            self._receive()
        taken, self._read = self._read[:count], self._read[count:]
        return taken

    def _receive(self) -> None:
        data = self.tcp.recv(1 << 20)
        assert data, "the connection ended"
        self._read += data


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again until ``condition`` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.02)


def seqs(messages: Iterable[Frame]) -> list[int]:
    """The stream sequences of messages."""
    return [message["seq"] for message in messages]
