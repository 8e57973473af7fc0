"""Names and values of headers that several modules use."""

from collections.abc import Iterable, Iterator
from typing import Final

X_REQUEST_ID: Final = b"x-request-id"
_UPGRADE_TOKENS: Final = (b"upgrade", b"http2-settings")


def elements(value: bytes) -> list[bytes]:
    """Return the elements of a comma-separated list, in lower case (RFC 9110, section 5.6.1)."""
    return [one.strip() for one in value.lower().split(b",")]


def without_upgrade(headers: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield ``headers`` without an offer of another protocol."""
    for name, value in headers:
        if name == b"connection":
            kept = [one for one in elements(value) if one not in _UPGRADE_TOKENS]
            yield name, b", ".join(kept)
        elif name != b"upgrade":
            yield name, value
