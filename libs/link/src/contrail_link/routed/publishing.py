"""Publishing to a cluster: a publish that did not reach the leader is sent again, if that is safe.

After a loss, only messages with ids are sent again, and only if the stream remembers ids for long
enough: the duplicate window recognises those that the first try has stored.
"""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.model import StreamInfo
from contrail_common.timeunits import NS_PER_S
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import (
    PublishAck,
    PublishContent,
    PublishOutcome,
    is_repeatable,
)
from contrail_link.contract.remote import Goal
from contrail_link.publishing import outcome_of
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
        # Questions about streams that are being asked now.
        self._infos: dict[str, asyncio.Future[StreamInfo]] = {}
        # Publishes that are being sent again.
        self._tasks: set[asyncio.Task[None]] = set()

    def leader_of(self, stream: str, subject: str) -> Node | None:
        """Return the node that probably leads a stream, or the stream of a subject if it is ""."""
        if not stream:
            captured = self._captured.get
            stream = captured(subject) or captured(subject.partition(".")[0]) or ""
            if not stream:
                return None
        return self._finder.leaders.get(stream)

    def node_of(self, stream: str, subject: str) -> Node:
        """Return the node to ask first."""
        return self.leader_of(stream, subject) or self._finder.default

    def publish_then(self, stream: str, content: PublishContent, done: Done) -> None:
        """Store messages as ``StorageLink.publish_then`` does."""
        leader = self.leader_of(stream, "" if stream else subject_of(content))
        node = leader or self._finder.default
        publish = Publish(self, node, stream, content, done, known=leader is not None)
        try:
            node.link.publish_then(stream, content, publish.answered)
        except ApiError as refusal:
            if not publish.send_again(refusal):
                raise

    async def close(self) -> None:
        """End the publishes that are being sent again with an unknown outcome."""
        tasks: list[asyncio.Future[Any]] = [*self._tasks, *self._infos.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def learn(self, node: Node, stream: str, subject: str) -> None:
        """Note that ``node`` leads ``stream``, which captures ``subject`` (not given if "")."""
        self._finder.leaders.note(stream, node)
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
            search = Search(self._finder, Goal.LEADER, stream, until)
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
                    self.learn(search.node, outcome.stream, publish.subject)
                    return of_repeated(outcome) if lost else outcome
                error = outcome
        except ApiError as refusal:
            return unknown(error) if lost else refusal

    async def _stream_of(self, subject: str) -> str:
        return self._captured.get(subject) or await self._routed.stream_for_subject(subject)

    async def _remembers(self, stream: str) -> bool:
        """Return True if the stream remembers ids for long enough to send them again."""
        info = self._infos.get(stream)
        if info is None:
            # A node that is lost takes many publishes with it, which all ask at once.
            info = self._infos[stream] = asyncio.ensure_future(self._routed.stream_info(stream))
            info.add_done_callback(partial(self._informed, stream))
        window_ns = (await asyncio.shield(info)).config.duplicate_window_ns
        return window_ns >= _WINDOWS * self._answered_s * NS_PER_S

    def _informed(self, stream: str, info: "asyncio.Future[StreamInfo]") -> None:
        del self._infos[stream]
        if not info.cancelled():
            info.exception()  # marks it as seen: those who asked may have given up


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
                self._publisher.learn(self.node, outcome.stream, self.subject)
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
