"""``StorageLink`` over TCP: what the api and the gateway use when storage is another process."""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial, wraps
from typing import Any, Final, TypeVar, cast

import msgspec

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckItem, PullRequest, PullResult
from contrail_link.contract.publish import PublishContent, PublishOutcome, is_repeatable
from contrail_link.contract.read import Peeked
from contrail_link.contract.remote import OnLoss
from contrail_link.tcp import methods
from contrail_link.tcp.channel import Address, Channel, Late, LinkLostError, Locate
from contrail_link.tcp.limits import LinkLimits
from contrail_link.tcp.methods import DeclaredMethod, Method, encode
from contrail_link.tcp.metrics import client_metrics, exposition

_R = TypeVar("_R")

_AGAIN_S: Final = 1


class RemoteLink:
    """A ``StorageLink`` to a storage node in another process.

    Only the methods with code of their own are written out. All others send their arguments and
    return the answer: they are made from their declarations, below the class.

    It has two connections, so that the answer to a publish never waits behind the bytes of a
    replay. If a connection is lost, requests that were not sent or that change nothing are repeated
    for a short time. A request that may have had an effect ends with OUTCOME_UNKNOWN. While there
    is no connection, all requests are refused with NOT_READY.
    """

    def __init__(
        self, where: Address | Locate, keys: Sequence[bytes], limits: LinkLimits | None = None
    ) -> None:
        self.limits = limits or LinkLimits()
        locate = where if callable(where) else _always(where)
        self._calls = Channel(locate, keys, self.limits)
        self._streams = Channel(locate, keys, self.limits)
        # Whether requests are given up before the connection: see `LinkLimits.doubt_s`.
        self._doubts = math.isfinite(self.limits.doubt_s)

    def start(self) -> None:
        """Connect in the background. Until then, requests are refused."""
        self._calls.start()
        self._streams.start()

    async def close(self) -> None:
        """End the connections."""
        await self._calls.close()
        await self._streams.close()

    @property
    def link(self) -> StorageLink:
        """This object, typed as what it implements."""
        return cast(StorageLink, self)

    @property
    def name(self) -> str:
        """Name of the node; "" until it was connected."""
        return self._calls.node

    @property
    def channels(self) -> dict[str, Channel]:
        """The connections, by their purpose."""
        return {"calls": self._calls, "streams": self._streams}

    async def wait_until_up(self, timeout_s: float) -> bool:
        """Wait until there is a connection to storage; return False after ``timeout_s``."""
        return await self._calls.wait_until_up(timeout_s)

    # Methods with code of their own --------------------------------------------------------------
    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages; ``done`` gets the outcome. NOT_READY at once while storage is away."""
        method = methods.PUBLISH_BATCH if isinstance(content, MessageBatch) else methods.PUBLISH
        # The messages are only kept if they may be needed to decide about a repetition.
        caller = _Publish(done, content if self._doubts else None)
        self._calls.post(method, encode((stream, content)), self.limits.call_s, caller)

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """Wait a short time for a connection after NOT_READY."""
        if refusal.spec is not errors.NOT_READY or refusal.applied is not False:
            return False
        return not self._calls.up and await _up_again(self._calls, refused_at_s)

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message where its subject goes, all with one request."""
        caller = _PublishEach(messages, done, self._doubts)
        body = encode((messages,))
        try:
            self._calls.post(methods.PUBLISH_EACH, body, self.limits.call_s, caller, caller)
        except ApiError as error:
            caller.failed(error)

    def peek_message(self, stream: str, seq: int) -> Peeked:
        """Return None: storage has to be asked."""
        return None

    def peek_last(self, stream: str, subject: str) -> Peeked:
        """Return None: storage has to be asked."""
        return None

    async def pull(self, request: PullRequest) -> PullResult:
        """Deliver up to a batch."""
        return await self._call(methods.PULL, (request,), partial(self._give_back, request))

    def _give_back(self, request: PullRequest, body: memoryview) -> None:
        """Return deliveries to the consumer that arrived after the caller was cancelled."""
        try:
            result = methods.PULL.result.decode(body)
        except msgspec.DecodeError:
            return  # another version of storage; it delivers them again after ack_wait
        address = (result.shard_id, result.consumer_id, result.epoch)
        seqs = [] if result.columns is None else result.columns.each_seq()
        items = [AckItem(*address, seqs, "nak")] if seqs else []
        for one in result.deliveries:
            items.append(AckItem(*result.address(one), [one.message.seq], "nak"))
        if items:
            arguments = encode((request.stream, request.consumer, items, False))
            with contextlib.suppress(ApiError):
                self._calls.post(methods.ACKNOWLEDGE, arguments, self.limits.call_s, _Nobody())

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        """Return why the link or storage is not ready; storage reports once a second."""
        # Either connection may be lost alone, and its methods with it.
        for channel in (self._calls, self._streams):
            if not channel.up:
                return {"storage link": f"down: {channel.why}"}
        return self._calls.status

    async def metrics_text(self) -> str:
        """Return the metrics of this end of the link; storage serves its own."""
        return exposition(client_metrics(self.channels))

    # Calls ---------------------------------------------------------------------------------------
    async def _call(
        self, method: Method[_R], arguments: tuple[Any, ...], late: Late | None = None
    ) -> _R:
        """Return the result of a method.

        ``late`` gets a result that arrives after the caller was cancelled.
        """
        body = encode(arguments)
        wait_ns = method.wait_ns(arguments)
        # A wait is not repeated, because the caller would then wait longer than it asked for.
        on_loss = OnLoss.REFUSE if wait_ns else method.on_loss
        timeout_s = self.limits.call_s + wait_ns / NS_PER_S
        failed_at_s: float | None = None
        while True:
            call = _Call(self._calls, late)
            try:
                call.begin(method, body, timeout_s)
                return method.result.decode(await call.result())
            except LinkLostError as lost:
                # Storage may have received the request before the connection ended.
                if on_loss is OnLoss.UNKNOWN:
                    raise ApiError(errors.OUTCOME_UNKNOWN, f"storage link: {lost}") from None
                failed_at_s = failed_at_s or _now_s()
                if on_loss is OnLoss.REFUSE or not await _up_again(self._calls, failed_at_s):
                    raise _interrupted(lost) from None
            except ApiError as error:
                failed_at_s = failed_at_s or _now_s()
                if not await self.may_retry(error, failed_at_s):
                    raise

    async def _stream(self, method: Method[Any], arguments: tuple[Any, ...]) -> "ChunkStream":
        """Return the chunks of a stream, once storage has checked the request."""
        body = encode(arguments)
        failed_at_s: float | None = None
        while True:
            stream = ChunkStream(self._streams)
            try:
                await stream.begin(method, body, self.limits)
                return stream
            except LinkLostError as lost:
                failed_at_s = failed_at_s or _now_s()
                if not await _up_again(self._streams, failed_at_s):
                    raise _interrupted(lost) from None
            except ApiError as error:
                failed_at_s = failed_at_s or _now_s()
                # While the connection is up, storage itself has refused; then the answer would be
                # the same again.
                if error.spec is not errors.NOT_READY or self._streams.up:
                    raise
                if not await _up_again(self._streams, failed_at_s):
                    raise


