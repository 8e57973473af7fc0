"""Publishing many messages to one stream in one request: JSON, NDJSON and msgpack."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec

from contrail_api.atomic import atomic_answer, atomic_batch
from contrail_api.batch_results import Result, all_stored, encode_results, results_of
from contrail_api.candidates import (
    Admitted,
    BareItem,
    IdItem,
    PackedItem,
    admitted,
    bare_batch,
    id_batch,
    uniform_batch,
)
from contrail_api.ndjson_batch import NdjsonBatch
from contrail_common import errors
from contrail_common.edge.json_body import (
    NESTING_MAX,
    decode_json,
    decode_msgpack,
    malformed,
    mistyped,
    nesting_in_slices,
)
from contrail_common.edge.message_items import (
    Candidate,
    MessageItem,
    candidate,
    check_count,
    checked,
    payload_of,
)
from contrail_common.edge.negotiation import (
    JSON_TYPE,
    MSGPACK_TYPE,
    NDJSON_TYPE,
    acceptable,
    content_type,
)
from contrail_common.edge.problems import invalid_field
from contrail_common.edge.query import parse_query
from contrail_common.edge.requests import Request
from contrail_common.edge.responses import JSON, Answer, Response
from contrail_common.edge.routing import Reply
from contrail_common.edge.settings import EdgeSettings
from contrail_common.errors import ApiError
from contrail_common.link import PublishOutcome, StorageLink

DIRECT_TYPES: Final = frozenset((JSON_TYPE.encode(), MSGPACK_TYPE.encode()))
BATCH_DIRECT_BYTES_MAX: Final = 512 << 10
"""Up to here a body is waited for and taken at once: as much as two log entries hold."""
_SLICE_BYTES: Final = 256 << 10
_ITEM_COST_BYTES: Final = 128
"""What it costs to look at any item, in bytes that are read in that time."""
_HEADERS_TEXT_MAX: Final = 6 * (64 << 10)
"""The longest JSON of headers that are not too large: each character may be an escape."""
_FORMS: Final = (JSON_TYPE, NDJSON_TYPE, MSGPACK_TYPE)
_ITEM_DEPTH: Final = 3
"""Levels of a JSON batch around the value of an item's ``json``."""
_PACKED_VERSION: Final = 1
_LENGTH_ENDS: Final = {0xDC: 3, 0xDD: 5}
"""Where the length ends in the head of a msgpack array 16 and array 32."""
_LENGTH_BYTES: Final = 5
_USUAL_HEAD: Final = bytes((0x92, _PACKED_VERSION))
"""How a batch begins: an array of two, of which the first is the version."""


class JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch of messages for one stream."""

    messages: list[MessageItem]


class _RawBatch(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[msgspec.Raw]


class _Headers(msgspec.Struct):
    headers: msgspec.Raw = msgspec.Raw(b"")


class BatchQuery(msgspec.Struct):
    """Parameters of a batch publish."""

    atomic: Annotated[bool, msgspec.Meta(description="All messages or none.")] = False


_raw_decoder: Final = msgspec.json.Decoder(_RawBatch)
_item_decoder: Final = msgspec.json.Decoder(MessageItem)
_headers: Final = msgspec.json.Decoder(_Headers)
_json_decoder: Final = msgspec.json.Decoder(JsonBatch)
_packed_frame: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw])
_bare_items: Final = msgspec.msgpack.Decoder(list[BareItem])
_id_items: Final = msgspec.msgpack.Decoder(list[IdItem])
_packed_items: Final = msgspec.msgpack.Decoder(list[PackedItem])


class BatchPublish:
    """``POST /v1/streams/{stream}/messages``."""

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link
        self._payload_bytes_max = settings.payload_bytes_max
        self._body_bytes_max = settings.body_bytes_max
        self._ndjson = NdjsonBatch(link, settings)

    async def publish(self, request: Request) -> Answer:
        """Store the messages of the body, each for itself."""
        form = content_type(request.headers.get(b"content-type"), _FORMS)
        stream = request.path_values["stream"]
        atomic = parse_query(request.query_string, BatchQuery).atomic
        accept = request.headers.get(b"accept")
        if form == NDJSON_TYPE and not atomic:
            if acceptable(accept, (JSON_TYPE, NDJSON_TYPE)) == NDJSON_TYPE:
                return await self._ndjson.publish_streaming(request, stream)
            piece = await self._ndjson.publish_all(request, stream)
            return _response(piece.results, piece.durability)
        acceptable(accept, (JSON_TYPE,))
        body = await request.body(self._body_bytes_max)
        if form == NDJSON_TYPE:
            asked = await self._ndjson.admitted(body)
        elif form == MSGPACK_TYPE:
            asked = self._packed(body)
        elif len(body) <= BATCH_DIRECT_BYTES_MAX:
            asked = self._json(body)
        else:
            asked = await self._json_in_slices(body)
        if atomic:
            return atomic_answer(await self._link.publish_batch(stream, atomic_batch(asked)))
        ack = await self._link.publish_batch(stream, asked.batch)
        return _response(results_of(asked.refused, ack.results), ack.durability)

    def publish_directly(self, request: Request, body: bytes, reply: Reply) -> None:
        """Store the messages of ``body`` as :meth:`publish` does, for a request that has no query.

        Its content type is one of ``DIRECT_TYPES``.
        """
        acceptable(request.headers.get(b"accept"), (JSON_TYPE,))
        packed = request.headers[b"content-type"] == MSGPACK_TYPE.encode()
        asked = self._packed(body) if packed else self._json(body)

        def done(outcome: PublishOutcome) -> None:
            if isinstance(outcome, ApiError):
                reply(outcome)
            else:
                results = results_of(asked.refused, outcome.results)
                reply(_response(results, outcome.durability))

        self._link.publish_batch_then(request.path_values["stream"], asked.batch, done)

    def _packed(self, body: bytes) -> Admitted:
        items = _packed_array(body)
        # Most batches have no headers, or just ids: these take a short way. Another batch shows
        # itself by its first message; what is wrong with it, the general form tells.
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            batch = bare_batch(_bare_items.decode(items), self._payload_bytes_max)
            if batch is not None:
                return Admitted(batch, {})
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            batch = id_batch(_id_items.decode(items), self._payload_bytes_max)
            if batch is not None:
                return Admitted(batch, {})
        packed = decode_msgpack(_packed_items, bytes(items), "/1")
        batch = uniform_batch(packed, self._payload_bytes_max)
        if batch is not None:
            return Admitted(batch, {})
        return admitted([checked(item, self._payload_bytes_max) for item in packed])

    def _json(self, body: bytes) -> Admitted:
        items = decode_json(_json_decoder, body).messages
        check_count(len(items))
        # Every payload first: a body of the wrong form is refused before anything is stored.
        payloads = [
            payload_of(item, f"/messages/{position}", NESTING_MAX - _ITEM_DEPTH)
            for position, item in enumerate(items)
        ]
        candidates: list[Candidate] = [
            candidate(item, payload, self._payload_bytes_max)
            for item, payload in zip(items, payloads, strict=True)
        ]
        return admitted(candidates)

    async def _json_in_slices(self, body: bytes) -> Admitted:
        """As :meth:`_json`, for large bodies: others have their turn in between."""
        items = 1
        for commas in nesting_in_slices(body):
            items += commas
            check_count(items)
            await asyncio.sleep(0)
        raws = decode_json(_raw_decoder, body).messages
        check_count(len(raws))
        parts: list[tuple[MessageItem, bytes] | ApiError] = []
        async for at, raw in _in_turns(raws):
            parts.append(_item_of(raw, f"/messages/{at}"))
        candidates: list[Candidate] = []
        async for at, _ in _in_turns(raws):
            part = parts[at]
            candidates.append(
                part if isinstance(part, ApiError) else candidate(*part, self._payload_bytes_max)
            )
        return admitted(candidates)


async def _in_turns(raws: Sequence[msgspec.Raw]) -> AsyncIterator[tuple[int, bytes]]:
    """The items with their numbers; the loop goes round after each slice of them."""
    size = 0
    for at, raw in enumerate(raws):
        item = bytes(raw)
        size += len(item) + _ITEM_COST_BYTES
        if size > _SLICE_BYTES:
            size = 0
            await asyncio.sleep(0)
        yield at, item


def _item_of(raw: bytes, at: str) -> tuple[MessageItem, bytes] | ApiError:
    """One message at the pointer ``at`` and its payload; or the refusal of its headers alone."""
    try:
        # Headers are what takes longest to read: far too many are not made at all.
        if len(raw) > _HEADERS_TEXT_MAX and len(_headers.decode(raw).headers) > _HEADERS_TEXT_MAX:
            return ApiError(errors.HEADERS_TOO_LARGE, applied=False)
        item = _item_decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise mistyped(error, at) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from None
    return item, payload_of(item, at, None)


def _response(results: list[Result], durability: str) -> Response:
    status = 201 if all_stored(results) else 207
    headers = [(b"durability", durability.encode())]
    return Response(status, encode_results(results), JSON, headers)


def _packed_array(body: bytes) -> memoryview:
    """The array of messages of a msgpack batch, still packed."""
    if body.startswith(_USUAL_HEAD):
        items = memoryview(body)[len(_USUAL_HEAD) :]
    else:
        version, raw = decode_msgpack(_packed_frame, body)
        if version != _PACKED_VERSION:
            raise invalid_field("/0", f"the batch version must be {_PACKED_VERSION}")
        items = memoryview(raw)
    # The count stands before the items: a body of tiny ones is refused before they are made.
    check_count(_array_length(bytes(items[:_LENGTH_BYTES])))
    return items


def _array_length(packed: bytes) -> int:
    """Elements of the msgpack array that ``packed`` is; 0 when it is short or no array."""
    end = _LENGTH_ENDS.get(packed[0]) if packed else None
    return 0 if end is None else int.from_bytes(packed[1:end])
