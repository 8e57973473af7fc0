"""Which log a shard's entries go to: those of shards in memory have one of their own."""

import asyncio
from typing import Protocol

from contrail_storage.core.commands import Command
from contrail_storage.core.key_layout import is_volatile
from contrail_storage.core.results import Result
from contrail_storage.node.proposer import Proposer


class ShardLog(Protocol):
    """What takes the commands of shards."""

    def command(self, shard: int, command: Command, size: int = 256) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        ...


class ShardLogs:
    """A `ShardLog` over the proposers of both kinds of shards."""

    def __init__(self, durable: Proposer, volatile: Proposer) -> None:
        self._durable = durable
        self._volatile = volatile

    def of(self, shard: int) -> Proposer:
        """The proposer of a shard's entries."""
        return self._volatile if is_volatile(shard) else self._durable

    def command(self, shard: int, command: Command, size: int = 256) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        return self.of(shard).command(shard, command, size)
