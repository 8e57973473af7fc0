"""Types of fields and parameters that several management routes share."""

from typing import Annotated, Any, TypeVar

from fastapi import Body, Query
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.timeunits import INT64_MAX, parse_duration, parse_time
from contrail_edge.inputs import schema_marks
from contrail_edge.inputs.negotiation import MERGE_PATCH_TYPE

_T = TypeVar("_T")


class RequestModel(BaseModel):
    """A request body: unknown fields are refused, and nothing is coerced to another type.

    The docstrings below fields describe them in the OpenAPI document.
    """

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


def _duration_ns(value: object) -> int:
    if not isinstance(value, (str, int)):
        raise ValueError('must be a duration string such as "30s", or integer nanoseconds')
    return parse_duration(value)


def _time_ns(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError(
            'must be an RFC 3339 time with an offset, such as "2026-01-31T08:00:00.5Z"'
        )
    return parse_time(value)


def _flag(value: object) -> object:
    return True if value == "" else value


def _without_default(schema: dict[str, Any]) -> None:
    del schema["default"]


Unavailable = Annotated[_T, Field(json_schema_extra=schema_marks.UNAVAILABLE)]
"""A JetStream field that only accepts its default so far. Left out of the document."""
Name = Annotated[str, Field(json_schema_extra=_without_default)]
"""A name. It is empty if omitted, but must not be empty if given."""
Flag = Annotated[bool, BeforeValidator(_flag)]
"""A query parameter that means true when it has no value, as in all other queries."""
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
DurationNs = Annotated[
    int,
    BeforeValidator(_duration_ns),
    WithJsonSchema({"type": "string", **schema_marks.DURATION}),
]
"""A duration.

Integers are nanoseconds; the document only shows strings, which all clients can send.
"""
TimeNs = Annotated[
    int, BeforeValidator(_time_ns), WithJsonSchema({"type": "string", **schema_marks.TIME})
]
Metadata = dict[str, str]


def unavailable_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the fields that only accept their default."""
    return tuple(
        name
        for name, field in model.model_fields.items()
        if field.json_schema_extra == schema_marks.UNAVAILABLE
    )


Pedantic = Annotated[
    Flag, Query(description="Refuse the request if the server would change a given value.")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of items on a page.")]
PageToken = Annotated[str, Query(description="`next_page_token` of the previous page.")]
Patch = Annotated[
    dict[str, Any],
    Body(media_type=MERGE_PATCH_TYPE),
]


def stands_at_default(body: BaseModel, name: str) -> bool:
    """Return True if a field means the same as when it is omitted."""
    value = getattr(body, name)
    if isinstance(value, BaseModel):
        return all(stands_at_default(value, inner) for inner in type(value).model_fields)
    default = type(body).model_fields[name].default
    # JetStream's clients send 0 or -1 for no limit.
    unlimited = default == -1 and isinstance(value, int) and value <= 0
    # Empty values of any kind mean the same: null, an empty list, an empty text.
    return bool(value == default or unlimited or not (value or default))


def unavailable(spec: errors.ErrorSpec, name: str) -> ApiError:
    """Return the error for a feature that this version does not have."""
    message = "not available in this version; only the default value is accepted"
    return ApiError(spec, f"{name}: {message}", [FieldProblem(f"/{name}", message)], applied=False)
