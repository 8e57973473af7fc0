"""NDJSON batches: read as a stream, published in pieces, and acknowledged piece by piece."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_api.publishing.candidates import Admitted, admitted
from contrail_api.publishing.results import Result, all_stored, encode_lines, results_of
from contrail_api.publishing.text_items import text_parts
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Response, StreamResponse
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.item_steps import Part, is_plain, json_item
from contrail_edge.inputs.json_body import decode_json
from contrail_edge.inputs.json_steps import NESTING_MAX, nesting_in_steps
from contrail_edge.inputs.message_items import (
    Candidate,
    MessageItem,
    candidate,
    check_count,
    payload_of,
)
from contrail_edge.inputs.negotiation import NDJSON_TYPE
from contrail_link.contract import StorageLink
from contrail_link.publishing import publish

PIECE_LINES_MAX: Final = 2_000
PIECE_BYTES_MAX: Final = 256 * 1024
"""Bytes of a piece; about the size of one log entry."""
_SLICE_BYTES: Final = 64 << 10
"""Bytes that are divided into lines in one step, at worst into one line per byte."""
_ITEM_DEPTH: Final = 1
"""Levels of nesting around the value of ``json`` in a line."""
_decoder: Final = msgspec.json.Decoder(MessageItem)


class Lines:
    """Divides a body, which may arrive in any chunks, into lines; drops blank lines."""

    def __init__(self) -> None:
        # Parts of the line that is not complete yet.
        self._parts: list[bytes] = []
        # Complete lines that were not taken, and their bytes.
        self._ready: list[bytes] = []
        self._ready_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Add a chunk of the body."""
        end = chunk.rfind(b"\n")
        if end < 0:
            self._parts.append(chunk)
            return
        complete = b"".join([*self._parts, chunk[:end]])
        self._parts = [chunk[end + 1 :]]
        lines = [line for line in complete.split(b"\n") if line.strip()]
        self._ready += lines
        self._ready_bytes += sum(map(len, lines))

    def finish(self) -> None:
        """Add the last line, which may have no line end."""
        self.feed(b"\n")

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def fill_a_piece(self) -> bool:
        """Return True if there are enough lines for a piece."""
        return len(self._ready) >= PIECE_LINES_MAX or self._ready_bytes >= PIECE_BYTES_MAX

    def take(self) -> list[bytes]:
        """Remove and return the next lines, at most one piece of them."""
        count, size = 0, 0
        for line in self._ready[:PIECE_LINES_MAX]:
            count += 1
            size += len(line)
            if size >= PIECE_BYTES_MAX:
                break
        taken, self._ready = self._ready[:count], self._ready[count:]
        self._ready_bytes -= size
        return taken


@dataclass(slots=True)
class Piece:
    """The outcomes of messages that were published together; ``last``: none follow.

    ``durability`` is that of their acks, or "" if they have none.
    """

    results: list[Result]
    durability: str
    last: bool


