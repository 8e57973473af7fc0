"""Advisories as endless server-sent events (the HTML standard, section 9.2).

The id of an event is its position. A client that reconnects sends the last id that it received, and
continues after it if storage still has the events since. Otherwise an event ``lost`` says so.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final, Literal, cast, get_args

import msgspec

from contrail_api.reading.tail import BEGIN, EVENT_HEADERS, HEARTBEAT_NS, GoneEvent
from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import Advisory, AdvisoryAction, AdvisoryType
from contrail_common.names import name_problem
from contrail_common.timeunits import format_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, StreamResponse
from contrail_edge.inputs.negotiation import EVENTS_TYPE, acceptable
from contrail_edge.inputs.query import parse_query
from contrail_edge.inputs.schema_marks import TimeText
from contrail_edge.routing import AnswerDoc, BodyDoc, HeaderDoc, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.admin import EventsRequest, EventsResult

LISTENERS_MAX: Final = 128
TYPES: Final[tuple[AdvisoryType, ...]] = get_args(AdvisoryType)
# Pause between attempts while storage is not reachable.
_AGAIN_S: Final = 1.0
_AWAY: Final = b": the storage is away\n\n"
_STILL_HERE: Final = b"id: %b\n: still here\n\n"
_PART: Final = rb"(?:[0-9a-f]{8}:)?[0-9a-f]{8}-[0-9]{1,19}"
"""A position in the events of one node, with a sign of the node if there are several."""
_POSITION: Final = re.compile(rb"%b(?:,%b){0,31}" % (_PART, _PART))
_encoder: Final = msgspec.json.Encoder()


class EventsQuery(msgspec.Struct):
    """Parameters of a stream of events."""

    stream: Annotated[
        str, msgspec.Meta(description="Only events of this stream. It need not exist yet.")
    ] = ""
    consumer: Annotated[
        str, msgspec.Meta(description="Only events of consumers with this name.")
    ] = ""
    types: Annotated[
        str, msgspec.Meta(description="Comma-separated list of event types. Default: all.")
    ] = ""


class EventJson(msgspec.Struct, kw_only=True):
    """One event. Fields that do not apply to its type are absent.

    ``stream_seq``, ``consumer_seq`` (of the first delivery) and ``deliveries`` describe a delivery,
    ``action`` a change of a stream or consumer, ``server`` a node. ``count`` is how many events
    the listener has missed, and is absent if the number is unknown.
    """

    type: Literal[AdvisoryType, "lost"]
    """What happened; `lost` if events are missing."""
    id: str
    """Position of the event, for Last-Event-ID."""
    timestamp: TimeText
    """Time of the event."""
    stream: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the stream."""
    consumer: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the consumer."""
    action: AdvisoryAction | msgspec.UnsetType = msgspec.UNSET
    """How the stream or consumer was changed."""
    stream_seq: int | msgspec.UnsetType = msgspec.UNSET
    """Sequence of the message."""
    consumer_seq: int | msgspec.UnsetType = msgspec.UNSET
    """Sequence of the first delivery of the message."""
    deliveries: int | msgspec.UnsetType = msgspec.UNSET
    """Number of deliveries of the message."""
    reason: str | msgspec.UnsetType = msgspec.UNSET
    """Why it happened."""
    server: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the node."""
    group: int | msgspec.UnsetType = msgspec.UNSET
    """Number of the group that the node leads, or no longer leads."""
    count: int | msgspec.UnsetType = msgspec.UNSET
    """Number of events that were missed; absent if unknown."""


EXAMPLE: Final[dict[str, Any]] = {
    "type": "terminated",
    "id": "9f1c03aa-42",
    "timestamp": "2026-01-31T08:00:00.500000000Z",
    "stream": "ORDERS",
    "consumer": "billing",
    "stream_seq": 1017,
    "consumer_seq": 1020,
    "deliveries": 3,
    "reason": "the address does not exist",
}
EVENTS: Final = Operation(
    operation_id="listen",
    tag="events",
    summary="Listen to events",
    description="Streams events about streams, consumers and deliveries until the client "
    "disconnects. In each event, `event` is the type, `id` the position and `data` the "
    "event in JSON.\n\nEvents are not stored: what happens while nobody listens is lost. "
    "A client that reconnects within a minute with `Last-Event-ID` continues after that "
    "event. If it cannot continue, an event `lost` tells how many events of any stream "
    "and type it missed, or that some are missing if the number is unknown. This happens "
    "if the client was away for longer or more than 4,096 events behind, or if storage "
    "was restarted.\n\nA comment is sent at least every 15 s. An event `gone` ends the "
    "answer when the server stops.",
    query=EventsQuery,
    headers=(
        HeaderDoc(
            name="Last-Event-ID",
            description="The `id` of the last event received.",
            example="9f1c03aa-42",
        ),
    ),
    answers={
        200: AnswerDoc(
            description="The events.",
            content={EVENTS_TYPE: BodyDoc(shape=EventJson, example=EXAMPLE)},
        )
    },
    errors=(errors.NOT_ACCEPTABLE, errors.INVALID_FIELD, errors.TOO_MANY_WAITERS),
)


