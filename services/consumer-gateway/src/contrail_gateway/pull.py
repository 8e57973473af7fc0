"""Pulls over HTTP: a long poll that is answered as soon as there is a message."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from itertools import repeat
from typing import Annotated, Any, Final

import msgspec

from contrail_common import errors
from contrail_common.ack_tokens import AckTokens
from contrail_common.columns.delivery_columns import DeliveryColumns
from contrail_common.errors import ApiError
from contrail_common.timeunits import NS_PER_S
from contrail_edge.direct_reads import DirectTask
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.requests import Request
from contrail_edge.http.responses import (
    Answer,
    Encoder,
    Response,
    StreamResponse,
    encoded,
    json_response,
    no_content,
)
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.json_body import decode_json
from contrail_edge.inputs.messages import payload_form
from contrail_edge.inputs.negotiation import (
    JSON_TYPE,
    MSGPACK_TYPE,
    NDJSON_TYPE,
    acceptable,
    accepts_columns,
    content_type,
)
from contrail_edge.inputs.query import parse_query
from contrail_edge.routing import Direct
from contrail_gateway.acks import Acknowledger, AckOutcome
from contrail_gateway.core.pull_rules import (
    ACKS_BYTES_MAX,
    PullBody,
    PullTerms,
    check_ack_count,
    pull_terms,
)
from contrail_gateway.deliveries import (
    PackedMessages,
    PulledColumns,
    PulledMessages,
    delivered_message,
    in_columns,
    packed_message,
    signer,
)
from contrail_link.contract.consume import ConsumeLink, Delivery, PullRequest, PullResult

_decoder: Final = msgspec.json.Decoder(PullBody)
_json: Final = msgspec.json.Encoder()
_COLUMNS_TYPE: Final = f"{MSGPACK_TYPE}; form=columns".encode()
_ACCEPTED_DIRECTLY: Final = frozenset(
    {b"*/*", JSON_TYPE.encode(), MSGPACK_TYPE.encode(), _COLUMNS_TYPE}
)
_msgpack: Final = msgspec.msgpack.Encoder()
_STEP_MESSAGES: Final = 1_000
_STEP_BYTES: Final = 256 << 10
_HEADER_BYTES: Final = 64
"""At most so many messages and bytes are shown in one step, which takes about 5 ms.

A header counts 64 bytes beside its own, and so does each of its values.
"""

_DELIVERED: Final = (200, "OK")
_TIMED_OUT: Final = (408, "Request Timeout")


class PullQuery(msgspec.Struct):
    """Parameters of a pull."""

    payload: Annotated[
        str,
        msgspec.Meta(
            description="`base64`: return every payload as `data_base64`.",
            extra_json_schema={"enum": ["auto", "base64"]},
        ),
    ] = ""


class Heartbeat(msgspec.Struct):
    """A line of an NDJSON pull: nothing came for a while; how far the consumer has delivered.

    ``shards`` has the consumer sequence and the stream sequence in each shard, where there are
    several; the two numbers are their sum and the highest of them then.
    """

    hb: bool
    last_consumer_seq: int
    last_stream_seq: int
    shards: dict[int, tuple[int, int]] | msgspec.UnsetType = msgspec.UNSET


class PullStatus(msgspec.Struct):
    """How an NDJSON pull ended; ``code`` as in JetStream's status messages."""

    code: int
    description: str
    num_pending: int


class StatusLine(msgspec.Struct):
    """The last line of an NDJSON pull."""

    status: PullStatus


class AckResultsLine(msgspec.Struct):
    """The first line of an NDJSON pull that brought acknowledgements."""

    ack_results: list[AckOutcome]


class _Pull(msgspec.Struct, frozen=True):
    """One pull. ``acked`` has the results of its acknowledgements, or is None if it had none."""

    request: Request
    stream: str
    consumer: str
    terms: PullTerms
    form: str
    base64: bool
    columns: bool
    acked: list[AckOutcome] | None

    def asked(self, *, no_wait: bool, expires_ns: int) -> PullRequest:
        """Return the pull as the storage link takes it."""
        return PullRequest(
            stream=self.stream,
            consumer=self.consumer,
            batch=self.terms.batch,
            expires_ns=expires_ns,
            max_bytes=self.terms.max_bytes,
            no_wait=no_wait,
            columns=self.columns,
        )


