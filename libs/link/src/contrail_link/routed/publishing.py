"""Publishing to a cluster: a publish that did not reach the leader is sent again, if that is safe.

After a loss, only messages with ids are sent again, and only if the stream remembers ids for long
enough: the duplicate window recognises those that the first try has stored.

The messages of a stream whose shards are led by several nodes are sent to each of these. Whether a
stream is such a one is asked once, when a result names a shard or a node refuses a batch.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamInfo
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
from contrail_link.publishing import outcome_of
from contrail_link.routed.layouts import (
    Layout,
    Part,
    first_subject,
    key_of,
    layout_of,
    parts_of,
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
        self.again = 0
        """Publishes that were sent again."""
        self._finder = finder
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

    def leader_of(self, subject: str) -> Node | None:
        """Return the node that probably leads the messages with a subject."""
        name = self._name("", subject)
        return self._finder.leaders.get(self._key(name, subject)) if name else None

    def node_of(self, subject: str) -> Node:
        """Return the node to ask first."""
        return self.leader_of(subject) or self._finder.default

    def publish_then(self, stream: str, content: PublishContent, done: Done) -> None:
        """Store messages as ``StorageLink.publish_then`` does."""
        name = self._name(stream, subject_of(content))
        layout = self._layouts.get(name)
        if layout is None or layout.shards == 1:
            self._send(stream, content, done, name)
            return
        parts = parts_of(layout, content)
        if len(parts) == 1:
            self._send(stream, content, done, key_of(name, parts[0].shard))
        else:
            self._scatter(name, parts, done)

    def _send(
        self,
        stream: str,
        content: PublishContent,
        done: Done,
        key: str,
        begun_s: float | None = None,
    ) -> None:
        leader = self._finder.leaders.get(key) if key else None
        node = leader or self._finder.default
        publish = Publish(self, node, stream, content, done, known=leader is not None)
        publish.begun_s = publish.begun_s if begun_s is None else begun_s
        try:
            node.link.publish_then(stream, content, publish.answered)
        except ApiError as refusal:
            if not publish.send_again(refusal):
                raise

    def _scatter(
        self, stream: str, parts: list[Part], done: Done, begun_s: float | None = None
    ) -> None:
        """Send parts to the leaders of their shards; ``done`` gets the outcome of all."""
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
            settle = partial(answered, part.positions)
            try:
                self._send(stream, part.content, settle, key_of(stream, part.shard), begun_s)
            except ApiError as refusal:
                # In a later turn, as all answers are.
                asyncio.get_running_loop().call_soon(settle, refusal)

    async def close(self) -> None:
        """End the publishes that are being sent again with an unknown outcome."""
        tasks: list[asyncio.Future[Any]] = [*self._tasks, *self._infos.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def learn(self, node: Node, ack: PublishAck, subject: str) -> None:
        """Note that ``node`` has stored messages; ``subject`` chose the stream, if it is not ""."""
        stream = ack.stream
        shard = ack.results[0].shard if ack.results else None
        layout = self._layouts.get(stream)
        if shard is None or (layout is not None and layout.shards == 1):
            self._finder.leaders.note(stream, node)
            if layout is not None and layout.shards > 1 and not ack.results[0].code:
                self._layouts.drop(stream, layout)  # the stream was created anew
        elif layout is not None:
            self._finder.leaders.note(key_of(stream, shard), node)
        else:
            self._ask(stream)
        if subject:
            self._captured.note(subject, stream)
            self._captured.note(subject.partition(".")[0], stream)

    def send_again(self, publish: "Publish", error: ApiError) -> None:
        """Send a publish again in the background."""
        self.again += 1
        task = asyncio.get_running_loop().create_task(self._finish(publish, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, publish: "Publish", error: ApiError) -> None:
        outcome: PublishOutcome = ApiError(errors.OUTCOME_UNKNOWN, "this process ended")
        try:
            outcome = await self._outcome(publish, error)
        finally:
            publish.done(outcome)

    async def _outcome(self, publish: "Publish", error: ApiError) -> PublishOutcome:
        """Send a publish until it is answered; return the outcome."""
        until = publish.begun_s + self._finder.again_s
        lost = False
        try:
            stream = publish.stream or await _in_time(until, self._stream_of(publish.subject))
            if error.spec is errors.NOT_LEADER and has_several(publish.content):
                parts = await _in_time(until, self._parts(stream, publish.content))
                if len(parts) > 1:
                    return await self._outcome_of(stream, parts, publish.begun_s)
            key = self._key(stream, first_subject(publish.content))
            search = Search(self._finder, Goal.LEADER, key, until)
            search.node = publish.node
            while True:
                kind = kind_of(error)
                if kind is Kind.FINAL:
                    return unknown(error) if lost else error
                if kind is Kind.LOST and not lost:
                    lost = True
                    if not is_repeatable(publish.content):
                        return unknown(error)
                    if not await _in_time(until, self._remembers(stream)):
                        return unknown(error)
                await search.next(error)
                # After a loss, the stream is named: another one may capture the subject by now.
                named = stream if lost else publish.stream
                outcome = await outcome_of(search.node.link, named, publish.content)
                if isinstance(outcome, PublishAck):
                    self.learn(search.node, outcome, publish.subject)
                    return of_repeated(outcome) if lost else outcome
                error = outcome
        except ApiError as refusal:
            return unknown(error) if lost else refusal

    async def _stream_of(self, subject: str) -> str:
        return self._captured.get(subject) or await self._routed.stream_for_subject(subject)

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


class Publish:
    """A publish on its way to a node, which is ``known`` to lead the stream or is only a guess."""

    __slots__ = ("_known", "_publisher", "begun_s", "content", "done", "node", "stream")

    def __init__(
        self,
        publisher: Publisher,
        node: Node,
        stream: str,
        content: PublishContent,
        done: Done,
        *,
        known: bool = False,
    ) -> None:
        self._publisher = publisher
        self._known = known
        self.node = node
        self.stream = stream
        self.content = content
        self.done = done
        self.begun_s = publisher.now()

    @property
    def subject(self) -> str:
        """The subject by which the stream is chosen, or "" if the stream was given."""
        return "" if self.stream else subject_of(self.content)

    def answered(self, outcome: PublishOutcome) -> None:
        """Pass the outcome on, or send the publish again."""
        if isinstance(outcome, PublishAck):
            if not self._known:
                self._publisher.learn(self.node, outcome, self.subject)
            self.done(outcome)
        elif not self.send_again(outcome):
            self.done(outcome)

    def send_again(self, error: ApiError) -> bool:
        """Send the publish again if that is safe after ``error``; else return False."""
        kind = kind_of(error)
        if kind is Kind.FINAL or (kind is Kind.LOST and not is_repeatable(self.content)):
            return False
        self._publisher.send_again(self, error)
        return True


def has_several(content: PublishContent) -> bool:
    """Return True if these are several messages."""
    return (len(content) if isinstance(content, list) else content.count) > 1


def subject_of(content: PublishContent) -> str:
    """Return the subject by which storage chooses the stream of a list."""
    return content[0].subject if isinstance(content, list) and content else ""


async def _in_time(until: float, work: Coroutine[Any, Any, _R]) -> _R:
    """Return the result of ``work``; NOT_READY if it is not there in time."""
    try:
        async with asyncio.timeout_at(until):
            return await work
    except TimeoutError:
        detail = "no node has answered in time"
        raise ApiError(errors.NOT_READY, detail, retry_after_s=1, applied=False) from None
