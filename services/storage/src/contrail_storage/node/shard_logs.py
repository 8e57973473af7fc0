"""Which log a shard's entries go to: those of shards in memory have one of their own."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_common.link import PubResult
from contrail_common.message_batch import MessageBatch
from contrail_common.model import PublishMessage
from contrail_storage.core.commands import Command, DropStream
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.results import Result
from contrail_storage.node.content_sealing import SealingLog
from contrail_storage.node.entries import Outcome
from contrail_storage.node.last_ids import LastIdLog
from contrail_storage.node.proposer import Proposer
from contrail_storage.node.reader import Reader
from contrail_storage.node.shard import Shard


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


class ShardLogs:
    """A `ShardLog` over the proposers of both kinds of shards."""

    def __init__(
        self,
        durable: Proposer,
        volatile: Proposer,
        sealing: SealingLog,
        reader: Reader,
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
