"""Used tickets: each ticket can be used once, no matter in which process."""

from typing import Final

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_link.contract.tickets import TICKET_NS

USED_MAX: Final = 100_000
_KEPT_NS: Final = 2 * TICKET_NS
"""Longer than a ticket is valid, because the clocks of other machines differ from ours."""


class UsedTickets:
    """Nonces of used tickets, kept in memory until the tickets have expired."""

    def __init__(self, started_ns: int) -> None:
        self.started_ns = started_ns
        """Tickets issued before this time are refused: nobody knows whether they were used."""
        self._used: dict[bytes, int] = {}
        """By nonce, in order of use: when the ticket was used, in nanoseconds."""

    def use(self, nonce: bytes, expires_ns: int, now_ns: int) -> bool:
        """Whether a ticket is used for the first time; OVERLOADED.

        Tickets issued before `started_ns` are refused: they may have been used then.
        """
        # In the order of use, so the first one that is young enough ends the search.
        while self._used:
            oldest, came_ns = next(iter(self._used.items()))
            if now_ns - came_ns < _KEPT_NS:
                break
            del self._used[oldest]
        # What was used in another process, or before a restart, is not known here.
        if nonce in self._used or expires_ns - TICKET_NS < self.started_ns:
            return False
        if len(self._used) >= USED_MAX:
            raise ApiError(errors.OVERLOADED, "too many tickets were used recently", applied=False)
        self._used[nonce] = now_ns
        return True
