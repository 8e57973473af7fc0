"""Bulk replay: plan a fixed range, then read each of its splits."""

from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec.structs import replace

from contrail_api.reading.parameters import (
    BINARY,
    POSITION,
    Consistency,
    Replica,
    Shard,
    check_consistency,
    one_shard,
    read_as,
)
from contrail_common import errors
from contrail_common.config_rules import SUBJECTS_MAX
from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, StreamResponse, json_response
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.negotiation import (
    ARROW_TYPE,
    JSON_TYPE,
    MSGPACK_TYPE,
    NDJSON_TYPE,
    acceptable,
)
from contrail_edge.inputs.query import filter_parameter, parse_query, time_parameter
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.read import (
    Chunk,
    Pieces,
    PinnedReplay,
    ReplayFormat,
    ReplayPlanRequest,
    ReplayRequest,
)

SPLITS_MAX: Final = 1024
COLUMNS: Final = ("shard", "seq", "time", "subject", "headers", "data")
FORMATS: Final[dict[str, ReplayFormat]] = {
    ARROW_TYPE: "arrow",
    NDJSON_TYPE: "ndjson",
    MSGPACK_TYPE: "msgpack",
}
FromSeq = Annotated[
    int, msgspec.Meta(ge=0, le=INT64_MAX, description="First sequence of the range.")
]
ToSeq = Annotated[
    int,
    msgspec.Meta(
        ge=0,
        le=INT64_MAX,
        description="Last sequence of the range (inclusive). 0 means the newest.",
    ),
]
Filters = Annotated[
    str,
    msgspec.Meta(
        description="Filter: only messages with matching subjects. Several filters are separated "
        f"by spaces (at most {SUBJECTS_MAX}); a message must match one of them."
    ),
]


class PlanQuery(msgspec.Struct):
    """Parameters of a replay plan."""

    splits: Annotated[
        int, msgspec.Meta(ge=1, le=SPLITS_MAX, description="Approximate number of splits.")
    ] = 1
    split_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=0,
            le=INT64_MAX,
            description="Approximate maximum size of a split. A larger range has more splits than "
            f"`splits`, up to {SPLITS_MAX:,}. 0 means no maximum.",
        ),
    ] = 0
    from_seq: FromSeq = 0
    to_seq: ToSeq = 0
    start_time: Annotated[
        str,
        msgspec.Meta(
            description="Start time (RFC 3339, inclusive).", extra_json_schema=schema_marks.TIME
        ),
    ] = ""
    end_time: Annotated[
        str,
        msgspec.Meta(
            description="End time (RFC 3339, exclusive).", extra_json_schema=schema_marks.TIME
        ),
    ] = ""
    subject: Filters = ""
    shard: Shard | msgspec.UnsetType = msgspec.UNSET
    consistency: Consistency = "leader"
    replica: Replica = ""


class ReplayQuery(msgspec.Struct):
    """Parameters of a replay."""

    shard: Shard | msgspec.UnsetType = msgspec.UNSET
    from_seq: FromSeq = 0
    to_seq: ToSeq = 0
    subject: Filters = ""
    columns: Annotated[
        str, msgspec.Meta(description="Comma-separated list of columns. Default: all.")
    ] = ""
    incarnation: Annotated[
        str,
        msgspec.Meta(
            description="`incarnation` of the plan. The request is refused if the stream was "
            "re-created since."
        ),
    ] = ""
    schema: Annotated[
        Literal["contrail", "spark"],
        msgspec.Meta(description="`spark`: use Arrow types that Spark reads without a cast."),
    ] = "contrail"
    clamp: Annotated[
        bool,
        msgspec.Meta(
            description="Start at the stream's first sequence if from_seq is below it, instead of "
            "answering 410."
        ),
    ] = False
    consistency: Consistency = "leader"
    replica: Replica = ""


class SplitJson(msgspec.Struct):
    """A range of one shard, both ends included. ``messages`` and ``bytes`` are estimates."""

    shard: int
    """Number of the shard."""
    from_seq: int
    """First sequence."""
    to_seq: int
    """Last sequence (inclusive)."""
    messages: int
    """Estimated number of messages."""
    bytes: int
    """Estimated size in bytes."""


class ShardBoundsJson(msgspec.Struct):
    """The messages that a shard has, whatever range the plan is for."""

    shard: int
    """Number of the shard."""
    first_seq: int
    """Sequence of the oldest message. Without messages, it is above `last_seq`."""
    last_seq: int
    """Sequence of the newest message."""


class PlanJson(msgspec.Struct):
    """The splits of a pinned range, valid for one incarnation of the stream."""

    stream: str
    """Name of the stream."""
    incarnation: str
    """Incarnation of the stream for which the plan is valid."""
    splits: list[SplitJson]
    """The splits, in order."""
    shards: list[ShardBoundsJson]
    """The shards that can have messages of the range, also those without splits."""


