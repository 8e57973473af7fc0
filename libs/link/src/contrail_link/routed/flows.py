"""Publishes in order: those for one leader go to one node at a time, and are sent again in order.

All publishes with the same key (see `layouts.key_of`) are a flow. As long as its publishes are
under way to one node, later ones follow them there. As soon as one of them comes back, or another
node leads, later ones wait until all that are under way are answered. Then those that came back and
those that wait are sent in the order in which they began.

A publish that comes back after a later one was answered is refused: it is too late to send it. This
is not for batches in columns: each is a request of HTTP, and these have no order among each other.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Final, Protocol

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_link.contract.publish import (
    PublishAck,
    PublishContent,
    PublishOutcome,
    is_repeatable,
)
from contrail_link.routed.leaders import Node
from contrail_link.routed.outcomes import Kind, kind_of, no_leader, of_repeated, unknown

SETTLE_S: Final = 1.0
"""How long later publishes wait for a node to answer earlier ones before they go elsewhere."""
WAITING_BYTES_MAX: Final = 64 << 20
"""Bytes of publishes that wait for a leader; above this, further ones are refused."""
_MESSAGE_BYTES: Final = 512
"""Bytes that a waiting message counts in addition to its payload."""
_TOGETHER_MAX: Final = 200
"""Messages that are sent again with one request, and publishes that are handled in one step."""
_REQUEST_BYTES: Final = 1 << 20
"""Bytes of messages that are sent again with one request."""
_ROUND_BYTES: Final = 32 << 20
"""Bytes that are sent again before the answers to all of them are there."""
_LATE_S: Final = 0.001
"""How late a publish whose time is over may be refused."""


class Sender(Protocol):
    """What sends the first publish of a flow to one node after the other."""

    again_s: float

    def now(self) -> float:
        """Return the time of the event loop."""
        ...

    def key_of(self, publish: "Publish") -> str:
        """Return the key of a publish, from what is known now."""
        ...

    def parts_of(self, publish: "Publish") -> "list[Publish]":
        """Return a publish, or its parts for different leaders, as far as these are known now."""
        ...

    def knows(self, key: str) -> bool:
        """Return True if all publishes with a key are for the same leader."""
        ...

    async def until_known(self, key: str) -> None:
        """Wait for a while if it is being asked which nodes lead a stream."""
        ...

    def node_of(self, key: str) -> Node:
        """Return the node to ask first."""
        ...

    def forget(self, key: str, node: Node | None) -> None:
        """Ask another node first from now on."""
        ...

    def learn(self, node: Node, ack: PublishAck, subject: str) -> None:
        """Note that a node has stored messages."""
        ...

    def send_alone(self, publish: "Publish") -> None:
        """Send a publish again that is part of no flow."""
        ...

    def outcome(self, publish: "Publish") -> Coroutine[Any, Any, PublishOutcome]:
        """Send a publish until it is answered or its time is over."""
        ...

    async def stream_of(self, publish: "Publish") -> str:
        """Return the stream for a publish."""
        ...

    async def check_window(self, publish: "Publish", stream: str) -> None:
        """Raise an error if a publish that was lost is not safe to repeat."""
        ...


class Flow:
    """The publishes for one leader."""

    __slots__ = ("key", "newest", "node", "settled", "task", "underway", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.node: Node | None = None
        """The node to which those under way were sent last."""
        self.underway = 0
        """Messages and batches that were sent and have no answer."""
        self.newest = -1
        """The highest number that was acknowledged."""
        self.waiting: list[Publish] = []
        """Publishes to be sent: a heap by number."""
        self.task: asyncio.Task[None] | None = None
        """Sends those that wait; while there is one, all others wait too."""
        self.settled: asyncio.Future[None] | None = None
        """Done when nothing is under way; None if nobody waits for that."""

    def note(self, publish: "Publish", outcome: PublishOutcome) -> None:
        """Note the outcome of a publish: earlier ones must not be stored after it."""
        if publish.is_ordered and is_stored(outcome):
            self.newest = max(self.newest, publish.number)


class Publish:
    """A publish on its way to a node, which is ``known`` to lead the stream or is only a guess."""

    __slots__ = (
        "begun_s", "content", "done", "error", "flow", "flows", "known", "late", "lost", "node",
        "number", "safe", "sent_s", "stream",
    )  # fmt: skip

    def __init__(
        self,
        flows: "Flows",
        flow: Flow | None,
        stream: str,
        content: PublishContent,
        done: Callable[[PublishOutcome], None],
        begun_s: float,
        number: int,
        node: Node | None = None,
    ) -> None:
        self.flows = flows
        self.flow = flow
        self.stream = stream
        self.content = content
        self.done = done
        self.begun_s = begun_s
        self.number = number
        """Its position among all publishes."""
        self.node = node
        self.known = False
        self.error: ApiError | None = None
        """The last answer; None if it was not sent yet."""
        self.lost = False
        """An answer was lost, so the messages may be stored already."""
        self.safe = False
        """It is known that the stream recognises the messages if they are stored already."""
        self.sent_s: float | None = None
        """When it was sent alone to the node that has not answered yet."""
        self.late = False
        """Later ones went ahead, so it must not be sent again."""

    def __lt__(self, other: "Publish") -> bool:
        return self.number < other.number

    @property
    def subject(self) -> str:
        """The subject by which the stream is chosen, or "" if the stream was given."""
        return "" if self.stream else subject_of(self.content)

    @property
    def size(self) -> int:
        """Bytes that it counts while it waits."""
        if isinstance(self.content, MessageBatch):
            return self.content.size() + _MESSAGE_BYTES
        return sum([len(one.payload) + _MESSAGE_BYTES for one in self.content])

    @property
    def is_ordered(self) -> bool:
        """True if it may have come before others from the same client that have no answer yet."""
        return not isinstance(self.content, MessageBatch)

    @property
    def is_plain(self) -> bool:
        """True if it is a single message for the stream of its subject, and was never lost."""
        listed = isinstance(self.content, list) and len(self.content) == 1
        return listed and not self.stream and not self.lost

    def answered(self, outcome: PublishOutcome) -> None:
        """Pass the outcome of a request on, or send the publish again."""
        flow = self.flow
        if isinstance(outcome, PublishAck):
            if not self.known and self.node is not None:
                self.flows.sender.learn(self.node, outcome, self.subject)
            self.done(of_repeated(outcome) if self.lost else outcome)
            if flow is not None:
                flow.note(self, outcome)
        elif not self.send_again(outcome):
            self.refuse(outcome)
        if flow is not None:
            self.flows.settle(flow, 1)

    def refuse(self, error: ApiError) -> None:
        """Answer with an error."""
        self.done(unknown(error) if self.lost else error)

    def send_again(self, error: ApiError) -> bool:
        """Send the publish again if that is safe after ``error``; else return False."""
        kind = kind_of(error)
        if kind is Kind.FINAL or (kind is Kind.LOST and not is_repeatable(self.content)):
            return False
        if self.flows.closed:
            return False
        self.error = error
        self.lost |= kind is Kind.LOST
        self.flows.again += 1
        if self.flow is None:
            self.flows.sender.send_alone(self)
        else:
            self.flows.enqueue(self.flow, self)
        return True


class Flows:
    """All flows of this process. All fields belong to the event loop."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.again = 0
        """Publishes that were sent again."""
        self.closed = False
        """Whether nothing is sent again any more."""
        # By key; a flow without publishes is dropped.
        self._flows: dict[str, Flow] = {}
        self.get: Final = self._flows.get
        """Return the flow with a key, or None."""
        self._next_number = 0
        # Bytes of all publishes that wait.
        self._bytes = 0
        # Publishes that are sent alone.
        self._sending: set[asyncio.Task[PublishOutcome]] = set()

    def take_numbers(self, count: int) -> int:
        """Return the first of ``count`` new numbers."""
        first = self._next_number
        self._next_number += count
        return first

    def of(self, key: str) -> Flow:
        """Return the flow with a key."""
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = Flow(key)
        return flow

    def room(self, flow: Flow, node: Node, count: int) -> int:
        """Return how many of ``count`` publishes may be sent to a node: they overtake none."""
        if flow.task is not None:
            return 0
        if self.sender.knows(flow.key):
            return 0 if flow.underway and flow.node is not node else count
        # The node may take one publish, and refuse one before it that is for another leader.
        return 0 if flow.underway else 1

    def begin(self, flow: Flow, node: Node, count: int) -> None:
        """Note that ``count`` publishes are sent to a node."""
        flow.node = node
        flow.underway += count

    def settle(self, flow: Flow, count: int) -> None:
        """Note that ``count`` publishes of those under way were answered."""
        flow.underway -= count
        if not flow.underway:
            if flow.settled is not None and not flow.settled.done():
                flow.settled.set_result(None)
            self._drop_if_empty(flow)

    def acknowledged(self, flow: Flow, newest: int, count: int) -> None:
        """Note that ``count`` publishes were stored, of which ``newest`` has the highest number."""
        flow.newest = max(flow.newest, newest)
        self.settle(flow, count)

    def send(self, publish: Publish, node: Node) -> None:
        """Send a publish, or let it wait for its turn. Raises a refusal without effect."""
        flow = publish.flow
        if flow is not None and not self.room(flow, node, 1):
            self.wait(flow, publish)
            return
        publish.node = node
        if flow is not None:
            self.begin(flow, node, 1)
        try:
            node.link.publish_then(publish.stream, publish.content, publish.answered)
        except ApiError as refusal:
            sent_again = publish.send_again(refusal)
            if flow is not None:
                self.settle(flow, 1)
            if not sent_again:
                raise

    def wait(self, flow: Flow, publish: Publish) -> None:
        """Let a new publish wait for its turn. Raises OVERLOADED if too many bytes wait."""
        if self._bytes + publish.size > WAITING_BYTES_MAX:
            detail = "too many bytes wait for a leader of their stream"
            raise ApiError(errors.OVERLOADED, detail, retry_after_s=1, applied=False)
        self.enqueue(flow, publish)

    def enqueue(self, flow: Flow, publish: Publish) -> None:
        """Send a publish when its turn comes."""
        self._bytes += publish.size
        heappush(flow.waiting, publish)
        if flow.task is None:
            flow.task = asyncio.get_running_loop().create_task(self._drain(flow))

    async def close(self) -> None:
        """Answer those that wait with an unknown outcome; send nothing again from now on."""
        self.closed = True
        draining = [flow for flow in self._flows.values() if flow.task is not None]
        tasks: list[asyncio.Task[Any]] = [one.task for one in draining if one.task is not None]
        tasks += self._sending
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for flow in draining:
            self._end(flow)  # a task that was cancelled before its first step has not done that

    def _drop_if_empty(self, flow: Flow) -> None:
        if not flow.underway and flow.task is None and self._flows.get(flow.key) is flow:
            del self._flows[flow.key]

    def _take(self, flow: Flow) -> Publish:
        publish = heappop(flow.waiting)
        self._bytes -= publish.size
        return publish

    async def _drain(self, flow: Flow) -> None:
        try:
            while flow.waiting:
                await _until_settled(flow)
                await self.sender.until_known(flow.key)
                await self._clear(flow)
                # The first one finds the leader. Two at once could find a node that refuses the
                # first, becomes the leader, and stores the second.
                if flow.waiting and await self._send_first(flow):
                    await self.sender.until_known(flow.key)
                    await self._clear(flow)
                    await self._send_rest(flow)
        finally:
            self._end(flow)

    def _end(self, flow: Flow) -> None:
        flow.task = None
        while flow.waiting:  # this process ends
            self._take(flow).refuse(_ended())
        self._drop_if_empty(flow)

    async def _clear(self, flow: Flow, *, underway: bool = False) -> None:
        """Answer and hand over those that wait, until the first one is to be sent.

        Nothing has come back since then. ``underway``: one is being sent, which those that belong
        to other flows must not overtake either.
        """
        for number in count(1):
            if not flow.waiting:
                return
            first = flow.waiting[0]
            error = self._too_late(flow, first)
            if error is not None:
                self._take(flow).refuse(error)
            elif not underway and self.sender.key_of(first) != flow.key:
                # More is known than when it began.
                for part in self.sender.parts_of(self._take(flow)):
                    part.flow = self.of(self.sender.key_of(part))
                    self.enqueue(part.flow, part)
            else:
                return
            if number % _TOGETHER_MAX == 0:
                await asyncio.sleep(0)

    def _too_late(self, flow: Flow, publish: Publish) -> ApiError | None:
        """Return the refusal of a publish if its time is over, or a later one has overtaken it."""
        if publish.is_ordered and publish.number < flow.newest:
            return overtaken()
        if publish.begun_s + self.sender.again_s <= self.sender.now():
            return no_leader(publish.error or ApiError(errors.NOT_LEADER))
        return None

    async def _send_first(self, flow: Flow) -> bool:
        """Send the first publish until it is answered; return True if a node has taken it.

        False if that takes too long: then the others go ahead of it.
        """
        first = self._take(flow)
        sending = asyncio.get_running_loop().create_task(self.sender.outcome(first))
        self._sending.add(sending)
        # Not within the task, which does not even begin if it is cancelled at once.
        sending.add_done_callback(partial(self._sent_alone, flow, first))
        while not sending.done():
            await asyncio.wait([sending], timeout=self._patience_s(flow, first))
            sent_s = first.sent_s
            if not sending.done() and sent_s is not None and sent_s + SETTLE_S <= self.sender.now():
                first.late = first.is_ordered
                self.sender.forget(flow.key, first.node)
                return False
            await self._clear(flow, underway=True)
        return isinstance(sending.result(), PublishAck)

    def _patience_s(self, flow: Flow, sent: Publish) -> float:
        """Return how long to wait for the answer to one that was sent before the others."""
        ends_s = [SETTLE_S + (self.sender.now() if sent.sent_s is None else sent.sent_s)]
        if flow.waiting:
            ends_s.append(flow.waiting[0].begun_s + self.sender.again_s)
        return max(_LATE_S, min(ends_s) - self.sender.now())

    def _sent_alone(
        self, flow: Flow, publish: Publish, sending: "asyncio.Task[PublishOutcome]"
    ) -> None:
        """Answer a publish that was sent alone."""
        self._sending.discard(sending)
        failed = sending.cancelled() or sending.exception() is not None
        outcome = _ended() if failed else sending.result()
        flow.note(publish, outcome)
        publish.done(outcome)

    async def _send_rest(self, flow: Flow) -> None:
        """Send those that wait to the leader, until one comes back."""
        node = self.sender.node_of(flow.key)
        safe: set[str] = set()
        size, last = 0, -1
        for number in count(1):
            # What has come back waits until all others are answered, like those behind it.
            if (
                not flow.waiting
                or size > _ROUND_BYTES
                or flow.waiting[0].number <= max(last, flow.newest)
            ):
                return
            first = flow.waiting[0]
            if first.lost and not first.safe and not await self._is_safe(flow, first, safe):
                continue
            together = self._take_together(flow)
            size += sum([one.size for one in together])
            last = together[-1].number
            self._send_together(flow, node, together)
            if len(together) > 1 or number % _TOGETHER_MAX == 0:
                await asyncio.sleep(0)

    async def _is_safe(self, flow: Flow, publish: Publish, safe: set[str]) -> bool:
        """Return True if a lost publish may be sent again; otherwise it is answered.

        ``safe`` are streams whose duplicate windows are long enough.
        """
        try:
            # Another stream may capture the subject by now.
            publish.stream = await self.sender.stream_of(publish)
            if publish.stream not in safe:
                await self.sender.check_window(publish, publish.stream)
        except ApiError as error:
            flow.waiting.remove(publish)
            heapify(flow.waiting)
            self._bytes -= publish.size
            publish.refuse(error)
            return False
        safe.add(publish.stream)
        publish.safe = True
        return flow.waiting[0] is publish

    def _take_together(self, flow: Flow) -> list[Publish]:
        """Take what one request can carry."""
        together = [self._take(flow)]
        size = together[0].size
        if together[0].is_plain:
            while flow.waiting and flow.waiting[0].is_plain and len(together) < _TOGETHER_MAX:
                size += flow.waiting[0].size
                if size > _REQUEST_BYTES:
                    break
                together.append(self._take(flow))
        return together

    def _send_together(self, flow: Flow, node: Node, together: list[Publish]) -> None:
        self.begin(flow, node, len(together))
        for publish in together:
            publish.node, publish.known = node, False
        if len(together) == 1:
            (publish,) = together
            try:
                node.link.publish_then(publish.stream, publish.content, publish.answered)
            except ApiError as refusal:
                publish.answered(refusal)
            return

        def answered(positions: list[int], outcome: PublishOutcome) -> None:
            for at, one in zip(positions, each_outcome(outcome, len(positions)), strict=True):
                together[at].answered(one)

        messages = [one.content[0] for one in together if isinstance(one.content, list)]
        node.link.publish_each_then(messages, answered)


