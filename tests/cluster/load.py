"""Clients in threads: publishers that repeat unanswered requests, and consumers that acknowledge.

All choices come from the seed; only the timing depends on the machine.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from contrail_client import (
    ApiProblem,
    BatchResult,
    Contrail,
    Message,
    OutcomeUnknown,
    PubAck,
    Pull,
    Retries,
    Unreachable,
)
from tests.cluster.journal import Delivered, Journal, Sent

STREAM: Final = "LOAD"
ALL: Final = "all"
EVEN: Final = "even"
ACK_WAIT: Final = "2s"
_BATCH_MAX: Final = 40
_PULL_MAX: Final = 50
_PAYLOAD_MAX: Final = 400
_END_S: Final = 120.0
_ONCE: Final = Retries(attempts=1)


class Load:
    """The publishers and consumers of one run, each at one of the addresses.

    Call `prepare` and `start`, then `finish`.
    """

    def __init__(self, urls: Sequence[str], seed: int, replicas: int = 1) -> None:
        self.journal = Journal()
        self.errors: list[BaseException] = []
        self._urls = itertools.cycle(urls)
        self._replicas = replicas
        self._publishing = threading.Event()
        self._consuming = threading.Event()
        self._serving = threading.Event()
        self._publishers = [
            threading.Thread(
                target=self._guard, args=(self._publish, seed, name, batch_max), daemon=True
            )
            for name, batch_max in (("p0", 1), ("p1", 1), ("p2", 1), ("p3", _BATCH_MAX))
        ]
        self._consumers = [
            threading.Thread(
                target=self._guard, args=(self._consume, seed, consumer, number), daemon=True
            )
            for number, consumer in enumerate((ALL, ALL, EVEN))
        ]

    def prepare(self) -> None:
        """Create the stream and its consumers."""
        with Contrail(next(self._urls)) as client:
            client.ensure_stream(STREAM, {"subjects": ["load.>"], "num_replicas": self._replicas})
            client.ensure_consumer(STREAM, ALL, {"ack_wait": ACK_WAIT})
            client.ensure_consumer(
                STREAM,
                EVEN,
                {
                    "ack_wait": ACK_WAIT,
                    "filter_subjects": ["load.p0", "load.p2"],
                    "max_deliver": 1_000,
                },
            )

    def start(self) -> None:
        """Start to publish and consume."""
        self._publishing.set()
        self._consuming.set()
        self.server_is_up()
        for thread in (*self._publishers, *self._consumers):
            thread.start()

    def server_is_up(self) -> None:
        """Note that the server serves."""
        self._serving.set()

    def end_of_server(self) -> None:
        """Note that the server is about to be killed: clients that fail wait for the next one."""
        self._serving.clear()

    def finish(self) -> None:
        """Stop publishing, wait until the consumers got everything, then stop consuming."""
        self._publishing.clear()
        for thread in self._publishers:
            thread.join(_END_S)
        self.journal.wait_for_all_delivered(ALL, _END_S)
        self._consuming.clear()
        for thread in self._consumers:
            thread.join(_END_S)

    def abandon(self) -> None:
        """End the threads, even if they wait for something."""
        self._publishing.clear()
        self._consuming.clear()
        self._serving.set()

    def _guard(self, work: Callable[[Contrail, random.Random, str, int], None], *how: int) -> None:
        seed, name, number = how
        try:
            with Contrail(next(self._urls), retries=_ONCE, timeout_s=_END_S) as client:
                work(client, random.Random(f"{seed} {name} {number}"), str(name), number)
        except BaseException as error:
            self.errors.append(error)
            raise

    # Publishing ----------------------------------------------------------------------------------

    def _publish(
        self, client: Contrail, chance: random.Random, publisher: str, batch_max: int
    ) -> None:
        numbers = itertools.count(1)
        while self._publishing.is_set():
            count = chance.randint(1, batch_max)
            entries = [_message(publisher, next(numbers), chance) for _ in range(count)]
            self.journal.sending(entries)
            while entries and (self._publishing.is_set() or self._serving.is_set()):
                entries = self._try(client, entries, single=batch_max == 1)

    def _try(self, client: Contrail, entries: list[Sent], *, single: bool) -> list[Sent]:
        """Publish once; returns the messages to publish again, with the same ids."""
        messages = [entry.message for entry in entries]
        try:
            if single:
                [message] = messages
                results: tuple[PubAck | ApiProblem, ...] = (_publish_one(client, message),)
            else:
                batch: BatchResult = client.publish_batch(STREAM, messages)
                results = batch.results
        except (OutcomeUnknown, Unreachable):
            self.journal.doubted()
            self._wait_for_server()
            return entries
        except ApiProblem as problem:
            if not problem.retryable:
                raise
            return entries
        return [
            entry
            for entry, result in zip(entries, results, strict=True)
            if not self._take(entry, result)
        ]

    def _take(self, entry: Sent, result: PubAck | ApiProblem) -> bool:
        if isinstance(result, PubAck):
            self.journal.answered(entry, result.seq)
            return True
        if not result.retryable:
            raise result
        self.journal.doubted()
        return False

    def _wait_for_server(self) -> None:
        self._serving.wait(_END_S)

    # Consuming -----------------------------------------------------------------------------------

    def _consume(self, client: Contrail, chance: random.Random, name: str, _number: int) -> None:
        consumer = client.consumer(STREAM, name)
        while self._consuming.is_set():
            asked_s = time.monotonic()
            try:
                pull = consumer.next(chance.randint(1, _PULL_MAX), expires="200ms")
            except (OutcomeUnknown, Unreachable):
                self._wait_for_server()
                continue
            except ApiProblem as problem:
                if not problem.retryable:
                    raise
                continue
            self.journal.delivered([Delivered(name, one.seq, one.payload, asked_s) for one in pull])
            try:
                with suppress(OutcomeUnknown, Unreachable):
                    self._acknowledge(client, name, pull, chance)
            except ApiProblem as problem:
                if not problem.retryable:
                    raise

    def _acknowledge(self, client: Contrail, name: str, pull: Pull, chance: random.Random) -> None:
        """Acknowledge nearly all messages; half of the time wait until that is durable."""
        done = [one for one in pull if chance.random() > 0.05]
        if not done:
            return
        sync = chance.random() < 0.5
        client.consumer(STREAM, name).ack(*done, sync=sync)
        if sync:
            self.journal.settled(name, [one.seq for one in done])


def _publish_one(client: Contrail, message: Message) -> PubAck:
    return client.publish(
        message.subject, message.payload, headers=message.headers, msg_id=message.msg_id
    )


def _message(publisher: str, number: int, chance: random.Random) -> Sent:
    name = f"{publisher}-{number}"
    payload = f"{name} {'x' * chance.randrange(_PAYLOAD_MAX)}".encode()
    headers = {"Number": [str(number)]} if chance.random() < 0.3 else None
    message = Message(f"load.{publisher}", payload, headers, name)
    return Sent(publisher, number, message)
