"""Answers: a complete body, or a stream of chunks."""

from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from contrail_edge.http.steps import Steps
from contrail_link.contract.read import Chunk, Pieces

_T = TypeVar("_T")

Header = tuple[bytes, bytes]

JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Response:
    """A complete answer. It has no body if ``content_type`` is None."""

    status: int
    body: bytes = b""
    content_type: bytes | None = None
    headers: list[Header] = field(default_factory=list)

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


def json_response(status: int, value: Any, headers: list[Header] | None = None) -> Response:
    """Return a JSON answer with ``value``, which msgspec encodes."""
    return Response(status, _encoder.encode(value), JSON, headers or [])


def encoded(values: Iterable[_T], shown: Callable[[_T], Any]) -> Steps[list[Any]]:
    """The steps that show and encode each value: the items of a page, which may take long."""
    items: list[Any] = []
    for value in values:
        items.append(msgspec.Raw(_encoder.encode(shown(value))))
        yield
    return items


def no_content(headers: list[Header] | None = None) -> Response:
    """Return an answer with status 204."""
    return Response(204, headers=headers or [])
