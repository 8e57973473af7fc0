"""Management of consumers: create, replace, change, list, delete."""

import secrets
from typing import Any, Final
from urllib.parse import quote

import msgspec
from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request

from contrail_api.changes import (
    ETAG,
    IF_MATCH,
    IF_NONE_MATCH,
    LOCATION,
    PATCH_BODY,
    as_document,
    exists_otherwise,
    merged,
    unless_overtaken,
)
from contrail_api.consumers.config import (
    ConsumerConfigBody,
    ConsumerInfoJson,
    ConsumerPage,
    config_json,
    consumer_draft,
    info_json,
)
from contrail_api.fields import Limit, PageToken, Patch, Pedantic
from contrail_common import errors, model
from contrail_common.config_rules import complete_consumer, normalise_consumer
from contrail_common.errors import ApiError
from contrail_common.model import ConsumerConfig, ConsumerInfo
from contrail_common.timeunits import parse_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import Response, encoded, json_response, no_content
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.preconditions import etag, preconditions
from contrail_edge.openapi.declared import (
    ConsumerName,
    KitResponse,
    StreamName,
    answer,
    invalid_model,
    kit_request,
    manage,
)
from contrail_edge.openapi.document import BODY_ERRORS
from contrail_edge.routing import AnswerDoc, BodyDoc, Operation
from contrail_link.contract import StorageLink

