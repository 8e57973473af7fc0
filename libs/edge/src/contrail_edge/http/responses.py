"""Answers of the kit: a whole body at once, or a stream of chunks."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from contrail_link.contract.read import Chunk, Pieces

Header = tuple[bytes, bytes]

JSON: Final = b"application/json"
_encoder: Final = msgspec.json.Encoder()


@dataclass(slots=True)
class Response:
    """An answer that is complete; a ``content_type`` of None is an answer without a body."""

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
    """An answer whose body is sent as it is made; no chunk may be empty.

    When ``chunks`` raises, the body is cut without its end mark, so that the reader can tell.
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
    """``value`` (anything that msgspec encodes) as a JSON answer."""
    return Response(status, _encoder.encode(value), JSON, headers or [])


def no_content(headers: list[Header] | None = None) -> Response:
    """204: done, or nothing there."""
    return Response(204, headers=headers or [])
