"""One WebSocket for all publishers and subscriptions of a client, reopened when it is lost."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Final, Protocol

from contrail_client.errors import (
    Closed,
    ContrailError,
    UnexpectedAnswer,
)
from contrail_client.live.frames import (
    FRAMES_MAX,
    Answering,
    ClientFrame,
    Connect,
    Drain,
    Info,
    OfSubscription,
    Ok,
    Pong,
    PubAcked,
    Received,
    Refused,
    decode,
    encode,
)
from contrail_client.live.websocket import Socket, open_socket
from contrail_client.models import StreamInfo
from contrail_client.operations import streams
from contrail_client.transport.aio import AsyncTransport

HEARTBEAT: Final = "15s"
SEND_BYTES: Final = 256 << 10
"""About the size of one WebSocket message: large enough to be cheap, and small enough that no
participant makes the others wait for long."""

# Longest wait of `close` for frames that are not sent yet.
_FLUSH_S: Final = 2.0

Answered = Callable[[Answering], None]


class Participant(Protocol):
    """A publisher or a subscription. The event loop calls all methods; none of them may wait."""

    def connected(self) -> None:
        """Note that a socket is open. Frames from `take` go to it from now on."""
        ...

    def take(self, max_bytes: int) -> Sequence[ClientFrame]:
        """The next frames to send, about `max_bytes` in all; empty if there are none."""
        ...

    def received(self, frame: OfSubscription) -> None:
        """Handle a frame that names this participant."""
        ...

    def draining(self) -> None:
        """Begin nothing new on this socket: the server is about to stop."""
        ...

    def disconnected(self, error: ContrailError) -> None:
        """Note that the socket is lost. No answer will come any more; the client reconnects."""
        ...

    def failed(self, error: ContrailError) -> None:
        """End with `error`: there will be no other socket."""
        ...


class AsyncConnection:
    """The WebSocket of a client, for its participants.

    The first participant opens it. When it is lost, it is reopened as long as there are
    participants.
    """

    def __init__(self, transport: AsyncTransport) -> None:
        # Everything here belongs to one event loop.
        self._transport = transport
        # Bounds and pauses; never changed.
        self._options = transport.options
        self.retries = self._options.retries
        self.reconnect_s = self._options.reconnect_s
        self._participants: dict[str, Participant] = {}
        """All participants, by the name that frames to them carry."""
        self._eager: dict[str, Participant] = {}
        """Participants that may have frames to send. Empty while no socket is open."""
        self._work = asyncio.Event()
        """Wakes the writer. Set whenever a participant is added to `_eager`."""
        self._idle = asyncio.Event()
        """Set while nothing is left to send; `close` waits for it."""
        self._idle.set()
        self._awaited: dict[int, Answered] = {}
        """What to call with the answer to a frame, by its number; only for the current socket."""
        self._last_id = 0
        """The last number of a frame. It never restarts, so no number is used on two sockets."""
        self._running: asyncio.Task[None] | None = None
        """The task that opens sockets and reads from them; done when there are no participants."""
        self._socket: Socket | None = None
        """The open socket, from the moment its first frame is sent until it is lost."""
        self._closed = False
        """Whether `close` was called: no participant may attach any more."""

    # For participants ----------------------------------------------------------------------------

    def new_id(self) -> int:
        """A number that no frame of this connection had before."""
        self._last_id += 1
        return self._last_id

    def attach(self, sid: str, participant: Participant) -> None:
        """Add a participant. Frames to it carry the name `sid`; raises `Closed` after `close`."""
        if self._closed:
            raise Closed("the client is closed")
        self._participants[sid] = participant
        if self._socket is not None:
            participant.connected()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def detach(self, sid: str) -> None:
        """Remove a participant."""
        self._participants.pop(sid, None)
        self._eager.pop(sid, None)

    def wants_to_send(self, sid: str) -> None:
        """Note that `take` of this participant has frames to send."""
        participant = self._participants.get(sid)
        if participant is not None and self._socket is not None:
            self._eager[sid] = participant
            self._idle.clear()
            self._work.set()

    def expect(self, number: int, answered: Answered) -> None:
        """Call `answered` with the answer to frame `number`, unless the socket is lost first."""
        self._awaited[number] = answered

    async def stream_info(self, stream: str) -> StreamInfo:
        """The stream as it is now, read over HTTP; raises ContrailError."""
        return await self._transport.run(streams.get(stream))

    # The socket ----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send pending frames for up to 2 s and close the socket; the participants fail."""
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FLUSH_S):
                await self._idle.wait()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        self._fail(Closed("the client is closed"))

    async def _run(self) -> None:
        try:
            await self._stay_connected()
        except Exception as error:
            self._fail(UnexpectedAnswer(f"the connection failed: {error!r}"))
            raise

    async def _stay_connected(self) -> None:
        reconnecting = self._transport.reconnecting()
        loop = asyncio.get_running_loop()
        while self._participants:
            try:
                socket = await open_socket(self._options)
                reconnecting.opened(loop.time())
                await self._serve(socket)
            except ContrailError as error:
                pause_s = reconnecting.lost(error, loop.time(), random.random())
                if pause_s is None:
                    self._fail(error)
                    return
                # Also after an attempt that failed: the deadlines of participants have to run.
                for participant in list(self._participants.values()):
                    participant.disconnected(error)
                await asyncio.sleep(pause_s)

    async def _serve(self, socket: Socket) -> None:
        """Use an open socket until it is lost; ends with an exception only."""
        writing: asyncio.Task[None] | None = None
        try:
            client = f"contrail-python/{version('contrail-client')}"
            await socket.send(encode([Connect(client=client, heartbeat=HEARTBEAT)]))
            # Only now may participants send: `connect` must be the first frame of a socket.
            self._socket = socket
            writing = asyncio.create_task(self._write(socket))
            for participant in list(self._participants.values()):
                participant.connected()
            async for message in socket.messages():
                for frame in decode(message):
                    self._received(frame)
        finally:
            self._socket = None
            # Their answers will not come. Participants decide what to send again.
            self._awaited.clear()
            self._eager.clear()
            self._idle.set()
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            await socket.close()

    async def _write(self, socket: Socket) -> None:
        """Send the frames of the participants.

        Frames that gather while one message is being sent go out together with the next one.
        """
        while True:
            await self._work.wait()
            self._work.clear()
            while self._eager:
                for sid, participant in list(self._eager.items()):
                    # A part from each in turn, so that a busy publisher does not delay
                    # acknowledgements.
                    frames = participant.take(SEND_BYTES)
                    for at in range(0, len(frames), FRAMES_MAX):
                        await socket.send(encode(frames[at : at + FRAMES_MAX]))
                    if not frames:
                        self._eager.pop(sid, None)
            self._idle.set()

    def _received(self, frame: Received) -> None:
        match frame:
            case PubAcked(id=number) | Ok(id=number) | Refused(id=int(number)):
                answered = self._awaited.pop(number, None)
                if answered is not None:
                    answered(frame)
            case Drain():
                for participant in list(self._participants.values()):
                    participant.draining()
            case Info() | Pong() | Refused():
                pass
            case _:
                named = self._participants.get(frame.sid)
                if named is not None:
                    named.received(frame)

    def _fail(self, error: ContrailError) -> None:
        participants = list(self._participants.values())
        self._participants.clear()
        for participant in participants:
            participant.failed(error)
