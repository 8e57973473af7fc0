"""Recorded requests sent again to two servers, whose answers must be alike.

One server answers the short ways (the fast lane, direct answers, known heads), the other one
through the declared routes. Each request goes to both before the next one does. What the recorded
answers gave and later requests use (tokens, cursors, versions, ids, times) is replaced in these by
what the same place of the server's own answer has.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final
from urllib.parse import quote

import httpcore
import httpx
import msgspec

from tests.contract.answers import TIME, VARYING, Answer, difference, reduced
from tests.support.servers import PLAIN, Process, ServerProcess

Headers = list[tuple[bytes, bytes]]

DIRECT_METHODS: Final = ("GET", "POST")
DIRECT_BYTES_MAX: Final = 1 << 19
"""Only requests with these methods and bodies may be answered directly, and their heads known."""
TRIES: Final = 3
"""A difference must be there each time: one server may be later than the other with what it does
after an answer."""
_SHORTEST: Final = "1ms"
_BOUND_CHARACTERS_MIN: Final = 12
"""Shorter values are bound only as ETags: they might be found where they mean something else."""
_CHOSEN: Final = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
"""Names and ids that the server chooses."""
_WORD: Final = re.compile(r'"\d+"|[\w-][\w.-]{10,}[\w-]')
_VERSION: Final = re.compile(r"the version is (\d+)")
_POLL: Final = re.compile(r"([?&]wait=)\d+m?s(?=&|$)")
_PULL: Final = re.compile(r"/consumers/[^/]+/next(\?|$)")
_CONSUMERS: Final = re.compile(r"/consumers(\?|$)")
_ARCHIVE: Final = re.compile(r"/restore(\?|$)")
"""Where a body is the recorded snapshot, which has checksums."""
_OF_THE_BODY: Final = (b"content-length", b"transfer-encoding")
_EVENTS: Final = "text/event-stream"


@dataclass
class Exchange:
    """A request that a test has sent, and the answer as far as the test has read it."""

    method: str
    target: str
    headers: Headers
    pieces: list[bytes] = field(default_factory=list)
    chunked: bool = False
    status: int = 0
    """0 if there was no answer."""
    answer_headers: httpx.Headers = field(default_factory=httpx.Headers)
    answer: bytearray = field(default_factory=bytearray)

    def __str__(self) -> str:
        return f"{self.method} {self.target[:80]} ({len(b''.join(self.pieces))} bytes)"

    @property
    def is_left_out(self) -> bool:
        """Nobody waits for a publish without ack: it may be stored later than what follows."""
        return "ack=none" in self.target

    @property
    def comes_twice(self) -> bool:
        """Whether to send the request again, for which the server may know its head by then.

        A consumer with a name that the server chooses is created once: nobody would delete a
        second one, which would have a random place in lists.
        """
        if self.method not in DIRECT_METHODS or sum(map(len, self.pieces)) > DIRECT_BYTES_MAX:
            return False
        creates = self.status == 201 and _CONSUMERS.search(self.target)
        return not (creates and _CHOSEN.fullmatch(json.loads(self.answer)["name"]))


class Recorder(httpx.HTTPTransport):
    """Sends requests, and keeps all of them in the order in which they were begun."""

    def __init__(self) -> None:
        super().__init__(verify=PLAIN)
        self.exchanges: list[Exchange] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        kept = [pair for pair in request.headers.raw if pair[0].lower() not in _OF_THE_BODY]
        exchange = Exchange(request.method, request.url.raw_path.decode("latin-1"), kept)
        exchange.chunked = "transfer-encoding" in request.headers
        self.exchanges.append(exchange)
        assert isinstance(request.stream, httpx.SyncByteStream)
        request.stream = _Kept(request.stream, exchange.pieces)
        answer = super().handle_request(request)
        exchange.status, exchange.answer_headers = answer.status_code, answer.headers
        assert isinstance(answer.stream, httpx.SyncByteStream)
        answer.stream = _Kept(answer.stream, exchange.answer)
        return answer


class _Kept(httpx.SyncByteStream):
    """A stream that keeps what was read of it."""

    def __init__(self, stream: httpx.SyncByteStream, kept: list[bytes] | bytearray) -> None:
        self._stream, self._kept = stream, kept

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._stream:
            if isinstance(self._kept, list):
                self._kept.append(piece)
            else:
                self._kept += piece
            yield piece

    def close(self) -> None:
        self._stream.close()


class InPieces(httpx.HTTPTransport):
    """Sends the head of a request, and then its body."""

    def __init__(self) -> None:
        super().__init__(verify=PLAIN)


class Whole(httpx.HTTPTransport):
    """Sends each request in one piece, as the short way wants it."""

    def __init__(self) -> None:
        super().__init__(verify=PLAIN)
        self._pool = httpcore.ConnectionPool(max_connections=1, network_backend=_WholeBackend())


class _WholeBackend(httpcore.SyncBackend):
    def connect_tcp(self, *place: Any, **options: Any) -> httpcore.NetworkStream:
        return _WholeStream(super().connect_tcp(*place, **options))


class _WholeStream(httpcore.NetworkStream):
    """Holds what is written until an answer is read."""

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream, self._held = stream, bytearray()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._held += buffer

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        held, self._held = bytes(self._held), bytearray()
        # A server may refuse a body that it has not read to the end.
        with contextlib.suppress(httpcore.WriteError):
            self._stream.write(held, timeout)
        return self._stream.read(max_bytes, timeout)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def without_wait(exchange: Exchange) -> Exchange:
    """A request that waits for new messages as briefly as it may. One in error stays as it is."""
    if exchange.status not in (200, 204):
        return exchange
    body = b"".join(exchange.pieces)
    if _PULL.search(exchange.target) and body:
        asked = json.loads(body)
        if not asked.get("no_wait"):
            asked.pop("idle_heartbeat", None)
            body = json.dumps({**asked, "expires": _SHORTEST}).encode()
            return replace(exchange, pieces=[body])
    if exchange.target.partition("?")[0].endswith("/messages"):
        return replace(exchange, target=_POLL.sub(rf"\g<1>{_SHORTEST}", exchange.target))
    return exchange


class _Player:
    """Sends recorded requests to one server, with the values that its own answers gave."""

    def __init__(self, client: httpx.Client, recorded_origin: str) -> None:
        self._client = client
        self._origins = recorded_origin, client.base_url.netloc.decode()
        # The server's own value for each recorded one, and the other way round.
        self._own = dict([self._origins])
        self._own_versions: dict[str, str] = {}
        self._recorded: dict[str, str] = {}

    def play(self, exchange: Exchange) -> Answer:
        """Send a request; its answer is reduced, and its values are bound."""
        request, content = self._request(without_wait(exchange)), b""
        try:
            answer = self._client.send(request, stream=True)
        except httpx.TransportError:
            return Answer(str(exchange), 0, (), "no answer")
        try:
            if answer.headers.get("content-type") != _EVENTS:
                content = answer.read()
        except httpx.TransportError:
            return Answer(str(exchange), answer.status_code, (), "an answer cut short")
        finally:
            answer.close()
        self._bind(exchange, answer, content)
        return reduced(str(exchange), answer, content, self._named)

    def _request(self, exchange: Exchange) -> httpx.Request:
        body: Any = exchange.pieces
        if not _ARCHIVE.search(exchange.target):
            body = [self._filled(piece) for piece in body]
        if not exchange.chunked:
            body = b"".join(body) if body else None
        versions = self._own_versions
        headers = [(name, self._filled(value, versions)) for name, value in exchange.headers]
        request = self._client.build_request(
            exchange.method, "/", content=iter(body) if isinstance(body, list) else body
        )
        of_the_body = [pair for pair in request.headers.raw if pair[0].lower() in _OF_THE_BODY]
        request.headers = httpx.Headers([*headers, *of_the_body])
        # httpx would repair what is meant to be broken.
        request.url = request.url.copy_with(
            raw_path=self._filled(exchange.target.encode("latin-1"))
        )
        return request

    def _filled(self, data: bytes, more: Mapping[str, str] | None = None) -> bytes:
        for recorded, own in {**self._own, **(more or {})}.items():
            data = data.replace(recorded.encode(), own.encode())
        return data

    def _named(self, text: str) -> str:
        text = text.replace(*reversed(self._origins))
        text = _WORD.sub(lambda found: self._recorded.get(found[0], found[0]), text)
        return _VERSION.sub(self._named_version, text)

    def _named_version(self, found: re.Match[str]) -> str:
        known = self._recorded.get(f'"{found[1]}"')
        # A version is an index of the log, which also has what the server does by itself.
        return f"the version is {known or 'another'}"

    def _bind(self, exchange: Exchange, answer: httpx.Response, content: bytes) -> None:
        for name, known in (("etag", self._own_versions), ("contrail-cursor", self._own)):
            if name in exchange.answer_headers and name in answer.headers:
                recorded, own = exchange.answer_headers[name], answer.headers[name]
                known.setdefault(recorded, own)
                self._recorded.setdefault(own, recorded)
        before = _values(exchange.answer_headers, bytes(exchange.answer))
        for recorded, own in _pairs(before, _values(answer.headers, content)):
            self._own.setdefault(recorded, own)
            self._own.setdefault(quote(recorded, safe=""), quote(own, safe=""))
            self._recorded.setdefault(own, recorded)


def _values(headers: httpx.Headers, content: bytes) -> Any:
    kind = headers.get("content-type", "")
    with contextlib.suppress(ValueError):
        if kind.endswith("json"):
            return json.loads(content)
        if kind.startswith("application/vnd.msgpack"):
            return msgspec.msgpack.decode(content)
    return None


def _pairs(recorded: Any, own: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values at the same places of two answers that each server has chosen for itself."""
    if isinstance(recorded, Mapping) and isinstance(own, Mapping):
        for key in recorded.keys() & own.keys():
            yield from _pairs(recorded[key], own[key], key)
    elif isinstance(recorded, list) and isinstance(own, list):
        for one, other in zip(recorded, own, strict=False):
            yield from _pairs(one, other, name)
    elif isinstance(recorded, str) and isinstance(own, str) and _is_chosen(recorded, own, name):
        yield recorded, own


