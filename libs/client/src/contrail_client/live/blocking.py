"""Publisher and subscriptions without `await`: a thread runs the asynchronous ones."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar

from contrail_client.errors import Closed, ContrailError, PublishesFailed
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.feed import Feed
from contrail_client.live.publisher import (
    FAILURES_KEPT,
    AsyncPublication,
    AsyncPublisher,
    outgoing_message,
)
from contrail_client.live.reader import AsyncOrderedReader
from contrail_client.live.settling import Kind, Option
from contrail_client.live.subscription import AsyncPushedMessage, AsyncSubscription
from contrail_client.models import (
    Delivered,
    Expected,
    Headers,
    Message,
    MessageFacts,
    PubAck,
)
from contrail_client.times import Duration, wire
from contrail_client.transport.aio import AsyncTransport
from contrail_client.transport.blocking import Transport

T = TypeVar("T")
R = TypeVar("R")

INBOX_MAX: Final = 1_000
"""Messages that may wait to be taken by the publisher in the thread. `publish` waits for room."""

FETCHED_MAX: Final = 100
"""Messages passed between threads in one step, which is far faster than one by one."""


class LoopThread:
    """A thread that runs an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="contrail-client", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the thread, and wait for its result. Raises Closed after `stop`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError as error:
            # The loop has ended. Python warns of a coroutine that is neither awaited nor closed.
            work.close()
            raise Closed("the client is closed") from error
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C ends the wait here; the work in the thread must end too
            raise

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call `function` in the thread, without waiting for it. Raises Closed after `stop`."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError as error:
            raise Closed("the client is closed") from error

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Connection:
    """As `AsyncConnection`, in its own thread, which starts with the first participant."""

    def __init__(self, transport: Transport) -> None:
        self._options = transport.options
        self._lock = threading.Lock()
        self._started: tuple[LoopThread, AsyncTransport, AsyncConnection] | None = None
        """Guarded by `_lock`; None before the first participant and after `close`."""

    def make(self, kind: Callable[[AsyncConnection], T]) -> tuple[LoopThread, T]:
        """Make a participant of `kind`; returns it with the thread that has to use it."""
        with self._lock:
            if self._started is None:
                thread = LoopThread()
                self._started = (thread, *thread.run(self._start()))
            thread, _, connection = self._started

        # In the thread, because participants may only be made where their event loop runs.
        async def made() -> T:
            return kind(connection)

        return thread, thread.run(made())

    def close(self) -> None:
        """As `AsyncConnection.close`; the thread ends too."""
        with self._lock:
            started, self._started = self._started, None
        if started is not None:
            thread, transport, connection = started
            thread.run(connection.close())
            thread.run(transport.close())
            thread.stop()

    async def _start(self) -> tuple[AsyncTransport, AsyncConnection]:
        transport = AsyncTransport(self._options)
        return transport, AsyncConnection(transport)


class Publication(Future[PubAck]):
    """The outcome of one message: `result()` returns the ack, or raises the error."""

    def __init__(self) -> None:
        super().__init__()
        # The caller has asked for the outcome, so `flush` need not report a failure.
        self.asked = False
        # The publication in the thread; None until the publisher has accepted the message.
        self._inner: AsyncPublication | None = None

    def result(self, timeout: float | None = None) -> PubAck:
        """The ack; waits up to `timeout` seconds, and raises the error if the publish failed."""
        self._ask()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a failed publish; None if there is an ack."""
        self._ask()
        return super().exception(timeout)

    def fail(self, error: ContrailError) -> None:
        """Fail with `error`: the publisher did not accept the message."""
        if self.set_running_or_notify_cancel():
            self.set_exception(error)

    def follow(self, inner: AsyncPublication) -> None:
        """Take over the outcome of `inner` when it is done; runs in the client's thread."""
        self._inner = inner
        # The caller may have asked before the publisher accepted the message.
        if self.asked:
            inner.mark_seen()
        inner.add_done_callback(self._settle)

    def _ask(self) -> None:
        self.asked = True
        if self._inner is not None:
            self._inner.mark_seen()

    def _settle(self, inner: "asyncio.Future[PubAck]") -> None:
        if self.cancelled() or not self.set_running_or_notify_cancel():
            return
        error = asyncio.Future.exception(inner)
        if error is None:
            self.set_result(asyncio.Future.result(inner))
        else:
            self.set_exception(error)


