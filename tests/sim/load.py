"""The clients of a run: each does its work over the edges and notes what it was told."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Protocol

from msgspec.structs import replace

from contrail_client import Message, StoredMessage
from contrail_common import errors
from contrail_common.errors import ApiError, from_code
from contrail_common.model import ConsumerConfig, Expected, PublishMessage, StreamConfig
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckItem, PullRequest, in_deliveries
from contrail_link.contract.read import LastRequest, RangeRequest
from contrail_link.publishing import publish
from tests.cluster.journal import Delivered, Journal, Sent
from tests.sim.cluster import SimCluster

LOAD: Final = "LOAD"
PLAIN: Final = "PLAIN"
REGISTER: Final = "REGISTER"
STREAMS: Final = LOAD, PLAIN, REGISTER
ALL: Final = "all"
_SUBJECT: Final = "register.one"
PAUSE_S: Final = 0.1
_READERS: Final = 3
_MAX_AGE_NS: Final = 3_600 * 10**9
_LONG_S: Final = 8.0
_SHORT_S: Final = 0.5
_BATCH_MAX: Final = 20
_REPEATED: Final = 0.1
_REPEATED_OF: Final = 100
"""Of so many messages that were acknowledged last, one may be published again."""


@dataclass(slots=True)
class Write:
    """A change of the register: what it expected, and what was answered."""

    name: str
    expected: int
    begun_s: float
    ended_s: float = float("inf")
    seq: int | None = None
    """The sequence that was acknowledged; 0: refused; None: nobody knows."""


@dataclass(slots=True, frozen=True)
class Read:
    """A read of the register: the sequence that it found."""

    begun_s: float
    ended_s: float
    seq: int


@dataclass(slots=True)
class History:
    """What the clients of a run were told."""

    journal: Journal = field(default_factory=Journal)
    plain: list[Write] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)


Work = Callable[[StorageLink, str, Random], Coroutine[Any, Any, None]]


class Part(Protocol):
    """Further clients of a run, and what they find."""

    producers: dict[str, Work]
    """By name: clients that end when no more changes are to begin."""
    consumers: dict[str, Work]
    """By name: clients that end when consumers are to end."""

    async def prepare(self, link: StorageLink, replicas: int) -> None:
        """Create the streams."""

    def is_complete(self) -> bool:
        """Whether the consumers have everything, once the producers have ended."""

    def finish(self) -> dict[str, Sequence[object]]:
        """The broken promises by their names, after all clients have ended."""


class Clients:
    """All clients of a run."""

    def __init__(self, cluster: SimCluster, *parts: Callable[["Clients"], Part]) -> None:
        self.history = History()
        self.cluster = cluster
        self.publishing = self.consuming = True
        self.parts = [part(self) for part in parts]
        # R5 where there are five nodes, for some of the streams.
        self._random = Random(f"{cluster.seed} clients")
        self._producers: list[asyncio.Task[None]] = []
        self._consumers: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Create the streams, then start all clients."""
        task = self.cluster.client("admin", self._prepare)
        self.cluster.until(task.done)
        task.result()
        producers: dict[str, Work] = {
            "p0": self._publish,
            "p1": self._publish,
            "plain": self._publish_plain,
            "r0": self._change_register,
            "r1": self._change_register,
            "reader": self._read_register,
        }
        consumers: dict[str, Work] = {"c0": self._consume, "c1": self._consume}
        for part in self.parts:
            producers |= part.producers
            consumers |= part.consumers
        self._producers = [self._start(name, work) for name, work in producers.items()]
        self._consumers = [self._start(name, work) for name, work in consumers.items()]

    def _start(self, name: str, work: Work) -> "asyncio.Task[None]":
        random = Random(f"{self.cluster.seed} {name}")
        # Edges that wait for long for a leader that no longer leads are the ones it may fool.
        patience_s = _LONG_S if name == "reader" else _SHORT_S
        return self.cluster.client(name, _bound(work, name, random), patience_s)

    def replicas(self) -> int:
        """How many replicas the next stream gets."""
        return self._random.choice((3, 5)) if len(self.cluster.nodes) > 3 else 3

    def finish(self) -> dict[str, Sequence[object]]:
        """Let all clients end, consumers with everything; return what the parts have found."""
        journal = self.history.journal
        self.publishing = False
        self.cluster.until(lambda: all(one.done() for one in self._producers))
        self.cluster.until(lambda: journal.wait_for_all_delivered(ALL, 0))
        for part in self.parts:
            self.cluster.until(part.is_complete)
        self.consuming = False
        self.cluster.until(lambda: all(one.done() for one in self._consumers))
        for task in self._producers + self._consumers:
            task.result()
        found: dict[str, Sequence[object]] = {}
        for part in self.parts:
            found |= part.finish()
        return found

    def stored(self, stream: str) -> list[StoredMessage]:
        """All messages of a stream, as the cluster has them now."""
        task = self.cluster.client("checker", lambda link: _everything(link, stream))
        self.cluster.until(task.done)
        return task.result()

    @property
    def now(self) -> float:
        """The time of the run."""
        return self.cluster.loop.now

    async def _prepare(self, link: StorageLink) -> None:
        for name in STREAMS:
            subjects = (f"{name.lower()}.>",)
            replicas = self.replicas()
            config = StreamConfig(
                name=name, subjects=subjects, num_replicas=replicas, max_age_ns=_MAX_AGE_NS
            )
            await until_done(lambda config=config: link.put_stream(config, "put", None, False))
        for part in self.parts:
            await part.prepare(link, self.replicas())
        consumer = ConsumerConfig(name=ALL, durable=True, ack_wait_ns=2 * 10**9)
        await until_done(lambda: link.put_consumer(LOAD, consumer, "put", None, False))

    # Publishing ----------------------------------------------------------------------------------

    async def _publish(self, link: StorageLink, name: str, random: Random) -> None:
        await self.publish_numbered(link, name, random, LOAD, self.history.journal)

    async def publish_numbered(
        self, link: StorageLink, name: str, random: Random, stream: str, journal: Journal
    ) -> None:
        """Publish with ids, in order; repeat what was not answered, and some of the rest."""
        numbers = itertools.count(1)
        answered: deque[Sent] = deque(maxlen=_REPEATED_OF)
        while self.publishing:
            count = random.choice((1, 1, 1, random.randint(2, _BATCH_MAX)))
            entries = [_numbered(stream, name, next(numbers), random) for _ in range(count)]
            journal.sending(entries)
            if answered and random.random() < _REPEATED:
                entries.append(random.choice(answered))
            while entries and self.publishing:
                try:
                    messages = [_to_publish(one.message) for one in entries]
                    ack = await publish(link, stream, messages)
                except ApiError as error:
                    check_passing(error)
                    journal.doubted()
                    await asyncio.sleep(PAUSE_S)
                    continue
                results = [each for one in ack.results for each in one.each()]
                left = []
                for entry, result in zip(entries, results, strict=True):
                    if result.code:
                        check_passing(from_code(result.code, result.detail))
                        left.append(entry)
                    else:
                        journal.answered(entry, result.seq)
                        answered.append(entry)
                entries = left
            await asyncio.sleep(random.random() * PAUSE_S)

    async def _publish_plain(self, link: StorageLink, name: str, random: Random) -> None:
        """Publish without ids, each message once."""
        for number in itertools.count(1):
            if not self.publishing:
                return
            one = Write(f"{name}-{number}", 0, self.now)
            self.history.plain.append(one)
            await self._write(link, PLAIN, PublishMessage("plain.a", None, one.name.encode()), one)
            await asyncio.sleep(random.random() * PAUSE_S)

    async def _write(
        self, link: StorageLink, stream: str, message: PublishMessage, one: Write
    ) -> None:
        """Publish once and note the outcome."""
        try:
            [result] = (await publish(link, stream, [message])).results
        except ApiError as error:
            if error.applied is False:
                one.seq = 0
        else:
            if not result.code:
                one.seq = result.seq
            elif result.code != errors.OUTCOME_UNKNOWN.code:
                one.seq = 0
        one.ended_s = self.now

    async def _change_register(self, link: StorageLink, name: str, random: Random) -> None:
        """Read the register, and change it if nobody else has meanwhile."""
        for number in itertools.count(1):
            if not self.publishing:
                return
            async with passing(PAUSE_S):
                seq = await self._last(link)
                one = Write(f"{name}-{number}", seq, self.now)
                self.history.writes.append(one)
                message = PublishMessage(
                    _SUBJECT, None, one.name.encode(), expected=Expected(last_subject_seq=seq)
                )
                await self._write(link, REGISTER, message, one)
            await asyncio.sleep(random.random() * 2 * PAUSE_S)

    async def _read_register(self, link: StorageLink, name: str, random: Random) -> None:
        """Read the register, several times at once."""
        del name

        async def read() -> None:
            while self.publishing:
                async with passing(PAUSE_S):
                    await self._last(link)
                await asyncio.sleep(random.random() * PAUSE_S)

        await asyncio.gather(*(read() for _ in range(_READERS)))

    async def _last(self, link: StorageLink) -> int:
        begun_s = self.now
        found, _ = await link.last_messages(LastRequest(stream=REGISTER, subject=_SUBJECT))
        seq = found[0].seq if found else 0
        self.history.reads.append(Read(begun_s, self.now, seq))
        return seq

    # Consuming -----------------------------------------------------------------------------------

    async def _consume(self, link: StorageLink, name: str, random: Random) -> None:
        del name
        await self.consume(link, random, LOAD, ALL, self.history.journal)

    async def consume(
        self, link: StorageLink, random: Random, stream: str, consumer: str, journal: Journal
    ) -> None:
        """Pull, and acknowledge nearly all; in half of the cases synchronously, and in columns."""
        while self.consuming:
            asked_s = self.now
            async with passing(PAUSE_S):
                request = PullRequest(
                    stream=stream,
                    consumer=consumer,
                    batch=random.randint(1, 50),
                    expires_ns=2 * 10**8,
                    columns=random.random() < 0.5,
                )
                pull = await link.pull(request)
                deliveries, columns = pull.deliveries, pull.columns
                if columns is not None:
                    deliveries = in_deliveries(columns)
                journal.delivered(
                    [
                        Delivered(consumer, one.message.seq, one.message.payload, asked_s)
                        for one in deliveries
                    ]
                )
                done = [one for one in deliveries if random.random() > 0.05]
                if done:
                    sync = random.random() < 0.5
                    items = [AckItem(*pull.address(one), [one.message.seq], "ack") for one in done]
                    if columns is not None:
                        items = [replace(items[0], seqs=[one.message.seq for one in done])]
                    results = await link.acknowledge(stream, consumer, items, sync)
                    results *= len(done) // len(items)
                    if sync:
                        settled = [
                            one.message.seq
                            for one, result in zip(done, results, strict=True)
                            if not result.code
                        ]
                        journal.settled(consumer, settled)


