"""Types of wire fields that carry marks for the OpenAPI document.

msgspec copies ``extra_json_schema`` into the JSON Schema of a field. The document's rules
(``contrail_edge.openapi.schemas``) read the marks; decoding and encoding ignore them.
"""

from typing import Annotated, Any, Final, TypeVar

import msgspec

_T = TypeVar("_T")

DURATION: Final[dict[str, Any]] = {"format": "go-duration"}
"""A duration. Documented as the schema ``Duration``, even if the field also accepts other forms."""
TTL: Final[dict[str, Any]] = {"format": "ttl"}
"""A time to live. Documented as the schema ``TimeToLive``."""
JSON: Final[dict[str, Any]] = {"format": "json"}
"""Any JSON value. Documented as an object, because Java clients send null for an omitted value."""
TIME: Final[dict[str, Any]] = {"format": "date-time"}
UNAVAILABLE: Final[dict[str, Any]] = {"x-unavailable": True}
"""A JetStream field that only accepts its default so far. Left out of the document."""

DurationText = Annotated[str, msgspec.Meta(extra_json_schema=DURATION)]
TimeText = Annotated[str, msgspec.Meta(extra_json_schema=TIME)]
Unavailable = Annotated[_T, msgspec.Meta(extra_json_schema=UNAVAILABLE)]
