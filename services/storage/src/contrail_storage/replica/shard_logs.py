"""Which log a shard's entries go to: those of shards in memory have one of their own.

Machines keep ids as keyed hashes, so ``apply`` can only say which message is the last. Its id is
read from the message itself afterwards, for the answer to a publisher that expected another.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, Protocol

import msgspec

from contrail_common import errors
from contrail_common.columns.message_batch import MessageBatch
from contrail_common.errors import ApiError
from contrail_common.model import MSG_ID, Expected, PublishMessage, StoredMessage
from contrail_link.contract import PubResult
from contrail_storage.core.commands import Command, DropStream
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.results import Result
from contrail_storage.replica.content_sealing import SealingLog
from contrail_storage.replica.entries import Outcome, set_outcome
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard


class ShardLog(Protocol):
    """What takes the commands of shards."""

    def command(self, shard: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        ...


class PublishLog(Protocol):
    """What takes messages for shards, as `Proposer` does."""

    def append(self, shard: int, messages: list[PublishMessage]) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append`."""
        ...

    def append_then(
        self, shard: int, messages: list[PublishMessage], done: Callable[[Outcome], None]
    ) -> None:
        """See `Proposer.append_then`."""
        ...

    def append_batch(self, shard: int, batch: MessageBatch) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append_batch`."""
        ...

    def append_batch_then(
        self, shard: int, batch: MessageBatch, done: Callable[[Outcome], None]
    ) -> None:
        """See `Proposer.append_batch_then`."""
        ...


class MessageSource(Protocol):
    """What finds a message, as `Reader` does."""

    async def get(self, shard: Shard, seq: int) -> StoredMessage:
        """The message with that sequence. Raises ApiError when it cannot be read."""
        ...


class ShardLogs:
    """A `ShardLog` over the proposers of both kinds of shards."""

    def __init__(
        self,
        durable: Proposer,
        volatile: Proposer,
        sealing: SealingLog,
        reader: MessageSource,
        shards: Mapping[int, Shard],
    ) -> None:
        self._shards = shards
        self._durable = durable
        self._volatile = volatile
        self._sealing = sealing
        self._to_durable = LastIdLog(durable, reader, shards)
        self._to_volatile = LastIdLog(volatile, reader, shards)
        self._to_sealing = LastIdLog(sealing, reader, shards)

    def of(self, shard: int) -> PublishLog:
        """What takes the messages of a shard."""
        if is_volatile(shard):
            return self._to_volatile
        return self._to_sealing if self._sealing.takes(shard) else self._to_durable

    def _proposer(self, shard: int) -> Proposer:
        return self._volatile if is_volatile(shard) else self._durable

    def command(self, shard: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result.

        Raises DATA_LOST for a damaged shard, whose stream can be removed and nothing else.
        """
        target = self._shards.get(shard)
        if target is not None and target.damaged and not isinstance(command, DropStream):
            raise ApiError(errors.DATA_LOST, target.damaged, applied=False)
        return self._proposer(shard).command(shard, command)


Done = Callable[[Outcome], None]

_CODE: Final = errors.WRONG_LAST_MSG_ID.code
_SHOWN_CHARS: Final = 256
_READ_MAX: Final = 16
"""Messages that are read for one request; a batch may have met more last ones than that."""


class LastIdLog:
    """A `PublishLog` that adds to a refusal of an expected last id what that id is."""

    def __init__(self, log: PublishLog, reader: MessageSource, shards: Mapping[int, Shard]) -> None:
        self._log = log
        self._reader = reader
        self._shards = shards
        self._telling: set[asyncio.Task[None]] = set()

    def append(self, shard: int, messages: list[PublishMessage]) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append`."""
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_then(shard, messages, partial(set_outcome, future))
        return future

    def append_then(self, shard: int, messages: list[PublishMessage], done: Done) -> None:
        """See `Proposer.append_then`."""
        if any(_expects(message.expected) for message in messages):
            done = partial(self._look, shard, done)
        self._log.append_then(shard, messages, done)

    def append_batch(self, shard: int, batch: MessageBatch) -> asyncio.Future[list[PubResult]]:
        """See `Proposer.append_batch`."""
        future: asyncio.Future[list[PubResult]] = asyncio.get_running_loop().create_future()
        self.append_batch_then(shard, batch, partial(set_outcome, future))
        return future

    def append_batch_then(self, shard: int, batch: MessageBatch, done: Done) -> None:
        """See `Proposer.append_batch_then`."""
        if batch.expected and any(map(_expects, batch.expected.values())):
            done = partial(self._look, shard, done)
        self._log.append_batch_then(shard, batch, done)

    def _look(self, number: int, done: Done, outcome: Outcome) -> None:
        shard = self._shards.get(number)
        if isinstance(outcome, ApiError) or shard is None:
            done(outcome)
            return
        seqs = {one.seq for one in outcome if one.code == _CODE and one.seq}
        if not seqs:
            done(outcome)
            return
        task = asyncio.ensure_future(self._tell(shard, sorted(seqs)[:_READ_MAX], done, outcome))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(
        self, shard: Shard, seqs: list[int], done: Done, outcome: list[PubResult]
    ) -> None:
        found: dict[int, str] = {}
        try:
            for seq in seqs:
                found[seq] = await self._id_of(shard, seq)
        finally:  # whatever became of the reads, the publisher has its answer
            done([_told(one, found) if one.code == _CODE else one for one in outcome])

    async def _id_of(self, shard: Shard, seq: int) -> str:
        """The id of a message, "" where it cannot be told."""
        try:
            message = await self._reader.get(shard, seq)
        except ApiError:
            return ""  # it is gone, or cannot be read
        for name, values in (message.headers or {}).items():
            if name.lower() == MSG_ID.lower() and values:
                return values[0][:_SHOWN_CHARS]
        return ""


def _expects(expected: Expected | None) -> bool:
    return expected is not None and expected.last_msg_id is not None


def _told(result: PubResult, ids: Mapping[int, str]) -> PubResult:
    known = ids.get(result.seq, "")
    detail = f"{result.detail}: {known}" if known else result.detail
    return msgspec.structs.replace(result, seq=0, detail=detail)
