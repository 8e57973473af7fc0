"""What the OpenAPI document says of events."""

from typing import Any, Final

from contrail_api.events import EventJson, EventsQuery
from contrail_common import errors
from contrail_common.edge.negotiation import EVENTS_TYPE
from contrail_common.edge.routing import Answered, Body, HeaderDoc, Operation

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
    description="What happens to streams, consumers and deliveries, as events without an end: "
    "`event` is the type, `id` the position, `data` the event in JSON. Events are not stored, and "
    "what happens while nobody listens is not kept. A client that comes back within a minute "
    "with `Last-Event-ID` goes on behind it. Where it cannot, because it was away or slow for "
    "longer than the newest 4,096 events or storage was started again, an event `lost` says how "
    "many are missing, of whatever stream and type, or only that some are. Comments come at least "
    "every 15 s. An event `gone` ends it when the server stops.",
    query=EventsQuery,
    headers=(
        HeaderDoc(
            name="Last-Event-ID",
            description="The id of the last event that was seen.",
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
