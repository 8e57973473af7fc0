"""What `ensure_stream` and `ensure_consumer` do about a configuration that is there already.

They leave it as it is. Where a field that was asked for has another value there, they say so: by a
`ConfigDiffers` warning, and in `differs` of what they return. Fields that were not given are not
compared.
"""

import warnings
from collections.abc import Mapping
from typing import Any, Final

from contrail_client.errors import Conflict, ContrailError
from contrail_client.models import Difference

ATTEMPTS: Final = 3
"""It may be deleted between the refusal to create it and the look at what is there."""

_EXISTS: Final = ("stream_exists", "consumer_exists")


class ConfigDiffers(UserWarning):
    """A stream or consumer that was to be ensured exists with other values than asked for."""


def exists_otherwise(error: ContrailError) -> bool:
    """Whether creating was refused because of another configuration under the name."""
    return isinstance(error, Conflict) and error.name in _EXISTS


def differences(
    refusal: Conflict, asked: Mapping[str, Any], existing: Mapping[str, Any]
) -> tuple[Difference, ...]:
    """The fields given in `asked` that the server said to differ."""
    named = {each.pointer.removeprefix("/") for each in refusal.errors}
    return tuple(
        Difference(name, wanted, existing.get(name))
        for name, wanted in asked.items()
        if name in named and not _holds(wanted, existing.get(name))
    )


def warn(what: str, differs: tuple[Difference, ...]) -> None:
    """Warn whoever called the method that calls this."""
    if differs:
        fields = ", ".join(map(str, differs))
        message = f"{what} already exists and was not changed: {fields}"
        warnings.warn(message, ConfigDiffers, stacklevel=3)


def _holds(wanted: Any, existing: Any) -> bool:
    """Whether each entry that is wanted of a table is there."""
    return (
        isinstance(wanted, Mapping)
        and isinstance(existing, Mapping)
        and all(existing.get(name) == value for name, value in wanted.items())
    )
