"""Types of fields that several request bodies share."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from contrail_common.timeunits import INT64_MAX, parse_duration, parse_time


class RequestModel(BaseModel):
    """A request body: unknown fields are refused, and nothing is coerced to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _duration_ns(value: object) -> int:
    if not isinstance(value, (str, int)):
        raise ValueError('a duration is a string such as "30s" or integer nanoseconds')
    return parse_duration(value)


def _time_ns(value: object) -> int:
    if not isinstance(value, str):
        raise ValueError('a time is RFC 3339 with an offset, such as "2026-01-31T08:00:00.5Z"')
    return parse_time(value)


def _flag(value: object) -> object:
    return True if value == "" else value


DURATION_SCHEMA: Final[dict[str, Any]] = {
    "anyOf": [{"type": "string", "examples": ["90s", "1h30m"]}, {"type": "integer"}],
    "description": "A duration: a Go-style string, or integer nanoseconds.",
}

Flag = Annotated[bool, BeforeValidator(_flag)]
"""A query parameter that means true when it has no value, as in all other queries."""
Int64 = Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)]
DurationNs = Annotated[int, BeforeValidator(_duration_ns), WithJsonSchema(DURATION_SCHEMA)]
TimeNs = Annotated[
    int,
    BeforeValidator(_time_ns),
    WithJsonSchema({"type": "string", "format": "date-time"}),
]
Metadata = dict[str, str]
