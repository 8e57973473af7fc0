"""Tickets: their lifetime, and the promise that each is used once."""

from typing import Final, Protocol

from contrail_link.contract.remote import META, UNKNOWN, remote

TICKET_NS: Final = 30_000_000_000
"""Lifetime of a ticket."""


class TicketUse(Protocol):
    """Records the use of tickets for all processes that accept them."""

    @remote(40, UNKNOWN, to=META)
    async def use_ticket(self, nonce: bytes, expires_ns: int) -> bool:
        """Return True if a ticket with this nonce is used for the first time. Raises OVERLOADED."""
        ...
