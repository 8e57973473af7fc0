"""Reading messages in order: once, as a long poll, or as an endless stream of events."""

import asyncio
from functools import partial
from typing import Annotated, Final

import msgspec

from contrail_api.reading.parameters import (
    MESSAGE,
    MESSAGES_PATH,
    POSITION,
    READING,
    ReadQuery,
    check_read,
    one_shard,
    read_as,
)
from contrail_api.reading.tail import Tail
from contrail_common import errors
from contrail_common.timeunits import INT64_MAX
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import Answer, Response, encoded, json_response, no_content
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.messages import Message, message_json
from contrail_edge.inputs.negotiation import EVENTS_TYPE, JSON_TYPE, NDJSON_TYPE, acceptable
from contrail_edge.inputs.query import (
    duration_parameter,
    filter_parameter,
    parse_query,
    time_parameter,
)
from contrail_edge.routing import AnswerDoc, BodyDoc, HeaderDoc, Operation, Route
from contrail_link.contract import StorageLink
from contrail_link.contract.read import RangeRequest, RangeResult

RANGE_LIMIT_MAX: Final = 10_000
RANGE_BYTES_MAX: Final = 16 << 20
_encoder: Final = msgspec.json.Encoder()


class RangeQuery(ReadQuery):
    """Parameters of a range read."""

    from_seq: Annotated[
        int,
        msgspec.Meta(
            ge=0, le=INT64_MAX, description="Sequence to start from. 0 means the first message."
        ),
    ] = 0
    start_time: Annotated[
        str,
        msgspec.Meta(
            description="Time to start from (RFC 3339), instead of from_seq.",
            extra_json_schema=schema_marks.TIME,
        ),
    ] = ""
    cursor: Annotated[
        str,
        msgspec.Meta(
            description="`cursor` of an earlier answer. Replaces from_seq if several shards "
            "are read together."
        ),
    ] = ""
    subject: Annotated[
        str, msgspec.Meta(description="Filter: only messages with matching subjects.")
    ] = ""
    limit: Annotated[
        int, msgspec.Meta(ge=1, le=RANGE_LIMIT_MAX, description="Maximum number of messages.")
    ] = 256
    max_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=1,
            le=RANGE_BYTES_MAX,
            description="Approximate maximum size of all payloads in bytes.",
        ),
    ] = 1 << 20
    wait: Annotated[
        str,
        msgspec.Meta(
            description="How long to wait for a first message, at most 60s.",
            extra_json_schema=schema_marks.DURATION,
        ),
    ] = ""


class MessageRange(msgspec.Struct, kw_only=True):
    """Messages in order. Continue with ``next_seq``; ``num_pending`` messages remain.

    If several shards are read together, ``cursor`` replaces ``next_seq``.
    """

    messages: list[Message]
    """The messages, in order."""
    next_seq: int | msgspec.UnsetType = msgspec.UNSET
    """Sequence to continue with."""
    cursor: str | msgspec.UnsetType = msgspec.UNSET
    """Cursor to continue with, if several shards are read together."""
    num_pending: int
    """Number of matching messages after these."""


RANGE: Final = Operation(
    operation_id="read_messages",
    tag=READING,
    summary="Read messages in order",
    description="Reads messages from a sequence or time onwards. With `wait` the request is a long "
    "poll, which answers 204 if no message arrives in time.\n\nWith `Accept: "
    "application/x-ndjson` the answer has one message per line, and headers tell where "
    "to continue.\n\nWith `Accept: text/event-stream` messages arrive as an endless "
    "stream of events, and `limit`, `max_bytes` and `wait` are ignored. The `id` of an "
    "event is the sequence, and `data` is the message in JSON. An event `gone` ends the "
    "stream of events when the stream is deleted or the server stops.\n\nA stream with "
    "several shards is read as one: ordered by time, while each shard keeps its own "
    "order. The position is then an opaque `cursor`, which replaces `from_seq`, "
    "`next_seq` and the event `id`. With `shard` a single shard is read by its sequences.",
    query=RangeQuery,
    headers=(
        HeaderDoc(
            name="Last-Event-ID",
            description="Events only: the `id` of the last event received. Overrides `from_seq`, "
            "`cursor` and `start_time`.",
            example="42",
        ),
    ),
    answers={
        200: AnswerDoc(
            description="The messages. Continue with `next_seq`.",
            content={
                JSON_TYPE: BodyDoc(
                    shape=MessageRange,
                    example={"messages": [MESSAGE], "next_seq": 43, "num_pending": 0},
                ),
            },
            headers=(
                HeaderDoc(
                    name="Contrail-Next-Seq",
                    description="NDJSON: the sequence to continue with.",
                    example="43",
                ),
                HeaderDoc(
                    name="Contrail-Cursor",
                    description="NDJSON: the cursor to continue with, if several shards are read "
                    "together.",
                    example="krA1ZjFjMGE5YmUyZDM0ODc2kgUD",
                ),
                HeaderDoc(
                    name="Nats-Num-Pending",
                    description="NDJSON: the number of messages after these.",
                    example="0",
                ),
                *POSITION,
            ),
        ),
        204: AnswerDoc(description="No message arrived within `wait`."),
    },
    errors=(
        errors.STREAM_NOT_FOUND,
        errors.NOT_ACCEPTABLE,
        errors.INVALID_FIELD,
        errors.INVALID_SUBJECT,
        errors.CONFLICTING_FIELDS,
        errors.TOO_MANY_WAITERS,
    ),
)


