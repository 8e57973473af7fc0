"""Changing a configuration: preconditions, merge patches (RFC 7396), and concurrent changes."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError, FieldProblem
from contrail_edge.inputs.negotiation import MERGE_PATCH_TYPE
from contrail_edge.routing import BodyDoc, HeaderDoc

ETAG: Final = HeaderDoc(
    name="ETag", description="Version of the configuration, for If-Match.", example='"3"'
)
LOCATION: Final = HeaderDoc(
    name="Location", description="Path of the new resource.", example="/v1/streams/ORDERS"
)
IF_MATCH: Final = HeaderDoc(
    name="If-Match",
    description="`ETag` of an earlier answer: change the configuration only if it still has this "
    "version; otherwise answer 412.",
    example='"3"',
)
IF_NONE_MATCH: Final = HeaderDoc(
    name="If-None-Match",
    description="`*`: only create; answer 412 if it already exists.",
    example="*",
)
PATCH_BODY: Final = {
    MERGE_PATCH_TYPE: BodyDoc(
        shape={
            "type": "object",
            "additionalProperties": True,
            "description": (
                "JSON merge patch (RFC 7396): the fields to change. null resets a field to "
                "its default."
            ),
        },
        example={"description": None, "metadata": {"team": "billing"}},
    )
}
_T = TypeVar("_T")
_RETRIES: Final = 4


def merged(target: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Apply ``patch`` to ``target``: null removes a member, objects are merged member by member."""
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            # A patch of a member that is no object replaces it by an object (RFC 7396).
            below = result.get(name)
            result[name] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result


def as_document(shown: msgspec.Struct) -> dict[str, Any]:
    """Return a configuration as the JSON object in answers."""
    document: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(shown))
    return document


async def unless_overtaken(read_and_write: Callable[[], Awaitable[_T]]) -> _T:
    """Return the result of ``read_and_write``; repeat it if another change came in between."""
    for _ in range(_RETRIES):
        try:
            return await read_and_write()
        except ApiError as error:
            # The caller's own If-Match may be what fails. Then each attempt fails in the same way.
            if error.spec is not errors.PRECONDITION_FAILED:
                raise
    return await read_and_write()


_SHOWN_CHARS_MAX: Final = 200
"""Longer values, such as lists of subjects, are cut."""


def exists_otherwise(error: ApiError, existing: msgspec.Struct, wanted: msgspec.Struct) -> ApiError:
    """Return ``error`` with an entry for each field in which two configurations differ."""
    fields = [
        FieldProblem(f"/{name}", f"is {_shown(getattr(existing, name))}, not {_shown(asked)}")
        for name, asked in msgspec.structs.asdict(wanted).items()
        if getattr(existing, name) != asked
    ]
    return ApiError(error.spec, error.detail, fields, applied=False)


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
