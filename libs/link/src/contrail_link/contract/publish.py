"""Publishing: messages and the outcome of each."""

from collections.abc import Callable
from typing import Protocol

import msgspec

from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_link.contract.remote import ANY, REPEAT, remote


class PubResult(msgspec.Struct, frozen=True, gc=False):
    """Outcome of one message: a sequence, or the error code and detail of its refusal.

    ``code`` 0 is success; otherwise ``seq`` has no meaning. ``code`` can be ``OUTCOME_UNKNOWN`` if
    a request spans several commits.
    With ``count`` above 1 it is the outcome of a run of messages. If they were stored, their
    sequences ascend from ``seq``; otherwise code and detail are the same for all. ``shard`` is set
    if the stream has several.
    """

    seq: int
    duplicate: bool = False
    code: int = 0
    detail: str = ""
    count: int = 1
    shard: int | None = None

    def each(self) -> "list[PubResult]":
        """Return one outcome for each message of the run."""
        if self.code:
            return [PubResult(0, code=self.code, detail=self.detail)] * self.count
        return [
            PubResult(seq, self.duplicate, shard=self.shard)
            for seq in range(self.seq, self.seq + self.count)
        ]


class PublishAck(msgspec.Struct, frozen=True):
    """Outcome of a publish request: results in the order of the messages.

    A list of messages has one result for each of them; a batch has runs.
    """

    stream: str
    results: list[PubResult]
    durability: str


PublishContent = list[PublishMessage] | MessageBatch
"""The messages of a publish, as a list or in columns."""
PublishOutcome = PublishAck | ApiError
"""The outcome of a publish; an error applies to all its messages."""


def is_repeatable(content: PublishContent) -> bool:
    """Return True if no message is stored twice when they are published again.

    The duplicate window protects them, or the number of their batch. An expectation would refuse
    the second publish, although the first was stored, and so would an atomic batch.
    """
    if isinstance(content, MessageBatch):
        ids = content.ids
        return not content.atomic and (
            content.numbered is not None
            or (ids is not None and not content.expected and bool((ids.lengths() > 0).all()))
        )
    return all(one.msg_id and one.expected is None for one in content)


class PublishLink(Protocol):
    """Publishing: messages and the outcome of each."""

    @remote(6, REPEAT, to=ANY)
    async def stream_for_subject(self, subject: str) -> str:
        """Return the stream that captures the literal ``subject`` (NO_STREAM_FOR_SUBJECT)."""
        ...

    def publish_then(
        self, stream: str, content: PublishContent, done: Callable[[PublishOutcome], None]
    ) -> None:
        """Store messages in order, each by itself; they are durable when ``done`` is called.

        If ``stream`` is "", a list goes to the stream that captures its first message's subject
        (NO_STREAM_FOR_SUBJECT). Headers must be interpreted already.

        ``done`` is called exactly once, on the event loop, while storage applies the entry: it must
        be short and must not raise. It gets refused messages as errors in the results, and an
        ApiError for the whole request: overloaded, or all outcomes unknown. If this method raises
        a refusal, nothing is stored and ``done`` is not called. Coroutines call
        :func:`contrail_link.publishing.publish`.
        """
        ...

    def publish_each_then(
        self, messages: list[PublishMessage], done: Callable[[list[int], PublishOutcome], None]
    ) -> None:
        """Store each message in the stream of its subject, in order. Never raises.

        Each call of ``done`` has some positions and their outcomes (runs). Calls may come before
        this method returns.
        """
        ...

    async def may_retry(self, refusal: ApiError, refused_at_s: float) -> bool:
        """Wait until a refused request can be sent again; return False if it should not be.

        ``refused_at_s``: the event loop's time of the first refusal. A request is sent again only
        if it was refused with NOT_READY and had no effect, and for a short time.
        """
        ...
