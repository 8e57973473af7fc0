"""The OpenAPI 3.1 document: operations as the routes declare them, one problem form for errors."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from contrail_common import errors
from contrail_common.edge.problems import PROBLEM_TYPE, Problem, problem
from contrail_common.edge.routing import Body, Content, HeaderDoc, Operation
from contrail_common.errors import ApiError, ErrorSpec

_REF: Final = "#/components/schemas/{name}"

COMMON_ERRORS: Final = (
    errors.BAD_REQUEST,
    errors.UNAUTHENTICATED,
    errors.FOREIGN_HOST,
    errors.FOREIGN_ORIGIN,
    errors.METHOD_NOT_ALLOWED,
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
        "description": "A literal subject: tokens joined by dots, percent-encoded where needed.",
        "schema": {"type": "string"},
        "example": "orders.eu.created",
    },
    "seq": {
        "description": "Sequence of a message.",
        "schema": {"type": "integer", "format": "int64", "minimum": 0},
        "example": 42,
    },
}

_REQUEST_ID: Final = {
    "description": "Identifies this request in logs and problems; taken from the request when that "
    "has one.",
    "schema": {"type": "string"},
}
_REQUEST_ID_REF: Final = {"X-Request-Id": {"$ref": "#/components/headers/X-Request-Id"}}


def documented(operation: Operation) -> dict[str, Any]:
    """The keyword arguments of a FastAPI route that carry ``operation``, without its inputs."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {
            "description": answered.description,
            "headers": {**_REQUEST_ID_REF, **_header_docs(answered.headers)},
            **({"content": _content(answered.content)} if answered.content else {}),
        }
        for status, answered in operation.answers.items()
    }
    refusals = (*COMMON_ERRORS, *operation.errors)
    responses.update(_problems(refusals if not operation.body else (*refusals, *BODY_ERRORS)))
    return {
        "operation_id": operation.operation_id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": operation.description,
        "status_code": next(iter(operation.answers)),
        "responses": responses,
    }


def parameters_and_body(template: str, operation: Operation) -> dict[str, Any]:
    """The inputs of a data-plane route, for ``openapi_extra``."""
    inputs: dict[str, Any] = {
        "parameters": [
            *_path_parameters(template),
            *_query_parameters(operation.query),
            *(
                {
                    "name": header.name,
                    "in": "header",
                    "required": False,
                    "description": header.description,
                    "schema": {"type": "string"},
                    "example": header.example,
                }
                for header in operation.headers
            ),
        ]
    }
    if operation.body:
        inputs["requestBody"] = {
            "required": operation.body_required,
            "content": _content(operation.body),
        }
    return inputs


def shapes_of(operations: Iterable[Operation]) -> set[type[msgspec.Struct]]:
    """The structs that the bodies and answers of ``operations`` refer to."""
    contents: list[Content] = []
    for operation in operations:
        contents.append(operation.body)
        contents.extend(answered.content for answered in operation.answers.values())
    return {
        body.shape
        for content in contents
        for body in content.values()
        if isinstance(body.shape, type)
    }


def finished(document: dict[str, Any], shapes: Iterable[type[msgspec.Struct]]) -> dict[str, Any]:
    """``document`` as FastAPI made it, with the structs' schemas and the security scheme."""
    used: set[type[msgspec.Struct]] = {*shapes}
    types = sorted(used | {Problem}, key=lambda shape: shape.__name__)
    _, structs = msgspec.json.schema_components(types, ref_template=_REF)
    components = document.setdefault("components", {})
    schemas = {**components.get("schemas", {}), **structs}
    _drop_fastapi_errors(document, schemas)
    components["schemas"] = dict(sorted(schemas.items()))
    components["examples"] = {
        name: {"value": msgspec.to_builtins(problem(ApiError(spec)))}
        for name, spec in sorted(errors.BY_NAME.items())
    }
    components["headers"] = {"X-Request-Id": _REQUEST_ID}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "The bootstrap token."}
    }
    # An empty requirement beside the scheme: a server without a configured token asks for none.
    document["security"] = [{"bearer": []}, {}]
    document["servers"] = [{"url": "/"}]
    return document


def _drop_fastapi_errors(document: dict[str, Any], schemas: dict[str, Any]) -> None:
    # FastAPI describes its own 422 wherever there are parameters; no request gets that answer.
    for own in ("HTTPValidationError", "ValidationError"):
        schemas.pop(own, None)
    for item in document["paths"].values():
        for operation in item.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if PROBLEM_TYPE not in content:
                operation["responses"].pop("422", None)


def _problems(specs: Iterable[ErrorSpec]) -> dict[int | str, dict[str, Any]]:
    by_status: dict[int, list[ErrorSpec]] = {}
    for spec in specs:
        known = by_status.setdefault(spec.status, [])
        if spec not in known:
            known.append(spec)
    return {
        status: {
            "description": "; ".join(f"`{spec.name}` ({spec.code}): {spec.title}" for spec in each),
            "headers": _REQUEST_ID_REF,
            "content": {
                PROBLEM_TYPE: {
                    "schema": {"$ref": _REF.format(name=Problem.__name__)},
                    "examples": {
                        spec.name: {"$ref": f"#/components/examples/{spec.name}"} for spec in each
                    },
                }
            },
        }
        for status, each in sorted(by_status.items())
    }


def _content(content: Content) -> dict[str, Any]:
    return {media_type: _media(body) for media_type, body in content.items()}


def _media(body: Body) -> dict[str, Any]:
    if isinstance(body.shape, type):
        schema: Mapping[str, Any] = {"$ref": _REF.format(name=body.shape.__name__)}
    else:
        schema = body.shape
    return {"schema": schema, **({} if body.example is None else {"example": body.example})}


def _header_docs(headers: Iterable[HeaderDoc]) -> dict[str, Any]:
    return {
        header.name: {
            "description": header.description,
            "schema": {"type": "string"},
            "example": header.example,
        }
        for header in headers
    }


def _path_parameters(template: str) -> list[dict[str, Any]]:
    names = [part[1:-1] for part in template.split("/") if part[:1] == "{"]
    return [
        {"name": name, "in": "path", "required": True, **_PATH_PARAMETERS[name]} for name in names
    ]


def _query_parameters(shape: type[msgspec.Struct] | None) -> list[dict[str, Any]]:
    if shape is None:
        return []
    _, components = msgspec.json.schema_components([shape])
    parameters = []
    for name, schema in components[shape.__name__]["properties"].items():
        described = {key: value for key, value in schema.items() if key != "description"}
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": schema.get("description", ""),
                "schema": described,
            }
        )
    return parameters
