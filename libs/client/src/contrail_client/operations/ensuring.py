"""The comparison of configurations in `ensure_stream` and `ensure_consumer`.

They never change an existing configuration. If it has another value for a requested field, they
report that: by a `ConfigDiffers` warning, and in `differs` of the result. Only requested fields are
compared.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final

from contrail_client.errors import Conflict, ContrailError
from contrail_client.models import Difference

ATTEMPTS: Final = 3
"""Attempts to create and then read: another client may delete it between the two."""

_EXISTS: Final = ("stream_exists", "consumer_exists")


class ConfigDiffers(UserWarning):
    """A stream or consumer exists with other values than `ensure_...` requested."""


def exists_otherwise(error: ContrailError) -> bool:
    """Whether the name exists with another configuration."""
    return isinstance(error, Conflict) and error.name in _EXISTS


def differences(
    refusal: Conflict, asked: Mapping[str, Any], existing: Mapping[str, Any]
) -> tuple[Difference, ...]:
    """The fields of `asked` that differ according to the server's refusal."""
    named = {each.pointer.removeprefix("/") for each in refusal.errors}
    return tuple(
        Difference(name, wanted, existing.get(name))
        for name, wanted in asked.items()
        if name in named and not _holds(wanted, existing.get(name))
    )


def warn(what: str, differs: tuple[Difference, ...]) -> None:
    """Issue the warning, with the line that called the client's method as its source."""
    if differs:
        fields = ", ".join(map(str, differs))
        message = f"{what} already exists and was not changed: {fields}"
        warnings.warn(message, ConfigDiffers, stacklevel=3)


def _holds(wanted: Any, existing: Any) -> bool:
    """Whether a nested table has all wanted entries. It may have further ones, the defaults."""
    return (
        isinstance(wanted, Mapping)
        and isinstance(existing, Mapping)
        and all(existing.get(name) == value for name, value in wanted.items())
    )
