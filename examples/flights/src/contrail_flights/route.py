"""Receives two routes while the year is still being published: one pulled, one pushed."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from contrail_client import ApiProblem, Consumer, Contrail, Delivery, PushedMessage
from contrail_flights.stream import NOT_FOUND, STREAM
from contrail_flights.tally import Tally, tally_of

PULL_BATCH: Final = 500
PULL_EXPIRES: Final = "1s"
PUSH_SILENCE_S: Final = 1.0
FINISH_TIMEOUT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Route:
    """A route, the subjects of its flights, and the durable consumer that receives them."""

    name: str
    subjects: str
    consumer: str


PULLED: Final = Route("JFK-LAX", "flights.JFK.LAX.*", "jfk-lax")
PUSHED: Final = Route("LGA-ATL", "flights.LGA.ATL.*", "lga-atl")


class RouteError(RuntimeError):
    """A consumer did not get all messages of its route."""


def new_consumer(client: Contrail, route: Route) -> Consumer:
    """The durable consumer of the route, re-created so that a run sees the whole route."""
    try:
        client.consumer(STREAM, route.consumer).delete()
    except ApiProblem as problem:
        if problem.status != NOT_FOUND:
            raise
    return client.create_consumer(STREAM, route.consumer, {"filter_subject": route.subjects})


class RouteReceiver:
    """Receives and acknowledges in its own thread, while the context lasts.

    A consumer delivers at least once, so a message whose ack was late may come again; only the
    first delivery is tallied. ``expected`` is the number of messages of the route. The acks that
    complete it are sync acks, which are durable when they are answered.
    """

    def __init__(self, consumer: str, expected: int, on_progress: Callable[[int], object]) -> None:
        self._name = consumer
        self._expected = expected
        self._on_progress = on_progress
        self._seen: set[int] = set()
        self._tally = Tally()
        self._failure: BaseException | None = None
        self._published = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=consumer, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def finish(self) -> Tally:
        """Wait until everything is delivered, and return its tally. Call it after publishing."""
        self._published.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._failure is not None:
            raise RouteError(f"consumer {self._name} failed: {self._failure}") from self._failure
        if self._thread.is_alive():
            raise RouteError(f"consumer {self._name} still received after {FINISH_TIMEOUT_S:.0f} s")
        return self._tally

    def _run(self) -> None:
        try:
            complete = False
            for more in self._receive():
                if self._stopped.is_set() or (complete and not more):
                    return
                # Only a check that began after everything was published can find the end.
                complete = self._published.is_set()
        except Exception as error:
            self._failure = error

    def _receive(self) -> Iterator[bool]:
        """Receive and acknowledge, step by step; yields whether more may be available now."""
        raise NotImplementedError

    def _take(self, *messages: Delivery | PushedMessage) -> bool:
        """Tally messages that come for the first time; True if they complete the route."""
        fresh = [message for message in messages if message.seq not in self._seen]
        self._seen.update(message.seq for message in fresh)
        self._tally += tally_of((message.subject, message.payload) for message in fresh)
        self._on_progress(len(fresh))
        return len(self._seen) >= self._expected


class PulledRoute(RouteReceiver):
    """Pulls batches over HTTP."""

    def __init__(
        self, consumer: Consumer, expected: int, on_progress: Callable[[int], object]
    ) -> None:
        super().__init__(consumer.name, expected, on_progress)
        self._consumer = consumer

    def _receive(self) -> Iterator[bool]:
        while True:
            deliveries = self._consumer.next(PULL_BATCH, expires=PULL_EXPIRES).messages
            if deliveries:
                complete = self._take(*deliveries)
                self._consumer.ack(*deliveries, sync=complete)
            yield bool(deliveries)


class PushedRoute(RouteReceiver):
    """Gets messages pushed over a WebSocket as they are stored."""

    def __init__(
        self,
        client: Contrail,
        consumer: Consumer,
        expected: int,
        on_progress: Callable[[int], object],
    ) -> None:
        super().__init__(consumer.name, expected, on_progress)
        self._client = client
        self._consumer = consumer

    def _receive(self) -> Iterator[bool]:
        with self._client.subscribe(STREAM, self._name) as messages:
            while True:
                message = messages.next(timeout_s=PUSH_SILENCE_S)
                if message is not None:
                    # The last ack is durable when it is answered, so the check after it finds
                    # nothing pending.
                    if self._take(message):
                        message.ack_sync()
                    else:
                        message.ack()
                yield message is not None or self._unfinished()

    def _unfinished(self) -> bool:
        """Whether messages are still in flight: silence alone does not prove that none are."""
        info = self._consumer.info()
        return bool(info.num_pending or info.num_ack_pending)
