"""Tickets: texts that replace the token once, for a short time, in the URL of a browser."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.timeunits import format_time
from contrail_link.contract.tickets import TICKET_NS

_LABEL: Final = b"tickets"
_NONCE_BYTES: Final = 16
_TIME_BYTES: Final = 8
_MARK_BYTES: Final = 16
_BYTES: Final = _NONCE_BYTES + _TIME_BYTES + _MARK_BYTES


class Ticket(msgspec.Struct, frozen=True):
    """A ticket and the time at which it expires (RFC 3339)."""

    ticket: str
    """Value of the parameter `ticket`. It can be used once."""
    expires_at: str
    """Time at which the ticket expires."""


@dataclass(frozen=True, slots=True)
class OpenedTicket:
    """The contents of a genuine ticket: its unique number, and the time at which it expires."""

    nonce: bytes
    expires_ns: int


class Tickets:
    """Issues and opens tickets. Every process with the same keys can open them.

    Storage makes sure that each is used only once. The keys are read at each use, so that they can
    be changed in place.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        # The first one signs.
        self._keys = keys

    def issue(self, now_ns: int) -> Ticket:
        """Return a new ticket."""
        expires_ns = now_ns + TICKET_NS
        content = secrets.token_bytes(_NONCE_BYTES) + expires_ns.to_bytes(_TIME_BYTES)
        text = base64.urlsafe_b64encode(content + _mark(self._keys[0], content))
        return Ticket(text.decode().rstrip("="), format_time(expires_ns))

    def open(self, ticket: bytes, now_ns: int) -> OpenedTicket:
        """Return the contents of a ticket.

        Raises UNAUTHENTICATED if it is not genuine or has expired.
        """
        try:
            raw = base64.b64decode(ticket + b"==", b"-_", validate=True)
        except binascii.Error:
            raw = b""
        content, mark = raw[:-_MARK_BYTES], raw[-_MARK_BYTES:]
        # Always try every key, so that the duration does not show which one matches.
        good = [hmac.compare_digest(mark, _mark(key, content)) for key in self._keys]
        expires_ns = int.from_bytes(content[_NONCE_BYTES:])
        # A ticket that expires too late was issued by a process whose clock is far ahead. Storage
        # would have to remember its use for as long.
        if len(raw) != _BYTES or not any(good) or not now_ns < expires_ns <= now_ns + 2 * TICKET_NS:
            raise ApiError(errors.UNAUTHENTICATED, "the ticket is not valid", applied=False)
        return OpenedTicket(content[:_NONCE_BYTES], expires_ns)


def _mark(key: bytes, content: bytes) -> bytes:
    # Derived, so that a ticket is never valid as an ack token.
    own = hmac.digest(key, _LABEL, hashlib.sha256)
    return hmac.digest(own, content, hashlib.sha256)[:_MARK_BYTES]
