"""HTTP by hand: bytes out, bytes in, over one socket."""

import contextlib
import json
import socket
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

TIMEOUT_S = 60.0


@dataclass
class RawAnswer:
    """An answer as it came, up to the end of the connection or of its declared body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class RawConnection:
    """One TCP connection to a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host = f"{parts.hostname}:{parts.port}"
        self._socket = socket.create_connection((parts.hostname, parts.port), TIMEOUT_S)
        self._read = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def hang_up(self) -> None:
        """End both directions at once, also under a thread that still sends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, data: bytes) -> None:
        """Send ``data``; a server that does not want it any more is no failure."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def request(self, method: str, target: str, *lines: str, body: bytes = b"") -> None:
        """Send a request with a Host header and ``lines``."""
        head = "\r\n".join([f"{method} {target} HTTP/1.1", f"Host: {self.host}", *lines, "", ""])
        self.send(head.encode("latin-1") + body)

    def answer(self) -> RawAnswer | None:
        """The next answer; None when the connection ends without one."""
        while b"\r\n\r\n" not in self._read:
            if not self._receive():
                return None
        head, _, self._read = self._read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "0"))
        while len(self._read) < length and self._receive():
            pass
        body, self._read = self._read[:length], self._read[length:]
        return RawAnswer(int(first.split(" ")[1]), headers, body)

    def ended(self) -> bool:
        """Whether the server has closed the connection (waits for it)."""
        return not self._receive()

    def _receive(self) -> bool:
        try:
            data = self._socket.recv(65_536)
        except ConnectionResetError:
            return False
        self._read += data
        return bool(data)