class NdjsonBatch:
    """Publishes the lines of a body.

    A body with a declared length is read completely, and refused as a whole if it has too many
    lines. A chunked body is stored while it arrives: if it exceeds a limit, the messages before it
    stay stored, and the last result has the error.
    """

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link
        self._payload_bytes_max = settings.payload_bytes_max
        self._body_bytes_max = settings.body_bytes_max

    def whole(self, body: bytes) -> Steps[Admitted]:
        """Return the messages of a complete body."""
        lines = Lines()
        yield from _feed_whole(lines, body)
        taken = []
        while lines:
            taken += lines.take()
        return (yield from self._admitted(taken, 0))

    async def publish_all(self, request: Request, stream: str) -> Piece:
        """Store every line, and return all results as one piece."""
        async with aclosing(self._pieces(request, stream, eager=False)) as pieces:
            total = await anext(pieces)
            async for piece in pieces:
                total.results += piece.results
        return total

    async def publish_streaming(self, request: Request, stream: str) -> Response | StreamResponse:
        """Store every line, and answer each with a line as soon as it is durable.

        If everything is stored before the answer begins, the status says so. Otherwise it is 200,
        and each line has its own outcome.
        """
        pieces = self._pieces(request, stream, eager=True)
        first = await anext(pieces)
        headers = [(b"durability", first.durability.encode())]
        if first.last:
            body = encode_lines(first.results)
            status = 201 if all_stored(first.results) else 207
            return Response(status, body, NDJSON_TYPE.encode(), headers)
        return StreamResponse(200, _encoded(first, pieces), NDJSON_TYPE.encode(), headers)

    async def _pieces(
        self, request: Request, stream: str, *, eager: bool
    ) -> AsyncGenerator[Piece, None]:
        lines = Lines()
        position = 0
        begun = False
        try:
            async for complete in self._arrivals(request, lines):
                check_count(position + len(lines))
                # A streaming client gets its acks as soon as possible. Otherwise full pieces cost
                # less, and an empty body still has an answer, from one empty piece.
                while lines.fill_a_piece or (lines and eager) or complete:
                    taken = lines.take()
                    piece = await self._publish_piece(stream, taken, position)
                    piece.last = complete and not lines
                    position += len(taken)
                    begun = True
                    request.consumed(sum(map(len, taken)))
                    yield piece
                    if piece.last:
                        return
        except ApiError as error:
            if not begun:
                raise
            # A part is stored, so the error cannot be the status of the whole request.
            yield Piece([error], "", last=True)

    async def _arrivals(self, request: Request, lines: Lines) -> AsyncGenerator[bool, None]:
        """Feed ``lines`` from the body; yield True if the body is complete."""
        # The length is known, so everything can be checked before anything is stored.
        if b"content-length" in request.headers:
            await in_turns(_feed_whole(lines, await request.body(self._body_bytes_max)))
        else:
            async with aclosing(request.chunks(self._body_bytes_max)) as chunks:
                async for chunk in chunks:
                    lines.feed(chunk)
                    if request.body_pending:
                        yield False
            lines.finish()
        yield True

    async def _publish_piece(self, stream: str, taken: list[bytes], position: int) -> Piece:
        """Publish lines, of which the first is line ``position`` of the body."""
        asked = await in_turns(self._admitted(taken, position))
        try:
            ack = await publish(self._link, stream, asked.batch)
        except ApiError as error:
            if position == 0:
                raise
            # Earlier pieces are stored and keep their acks, so each line of this one fails.
            return Piece([error for _ in taken], "", last=False)
        return Piece(results_of(asked.refused, ack.results), ack.durability, last=False)

    def _admitted(self, lines: list[bytes], position: int) -> Steps[Admitted]:
        """Return the messages of lines, of which the first is line ``position`` of the body."""
        batch = yield from text_parts(lines, self._payload_bytes_max)
        if batch is not None:
            return Admitted(batch, {})
        found: list[Candidate] = []
        for at, line in enumerate(lines, position):
            found.append((yield from self._candidate(line, at)))
            yield
        return (yield from admitted(found))

    def _candidate(self, line: bytes, position: int) -> Steps[Candidate]:
        try:
            if is_plain(line):
                item = decode_json(_decoder, line)
                part: Part = item, payload_of(item, "", NESTING_MAX - _ITEM_DEPTH)
            else:
                yield from nesting_in_steps(line)
                part = yield from json_item(_decoder, line, "", self._payload_bytes_max)
        except ApiError as error:
            if position == 0 and error.spec is errors.MALFORMED_BODY:
                raise  # the body is not NDJSON at all
            return error
        if isinstance(part, ApiError):
            return part
        return candidate(*part, self._payload_bytes_max, None)


def _feed_whole(lines: Lines, body: bytes) -> Steps[None]:
    """Feed a complete body; stop early if it has too many lines."""
    for start in range(0, len(body), _SLICE_BYTES):
        if start:
            yield
        lines.feed(body[start : start + _SLICE_BYTES])
        check_count(len(lines))
    lines.finish()
    check_count(len(lines))


async def _encoded(first: Piece, pieces: AsyncGenerator[Piece, None]) -> AsyncIterator[bytes]:
    async with aclosing(pieces):
        yield encode_lines(first.results)
        async for piece in pieces:
            yield encode_lines(piece.results)
