"""PATCH: JSON Merge Patch (RFC 7396), and writing a change that nobody else overtook."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError

_T = TypeVar("_T")

_RETRIES: Final = 4


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """``target`` with ``patch`` laid over it: null removes a member, objects merge member-wise."""
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            below = result.get(name)
            result[name] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result


def as_document(shown: msgspec.Struct) -> dict[str, Any]:
    """A configuration as the JSON object that its reader saw."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(shown))
    return document


async def unless_overtaken(read_and_write: Callable[[], Awaitable[_T]]) -> _T:
    """The result of ``read_and_write``, tried again while others write between its two halves."""
    for _ in range(_RETRIES):
        try:
            return await read_and_write()
        except ApiError as error:
            if error.spec is not errors.PRECONDITION_FAILED:
                raise
    return await read_and_write()
