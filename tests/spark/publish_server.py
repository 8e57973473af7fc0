"""A scripted server on loopback that takes batch publishes, for answers a real one rarely gives."""

import threading
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

import msgspec

MSGPACK: Final = "application/vnd.msgpack"


@dataclass(frozen=True)
class Answer:
    """An answer. Without ``announced``, the number of bytes, it is the true one."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    announced: int | None = None
    kind: str = MSGPACK


def runs(*found: dict[str, Any], status: int = 201) -> Answer:
    """The results of a batch."""
    return Answer(status, msgspec.msgpack.encode({"runs": found}))


def problem(status: int, name: str, **headers: str) -> Answer:
    """A refusal of the whole request."""
    body = msgspec.json.encode({"name": name, "detail": f"about {name}"})
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    return Answer(status, body, given, kind="application/problem+json")


class PublishServer:
    """Gives ``answers`` in turn; None closes the connection instead. Keeps what it received."""

    def __init__(self) -> None:
        self.answers: deque[Answer | None] = deque()
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.connections = 0
        self._http = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"owner": self})
        )
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        """Stop listening."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    owner: PublishServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.owner.connections += 1

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.owner.requests.append((self.path, dict(self.headers), body))
        answer = self.owner.answers.popleft()
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        announced = len(answer.body) if answer.announced is None else answer.announced
        self.send_header("Content-Length", str(announced))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(answer.body)
        self.close_connection = announced != len(answer.body)

    def log_message(self, format: str, *args: object) -> None:
        pass
