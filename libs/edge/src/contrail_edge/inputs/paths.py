"""The request target's path: percent-decoded exactly once, from the raw bytes."""

import re
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from contrail_common import errors
from contrail_common.errors import ApiError

_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f]")
_SEGMENT_SAFE: Final = "!$&'()*+,;=:@-._~"


def percent_decode(text: str) -> str:
    """Return ``text`` with its percent escapes decoded as UTF-8.

    Raises BAD_REQUEST for an invalid escape, bytes that are not UTF-8, and control characters.
    """
    if "%" not in text:
        return text
    if _BAD_ESCAPE.search(text):
        raise ApiError(errors.BAD_REQUEST, "a percent escape is not two hexadecimal digits")
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ApiError(errors.BAD_REQUEST, "a percent escape does not decode to UTF-8") from None
    if _CONTROL.search(decoded):
        raise ApiError(errors.BAD_REQUEST, "the path or query contains a control character")
    return decoded


def split_path(raw_path: bytes) -> list[str]:
    """Return the decoded segments of a path. The first one, before the leading slash, is empty."""
    try:
        text = raw_path.decode("ascii")
    except UnicodeDecodeError:
        raise ApiError(errors.BAD_REQUEST, "the path is not ASCII") from None
    # Split before decoding: an escaped slash belongs to a name, and does not separate segments.
    segments = text.split("/")
    if "%" in text:
        return [percent_decode(segment) for segment in segments]
    return segments


def canonical_path(segments: list[str]) -> str:
    """Return the path with only the necessary escapes, so that equal paths compare equal."""
    return "/".join(quote(segment, safe=_SEGMENT_SAFE) for segment in segments)
