"""`contrail bench`: measure a server from this client, on a stream that is created and removed.

The figures are of client and server together; the client's own work is a large part of them.
"""

import math
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Annotated, Final

import msgspec
import typer

from contrail_client.blocking.client import Contrail
from contrail_client.cli import show
from contrail_client.cli.connection import Session, client_command
from contrail_client.cli.tree import group
from contrail_client.errors import Unreachable
from contrail_client.live.outbox import MAX_OUTSTANDING
from contrail_client.models import Message

app = group("Measure throughput and latency.")

FILL_OUTSTANDING: Final = 4
PERCENTILES: Final = (50, 90, 99)
_STAMP: Final = struct.Struct("!d")
_PATIENCE_S: Final = 30.0
_MB: Final = 1e6


class Mode(StrEnum):
    """How messages are published."""

    SYNC = "sync"
    ASYNC = "async"
    BATCH = "batch"


Messages = Annotated[int, typer.Option(min=1, help="Number of messages.")]
Size = Annotated[int, typer.Option(min=_STAMP.size, help="Payload size in bytes.")]
Publishing = Annotated[
    Mode, typer.Option(help="sync: one at a time; async: many at once; batch: in batches.")
]
Batch = Annotated[int, typer.Option(min=1, help="Messages per batch or pull.")]
Outstanding = Annotated[
    int, typer.Option(min=1, help="With async: maximum number of unacknowledged messages.")
]
Clients = Annotated[int, typer.Option(min=1, max=256, help="Number of concurrent clients.")]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: times in seconds, latencies in milliseconds."""

    what: str
    messages: int
    seconds: float
    messages_per_second: float
    megabytes_per_second: float
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """The stream of one measurement."""

    client: Contrail
    name: str
    subject: str


@client_command(app, "pub")
def bench_publish(
    session: Session,
    messages: Messages = 10_000,
    size: Size = 128,
    mode: Publishing = Mode.ASYNC,
    batch: Batch = 500,
    outstanding: Outstanding = MAX_OUTSTANDING,
    clients: Clients = 1,
) -> None:
    """Measure publishing: one message at a time, many at once over WebSocket, or in batches.

    Latency is the time from a publish to its ack, per message or per batch. Several clients run in
    threads with their own connections and share the messages.
    """
    payload = bytes(size)

    def publish(stream: Stream, count: int) -> Iterator[tuple[int, float]]:
        match mode:
            case Mode.SYNC:
                return _one_by_one(stream, payload, count)
            case Mode.ASYNC:
                return _at_once(stream, payload, count, outstanding)
            case Mode.BATCH:
                return _in_batches(stream, payload, count, batch)

    latencies: list[float] = []
    with _stream(session.client) as stream, show.progress("Publishing", messages) as bar:

        def work(client: Contrail, count: int) -> None:
            for done, latency_s in publish(replace(stream, client=client), count):
                latencies.append(latency_s)
                bar.advance(bar.task_ids[0], done)

        seconds = _side_by_side(session, work, shares(messages, clients))
    what = f"publish, {mode}" + (f", {clients} clients" if clients > 1 else "")
    _show(session, figures(what, messages, size, seconds, latencies))


@client_command(app, "sub")
def bench_subscribe(
    session: Session,
    messages: Messages = 10_000,
    size: Size = 128,
    ordered: Annotated[
        bool, typer.Option(help="Use an ordered subscription, which does not acknowledge.")
    ] = False,
) -> None:
    """Measure receiving stored messages by push."""
    with _stream(session.client) as stream, show.progress("Receiving", messages) as bar:
        _fill(stream, messages, size)
        begun = time.perf_counter()
        for count in _ordered(stream, messages) if ordered else _pushed(stream, messages):
            bar.advance(bar.task_ids[0], count)
        seconds = time.perf_counter() - begun
    kind = "ordered" if ordered else "acknowledged"
    _show(session, figures(f"push, {kind}", messages, size, seconds, []))


@client_command(app, "pull")
def bench_pull(
    session: Session, messages: Messages = 10_000, size: Size = 128, batch: Batch = 500
) -> None:
    """Measure receiving stored messages by pulls. Latency is the time of a pull."""
    with _stream(session.client) as stream, show.progress("Pulling", messages) as bar:
        _fill(stream, messages, size)
        worker = stream.client.ensure_consumer(
            stream.name, "bench", {"max_ack_pending": max(batch, 1_000)}
        )
        begun = time.perf_counter()
        latencies: list[float] = []
        left = messages
        while left:
            asked = time.perf_counter()
            found = worker.next(min(batch, left))
            latencies.append(time.perf_counter() - asked)
            worker.ack(*found)
            left -= len(found)
            bar.advance(bar.task_ids[0], len(found))
        seconds = time.perf_counter() - begun
    _show(session, figures("pull", messages, size, seconds, latencies))


@client_command(app, "latency")
def bench_latency(
    session: Session,
    messages: Messages = 1_000,
    size: Size = 128,
    rate: Annotated[float, typer.Option(min=1.0, help="Messages to publish per second.")] = 200.0,
) -> None:
    """Measure the time from publish to delivery by push, publishing at a steady rate."""
    latencies: list[float] = []
    with (
        _stream(session.client) as stream,
        show.progress("Measuring", messages) as bar,
        stream.client.ordered(stream.name) as reader,
    ):
        publishing = threading.Thread(
            target=_steadily, args=(stream, messages, size, rate), daemon=True
        )
        begun = time.perf_counter()
        publishing.start()
        while len(latencies) < messages:
            found = reader.next(timeout_s=_PATIENCE_S)
            if found is None:
                raise Unreachable(f"no message arrived for {_PATIENCE_S:.0f} s")
            [sent] = _STAMP.unpack_from(found.payload)
            latencies.append(time.perf_counter() - sent)
            bar.advance(bar.task_ids[0])
        seconds = time.perf_counter() - begun
        publishing.join()
    _show(session, figures(f"publish to push at {rate:g}/s", messages, size, seconds, latencies))


def shares(messages: int, clients: int) -> list[int]:
    """How many messages each client has; a client without any is left out."""
    each, more = divmod(messages, clients)
    return [count for number in range(clients) if (count := each + (number < more))]


def _side_by_side(
    session: Session, work: Callable[[Contrail, int], None], counts: Sequence[int]
) -> float:
    """Have a client of its own work for each count; the seconds until the last is done."""
    with ExitStack() as stack, ThreadPoolExecutor(len(counts)) as threads:
        made = [stack.enter_context(session.connect()) for _ in counts]
        for client in made:
            client.rtt()  # connect before the measurement begins
        begun = time.perf_counter()
        for done in [threads.submit(work, *each) for each in zip(made, counts, strict=True)]:
            done.result()
        return time.perf_counter() - begun


def figures(
    what: str, messages: int, size: int, seconds: float, latencies_s: Sequence[float]
) -> Figures:
    """The figures of one measurement."""
    ordered_ms = sorted(1_000 * each for each in latencies_s)
    p50, p90, p99 = (percentile(ordered_ms, percent) for percent in PERCENTILES)
    return Figures(
        what=what,
        messages=messages,
        seconds=round(seconds, 3),
        messages_per_second=round(messages / seconds, 1),
        megabytes_per_second=round(messages * size / seconds / _MB, 2),
        p50_ms=p50,
        p90_ms=p90,
        p99_ms=p99,
        max_ms=round(ordered_ms[-1], 3) if ordered_ms else None,
    )


def percentile(ordered: Sequence[float], percent: int) -> float | None:
    """The smallest value that at least `percent` of all (ascending) values do not exceed."""
    if not ordered:
        return None
    return round(ordered[max(math.ceil(len(ordered) * percent / 100), 1) - 1], 3)


def _one_by_one(stream: Stream, payload: bytes, count: int) -> Iterator[tuple[int, float]]:
    for _ in range(count):
        begun = time.perf_counter()
        stream.client.publish(stream.subject, payload)
        yield 1, time.perf_counter() - begun


def _at_once(
    stream: Stream, payload: bytes, count: int, outstanding: int
) -> Iterator[tuple[int, float]]:
    acked: deque[float] = deque()

    def stored(begun: float, _: object) -> None:
        acked.append(time.perf_counter() - begun)

    with stream.client.publisher(max_outstanding=outstanding) as publisher:
        for _ in range(count):
            begun = time.perf_counter()
            publisher.publish(stream.subject, payload).add_done_callback(partial(stored, begun))
            while acked:
                yield 1, acked.popleft()
        publisher.flush()
        while acked:
            yield 1, acked.popleft()


def _in_batches(
    stream: Stream, payload: bytes, count: int, size: int
) -> Iterator[tuple[int, float]]:
    for first in range(0, count, size):
        batch = [Message(stream.subject, payload)] * min(size, count - first)
        begun = time.perf_counter()
        stream.client.publish_batch(stream.name, batch).raise_refused()
        yield len(batch), time.perf_counter() - begun


def _pushed(stream: Stream, count: int) -> Iterator[int]:
    stream.client.ensure_consumer(stream.name, "bench", {"max_ack_pending": 10_000})
    with stream.client.subscribe(stream.name, "bench") as messages:
        for number, message in zip(range(1, count + 1), messages, strict=False):
            if number == count:
                # Frames are handled in order, so everything is acknowledged when this is answered.
                message.ack_sync()
            else:
                message.ack()
            yield 1


def _ordered(stream: Stream, count: int) -> Iterator[int]:
    with stream.client.ordered(stream.name) as messages:
        for _ in zip(range(count), messages, strict=False):
            yield 1


def _steadily(stream: Stream, count: int, size: int, rate: float) -> None:
    begun = time.perf_counter()
    with stream.client.publisher() as publisher:
        for number in range(count):
            # From the beginning, not from the last message, so that delays do not lower the rate.
            time.sleep(max(begun + number / rate - time.perf_counter(), 0.0))
            stamp = _STAMP.pack(time.perf_counter())
            publisher.publish(stream.subject, stamp.ljust(size, b"\0"))


def _fill(stream: Stream, count: int, size: int) -> None:
    messages = (Message(stream.subject, bytes(size)) for _ in range(count))
    for result in stream.client.publish_all(stream.name, messages, outstanding=FILL_OUTSTANDING):
        result.raise_refused()


@contextmanager
def _stream(client: Contrail) -> Iterator[Stream]:
    """A stream of its own, removed in the end."""
    mark = secrets.token_hex(4)
    stream = Stream(client, f"BENCH_{mark}", f"bench.{mark}")
    client.create_stream(stream.name, {"subjects": [stream.subject]})
    try:
        yield stream
    finally:
        client.delete_stream(stream.name)


def _show(session: Session, found: Figures) -> None:
    show.facts(found, found.what, as_json=session.as_json)
