"""Nodes of a cluster that are played: they share what is stored, and a test says who leads."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import (
    PublishMessage,
    StoredMessage,
    StreamConfig,
    StreamInfo,
    StreamState,
)
from contrail_common.partition import shard_of
from contrail_link.contract import StorageLink
from contrail_link.contract.admin import EventsRequest, EventsResult
from contrail_link.contract.consume import AckItem, AckResult, Delivery, PullRequest, PullResult
from contrail_link.contract.publish import PublishAck, PublishContent, PublishOutcome, PubResult
from contrail_link.contract.read import ReadPosition, ReplicaPosition
from contrail_link.contract.streams import CreateMode, Page
from contrail_link.routed.leaders import Node, OwnNode

SECOND_NS = 1_000_000_000
META = ""
WINDOWS_S = {"S": 120, "T": 120, "SHORT": 1, "SPREAD": 120}
"""The duplicate windows of the streams. Each captures the subjects below its name."""
SHARDS = 3
"""Of the stream SPREAD; what ``Cluster.leaders`` says of it is that of its first shard."""
NO_STATE = StreamState(
    messages=0,
    bytes=0,
    first_seq=1,
    first_ts_ns=0,
    last_seq=0,
    last_ts_ns=0,
    num_subjects=0,
    num_deleted=0,
    consumer_count=0,
)


class Cluster:
    """The state that all nodes share, as if it was replicated, with the leader of each stream."""

    def __init__(self, count: int) -> None:
        self.nodes = [FakeNode(self, f"n{at}") for at in range(count)]
        self.leaders: dict[str, FakeNode | None] = dict.fromkeys((META, *WINDOWS_S), self.nodes[0])
        self.stored: dict[str, list[PublishMessage]] = {name: [] for name in WINDOWS_S}
        self.spread = [self.nodes[at % count] for at in range(SHARDS)]
        """The leaders of the shards of SPREAD."""
        self.changes: list[str] = []
        self.fates: dict[str, str] = {}
        """By the content of a change: how it is lost when it first reaches a leader."""
        # By stream and id: when it was stored.
        self._ids: dict[tuple[str, str], float] = {}

    @property
    def routed(self) -> list[Node]:
        return [OwnNode(one.name, cast(StorageLink, one)) for one in self.nodes]

    def store(self, stream: str, message: PublishMessage) -> PubResult:
        now = asyncio.get_running_loop().time()
        if message.msg_id:
            key = stream, message.msg_id
            if now - self._ids.get(key, -1e9) < WINDOWS_S[stream]:
                return PubResult(1, duplicate=True)
            self._ids[key] = now
        if message.expected is not None and self.stored[stream]:
            return PubResult(0, code=errors.WRONG_LAST_SEQUENCE.code)
        self.stored[stream].append(message)
        return PubResult(len(self.stored[stream]))

    def info(self, stream: str) -> StreamInfo:
        leader = self.leaders[stream]
        shards = self.spread if stream == "SPREAD" else []
        return StreamInfo(
            config=StreamConfig(
                name=stream,
                subjects=(f"{stream}.>",),
                duplicate_window_ns=WINDOWS_S[stream] * SECOND_NS,
                shards=len(shards) or 1,
            ),
            created_ns=1,
            state=msgspec.structs.replace(NO_STATE, messages=len(self.stored[stream])),
            incarnation="i",
            version=1,
            leader=leader.name if leader else "",
            shards=[msgspec.structs.replace(NO_STATE, leader=one.name) for one in shards],
        )


class FakeNode:
    """The link of one node. ``delay_s`` is the time of an answer; ``hint`` names the leader.

    ``down``: nothing reaches it. ``lose`` is the part of requests that is lost after it was sent:
    "before" or "after" its effect, or with a "late" effect.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self.hint: Callable[[str], str] = self.right_hint
        self.down = False
        self.lose = ""
        self.delay_s = 0.001
        self.sent: list[tuple[str, Any]] = []
        """Requests with a possible effect: method and content."""
        self.asked = 0
        self.has_copy = True
        self.events: list[EventsResult] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # When the last publish arrives: as on a connection, later ones arrive after it.
        self._arrives_s = 0.0

    def right_hint(self, stream: str) -> str:
        leader = self.cluster.leaders[stream]
        return leader.name if leader else ""

    def lead(self, *streams: str) -> None:
        for stream in streams or tuple(self.cluster.leaders):
            self.cluster.leaders[stream] = self

    def check(self, stream: str) -> None:
        """Refuse what only the leader answers."""
        if stream not in self.cluster.leaders:
            # Only the leader of the meta group knows that there is no such stream.
            meta = self.right_hint(META)
            if meta == self.name:
                raise ApiError(errors.STREAM_NOT_FOUND, applied=False)
            missing = errors.STREAM_NOT_FOUND if meta else errors.NOT_LEADER
            raise ApiError(missing, applied=False, leader=meta)
        if self.cluster.leaders[stream] is not self:
            raise ApiError(errors.NOT_LEADER, applied=False, leader=self.hint(stream))

    def check_publish(self, stream: str, messages: Sequence[PublishMessage]) -> None:
        """Refuse what is not for shards that this node leads."""
        if stream != "SPREAD":
            self.check(stream)
            return
        for leader in {self.cluster.spread[shard_of(one.subject, SHARDS)] for one in messages}:
            if leader is not self:
                raise ApiError(errors.NOT_LEADER, applied=False, leader=leader.name)

    async def _reach(self, delay_s: float | None = None) -> None:
        self.asked += 1
        if self.down:
            raise ApiError(errors.NOT_READY, "not reached", applied=False)
        delay_s = self.delay_s if delay_s is None else delay_s
        if delay_s:
            await wait_virtually(delay_s)

    def _delay_in_order_s(self) -> float:
        now_s = asyncio.get_running_loop().time()
        self._arrives_s = max(self._arrives_s + 1e-9, now_s + self.delay_s)
        return self._arrives_s - now_s

    async def _read(self, stream: str) -> None:
        await self._reach()
        if self.lose:
            raise ApiError(errors.NOT_READY, "lost")
        self.check(stream)

    async def _change(
        self,
        stream: str,
        name: str,
        content: Any,
        effect: Callable[[], Any],
        delay_s: float | None = None,
    ) -> Any:
        await self._reach(delay_s)
        if name == "publish":
            self.check_publish(stream, content)
        else:
            self.check(stream)
        self.sent.append((name, content))
        lost = self.lose or self.cluster.fates.pop(_key(content), "")
        if lost:
            if lost == "after":
                effect()
            elif lost == "late":
                asyncio.get_running_loop().call_later(0.7, effect)
            raise ApiError(errors.OUTCOME_UNKNOWN, "lost")
        return effect()

    # Streams -------------------------------------------------------------------------------------
    async def put_stream(
        self, config: StreamConfig, mode: CreateMode, if_match: int | None, if_none: bool
    ) -> tuple[StreamInfo, bool]:
        def effect() -> tuple[StreamInfo, bool]:
            self.cluster.changes.append(config.name)
            return self.cluster.info("S"), True

        found: tuple[StreamInfo, bool] = await self._change(META, "put", config.name, effect)
        return found

    async def stream_info(self, name: str, replica: str = "") -> StreamInfo:
        await self._read(name)
        return self.cluster.info(name)

    async def list_streams(self, subject: str, prefix: str, limit: int, token: str) -> Page:
        raise NotImplementedError

    async def purge_stream(
        self, name: str, subject: str, up_to_seq: int, keep: int, shard: int | None = None
    ) -> int:
        def effect() -> int:
            self.cluster.changes.append(subject)
            return 1

        found: int = await self._change(name, "purge", subject, effect)
        return found

    # Publishing ----------------------------------------------------------------------------------
    async def stream_for_subject(self, subject: str) -> str:
        await self._reach()
        if self.lose:
            raise ApiError(errors.NOT_READY, "lost")
        return subject.partition(".")[0]

    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        messages = content if isinstance(content, list) else messages_of(content)
        target = stream or messages[0].subject.partition(".")[0]
        if self.down:
            raise ApiError(errors.NOT_READY, "not reached", applied=False)

        def effect() -> PublishAck:
            results = [self.cluster.store(target, one) for one in messages]
            if target == "SPREAD":
                results = [
                    msgspec.structs.replace(one, shard=shard_of(messages[at].subject, SHARDS))
                    for at, one in enumerate(results)
                ]
            return PublishAck(target, results, "fsync")

        delay_s = self._delay_in_order_s() if self.delay_s else 0.0

        async def work() -> None:
            try:
                done(await self._change(target, "publish", messages, effect, delay_s))
            except ApiError as error:
                done(error)

        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        for at, message in enumerate(messages):

            def one(outcome: PublishOutcome, at: int = at) -> None:
                done([at], outcome)

            try:
                self.publish_then("", [message], one)
            except ApiError as error:
                one(error)

    # Reading and consuming -----------------------------------------------------------------------
    async def read_position(self, stream: str, shard: int | None = None) -> ReadPosition:
        await self._read(stream)
        return ReadPosition(len(self.cluster.stored[stream]), 1)

    async def find_replica(self, stream: str, shard: int | None = None) -> ReplicaPosition:
        await self._reach()
        if not self.has_copy:
            raise ApiError(errors.NOT_LEADER, applied=False, leader=self.hint(stream))
        return ReplicaPosition(len(self.cluster.stored[stream]), 1, self.name, 0)

    async def replica_position(
        self, stream: str, shard: int | None, replica: str
    ) -> ReplicaPosition:
        assert replica == self.name
        return await self.find_replica(stream, shard)

    async def get_message(
        self, stream: str, seq: int, shard: int | None = None, replica: str = ""
    ) -> StoredMessage:
        if replica == self.name:
            await self._reach()
        else:
            await self._read(stream)
        raise ApiError(errors.MESSAGE_NOT_FOUND, applied=False)

    async def pull(self, request: PullRequest) -> PullResult:
        """Wait as long as the node leads: it ends the pulls of a stream that it loses."""
        await self._reach()
        clock = asyncio.get_running_loop()
        end = clock.time() + request.expires_ns / SECOND_NS
        while True:
            if self.lose:
                raise ApiError(errors.NOT_READY, "lost")
            self.check(request.stream)
            stored = self.cluster.stored[request.stream]
            if stored or clock.time() >= end:
                one = stored[:1]
                return PullResult([Delivery(_stored(m), 1, 1, 0) for m in one], 0, 1, 1, 1)
            await wait_virtually(0.01)

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        found: list[AckResult] = await self._change(
            stream, "acknowledge", items, lambda: [AckResult() for _ in items]
        )
        return found

    async def bind_consumer(self, stream: str, consumer: str) -> AsyncIterator[bytes]:
        await self._read(stream)
        return self._hold(stream)

    async def _hold(self, stream: str) -> AsyncIterator[bytes]:
        while True:
            self.check(stream)
            await wait_virtually(0.01)
            if False:
                yield b""

    # Administration ------------------------------------------------------------------------------
    async def begin_restore(self, stream: str) -> str:
        await self._reach()
        self.check(META)
        return f"token of {self.name}"

    async def append_restore(self, token: str, offset: int, piece: bytes) -> None:
        assert token == f"token of {self.name}"
        self.sent.append(("append", piece))

    async def read_events(self, request: EventsRequest) -> EventsResult:
        await self._reach()
        self.sent.append(("events", request.after))
        if self.events:
            return self.events.pop(0)
        await wait_virtually(request.wait_ns / SECOND_NS)
        return EventsResult([], request.after or "0000000a-0")

    def readiness(self) -> dict[str, str]:
        return {"link": "down"} if self.down else {}

    async def metrics_text(self) -> str:
        return ""