COLLECTION: Final = "/v1/streams/{stream}/consumers"
RESOURCE: Final = "/v1/streams/{stream}/consumers/{consumer}"
_EPHEMERAL_NAME_BYTES: Final = 8
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
_INFO: Final = {"application/json": BodyDoc(shape=ConsumerInfoJson, example=_EXAMPLE)}
_FOUND: Final = AnswerDoc(description="The consumer.", content=_INFO, headers=(ETAG,))
_CREATED: Final = AnswerDoc(
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
        200: AnswerDoc(
            description="A page of consumers.",
            content={
                "application/json": BodyDoc(
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
    answers={204: AnswerDoc(description="The consumer was deleted.")},
    errors=(*_LOOKUP_ERRORS, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)


class ConsumerRoutes:
    """The management routes of consumers, over one storage link."""

    def __init__(self, link: StorageLink) -> None:
        self._link = link

    def add_to(self, router: APIRouter) -> None:
        """Add the routes with their documentation."""
        manage(router, "GET", COLLECTION, self.list_consumers, LIST)
        manage(router, "POST", COLLECTION, self.create_consumer, CREATE)
        manage(router, "PUT", RESOURCE, self.put_consumer, PUT)
        manage(router, "PATCH", RESOURCE, self.patch_consumer, PATCH)
        manage(router, "GET", RESOURCE, self.get_consumer, GET)
        manage(router, "DELETE", RESOURCE, self.delete_consumer, DELETE)

    async def list_consumers(
        self, request: Request, stream: StreamName, limit: Limit = 256, page_token: PageToken = ""
    ) -> KitResponse:
        """List the consumers of a stream by name, in pages."""
        page = await self._link.list_consumers(stream, limit, page_token)
        items = await in_turns(encoded(page.consumers, info_json))
        return answer(request, json_response(200, ConsumerPage(items, page.next_token)))

    async def create_consumer(
        self,
        request: Request,
        stream: StreamName,
        config: ConsumerConfigBody,
        pedantic: Pedantic = False,
    ) -> KitResponse:
        """Create a consumer: durable when it has a name, ephemeral otherwise."""
        name = config.name or config.durable_name or ""
        _check_durable_name(config, name)
        durable = bool(name) and not _is_ephemeral(config)
        # Random, so that no two clients share an ephemeral consumer by accident.
        named = config.model_copy(update={"name": name or secrets.token_hex(_EPHEMERAL_NAME_BYTES)})
        complete = normalise_consumer(consumer_draft(named, durable=durable), pedantic=pedantic)
        try:
            info, created = await self._link.put_consumer(stream, complete, "create", None, False)
        except ApiError as error:
            if error.spec is not errors.CONSUMER_EXISTS:
                raise
            # Storage has completed the existing one, so compare it with a completed one.
            existing = (await self._link.consumer_info(stream, name)).config
            limits = (await self._link.stream_info(stream)).config.consumer_limits
            shown = config_json(existing), config_json(complete_consumer(complete, limits))
            raise exists_otherwise(error, *shown) from None
        return answer(request, info_response(info, created=created))

    async def put_consumer(
        self,
        request: Request,
        stream: StreamName,
        consumer: ConsumerName,
        config: ConsumerConfigBody,
        pedantic: Pedantic = False,
    ) -> KitResponse:
        """Create a durable consumer, or replace its configuration."""
        durable = not _is_ephemeral(config)
        complete = _normalised(config, consumer, durable=durable, pedantic=pedantic)
        wanted = preconditions(kit_request(request))
        if_match, if_none = await wanted.for_put(lambda: self._version(stream, consumer))
        info, created = await self._link.put_consumer(stream, complete, "put", if_match, if_none)
        return answer(request, info_response(info, created=created))

    async def patch_consumer(
        self,
        request: Request,
        stream: StreamName,
        consumer: ConsumerName,
        patch: Patch,
        pedantic: Pedantic = False,
    ) -> KitResponse:
        """Change some fields of a consumer's configuration."""
        wanted = preconditions(kit_request(request))

        async def read_and_write() -> ConsumerInfo:
            current = await self._link.consumer_info(stream, consumer)
            wanted.check(current.version)
            # The version makes sure that no change of another caller in between is lost.
            config, durable = _patched(current.config, patch), current.config.durable
            complete = _normalised(config, consumer, durable=durable, pedantic=pedantic)
            info, _ = await self._link.put_consumer(stream, complete, "put", current.version, False)
            return info

        return answer(request, info_response(await unless_overtaken(read_and_write), created=False))

    async def get_consumer(
        self, request: Request, stream: StreamName, consumer: ConsumerName
    ) -> KitResponse:
        """Return a consumer's configuration and progress."""
        info = await self._link.consumer_info(stream, consumer)
        return answer(request, info_response(info, created=False))

    async def delete_consumer(
        self, request: Request, stream: StreamName, consumer: ConsumerName
    ) -> KitResponse:
        """Delete a consumer; its waiting pulls end."""
        wanted = preconditions(kit_request(request))

        async def version() -> int:
            return (await self._link.consumer_info(stream, consumer)).version

        async def read_and_remove() -> None:
            if_match = await wanted.for_delete(version)
            await self._link.delete_consumer(stream, consumer, if_match)

        await unless_overtaken(read_and_remove)
        return answer(request, no_content())

    async def _version(self, stream: str, consumer: str) -> int | None:
        try:
            return (await self._link.consumer_info(stream, consumer)).version
        except ApiError as error:
            if error.spec is errors.CONSUMER_NOT_FOUND:
                return None
            raise


def info_response(info: ConsumerInfo, *, created: bool) -> Response:
    """Return a consumer's info with its ETag; 201 with its Location if it is new."""
    headers = [etag(info.version)]
    if created:
        stream, name = quote(info.stream, safe=""), quote(info.config.name, safe="")
        headers.append((b"location", f"/v1/streams/{stream}/consumers/{name}".encode()))
    return json_response(201 if created else 200, info_json(info), headers)


def _normalised(
    config: ConsumerConfigBody, consumer: str, *, durable: bool, pedantic: bool
) -> ConsumerConfig:
    if "name" in config.model_fields_set and config.name != consumer:
        raise invalid_field(
            "/name", f'must be "{consumer}", as in the path', errors.CONSUMER_PATH_MISMATCH
        )
    _check_durable_name(config, consumer)
    named = config.model_copy(update={"name": consumer})
    return normalise_consumer(consumer_draft(named, durable=durable), pedantic=pedantic)


def _is_ephemeral(config: ConsumerConfigBody) -> bool:
    """Return True if ``durable_name`` is null, as in the configuration of an ephemeral consumer."""
    return "durable_name" in config.model_fields_set and config.durable_name is None


def _check_durable_name(config: ConsumerConfigBody, name: str) -> None:
    if config.durable_name and config.durable_name != name:
        raise invalid_field(
            "/durable_name", f'must be "{name}", as the name', errors.CONSUMER_NAME_MISMATCH
        )


def _patched(config: ConsumerConfig, patch: dict[str, Any]) -> ConsumerConfigBody:
    shown = as_document(config_json(config))
    if "filter_subject" in patch or "filter_subjects" in patch:
        # The filters are shown in two fields; a patch of one replaces both.
        shown.update(filter_subject=None, filter_subjects=[])
    document = merged(shown, patch)
    try:
        return ConsumerConfigBody.model_validate(document)
    except ValidationError as error:
        raise invalid_model(
            {**one, "loc": ("body", *one["loc"])} for one in error.errors()
        ) from None
