"""Single messages that a socket publishes. Those that arrive together are stored together."""

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from contrail_common.errors import ApiError
from contrail_common.model import PublishMessage
from contrail_gateway.core.frames import FrameId, PubAck, ServerFrame
from contrail_gateway.sockets.metrics import SessionCounts
from contrail_link.contract import StorageLink
from contrail_link.contract.publish import PublishAck, PublishOutcome, PubResult
from contrail_link.publishing import refusal_by_subject

MESSAGE_BYTES: Final = 256
"""Bytes that an unanswered message counts in addition to its payload."""


TOGETHER_MAX: Final = 2_000
"""Messages that are passed on in one step, which takes a few milliseconds."""


class PublishHost(Protocol):
    """The part of a session that its publishes use."""

    link: StorageLink
    counts: SessionCounts

    def send_all(self, frames: Sequence[ServerFrame]) -> None: ...

    def refuse(self, frame_id: FrameId | None, sid: str | None, error: ApiError) -> None:
        """Send an error."""
        ...

    def answered(self, count: int, size: int) -> None:
        """Note that ``count`` messages of ``size`` bytes in total were answered."""
        ...


class Publishes:
    """Collects the messages of one socket, passes them on together, and sends their answers.

    It does not refer to its host: both would then wait for a full garbage collection.
    """

    def __init__(self) -> None:
        # Ids and messages of the frames that are not passed on yet; equally long.
        self._ids: list[FrameId | None] = []
        self._messages: list[PublishMessage] = []

    def add(
        self,
        host: PublishHost,
        ids: Sequence[FrameId | None],
        messages: Sequence[PublishMessage],
    ) -> int:
        """Add messages, and return the bytes that they count until they are answered."""
        if len(self._ids) + len(ids) > TOGETHER_MAX:
            self.pass_on(host)
        self._ids += ids
        self._messages += messages
        return sum([len(message.payload) for message in messages]) + MESSAGE_BYTES * len(ids)

    def pass_on(self, host: PublishHost) -> None:
        """Pass the messages to storage. Each frame with an id gets an answer of its own."""
        if not self._messages:
            return
        ids, messages = self._ids, self._messages
        # Take them out first: storage may answer before the call returns.
        self._ids, self._messages = [], []
        host.link.publish_each_then(messages, partial(_answer, host, ids, messages))


def _answer(
    host: PublishHost,
    ids: list[FrameId | None],
    messages: list[PublishMessage],
    positions: list[int],
    outcome: PublishOutcome,
) -> None:
    size = sum([len(messages[at].payload) for at in positions])
    host.answered(len(positions), size + MESSAGE_BYTES * len(positions))
    asked = [ids[at] for at in positions]
    if isinstance(outcome, ApiError):
        _refuse(host, asked, outcome)
        return
    start = 0
    for run in outcome.results:
        of_run = asked[start : start + run.count]
        start += run.count
        if run.code:
            _refuse(host, of_run, refusal_by_subject(run.code, run.detail))
        else:
            host.counts.published += run.count
            host.send_all(_acks(of_run, outcome, run))


def _refuse(host: PublishHost, ids: list[FrameId | None], error: ApiError) -> None:
    for frame_id in ids:
        host.refuse(frame_id, None, error)


def _acks(ids: list[FrameId | None], outcome: PublishAck, run: PubResult) -> list[PubAck]:
    """Return the answers to those frames of a run that have an id."""
    stream, durability, duplicate, shard = (
        outcome.stream, outcome.durability, run.duplicate, run.shard,
    )  # fmt: skip
    return [
        PubAck(
            id=frame_id,
            stream=stream,
            seq=seq,
            duplicate=duplicate,
            durability=durability,
            shard=shard,
        )
        for seq, frame_id in enumerate(ids, run.seq)
        if frame_id is not None
    ]
