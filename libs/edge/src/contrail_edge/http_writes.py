"""How an answer gets from uvicorn's cycle to the connection: in few writes, or not to its end."""

import asyncio
from collections.abc import Sequence

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from contrail_edge.http.budgets import UnreadBudget
from contrail_link.contract.read import Chunk, Pieces


class JoinedWrites:
    """A transport for one answer that sends its head together with the first piece of its body.

    uvicorn writes them separately, which costs two system calls and often two packets. If no body
    follows at once, the head is sent by itself in the next pass of the event loop.
    """

    __slots__ = ("_begun", "_handle", "_head", "_loop", "_transport", "_unread")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        unread: UnreadBudget,
    ) -> None:
        self._transport = transport
        self._unread = unread
        self._loop = loop
        # The head, until it is sent.
        self._head: bytes | None = None
        # Whether the head was given.
        self._begun = False
        # Sends a head without a body; None when no head is held back.
        self._handle: asyncio.Handle | None = None

    def write(self, data: bytes) -> None:
        """Hold back the head, which comes first; send it together with the next ``data``."""
        if not self._begun:
            self._begun = True
            self._head = data
            self._handle = self._loop.call_soon(self._flush)
        elif self._handle is None or self._head is None:
            self._write(data)
        else:
            self._handle.cancel()
            head, self._head, self._handle = self._head, None, None
            self._write(head + data)

    def writelines(self, pieces: Sequence[Chunk]) -> None:
        """Send ``pieces`` after the head, without joining them."""
        self._flush()
        if not self._transport.is_closing():
            self._transport.writelines(pieces)
            self._unread.wrote(self._transport, sum(map(len, pieces)))

    def _flush(self) -> None:
        head, self._head, self._handle = self._head, None, None
        if head is not None:
            self._write(head)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            self._unread.wrote(self._transport, len(data))

    def close(self) -> None:
        """Close the connection after everything has been sent."""
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        """Return True if the connection is closing or closed."""
        return self._transport.is_closing()


class Gather:
    """Sends a chunk of a body as separate pieces; uvicorn would copy them into one."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: JoinedWrites) -> None:
        self._cycle = cycle
        self._transport = transport

    async def __call__(self, pieces: Pieces) -> None:
        """Send one chunk; the head must have been sent, and another ``send`` ends the body."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        size = sum(map(len, pieces))
        if cycle.disconnected or not size:
            return
        if not cycle.response_started or not cycle.chunked_encoding:
            raise RuntimeError("pieces can only follow the head of a chunked body")
        self._transport.writelines([b"%x\r\n" % size, *filter(len, pieces), b"\r\n"])


def cut(cycle: RequestResponseCycle) -> None:
    """Close the connection of an answer that has begun and stays incomplete."""
    # As if the client had left: uvicorn logs every other incomplete answer as a fault.
    cycle.disconnected = True
    cycle.transport.close()