class Publisher:
    """As `AsyncPublisher`, without `await`. Several threads may share one."""

    def __init__(self, connection: Connection, **options: Any) -> None:
        """Take the options of `AsyncPublisher`."""
        kind = partial(AsyncPublisher, **options)
        self._thread, self._publisher = connection.make(kind)
        self._inbox: deque[tuple[Message, Publication]] = deque()
        """Messages for the publisher in the thread, in order; guarded by `_lock`."""
        self._lock = threading.Condition()
        """Guards `_inbox` and `_busy`; notified when the inbox has room again."""
        self._passing: asyncio.Task[None] | None = None
        """The task that empties the inbox; belongs to the thread."""
        self._busy = False
        """Whether `_passing` runs or is about to; guarded by `_lock`."""
        self._not_taken: deque[tuple[str, ContrailError, Publication]] = deque(maxlen=FAILURES_KEPT)
        """Messages that the publisher did not accept; belongs to the thread."""

    def __enter__(self) -> Self:
        self._thread.run(self._publisher.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
        finally:
            self.close()

    def publish(
        self,
        subject: str,
        payload: bytes | str = b"",
        *,
        headers: Headers | None = None,
        msg_id: str | None = None,
        expected: Expected | None = None,
        ttl: str | timedelta | None = None,
    ) -> Publication:
        """As `AsyncPublisher.publish`; if the publisher has ended, the result raises the error."""
        message = outgoing_message(subject, payload, headers, msg_id, expected, ttl)
        publication = Publication()
        with self._lock:
            while len(self._inbox) >= INBOX_MAX:
                self._lock.wait()
            self._inbox.append((message, publication))
            begin = not self._busy
            self._busy = True
        # One call into the thread starts the task; it then takes what further callers add.
        if begin:
            try:
                self._thread.call(self._begin_passing)
            except Closed as error:
                self._fail_waiting(error)
        return publication

    def _fail_waiting(self, error: Closed) -> None:
        """Fail all messages of the inbox: the client was closed, and nothing empties it."""
        with self._lock:
            waiting = list(self._inbox)
            self._inbox.clear()
            self._busy = False
            self._lock.notify_all()
        for _, publication in waiting:
            publication.fail(error)

    def flush(self) -> None:
        """As `AsyncPublisher.flush`."""
        self._thread.run(self._flush())

    def close(self) -> None:
        """As `AsyncPublisher.close`."""
        with contextlib.suppress(Closed):  # the client was closed first, and the publisher with it
            self._thread.run(self._close())

    def _begin_passing(self) -> None:
        self._passing = asyncio.create_task(self._pass_on())

    async def _pass_on(self) -> None:
        """Pass the messages of the inbox to the publisher, which accepts them as it has room."""
        while True:
            with self._lock:
                if not self._inbox:
                    self._busy = False
                    return
                taken = [self._inbox.popleft() for _ in range(min(len(self._inbox), FETCHED_MAX))]
                self._lock.notify_all()
            for message, publication in taken:
                try:
                    inner = await self._publisher.send(message)
                except ContrailError as error:
                    publication.fail(error)
                    self._not_taken.append((message.subject, error, publication))
                else:
                    publication.follow(inner)

    async def _flush(self) -> None:
        while self._busy:
            # `_passing` may be of an earlier turn, while the call that replaces it is due.
            await asyncio.sleep(0)
            if self._passing is not None:
                await self._passing
        await self._publisher.flush()
        failed = [(subject, error) for subject, error, each in self._not_taken if not each.asked]
        self._not_taken.clear()
        if failed:
            raise PublishesFailed(failed, len(failed))

    async def _close(self) -> None:
        self._publisher.close()
        if self._passing is not None:
            await self._passing


class PushedMessage(MessageFacts):
    """As `AsyncPushedMessage`, without `await`."""

    __slots__ = ("_inner", "_thread")

    def __init__(self, inner: AsyncPushedMessage, thread: LoopThread) -> None:
        super().__init__(inner.delivered)
        self._inner = inner
        self._thread = thread

    def ack(self) -> None:
        """As `AsyncPushedMessage.ack`."""
        self._settle("ack")

    def nak(self, *, delay: Duration | None = None) -> None:
        """As `AsyncPushedMessage.nak`."""
        self._settle("nak", wire(delay))

    def term(self, *, reason: str | None = None) -> None:
        """As `AsyncPushedMessage.term`."""
        self._settle("term", reason)

    def in_progress(self) -> None:
        """As `AsyncPushedMessage.in_progress`."""
        self._thread.run(self._inner.in_progress())

    def ack_sync(self) -> None:
        """As `AsyncPushedMessage.ack_sync`."""
        self._thread.run(self._inner.ack_sync())

    def _settle(self, kind: Kind, option: Option = None) -> None:
        # Claimed here, so that a second acknowledgement raises in the caller.
        self._inner.claim()
        self._thread.call(self._inner.settle_claimed, kind, option)


class BlockingFeed(Generic[T, R]):
    """As `Feed`, without `await`; `R` is the form in which a caller gets a `T`."""

    def __init__(self, thread: LoopThread, feed: Feed[T]) -> None:
        self._thread = thread
        self._feed = feed
        # Messages that were passed to this side and not read yet, oldest first.
        self._fetched: deque[R] = deque()

    @property
    def stream(self) -> str:
        """The stream that is read."""
        return self._feed.stream

    def __enter__(self) -> Self:
        self._thread.run(self._feed.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.unsubscribe()

    def __iter__(self) -> Iterator[R]:
        return self

    def __next__(self) -> R:
        found = self.next()
        if found is None:
            raise StopIteration
        return found

    def next(self, *, timeout_s: float | None = None) -> R | None:
        """As `Feed.next`."""
        if not self._fetched:
            self._fetched.extend(map(self._give, self._thread.run(self._fetch(timeout_s))))
        return self._fetched.popleft() if self._fetched else None

    def drain(self) -> None:
        """As `Feed.drain`."""
        self._thread.run(self._feed.drain())

    def unsubscribe(self) -> None:
        """As `Feed.unsubscribe`."""
        for each in self._fetched:
            self._return(each)
        self._fetched.clear()
        self._thread.run(self._feed.unsubscribe())

    async def _fetch(self, timeout_s: float | None) -> list[T]:
        first = await self._feed.next(timeout_s=timeout_s)
        return [] if first is None else [first, *self._feed.take_unread(FETCHED_MAX - 1)]

    def _give(self, found: T) -> R:
        raise NotImplementedError

    def _return(self, found: R) -> None:
        """Return a message that was fetched and that the caller has not read."""


class Subscription(BlockingFeed[AsyncPushedMessage, PushedMessage]):
    """As `AsyncSubscription`, without `await`."""

    def __init__(self, connection: Connection, stream: str, consumer: str, **options: Any) -> None:
        """Take the options of `AsyncSubscription`."""
        kind = partial(AsyncSubscription, stream=stream, consumer=consumer, **options)
        super().__init__(*connection.make(kind))
        self.consumer = consumer

    def _give(self, found: AsyncPushedMessage) -> PushedMessage:
        return PushedMessage(found, self._thread)

    def _return(self, found: PushedMessage) -> None:
        found.nak()


class OrderedReader(BlockingFeed[Delivered, Delivered]):
    """As `AsyncOrderedReader`, without `await`; `on_gap` is called by the client's thread."""

    def __init__(self, connection: Connection, stream: str, **options: Any) -> None:
        """Take the options of `AsyncOrderedReader`."""
        kind = partial(AsyncOrderedReader, stream=stream, **options)
        super().__init__(*connection.make(kind))

    def _give(self, found: Delivered) -> Delivered:
        return found
