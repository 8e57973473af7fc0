"""A durable pull consumer on one route, at work while the year is still being published."""

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

from contrail_client import ApiProblem, Consumer, Contrail
from contrail_spark.flights.stream import NOT_FOUND, STREAM
from contrail_spark.flights.tally import Tally, tally_of

CONSUMER: Final = "jfk-lax"
ROUTE: Final = "flights.JFK.LAX.*"
PULL_BATCH: Final = 500
PULL_EXPIRES: Final = "1s"
FINISH_TIMEOUT_S: Final = 60.0


class RouteError(RuntimeError):
    """The consumer did not come to its end."""


def new_consumer(client: Contrail) -> Consumer:
    """The durable consumer of the route, made anew: a run has to see the whole route."""
    try:
        client.consumer(STREAM, CONSUMER).delete()
    except ApiProblem as problem:
        if problem.status != NOT_FOUND:
            raise
    return client.ensure_consumer(STREAM, CONSUMER, {"filter_subject": ROUTE})


class RouteConsumer:
    """Pulls and acknowledges in a thread of its own, from entering the context to leaving it.

    The consumer delivers at least once, so a message may come again when its ack was late; it is
    tallied the first time.  ``expected`` is how many the route has: the acks that complete it are
    sent as sync acks, which are durable once they are answered.
    """

    def __init__(
        self, consumer: Consumer, expected: int, on_progress: Callable[[int], object]
    ) -> None:
        self._consumer = consumer
        self._expected = expected
        self._on_progress = on_progress
        self._seen: set[int] = set()
        self._tally = Tally()
        self._failure: BaseException | None = None
        self._published = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="route-consumer", daemon=True)

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
        """What was delivered, once everything is: to be called when publishing is over."""
        self._published.set()
        self._thread.join(FINISH_TIMEOUT_S)
        if self._failure is not None:
            raise RouteError(f"consumer {CONSUMER} failed: {self._failure}") from self._failure
        if self._thread.is_alive():
            raise RouteError(f"consumer {CONSUMER} still received after {FINISH_TIMEOUT_S:.0f} s")
        return self._tally

    def _run(self) -> None:
        try:
            while self._pull() and not self._stopped.is_set():
                pass
        except Exception as error:
            self._failure = error

    def _pull(self) -> bool:
        """One pull and its acks; False when nothing came after everything was published."""
        complete = self._published.is_set()
        deliveries = self._consumer.next(PULL_BATCH, expires=PULL_EXPIRES).messages
        fresh = [delivery for delivery in deliveries if delivery.seq not in self._seen]
        if deliveries:
            self._seen.update(delivery.seq for delivery in fresh)
            self._tally += tally_of((delivery.subject, delivery.payload) for delivery in fresh)
            self._consumer.ack(*deliveries, sync=len(self._seen) >= self._expected)
            self._on_progress(len(fresh))
        return bool(deliveries) or not complete
