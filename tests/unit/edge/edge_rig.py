"""The edge without sockets and storage: an ASGI driver, and a link that answers as it is told."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import contrail_api
import contrail_gateway
from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import (
    ConsumerConfig,
    ConsumerInfo,
    PublishMessage,
    SequencePair,
    StoredMessage,
)
from contrail_common.texts import Texts, as_u32
from contrail_edge.app import EdgeApp, build_app
from contrail_edge.http.settings import EdgeSettings
from contrail_link.contract import StorageLink
from contrail_link.contract.consume import AckItem, AckResult, ConsumerHold, PullRequest, PullResult
from contrail_link.contract.publish import PublishAck, PublishContent, PublishOutcome, PubResult
from contrail_link.contract.read import (
    Chunk,
    LastRequest,
    Peeked,
    Pieces,
    RangeRequest,
    RangeResult,
    ReplayRequest,
)
from contrail_storage.consumers.binding import Binding

ACK_KEY = b"k" * 32


def messages_of(batch: MessageBatch) -> list[PublishMessage]:
    columns, ids = batch.columns, batch.ids
    payloads = Texts(columns.offsets, columns.payload)
    texts = [""] * batch.count if ids is None else ids.each()
    return [
        PublishMessage(
            batch.subjects[int(number)],
            None if columns.headers is None else columns.headers.message(at),
            payloads.slice(at, at + 1).heap,
            texts[at] or None,
            (batch.expected or {}).get(at),
            (batch.rollups or {}).get(at),
            (batch.ttls or {}).get(at),
        )
        for at, number in enumerate(as_u32(batch.subject_index))
    ]


class LinkDouble:
    """A storage link of one stream, ``S`` on ``a.>``, whose waits a test ends itself."""

    def __init__(self) -> None:
        self.published: list[list[PublishMessage]] = []
        self._last_seq = 0
        self.pulls: list[PullRequest] = []
        self.pull_results: list[PullResult] = []
        self.acked: list[AckItem] = []
        self.failures: list[Exception | None] = []
        self.outcomes: list[Callable[..., None]] | None = None
        """When a list: direct publishes wait in it until a test ends them, or with an error."""
        self.consumer_missing = False
        self.max_expires_ns = 0
        self.waiting = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.replay_chunks: list[bytes | tuple[bytes, ...] | Exception] = []
        self.unready: dict[str, str] = {}
        self.used_tickets: set[bytes] = set()
        self.reads: list[asyncio.Future[None]] | None = None
        """When a list: reads of single messages wait in it until a test ends them."""
        self.reads_made = 0
        self.in_memory = False
        """Whether reads need no wait."""
        self.disk: list[asyncio.Future[None]] | None = None
        """When a list: reads wait in it, in memory or not, until a test ends them."""
        self.headers = {"N": ["v"]}
        self.payload = b""
        """Of all messages, unless it is empty."""

    def _fail(self) -> None:
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure

    def _stored(self, messages: list[PublishMessage]) -> int:
        """Keep messages; answers the sequence of the first."""
        first = self._last_seq + 1
        self._last_seq += len(messages)
        self.published.append(messages)
        return first

    async def stream_for_subject(self, subject: str) -> str:
        if not subject.startswith("a."):
            raise ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)
        return "S"

    @staticmethod
    def _check_captured(stream: str, messages: list[PublishMessage]) -> None:
        if not stream and not messages[0].subject.startswith("a."):
            raise ApiError(errors.NO_STREAM_FOR_SUBJECT, applied=False)

    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        self._fail()
        if isinstance(content, MessageBatch):
            messages = messages_of(content)
        else:
            messages = list(content)
            self._check_captured(stream, messages)
        seq = self._stored(messages)
        results = [PubResult(seq + at) for at in range(len(messages))]
        outcome = PublishAck(stream or "S", results, "fsync")
        if self.outcomes is None:
            done(outcome)
        else:
            self.outcomes.append(lambda given=None: done(outcome if given is None else given))

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        return False

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        for at, message in enumerate(messages):
            try:
                self.publish_then("", [message], partial(done, [at]))
            except ApiError as error:
                done([at], error)

    async def get_message(
        self, stream: str, seq: int, shard: int | None = None, replica: str = ""
    ) -> StoredMessage:
        self._fail()
        self.reads_made += 1
        if self.reads is not None:
            self.reads.append(asyncio.get_running_loop().create_future())
            await self.reads[-1]
        if seq > 9:
            raise ApiError(errors.MESSAGE_NOT_FOUND, f"no message with sequence {seq}")
        return self._message(seq)

    def _message(self, seq: int) -> StoredMessage:
        return StoredMessage(seq, "a.b", 1, self.headers, self.payload or b"m%d" % seq)

    def peek_message(self, stream: str, seq: int) -> Peeked:
        if self.disk is not None:
            self.disk.append(asyncio.get_running_loop().create_future())
            return self.disk[-1]
        return self._message(seq) if self.in_memory and seq <= 9 else None

    def peek_last(self, stream: str, subject: str) -> StoredMessage | None:
        known = self.in_memory and subject == "a.b"
        return StoredMessage(9, subject, 1, None, b"m9") if known else None

    async def last_messages(self, request: LastRequest) -> tuple[list[StoredMessage], str | None]:
        return [StoredMessage(9, request.subject, 1, None, b"m9")], None

    async def read_range(self, request: RangeRequest) -> RangeResult:
        if request.wait_ns:
            await self._wait_for_ever()
        return RangeResult([], 1, 0)

    async def bind_consumer(self, stream: str, consumer: str) -> ConsumerHold:
        return Binding(lambda _: None)

    async def pull(self, request: PullRequest) -> PullResult:
        self._fail()
        self.pulls.append(request)
        if self.pull_results:
            return self.pull_results.pop(0)
        if not request.no_wait:
            await self._wait_for_ever()
        return PullResult([], 0, 1, 7, 1)

    async def _wait_for_ever(self) -> None:
        self.waiting.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.cancelled.set()

    async def consumer_info(self, stream: str, consumer: str) -> ConsumerInfo:
        if self.consumer_missing:
            raise ApiError(errors.CONSUMER_NOT_FOUND)
        zero = SequencePair(0, 0)
        config = ConsumerConfig(name=consumer, durable=True, max_expires_ns=self.max_expires_ns)
        return ConsumerInfo(
            stream=stream,
            config=config,
            created_ns=0,
            version=1,
            delivered=zero,
            ack_floor=zero,
            num_ack_pending=0,
            num_redelivered=0,
            num_waiting=0,
            num_pending=0,
        )

    async def acknowledge(
        self, stream: str, consumer: str, items: list[AckItem], sync: bool
    ) -> list[AckResult]:
        if self.consumer_missing:
            raise ApiError(errors.CONSUMER_NOT_FOUND)
        self.acked += items
        return [AckResult() for _ in items]

    async def replay(self, request: ReplayRequest) -> AsyncIterator[Chunk | Pieces]:
        self._fail()
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[Chunk | Pieces]:
        for chunk in self.replay_chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def use_ticket(self, nonce: bytes, expires_ns: int) -> bool:
        self._fail()
        first = nonce not in self.used_tickets
        self.used_tickets.add(nonce)
        return first

    def readiness(self, *, strict: bool = False) -> dict[str, str]:
        return self.unready

    async def metrics_text(self) -> str:
        return "storage_up 1\n"


@dataclass
class Exchange:
    """What one request was answered, message by message."""

    sent: list[dict[str, Any]] = field(default_factory=list)

    @property
    def status(self) -> int:
        return cast(int, self.sent[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def ended(self) -> bool:
        return len(self.sent) > 1 and not self.sent[-1].get("more_body", False)

    def json(self) -> Any:
        return json.loads(self.body)


class Edge:
    """An edge application over a :class:`LinkDouble`."""

    def __init__(self, link: Any = None, **settings: Any) -> None:
        self.link: Any = link or LinkDouble()
        self.settings = EdgeSettings(ack_keys=(ACK_KEY,), linger_s=0.05, **settings)
        link = cast(StorageLink, self.link)
        modules = [
            contrail_api.edge_module(link, self.settings),
            contrail_gateway.edge_module(link, self.settings),
        ]
        self.app: EdgeApp = build_app(modules, self.settings)

    async def call(
        self,
        method: str,
        target: str,
        body: bytes | Iterable[bytes] = b"",
        headers: dict[str, str] | None = None,
        gone: asyncio.Event | None = None,
    ) -> Exchange:
        """Send one request, chunks of ``body`` one by one; ``gone`` is when the client leaves."""
        raw_path, _, query = target.partition("?")
        chunked = not isinstance(body, bytes)
        chunks = [body] if isinstance(body, bytes) else list(body)
        given = {"host": "127.0.0.1:7420", **(headers or {})}
        if chunked:
            given["transfer-encoding"] = "chunked"
        elif body:
            given.setdefault("content-length", str(len(chunks[0])))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "server": ("127.0.0.1", 7420),
            "client": ("127.0.0.1", 50_000),
        }
        left = list(chunks)

        async def receive() -> dict[str, Any]:
            if left:
                chunk = left.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(left)}
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        exchange = Exchange()

        async def send(message: Any) -> None:
            exchange.sent.append(message)

        await self.app(scope, receive, send)
        return exchange
