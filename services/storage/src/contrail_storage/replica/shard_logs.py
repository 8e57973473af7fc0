"""Which log a shard's entries go to. Shards in memory have a log of their own.

Machines keep message ids as keyed hashes, so ``apply`` can only say which message is the last one.
If a publisher expected another last id, the id for the answer is read from the message afterwards.
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
from contrail_link.contract.publish import PubResult
from contrail_storage.core.commands import Command, DropStream
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.results import Result
from contrail_storage.replica.content_sealing import SealingLog
from contrail_storage.replica.entries import Outcome, set_outcome
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard


class ShardLog(Protocol):
    """Accepts commands for shards."""

    def command(self, shard: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        ...


class PublishLog(Protocol):
    """Accepts messages for shards, as `Proposer` does."""

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
    """Finds a message by its sequence, as `Reader` does."""

    async def get(self, shard: Shard, seq: int) -> StoredMessage:
        """Return the message with that sequence. Raises ApiError when it cannot be read."""
        ...


class ShardLogs:
    """A `ShardLog` over the proposers of durable shards and of shards in memory."""

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
        """Return the log that accepts the messages of a shard."""
        if is_volatile(shard):
            return self._to_volatile
        return self._to_sealing if self._sealing.takes(shard) else self._to_durable

    def _proposer(self, shard: int) -> Proposer:
        return self._volatile if is_volatile(shard) else self._durable

    def command(self, shard: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result.

        Raises DATA_LOST for a damaged shard; only its stream can still be removed.
        """
        target = self._shards.get(shard)
        if target is not None and target.damaged and not isinstance(command, DropStream):
            raise ApiError(errors.DATA_LOST, target.damaged, applied=False)
        return self._proposer(shard).command(shard, command)


Done = Callable[[Outcome], None]

_CODE: Final = errors.WRONG_LAST_MSG_ID.code
_SHOWN_CHARS: Final = 256
_READ_MAX: Final = 16
"""Messages that are read for one request at most; the other refusals do not name the last id."""


class LastIdLog:
    """A `PublishLog` whose refusals of an expected last message id name the actual one."""

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
        finally:  # the publisher gets its answer even if a read fails
            done([_told(one, found) if one.code == _CODE else one for one in outcome])

    async def _id_of(self, shard: Shard, seq: int) -> str:
        """The id of a message; "" if the message has none or cannot be read."""
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
