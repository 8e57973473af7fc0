"""The OpenAPI 3.1 document, made from the operations of all routes.

FastAPI lists the paths, and the parameters and bodies that pydantic knows. Everything else is added
here afterwards, because FastAPI's model of the document drops nulls and turns integers into floats.
"""

from collections.abc import Iterable, Iterator, Mapping
from inspect import cleandoc
from typing import Any, Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, ErrorSpec
from contrail_edge.http.problems import PROBLEM_TYPE, Problem, problem
from contrail_edge.openapi.field_texts import describe_as_given, describe_fields
from contrail_edge.openapi.schemas import NAMED, REF, generic, references, shown
from contrail_edge.routing import BodyDoc, Content, HeaderDoc, Operation

TITLE: Final = "Contrail HTTP API"
"""Code generators derive package names from it, and the SDK has the name ``contrail``."""

_INFO: Final[Mapping[str, Any]] = {
    "summary": "Durable message streams over HTTP.",
    "description": (
        "Streams store messages by subject, and consumers deliver them. Every error is a "
        "problem document (RFC 9457) with a stable `code` and `name`. Messages can also be "
        "published and delivered over a WebSocket at `/v1/ws`, which an AsyncAPI document "
        "describes."
    ),
    "contact": {"name": "Contrail"},
    "license": {"name": "Apache License 2.0", "identifier": "Apache-2.0"},
}
_TAGS: Final[Mapping[str, str]] = {
    "streams": "Create, change, purge, erase, archive and delete streams.",
    "publishing": "Store messages, one or many at a time.",
    "reading": "Read and delete messages without a consumer.",
    "consumers": "Create, change and delete consumers.",
    "delivery": "Pull messages from a consumer and acknowledge them.",
    "replay": "Read large ranges of messages in bulk.",
    "events": "Listen to events about streams, consumers and deliveries.",
    "cluster": "Storage nodes, and the groups that they form.",
    "service": "Health and metrics of the server.",
}

COMMON_ERRORS: Final = (
    errors.BAD_REQUEST,
    errors.UNAUTHENTICATED,
    errors.FOREIGN_HOST,
    errors.FOREIGN_ORIGIN,
    errors.REQUEST_TIMEOUT,
    errors.URI_TOO_LONG,
    errors.REQUEST_HEADERS_TOO_LARGE,
    errors.INTERNAL,
    errors.OVERLOADED,
    errors.NOT_READY,
    errors.STORAGE_FAILED,
    errors.STORAGE_READ_FAILED,
    errors.SHUTTING_DOWN,
)
BODY_ERRORS: Final = (
    errors.MALFORMED_BODY,
    errors.BODY_TOO_LARGE,
    errors.UNSUPPORTED_MEDIA,
    errors.INVALID_FIELD,
)

_PATH_PARAMETERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "stream": {
        "description": "Name of the stream.",
        "schema": {"type": "string"},
        "example": "ORDERS",
    },
    "consumer": {
        "description": "Name of the consumer.",
        "schema": {"type": "string"},
        "example": "billing",
    },
    "subject": {
        "description": (
            "A subject without wildcards: tokens separated by dots, percent-encoded where needed."
        ),
        "schema": {"type": "string"},
        "example": "orders.eu.created",
    },
    "seq": {
        "description": "Sequence of a message.",
        "schema": {"type": "integer", "minimum": 0},
        "example": 42,
    },
}

_HEADERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "X-Request-Id": {
        "description": (
            "Identifies this request in logs and errors. If the request has this header, its "
            "value is used."
        ),
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds to wait before the next attempt.",
        "schema": {"type": "integer", "format": "int32"},
    },
    "WWW-Authenticate": {
        "description": "The authentication scheme: `Bearer`.",
        "schema": {"type": "string"},
    },
}
_HEADERS_OF_STATUS: Final[Mapping[int, tuple[str, ...]]] = {
    401: ("X-Request-Id", "WWW-Authenticate"),
    429: ("X-Request-Id", "Retry-After"),
    503: ("X-Request-Id", "Retry-After"),
}


