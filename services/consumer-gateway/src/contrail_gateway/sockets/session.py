"""The session of one socket: it reads frames, does what they ask, and sends frames."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Final, get_args

import structlog
from msgspec import UNSET

from contrail_common import errors
from contrail_common.__about__ import __version__
from contrail_common.ack_tokens import AckTokens
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.timeunits import NS_PER_S, format_duration
from contrail_edge.http.last_look import after_a_look
from contrail_edge.http.problems import BatchResult, Problems, problem
from contrail_edge.http.settings import EdgeSettings
from contrail_edge.http.steps import Steps, at_once
from contrail_edge.inputs.item_steps import candidates, given_item
from contrail_edge.inputs.json_steps import NESTING_MAX
from contrail_edge.inputs.message_items import (
    Candidate,
    Item,
    candidate,
    check_count,
    payload_of,
    plain_messages,
)
from contrail_edge.ws.websocket import CloseCode, EdgeSocket, Opening
from contrail_gateway.core.frames import (
    Ack,
    AddCredit,
    Batch,
    Connect,
    Drain,
    FrameId,
    Info,
    InProgress,
    Nak,
    Ok,
    PackedPub,
    Ping,
    Pong,
    Pub,
    Publishing,
    ServerFrame,
    Settling,
    Sub,
    Term,
    Unsub,
    Watch,
)
from contrail_gateway.core.pulled import Pulled
from contrail_gateway.core.session import Session, UnauthenticatedError
from contrail_gateway.core.subscription import Subscription
from contrail_gateway.deliveries import SignTokens
from contrail_gateway.sockets.codec import (
    BatchAcks,
    Codec,
    Failed,
    InvalidTextError,
    LargeBatch,
    Misunderstood,
    Received,
)
from contrail_gateway.sockets.feeds import Feed
from contrail_gateway.sockets.metrics import SessionCounts
from contrail_gateway.sockets.publishes import MESSAGE_BYTES, Publishes
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult

_log: Final = structlog.get_logger(__name__)

# Levels of nesting around the payload of a `pub`, and of a message in a `pub_batch`.
_PUB_DEPTH: Final = 1
_BATCH_DEPTH: Final = 3
# More tokens are verified in steps.
_TOKENS_AT_ONCE: Final = 100
_SETTLING: Final = frozenset(get_args(Settling))
_BATCHES: Final = frozenset((*get_args(Batch), LargeBatch))
_DRAIN_LOOK_S: Final = 0.05
_INTERNAL_CLOSE: Final = 1011


@dataclass(slots=True)
class GatewayState:
    """Everything that the sessions of a process share.

    ``work`` holds tasks that may outlive their sockets.
    """

    link: StorageLink
    tokens: AckTokens
    settings: EdgeSettings
    counts: SessionCounts
    work: set["asyncio.Future[None]"] = field(default_factory=set)


class SocketSession:
    """Handles the messages of one socket, and is the host of its feeds.

    All fields belong to the event loop.
    """

    def __init__(
        self, state: GatewayState, codec: Codec, socket: EdgeSocket, opening: Opening
    ) -> None:
        self.link = state.link
        self.tokens = state.tokens
        self.counts = state.counts
        # State of the process; `_state.work` keeps this session's tasks after the socket is gone.
        self._state = state
        # JSON or msgpack, as agreed in the handshake; never changes.
        self._codec = codec
        # The WebSocket; after it has closed, sending to it has no effect.
        self._socket = socket
        # The handshake, which can check a token that comes in a `connect` frame.
        self._opening = opening
        # The event loop, for timers.
        self._loop = asyncio.get_running_loop()
        # The running feeds by sid. Invariant: between two frames, the same keys as
        # `session.subscriptions`.
        self._feeds: dict[str, Feed] = {}
        # Messages read and not passed on to storage yet. They are passed on before any other
        # kind of frame is handled.
        self._publishes = Publishes()
        # Timer of the next look for due heartbeats; None without subscriptions.
        self._beat: asyncio.TimerHandle | None = None
        # Timer that closes a socket that does not authenticate in time; None once it has.
        self._connect_by: asyncio.TimerHandle | None = None
        # Monotonic time at which a draining socket closes even if it is busy; 0 before a drain.
        self._drain_until_ns = 0
        self.session = Session(
            authenticated=opening.authenticated, now_ns=time.monotonic_ns(), packed=codec.packed
        )
        self.send(
            Info(
                server=f"contrail/{__version__}",
                node=state.settings.node,
                max_payload=state.settings.payload_bytes_max,
                heartbeat=format_duration(self.session.heartbeat_ns),
            )
        )
        if not opening.authenticated:
            self._connect_by = self._loop.call_later(state.settings.connect_s, self._too_late)

    # For the socket ------------------------------------------------------------------------------
    def received(self, message: bytes) -> Steps[None] | None:
        """Handle the frames of a message, or return the steps that do so if that may take long."""
        try:
            frames = self._codec.decode(message, self._state.settings.payload_bytes_max)
        except (ApiError, InvalidTextError) as error:
            self._unreadable(error)
            return None
        # One short frame is handled at once. Everything else may take longer than a step.
        if not isinstance(frames, list) or len(frames) != 1 or _takes_long(frames[0]):
            return self._do(frames)
        self._handle(frames[0])
        self._look_full()
        return None

    def received_together(self, messages: list[bytes]) -> bool:
        """Handle messages at once that all publish, and ask for nothing unusual."""
        if not self.session.authenticated:
            return False
        frames = self._codec.plain_pubs(messages)
        if frames is None:
            return False
        found = plain_messages(frames, self._state.settings.payload_bytes_max)
        if found is None:
            return False
        try:
            self.session.heard(frames[0], time.monotonic_ns())
            size = self._publishes.add(self, [frame.id for frame in frames], found)
        except Exception as error:
            self._broken(error)
        else:
            self.session.begin(len(found), size)
            self._look_full()
        return True

    def _do(self, frames: Iterable[Received | None]) -> Steps[None]:
        try:
            for frame in frames:
                if frame is None:
                    pass
                elif _takes_long(frame):
                    yield from self._handle_in_steps(frame)
                else:
                    self._handle(frame)
                if not self._socket.open:
                    return  # this frame closed the socket; those after it have no effect
                yield
        except (ApiError, InvalidTextError) as error:
            self._unreadable(error)
        self._look_full()

    def _unreadable(self, error: Exception) -> None:
        if not isinstance(error, ApiError):
            self._socket.close(CloseCode.INVALID_DATA, "text frames must be UTF-8")
        elif error.spec in (errors.BATCH_TOO_LARGE, errors.BODY_TOO_LARGE):
            self._socket.close(CloseCode.TOO_LARGE, error.detail)
        else:
            self._socket.close(CloseCode.PROTOCOL_ERROR, error.detail)

    def _look_full(self) -> None:
        if self.session.full:
            self._socket.pause()

    def caught_up(self) -> None:
        """Pass on the publishes of all frames that arrived together."""
        try:
            self._publishes.pass_on(self)
        except Exception as error:
            self._broken(error)

    def drain(self, grace_s: float) -> None:
        """Stop pushing. Close when the client has settled its messages, or after ``grace_s``."""
        if self.session.draining:
            return
        self.session.draining = True
        grace_ns = round(grace_s * NS_PER_S)
        self._drain_until_ns = time.monotonic_ns() + grace_ns
        self.send(Drain(grace=format_duration(grace_ns)))
        for feed in list(self._feeds.values()):
            # A feed that is leaving already has an `unsub` to answer, which must not be forgotten.
            if not feed.sub.leaving:
                feed.leave(None, drain=True)
        self._look_drained()

    def lost(self) -> None:
        """Stop everything that serves the socket."""
        for timer in (self._beat, self._connect_by):
            if timer is not None:
                timer.cancel()
        for feed in list(self._feeds.values()):
            feed.stop()

    def _look_drained(self) -> None:
        now_ns = time.monotonic_ns()
        if not self._socket.open:
            return
        # The client may not have seen `drain` yet, and its acknowledgements may be on their way.
        quiet = self.session.quiet(now_ns) and not self._socket.busy
        if now_ns >= self._drain_until_ns or quiet:
            self._socket.close(CloseCode.DRAINING, "draining")
        else:
            self._loop.call_later(_DRAIN_LOOK_S, self._look_drained)

    def _too_late(self) -> None:
        # The frame may have arrived while the event loop was busy.
        self._connect_by = after_a_look(self._loop, self._refuse_late)

    def _refuse_late(self) -> None:
        self._socket.close(
            CloseCode.UNAUTHENTICATED, "the first frame must be connect with a token"
        )

    # For the feeds -------------------------------------------------------------------------------
    def send(self, frame: ServerFrame) -> None:
        self._socket.send(self._codec.encode(frame))

    def send_all(self, frames: Sequence[ServerFrame]) -> None:
        self._socket.send_all(list(map(self._codec.encode, frames)))

    def refuse(self, frame_id: FrameId | None, sid: str | None, error: ApiError) -> None:
        """Send an error."""
        self.send(Failed(problem=problem(error), id=frame_id, sid=sid))

    def push(self, sub: Subscription, pulled: Pulled, sign: SignTokens | None) -> None:
        """Send messages."""
        self.counts.pushed += len(pulled)
        self._socket.send(self._codec.messages(sub, pulled, sign))

    def answered(self, count: int, size: int) -> None:
        """Note that ``count`` items of ``size`` bytes were answered, and resume reading if full."""
        session = self.session
        was_full = session.full
        session.finish(count, size)
        # Reading was paused at the limit, see `_look_full`.
        if was_full and not session.full:
            self._socket.resume()

    async def wait_writable(self) -> None:
        """Wait until the peer has read enough of what was sent."""
        await self._socket.wait_writable()

    def ended(self, sid: str) -> None:
        """Remove the subscription ``sid``."""
        self.counts.subscriptions -= 1
        del self._feeds[sid]
        del self.session.subscriptions[sid]

    def later(self, work: "asyncio.Future[None]") -> None:
        """Keep a reference to work that outlives the socket."""
        self._state.work.add(work)
        work.add_done_callback(self._state.work.discard)

    # Frames --------------------------------------------------------------------------------------
    def _handle(self, frame: Any) -> None:
        try:
            # First of all: without a token, a client learns nothing but that it needs one.
            self.session.heard(frame, time.monotonic_ns())
            if isinstance(frame, Misunderstood):
                raise frame.error
            if not isinstance(frame, Publishing):
                self._publishes.pass_on(self)  # earlier publishes come before this frame
            self._handlers[type(frame)](self, frame)
        except Exception as error:
            self._failed(frame, error)

    def _handle_in_steps(self, frame: Any) -> Steps[None]:
        try:
            self.session.heard(frame, time.monotonic_ns())
            self._publishes.pass_on(self)
            if isinstance(frame, Settling):
                yield from self._settle_in_steps(frame)
            else:
                yield from self._publish_batch(frame)
        except Exception as error:
            self._failed(frame, error)

    def _failed(self, frame: Any, error: Exception) -> None:
        if isinstance(error, ApiError):
            self.refuse(frame.id, getattr(frame, "sid", None), error)
        elif isinstance(error, UnauthenticatedError):
            self._socket.close(CloseCode.UNAUTHENTICATED, "missing or invalid token")
        else:
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        _log.error("frame_failed", exc_info=error)
        self._socket.close(_INTERNAL_CLOSE, "internal error")

    def _connect(self, frame: Connect) -> None:
        token = frame.token
        good = token is not None and self._opening.good_token(token)
        self.session.connect(frame, good_token=good)
        self._socket.trust()
        if self._connect_by is not None:
            self._connect_by.cancel()
            self._connect_by = None
        self._watch_silence()
        _log.info("socket_connected", client=frame.client)
        self._ok(frame.id)

    def _publish(self, frame: Publishing) -> None:
        payload = payload_of(frame, "", NESTING_MAX - _PUB_DEPTH)
        message = candidate(frame, payload, self._state.settings.payload_bytes_max, None)
        if isinstance(message, ApiError):
            raise message
        self.session.begin(1, self._publishes.add(self, [frame.id], [message]))

    def _publish_batch(self, frame: Batch | LargeBatch) -> Steps[None]:
        # As over HTTP, a malformed batch is refused as a whole, an invalid message by itself.
        if isinstance(frame, LargeBatch):
            parts = frame.items
        else:
            check_count(len(frame.messages))
            items: Sequence[Item] = frame.messages
            parts = (
                given_item(item, f"/messages/{at}", NESTING_MAX - _BATCH_DEPTH)
                for at, item in enumerate(items)
            )
        found = yield from candidates(parts, self._state.settings.payload_bytes_max)
        messages = [one for one in found if isinstance(one, PublishMessage)]
        size = sum(len(message.payload) + MESSAGE_BYTES for message in messages)
        done = partial(self._batch_published, frame.id, found, size)
        if messages:
            self.link.publish_then(frame.stream, messages, done)
            self.session.begin(len(messages), size)
        else:
            # Storage knows nothing of a batch without a valid message.
            done(PublishAck(frame.stream, [], ""))

    def _batch_published(
        self,
        frame_id: FrameId | None,
        found: Sequence[Candidate],
        size: int,
        outcome: PublishOutcome,
    ) -> None:
        count = sum(1 for one in found if isinstance(one, PublishMessage))
        self.answered(count, size)
        if isinstance(outcome, ApiError):
            self.refuse(frame_id, None, outcome)
            return
        answers = iter([each for run in outcome.results for each in run.each()])
        results = _results(found, answers)
        self.counts.published += sum(1 for one in results if one.problem is UNSET)
        if frame_id is not None:
            self.send(
                BatchAcks(
                    id=frame_id,
                    results=results,
                    stream=outcome.stream,
                    durability=outcome.durability,
                )
            )
            return
        # Without an id, only failures are reported. Equal ones are encoded once: there may be
        # 10,000.
        for one, alike in groupby(one.problem for one in results if one.problem is not UNSET):
            self._socket.send_all([self._codec.encode(Failed(problem=one))] * len(list(alike)))

    def _subscribe(self, frame: Sub) -> None:
        sub = self.session.subscribe(frame)
        try:
            feed = Feed(self, sub, frame)
        except ApiError:
            del self.session.subscriptions[frame.sid]
            raise
        self._feeds[frame.sid] = feed
        self.counts.subscriptions += 1
        self._watch_silence()

    def _credit(self, frame: AddCredit) -> None:
        self._feeds[self.session.credit(frame).sid].more()
        self._ok(frame.id)

    def _settle(self, frame: Settling) -> None:
        at_once(self._settle_in_steps(frame))

    def _settle_in_steps(self, frame: Settling) -> Steps[None]:
        settlement = self.session.settle(frame)
        return self._feeds[frame.sid].acks.settle(settlement, frame.id)

    def _unsubscribe(self, frame: Unsub) -> None:
        if self.session.find(frame.sid).leaving:
            raise ApiError(errors.SUBSCRIPTION_NOT_FOUND, f"sid {frame.sid}", applied=False)
        self._feeds[frame.sid].leave(frame.id, drain=frame.drain)

    def _ping(self, frame: Ping) -> None:
        self.send(Pong(id=frame.id))

    def _watch(self, _: Watch) -> None:
        raise ApiError(errors.OPERATION_UNAVAILABLE, "watch", applied=False)

    def _ok(self, frame_id: FrameId | None) -> None:
        if frame_id is not None:
            self.send(Ok(id=frame_id))

    # By the type of a frame: the method that handles it.
    _handlers: ClassVar[dict[type, Callable[["SocketSession", Any], None]]] = {
        Pub: _publish,
        PackedPub: _publish,
        Ack: _settle,
        AddCredit: _credit,
        Nak: _settle,
        Term: _settle,
        InProgress: _settle,
        Sub: _subscribe,
        Unsub: _unsubscribe,
        Connect: _connect,
        Ping: _ping,
        Watch: _watch,
    }

    # Heartbeats ----------------------------------------------------------------------------------
    def _watch_silence(self) -> None:
        """Send due heartbeats. Look again four times per interval while there are feeds."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
        for beat in self.session.beats(time.monotonic_ns()):
            self.send(beat)
        if self._feeds and self.session.heartbeat_ns and self._socket.open:
            delay_s = self.session.heartbeat_ns / NS_PER_S / 4
            self._beat = self._loop.call_later(delay_s, self._watch_silence)


def _takes_long(frame: Any) -> bool:
    """Return True if ``frame`` may hold the event loop too long to be handled in one step."""
    kind = type(frame)
    if kind in _SETTLING:
        return bool(frame.ranges) or len(frame.tokens) > _TOKENS_AT_ONCE
    return kind in _BATCHES


def _results(found: Sequence[Candidate], answers: Iterator[PubResult]) -> list[BatchResult]:
    """Return one result per message of a batch, in order; ``answers`` has the valid ones."""
    problems = Problems()
    results = []
    for one in found:
        result = one if isinstance(one, ApiError) else next(answers)
        if isinstance(result, ApiError) or result.code:
            results.append(BatchResult(problem=problems.of(result)))
        else:
            shard = UNSET if result.shard is None else result.shard
            results.append(BatchResult(result.seq, result.duplicate, shard=shard))
    return results