class Events:
    """The route of advisories."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link
        # Open answers, at most LISTENERS_MAX.
        self._listeners = 0

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (Route("GET", "/v1/events", self.open, EVENTS),)

    async def open(self, request: Request) -> Answer:
        """Answer with events. A client that has received the head of the answer misses none."""
        query = parse_query(request.query_string, EventsQuery)
        acceptable(request.headers.get(b"accept"), (EVENTS_TYPE,))
        asked = EventsRequest(
            after=_last_event_id(request.headers.get(b"last-event-id", b"")),
            stream=_name("stream", query.stream),
            consumer=_name("consumer", query.consumer),
            types=_types(query.types),
        )
        # Read once before the answer begins, so that errors are answered with a status.
        first = await self._link.read_events(asked)
        if self._listeners >= LISTENERS_MAX:
            raise ApiError(
                errors.TOO_MANY_WAITERS, f"the limit is {LISTENERS_MAX} listeners", applied=False
            )
        chunks = self._events(request, asked, first)
        return StreamResponse(200, chunks, EVENTS_TYPE.encode(), list(EVENT_HEADERS))

    async def _events(
        self, request: Request, asked: EventsRequest, found: EventsResult | None
    ) -> AsyncGenerator[bytes, None]:
        self._listeners += 1
        try:
            yield BEGIN
            while True:
                if found is None:
                    yield _AWAY
                    await request.while_wanted(asyncio.sleep(_AGAIN_S))
                else:
                    yield _to_bytes(found)
                    asked = msgspec.structs.replace(
                        asked, after=found.position, wait_ns=HEARTBEAT_NS
                    )
                found = await request.while_wanted(self._read(asked))
        except ApiError as error:
            # The client reconnects automatically, and the status of that answer tells what is
            # wrong.
            yield b"event: gone\ndata: %b\n\n" % _encoder.encode(GoneEvent(error.spec.name))
        finally:
            self._listeners -= 1

    async def _read(self, asked: EventsRequest) -> EventsResult | None:
        """Return the next events, or None while storage is not reachable."""
        try:
            return await self._link.read_events(asked)
        except ApiError as error:
            # The client would reconnect at once, to the same storage: keep the answer open.
            if error.spec.retryable:
                return None
            raise


def _to_bytes(found: EventsResult) -> bytes:
    """Return events as bytes.

    Without any, send the position, so that the client keeps up with it.
    """
    position = found.position.encode()
    events = [
        b"event: %b\nid: %b\ndata: %b\n\n"
        % (one.type.encode(), one.id.encode(), _encoder.encode(_to_json(one)))
        for one in found.advisories
    ]
    if found.lost != 0:
        events.insert(0, b"event: lost\nid: %b\ndata: %b\n\n" % (position, _lost(found)))
    return b"".join(events) or _STILL_HERE % position


def _to_json(advisory: Advisory) -> EventJson:
    return EventJson(
        type=advisory.type,
        id=advisory.id,
        timestamp=format_time(advisory.time_ns),
        stream=advisory.stream or msgspec.UNSET,
        consumer=advisory.consumer or msgspec.UNSET,
        action=advisory.action or msgspec.UNSET,
        stream_seq=advisory.stream_seq or msgspec.UNSET,
        consumer_seq=advisory.consumer_seq or msgspec.UNSET,
        deliveries=advisory.deliveries or msgspec.UNSET,
        reason=advisory.reason or msgspec.UNSET,
        server=advisory.server or msgspec.UNSET,
        group=msgspec.UNSET if advisory.group is None else advisory.group,
    )


def _lost(found: EventsResult) -> bytes:
    now = format_time(time.time_ns())
    count = msgspec.UNSET if found.lost is None else found.lost
    return _encoder.encode(EventJson(type="lost", id=found.position, timestamp=now, count=count))


def _name(parameter: str, name: str) -> str:
    problem = name_problem(name) if name else None
    if problem is not None:
        raise invalid_field(parameter, problem)
    return name


def _types(text: str) -> tuple[AdvisoryType, ...]:
    types = tuple(text.split(",")) if text else ()
    if not set(types) <= set(TYPES):
        raise invalid_field("types", f"must be a comma-separated list of {', '.join(TYPES)}")
    return cast(tuple[AdvisoryType, ...], types)


def _last_event_id(header: bytes) -> str:
    if header and not _POSITION.fullmatch(header):
        raise invalid_field("Last-Event-ID", "must be the id of an event")
    return header.decode()
