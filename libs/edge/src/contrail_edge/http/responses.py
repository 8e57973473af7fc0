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
    """A complete answer. It has no body if ``content_type`` is None."""

    status: int
    body: bytes = b""
    content_type: bytes | None = None
    headers: list[Header] = []
    template: bytes = b""
    """What :func:`header_template` has made of content type and headers, or nothing."""

    def wire_headers(self) -> list[Header]:
        """All headers, those of the body first."""
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


def header_template(content_type: bytes, headers: Iterable[Header]) -> bytes:
    """Return the headers of answers that differ only by their bodies, as they are sent.

    The length of the body is ``%d``. No header may have a line break.
    """
    fixed = [(name, value.replace(b"%", b"%%")) for name, value in headers]
    kind = content_type.replace(b"%", b"%%")
    lines = header_lines([(b"content-type", kind), (b"content-length", b"%d"), *fixed])
    assert lines is not None
    return lines


def json_response(status: int, value: Any, headers: list[Header] | None = None) -> Response:
    """Return a JSON answer with ``value``, which msgspec encodes."""
    return Response(status, _encoder.encode(value), JSON, headers or [])


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