def _is_chosen(recorded: str, own: str, name: str) -> bool:
    if len(recorded) < _BOUND_CHARACTERS_MIN:
        return False
    alike = (form.fullmatch(recorded) and form.fullmatch(own) for form in (TIME, _CHOSEN))
    return name in VARYING or any(alike)


class Twin(ServerProcess):
    """``contrail serve`` with slow time: see ``twin.py``."""

    module = "tests.contract.twin"


class Twins:
    """Two servers that get the same requests, and are empty before each replay."""

    def __init__(self, fast: Process, declared: Process) -> None:
        self.fast, self.declared = fast, declared

    def differences(self, exchanges: Sequence[Exchange], origin: str) -> list[str]:
        """What differs between the answers to ``exchanges``, which a server at ``origin`` had.

        They are sent in pieces, and then whole and twice, so that the server knows their heads.
        """
        once = [one for one in exchanges if not one.is_left_out]
        twice = [again for one in once for again in [one] * (1 + one.comes_twice)]
        return self._that_stays(once, origin, InPieces) or self._that_stays(twice, origin, Whole)

    def _that_stays(
        self,
        exchanges: Sequence[Exchange],
        origin: str,
        transport: Callable[[], httpx.HTTPTransport],
    ) -> list[str]:
        found = self._replay(exchanges, origin, transport)
        for _ in range(1, TRIES):
            if found:
                again = self._replay(exchanges, origin, transport)
                found = {at: text for at, text in again.items() if at in found}
        return list(found.values())

    def _replay(
        self,
        exchanges: Sequence[Exchange],
        origin: str,
        transport: Callable[[], httpx.HTTPTransport],
    ) -> dict[int, str]:
        """What differs, by the number of the exchange."""
        with ExitStack() as stack:
            clients = [
                stack.enter_context(server.client(transport=transport()))
                for server in (self.fast, self.declared)
            ]
            players = [_Player(client, origin) for client in clients]
            answers = [[player.play(each) for player in players] for each in exchanges]
            for client in clients:
                for item in client.get("/v1/streams?limit=1000").json()["items"]:
                    client.delete(f"/v1/streams/{item['config']['name']}").raise_for_status()
        return {at: text for at, pair in enumerate(answers) if (text := difference(*pair))}
