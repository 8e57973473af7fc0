"""Query parameters: declared once as a struct, which parses them and describes them in OpenAPI."""

import functools
from typing import Any, TypeVar

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_common.subjects import filter_problem
from contrail_common.timeunits import parse_duration, parse_time
from contrail_edge.http.problems import invalid_field
from contrail_edge.inputs.json_body import mistyped
from contrail_edge.inputs.paths import percent_decode

_T = TypeVar("_T", bound=msgspec.Struct)

PARAMETERS_MAX = 64
WAIT_MAX_NS = 60_000_000_000
"""Maximum time for which a request may wait for messages."""


def parse_query(query_string: bytes, shape: type[_T]) -> _T:
    """Return the parameters that ``shape`` declares.

    Others are ignored; a flag without value is true.

    Raises INVALID_FIELD with the name of the parameter, or BAD_REQUEST for an invalid escape.
    """
    if not query_string:
        defaults: _T = _defaults(shape)
        return defaults
    given = _pairs(query_string)
    for name in _flags(shape):
        if given.get(name) == "":
            given[name] = "true"
    try:
        return msgspec.convert(given, shape, strict=False)
    except msgspec.ValidationError as error:
        refusal = mistyped(error)
        fields = [FieldProblem(one.pointer.lstrip("/"), one.message) for one in refusal.fields]
        raise ApiError(refusal.spec, refusal.detail.lstrip("/"), fields) from None


def _pairs(query_string: bytes) -> dict[str, str]:
    try:
        parts = query_string.decode("ascii").replace("+", " ").split("&")
    except UnicodeDecodeError:
        raise ApiError(errors.BAD_REQUEST, "the query is not ASCII") from None
    if len(parts) > PARAMETERS_MAX:
        raise ApiError(errors.BAD_REQUEST, f"the query has more than {PARAMETERS_MAX} parameters")
    pairs: dict[str, str] = {}
    for part in filter(None, parts):
        name, _, value = part.partition("=")
        name = percent_decode(name)
        if name in pairs:
            raise invalid_field(name, "must not be given more than once")
        pairs[name] = percent_decode(value)
    return pairs


@functools.lru_cache(maxsize=64)
def _defaults(shape: type[msgspec.Struct]) -> Any:
    return msgspec.convert({}, shape)


@functools.lru_cache(maxsize=64)
def _flags(shape: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(
        one.encode_name
        for one in msgspec.structs.fields(shape)
        # An annotated type has the bare one as its origin.
        if getattr(one.type, "__origin__", one.type) is bool
    )


def duration_parameter(name: str, text: str, *, maximum_ns: int = WAIT_MAX_NS) -> int:
    """Return the nanoseconds of the duration ``text``, from 0 to ``maximum_ns``.

    0 if it is empty.
    """
    if not text:
        return 0
    try:
        duration_ns = parse_duration(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise invalid_field(name, str(error)) from None
    if not 0 <= duration_ns <= maximum_ns:
        raise invalid_field(name, f"must be between 0 and {maximum_ns // 1_000_000_000}s")
    return duration_ns


def time_parameter(name: str, text: str) -> int:
    """Return the nanoseconds of the RFC 3339 time ``text``, at least 1.

    0 (no time) if it is empty.
    """
    if not text:
        return 0
    try:
        return max(1, parse_time(text))
    except ValueError as error:
        raise invalid_field(name, str(error)) from None


def filter_parameter(name: str, text: str) -> str:
    """Return ``text`` if it is empty or a valid subject filter; otherwise raise INVALID_SUBJECT."""
    problem = filter_problem(text) if text else None
    if problem is not None:
        raise invalid_field(name, problem, errors.INVALID_SUBJECT)
    return text
