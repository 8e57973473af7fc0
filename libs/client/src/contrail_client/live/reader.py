"""Ordered reading: every message of a stream once and in order, pushed as it is published."""

import asyncio
from collections.abc import Sequence
from typing import Final

from contrail_client.calls import texts
from contrail_client.errors import ApiProblem, ContrailError, SubscriptionEnded
from contrail_client.live.connection import AsyncConnection
from contrail_client.live.feed import CREDIT_BYTES, CREDIT_MSGS, Feed
from contrail_client.live.frames import Answering, Missing, Ok, Sub
from contrail_client.live.ordered import Begin, Course, GapHandler, Start, begin_at
from contrail_client.models import Delivered, Gap, place_of

_INVALID_FIELD: Final = "invalid_field"


class AsyncOrderedReader(Feed[Delivered]):
    """The messages of a stream in order, each once: from `start`, then live as they are published.

    In a stream with several shards the order holds within each shard, and `start` cannot be a
    sequence.

    The reader acknowledges nothing. After a lost connection it continues after the last message
    that came. `on_gap` is called between two messages when the stream no longer had the sequences
    between them.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        stream: str,
        *,
        start: Start = "all",
        filter_subjects: Sequence[str] = (),
        on_gap: GapHandler | None = None,
        credit_msgs: int = CREDIT_MSGS,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        super().__init__(connection, stream, credit_msgs=credit_msgs, credit_bytes=credit_bytes)
        self._begin = begin_at(start)
        # The position; None before the first look at the stream.
        self._course: Course | None = None
        # When the stream was created: another time means that it is another stream.
        self._created = ""
        self._filter_subjects = texts(filter_subjects)
        self._on_gap = on_gap
        # The task that looks at the stream and then subscribes.
        self._looking: asyncio.Task[None] | None = None
        # Ask for columns, until a server refuses them.
        self._cols = True

    def disconnected(self, error: ContrailError) -> None:
        """As `Participant.disconnected`."""
        self._stop_looking()
        super().disconnected(error)

    def _subscribe(self) -> None:
        self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Subscribe, unless the stream was re-created; the first time, find out where it ends."""
        try:
            info = await self._connection.stream_info(self.stream)
        except ContrailError as error:
            self._refused(error)
            return
        if self._course is None:
            begin = self._begin
            if begin.deliver_policy == "new" and not info.shards:
                # Unlike `new`, a sequence keeps its meaning if the connection is lost before the
                # first message comes.
                begin = Begin("by_start_sequence", opt_start_seq=info.state.last_seq + 1)
            self._course = Course(begin)
            self._created = info.created
        if info.created != self._created:
            self.failed(SubscriptionEnded("the stream was re-created"))
            return
        sub = Sub(
            id=self._connection.new_id(),
            sid=self._sid,
            stream=self.stream,
            filter_subjects=self._filter_subjects,
            cols=self._cols,
            credit=self._credit(),
        )
        self._request(self._course.resume(sub))

    def _refused(self, error: ContrailError) -> None:
        if self._cols and isinstance(error, ApiProblem) and error.name == _INVALID_FIELD:
            # The server is too old for columns: subscribe again without them.
            self._cols = False
            self._subscribe()
        else:
            super()._refused(error)

    def _answered(self, frame: Answering) -> None:
        if isinstance(frame, Ok) and frame.cursor:
            self._reached(frame.cursor)
        super()._answered(frame)

    def _reached(self, cursor: str) -> None:
        assert self._course is not None
        self._course.cursor = cursor

    def _give(self, delivered: Delivered) -> Delivered:
        return delivered

    def _came(self, delivered: Delivered) -> None:
        assert self._course is not None
        if self._course.take(delivered.seq, delivered.shard):
            self._add_unread(delivered.place, delivered)
        else:
            self._consumed(delivered)

    def _missing(self, frame: Missing) -> None:
        assert self._course is not None
        gap = self._course.skip(frame.first, frame.last, frame.cause, frame.shard)
        if gap is not None:
            self._add_unread(place_of(gap.shard, gap.first), gap)

    def _passed(self, gap: Gap) -> None:
        if self._on_gap is not None:
            self._on_gap(gap)

    def _finish(self, error: ContrailError) -> None:
        super()._finish(error)
        self._stop_looking()

    def _stop_looking(self) -> None:
        # `_look` may be the one that ends the reader. It must not cancel itself.
        if self._looking is not None and self._looking is not asyncio.current_task():
            self._looking.cancel()
            self._looking = None
