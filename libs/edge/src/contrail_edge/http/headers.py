"""Names and values of headers that several modules use."""

from typing import Final

X_REQUEST_ID: Final = b"x-request-id"


def elements(value: bytes) -> list[bytes]:
    """Return the elements of a comma-separated list, in lower case (RFC 9110, section 5.6.1)."""
    return [one.strip() for one in value.lower().split(b",")]
