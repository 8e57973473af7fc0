"""Which log a shard's entries go to. Shards in memory have a log of their own."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core.commands import Command, DropStream
from contrail_storage.core.key_layout import is_in_memory
from contrail_storage.core.results import Result
from contrail_storage.replica.content_sealing import SealingLog, seals
from contrail_storage.replica.entries import Content, Done
from contrail_storage.replica.proposer import Proposer
from contrail_storage.replica.shard import Shard

Append = Callable[[int, Content, Done], None]
"""Accepts messages for a shard: see `Proposer.append`."""


class ShardLog(Protocol):
    """Accepts commands for shards."""

    def command(self, shard_id: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        ...


class ShardLogs:
    """A `ShardLog` over the proposers of durable shards and of shards in memory."""

    def __init__(
        self,
        durable: Proposer,
        in_memory: Proposer,
        sealing: SealingLog,
        shards: Mapping[int, Shard],
    ) -> None:
        self._shards = shards
        self._durable = durable
        self._memory = in_memory
        self._sealing = sealing

    def appending(self, shard: Shard) -> Append:
        """Return what accepts the messages of a stream's shards; it stays the same."""
        if shard.in_memory:
            return self._memory.append
        return self._sealing.append if seals(shard) else self._durable.append

    def hold(self, shard: Shard, size: int) -> None:
        """Count bytes of messages that will be appended soon: see `Proposer.hold`."""
        (self._memory if shard.in_memory else self._durable).hold(size)

    def command(self, shard_id: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result.

        Raises DATA_LOST for a damaged shard; only its stream can still be removed.
        """
        target = self._shards.get(shard_id)
        # Nothing may be built on a state that is incomplete, and no caller should wait for an entry
        # that is not applied.
        if target is not None and target.damaged and not isinstance(command, DropStream):
            raise ApiError(errors.DATA_LOST, target.damaged, applied=False)
        log = self._memory if is_in_memory(shard_id) else self._durable
        return log.command(shard_id, command)