def documented(operation: Operation) -> dict[str, Any]:
    """Return the keyword arguments of a FastAPI route for ``operation``."""
    return {
        "operation_id": operation.operation_id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description,
        "status_code": next(iter(operation.answers)),
    }


def finished(document: dict[str, Any], operations: Iterable[Operation]) -> dict[str, Any]:
    """Complete the ``document`` of FastAPI with the documentation of ``operations``."""
    by_id = {operation.operation_id: operation for operation in operations}
    found = {**document.get("components", {}).get("schemas", {}), **_structs(by_id.values())}
    describe_as_given(found)
    named = {**NAMED, **{name: generic(schema) for name, schema in found.items()}}
    described = [
        (path, item[method]) for path, item in document["paths"].items() for method in item
    ]
    for path, one in described:
        _describe(one, path, by_id[one["operationId"]])
        for content in _contents(one):
            _prune_examples(content, named)
    document["info"] |= _INFO
    document["servers"] = [{"url": "/"}]
    used = {one["tags"][0] for _, one in described}
    document["tags"] = [{"name": tag, "description": _TAGS[tag]} for tag in sorted(used)]
    # An empty requirement beside the scheme: a server without a configured token asks for none.
    document["security"] = [{"bearer": []}, {}]
    document["components"] = {
        "schemas": _referred_to(document["paths"], named),
        "responses": _problem_responses(by_id.values()),
        "headers": _HEADERS,
        "examples": _problem_examples(by_id.values()),
        "securitySchemes": {
            "bearer": {"type": "http", "scheme": "bearer", "description": "The bootstrap token."}
        },
    }
    return document


def _describe(one: dict[str, Any], path: str, operation: Operation) -> None:
    """Complete one operation. FastAPI knows the parameters and body of management routes."""
    known = one.pop("parameters", None) or _path_parameters(path)
    parameters = [
        *({**each, "schema": generic(each["schema"])} for each in known),
        *_query_parameters(operation.query),
        *(
            {"name": header.name, "in": "header", "required": False, **_header(header)}
            for header in operation.headers
        ),
    ]
    for each in parameters:
        if each["schema"].get("default") == "":
            del each["schema"]["default"]  # what omitting the parameter means
    if parameters:
        one["parameters"] = parameters
    if operation.body:
        one["requestBody"] = {
            "required": operation.body_required,
            "content": _content(operation.body),
        }
    elif "requestBody" in one:
        for media in one["requestBody"]["content"].values():
            media["schema"] = generic(media["schema"])
            if operation.body_example is not None:
                media["example"] = operation.body_example
    if not operation.needs_token:
        one["security"] = []
    one["responses"] = _responses(operation)