class Pulls:
    """``POST .../next``."""

    def __init__(
        self, link: ConsumeLink, tokens: AckTokens, acks: Acknowledger, settings: EdgeSettings
    ) -> None:
        self._link = link
        self._tokens = tokens
        self._acks = acks
        self._body_bytes_max = min(ACKS_BYTES_MAX, settings.body_bytes_max)

    @property
    def direct(self) -> Direct:
        """The handler for requests whose whole answer is one write: not NDJSON."""
        return Direct(
            DirectTask(self._next_directly),
            types=frozenset({JSON_TYPE.encode()}),
            accepts=_ACCEPTED_DIRECTLY,
        )

    async def next(self, request: Request) -> Answer:
        """Apply the acknowledgements of the body, then wait for messages and deliver them."""
        return await self._next(request, await request.body(self._body_bytes_max))

    async def _next_directly(self, request: Request, body: bytes) -> Response:
        answer = await self._next(request, body)
        assert isinstance(answer, Response)
        return answer

    async def _next(self, request: Request, raw: bytes) -> Answer:
        pull = await self._begin(request, raw)
        terms = pull.terms
        result = await self._link.pull(
            pull.asked(no_wait=True, expires_ns=terms.expires_ns if terms.expires_given else 0)
        )
        # Only now is it known that the consumer exists and allows this pull. A streamed answer
        # could not be refused any more.
        if result.is_empty and terms.expires_ns:
            if terms.heartbeat_ns:
                lines = self._lines_with_heartbeats(pull, result)
                return StreamResponse(200, lines, NDJSON_TYPE.encode())
            result = await self._wait(pull, result)
        if result.is_empty and pull.acked is None:
            return no_content()
        return await in_turns(self._response(pull, result))

    async def _begin(self, request: Request, raw: bytes) -> _Pull:
        accept = request.headers.get(b"accept")
        form = acceptable(accept, (JSON_TYPE, NDJSON_TYPE, MSGPACK_TYPE))
        columns = form == MSGPACK_TYPE and accepts_columns(accept)
        try:
            base64 = payload_form(parse_query(request.query_string, PullQuery).payload)
        except ValueError as error:
            raise invalid_field("payload", str(error)) from None
        body = self._body(request, raw)
        terms = pull_terms(body, heartbeats=form == NDJSON_TYPE)
        stream, consumer = request.path_values["stream"], request.path_values["consumer"]
        acked = None
        if body.acks:
            acked = await self._acks.apply(stream, consumer, body.acks, sync=False)
        return _Pull(request, stream, consumer, terms, form, base64, columns, acked)

    @staticmethod
    def _body(request: Request, raw: bytes) -> PullBody:
        if not raw:
            return PullBody()
        content_type(request.headers.get(b"content-type"), (JSON_TYPE,))
        check_ack_count(raw)
        return decode_json(_decoder, raw)

    async def _wait(self, pull: _Pull, nothing: PullResult) -> PullResult:
        try:
            return await pull.request.while_wanted(self._waiting_pull(pull))
        except ApiError as error:
            # The acknowledgements were applied. Return their results even during a shutdown.
            if error.spec is errors.SHUTTING_DOWN and pull.acked is not None:
                return nothing
            raise

    async def _waiting_pull(self, pull: _Pull) -> PullResult:
        expires_ns = pull.terms.expires_ns
        if not pull.terms.expires_given:
            # The default must not exceed the maximum of the consumer.
            config = (await self._link.consumer_info(pull.stream, pull.consumer)).config
            expires_ns = min(expires_ns, config.max_expires_ns or expires_ns)
        return await self._link.pull(pull.asked(no_wait=False, expires_ns=expires_ns))

    def _response(self, pull: _Pull, result: PullResult) -> Steps[Response]:
        if pull.form == NDJSON_TYPE:
            body = self._head_line(pull) + (yield from self._last_lines(pull, result))
            return Response(200, body, NDJSON_TYPE.encode())
        acked = msgspec.UNSET if pull.acked is None else pull.acked
        if result.columns is not None:
            return Response(200, self._in_columns(pull, result, result.columns), _COLUMNS_TYPE)
        messages = yield from self._messages(pull, result)
        if pull.form == MSGPACK_TYPE:
            body = _msgpack.encode(PackedMessages(messages, result.num_pending, acked))
            return Response(200, body, MSGPACK_TYPE.encode())
        return json_response(200, PulledMessages(messages, result.num_pending, acked))

    def _in_columns(self, pull: _Pull, result: PullResult, columns: DeliveryColumns) -> bytes:
        acked = msgspec.UNSET if pull.acked is None else pull.acked
        address = (result.shard_id, result.consumer_id, result.epoch)
        seqs = columns.each_seq()
        token = self._tokens.sign_all(pull.stream, pull.consumer, address, seqs)
        cols = in_columns(pull.stream, columns)
        return _msgpack.encode(PulledColumns(cols, result.num_pending, token, acked))

    async def _lines_with_heartbeats(
        self, pull: _Pull, nothing: PullResult
    ) -> AsyncGenerator[bytes, None]:
        head = self._head_line(pull)
        if head:
            yield head
        task = asyncio.create_task(pull.request.while_wanted(self._waiting_pull(pull)))
        try:
            while not (await asyncio.wait({task}, timeout=pull.terms.heartbeat_ns / NS_PER_S))[0]:
                yield await self._heartbeat_line(pull)
            yield await in_turns(self._last_lines(pull, task.result()))
        except ApiError as error:
            # The status of the answer was sent, so the last line has to report the error.
            yield _status_line(error.spec.status, error.spec.title, nothing.num_pending)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _heartbeat_line(self, pull: _Pull) -> bytes:
        info = await self._link.consumer_info(pull.stream, pull.consumer)
        beat = Heartbeat(True, info.delivered.consumer_seq, info.delivered.stream_seq)
        if info.shards:
            beat.shards = {
                one.shard: (one.delivered.consumer_seq, one.delivered.stream_seq)
                for one in info.shards
            }
        return _line(beat)

    def _last_lines(self, pull: _Pull, result: PullResult) -> Steps[bytes]:
        lines = _json.encode_lines((yield from self._messages(pull, result)))
        code, description = _DELIVERED if result.deliveries else _TIMED_OUT
        return lines + _status_line(code, description, result.num_pending)

    @staticmethod
    def _head_line(pull: _Pull) -> bytes:
        return b"" if pull.acked is None else _line(AckResultsLine(pull.acked))

    def _messages(self, pull: _Pull, result: PullResult) -> Steps[list[Any]]:
        """The steps that show the messages: one, and as many to encode them if they are long."""
        found = result.deliveries
        tokens = signer(self._tokens, pull.stream, pull.consumer, result)(found)
        encoder: Encoder = _msgpack if pull.form == MSGPACK_TYPE else _json
        show: Callable[..., Any] = packed_message
        if encoder is _json:
            show = partial(delivered_message, base64=pull.base64)
        shown = map(show, repeat(pull.stream), found, tokens)
        if _fit_a_step(found):
            return list(shown)
        yield True  # they may have been read in this step
        return (yield from encoded(shown, _itself, encoder))


def _fit_a_step(found: list[Delivery]) -> bool:
    left = _STEP_BYTES
    for delivery in found:
        message = delivery.message
        left -= len(message.payload)
        for values in (message.headers or {}).values():
            left -= _HEADER_BYTES * (1 + len(values)) + sum(map(len, values))
        if left < 0:
            return False
    return len(found) <= _STEP_MESSAGES


def _itself(shown: Any) -> Any:
    return shown


def _line(value: msgspec.Struct) -> bytes:
    return _json.encode(value) + b"\n"


def _status_line(code: int, description: str, num_pending: int) -> bytes:
    return _line(StatusLine(PullStatus(code, description, num_pending)))
