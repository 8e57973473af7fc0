"""Which log a shard's entries go to: that of its group."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from contrail_common import errors
from contrail_common.errors import ApiError
from contrail_storage.core.commands import Command, DropStream
from contrail_storage.core.meta_machine import MetaMachine
from contrail_storage.core.results import Result
from contrail_storage.replica.content_sealing import SealingLog, seals
from contrail_storage.replica.entries import Content, Done
from contrail_storage.replica.groups import Groups
from contrail_storage.replica.shard import Shard
from contrail_storage.replica.spread import Spread

Append = Callable[[int, Content, Done], None]
"""Accepts messages for a shard: see `Proposer.append`."""


class ShardLog(Protocol):
    """Accepts commands for shards."""

    def command(self, shard_id: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result."""
        ...


class ShardLogs:
    """A `ShardLog` over the proposers of all groups."""

    def __init__(
        self,
        groups: Groups,
        meta: MetaMachine,
        sealing: SealingLog,
        shards: Mapping[int, Shard],
        spread: Spread,
    ) -> None:
        self._shards = shards
        self.groups = groups
        """The groups that the shards' entries go to."""
        # Knows the groups of shards that are not made yet.
        self._meta = meta
        self._sealing = sealing
        self.spread = spread
        """Serves the shards that other nodes lead."""

    def appending(self, shard: Shard) -> Append:
        """Return what accepts the messages of a shard; it stays the same."""
        return self._sealing.append if seals(shard) else self.groups.proposers[shard.group].append

    def group_of(self, shard_id: int) -> int:
        """The group of a shard, which may not be made yet."""
        target = self._shards.get(shard_id)
        return self._meta.group_of(shard_id) if target is None else target.group

    def hold(self, shard: Shard, size: int) -> None:
        """Count bytes of messages that will be appended soon: see `Proposer.hold`."""
        self.groups.proposers[shard.group].hold(size)

    def command(self, shard_id: int, command: Command) -> asyncio.Future[Result]:
        """Propose a command; the future gives its result.

        Raises DATA_LOST for a damaged shard; only its stream can still be removed.
        """
        target = self._shards.get(shard_id)
        # Nothing may be built on a state that is incomplete, and no caller should wait for an entry
        # that is not applied.
        if target is not None and target.damaged and not isinstance(command, DropStream):
            raise ApiError(errors.DATA_LOST, target.damaged, applied=False)
        group = self.group_of(shard_id)
        if not self.groups.leads(group):
            home = self._meta.home_of(shard_id)
            if home != group and self.groups.leads(home) and group in self.groups:
                return self.spread.elsewhere.command(group, home, shard_id, command)
            self.groups.check_led(group)
        return self.groups.proposers[group].command(shard_id, command)