class Ranges:
    """The route that reads messages in order."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link
        self._tail = Tail(link)

    def routes(self) -> tuple[Route, ...]:
        """Return the routes with their documentation."""
        return (Route("GET", MESSAGES_PATH, self.range, RANGE),)

    async def range(self, request: Request) -> Answer:
        """Return messages from a position on; wait for the first if the request asks for it."""
        query = parse_query(request.query_string, RangeQuery)
        base64 = check_read(query)
        offers = (JSON_TYPE, NDJSON_TYPE, EVENTS_TYPE)
        form = acceptable(request.headers.get(b"accept"), offers)
        if query.from_seq and query.start_time:
            raise invalid_field(
                "start_time", "cannot be used together with from_seq", errors.CONFLICTING_FIELDS
            )
        if query.cursor and (query.from_seq or query.start_time):
            raise invalid_field(
                "cursor",
                "cannot be used together with from_seq or start_time",
                errors.CONFLICTING_FIELDS,
            )
        wait_ns = duration_parameter("wait", query.wait)
        asked = RangeRequest(
            stream=request.path_values["stream"],
            from_seq=query.from_seq,
            start_time_ns=time_parameter("start_time", query.start_time),
            subject=filter_parameter("subject", query.subject),
            limit=query.limit,
            max_bytes=query.max_bytes,
            wait_ns=wait_ns,
            shard=one_shard(query.shard),
            cursor=query.cursor,
        )

        async def open_tail(replica: str) -> Answer:
            there = msgspec.structs.replace(asked, replica=replica)
            return await self._tail.open(request, there, base64=base64)

        async def read(replica: str) -> RangeResult:
            there = msgspec.structs.replace(asked, replica=replica)
            read = self._link.read_range(there)
            # A read that does not wait needs no task, and no place among the waiting requests.
            return await (request.while_wanted(read) if wait_ns else read)

        where = query.consistency, self._link, asked.stream, asked.shard
        if form == EVENTS_TYPE:
            events, position = await read_as(*where, open_tail)
            events.headers.extend(position)
            return events
        found, position = await read_as(*where, read)
        if wait_ns and not found.messages:
            return no_content(position)
        await asyncio.sleep(0)  # they may have been read in this step
        answer = await in_turns(_range_response(asked.stream, found, form, base64=base64))
        answer.headers.extend(position)
        return answer


def _range_response(stream: str, found: RangeResult, form: str, *, base64: bool) -> Steps[Response]:
    messages = yield from encoded(found.messages, partial(message_json, stream, base64=base64))
    if form == JSON_TYPE:
        answer = MessageRange(messages=messages, num_pending=found.num_pending)
        if found.cursor:
            answer.cursor = found.cursor
        else:
            answer.next_seq = found.next_seq
        return json_response(200, answer)
    headers = [
        (b"contrail-cursor", found.cursor.encode())
        if found.cursor
        else (b"contrail-next-seq", b"%d" % found.next_seq),
        (b"nats-num-pending", b"%d" % found.num_pending),
    ]
    return Response(200, _encoder.encode_lines(messages), NDJSON_TYPE.encode(), headers)
