"""A stream's messages as server-sent events, without an end (the HTML standard, section 9.2).

The id of an event is the message's sequence; a client that comes back names the last one it saw
and goes on behind it.
"""

from collections.abc import AsyncGenerator
from typing import Final

import msgspec

from contrail_common.edge.messages import messages_json
from contrail_common.edge.negotiation import EVENTS_TYPE
from contrail_common.edge.problems import invalid_field
from contrail_common.edge.requests import Request
from contrail_common.edge.responses import Answer, Header, StreamResponse
from contrail_common.errors import ApiError
from contrail_common.link import RangeRequest, RangeResult, StorageLink
from contrail_common.timeunits import INT64_MAX

HEARTBEAT_NS: Final = 15_000_000_000
"""How long nothing is said at most: proxies end connections that are silent for a minute or so."""
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


class Gone(msgspec.Struct):
    """Data of the last event, ``gone``: why nothing follows."""

    reason: str


class Tail:
    """Answers range reads that accept ``text/event-stream``."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    async def open(self, request: Request, asked: RangeRequest, *, base64: bool) -> Answer:
        """Begin the events of what ``asked`` selects; ``Last-Event-ID`` wins over its start."""
        asked = msgspec.structs.replace(asked, limit=PAGE_MESSAGES, max_bytes=PAGE_BYTES, wait_ns=0)
        seen = _last_event_id(request.headers.get(b"last-event-id"))
        if seen is not None:
            asked = msgspec.structs.replace(asked, from_seq=seen + 1, start_time_ns=0)
        # Read once before the answer begins: what is refused is refused with a status.
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
                        b"id: %d\ndata: %b\n\n" % (message.seq, _encoder.encode(message))
                        for message in messages
                    )
                elif asked.wait_ns:
                    yield _HEARTBEAT
                asked = msgspec.structs.replace(
                    asked, from_seq=found.next_seq, start_time_ns=0, wait_ns=HEARTBEAT_NS
                )
                found = await request.while_wanted(self._link.read_range(asked))
        except ApiError as error:
            # The client reconnects by itself, and then learns from the status what is wrong.
            yield b"event: gone\ndata: %b\n\n" % _encoder.encode(Gone(error.spec.name))


def _last_event_id(header: bytes | None) -> int | None:
    if not header:
        return None
    text = header.decode("latin-1")
    if not (text.isascii() and text.isdigit() and len(text) <= _SEQ_DIGITS_MAX):
        raise invalid_field("Last-Event-ID", "must be the sequence of a message")
    seq = int(text)
    if seq >= INT64_MAX:
        raise invalid_field("Last-Event-ID", "must be below 2^63 - 1")
    return seq
