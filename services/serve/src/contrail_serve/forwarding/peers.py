"""The processes of the other kind: idle connections to them, and those that are unreachable."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import structlog

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_serve.forwarding.connection import Address, PeerConnection

_IDLE_MAX: Final = 64
# Shorter than servers keep idle connections, so that none ends while a request is sent over it.
_IDLE_S: Final = 30.0
# Time to connect, and time for which an unreachable peer is asked last.
_CONNECT_S: Final = 2.0
_DEAD_S: Final = 1.0
_P = TypeVar("_P", bound=asyncio.Protocol)

_log: Final = structlog.get_logger("contrail.forward")


class Peers:
    """Processes of the same ``kind`` (``api`` or ``gateway``), which take requests in turn."""

    def __init__(self, kind: str, addresses: Sequence[Address]) -> None:
        self.kind = kind
        self._addresses = list(addresses)
        # Idle connections by address, the most recently used last.
        self._idle: dict[Address, list[PeerConnection]] = {one: [] for one in addresses}
        # Loop times until which unreachable peers are asked last. An entry stays until the peer
        # is reachable again, so that the warning is logged once.
        self._dead_until: dict[Address, float] = {}
        # Counts requests, so that each begins with another address.
        self._turn = 0

    def in_turn(self) -> list[Address]:
        """Return all addresses, each time beginning with another; unreachable ones come last."""
        self._turn += 1
        at = self._turn % len(self._addresses) if self._addresses else 0
        rotated = self._addresses[at:] + self._addresses[:at]
        now = asyncio.get_running_loop().time()
        return sorted(rotated, key=lambda one: self._dead_until.get(one, 0.0) > now)

    async def connection(self, tried: set[Address]) -> PeerConnection:
        """Return a connection to a peer that is not in ``tried``; raise NOT_READY if none is left.

        Adds unreachable addresses to ``tried``.
        """
        for address in self.in_turn():
            if address in tried:
                continue
            idle = self._kept(address)
            if idle is not None:
                return idle
            found = await self.connect(address, partial(PeerConnection, address))
            if found is not None:
                return found
            tried.add(address)
        raise self.away()

    async def connect(self, address: Address, make: Callable[[], _P]) -> _P | None:
        """Connect, and return the protocol that ``make`` made; None if the peer is unreachable."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, protocol = await asyncio.get_running_loop().create_connection(make, *address)
        except (OSError, TimeoutError) as error:
            self._passed_over(address, error)
            return None
        self._dead_until.pop(address, None)
        return protocol

    def away(self) -> ApiError:
        """Return the error for a request while no peer is reachable."""
        return ApiError(
            errors.NOT_READY, f"no {self.kind} can be reached", retry_after_s=1, applied=False
        )

    def keep(self, connection: PeerConnection) -> None:
        """Keep a connection for later requests, or end it if there are enough."""
        idle = self._idle[connection.address]
        if connection.usable and len(idle) < _IDLE_MAX:
            connection.idle_since = asyncio.get_running_loop().time()
            idle.append(connection)
        else:
            connection.abort()

    @property
    def idle(self) -> int:
        """Number of idle connections."""
        return sum(map(len, self._idle.values()))

    def forget(self, address: Address) -> None:
        """End all idle connections to ``address``, because one of them was dead."""
        for connection in self._idle[address]:
            connection.abort()
        self._idle[address].clear()

    def close(self) -> None:
        """End all idle connections."""
        for address in self._addresses:
            self.forget(address)

    def _kept(self, address: Address) -> PeerConnection | None:
        idle = self._idle[address]
        oldest = asyncio.get_running_loop().time() - _IDLE_S
        while idle:
            connection = idle.pop()
            if connection.usable and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    def _passed_over(self, address: Address, error: Exception) -> None:
        now = asyncio.get_running_loop().time()
        if address not in self._dead_until:
            where = f"{address[0]}:{address[1]}"
            _log.warning("peer_away", kind=self.kind, address=where, reason=str(error))
        self._dead_until[address] = now + _DEAD_S
