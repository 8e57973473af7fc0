"""Frames that wait to be sent on one connection: bounded, in slices, many in one write."""

from collections import deque
from collections.abc import Sequence
from typing import Final

from contrail_replicator.peers.frames import Bytes
from contrail_replicator.peers.ports import PeerNet, Wire

SLICE_BYTES: Final = 256 << 10
"""Bytes written in one pass of the event loop: some 0.2 ms with TLS."""


class Outbox:
    """Writes frames to a wire: at once while it takes them, and joined when they have to wait.

    A frame that does not fit within ``bytes_max`` unsent bytes is dropped and counted, which Raft
    repairs like a lost message.
    """

    def __init__(self, net: PeerNet, wire: Wire, bytes_max: int) -> None:
        self._net = net
        self._wire = wire
        self._bytes_max = bytes_max
        # Pieces that are not written yet, and their bytes.
        self._queue: deque[Bytes] = deque()
        self._queued = 0
        # A flush is due; the wire calls `drained` otherwise.
        self._due = False
        self._closed = False

    @property
    def unsent(self) -> int:
        """Bytes that the operating system has not taken yet."""
        return self._queued + self._wire.unsent

    def send(self, frame: Sequence[Bytes]) -> bool:
        """Send a frame of these pieces. False if it was dropped."""
        size = sum(map(len, frame))
        unsent = self._queued + self._wire.unsent
        if self._closed or unsent + size > self._bytes_max:
            return False
        if not unsent and size <= SLICE_BYTES:
            self._wire.write(frame[0] if len(frame) == 1 else b"".join(frame))
            return True
        self._queue += frame
        self._queued += size
        if not self._due and not self._wire.unsent:
            self._schedule()
        return True

    def drained(self) -> None:
        """Go on writing: the wire has sent everything."""
        if self._queue and not self._due:
            self._schedule()

    def close(self) -> None:
        """Drop everything that waits."""
        self._closed = True
        self._queue.clear()
        self._queued = 0

    def _schedule(self) -> None:
        self._due = True
        self._net.call_later(0, self._flush)

    def _flush(self) -> None:
        self._due = False
        taken: list[Bytes] = []
        room = SLICE_BYTES
        while self._queue and room:
            piece = self._queue.popleft()
            if len(piece) > room:
                view = memoryview(piece)
                self._queue.appendleft(view[room:])
                piece = view[:room]
            taken.append(piece)
            room -= len(piece)
        if taken:
            self._queued -= SLICE_BYTES - room
            self._wire.write(taken[0] if len(taken) == 1 else b"".join(taken))
        if self._queue and not self._wire.unsent:
            self._schedule()