def _bound(
    does: Callable[[StorageLink, str, Random], Coroutine[Any, Any, None]], name: str, random: Random
) -> Callable[[StorageLink], Coroutine[Any, Any, None]]:
    return lambda link: does(link, name, random)


@asynccontextmanager
async def passing(pause_s: float) -> AsyncIterator[None]:
    """Around requests that may fail while the cluster has faults."""
    try:
        yield
    except ApiError as error:
        check_passing(error)
        await asyncio.sleep(pause_s)


def check_passing(error: ApiError) -> None:
    """Raise an error that no fault of a node explains."""
    if not error.spec.retryable and error.spec is not errors.OUTCOME_UNKNOWN:
        raise error


async def until_done(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    while True:
        try:
            return await call()
        except ApiError as error:
            check_passing(error)
            await asyncio.sleep(PAUSE_S)


async def _everything(link: StorageLink, stream: str) -> list[StoredMessage]:
    """All messages of a stream, in order."""
    found: list[StoredMessage] = []
    position = 1
    while True:
        request = RangeRequest(stream=stream, from_seq=position, limit=1_000)
        result = await until_done(lambda request=request: link.read_range(request))
        found += [
            StoredMessage(
                stream=stream,
                seq=one.seq,
                subject=one.subject,
                time=str(one.time_ns),
                headers=one.headers or {},
                data_base64=one.payload,
            )
            for one in result.messages
        ]
        if not result.messages:
            return found
        position = result.next_seq


def _numbered(stream: str, publisher: str, number: int, random: Random) -> Sent:
    name = f"{publisher}-{number}"
    payload = f"{name} {'x' * random.randrange(400)}".encode()
    return Sent(publisher, number, Message(f"{stream.lower()}.{publisher}", payload, None, name))


def _to_publish(message: Message) -> PublishMessage:
    assert message.msg_id is not None
    headers = {"Nats-Msg-Id": [message.msg_id]}
    return PublishMessage(message.subject, headers, message.payload, message.msg_id)
