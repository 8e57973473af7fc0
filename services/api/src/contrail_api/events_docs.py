"""What the OpenAPI document says of events."""

from typing import Any, Final

from contrail_api.events import EventJson, EventsQuery
from contrail_common import errors
from contrail_edge.inputs.negotiation import EVENTS_TYPE
from contrail_edge.routing import Answered, Body, HeaderDoc, Operation

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
        200: Answered(
            description="The events.",
            content={EVENTS_TYPE: Body(shape=EventJson, example=EXAMPLE)},
        )
    },
    errors=(errors.NOT_ACCEPTABLE, errors.INVALID_FIELD, errors.TOO_MANY_WAITERS),
)
