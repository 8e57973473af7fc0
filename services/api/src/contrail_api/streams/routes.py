"""Management of streams: create, replace, change, list, delete, purge, seal."""

from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from pydantic import Field, ValidationError
from starlette.requests import Request

from contrail_api.changes import (
    IF_MATCH,
    IF_NONE_MATCH,
    PATCH_BODY,
    as_document,
    exists_otherwise,
    merged,
    unless_overtaken,
)
from contrail_api.fields import Int64, Limit, PageToken, Patch, Pedantic, RequestModel
from contrail_api.reading.parameters import POSITION, read_as
from contrail_api.streams.config import StreamConfigBody, stream_draft
from contrail_api.streams.shown import (
    COLLECTION,
    CREATED,
    EXAMPLE,
    FOUND,
    Purged,
    SteppedDown,
    StreamPage,
    config_json,
    info_json,
    info_response,
)
from contrail_common import errors
from contrail_common.config_rules import normalise_stream, sealed
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.model import StreamConfig, StreamInfo
from contrail_edge.http.problems import invalid_field
from contrail_edge.http.responses import encoded, json_response, no_content
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.turns import in_turns
from contrail_edge.inputs.preconditions import preconditions
from contrail_edge.inputs.query import filter_parameter
from contrail_edge.openapi.declared import (
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

RESOURCE: Final = "/v1/streams/{stream}"


class PurgeBody(RequestModel):
    """Which messages to remove. Default: all messages."""

    subject: str = Field(default="", description="Filter: only messages with matching subjects.")
    up_to_seq: Int64 | None = Field(
        default=None, ge=1, description="Only messages below this sequence (exclusive)."
    )
    keep: Int64 | None = Field(default=None, ge=0, description="Number of newest messages to keep.")
    shard: Int64 | None = Field(
        default=None,
        ge=0,
        description="Only messages of this shard. Required with up_to_seq if the stream has "
        "several shards.",
    )


class StepDownBody(RequestModel):
    """Which node should lead the stream. Default: the one that has most of it."""

    preferred: str = Field(default="", description="Name of a node that has a replica.")


_TAG: Final = "streams"
_CONFIG_ERRORS: Final = (
    *BODY_ERRORS,
    errors.STREAM_CONFIG_INVALID,
    errors.STREAM_NAME_SEPARATOR,
    errors.REPLICAS_UNSUPPORTED,
    errors.REPLICAS_NEGATIVE,
    errors.PEDANTIC,
    errors.SUBJECT_OVERLAP,
    errors.STREAM_LIMIT,
    errors.OUTCOME_UNKNOWN,
)
_UPDATE_ERRORS: Final = (
    *_CONFIG_ERRORS,
    errors.STREAM_NAME_MISMATCH,
    errors.STREAM_UPDATE_REFUSED,
    errors.PRECONDITION_FAILED,
)
LIST: Final = Operation(
    operation_id="list_streams",
    tag=_TAG,
    summary="List streams",
    description="Lists streams by name, in pages.",
    answers={
        200: AnswerDoc(
            description="A page of streams.",
            content={
                "application/json": BodyDoc(
                    shape=StreamPage, example={"items": [EXAMPLE], "next_page_token": None}
                )
            },
        )
    },
    errors=(errors.INVALID_FIELD, errors.INVALID_SUBJECT),
)
CREATE: Final = Operation(
    operation_id="create_stream",
    tag=_TAG,
    summary="Create a stream",
    description="If an identical stream already exists, the answer is 200. A stream with the same "
    "name and a different configuration is refused.",
    answers={201: CREATED, 200: FOUND},
    errors=(*_CONFIG_ERRORS, errors.STREAM_EXISTS),
)
PUT: Final = Operation(
    operation_id="put_stream",
    # Without a name: it must be that of the path, which the reader chooses.
    body_example={"subjects": ["orders.>"], "max_age": "7d"},
    tag=_TAG,
    summary="Create or replace a stream's configuration",
    description="Omitted fields take their defaults. With `If-None-Match: *` a stream is only "
    "created, never replaced. With `If-Match` the configuration is only replaced if it "
    "has the given version.",
    headers=(IF_MATCH, IF_NONE_MATCH),
    answers={200: FOUND, 201: CREATED},
    errors=_UPDATE_ERRORS,
)
PATCH: Final = Operation(
    operation_id="patch_stream",
    tag=_TAG,
    summary="Change fields of a stream's configuration",
    description="Applies a JSON merge patch to the configuration.",
    headers=(IF_MATCH,),
    body=PATCH_BODY,
    answers={200: FOUND},
    errors=(*_UPDATE_ERRORS, errors.STREAM_NOT_FOUND),
)
GET: Final = Operation(
    operation_id="get_stream",
    tag=_TAG,
    summary="Get a stream's configuration and state",
    description="The ETag is the version of the configuration. Changes of the state do not "
    "affect it.",
    answers={200: replace(FOUND, headers=(*FOUND.headers, *POSITION))},
    errors=(errors.STREAM_NOT_FOUND,),
)
DELETE: Final = Operation(
    operation_id="delete_stream",
    tag=_TAG,
    summary="Delete a stream",
    description="Deletes the stream with its messages and consumers.",
    headers=(IF_MATCH,),
    answers={204: AnswerDoc(description="The stream was deleted.")},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)
PURGE: Final = Operation(
    operation_id="purge_stream",
    tag=_TAG,
    summary="Purge messages of a stream",
    description="Removes all messages, only those with matching subjects, only those below "
    "`up_to_seq` (exclusive), or all but the newest `keep`. A purge does not affect "
    "duplicate detection: the ids of removed messages are still remembered. For a stream "
    "with several shards, `up_to_seq` requires `shard`, and so does `keep` unless all "
    "matching subjects are in one shard.",
    answers={
        200: AnswerDoc(
            description="The number of messages removed.",
            content={"application/json": BodyDoc(shape=Purged, example={"purged": 2})},
        )
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.STREAM_SEALED,
        errors.PURGE_DENIED,
        errors.CONFLICTING_FIELDS,
        errors.INVALID_SUBJECT,
        errors.OUTCOME_UNKNOWN,
    ),
)
STEP_DOWN: Final = Operation(
    operation_id="step_down_stream_leader",
    tag=_TAG,
    summary="Make another node the leader of a stream",
    description="The leader of the stream hands over to the `preferred` node, or to the replica "
    "that has most. Requests wait meanwhile. Other streams may move with it, because "
    "several streams are led together. After a minute the node that should lead them "
    "may lead them again.",
    answers={
        200: AnswerDoc(
            description="The node that leads the stream now.",
            content={"application/json": BodyDoc(shape=SteppedDown, example={"leader": "n2"})},
        )
    },
    errors=(
        *BODY_ERRORS,
        errors.STREAM_NOT_FOUND,
        errors.NOT_REPLICATED,
        errors.NO_FIT_PEER,
        errors.OUTCOME_UNKNOWN,
    ),
)
SEAL: Final = Operation(
    operation_id="seal_stream",
    tag=_TAG,
    summary="Seal a stream",
    description="Makes the stream read-only for good. No message can be published, removed, or "
    "expire any more.",
    headers=(IF_MATCH,),
    answers={200: FOUND},
    errors=(errors.STREAM_NOT_FOUND, errors.PRECONDITION_FAILED, errors.OUTCOME_UNKNOWN),
)


class StreamRoutes:
    """The management routes of streams, over one storage link."""

    def __init__(self, link: StorageLink, settings: EdgeSettings) -> None:
        self._link = link

    def add_to(self, router: APIRouter) -> None:
        """Add the routes with their documentation."""
        manage(router, "GET", COLLECTION, self.list_streams, LIST)
        manage(router, "POST", COLLECTION, self.create_stream, CREATE)
        manage(router, "PUT", RESOURCE, self.put_stream, PUT)
        manage(router, "PATCH", RESOURCE, self.patch_stream, PATCH)
        manage(router, "GET", RESOURCE, self.get_stream, GET)
        manage(router, "DELETE", RESOURCE, self.delete_stream, DELETE)
        manage(router, "POST", f"{RESOURCE}/purge", self.purge_stream, PURGE)
        manage(router, "POST", f"{RESOURCE}/seal", self.seal_stream, SEAL)
        manage(router, "POST", f"{RESOURCE}/leader/stepdown", self.step_down, STEP_DOWN)

    async def list_streams(
        self,
        request: Request,
        subject: Annotated[
            str, Query(description="Only streams with a subject that overlaps this one.")
        ] = "",
        prefix: Annotated[
            str, Query(description="Only streams whose name starts with this prefix.")
        ] = "",
        limit: Limit = 256,
        page_token: PageToken = "",
    ) -> KitResponse:
        """List streams by name, in pages."""
        filter_parameter("subject", subject)
        page = await self._link.list_streams(subject, prefix, limit, page_token)
        items = await in_turns(encoded(page.streams, info_json))
        return answer(request, json_response(200, StreamPage(items, page.next_token)))

    async def create_stream(
        self, request: Request, config: StreamConfigBody, pedantic: Pedantic = False
    ) -> KitResponse:
        """Create a stream; return an identical one that exists."""
        if not config.name:
            raise invalid_field("/name", "is required", errors.STREAM_CONFIG_INVALID)
        complete = self._normalised(config, pedantic=pedantic)
        try:
            info, created = await self._link.put_stream(complete, "create", None, False)
        except ApiError as error:
            # If it was deleted in the meantime, there is no configuration to compare with.
            if error.spec is not errors.STREAM_EXISTS or await self._version(config.name) is None:
                raise
            # Name the fields that differ: the program probably has an old configuration.
            existing = (await self._link.stream_info(config.name)).config
            shown = config_json(existing), config_json(complete)
            raise exists_otherwise(error, *shown) from None
        return answer(request, info_response(info, created=created))

    async def put_stream(
        self,
        request: Request,
        stream: StreamName,
        config: StreamConfigBody,
        pedantic: Pedantic = False,
    ) -> KitResponse:
        """Create a stream, or replace its configuration."""
        _check_name(config, stream)
        complete = self._normalised(named(config, stream), pedantic=pedantic)
        wanted = preconditions(kit_request(request))
        if_match, if_none = await wanted.for_put(lambda: self._version(stream))
        info, created = await self._link.put_stream(complete, "put", if_match, if_none)
        return answer(request, info_response(info, created=created))

    async def patch_stream(
        self, request: Request, stream: StreamName, patch: Patch, pedantic: Pedantic = False
    ) -> KitResponse:
        """Change some fields of a stream's configuration."""
        wanted = preconditions(kit_request(request))

        async def read_and_write() -> StreamInfo:
            current = await self._link.stream_info(stream)
            wanted.check(current.version)
            # The version makes sure that no change of another caller in between is lost.
            config = _patched(current.config, patch)
            _check_name(config, stream)
            complete = self._normalised(config, pedantic=pedantic)
            info, _ = await self._link.put_stream(complete, "put", current.version, False)
            return info

        return answer(request, info_response(await unless_overtaken(read_and_write), created=False))

    async def get_stream(
        self,
        request: Request,
        stream: StreamName,
        consistency: Annotated[
            Literal["leader", "any"],
            Query(description="Which replica answers. With `any` it may be up to 10 s behind."),
        ] = "leader",
    ) -> KitResponse:
        """Return a stream's configuration and state."""

        async def read(replica: str) -> StreamInfo:
            return await self._link.stream_info(stream, replica)

        info, position = await read_as(consistency, self._link, stream, None, read)
        response = info_response(info, created=False)
        response.headers.extend(position)
        return answer(request, response)

    async def delete_stream(self, request: Request, stream: StreamName) -> KitResponse:
        """Delete a stream with its messages and consumers."""
        wanted = preconditions(kit_request(request))

        async def version() -> int:
            return (await self._link.stream_info(stream)).version

        async def read_and_remove() -> None:
            await self._link.delete_stream(stream, await wanted.for_delete(version))

        await unless_overtaken(read_and_remove)
        return answer(request, no_content())

    async def purge_stream(
        self, request: Request, stream: StreamName, purge: PurgeBody | None = None
    ) -> KitResponse:
        """Remove messages of a stream."""
        asked = purge or PurgeBody()
        if asked.keep is not None and asked.up_to_seq is not None:
            message = "keep and up_to_seq cannot be used together"
            raise ApiError(
                errors.CONFLICTING_FIELDS, message, [FieldProblem("/keep", message)], applied=False
            )
        filter_parameter("/subject", asked.subject)
        purged = await self._link.purge_stream(
            stream, asked.subject, asked.up_to_seq or 0, asked.keep or 0, asked.shard
        )
        return answer(request, json_response(200, Purged(purged)))

    async def step_down(
        self, request: Request, stream: StreamName, body: StepDownBody | None = None
    ) -> KitResponse:
        """Make another node the leader of a stream."""
        leader = await self._link.step_down(stream, body.preferred if body else "")
        return answer(request, json_response(200, SteppedDown(leader)))

    async def seal_stream(self, request: Request, stream: StreamName) -> KitResponse:
        """Make a stream read-only for good: no message is added, removed, or expires."""
        wanted = preconditions(kit_request(request))

        async def read_and_write() -> StreamInfo:
            current = await self._link.stream_info(stream)
            wanted.check(current.version)
            config = sealed(current.config)
            info, _ = await self._link.put_stream(config, "put", current.version, False)
            return info

        return answer(request, info_response(await unless_overtaken(read_and_write), created=False))

    def _normalised(self, body: StreamConfigBody, *, pedantic: bool) -> StreamConfig:
        return normalise_stream(stream_draft(body), pedantic=pedantic)

    async def _version(self, stream: str) -> int | None:
        try:
            return (await self._link.stream_info(stream)).version
        except ApiError as error:
            if error.spec is errors.STREAM_NOT_FOUND:
                return None
            raise


def named(config: StreamConfigBody, stream: str) -> StreamConfigBody:
    """Return ``config`` with the name in the path."""
    return config.model_copy(update={"name": stream})


def _check_name(config: StreamConfigBody, stream: str) -> None:
    if "name" in config.model_fields_set and config.name != stream:
        raise invalid_field(
            "/name", f'must be "{stream}", as in the path', errors.STREAM_NAME_MISMATCH
        )


def _patched(config: StreamConfig, patch: dict[str, Any]) -> StreamConfigBody:
    # If the patch removes `name`, it takes its default: the name in the path.
    document = merged(as_document(config_json(config)), patch)
    document.setdefault("name", config.name)
    try:
        return StreamConfigBody.model_validate(document)
    except ValidationError as error:
        raise invalid_model(
            {**one, "loc": ("body", *one["loc"])} for one in error.errors()
        ) from None
