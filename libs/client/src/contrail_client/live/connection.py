"""One WebSocket for all publishers and subscriptions of a client, opened anew when it is lost."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Final, Protocol

from contrail_client import streams
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
from contrail_client.transport.aio import AsyncTransport

HEARTBEAT: Final = "15s"
SEND_BYTES: Final = 256 << 10
"""About how much one WebSocket message holds: enough to be cheap, and small enough to share."""

_FLUSH_S: Final = 2.0

Answered = Callable[[Answering], None]


class Participant(Protocol):
    """A publisher or a subscription. Nothing here waits; all is called on the event loop."""

    def connected(self) -> None:
        """A socket is open; what `take` gives from here on goes to it."""
        ...

    def take(self, max_bytes: int) -> Sequence[ClientFrame]:
        """The next frames to send, about `max_bytes` of them; none when there is nothing."""
        ...

    def received(self, frame: OfSubscription) -> None:
        """A frame that names this participant came."""
        ...

    def draining(self) -> None:
        """The server is about to stop: nothing new should begin on this socket."""
        ...

    def disconnected(self, error: ContrailError) -> None:
        """No socket is open, and no answer will come any more; opening one is tried again."""
        ...

    def failed(self, error: ContrailError) -> None:
        """There will be no other socket."""
        ...


class AsyncConnection:
    """Opened by the first participant, and again whenever it is lost while there are any."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._options = transport.options
        self.retries = self._options.retries
        self.reconnect_s = self._options.reconnect_s
        self._participants: dict[str, Participant] = {}
        self._eager: dict[str, Participant] = {}
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._awaited: dict[int, Answered] = {}
        self._last_id = 0
        self._running: asyncio.Task[None] | None = None
        self._socket: Socket | None = None
        self._closed = False

    # For participants ----------------------------------------------------------------------------

    def new_id(self) -> int:
        """A number that no frame had before."""
        self._last_id += 1
        return self._last_id

    def attach(self, sid: str, participant: Participant) -> None:
        """Take part under the name `sid`, which frames to the participant carry."""
        if self._closed:
            raise Closed("the client is closed")
        self._participants[sid] = participant
        if self._socket is not None:
            participant.connected()
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def detach(self, sid: str) -> None:
        """Take part no longer."""
        self._participants.pop(sid, None)
        self._eager.pop(sid, None)

    def wants_to_send(self, sid: str) -> None:
        """`take` of this participant has something to give."""
        participant = self._participants.get(sid)
        if participant is not None and self._socket is not None:
            self._eager[sid] = participant
            self._idle.clear()
            self._work.set()

    def expect(self, number: int, answered: Answered) -> None:
        """Call `answered` with the answer to frame `number`, unless the socket is lost first."""
        self._awaited[number] = answered

    async def stream_info(self, stream: str) -> StreamInfo:
        """The stream as it is now, asked over HTTP; raises ContrailError."""
        return await self._transport.run(streams.get(stream))

    # Its own life --------------------------------------------------------------------------------

    async def close(self) -> None:
        """Send what there is and close the socket; what still takes part fails."""
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
                for participant in list(self._participants.values()):
                    participant.disconnected(error)
                await asyncio.sleep(pause_s)

    async def _serve(self, socket: Socket) -> None:
        """Work with an open socket until it is lost, which raises."""
        writing: asyncio.Task[None] | None = None
        try:
            client = f"contrail-python/{version('contrail-client')}"
            await socket.send(encode([Connect(client=client, heartbeat=HEARTBEAT)]))
            self._socket = socket
            writing = asyncio.create_task(self._write(socket))
            for participant in list(self._participants.values()):
                participant.connected()
            async for message in socket.messages():
                for frame in decode(message):
                    self._received(frame)
        finally:
            self._socket = None
            self._awaited.clear()
            self._eager.clear()
            self._idle.set()
            if writing is not None:
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
            await socket.close()

    async def _write(self, socket: Socket) -> None:
        """Send what participants have; what gathers while one message leaves goes with the next."""
        while True:
            await self._work.wait()
            self._work.clear()
            while self._eager:
                for sid, participant in list(self._eager.items()):
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