_REPLAY: Final = "replay"
PLAN: Final = Operation(
    operation_id="plan_replay",
    tag=_REPLAY,
    summary="Plan a bulk replay",
    description="Pins a range and divides it into splits. Reading a split again returns the same "
    "messages as long as they are retained. The range is clipped to the messages that "
    "exist now, so the first split shows where it really starts. For a stream with "
    "several shards, sequences require `shard`; without sequences the plan has splits of "
    "every shard.",
    query=PlanQuery,
    answers={
        200: AnswerDoc(
            description="The splits.",
            headers=POSITION,
            content={
                JSON_TYPE: BodyDoc(
                    shape=PlanJson,
                    example={
                        "stream": "ORDERS",
                        "incarnation": "5f1c0a9be2d34876",
                        "splits": [
                            {
                                "shard": 0,
                                "from_seq": 1,
                                "to_seq": 42,
                                "messages": 42,
                                "bytes": 5120,
                            }
                        ],
                        "shards": [{"shard": 0, "first_seq": 1, "last_seq": 42}],
                    },
                )
            },
        )
    },
    errors=(errors.STREAM_NOT_FOUND, errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
REPLAY: Final = Operation(
    operation_id="replay",
    tag=_REPLAY,
    summary="Replay a range",
    description="Returns all messages of a range, both ends included. A stream with several shards "
    "requires `shard`. Accept chooses the form: an Arrow stream (the default), "
    "`application/x-ndjson` or `application/vnd.msgpack`. NDJSON and msgpack end with "
    '`{"end":true,"messages":n}`, and Arrow with its end-of-stream mark. An answer without its '
    "end is incomplete.",
    query=ReplayQuery,
    answers={
        200: AnswerDoc(
            description="The messages.",
            headers=POSITION,
            content={
                ARROW_TYPE: BINARY,
            },
        )
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.REPLAY_GONE,
        errors.INCARNATION_CHANGED,
        errors.REPLAY_AHEAD,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
    ),
)


class Replays:
    """The replay routes."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (
            Route("GET", "/v1/streams/{stream}/replay/plan", self.plan, PLAN),
            Route("GET", "/v1/streams/{stream}/replay", self.replay, REPLAY),
        )

    async def plan(self, request: Request) -> Answer:
        """Return a plan: a fixed range, divided into splits."""
        query = parse_query(request.query_string, PlanQuery)
        check_consistency(query.consistency, query.replica)
        asked = ReplayPlanRequest(
            stream=request.path_values["stream"],
            splits=query.splits,
            split_bytes=query.split_bytes,
            from_seq=query.from_seq,
            to_seq=query.to_seq,
            start_time_ns=time_parameter("start_time", query.start_time),
            end_time_ns=time_parameter("end_time", query.end_time),
            subject=_filters(query.subject),
            shard=one_shard(query.shard),
        )

        async def read(replica: str) -> PinnedReplay:
            return await self._link.replay_plan(replace(asked, replica=replica))

        plan, position = await read_as(
            query.consistency, self._link, asked.stream, asked.shard, read, query.replica
        )
        splits = [
            SplitJson(one.shard, one.from_seq, one.to_seq, one.messages, one.bytes)
            for one in plan.splits
        ]
        shards = [ShardBoundsJson(one.shard, one.first_seq, one.last_seq) for one in plan.shards]
        found = PlanJson(plan.stream, plan.incarnation, splits, shards)
        return json_response(200, found, position)

    async def replay(self, request: Request) -> Answer:
        """Return all messages of a range, both ends included."""
        query = parse_query(request.query_string, ReplayQuery)
        media_type = acceptable(request.headers.get(b"accept"), tuple(FORMATS))
        # The other forms have no types, so the option would be ignored silently.
        if query.schema == "spark" and media_type != ARROW_TYPE:
            raise invalid_field("schema", "spark is only available for Arrow")
        check_consistency(query.consistency, query.replica)
        asked = ReplayRequest(
            stream=request.path_values["stream"],
            format=FORMATS[media_type],
            from_seq=query.from_seq,
            to_seq=query.to_seq,
            subject=_filters(query.subject),
            columns=_columns(query.columns),
            incarnation=query.incarnation,
            schema=query.schema,
            clamp=query.clamp,
            shard=one_shard(query.shard),
        )

        async def read(replica: str) -> AsyncIterator[Chunk | Pieces]:
            return await self._link.replay(replace(asked, replica=replica))

        chunks, position = await read_as(
            query.consistency, self._link, asked.stream, asked.shard, read, query.replica
        )
        return StreamResponse(200, chunks, media_type.encode(), position)


def _filters(text: str) -> str:
    """Check the filters in ``text``, and return them separated by single spaces."""
    filters = text.split()
    if text and not filters:  # without a filter it would mean all messages
        raise invalid_field("subject", "must contain a filter", errors.INVALID_SUBJECT)
    if len(filters) > SUBJECTS_MAX:
        raise invalid_field("subject", f"must not have more than {SUBJECTS_MAX} filters")
    return " ".join(filter_parameter("subject", one) for one in filters)


def _columns(text: str) -> tuple[str, ...]:
    columns = tuple(text.split(",")) if text else ()
    unknown = [column for column in columns if column not in COLUMNS]
    if unknown or len(set(columns)) != len(columns):
        raise invalid_field(
            "columns", f"must be a comma-separated list of {', '.join(COLUMNS)}, without repeats"
        )
    return columns