def messages_of(batch: MessageBatch) -> list[PublishMessage]:
    """The messages of a batch without headers."""
    ids = batch.ids.each() if batch.ids else [""] * batch.count
    index = memoryview(batch.subject_index).cast("I")
    expected = batch.expected or {}
    return [
        PublishMessage(
            batch.subjects[index[at]],
            *batch.columns.content(at),
            ids[at] or None,
            expected.get(at),
        )
        for at in range(batch.count)
    ]


def _stored(message: PublishMessage) -> StoredMessage:
    return StoredMessage(1, message.subject, 1, None, message.payload)


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose time moves on only when nothing else is left to do. Waits take no time."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def skip(timeout: float | None) -> Any:
            assert timeout is not None, "everything waits, and nothing is due"
            # At least the resolution of the loop, which calls what is due within a nanosecond: a
            # caller that waits again for the rest of its time would do so for ever.
            self._now_s += max(1e-9, timeout)
            return select(0)

        selector.select = skip

    def time(self) -> float:
        return self._now_s


async def wait_virtually(seconds: float) -> None:
    """Let this much time of a virtual loop pass."""
    await asyncio.sleep(seconds)


def run_virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a test on a loop whose waits take no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def _key(content: Any) -> str:
    """The number of a change in its content."""
    if not isinstance(content, list):
        return str(content)
    (one,) = content[:1]
    return one.payload.decode() if isinstance(one, PublishMessage) else str(one.seqs[0])
