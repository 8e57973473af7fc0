"""Keeps a streaming query running: progress, attempts after failures, and an orderly end."""

import json
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from pyspark.errors import PySparkException

from contrail_client.cli.ending import Failed
from contrail_pipeline.transform.failures import failure_of

PAUSE_FIRST_S: Final = 1.0
PAUSE_MAX_S: Final = 60.0
POLL_S: Final = 0.2


class Query(Protocol):
    """What is used of Spark's streaming query."""

    @property
    def status(self) -> dict[str, Any]: ...  # noqa: D102
    @property
    def recentProgress(self) -> list[Any]: ...  # noqa: D102 Spark's name
    def awaitTermination(self, timeout: Any = None) -> bool | None: ...  # noqa: D102
    def stop(self) -> None: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class Progress:
    """A finished batch. ``lag`` is the number of messages after it that the stream had then."""

    batch: int
    rows: int
    rows_per_second: float
    lag: int
    error: str | None = None

    def document(self) -> dict[str, Any]:
        """The progress as JSON."""
        return {
            "batch": self.batch,
            "rows": self.rows,
            "rows_per_second": round(self.rows_per_second, 1),
            "lag": self.lag,
            "last_error": self.error,
        }

    def line(self) -> str:
        """The progress for people."""
        behind = "no lag" if not self.lag else f"lag {self.lag:,} messages"
        error = f", last error: {self.error}" if self.error else ""
        return (
            f"batch {self.batch}: {self.rows:,} rows read, {self.rows_per_second:,.0f} rows/s, "
            f"{behind}{error}"
        )


def progress_of(found: Mapping[str, Any], error: str | None) -> Progress:
    """The progress that Spark reports of a batch."""
    lag = 0
    for source in found["sources"]:
        end, newest = (_shards(source[name]) for name in ("endOffset", "latestOffset"))
        lag = max(lag, sum(newest.values()) - sum(end.get(one, 0) for one in newest))
    # Without a row, Spark has no rate.
    rate = found.get("processedRowsPerSecond") or 0.0
    return Progress(int(found["batchId"]), int(found["numInputRows"]), float(rate), lag, error)


def _shards(offset: Any) -> dict[str, int]:
    document = json.loads(offset) if isinstance(offset, str) else offset
    # A query that repeats a batch after a start has not asked for the newest offset yet.
    shards: dict[str, int] = {} if document is None else document["shards"]
    return shards


@dataclass(slots=True)
class Supervisor:
    """Runs a query until it ends, is stopped, or fails for good.

    ``start`` starts it; ``told`` gets each batch, and ``failed`` each passing failure with the
    pause that follows. ``retries`` limits consecutive attempts without a finished batch.
    """

    start: Callable[[], Query]
    told: Callable[[Progress], None]
    failed: Callable[[str, float], None]
    retries: int
    stopping: threading.Event = field(default_factory=threading.Event)
    rows: int = 0
    batches: int = 0
    _batch: int = -1
    _error: str | None = None

    def run(self) -> None:
        """Run the query. Raises Failed, with the reason, if it cannot go on."""
        attempt = 0
        while True:
            before = self.batches
            query: Query | None = None
            try:
                query = self.start()
                self._follow(query)
                self._report(query)
                return
            except Exception as error:
                if _is_disconnected(error):
                    raise Failed("Spark has ended: its JVM does not answer any more") from error
                if not _is_of_spark(error):
                    raise
                if query is not None:
                    self._report(query)
                failure = failure_of(error)
                if not failure.passing:
                    raise Failed(failure.sentence) from error
                attempt = 1 if self.batches > before else attempt + 1
                if attempt > self.retries:
                    times = "1 attempt" if attempt == 1 else f"{attempt} attempts"
                    raise Failed(f"{failure.sentence} (after {times})") from error
                self._error = failure.sentence
            pause = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2 ** (attempt - 1))
            self.failed(self._error, pause)
            if self.stopping.wait(pause):
                return

    def _follow(self, query: Query) -> None:
        while not query.awaitTermination(POLL_S):
            self._report(query)
            if self.stopping.is_set():
                self._end(query)
                return

    def _end(self, query: Query) -> None:
        """Stop the query after the batch that runs now.

        Spark may begin another one at that very moment. It is cut off, and repeated later.
        """
        before = self.batches
        while (
            query.status["isTriggerActive"]
            and self.batches == before
            and not query.awaitTermination(POLL_S)
        ):
            self._report(query)
        query.stop()

    def _report(self, query: Query) -> None:
        for found in query.recentProgress:
            # An idle query reports the last batch again, without rows.
            if found["batchId"] <= self._batch or not _is_batch(found):
                continue
            self._batch = found["batchId"]
            self.rows += found["numInputRows"]
            self.batches += 1
            self.told(progress_of(found, self._error))
            self._error = None


def _is_of_spark(error: Exception) -> bool:
    # PySpark passes on those that it does not know.
    return isinstance(error, PySparkException) or type(error).__module__ == "py4j.protocol"


def _is_disconnected(error: Exception) -> bool:
    return isinstance(error, ConnectionError) or type(error).__name__ == "Py4JNetworkError"


def _is_batch(found: Mapping[str, Any]) -> bool:
    return "addBatch" in found["durationMs"]


@contextmanager
def ended_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Set ``stopping`` on the first SIGINT or SIGTERM; the second one interrupts the program."""
    kept = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        if stopping.is_set():
            raise KeyboardInterrupt
        stopping.set()

    for one in kept:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in kept.items():
            signal.signal(one, handler)
