"""Answers: a complete body, or a stream of chunks."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from contrail_edge.http.steps import Steps
from contrail_link.contract.read import Chunk, Pieces

_T = TypeVar("_T")

Header = tuple[bytes, bytes]
Encoder = msgspec.json.Encoder | msgspec.msgpack.Encoder

JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()
_LINE: Final = b"%b: %b\r\n"


class Response(msgspec.Struct):
    """A complete answer. It has no body if it has neither ``content_type`` nor ``lines``."""

    status: int
    body: bytes = b""
    content_type: bytes | None = None
    headers: list[Header] = []
    lines: bytes = b""
    """Headers as they are sent, those of the body first, in the place of ``content_type``."""

    def wire_headers(self) -> list[Header]:
        """All headers, those of the body first."""
        if self.lines:
            return [*map(_pair, self.lines[:-2].split(b"\r\n")), *self.headers]
        if self.content_type is None:
            return self.headers
        return [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.headers,
        ]


@dataclass(slots=True)
class StreamResponse:
    """An answer whose body is sent while it is produced. No chunk may be empty.

    If ``chunks`` raises, the body ends without its end mark, so that the reader notices.
    """

    status: int
    chunks: AsyncIterator[Chunk | Pieces] | AsyncIterator[bytes]
    content_type: bytes
    headers: list[Header] = field(default_factory=list)

    def wire_headers(self) -> list[Header]:
        """All headers, those of the body first."""
        return [(b"content-type", self.content_type), *self.headers]


Answer = Response | StreamResponse


def header_lines(headers: Sequence[Header]) -> bytes | None:
    """Return ``headers`` as they are sent, or None if one of them has a line break."""
    lines = b"".join(map(_LINE.__mod__, headers))
    # A line break in a value, for example from a stored header, would forge headers or an answer.
    return lines if lines.count(b"\n") == lines.count(b"\r") == len(headers) else None


def _pair(line: bytes) -> Header:
    name, _, value = line.partition(b": ")
    return name, value


def header_template(content_type: bytes, headers: Iterable[Header] = ()) -> bytes:
    """Return what :attr:`Response.lines` of similar answers are made of with ``%``.

    First comes the length of the body, then what ``headers`` have in the place of values, such as
    ``%b``. No value may have a line break.
    """
    lines = header_lines([(b"content-type", content_type), (b"content-length", b"%d"), *headers])
    assert lines is not None
    return lines


_JSON_LINES: Final = header_template(JSON)


def json_response(status: int, value: Any, headers: list[Header] | None = None) -> Response:
    """Return a JSON answer with ``value``, which msgspec encodes."""
    body = _encoder.encode(value)
    if headers:
        return Response(status, body, JSON, headers)
    return Response(status, body, lines=_JSON_LINES % len(body))


def encoded(
    values: Iterable[_T], shown: Callable[[_T], Any], encoder: Encoder = _encoder
) -> Steps[list[Any]]:
    """The steps that show and encode each value: the items of a page, which may take long."""
    items: list[Any] = []
    for value in values:
        items.append(msgspec.Raw(encoder.encode(shown(value))))
        yield
    return items


def no_content(headers: list[Header] | None = None) -> Response:
    """Return an answer with status 204."""
    return Response(204, headers=headers or [])
