"""The messages of a stream as endless server-sent events (the HTML standard, section 9.2).

The id of an event is the message's sequence, or the cursor after the message if several shards are
read together. A client that reconnects sends the last id that it received, and continues after it.
"""

from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from contrail_common.cursors import after_each, read_cursor
from contrail_common.errors import ApiError
from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Header, StreamResponse
from contrail_edge.inputs.messages import messages_json
from contrail_edge.inputs.negotiation import EVENTS_TYPE
from contrail_link.contract import StorageLink
from contrail_link.contract.read import RangeRequest, RangeResult

HEARTBEAT_NS: Final = 15_000_000_000
"""Maximum time without bytes. Proxies close connections that are silent for about a minute."""
# Messages and payload bytes that are read at once.
PAGE_MESSAGES: Final = 256
PAGE_BYTES: Final = 1 << 20
_SEQ_DIGITS_MAX: Final = 19
BEGIN: Final = b"retry: 1000\n\n"
_HEARTBEAT: Final = b": still here\n\n"
EVENT_HEADERS: Final[tuple[Header, ...]] = (
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)
_encoder: Final = msgspec.json.Encoder()


class GoneEvent(msgspec.Struct):
    """Data of the last event, ``gone``: why the events end."""

    reason: str


class Tail:
    """Answers range reads that accept ``text/event-stream``."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    async def open(self, request: Request, asked: RangeRequest, *, base64: bool) -> Answer:
        """Answer with the messages that ``asked`` selects.

        ``Last-Event-ID`` overrides its start.
        """
        asked = msgspec.structs.replace(asked, limit=PAGE_MESSAGES, max_bytes=PAGE_BYTES, wait_ns=0)
        asked = _resumed(asked, request.headers.get(b"last-event-id"))
        # Read once before the answer begins, so that errors are answered with a status.
        first = await self._link.read_range(asked)
        events = self._events(request, asked, first, base64=base64)
        return StreamResponse(200, events, EVENTS_TYPE.encode(), list(EVENT_HEADERS))

    async def _events(
        self, request: Request, asked: RangeRequest, found: RangeResult, *, base64: bool
    ) -> AsyncGenerator[bytes, None]:
        yield BEGIN
        try:
            while True:
                if found.messages:
                    messages = messages_json(asked.stream, found.messages, base64=base64)
                    yield b"".join(
                        b"id: %b\ndata: %b\n\n" % (event_id, _encoder.encode(message))
                        for event_id, message in zip(_event_ids(found), messages, strict=True)
                    )
                elif asked.wait_ns:
                    yield _HEARTBEAT
                asked = msgspec.structs.replace(
                    asked,
                    from_seq=found.next_seq,
                    cursor=found.cursor,
                    start_time_ns=0,
                    wait_ns=HEARTBEAT_NS,
                )
                found = await request.while_wanted(self._link.read_range(asked))
        except ApiError as error:
            # The client reconnects automatically, and the status of that answer tells what is
            # wrong.
            yield b"event: gone\ndata: %b\n\n" % _encoder.encode(GoneEvent(error.spec.name))


def _event_ids(found: RangeResult) -> list[bytes]:
    """Return the id of each message's event, from which a client can continue."""
    if not found.cursor:
        return [b"%d" % message.seq for message in found.messages]
    taken = [(message.shard or 0, message.seq) for message in found.messages]
    return [text.encode() for text in after_each(read_cursor(found.begin), taken)]


def _resumed(asked: RangeRequest, header: bytes | None) -> RangeRequest:
    """Return ``asked``, starting after the event in ``Last-Event-ID`` if there is one."""
    if not header:
        return asked
    text = header.decode("latin-1")
    # A cursor never looks like a number, so the id itself says how it was read.
    if not text.isdigit():
        try:
            read_cursor(text)
        except ValueError:
            raise invalid_field("Last-Event-ID", "must be the id of an event") from None
        return msgspec.structs.replace(asked, from_seq=0, cursor=text, start_time_ns=0)
    if not (text.isascii() and len(text) <= _SEQ_DIGITS_MAX):
        raise invalid_field("Last-Event-ID", "must be the id of an event")
    seq = int(text)
    if seq >= INT64_MAX:
        raise invalid_field("Last-Event-ID", "must be below 2^63 - 1")
    return msgspec.structs.replace(asked, from_seq=seq + 1, cursor="", start_time_ns=0)
