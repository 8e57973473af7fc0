"""Publishing to a cluster: a publish that did not reach the leader is sent again, if that is safe.

After a loss, only messages with ids are sent again, and only if the stream remembers ids for long
enough: the duplicate window recognises those that the first try has stored.

The messages of a stream whose shards are led by several nodes are sent to each of these. Whether a
stream is such a one is asked once, when a result names a shard or a node refuses a batch.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final, TypeVar

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage, StreamInfo
from contrail_common.texts import I64Array
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import (
    PublishAck,
    PublishContent,
    PublishOutcome,
    is_repeatable,
)
from contrail_link.contract.remote import Goal
from contrail_link.gathering import Gathering, PartOutcome
from contrail_link.publishing import outcome_of, positions_by_subject
from contrail_link.routed.flows import (
    SETTLE_S,
    Flow,
    Flows,
    Publish,
    each_outcome,
    has_several,
    overtaken,
    subject_of,
)
from contrail_link.routed.layouts import (
    PLAIN,
    Layout,
    Part,
    first_subject,
    key_of,
    layout_of,
    of_key,
    parts_of,
    unnamed,
)
from contrail_link.routed.leaders import Learned, Node
from contrail_link.routed.outcomes import Kind, kind_of, of_repeated, unknown
from contrail_link.routed.search import Finder, Search

Done = Callable[[PublishOutcome], None]
_R = TypeVar("_R")

_WINDOWS: Final = 2
"""Duplicate window that a repeated publish needs, in times until its last answer."""


class Publisher:
    """Publishes to the leaders of streams. All fields belong to the event loop."""

    def __init__(self, finder: Finder, routed: StorageLink, answer_s: float) -> None:
        self._finder = finder
        self.again_s = finder.again_s
        self.flows = Flows(self)
        """Publishes without an answer, in order."""
        # Longest time from a publish to the answer to its last repetition.
        self._answered_s = finder.again_s + answer_s
        # The link to the whole cluster, for questions about streams.
        self._routed = routed
        # Names of streams by a subject that they capture, and by the first token of one.
        self._captured: Learned[str] = Learned()
        self.now: Final = asyncio.get_running_loop().time
        """The time of the event loop, in seconds."""
        # By stream that has several shards. Wrong if the stream was created anew: see `_outcome`.
        self._layouts: Learned[Layout] = Learned()
        # Questions about streams that are being asked now.
        self._infos: dict[str, asyncio.Future[StreamInfo]] = {}
        # Publishes that are being sent again.
        self._tasks: set[asyncio.Task[None]] = set()

    def _name(self, stream: str, subject: str) -> str:
        """Return the stream of a request: ``stream``, or the one that probably captures a subject.

        "" if that is not known.
        """
        if stream:
            return stream
        captured = self._captured.get
        return captured(subject) or captured(subject.partition(".")[0]) or ""

    def _key(self, stream: str, subject: str) -> str:
        """Return the key of what leads the messages of a stream that have a subject."""
        layout = self._layouts.get(stream)
        return stream if layout is None else layout.key(stream, subject)

    def key_of(self, publish: Publish) -> str:
        """Return the key of the flow to which a publish belongs, from what is known now."""
        subject = first_subject(publish.content)
        name = self._name(publish.stream, publish.subject)
        return self._key(name, subject) if name else unnamed(subject)

    def parts_of(self, publish: Publish) -> list[Publish]:
        """Return a publish, or its parts for different leaders, as far as these are known now."""
        name = self._name(publish.stream, publish.subject)
        parts = self._split(name, publish.content)
        return _parts(publish, name, parts) if len(parts) > 1 else [publish]

    def _split(self, stream: str, content: PublishContent) -> list[Part]:
        """Return the parts of a request for different leaders; none if only one is known."""
        layout = self._layouts.get(stream)
        return [] if layout is None or layout.shards == 1 else parts_of(layout, content)

    def leader_of(self, subject: str) -> Node | None:
        """Return the node that probably leads the messages with a subject."""
        name = self._name("", subject)
        layout = self._layouts.get(name)
        return None if layout is None else self._finder.leaders.get(layout.key(name, subject))

    def knows(self, key: str) -> bool:
        """Return True if all publishes with a key are for the same leader."""
        stream, shard = of_key(key)
        return shard is not None or self._layouts.get(stream) is not None

    def node_of(self, key: str) -> Node:
        """Return the node to ask first for what has a key."""
        return self._finder.leaders.get(key) or self._finder.default

    def _flow_of(self, subject: str, stream: str = "") -> Flow:
        """Return the flow of a message for a stream, or for the one of its subject."""
        # As long as there are messages of which less was known, later ones stay behind them.
        flow = self.flows.get(unnamed(subject))
        if flow is not None:
            return flow
        name = self._name(stream, subject)
        if not name:
            return self.flows.of(unnamed(subject))
        return self.flows.get(name) or self.flows.of(self._key(name, subject))

    def publish_then(self, stream: str, content: PublishContent, done: Done) -> None:
        """Store messages as ``StorageLink.publish_then`` does."""
        name = self._name(stream, subject_of(content))
        parts = self._split(name, content)
        if len(parts) > 1:
            self._scatter(name, parts, done)
        else:
            self._send(stream, content, done, self._flow_of(first_subject(content), stream))

    def _send(self, stream: str, content: PublishContent, done: Done, flow: Flow) -> None:
        flows = self.flows
        number = flows.take_numbers(1)
        publish = Publish(flows, flow, stream, content, done, self.now(), number)
        leader = self._finder.leaders.get(flow.key)
        publish.known = leader is not None and self.knows(flow.key)
        flows.send(publish, leader or self._finder.default)

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message where its subject goes; each node gets its messages together."""
        flows = self.flows
        first, begun_s = flows.take_numbers(len(messages)), self.now()
        requests: dict[Node, _Together] = {}
        for flow, positions in positions_by_subject(messages, self._flow_of).items():
            node = self.node_of(flow.key)
            count = flows.room(flow, node, len(positions))
            if count:
                flows.begin(flow, node, count)
                request = requests.get(node)
                if request is None:
                    request = requests[node] = _Together(self, node, done, begun_s, first)
                request.add(flow, positions[:count])
            for at in positions[count:]:
                one = partial(done, [at])
                number = first + at
                publish = Publish(flows, flow, "", [messages[at]], one, begun_s, number)
                try:
                    flows.wait(flow, publish)
                except ApiError as error:
                    one(error)
        for request in requests.values():
            request.send(messages)

    def _scatter(
        self, stream: str, parts: list[Part], done: Done, begun_s: float | None = None
    ) -> None:
        """Send parts to the leaders of their shards; ``done`` gets the outcome of all.

        With ``begun_s``, the time at which they began, they are in no flow: see `_outcome_of`.
        """
        for part, settle in _gathering(stream, parts, done):
            try:
                if begun_s is None:
                    flow = self._flow_of(first_subject(part.content), stream)
                    self._send(stream, part.content, settle, flow)
                else:
                    alone = Publish(self.flows, None, stream, part.content, settle, begun_s, -1)
                    self.flows.send(alone, self.node_of(key_of(stream, part.shard)))
            except ApiError as refusal:
                # In a later turn, as all answers are.
                asyncio.get_running_loop().call_soon(settle, refusal)

    async def close(self) -> None:
        """End the publishes that are being sent again with an unknown outcome."""
        await self.flows.close()
        tasks: list[asyncio.Future[Any]] = [*self._tasks, *self._infos.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def forget(self, key: str, node: Node | None) -> None:
        """Ask another node first from now on."""
        if node is not None:
            self._finder.leaders.drop(key, node)

    def learn(self, node: Node, ack: PublishAck, subject: str) -> None:
        """Note that ``node`` has stored messages; ``subject`` chose the stream, if it is not ""."""
        stream = ack.stream
        shard = ack.results[0].shard if ack.results else None
        layout = self._layouts.get(stream)
        if shard is None:
            self._finder.leaders.note(stream, node)
            # If another layout is known, the stream was created anew.
            if layout is not PLAIN and not ack.results[0].code:
                self._layouts.note(stream, PLAIN)
        elif layout is None or layout is PLAIN:
            self._ask(stream)
        else:
            key = stream if layout.shards == 1 else key_of(stream, shard)
            self._finder.leaders.note(key, node)
        if subject:
            self._captured.note(subject, stream)
            self._captured.note(subject.partition(".")[0], stream)

    def send_alone(self, publish: Publish) -> None:
        """Send a publish again in the background."""
        task = asyncio.get_running_loop().create_task(self._finish(publish))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, publish: Publish) -> None:
        outcome: PublishOutcome = ApiError(errors.OUTCOME_UNKNOWN, "this process ended")
        try:
            outcome = await self.outcome(publish)
        finally:
            publish.done(outcome)

    async def outcome(self, publish: Publish) -> PublishOutcome:
        """Send a publish until it is answered; return the outcome."""
        until = publish.begun_s + self.again_s
        error = publish.error
        try:
            stream = await self.stream_of(publish)
            key = self._key(stream, first_subject(publish.content))
            search = Search(self._finder, Goal.LEADER, key, until)
            search.node = publish.node or search.node
            while True:
                if error is not None:
                    parts = await self._after(publish, stream, error)
                    if len(parts) > 1:
                        return await self._outcome_of(stream, parts, publish.begun_s)
                    await search.next(error)
                # After a loss, the stream is named: another one may capture the subject by now.
                named = stream if publish.lost else publish.stream
                publish.node, publish.sent_s = search.node, self.now()
                outcome = await outcome_of(search.node.link, named, publish.content)
                publish.sent_s = None
                if isinstance(outcome, PublishAck):
                    self.learn(search.node, outcome, publish.subject)
                    return of_repeated(outcome) if publish.lost else outcome
                error = outcome
        except ApiError as refusal:
            return unknown(refusal) if publish.lost else refusal

    async def _after(self, publish: Publish, stream: str, error: ApiError) -> list[Part]:
        """Return the parts of a publish that may be sent again; none if it is for one shard.

        Raises an error for the caller if that is not safe.
        """
        kind = kind_of(error)
        if kind is Kind.FINAL:
            raise error
        publish.error = error
        publish.lost |= kind is Kind.LOST
        if publish.late:
            raise overtaken()
        if publish.lost and not publish.safe:
            await self.check_window(publish, stream)
        if error.spec is not errors.NOT_LEADER or not has_several(publish.content):
            return []
        until = publish.begun_s + self.again_s
        return await _in_time(until, self._parts(stream, publish.content))

    async def stream_of(self, publish: Publish) -> str:
        """Return the stream for a publish: the one that was given, or that captures its subject."""
        name = publish.stream or self._captured.get(publish.subject)
        if name:
            return name
        asked = self._routed.stream_for_subject(publish.subject)
        return await _in_time(publish.begun_s + self.again_s, asked)

    async def until_known(self, key: str) -> None:
        """Wait for a while if it is being asked which nodes lead a stream."""
        asked = self._infos.get(of_key(key)[0])
        if asked is not None:
            await asyncio.wait([asked], timeout=SETTLE_S)

    async def check_window(self, publish: Publish, stream: str) -> None:
        """Raise the error of a publish that was lost, unless its stream remembers it."""
        until = publish.begun_s + self.again_s
        safe = is_repeatable(publish.content)
        if not (safe and await _in_time(until, self._remembers(stream))):
            raise publish.error or ApiError(errors.OUTCOME_UNKNOWN)
        publish.safe = True

    async def _parts(self, stream: str, content: PublishContent) -> list[Part]:
        """Return the parts of a batch that a node has refused, by the layout that is right now."""
        layout = layout_of(await asyncio.shield(self._ask(stream)))
        return parts_of(layout, content)

    async def _outcome_of(self, stream: str, parts: list[Part], begun_s: float) -> PublishOutcome:
        """Send parts, and return the outcome of all."""
        outcome: asyncio.Future[PublishOutcome] = asyncio.get_running_loop().create_future()
        self._scatter(stream, parts, outcome.set_result, begun_s)
        return await outcome

    async def _remembers(self, stream: str) -> bool:
        """Return True if the stream remembers ids for long enough to send them again."""
        window_ns = (await asyncio.shield(self._ask(stream))).config.duplicate_window_ns
        return window_ns >= _WINDOWS * self._answered_s * NS_PER_S

    def _ask(self, stream: str) -> "asyncio.Future[StreamInfo]":
        """Return the answer to a question about a stream, which is on its way."""
        info = self._infos.get(stream)
        if info is None:
            # A node that is lost takes many publishes with it, which all ask at once.
            info = self._infos[stream] = asyncio.ensure_future(self._routed.stream_info(stream))
            info.add_done_callback(partial(self._informed, stream))
        return info

    def _informed(self, stream: str, asked: "asyncio.Future[StreamInfo]") -> None:
        del self._infos[stream]
        # That looks at an error, too: those who asked may have given up.
        if asked.cancelled() or asked.exception() is not None:
            return
        info = asked.result()
        self._layouts.note(stream, layout_of(info))
        for number, state in enumerate(info.shards):
            node = self._finder.named(state.leader or "")
            if node is not None:
                self._finder.leaders.note(key_of(stream, number), node)