def is_stored(outcome: PublishOutcome) -> bool:
    """Return True if a message was stored."""
    return isinstance(outcome, PublishAck) and not all(run.code for run in outcome.results)


def each_outcome(outcome: PublishOutcome, count: int) -> Iterator[PublishOutcome]:
    """Return the outcome of each of ``count`` messages that were sent together."""
    if isinstance(outcome, ApiError):
        yield from [outcome] * count
        return
    for run in outcome.results:
        for one in run.each():
            # Messages are cut into several entries of the log, and some of these may be lost.
            error = errors.from_code(one.code, one.detail) if one.code else None
            if error is not None and kind_of(error) is not Kind.FINAL:
                yield error
            else:
                yield PublishAck(outcome.stream, [one], outcome.durability)


def overtaken() -> ApiError:
    """Return the refusal of a publish that comes back after a later one was stored."""
    detail = "a later message was stored before this one could be sent again"
    return ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False)


def has_several(content: PublishContent) -> bool:
    """Return True if these are several messages."""
    return (len(content) if isinstance(content, list) else content.count) > 1


def subject_of(content: PublishContent) -> str:
    """Return the subject by which storage chooses the stream of a list."""
    return content[0].subject if isinstance(content, list) and content else ""


async def _until_settled(flow: Flow) -> None:
    """Wait until those under way are answered, but not for ever: a node may be silent."""
    if flow.underway:
        flow.settled = asyncio.get_running_loop().create_future()
        await asyncio.wait([flow.settled], timeout=SETTLE_S)
        flow.settled = None


def _ended() -> ApiError:
    return ApiError(errors.OUTCOME_UNKNOWN, "this process ended")
