"""What a creation is told when another configuration has the name already."""

from typing import Final

import msgspec

from contrail_common.errors import ApiError, FieldProblem

_SHOWN_CHARS_MAX: Final = 200
"""A list of subjects may be as long as a request; the reader knows it by its beginning."""


def exists_otherwise(error: ApiError, existing: msgspec.Struct, wanted: msgspec.Struct) -> ApiError:
    """The refusal `error` with an entry for each field in which two shown configurations differ."""
    fields = [
        FieldProblem(f"/{name}", f"is {_shown(getattr(existing, name))}, not {_shown(asked)}")
        for name, asked in msgspec.structs.asdict(wanted).items()
        if getattr(existing, name) != asked
    ]
    return ApiError(error.spec, error.detail, fields, applied=False)


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}..."