def _forward(method: DeclaredMethod) -> Callable[..., Any]:
    """Return the method of RemoteLink that asks storage and returns its answer."""

    @wraps(method.declaration)
    async def forward(self: RemoteLink, *args: Any, **kwargs: Any) -> Any:
        arguments = method.in_order(args, kwargs)
        if method.streams:
            return await self._stream(method, arguments)
        return await self._call(method, arguments)

    return forward


for _method in methods.DECLARED:
    if not hasattr(RemoteLink, _method.name):
        setattr(RemoteLink, _method.name, _forward(_method))


def _always(address: Address) -> Locate:
    async def locate() -> Address:
        return address

    return locate


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _up_again(channel: Channel, failed_at_s: float) -> bool:
    """Wait for a connection; False if a request that failed at that time has waited enough."""
    left_s = failed_at_s + channel.limits.reconnect_wait_s - _now_s()
    return left_s > 0 and await channel.wait_until_up(left_s)


class _Nobody:
    """The caller of a request whose outcome nobody waits for."""

    def answered(self, body: memoryview) -> None:
        """Do nothing."""

    def failed(self, error: ApiError | LinkLostError) -> None:
        """Do nothing."""

    def may_repeat(self) -> bool:
        """Return False."""
        return False


class _Call:
    """A request whose caller is a coroutine; if that is cancelled, so is the request."""

    def __init__(self, channel: Channel, late: Late | None) -> None:
        self._channel = channel
        self._late = late
        self._number = 0
        self._done: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()

    def begin(self, method: Method[Any], body: bytes, timeout_s: float) -> None:
        self._number = self._channel.post(method, body, timeout_s, self)

    async def result(self) -> memoryview:
        try:
            return await self._done
        except asyncio.CancelledError:
            # The result arrived in the pass of the event loop that cancelled the caller.
            if self._late is not None and _has_result(self._done):
                self._late(self._done.result())
            self._channel.cancel(self._number, self._late)
            raise

    def answered(self, body: memoryview) -> None:
        if not self._done.done():
            self._done.set_result(body)
        elif self._late is not None:
            self._late(body)

    def failed(self, error: ApiError | LinkLostError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def may_repeat(self) -> bool:
        return False


class _Publish:
    """A publish whose caller is a callback."""

    __slots__ = ("_content", "_done")

    def __init__(
        self, done: Callable[[PublishOutcome], None], content: PublishContent | None
    ) -> None:
        self._done = done
        self._content = content

    def may_repeat(self) -> bool:
        return self._content is not None and is_repeatable(self._content)

    def answered(self, body: memoryview) -> None:
        try:
            outcome: PublishOutcome = methods.PUBLISH.result.decode(body)
        except msgspec.DecodeError as error:
            # Storage of another version has answered. It may well have stored the messages.
            outcome = ApiError(errors.OUTCOME_UNKNOWN, f"storage link: {error}")
        self._done(outcome)

    def failed(self, error: ApiError | LinkLostError) -> None:
        if isinstance(error, LinkLostError):
            error = ApiError(errors.OUTCOME_UNKNOWN, f"storage link: {error}")
        self._done(error)


class _PublishEach:
    """Messages whose outcomes arrive in parts; a message without one has got none yet."""

    __slots__ = ("_done", "_doubts", "_messages", "_waiting")

    def __init__(
        self,
        messages: Sequence[PublishMessage],
        done: Callable[[list[int], PublishOutcome], None],
        doubts: bool,
    ) -> None:
        self._messages = messages
        self._done = done
        self._doubts = doubts
        # Positions without an outcome, in order.
        self._waiting = list(range(len(messages)))

    def may_repeat(self) -> bool:
        return self._doubts and is_repeatable([self._messages[at] for at in self._waiting])

    def answered(self, body: memoryview) -> None:
        """Do nothing: storage sends outcomes only."""

    def chunk(self, piece: memoryview) -> None:
        if not self._waiting:
            return  # it has failed before
        try:
            found = methods.PUBLISH_EACH.result.decode(piece)
        except msgspec.DecodeError as error:
            # Storage of another version has answered. It may well have stored the messages.
            self.failed(ApiError(errors.OUTCOME_UNKNOWN, f"storage link: {error}"))
            return
        positions = found.positions
        if positions == self._waiting:
            self._waiting = []
        else:
            answered = set(positions)
            self._waiting = [at for at in self._waiting if at not in answered]
        self._done(positions, found.outcome)

    def ended(self) -> None:
        """Do nothing: every message has its outcome."""

    def failed(self, error: ApiError | LinkLostError) -> None:
        if isinstance(error, LinkLostError):
            error = ApiError(errors.OUTCOME_UNKNOWN, f"storage link: {error}")
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._done(waiting, error)


class ChunkStream(AsyncIterator[bytes]):
    """The chunks of a stream. At most a window of bytes is buffered here or on its way."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._number = 0
        # Credit that storage has at the beginning.
        self._window = 0
        # Bytes that the reader has taken, and whose credit was not given back yet.
        self._taken = 0
        # Pieces that the reader has not taken.
        self._pieces: deque[bytes] = deque()
        # No piece follows: the stream has ended, was cut or was closed.
        self._complete = False
        # Why the stream was cut.
        self._error: ApiError | None = None
        # Wakes the reader that waits for a piece.
        self._news: asyncio.Future[None] | None = None
        # Done when storage has accepted the request.
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def begin(self, method: Method[Any], body: bytes, limits: LinkLimits) -> None:
        """Send the request, and wait until storage has checked it."""
        self._window = limits.window_bytes
        self._number = self._channel.post(method, body, limits.call_s, self, self)
        self._channel.give_credit(self._number, self._window)
        try:
            await self._begun
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def __anext__(self) -> bytes:
        """Return the next piece; raise ApiError if the stream was cut."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self._complete:
                raise StopAsyncIteration
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        piece = self._pieces.popleft()
        self._taken += len(piece)
        # Half a window at a time: a frame for each piece would cost more, and a whole window would
        # leave storage without credit while the frame is on its way.
        if 2 * self._taken >= self._window and not self._complete:
            self._channel.give_credit(self._number, self._taken)
            self._taken = 0
        return piece

    async def aclose(self) -> None:
        """Cancel the rest of the stream; does nothing after its end."""
        if not self._complete:
            self._complete = True
            self._channel.cancel(self._number)
        self._pieces.clear()

    def answered(self, body: memoryview) -> None:
        """Note that storage has accepted the request."""
        del body
        if not self._begun.done():
            self._begun.set_result(None)

    def failed(self, error: ApiError | LinkLostError) -> None:
        """Note that the request was refused, or that the stream was cut."""
        if not self._begun.done():
            self._complete = True
            self._begun.set_exception(error)
            return
        self._complete = True
        self._error = error if isinstance(error, ApiError) else _interrupted(error)
        self._wake()

    def may_repeat(self) -> bool:
        """Return False: the declaration of the method decides."""
        return False

    def chunk(self, piece: memoryview) -> None:
        """Buffer a piece."""
        self._pieces.append(bytes(piece))
        self._wake()

    def ended(self) -> None:
        """Note that the stream is complete."""
        self._complete = True
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)


def _has_result(done: "asyncio.Future[Any]") -> bool:
    return done.done() and not done.cancelled() and done.exception() is None


def _interrupted(lost: LinkLostError) -> ApiError:
    return ApiError(errors.NOT_READY, f"storage link: {lost}", retry_after_s=_AGAIN_S)