def _gathering(stream: str, parts: list[Part], done: Done) -> Iterator[tuple[Part, Done]]:
    """Return each part with what takes its outcome; ``done`` gets the outcome of all."""
    durability = ""

    def gathered(outcome: PartOutcome) -> None:
        if isinstance(outcome, ApiError):
            done(outcome)
        else:
            done(PublishAck(stream, outcome, durability))

    def answered(positions: I64Array, outcome: PublishOutcome) -> None:
        nonlocal durability
        if isinstance(outcome, PublishAck):
            durability = outcome.durability
            gathering.settle(positions, outcome.results)
        else:
            gathering.settle(positions, outcome)

    count = sum(len(part.positions) for part in parts)
    gathering = Gathering(count, {}, len(parts), gathered)
    for part in parts:
        yield part, partial(answered, part.positions)


def _parts(publish: Publish, stream: str, parts: list[Part]) -> list[Publish]:
    """Return the parts of a publish that waits, with what is known of it."""
    found: list[Publish] = []
    for part, settle in _gathering(stream, parts, publish.done):
        one = Publish(
            publish.flows, None, stream, part.content, settle, publish.begun_s, publish.number
        )
        one.error, one.lost, one.safe = publish.error, publish.lost, publish.safe
        found.append(one)
    return found


