"""What the OpenAPI document says of the management of consumers."""

from typing import Any, Final

import msgspec

from contrail_api.consumer_config import ConsumerInfoJson, ConsumerPage, info_json
from contrail_api.stream_docs import ETAG, IF_MATCH, IF_NONE_MATCH, LOCATION, PATCH_BODY
from contrail_common import errors, model
from contrail_common.timeunits import parse_time
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import Answered, Body, Operation

_TAG: Final = "consumers"

_EXAMPLE: Final[Any] = msgspec.to_builtins(
    info_json(
        model.ConsumerInfo(
            stream="ORDERS",
            config=model.ConsumerConfig(
                name="billing", durable=True, filter_subjects=("orders.eu.*",)
            ),
            created_ns=parse_time("2026-01-31T08:00:00Z"),
            version=1,
            delivered=model.SequencePair(3, 7, parse_time("2026-01-31T08:02:00Z")),
            ack_floor=model.SequencePair(2, 5, parse_time("2026-01-31T08:01:00Z")),
            num_ack_pending=1,
            num_redelivered=0,
            num_waiting=0,
            num_pending=12,
        )
    )
)
_INFO: Final = {"application/json": Body(shape=ConsumerInfoJson, example=_EXAMPLE)}
_FOUND: Final = Answered(description="The consumer.", content=_INFO, headers=(ETAG,))
_CREATED: Final = Answered(
    description="The consumer was created.", content=_INFO, headers=(ETAG, LOCATION)
)
_CONFIG_ERRORS: Final = (
    *BODY_ERRORS,
    errors.STREAM_NOT_FOUND,
    errors.CONSUMER_CONFIG_INVALID,
    errors.CONSUMER_NAME_SEPARATOR,
    errors.CONSUMER_NAME_MISMATCH,
    errors.START_INVALID,
    errors.FILTERS_OVERLAP,
    errors.FILTER_TWICE,
    errors.FILTER_EMPTY,
    errors.BACKOFF_INVALID,
    errors.WORKQUEUE_ACKS,
    errors.WORKQUEUE_DELIVER_ALL,
    errors.WORKQUEUE_UNFILTERED,
    errors.WORKQUEUE_NOT_UNIQUE,
    errors.PEDANTIC,
    errors.REPLICAS_NEGATIVE,
    errors.CONSUMER_REPLICAS_EXCEEDED,
    errors.CONSUMER_LIMIT,
    errors.CONSUMER_LIMITS_EXCEEDED,
    errors.CONSUMER_THRESHOLD_EXCEEDED,
    errors.OUTCOME_UNKNOWN,
)
_UPDATE_ERRORS: Final = (
    *_CONFIG_ERRORS,
    errors.CONSUMER_PATH_MISMATCH,
    errors.CONSUMER_UPDATE_REFUSED,
    errors.PRECONDITION_FAILED,
)
_LOOKUP_ERRORS: Final = (errors.STREAM_NOT_FOUND, errors.CONSUMER_NOT_FOUND)

LIST: Final = Operation(
    operation_id="list_consumers",
    tag=_TAG,
    summary="List consumers",
    description="Lists the consumers of a stream by name, in pages.",
    answers={
        200: Answered(
            description="A page of consumers.",
            content={
                "application/json": Body(
                    shape=ConsumerPage, example={"items": [_EXAMPLE], "next_page_token": None}
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.INVALID_FIELD),
)
CREATE: Final = Operation(
    operation_id="create_consumer",
    tag=_TAG,
    summary="Create a consumer",
    description="A consumer with a name is durable. A consumer without one is ephemeral: the "
    "server gives it a name, and deletes it once it has been unused for its "
    "`inactive_threshold`, 5s by default.",
    answers={201: _CREATED, 200: _FOUND},
    errors=(*_CONFIG_ERRORS, errors.CONSUMER_EXISTS),
)
PUT: Final = Operation(
    operation_id="put_consumer",
    tag=_TAG,
    summary="Create or replace a durable consumer's configuration",
    description="Omitted fields take their defaults. With `If-None-Match: *` a consumer is only "
    "created, never replaced. With `If-Match` the configuration is only replaced if it "
    "has the given version.",
    headers=(IF_MATCH, IF_NONE_MATCH),
    answers={200: _FOUND, 201: _CREATED},
    errors=_UPDATE_ERRORS,
)
PATCH: Final = Operation(
    operation_id="patch_consumer",
    tag=_TAG,
    summary="Change fields of a consumer's configuration",
    description="Applies a JSON merge patch to the configuration.",
    headers=(IF_MATCH,),
    body=PATCH_BODY,
    answers={200: _FOUND},
    errors=(*_UPDATE_ERRORS, errors.CONSUMER_NOT_FOUND),
)
GET: Final = Operation(
    operation_id="get_consumer",
    tag=_TAG,
    summary="Get a consumer's configuration and progress",
    description="The ETag is the version of the configuration. Progress does not affect it.",
    answers={200: _FOUND},
    errors=_LOOKUP_ERRORS,
)
DELETE: Final = Operation(
    operation_id="delete_consumer",
    tag=_TAG,
    summary="Delete a consumer",
    description="Waiting pulls of the consumer end with 410.",
    headers=(IF_MATCH,),
    answers={204: Answered(description="The consumer was deleted.")},
    errors=(*_LOOKUP_ERRORS, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
