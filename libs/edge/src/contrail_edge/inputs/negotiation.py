"""Content negotiation: the format of a request's body, and of its answer."""

import functools
import re
from collections.abc import Mapping
from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError

JSON_TYPE: Final = "application/json"
MERGE_PATCH_TYPE: Final = "application/merge-patch+json"
NDJSON_TYPE: Final = "application/x-ndjson"
MSGPACK_TYPE: Final = "application/vnd.msgpack"
ARROW_TYPE: Final = "application/vnd.apache.arrow.stream"
BYTES_TYPE: Final = "application/octet-stream"
EVENTS_TYPE: Final = "text/event-stream"

_COLUMNS_RANGE: Final = re.compile(
    rb"(?:^|,)\s*%s\s*;(?:[^,]*;)?\s*form=\"?columns\"?\s*(?:[;,]|$)"
    % re.escape(MSGPACK_TYPE.encode()),
    re.IGNORECASE,
)
_cached_columns: Final = functools.lru_cache(maxsize=256)(_COLUMNS_RANGE.search)

_CACHED_BYTES_MAX: Final = 256
"""Longer header values are unusual, and are not cached."""


def content_type(header: bytes | None, offers: tuple[str, ...]) -> str:
    """Return the one of ``offers`` that the Content-Type names.

    Raise UNSUPPORTED_MEDIA otherwise.
    """
    listed = ", ".join(offers)
    if header is None:
        raise ApiError(errors.UNSUPPORTED_MEDIA, f"the request needs a Content-Type: {listed}")
    kind, _, parameters = header.decode("latin-1").lower().partition(";")
    if kind.strip() not in offers:
        raise ApiError(errors.UNSUPPORTED_MEDIA, f"the Content-Type must be {listed}")
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "charset" and value.strip('"') not in ("utf-8", "utf8"):
            raise ApiError(errors.UNSUPPORTED_MEDIA, "the only supported charset is UTF-8")
    return kind.strip()


def acceptable(header: bytes | None, offers: tuple[str, ...]) -> str:
    """Return the best of ``offers`` by the Accept header, or the first if there is no such header.

    Raises NOT_ACCEPTABLE if the header excludes all of them (RFC 9110 section 12.5.1).
    """
    if not header:
        return offers[0]
    best = _cached_best if len(header) <= _CACHED_BYTES_MAX else _best
    found = best(header, offers)
    if found is None:
        raise ApiError(errors.NOT_ACCEPTABLE, f"this resource is available as {', '.join(offers)}")
    return found


def _best(header: bytes, offers: tuple[str, ...]) -> str | None:
    ranges = _accept_ranges(header)

    def quality(offer: str) -> float:
        # The most specific range decides, even if it excludes the offer (q=0).
        for candidate in (offer, offer.partition("/")[0] + "/*", "*/*"):
            if candidate in ranges:
                return ranges[candidate]
        return 0.0

    # max() keeps the first of equals, which is the server's own preference.
    best = max(offers, key=quality)
    return best if quality(best) > 0 else None


_cached_best: Final = functools.lru_cache(maxsize=256)(_best)


def accepts_columns(header: bytes | None) -> bool:
    """Return True if the Accept header asks for msgpack in columns (``form=columns``)."""
    if header is None or b"columns" not in header:
        return False
    found = _cached_columns if len(header) <= _CACHED_BYTES_MAX else _COLUMNS_RANGE.search
    return found(header) is not None


def names_json(header: bytes | None) -> bool:
    """Return True if the Accept header names JSON and does not prefer anything else."""
    if not header:
        return False
    ranges = _accept_ranges(header)
    json = ranges.get(JSON_TYPE, 0.0)
    return json > 0 and json >= ranges.get(BYTES_TYPE, 0.0) and json >= ranges.get("*/*", 0.0)


def _accept_ranges(header: bytes) -> Mapping[str, float]:
    return _cached_ranges(header) if len(header) <= _CACHED_BYTES_MAX else _parse_ranges(header)


def _parse_ranges(header: bytes) -> Mapping[str, float]:
    ranges: dict[str, float] = {}
    for element in header.decode("latin-1").lower().split(","):
        name, _, parameters = element.partition(";")
        quality = 1.0
        for parameter in parameters.split(";"):
            key, _, value = parameter.strip().partition("=")
            if key == "q":
                quality = _quality(value)
        if name.strip():
            ranges[name.strip()] = quality
    return ranges


_cached_ranges: Final = functools.lru_cache(maxsize=256)(_parse_ranges)


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0
