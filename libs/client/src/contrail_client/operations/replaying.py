"""Replays: the plan, and reading a split to its end, also across broken connections."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec.structs import replace

from contrail_client.calls import (
    ARROW,
    NDJSON,
    Call,
    Request,
    Retries,
    call,
    json_as,
    path_of,
    query_items,
    texts,
    with_staleness,
)
from contrail_client.errors import (
    ApiProblem,
    ContrailError,
    ReplayCut,
    UnexpectedAnswer,
    Unreachable,
)
from contrail_client.models import Consistency, ReplayPlan, ReplaySplit, StoredMessage
from contrail_client.times import Time

_plan = json_as(ReplayPlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The range of a stream to replay; None sets no bound.

    In a stream with several shards, sequences need a `shard`. With `consistency="any"`, each part
    may be read from another replica; one that has not all of it is asked again later.
    """

    from_seq: int | None = None
    to_seq: int | None = None
    start_time: Time | None = None
    end_time: Time | None = None
    subject: str | None = None
    shard: int | None = None
    consistency: Consistency | None = None


def plan(stream: str, bounds: Bounds, *, splits: int) -> Call[ReplayPlan]:
    """Fix a range of a stream and cut it into about `splits` parts."""
    query = {
        "splits": splits,
        "from_seq": bounds.from_seq,
        "to_seq": bounds.to_seq,
        "start_time": bounds.start_time,
        "end_time": bounds.end_time,
        "subject": bounds.subject,
        "shard": bounds.shard,
        "consistency": bounds.consistency,
    }

    def complete(found: ReplayPlan) -> ReplayPlan:
        splits = (
            replace(
                split,
                stream=found.stream,
                incarnation=found.incarnation,
                subject=bounds.subject,
                consistency=bounds.consistency,
            )
            for split in found.splits
        )
        return replace(found, splits=tuple(splits))

    return call(
        "GET",
        path_of("streams", stream, "replay", "plan"),
        with_staleness(lambda answer: complete(_plan(answer))),
        query=query,
    )


def arrow_request(split: ReplaySplit, columns: Sequence[str]) -> Request:
    """The request for a split as an Arrow stream; without `columns` it has all columns."""
    return _request(split, ARROW, columns)


class _End(msgspec.Struct):
    """The end mark: the last record of a complete body."""

    end: Literal[True]
    messages: int


_message_decoder = msgspec.json.Decoder(StoredMessage)
_end_decoder = msgspec.json.Decoder(_End)


class MessageReader:
    """Reads one split: bytes in, messages out, without IO.

    Send `request()` and `feed` the chunks of its answer; call `finish` at its end. When the
    connection breaks, call `interrupted`, wait, and send `request()` again: it asks for the rest.
    """

    def __init__(self, split: ReplaySplit) -> None:
        # What is left to read: its start moves with each message.
        self._split = split
        # Failures in a row without a message in between.
        self._failures = 0
        # The start of the split at the last failure.
        self._failed_at = split.from_seq
        self._begin()

    def _begin(self) -> None:
        self._tail = b""
        self._count = 0
        self._ended = False

    @property
    def done(self) -> bool:
        """Whether nothing is left to read: the end mark or the last sequence came."""
        return self._ended or self._split.from_seq > self._split.to_seq

    def request(self) -> Request:
        """The request for the messages that were not read yet; drops a partial line."""
        self._begin()
        return _request(self._split, NDJSON, ())

    def feed(self, chunk: bytes) -> list[StoredMessage]:
        """The messages that `chunk` completes; UnexpectedAnswer if the body is not a replay."""
        if self._ended and chunk:
            raise UnexpectedAnswer("the replay continued after its end mark")
        # A chunk may end within a line: the rest of it comes with the next one.
        complete, _, self._tail = (self._tail + chunk).rpartition(b"\n")
        # The end mark is a line of its own, and nothing may follow it.
        before, _, last = complete.rpartition(b"\n")
        end = _end_mark(last)
        try:
            messages = _message_decoder.decode_lines(before if end else complete)
        except msgspec.DecodeError as error:
            raise UnexpectedAnswer(f"a line of the replay cannot be read: {error}") from error
        if messages:
            # If the connection breaks now, the next request begins after these messages.
            self._count += len(messages)
            self._split = replace(self._split, from_seq=messages[-1].seq + 1)
        if end:
            self._finish(end)
        return messages

    def finish(self) -> None:
        """Check the end of the body; raises ReplayCut if messages are missing."""
        if not self.done:
            raise ReplayCut(f"the replay ended before sequence {self._split.to_seq}")

    def interrupted(self, error: ContrailError, retries: Retries, chance: float) -> float:
        """Seconds to wait before the request for the rest.

        Raises `error` if it will not pass, or after too many attempts in a row without a message.
        """
        if self._split.from_seq > self._failed_at:
            self._failures = 0
        self._failures += 1
        self._failed_at = self._split.from_seq
        may_pass = isinstance(error, ReplayCut | Unreachable) or (
            isinstance(error, ApiProblem) and error.retryable
        )
        if not may_pass or self._failures >= retries.attempts:
            raise error
        return retries.backoff_s(self._failures, chance)

    def _finish(self, end: _End) -> None:
        # The missing messages may be anywhere, so asking for the rest would not bring them.
        if end.messages != self._count:
            raise UnexpectedAnswer(
                f"the replay announced {end.messages} messages and sent {self._count}"
            )
        self._ended = True


def _end_mark(line: bytes) -> _End | None:
    try:
        return _end_decoder.decode(line)
    except msgspec.DecodeError:
        return None


def _request(split: ReplaySplit, accept: str, columns: Sequence[str]) -> Request:
    query = {
        "shard": split.shard,
        "from_seq": split.from_seq,
        "to_seq": split.to_seq,
        "subject": split.subject,
        "incarnation": split.incarnation or None,
        "columns": ",".join(texts(columns)) or None,
        "consistency": split.consistency,
    }
    path = path_of("streams", split.stream, "replay")
    return Request("GET", path, query_items(query), (("Accept", accept),))
