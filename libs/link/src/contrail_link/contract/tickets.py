"""Tickets between the processes that take them: how long they last, and who sees to their use."""

from typing import Final, Protocol

from contrail_link.contract.remote import UNKNOWN, remote

TICKET_NS: Final = 30_000_000_000
"""How long a ticket lasts."""


class TicketUse(Protocol):
    """Sees to it that a ticket is used once, whichever process it is shown to."""

    @remote(40, UNKNOWN)
    async def use_ticket(self, nonce: bytes, expires_ns: int) -> bool:
        """Whether a ticket with this number is used for the first time; OVERLOADED."""
        ...
