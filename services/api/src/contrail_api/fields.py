"""Types of fields that several request bodies share."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from contrail_common.timeunits import INT64_MAX, parse_duration, parse_time
from contrail_edge.inputs import schema_marks

_T = TypeVar("_T")


class RequestModel(BaseModel):
    """A request body: unknown fields are refused, and nothing is coerced to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


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
"""A field of JetStream's that may only stand at its default here; the document leaves it out."""
Name = Annotated[str, Field(json_schema_extra=_without_default)]
"""A name that is empty when it is omitted, but must not be empty when it is given."""
Flag = Annotated[bool, BeforeValidator(_flag)]
"""A query parameter that means true when it has no value, as in all other queries."""
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
DurationNs = Annotated[
    int,
    BeforeValidator(_duration_ns),
    WithJsonSchema({"type": "string", **schema_marks.DURATION}),
]
"""Integers are nanoseconds; the document shows strings alone, which every client can write."""
TimeNs = Annotated[
    int, BeforeValidator(_time_ns), WithJsonSchema({"type": "string", **schema_marks.TIME})
]
Metadata = dict[str, str]


def unavailable_fields(model: type[BaseModel]) -> tuple[str, ...]:
    """The names of the fields that may only stand at their default."""
    return tuple(
        name
        for name, field in model.model_fields.items()
        if field.json_schema_extra == schema_marks.UNAVAILABLE
    )
