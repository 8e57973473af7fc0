"""Types of wire fields that say more to the OpenAPI document than Python's own types do.

msgspec copies ``extra_json_schema`` into the JSON Schema of a field. The document's rules
(``contrail_edge.openapi.schemas``) read the marks; decoding and encoding ignore them.
"""

from typing import Annotated, Any, Final, TypeVar

import msgspec

_T = TypeVar("_T")

DURATION: Final[dict[str, Any]] = {"format": "go-duration"}
"""A duration: documented as the one schema ``Duration``, whatever else a field accepts."""
TTL: Final[dict[str, Any]] = {"format": "ttl"}
"""A time to live: documented as the one schema ``TimeToLive``."""
JSON: Final[dict[str, Any]] = {"format": "json"}
"""Any JSON value: documented as an object, since Java's clients send null for one left out."""
TIME: Final[dict[str, Any]] = {"format": "date-time"}
UNAVAILABLE: Final[dict[str, Any]] = {"x-unavailable": True}
"""A field of JetStream's that only takes its default so far: left out of the document."""

DurationText = Annotated[str, msgspec.Meta(extra_json_schema=DURATION)]
TimeText = Annotated[str, msgspec.Meta(extra_json_schema=TIME)]
Unavailable = Annotated[_T, msgspec.Meta(extra_json_schema=UNAVAILABLE)]