def _contents(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the request and answer bodies of an operation by media type."""
    yield one.get("requestBody", {}).get("content", {})
    for answered in one["responses"].values():
        yield answered.get("content", {})


def _prune_examples(content: dict[str, Any], named: Mapping[str, Any]) -> None:
    for media in content.values():
        if "example" in media:
            media["example"] = shown(media["example"], media["schema"], named)


def _responses(operation: Operation) -> dict[str, Any]:
    answers = {
        str(status): {
            "description": answered.description,
            "headers": {
                **_header_refs(("X-Request-Id",)),
                **{header.name: _header(header) for header in answered.headers},
            },
            **({"content": _content(answered.content)} if answered.content else {}),
        }
        for status, answered in operation.answers.items()
    }
    refusals = {
        str(status): {
            "$ref": f"#/components/responses/Problem{status}",
            "description": "; ".join(f"`{spec.name}` ({spec.code}): {spec.title}" for spec in each),
        }
        for status, each in sorted(_by_status(_errors(operation)).items())
    }
    return {**answers, **refusals}


def _errors(operation: Operation) -> list[ErrorSpec]:
    """Return all errors of an operation, each once."""
    common = [
        spec
        for spec in COMMON_ERRORS
        if operation.needs_token or spec is not errors.UNAUTHENTICATED
    ]
    return list(
        dict.fromkeys([*common, *operation.errors, *(BODY_ERRORS if operation.body else ())])
    )


def _all_errors(operations: Iterable[Operation]) -> list[ErrorSpec]:
    return list(dict.fromkeys(spec for each in operations for spec in _errors(each)))


def _by_status(specs: Iterable[ErrorSpec]) -> dict[int, list[ErrorSpec]]:
    by_status: dict[int, list[ErrorSpec]] = {}
    for spec in specs:
        by_status.setdefault(spec.status, []).append(spec)
    return by_status


def _problem_responses(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return one response per error status; operations list their own errors beside it."""
    return {
        f"Problem{status}": {
            "description": f"Refused with {status}.",
            "headers": _header_refs(_HEADERS_OF_STATUS.get(status, ("X-Request-Id",))),
            "content": {
                PROBLEM_TYPE: {
                    "schema": {"$ref": REF.format(name=Problem.__name__)},
                    "examples": {
                        spec.name: {"$ref": f"#/components/examples/{spec.name}"} for spec in each
                    },
                }
            },
        }
        for status, each in sorted(_by_status(_all_errors(operations)).items())
    }


def _structs(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of the structs in bodies and answers of ``operations``, and Problem."""
    shapes: list[Any] = [Problem]
    for operation in operations:
        for content in (operation.body, *(each.content for each in operation.answers.values())):
            shapes += [body.shape for body in content.values()]
    kinds = {shape for shape in shapes if isinstance(shape, type)}
    by_name = sorted(kinds, key=lambda kind: kind.__name__)
    _, structs = msgspec.json.schema_components(by_name, ref_template=REF)
    describe_fields(structs, by_name)
    return with_clean_descriptions(structs)


def with_clean_descriptions(schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schemas of structs with docstrings as Markdown: no indentation, one backtick."""
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = cleandoc(schema["description"]).replace("``", "`")
    return schemas


def _referred_to(paths: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of ``named`` that ``paths`` and problems refer to, directly or indirectly."""
    wanted, found = {*references(paths), Problem.__name__}, dict[str, Any]()
    while wanted:
        name = wanted.pop()
        found[name] = named[name]
        wanted.update(other for other in references(named[name]) if other not in found)
    return dict(sorted(found.items()))


def _problem_examples(operations: Iterable[Operation]) -> dict[str, Any]:
    specs = sorted(_all_errors(operations), key=lambda spec: spec.name)
    return {spec.name: {"value": msgspec.to_builtins(problem(ApiError(spec)))} for spec in specs}


def _header_refs(names: Iterable[str]) -> dict[str, Any]:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _header(header: HeaderDoc) -> dict[str, Any]:
    return {
        "description": header.description,
        "schema": {"type": "string"},
        "example": header.example,
    }


def _content(content: Content) -> dict[str, Any]:
    return {media_type: _media(body) for media_type, body in content.items()}


def _media(body: BodyDoc) -> dict[str, Any]:
    if isinstance(body.shape, type):
        schema = {"$ref": REF.format(name=body.shape.__name__)}
    else:
        schema = generic(body.shape)
    return {"schema": schema, **({} if body.example is None else {"example": body.example})}


def _path_parameters(template: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in template.split("/") if part[:1] == "{"]
    return [
        {"name": name, "in": "path", "required": True, **_PATH_PARAMETERS[name]} for name in names
    ]


def _query_parameters(shape: type[msgspec.Struct] | None) -> list[dict[str, Any]]:
    if shape is None:
        return []
    _, components = msgspec.json.schema_components([shape])
    describe_fields(components, [shape])
    parameters = []
    for name, schema in components[shape.__name__]["properties"].items():
        described = generic(schema)
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": described.pop("description", ""),
                "schema": described,
            }
        )
    return parameters