class _Together:
    """Messages of any flows that are sent to a node with one request."""

    __slots__ = (
        "_begun_s", "_done", "_first", "_flow_of", "_flows", "_node", "_positions", "_publisher",
    )  # fmt: skip

    def __init__(
        self,
        publisher: Publisher,
        node: Node,
        done: Callable[[list[int], PublishOutcome], None],
        begun_s: float,
        first: int,
    ) -> None:
        self._publisher = publisher
        self._node = node
        self._done = done
        self._begun_s = begun_s
        # Number of the message at position 0.
        self._first = first
        # Positions of the messages in the call, in order.
        self._positions: list[int] = []
        # Their flows.
        self._flows: list[Flow] = []
        # Flows by position; empty if all messages are of the same one.
        self._flow_of: dict[int, Flow] = {}

    def add(self, flow: Flow, positions: list[int]) -> None:
        """Add messages of a flow."""
        if len(self._flows) == 1:
            self._flow_of = dict.fromkeys(self._positions, self._flows[0])
        self._flows.append(flow)
        self._positions += positions
        if self._flow_of:
            self._flow_of |= dict.fromkeys(positions, flow)

    def send(self, messages: list[PublishMessage]) -> None:
        """Send the messages, which are in ``messages``, in their order there."""
        self._positions.sort()
        some = [messages[at] for at in self._positions]
        self._node.link.publish_each_then(some, partial(self._answered, some))

    def _answered(
        self, messages: list[PublishMessage], answered: list[int], outcome: PublishOutcome
    ) -> None:
        publisher, first, flow_of = self._publisher, self._first, self._flow_of
        positions = [self._positions[at] for at in answered]
        if isinstance(outcome, PublishAck) and not any(run.code for run in outcome.results):
            subject = messages[answered[0]].subject
            if publisher.leader_of(subject) is not self._node:
                publisher.learn(self._node, outcome, subject)
            self._done(positions, outcome)
            if flow_of:
                for at in positions:
                    publisher.flows.acknowledged(flow_of[at], first + at, 1)
            else:
                publisher.flows.acknowledged(self._flows[0], first + positions[-1], len(positions))
            return
        for own, at, one in zip(
            answered, positions, each_outcome(outcome, len(positions)), strict=True
        ):
            flow, done = flow_of.get(at) or self._flows[0], partial(self._done, [at])
            content, number = [messages[own]], first + at
            publish = Publish(
                publisher.flows, flow, "", content, done, self._begun_s, number, self._node
            )
            publish.answered(one)


async def _in_time(until: float, work: Coroutine[Any, Any, _R]) -> _R:
    """Return the result of ``work``; NOT_READY if it is not there in time."""
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError:
        detail = "no node has answered in time"
        raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False) from None
